"""Emulators of norms, activations, rotations, caches and quantisation, against slow loops.

The loops are written from the documentation of the ops, scalar by scalar in double precision. Calls
go through torch_npu, so that its schema, its meta kernel and its C++ agree with them. Where two
conventions exist (which half is the gate, which cache comes first), the other one must differ.
"""

import cmath
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulators.rules import Unsupported
from tests.npu.simulator import Simulation

BF16 = torch.bfloat16
call = torch.ops.npu


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, wanted: Any, *, tolerance: float = 1e-5) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


# ---- norms and activations


@pytest.mark.parametrize("inner", ((7,), (3, 7)), ids=str)
def test_rms_norm(npu: Simulation, inner: tuple[int, ...]):
    x, gamma, eps = normal(5, 3, 7), normal(*inner, seed=1), 0.25
    y, rstd = call.npu_rms_norm(x.npu(), gamma.npu(), eps)
    rows = x.flatten(-len(inner)).reshape(-1, gamma.numel()).tolist()
    for i, row in enumerate(rows):
        scale = 1 / math.sqrt(sum(v * v for v in row) / len(row) + eps)
        wanted = [v * scale * g for v, g in zip(row, gamma.flatten().tolist(), strict=True)]
        close(y.cpu().view(-1, gamma.numel())[i], wanted)
        close(rstd.cpu().flatten()[i], scale)
    assert rstd.shape == (*x.shape[: 3 - len(inner)], *[1] * len(inner))


def test_rms_norm_rounds_once(npu: Simulation):
    x, gamma = normal(64, 40, dtype=BF16), normal(40, seed=1, dtype=BF16)
    y, _ = call.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(y.cpu(), (wide.float() * gamma.float()).to(BF16))
    twice = wide.to(BF16) * gamma
    assert not torch.equal(y.cpu(), twice)


def test_the_third_result_of_add_rms_norm_is_the_sum(npu: Simulation):
    a, b, gamma = (
        normal(4, 6, dtype=BF16),
        normal(4, 6, seed=1, dtype=BF16),
        torch.ones(6).bfloat16(),
    )
    y, rstd, total = call.npu_add_rms_norm(a.npu(), b.npu(), gamma.npu(), 1e-6)
    assert torch.equal(total.cpu(), a + b)
    alone, of_sum = call.npu_rms_norm((a + b).npu(), gamma.npu(), 1e-6)
    assert torch.equal(y.cpu(), alone.cpu()) and torch.equal(rstd.cpu(), of_sum.cpu())


def test_gemma_adds_one_to_the_weight(npu: Simulation):
    x, gamma = normal(4, 6), normal(6, seed=1)
    y, _ = call.npu_gemma_rms_norm(x.npu(), gamma.npu(), 1e-6)
    close(y, call.npu_rms_norm(x.npu(), (1 + gamma).npu(), 1e-6)[0].cpu())


def test_the_gate_of_swiglu_is_the_first_half(npu: Simulation):
    x = normal(3, 8)
    wanted = [[silu(r[i]) * r[4 + i] for i in range(4)] for r in x.tolist()]
    close(call.npu_swiglu(x.npu()), wanted)
    close(call.npu_swiglu(x.T.contiguous().npu(), 0).cpu().T, wanted)


@pytest.mark.parametrize("interleaved", (True, False))
def test_clipped_swiglu(npu: Simulation, interleaved: bool):
    x, limit, alpha, bias = normal(5, 8) * 4, 2.5, 1.3, 0.7
    y = call.npu_clipped_swiglu(
        x.npu(), alpha=alpha, limit=limit, bias=bias, interleaved=interleaved
    )
    for row, found in zip(x.tolist(), y.cpu(), strict=True):
        gates, ups = (row[0::2], row[1::2]) if interleaved else (row[:4], row[4:])
        wanted = []
        for gate, up in zip(gates, ups, strict=True):
            gate, up = min(gate, limit), max(-limit, min(up, limit))
            wanted.append(gate / (1 + math.exp(-alpha * gate)) * (up + bias))
        close(found, wanted)


@pytest.mark.parametrize("name", ("npu_swiglu_quant", "npu_dequant_swiglu_quant"))
@pytest.mark.parametrize("left", (True, False))
def test_activate_left_says_which_half_is_the_gate(npu: Simulation, name: str, left: bool):
    x = normal(5, 12)
    x = x.to(BF16)
    extra = dict(activate_left=True) if left else {}  # the default is the right half
    if name == "npu_dequant_swiglu_quant":
        whole = (x.float() * 50).round().int()
        columns, rows = normal(1, 12, seed=1).abs(), normal(5, 1, seed=2).abs()
        extra |= dict(weight_scale=columns.npu(), activation_scale=rows.npu())
        q, scale = getattr(call, name)(whole.npu(), quant_mode=1, **extra)
        x = whole * columns * rows
    else:
        q, scale = call.npu_swiglu_quant(x.npu(), quant_mode=1, **extra)
    for row, found, s in zip(x.tolist(), q.cpu(), scale.cpu().tolist(), strict=True):
        gates, ups = (row[:6], row[6:]) if left else (row[6:], row[:6])
        y = [silu(g) * u for g, u in zip(gates, ups, strict=True)]
        assert s == pytest.approx(max(map(abs, y)) / 127, rel=1e-4)
        assert (found - torch.tensor([round(v / s) for v in y])).abs().max() <= 1


# ---- rotations


def turned(row: list[float], angles: list[float], pairs: list[tuple[int, int]]) -> list[float]:
    out = list(row)
    for (i, j), angle in zip(pairs, angles, strict=True):
        z = complex(row[i], row[j]) * cmath.exp(1j * angle)
        out[i], out[j] = z.real, z.imag
    return out


@pytest.mark.parametrize("mode", ("half", "interleave"))
def test_rotary_mul_turns_pairs(npu: Simulation, mode: str):
    T, N, C = 4, 3, 5
    x, angles = normal(1, T, N, 2 * C), normal(T, C, seed=1)
    double = torch.cat([angles, angles], -1)
    if mode == "interleave":
        double = angles.repeat_interleave(2, -1)
    tables = [f(double)[None, :, None].npu() for f in (torch.cos, torch.sin)]
    found = call.npu_rotary_mul(x.npu(), *tables, mode).cpu()
    half, neighbours = [(i, i + C) for i in range(C)], [(2 * i, 2 * i + 1) for i in range(C)]
    pairs = half if mode == "half" else neighbours
    for t in range(T):
        for n in range(N):
            close(found[0, t, n], turned(x[0, t, n].tolist(), angles[t].tolist(), pairs))


def test_interleave_rope_takes_neighbours_apart_first(npu: Simulation):
    x, angles = normal(2, 3, 1, 64), normal(2, 1, 1, 32, seed=1)
    tables = [f(torch.cat([angles, angles], -1)).npu() for f in (torch.cos, torch.sin)]
    found = call.npu_interleave_rope(x.npu(), *tables).cpu()
    row = x[1, 2, 0].tolist()
    pairs = [(2 * i, 2 * i + 1) for i in range(32)]
    wanted = turned(row, angles[1, 0, 0].tolist(), pairs)
    close(found[1, 2, 0], wanted[0::2] + wanted[1::2])


def test_apply_rotary_pos_emb_writes_into_its_arguments(npu: Simulation):
    q, k, angles = normal(2, 3, 2, 64), normal(2, 3, 1, 64, seed=1), normal(2, 3, 1, 32, seed=2)
    tables = [f(torch.cat([angles, angles], -1)).npu() for f in (torch.cos, torch.sin)]
    on_npu = q.npu(), k.npu()
    results = call.npu_apply_rotary_pos_emb(*on_npu, *tables)
    pairs = [(i, i + 32) for i in range(32)]
    wanted = turned(k[1, 2, 0].tolist(), angles[1, 2, 0].tolist(), pairs)
    for x in (on_npu[1], results[1]):
        close(x.cpu()[1, 2, 0], wanted)


@pytest.mark.parametrize(
    ("shape", "table", "mode"),
    [
        ((4, 3, 9), (4, 1, 9), "half"),
        ((4, 3, 896), (4, 1, 896), "half"),
        ((1, 4, 3, 8), (1, 4, 3, 8), "interleave"),
        ((4, 3, 8), (1, 1, 8), "half"),
    ],
)
def test_rotary_mul_refuses(npu: Simulation, shape: Any, table: Any, mode: str):
    x, t = torch.ones(shape).npu(), torch.ones(table).npu()
    with pytest.raises((Unsupported, RuntimeError)):
        call.npu_rotary_mul(x, t, t, mode)


# ---- caches


def test_scatter_pa_kv_cache_of_both_layouts(npu: Simulation):
    key, value = normal(3, 2, 16), normal(3, 2, 32, seed=1)
    slots = [9, 3, 6]
    for mode, dtype in (("Norm", torch.float32), ("PA_NZ", BF16)):
        rows = [x.to(dtype) for x in (key, value)]
        if mode == "Norm":
            shapes = [(3, 4, 2, 16), (3, 4, 2, 32)]
        else:  # [blocks, columns, size, 16]
            shapes = [(3, 2, 4, 16), (3, 4, 4, 16)]
        caches = [torch.zeros(s, dtype=dtype).npu() for s in shapes]
        extra = {} if mode == "PA_NZ" else dict(cache_mode=mode)  # which is the default
        index = torch.tensor(slots, dtype=torch.int32).npu()
        call.npu_scatter_pa_kv_cache(*(x.npu() for x in rows), *caches, index, **extra)
        for x, cache in zip(rows, caches, strict=True):
            found = cache.cpu()
            assert int((found != 0).sum()) == x.numel()
            for t, slot in enumerate(slots):
                page = found[slot // 4]
                at = page[slot % 4] if mode == "Norm" else page[:, slot % 4]
                assert torch.equal(at.flatten(), x[t].flatten())


def test_two_writes_to_one_slot_leave_it_open(npu: Simulation):
    cache = [torch.zeros(2, 4, 1, 16).npu() for _ in range(2)]
    row = normal(3, 1, 16).npu()
    slots = torch.tensor([2, 5, 2], dtype=torch.int32).npu()
    call.npu_scatter_pa_kv_cache(row, row, *cache, slots, cache_mode="Norm")
    assert cache[0][0, 2].isnan().all() and torch.equal(cache[0][1, 1].cpu(), row[1].cpu())
    flat = torch.zeros(4, 2).npu()
    call.npu_scatter_nd_update_(flat, torch.tensor([[3], [3]]).npu(), torch.ones(2, 2).npu())
    assert flat[3].isnan().all() and not flat[:3].cpu().any()


@pytest.mark.parametrize("slot", (-1, 8))
def test_slots_lie_in_the_cache(npu: Simulation, slot: int):
    cache = [torch.zeros(2, 4, 1, 16).npu() for _ in range(2)]
    row, slots = torch.ones(1, 1, 16).npu(), torch.tensor([slot], dtype=torch.int32).npu()
    with pytest.raises(Unsupported, match="slots in 0"):
        call.npu_scatter_pa_kv_cache(row, row, *cache, slots, cache_mode="Norm")


def test_scatter_nd_update_takes_indices_of_several_dims(npu: Simulation):
    x, updates = normal(3, 4, 2), normal(2, 2, seed=1)
    index = torch.tensor([[2, 1], [0, 3]])
    found = call.npu_scatter_nd_update(x.npu(), index.npu(), updates.npu()).cpu()
    wanted = x.clone()
    wanted[2, 1], wanted[0, 3] = updates[0], updates[1]
    assert torch.equal(found, wanted)


def latents_cache(rope_first: bool) -> tuple[Tensor, Tensor]:
    caches = torch.zeros(5, 4, 1, 64, dtype=BF16).npu(), torch.zeros(5, 4, 1, 512, dtype=BF16).npu()
    return caches if rope_first else caches[::-1]


def test_kv_rmsnorm_rope_cache(npu: Simulation):
    kv, gamma = normal(3, 1, 1, 576, dtype=BF16), normal(512, seed=1, dtype=BF16)
    angles = normal(3, 1, 1, 32, seed=2)
    tables = [f(torch.cat([angles, angles], -1)).to(BF16) for f in (torch.cos, torch.sin)]
    slots, caches = [6, 17, 3], latents_cache(rope_first=True)
    args = [x.npu() for x in (kv, gamma, *tables, torch.tensor(slots))]
    results = call.npu_kv_rmsnorm_rope_cache(
        *args, *caches, cache_mode="PA_BNSD", is_output_kv=True, epsilon=1e-5
    )
    for t, slot in enumerate(slots):
        row = kv[t, 0, 0].tolist()
        scale = 1 / math.sqrt(sum(v * v for v in row[:512]) / 512 + 1e-5)
        latent = [v * scale * g for v, g in zip(row[:512], gamma.tolist(), strict=True)]
        even, odd = row[512::2], row[513::2]
        cos, sin = (x[t, 0, 0, :32].tolist() for x in tables)
        rope = [a * c - b * s for a, b, c, s in zip(even, odd, cos, sin, strict=True)]
        rope += [b * c + a * s for a, b, c, s in zip(even, odd, cos, sin, strict=True)]
        for wanted, cache, alone in zip((rope, latent), caches, results[2:], strict=True):
            for found in (cache.cpu()[slot // 4, slot % 4, 0], alone.cpu()[t, 0, 0]):
                close(found, wanted, tolerance=2**-7)
    assert all(int((c.cpu() != 0).any(-1).sum()) == 3 for c in caches)


def test_the_two_caches_of_kv_rmsnorm_rope_cache_are_not_swapped(npu: Simulation):
    """The rotated part comes first, although the input has it last."""
    kv, table = (
        torch.ones(1, 1, 1, 576, dtype=BF16).npu(),
        torch.ones(1, 1, 1, 64, dtype=BF16).npu(),
    )
    gamma, slot = torch.ones(512, dtype=BF16).npu(), torch.tensor([1]).npu()
    args = (kv, gamma, table, table, slot)
    call.npu_kv_rmsnorm_rope_cache(*args, *latents_cache(True), cache_mode="PA_BNSD")
    with pytest.raises((Unsupported, RuntimeError)):
        call.npu_kv_rmsnorm_rope_cache(*args, *latents_cache(False), cache_mode="PA_BNSD")


def test_gather_pa_kv_cache(npu: Simulation):
    k_cache, v_cache = normal(4, 3, 2, 5), normal(4, 3, 2, 5, seed=1)
    table, lengths = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), [4, 2]
    room = [torch.zeros(6, 2, 5).npu() for _ in range(2)]
    args = (k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32))
    k, v = call.npu_gather_pa_kv_cache_functional(*(x.npu() for x in args), *room)
    for found, cache in ((k, k_cache), (v, v_cache)):
        wanted = [cache[2, 0], cache[2, 1], cache[2, 2], cache[0, 0], cache[3, 0], cache[3, 1]]
        assert torch.equal(found.cpu(), torch.stack(wanted))


# ---- quantisation


def test_dynamic_quant(npu: Simulation):
    x, smooth = normal(4, 6, dtype=BF16), normal(6, seed=1, dtype=BF16)
    for extra, scaled in (
        ({}, x.double()),
        (dict(smooth_scales=smooth.npu()), x.double() * smooth),
    ):
        q, scale = call.npu_dynamic_quant(x.npu(), **extra)
        assert (q.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (4,))
        for row, found, s in zip(scaled.tolist(), q.cpu().tolist(), scale.tolist(), strict=True):
            assert s == pytest.approx(max(map(abs, row)) / 127, rel=1e-6)
            assert found == [round(v / s) for v in row]


def test_a_row_of_zeros_has_no_scale(npu: Simulation):
    _, scale = call.npu_dynamic_quant(torch.zeros(2, 4, dtype=BF16).npu())
    assert scale.isnan().all()


@pytest.mark.parametrize("divide", (True, False))
def test_quantize_divides_or_multiplies(npu: Simulation, divide: bool):
    x, scale = normal(3, 5) * 9, normal(5, seed=1).abs() + 0.1
    found = call.npu_quantize(x.npu(), scale.npu(), None, torch.qint8, -1, divide)
    for row, got in zip(x.tolist(), found.cpu().tolist(), strict=True):
        steps = zip(row, scale.tolist(), strict=True)
        exact = [v / s if divide else v * s for v, s in steps]
        assert got == [max(-128, min(127, round(v))) for v in exact]


def whole(*shape: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(
        torch.int8
    )


def test_quant_matmul(npu: Simulation):
    x, w, columns, rows = whole(3, 8, seed=0), whole(8, 5, seed=1), normal(5).abs(), normal(3).abs()
    bias = normal(5, seed=2)
    found = call.npu_quant_matmul(
        x.npu(),
        w.npu(),
        columns.npu(),
        pertoken_scale=rows.npu(),
        bias=bias.npu(),
        output_dtype=BF16,
    )
    for i in range(3):
        for j in range(5):
            total = sum(int(x[i, k]) * int(w[k, j]) for k in range(8))
            wanted = total * columns[j].item() * rows[i].item() + bias[j].item()
            assert found[i, j].item() == pytest.approx(wanted, rel=2**-8)


def test_grouped_matmul_swiglu_quant(npu: Simulation):
    x, w = whole(4, 6, seed=0), whole(2, 6, 8, seed=1)
    columns, rows = normal(2, 8).abs(), normal(4).abs() * 0.01
    sums = torch.tensor([1, 4])
    args = [t.npu() for t in (x, w, sums, columns, rows)]
    q, scale, _ = call.npu_grouped_matmul_swiglu_quant(*args)
    for i, expert in enumerate((0, 1, 1, 1)):
        h = [
            sum(int(x[i, k]) * int(w[expert, k, j]) for k in range(6))
            * columns[expert, j].item()
            * rows[i].item()
            for j in range(8)
        ]
        y = [silu(h[j]) * h[4 + j] for j in range(4)]
        assert scale[i].item() == pytest.approx(max(map(abs, y)) / 127, rel=1e-4)
        wanted = torch.tensor([round(v / scale[i].item()) for v in y])
        assert (q[i].cpu() - wanted).abs().max() <= 1


# ---- sampling


def test_top_k_top_p(npu: Simulation):
    logits = normal(6, 30)
    logits[0, 3] = logits[0, 7]
    k, p = torch.tensor([1, 3, 5, 8, 30, 12], dtype=torch.int32), [1.0, 0.5, 0.9, 0.2, 0.7, 0.0]
    found = call.npu_top_k_top_p(logits.npu(), torch.tensor(p).npu(), k.npu()).cpu()
    for row, got, count, share in zip(logits.tolist(), found.tolist(), k.tolist(), p, strict=True):
        least = sorted(row)[-count]
        kept = [v for v in row if v >= least]
        total = sum(math.exp(v) for v in kept)
        below, wanted = 0.0, set(kept)
        for v in sorted(kept)[:-1]:  # from the least probable; one is always kept
            below += math.exp(v) / total
            if below <= 1 - share:
                wanted.discard(v)
        assert {v for v in got if v != -math.inf} == wanted


def test_what_sums_to_the_dropped_share_is_dropped(npu: Simulation):
    """Equal quarters: two of them sum to 1 - p exactly."""
    found = call.npu_top_k_top_p(
        torch.zeros(1, 4).npu(), torch.tensor([0.5]).npu(), torch.tensor([4]).int().npu()
    )
    assert found.isfinite().sum() == 2


def test_top_k_is_at_most_1024(npu: Simulation):
    k = torch.tensor([1025], dtype=torch.int32).npu()
    with pytest.raises(Unsupported, match="1024"):
        call.npu_top_k_top_p(torch.zeros(1, 2000).npu(), torch.ones(1).npu(), k)


def test_transpose_batchmatmul_puts_the_batch_second(npu: Simulation):
    x, w = normal(3, 2, 5, dtype=BF16), normal(2, 5, 4, seed=1, dtype=BF16)
    found = call.npu_transpose_batchmatmul(x.npu(), w.npu(), perm_x1=[1, 0, 2])
    assert found.shape == (3, 2, 4)
    wanted = [[(x[m, b].double() @ w[b].double()).tolist() for b in range(2)] for m in range(3)]
    close(found, wanted, tolerance=2**-7)
