"""What the scheduler does with prefixes, forks, priorities, drafts and steps ahead, case by case.

The model is that of `tests.serving.fake`; a request comes out as it does alone.
"""

import gc
import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import PrefixCache, scope
from funcinfer.serving.request import Plan, Request, Work
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
from tests.serving.fake import Device, alone, guess

NO_STOP = frozenset()


class Loop:
    """A scheduler and a fake device. `plans` are those so far."""

    def __init__(self, num_pages: int, page_size: int, *, cached: bool = True, right=None) -> None:
        self.device = Device(page_size, right=right or (lambda position: 0))
        pool = PagePool(num_pages, self.device.free)
        prefix = PrefixCache(pool, page_size) if cached else None
        self.state = ScheduleState(pool, page_size, prefix=prefix)
        self.plans: list[Plan] = []

    def add(self, request_id, prompt, max_tokens: int, **options) -> Request:
        return add(self.state, request_id, prompt, max_total=len(prompt) + max_tokens, **options)

    def step(self, budget: int = 99, max_running: int = 9, **options) -> Plan:
        self.plans.append(schedule(self.state, budget, max_running, **options))
        for work, tokens in self.device.launch(self.plans[-1]):
            commit(self.state, work, tokens)
        return self.plans[-1]

    def drain(self, budget: int = 99, max_running: int = 9, **options) -> None:
        while self.state.running or self.state.waiting:
            self.step(budget, max_running, **options)

    def rows_of(self, request_id) -> list[tuple[int, int]]:
        works = [w for plan in self.plans for w in plan.works if w.request_id == request_id]
        return [(work.start, work.num_tokens) for work in works]


def check(request: Request, stop: frozenset[int] = NO_STOP) -> None:
    assert (request.output, request.finish_reason) == alone(request.prompt, request.max_total, stop)


# Prefixes


@pytest.mark.parametrize("page_size", [1, 2, 3, 4])
def test_every_hit_leaves_a_token_to_compute(page_size):
    """All prompt lengths up to three pages and a token, all lengths of what they have in common."""
    for length, budget in itertools.product(range(1, 3 * page_size + 2), (1, 2, 99)):
        for common in range(length + 1):
            loop = Loop(40, page_size)
            first = loop.add("first", list(range(1, length + 1)), 2)
            loop.drain()
            second = loop.add("second", [*range(1, common + 1), *[0] * (length - common)], 2)
            loop.drain(budget)
            cached = first.tokens[:-1]  # the last token is never read back
            known = next(
                (i for i, (x, y) in enumerate(zip(cached, second.tokens, strict=False)) if x != y),
                length,
            )
            hit = max(x for x in range(length) if x % page_size == 0 and x <= known)
            starts = [start for start, _ in loop.rows_of("second")]
            counts = [count for _, count in loop.rows_of("second")]
            assert starts[0] == hit
            assert sum(counts) == length - hit + 1
            assert all(1 <= count <= budget for count in counts)
            assert sum(plan.num_hit for plan in loop.plans) == hit
            check(second)


def test_a_recomputed_request_hits_its_own_output():
    loop = Loop(40, 2)
    request = loop.add("a", [1, 2, 3], 8)
    for _ in range(5):
        loop.step()
    assert len(request.tokens) == 8  # seven of them are in the cache, six in full pages
    preempt(loop.state, "a")
    loop.drain()
    assert loop.rows_of("a")[5:7] == [(6, 2), (8, 1)]
    check(request)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_preemption_at_every_length(page_size):
    """Twice in a row; what is found again is what was entered when the last step was planned."""
    for length in range(2, 2 * page_size + 4):
        loop = Loop(40, page_size)
        request = loop.add("a", [3], 2 * page_size + 8)
        for _ in range(2):
            while len(request.tokens) < length:
                loop.step()
            preempt(loop.state, "a")
            (work,) = loop.step(budget=99).works
            assert work.start == (length - 2) // page_size * page_size
            assert work.start + work.num_tokens == length
            length = len(request.tokens) + 1
        loop.drain()
        check(request)


def test_recycled_pages_are_not_found_as_what_they_were():
    loop = Loop(6, 2)
    for prompt in ([1] * 7, [2] * 7, [3] * 7, [1] * 7):
        request = loop.add("x", prompt, 2)
        loop.drain()
        check(request)
        assert loop.plans[-2].num_hit == 0
        for block in loop.state.prefix.blocks:
            tokens = [loop.device.rows[block.page, offset][0] for offset in range(2)]
            assert tuple(tokens) == block.tokens


def test_scopes_share_no_page():
    loop = Loop(30, 2)
    requests = []
    for number, salt in enumerate("xyx"):
        requests.append(loop.add(number, [1, 2, 3, 4, 5], 9, scope=scope(salt=salt)))
        loop.step()
    first, other, same = requests
    assert [plan.num_hit for plan in loop.plans] == [0, 0, 4]
    assert not set(first.pages) & set(other.pages)
    assert same.pages[:2] == first.pages[:2]
    loop.drain()
    for request in requests:
        check(request)


def test_what_is_shared_costs_neither_budget_nor_pages():
    """`a` leaves 3 pages free; `b` needs 5, of which it shares 3; the token left is c's."""
    loop = Loop(8, 2)
    loop.add("a", [1, 2, 3, 4, 5, 6, 7], 6)
    loop.step()
    loop.add("b", [1, 2, 3, 4, 5, 6, 8, 8, 8], 2)
    loop.add("c", [9, 9], 2)
    plan = loop.step(budget=5)
    assert [(w.request_id, w.start, w.num_tokens) for w in plan.works] == [
        ("a", 7, 1),
        ("b", 6, 3),
        ("c", 0, 1),
    ]
    assert (plan.num_tokens, plan.num_hit) == (5, 6)
    assert loop.state.pool.num_free == 0


def test_pages_in_the_cache_are_free_pages():
    loop = Loop(9, 2)
    loop.add("a", [1] * 15, 2)
    loop.drain()
    pool = loop.state.pool
    assert (pool.num_idle, pool.num_free) == (8, 8)
    request = loop.add("b", [2] * 15, 2)
    loop.drain()
    check(request)
    loop.state.prefix.clear()
    assert (pool.num_idle, pool.num_free) == (0, 8)


def test_four_requests_in_too_small_a_pool():
    """Each of the later ones is preempted again and again, and nothing is lost or repeated."""
    for cached in (False, True):
        loop = Loop(11, 2, cached=cached)
        requests = [loop.add(i, [i, 1, 2], 12) for i in range(4)]
        preempted = []
        while loop.state.running or loop.state.waiting:
            plan = loop.step(budget=6)
            preempted += plan.preempted
            assert plan.num_tokens <= 6
        for request in requests:
            check(request)
        assert len(preempted) >= 4
    assert loop.state.pool.num_free == 10


def test_the_first_of_equal_prompts_is_computed_for_all_that_come_later():
    loop = Loop(40, 2)
    requests = []
    for number in range(4):
        requests.append(loop.add(number, [1, 2, 3, 4, 5], 6))
        loop.step()
    assert [loop.rows_of(number)[0] for number in range(4)] == [(0, 5), (4, 1), (4, 1), (4, 1)]
    assert len({tuple(request.pages[:2]) for request in requests}) == 1
    assert loop.state.pool.references(requests[0].pages[0]) == 4
    loop.drain()
    for request in requests:
        check(request)


def test_equal_prompts_that_were_computed_together_end_on_the_same_pages():
    loop = Loop(40, 2)
    requests = [loop.add(number, [1, 2, 3, 4, 5], 6) for number in range(2)]
    loop.step()
    assert not set(requests[0].pages) & set(requests[1].pages)
    loop.step()
    assert requests[0].pages[:2] == requests[1].pages[:2]
    assert requests[0].pages[2] != requests[1].pages[2]
    loop.drain()
    for request in requests:
        check(request)


def test_a_prefix_cache_belongs_to_the_pool_of_the_state():
    pool = PagePool(4)
    with pytest.raises(
        ValueError, match="over this pool with page_size 2: expected this pool and page_size 4"
    ):
        ScheduleState(pool, 4, prefix=PrefixCache(pool, 2))
    with pytest.raises(ValueError, match="prefix is over another pool with page_size 4"):
        ScheduleState(pool, 4, prefix=PrefixCache(PagePool(4), 4))


# Forks


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_children_share_the_full_pages_of_the_prompt(cached, length):
    """With a prompt of whole pages the last page too is computed by each child."""
    loop = Loop(60, 4, cached=cached)
    prompt = list(range(length))
    family = [loop.add(0, prompt, 6), *(fork(loop.state, 0, number) for number in (1, 2))]
    loop.step()
    shared = (length - 1) // 4
    assert [w.request_id for w in loop.plans[0].works] == ([0] if shared else [0, 1, 2])
    loop.step()
    for child in family[1:]:
        assert loop.rows_of(child.id)[0] == (4 * shared, length - 4 * shared)
        assert child.pages[:shared] == family[0].pages[:shared]
    written = [page for r in family for page in r.pages[(len(r.tokens) - 1) // 4 :]]
    assert len(written) == len(set(written))
    loop.drain()
    for request in family:
        check(request)


@pytest.mark.parametrize("cached", [False, True])
def test_children_wait_for_chunks_and_behind_nobody_else(cached):
    loop = Loop(60, 2, cached=cached)
    loop.add("parent", [1] * 7, 4)
    loop.add("next", [2] * 3, 4)
    child = fork(loop.state, "parent", "child")
    for _ in range(3):
        loop.step(budget=3)
    assert [[w.request_id for w in plan.works] for plan in loop.plans] == [
        ["parent"],
        ["parent"],
        ["parent", "child", "next"],  # its last chunk is in the page that is not shared
    ]
    assert loop.rows_of("child") == [(6, 1)]
    loop.drain()
    check(child)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("event", ["parent ends", "parent is preempted", "child is preempted"])
def test_children_live_their_own_lives(cached, event):
    loop = Loop(60, 2, cached=cached)
    parent = loop.add("parent", [1] * 5, 4)
    child = fork(loop.state, "parent", "child")
    loop.step(budget=3)
    if event == "parent ends":
        finish(loop.state, "parent", "abort")
    elif event == "parent is preempted":
        preempt(loop.state, "parent")
    else:
        for _ in range(3):
            loop.step()
        preempt(loop.state, "child")
    loop.drain()
    check(child)
    if event != "parent ends":
        check(parent)
    assert loop.state.pool.num_free == 59


def test_a_fork_is_refused_like_an_add():
    loop = Loop(9, 2)
    loop.add("a", [1, 2, 3], 4)
    with pytest.raises(ValueError, match="no live request has the id 'b'"):
        fork(loop.state, "b", "c")
    with pytest.raises(ValueError, match="a live request has the id 'a' already"):
        fork(loop.state, "a", "a")
    assert list(loop.state.waiting) == ["a"]


# Priorities


def test_the_smallest_priority_runs_first_and_arrival_breaks_ties():
    loop = Loop(60, 2)
    for name, priority in (("c", 2), ("a", 0), ("d", 2), ("b", 1), ("first", -1)):
        loop.add(name, [1, 2], 3, priority=priority)
    assert list(loop.state.waiting) == ["first", "a", "b", "c", "d"]
    plans = [loop.step(max_running=2) for _ in range(4)]
    assert [[w.request_id for w in plan.works] for plan in plans] == [
        ["first", "a"],
        ["first", "a"],
        ["first", "a"],
        ["b", "c"],
    ]


def test_a_late_request_of_a_smaller_priority_keeps_its_pages():
    """It joins in front; then the victim is who has the largest number, though it came first."""
    loop = Loop(8, 2)
    low = loop.add("low", [1, 2, 3], 9, priority=5)
    loop.step()
    high = loop.add("high", [4, 5, 6], 9, priority=1)
    assert [w.request_id for w in loop.step().works] == ["high", "low"]
    assert list(loop.state.running) == ["high", "low"]
    preempted = []
    while loop.state.running or loop.state.waiting:
        preempted += loop.step().preempted
    assert set(preempted) == {"low"}
    check(low)
    check(high)


def test_a_waiting_request_takes_no_place_from_a_running_one():
    loop = Loop(60, 2)
    loop.add("low", [1, 2, 3], 3, priority=5)
    loop.step(max_running=1)
    loop.add("high", [4, 5, 6], 3, priority=1)
    plans = [loop.step(max_running=1) for _ in range(3)]
    assert [[w.request_id for w in plan.works] for plan in plans] == [["low"], ["low"], ["high"]]


def test_a_priority_is_an_int():
    loop = Loop(9, 2)
    with pytest.raises(ValueError, match="request 'a': priority is 'high', not an int"):
        loop.add("a", [1], 3, priority="high")
    assert not loop.state.waiting


@given(
    events=st.lists(st.tuples(st.integers(0, 9), st.integers(-2, 2)), max_size=40),
)
def test_the_queue_is_a_sorted_list(events):
    """An id that waits already is taken out, wherever it is; else it is put in."""
    state = ScheduleState(PagePool(4), 4)
    expected: list[tuple[int, int, int]] = []
    for arrival, (number, priority) in enumerate(events):
        if number in state.waiting:
            finish(state, number, "abort")
            expected = [entry for entry in expected if entry[2] != number]
        else:
            add(state, number, [1], max_total=2, priority=priority)
            expected = sorted([*expected, (priority, arrival, number)])
        assert list(state.waiting) == [number for _, _, number in expected]
        assert len(state.waiting) == len(expected)
        if expected:
            assert state.waiting.first().id == expected[0][2]


# Drafts


def test_every_pattern_of_accepted_drafts():
    """Tokens are those of plain decoding; a step brings the accepted drafts and one more."""
    for page_size, cached in ((1, True), (2, True), (3, False)):
        for pattern in itertools.product(range(4), repeat=3):
            loop = Loop(40, page_size, cached=cached)
            request = loop.add("a", [1, 2, 3], 14)
            loop.step()
            for right in pattern:
                before = request.num_output
                propose(loop.state, "a", guess(request.tokens, None, 3, right))
                (work,) = loop.step().works
                assert work.num_tokens == 1 + work.num_drafts == 4
                assert request.num_output == before + right + 1
                assert request.computed == len(request.tokens) - 1
            assert [work.num_drafts for work in loop.step().works] == [0]  # each is tried once
            loop.drain()
            check(request)


@pytest.mark.parametrize(("place", "right"), [*itertools.product(range(1, 8), range(5))])
def test_a_stop_token_among_drafts_ends_the_request_there(place, right):
    prompt = [4, 2]
    output, _ = alone(prompt, 12, NO_STOP)
    stop = frozenset({output[place]})
    loop = Loop(40, 2)
    request = loop.add("a", prompt, 10, stop=stop)
    loop.step()
    while loop.state.running:
        propose(loop.state, "a", guess(request.tokens, None, 4, right))
        loop.step()
    check(request, stop)
    assert loop.state.pool.num_free == 39


def test_drafts_end_a_token_before_the_end_of_the_request():
    loop = Loop(40, 2)
    request = loop.add("a", [1, 2, 3], 4)
    rows = []
    loop.step()
    while loop.state.running:
        propose(loop.state, "a", guess(request.tokens, None, 9, 0))
        rows += loop.step().works
    assert [(work.start, work.num_drafts) for work in rows] == [(3, 2), (4, 1), (5, 0)]


def test_drafts_leave_a_token_for_everybody_behind():
    loop = Loop(60, 2)
    for name in "abc":
        loop.add(name, [1, 2, 3], 9)
    loop.step()
    for name in "abc":
        propose(loop.state, name, [1, 1, 1, 1])
    assert [w.num_tokens for w in loop.step(budget=6).works] == [4, 1, 1]


def test_drafts_take_free_pages_only():
    loop = Loop(6, 2)
    first, second = loop.add("a", [1] * 4, 6), loop.add("b", [2] * 4, 4)
    loop.step()
    for request in (first, second):
        propose(loop.state, request.id, guess(request.tokens, None, 3, 3))
    plan = loop.step()  # the last page is for the token of `a`, and has room for one draft
    assert plan.preempted == ()
    assert [(w.request_id, w.num_tokens) for w in plan.works] == [("a", 2)]
    loop.drain()
    check(first)
    check(second)


def test_drafts_without_a_page_are_left_out():
    loop = Loop(5, 2)
    request = loop.add("a", [1] * 5, 4)
    loop.step()
    loop.state.pool.allocate(1)
    propose(loop.state, "a", guess(request.tokens, None, 2, 2))
    (work,) = loop.step().works
    assert (work.start, work.num_tokens, work.tokens) == (5, 1, request.tokens[5:6])


def test_rejected_positions_are_written_again():
    """Look-ahead pages stay, and the row after begins where the accepted ones end."""
    loop = Loop(40, 2, right=lambda position: 1)
    request = loop.add("a", [1, 2, 3], 12)
    loop.step(num_drafts=4)
    for _ in range(3):
        start = request.computed
        (work,) = loop.step(num_drafts=4).works
        assert (work.start, work.num_tokens, work.drafts) == (start, 5, ())
        assert work.tokens == [request.tokens[start], -1, -1, -1, -1]
        assert request.computed == start + 2
        assert len(request.pages) == -(-(start + 5) // 2)
    loop.drain()
    check(request)


def test_only_a_row_behind_another_has_drafts_of_the_device():
    loop = Loop(40, 2)
    loop.add("a", [1], 9)
    assert [w.num_drafts for w in loop.step(num_drafts=2).works] == [0]
    assert [w.num_drafts for w in loop.step(num_drafts=2).works] == [2]
    preempt(loop.state, "a")
    assert [w.num_drafts for w in loop.step(num_drafts=2).works] == [0]


def test_tokens_that_are_not_those_of_the_row_are_refused():
    loop = Loop(40, 2)
    request = loop.add("a", [1, 2, 3], 12)
    (work,) = schedule(loop.state, 9, 9).works
    with pytest.raises(ValueError, match="drafts can't follow a token not committed yet"):
        propose(loop.state, "a", [1])
    commit(loop.state, work, [4])
    with pytest.raises(ValueError, match="the row at 0 is committed already"):
        commit(loop.state, work, [4])
    propose(loop.state, "a", [5, 6])
    (work,) = schedule(loop.state, 9, 9).works
    for tokens in ([4, 6], [5, 7, 8], [6, 6, 6]):
        with pytest.raises(ValueError, match=r"don't begin with accepted drafts of \[5, 6\]"):
            commit(loop.state, work, tokens)
    assert (request.output, request.computed) == ([4], 6)
    assert commit(loop.state, work, [5, 7]) == (2, None)
    assert (request.output, request.computed) == ([4, 5, 7], 5)
    with pytest.raises(ValueError, match="no live request has the id 'b'"):
        propose(loop.state, "b", [1])


def test_tokens_that_no_row_has_computed_are_not_in_the_cache():
    """More tokens than rows, given by someone else, may end a request."""
    for end in (2, 4):
        loop = Loop(40, 1)
        loop.add("a", [1, 2], end)
        (work,) = schedule(loop.state, 9, 9).works
        commit(loop.state, work, [3, 4, 5])
        if end > 3:
            assert loop.rows_of("a") == []
            (work,) = schedule(loop.state, 9, 9).works
            assert (work.start, work.tokens) == (2, [3, 4, 5])
            commit(loop.state, work, [6])
        tokens = sorted(block.tokens for block in loop.state.prefix.blocks)
        assert tokens == [(token,) for token in ([1, 2] if end == 2 else [1, 2, 3, 4, 5])]


def test_drafts_outlive_a_preemption():
    loop = Loop(40, 2)
    request = loop.add("a", [1, 2, 3], 9)
    loop.step()
    propose(loop.state, "a", guess(request.tokens, None, 2, 2))
    preempt(loop.state, "a")
    assert [(w.start, w.num_tokens) for w in loop.step().works] == [(0, 6)]
    assert request.num_output == 4
    loop.drain()
    check(request)


# Steps ahead


def run_ahead(loop: Loop, budget: int = 99, **options) -> int:
    """Step with results one step late until nobody is left; returns the number of steps."""
    unread: list[tuple[Work, list[int]]] = []
    steps = 0
    while loop.state.running or loop.state.waiting:
        plan = schedule(loop.state, budget, 9, ahead=1, **options)
        loop.plans.append(plan)
        launched = loop.device.launch(plan)
        for work, tokens in unread:
            commit(loop.state, work, tokens)
        unread = launched
        steps += bool(plan.works)
    return steps


def test_a_step_ahead_has_a_row_for_every_request():
    loop = Loop(40, 2)
    requests = [loop.add(name, [1, 2, number], 6) for number, name in enumerate("abc")]
    assert run_ahead(loop) == 6
    for request in requests:
        check(request)
        assert loop.rows_of(request.id) == [(0, 3), *((x, 1) for x in range(3, 8))]
    late = [[work.late for work in plan.works] for plan in loop.plans]
    assert late == [[False] * 3, *[[True] * 3] * 5, []]
    assert loop.plans[1].works[0].tokens == [-1]


def test_a_stop_that_is_found_late_costs_one_row():
    output, _ = alone([4, 2], 12, NO_STOP)
    stop = frozenset({output[3]})
    expected, _ = alone([4, 2], 12, stop)
    loop = Loop(40, 2)
    request = loop.add("a", [4, 2], 10, stop=stop)
    assert run_ahead(loop) == len(expected) + 1
    check(request, stop)
    assert loop.state.pool.num_free == 39


def test_steps_ahead_with_drafts():
    """The true start of a late row is below the planned one by the drafts that were rejected."""
    for right in range(4):
        loop = Loop(60, 2, right=lambda position, right=right: right)
        requests = [loop.add(name, [1, 2, number], 13) for number, name in enumerate("ab")]
        run_ahead(loop, num_drafts=3)
        for request in requests:
            check(request)
        assert any(w.late and w.num_drafts for plan in loop.plans for w in plan.works)


def test_a_late_row_is_not_planned_past_the_end():
    loop = Loop(40, 2, right=lambda position: 0)
    loop.add("a", [1, 2], 5)
    first = schedule(loop.state, 9, 9, ahead=1)
    second = schedule(loop.state, 9, 9, ahead=1, num_drafts=9)
    (work,) = second.works
    assert (work.start, work.num_drafts, work.late) == (2, 3, True)
    loop.device.launch(first)
    assert schedule(loop.state, 9, 9, ahead=1).works == ()


def test_more_tokens_than_a_row_has_are_refused_while_the_next_is_in_flight():
    loop = Loop(40, 2)
    request = loop.add("a", [1, 2], 8)
    (first,) = schedule(loop.state, 9, 9, ahead=1).works
    (second,) = schedule(loop.state, 9, 9, ahead=1).works
    with pytest.raises(ValueError, match="2 tokens for a row with 0 drafts, while the next row"):
        commit(loop.state, first, [3, 4])
    assert commit(loop.state, first, [3]) == (1, None)
    assert commit(loop.state, second, [4]) == (1, None)
    assert (request.output, request.computed) == ([3, 4], 3)


def test_blocks_of_a_row_in_flight_are_not_shared_yet():
    """A step that may fail has left nothing in the index when it does."""
    loop = Loop(40, 2)
    loop.add("a", [1] * 9, 3)
    for ahead, blocks in ((0, [0, 2, 4]), (1, [0, 0, 2])):
        chunks = []
        for _ in range(3):
            schedule(loop.state, 4, 9, ahead=ahead)
            chunks.append(len(loop.state.prefix.blocks))
        assert chunks == blocks
        preempt(loop.state, "a")
        loop.state.prefix.clear()


# Cost


def calls_of_a_step(loop: Loop, max_running: int) -> int:
    """Python and C functions that `schedule` and `commit` call for one step."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for work in schedule(loop.state, 99, max_running).works:
            commit(loop.state, work, [9])
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("cached", [False, True])
def test_a_decode_step_costs_the_same_for_any_context_and_queue(cached):
    calls = set()
    for context, waiting in itertools.product((16, 256), (1, 50)):
        loop = Loop(1 + 4 * (context // 4 + 3), 4, cached=cached)
        for number in range(4 + waiting):
            loop.add(number, [1 + number] * context, 12)
        for budget in (4 * context, 4, 4):  # then all have entered their prompts
            for work in schedule(loop.state, budget, 4).works:
                commit(loop.state, work, [9])
        calls.add(calls_of_a_step(loop, max_running=4))
        assert len(loop.state.running) == 4
    assert len(calls) == 1


def test_a_request_without_room_pays_for_what_has_changed_only():
    """It shares most of its pages with `a`, and looks for them in every step."""
    calls = []
    for context in (64, 1024):
        loop = Loop(context // 4 + 4, 4)
        loop.add("a", [1] * context, 8)
        for _ in range(2):
            for work in schedule(loop.state, context, 9).works:
                commit(loop.state, work, [9])
        loop.add("b", [1] * context + [2] * 9, 3)
        first, second, *_ = (calls_of_a_step(loop, max_running=9) for _ in range(2))
        assert list(loop.state.waiting) == ["b"]
        assert first > 2 * context // 4
        calls.append(second)
    assert calls[1] - calls[0] <= 4 * 3  # halving 16 times as many pages


def test_a_step_leaves_no_objects_behind():
    """Over 1,000 steps, beyond the token ids of the output."""
    state = ScheduleState(PagePool(2000), page_size=4)
    for number in range(3):
        add(state, number, [1, 2, 3], max_total=2400)

    def steps(count: int) -> int:
        for number in range(count):
            if number % 5 == 0:
                for request in state.running.values():
                    propose(state, request.id, (1, 1))
            for work in schedule(state, 99, 9).works:
                commit(state, work, (1,) * (1 + work.num_drafts))
        gc.collect()
        return len(gc.get_objects())

    before = steps(100)
    assert steps(1000) <= before
