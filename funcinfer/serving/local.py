"""Between global rows and this rank's part of them, inside a rank."""

import dataclasses
from collections.abc import Callable

import torch

from funcinfer.kvcache.batch import Batch, batch_specs
from funcinfer.serving.processors import processed_probabilities
from funcinfer.serving.sampling import RowParams
from funcinfer.sharding import Axis, P, Rules, all_gather, reshard
from funcinfer.tree import tree_map


def local_batch(batch: Batch, rules: Rules) -> Batch:
    """This rank's part of a global Batch that every rank has whole."""

    def cut(x: torch.Tensor, layout: P) -> torch.Tensor:
        return reshard(x, P(*[None] * x.ndim), layout)

    layouts = dataclasses.replace(
        batch_specs(rules), page_size=batch.page_size, segments=batch.segments
    )
    return tree_map(cut, batch, layouts)


def local_rows(x_N: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The rows of this rank's requests group."""
    rest = [None] * (x_N.ndim - 1)
    return reshard(x_N, P(None, *rest), P(rules["requests"], *rest))


def local_params(params: RowParams, rules: Rules) -> RowParams:
    """The parameters of the rows of this rank's requests group."""
    return _each(params, lambda x_N: local_rows(x_N, rules))


def rows_of(params: RowParams, rows_B: torch.Tensor) -> RowParams:
    """The parameters of these rows."""
    return _each(params, lambda x_N: x_N[rows_B])


def processed_law(logits_NV: torch.Tensor, params: RowParams, *, axis: Axis) -> torch.Tensor:
    """`processed_probabilities` by a RowParams that has a temperature."""
    assert params.temperature_B is not None
    return processed_probabilities(
        logits_NV,
        params.temperature_B,
        params.top_k_B,
        params.top_p_B,
        params.min_p_B,
        params.num_candidates,
        axis=axis,
    )


def _each(params: RowParams, f: Callable[[torch.Tensor], torch.Tensor]) -> RowParams:
    tensors = {n: x for n, x in params._asdict().items() if isinstance(x, torch.Tensor)}
    return params._replace(**{name: f(x) for name, x in tensors.items()})


def every_row(x_N: torch.Tensor, rules: Rules) -> torch.Tensor:
    """The rows of all requests groups."""
    return all_gather(x_N, rules["requests"], dim=0)


def table_rows(batch: Batch, num_groups: int) -> torch.Tensor:
    """The row of the global page table that each token of a global Batch reads: [T]."""
    T, R = len(batch.tokens) // num_groups, len(batch.page_table) // num_groups
    groups_T = torch.arange(len(batch.tokens), device=batch.rows.device) // T
    return groups_T * R + batch.rows


def slots_at(batch: Batch, rows_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """The slot of each position of these rows of the page table; a table that ends before it has
    the scratch page there.
    """
    page_T = positions_T.clamp(min=0) // batch.page_size
    width = batch.page_table.shape[1]
    pages_T = batch.page_table[rows_T, page_T.clamp(max=width - 1)]
    pages_T = torch.where(page_T < width, pages_T, 0)
    return pages_T * batch.page_size + positions_T % batch.page_size
