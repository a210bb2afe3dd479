"""The primitives on an Ascend NPU, by the fused ops of torch_npu.

Names, signatures, defaults and dtypes are those of `reference`; `npu_limits` says which op computes
a primitive, and when it is composed of torch ops. Norms, activations and rotations are here,
attention in `npu_attention`, latent attention and its indexer in `npu_mla`, experts in `npu_moe`,
writes of caches in `npu_cache`, products of eight-bit integers in `npu_quant`. Ops are called as
`torch.ops.npu.*`, which are there once torch_npu is imported: whoever has a tensor on an NPU has
done that, `load_torch_npu` does it for others.

Half precision is computed in float32 inside the fused ops and rounded once. The reference rounds
more often in `rms_norm` and in the rotations: results differ by a unit in the last place.

Legend: T tokens, F mlp width, N heads, H head dim, C rotated pairs.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference
from funcinfer.layers.primitives.npu_attention import merge_lse, paged_attention
from funcinfer.layers.primitives.npu_cache import write_kv, write_latents, write_rows
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.npu_mla import (
    fused_prolog,
    lightning_indexer,
    paged_mla_attention,
    sparse_mla_attention,
)
from funcinfer.layers.primitives.npu_moe import expert_mlp, gate_sigmoid, gate_softmax
from funcinfer.layers.primitives.npu_quant import (
    dynamic_quant,
    quant_expert_swiglu,
    quant_linear,
)
from funcinfer.layers.primitives.reference import (
    check_gate,
    check_latent_rows,
    check_norm,
    check_sum,
    check_tables,
    deinterleaved,
    indexer_scores,
    linear,
    select_top,
)
from funcinfer.layers.primitives.reference_prolog import (
    Parts,
    PrologWeights,
    check_prolog,
    compose_prolog,
)

__all__ = [
    "add_rms_norm",
    "dynamic_quant",
    "expert_mlp",
    "gate_sigmoid",
    "gate_softmax",
    "indexer_scores",
    "layer_norm",
    "lightning_indexer",
    "linear",
    "load_torch_npu",
    "merge_lse",
    "mla_prolog",
    "norm_rotate_write",
    "paged_attention",
    "paged_mla_attention",
    "quant_expert_swiglu",
    "quant_linear",
    "rms",
    "rms_norm",
    "rms_norm_fp32_weight",
    "rms_norm_one_plus",
    "rotate_deinterleaved",
    "rotate_half_split",
    "rotate_interleaved",
    "select_top",
    "sparse_mla_attention",
    "swiglu",
    "swiglu_clamped",
    "swiglu_oai",
    "write_kv",
    "write_rows",
]


def load_torch_npu() -> Any:
    """The module torch_npu, imported. ImportError that says what is missing: it, or CANN."""
    try:
        return importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise
        raise ImportError(
            "device npu needs torch_npu, which is not installed: pip install 'funcinfer[npu]',"
            " in the version that fits torch and CANN"
        ) from error
    except (ImportError, OSError) as error:
        raise ImportError(
            f"torch_npu is installed, but can't be loaded: {error}. It needs the CANN toolkit on"
            f" this machine: install it, and source its set_env.sh"
        ) from error


def rms(x: Tensor, *, eps: float) -> Tensor:
    """As `reference.rms`: npu_rms_norm with a weight of ones."""
    if choice("rms", x, eps=eps).form is None:
        return reference.rms(x, eps=eps)
    return torch.ops.npu.npu_rms_norm(x, x.new_ones(x.shape[-1]), eps)[0]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `reference.rms_norm`, but that the weight comes before the one rounding."""
    check_norm("rms_norm", x, weight)
    if choice("rms_norm", x, weight, eps=eps).form is None:
        return reference.rms_norm(x, weight, eps=eps)
    return _norm(x, weight, eps)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.add_rms_norm`; the op's third result is the sum. Without it, its two parts."""
    check_sum("add_rms_norm", x, y)
    check_norm("add_rms_norm", x, weight)
    if choice("add_rms_norm", x, y, weight, eps=eps).form is None:
        total = x + y
        return rms_norm(total, weight, eps=eps), total
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, y, weight, eps)
    return normed, total


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `reference.rms_norm_fp32_weight`."""
    check_norm("rms_norm_fp32_weight", x, weight)
    if choice("rms_norm_fp32_weight", x, weight, eps=eps).form is None:
        return reference.rms_norm_fp32_weight(x, weight, eps=eps)
    return _norm(x, weight, eps)


def rms_norm_one_plus(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `reference.rms_norm_one_plus`."""
    check_norm("rms_norm_one_plus", x, weight)
    if choice("rms_norm_one_plus", x, weight, eps=eps).form is None:
        return reference.rms_norm_one_plus(x, weight, eps=eps)
    return torch.ops.npu.npu_gemma_rms_norm(x, weight, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """As `reference.layer_norm`, by torch's own layer_norm, for which torch_npu has a kernel."""
    check_norm("layer_norm", x, weight, bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.nn.functional.layer_norm(
        x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps
    )
    return y.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """As `reference.swiglu`."""
    check_gate("swiglu", gate, up)
    if choice("swiglu", gate, up).form is None:
        return reference.swiglu(gate, up)
    return torch.ops.npu.npu_swiglu(halves(gate, up), -1)


def swiglu_clamped(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """As `reference.swiglu_clamped`."""
    check_gate("swiglu_clamped", gate, up)
    if choice("swiglu_clamped", gate, up, limit=limit).form is None:
        return reference.swiglu_clamped(gate, up, limit=limit)
    return _clipped(gate, up, alpha=1.0, limit=limit, bias=0.0)


def swiglu_oai(gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """As `reference.swiglu_oai`."""
    check_gate("swiglu_oai", gate, up)
    if choice("swiglu_oai", gate, up, limit=limit, alpha=alpha).form is None:
        return reference.swiglu_oai(gate, up, limit=limit, alpha=alpha)
    return _clipped(gate, up, alpha=alpha, limit=limit, bias=1.0)


def rotate_half_split(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """As `reference.rotate_half_split`."""
    check_tables("rotate_half_split", x, cos_TC, sin_TC)
    if choice("rotate_half_split", x, cos_TC, sin_TC).form is None:
        return reference.rotate_half_split(x, cos_TC, sin_TC)
    tables = (torch.cat([t, t], -1) for t in (cos_TC, sin_TC))
    return _rotate(x, *tables, mode="half")


def rotate_interleaved(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """As `reference.rotate_interleaved`."""
    check_tables("rotate_interleaved", x, cos_TC, sin_TC)
    if choice("rotate_interleaved", x, cos_TC, sin_TC).form is None:
        return reference.rotate_interleaved(x, cos_TC, sin_TC)
    tables = (t.repeat_interleave(2, -1) for t in (cos_TC, sin_TC))
    return _rotate(x, *tables, mode="interleave")


def rotate_deinterleaved(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """As `reference.rotate_deinterleaved`; npu_interleave_rope takes [T, N, 1, 64]."""
    check_tables("rotate_deinterleaved", x, cos_TC, sin_TC)
    form = choice("rotate_deinterleaved", x, cos_TC, sin_TC).name
    if form == "composed":
        return reference.rotate_deinterleaved(x, cos_TC, sin_TC)
    tables = (torch.cat([t, t], -1) for t in (cos_TC, sin_TC))
    if form == "half":
        return _rotate(deinterleaved(x, cos_TC.shape[-1]), *tables, mode="half")
    cos, sin = (t.to(x.dtype)[:, None, None] for t in tables)
    x_TN1H = x[:, :, None] if x.ndim == 3 else x[:, None, None]
    rotary = cos.shape[-1]
    turned = torch.ops.npu.npu_interleave_rope(x_TN1H[..., :rotary].contiguous(), cos, sin)
    rest = x_TN1H[..., rotary:]
    return (torch.cat([turned, rest], -1) if rest.shape[-1] else turned).view(x.shape)


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
) -> tuple[Tensor, Tensor]:
    """As `reference.norm_rotate_write`; without its op, by the ops of its parts."""
    check_latent_rows(kv_TW, weight_C, ckv_pages, kpe_pages)
    args = (kv_TW, weight_C, cos_TC, sin_TC, ckv_pages, kpe_pages, slots_T)
    if choice("norm_rotate_write", *args, eps=eps).form is not None:
        return write_latents(*args, eps)
    kv_TC, kpe_TE = kv_TW.split([len(weight_C), kv_TW.shape[1] - len(weight_C)], 1)
    ckv_TC = rms_norm(kv_TC, weight_C, eps=eps)
    kpe_TE = rotate_deinterleaved(kpe_TE, cos_TC, sin_TC)
    return write_kv(ckv_pages, kpe_pages, ckv_TC, kpe_TE, slots_T)


def mla_prolog(
    x_TD: Tensor,
    weights: PrologWeights,
    cos_TC: Tensor,
    sin_TC: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    slots_T: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.mla_prolog`; without its op, by the ops of its parts."""
    tables, pages = (cos_TC, sin_TC), (ckv_pages, kpe_pages)
    check_prolog(x_TD, weights, tables, kpe_pages)
    if choice("mla_prolog", x_TD, weights, *tables, *pages, slots_T, eps=eps).form is not None:
        return fused_prolog(x_TD, weights, tables, pages, slots_T, eps)
    parts = Parts(linear, rms_norm, rotate_deinterleaved, norm_rotate_write)
    return compose_prolog(parts, x_TD, weights, tables, pages, slots_T, eps)


def halves(gate: Tensor, up: Tensor) -> Tensor:
    """[..., 2 F] with the gate in the first half and up in the second.

    Where the two are neighbours in one tensor, as an MLP's product has them, a view of it.

    >>> both = torch.arange(12).view(2, 2, 3)
    >>> halves(*both.unbind(-2)).data_ptr() == both.data_ptr()
    True
    """
    base, (F, stride) = gate._base, (gate.shape[-1], gate.stride())
    neighbours = (
        base is not None
        and base is up._base
        and base.is_contiguous()
        and stride == up.stride()
        and stride[-1] == 1
        and up.storage_offset() == gate.storage_offset() + F
        and all(s % (2 * F) == 0 for s in stride[:-1])
    )
    if not neighbours:
        return torch.cat([gate, up], -1)
    return gate.as_strided((*gate.shape[:-1], 2 * F), stride, gate.storage_offset())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op takes weights of x's dtype, or in float32."""
    weight = weight if weight.dtype == x.dtype else weight.float()
    y = torch.ops.npu.npu_rms_norm(x, weight, eps)[0]
    return y.to(x.dtype)


def _clipped(gate: Tensor, up: Tensor, *, alpha: float, limit: float, bias: float) -> Tensor:
    return torch.ops.npu.npu_clipped_swiglu(
        halves(gate, up), dim=-1, alpha=alpha, limit=limit, bias=bias, interleaved=False
    )


def _rotate(x: Tensor, cos_TE: Tensor, sin_TE: Tensor, *, mode: str) -> Tensor:
    """The first E dims of x turned, as layout BSND with one batch: tables [1, T, 1, E]."""
    cos, sin = (t.to(x.dtype)[None, :, None] for t in (cos_TE, sin_TE))
    rotary = cos.shape[-1]
    x_1TNH = x[None] if x.ndim == 3 else x[None, :, None]
    turned, rest = x_1TNH[..., :rotary].contiguous(), x_1TNH[..., rotary:]
    turned = torch.ops.npu.npu_rotary_mul(turned, cos, sin, mode)
    return torch.cat([turned, rest], -1).view(x.shape) if rest.shape[-1] else turned.view(x.shape)
