"""Sampling: the law of each row -> one token a row, and where its randomness comes from.

The law is that of `funcinfer.serving.processors`, which says how it is made of the logits. It is
drawn from by inversion: for a uniform number u in [0, 1), the first token i, in order of id, with
cdf_i > u cdf_V. The j-th draw of a request comes from `uniform(seed, j)`, so it depends on nothing
else: not on the batch, the chunks, a preemption or the platform.

The vocabulary may lie over a mesh axis; then the logits are this rank's part of it, every rank gets
the same tokens, and of logits only candidates for top_k and top_p are gathered. The axis chooses a
rank by its mass first, and the rank then the token: the same inversion in two stages.

A row without a law gets token -1, and `sample` raises for it. B rows, V tokens of the vocabulary,
whole or this rank's part of it, N ranks of the axis.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch

from funcinfer.serving.params import SamplingParams
from funcinfer.serving.processors import argmax, check_shapes, processed_weights
from funcinfer.sharding import Axis, all_gather, axis_index, psum


class RowParams(NamedTuple):
    """Parameters of a batch as tensors; None where no row needs the step, which is then skipped.

    num_candidates: as `processed_probabilities` wants it.
    """

    temperature_B: torch.Tensor | None = None
    top_k_B: torch.Tensor | None = None
    top_p_B: torch.Tensor | None = None
    min_p_B: torch.Tensor | None = None
    num_candidates: int | None = None


def stack_params(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
    """Gather the parameters of the rows of a batch into tensors, leaving out what no row uses.

    Skipping a step changes no row: a filter that is off does nothing.

    >>> stack_params([SamplingParams(), SamplingParams(temperature=0.5)]).temperature_B
    tensor([0.0000, 0.5000])
    """
    drawn = [row for row in params if row.temperature > 0]
    if not drawn:
        return RowParams()

    def floats(name: str) -> torch.Tensor:
        values = [getattr(row, name) for row in params]
        return torch.tensor(values, dtype=torch.float32, device=device)

    top_k = [min(row.top_k, 2**31 - 1) for row in params]
    largest = max(k if row.temperature > 0 else 0 for k, row in zip(top_k, params, strict=True))
    alone = any(row.top_p < 1 and not row.top_k for row in drawn)
    return RowParams(
        floats("temperature"),
        torch.tensor(top_k, device=device) if largest else None,
        floats("top_p") if any(row.top_p < 1 for row in drawn) else None,
        floats("min_p") if any(row.min_p > 0 for row in drawn) else None,
        None if alone or not largest else largest,
    )


def sample(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor | None = None,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
    num_candidates: int | None = None,
    uniforms_B: torch.Tensor | None = None,
    *,
    axis: Axis = None,
) -> torch.Tensor:
    """One token a row, int64 [B]; the tokens are read once, to check them.

    temperature_B: None: all rows are greedy, and nothing else is looked at. top_k_B, top_p_B,
    min_p_B: None: off for all rows. num_candidates: see `processed_probabilities`. uniforms_B:
    numbers in [0, 1); those of greedy rows have no effect. axis: where the vocabulary lies.
    Raises ValueError naming the rows that have no law, and for shapes that do not match. `choose`
    is the same without the reading, and gives -1 for such rows.

    >>> sample(torch.tensor([[0.0, 2.0, 2.0]]))
    tensor([1])
    >>> row, uniforms = torch.log(torch.tensor([[0.2, 0.3, 0.5]])), torch.tensor([0.6])
    >>> sample(row, torch.ones(1), uniforms_B=uniforms)
    tensor([2])
    """
    tokens_B = choose(
        logits_BV,
        temperature_B,
        top_k_B,
        top_p_B,
        min_p_B,
        num_candidates,
        uniforms_B,
        axis=axis,
    )
    if bool((tokens_B < 0).any()):
        rows = torch.nonzero(tokens_B < 0).flatten().tolist()
        raise ValueError(
            f"logits of rows {rows} give no token: they hold NaN or +inf, or nothing above -inf"
        )
    return tokens_B


def choose(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor | None = None,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
    num_candidates: int | None = None,
    uniforms_B: torch.Tensor | None = None,
    *,
    axis: Axis = None,
) -> torch.Tensor:
    """`sample` without reading the tokens: a row without a law gets token -1.

    >>> choose(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]))
    tensor([ 1, -1])
    """
    if temperature_B is None:
        check_shapes(logits_BV)
        return argmax(logits_BV, axis)
    if uniforms_B is None:
        raise ValueError("uniforms_B is None: rows with a temperature need uniform numbers")
    weights_BV = processed_weights(
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, num_candidates, axis=axis
    )
    return draw(weights_BV, uniforms_B, axis=axis)


def draw(
    probabilities_BV: torch.Tensor, uniforms_B: torch.Tensor, *, axis: Axis = None
) -> torch.Tensor:
    """Invert the distribution function: the first token i with cdf_i > u cdf_V, int64 [B].

    A token of probability 0 is never drawn, rounding notwithstanding; a row of zeros gives -1.
    The rows need not be normalised. axis: where the vocabulary lies.
    Raises ValueError for shapes that do not match.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]), torch.tensor([0.25, 0.5]))
    tensor([ 2, -1])
    """
    check_shapes(probabilities_BV, uniforms_B=uniforms_B)
    cdf_BV = probabilities_BV.cumsum(-1)
    mass_BN = all_gather(cdf_BV[:, -1:], axis, dim=1)
    ends_BN = mass_BN.cumsum(-1)
    target_B1 = uniforms_B.to(cdf_BV.dtype)[:, None] * ends_BN[:, -1:]
    rank_B1 = invert(mass_BN, ends_BN, target_B1)
    before_B1 = (ends_BN - mass_BN).gather(-1, rank_B1.clamp(min=0))
    mine_B1 = invert(probabilities_BV, cdf_BV, target_B1 - before_B1)
    me = axis_index(axis)
    mine_B1 += me * probabilities_BV.shape[-1]
    tokens_B1 = psum(torch.where(rank_B1 == me, mine_B1, 0), axis)
    return torch.where(rank_B1 < 0, -1, tokens_B1)[:, 0]


def invert(
    weights_BV: torch.Tensor, cdf_BV: torch.Tensor, targets_B1: torch.Tensor
) -> torch.Tensor:
    """The first possible index of each row whose cdf is above the target, else the last possible
    one; -1 where none is: int64 [B, 1].

    >>> weights = torch.tensor([[1.0, 3.0, 0.0]])
    >>> invert(weights, weights.cumsum(-1), torch.tensor([[4.0]]))
    tensor([[1]])
    """
    possible_BV = weights_BV > 0
    first_B1, found_B1 = _first((cdf_BV > targets_B1) & possible_BV)
    # u rounded to 1, or a cumulative sum that is not monotone.
    from_end_B1, any_B1 = _first(possible_BV.flip(-1))
    last_B1 = torch.where(any_B1, weights_BV.shape[-1] - 1 - from_end_B1, -1)
    return torch.where(found_B1, first_B1, last_B1)


def uniform(seed: int, index: int) -> float:
    """The index-th uniform number of a seed: a multiple of 2**-53 in [0, 1).

    seed, index: 0..2**64-1. A counter instead of a state: the 53 high bits of the 64-bit BLAKE2b
    digest (RFC 7693) of the two numbers as little-endian 64-bit words. Equal on every platform.

    >>> uniform(42, 0), uniform(42, 1)
    (0.013842768924102522, 0.9877556983605247)
    """
    return (_digest(seed, index) >> 11) * 2**-53


def child_seed(seed: int, child: int) -> int:
    """The seed of the child-th completion of a request with n > 1; the 0th has the request's own.

    >>> child_seed(42, 0), child_seed(42, 1) == child_seed(42, 2)
    (42, False)
    """
    return _digest(seed, child, b"child") if child else seed


def draft_seed(seed: int, num_output: int) -> int:
    """The seed of the draws of drafts that are proposed when the output has `num_output` tokens.

    They must not share numbers with the verification. Nor with drafts proposed earlier: whether
    those were accepted may have depended on drafts at positions that are drafted anew now.

    >>> draft_seed(42, 5) == draft_seed(42, 6)
    False
    """
    return _digest(seed, num_output, b"draft")


def fresh_seed() -> int:
    """A seed from the entropy of the operating system, for a request that came without one.

    Where several processes serve one request, one of them takes it and tells the others.

    >>> 0 <= fresh_seed() < 2**64
    True
    """
    return secrets.randbits(64)


def _digest(seed: int, index: int, purpose: bytes = b"") -> int:
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(words, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _first(mask_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [B, 1] of the first True of each row, and whether there is one."""
    first_B1 = mask_BV.to(torch.uint8).argmax(-1, keepdim=True)
    return first_B1, mask_BV.gather(-1, first_B1)
