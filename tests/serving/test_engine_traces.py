"""The engine under random traces: every request becomes what it becomes alone.

`tiny.expected` computes a request from whole sequences. The pools are small enough that requests
are preempted, new and freed pages hold NaN, and a request may be aborted at any time. Prefix cache,
drafts of every origin and asynchronous steps must not be seen in what comes out, nor in the cache.
"""

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from funcinfer import Completion, Engine, SamplingParams
from funcinfer.kvcache.layout import pages_needed
from funcinfer.kvcache.prefix import scope
from funcinfer.serving import schedule
from funcinfer.serving.drafters import NgramDrafter, ScriptedDrafter
from funcinfer.serving.sampling import child_seed
from funcinfer.tree import tree_leaves
from tests.serving import tiny

LAWS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 7: -100.0}, min_tokens=4, seed=9),
)
STOPS = ("ab", "cab", "bca", "cc")


@st.composite
def requests(draw) -> tuple[list[int], SamplingParams]:
    """A prompt and how it is continued, often with a stop token that does come."""
    length = draw(st.sampled_from([1, 3, 4, 5, 8, 11, 16, 17]))
    prompt = tiny.piece(7 * draw(st.integers(0, 1)), length)
    law = draw(st.sampled_from(LAWS))
    stop_ids = ()
    if draw(st.booleans()):
        stop_ids = (tiny.stream(tuple(prompt), tiny.law_of(law), 6)[draw(st.integers(0, 5))],)
    sampling = dataclasses.replace(
        law,
        max_tokens=draw(st.integers(max(1, law.min_tokens), 10)),
        stop_token_ids=stop_ids,
        ignore_eos=draw(st.booleans()),
        stop=draw(st.lists(st.sampled_from(STOPS), max_size=2)),
        include_stop=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 2])),
        n=draw(st.sampled_from([1, 1, 3])),
    )
    return prompt, sampling


def single(sampling: SamplingParams, child: int) -> SamplingParams:
    """The child-th completion as a request of its own."""
    seed = sampling.seed if sampling.seed is None else child_seed(sampling.seed, child)
    return dataclasses.replace(sampling, n=1, seed=seed)


class Drafts:
    """A drafter that knows what will come, and is right as often as its pattern says."""

    def __init__(self, pattern: list[int]) -> None:
        self.wanted: dict[object, tuple[list[int], SamplingParams]] = {}
        self.pattern = itertools.cycle(pattern)

    def __call__(self, id, history, count) -> list[int]:
        prompt, sampling = self.wanted[id]
        known = len(history) - len(prompt)
        stops = tiny.stops_of(sampling) if sampling.min_tokens else ()
        right = next(self.pattern)
        most = min(known + count, tiny.MAX_LENGTH - len(prompt))
        tokens = tiny.stream(tuple(prompt), tiny.law_of(sampling), most, stops)[known:]
        return [(t + (i >= right)) % tiny.VOCAB for i, t in enumerate(tokens)]


class EngineMachine(RuleBasedStateMachine):
    """Add, step and abort in any order on one rank."""

    # The longest request, of 17 + 10 tokens, leaves the pool little more than it needs.
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        spare_pages=st.integers(1, 6),
        token_budget=st.integers(1, 20),
        max_running=st.integers(1, 5),
        prefix_cache=st.booleans(),
        drafter=st.sampled_from(["none", "none", "n-gram", "script", "module", "module"]),
        speculate=st.integers(1, 5),
        asynchronous=st.booleans(),
        pattern=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        chunk=st.sampled_from([None, 2, 5]),
    )
    def start(
        self, page_size, spare_pages, drafter, speculate, asynchronous, pattern, chunk, **options
    ):
        self.script = Drafts(pattern)
        given_drafter = {"n-gram": NgramDrafter(2, 1), "script": ScriptedDrafter(self.script)}
        self.asynchronous = asynchronous and drafter in ("none", "module")
        self.engine = Engine(
            tiny.with_drafts() if drafter == "module" else tiny.alone(),
            num_pages=pages_needed(17 + 10, page_size) + spare_pages,
            page_size=page_size,
            speculate=0 if drafter == "none" else speculate,
            drafter=given_drafter.get(drafter),
            asynchronous=self.asynchronous,
            chunk=None if chunk is None else lambda position: chunk,
            text=tiny.text(),
            poison=True,
            on_token=lambda completion, token: self.streamed[completion.id].append(token),
            **options,
        )
        count_every_draft(self.engine)
        self.kind = f"{drafter}{' ahead' if self.asynchronous else ''}"
        self.storage = storage(self.engine)
        self.wanted: dict[object, tuple[list[int], SamplingParams]] = {}
        self.streamed: dict[object, list[int]] = {}
        self.shown: dict[object, str] = {}
        self.ended: dict[object, Completion] = {}
        self.count = 0

    @precondition(lambda self: len(self.engine.live) < 10)
    @rule(request=requests(), priority=st.integers(0, 1), salt=st.sampled_from([None, None, "x"]))
    def add(self, request, priority, salt):
        prompt, sampling = request
        id = ("request", self.count)
        self.count += 1
        for child in range(sampling.n):
            name = (id, child) if child else id
            self.wanted[name] = prompt, single(sampling, child)
            self.streamed[name], self.shown[name] = [], ""
        self.script.wanted = self.wanted
        options = dict(priority=priority, scope=scope(salt=salt))
        assert self.engine.add(prompt, sampling, id=id, **options) == id

    @rule()
    def step(self):
        before = set(self.engine.live)
        ended = self.engine.step()
        assert {done.id for done in ended} == before - set(self.engine.live)
        for done in ended:
            check_whole(done, *self.wanted[done.id])
            self.ended[done.id] = done

    @rule(choice=st.integers(0))
    def abort(self, choice):
        live = sorted(self.engine.live, key=str)
        if live:
            done = self.engine.abort(live[choice % len(live)])
            assert done.finish_reason == "abort"
            wanted, _ = tiny.expected(*self.wanted[done.id])
            assert done.tokens == wanted[: len(done.tokens)]
            assert done.text.startswith(self.shown[done.id])
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
        check_pool(state)
        assert set(self.engine.live) == {*state.running, *state.waiting}
        assert storage(self.engine) == self.storage
        for id, completion in {**self.engine.live, **self.ended}.items():
            assert completion.tokens == self.streamed[id]
            assert completion.text.startswith(self.shown[id])
            self.shown[id] = completion.text

    @invariant()
    def caches_are_cold(self):
        """What is computed for certain is what one forward of the whole sequence computes."""
        (state,) = self.engine.states
        for request in list(state.running.values())[:2]:
            sure = request.row_start if self.asynchronous else request.computed
            check_rows(self.engine, request, min(sure, len(request.tokens)))

    def teardown(self):
        event(self.kind)
        steps = 1000
        while self.engine.live and steps:
            self.step()
            steps -= 1
        assert not self.engine.live
        assert self.engine.step() == []  # fills what the last one freed
        assert_initial(self.engine)


EngineMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestTraces = EngineMachine.TestCase


def count_every_draft(engine: Engine) -> None:
    """Have each launch checked: of the drafts that were planned, the device has counted those that
    it does not accept as rejected, those too that it could not make. The next row is placed by it.
    """
    launch = engine.executor.launch

    def checked(step):
        result = launch(step)
        rows = [row for group in step.groups for row in group if row.draw is not None]
        for b, row in enumerate(rows):
            rejected = engine.executor.slots[0].rejected_S[row.slot]
            assert int(result.num_accepted_B[b]) + int(rejected) == row.num_drafts
        return result

    engine.executor.launch = checked


def check_whole(done: Completion, prompt: list[int], sampling: SamplingParams) -> None:
    """That a request has become what it becomes alone."""
    assert (done.tokens, done.finish_reason) == tiny.expected(prompt, sampling)
    assert done.text == tiny.expected_text(prompt, sampling)
    if sampling.logprobs is None:
        assert done.logprobs is None
    else:
        wanted = tiny.expected_logprobs(prompt, done.tokens, sampling.logprobs)
        check_logprobs(done.logprobs, wanted)
    if sampling.prompt_logprobs is None:
        assert done.prompt_logprobs is None
    else:
        first, *rest = done.prompt_logprobs
        assert first is None
        wanted = tiny.expected_logprobs(prompt[:1], prompt[1:], sampling.prompt_logprobs)
        check_logprobs(rest, wanted)


def check_logprobs(found, wanted) -> None:
    assert [(f.token, [i for i, _ in f.top]) for f in found] == [
        (token, [i for i, _ in top]) for token, _, top in wanted
    ]
    for f, (_, value, top) in zip(found, wanted, strict=True):
        assert abs(f.logprob - value) < 1e-9
        assert all(abs(x - y) < 1e-9 for (_, x), (_, y) in zip(f.top, top, strict=True))


def check_pool(state: schedule.ScheduleState) -> None:
    """References are those of the tables, and every page is held, idle or free."""
    pool = state.pool
    held = Counter(page for request in state.running.values() for page in request.pages)
    assert 0 not in held
    for page in range(1, pool.num_pages):
        assert pool.references(page) == held[page]
    assert len(held) + pool.num_free == pool.num_usable
    assert pool.num_idle <= pool.num_free
    for request in state.running.values():  # what is written next is of one table alone
        for page in request.pages[request.computed // state.page_size :]:
            assert held[page] == 1
            assert not pool.is_kept(page)


def check_rows(engine: Engine, request: schedule.Request, count: int) -> None:
    """That the cache holds, of the first `count` positions, what one forward computes."""
    if count == 0:
        return
    places = [slot_of(request.pages, x, engine.page_size) for x in range(count)]
    cold = tiny.cold_rows(tuple(request.tokens[:count]))
    for leaf, rows in zip(tree_leaves(engine.executor.caches), cold, strict=False):
        torch.testing.assert_close(leaf.flatten(0, 1)[places], rows, rtol=0, atol=1e-9)


def storage(engine: Engine) -> list[int]:
    return [leaf.data_ptr() for leaf in tree_leaves(engine.executor.caches)]


def assert_initial(engine: Engine) -> None:
    """All pages can be handed out, and those without known contents hold NaN."""
    for state in engine.states:
        assert state.pool.num_free == state.pool.num_usable
        if state.prefix is not None:
            state.prefix.clear()
        assert state.pool.num_idle == 0
    engine.step()
    for leaf in tree_leaves(engine.executor.caches):
        assert bool(leaf[1:].isnan().all())


@settings(max_examples=8)
@given(trace=st.lists(requests(), min_size=1, max_size=4), budget=st.integers(1, 12))
def test_a_step_writes_the_planned_slots_and_no_other(trace, budget):
    engine = Engine(
        tiny.alone(),
        num_pages=9,
        page_size=tiny.PAGE_SIZE,
        token_budget=budget,
        prefix_cache=False,
        text=tiny.text(),
    )
    for request in trace:
        engine.add(*request)
    while engine.live:
        (state,) = engine.states
        used = {slot_of(r.pages, x) for r in state.running.values() for x in range(r.computed)}
        unused = [i for i in range(4, 36) if i not in used]
        before = []
        for leaf in tree_leaves(engine.executor.caches):
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
        for old, leaf in zip(before, tree_leaves(engine.executor.caches), strict=True):
            new = leaf.flatten(0, 1)
            changed = {i for i in range(len(new)) if not torch.equal(new[i], old[i])}
            fresh = {i for i in planned if bool((old[i] == 7.25).all())}
            assert fresh <= changed <= {0, *planned}
            assert bool(new.isfinite().all())
            # A planned slot is used already only where this step took its page from a request.
            assert plan.preempted or len(fresh) == len(planned)


def slot_of(pages: list[int], position: int, size: int = tiny.PAGE_SIZE) -> int:
    return pages[position // size] * size + position % size


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("speculate", [0, 2])
def test_preemption_after_every_token(page_size, speculate):
    """All requests start again after each step, so at every length, on and beside page edges."""
    engine = Engine(
        tiny.with_drafts(), num_pages=48, page_size=page_size, speculate=speculate, poison=True
    )
    wanted = {}
    for prompt, sampling in [request for request in mixed_trace() if len(request[0]) < 6]:
        wanted[engine.add(prompt, sampling)] = tiny.expected(prompt, sampling)
    ended = {}
    for _ in range(12):
        ended |= {done.id: done for done in engine.step()}
        (state,) = engine.states
        if state.running:
            schedule.preempt(state, next(iter(state.running)))
    assert {i: (done.tokens, done.finish_reason) for i, done in ended.items()} == wanted


def test_drafts_that_the_device_could_not_make_count_as_rejected():
    """In a full pool one request's chain of drafts ends for lack of a page; the other request ends,
    and the next row is planned with all drafts, before those that there are have been read.
    """
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    engine = Engine(
        tiny.with_drafts(),
        num_pages=1 + 12,
        page_size=1,
        speculate=3,
        max_running=2,
        asynchronous=True,
        prefix_cache=False,
        poison=True,
    )
    count_every_draft(engine)
    wanted = {}
    for prompt, most in ((tiny.piece(0, 3), 10), (tiny.piece(9, 5), 4)):
        params = dataclasses.replace(sampling, max_tokens=most)
        wanted[engine.add(prompt, params)] = tiny.expected(prompt, params)
    ended = {}
    while engine.live:
        ended |= {done.id: done for done in engine.step()}
    assert {i: (done.tokens, done.finish_reason) for i, done in ended.items()} == wanted


def mixed_trace() -> list[tuple[list[int], SamplingParams]]:
    """Requests of all laws and many lengths."""
    lengths = (1, 13, 4, 9, 17, 2, 8, 5, 11)
    return [
        (
            tiny.piece(11 * i, length),
            dataclasses.replace(law, max_tokens=4 + i, ignore_eos=i % 2 == 0),
        )
        for (i, length), law in zip(enumerate(lengths), itertools.cycle(LAWS), strict=False)
    ]
