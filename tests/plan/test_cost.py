"""Operations and bytes of a step, against arithmetic by hand, against published sizes, and against
each other on meshes that must add up.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch

from funcinfer.layers.primitives import reference
from funcinfer.models import gqa
from funcinfer.plan import Setting, Subject, find
from funcinfer.plan.cost import Cost, cost_of
from funcinfer.plan.counting import CountingOps, Experts
from funcinfer.plan.kinds import cut
from funcinfer.plan.memory import memory_of
from funcinfer.plan.planning import memories_of, traces_of
from funcinfer.plan.trace import Load, trace
from funcinfer.sharding import Mesh, Rules, presets
from funcinfer.sharding import presets_parallel as parallel
from funcinfer.sharding.presets import Preset
from tests.equivalence import tiny
from tests.plan import configs

H200_SETTING = Setting(find("h200"))


@functools.cache
def subject(name: str) -> Subject:
    return Subject.from_config(getattr(configs, name))


def one_device(name: str, load: Load) -> Cost:
    rules = Rules.none()
    (memory,) = memories_of(subject(name), Mesh(), rules, H200_SETTING)
    (step,) = traces_of(subject(name), Mesh(), rules, load, H200_SETTING)
    return cost_of(step, memory)


# Milliseconds that weights and KV take at 4.3 TB/s, and operations of 8k prompt tokens at 790
# TFLOP/s: worked out once by hand from the models' published shapes.
FLOORS = {
    "QWEN3_06B": (0.291, 0.496, 0.714, 3.77, 19),
    "QWEN3_8B": (3.54, 3.80, 4.08, 8.02, 169),
    "QWEN3_30B_A3B": (1.43, 1.60, 6.38, 16.8, 90),
    "DEEPSEEK_SLICE": (1.52, 1.53, 4.57, 14.8, 62),
}
DECODES = ((1, 512), (1, 8192), (8, 2048), (64, 2048))
CASES = [(m, *load, ms) for m, t in FLOORS.items() for load, ms in zip(DECODES, t, strict=False)]


@pytest.mark.parametrize(("model", "batch", "context", "milliseconds"), CASES)
def test_decode_reads_what_arithmetic_by_hand_says(
    model: str, batch: int, context: int, milliseconds: float
) -> None:
    cost = one_device(model, Load(batch, 1, context))
    read = cost.weight_bytes + cost.cache_read_bytes
    assert 1e3 * read / 4.3e12 == pytest.approx(milliseconds, rel=0.01)
    assert cost.moved_bytes < 1.1 * read


@pytest.mark.parametrize("model", FLOORS)
def test_prefill_computes_what_arithmetic_by_hand_says(model: str) -> None:
    cost = one_device(model, Load(1, 8192, 8192))
    assert 1e3 * cost.flops / 790e12 == pytest.approx(FLOORS[model][4], rel=0.03)


def test_a_latent_cache_costs_1152_bytes_a_token_and_layer() -> None:
    cost = one_device("DEEPSEEK_SLICE", Load(3, 1, 1000))
    assert cost.cache_read_bytes == 4 * 3 * 1000 * (512 + 64) * 2
    assert cost.cache_written_bytes == 4 * 3 * (512 + 64) * 2


def test_operations_of_a_small_model_one_by_one() -> None:
    """Two layers of 8 query and 4 KV heads of 6, width 20, MLP 24, vocabulary 45; 3 x 5 tokens."""
    cfg = tiny.grouped(2)
    step = trace(
        cut(gqa.decoder(cfg)), Mesh(), Rules.none(), Load(3, 5, 9), page_size=8, dtype=torch.float32
    )
    memory = memory_of(cut(gqa.decoder(cfg)), Mesh(), Rules.none(), page_size=8)
    cost = cost_of(step, memory)
    products = 8 * 6 * 20 + 2 * 4 * 6 * 20 + 20 * 8 * 6 + 2 * 24 * 20 + 20 * 24
    pairs = 3 * (5 + 6 + 7 + 8 + 9)  # the tokens at positions 4 to 8
    assert cost.flops == 2 * (2 * 15 * products + pairs * 4 * 8 * 6) + 2 * 3 * 45 * 20
    assert cost.cache_read_bytes == 2 * 3 * 9 * (2 * 4 * 6) * 4
    # In and out of q, k, v, o, gate and up, down; of attention; and of the head.
    moved = (20 + 48) + 2 * (20 + 24) + (48 + 20) + (20 + 48) + (24 + 20)
    activations = 2 * 15 * (moved + 48 + 48) + 3 * (20 + 45)
    assert cost.activation_bytes == 4 * activations


def test_padding_sees_nothing_and_costs_the_rest() -> None:
    preset = parallel.sequence_parallelism(4, tp=4)
    looked_at = cut(gqa.decoder(tiny.grouped()))
    costs = []
    for requests in (1, 4):  # one token is padded to four
        step = trace(looked_at, preset.mesh, preset.decode, Load(requests, 1, 8), page_size=8)
        costs.append(cost_of(step, memory_of(looked_at, preset.mesh, preset.decode, page_size=8)))
    one, four = costs
    assert four.cache_read_bytes == 4 * one.cache_read_bytes
    attention = 2 * 3 * 8 * 4 * 2 * 6  # layers, more tokens, positions, operations of 2 heads
    heads = 2 * 3 * 12 * 20  # more rows of logits, columns of a rank, width
    assert four.flops - one.flops == attention + heads


def hits(experts: int, k: int, tokens: int) -> float:
    """Experts that are hit on average, over every way in which tokens can choose."""
    ways = itertools.product(itertools.combinations(range(experts), k), repeat=tokens)
    return sum(len(set().union(*way)) for way in ways) / math.comb(experts, k) ** tokens


@pytest.mark.parametrize(("experts", "k", "tokens"), [(4, 2, 2), (5, 2, 3), (3, 3, 1), (6, 1, 4)])
def test_experts_hit(experts: int, k: int, tokens: int) -> None:
    step = trace(
        cut(gqa.decoder(tiny.grouped())), Mesh(), Rules.none(), Load(tokens, 1, 4), page_size=4
    )
    memory = memory_of(cut(gqa.decoder(tiny.grouped())), Mesh(), Rules.none(), page_size=4)
    item = Experts(
        rows=tokens,
        choices=k,
        held=experts,
        experts=experts,
        flops=7,
        activation_bytes=11,
        weight_bytes=1000,
    )
    section = next(s for s in step.sections.values() if s.count == 2)
    with_experts = dataclasses.replace(section, count=1, work=[item], collectives=[])
    only = dataclasses.replace(step, sections={"experts": with_experts})
    without = dataclasses.replace(step, sections={})
    cost, base = cost_of(only, memory), cost_of(without, memory)
    assert cost.weight_bytes - base.weight_bytes == pytest.approx(1000 * hits(experts, k, tokens))
    assert (cost.flops, cost.activation_bytes) == (7 * tokens * k, 11 * tokens * k)


MESHES: dict[str, Preset] = {
    "dp": parallel.tensor_parallelism(4, tp=1, dp=4),
    "tp": parallel.tensor_parallelism(4, tp=4),
    "dcp": parallel.decode_context_parallelism(4, tp=2, dcp=2),
    "ep": parallel.data_parallel_attention(ep=4),
}


@pytest.mark.parametrize("name", MESHES)
def test_ranks_share_the_work_of_one_device(name: str) -> None:
    """Nothing of these is done twice: the ranks' products and attention are those of one device."""
    looked_at = cut(gqa.decoder(tiny.grouped(3, experts=name == "ep")))
    mesh, _, rules = MESHES[name]
    total = trace(looked_at, Mesh(), Rules.none(), Load(8, 1, 24), page_size=8)
    share = Load(8 // mesh.size(rules["requests"]), 1, 24)
    part = trace(looked_at, mesh, rules, share, page_size=8)
    one = cost_of(total, memory_of(looked_at, Mesh(), Rules.none(), page_size=8))
    rank = cost_of(part, memory_of(looked_at, mesh, rules, page_size=8))
    extra = 0.0
    if name == "tp":  # 45 columns are padded to 48
        extra = 2 * 8 * 3 * 20
    if name == "dcp":  # the same, and each KV head's projection is on two ranks
        extra = 2 * 8 * 3 * 20 + 3 * 2 * 8 * (2 * 4 * 6) * 20
    assert mesh.num_ranks * rank.flops == pytest.approx(one.flops + extra)
    assert mesh.num_ranks * rank.cache_read_bytes == pytest.approx(one.cache_read_bytes)


SCALED = {
    "one": presets.for_mesh(None, Mesh()),
    "sp, ep": parallel.expert_parallelism(None, dp=2, tp=2, sp=True),
    "pcp, dcp": parallel.context_parallelism(None, pcp=2, dcp=2, tp=2),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("model", ["latent", "sparse"])
@pytest.mark.parametrize("load", [Load(4, 1, 20), Load(2, 12, 16)])
def test_a_trace_serves_larger_batches(model: str, name: str, load: Load) -> None:
    looked_at = cut(tiny.DECODERS[model])
    mesh, prefill, decode = SCALED[name]
    rules = decode if load.new == 1 else prefill
    memory = memory_of(looked_at, mesh, rules, page_size=8)
    small = trace(looked_at, mesh, rules, load, page_size=8)
    bigger = dataclasses.replace(load, requests=3 * load.requests)
    large = trace(looked_at, mesh, rules, bigger, page_size=8)
    found = dataclasses.asdict(cost_of(small, memory, requests=bigger.requests))
    wanted = dataclasses.asdict(cost_of(large, memory))
    assert [(s["count"], s["nbytes"]) for s in found.pop("sent")] == [
        (s["count"], s["nbytes"]) for s in wanted.pop("sent")
    ]
    assert found == pytest.approx(wanted)


def test_a_trace_does_not_serve_batches_between() -> None:
    looked_at = cut(tiny.DECODERS["latent"])
    step = trace(looked_at, Mesh(), Rules.none(), Load(4, 1, 8), page_size=8)
    memory = memory_of(looked_at, Mesh(), Rules.none(), page_size=8)
    with pytest.raises(ValueError, match=r"a trace of 4 requests .* can't tell the cost of 6"):
        cost_of(step, memory, requests=6)


@pytest.mark.parametrize("new", [1, 2, 5, 9])
@pytest.mark.parametrize("before", [0, 1, 7])
def test_positions_seen(new: int, before: int) -> None:
    load = Load(1, new, before + new)
    seen = [before + i + 1 for i in range(new)]
    assert load.seen == sum(seen) / new
    for most in range(1, before + new + 2):
        assert load.seen_of(most) == pytest.approx(sum(min(most, s) for s in seen) / new)


def test_sparse_attention_reads_what_is_selected() -> None:
    """5 positions of a token in each of 3 layers; 2 of them score all positions first."""
    looked_at = cut(tiny.DECODERS["sparse"])
    step = trace(looked_at, Mesh(), Rules.none(), Load(2, 1, 40), page_size=8)
    cost = cost_of(step, memory_of(looked_at, Mesh(), Rules.none(), page_size=8))
    latent, key = (11 + 4) * 2, 8 * 2
    assert cost.cache_read_bytes == 3 * 2 * 5 * latent + 2 * 2 * 40 * key


def test_counting_ops_have_the_results_of_the_reference() -> None:
    """Shapes and dtypes of what is counted in place of being done."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    T, R, M, I = 7, 3, 5, torch.int32
    rows, lo, hi = (meta(T, dtype=I) for _ in range(3))
    table = meta(R, M, dtype=I)
    heads = type("Pages", (), dict(k=meta(9, 4, 2, 6), v=meta(9, 4, 2, 5)))()
    latents = type("Pages", (), dict(ckv=meta(9, 4, 11), kpe=meta(9, 4, 4)))()
    keys = type("Pages", (), dict(k=meta(9, 4, 8)))()
    q = meta(T, 6, 11), meta(T, 6, 4)
    gate = meta(T, 2, dtype=torch.float32)
    calls: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "paged_attention": ([meta(T, 6, 6), heads, table, rows, lo, hi], dict(scale=0.5)),
        "paged_mla_attention": ([*q, latents, table, rows, lo, hi], dict(scale=0.5)),
        "sparse_mla_attention": ([*q, latents, table, rows, meta(T, 3, dtype=I)], dict(scale=0.5)),
        "indexer_scores": ([meta(T, 2, 8), gate, keys, table, rows, lo, hi], {}),
        "lightning_indexer": ([meta(T, 2, 8), gate, keys, table, rows, lo, hi], dict(topk=6)),
        "expert_mlp": (
            [
                meta(T, 12),
                meta(T, 2, dtype=torch.int64),
                meta(T, 2, dtype=torch.float32),
                meta(4, 2, 10, 12),
                meta(4, 12, 10),
            ],
            dict(activation=reference.swiglu),
        ),
        "rms_norm": ([meta(T, 12), meta(12)], dict(eps=1e-6)),
    }
    for name, (args, options) in calls.items():
        ops = CountingOps([], page_parts=1, experts={4: 4})
        found, wanted = (
            getattr(ops, name)(*args, **options),
            getattr(reference, name)(*args, **options),
        )
        if isinstance(wanted, torch.Tensor):
            found, wanted = [found], [wanted]
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in wanted], name


def test_counting_ops_refuse_what_the_reference_refuses() -> None:
    ops = CountingOps([], page_parts=1, experts={})
    q, table = torch.empty(2, 3, 4, device="meta"), torch.empty(1, 1, device="meta")
    cache = type("Pages", (), dict(k=torch.empty(2, 2, 2, 4), v=torch.empty(2, 2, 2, 4)))()
    with pytest.raises(ValueError, match="3 q heads can't be grouped over 2 KV heads"):
        ops.paged_attention(q, cache, table, *[torch.empty(2, device="meta")] * 3, scale=1.0)
