"""The engine under random traces: every request becomes what it becomes alone.

`tiny.expected` computes a request from whole sequences. The pools are small enough that requests
are preempted, new and freed pages hold NaN, and a request may be aborted at any time.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from funcinfer import Completion, Engine, SamplingParams
from funcinfer.serving import schedule
from funcinfer.tree import tree_leaves
from tests.equivalence.layouts import LAYOUTS
from tests.launch import Processes
from tests.serving import tiny

LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
)


@st.composite
def requests(draw) -> tuple[list[int], SamplingParams]:
    """A prompt and how it is continued, often with a stop token that does come."""
    prompt = tiny.piece(7 * draw(st.integers(0, 3)), draw(st.integers(1, 17)))
    law = draw(st.sampled_from(LAWS))
    stops = ()
    if draw(st.booleans()):
        stops = (tiny.stream(tuple(prompt), law, 6)[draw(st.integers(0, 5))],)
    sampling = dataclasses.replace(
        law,
        max_tokens=draw(st.integers(1, 10)),
        stop_token_ids=stops,
        ignore_eos=draw(st.booleans()),
    )
    return prompt, sampling


class EngineMachine(RuleBasedStateMachine):
    """Add, step and abort in any order on one rank."""

    # The longest request, of 17 + 10 tokens, needs 7 pages.
    @initialize(
        num_pages=st.integers(8, 13),
        token_budget=st.integers(1, 20),
        max_running=st.integers(1, 5),
    )
    def start(self, num_pages, token_budget, max_running):
        self.engine = Engine(
            tiny.alone(),
            num_pages=num_pages,
            page_size=tiny.PAGE_SIZE,
            token_budget=token_budget,
            max_running=max_running,
            poison=True,
            on_token=lambda completion, token: self.streamed[completion.id].append(token),
        )
        self.storage = storage(self.engine)
        self.wanted: dict[object, tuple[list[int], str]] = {}
        self.streamed: dict[object, list[int]] = {}
        self.ended: dict[object, Completion] = {}
        self.count = 0

    @rule(request=requests())
    def add(self, request):
        id = self.engine.add(*request, id=("request", self.count))
        self.count += 1
        self.wanted[id], self.streamed[id] = tiny.expected(*request), []

    @rule()
    def step(self):
        before = set(self.engine.live)
        ended = self.engine.step()
        assert {done.id for done in ended} == before - set(self.engine.live)
        for done in ended:
            assert (done.tokens, done.finish_reason) == self.wanted[done.id]
            self.ended[done.id] = done

    @rule(choice=st.integers(0))
    def abort(self, choice):
        live = sorted(self.engine.live)
        if live:
            done = self.engine.abort(live[choice % len(live)])
            assert done.finish_reason == "abort"
            assert done.tokens == self.wanted[done.id][0][: len(done.tokens)]
            assert done.id not in self.engine.live
            self.ended[done.id] = done

    @rule(choice=st.integers(0))
    def preempt(self, choice):
        (state,) = self.engine.states
        if state.running:
            schedule.preempt(state, list(state.running)[choice % len(state.running)])

    @invariant()
    def is_sound(self):
        (state,) = self.engine.states
        held = [page for request in state.running.values() for page in request.pages]
        assert sorted({0, *held}) == sorted([0, *held])
        assert len(held) + state.pool.num_free == state.pool.num_usable
        assert set(self.engine.live) == {*state.running, *state.waiting}
        assert storage(self.engine) == self.storage
        for id, completion in {**self.engine.live, **self.ended}.items():
            assert completion.tokens == self.streamed[id]

    def teardown(self):
        steps = 200
        while self.engine.live and steps:
            self.step()
            steps -= 1
        assert not self.engine.live
        assert self.engine.step() == []  # fills what the last one freed
        assert_initial(self.engine)


EngineMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestTraces = EngineMachine.TestCase


def storage(engine: Engine) -> list[int]:
    return [leaf.data_ptr() for leaf in tree_leaves(engine.caches)]


def assert_initial(engine: Engine) -> None:
    """All pages are free and hold NaN, but for the scratch row."""
    for state in engine.states:
        assert state.pool.num_free == state.pool.num_usable
    for leaf in tree_leaves(engine.caches):
        assert bool(leaf.flatten(0, 1)[1:].isnan().all())


@settings(max_examples=25)
@given(trace=st.lists(requests(), min_size=1, max_size=5), budget=st.integers(1, 12))
def test_a_step_writes_the_planned_slots_and_no_other(trace, budget):
    engine = Engine(tiny.alone(), num_pages=9, page_size=tiny.PAGE_SIZE, token_budget=budget)
    for request in trace:
        engine.add(*request)
    while engine.live:
        (state,) = engine.states
        used = {slot_of(r.pages, x) for r in state.running.values() for x in range(r.computed)}
        unused = [i for i in range(4, 36) if i not in used]
        before = []
        for leaf in tree_leaves(engine.caches):
            leaf.flatten(0, 1)[unused] = 7.25
            before.append(leaf.flatten(0, 1).clone())
        with tiny.recorded_plans() as plans:
            engine.step()
        (plan,) = plans
        planned = [
            slot_of(work.pages, work.start + i)
            for work in plan.works
            for i in range(work.num_tokens)
        ]
        assert len(set(planned)) == len(planned) == plan.num_tokens
        for old, leaf in zip(before, tree_leaves(engine.caches), strict=True):
            new = leaf.flatten(0, 1)
            changed = {i for i in range(len(new)) if not torch.equal(new[i], old[i])}
            fresh = {i for i in planned if bool((old[i] == 7.25).all())}
            assert fresh <= changed <= {0, *planned}
            assert bool(new.isfinite().all())
            # A planned slot is used already only where this step took its page from a request.
            assert plan.preempted or len(fresh) == len(planned)


def slot_of(pages: list[int], position: int) -> int:
    return pages[position // 4] * 4 + position % 4


def mixed_trace() -> list[tuple[list[int], SamplingParams]]:
    """Requests of all laws and many lengths."""
    lengths = (1, 13, 4, 9, 17, 2, 8, 5)
    return [
        (
            tiny.piece(11 * i, length),
            dataclasses.replace(law, max_tokens=3 + i, ignore_eos=i % 2 == 0),
        )
        for (i, length), law in zip(enumerate(lengths), itertools.cycle(LAWS), strict=False)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "one rank",
        "tp2",
        "dp2",
        "dp2 tp2",
        "tp2 sp",
        "dp2 tp2 sp, head and MLP over both, embedding over dp",
        "pcp2",
        "dcp2 tp2",
        "dcp2, runs of 2",
    ],
)
def test_every_mesh_serves_the_same_tokens(name):
    layout = LAYOUTS[name]
    engine = Engine(
        tiny.model(layout),
        num_pages=10 if layout.mesh.size(layout.prefill["requests"]) == 1 else 8,
        page_size=tiny.PAGE_SIZE,
        token_budget=7,
        max_running=4,
        poison=True,
    )
    before = storage(engine)
    wanted, ended, preempted = {}, {}, 0
    with tiny.recorded_plans() as plans:
        for request in mixed_trace():
            wanted[engine.add(*request)] = tiny.expected(*request)
            ended |= {done.id: done for done in engine.step()}
        while engine.live:
            ended |= {done.id: done for done in engine.step()}
        preempted = sum(len(plan.preempted) for plan in plans)
    assert {i: (done.tokens, done.finish_reason) for i, done in ended.items()} == wanted
    assert preempted > 0
    assert storage(engine) == before
    engine.step()
    assert_initial(engine)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_preemption_after_every_token(page_size):
    """All requests start again after each step, so at every length, on and beside page edges."""
    engine = Engine(tiny.alone(), num_pages=48, page_size=page_size, poison=True)
    wanted = {}
    for prompt, sampling in [request for request in mixed_trace() if len(request[0]) < 6]:
        wanted[engine.add(prompt, sampling)] = tiny.expected(prompt, sampling)
    ended = {}
    for _ in range(10):
        ended |= {done.id: done for done in engine.step()}
        (state,) = engine.states
        if state.running:
            schedule.preempt(state, next(iter(state.running)))
    assert {i: (done.tokens, done.finish_reason) for i, done in ended.items()} == wanted


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as two:
        yield two


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_processes_serve_the_same_tokens(processes, name):
    path = "tests.serving.tiny:served_by_processes"
    prompts = [tiny.piece(11 * i, length) for i, length in enumerate((1, 13, 9, 6))]
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=9)
    for sampling in (SamplingParams(max_tokens=12), seeded):
        wanted = [tiny.expected(prompt, sampling) for prompt in prompts]
        assert processes.call(path, name, prompts, sampling) == [wanted, wanted]
    unseeded = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    one, other = processes.call(path, name, prompts, unseeded)
    assert one == other
    again, _ = processes.call(path, name, prompts, unseeded)
    assert again != one
