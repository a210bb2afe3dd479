"""Norms, activations, rotations and the choice of back end, against loops over floats."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import reference
from tests.layers import slow

EPS = 1e-3


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype) * 1.7


def assert_equal_floats(got: Tensor, want: object) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-12, atol=1e-12)


X, W, B = draw(3, 5, 7), draw(7, seed=1), draw(7, seed=2)


# ---- norms


def test_norms_equal_the_loops():
    rows = X.flatten(0, 1).tolist()
    w, b = W.tolist(), B.tolist()
    unit = [slow.rms(row, EPS) for row in rows]
    plain = [[x * y for x, y in zip(row, w, strict=True)] for row in unit]
    one_plus = [[x * (1 + y) for x, y in zip(row, w, strict=True)] for row in unit]
    centred = [slow.layer_norm(row, w, b, EPS) for row in rows]
    for got, want in [
        (ops.rms(X, eps=EPS), unit),
        (ops.rms_norm(X, W, eps=EPS), plain),
        (ops.rms_norm_fp32_weight(X, W, eps=EPS), plain),
        (ops.rms_norm_one_plus(X, W, eps=EPS), one_plus),
        (ops.layer_norm(X, W, B, eps=EPS), centred),
    ]:
        assert_equal_floats(got.flatten(0, 1), want)


def test_norms_round_where_they_say():
    """Cast, then weight: two roundings to bf16. Weight, then cast: one. In float32 they agree."""
    x, w = draw(50, 7, dtype=torch.bfloat16), draw(7, seed=1, dtype=torch.bfloat16)
    exact = (x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()).float()
    before, after = ops.rms_norm(x, w, eps=EPS), ops.rms_norm_fp32_weight(x, w, eps=EPS)
    assert torch.equal(before, exact.bfloat16() * w)
    assert torch.equal(after, (exact * w.float()).bfloat16())
    assert not torch.equal(before, after)
    one_plus = ops.rms_norm_one_plus(x, w, eps=EPS)
    assert torch.equal(one_plus, (exact * (1 + w.float())).bfloat16())


def test_one_plus_keeps_small_weights():
    x = torch.full((1, 4), 512.0, dtype=torch.bfloat16)
    w = torch.full((4,), 1e-3, dtype=torch.bfloat16)
    assert (1 + w).eq(1).all()  # what forming the sum in bf16 would lose
    wide = ops.rms_norm_one_plus(x.float(), w, eps=0.0)
    assert (wide - 1.001).abs().max() < 1e-5
    assert ops.rms_norm_one_plus(x, torch.zeros(4), eps=0.0).eq(1).all()


def test_conventions_of_norms_differ():
    results = [
        ops.rms_norm(X, W, eps=EPS),
        ops.rms_norm_one_plus(X, W, eps=EPS),
        ops.rms(X, eps=EPS),
        ops.rms_norm(X, W, eps=1e-6),
        ops.layer_norm(X, W, torch.zeros(7), eps=EPS),
    ]
    for i, one in enumerate(results):
        assert not any(torch.allclose(one, other, atol=1e-4) for other in results[:i])


def test_norm_of_large_and_tiny_values_is_finite():
    x = torch.tensor([[200.0, -60000.0, 3.0]], dtype=torch.float16)
    assert ops.rms(x, eps=1e-6).isfinite().all()  # the square overflows float16
    assert ops.rms(torch.zeros(1, 3, dtype=torch.float16), eps=1e-6).eq(0).all()
    assert ops.rms(torch.full((1, 3), 1e-9), eps=1e-20).isfinite().all()


# ---- activations


@pytest.mark.parametrize(
    ("op", "loop"),
    [
        (ops.swiglu, slow.swiglu),
        (
            lambda g, u: ops.swiglu_clamped(g, u, limit=0.9),
            lambda g, u: slow.swiglu_clamped(g, u, 0.9),
        ),
        (ops.swiglu_oai, lambda g, u: slow.swiglu_oai(g, u, 7.0, 1.702)),
        (
            lambda g, u: ops.swiglu_oai(g, u, limit=0.9, alpha=0.8),
            lambda g, u: slow.swiglu_oai(g, u, 0.9, 0.8),
        ),
    ],
)
def test_activations_equal_the_loops(op, loop):
    gate, up = 4 * draw(11, 3), 4 * draw(11, 3, seed=1)
    want = [
        [loop(g, u) for g, u in zip(*rows, strict=True)]
        for rows in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert_equal_floats(op(gate, up), want)
    assert not torch.allclose(op(up, gate), op(gate, up))


def test_activations_by_hand():
    minus, plus = torch.tensor([-10.0]), torch.tensor([10.0])
    assert ops.swiglu_clamped(minus, minus, limit=7.0).item() == pytest.approx(0.003178, abs=5e-7)
    assert ops.swiglu_clamped(plus, plus, limit=7.0).item() == pytest.approx(48.9554, abs=5e-5)
    assert ops.swiglu_oai(plus, plus).item() == pytest.approx(55.9996, abs=5e-5)
    far = torch.tensor([50.0, -50.0])
    clamped = ops.swiglu_clamped(far, far, limit=torch.inf)
    assert torch.equal(clamped, ops.swiglu(far, far))


def test_activations_are_rounded_once():
    gate, up = (draw(64, 5, seed=s, dtype=torch.bfloat16) for s in (1, 2))
    exact = gate.double() * gate.double().sigmoid() * up.double()
    assert torch.equal(ops.swiglu(gate, up), exact.float().bfloat16())


# ---- rotations

ANGLES = 3 * draw(5, 3, seed=4)
ROTATIONS = [
    (ops.rotate_half_split, slow.half_split_pairs),
    (ops.rotate_interleaved, slow.interleaved_pairs),
]


@pytest.mark.parametrize(("rotate", "pairs"), ROTATIONS)
@pytest.mark.parametrize("head_dim", [6, 7, 10])
def test_rotations_equal_the_loops(rotate, pairs, head_dim):
    x = draw(5, 3, head_dim)
    got = rotate(x, ANGLES.cos(), ANGLES.sin())
    want = [
        [slow.rotate(head, angles, pairs(6)) for head in heads]
        for heads, angles in zip(x.tolist(), ANGLES.tolist(), strict=True)
    ]
    assert_equal_floats(got, want)
    assert torch.equal(got[..., 6:], x[..., 6:])
    assert torch.equal(rotate(x[:, 1], ANGLES.cos(), ANGLES.sin()), got[:, 1])
    assert (got[..., :6] != x[..., :6]).all()


@pytest.mark.parametrize(("rotate", "pairs"), ROTATIONS)
def test_rotations_undo_and_add_up(rotate, pairs):
    x = draw(5, 3, 8)
    there = rotate(x, ANGLES.cos(), ANGLES.sin())
    torch.testing.assert_close(rotate(there, ANGLES.cos(), -ANGLES.sin()), x)
    twice = rotate(there, ANGLES.cos(), ANGLES.sin())
    torch.testing.assert_close(twice, rotate(x, (2 * ANGLES).cos(), (2 * ANGLES).sin()))


def test_rotations_differ_by_a_permutation():
    x = draw(5, 3, 6)
    tables = ANGLES.cos(), ANGLES.sin()
    half, pairs = ops.rotate_half_split(x, *tables), ops.rotate_interleaved(x, *tables)
    assert not torch.allclose(half, pairs)
    to_pairs = torch.tensor([0, 3, 1, 4, 2, 5])
    torch.testing.assert_close(
        ops.rotate_half_split(x, *tables)[..., to_pairs],
        ops.rotate_interleaved(x[..., to_pairs], *tables),
    )


@pytest.mark.parametrize("head_dim", [6, 9])
def test_the_deinterleaved_rotation_is_the_loop_in_another_order(head_dim: int):
    x, order = draw(5, 3, head_dim), [0, 2, 4, 1, 3, 5, *range(6, head_dim)]
    turned = [
        [slow.rotate(head, angles, slow.interleaved_pairs(6)) for head in heads]
        for heads, angles in zip(x.tolist(), ANGLES.tolist(), strict=True)
    ]
    want = [[[head[i] for i in order] for head in heads] for heads in turned]
    assert_equal_floats(ops.rotate_deinterleaved(x, ANGLES.cos(), ANGLES.sin()), want)
    one = ops.rotate_deinterleaved(x[:, 1], ANGLES.cos(), ANGLES.sin())
    assert_equal_floats(one, [heads[1] for heads in want])


def test_latents_are_normed_rotated_and_written():
    kv, w, slots = draw(3, 5 + 4), draw(5, seed=1), [3, 0, 5]
    angles = ANGLES[:3, :2]
    ckv, kpe = draw(3, 2, 5, seed=2), draw(3, 2, 4, seed=3)
    want_ckv, want_kpe = ckv.flatten(0, 1).tolist(), kpe.flatten(0, 1).tolist()
    for row, angle, slot in zip(kv.tolist(), angles.tolist(), slots, strict=True):
        unit = slow.rms(row[:5], EPS)
        want_ckv[slot] = [x * y for x, y in zip(unit, w.tolist(), strict=True)]
        turned = slow.rotate(row[5:], angle, slow.interleaved_pairs(4))
        want_kpe[slot] = [turned[i] for i in (0, 2, 1, 3)]
    want_ckv[0], want_kpe[0] = [0.0] * 5, [0.0] * 4
    tables, pages = (angles.cos(), angles.sin()), (ckv, kpe)
    found = ops.norm_rotate_write(kv, w, *tables, *pages, torch.tensor(slots), eps=EPS)
    assert (found[0] is ckv, found[1] is kpe) == (True, True)
    assert_equal_floats(ckv.flatten(0, 1), want_ckv)
    assert_equal_floats(kpe.flatten(0, 1), want_kpe)
    with pytest.raises(ValueError, match=r"norm_rotate_write: kv \(3, 9\), weight \(4,\)"):
        ops.norm_rotate_write(kv, w[:4], *tables, *pages, torch.tensor(slots), eps=EPS)


def test_rotations_happen_in_the_input_dtype():
    x, cos, sin = draw(5, 3, 6, dtype=torch.bfloat16), ANGLES.cos().float(), ANGLES.sin().float()
    a, b = x[..., :3], x[..., 3:]
    cos_low, sin_low = cos[:, None].bfloat16(), sin[:, None].bfloat16()
    want = torch.cat([a * cos_low - b * sin_low, b * cos_low + a * sin_low], -1)
    assert torch.equal(ops.rotate_half_split(x, cos, sin), want)
    assert ops.rotate_interleaved(x, cos, sin).dtype == torch.bfloat16


# ---- every op: dtypes, devices, gradients, tracing


def calls(dtype: torch.dtype) -> dict[str, tuple]:
    """name -> (function of tensors, tensors)"""
    x, y, w = draw(5, 3, 6, dtype=dtype), draw(5, 3, 6, seed=1, dtype=dtype), draw(6, dtype=dtype)
    cos, sin = (ANGLES + 0.1).cos().to(dtype), (ANGLES + 0.1).sin().to(dtype)
    return {
        "rms": (lambda x: ops.rms(x, eps=EPS), (x,)),
        "rms_norm": (lambda x, w: ops.rms_norm(x, w, eps=EPS), (x, w)),
        "add_rms_norm": (lambda x, w: ops.add_rms_norm(x, x.flip(0), w, eps=EPS)[0], (x, w)),
        "rms_norm_fp32_weight": (lambda x, w: ops.rms_norm_fp32_weight(x, w, eps=EPS), (x, w)),
        "rms_norm_one_plus": (lambda x, w: ops.rms_norm_one_plus(x, w, eps=EPS), (x, w)),
        "layer_norm": (lambda x, w, b: ops.layer_norm(x, w, b, eps=EPS), (x, w, y[0, 0])),
        "swiglu": (ops.swiglu, (x, y)),
        "swiglu_clamped": (lambda g, u: ops.swiglu_clamped(g, u, limit=1.0), (x, y)),
        "swiglu_oai": (lambda g, u: ops.swiglu_oai(g, u, limit=1.0), (x, y)),
        "rotate_half_split": (ops.rotate_half_split, (x, cos, sin)),
        "rotate_interleaved": (ops.rotate_interleaved, (x, cos, sin)),
        "rotate_deinterleaved": (ops.rotate_deinterleaved, (x, cos, sin)),
    }


@pytest.mark.parametrize("name", calls(torch.float32))
def test_results_have_the_input_dtype_on_every_device(name):
    exact = calls(torch.float64)[name]
    want = exact[0](*exact[1])
    for dtype, tolerance in [(torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 1e-1)]:
        op, tensors = calls(dtype)[name]
        got = op(*tensors)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        meta = op(*(x.to("meta") for x in tensors))
        assert (meta.device.type, meta.shape, meta.dtype) == ("meta", got.shape, dtype)


@pytest.mark.parametrize("name", calls(torch.float32))
def test_a_wide_weight_does_not_widen_the_result(name):
    op, (x, *others) = calls(torch.bfloat16)[name]
    assert op(x, *(other.float() for other in others)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", calls(torch.float32))
def test_gradients(name):
    op, tensors = calls(torch.float64)[name]
    assert torch.autograd.gradcheck(op, tuple(x.requires_grad_() for x in tensors))


@pytest.mark.parametrize("name", calls(torch.float32))
def test_ops_trace(name):
    torch.compiler.reset()
    op, tensors = calls(torch.bfloat16)[name]
    compiled = torch.compile(lambda *xs: op(*xs), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), op(*tensors))


# ---- choice of back end


def fake_backend(**functions) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(reference), **functions})


def test_back_end_is_chosen_by_the_first_tensor(monkeypatch):
    monkeypatch.setitem(ops.BACKENDS, "meta", fake_backend(rms=lambda x, *, eps: "meta's own"))
    assert ops.rms(X.to("meta"), eps=EPS) == "meta's own"
    assert ops.rms(x=X.to("meta"), eps=EPS) == "meta's own"
    assert torch.equal(ops.rms(x=X, eps=EPS), reference.rms(X, eps=EPS))
    with ops.force_reference():
        assert ops.rms(X.to("meta"), eps=EPS).shape == X.shape


def test_forcing_the_reference_nests_ends_and_stays_in_its_thread(monkeypatch):
    monkeypatch.setitem(ops.BACKENDS, "cpu", fake_backend(rms=lambda x, *, eps: "other"))
    elsewhere = []
    with ops.force_reference():
        with ops.force_reference():
            pass
        assert isinstance(ops.rms(X, eps=EPS), Tensor)
        thread = threading.Thread(target=lambda: elsewhere.append(ops.rms(X, eps=EPS)))
        thread.start()
        thread.join()
    assert elsewhere == ["other"]
    assert ops.rms(X, eps=EPS) == "other"
    with pytest.raises(RuntimeError, match="inside"), ops.force_reference():
        raise RuntimeError("inside")
    assert ops.rms(X, eps=EPS) == "other"


def test_a_compiled_function_follows_the_choice(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setitem(ops.BACKENDS, "cpu", fake_backend(rms=lambda x, *, eps: x + 5))
    compiled = torch.compile(lambda x: ops.rms(x, eps=EPS), fullgraph=True, backend="eager")
    assert torch.equal(compiled(X), X + 5)
    with ops.force_reference():
        assert torch.equal(compiled(X), reference.rms(X, eps=EPS))
    assert torch.equal(compiled(X), X + 5)


def test_every_back_end_has_every_op():
    names = set(reference.__all__)
    assert names <= set(ops.__all__)
    for backend in ops.BACKENDS.values():
        assert names <= set(dir(backend))


# ---- messages


def test_unknown_device(monkeypatch):
    monkeypatch.delitem(ops.BACKENDS, "meta")
    with pytest.raises(ValueError, match=r"device type 'meta'; there are \['cpu', 'cuda', 'npu'\]"):
        ops.rms(X.to("meta"), eps=EPS)
    with pytest.raises(TypeError, match="first argument is float; it must be the tensor"):
        ops.rms(1.0, eps=EPS)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_fp32_weight", "rms_norm_one_plus"])
def test_weights_of_another_size(name):
    with pytest.raises(ValueError, match=rf"{name}: weight of shape \(1,\) .* last dim: \(7,\)"):
        getattr(ops, name)(X, W[:1], eps=EPS)


def test_layer_norm_bias_of_another_size():
    with pytest.raises(ValueError, match=r"layer_norm: weight of shape \(6,\)"):
        ops.layer_norm(X, W, B[:6], eps=EPS)


@pytest.mark.parametrize(
    "op", [ops.swiglu, lambda g, u: ops.swiglu_clamped(g, u, limit=1.0), ops.swiglu_oai]
)
def test_gate_and_up_of_different_sizes(op):
    with pytest.raises(ValueError, match=r"gate has shape \(3, 5, 7\) and up \(5, 7\)"):
        op(X, X[0])


@pytest.mark.parametrize(
    ("x", "cos", "sin"),
    [
        (draw(5, 2, 5), ANGLES, ANGLES),  # tables wider than the head
        (draw(4, 2, 6), ANGLES, ANGLES),  # another number of tokens
        (draw(5, 2, 6), ANGLES, ANGLES[:, :2]),
        (draw(5, 1, 2, 6), ANGLES, ANGLES),
        (draw(5, 2, 6), ANGLES[0], ANGLES[0]),
    ],
)
def test_rotation_shapes(x, cos, sin):
    for rotate, _ in ROTATIONS:
        with pytest.raises(ValueError, match=r"rotate_\w+: x of shape .* wanted x \[T, N, H\]"):
            rotate(x, cos, sin)


@pytest.mark.parametrize(
    ("out", "summed"), [((5,), (3,)), ((4, 2), (3,)), ((5,), (2, 3)), ((2, 3), (4, 5))]
)
def test_linear_equals_a_loop(out: tuple[int, ...], summed: tuple[int, ...]) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(7, *summed, generator=draws, dtype=torch.float64)
    weight = torch.randn(*out, *summed, generator=draws, dtype=torch.float64)
    y = ops.linear(x, weight, dims=len(summed))
    assert y.shape == (7, *out)
    for t in range(7):
        for place in itertools.product(*map(range, out)):
            wanted = sum(
                float(x[(t, *i)]) * float(weight[(*place, *i)])
                for i in itertools.product(*map(range, summed))
            )
            assert abs(float(y[(t, *place)]) - wanted) < 1e-12


def test_linear_names_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match=r"x \(2, 3\) and weight \(4, 5\) differ in their last 1"):
        ops.linear(torch.ones(2, 3), torch.ones(4, 5))
