"""The page pool against a dictionary of reference counts, event by event."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from funcinfer.kvcache.allocator import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Tables that hold pages, and a model of the counts; every failed call must change nothing.

    kept: pages that an index keeps, by when they were last held; the end of a table counts as
    earlier than its beginning.
    """

    @initialize(num_pages=st.integers(2, 9))
    def start(self, num_pages):
        self.freed: list[int] = []
        self.pool = PagePool(num_pages, on_free=self.freed.extend)
        self.tables: list[tuple[int, ...]] = []
        self.kept: dict[int, int] = {}
        self.clock = 0

    def evict(self, page: int) -> None:
        assert page not in self.freed, "the index drops a page before it becomes free"
        del self.kept[page]

    def counts(self) -> list[int]:
        held = [page for table in self.tables for page in table]
        return [held.count(page) for page in range(self.pool.num_pages)]

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        before, free = self.counts(), self.pool.num_free
        idle = sorted((p for p in self.kept if not before[p]), key=self.kept.__getitem__)
        self.freed.clear()
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(set(pages)) == count
            assert all(before[page] == 0 and page != 0 for page in pages)
            evicted = idle[: max(count - (free - len(idle)), 0)]
            assert sorted(self.freed) == sorted(evicted)
            assert not self.kept.keys() & set(evicted)
            self.tables.append(pages)

    @rule(choice=st.integers(0))
    def keep(self, choice):
        held = [page for table in self.tables for page in table if page not in self.kept]
        if held:
            page = held[choice % len(held)]
            self.pool.keep(page, self.evict)
            self.kept[page] = self.clock

    @rule(choice=st.integers(0))
    def forget(self, choice):
        if self.kept:
            page = sorted(self.kept)[choice % len(self.kept)]
            idle = not self.counts()[page]
            self.freed.clear()
            self.pool.forget(page)
            del self.kept[page]
            assert self.freed == [page] * idle

    @rule(page=st.integers(-2, 10))
    def keep_or_forget_anything(self, page):
        """What is not held, or kept already, can't be kept; what isn't kept can't be forgotten."""
        counts = self.counts()
        if not (0 < page < len(counts) and counts[page]) or page in self.kept:
            with pytest.raises(ValueError, match="page"):
                self.pool.keep(page, self.evict)
        if page not in self.kept:
            with pytest.raises(ValueError, match=f"page {page} is not kept"):
                self.pool.forget(page)

    @rule(choice=st.integers(0))
    def share_idle(self, choice):
        counts = self.counts()
        idle = sorted(page for page in self.kept if not counts[page])
        if idle:
            page = idle[choice % len(idle)]
            self.pool.share([page])
            self.tables.append((page,))

    @rule(choice=st.integers(0))
    def share(self, choice):
        if self.tables:
            table = self.tables[choice % len(self.tables)]
            self.pool.share(table)
            self.tables.append(table)

    @rule(choice=st.integers(0))
    def free(self, choice):
        if self.tables:
            before = self.counts()
            table = self.tables.pop(choice % len(self.tables))
            self.freed.clear()
            self.pool.free(table)
            after = self.counts()
            gone = [page for page in range(len(after)) if before[page] > after[page] == 0]
            assert sorted(self.freed) == [page for page in gone if page not in self.kept]
            for page in reversed(table):
                if page in gone and page in self.kept:
                    self.clock += 1
                    self.kept[page] = self.clock

    @rule(pages=st.lists(st.integers(-2, 10), min_size=1, max_size=6))
    def free_anything(self, pages):
        """A free that drops more references than there are raises, whatever else it lists."""
        counts = self.counts()
        held = all(0 < page < len(counts) for page in pages)
        if held and all(pages.count(page) <= counts[page] for page in pages):
            return
        with pytest.raises(ValueError, match="page"):
            self.pool.free(pages)

    @rule(pages=st.lists(st.integers(-2, 10), min_size=1, max_size=6))
    def share_anything(self, pages):
        counts = self.counts()
        if all(0 < p < len(counts) and (counts[p] or p in self.kept) for p in pages):
            return
        with pytest.raises(ValueError, match="page"):
            self.pool.share(pages)

    @invariant()
    def free_and_referenced_are_the_whole_pool(self):
        counts = self.counts()
        assert [self.pool.references(page) for page in range(1, len(counts))] == counts[1:]
        assert self.pool.num_free + sum(count > 0 for count in counts) == self.pool.num_usable
        assert self.pool.num_idle == sum(not counts[page] for page in self.kept)
        for page in range(1, len(counts)):
            assert self.pool.is_kept(page) == (page in self.kept)

    def teardown(self):
        for table in self.tables:
            self.pool.free(table)
        self.tables = []
        self.free_and_referenced_are_the_whole_pool()
        everything = self.pool.allocate(self.pool.num_usable)
        assert not self.kept
        assert sorted(everything) == list(range(1, self.pool.num_pages))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_scratch_page_is_never_handed_out():
    pool = PagePool(5)
    assert pool.allocate(4) == (1, 2, 3, 4)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == ()
    with pytest.raises(ValueError, match="page 0 is the scratch page"):
        pool.free([0])


def test_a_double_free_is_an_error_and_frees_nothing():
    pool = PagePool(5)
    pages = pool.allocate(3)
    pool.free(pages[:1])
    for again in (pages, (pages[1], pages[1])):
        with pytest.raises(ValueError, match="freed once more than it is held"):
            pool.free(again)
    assert pool.num_free == 2
    assert [pool.references(page) for page in pages] == [0, 1, 1]


def test_a_shared_page_is_free_after_its_last_reference():
    freed = []
    pool = PagePool(4, on_free=freed.append)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.free(pages)
    assert freed == [pages[1:]]
    pool.free(pages[:1])
    assert freed == [pages[1:], pages[:1]]
    assert pool.num_free == pool.num_usable == 3


def test_both_references_of_a_page_can_be_dropped_in_one_call():
    freed = []
    pool = PagePool(4, on_free=freed.append)
    (page,) = pool.allocate(1)
    pool.share([page])
    pool.free([page, page])
    assert freed == [(page,)]
    assert pool.num_free == 3


def test_freed_pages_are_told_before_they_are_handed_out_again():
    events = []
    pool = PagePool(3, on_free=lambda pages: events.append(("free", pages)))
    first = pool.allocate(2)
    pool.free(first)
    events.append(("allocate", pool.allocate(2)))
    assert events == [("free", first), ("allocate", first)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: PagePool(1), "num_pages is 1: a pool needs the scratch page"),
        (lambda pool: pool.allocate(-1), "cannot allocate -1 pages"),
        (lambda pool: pool.share([1]), "page 1 is free: only a held or idle page can be shared"),
        (lambda pool: pool.keep(1, print), "page 1 is free: only a held page can be kept, once"),
        (lambda pool: pool.forget(1), "page 1 is not kept"),
        (lambda pool: pool.is_kept(0), "page 0 is the scratch page"),
        (lambda pool: pool.free([3]), "page 3 is outside the pool: pages of requests are 1..2"),
        (lambda pool: pool.references(-1), "page -1 is outside the pool"),
    ],
)
def test_misuse_is_refused(call, message):
    pool = PagePool(3)
    with pytest.raises(ValueError, match=message):
        call(pool)
    assert pool.num_free == 2
