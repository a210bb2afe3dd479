"""The engine on every mesh, as threads and as processes: the same tokens as on one rank."""

from collections.abc import Iterator

import pytest

from funcinfer import Engine, SamplingParams
from tests.equivalence.layouts import LAYOUTS
from tests.launch import Processes
from tests.serving import tiny
from tests.serving.test_engine_traces import assert_initial, mixed_trace, storage

MODES = {
    "plain": {},
    "drafts": dict(speculate=2),
    "ahead": dict(asynchronous=True),
    "drafts ahead": dict(speculate=2, asynchronous=True),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("one rank", "plain"),
        ("dp2 tp2", "plain"),
        ("tp2 sp", "drafts"),
        ("dp2", "drafts ahead"),
        ("dp2 tp2 sp, head and MLP over both, embedding over dp", "drafts ahead"),
        ("pcp2", "drafts ahead"),
        ("dcp2 tp2", "drafts"),
        ("dcp2, runs of 2", "drafts ahead"),
        ("dp2 tp2", "ahead"),
    ],
)
def test_every_mesh_serves_the_same_tokens(name, mode):
    layout = LAYOUTS[name]
    engine = Engine(
        tiny.with_drafts(layout) if "drafts" in mode else tiny.model(layout),
        num_pages=9 if layout.mesh.size(layout.prefill["requests"]) == 1 else 7,
        page_size=tiny.PAGE_SIZE,
        token_budget=7,
        max_running=4,
        poison=True,
        **MODES[mode],
    )
    before = storage(engine)
    wanted, ended = {}, {}
    for request in mixed_trace():
        wanted[engine.add(*request)] = tiny.expected(*request)
        ended |= {done.id: done for done in engine.step()}
    while engine.live:
        ended |= {done.id: done for done in engine.step()}
    assert {i: (done.tokens, done.finish_reason) for i, done in ended.items()} == wanted
    assert engine.metrics.preemptions > 0
    assert (engine.metrics.accepted > 0) == ("drafts" in mode)
    assert storage(engine) == before
    engine.step()
    assert_initial(engine)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as two:
        yield two


@pytest.mark.parametrize("name", ["tp2", "dp2"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_first_process_schedules_for_the_others(processes, name, asynchronous):
    path = "tests.serving.tiny:served_by_processes"
    prompts = [tiny.piece(11 * i, length) for i, length in enumerate((1, 13, 9, 6))]
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=9)
    penalised = SamplingParams(max_tokens=9, frequency_penalty=1.0, logit_bias={3: 2.0})
    for sampling in (SamplingParams(max_tokens=12), seeded, penalised):
        wanted = [tiny.expected(prompt, sampling) for prompt in prompts]
        first, other = processes.call(path, name, prompts, sampling, asynchronous)
        assert first[0] == wanted
        assert other[0] == []
        assert first[1] == other[1]  # the tokens of every step, on every rank
    unseeded = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    (one, steps), (_, others) = processes.call(path, name, prompts, unseeded, asynchronous)
    assert steps == others
    (again, _), _ = processes.call(path, name, prompts, unseeded, asynchronous)
    assert again != one
