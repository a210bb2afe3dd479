"""Products of eight-bit integers, against loops over floats and whole numbers."""

import math

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from tests.layers.test_primitives import assert_equal_floats, draw


def whole(*shape: int, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=numbers).to(torch.int8)


def quantised(row: list[float]) -> tuple[list[int], float]:
    """(whole numbers, scale) of a row, the scale in float32; Python rounds halves to even too."""
    scale = torch.tensor(max(map(abs, row)) / 127, dtype=torch.float32).item()
    return [round(x / scale) for x in row], scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_quantised_as_in_the_loop(dtype: torch.dtype):
    x = draw(3, 4, 50, dtype=dtype)
    q, scale = ops.dynamic_quant(x)
    assert (q.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert (q.shape, scale.shape) == ((3, 4, 50), (3, 4))
    for row, q_row, s in zip(
        x.flatten(0, 1).tolist(), q.flatten(0, 1), scale.flatten(), strict=True
    ):
        wanted, wanted_scale = quantised(row)
        assert s.item() == pytest.approx(wanted_scale, rel=1e-6)
        # The scale may be another neighbour in float32, which moves a half at most.
        assert all(abs(a - b) <= 1 for a, b in zip(q_row.tolist(), wanted, strict=True))
        assert sum(a != b for a, b in zip(q_row.tolist(), wanted, strict=True)) <= 1


def test_halves_are_rounded_to_even_and_both_ends_are_reached():
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    q, scale = ops.dynamic_quant(x)
    assert q.tolist() == [127, -127, 0, 2, 2, 0, -2]
    assert scale.item() == 1.0


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 400.0, 1e30])
def test_what_is_lost_is_half_a_step(size: float):
    x = draw(20, 64, dtype=torch.bfloat16) * size
    q, scale = ops.dynamic_quant(x)
    lost = (q.double() * scale.double()[:, None] - x.double()).abs().amax(-1)
    assert (lost <= x.double().abs().amax(-1) / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42])
def test_a_row_without_a_scale_is_zeros(value: float):
    x = torch.tensor([[value] * 3, [1.0, 2.0, 3.0]])
    q, scale = ops.dynamic_quant(x)
    assert (q[0].tolist(), scale[0].item()) == ([0, 0, 0], 1.0)
    assert torch.equal(q[1:], ops.dynamic_quant(x[1:])[0])


def test_nan_stays_nan():
    _, scale = ops.dynamic_quant(torch.tensor([[1.0, math.nan], [1.0, 2.0]]))
    assert scale.isnan().tolist() == [True, False]


def test_products_equal_the_loop():
    x, w = whole(2, 3, 11), whole(5, 11, seed=1)
    x_scale, w_scale, bias = draw(2, 3).abs(), draw(5, seed=1).abs(), draw(5, seed=2)
    for b in (bias, None):
        got = ops.quant_linear(x, w, x_scale, w_scale, bias=b, dtype=torch.float64)
        want = [
            [
                [
                    sum(int(x[i, j, d]) * int(w[n, d]) for d in range(11))
                    * x_scale[i, j].item()
                    * w_scale[n].item()
                    + (0.0 if b is None else b[n].item())
                    for n in range(5)
                ]
                for j in range(3)
            ]
            for i in range(2)
        ]
        assert_equal_floats(got, want)


def test_long_sums_are_exact():
    """127 * 127 * 5001 is odd and above 2 ** 24: float32 would lose its last bit."""
    x = torch.full((1, 5001), 127, dtype=torch.int8)
    one = torch.ones(1)
    y = ops.quant_linear(x, x, one, one, dtype=torch.float64)
    assert y.item() == 127 * 127 * 5001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_has_the_wanted_dtype_and_is_rounded_once(dtype: torch.dtype):
    x, w, scales = whole(3, 11), whole(5, 11, seed=1), (draw(3).abs() / 99, draw(5).abs() / 99)
    bias = draw(5, dtype=torch.bfloat16)
    exact = ops.quant_linear(x, w, *scales, bias=bias, dtype=torch.float64)
    y = ops.quant_linear(x, w, *scales, bias=bias, dtype=dtype)
    assert torch.equal(y, exact.to(dtype))
    parts = [t.to("meta") for t in (x, w, *scales)]
    meta = ops.quant_linear(*parts, dtype=dtype)
    assert (meta.shape, meta.dtype) == (y.shape, dtype)


def test_a_small_part_under_its_own_scales_keeps_its_bits():
    """Gate and up in one matrix: a scale for each row loses nothing, one of both does."""
    x, gate, up = draw(8, 64), draw(16, 64, seed=1), draw(16, 64, seed=2) / 100
    rows = ops.dynamic_quant(x)

    def product(q_w: Tensor, w_scale: Tensor) -> Tensor:
        return ops.quant_linear(rows[0], q_w, rows[1], w_scale, dtype=torch.float64)

    both, apart = torch.cat([gate, up]), [product(*ops.dynamic_quant(w)) for w in (gate, up)]
    fine = product(*ops.dynamic_quant(both))
    assert torch.equal(fine, torch.cat(apart, -1))
    step = both.abs().max() / 127
    coarse = product((both / step).round().to(torch.int8), step.expand(32).float())
    wanted = x @ both.T
    far = [
        (y - wanted)[:, 16:].norm() / wanted[:, 16:].norm() for y in (torch.cat(apart, -1), coarse)
    ]
    assert far[0] < 0.02 < 0.1 < far[1]


@pytest.mark.parametrize("x", [whole(2, 3), torch.tensor(1.0), torch.ones(2, 0)])
def test_nothing_to_quantise(x: Tensor):
    with pytest.raises(ValueError, match=r"dynamic_quant: x is torch\.\w+ \(.*wanted floats"):
        ops.dynamic_quant(x)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": whole(2, 3).int()},
        {"x": whole(2, 4)},
        {"w": torch.ones(5, 3)},
        {"w": whole(3)},
        {"x_scale": torch.ones(2, 1)},
        {"w_scale": torch.ones(5, 1)},
        {"bias": torch.ones(1)},
        {"bias": torch.ones(5).int()},
    ],
)
def test_products_that_do_not_fit(changed: dict[str, Tensor]):
    given = dict(x=whole(2, 3), w=whole(5, 3), x_scale=torch.ones(2), w_scale=torch.ones(5))
    given |= changed
    bias = given.pop("bias", None)
    with pytest.raises(ValueError, match=r"quant_linear: x torch\.\w+ \(.*wanted x int8"):
        ops.quant_linear(*given.values(), bias=bias, dtype=torch.float32)
