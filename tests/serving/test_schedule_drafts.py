"""What the scheduler does with drafts and with steps planned ahead, case by case.

The model is that of `tests.serving.fake`; a request comes out as it does alone.
"""

import itertools

import pytest

from funcinfer.serving.request import Work
from funcinfer.serving.schedule import commit, preempt, propose, schedule
from tests.serving.fake import NO_STOP, Loop, alone, check, guess

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
