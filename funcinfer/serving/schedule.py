"""The scheduler: state in, plan out. No tensors, no clock, no model.

One rule and no phases. A live request has `computed` positions in the cache out of the
`total = len(prompt) + len(output)` tokens it has so far. A step gives each running request

    count = min(budget left, total - computed)

tokens, in order. A prompt, a chunk of a prompt, a decode row and a recomputed request differ in
nothing but these two numbers, so they share one batch and one token budget. A request wants logits
exactly when the step reaches its total; then drafts can follow, as just more tokens.

Requests are ordered by priority, the smallest number first, then by arrival:

- admission takes the first waiting request when there is budget, a place, and pages for all of
  its tokens; nobody overtakes it. What others have computed of them is not computed again;
- a running request that lacks a page preempts the last running one: that one gives back its pages,
  starts again from computed = 0 and waits. Its output so far is kept and recomputed like a prompt.
  The last one itself never preempts: it makes do with the pages that are left, perhaps none this
  step. Neither do drafts, nor a waiting request, whatever its priority;
- what could not run with the whole pool for itself is refused by `add`, so the first running
  request always runs, and every request ends.

A page is shared only when it is full, and what is shared is less than the total: each request
computes at least one token, and writes to pages of its own.

`schedule` counts the tokens it plans as computed. A planned request whose token has not been
committed yet has computed == total, so a further `schedule` leaves it alone; or, with `ahead`,
plans a row for the token that is not known yet. Every stay of a request in the running set has an
epoch of its own, and each `Work` carries it: a token that comes late, after a preemption or for an
earlier request of the same id, is recognised and dropped.

Cost: a step touches the running requests and the admitted ones, not the rest of the queue, and
copies no token or page list.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import Chain
from funcinfer.serving.planning import (
    Step,
    admit,
    enter_blocks,
    new_work,
    plan_row,
    preempt_last,
    release,
    sure_positions,
)
from funcinfer.serving.request import Plan, Request, ScheduleState, Work, never_fits

__all__ = [
    "PagePool",
    "Plan",
    "Request",
    "ScheduleState",
    "Work",
    "add",
    "commit",
    "finish",
    "fork",
    "never_fits",
    "preempt",
    "propose",
    "schedule",
]


def add(
    state: ScheduleState,
    request_id: Hashable,
    prompt: Sequence[int],
    *,
    max_total: int,
    stop: frozenset[int] = frozenset(),
    sampling: Any = None,
    priority: int = 0,
    scope: Hashable = None,
    can_be_late: bool = True,
) -> Request:
    """Put a request behind the waiting ones of its priority.

    max_total: tokens of prompt and output together at which it ends with reason "length".
    stop: token ids that end it with reason "stop"; the stop token belongs to the output.
    priority: a smaller number runs first. scope: who may share pages with it: requests of an equal
    one, see `funcinfer.kvcache.prefix.scope`. can_be_late: whether its rows may have tokens that
    aren't known when they are planned, of late rows or of drafts on the device.
    Raises ValueError when the id is live already, and for what can never fit. An id is free again
    once its request has ended.

    >>> state = ScheduleState(PagePool(4), page_size=4)
    >>> add(state, "a", [7, 8, 9], max_total=5).computed
    0
    """
    if request_id in state.running or request_id in state.waiting:
        raise ValueError(f"a live request has the id {request_id!r} already")
    reason = never_fits(
        len(prompt),
        max_total,
        num_pages=state.pool.num_pages,
        page_size=state.page_size,
        max_length=state.max_length,
    )
    if reason is not None:
        raise ValueError(f"request {request_id!r} can never run: {reason}")
    if not isinstance(priority, int):
        raise ValueError(f"request {request_id!r}: priority is {priority!r}, not an int")
    hash(scope)  # one that can't be hashed fails here, not in a step
    state.counter += 1
    request = Request(
        id=request_id,
        tokens=list(prompt),
        prompt_len=len(prompt),
        max_total=max_total,
        stop=stop,
        sampling=sampling,
        arrival=state.counter,
        epoch=state.counter,
        order=(priority, state.counter, 0),
        can_be_late=can_be_late,
        chain=Chain(scope) if state.prefix is not None else None,
    )
    state.waiting.push(request)
    return request


def fork(
    state: ScheduleState, parent_id: Hashable, request_id: Hashable, *, sampling: Any = None
) -> Request:
    """Add one more completion of a live request's prompt: the same but for `sampling`.

    It runs once the prompt has been computed, and shares the full pages of it; from the last,
    partial page on it computes for itself. It arrives with its parent, and lives its own life.
    Raises ValueError when no live request has the parent's id, or one has the new id.

    >>> state = ScheduleState(PagePool(9), page_size=2)
    >>> parent = add(state, "a", [7, 8, 9], max_total=5)
    >>> child = fork(state, "a", "a/1")
    >>> work, = schedule(state, 8, 2).works
    >>> commit(state, work, [4])
    (1, None)
    >>> [work.request_id for work in schedule(state, 8, 2).works]
    ['a', 'a/1']
    >>> child.pages[0] == parent.pages[0], child.row_start
    (True, 2)
    """
    parent = state.request(parent_id)
    priority, arrival, _ = parent.order
    child = add(
        state,
        request_id,
        parent.prompt,
        max_total=parent.max_total,
        stop=parent.stop,
        sampling=sampling,
        priority=priority,
        scope=parent.chain.scope if parent.chain is not None else None,
        can_be_late=parent.can_be_late,
    )
    state.waiting.pop(request_id)
    child.order, child.arrival, child.parent = (priority, arrival, child.arrival), arrival, parent
    state.waiting.push(child)
    return child


def propose(state: ScheduleState, request_id: Hashable, drafts: Sequence[int]) -> None:
    """Say what the next tokens of a request may be; its next row has them verified.

    They are cut at what the budget, the free pages and the length of the request allow, and replace
    earlier ones. Raises ValueError when no live request has the id, or a row in flight is about to
    bring its next token.
    """
    request = state.running.get(request_id) or state.request(request_id)
    if request.in_flight:
        raise ValueError(f"request {request_id!r}: drafts can't follow a token not committed yet")
    request.drafts = tuple(drafts)


def schedule(
    state: ScheduleState,
    budget: int,
    max_running: int,
    *,
    ahead: int = 0,
    num_drafts: int = 0,
    look_ahead: int = 0,
    chunk: Callable[[int], int] | None = None,
) -> Plan:
    """Plan one step: at most `budget` tokens of at most `max_running` requests.

    ahead: 0: the steps planned before have been run. 1: the last of them may be running still, and
    where its token is all that a request waits for, a `late` row is planned; not for a request that
    may be at its end with that token.
    num_drafts: drafts the device has for each row that follows one that wanted logits; those that
    were proposed go first. Drafts get what budget is left when each running request behind has a
    token, and pages that are free.
    look_ahead: positions behind a row that wants logits to which the device writes drafts' keys and
    values. They get pages that are free.
    chunk: most tokens of a row of several that starts at this position, see
    `funcinfer.serving.chunking`; a row has at least one. It must not raise.

    Changes the state: pages are taken, requests admitted and preempted, planned tokens counted as
    computed. A budget of at least max_running lets every running request decode in every step.
    Raises ValueError for a budget or max_running below 1, a negative num_drafts or look_ahead,
    another `ahead`.

    >>> state = ScheduleState(PagePool(4), page_size=4)
    >>> request = add(state, "a", [7, 8, 9], max_total=5)
    >>> [(work.start, work.tokens, work.wants_logits) for work in schedule(state, 2, 1).works]
    [(0, [7, 8], False)]
    >>> [(work.start, work.tokens, work.wants_logits) for work in schedule(state, 2, 1).works]
    [(2, [9], True)]
    """
    if budget < 1 or max_running < 1:
        raise ValueError(f"budget {budget} and max_running {max_running} must be at least 1")
    if ahead not in (0, 1) or num_drafts < 0 or look_ahead < 0:
        raise ValueError(
            f"ahead is {ahead}, num_drafts {num_drafts}, look_ahead {look_ahead}: expected 0 or 1, "
            f"and >= 0"
        )
    step = Step(state, state.page_size, budget, ahead, num_drafts, look_ahead, chunk)
    running, size = state.running, state.page_size
    can_draft = bool(num_drafts or look_ahead)
    requests = tuple(running.values())
    behind = len(requests)
    for request in requests:
        behind -= 1
        if not step.left or (step.preempted and request.id not in running):
            break  # victims are a tail of the running ones
        start, history, pages = request.computed, request.tokens, request.pages
        if start >= request.next_full:
            enter_blocks(state, request, sure_positions(request, ahead))
        if (
            start + 1 != len(history)
            or start >= len(pages) * size
            or can_draft
            or request.drafts
            or request.in_flight
        ):
            plan_row(step, request, behind)
            continue
        # What plan_row does for a token that has its page, in fewer steps: most rows are such ones.
        request.in_flight = 1
        request.has_drawn = True
        request.row_start = start
        request.computed = start + 1
        step.left -= 1
        row = (request.id, start, 1, True, request.epoch, history, pages, 0, (), False)
        step.works.append(new_work(row))
    num_hit = 0 if step.preempted else admit(step, max_running)
    return Plan(tuple(step.works), budget - step.left, tuple(step.preempted), num_hit)


def commit(state: ScheduleState, work: Work, tokens: Sequence[int]) -> tuple[int, str | None]:
    """Append the tokens sampled for a row: how many were accepted, and why the request ended.

    tokens: at least one; after a row with drafts, those accepted and one more. Cut after the first
    stop token, else at max_total. Positions of rejected drafts count as not computed: a later row
    writes over them. A request that ends leaves the state and gives back its pages; the reason is
    "stop", "length", or None while it goes on. Tokens of a stale row (the request has ended or was
    preempted since) are dropped: 0. Rows of one request are committed in order.
    Raises ValueError for a row that did not want logits or has been committed, without tokens, and
    where all but the last of the tokens aren't the row's drafts.

    >>> state = ScheduleState(PagePool(4), page_size=4)
    >>> request = add(state, "a", [7, 8, 9], max_total=5)
    >>> work, = schedule(state, 8, 1).works
    >>> commit(state, work, [4]), request.output
    ((1, None), [4])
    """
    if not work.wants_logits or not tokens:
        raise ValueError(
            f"request {work.request_id!r}: expected tokens for a row that wants logits, got "
            f"{list(tokens)} with wants_logits={work.wants_logits}"
        )
    request = state.running.get(work.request_id)
    if request is None or request.epoch != work.epoch:
        return 0, None
    history, num_drafts, count = request.tokens, work.num_drafts, len(tokens)
    if count == 1 and not num_drafts and request.in_flight:  # the same in fewer steps
        token = tokens[0]
        if token not in request.stop and len(history) + 1 < request.max_total:
            history.append(token)
            request.in_flight -= 1
            return 1, None
    if not request.in_flight or (count > 1 and tuple(tokens[:-1]) != work.drafts[: count - 1]):
        _check_tokens(request, work, tokens)
    known = len(history)
    reason = None
    if known + count < request.max_total and request.stop.isdisjoint(tokens):
        history.extend(tokens)
    else:
        count, reason = _append(request, tokens)
    request.in_flight -= 1
    if num_drafts >= count:
        request.computed -= num_drafts + 1 - count
    if reason is not None:
        if request.computed >= request.next_full:
            enter_blocks(state, request, known + min(count - 1, num_drafts))
        finish(state, request.id, reason)
    return count, reason


def finish(state: ScheduleState, request_id: Hashable, reason: str) -> Request:
    """End a live request now, running or waiting: its pages go back, its id is free again.

    reason: kept as request.finish_reason; "abort" when the user gave up, "error" when the model
    did. Raises ValueError when no live request has the id.
    """
    request = state.request(request_id)
    (state.running if request_id in state.running else state.waiting).pop(request_id)
    release(state, request)
    request.chain = request.parent = None
    request.finish_reason = reason
    return request


def preempt(state: ScheduleState, request_id: Hashable) -> None:
    """Take a running request out, and with it those behind it, to be computed afresh.

    They wait, in their order. Also the way back after a step that failed: preempt the request of
    its first row, and nothing of that step remains; with `ahead`, the first of the rows in flight.
    Raises ValueError when no running request has the id.
    """
    if request_id not in state.running:
        raise ValueError(f"no running request has the id {request_id!r}")
    while request_id in state.running:
        preempt_last(state)


def _append(request: Request, tokens: Sequence[int]) -> tuple[int, str | None]:
    """Append tokens up to the first that ends the request: how many there are, and why it ends."""
    for count, token in enumerate(tokens, start=1):
        request.tokens.append(token)
        if token in request.stop:
            return count, "stop"
        if len(request.tokens) == request.max_total:
            return count, "length"
    return len(tokens), None


def _check_tokens(request: Request, work: Work, tokens: Sequence[int]) -> None:
    """Raise ValueError unless the tokens can be those of a row in flight."""
    if not request.in_flight:
        raise ValueError(f"request {request.id!r}: the row at {work.start} is committed already")
    drafts, accepted = work.drafts, len(tokens) - 1
    if drafts and tuple(tokens[:accepted]) != drafts[:accepted]:
        raise ValueError(
            f"request {request.id!r}: tokens {list(tokens)} don't begin with accepted drafts of "
            f"{list(drafts)}"
        )
    if accepted > work.num_drafts and request.in_flight > 1:
        raise ValueError(
            f"request {request.id!r}: {len(tokens)} tokens for a row with {work.num_drafts} "
            f"drafts, while the next row is in flight"
        )
