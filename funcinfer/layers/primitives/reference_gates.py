"""Gates: which k of E experts a token's logits choose, in plain torch.

    gate_softmax   s = softmax(z)    k largest s       in the groups with the best expert
    gate_sigmoid   s = sigmoid(z)    k largest s + b   in the groups with the best two by s + b

Groups of experts are those of DeepSeek-V2 (2024), section 2.2.3; the bias b chooses experts and
never weighs them (Wang et al., "Auxiliary-loss-free load balancing", 2024). Equal scores go to the
lowest id, so that ranks that hold the same token choose alike.

Legend: T tokens, E experts, K choices of a token, G groups, S = E / G experts of a group.
"""

import torch
from torch import Tensor


def gate_softmax(
    logits_TE: Tensor, *, k: int, groups: int = 1, keep_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """The k most probable experts of the `keep_groups` groups with the most probable one:
    (probabilities [T, K], ids [T, K] in int64), the most probable first.

    Probabilities are over all experts, in at least float32, and not normalised again. ValueError
    for groups that don't divide the experts, or leave fewer than k of them.

    >>> gate_softmax(torch.tensor([[1.0, 3.0, 2.0]]).log(), k=2)
    (tensor([[0.5000, 0.3333]]), tensor([[1, 2]]))
    """
    check_gate_sizes(logits_TE, k, groups, keep_groups)
    score_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    choice_TE = score_TE
    if groups > 1:
        choice_TGS = score_TE.unflatten(-1, (groups, -1))
        choice_TE = _keep_groups(choice_TGS, choice_TGS.amax(-1), keep_groups)
    return _pick(choice_TE, score_TE, k)


def gate_sigmoid(
    logits_TE: Tensor, bias_E: Tensor, *, k: int, groups: int = 1, keep_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """The k experts with the largest s + b, s = sigmoid(logits), of the `keep_groups` groups with
    the best two: (s [T, K], ids [T, K] in int64), the largest s + b first.

    All in at least float32; s is not normalised. ValueError as in `gate_softmax`, for groups of one
    expert, and for a bias that is not [E].

    >>> gate_sigmoid(torch.zeros(1, 3), torch.tensor([0.0, 2.0, 1.0]), k=2)
    (tensor([[0.5000, 0.5000]]), tensor([[1, 2]]))
    """
    check_gate_sizes(logits_TE, k, groups, keep_groups, bias_E)
    score_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)).sigmoid()
    choice_TE = score_TE + bias_E
    if groups > 1:
        choice_TGS = choice_TE.unflatten(-1, (groups, -1))
        choice_TE = _keep_groups(choice_TGS, choice_TGS.topk(2, -1).values.sum(-1), keep_groups)
    return _pick(choice_TE, score_TE, k)


def check_gate_sizes(
    logits_TE: Tensor, k: int, groups: int, keep_groups: int, bias_E: Tensor | None = None
) -> None:
    """ValueError where k and groups don't fit the experts; with a bias, a group needs two."""
    E = logits_TE.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"k={k} choices of {E} experts: k must be from 1 to that")
    if groups < 1 or E % groups:
        raise ValueError(f"{E} experts can't be divided into groups={groups} even groups")
    if groups > 1 and bias_E is not None and E // groups < 2:
        raise ValueError(
            f"{groups} groups of {E // groups} expert:"
            f" a group's score is the sum of its best two, so each must hold at least 2"
        )
    if not 1 <= keep_groups <= groups or k > keep_groups * (E // groups):
        raise ValueError(
            f"k={k} choices in keep_groups={keep_groups} of groups={groups}, each of {E // groups}"
            f" experts: keep_groups must be from 1 to {groups} and leave at least k experts"
        )
    if bias_E is not None and bias_E.shape != (E,):
        raise ValueError(f"bias {tuple(bias_E.shape)} must have one entry an expert: {E}")


def _top_ids(score: Tensor, k: int) -> Tensor:
    """Ids of the k largest of the last dim, largest first, equal ones by id: not so with `topk`."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _pick(choice_TE: Tensor, score_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The scores and ids of the k largest choices."""
    ids_TK = _top_ids(choice_TE, k)
    return score_TE.gather(-1, ids_TK), ids_TK


def _keep_groups(choice_TGS: Tensor, group_TG: Tensor, keep: int) -> Tensor:
    """The choices [T, E] with those of all but the `keep` best groups at -inf.

    Biased scores may be negative: any finite value in place of -inf could win against them.
    """
    kept_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    kept_TG = kept_TG.scatter(-1, _top_ids(group_TG, keep), True)
    return torch.where(kept_TG[..., None], choice_TGS, -torch.inf).flatten(1)
