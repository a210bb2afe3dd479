"""Norms, activations, and the filter of logits."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.npu.emulators.rules import FLOATS, dtypes, emulator, require


def normalised(x: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x * rstd * gamma in float32, rstd): the mean is over as many dims as gamma has."""
    dims = tuple(range(-gamma.ndim, 0))
    require(x.shape[x.ndim - gamma.ndim :] == gamma.shape, "gamma has the last dims of x")
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + eps)
    return x.float() * rstd * gamma.float(), rstd


@emulator
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    require(input.dtype in FLOATS and gamma.dtype in FLOATS, "npu_rms_norm: half or float32")
    y, rstd = normalised(input, gamma, epsilon)
    return y.to(input.dtype), rstd


@emulator
def npu_rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    x, g, scaled = input.float(), gamma.float(), input.float() * rstd
    dims = tuple(range(-gamma.ndim, 0))
    through = dy.float() * g
    dx = rstd * (through - scaled * (through * scaled).mean(dims, keepdim=True))
    dgamma = (dy.float() * scaled).sum(tuple(range(x.ndim - gamma.ndim)))
    return dx.to(input.dtype), dgamma


@emulator
def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dtypes("npu_gemma_rms_norm", FLOATS, input, gamma)
    y, rstd = normalised(input, 1 + gamma.float(), epsilon)
    return y.to(input.dtype), rstd


@emulator
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtypes("npu_add_rms_norm", FLOATS, x1, x2, gamma)
    require(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 of one shape")
    x = x1 + x2
    y, rstd = normalised(x, gamma, epsilon)
    return y.to(x.dtype), rstd, x


@emulator
def npu_swiglu(input: Tensor, dim: int) -> Tensor:
    require(input.shape[dim] % 2 == 0, "npu_swiglu: an even number of columns")
    gate, up = input.float().chunk(2, dim)
    return (silu(gate) * up).to(input.dtype)


@emulator
def npu_clipped_swiglu(
    x: Tensor, dim: int, alpha: float, limit: float, bias: float, interleaved: bool
) -> Tensor:
    require(x.shape[dim] % 2 == 0, "npu_clipped_swiglu: an even number of columns")
    wide = x.float().movedim(dim, -1)
    gate, up = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    y = gate * torch.sigmoid(alpha * gate) * (up + bias)
    return y.to(x.dtype).movedim(-1, dim).contiguous()


@emulator
def npu_top_k_top_p(logits: Tensor, p: Tensor | None, k: Tensor | None) -> Tensor:
    dtypes("npu_top_k_top_p", FLOATS, logits, p)
    require(logits.ndim == 2, "npu_top_k_top_p: logits [B, V]")
    value, order = logits.float().sort(dim=-1, stable=True)
    if k is not None:
        require(k.dtype == torch.int32, "npu_top_k_top_p: k is int32")
        require(k.min() >= 1 and k.max() <= min(1024, logits.shape[1]), "k in 1 ... min(1024, V)")
        least = value.gather(1, (logits.shape[1] - k.long())[:, None])
        value = value.masked_fill(value < least, -torch.inf)
    if p is not None:
        drop = value.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        drop[:, -1] = False
        value = value.masked_fill(drop, -torch.inf)
    return torch.empty_like(value).scatter(1, order, value).to(logits.dtype)
