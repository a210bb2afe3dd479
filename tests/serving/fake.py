"""A fake model over a fake paged cache, and what it says of a sequence without either.

A row of the cache holds a checksum of all tokens up to its own and of the scope, as keys and values
depend on both. The next token is a hash of all rows, read through the page table. So a wrong page,
one with two owners, one behind another prefix, a stale row or a lost token changes what comes out;
rows of a page that was freed are gone.
"""

import zlib
from collections.abc import Callable, Hashable, Sequence

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import PrefixCache
from funcinfer.serving.request import Plan, Request, Work
from funcinfer.serving.schedule import ScheduleState, add, commit, schedule

VOCAB = 11
NO_STOP = frozenset()


def rows_of(tokens: Sequence[int], scope: Hashable = None) -> list[int]:
    """The cache rows of a sequence."""
    rows, row = [], zlib.crc32(repr(scope).encode())
    for token in tokens:
        row = zlib.crc32(bytes([token]), row)
        rows.append(row)
    return rows


def next_token(rows: Sequence[int]) -> int:
    return zlib.crc32(b"".join(row.to_bytes(4, "little") for row in rows)) % VOCAB


def alone(
    prompt: Sequence[int], max_total: int, stop: frozenset[int], scope: Hashable = None
) -> tuple[list[int], str]:
    """Output and reason of a request, one token at a time, over a plain list."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(rows_of(tokens, scope)))
        if tokens[-1] in stop:
            return tokens[len(prompt) :], "stop"
        if len(tokens) == max_total:
            return tokens[len(prompt) :], "length"


def guess(tokens: Sequence[int], scope: Hashable, count: int, right: int) -> list[int]:
    """`count` drafts after these tokens, of which the first `right` are what the model will say."""
    history = list(tokens)
    for number in range(count):
        history.append((next_token(rows_of(history, scope)) + (number >= right)) % VOCAB)
    return history[len(tokens) :]


class Device:
    """Runs plans in the order in which they are launched.

    scope_of: the scope of the request of a row. right: how many of the drafts that the device makes
    for a request whose last token is at this position are right. free: for the pool's on_free; the
    pages lose their rows before the next step.
    """

    def __init__(
        self,
        page_size: int,
        scope_of: Callable[[Work], Hashable] = lambda work: None,
        right: Callable[[int], int] = lambda position: 0,
    ) -> None:
        self.page_size, self.scope_of, self.right = page_size, scope_of, right
        self.rows: dict[tuple[int, int], tuple[int, int]] = {}  # token and checksum, by place
        self.freed: list[int] = []
        self.written: list[tuple[Work, int]] = []  # row and page, of the latest step
        self._latest: dict[int, tuple[int, int]] = {}  # epoch -> last token, drafts rejected

    def free(self, pages: tuple[int, ...]) -> None:
        self.freed += pages

    def erase(self) -> None:
        gone = set(self.freed)
        self.rows = {place: row for place, row in self.rows.items() if place[0] not in gone}
        self.freed = []

    def launch(self, plan: Plan) -> list[tuple[Work, list[int]]]:
        """Write every row of the plan, then answer those that want logits."""
        self.erase()
        self.written = []
        placed = [(work, *self._place(work)) for work in plan.works]
        return [
            (work, self._verify(work, end, drafts))
            for work, end, drafts in placed
            if work.wants_logits
        ]

    def _place(self, work: Work) -> tuple[int, list[int]]:
        """Write a row; returns where its drafts begin, and the drafts."""
        tokens = work.tokens
        drafts = list(tokens[len(tokens) - work.num_drafts :])
        del tokens[len(tokens) - work.num_drafts :]
        start = work.start
        if work.late:
            tokens[-1], rejected = self._latest[work.epoch]
            start -= rejected
        end = start + len(tokens)
        history = [self._read(work, x)[0] for x in range(start)] + tokens
        if work.num_drafts and not work.drafts:
            drafts = guess(history, self.scope_of(work), work.num_drafts, self.right(end))
        before = [self._read(work, x)[1] for x in range(start)]
        row = before[-1] if before else rows_of([0], self.scope_of(work))[0]
        for offset, token in enumerate(tokens + drafts):
            position = start + offset
            if position:
                row = zlib.crc32(bytes([token]), row)
            else:
                row = rows_of([token], self.scope_of(work))[0]
            page = work.pages[position // self.page_size]
            self.rows[page, position % self.page_size] = token, row
            self.written.append((work, page))
        return end, drafts

    def _verify(self, work: Work, end: int, drafts: list[int]) -> list[int]:
        """The tokens that a row gives: its drafts as far as they are right, and one more."""
        rows = [self._read(work, x)[1] for x in range(end + len(drafts))]
        tokens = []
        for number in range(len(drafts) + 1):
            tokens.append(next_token(rows[: end + number]))
            if drafts[number : number + 1] != tokens[-1:]:
                break
        self._latest[work.epoch] = tokens[-1], len(drafts) + 1 - len(tokens)
        return tokens

    def _read(self, work: Work, position: int) -> tuple[int, int]:
        return self.rows[work.pages[position // self.page_size], position % self.page_size]


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
