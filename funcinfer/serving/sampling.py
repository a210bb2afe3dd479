"""Sampling: logits and per-row parameters -> the law that is drawn from, and one token a row.

For one row of logits z, with temperature T, top_k k, top_p p and a uniform number u in [0, 1):

    1. temperature   z / T; T = 0 is greedy: all mass on the largest logit, the lowest id if tied
    2. top_k         the k most likely tokens; 0: all
    3. top_p         of these, renormalised, the shortest run of most likely tokens whose mass
                     reaches p; never fewer than one; 1: all
    4. draw          the first token i, in order of id, with cdf_i > u cdf_V

Among equal logits the lower id counts as the more likely, so exactly k tokens are kept, the same
ones on every rank. A row that uses no filter is not touched by one, bit for bit, whatever
its neighbours use. The j-th draw of a request comes from `uniform(seed, j)`, so it depends on
nothing else: not on the batch, the chunks, a preemption or the platform.

Everything is computed in promote_types(logits.dtype, float32). A row without a law (NaN or +inf
among its logits, or nothing above -inf) has law zero and token -1, and `sample` raises for it.

B rows, V tokens of the vocabulary. Top-p sampling: Holtzman et al., arXiv 1904.09751, section 3.1.
"""

import hashlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Greedy unless a temperature is given.

    max_tokens: most tokens to generate, at least 1.
    temperature: 0 for greedy, which uses no randomness; else the divisor of the logits.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: in 0..1, keep the most likely tokens up to this mass; 1 keeps all, 0 only the first.
    seed: 0..2**64-1, fixes every draw; None: a fresh one for each request (`fresh_seed`).
    stop_token_ids: tokens that end the request, besides those of the checkpoint.
    ignore_eos: do not end at the stop tokens of the checkpoint.
    Raises ValueError naming the field.

    >>> SamplingParams(temperature=0.7, stop_token_ids=[2]).stop_token_ids
    (2,)
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 1.5: expected a number in 0..1
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def require(name: str, fine: bool, expected: str) -> None:
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected {expected}")

        require("max_tokens", _is_count(self.max_tokens, 1), "an integer of at least 1")
        require(
            "temperature", _is_number(self.temperature, sys.float_info.max), "a finite number >= 0"
        )
        require("top_k", _is_count(self.top_k, 0), "an integer of at least 0, where 0 keeps all")
        require("top_p", _is_number(self.top_p, 1.0), "a number in 0..1")
        seed_is_fine = self.seed is None or (_is_count(self.seed, 0) and self.seed <= _MAX_SEED)
        require("seed", seed_is_fine, "None or an integer in 0..2**64-1")
        ids = self.stop_token_ids
        ids_are_fine = isinstance(ids, list | tuple) and all(_is_count(i, 0) for i in ids)
        require("stop_token_ids", ids_are_fine, "a tuple of token ids >= 0")
        require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        object.__setattr__(self, "stop_token_ids", tuple(ids))


class RowParams(NamedTuple):
    """Parameters of a batch as tensors; None where no row needs the step, which is then skipped."""

    temperature_B: torch.Tensor | None
    top_k_B: torch.Tensor | None
    top_p_B: torch.Tensor | None


def stack_params(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
    """Gather the parameters of the rows of a batch into tensors, leaving out what no row uses.

    Skipping a step changes no row: a filter that is off does nothing.

    >>> stack_params([SamplingParams(), SamplingParams(temperature=0.5)])
    RowParams(temperature_B=tensor([0.0000, 0.5000]), top_k_B=None, top_p_B=None)
    """
    drawn = [row for row in params if row.temperature > 0]
    if not drawn:
        return RowParams(None, None, None)
    top_k = [min(row.top_k, 2**31 - 1) for row in params]
    return RowParams(
        torch.tensor([row.temperature for row in params], dtype=torch.float32, device=device),
        torch.tensor(top_k, device=device) if any(row.top_k for row in drawn) else None,
        torch.tensor([row.top_p for row in params], dtype=torch.float32, device=device)
        if any(row.top_p < 1 for row in drawn)
        else None,
    )


def sample(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor | None = None,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    uniforms_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token a row, int64 [B]; the tokens are read once, to check them.

    temperature_B: None: all rows are greedy, and nothing else is looked at. top_k_B, top_p_B:
    None: off for all rows. uniforms_B: numbers in [0, 1); those of greedy rows have no effect.
    Raises ValueError naming the rows that have no law (see the head of the file), and for shapes
    that do not match. `choose` is the same without the reading, and gives -1 for such rows.

    >>> sample(torch.tensor([[0.0, 2.0, 2.0]]))
    tensor([1])
    >>> row, uniforms = torch.log(torch.tensor([[0.2, 0.3, 0.5]])), torch.tensor([0.6])
    >>> sample(row, torch.ones(1), uniforms_B=uniforms)
    tensor([2])
    """
    tokens_B = choose(logits_BV, temperature_B, top_k_B, top_p_B, uniforms_B)
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
    uniforms_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sample` without host synchronisation: a row without a law gets token -1.

    >>> choose(torch.tensor([[0.0, 1.0], [0.0, float("nan")]]))
    tensor([ 1, -1])
    """
    if temperature_B is None:
        _check_shapes(logits_BV)
        has_law_B = torch.isfinite(logits_BV.amax(-1))
        return torch.where(has_law_B, logits_BV.argmax(-1), -1)
    if uniforms_B is None:
        raise ValueError("uniforms_B is None: rows with a temperature need uniform numbers")
    return draw(processed_probabilities(logits_BV, temperature_B, top_k_B, top_p_B), uniforms_B)


def processed_probabilities(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """The law that `sample` draws from: [B, V], each row sums to 1, filtered tokens exactly 0.

    Greedy rows are one-hot; a row without a law is all zero. dtype: float32, or float64 for
    float64 logits. Raises ValueError for shapes that do not match.

    >>> row = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    >>> processed_probabilities(row, torch.ones(1), torch.tensor([2]))
    tensor([[0.0000, 0.0000, 0.4286, 0.5714]])
    """
    _check_shapes(logits_BV, temperature_B=temperature_B, top_k_B=top_k_B, top_p_B=top_p_B)
    dtype = torch.promote_types(logits_BV.dtype, torch.float32)
    top_B1 = logits_BV.amax(-1, keepdim=True)  # NaN if there is one
    has_law_B1 = torch.isfinite(top_B1)
    temperature_B1 = temperature_B.to(dtype).clamp(max=torch.finfo(dtype).max)[:, None]
    greedy_B1 = temperature_B1 < torch.finfo(dtype).tiny  # also what would divide by a denormal
    # The largest logit becomes 0 before the division, so no temperature overflows to inf - inf.
    shifted_BV = logits_BV.to(dtype) - top_B1.to(dtype)
    scaled_BV = shifted_BV / torch.where(greedy_B1, 1.0, temperature_B1)
    if top_k_B is not None or top_p_B is not None:
        scaled_BV = _filter(logits_BV, scaled_BV, top_k_B, top_p_B)
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    one_hot_BV = (ids_V == logits_BV.argmax(-1, keepdim=True)).to(dtype)  # lowest id if tied
    law_BV = torch.where(greedy_B1, one_hot_BV, scaled_BV.softmax(-1))
    return torch.where(has_law_B1, law_BV, 0.0)


def draw(probabilities_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Invert the distribution function: the first token i with cdf_i > u cdf_V, int64 [B].

    A token of probability 0 is never drawn, rounding notwithstanding; a row of zeros gives -1.
    The rows need not be normalised. Raises ValueError for shapes that do not match.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]), torch.tensor([0.25, 0.5]))
    tensor([ 2, -1])
    """
    _check_shapes(probabilities_BV, uniforms_B=uniforms_B)
    possible_BV = probabilities_BV > 0
    cdf_BV = probabilities_BV.cumsum(-1)
    reached_BV = cdf_BV > uniforms_B.to(cdf_BV.dtype)[:, None] * cdf_BV[:, -1:]
    first_B, found_B = _first(reached_BV & possible_BV)
    # u rounded to 1, or a cumulative sum that is not monotone: take the last possible token.
    from_end_B, any_B = _first(possible_BV.flip(-1))
    last_B = torch.where(any_B, probabilities_BV.shape[-1] - 1 - from_end_B, -1)
    return torch.where(found_B, first_B, last_B)


def uniform(seed: int, index: int) -> float:
    """The index-th uniform number of a seed: a multiple of 2**-53 in [0, 1).

    seed, index: 0..2**64-1. A counter instead of a state: the 53 high bits of the 64-bit BLAKE2b
    digest (RFC 7693) of the two numbers as little-endian 64-bit words. Equal on every platform.

    >>> uniform(42, 0), uniform(42, 1)
    (0.013842768924102522, 0.9877556983605247)
    """
    words = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) * 2**-53


def fresh_seed() -> int:
    """A seed from the entropy of the operating system, for a request that came without one.

    Where several processes serve one request, one of them takes it and tells the others.

    >>> 0 <= fresh_seed() < 2**64
    True
    """
    return secrets.randbits(64)


def _filter(
    logits_BV: torch.Tensor,
    scaled_BV: torch.Tensor,
    top_k_B: torch.Tensor | None,
    top_p_B: torch.Tensor | None,
) -> torch.Tensor:
    """-inf for all but the kept tokens, which are the first so many in order of likelihood."""
    vocab = scaled_BV.shape[-1]
    # The order of the logits, not of what a high temperature may have rounded to ties.
    order_BV = logits_BV.argsort(dim=-1, descending=True, stable=True)
    sorted_BV = scaled_BV.gather(-1, order_BV)
    rank_V = torch.arange(vocab, device=scaled_BV.device)
    kept_B1 = torch.full_like(order_BV[:, :1], vocab)
    if top_k_B is not None:
        kept_B1 = torch.where(top_k_B > 0, top_k_B, vocab)[:, None]
        sorted_BV = sorted_BV.masked_fill(rank_V >= kept_B1, -torch.inf)
    if top_p_B is not None:
        before_BV = sorted_BV.softmax(-1).cumsum(-1)[:, :-1]  # mass ahead of ranks 1, 2, ...
        top_p_B1 = top_p_B.to(scaled_BV.dtype)[:, None]
        within_B1 = (before_BV < top_p_B1).sum(-1, keepdim=True) + 1
        kept_B1 = torch.where(top_p_B1 < 1, torch.minimum(kept_B1, within_B1), kept_B1)
    dropped_BV = torch.empty_like(order_BV, dtype=torch.bool)
    dropped_BV.scatter_(-1, order_BV, rank_V >= kept_B1)
    return scaled_BV.masked_fill(dropped_BV, -torch.inf)


def _first(mask_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first True of each row, and whether there is one."""
    return mask_BV.to(torch.uint8).argmax(-1), mask_BV.any(-1)


def _check_shapes(values_BV: torch.Tensor, **per_row: torch.Tensor | None) -> None:
    if values_BV.ndim != 2 or values_BV.shape[-1] < 1 or not values_BV.is_floating_point():
        raise ValueError(
            f"expected floating-point values [B, V] with V >= 1, got {values_BV.dtype} "
            f"{list(values_BV.shape)}"
        )
    for name, value in per_row.items():
        if value is not None and value.shape != values_BV.shape[:1]:
            raise ValueError(
                f"{name} has shape {list(value.shape)}: expected one number for each of the "
                f"{values_BV.shape[0]} rows"
            )


def _is_count(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= least)


def _is_number(value: object, most: float) -> bool:
    """A number in 0..most, and no bool; NaN compares false."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()  # a float32 could not be compared with the largest float64
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most
