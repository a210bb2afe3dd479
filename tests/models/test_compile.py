"""Layers and steps trace as one graph under torch.compile, with equal results, in place."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from funcinfer.hf_config import read_config
from funcinfer.kvcache.batch import Batch, prepare
from funcinfer.kvcache.paged import write
from funcinfer.layers.attend import project_out
from funcinfer.layers.attention import attention, head_norm
from funcinfer.layers.embedding import embed, lm_head, take_rows
from funcinfer.layers.mlp import mlp
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.models import registry
from funcinfer.models.decoder import Decoder
from funcinfer.sharding import Mesh, Rules, bind, solo
from funcinfer.tree import tree_leaves, tree_map
from tests.equivalence.harness import ONE_RANK, TOLERANCE, Runner, Trace, distance, draw
from tests.equivalence.layouts import tensor
from tests.equivalence.small import HEAD_DIM, ONE_LAYER, VOCAB

NO_RULES = Rules()
TRACE = Trace({0: 9, 1: 6}, ((False, {0: 6, 1: 3}), *[(True, {0: 1, 1: 1})] * 2))
rope = partial(rope_tables, Rope(100.0, HEAD_DIM))
attend_to = partial(attention, rules=NO_RULES, scale=0.3, qk_norm=head_norm(1e-6))
step_of = partial(prepare, rules=NO_RULES, rope=rope)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(f, fullgraph=True, backend=backend)


def example() -> tuple[dict[str, Any], Batch, torch.Tensor, Any]:
    """Parameters of one layer, the second step of a trace, its hidden states, the cache before."""
    runner = Runner(ONE_LAYER, draw(ONE_LAYER), ONE_RANK, TRACE)
    runner.step(*TRACE.steps[0])
    batch, _ = runner.place(*TRACE.steps[1])
    x = torch.randn(len(batch.tokens), 20, generator=torch.Generator().manual_seed(0))
    return runner.shards[0], batch, x, runner.caches[0]["layers.0.attn.kv"]


def same(found: Any, wanted: Any) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_attention():
    """The write into the pool is part of the graph, and stays in place."""
    params, batch, x, cache = example()
    p = params["layers"][0]["attn"]

    def run(p: Any, x: torch.Tensor, cache: Any, batch: Batch) -> Any:
        return attend_to(p, x, cache, step_of(batch))

    wanted = run(p, x, tree_map(torch.clone, cache), batch)
    y, written = compiled(run, "aot_eager")(p, x, cache, batch)
    same((y, written), wanted)
    assert tree_map(torch.Tensor.data_ptr, written) == tree_map(torch.Tensor.data_ptr, cache)


def test_layers_without_a_cache():
    params, batch, x, _ = example()
    o = torch.randn(len(x), 8, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    attn = params["layers"][0]["attn"]
    calls: list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = [
        (partial(mlp, rules=NO_RULES), (params["layers"][0]["mlp"], x)),
        (partial(embed, rules=NO_RULES), (params["embed"], batch.tokens)),
        (partial(take_rows, rules=NO_RULES), (x, batch.out)),
        (partial(lm_head, vocab_size=VOCAB - 2, rules=NO_RULES), (params["head"], x)),
        (partial(project_out, rules=NO_RULES), (attn["wo"], o)),
    ]
    for f, args in calls:
        same(compiled(f, "aot_eager")(*args), f(*args))


def check_steps(decoder: Decoder, backend: str) -> None:
    """Compiled decode steps against plain ones: equal logits, equal pools, the same storage."""
    params = draw(decoder)
    runner, plain = (Runner(decoder, params, ONE_RANK, TRACE) for _ in range(2))
    decode = compiled(runner.fns.decode, backend)
    runner.fns = dataclasses.replace(runner.fns, decode=decode)
    before = [leaf.data_ptr() for leaf in tree_leaves(runner.caches)]
    for phase, counts in TRACE.steps:
        wanted = plain.step(phase, counts)
        assert distance(runner.step(phase, counts), wanted) <= TOLERANCE
        assert [leaf.data_ptr() for leaf in tree_leaves(runner.caches)] == before
        same(runner.caches, plain.caches)


def test_decode():
    check_steps(ONE_LAYER, "aot_eager")


# torch's own modules warn when inductor imports them.
@pytest.mark.filterwarnings("ignore:.*torch.jit.:DeprecationWarning")
def test_generated_code():
    """New rows are written in place by generated code too, and read behind the write."""
    _, batch, x, cache = example()
    k = x[:, :8].reshape(-1, 4, 2).repeat(1, 1, 3)

    def run(cache: Any, k: torch.Tensor, slots: torch.Tensor) -> Any:
        cache = write(cache, k, 2 * k, slots)
        return cache.k.sum(-1) - cache.v.sum(-1), cache

    wanted = run(tree_map(torch.clone, cache), k, batch.slots)
    y, written = compiled(run, "inductor")(cache, k, batch.slots)
    same((y, written), wanted)
    assert tree_map(torch.Tensor.data_ptr, written) == tree_map(torch.Tensor.data_ptr, cache)


@pytest.mark.parametrize("name", ("llama", "qwen2", "qwen3"))
def test_decode_of_families(name: str, tiny_folder: Callable[..., Path]):
    config = read_config(tiny_folder(name, num_hidden_layers=1))
    family = registry.family_of(config)
    check_steps(family.decoder(family.from_hf(config)), "eager")


def test_a_layer_under_a_bound_mesh():
    """Collectives over axes of size 1 are nothing in the graph."""
    params, _, x, _ = example()
    rules = Rules(**tensor("tp"))
    p = params["layers"][0]["mlp"]
    with bind(Mesh(tp=1), solo()):
        found = compiled(partial(mlp, rules=rules), "eager")(p, x)
    same(found, mlp(p, x, rules=NO_RULES))
