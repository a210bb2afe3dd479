"""Processors: raw logits and what a row asks for -> the law that its token is drawn from.

For one row of logits z, in this order and no other; what is off changes no bit:

    1. logit_bias    z_i + b_i
    2. repetition    z_i / r where z_i > 0, else z_i r, for the tokens of prompt and output
    3. presence and frequency    z_i - a - c_i f, for tokens that the output has c_i > 0 times
    4. min_tokens    -inf for tokens that would end the request while the output is shorter
    5. temperature   z / T; T = 0 is greedy: all mass on the largest logit, the lowest id if tied
    6. top_k         the k most likely tokens; 0: all
    7. top_p         of these, renormalised, the shortest run of most likely tokens whose mass
                     reaches p; never fewer than one; 1: all
    8. min_p         of these, the tokens with at least the fraction min_p of the largest
                     probability; 0: all

1 to 4 are `edit_logits`; they touch only the tokens that they name. 5 to 8 are
`processed_probabilities`. Log-probabilities are those of the raw logits, before all of this:
`funcinfer.serving.logprobs`. In a verification, the row that judges a draft has the drafts before
it as the end of its output.

Among equal logits the lower id counts as the more likely, so exactly k tokens are kept, the same
ones on every rank. Nothing that a row gets depends on its neighbours, bit for bit.

Everything is computed in promote_types(logits.dtype, float32). A row without a law (NaN or +inf
among its logits, or nothing above -inf) has law zero.

B rows, V tokens of the vocabulary, whole or this rank's part of it along `axis`, N ranks of it, E
edits. Sources: repetition penalty: Keskar et al., arXiv 1909.05858, section 4.1; top-p: Holtzman et
al., arXiv 1904.09751, section 3.1; min-p: Nguyen et al., arXiv 2407.01082, section 3.
"""

import torch

from funcinfer.serving.edits import Edits
from funcinfer.serving.filters import kept_tokens, make_filters, make_scale
from funcinfer.sharding import Axis, all_gather, axis_index


def edit_logits(logits_BV: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Bias, penalties and min_tokens (1 to 4): logits [B, V], of at least float32.

    The tensor itself comes back where there is nothing to edit. What is finite stays so, unless
    it is forbidden. Raises ValueError for what is no [B, V].

    >>> from funcinfer.serving.edits import History, RowEdits, stack_edits
    >>> from funcinfer.serving.params import SamplingParams
    >>> params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0)
    >>> row = RowEdits(params, num_output=1, history=History([5, 5], [7]))
    >>> edit_logits(torch.full((1, 8), 2.0), stack_edits([row]))
    tensor([[2.0000, 2.0000, 2.0000, 2.0000, 2.0000, 1.3333, 2.0000, 0.3333]])
    """
    check_shapes(logits_BV)
    if all(part is None for part in edits):
        return logits_BV
    dtype = torch.promote_types(logits_BV.dtype, torch.float32)
    edited_BV = logits_BV.to(dtype, copy=True)
    if edits.bias is not None:
        bias = edits.bias
        at = bias.rows_E, bias.ids_E
        edited_BV[at] += bias.values_E.to(dtype)
    if edits.penalties is not None:
        p = edits.penalties
        at = p.rows_E, p.ids_E
        edited_BV[at] = _penalise(edited_BV[at], p.repetition_E, p.subtracted_E)
    if edits.forbidden is not None:
        edited_BV[edits.forbidden.rows_E, edits.forbidden.ids_E] = -torch.inf
    return edited_BV


def _penalise(
    logits_E: torch.Tensor, repetition_E: torch.Tensor, subtracted_E: torch.Tensor
) -> torch.Tensor:
    limits = torch.finfo(logits_E.dtype)
    r_E = repetition_E.to(logits_E.dtype).clamp(limits.tiny, limits.max)
    repeated_E = torch.where(logits_E > 0, logits_E / r_E, logits_E * r_E)
    bounded_E = repeated_E.clamp(limits.min, limits.max)
    repeated_E = torch.where(logits_E.isfinite(), bounded_E, logits_E)
    return repeated_E - subtracted_E.to(logits_E.dtype)


def processed_probabilities(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
    num_candidates: int | None = None,
    *,
    axis: Axis = None,
) -> torch.Tensor:
    """Temperature and filters (5 to 8): the law [B, V]; rows sum to 1, filtered tokens exactly 0.

    top_k_B, top_p_B, min_p_B: None: off for all rows. num_candidates: how many of the most likely
    tokens to look at for top_k and top_p: at least the top_k of each row that has one, and V where
    a row has top_p alone. None: as many as it takes, which waits for the host to tell. axis: the
    mesh axis over which the vocabulary lies; law and logits are this rank's part, and no more than
    the candidates is gathered.

    Greedy rows are one-hot; a row without a law is all zero. dtype: float32, or float64 for float64
    logits. Raises ValueError for shapes that do not match.

    >>> row = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    >>> processed_probabilities(row, torch.ones(1), torch.tensor([2]))
    tensor([[0.0000, 0.0000, 0.4286, 0.5714]])
    """
    weights_BV = processed_weights(
        logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, num_candidates, axis=axis
    )
    total_B1 = total(weights_BV, axis)
    return weights_BV / torch.where(total_B1 > 0, total_B1, 1)


def processed_weights(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    top_k_B: torch.Tensor | None = None,
    top_p_B: torch.Tensor | None = None,
    min_p_B: torch.Tensor | None = None,
    num_candidates: int | None = None,
    *,
    axis: Axis = None,
) -> torch.Tensor:
    """`processed_probabilities` before they are normalised: the largest of each row is 1.

    >>> processed_weights(torch.tensor([[2.0, 2.0, -torch.inf]]), torch.ones(1))
    tensor([[1., 1., 0.]])
    """
    check_shapes(
        logits_BV, temperature_B=temperature_B, top_k_B=top_k_B, top_p_B=top_p_B, min_p_B=min_p_B
    )
    top_B1, likeliest_B1 = _likeliest(logits_BV, axis)
    scale = make_scale(top_B1, temperature_B)
    scaled_BV = scale(logits_BV)
    weights_BV = scaled_BV.exp()
    if top_k_B is not None or top_p_B is not None:
        filters = make_filters(scale, top_k_B, top_p_B)
        mass_B1 = total(weights_BV, axis)
        kept_BV = kept_tokens(logits_BV, scale, filters, mass_B1, num_candidates, axis)
        weights_BV = torch.where(kept_BV, weights_BV, 0.0)
    if min_p_B is not None:
        least_B1 = min_p_B.to(scaled_BV.dtype).log()[:, None]
        weights_BV = torch.where(scaled_BV >= least_B1, weights_BV, 0.0)
    V = logits_BV.shape[-1]
    ids_V = torch.arange(V, device=logits_BV.device) + axis_index(axis) * V
    greedy_BV = (ids_V == likeliest_B1).to(weights_BV.dtype)
    weights_BV = torch.where(scale.greedy_B1, greedy_BV, weights_BV)
    return torch.where(torch.isfinite(top_B1), weights_BV, 0.0)


def argmax(logits_BV: torch.Tensor, axis: Axis = None) -> torch.Tensor:
    """The id of the largest logit of each row, the lowest if tied; -1 for a row without a law.

    >>> argmax(torch.tensor([[0.0, 1.0, 1.0], [0.0, float("nan"), 1.0]]))
    tensor([ 1, -1])
    """
    top_B1, likeliest_B1 = _likeliest(logits_BV, axis)
    return torch.where(torch.isfinite(top_B1), likeliest_B1, -1)[:, 0]


def total(weights_BV: torch.Tensor, axis: Axis = None) -> torch.Tensor:
    """The sums [B, 1] of the rows, over all ranks; the same bits on each, and in each company.

    By a cumulative sum: how `sum` adds up a row depends on how many rows there are.

    >>> total(torch.tensor([[1.0, 2.0, 4.0]]))
    tensor([[7.]])
    """
    mass_B1 = weights_BV.cumsum(-1)[:, -1:]
    return all_gather(mass_B1, axis, dim=1).cumsum(-1)[:, -1:]


def _likeliest(logits_BV: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, NaN if there is one, and the lowest id that has it."""
    place_B1 = logits_BV.argmax(-1, keepdim=True)  # the first of ties
    tops_BN = all_gather(logits_BV.gather(-1, place_B1), axis, dim=1)
    ids_BN = all_gather(place_B1 + axis_index(axis) * logits_BV.shape[-1], axis, dim=1)
    rank_B1 = tops_BN.argmax(-1, keepdim=True)
    return tops_BN.gather(-1, rank_B1), ids_BN.gather(-1, rank_B1)


def check_shapes(values_BV: torch.Tensor, **per_row: torch.Tensor | None) -> None:
    """Raise ValueError unless values are floating-point [B, V] and the others [B]."""
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
