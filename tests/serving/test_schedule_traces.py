"""Random traces over pool, prefix cache and scheduler, with a fake model (`tests.serving.fake`).

Requests with shared prefixes, scopes and priorities are added, forked, stepped in chunks, given
drafts of which some are right, answered late, aborted, preempted, and lost in failing steps. After
every event the pool and the index are what the tables say, and every request ends as it does alone.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import PrefixCache, hash_block, scope
from funcinfer.serving.request import Plan, Work
from funcinfer.serving.schedule import (
    ScheduleState,
    add,
    commit,
    finish,
    fork,
    preempt,
    propose,
    schedule,
)
from tests.serving.fake import VOCAB, Device, alone, guess, rows_of

SCOPES = (scope(), scope(salt="x"))
STARTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9])
MAX_LENGTH = 24
HASHES = {
    "as shipped": hash_block,
    "constant": lambda parent, tokens: 5,
}

REQUESTS = st.fixed_dictionaries(
    dict(
        start=st.sampled_from(STARTS),
        length=st.integers(0, 8),
        rest=st.lists(st.integers(0, VOCAB - 1), max_size=3),
        max_tokens=st.integers(1, 12),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=1),
        number=st.integers(0, 9),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        scope=st.sampled_from(SCOPES),
    )
)


class TraceMachine(RuleBasedStateMachine):
    """`queue`: the answers of steps that were run and not read yet, in order."""

    ahead = 0

    @initialize(
        num_pages=st.integers(3, 12),
        page_size=st.integers(1, 4),
        budget=st.integers(1, 12),
        max_running=st.integers(2, 5),
        cached=st.sampled_from([None, "as shipped", "as shipped", "constant"]),
        num_drafts=st.sampled_from([0, 2, 3]),
        right=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    )
    def start(self, num_pages, page_size, budget, max_running, cached, num_drafts, right):
        self.device = Device(
            page_size,
            lambda work: self.state.request(work.request_id).sampling,
            lambda position: right[position % len(right)],
        )
        pool = PagePool(num_pages, self.device.free)
        prefix = PrefixCache(pool, page_size, HASHES[cached]) if cached else None
        self.state = ScheduleState(pool, page_size, MAX_LENGTH, prefix=prefix)
        self.budget, self.max_running = budget, max_running
        self.num_drafts = num_drafts
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.queue: list[list[tuple[Work, list[int]]]] = []

    def live(self) -> list:
        return [*self.state.running.values(), *self.state.waiting.values()]

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=3))
    def add(self, requests):
        for request in requests:
            self.add_one(**request)

    def add_one(self, start, length, rest, max_tokens, stop, number, priority, scope) -> None:
        prompt = start[:length] + rest
        max_total = len(prompt) + max_tokens
        pages = len({position // self.state.page_size for position in range(max_total - 1)})
        fits = prompt and max_total <= MAX_LENGTH and pages <= self.state.pool.num_usable
        arguments = dict(
            max_total=max_total, stop=stop, sampling=scope, priority=priority, scope=scope
        )
        if not fits or number in {request.id for request in self.live()}:
            before = self.state.counter, self.live()
            with pytest.raises(ValueError, match=f"{number}"):
                add(self.state, number, prompt, **arguments)
            assert before == (self.state.counter, self.live())
            return
        add(self.state, number, prompt, **arguments)
        self.expected[number] = alone(prompt, max_total, stop, scope)

    @rule(choice=st.integers(0), number=st.integers(0, 12))
    def fork(self, choice, number):
        live = self.live()
        if live and number not in {request.id for request in live}:
            parent = live[choice % len(live)]
            fork(self.state, parent.id, number, sampling=parent.sampling)
            self.expected[number] = self.expected[parent.id]

    @rule(choice=st.integers(0), count=st.integers(1, 4), right=st.integers(0, 4))
    def propose(self, choice, count, right):
        live = self.live()
        if live:
            request = live[choice % len(live)]
            drafts = guess(request.tokens, request.sampling, count, right)
            if request.in_flight:
                with pytest.raises(ValueError, match="can't follow a token not committed yet"):
                    propose(self.state, request.id, drafts)
            else:
                propose(self.state, request.id, drafts)

    @rule(count=st.integers(1, 4), chunk=st.sampled_from([None, None, 1, 2, 3]), late=st.booleans())
    def steps(self, count, chunk, late):
        for _ in range(count):
            self.step(chunk, late)
            self.state_is_sound()

    @rule(chunk=st.sampled_from([None, 2]), right=st.integers(0, 4))
    def drafted_step(self, chunk, right):
        """A step for which drafts are proposed to everybody."""
        for number, request in enumerate(self.live()):
            if not request.in_flight:
                drafts = guess(request.tokens, request.sampling, 1 + (right + number) % 4, right)
                propose(self.state, request.id, drafts)
        self.step(chunk, late=bool(self.ahead))

    def step(self, chunk: int | None, late: bool) -> None:
        plan = self.planned(chunk)
        self.queue.append(self.device.launch(plan))
        pool = self.state.pool
        for work, page in self.device.written:
            assert pool.references(page) == 1, f"{work} writes to a shared page"
            assert not pool.is_kept(page), f"{work} writes to a page of the index"
        while len(self.queue) > 1 and self.ahead:
            self.read_one()
        if not late:
            self.read()

    def planned(self, chunk: int | None) -> Plan:
        state = self.state
        before = {r.id: (r, r.computed, len(r.tokens), r.in_flight, r.epoch) for r in self.live()}
        running, waiting = list(state.running), list(state.waiting)
        plan = schedule(
            state,
            self.budget,
            self.max_running,
            ahead=self.ahead,
            num_drafts=self.num_drafts,
            chunk=None if chunk is None else lambda start: chunk,
        )
        assert plan.num_tokens == sum(work.num_tokens for work in plan.works) <= self.budget
        assert len(state.running) <= self.max_running
        ids = [work.request_id for work in plan.works]
        assert ids == sorted(set(ids), key=lambda i: before[i][0].order)
        admitted = [i for i in waiting if i in state.running]
        assert admitted == waiting[: len(admitted)], "nobody overtakes"
        assert not admitted or not plan.preempted
        num_hit = 0
        for work in plan.works:
            request, computed, total, in_flight, epoch = before[work.request_id]
            assert work.epoch == epoch
            assert work.request_id not in plan.preempted
            if request.id in running:
                assert work.start == computed
            else:
                assert work.start % state.page_size == 0
                assert work.start <= total - 1
                num_hit += work.start
            assert in_flight <= self.ahead
            assert work.late == (in_flight > 0)
            end = work.start + work.num_tokens - work.num_drafts
            last = work.start + 1 if work.late else total
            assert work.start < end <= last
            assert work.wants_logits == (end == last)
            assert last + work.num_drafts < request.max_total
            assert chunk is None or end - work.start <= max(chunk, 1)
            assert not work.num_drafts or work.wants_logits
            assert work.drafts == () or len(work.drafts) == work.num_drafts
            if not work.late:
                assert work.tokens[: end - work.start] == request.tokens[work.start : end]
        assert num_hit == plan.num_hit
        for request_id in plan.preempted:
            assert request_id in state.waiting
        if running:
            first, computed, total, in_flight, _ = before[running[0]]
            assert running[0] not in plan.preempted
            if not in_flight or (self.ahead >= in_flight and computed + 1 < first.max_total):
                assert running[0] in ids, "the first running request always runs"
        return plan

    @rule()
    def read(self):
        while self.queue:
            self.read_one()

    def read_one(self) -> None:
        for work, tokens in self.queue.pop(0):
            request = self.state.running.get(work.request_id)
            fresh = request is not None and request.epoch == work.epoch
            before = request.num_output if fresh else None
            accepted, reason = commit(self.state, work, tokens)
            assert fresh == (accepted > 0)
            if fresh:
                output, end = self.expected[request.id]
                assert request.output == output[: before + accepted]
                assert (
                    reason == request.finish_reason == (end if request.output == output else None)
                )
                assert accepted == len(tokens) or reason is not None
                if reason is None:
                    assert request.computed + (0, 1)[request.in_flight] >= len(request.tokens) - 1

    @rule(
        kind=st.sampled_from(["abort", "error", "preempt", "preempt", "lose", "lose", "clear"]),
        choice=st.integers(0, 9),
    )
    def disturb(self, kind, choice):
        live, running = self.live(), list(self.state.running.values())
        if kind == "lose":
            self.lose()
        elif kind == "clear":
            self.clear()
        elif kind == "preempt" and running:
            first = choice % len(running)
            preempt(self.state, running[first].id)
            assert list(self.state.running.values()) == running[:first]
        elif kind in ("abort", "error") and live:
            request = live[choice % len(live)]
            assert finish(self.state, request.id, kind) is request
            assert request.output == self.expected[request.id][0][: request.num_output]

    def lose(self):
        """A step fails on the device; one that was planned ahead goes with it."""
        lost = [self.planned(None)]
        if self.ahead:
            self.read()
            lost.append(self.planned(None))
        for plan in lost:
            for work in plan.works:
                request = self.state.running.get(work.request_id)
                if request is not None and request.epoch == work.epoch:
                    preempt(self.state, request.id)

    def clear(self):
        if self.state.prefix is not None:
            self.state.prefix.clear()

    @invariant()
    def state_is_sound(self):
        if not hasattr(self, "state"):
            return
        state, pool = self.state, self.state.pool
        held = [page for request in state.running.values() for page in request.pages]
        for page in range(1, pool.num_pages):
            assert pool.references(page) == held.count(page)
        kept = {page for page in range(1, pool.num_pages) if pool.is_kept(page)}
        assert pool.num_free + len(set(held)) == pool.num_usable
        assert pool.num_idle == len(kept - set(held))
        blocks = state.prefix.blocks if state.prefix is not None else []
        assert sorted(block.page for block in blocks) == sorted(kept)
        for block in blocks:
            tokens, above = block.tokens, block
            while above.parent is not None:
                above = above.parent
                tokens = above.tokens + tokens
            wanted = list(zip(tokens, rows_of(tokens, block.scope), strict=True))
            places = [(block.page, offset) for offset in range(state.page_size)]
            assert [self.device.rows[place] for place in places] == wanted[-state.page_size :]
        self.requests_are_sound(kept)

    def requests_are_sound(self, kept: set[int]) -> None:
        state = self.state
        for request in state.running.values():
            assert len(request.tokens) < request.max_total
            assert 0 <= request.computed <= request.max_total - 1
            assert request.in_flight <= 1 + self.ahead
            if not request.in_flight:
                assert request.computed < len(request.tokens)
            covered = len(request.pages) * state.page_size
            assert request.computed <= covered <= request.max_total - 2 + state.page_size
            for number, page in enumerate(request.pages):
                if page in kept or state.pool.references(page) > 1:
                    assert (number + 1) * state.page_size <= len(request.tokens) - 1
        for request in state.waiting.values():
            assert (request.computed, request.pages, request.in_flight) == (0, [], 0)
        for requests in (state.running, state.waiting):
            orders = [request.order for request in requests.values()]
            assert orders == sorted(orders)
        assert not state.running.keys() & state.waiting.keys()

    def teardown(self):
        if not hasattr(self, "state"):
            return
        self.read()
        steps = 2 * sum(request.max_total for request in self.live()) + 2
        while self.live():
            self.step(chunk=None, late=bool(self.ahead))
            self.state_is_sound()
            steps -= 1
            assert steps >= 0
        self.read()
        self.clear()
        assert self.state.pool.num_free == self.state.pool.num_usable
        assert (self.state.pool.num_idle, len(self.state.waiting)) == (0, 0)
        self.device.erase()
        assert not self.device.rows


class AheadMachine(TraceMachine):
    """The same while the step before is running still."""

    ahead = 1


TraceMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
AheadMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30)
TestTraces = TraceMachine.TestCase
TestAhead = AheadMachine.TestCase


def drawn_request(random: Random) -> dict:
    return dict(
        start=random.choice(STARTS),
        length=random.randint(0, 8),
        rest=[random.randrange(VOCAB) for _ in range(random.randint(0, 3))],
        max_tokens=random.randint(1, 12),
        stop=frozenset(random.sample(range(VOCAB), random.randint(0, 1))),
        number=random.randint(0, 9),
        priority=random.choice([0, 0, 0, 1, -1]),
        scope=random.choice(SCOPES),
    )


@pytest.mark.parametrize("machine", [TraceMachine, AheadMachine])
@pytest.mark.parametrize("first_seed", range(0, 80, 20))
def test_long_traces(machine, first_seed):
    """Traces drawn evenly, which are longer and busier than those of hypothesis."""
    for seed in range(first_seed, first_seed + 20):
        random = Random(seed)
        trace = machine()
        trace.start(
            num_pages=random.randint(4, 12),
            page_size=random.randint(1, 4),
            budget=random.randint(1, 12),
            max_running=random.randint(2, 5),
            cached=random.choice([None, "as shipped", "as shipped", "constant"]),
            num_drafts=random.choice([0, 2, 3]),
            right=[random.randint(0, 3) for _ in range(3)],
        )
        for _ in range(60):
            event = random.choice(["add", "steps", "steps", "steps", "drafts", "fork", "disturb"])
            if event == "add":
                trace.add_one(**drawn_request(random))
            elif event == "steps":
                chunk, late = random.choice([None, None, 1, 2]), random.random() < 0.3
                trace.steps(count=random.randint(1, 3), chunk=chunk, late=late)
            elif event == "drafts":
                trace.drafted_step(chunk=None, right=random.randint(0, 4))
            elif event == "fork":
                trace.fork(choice=random.randrange(10), number=random.randint(0, 12))
            else:
                kind = random.choice(["abort", "preempt", "lose", "lose", "clear"])
                trace.disturb(kind=kind, choice=random.randrange(10))
            trace.state_is_sound()
        trace.teardown()
