"""Bytes of a rank, against the tensors that ranks of a real run hold."""

import re

import pytest
import torch

from funcinfer.plan.kinds import cut, whole
from funcinfer.plan.memory import Held, Memory, memory_of
from funcinfer.sharding import Mesh, Rules, presets
from funcinfer.sharding import presets_parallel as parallel
from funcinfer.sharding.presets import Preset
from funcinfer.tree import leaves_with_path, tree_leaves
from tests.equivalence import tiny
from tests.equivalence.harness import PAGE_SIZE, Layout, Runner, draw

DECODERS = {
    "grouped": tiny.decoder(tiny.grouped(3, experts=True)),
    "latent, drafts": tiny.decoder(tiny.latent(3, experts=True, num_drafts=1)),
    "sparse": tiny.decoder(tiny.latent(4, experts=True, index_layers=(0, 2))),
}
PRESETS = {
    "one rank": presets.for_mesh(None, Mesh()),
    "tp": parallel.tensor_parallelism(None, dp=2, tp=4),
    "ep": parallel.expert_parallelism(None, dp=3, tp=2),
    "pcp, dcp": parallel.context_parallelism(None, pcp=2, tp=2, dcp=2),
    "pp": parallel.pipeline_parallelism(None, pp=2, tp=2),
}


def of_model(model: str, name: str) -> Preset:
    """The preset for 4 KV heads where the model has them."""
    mesh, *rules = PRESETS[name]
    over = "tp" if model == "grouped" and "tp" in mesh.names else None
    return Preset(mesh, *(r.replace(kv_heads=over) for r in rules))


def nbytes(tree: object) -> int:
    return sum(x.nbytes for x in tree_leaves(tree) if x is not None)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", DECODERS)
def test_bytes_are_those_of_a_real_run(model: str, name: str) -> None:
    decoder, preset = DECODERS[model], of_model(model, name)
    runner = Runner(decoder, draw(decoder), Layout(*preset))
    looked_at = whole(decoder) if name == "pp" else cut(decoder)
    num_pages = len(runner.pages[0])  # some request's; the pool is counted by its first dim
    for rank, coord in enumerate(preset.mesh.coords()):
        memory = memory_of(
            looked_at,
            preset.mesh,
            preset.decode,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            coord=coord,
        )
        assert memory.param_bytes == nbytes(runner.shards[rank])
        pools = [x for x in tree_leaves(runner.caches[rank]) if x is not None]
        num_pages = pools[0].shape[0]
        assert memory.page_bytes * num_pages == nbytes(runner.caches[rank])
        assert memory.token_bytes == memory.page_bytes / PAGE_SIZE
        drafts = [x for p, x in leaves_with_path(runner.caches[rank]) if p.startswith("mtp")]
        without = (nbytes(runner.caches[rank]) - nbytes(drafts)) / num_pages / PAGE_SIZE
        assert memory.step_token_bytes == without


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", DECODERS)
def test_copies_are_the_ranks_that_hold_the_same(model: str, name: str) -> None:
    """Every weight is filled with the number of its element; ranks with equal parts are counted."""
    decoder, preset = DECODERS[model], of_model(model, name)
    runner = Runner(decoder, draw(decoder), Layout(*preset))
    looked_at = whole(decoder)
    memory = memory_of(looked_at, preset.mesh, preset.decode, page_size=PAGE_SIZE)
    copies = {h.path: h.copies for h in memory.params}
    for path, mine in leaves_with_path(runner.shards[0]):
        if mine is None:
            continue
        theirs = [dict(leaves_with_path(shard))[path] for shard in runner.shards]
        same = sum(x is not None and torch.equal(x, mine) for x in theirs)
        assert copies[path] == same, path
    assert memory.copied_bytes == sum(h.total for h in memory.params if copies[h.path] > 1)


def test_a_cut_decoder_tells_of_the_whole_one() -> None:
    """Kinds with their counts are the layers, one by one."""
    decoder, (mesh, _, rules) = DECODERS["latent, drafts"], PRESETS["ep"]
    short, long = (memory_of(c, mesh, rules, page_size=16) for c in (cut(decoder), whole(decoder)))
    assert (short.param_bytes, short.page_bytes) == (long.param_bytes, long.page_bytes)
    assert short.copied_bytes == long.copied_bytes
    names = {h.path for h in long.params}
    assert {h.path for h in short.params} < names
    layers = [h for h in short.params if re.match(r"layers\.1\.", h.path)]
    assert layers
    assert {h.count for h in layers} == {2}


def pages(page_bytes: int, param_bytes: int, page_size: int = 8) -> Memory:
    params = Held("w", (None,), (1,), param_bytes, 1, 1)
    page = Held("layers.0.attn.kv.k", (None,), (1,), page_bytes, 1, 1)
    return Memory((params,), (page,), page_size)


@pytest.mark.parametrize("limit", range(0, 3000, 70))
@pytest.mark.parametrize("requests", [1, 3])
def test_the_largest_context_is_the_last_that_fits(limit: int, requests: int) -> None:
    memory = pages(page_bytes=100, param_bytes=210)
    fitting = [
        context
        for context in range(0, 400, 8)
        if memory.param_bytes + memory.cache_bytes(context, requests) <= limit
    ]
    assert memory.largest_context(limit, requests) == max(fitting, default=0)


def test_a_context_of_part_of_a_page_takes_the_page() -> None:
    memory = pages(page_bytes=100, param_bytes=0)
    assert memory.cache_bytes(1, 1) == memory.cache_bytes(8, 1) == 200
    assert memory.cache_bytes(9, 2) == 500


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_up.*24.* 5 even parts"):
        memory_of(cut(DECODERS["grouped"]), Mesh(tp=5), Rules(mlp="tp"), page_size=8)
