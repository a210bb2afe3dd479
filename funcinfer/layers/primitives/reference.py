"""Norms, activations and rotations in plain torch: the definition that every back end is held to.

    rms         y[T, D] = x / sqrt(mean_D(x^2) + eps)                    (Zhang & Sennrich 2019)
    layer_norm  y[T, D] = (x - mean_D x) / sqrt(var_D x + eps) * w + b   (Ba et al. 2016)
    swiglu      y[T, F] = silu(gate[T, F]) * up[T, F]                    (Shazeer 2020)
    linear      y[T, *out] = sum_in x[T, *in] w[*out, *in]
    rotate_*    (a, b) -> (a cos - b sin, b cos + a sin) on pairs of H   (Su et al. 2021)

"fp32 inside" means `promote_types(x.dtype, float32)`: half precision is computed in float32, and
float64 stays float64. Results have the input's dtype. Attention is in `reference_attention`,
the experts' MLPs are in `reference_moe`, latent attention in `reference_mla`, its indexer in
`reference_indexer`, writes of caches in `reference_cache`,
gates of experts in `reference_gates`, what comes before latent attention in `reference_prolog`,
products of eight-bit integers in `reference_quant`.

Legend: T tokens, D model dim, F mlp width, N heads, H head dim, C rotated pairs (rotary dim / 2).
"""

import torch
from torch import Tensor

from funcinfer.layers.primitives.reference_attention import merge_lse, paged_attention
from funcinfer.layers.primitives.reference_cache import write_kv, write_rows
from funcinfer.layers.primitives.reference_gates import gate_sigmoid, gate_softmax
from funcinfer.layers.primitives.reference_indexer import (
    indexer_scores,
    lightning_indexer,
    select_top,
)
from funcinfer.layers.primitives.reference_mla import (
    paged_mla_attention,
    sparse_mla_attention,
)
from funcinfer.layers.primitives.reference_moe import expert_mlp
from funcinfer.layers.primitives.reference_prolog import (
    Parts,
    PrologWeights,
    check_prolog,
    compose_prolog,
)
from funcinfer.layers.primitives.reference_quant import dynamic_quant, quant_linear
from funcinfer.layers.primitives.reference_quant_moe import quant_expert_swiglu

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


def linear(x: Tensor, weight: Tensor, *, dims: int = 1) -> Tensor:
    """The products of x [..., *in] and a weight [*out, *in], summed over its last `dims` dims.

    Weights keep the checkpoint's order with dims unfolded, as (heads, width, model width); the sum
    runs as one matrix product, which a CPU does up to 50 times faster in bfloat16 than an einsum.
    ValueError where the summed dims differ.

    >>> linear(torch.ones(2, 3), torch.ones(4, 5, 3)).shape
    torch.Size([2, 4, 5])
    >>> linear(torch.ones(2, 4, 5), torch.ones(3, 4, 5), dims=2).shape
    torch.Size([2, 3])
    """
    if x.shape[x.ndim - dims :] != weight.shape[weight.ndim - dims :]:
        raise ValueError(
            f"linear: x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in their last"
            f" {dims} dims, over which the sum runs"
        )
    out = weight.shape[: weight.ndim - dims]
    matrix = weight.flatten(weight.ndim - dims).flatten(0, len(out) - 1)
    y = torch.nn.functional.linear(x.flatten(x.ndim - dims), matrix)
    return y.unflatten(-1, out)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def check_norm(name: str, x: Tensor, *weights: Tensor) -> None:
    """ValueError where a weight is not one number for each of the last dim of `x`."""
    for weight in weights:
        if weight.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: weight of shape {tuple(weight.shape)} for x of shape {tuple(x.shape)}; "
                f"it must have one entry for each of the last dim: {tuple(x.shape[-1:])}"
            )


def rms(x: Tensor, *, eps: float) -> Tensor:
    """Divide x by its root mean square over the last dim; no weight.

    x: [..., D]. Returns [..., D] in x's dtype, fp32 inside.

    >>> rms(torch.tensor([[3.0, 4.0]]), eps=0.0).square().mean().item()
    1.0
    """
    return _normalised(x, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm with the cast to x's dtype *before* the weight (Llama, Qwen, DeepSeek, GLM).

    x: [..., D], weight: [D]. Returns [..., D] in x's dtype. ValueError if the weight is not [D].

    >>> rms_norm(torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 3.0]), eps=0.0)
    tensor([[ 2., -3.]])
    """
    check_norm("rms_norm", x, weight)
    return (rms(x, eps=eps) * weight).to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """A residual sum and its norm: (`rms_norm` of x + y, x + y).

    x, y: [..., D] of one dtype, weight: [D]. The sum is rounded to x's dtype, and the norm is that
    of the rounded sum, as where the two are apart. Both results are [..., D] in x's dtype.
    ValueError if x and y differ in shape or dtype, or the weight is not [D].

    >>> x, y = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 2.0]])
    >>> add_rms_norm(x, y, torch.tensor([1.0, 2.0]), eps=0.0)
    (tensor([[1., 2.]]), tensor([[3., 3.]]))
    """
    check_sum("add_rms_norm", x, y)
    check_norm("add_rms_norm", x, weight)
    total = x + y
    return rms_norm(total, weight, eps=eps), total


def check_sum(name: str, x: Tensor, y: Tensor) -> None:
    """ValueError where two terms differ in shape or dtype."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"{name}: x is {x.dtype} {tuple(x.shape)} and y {y.dtype} {tuple(y.shape)}; "
            "they must have one shape and dtype"
        )


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm with the weight in fp32 *before* the cast to x's dtype (gpt-oss, DeepSeek V4).

    x: [..., D], weight: [D]. Returns [..., D] in x's dtype. ValueError if the weight is not [D].

    >>> rms_norm_fp32_weight(torch.tensor([[1.0, -1.0]]), torch.tensor([2.0, 3.0]), eps=0.0)
    tensor([[ 2., -3.]])
    """
    check_norm("rms_norm_fp32_weight", x, weight)
    return (_normalised(x, eps) * _wide(weight)).to(x.dtype)


def rms_norm_one_plus(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Zero-centred RMSNorm: times (1 + weight), formed in fp32 (Qwen3-Next, Gemma, MiniMax-M3).

    In bf16 `1 + weight` would lose every weight below 2^-9. x: [..., D], weight: [D]. Returns
    [..., D] in x's dtype. ValueError if the weight is not [D].

    >>> rms_norm_one_plus(torch.tensor([[1.0, -1.0]]), torch.tensor([0.0, 1.0]), eps=0.0)
    tensor([[ 1., -2.]])
    """
    check_norm("rms_norm_one_plus", x, weight)
    return (_normalised(x, eps) * (1 + _wide(weight))).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """LayerNorm over the last dim with weight and bias, all in fp32 (the indexer's key norm).

    x: [..., D], weight and bias: [D]. Returns [..., D] in x's dtype. ValueError if weight or bias
    is not [D].

    >>> one = torch.ones(2)
    >>> layer_norm(torch.tensor([[5.0, 9.0]]), one, one, eps=0.0)
    tensor([[0., 2.]])
    """
    check_norm("layer_norm", x, weight, bias)
    centred = _wide(x) - _wide(x).mean(-1, keepdim=True)
    return (_normalised(centred, eps) * _wide(weight) + _wide(bias)).to(x.dtype)


def check_gate(name: str, gate: Tensor, up: Tensor) -> None:
    """ValueError where gate and up differ in shape."""
    if gate.shape != up.shape:
        raise ValueError(
            f"{name}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; "
            "they must be equal"
        )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate, up: [..., F]. Returns [..., F] in gate's dtype, fp32 inside. ValueError if shapes differ.

    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([3.0, 2.0]))
    tensor([ 0., 40.])
    """
    check_gate("swiglu", gate, up)
    return (torch.nn.functional.silu(_wide(gate)) * _wide(up)).to(gate.dtype)


def swiglu_clamped(gate: Tensor, up: Tensor, *, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clip(up, -limit, limit) (DeepSeek V4, GLM-5.3).

    The gate is bounded from above only: silu bounds it from below. gate, up: [..., F]. Returns
    [..., F] in gate's dtype, fp32 inside. ValueError if shapes differ.

    >>> swiglu_clamped(torch.tensor([50.0]), torch.tensor([-50.0]), limit=20.0)
    tensor([-400.])
    """
    check_gate("swiglu_clamped", gate, up)
    return swiglu(_wide(gate).clamp(max=limit), _wide(up).clamp(-limit, limit)).to(gate.dtype)


def swiglu_oai(gate: Tensor, up: Tensor, *, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), clamped as in `swiglu_clamped` (gpt-oss).

    gate, up: [..., F]. Returns [..., F] in gate's dtype, fp32 inside. ValueError if shapes differ.

    >>> swiglu_oai(torch.tensor([0.0, 50.0]), torch.tensor([3.0, 1.0])).round(decimals=3)
    tensor([ 0., 14.])
    """
    check_gate("swiglu_oai", gate, up)
    gate_wide, up_wide = _wide(gate).clamp(max=limit), _wide(up).clamp(-limit, limit)
    return (gate_wide * torch.sigmoid(alpha * gate_wide) * (up_wide + 1)).to(gate.dtype)


def check_tables(name: str, x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> None:
    """ValueError where the tables of a rotation don't fit x."""
    if (
        x.ndim not in (2, 3)
        or cos_TC.shape != sin_TC.shape
        or cos_TC.ndim != 2
        or cos_TC.shape[0] != x.shape[0]
        or 2 * cos_TC.shape[1] > x.shape[-1]
    ):
        raise ValueError(
            f"{name}: x of shape {tuple(x.shape)}, cos {tuple(cos_TC.shape)}, sin "
            f"{tuple(sin_TC.shape)}; wanted x [T, N, H] or [T, H] and tables [T, C] with 2 C <= H"
        )


def _tables(name: str, x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The tables in x's dtype, with a head dim put in if x has one."""
    check_tables(name, x, cos_TC, sin_TC)
    cos, sin = cos_TC.to(x.dtype), sin_TC.to(x.dtype)
    return (cos[:, None], sin[:, None]) if x.ndim == 3 else (cos, sin)


def rotate_half_split(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotate the pairs (i, i + C) of the first 2 C dims; the other dims pass through unchanged.

    x: [T, N, H] or [T, H]; cos, sin: [T, C], cast to x's dtype and multiplied in it, as in
    transformers. Rotation by the opposite angle is `rotate_half_split(x, cos, -sin)`. Returns x's
    shape and dtype. ValueError on other shapes. Used by Llama, Qwen, GLM-4.5, MiniMax, gpt-oss and
    the V3.2 indexer.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)  # cos, sin of 90 degrees
    >>> rotate_half_split(torch.tensor([[1.0, 2.0, 3.0]]), *quarter)
    tensor([[-2.,  1.,  3.]])
    """
    cos, sin = _tables("rotate_half_split", x, cos_TC, sin_TC)
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def rotate_interleaved(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """Rotate the pairs (2 i, 2 i + 1) of the first 2 C dims, in place of one another.

    Arguments, result and errors as in `rotate_half_split`. Used by the GLM-5 indexer.

    >>> quarter = torch.zeros(1, 1), torch.ones(1, 1)
    >>> rotate_interleaved(torch.tensor([[1.0, 2.0, 3.0]]), *quarter)
    tensor([[-2.,  1.,  3.]])
    """
    cos, sin = _tables("rotate_interleaved", x, cos_TC, sin_TC)
    rotary = 2 * cos.shape[-1]
    a, b, rest = x[..., 0:rotary:2], x[..., 1:rotary:2], x[..., rotary:]
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([pairs.flatten(-2), rest], -1)


def rotate_deinterleaved(x: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
    """`rotate_interleaved`, the first of each rotated pair before the second of each: the order
    (0, 2, 4, ..., 1, 3, 5, ...) of its result.

    Scores of queries and keys are the same where both are in this order. Arguments and errors as in
    `rotate_half_split`. Used by DeepSeek's MLA, as in its own code and in transformers.

    >>> quarter = torch.zeros(1, 2), torch.ones(1, 2)
    >>> rotate_deinterleaved(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), *quarter)
    tensor([[-2., -4.,  1.,  3.]])
    """
    check_tables("rotate_deinterleaved", x, cos_TC, sin_TC)
    return rotate_half_split(deinterleaved(x, cos_TC.shape[-1]), cos_TC, sin_TC)


def deinterleaved(x: Tensor, pairs: int) -> Tensor:
    """The first `pairs` pairs of the last dim, the first of each before the second of each.

    >>> deinterleaved(torch.arange(5), 2)
    tensor([0, 2, 1, 3, 4])
    """
    turned = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).movedim(-1, -2).flatten(-2)
    return torch.cat([turned, x[..., 2 * pairs :]], -1)


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
    """New rows of a latent cache: `rms_norm` of the first C of W dims, `rotate_deinterleaved` of
    the others, `write_kv` of both. The pages [pages, page, C] and [pages, page, W - C] come back.

    ValueError where the widths don't fit together.

    >>> ckv, kpe = torch.zeros(2, 1, 2), torch.zeros(2, 1, 2)
    >>> tables = torch.zeros(1, 1), torch.ones(1, 1)
    >>> kv, one = torch.tensor([[3.0, 3.0, 1.0, 2.0]]), torch.ones(2)
    >>> pages = norm_rotate_write(kv, one, *tables, ckv, kpe, torch.tensor([1]), eps=0.0)
    >>> [x[1].tolist() for x in pages]
    [[[1.0, 1.0]], [[-2.0, 1.0]]]
    """
    check_latent_rows(kv_TW, weight_C, ckv_pages, kpe_pages)
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
    """All before absorbed latent attention: (u [T, N, C], q_pe [T, N, E], and both pages).

    Queries come with the key up-projection absorbed and rotated (`rotate_deinterleaved`), new rows
    are written as by `norm_rotate_write`. ValueError where shapes don't fit together.
    """
    tables, pages = (cos_TC, sin_TC), (ckv_pages, kpe_pages)
    check_prolog(x_TD, weights, tables, kpe_pages)
    parts = Parts(linear, rms_norm, rotate_deinterleaved, norm_rotate_write)
    return compose_prolog(parts, x_TD, weights, tables, pages, slots_T, eps)


def check_latent_rows(
    kv_TW: Tensor, weight_C: Tensor, ckv_pages: Tensor, kpe_pages: Tensor
) -> None:
    """ValueError where rows of latents don't fit their weight and pages."""
    widths = weight_C.shape[-1], kv_TW.shape[-1] - weight_C.shape[-1]
    if kv_TW.ndim != 2 or (ckv_pages.shape[-1], kpe_pages.shape[-1]) != widths:
        raise ValueError(
            f"norm_rotate_write: kv {tuple(kv_TW.shape)}, weight {tuple(weight_C.shape)}, pages"
            f" {tuple(ckv_pages.shape)} and {tuple(kpe_pages.shape)}; wanted kv [T, C + E], weight"
            f" [C], pages [..., C] and [..., E]"
        )
