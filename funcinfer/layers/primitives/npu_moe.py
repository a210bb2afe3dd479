"""Gates (npu_moe_gating_top_k) and the experts' MLPs by torch_npu: sort by expert, two grouped
products, weighted sum.

    x[T, D], ids[T, K] -> x[M, D] sorted by expert, place[T K], counts[E]   npu_moe_init_routing_v2
    h[M, 2 F] = x . gate_up[expert]   a = act(h)   y[M, D] = a . down[expert]    npu_grouped_matmul
    out[t] = sum_k weights[t, k] * y[place[t K + k]]                      npu_moe_finalize_routing

Choices of no expert get the id E, which is outside of the range that is sorted in: they come after
all others, and the products leave their rows undefined. Counts of tokens a expert come as counts,
not added up, and go on as such (expert_tokens_num_type 1, group_list_type 1). Places are in row
order (row_idx_type 0, drop_pad_mode 2).

Legend: T tokens, K choices of a token, M = T * K choices, E experts, F width of an expert, D model
width, C = 2 (gate, up).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference_gates, reference_moe
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.reference_gates import check_gate_sizes
from funcinfer.layers.primitives.reference_moe import Activation, check_experts

COUNTS, ROW_ORDER, DROPLESS_ROW_ORDER = 1, 0, 2
SOFTMAX, SIGMOID = 0, 1
BEST, BEST_TWO = 0, 1


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_ECFD: Tensor,
    down_EDF: Tensor,
    *,
    activation: Activation,
) -> Tensor:
    """As `reference_moe.expert_mlp`."""
    args = (x_TD, ids_TK, weights_TK, gate_up_ECFD, down_EDF)
    check_experts(*args)
    if choice("expert_mlp", *args).form is None:
        return reference_moe.expert_mlp(*args, activation=activation)
    E, C, F, _ = gate_up_ECFD.shape
    M, mine_TK = ids_TK.numel(), (ids_TK >= 0) & (ids_TK < E)
    x_MD, place_M, counts_E, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x_TD.contiguous(),
        torch.where(mine_TK, ids_TK, E).int(),
        active_num=M,
        expert_num=E + 1,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, E],
        row_idx_type=ROW_ORDER,
    )
    h_MCF = grouped(x_MD, gate_up_ECFD.flatten(1, 2), counts_E).unflatten(1, (C, F))
    a_MF = activation(*h_MCF.unbind(1))
    y_MD = grouped(a_MF, down_EDF, counts_E)
    defined_M = torch.arange(M, device=x_TD.device) < counts_E.sum()
    y_MD = y_MD.masked_fill(~defined_M[:, None], 0)
    weights_TK = torch.where(mine_TK, weights_TK, 0)
    combine: Callable[..., Tensor] = _finalize
    if choice("expert_mlp.combine", *args).form is None:
        combine = _gather_and_sum
    return combine(y_MD, place_M.clamp_min(0), weights_TK)


def gate_softmax(
    logits_TE: Tensor, *, k: int, groups: int = 1, keep_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """As `reference_gates.gate_softmax`. The op has this norm as 0, whatever a text says."""
    check_gate_sizes(logits_TE, k, groups, keep_groups)
    settings = dict(k=k, groups=groups, keep_groups=keep_groups)
    if choice("gate_softmax", logits_TE, **settings).form is None:
        return reference_gates.gate_softmax(logits_TE, **settings)
    score_TK, ids_TK, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits_TE.float(),
        k,
        k_group=keep_groups,
        group_count=groups,
        group_select_mode=BEST,
        norm_type=SOFTMAX,
    )
    return score_TK, ids_TK.long()


def gate_sigmoid(
    logits_TE: Tensor, bias_E: Tensor, *, k: int, groups: int = 1, keep_groups: int = 1
) -> tuple[Tensor, Tensor]:
    """As `reference_gates.gate_sigmoid`. The op gives the shares of the chosen scores alone, so the
    scores are looked up among those of all experts.
    """
    check_gate_sizes(logits_TE, k, groups, keep_groups, bias_E)
    settings = dict(k=k, groups=groups, keep_groups=keep_groups)
    if choice("gate_sigmoid", logits_TE, bias_E, **settings).form is None:
        return reference_gates.gate_sigmoid(logits_TE, bias_E, **settings)
    _, ids_TK, score_TE = torch.ops.npu.npu_moe_gating_top_k(
        logits_TE.float(),
        k,
        bias=bias_E.float(),
        k_group=keep_groups,
        group_count=groups,
        group_select_mode=BEST_TWO,
        norm_type=SIGMOID,
        out_flag=True,
    )
    ids_TK = ids_TK.long()
    return score_TE.gather(1, ids_TK), ids_TK


def grouped(x_MD: Tensor, w_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """X . w of each row's expert, [M, F]; rows after the last expert's are undefined."""
    (y_MF,) = torch.ops.npu.npu_grouped_matmul(
        [x_MD],
        [w_EFD.transpose(1, 2)],
        group_list=counts_E,
        split_item=2,
        group_type=0,
        group_list_type=COUNTS,
    )
    return y_MF


def _finalize(y_MD: Tensor, place_M: Tensor, weights_TK: Tensor) -> Tensor:
    return torch.ops.npu.npu_moe_finalize_routing(
        y_MD, None, None, None, weights_TK, place_M, None, drop_pad_mode=DROPLESS_ROW_ORDER
    )


def _gather_and_sum(y_MD: Tensor, place_M: Tensor, weights_TK: Tensor) -> Tensor:
    """The same with weights in at least float32, and for devices without the op."""
    wide = torch.promote_types(y_MD.dtype, torch.float32)
    y_TKD = y_MD.index_select(0, place_M).unflatten(0, tuple(weights_TK.shape))
    return torch.einsum("tkd,tk->td", y_TKD.to(wide), weights_TK.to(wide)).to(y_MD.dtype)
