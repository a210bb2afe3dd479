"""The scheduler: state in, plan out. No tensors, no clock, no model.

One rule and no phases. A live request has `computed` positions in the cache out of the
`total = len(prompt) + len(output)` tokens it has so far. A step gives each running request

    count = min(budget left, total - computed)

tokens, in order of arrival. A prompt, a chunk of a prompt, a decode row and a recomputed request
differ in nothing but these two numbers, so they share one batch and one token budget. A request
wants logits exactly when the step reaches its total.

Running requests arrived before waiting ones, always, and both are kept in order of arrival:

- admission takes the first waiting request when there is budget, a place, and pages for all of
  its tokens; nobody overtakes it;
- a running request that lacks a page preempts the latest arrival: that one gives back its pages,
  starts again from computed = 0 and goes to the head of the waiting ones. Its output so far is
  kept and recomputed like a prompt. The latest arrival itself never preempts: it makes do with
  the pages that are left, perhaps none this step;
- what could not run with the whole pool for itself is refused by `add`, so the oldest request
  always runs, and every request ends.

`schedule` counts the tokens it plans as computed. A planned request whose token has not been
committed yet has computed == total, so a further `schedule` leaves it alone. Every stay of a
request in the running set has an epoch of its own, and each `Work` carries it: a token that
comes late, after a preemption or for an earlier request of the same id, is recognised and dropped.

Cost: a step touches the running requests and the admitted ones, not the rest of the queue, and
copies no token or page list.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.layout import pages_needed


@dataclass(slots=True, eq=False)
class Request:
    """One live request; made by `add`, changed by the functions of this file only.

    tokens: prompt and output in one list, which only ever grows; the first prompt_len are the
    prompt. computed: positions whose keys and values are in the cache, or planned to be.
    pages: the page-table row. epoch: the present stay in the running set. sampling: anything the
    caller wants to find here again; the scheduler does not look at it.
    """

    id: Hashable
    tokens: list[int] = field(repr=False)
    prompt_len: int
    max_total: int
    stop: frozenset[int]
    sampling: Any
    arrival: int
    epoch: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt tokens, copied."""
        return self.tokens[: self.prompt_len]

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, copied."""
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far: also the index of the next draw."""
        return len(self.tokens) - self.prompt_len


class Work(NamedTuple):
    """One row of a step: `num_tokens` tokens of one request from position `start` on.

    history and pages are the request's own lists, not copies. Both only grow while the row is in
    flight (a preempted request gets a new page list), and the row covers positions that are there.
    """

    request_id: Hashable
    start: int
    num_tokens: int
    wants_logits: bool
    epoch: int
    history: list[int]
    pages: list[int]

    @property
    def tokens(self) -> list[int]:
        """The tokens of this row, copied."""
        return self.history[self.start : self.start + self.num_tokens]


class Plan(NamedTuple):
    """What one step computes: rows in batch order, how many tokens they have, who was preempted."""

    works: tuple[Work, ...]
    num_tokens: int
    preempted: tuple[Hashable, ...]


@dataclass(slots=True, eq=False)
class ScheduleState:
    """Everything the scheduler knows. Both dicts are in order of arrival, running ones first.

    max_length: most tokens, prompt and output, that the model can take; None: no limit.
    counter: number of arrivals and epochs so far.
    """

    pool: PagePool
    page_size: int
    max_length: int | None = None
    running: dict[Hashable, Request] = field(default_factory=dict)
    waiting: OrderedDict[Hashable, Request] = field(default_factory=OrderedDict)
    counter: int = 0

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}: it must be at least 1")

    def request(self, request_id: Hashable) -> Request:
        """The live request of this id. Raises ValueError when there is none."""
        found = self.running.get(request_id) or self.waiting.get(request_id)
        if found is None:
            raise ValueError(f"no live request has the id {request_id!r}")
        return found


def never_fits(
    prompt_len: int, max_total: int, *, num_pages: int, page_size: int, max_length: int | None
) -> str | None:
    """Why a request can never run to its end, or None when it can.

    max_total: tokens of prompt and output together at which the request ends. The last of them is
    never read back, so max_total - 1 positions are cached. num_pages: size of the pool, its
    scratch page included. A caller that would rather cut requests than refuse them passes
    max_total = min(prompt_len + max_tokens, max_length).

    >>> never_fits(5, 9, num_pages=3, page_size=4, max_length=None)
    >>> never_fits(5, 10, num_pages=3, page_size=4, max_length=None)
    'a request of 10 tokens needs 3 pages of 4; the pool has 2 for requests'
    """
    if prompt_len < 1:
        return "the prompt is empty"
    if max_total <= prompt_len:
        return f"a prompt of {prompt_len} tokens leaves none to generate within {max_total}"
    if max_length is not None and max_total > max_length:
        return f"a request of {max_total} tokens is longer than the maximal length {max_length}"
    needed = pages_needed(max_total - 1, page_size)
    if needed > num_pages - 1:
        return (
            f"a request of {max_total} tokens needs {needed} pages of {page_size}; "
            f"the pool has {num_pages - 1} for requests"
        )
    return None


def add(
    state: ScheduleState,
    request_id: Hashable,
    prompt: Sequence[int],
    *,
    max_total: int,
    stop: frozenset[int] = frozenset(),
    sampling: Any = None,
) -> Request:
    """Put a request at the end of the waiting ones.

    max_total: tokens of prompt and output together at which it ends with reason "length".
    stop: token ids that end it with reason "stop"; the stop token belongs to the output.
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
    )
    state.waiting[request_id] = request
    return request


def schedule(state: ScheduleState, budget: int, max_running: int) -> Plan:
    """Plan one step: at most `budget` tokens of at most `max_running` requests.

    Changes the state: pages are taken, requests admitted and preempted, planned tokens counted as
    computed. A budget of at least max_running lets every running request decode in every step.
    Raises ValueError for a budget or max_running below 1.

    >>> state = ScheduleState(PagePool(4), page_size=4)
    >>> request = add(state, "a", [7, 8, 9], max_total=5)
    >>> [(work.start, work.tokens, work.wants_logits) for work in schedule(state, 2, 1).works]
    [(0, [7, 8], False)]
    >>> [(work.start, work.tokens, work.wants_logits) for work in schedule(state, 2, 1).works]
    [(2, [9], True)]
    """
    if budget < 1 or max_running < 1:
        raise ValueError(f"budget {budget} and max_running {max_running} must be at least 1")
    running, page_size = state.running, state.page_size
    works: list[Work] = []
    preempted: list[Hashable] = []
    left = budget
    for request in tuple(running.values()):
        if left == 0 or request.id not in running:  # victims are a tail of the running ones
            break
        count = len(request.tokens) - request.computed
        if count > left:
            count = left
        lacking = request.computed + count - len(request.pages) * page_size
        if lacking > 0:
            count -= lacking - _take_pages(state, request, lacking, preempted)
        if count > 0:
            works.append(_plan(request, count))
            left -= count
    while left and state.waiting and len(running) < max_running and not preempted:
        request = next(iter(state.waiting.values()))
        total = len(request.tokens)
        if pages_needed(total, page_size) > state.pool.num_free:
            break
        running[request.id] = state.waiting.pop(request.id)
        count = min(left, total)
        _take_pages(state, request, count, preempted)
        works.append(_plan(request, count))
        left -= count
    return Plan(tuple(works), budget - left, tuple(preempted))


def commit(state: ScheduleState, work: Work, tokens: Sequence[int]) -> tuple[int, str | None]:
    """Append the tokens sampled for a row: how many were accepted, and why the request ended.

    tokens: at least one; cut after the first stop token, else at max_total. A request that ends
    leaves the state and gives back its pages; the reason is "stop", "length", or None while it
    goes on. Tokens of a stale row (the request has ended or was preempted since) are dropped: 0.
    Raises ValueError for a row that did not want logits, or without tokens.

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
    reason = None
    accepted = 0
    for token in tokens:
        request.tokens.append(token)
        accepted += 1
        if token in request.stop:
            reason = "stop"
        elif len(request.tokens) == request.max_total:
            reason = "length"
        if reason is not None:
            finish(state, request.id, reason)
            break
    return accepted, reason


def finish(state: ScheduleState, request_id: Hashable, reason: str) -> Request:
    """End a live request now, running or waiting: its pages go back, its id is free again.

    reason: kept as request.finish_reason; "abort" when the user gave up, "error" when the model
    did. Raises ValueError when no live request has the id.
    """
    request = state.request(request_id)
    (state.running if request_id in state.running else state.waiting).pop(request_id)
    _release(state, request)
    request.finish_reason = reason
    return request


def preempt(state: ScheduleState, request_id: Hashable) -> None:
    """Take a running request out, and with it those that arrived later, to be computed afresh.

    They go to the head of the waiting ones, still in order of arrival. Also the way back after a
    step that failed: preempt the request of its first row, and nothing of that step remains.
    Raises ValueError when no running request has the id.
    """
    if request_id not in state.running:
        raise ValueError(f"no running request has the id {request_id!r}")
    while request_id in state.running:
        _preempt_latest(state)


def _plan(request: Request, count: int) -> Work:
    """The row for the next `count` tokens, which count as computed from now on."""
    start = request.computed
    request.computed = end = start + count
    reaches_total = end == len(request.tokens)
    return Work(
        request.id, start, count, reaches_total, request.epoch, request.tokens, request.pages
    )


def _take_pages(
    state: ScheduleState, request: Request, lacking: int, preempted: list[Hashable]
) -> int:
    """Get pages for `lacking` more positions; returns for how many of them there are pages now.

    Later arrivals are preempted as long as pages are missing; the latest one takes what is left.
    """
    pool, page_size = state.pool, state.page_size
    wanted = pages_needed(lacking, page_size)
    while wanted > pool.num_free and next(reversed(state.running)) != request.id:
        preempted.append(_preempt_latest(state))
    pages = pool.allocate(min(wanted, pool.num_free))
    assert pages is not None, "no more than the free pages are asked for"
    request.pages.extend(pages)
    return min(lacking, len(pages) * page_size)


def _preempt_latest(state: ScheduleState) -> Hashable:
    """Move the latest running request to the head of the waiting ones; returns its id."""
    request_id, request = state.running.popitem()
    _release(state, request)
    state.waiting[request_id] = request
    state.waiting.move_to_end(request_id, last=False)
    return request_id


def _release(state: ScheduleState, request: Request) -> None:
    """Give back the pages and start a new epoch; rows in flight keep the old page list."""
    pages, request.pages = request.pages, []
    request.computed = 0
    state.counter += 1
    request.epoch = state.counter
    state.pool.free(pages)
