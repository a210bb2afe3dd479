"""A back end for training: three primitives for whole sequences, as few large products.

The reference back end serves any mix of requests, in blocks that fit a CPU's cache: on a GPU these
are thousands of small kernels. Here every row of the page table is one page, request r has page
r + 1, and its tokens come in order, as many for each request: what `model.whole` and `sample` make.

    sequences   a token of place i sees the positions s <= i
    chained     behind the first T slots of a page lie the rows of chained drafts, T for each depth.
                The row of depth d and place i sees the main rows s <= i and, of each depth up to d,
                place i: what a chain sees that starts at i.

B sequences, T tokens of each, S slots of a page, N heads, H width of a key, V of a value, C of a
latent, E experts, F their width.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from funcinfer.layers.primitives import reference


def visible(T: int, S: int, hi_BT: Tensor) -> Tensor:
    """Which slots [B, T, S] a token sees, by the law above; `hi` is its position + 1.

    >>> visible(2, 4, torch.tensor([[2, 3]])).int().tolist()  # depth 1
    [[[1, 0, 1, 0], [1, 1, 0, 1]]]
    """
    i_T1, s_S = torch.arange(T, device=hi_BT.device)[:, None], torch.arange(S, device=hi_BT.device)
    depth_BT1 = (hi_BT - 1 - i_T1[:, 0])[..., None]
    own_BTS = (s_S % T == i_T1) & (s_S // T <= depth_BT1)
    return torch.where(s_S < T, s_S <= i_T1, own_BTS)


def paged_attention(
    q_TNH: Tensor,
    cache: Any,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    *,
    scale: float,
    **hints: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.paged_attention` over sequences or chains; the second result, lse, is empty."""
    B = page_table_RM.shape[0]
    q_BNTH = q_TNH.unflatten(0, (B, -1)).transpose(1, 2)
    k_BNSH, v_BNSV = (x.transpose(1, 2) for x in (cache.k, cache.v))
    T, S = q_BNTH.shape[2], k_BNSH.shape[2]
    see = None if T == S else visible(T, S, hi_T.unflatten(0, (B, T)))[:, None]
    out_BNTV = scaled_dot_product_attention(
        q_BNTH, k_BNSH, v_BNSV, attn_mask=see, is_causal=T == S, scale=scale
    )
    return out_BNTV.transpose(1, 2).flatten(0, 1), q_TNH.new_empty(0)


def paged_mla_attention(
    q_TNC: Tensor,
    q_pe_TNE: Tensor,
    cache: Any,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    *,
    scale: float,
    **hints: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.paged_mla_attention` for a few tokens of each request; lse is empty."""
    B = page_table_RM.shape[0]
    q_BTNW = torch.cat([q_TNC, q_pe_TNE], -1).unflatten(0, (B, -1))
    ckv_BSC, kpe_BSE = cache.ckv[1 : B + 1], cache.kpe[1 : B + 1]
    see_BTS = torch.arange(ckv_BSC.shape[1], device=q_TNC.device) < hi_T.unflatten(0, (B, -1, 1))
    out_B1QC = scaled_dot_product_attention(
        q_BTNW.flatten(1, 2)[:, None],
        torch.cat([ckv_BSC, kpe_BSE], -1)[:, None],
        ckv_BSC[:, None],
        attn_mask=see_BTS.repeat_interleave(q_BTNW.shape[2], 1)[:, None],
        scale=scale,
    )
    return out_B1QC.reshape(q_TNC.shape), q_TNC.new_empty(0)


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_ECFD: Tensor,
    down_EDF: Tensor,
    *,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """`reference.expert_mlp` by every expert for every token, those not chosen with weight 0.

    E / K times the products, in two of them: right for few and narrow experts.
    """
    E = gate_up_ECFD.shape[0]
    weights_TE = weights_TK.new_zeros(x_TD.shape[0], E).scatter_add(1, ids_TK, weights_TK)
    gate_TEF, up_TEF = torch.einsum("td,ecfd->ctef", x_TD, gate_up_ECFD)
    h_TEF = activation(gate_TEF, up_TEF) * weights_TE[..., None].to(x_TD.dtype)
    return torch.einsum("tef,edf->td", h_TEF, down_EDF)


BACKEND = SimpleNamespace(
    **{name: getattr(reference, name) for name in reference.__all__}
    | {f.__name__: f for f in (paged_attention, paged_mla_attention, expert_mlp)}
)
