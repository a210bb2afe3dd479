"""The first half of the experts' MLPs on eight-bit integers: product, SwiGLU, quantised again.

    h[M, G] = s_x[M] * s_w[e, G] * sum_D q_x[M, D] q_w[e, D, G]       e: the expert of row M
    a[M, F] = silu(h[M, :F]) * h[M, F:]                               the gate is the first half
    (int8 [M, F], scale [M]) = dynamic_quant(a)

Rows are sorted by expert. Float64 inside, as in `reference_quant`.

Legend: M rows, E experts, D model width, F width of an expert, G = 2 F.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from funcinfer.layers.primitives.reference_quant import dynamic_quant


def quant_expert_swiglu(
    x_MD: Tensor, w_EDG: Tensor, x_scale_M: Tensor, w_scale_EG: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    """What the second product of the experts takes: (int8 [M, F], float32 scales [M]).

    x, w: int8, counts: int64, how many rows each expert has; rows after the last expert's are
    zeros with the scale 1. Counts are read by the host. ValueError where shapes or dtypes don't
    fit together.

    >>> x, w = torch.full((2, 1), 10, dtype=torch.int8), torch.ones(1, 1, 2, dtype=torch.int8)
    >>> quant_expert_swiglu(x, w, torch.ones(2), torch.ones(1, 2), torch.tensor([1]))[0]
    tensor([[127],
            [  0]], dtype=torch.int8)
    """
    check_quant_experts(x_MD, w_EDG, x_scale_M, w_scale_EG, counts_E)
    h_MG = x_MD.new_zeros(x_MD.shape[0], w_EDG.shape[2], dtype=torch.float64)
    if x_MD.device.type != "meta":
        ends = counts_E.cumsum(0).tolist()
        for e, (start, end) in enumerate(pairwise([0, *ends])):
            product = x_MD[start:end].double() @ w_EDG[e].double()
            h_MG[start:end] = product * x_scale_M[start:end, None].double() * w_scale_EG[e].double()
    gate, up = h_MG.chunk(2, -1)
    return dynamic_quant(silu(gate) * up)


def check_quant_experts(
    x_MD: Tensor, w_EDG: Tensor, x_scale_M: Tensor, w_scale_EG: Tensor, counts_E: Tensor
) -> None:
    """ValueError where the arguments of `quant_expert_swiglu` don't fit together."""
    fits = (
        x_MD.dtype == w_EDG.dtype == torch.int8
        and counts_E.dtype == torch.int64
        and (x_MD.ndim, w_EDG.ndim) == (2, 3)
        and x_MD.shape[1] == w_EDG.shape[1]
        and w_EDG.shape[2] > 0
        and w_EDG.shape[2] % 2 == 0
        and x_scale_M.shape == x_MD.shape[:1]
        and w_scale_EG.shape == (w_EDG.shape[0], w_EDG.shape[2])
        and counts_E.shape == w_EDG.shape[:1]
    )
    if not fits:
        given = dict(x=x_MD, w=w_EDG, x_scale=x_scale_M, w_scale=w_scale_EG, counts=counts_E)
        shown = ", ".join(f"{name} {t.dtype} {tuple(t.shape)}" for name, t in given.items())
        raise ValueError(
            f"quant_expert_swiglu: {shown}; wanted x int8 [M, D], w int8 [E, D, 2 F], x_scale [M],"
            f" w_scale [E, 2 F] and counts int64 [E]"
        )
