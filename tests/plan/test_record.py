"""What is recorded on meta tensors is what ranks really call: each collective of every rank, its
order, axes, shape, dtype and bytes.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import batch_specs
from funcinfer.layers.dispatch import padded_exchange, ragged_exchange
from funcinfer.layers.moe import moe, moe_specs
from funcinfer.layers.router import softmax_top_k
from funcinfer.models.decoder import Decoder
from funcinfer.plan.kinds import Cut, cut, whole
from funcinfer.plan.ragged import counted_exchange
from funcinfer.plan.trace import Load, Trace, trace
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks, presets
from funcinfer.sharding import presets_parallel as parallel
from funcinfer.sharding.presets import Preset
from funcinfer.sharding.record import Collective, record, stage_coords
from funcinfer.spec import init, with_dtype
from funcinfer.tree import tree_map
from tests.equivalence import tiny
from tests.equivalence.families import FAMILIES, family
from tests.equivalence.harness import PAGE_SIZE, Layout, Runner, draw, whole_prompts
from tests.plan.spy import Call, spied

PRESETS: dict[str, Callable[[int | None], Preset]] = {
    "one rank": lambda kv: presets.for_mesh(kv, Mesh()),
    "dp, tp": lambda kv: parallel.tensor_parallelism(kv, dp=2, tp=2),
    "copies of KV heads": lambda kv: parallel.tensor_parallelism(kv, tp=8),
    "sp": lambda kv: parallel.sequence_parallelism(kv, dp=2, tp=4),
    "ep": lambda kv: parallel.expert_parallelism(kv, dp=2, tp=2),
    "ep, sp": lambda kv: parallel.expert_parallelism(kv, dp=3, tp=2, sp=True),
    "pcp, sp": lambda kv: parallel.prefill_context_parallelism(kv, pcp=2, tp=2, dp=2, sp=True),
    "dcp": lambda kv: parallel.decode_context_parallelism(kv, dcp=4, tp=2),
    "pcp, dcp, sp, ep": lambda kv: parallel.expert_parallelism(kv, pcp=2, tp=2, dcp=2, sp=True),
    "FlashComm2": lambda kv: parallel.split_output_projection(kv, tp=4, o_proj=2, dp=2),
    "pp": lambda kv: parallel.pipeline_parallelism(kv, pp=2, tp=2, dp=2, sp=True),
}
WHOLE_HEADS = {
    "fine-grained": parallel.fine_grained_tensor_parallelism(dp=4, group=2),
    "own axis of experts": parallel.data_parallel_attention(dp=2, ep=4),
    "sparse context": parallel.sparse_context_parallelism(dp=2, tp=4, sp=True),
}
CASES = [(model, name) for model in tiny.DECODERS for name in (*PRESETS, *WHOLE_HEADS)]
STEPS = ((False, {0: 7, 1: 5, 2: 4}), (True, {0: 1, 1: 3, 2: 1}))


@functools.cache
def params_of(model: str) -> Any:
    return draw(tiny.DECODERS[model])


def preset_of(model: str, name: str) -> Preset:
    if name in WHOLE_HEADS:
        return WHOLE_HEADS[name]
    return PRESETS[name](tiny.CONFIGS[model].num_kv_heads)


def real(runner: Runner, decode: bool, batch: Any) -> list[list[Call]]:
    """The collectives of each rank in one step of a thread for each rank."""
    batches = runner.ranks.split(batch, batch_specs(runner.layout.rules(decode)))
    step = spied(runner.fns.decode if decode else runner.fns.prefill)
    with torch.no_grad():
        results = runner.ranks.run(step, runner.shards, runner.caches, batches)
    runner.caches = [cache for (_, cache), _ in results]
    return [calls for _, calls in results]


def on_paper(runner: Runner, decode: bool, batch: Any, rank: int) -> list[Collective]:
    """The same step of one rank, alone, on meta tensors of the same shapes."""
    step = runner.fns.decode if decode else runner.fns.prefill
    batches = runner.ranks.split(batch, batch_specs(runner.layout.rules(decode)))
    local = [runner.shards[rank], runner.caches[rank], batches[rank]]
    mesh = runner.layout.mesh
    with record(mesh, mesh.coords()[rank]) as collectives, torch.no_grad():
        step(*tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, local))
    return collectives


def as_call(c: Collective) -> Call:
    return c.call, c.axes, c.shape, c.dtype


def nbytes(call: Call) -> int:
    _, _, shape, dtype = call
    return torch.empty(shape, dtype=dtype).nbytes


@pytest.mark.parametrize(("model", "name"), CASES)
def test_recorded_collectives_are_the_real_ones(model: str, name: str) -> None:
    layout = Layout(*preset_of(model, name))
    runner = Runner(tiny.DECODERS[model], params_of(model), layout)
    last = layout.mesh.num_ranks - 1
    for decode, counts in STEPS:
        batch, _ = runner.place(decode, counts)
        recorded = {r: on_paper(runner, decode, batch, r) for r in (0, last // 2, last)}
        called = real(runner, decode, batch)
        for i, n in counts.items():
            runner.done[i] += n
        for rank, found in recorded.items():
            assert [as_call(c) for c in found] == called[rank]
            assert [c.nbytes for c in found] == [nbytes(call) for call in called[rank]]
        assert bool(called[0]) == (last > 0)


def totals(step: Trace) -> Counter[Call]:
    """How often a traced step calls what: layers of a kind as often as there are of them."""
    found: Counter[Call] = Counter()
    for section in step.sections.values():
        for c in section.collectives:
            found[as_call(c)] += section.count
    return found


def assert_trace_is_the_real_step(decoder: Decoder, looked_at: Cut, preset: Preset) -> None:
    """The trace that plans are made of, which sees kinds of layers only and counts primitives,
    against a step of ranks: two prompts a requests group, then the last token of each once more.
    """
    mesh = preset.mesh
    groups = mesh.size(preset.prefill["requests"])
    lengths = dict.fromkeys(range(2 * groups), 6)
    runner = Runner(decoder, draw(decoder), Layout(*preset), whole_prompts(lengths))
    for decode, rules, load in (
        (False, preset.prefill, Load(requests=2, new=6, context=6, wanted=6)),
        (True, preset.decode, Load(requests=2, new=1, context=6)),
    ):
        runner.done = dict.fromkeys(runner.done, 6 - load.new)
        batch, _ = runner.place(decode, dict.fromkeys(lengths, load.new))
        called = real(runner, decode, batch)
        for coord in stage_coords(rules, mesh):
            step = trace(
                looked_at,
                mesh,
                rules,
                load,
                page_size=PAGE_SIZE,
                dtype=torch.float32,
                coord=coord,
            )
            assert totals(step) == Counter(called[mesh.rank(coord)])


# Layers 1 and 2, and 3 and 5, are of a kind.
REPEATED = {
    "grouped": tiny.decoder(tiny.grouped(4, experts=True)),
    "latent": tiny.decoder(tiny.latent(4, experts=True)),
    "sparse": tiny.decoder(tiny.latent(6, experts=True, index_layers=(0, 1, 2, 4))),
}


@pytest.mark.parametrize("name", ["dp, tp", "ep, sp", "pcp, sp", "pcp, dcp, sp, ep", "pp"])
@pytest.mark.parametrize("model", REPEATED)
def test_a_layer_of_each_kind_stands_for_all(model: str, name: str) -> None:
    decoder, preset = REPEATED[model], preset_of(model, name)
    looked_at = whole(decoder) if name == "pp" else cut(decoder)
    assert_trace_is_the_real_step(decoder, looked_at, preset)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_traced_as_it_runs(name: str) -> None:
    cfg, decoder, _ = family(name)
    preset = parallel.expert_parallelism(cfg.num_kv_heads, dp=2, tp=2, sp=True)
    assert_trace_is_the_real_step(decoder, cut(decoder), preset)


# The kind of each layer.
COUNTS = {"grouped": [0, 1, 1, 1], "latent": [0, 1, 1, 1], "sparse": [0, 1, 1, 3, 1, 3]}


def test_kinds_of_layers() -> None:
    for model, kinds in COUNTS.items():
        looked_at = cut(REPEATED[model])
        assert looked_at.layers == tuple(sorted(set(kinds)))
        assert looked_at.counts == tuple(kinds.count(k) for k in looked_at.layers)


@pytest.mark.parametrize("axis", ["a", ("a", "b"), ("b", "a")])
def test_ragged_exchanges_are_recorded_with_their_counts_given(axis: Any) -> None:
    mesh, T, D, E, k = Mesh(a=2, b=2), 5, 6, 8, 3
    rules = Rules(experts=axis, moe_tokens=axis, residual_tokens=axis)
    route = functools.partial(softmax_top_k, k=k, normalise=True)
    specs = with_dtype(moe_specs(D, E, 4), torch.float32)
    params = init(specs, seed=3)
    params["router"]["weight"] = torch.randn(E, D, generator=torch.Generator().manual_seed(7))
    ranks = ThreadRanks(mesh)
    n = mesh.size(axis)
    x_TD = torch.randn(n * T, D, generator=torch.Generator().manual_seed(1))
    shards = ranks.split(params, rules.specs(specs))
    xs = ranks.split(x_TD, P(axis, None))
    run = spied(functools.partial(moe, rules=rules, route=route, exchange=ragged_exchange))
    with torch.no_grad():
        called = [calls for _, calls in ranks.run(run, shards, xs)]

    # Which rank each token goes to, counted one by one.
    counts = [[0] * n for _ in range(n)]
    for source in range(n):
        _, ids_TK = route(params["router"], x_TD[source * T : source * T + T])
        for ids in ids_TK.tolist():
            for target in {e // (E // n) for e in ids}:
                counts[source][target] += 1
    assert len({tuple(row) for row in counts}) > 1, "ranks should differ"
    for coord, wanted in zip(mesh.coords(), called, strict=True):
        local = tree_map(lambda x: x.to("meta"), [shards[0], xs[0]])
        with record(mesh, coord) as found, torch.no_grad():
            moe(*local, rules=rules, route=route, exchange=counted_exchange(counts))
        assert [as_call(c) for c in found] == wanted


def test_padded_and_ragged_exchanges_are_told_apart() -> None:
    counts = [[1, 2], [2, 1]]
    args = [torch.empty(s, device="meta") for s in ((3, 4), (2, 3, 1), (3, 1))]
    found = []
    for exchange in (padded_exchange, counted_exchange(counts)):
        with record(Mesh(ep=2)) as calls:
            exchange(lambda x, ids, w: x, *args, "ep")
        found.append({c.op for c in calls})
    assert found == [{"all_gather", "all_to_all", "psum_scatter"}, {"all_to_all_v"}]


def test_counts_of_another_number_of_ranks_are_refused() -> None:
    args = [torch.empty(s, device="meta") for s in ((3, 4), (4, 3, 1), (3, 1))]
    with record(Mesh(ep=4)), pytest.raises(ValueError, match=r"counts of 2 ranks .* 'ep' has 4"):
        counted_exchange([[1, 2], [2, 1]])(lambda x, ids, w: x, *args, "ep")
