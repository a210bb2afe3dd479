"""The facts about a call of a primitive that decide which torch_npu op computes it.

Each function has the arguments of its primitive and gives the facts that the limits in
`npu_limits` name: plain values, from shapes, dtypes and host data alone, so that meta tensors do.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives.segments import Segments

Facts = dict[str, Any]


def dtype_of(x: Tensor) -> str:
    """`bfloat16` of a tensor of torch.bfloat16."""
    return str(x.dtype).removeprefix("torch.")


def _same(*xs: Tensor) -> bool:
    return all(x.dtype == xs[0].dtype for x in xs)


def rms(x: Tensor, *, eps: float) -> Facts:
    """Facts about `rms`."""
    return dict(tokens=_rows(x), dtype=dtype_of(x))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Facts:
    """Facts about the norms with a weight."""
    facts = dict(tokens=_rows(x), dtype=dtype_of(x), weight_dtype=dtype_of(weight))
    return facts | dict(same_dtype=_same(x, weight))


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float) -> Facts:
    """Facts about `add_rms_norm`."""
    return dict(tokens=_rows(x), dtype=dtype_of(x), same_dtype=_same(x, y, weight))


def gated(gate: Tensor, up: Tensor, **settings: float) -> Facts:
    """Facts about the gated activations."""
    return dict(tokens=_rows(gate), dtype=dtype_of(gate), same_dtype=_same(gate, up))


def rotate(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Facts:
    """Facts about the rotations."""
    heads = x.shape[1] if x.ndim == 3 else 1
    return dict(tokens=x.shape[0], dtype=dtype_of(x), heads=heads, rotary_dim=2 * cos_TC.shape[-1])


def norm_rotate_write(
    kv_TW: Tensor,
    weight_C: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    slots_T: Tensor,
    *,
    eps: float,
) -> Facts:
    """Facts about `norm_rotate_write`; the op wants as many pages as consecutive tokens fill."""
    (pages, page, C), E = ckv_pages.shape, kpe_pages.shape[2]
    return dict(
        tokens=kv_TW.shape[0],
        dtype=dtype_of(kv_TW),
        same_dtype=_same(kv_TW, weight_C, ckv_pages, kpe_pages),
        latent=C,
        rope_dim=E,
        rotary_dim=2 * cos_TC.shape[-1],
        spare_pages=pages - -(-kv_TW.shape[0] // page),
    )


def mla_prolog(
    x_TD: Tensor,
    weights: Any,
    cos_TC: Tensor,
    sin_TC: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    slots_T: Tensor,
    *,
    eps: float,
) -> Facts:
    """Facts about `mla_prolog`."""
    (D, Q), (N, H, C) = weights.dq.shape, weights.uk.shape
    return dict(
        tokens=x_TD.shape[0],
        dtype=dtype_of(x_TD),
        same_dtype=_same(x_TD, *vars(weights).values(), ckv_pages, kpe_pages),
        embed=D,
        q_lora=Q,
        heads=N,
        nope_dim=H,
        latent=C,
        rope_dim=kpe_pages.shape[2],
        page_size=ckv_pages.shape[1],
    )


def write_rows(pages: Tensor, new: Tensor, slots_T: Tensor) -> Facts:
    """Facts about `write_rows`."""
    return dict(tokens=slots_T.shape[0], dtype=dtype_of(pages))


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_new: Tensor, v_new: Tensor, slots_T: Tensor
) -> Facts:
    """Facts about `write_kv`."""
    return dict(
        tokens=slots_T.shape[0],
        dtype=dtype_of(k_pages),
        same_dtype=_same(k_pages, v_pages),
        value_width=v_pages.shape[-1],
    )


def _ragged(segments: Segments | None) -> Facts:
    return dict(segments=0 if segments is None else len(segments.lens))


def paged_attention(
    q_TNH: Tensor,
    cache: Any,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    *,
    scale: float,
    sinks_N: Tensor | None = None,
    segments: Segments | None = None,
) -> Facts:
    """Facts about `paged_attention`; `segments` 0 where there are none."""
    (T, N, H), (_, page, K, V) = q_TNH.shape, cache.v.shape
    M = page_table_RM.shape[1]
    return dict(
        tokens=T,
        dtype=dtype_of(q_TNH),
        same_dtype=_same(q_TNH, cache.k, cache.v),
        heads=N,
        group=N // K,
        head_dim=H,
        equal_widths=H == V,
        widths=(H, V, "mha" if N == K else "gqa"),
        kv_width=K * H,
        page_size=page,
        pages=M,
        positions=M * page,
        spare_pages=cache.k.shape[0] - T * M,
        **_ragged(segments),
    )


def merge_lse(outs_nTNV: Tensor, lses_nTN: Tensor) -> Facts:
    """Facts about `merge_lse`."""
    return dict(
        tokens=math.prod(lses_nTN.shape[1:]),
        parts=lses_nTN.shape[0],
        width=outs_nTNV.shape[-1],
        dtype=dtype_of(outs_nTNV),
        lse_dtype=dtype_of(lses_nTN),
    )


def _latents(q_TNC: Tensor, q_pe_TNE: Tensor, cache: Any) -> Facts:
    return dict(
        tokens=q_TNC.shape[0],
        dtype=dtype_of(q_TNC),
        same_dtype=_same(q_TNC, q_pe_TNE, cache.ckv, cache.kpe),
        heads=q_TNC.shape[1],
        latent=q_TNC.shape[2],
        rope_dim=q_pe_TNE.shape[2],
        page_size=cache.ckv.shape[1],
    )


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
    segments: Segments | None = None,
) -> Facts:
    """Facts about `paged_mla_attention`; `segments` 0 where there are none."""
    return _latents(q_TNC, q_pe_TNE, cache) | _ragged(segments)


def sparse_mla_attention(
    q_TNC: Tensor,
    q_pe_TNE: Tensor,
    cache: Any,
    page_table_RM: Tensor,
    rows_T: Tensor,
    positions_TK: Tensor,
    *,
    scale: float,
    with_lse: bool = True,
) -> Facts:
    """Facts about `sparse_mla_attention`."""
    return _latents(q_TNC, q_pe_TNE, cache) | dict(lse="wanted" if with_lse else "not wanted")


def lightning_indexer(
    q_TIH: Tensor,
    gate_TI: Tensor,
    keys: Any,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor | None,
    hi_T: Tensor,
    *,
    topk: int,
    segments: Segments | None = None,
) -> Facts:
    """Facts about `lightning_indexer`."""
    (T, heads, width), (_, page, _) = q_TIH.shape, keys.k.shape
    return dict(
        tokens=T,
        dtype=dtype_of(q_TIH),
        same_dtype=_same(q_TIH, keys.k),
        gate_dtype=dtype_of(gate_TI),
        heads=heads,
        head_dim=width,
        page_size=page,
        topk=min(topk, page_table_RM.shape[1] * page),
        lo="none" if lo_T is None else "given",
    )


def gate(logits_TE: Tensor, *bias: Tensor, k: int, groups: int = 1, keep_groups: int = 1) -> Facts:
    """Facts about the gates; the op pads each group to a multiple of 32 experts."""
    T, E = logits_TE.shape
    padded = groups * (-(-E // groups // 32) * 32)
    return dict(
        tokens=T,
        dtype=dtype_of(logits_TE),
        experts=E,
        group_size=E // groups,
        padded_experts=padded,
    )


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_ECFD: Tensor,
    down_EDF: Tensor,
    **settings: Any,
) -> Facts:
    """Facts about `expert_mlp`."""
    E, D, F = down_EDF.shape
    return dict(
        tokens=ids_TK.numel(),
        dtype=dtype_of(x_TD),
        same_dtype=_same(x_TD, gate_up_ECFD, down_EDF),
        experts=E,
        embed=D,
        width=F,
    )


def combine_experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *args: Any, **settings: Any
) -> Facts:
    """Facts about the last part of `expert_mlp`, the weighted sum over choices."""
    return dict(tokens=ids_TK.numel(), dtype=dtype_of(x_TD), same_dtype=_same(x_TD, weights_TK))


def dynamic_quant(x: Tensor) -> Facts:
    """Facts about `dynamic_quant`."""
    return dict(tokens=_rows(x), dtype=dtype_of(x))


def quant_linear(
    x_int8: Tensor,
    w_int8: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
) -> Facts:
    """Facts about `quant_linear`."""
    N, D = w_int8.shape
    return dict(
        tokens=x_scale.numel(),
        dtype=str(dtype).removeprefix("torch."),
        bias="none" if bias is None else dtype_of(bias),
        embed=D,
        width=N,
    )


def quant_expert_swiglu(
    x_MD: Tensor, w_EDG: Tensor, x_scale_M: Tensor, w_scale_EG: Tensor, counts_E: Tensor
) -> Facts:
    """Facts about `quant_expert_swiglu`."""
    E, D, G = w_EDG.shape
    return dict(
        tokens=x_MD.shape[0], experts=E, embed=D, columns=G, scale_dtype=dtype_of(w_scale_EG)
    )


def nothing(*args: Any, **settings: Any) -> Facts:
    """Facts about a primitive that no op computes."""
    return {}


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


FACTS: Mapping[str, Callable[..., Facts]] = MappingProxyType(
    {
        "rms": rms,
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "rms_norm_fp32_weight": rms_norm,
        "rms_norm_one_plus": rms_norm,
        "layer_norm": nothing,
        "linear": nothing,
        "swiglu": gated,
        "swiglu_clamped": gated,
        "swiglu_oai": gated,
        "rotate_half_split": rotate,
        "rotate_interleaved": rotate,
        "rotate_deinterleaved": rotate,
        "norm_rotate_write": norm_rotate_write,
        "mla_prolog": mla_prolog,
        "write_rows": write_rows,
        "write_kv": write_kv,
        "paged_attention": paged_attention,
        "merge_lse": merge_lse,
        "paged_mla_attention": paged_mla_attention,
        "sparse_mla_attention": sparse_mla_attention,
        "indexer_scores": nothing,
        "select_top": nothing,
        "lightning_indexer": lightning_indexer,
        "gate_softmax": gate,
        "gate_sigmoid": gate,
        "expert_mlp": expert_mlp,
        "dynamic_quant": dynamic_quant,
        "quant_linear": quant_linear,
        "quant_expert_swiglu": quant_expert_swiglu,
        "expert_mlp.combine": combine_experts,
    }
)
