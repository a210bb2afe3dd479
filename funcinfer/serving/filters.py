"""Top-k and top-p without sorting the vocabulary: which tokens of a row are kept.

A row's kept tokens are told by its M largest logits, as values: the cut is the least logit that
stays, and how many of the tokens with exactly this logit do, the lowest ids first. So the result
depends neither on M, as long as M suffices, nor on how a sort orders ties, nor on other rows.
Over a vocabulary that lies over N ranks, the largest logits of each are gathered, N M numbers a
row; from there on every rank computes the same cut and applies it to its own part.

B rows, R of them, V tokens of the vocabulary, whole or this rank's part of it, M candidates: the
largest logits of a row, largest first, N ranks. Laws: `funcinfer.serving.processors`.
"""

from typing import NamedTuple

import torch

from funcinfer.sharding import Axis, all_gather, axis_index, axis_size

_FIRST_LOOK = 128
_GROWTH = 8
_ALL = 2**40  # more than a vocabulary has tokens


class Scale(NamedTuple):
    """What turns logits into scaled ones: (z - top) / temperature, at most 0.

    greedy_B1: rows whose temperature is 0, or would divide by a denormal; theirs is 1 here.
    """

    top_B1: torch.Tensor
    temperature_B1: torch.Tensor
    greedy_B1: torch.Tensor

    def __call__(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The scaled logits. The largest is 0 before the division, so no temperature overflows."""
        return (logits_BV.to(self.top_B1.dtype) - self.top_B1) / self.temperature_B1


class Filters(NamedTuple):
    """top_k, 0 for all tokens, and top_p, at least 1 for all, of each row."""

    top_k_B1: torch.Tensor
    top_p_B1: torch.Tensor


class Cut(NamedTuple):
    """Where a row is cut: tokens above the threshold stay, and the first ties of it.

    ties_B1: how many tokens of exactly the threshold stay. enough_B1: whether the candidates
    sufficed to tell. A row without a filter has the threshold -inf, all of whose ties stay.
    """

    threshold_B1: torch.Tensor
    ties_B1: torch.Tensor
    enough_B1: torch.Tensor


def make_scale(top_B1: torch.Tensor, temperature_B: torch.Tensor) -> Scale:
    """The scale of rows whose largest logit is `top_B1`.

    >>> make_scale(torch.tensor([[3.0]]), torch.tensor([2.0]))(torch.tensor([[3.0, 1.0]]))
    tensor([[ 0., -1.]])
    """
    dtype = torch.promote_types(top_B1.dtype, torch.float32)
    limits = torch.finfo(dtype)
    temperature_B1 = temperature_B.to(dtype).clamp(max=limits.max)[:, None]
    greedy_B1 = temperature_B1 < limits.tiny
    return Scale(top_B1.to(dtype), torch.where(greedy_B1, 1.0, temperature_B1), greedy_B1)


def make_filters(
    scale: Scale, top_k_B: torch.Tensor | None, top_p_B: torch.Tensor | None
) -> Filters:
    """The filters of each row; None: off for all. Greedy rows, whose law needs no filter, and rows
    without a law have none, so that no candidates are looked for.

    >>> scale = make_scale(torch.zeros(2, 1), torch.tensor([0.0, 0.5]))
    >>> make_filters(scale, torch.tensor([3, 3]), None)
    Filters(top_k_B1=tensor([[0],
            [3]]), top_p_B1=tensor([[1.],
            [1.]]))
    """
    shape, dtype, device = scale.top_B1.shape, scale.top_B1.dtype, scale.top_B1.device
    off_k_B1 = torch.zeros(shape, dtype=torch.int64, device=device)
    off_p_B1 = torch.ones(shape, dtype=dtype, device=device)
    uses_B1 = torch.isfinite(scale.top_B1) & ~scale.greedy_B1
    top_k_B1 = off_k_B1 if top_k_B is None else torch.where(uses_B1, top_k_B.long()[:, None], 0)
    top_p_B1 = off_p_B1 if top_p_B is None else torch.where(uses_B1, top_p_B.to(dtype)[:, None], 1)
    return Filters(top_k_B1, top_p_B1)


def kept_tokens(
    logits_BV: torch.Tensor,
    scale: Scale,
    filters: Filters,
    mass_B1: torch.Tensor,
    num_candidates: int | None = None,
    axis: Axis = None,
) -> torch.Tensor:
    """Which tokens [B, V] top_k and top_p keep.

    mass_B1: the sum of exp(scaled logits) over the vocabulary. num_candidates: enough for every
    row; None: as many as it takes, more of them for the rows that need it, which reads back
    whether there are such rows. Ranks of `axis` agree about that.

    >>> row = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    >>> scale = make_scale(torch.tensor([[3.0]]), torch.ones(1))
    >>> kept_tokens(row, scale, make_filters(scale, torch.tensor([2]), None), torch.ones(1, 1))
    tensor([[False,  True,  True, False]])
    """
    vocab = logits_BV.shape[-1] * axis_size(axis)
    count = min(_FIRST_LOOK if num_candidates is None else num_candidates, vocab)
    cut = _gather_cut(logits_BV, (scale, filters, mass_B1), count, axis)
    while num_candidates is None and count < vocab:
        rows_R = torch.nonzero(~cut.enough_B1[:, 0])[:, 0]
        if not len(rows_R):
            break
        count = min(count * _GROWTH, vocab)
        theirs = Scale(*(x[rows_R] for x in scale)), Filters(*(x[rows_R] for x in filters))
        more = _gather_cut(logits_BV[rows_R], (*theirs, mass_B1[rows_R]), count, axis)
        cut = Cut(*(x.index_copy(0, rows_R, y) for x, y in zip(cut, more, strict=True)))
    return _stays(logits_BV, cut.threshold_B1, cut.ties_B1)


def largest(values_BV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` largest values of each row, the first of ties, and where they stand: [B, num] each.

    Unlike `torch.topk`, which ties come and in which order is defined: that of their places.

    >>> largest(torch.tensor([[1.0, 2.0, 1.0, 2.0]]), 3)
    (tensor([[2., 2., 1.]]), tensor([[1, 3, 0]]))
    """
    top_BM = values_BV.topk(num).values
    threshold_B1 = top_BM[:, -1:]
    ties_B1 = num - (top_BM > threshold_B1).sum(-1, keepdim=True)
    stays_BV = _stays(values_BV, threshold_B1, ties_B1)
    places_BM = stays_BV.to(torch.uint8).topk(num).indices.sort(-1).values
    order_BM = values_BV.gather(-1, places_BM).argsort(dim=-1, descending=True, stable=True)
    places_BM = places_BM.gather(-1, order_BM)
    return values_BV.gather(-1, places_BM), places_BM


def _find_cut(
    candidates_BM: torch.Tensor, scale: Scale, filters: Filters, mass_B1: torch.Tensor
) -> Cut:
    """Where the rows are cut, told from their M largest logits, largest first.

    mass_B1: as in `kept_tokens`; only rows that have a top_p and no top_k need it.
    """
    M = candidates_BM.shape[-1]
    has_k_B1, has_p_B1 = filters.top_k_B1 > 0, filters.top_p_B1 < 1
    run_BM = scale(candidates_BM).exp().cumsum(-1)  # the mass of the first 1, 2, ... tokens
    most_B1 = torch.where(has_k_B1, filters.top_k_B1.clamp(max=M), M)
    within_B1 = torch.where(has_k_B1, run_BM.gather(-1, most_B1 - 1), mass_B1)
    target_B1 = filters.top_p_B1 * within_B1
    needed_B1 = (run_BM[:, :-1] < target_B1).sum(-1, keepdim=True) + 1
    num_kept_B1 = torch.where(has_p_B1, torch.minimum(most_B1, needed_B1), most_B1)
    threshold_B1 = candidates_BM.gather(-1, num_kept_B1 - 1)
    num_above_B1 = (candidates_BM > threshold_B1).sum(-1, keepdim=True)
    reached_B1 = has_p_B1 & (run_BM[:, -1:] >= target_B1)
    enough_B1 = torch.where(has_k_B1, filters.top_k_B1 <= M, ~has_p_B1 | reached_B1)
    cut_B1 = has_k_B1 | has_p_B1
    ties_B1 = torch.where(cut_B1, num_kept_B1 - num_above_B1, _ALL)
    return Cut(torch.where(cut_B1, threshold_B1, -torch.inf), ties_B1, enough_B1)


def _gather_cut(
    logits_BV: torch.Tensor,
    per_row: tuple[Scale, Filters, torch.Tensor],
    count: int,
    axis: Axis,
) -> Cut:
    """The cut told from the `count` largest logits of all ranks, with the ties of this rank."""
    mine_BM = logits_BV.topk(min(count, logits_BV.shape[-1])).values
    all_BNM = all_gather(mine_BM[:, None], axis, dim=1)
    cut = _find_cut(all_BNM.flatten(1).topk(count).values, *per_row)
    # A rank that has more ties than candidates still shows as many as could stay.
    ties_BN = (all_BNM == cut.threshold_B1[..., None]).sum(-1)
    before_B1 = (ties_BN.cumsum(-1) - ties_BN)[:, axis_index(axis), None]
    return cut._replace(ties_B1=cut.ties_B1 - before_B1)


def _stays(
    values_BV: torch.Tensor, threshold_B1: torch.Tensor, ties_B1: torch.Tensor
) -> torch.Tensor:
    """Which values are above the threshold, or among the first so many ties of it."""
    tied_BV = values_BV == threshold_B1
    tied_BV &= tied_BV.cumsum(-1, dtype=torch.int32) <= ties_B1
    return tied_BV | (values_BV > threshold_B1)
