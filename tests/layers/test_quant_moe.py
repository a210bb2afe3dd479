"""The first half of the experts' MLPs on eight-bit integers, against loops."""

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from tests.layers import slow
from tests.layers.test_primitives import draw
from tests.layers.test_quant import whole

M, E, D, F = 7, 3, 6, 4


def arguments() -> dict[str, Tensor]:
    x, w = whole(M, D), whole(E, D, 2 * F, seed=1)
    scales = draw(M).abs() / 99, draw(E, 2 * F, seed=1).abs() / 99
    return dict(x=x, w=w, x_scale=scales[0], w_scale=scales[1], counts=torch.tensor([2, 0, 4]))


def test_rows_equal_the_loop():
    a = arguments()
    q, scale = ops.quant_expert_swiglu(*a.values())
    assert (q.dtype, q.shape, scale.dtype) == (torch.int8, (M, F), torch.float32)
    for m, e in enumerate([0, 0, 2, 2, 2, 2]):
        h = [
            sum(int(a["x"][m, d]) * int(a["w"][e, d, g]) for d in range(D))
            * a["x_scale"][m].item()
            * a["w_scale"][e, g].item()
            for g in range(2 * F)
        ]
        y = [slow.swiglu(h[f], h[F + f]) for f in range(F)]
        step = max(map(abs, y)) / 127
        assert scale[m].item() == pytest.approx(step, rel=1e-6)
        assert max(abs(n - v / step) for n, v in zip(q[m].tolist(), y, strict=True)) < 0.5001
    assert (q[6].tolist(), scale[6].item()) == ([0] * F, 1.0)


def test_rows_of_zeros_and_shapes_alone():
    a = arguments()
    a["x"][1] = 0
    q, scale = ops.quant_expert_swiglu(*a.values())
    assert (q[1].tolist(), scale[1].item()) == ([0] * F, 1.0)
    meta = ops.quant_expert_swiglu(*(t.to("meta") for t in a.values()))
    assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in (q, scale)]


@pytest.mark.parametrize(
    "changed",
    [
        {"x": whole(M, D + 1)},
        {"w": whole(E, D, 2 * F).int()},
        {"w": whole(E, D, 7)},
        {"x_scale": torch.ones(M, 1)},
        {"w_scale": torch.ones(E, F)},
        {"counts": torch.tensor([2, 0])},
        {"counts": torch.tensor([2, 0, 4]).int()},
    ],
)
def test_arguments_that_do_not_fit(changed: dict[str, Tensor]):
    given = arguments() | changed
    with pytest.raises(ValueError, match=r"quant_expert_swiglu: x torch\.int8 .*wanted x int8"):
        ops.quant_expert_swiglu(*given.values())
