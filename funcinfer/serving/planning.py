"""How a step is made: rows of running requests, pages for them, and admission.

The parts of `funcinfer.serving.schedule`, which states the rules.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from funcinfer.kvcache.layout import pages_needed
from funcinfer.kvcache.prefix import common_hit
from funcinfer.serving.request import NEVER, Request, ScheduleState, Work

# A named tuple of all its fields, in half the time that its own constructor takes.
new_work: Callable[[tuple[Any, ...]], Work] = partial(tuple.__new__, Work)


@dataclass(slots=True, eq=False)
class Step:
    """A plan in the making: what is asked for, the budget left, and what is planned."""

    state: ScheduleState
    page_size: int
    left: int
    ahead: int
    num_drafts: int
    look_ahead: int
    chunk: Callable[[int], int] | None
    works: list[Work] = field(default_factory=list)
    preempted: list[Hashable] = field(default_factory=list)


def plan_row(step: Step, request: Request, behind: int) -> None:
    """Plan the next row of a request, whose tokens count as computed from now on, if it has any.

    behind: running requests that are still to get a token of the budget, before drafts do.
    """
    start, left, pages, history = request.computed, step.left, request.pages, request.tokens
    late = request.in_flight > 0
    if late:
        total = start + 1
        if request.in_flight > step.ahead or total >= request.max_total or not request.can_be_late:
            return
    else:
        total = len(history)
    count = total - start
    if count > 1 and step.chunk is not None:
        count = min(count, max(step.chunk(start), 1))
    if count > left:
        count = left
    room = len(pages) * step.page_size - start - count
    if room < 0:
        room += _take_pages(step, request, -room)
        if room < 0:
            count += room
            if not count:
                return
    num_drafts, drafts = 0, request.drafts
    wants_logits = start + count == total
    if wants_logits:
        if drafts or step.num_drafts:
            request.drafts = ()
            num_drafts = len(drafts)
            if not drafts and request.has_drawn and request.can_be_late:
                num_drafts = step.num_drafts
            most, useful = left - count - behind, request.max_total - total - 1
            if num_drafts > most or num_drafts > useful or num_drafts > room:
                num_drafts = _fit_drafts(step, request, num_drafts, min(most, useful), room)
                drafts = drafts[:num_drafts]
            count += num_drafts
        if step.look_ahead:
            _look_ahead(step, request, start + count)
        request.in_flight += 1
        request.has_drawn = True
    request.row_start = start
    request.computed = start + count
    step.left = left - count
    if not num_drafts:
        drafts = ()
    epoch = request.epoch
    row = (request.id, start, count, wants_logits, epoch, history, pages, num_drafts, drafts, late)
    step.works.append(new_work(row))


def _take_pages(step: Step, request: Request, lacking: int) -> int:
    """Take pages for `lacking` more positions, or fewer; returns how many positions they have.

    Requests behind are preempted as long as pages are missing; the last one takes what is left.
    """
    state, wanted = step.state, pages_needed(lacking, step.page_size)
    while (pages := state.pool.allocate(wanted)) is None:
        last = next(reversed(state.running))
        if last == request.id:
            pages = state.pool.allocate(state.pool.num_free) or ()
            break
        victim = state.running[last]
        if victim.computed >= victim.next_full:
            enter_blocks(state, victim, sure_positions(victim, step.ahead))
        step.preempted.append(preempt_last(state))
    request.pages.extend(pages)
    return len(pages) * step.page_size


def _fit_drafts(step: Step, request: Request, count: int, most: int, room: int) -> int:
    """How many of `count` drafts, at most `most`, find a place.

    `room` is that of the request's pages; free ones are taken for the rest.
    """
    if count > most:
        count = max(most, 0)
    if count > room:
        pool, wanted = step.state.pool, pages_needed(count - room, step.page_size)
        pages = pool.allocate(wanted) or pool.allocate(pool.num_free) or ()
        request.pages.extend(pages)
        count = min(count, room + len(pages) * step.page_size)
    return count


def _look_ahead(step: Step, request: Request, end: int) -> None:
    """Take free pages for positions from `end` on, up to the last one that can matter."""
    last = min(end + step.look_ahead, request.max_total - 1)
    lacking = last - len(request.pages) * step.page_size
    if lacking > 0:
        pool, wanted = step.state.pool, pages_needed(lacking, step.page_size)
        request.pages.extend(pool.allocate(wanted) or pool.allocate(pool.num_free) or ())


def admit(step: Step, max_running: int) -> int:
    """Plan rows of waiting requests, in order; returns how many positions they need not compute."""
    state, running = step.state, step.state.running
    num_hit = 0
    ordered = True
    while step.left and state.waiting and len(running) < max_running:
        request = state.waiting.first()
        if _awaits_prompt(state, request) or not _fits_now(state, request):
            break
        ordered &= not running or running[next(reversed(running))].order < request.order
        running[request.id] = state.waiting.pop(request.id)
        num_hit += request.computed
        plan_row(step, request, behind=0)
    if not ordered:
        requests = sorted(running.values(), key=lambda request: request.order)
        running.clear()
        running.update((request.id, request) for request in requests)
        step.works.sort(key=lambda work: running[work.request_id].order)
    return num_hit


def _awaits_prompt(state: ScheduleState, child: Request) -> bool:
    """Whether the parent is computing full pages of the prompt that are to be shared."""
    parent, size = child.parent, state.page_size
    if parent is None or state.running.get(parent.id) is not parent:
        return False
    computed = parent.next_full - size if state.prefix is not None else parent.row_start
    return computed < (parent.prompt_len - 1) // size * size


def _fits_now(state: ScheduleState, request: Request) -> bool:
    """Give a waiting request the pages it shares, if there are enough for the rest of its tokens.

    At least one of them is left to compute. Shared pages that nobody holds are free pages as well.
    """
    pool, size, prefix, chain = state.pool, state.page_size, state.prefix, request.chain
    parent, limit = request.parent, len(request.tokens) - 1
    shared: list[int] = []
    hit = 0
    if prefix is not None and chain is not None:
        hit = common_hit(limit, [partial(prefix.longest, chain, request.tokens)])
        num_held = prefix.num_held(chain, hit)
    else:
        if parent is not None and state.running.get(parent.id) is parent:
            shared = parent.pages[: limit // size]
        num_held = len(shared)
    if pages_needed(limit + 1, size) > pool.num_free + num_held:
        return False
    if prefix is not None and chain is not None:
        shared = prefix.take(chain, hit)
        request.next_full = hit + size
    else:
        pool.share(shared)
    request.pages = shared
    request.computed = request.row_start = len(shared) * size
    request.parent = None
    return True


def enter_blocks(state: ScheduleState, request: Request, computed: int) -> None:
    """Let others share the full pages of the first `computed` positions, up to the last token."""
    prefix, chain, tokens = state.prefix, request.chain, request.tokens
    assert prefix is not None and chain is not None, "without them no block is ever full"
    prefix.enter(chain, tokens, request.pages, min(computed, len(tokens) - 1))
    full = (len(chain.blocks) + 1) * state.page_size
    request.next_full = NEVER if chain.closed else full


def preempt_last(state: ScheduleState) -> Hashable:
    """Move the last running request to the waiting ones; returns its id."""
    request_id, request = state.running.popitem()
    release(state, request)
    state.waiting.push(request)
    return request_id


def release(state: ScheduleState, request: Request) -> None:
    """Give back the pages and start a new epoch; rows in flight keep the old page list."""
    pages, request.pages = request.pages, []
    request.computed = request.in_flight = 0
    request.has_drawn = False
    state.counter += 1
    request.epoch = state.counter
    state.pool.free(pages)


def sure_positions(request: Request, ahead: int) -> int:
    """How many positions have been computed for certain: all that are planned, less those of a row
    that may be in flight. Before the next row is planned.
    """
    return request.row_start if ahead else request.computed
