"""Verification of drafts: target laws, draft laws and drafts -> which tokens are emitted.

A drafter proposed tokens x_1..x_k, each drawn from its law q_i; the model gave its own laws
p_1..p_{k+1} at the same positions, after all processors. Exact means: the emitted tokens, followed
by what the model goes on with, have the law of the model alone, whatever the drafter.

    token-wise  x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)), up to the first
                rejection at j; then the last token comes from norm(max(p_j - q_j, 0)), or from
                p_{k+1} where all k were accepted
    block       P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)); R_i = sum max(P_i p_{i+1} -
                q_{i+1}, 0); h_i = R_i / (R_i + 1 - P_i), h_k = P_k; each i is a hit with
                probability h_i, independently, and the last hit is the number of accepted drafts,
                0 if there is none; the last token comes from norm(max(P_i p_{i+1} - q_{i+1}, 0)),
                or from p_{k+1} if i = k. On average no fewer drafts than token-wise
    matching    for drafts without randomness, q one-hot: the token of p_i is drawn as without
                drafts, by the uniform number of its place, and x_i is accepted if it is the same.
                The law is that of token-wise, and each request gets the tokens that it would get
                without drafts. At temperature 0 this is: accept the argmax, no randomness used
    typical     token-wise with p / q divided by min(exp(-alpha H(p)), threshold). Not exact

A verifier is a pure function to a `Verdict`: the law of the number of accepted drafts, and of the
last token for each number. `draw_verdict` draws from it by one uniform number. All of this works on
whole laws; `match` works on tokens, so on a vocabulary over ranks as well (`choose`).

A draft of -1 is none: it is never accepted, and so is no draft behind it. Thus the rows of a batch
may have fewer than k drafts. How many a drafter proposes may depend on tokens before a draft, not
on the draft itself. A row whose logits gave no law has law zero, which ends the drafts there; where
it is reached, the last token is -1, as in `choose`.

B rows, K drafts, L = K + 1 positions, V tokens of the vocabulary. Sources: token-wise: Leviathan et
al., arXiv 2211.17192; block: Sun et al., arXiv 2403.10444; typical: Cai et al., arXiv 2401.10774,
section 3.3.1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from funcinfer.serving.sampling import draw, invert


class Verdict(NamedTuple):
    """What is emitted, as laws.

    accepted_BL: the probability that exactly i drafts are accepted, i = 0..K. last_BLV: the law of
    the token after them. Numbers of probability 0 have some law as well.
    """

    accepted_BL: torch.Tensor
    last_BLV: torch.Tensor


class Emitted(NamedTuple):
    """What is emitted: num_accepted_B drafts and one more token, then -1, in tokens_BL.

    The last token of a row without a law is -1 too; the drafts before it are good.
    """

    num_accepted_B: torch.Tensor
    tokens_BL: torch.Tensor

    @property
    def last_B(self) -> torch.Tensor:
        """The last token of each row: the one behind its accepted drafts."""
        return self.tokens_BL.gather(1, self.num_accepted_B[:, None])[:, 0]


Judge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Verdict]


@dataclass(frozen=True)
class Verifier:
    """A rule of verification: `judge(target_BLV, drafts_BK, draft_BKV)` gives a Verdict.

    draft_BKV: the laws that the drafts were drawn from, or None where they were not drawn: one-hot.
    exact: whether the law of what is emitted is that of the target.
    """

    name: str
    exact: bool
    judge: Judge


def verify(
    verifier: Verifier,
    target_BLV: torch.Tensor,
    drafts_BK: torch.Tensor,
    draft_BKV: torch.Tensor | None,
    uniforms_B: torch.Tensor,
    *,
    exact: bool = True,
) -> Emitted:
    """Judge the drafts and draw.

    uniforms_B: one number in [0, 1) decides all that a row emits: `uniform(seed, num_output)`.
    At least one token is emitted, so no number is used twice. Raises ValueError for a verifier that
    is not exact, unless exact=False, and for shapes that do not match.

    >>> target = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]])
    >>> draft = torch.tensor([[[0.6, 0.4]]])
    >>> verify(TOKENWISE, target, torch.tensor([[0]]), draft, torch.tensor([0.6])).tokens_BL
    tensor([[ 1, -1]])
    >>> verify(TOKENWISE, target, torch.tensor([[0]]), draft, torch.tensor([0.7])).tokens_BL
    tensor([[0, 0]])
    """
    if exact and not verifier.exact:
        raise ValueError(
            f"verifier {verifier.name!r} changes the law of what is emitted: choose an exact one, "
            f"or say exact=False"
        )
    return draw_verdict(verifier.judge(target_BLV, drafts_BK, draft_BKV), drafts_BK, uniforms_B)


def match(sampled_BL: torch.Tensor, drafts_BK: torch.Tensor) -> Emitted:
    """Accept the drafts that are the tokens drawn at their places, up to the first that is not.

    sampled_BL: `choose` from the target laws, by the uniform numbers of their places, or greedy.
    The drafts must not have been drawn: see `matching` at the head of this file.
    Raises ValueError for shapes that do not match.

    >>> match(torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[5, 8], [5, 6]])).tokens_BL
    tensor([[ 5,  6, -1],
            [ 5,  6,  7]])
    """
    B, K = drafts_BK.shape
    if sampled_BL.shape != (B, K + 1):
        raise ValueError(
            f"sampled_BL has shape {list(sampled_BL.shape)}: expected {[B, K + 1]}, a token for "
            f"each of the {K} drafts and one more"
        )
    same_BK = (sampled_BL[:, :-1] == drafts_BK) & (drafts_BK >= 0)
    num_B = same_BK.cumprod(-1).sum(-1)
    places_L = torch.arange(K + 1, device=drafts_BK.device)
    return Emitted(num_B, torch.where(places_L <= num_B[:, None], sampled_BL, -1))


def draw_verdict(verdict: Verdict, drafts_BK: torch.Tensor, uniforms_B: torch.Tensor) -> Emitted:
    """Draw from a verdict by one uniform number a row.

    The number of accepted drafts is found by inversion; where the uniform number lies within the
    interval of that number is uniform again, and draws the last token by inversion.

    >>> verdict = Verdict(torch.tensor([[0.5, 0.5]]), torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]))
    >>> [draw_verdict(verdict, torch.tensor([[1]]), torch.tensor([u])).tokens_BL.tolist()
    ...  for u in (0.49, 0.74, 0.76)]
    [[[0, -1]], [[1, 0]], [[1, 1]]]
    """
    dtype = torch.promote_types(verdict.accepted_BL.dtype, uniforms_B.dtype)
    accepted_BL = verdict.accepted_BL.to(dtype)
    cdf_BL = accepted_BL.cumsum(-1)
    target_B1 = uniforms_B.to(dtype)[:, None] * cdf_BL[:, -1:]
    num_B1 = invert(accepted_BL, cdf_BL, target_B1)
    width_B1 = accepted_BL.gather(-1, num_B1)
    below_B1 = cdf_BL.gather(-1, num_B1) - width_B1
    rest_B = ((target_B1 - below_B1) / width_B1).clamp(0, 1)[:, 0]
    V = verdict.last_BLV.shape[-1]
    last_BV = verdict.last_BLV.gather(1, num_B1[..., None].expand(-1, -1, V))[:, 0]
    last_B1 = draw(last_BV, rest_B)[:, None]
    places_L = torch.arange(accepted_BL.shape[1], device=num_B1.device)
    padded_BL = torch.nn.functional.pad(drafts_BK, (0, 1), value=-1)
    tokens_BL = torch.where(places_L < num_B1, padded_BL, -1)
    return Emitted(num_B1[:, 0], torch.where(places_L == num_B1, last_B1, tokens_BL))


def judge_tokenwise(
    target_BLV: torch.Tensor, drafts_BK: torch.Tensor, draft_BKV: torch.Tensor | None = None
) -> Verdict:
    """Leviathan's rule. Raises ValueError for shapes that do not match, as all judges do.

    >>> target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    >>> judge_tokenwise(target, torch.tensor([[0]])).accepted_BL
    tensor([[0.7500, 0.2500]])
    """
    live_BK, ratio_BK = _ratios(target_BLV, drafts_BK, draft_BKV)
    excess_BKV = _excess(target_BLV[:, :-1], drafts_BK, draft_BKV)
    return Verdict(_run_lengths(ratio_BK.clamp(max=1)), _last_laws(target_BLV, excess_BKV, live_BK))


def judge_block(
    target_BLV: torch.Tensor, drafts_BK: torch.Tensor, draft_BKV: torch.Tensor | None = None
) -> Verdict:
    """Block verification of Sun et al.

    >>> target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    >>> judge_block(target, torch.tensor([[0]])).accepted_BL
    tensor([[0.7500, 0.2500]])
    """
    live_BK, ratio_BK = _ratios(target_BLV, drafts_BK, draft_BKV)
    one_B1 = ratio_BK.new_ones(len(ratio_BK), 1)
    reach = [one_B1]  # P_0, P_1, ...
    for ratio_B1 in ratio_BK.split(1, -1):
        reach.append((reach[-1] * ratio_B1).clamp(max=1))
    reach_BL = torch.cat(reach, -1)
    excess_BKV = _excess(reach_BL[:, :-1, None] * target_BLV[:, :-1], drafts_BK, draft_BKV)
    # Behind draft i: R_i where another draft is live there, else h_i = P_i.
    goes_on_BK = torch.cat([live_BK, one_B1 > 1], -1)[:, 1:]
    excess_BK = torch.cat([_mass(excess_BKV), one_B1], -1)[:, 1:]
    reach_BK = reach_BL[:, 1:]
    bound_BK = excess_BK + (1 - reach_BK)  # so that P_i = 1 is a hit for certain
    # Both 0 where p = q behind an accepted run: a later draft is accepted for certain.
    inner_BK = torch.where(bound_BK > 0, excess_BK / bound_BK, 1)
    hit_BK = torch.where(live_BK, torch.where(goes_on_BK, inner_BK, reach_BK), 0)
    hit_BL = torch.cat([one_B1, hit_BK], -1)
    misses_BK = (1 - hit_BK).flip(-1).cumprod(-1).flip(-1)  # of this draft and all later ones
    later_BL = torch.cat([misses_BK, one_B1], -1)
    return Verdict(hit_BL * later_BL, _last_laws(target_BLV, excess_BKV, live_BK))


def typical(alpha: float = 0.4, threshold: float = 0.95) -> Verifier:
    """Typical acceptance: where the target is undecided, almost any draft will do. Not exact.

    alpha: at least 0. threshold: in 0..1, not 0. Raises ValueError naming what is out of range.

    >>> typical().exact
    False
    """
    if not alpha >= 0 or not 0 < threshold <= 1:
        raise ValueError(
            f"alpha is {alpha} and threshold {threshold}: expected alpha >= 0 and a threshold "
            f"above 0 and at most 1"
        )
    judge = partial(_judge_typical, alpha=alpha, threshold=threshold)
    return Verifier(f"typical({alpha}, {threshold})", False, judge)


def _judge_typical(
    target_BLV: torch.Tensor,
    drafts_BK: torch.Tensor,
    draft_BKV: torch.Tensor | None = None,
    *,
    alpha: float,
    threshold: float,
) -> Verdict:
    live_BK, ratio_BK = _ratios(target_BLV, drafts_BK, draft_BKV)
    entropy_BK = _mass(torch.special.entr(target_BLV[:, :-1]))
    accept_BK = ratio_BK / (-alpha * entropy_BK).exp().clamp(max=threshold)
    excess_BKV = _excess(target_BLV[:, :-1], drafts_BK, draft_BKV)
    last_BLV = _last_laws(target_BLV, excess_BKV, live_BK)
    return Verdict(_run_lengths(accept_BK.clamp(max=1)), last_BLV)


def _ratios(
    target_BLV: torch.Tensor, drafts_BK: torch.Tensor, draft_BKV: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts can be judged, and p_i(x_i) / q_i(x_i) of these; 0 for the others.

    Those are drafts of -1 or without a target law; drafts behind them are never reached, because a
    ratio of 0 is in the way. A draft to which its own law gives probability 0 is judged, with
    ratio 0.
    """
    B, K = drafts_BK.shape
    if target_BLV.ndim != 3 or target_BLV.shape[:2] != (B, K + 1):
        raise ValueError(
            f"target_BLV has shape {list(target_BLV.shape)}: expected [{B}, {K + 1}, V], a law for "
            f"each of the {K} drafts and one more"
        )
    V = target_BLV.shape[-1]
    if draft_BKV is not None and draft_BKV.shape != (B, K, V):
        raise ValueError(
            f"draft_BKV has shape {list(draft_BKV.shape)}: expected {[B, K, V]}, a law for each "
            f"draft over the tokens of the target"
        )
    has_law_BK = target_BLV[:, :-1].amax(-1) > 0
    live_BK = (drafts_BK >= 0) & has_law_BK
    at_BK1 = drafts_BK.clamp(min=0)[..., None]
    p_BK = target_BLV[:, :-1].gather(-1, at_BK1)[..., 0]
    q_BK = torch.ones_like(p_BK) if draft_BKV is None else draft_BKV.gather(-1, at_BK1)[..., 0]
    ratio_BK = p_BK / torch.where(q_BK > 0, q_BK, 1)
    return live_BK, torch.where(live_BK & (q_BK > 0), ratio_BK, 0)


def _excess(
    weights_BKV: torch.Tensor, drafts_BK: torch.Tensor, draft_BKV: torch.Tensor | None
) -> torch.Tensor:
    """max(weights - q, 0) at each draft, for weights of at most 1."""
    if draft_BKV is not None:
        return (weights_BKV - draft_BKV).clamp(min=0)
    return weights_BKV.scatter(-1, drafts_BK.clamp(min=0)[..., None], 0.0)


def _run_lengths(accept_BK: torch.Tensor) -> torch.Tensor:
    """The law [B, L] of how many drafts precede the first rejection."""
    one_B1 = accept_BK.new_ones(len(accept_BK), 1)
    reach_BL = torch.cat([one_B1, accept_BK.cumprod(-1)], -1)
    return reach_BL * torch.cat([1 - accept_BK, one_B1], -1)


def _last_laws(
    target_BLV: torch.Tensor, excess_BKV: torch.Tensor, live_BK: torch.Tensor
) -> torch.Tensor:
    """The law [B, L, V] of the token after i drafts: the excess normalised, the target at the end.

    Where there is no excess, p = q but for rounding: then no rejection is possible but by rounding.
    """
    mass_BK1 = _mass(excess_BKV)[..., None]
    normalised_BKV = excess_BKV / torch.where(mass_BK1 > 0, mass_BK1, 1)
    rejected_BK1 = live_BK[..., None] & (mass_BK1 > 0)
    last_BKV = torch.where(rejected_BK1, normalised_BKV, target_BLV[:, :-1])
    return torch.cat([last_BKV, target_BLV[:, -1:]], 1)


def _mass(weights_BKV: torch.Tensor) -> torch.Tensor:
    """The sum over V, with the same bits in each batch (see `processors.total`)."""
    return weights_BKV.cumsum(-1)[..., -1]


TOKENWISE = Verifier("tokenwise", True, judge_tokenwise)
BLOCK = Verifier("block", True, judge_block)
