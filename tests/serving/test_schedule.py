"""The scheduler with a fake model that reads its tokens back from a fake paged cache.

The model's next token is a hash of the tokens found in the cache, so a wrong page, a page with two
owners, a chunk at a wrong start or a lost token changes what comes out; freed pages are erased.
The truth is `alone`: the same hash over a plain list, without scheduler, pages or chunks.
"""

import itertools
import zlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from funcinfer.kvcache.allocator import PagePool
from funcinfer.serving.schedule import (
    Plan,
    ScheduleState,
    Work,
    add,
    commit,
    finish,
    never_fits,
    preempt,
    schedule,
)

VOCAB = 11


def next_token(history: list[int]) -> int:
    return zlib.crc32(bytes(history)) % VOCAB


def alone(prompt: list[int], max_total: int, stop: frozenset[int]) -> tuple[list[int], str]:
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == max_total:
            return tokens[len(prompt) :], "length"


class Model:
    """Cache rows by page and offset; a freed page loses its rows."""

    def __init__(self, num_pages: int, page_size: int, max_length: int | None = None) -> None:
        self.rows: dict[tuple[int, int], int] = {}
        self.state = ScheduleState(PagePool(num_pages, self.erase), page_size, max_length)

    def erase(self, pages: tuple[int, ...]) -> None:
        self.rows = {place: token for place, token in self.rows.items() if place[0] not in pages}

    def run(self, plan: Plan) -> list[tuple[Work, int]]:
        """Write every row of the plan, then answer those that want logits."""
        size = self.state.page_size
        for work in plan.works:
            for offset, token in enumerate(work.tokens):
                position = work.start + offset
                self.rows[work.pages[position // size], position % size] = token
        answers = []
        for work in plan.works:
            if work.wants_logits:
                end = work.start + work.num_tokens
                cached = [self.rows[work.pages[x // size], x % size] for x in range(end)]
                answers.append((work, next_token(cached)))
        return answers

    def step(self, budget: int, max_running: int) -> Plan:
        plan = schedule(self.state, budget, max_running)
        for work, token in self.run(plan):
            commit(self.state, work, [token])
        return plan

    def drain(self, budget: int, max_running: int) -> None:
        """Step until nothing is live; each step brings the oldest request on by a token."""
        for _ in range(sum(request.max_total for request in self.live())):
            if self.live():
                self.step(budget, max_running)
        assert not self.live()

    def live(self) -> list:
        return [*self.state.running.values(), *self.state.waiting.values()]


def check_state(state: ScheduleState) -> None:
    """Every page has one owner, nobody holds more than it uses, and order is order of arrival."""
    held = [page for request in state.running.values() for page in request.pages]
    assert len(held) == len(set(held))
    assert len(held) + state.pool.num_free == state.pool.num_usable
    assert all(state.pool.references(page) == 1 for page in held)
    for request in state.running.values():
        assert 0 <= request.computed <= len(request.tokens) < request.max_total
        assert len(request.pages) == len({x // state.page_size for x in range(request.computed)})
    for request in state.waiting.values():
        assert request.computed == 0
        assert request.pages == []
    arrivals = [r.arrival for r in (*state.running.values(), *state.waiting.values())]
    assert arrivals == sorted(arrivals)
    assert not state.running.keys() & state.waiting.keys()


class ScheduleMachine(RuleBasedStateMachine):
    """Random traces of add, step, late answers, abort and preempt over a small pool."""

    @initialize(
        num_pages=st.integers(2, 8),
        page_size=st.integers(1, 4),
        budget=st.integers(1, 9),
        max_running=st.integers(1, 5),
    )
    def start(self, num_pages, page_size, budget, max_running):
        self.model = Model(num_pages, page_size, max_length=20)
        self.state = self.model.state
        self.budget, self.max_running = budget, max_running
        self.expected: dict[int, tuple[list[int], str]] = {}
        self.requests: dict[int, object] = {}
        self.late: list[tuple[Work, int]] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), max_size=14),
        max_tokens=st.integers(1, 9),
        stop=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        number=st.integers(0, 6),
    )
    def add(self, prompt, max_tokens, stop, number):
        max_total = len(prompt) + max_tokens
        positions = range(max_total - 1)
        pages = len({position // self.state.page_size for position in positions})
        fits = prompt and max_total <= 20 and pages <= self.state.pool.num_usable
        if not fits or number in {request.id for request in self.model.live()}:
            counter = self.state.counter
            with pytest.raises(ValueError, match=f"{number}"):
                add(self.state, number, prompt, max_total=max_total, stop=stop)
            assert self.state.counter == counter
            return
        self.requests[number] = add(self.state, number, prompt, max_total=max_total, stop=stop)
        self.expected[number] = alone(prompt, max_total, stop)

    @rule()
    def step(self):
        before = {request.id: request for request in self.model.live()}
        todo = {i: (r.computed, len(r.tokens), r.epoch) for i, r in before.items()}
        plan = schedule(self.state, self.budget, self.max_running)
        assert plan.num_tokens == sum(work.num_tokens for work in plan.works) <= self.budget
        assert len(self.state.running) <= self.max_running
        assert len({work.request_id for work in plan.works}) == len(plan.works)
        arrivals = [before[work.request_id].arrival for work in plan.works]
        assert arrivals == sorted(arrivals)
        for work in plan.works:
            computed, total, epoch = todo[work.request_id]
            assert work.request_id not in plan.preempted
            assert (work.start, work.epoch) == (computed, epoch)
            assert 1 <= work.num_tokens <= total - computed
            assert work.wants_logits == (work.start + work.num_tokens == total)
            assert work.tokens == before[work.request_id].tokens[computed:][: work.num_tokens]
        for request_id in plan.preempted:
            assert request_id in self.state.waiting
            assert len(before[request_id].tokens) == todo[request_id][1]
        ready = [i for i, (computed, total, _) in todo.items() if computed < total]
        if ready and ready[0] == next(iter(todo)):
            assert plan.works[0].request_id == ready[0], "the oldest request always runs"
        self.late += self.model.run(plan)

    @rule()
    def answer(self):
        for work, token in self.late:
            request = self.state.running.get(work.request_id)
            fresh = request is not None and request.epoch == work.epoch
            before = request.num_output if fresh else None
            accepted, reason = commit(self.state, work, [token])
            assert accepted == fresh
            if fresh:
                assert request.num_output == before + 1
                assert request.finish_reason == reason
        self.late = []

    @rule(choice=st.integers(0), reason=st.sampled_from(["abort", "error"]))
    def end_one(self, choice, reason):
        live = self.model.live()
        if live:
            request = live[choice % len(live)]
            assert finish(self.state, request.id, reason) is request
            expected, _ = self.expected[request.id]
            assert request.output == expected[: request.num_output]
            del self.requests[request.id]

    @rule(choice=st.integers(0))
    def preempt_one(self, choice):
        running = list(self.state.running.values())
        if running:
            first = choice % len(running)
            outputs = [request.output for request in running]
            preempt(self.state, running[first].id)
            assert list(self.state.running.values()) == running[:first]
            assert list(self.state.waiting.values())[: len(running) - first] == running[first:]
            assert [request.output for request in running] == outputs

    @invariant()
    def state_is_sound(self):
        check_state(self.state)

    def teardown(self):
        self.answer()
        steps = sum(request.max_total for request in self.model.live())
        while self.model.live():
            oldest = self.model.live()[0]
            before = (oldest.num_output, oldest.computed)
            plan = self.model.step(self.budget, self.max_running)
            check_state(self.state)
            assert oldest.id not in plan.preempted
            assert oldest.finish_reason or (oldest.num_output, oldest.computed) > before
            steps -= 1
            assert steps >= 0
        assert self.state.pool.num_free == self.state.pool.num_usable
        assert not self.model.rows
        for number, request in self.requests.items():
            assert (request.output, request.finish_reason) == self.expected[number]


ScheduleMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestSchedule = ScheduleMachine.TestCase


@pytest.mark.parametrize("page_size", [2, 4])
def test_preemption_at_every_length(page_size):
    """Two requests in all small pools: the later one is preempted at, before and behind an edge."""
    lengths = range(1, 2 * page_size + 2)
    victims = set()
    for first, second, pages in itertools.product(lengths, lengths, range(3, 7)):
        max_totals = first + page_size + 2, second + page_size + 2
        if any(
            never_fits(1, total, num_pages=pages, page_size=page_size, max_length=None)
            for total in max_totals
        ):
            continue
        model = Model(pages, page_size)
        prompts = [3] * first, [5] * second
        requests = [
            add(model.state, name, prompt, max_total=total)
            for name, prompt, total in zip("ab", prompts, max_totals, strict=True)
        ]
        for _ in range(sum(max_totals)):
            plan = model.step(2 * page_size + 1, 2)
            check_state(model.state)
            assert set(plan.preempted) <= {"b"}
            victims |= {len(requests[1].tokens) for _ in plan.preempted}
        for request, prompt, total in zip(requests, prompts, max_totals, strict=True):
            assert (request.output, "length") == alone(prompt, total, frozenset())
    assert {page_size + 1, 2 * page_size} <= victims


def test_every_request_survives_two_preemptions():
    model = Model(40, 4)
    requests = [add(model.state, i, [i, 1, 2], max_total=12) for i in range(4)]
    stops = {0: [5, 8], 1: [5, 9], 2: [4, 8], 3: [8, 11]}
    for _ in range(48):
        model.step(5, 4)
        for number in (3, 2, 1, 0):
            request = requests[number]
            if stops[number] and len(request.tokens) >= stops[number][0]:
                stops[number].pop(0)
                preempt(model.state, number)
    assert not any(stops.values())
    assert [r.output for r in requests] == [alone([i, 1, 2], 12, frozenset())[0] for i in range(4)]


def test_chunks_and_decode_rows_share_one_budget():
    model = Model(30, 4)
    add(model.state, "a", [1, 2, 3], max_total=9)
    model.step(6, 4)
    add(model.state, "b", [4] * 8, max_total=12)
    add(model.state, "c", [5] * 2, max_total=12)
    plans = [model.step(6, 4) for _ in range(3)]
    rows = [[(w.request_id, w.start, w.num_tokens, w.wants_logits) for w in p.works] for p in plans]
    assert rows == [
        [("a", 3, 1, True), ("b", 0, 5, False)],
        [("a", 4, 1, True), ("b", 5, 3, True), ("c", 0, 2, True)],
        [("a", 5, 1, True), ("b", 8, 1, True), ("c", 2, 1, True)],
    ]


def test_nobody_overtakes_the_head_of_the_queue():
    """A short request waits behind a long one that needs more pages than are free."""
    model = Model(6, 4)
    add(model.state, "running", [1] * 8, max_total=12)
    model.step(9, 4)
    add(model.state, "long", [2] * 13, max_total=14)
    add(model.state, "short", [3], max_total=2)
    plan = model.step(9, 4)
    assert [work.request_id for work in plan.works] == ["running"]
    assert list(model.state.waiting) == ["long", "short"]


def test_the_latest_arrival_makes_do_with_the_pages_that_are_left():
    """It is stalled rather than preempted: nobody could use its pages before it."""
    model = Model(5, 2)
    add(model.state, "a", [1] * 4, max_total=9)
    add(model.state, "b", [2] * 4, max_total=9)
    assert [w.request_id for w in model.step(5, 2).works] == ["a", "b"]  # b: one of four tokens
    plan = model.step(5, 2)  # a takes the last page, b has room for one more token
    assert [(w.request_id, w.start, w.num_tokens) for w in plan.works] == [("a", 4, 1), ("b", 1, 1)]
    plan = model.step(5, 2)
    assert [w.request_id for w in plan.works] == ["a"]
    assert plan.preempted == ()
    plan = model.step(5, 2)
    assert plan.preempted == ("b",)


def test_a_row_refers_to_the_lists_of_its_request():
    """Planning copies neither tokens nor pages, and rows in flight keep the old page list."""
    model = Model(9, 4)
    request = add(model.state, "a", [1] * 9, max_total=12)
    (work,) = schedule(model.state, 9, 1).works
    assert work.history is request.tokens
    assert work.pages is request.pages
    pages = list(work.pages)
    preempt(model.state, "a")
    assert work.pages == pages
    assert request.pages == []


def test_a_planned_request_waits_for_its_token():
    model = Model(9, 4)
    add(model.state, "a", [1, 2], max_total=6)
    plan = schedule(model.state, 4, 2)
    assert len(plan.works) == 1
    assert schedule(model.state, 4, 2) == Plan((), 0, ())
    ((work, token),) = model.run(plan)
    assert commit(model.state, work, [token]) == (1, None)
    assert [w.start for w in schedule(model.state, 4, 2).works] == [2]


def test_a_failed_step_is_undone_by_preempting_its_first_row():
    model = Model(9, 4)
    requests = [add(model.state, i, [i, 7], max_total=7) for i in range(3)]
    model.step(8, 3)
    failed = schedule(model.state, 8, 3)
    preempt(model.state, failed.works[0].request_id)
    assert model.state.pool.num_free == 8
    model.drain(8, 3)
    assert [r.output for r in requests] == [alone([i, 7], 7, frozenset())[0] for i in range(3)]


@pytest.mark.parametrize("restart", ["preempt", "abort and add"])
def test_a_token_of_an_earlier_epoch_is_dropped(restart):
    model = Model(9, 4)
    add(model.state, "a", [1, 2], max_total=6)
    (work,) = schedule(model.state, 4, 2).works
    if restart == "preempt":
        preempt(model.state, "a")
    else:
        finish(model.state, "a", "abort")
        add(model.state, "a", [1, 2], max_total=6)
    assert commit(model.state, work, [9]) == (0, None)
    (again,) = schedule(model.state, 4, 2).works
    assert commit(model.state, work, [9]) == (0, None)
    assert commit(model.state, again, [9]) == (1, None)
    assert model.state.request("a").output == [9]
    finish(model.state, "a", "abort")
    assert commit(model.state, again, [9]) == (0, None)


STOP = 6


@pytest.mark.parametrize(
    ("tokens", "room", "output", "reason"),
    [
        ([3, 4, STOP, 5, 6, 7, 8], 4, [3, 4, STOP], "stop"),
        ([3, 4, STOP, 5, 6, 7, 8], 3, [3, 4, STOP], "stop"),
        ([3, 4, STOP, 5, 6, 7, 8], 2, [3, 4], "length"),
        ([3, 4], 3, [3, 4], None),
        ([3], 1, [3], "length"),
        ([10], 4, [10], "stop"),
    ],
)
def test_a_commit_ends_at_the_first_stop_or_at_the_cap(tokens, room, output, reason):
    model = Model(9, 4)
    request = add(model.state, "a", [1, 2], max_total=2 + room, stop=frozenset({STOP, 10}))
    (work,) = schedule(model.state, 4, 2).works
    assert commit(model.state, work, tokens) == (len(output), reason)
    assert (request.prompt, request.output) == ([1, 2], output)
    assert request.finish_reason == reason
    assert (request.id in model.state.running) == (reason is None)
    assert model.state.pool.num_free == (8 if reason else 7)


def test_what_fits_is_what_a_run_on_a_large_pool_uses():
    for page_size, prompt_len, max_total in itertools.product((1, 2, 3), range(1, 8), range(1, 12)):
        if max_total <= prompt_len:
            continue
        model = Model(30, page_size)
        add(model.state, "a", [1] * prompt_len, max_total=max_total)
        used = 0
        for _ in range(max_total):
            plan = schedule(model.state, 3, 1)
            used = max(used, *(len(request.pages) for request in model.live()), 0)
            for work, token in model.run(plan):
                commit(model.state, work, [token])
        for num_pages in range(2, 14):
            reason = never_fits(
                prompt_len, max_total, num_pages=num_pages, page_size=page_size, max_length=None
            )
            assert (reason is None) == (used <= num_pages - 1)


@pytest.mark.parametrize(
    ("prompt", "max_total", "message"),
    [
        ([], 4, "request 'b' can never run: the prompt is empty"),
        ([1] * 9, 9, "a prompt of 9 tokens leaves none to generate within 9"),
        ([1] * 4, 3, "a prompt of 4 tokens leaves none to generate within 3"),
        ([1] * 4, 11, "a request of 11 tokens is longer than the maximal length 10"),
        ([1] * 4, 10, "a request of 10 tokens needs 5 pages of 2; the pool has 4 for requests"),
    ],
)
def test_what_never_fits_is_refused_and_disturbs_nobody(prompt, max_total, message):
    model = Model(5, 2, max_length=10)
    good = add(model.state, "a", [1, 2], max_total=9)
    with pytest.raises(ValueError, match=message):
        add(model.state, "b", prompt, max_total=max_total)
    model.drain(4, 2)
    assert (good.output, good.finish_reason) == alone([1, 2], 9, frozenset())


def test_a_prompt_one_below_the_maximal_length_gets_one_token():
    model = Model(9, 2, max_length=8)
    request = add(model.state, "a", [1] * 7, max_total=8)
    model.drain(3, 1)
    assert (request.num_output, request.finish_reason) == (1, "length")


def test_an_id_belongs_to_one_live_request():
    model = Model(9, 4)
    first = add(model.state, "a", [1, 2], max_total=6)
    with pytest.raises(ValueError, match="a live request has the id 'a' already"):
        add(model.state, "a", [3], max_total=6)
    model.step(8, 2)
    with pytest.raises(ValueError, match="a live request has the id 'a' already"):
        add(model.state, "a", [3], max_total=6)
    model.drain(8, 2)
    assert first.output == alone([1, 2], 6, frozenset())[0]
    second = add(model.state, "a", [3], max_total=6)
    finish(model.state, "a", "abort")
    third = add(model.state, "a", [3], max_total=6)
    model.drain(8, 2)
    assert (second.output, second.finish_reason) == ([], "abort")
    assert third.output == alone([3], 6, frozenset())[0]


def test_misuse_is_refused():
    model = Model(9, 4)
    add(model.state, "a", [1, 2, 3], max_total=6)
    with pytest.raises(ValueError, match="budget 0 and max_running 2 must be at least 1"):
        schedule(model.state, 0, 2)
    with pytest.raises(ValueError, match="budget 4 and max_running 0 must be at least 1"):
        schedule(model.state, 4, 0)
    with pytest.raises(ValueError, match="no running request has the id 'a'"):
        preempt(model.state, "a")
    with pytest.raises(ValueError, match="no live request has the id 'b'"):
        finish(model.state, "b", "abort")
    (chunk,) = schedule(model.state, 2, 1).works
    with pytest.raises(ValueError, match="wants_logits=False"):
        commit(model.state, chunk, [4])
    (last,) = schedule(model.state, 2, 1).works
    with pytest.raises(ValueError, match="expected tokens"):
        commit(model.state, last, [])
    with pytest.raises(ValueError, match="page_size is 0"):
        ScheduleState(PagePool(4), 0)
