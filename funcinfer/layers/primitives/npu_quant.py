"""Quantised products by torch_npu: npu_dynamic_quant, npu_quant_matmul and, for experts,
npu_grouped_matmul_swiglu_quant_v2.

What the ops make of a row of zeros isn't documented (0 / 0). Such rows are replaced, whatever came.
"""

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference_quant, reference_quant_moe
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.npu_layout import FRACTAL_NZ
from funcinfer.layers.primitives.npu_moe import COUNTS
from funcinfer.layers.primitives.reference_quant import (
    SMALLEST_SCALE,
    check_floats,
    check_quant_linear,
    without_scale,
)
from funcinfer.layers.primitives.reference_quant_moe import check_quant_experts


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_quant.dynamic_quant`."""
    check_floats(x)
    if choice("dynamic_quant", x).form is None:
        return reference_quant.dynamic_quant(x)
    q, scale = torch.ops.npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1]))
    empty = without_scale(x)
    q = q.view(x.shape).masked_fill(empty[..., None], 0)
    return q, scale.view(empty.shape).masked_fill(empty, 1)


def quant_linear(
    x_int8: Tensor,
    w_int8: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference_quant.quant_linear`; the op takes a weight [D, N], strided too, and a
    bias of float32 whatever the result is.
    """
    args, settings = (x_int8, w_int8, x_scale, w_scale), dict(bias=bias, dtype=dtype)
    check_quant_linear(*args, bias)
    if choice("quant_linear", *args, **settings).form is None:
        return reference_quant.quant_linear(*args, bias=bias, dtype=dtype)
    y = torch.ops.npu.npu_quant_matmul(
        x_int8.reshape(-1, x_int8.shape[-1]),
        w_int8.T,
        w_scale.float(),
        pertoken_scale=x_scale.reshape(-1).float(),
        bias=None if bias is None else bias.float(),
        output_dtype=dtype,
    )
    return y.view(*x_int8.shape[:-1], len(w_scale))


def quant_expert_swiglu(
    x_MD: Tensor, w_EDG: Tensor, x_scale_M: Tensor, w_scale_EG: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference_quant_moe.quant_expert_swiglu`; the op takes weights in FRACTAL_NZ alone, and
    the cast copies them where they aren't yet.
    """
    args = (x_MD, w_EDG, x_scale_M, w_scale_EG, counts_E)
    check_quant_experts(*args)
    if choice("quant_expert_swiglu", *args).form is None:
        return reference_quant_moe.quant_expert_swiglu(*args)
    q, scale = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        x_MD.contiguous(),
        [torch.ops.npu.npu_format_cast(w_EDG.contiguous(), FRACTAL_NZ)],
        [w_scale_EG],
        x_scale_M.float(),
        counts_E,
        group_list_type=COUNTS,
    )
    undefined = torch.arange(len(q), device=q.device) >= counts_E.sum()
    # Not below: a scale of zeros may be NaN. But one that is NaN because x's is stays so.
    empty = ~(scale >= SMALLEST_SCALE) & ~x_scale_M.isnan() | undefined
    return q.masked_fill(empty[:, None], 0), scale.masked_fill(empty, 1)
