"""Rotations. `cos` and `sin` have a column for every dim of x, so each angle stands there twice."""

import torch
from torch import Tensor

from tests.npu.emulators.rules import FLOATS, dtypes, emulator, require


def turn_halves(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) of the two halves of the last dim."""
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def turn_pairs(x: Tensor) -> Tensor:
    """(a, b) -> (-b, a) of the neighbours of the last dim."""
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def apart(x: Tensor) -> Tensor:
    """The even dims, then the odd ones."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half") -> Tensor:
    """x cos + turn(x) sin in float32."""
    turn = {"half": turn_halves, "interleave": turn_pairs}[mode]
    return x.float() * cos.float() + turn(x.float()) * sin.float()


@emulator
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> Tensor:
    D = input.shape[-1]
    dtypes("npu_rotary_mul", FLOATS, r1, r2)
    require(input.dtype in FLOATS, "npu_rotary_mul: half or float32")
    require(rotary_mode in ("half", "interleave"), f"npu_rotary_mul: mode {rotary_mode!r}")
    require(input.ndim in (3, 4) and r1.ndim == input.ndim, "npu_rotary_mul: 3 or 4 dims, as many")
    require(r1.shape == r2.shape and r1.shape[-1] == D, "npu_rotary_mul: a column for every dim")
    require(D < 896 and D % 2 == 0, "npu_rotary_mul: an even D < 896")
    fits = all(a in (1, b) for a, b in zip(r1.shape, input.shape, strict=True))
    require(fits, f"npu_rotary_mul: {tuple(r1.shape)} does not broadcast to {tuple(input.shape)}")
    if input.ndim == 3:
        require(r1.shape[0] == input.shape[0], "npu_rotary_mul: TND takes T1D or TND")
        require(rotary_mode == "half" or r1.shape[1] == 1, "npu_rotary_mul: interleave takes T1D")
        require(input.shape[1] < 1000, "npu_rotary_mul: N < 1000")
    elif rotary_mode == "interleave":
        ones = sum(n == 1 for n in r1.shape[:-1])
        require(ones >= 2, "npu_rotary_mul: interleave takes 11SD, 1S1D or S11D")
    return rotated(input, r1, r2, rotary_mode).to(input.dtype)


@emulator
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> tuple[Tensor, Tensor]:
    dtypes("npu_apply_rotary_pos_emb", FLOATS, query, key, cos, sin)
    require(rotary_mode == "half" and layout in ("BSND", "TND"), "half, BSND or TND")
    require(query.shape[-1] in (64, 128), "npu_apply_rotary_pos_emb: D is 64 or 128")
    require(cos.shape[:-2] == query.shape[:-2] and cos.shape[-2] == 1, "cos [B, S, 1, D]")
    for x in (query, key):
        x.copy_(rotated(x, cos, sin))
    return query, key


@emulator
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtypes("npu_interleave_rope", FLOATS, x, cos, sin)
    require(x.ndim == 4 and x.shape[-1] == 64, "npu_interleave_rope: [B, N, S, 64]")
    return rotated(apart(x), cos, sin).to(x.dtype)
