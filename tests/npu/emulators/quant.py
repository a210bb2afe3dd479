"""Eight-bit integers: a scale for each token, and for each output column of a weight."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.npu.emulators.moe import group_bounds
from tests.npu.emulators.rules import FLOATS, HALF, dtypes, emulator, lifted, nothing, require


def _per_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, scale): scale = max |x| / 127. A row of zeros is undefined: 0 and NaN here."""
    scale = x.abs().amax(-1) / 127
    q = (x / scale[..., None]).round().clamp(-128, 127).nan_to_num(0.0)
    return q.to(torch.int8), scale.masked_fill(scale == 0, torch.nan)


@emulator
def npu_dynamic_quant(
    input: Tensor, smooth_scales: Tensor | None, dst_type: int | None, quant_mode: str
) -> tuple[Tensor, Tensor]:
    name = "npu_dynamic_quant"
    dtypes(name, HALF, input, smooth_scales)
    require(input.ndim > 1, f"{name}: 2 dims or more")
    require(dst_type in (None, 1, torch.int8), f"the emulator of {name} knows int8")
    require(quant_mode == "pertoken", f"the emulator of {name} knows pertoken")
    x = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
    return _per_row(x)


@emulator
def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int,
    div_mode: bool,
) -> Tensor:
    require(axis in (-1, input.ndim - 1), "the emulator of npu_quantize scales the last dim")
    x = input.float() / scales.float() if div_mode else input.float() * scales.float()
    x = x if zero_points is None else x + zero_points.float()
    return x.round().clamp(-128, 127).to(torch.int8)


@emulator
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
) -> Tensor:
    name = "npu_quant_matmul"
    dtypes(name, (torch.int8,), x1, x2)
    require(x1.shape[-1] == x2.shape[-2], f"{name}: x1 [.., K] and x2 [K, N]")
    require(max(x1.shape[-1], x2.shape[-1]) < 65536, f"{name}: last dims below 65536")
    require(scale.ndim == 1 and scale.shape[0] in (1, x2.shape[-1]), f"{name}: scale [1] or [N]")
    out_dtype = _dtype(output_dtype)
    require(out_dtype not in FLOATS or out_dtype in HALF or lifted(), f"{name}: gives no float32")
    if pertoken_scale is not None:
        rows = (torch.float32, x1.shape[-2:-1])
        require((pertoken_scale.dtype, pertoken_scale.shape) == rows, f"{name}: pertoken_scale [M]")
        biases = (torch.int32, torch.bfloat16, torch.float32)
        require(bias is None or bias.dtype in biases, f"{name}: no bias of {bias}")
    if out_dtype == torch.float16:
        require(pertoken_scale is not None, f"{name}: float16 takes a scale for each token")
    total = (x1.double() @ x2.double()).float()
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.float()
    y = total * scale.float()
    if pertoken_scale is not None:
        require(out_dtype != torch.int8, f"{name}: int8 without a scale for each token")
        y = y * pertoken_scale.float()[:, None]
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.float()
    if out_dtype == torch.int8:
        y = y if offset is None else y + offset.float()
        return y.round().clamp(-128, 127).to(torch.int8)
    return y.to(out_dtype)


def _dtype(code: int | torch.dtype | None) -> torch.dtype:
    names = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
    return code if isinstance(code, torch.dtype) else names[code or 1]


@emulator
def npu_grouped_matmul_swiglu_quant(
    x: Tensor, weight: Tensor, group_list: Tensor, weight_scale: Tensor, x_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return *_by_groups(x, weight, weight_scale, x_scale, group_list, 0), nothing().sum()


@emulator
def npu_grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    group_list_type: int | None,
) -> tuple[Tensor, Tensor]:
    name = "npu_grouped_matmul_swiglu_quant_v2"
    require(len(weight) == len(weight_scale) == 1, f"{name}: one weight")
    (E, K, N), wide = weight[0].shape, weight_scale[0]
    require(1 <= E <= 1024 and K < 65536 and N <= 10240, f"{name}: {E} weights [{K}, {N}]")
    require(K % 16 == 0 and N % 32 == 0, f"{name}: FRACTAL_NZ of [{K}, {N}]")
    require(wide.shape == (E, N) and wide.dtype in FLOATS, f"{name}: weight_scale [E, N]")
    require(x_scale.shape == x.shape[:1] and x_scale.dtype == torch.float32, f"{name}: x_scale [M]")
    require(len(group_list) == E, f"{name}: a group for each weight")
    return _by_groups(x, weight[0], wide, x_scale, group_list, group_list_type or 0)


def _by_groups(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor, groups: Tensor, kind: int
) -> tuple[Tensor, Tensor]:
    """Rows past the last group are undefined."""
    dtypes("npu_grouped_matmul_swiglu_quant", (torch.int8,), x, weight)
    require(groups.dtype == torch.int64, "npu_grouped_matmul_swiglu_quant: group_list is int64")
    rows = torch.full((x.shape[0], weight.shape[2]), torch.nan)
    for e, (start, end) in enumerate(group_bounds(groups, kind, x.shape[0])):
        part = (x[start:end].double() @ weight[e].double()).float()
        rows[start:end] = part * weight_scale[e].float() * x_scale[start:end, None].float()
    gate, up = rows.chunk(2, -1)
    return _per_row(silu(gate) * up)


@emulator
def npu_swiglu_quant(
    x: Tensor, smooth_scales: Tensor | None, activate_left: bool, quant_mode: int
) -> tuple[Tensor, Tensor]:
    require(quant_mode == 1, "the emulator of npu_swiglu_quant quantises by token")
    a, b = x.float().chunk(2, -1)
    y = silu(a) * b if activate_left else silu(b) * a
    return _per_row(y if smooth_scales is None else y * smooth_scales.float())


@emulator
def npu_dequant_swiglu_quant(
    x: Tensor,
    weight_scale: Tensor | None,
    activation_scale: Tensor | None,
    quant_scale: Tensor | None,
    activate_left: bool,
    quant_mode: int,
) -> tuple[Tensor, Tensor]:
    name = "npu_dequant_swiglu_quant"
    require(quant_mode == 1, f"the emulator of {name} quantises by token")
    wide = x.float()
    if x.dtype == torch.int32:
        require(weight_scale is not None, f"{name}: int32 takes a scale for each column")
        assert weight_scale is not None
        wide = wide * weight_scale.float()
    if activation_scale is not None:
        wide = wide * activation_scale.float().reshape(-1, 1)
    a, b = wide.chunk(2, -1)
    y = silu(a) * b if activate_left else silu(b) * a
    return _per_row(y if quant_scale is None else y * quant_scale.float())
