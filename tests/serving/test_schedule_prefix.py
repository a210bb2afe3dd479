"""What the scheduler does with prefixes, forks and priorities, case by case.

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
from tests.serving.fake import Loop, check

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


# Cost


def calls_of_a_step(loop: Loop, max_running: int) -> int:
    """Python and C functions that `schedule` and `commit` call for one step.

    The garbage collector waits: it would call what other tests left to be finalized.
    """
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        for work in schedule(loop.state, 99, max_running).works:
            commit(loop.state, work, [9])
    finally:
        sys.setprofile(None)
        gc.enable()
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
    assert steps(1000) - before < 100  # others in the process may make a few
