"""The experts' primitive in each of its forms against a loop over floats."""

from functools import partial

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import reference_moe
from tests.layers import slow_moe

E, D, F = 5, 8, 16
expert_mlp = partial(ops.expert_mlp, activation=ops.swiglu)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def experts(num: int = E, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return draw(num, 2, F, D, seed=1, dtype=dtype), draw(num, D, F, seed=2, dtype=dtype)


@pytest.fixture(params=["counts", "static"])
def form(request, monkeypatch) -> str:
    """Both forms in eager mode: `static` is what runs in a traced graph and on other devices."""
    if request.param == "static":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return request.param


# ids of each case, of E = 5 experts; -1, 5 and 99 are no expert.
CASES = {
    "mixed": [[0, 3], [3, -1], [4, 0], [-1, 99], [3, 2], [5, 3], [0, 4]],
    "one token": [[4, 1, 2]],
    "all on one": [[2], [2], [2]],
    "none": [[-1, 5], [-1, -1]],
    "the same expert twice": [[1, 1], [4, 4]],
    "many": [[(7 * t + k * t) % 6 for k in range(3)] for t in range(40)],
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_loop(form, case):
    ids_TK = torch.tensor(CASES[case], dtype=torch.int32)
    x_TD, weights_TK = draw(len(ids_TK), D), draw(*ids_TK.shape, seed=3)
    weights_TK[(ids_TK < 0) | (ids_TK >= E)] = torch.nan
    gate_up, down = experts()
    got = expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down)
    pairs = [
        [(e, w) for e, w in zip(*row, strict=True) if 0 <= e < E]
        for row in zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)
    ]
    want = slow_moe.moe(dict(gate_up=gate_up.tolist(), down=down.tolist()), x_TD.tolist(), pairs)
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_tiles_longer_than_the_longest_are_cut(form, monkeypatch):
    monkeypatch.setattr(reference_moe, "MAX_TILE", 4)
    ids_TK = torch.tensor([[t % 2] for t in range(23)])
    x_TD, weights_TK = draw(23, D), draw(23, 1, seed=3)
    gate_up, down = experts(2)
    got = expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down)
    one_by_one = [
        expert_mlp(x_TD[t : t + 1], ids_TK[t : t + 1], weights_TK[t : t + 1], gate_up, down)
        for t in range(23)
    ]
    torch.testing.assert_close(got, torch.cat(one_by_one))


def test_no_tokens_and_no_choices_give_nothing(form):
    gate_up, down = experts()
    for T, K in ((0, 2), (3, 0)):
        ids, weights = torch.zeros(T, K, dtype=torch.int64), draw(T, K)
        assert torch.equal(expert_mlp(draw(T, D), ids, weights, gate_up, down), draw(T, D) * 0)


def test_rows_of_no_expert_and_experts_without_rows_may_hold_nan(form):
    gate_up, down = experts()
    for unused in (1, E - 1):
        gate_up[unused], down[unused] = torch.nan, torch.nan
    x_TD, ids_TK = draw(3, D), torch.tensor([[0, 3], [-1, -1], [2, -1]])
    x_TD[1] = torch.nan
    got = expert_mlp(x_TD, ids_TK, draw(3, 2), gate_up, down)
    assert got.isfinite().all() and torch.equal(got[1], torch.zeros(D).double())


def test_it_gives_equal_bits_every_time_and_whatever_the_neighbours(form):
    x_TD, weights_TK = draw(9, D, dtype=torch.float32), draw(9, 2, seed=3, dtype=torch.float32)
    ids_TK = torch.tensor([[(t * t + k) % E for k in range(2)] for t in range(9)])
    gate_up, down = experts(dtype=torch.float32)
    first = expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down)
    assert torch.equal(first, expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down))
    order = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    turned = expert_mlp(x_TD[order], ids_TK[order], weights_TK[order], gate_up, down)
    torch.testing.assert_close(turned, first[order])


def test_it_is_differentiable(form):
    ids_TK = torch.tensor([[0, 1], [2, -1], [1, 3]])
    args = draw(3, 3), draw(3, 2), draw(3, 2, 2, 3, seed=1), draw(3, 3, 2, seed=2)

    def call(x_TD, weights_TK, gate_up, down):
        return expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down)

    assert torch.autograd.gradcheck(call, [a.requires_grad_() for a in args])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_traced_graph_and_meta_tensors_give_the_same(dtype):
    """bfloat16 goes through grouped_mm there, float32 through tiles."""
    torch._dynamo.reset()
    ids_TK = torch.tensor([[0, 3, -1], [3, 4, 7], [2, -1, -1], [-1, -1, -1]])
    x_TD, weights_TK = draw(4, D).to(dtype), draw(4, 3, seed=3, dtype=torch.float32)
    gate_up, down = (w.to(dtype) for w in experts())
    args = x_TD, ids_TK, weights_TK, gate_up, down
    want = expert_mlp(*args)
    traced = torch.compile(expert_mlp, backend="aot_eager", fullgraph=True)(*args)
    assert traced.dtype == dtype
    bound = dict(rtol=2e-2, atol=0.3) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(traced, want, **bound)
    meta = expert_mlp(*(a.to("meta") for a in args))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", want.shape, dtype)


def test_in_eager_mode_only_experts_that_are_hit_are_read(monkeypatch):
    read = []
    linear = reference_moe.linear

    def recorded(x, w):
        read.append(w.data_ptr())
        return linear(x, w)

    monkeypatch.setattr(reference_moe, "linear", recorded)
    gate_up, down = experts()
    expert_mlp(draw(2, D), torch.tensor([[4, 1], [1, -1]]), draw(2, 2), gate_up, down)
    assert read == [w[e].data_ptr() for w in (gate_up, down) for e in (1, 4)]


def test_weights_and_their_sum_are_not_rounded_to_bfloat16():
    """1 + 2^-8 is 1 in bfloat16, but with 2^-8 more it is 1 + 2^-7."""
    gate_up = torch.ones(2, 2, 1, 1, dtype=torch.bfloat16)
    x, down, ids = gate_up[0, 0], gate_up[:, 0], torch.tensor([[0, 1]])
    weights = torch.tensor([[1 + 2**-8, 2**-8]])
    got = ops.expert_mlp(x, ids, weights, gate_up, down, activation=torch.mul)
    assert (got.item(), got.dtype) == (1 + 2**-7, torch.bfloat16)


@pytest.mark.parametrize(
    ("activation", "gate", "up", "want"),
    [
        (partial(ops.swiglu_clamped, limit=7.0), -10.0, -10.0, 0.003178),
        (partial(ops.swiglu_clamped, limit=7.0), 10.0, -10.0, -48.9554),
        (ops.swiglu_oai, 10.0, 10.0, 55.9996),
        (ops.swiglu_oai, 2.0, 3.0, 7.7427),
        (ops.swiglu, 50.0, -50.0, -2500.0),
        (ops.swiglu, -10.0, -10.0, 0.00454),
    ],
)
def test_activations_of_known_value(form, activation, gate, up, want):
    gate_up = torch.tensor([gate, up]).view(1, 2, 1, 1)
    one, ids, down = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1)
    got = ops.expert_mlp(one, ids, one, gate_up, down, activation=activation).item()
    assert got == pytest.approx(want, rel=1e-4)
    swapped = ops.expert_mlp(one, ids, one, gate_up.flip(1), down, activation=activation).item()
    assert (swapped == pytest.approx(got)) == (gate == up)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x_TD=torch.zeros(3, D + 1)), r"gate_up must be \[E, 2, F, D\] and down \[E, D, F\]"),
        (dict(weights_TK=torch.zeros(3, 1)), r"must both be \[T, K\]"),
        (dict(down_EDF=torch.zeros(E, F, D)), r"down \(5, 16, 8\)"),
        (dict(gate_up_ECFD=torch.zeros(E, 2 * F, D)), r"wanted x \[T, D\], ids \[T, K\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    args = dict(
        x_TD=torch.zeros(3, D),
        ids_TK=torch.zeros(3, 2, dtype=torch.int64),
        weights_TK=torch.zeros(3, 2),
        gate_up_ECFD=torch.zeros(E, 2, F, D),
        down_EDF=torch.zeros(E, D, F),
    )
    with pytest.raises(ValueError, match=message):
        expert_mlp(*{**args, **change}.values())
