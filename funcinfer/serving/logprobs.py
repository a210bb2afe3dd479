"""Log-probabilities of tokens: z_i - log sum_j exp(z_j), of the raw logits z.

Raw means: before bias, penalties, temperature and filters. So a reported number says what the
model believes, not how a request had it sampled, and is the same in every company of requests.

B rows, V tokens of the vocabulary, whole or this rank's part of it along `axis`, M alternatives.
"""

from typing import NamedTuple

import torch

from funcinfer.serving.filters import largest, make_scale
from funcinfer.serving.processors import check_shapes, total
from funcinfer.sharding import Axis, all_gather, axis_index, axis_size, psum


class Logprobs(NamedTuple):
    """Log-probability of one token a row, and the M most likely tokens, the first one first."""

    token_B: torch.Tensor
    top_BM: torch.Tensor
    top_ids_BM: torch.Tensor


def logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, num_top: int = 0, *, axis: Axis = None
) -> Logprobs:
    """The log-probabilities of `tokens_B` and of the `num_top` most likely tokens of each row.

    Of equally likely tokens the lower id comes first. dtype: float32, or float64 for float64
    logits. A row with NaN or +inf, or nothing above -inf, has NaN; so has a token of -1. axis: the
    mesh axis over which the vocabulary lies; ranks get the same. Raises ValueError for shapes that
    do not match, and for more alternatives than tokens.

    >>> row = torch.log(torch.tensor([[0.5, 0.125, 0.25, 0.125]]))
    >>> found = logprobs(row, torch.tensor([1]), 3)
    >>> found.token_B.exp(), found.top_BM.exp(), found.top_ids_BM
    (tensor([0.1250]), tensor([[0.5000, 0.2500, 0.1250]]), tensor([[0, 2, 1]]))
    """
    check_shapes(logits_BV, tokens_B=tokens_B)
    vocab = logits_BV.shape[-1] * axis_size(axis)
    if not 0 <= num_top <= vocab:
        raise ValueError(f"num_top is {num_top}: expected a number in 0..{vocab}, the vocabulary")
    top_B1 = all_gather(logits_BV.amax(-1, keepdim=True), axis, dim=1).amax(-1, keepdim=True)
    scale = make_scale(top_B1, torch.ones_like(top_B1[:, 0]))
    scaled_BV = scale(logits_BV)
    log_total_B1 = total(scaled_BV.exp(), axis).log()
    V = logits_BV.shape[-1]
    local_B = tokens_B - axis_index(axis) * V
    mine_B = (local_B >= 0) & (local_B < V)
    found_B = scaled_BV.gather(-1, local_B.clamp(0, V - 1)[:, None])[:, 0]
    token_B = psum(torch.where(mine_B, found_B, 0), axis) - log_total_B1[:, 0]
    token_B = torch.where(tokens_B < 0, torch.nan, token_B)
    top_BM, top_ids_BM = _likeliest(logits_BV, num_top, axis)
    return Logprobs(token_B, scale(top_BM) - log_total_B1, top_ids_BM)


def _likeliest(
    logits_BV: torch.Tensor, num_top: int, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of each row over all ranks, and their ids; the lowest ids if tied."""
    if num_top == 0:
        return logits_BV[:, :0], torch.zeros_like(logits_BV[:, :0], dtype=torch.int64)
    V = logits_BV.shape[-1]
    mine_BM, places_BM = largest(logits_BV, min(num_top, V))
    all_BM = all_gather(mine_BM, axis, dim=1)
    ids_BM = all_gather(places_BM + axis_index(axis) * V, axis, dim=1)
    # Ties lie in order of id: on a rank, and rank by rank.
    top_BM, places_BM = largest(all_BM, num_top)
    return top_BM, ids_BM.gather(-1, places_BM)
