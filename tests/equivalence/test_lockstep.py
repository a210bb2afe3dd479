"""Data parallelism in lockstep: experts lie over all ranks, so each rank runs each step.

A requests group without work runs padding; a rank without a token, or without a key of its
requests, takes part in every collective. What the others compute does not change, what such a rank
computes is finite, and its attention says that it saw nothing: out 0, lse -inf.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcinfer
from funcinfer.kvcache.batch import batch_specs
from funcinfer.layers import primitives as ops
from funcinfer.models import gqa, mla
from funcinfer.models.decoder import Decoder, output_specs
from funcinfer.sharding import Axis, Mesh, Rules, ThreadRanks, current, names, presets
from funcinfer.tree import tree_leaves
from tests.equivalence import tiny
from tests.equivalence.harness import (
    ONE_RANK,
    Layout,
    Logits,
    Runner,
    Trace,
    assert_same,
    draw,
    run,
)
from tests.equivalence.layouts import data
from tests.launch import process_ranks, run_on_processes

# Request i is of group i % 2 on two groups. In each step one of them or both have nothing to do, or
# one has several times the tokens of the other.
TRACE = Trace(
    lengths={0: 12, 1: 3, 2: 5, 4: 1},
    steps=(
        (False, {0: 7}),
        (False, {1: 1}),
        (False, {0: 1, 2: 4, 1: 1}),
        (True, {0: 1, 2: 1}),
        (True, {}),
        (True, {1: 1}),
        (True, {0: 3, 4: 1}),
    ),
)


def wide(over: Axis) -> dict[str, Axis]:
    """The widths that every rank of a group has a slice of; heads, but not experts."""
    return dict.fromkeys(("heads", "o_heads", "mlp", "shared_mlp", "vocab_in", "vocab_out"), over)


BOTH = ("dp", "tp")
LAYOUTS: dict[str, Layout] = {
    "experts over dp2, exchanged": Layout(
        Mesh(dp=2), Rules(**data("dp"), moe_tokens="dp", experts="dp")
    ),
    "experts over dp2, gathered": Layout(Mesh(dp=2), Rules(**data("dp"), experts="dp")),
    "experts over dp2 and tp2, exchanged": Layout(
        Mesh(dp=2, tp=2),
        Rules(
            **data("dp") | wide("tp") | dict.fromkeys(("residual_tokens", "moe_tokens"), BOTH),
            experts=BOTH,
        ),
    ),
    "experts over dp2 and tp2, gathered": Layout(
        Mesh(dp=2, tp=2), Rules(**data("dp") | wide("tp"), experts=BOTH)
    ),
    "experts over dp2 and tp2, exchanged over dp": Layout(
        Mesh(dp=2, tp=2), Rules(**data("dp") | wide("tp"), moe_tokens="dp", experts=BOTH)
    ),
    "experts over dp4": Layout(Mesh(dp=4), Rules(**data("dp"), moe_tokens="dp", experts="dp")),
    "experts over dp2, embedding and head too": Layout(
        Mesh(dp=2),
        Rules(
            **data("dp"),
            **dict.fromkeys(("vocab_in", "vocab_out", "o_heads", "mlp"), "dp")
            | dict(experts="dp", moe_tokens="dp"),
        ),
    ),
    "experts over dp2 and dcp4": Layout(
        Mesh(dp=2, dcp=4),
        Rules(**data("dp") | wide("dcp"), page_tokens="dcp", experts=("dp", "dcp")),
    ),
}
MODELS: dict[str, Callable[[], Decoder]] = {
    "grouped": lambda: gqa.decoder(tiny.grouped(2, experts=True)),
    "latent": lambda: mla.decoder(tiny.latent(2, experts=True)),
    "sparse": lambda: mla.decoder(tiny.latent(2, experts=True, index_layers=(0, 1))),
}


@functools.cache
def one_rank(name: str) -> tuple[Decoder, Any, Logits]:
    decoder = MODELS[name]()
    params = draw(decoder)
    busy = Trace(TRACE.lengths, tuple(step for step in TRACE.steps if step[1]))
    return decoder, params, run(decoder, params, ONE_RANK, busy)


def fitted(name: str, layout: str) -> Layout:
    """The layout for a model; grouped attention has 4 KV heads to shard too."""
    chosen = LAYOUTS[layout]
    tp = "tp" if "tp" in chosen.mesh.names else None
    return chosen.replace(kv_heads=tp) if name == "grouped" else chosen


class Attention:
    """What attention gave on each rank: (whether it sees a key, out, lse) of all tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for name in ("paged_attention", "paged_mla_attention", "sparse_mla_attention"):
            monkeypatch.setattr(ops, name, self.noting(name, getattr(ops, name)))

    def noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            out, lse = original(*args, **kwargs)
            self.seen.append((self.sees(name, args, kwargs), out, lse))
            return out, lse

        return call

    @staticmethod
    def sees(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if name == "sparse_mla_attention":
            return (kwargs["positions_TK"] >= 0).any(1)
        lo, hi = (kwargs["lo_T"], kwargs["hi_T"]) if "lo_T" in kwargs else args[4:6]
        return hi > lo

    def check(self) -> int:
        """The number of tokens that saw nothing; what they gave is 0 and -inf, the rest finite."""
        for sees, out, lse in self.seen:
            assert bool(out.isfinite().all())
            assert bool((out[~sees] == 0).all())
            if lse is not None:  # sparse attention gives one only where parts are merged
                assert bool(lse[sees].isfinite().all())
                assert bool((lse[~sees] == -torch.inf).all())
        return sum(int((~sees).sum()) for sees, _, _ in self.seen)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_idle_ranks_run_along(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, params, wanted = one_rank(name)
    attention = Attention(monkeypatch)
    runner = Runner(decoder, params, fitted(name, layout), TRACE)
    found: Logits = {}
    for decode, counts in TRACE.steps:
        batch, rows = runner.place(decode, counts)
        logits, hidden = outputs(runner, decode, batch)
        assert bool(logits[:, : decoder.vocab_size].isfinite().all())
        assert bool(hidden.isfinite().all())
        for i, n in counts.items():
            runner.done[i] += n
        found |= {
            key: row[: decoder.vocab_size]
            for key, row in zip(rows, logits, strict=True)
            if key is not None
        }
    runner.check_copies()
    assert_same(found, wanted)
    assert attention.check() > 0


def outputs(runner: Runner, decode: bool, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of logits and hidden states, of padding too."""
    rules = runner.layout.rules(decode)
    batches = runner.ranks.split(batch, batch_specs(rules))
    step = runner.fns.decode if decode else runner.fns.prefill
    with torch.no_grad():
        results = runner.ranks.run(step, runner.shards, runner.caches, batches)
    runner.caches = [cache for _, cache in results]
    joined = runner.ranks.join([out for out, _ in results], output_specs(rules))
    return joined.logits, joined.hidden


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_padding_writes_to_the_scratch_page_alone(name: str) -> None:
    decoder, params, _ = one_rank(name)
    layout = fitted(name, "experts over dp2 and tp2, exchanged")
    runner = Runner(decoder, params, layout, TRACE)
    runner.step(False, {0: 7, 1: 1})
    before = [leaf.clone() for leaf in tree_leaves(runner.caches)]
    assert runner.step(True, {}) == {}
    for old, new in zip(before, tree_leaves(runner.caches), strict=True):
        torch.testing.assert_close(new[1:], old[1:], rtol=0, atol=0, equal_nan=True)
        assert bool(new[0].nan_to_num().eq(0).all())


def test_a_rank_that_leaves_out_a_step_is_found_at_once() -> None:
    """It is no matter of time: the rendezvous sees that the others can never go on."""
    decoder, params, _ = one_rank("latent")
    layout = fitted("latent", "experts over dp2, exchanged")
    runner = Runner(decoder, params, layout, TRACE, ranks=ThreadRanks(layout.mesh, timeout=600))
    batch, _ = runner.place(False, {0: 7})
    batches = runner.ranks.split(batch, batch_specs(layout.prefill))

    def only_with_work(params: Any, cache: Any, batch: Any) -> Any:
        env = current()
        assert env is not None
        return runner.fns.prefill(params, cache, batch) if env.coord["dp"] == 0 else None

    with (
        pytest.raises(RuntimeError, match=r"rank 1 \(dp=1\): returned"),
        torch.no_grad(),
    ):
        runner.ranks.run(only_with_work, runner.shards, runner.caches, batches)


# Serving.

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 4], [40, 30, 20, 10, 12], [9]]
MESHES = [
    (Mesh(dp=2, tp=2), dict(sp=True)),
    (Mesh(dp=2, tp=2), {}),
    (Mesh(dp=4), {}),
]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one request", "four"])
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=repr)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32"])
def test_an_engine_serves_fewer_requests_than_ranks(
    name: str,
    mesh: Mesh,
    options: dict[str, bool],
    prompts: list[list[int]],
    tiny_folder: Callable[..., Path],
) -> None:
    """Requests end at different times, so that groups run dry one after another."""
    folder = tiny_folder(name)
    whole = funcinfer.load(folder, dtype=torch.float32)
    preset = presets.for_mesh(whole.cfg.num_kv_heads, mesh, expert_parallel=True, **options)
    model = funcinfer.load(folder, dtype=torch.float32, mesh=preset.mesh, rules=preset.prefill)
    assert names(model.rules["experts"]) == mesh.names
    engine = funcinfer.Engine(model, num_pages=9, page_size=4, token_budget=5, poison=True)
    wanted = {}
    for i, prompt in enumerate(prompts):
        sampling = funcinfer.SamplingParams(max_tokens=2 + 2 * i, ignore_eos=True)
        engine.add(prompt, sampling, id=i)
        wanted[i] = whole.generate([prompt], sampling)[0]
    found, steps = {}, 0
    while engine.live:
        found |= {done.id: done.tokens for done in engine.step()}
        steps += 1
        assert steps < 40
    assert found == wanted


# Processes.


def on_processes(name: str) -> None:
    decoder, params, wanted = one_rank(name)
    layout = fitted(name, "experts over dp2, exchanged")
    assert_same(run(decoder, params, layout, TRACE, ranks=process_ranks(layout.mesh)), wanted)


def test_processes_run_along() -> None:
    run_on_processes(2, "tests.equivalence.test_lockstep:on_processes", "latent")
