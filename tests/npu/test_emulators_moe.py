"""Emulators of routing, of the grouped product and of the way back, against loops over tokens."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulators.rules import Unsupported
from tests.npu.simulator import Simulation
from tests.npu.test_emulators import BF16, call, close, normal, silu, whole

T, K, E, H = 7, 3, 6, 5


def chosen(seed: int = 0, experts: int = E) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(experts, generator=generator)[:K] for _ in range(T)]
    return torch.stack(rows).int()


# ---- gates


def best(scores: dict[int, float], count: int) -> list[int]:
    """The keys of the largest values, the lowest key first among equal ones."""
    return sorted(scores, key=lambda i: (-scores[i], i))[:count]


@pytest.mark.parametrize("select", (0, 1))
@pytest.mark.parametrize("norm", (0, 1))
@pytest.mark.parametrize("groups", (1, 3))
def test_gating_top_k(npu: Simulation, groups: int, norm: int, select: int):
    x, bias, scale = normal(40, 12).round(decimals=1), normal(12, seed=1) * 0.2, 2.5
    keep = max(1, groups - 1)
    y, index, scores = call.npu_moe_gating_top_k(
        x.npu(),
        3,
        bias=bias.npu(),
        k_group=keep,
        group_count=groups,
        group_select_mode=select,
        norm_type=norm,
        out_flag=True,
        routed_scaling_factor=scale,
    )
    for t, row in enumerate(x.tolist()):
        total = sum(map(math.exp, row))
        score = [math.exp(v) / total if norm == 0 else 1 / (1 + math.exp(-v)) for v in row]
        choice = {e: s + b for e, (s, b) in enumerate(zip(score, bias.tolist(), strict=True))}
        of_group = [range(g * 12 // groups, (g + 1) * 12 // groups) for g in range(groups)]
        ranks = {
            g: sum(sorted((choice[e] for e in of_group[g]), reverse=True)[: select + 1])
            for g in range(groups)
        }
        open_experts = {e for g in best(ranks, keep) for e in of_group[g]}
        wanted = best({e: v for e, v in choice.items() if e in open_experts}, 3)
        assert index[t].tolist() == wanted
        weights = [score[e] for e in wanted]
        if norm == 1:  # and never for a softmax
            weights = [w / sum(weights) for w in weights]
        close(y[t], [w * scale for w in weights])
        close(scores[t], score)
    assert index.dtype == torch.int32


def test_scores_that_nobody_asked_for_are_open(npu: Simulation):
    _, _, scores = call.npu_moe_gating_top_k(normal(2, 6).npu(), 2)
    assert scores.shape == (2, 6) and scores.isnan().all()


def test_softmax_gate_of_the_first_version_counts_rows_by_column(npu: Simulation):
    x = normal(T, E)
    y, index, rows = call.npu_moe_gating_top_k_softmax(x.npu(), None, K)
    for t, row in enumerate(x.tolist()):
        assert index[t].tolist() == best(dict(enumerate(row)), K)
        assert rows[t].tolist() == [k * T + t for k in range(K)]
        close(y[t], [math.exp(row[e]) / sum(map(math.exp, row)) for e in index[t].tolist()])


# ---- rows to experts


@pytest.mark.parametrize("active", ([0, E], [2, 5]), ids=str)
@pytest.mark.parametrize("kind", (0, 1, 2))
@pytest.mark.parametrize("by", (0, 1))
def test_init_routing(npu: Simulation, active: list[int], kind: int, by: int):
    x, ids = normal(T, H), chosen()
    rows, index, counts, _ = call.npu_moe_init_routing_v2(
        x.npu(),
        ids.npu(),
        active_num=T * K,
        expert_num=E,
        expert_tokens_num_type=kind,
        expert_tokens_num_flag=True,
        active_expert_range=active,
        row_idx_type=by,
    )
    order = [(t, k) for e in range(*active) for t in range(T) for k in range(K) if ids[t, k] == e]
    for place, (t, k) in enumerate(order):
        assert torch.equal(rows[place].cpu(), x[t])
        where = (t * K + k, place) if by == 0 else (place, t * K + k)
        assert index[where[0]].item() == where[1]
    assert rows[len(order) :].isnan().all()
    if by == 0:
        outside = [i for i in range(T * K) if divmod(i, K) not in order]
        assert all(index[i].item() == -1 for i in outside)
    per_expert = [int((ids == e).sum()) for e in range(*active)]
    if kind == 0:
        assert counts.tolist() == [sum(per_expert[: i + 1]) for i in range(len(per_expert))]
    elif kind == 1:
        assert counts.tolist() == per_expert
    else:
        pairs = [[e, n] for e, n in zip(range(*active), per_expert, strict=True) if n]
        assert counts[: len(pairs)].tolist() == pairs
    assert counts.dtype == torch.int64


def test_init_routing_quantises_rows(npu: Simulation):
    x = normal(T, H)
    rows, index, _, scale = call.npu_moe_init_routing_v2(
        x.npu(),
        chosen().npu(),
        active_num=T * K,
        expert_num=E,
        expert_tokens_num_flag=True,
        active_expert_range=[0, E],
        quant_mode=1,
    )
    for i, place in enumerate(index.tolist()):
        row, s = x[i // K].tolist(), scale[place].item()
        assert s == pytest.approx(max(map(abs, row)) / 127, rel=1e-6)
        assert rows[place].tolist() == [round(v / s) for v in row]


def test_re_routing_puts_experts_before_ranks(npu: Simulation):
    counts = [[2, 0, 3], [1, 4, 1]]
    labels = [(r, e, i) for r in range(2) for e in range(3) for i in range(counts[r][e])]
    tokens = normal(len(labels), 4, dtype=BF16)
    rows, _, index, totals = call.npu_moe_re_routing(tokens.npu(), torch.tensor(counts).npu())
    wanted = sorted(labels, key=lambda x: (x[1], x[0], x[2]))
    assert index.tolist() == [labels.index(x) for x in wanted]
    assert torch.equal(rows.cpu(), torch.stack([tokens[labels.index(x)] for x in wanted]))
    assert totals.tolist() == [3, 4, 4]


# ---- products and the way back


def product(groups: list[int], kind: int, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    x, w = normal(rows, H), normal(len(groups), H, 4, seed=1)
    (y,) = call.npu_grouped_matmul(
        [x.npu()],
        [w.npu()],
        group_list=torch.tensor(groups).npu(),
        split_item=2,
        group_type=0,
        group_list_type=kind,
    )
    return y.cpu(), x, w


@pytest.mark.parametrize(("kind", "groups"), [(0, [3, 3, 7]), (1, [3, 0, 4])])
def test_grouped_matmul(npu: Simulation, kind: int, groups: list[int]):
    y, x, w = product(groups, kind)
    for row, expert in enumerate([0, 0, 0, 2, 2, 2, 2]):
        close(y[row], x[row].double() @ w[expert].double())
    assert y[7:].isnan().all()


def test_the_two_kinds_of_groups_are_not_the_same(npu: Simulation):
    counts, _, _ = product([3, 0, 4], 1)
    with pytest.raises(Unsupported, match="list type 0"):
        product([3, 0, 4], 0)
    sums, _, _ = product([1, 3, 4], 0)
    assert not torch.equal(sums[:4], product([1, 3, 4], 1)[0][:4])
    assert counts[:7].isfinite().all()


def test_int8_products_take_scales(npu: Simulation):
    x, w = (normal(4, 6) * 40).to(torch.int8), (normal(2, 6, 3, seed=1) * 40).to(torch.int8)
    columns, rows = normal(2, 3).abs(), normal(4, seed=2).abs()
    (y,) = call.npu_grouped_matmul(
        [x.npu()],
        [w.npu()],
        scale=[columns.to(BF16).npu()],
        per_token_scale=[rows.npu()],
        group_list=torch.tensor([1, 3]).npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
        output_dtype=BF16,
    )
    for i, expert in enumerate((0, 1, 1, 1)):
        whole = x[i].double() @ w[expert].double()
        close(y[i], whole * columns[expert].to(BF16) * rows[i], tolerance=2**-7)


@pytest.mark.parametrize("mode", (0, 1, 2, 3))
def test_finalize_routing(npu: Simulation, mode: int):
    flat, skip, scales = normal(T * K, H), normal(T, H, seed=1), normal(T, K, seed=2)
    bias, ids = normal(E, H, seed=3), chosen()
    index = torch.randperm(T * K, generator=torch.Generator().manual_seed(4)).int()
    if mode % 2:
        flat, index[5] = flat.view(3, T, H), -1
    args = [x.npu() for x in (skip, 2 * skip, bias, scales, index, ids)]
    found = call.npu_moe_finalize_routing(flat.npu(), *args, drop_pad_mode=mode)
    flat = flat.reshape(-1, H)
    for t in range(T):
        wanted = 3 * skip[t].double()
        for k in range(K):
            at = int(index[k * T + t] if mode < 2 else index[t * K + k])
            row = flat[at].double() if at >= 0 else torch.zeros(H).double()
            wanted = wanted + scales[t, k].double() * (row + bias[ids[t, k]])
        close(found[t], wanted)


@pytest.mark.parametrize(
    ("op", "rule"),
    [
        (lambda: call.npu_moe_gating_top_k(normal(2, 6).npu(), 2, renorm=1), "renorm"),
        (lambda: call.npu_moe_gating_top_k(normal(2, 6).npu(), 2, group_count=3), "more than 2"),
        (
            lambda: call.npu_moe_finalize_routing(
                normal(6, H).npu(),
                None,
                normal(2, H).npu(),
                None,
                normal(2, 3).npu(),
                torch.arange(6, dtype=torch.int32).npu(),
                None,
            ),
            "skip2 needs skip1",
        ),
        (
            lambda: call.npu_moe_init_routing_v2(
                normal(2, H).npu(), torch.tensor([[9], [0]]).int().npu(), expert_num=4
            ),
            "",
        ),
    ],
)
def test_what_the_documentation_forbids(npu: Simulation, op: Callable[[], Any], rule: str):
    with pytest.raises((Unsupported, RuntimeError), match=rule or "experts|range|only"):
        op()


@pytest.mark.parametrize(("kind", "groups"), [(0, [1, 1, 4]), (1, [1, 0, 3])])
def test_quantised_experts_take_sums_or_counts(npu: Simulation, kind: int, groups: list[int]):
    """Row 0 is of expert 0, the next three of expert 2, the last of none."""
    x, w = whole(5, 16, seed=0), whole(3, 16, 32, seed=1)
    columns, rows = normal(3, 32).abs(), normal(5).abs() * 0.0005
    args = x.npu(), [w.npu()], [columns.npu()], rows.npu(), torch.tensor(groups).npu()
    q, scale = call.npu_grouped_matmul_swiglu_quant_v2(*args, group_list_type=kind)
    for i, expert in enumerate((0, 2, 2, 2)):
        h = [
            sum(int(x[i, k]) * int(w[expert, k, j]) for k in range(16))
            * columns[expert, j].item()
            * rows[i].item()
            for j in range(32)
        ]
        y = [silu(h[j]) * h[16 + j] for j in range(16)]
        assert scale[i].item() == pytest.approx(max(map(abs, y)) / 127, rel=1e-4)
        wanted = torch.tensor([round(v / scale[i].item()) for v in y])
        assert (q[i].cpu() - wanted).abs().max() <= 1
    assert scale[4].isnan()
