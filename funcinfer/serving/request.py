"""What the scheduler knows: requests, running and waiting, and the rows and plans it makes."""

import heapq
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.layout import pages_needed
from funcinfer.kvcache.prefix import Chain, PrefixCache

LATE = -1  # stands for a token that isn't known on the host when its row is planned
NEVER = sys.maxsize

Order = tuple[int, int, int]


@dataclass(slots=True, eq=False)
class Request:
    """One live request; made and changed by the functions of `funcinfer.serving.schedule` only.

    tokens: prompt and output in one list, which only ever grows; the first prompt_len are the
    prompt. computed: positions whose keys and values are in the cache, or planned to be; with rows
    in flight, if all their drafts are accepted. pages: the page-table row. epoch: the present stay
    in the running set. sampling: anything the caller wants to find here again; the scheduler does
    not look at it.

    order: requests run in this order: by priority, the smallest number first, then by arrival. The
    children of a request arrive with it, behind it. parent: whose prompt pages a child waits for.
    in_flight: rows planned that want logits and are not committed. has_drawn: whether there was
    such a row in this epoch. row_start: where the latest planned row began. drafts: proposed for
    the next row. can_be_late: whether rows may have tokens that aren't known when they are planned.
    chain: its blocks, with a prefix cache. next_full: positions at which the next block is full.
    """

    id: Hashable
    tokens: list[int] = field(repr=False)
    prompt_len: int
    max_total: int
    stop: frozenset[int]
    sampling: Any
    arrival: int
    epoch: int
    order: Order
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    parent: "Request | None" = field(default=None, repr=False)
    in_flight: int = 0
    has_drawn: bool = False
    row_start: int = 0
    drafts: tuple[int, ...] = ()
    can_be_late: bool = True
    chain: Chain | None = field(default=None, repr=False)
    next_full: int = NEVER

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

    The last num_drafts tokens are drafts; a row with drafts wants logits of its last 1 + num_drafts
    tokens. drafts: their values, or () when only the device has them. late: the token before the
    drafts is the last one that the request's row before this one gives, not known yet. That row was
    in flight when this one was planned, and `start` counts all its drafts as accepted: the true
    start is lower by the number of drafts that it rejects.
    """

    request_id: Hashable
    start: int
    num_tokens: int
    wants_logits: bool
    epoch: int
    history: list[int]
    pages: list[int]
    num_drafts: int = 0
    drafts: tuple[int, ...] = ()
    late: bool = False

    @property
    def tokens(self) -> list[int]:
        """The tokens of this row, copied; -1 for those that weren't known."""
        end = self.start + self.num_tokens - self.num_drafts - self.late
        known = self.history[self.start : end]
        drafts = self.drafts or (LATE,) * self.num_drafts
        return [*known, *(LATE,) * self.late, *drafts]


class Plan(NamedTuple):
    """What one step computes.

    works: rows in batch order. num_tokens: how many tokens they have. preempted: who was. num_hit:
    positions of the requests admitted in this step that others had computed.
    """

    works: tuple[Work, ...]
    num_tokens: int
    preempted: tuple[Hashable, ...]
    num_hit: int = 0


class WaitingQueue(Mapping[Hashable, Request]):
    """Requests by id, iterated in their order. The first one is found in O(1).

    Taking one in or out costs O(log n); one that is taken out from the middle stays in the heap
    until it comes to the top, or until half of the heap is such ones.
    """

    def __init__(self) -> None:
        self._requests: dict[Hashable, Request] = {}
        self._heap: list[tuple[Order, Request]] = []

    def __getitem__(self, request_id: Hashable) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[Hashable]:
        requests = sorted(self._requests.values(), key=lambda request: request.order)
        return iter([request.id for request in requests])

    def __len__(self) -> int:
        return len(self._requests)

    def first(self) -> Request:
        """The request that runs first. Raises IndexError when nobody waits."""
        return self._heap[0][1]

    def push(self, request: Request) -> None:
        """Take a request in. No two live requests have the same id or order."""
        self._requests[request.id] = request
        heapq.heappush(self._heap, (request.order, request))

    def pop(self, request_id: Hashable) -> Request:
        """Take a request out. Raises KeyError when none has the id."""
        request = self._requests.pop(request_id)
        if len(self._heap) > 2 * len(self._requests):
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)
        while self._heap and not self._waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return request

    def _waits(self, request: Request) -> bool:
        return self._requests.get(request.id) is request


@dataclass(slots=True, eq=False)
class ScheduleState:
    """Everything the scheduler knows. running and waiting are in order.

    max_length: most tokens, prompt and output, that the model can take; None: no limit.
    counter: number of arrivals and epochs so far. prefix: the prefix cache over `pool`; None:
    requests share nothing, but for the prompts of `fork`.
    """

    pool: PagePool
    page_size: int
    max_length: int | None = None
    running: dict[Hashable, Request] = field(default_factory=dict)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    counter: int = 0
    prefix: PrefixCache | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}: it must be at least 1")
        prefix = self.prefix
        if prefix is None:
            return
        if prefix.pool is not self.pool or prefix.page_size != self.page_size:
            whose = "this" if prefix.pool is self.pool else "another"
            raise ValueError(
                f"prefix is over {whose} pool with page_size {prefix.page_size}: "
                f"expected this pool and page_size {self.page_size}"
            )

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
