"""Products of eight-bit integers: a scale for each token, and for each output of a weight (W8A8).

    s[T] = max_D |x[T, D]| / 127        q[T, D] = round(x[T, D] / s[T])
    y[T, N] = s_x[T] * s_w[N] * sum_D q_x[T, D] q_w[N, D] + bias[N]

Symmetric, there are no zero points; halves are rounded to even. What is lost is at most half a
step of a row, max |x| / 254. A scale is what integers are multiplied by to get the numbers back.

Sums of integers and what is done to them are float64 here, and rounded once. Source: vector-wise
absmax quantisation of Dettmers et al. 2022 (LLM.int8(), section 2), without its outliers.

Legend: T tokens, D model width, N outputs.
"""

import torch
from torch import Tensor

LARGEST = 127
# Below this, scales would lose bits, or be 0.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers and a scale for each row: (int8 in x's shape, float32 [...]) of x [..., D].

    A row of zeros is zeros with the scale 1, and so is one whose scale would be below the smallest
    normal float32. ValueError if x has no last dim or whole numbers.

    >>> dynamic_quant(torch.tensor([[-254.0, 127.0], [0.0, 0.0]]))
    (tensor([[-127,   64],
            [   0,    0]], dtype=torch.int8), tensor([2., 1.]))
    """
    check_floats(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    empty = without_scale(x)
    scale = (wide.abs().amax(-1) / LARGEST).float().masked_fill(empty, 1)
    return (wide / scale[..., None]).round().to(torch.int8), scale


def quant_linear(
    x_int8: Tensor,
    w_int8: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    *,
    bias: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """`linear` of numbers that are whole numbers times scales: [..., N] in `dtype`.

    x: int8 [..., D] with scales [...], weight: int8 [N, D] with scales [N], bias: [N], of floats.
    ValueError on other shapes and on other whole numbers.

    >>> x, w = torch.tensor([[3, 4]], dtype=torch.int8), torch.tensor([[1, 2]], dtype=torch.int8)
    >>> scales = torch.tensor([0.5]), torch.tensor([10.0])
    >>> quant_linear(x, w, *scales, bias=torch.tensor([1.0]), dtype=torch.float32)
    tensor([[56.]])
    """
    check_quant_linear(x_int8, w_int8, x_scale, w_scale, bias)
    y = x_int8.double() @ w_int8.double().T
    y = y * x_scale.double()[..., None] * w_scale.double()
    return (y if bias is None else y + bias.double()).to(dtype)


def without_scale(x: Tensor) -> Tensor:
    """Which rows of x are too small for a scale; NaN isn't.

    >>> without_scale(torch.tensor([[0.0], [1.0], [torch.nan]]))
    tensor([ True, False, False])
    """
    return x.abs().amax(-1).to(torch.promote_types(x.dtype, torch.float32)) < (
        LARGEST * SMALLEST_SCALE
    )


def check_floats(x: Tensor) -> None:
    """ValueError where `dynamic_quant` has nothing to quantise."""
    if not x.is_floating_point() or x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"dynamic_quant: x is {x.dtype} {tuple(x.shape)}; wanted floats [..., D]")


def check_quant_linear(
    x_int8: Tensor, w_int8: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None
) -> None:
    """ValueError where the arguments of `quant_linear` don't fit together."""
    fits = (
        x_int8.dtype == w_int8.dtype == torch.int8
        and x_int8.ndim > 0
        and w_int8.ndim == 2
        and x_int8.shape[-1] == w_int8.shape[1]
        and x_scale.shape == x_int8.shape[:-1]
        and w_scale.shape == w_int8.shape[:1]
        and (bias is None or (bias.shape == w_scale.shape and bias.is_floating_point()))
    )
    if not fits:
        given = dict(x=x_int8, weight=w_int8, x_scale=x_scale, w_scale=w_scale, bias=bias)
        shown = ", ".join(
            f"{name} {t.dtype} {tuple(t.shape)}" for name, t in given.items() if t is not None
        )
        raise ValueError(
            f"quant_linear: {shown}; wanted x int8 [..., D], weight int8 [N, D], x_scale [...],"
            f" w_scale [N] and bias [N] of floats"
        )
