"""The prefix cache against a dictionary of whole prefixes, and pages whose contents are known."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import Chain, PrefixCache, common_hit, hash_block, scope

SCOPES = (scope(), scope(salt="x"), scope(adapter="x"))

HASHES = {
    "as shipped": hash_block,
    "two values": lambda parent, tokens: hash_block(parent, tokens) % 2,
    "constant": lambda parent, tokens: 5,
}


class PrefixMachine(RuleBasedStateMachine):
    """Tables of pages whose content is written down: each page's whole prefix and scope.

    Whatever the hash does, a page that is taken holds what was asked for. With the shipped one,
    the hit is as long as the contents of the pages that were not taken away allow.
    """

    @initialize(
        num_pages=st.integers(4, 10),
        page_size=st.integers(1, 3),
        hashed=st.sampled_from(sorted(HASHES)),
    )
    def start(self, num_pages, page_size, hashed):
        self.content: dict[int, tuple] = {}
        self.pool = PagePool(num_pages, on_free=self.erase)
        self.exact = hashed == "as shipped"
        self.cache = PrefixCache(self.pool, page_size, HASHES[hashed])
        self.size = page_size
        self.tables: list[SimpleNamespace] = []

    def erase(self, pages):
        for page in pages:
            self.content.pop(page, None)

    def prefixes(self, scope_, tokens) -> list[tuple]:
        """What the full pages of these tokens must hold."""
        ends = range(self.size, len(tokens) + 1, self.size)
        return [(scope_, tuple(tokens[:end])) for end in ends]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        scope_=st.sampled_from(SCOPES),
        looks=st.integers(1, 2),
    )
    def open(self, tokens, scope_, looks):
        """A new table: look, take what is there, compute the rest."""
        chain, limit = Chain(scope_), len(tokens) - 1
        for _ in range(looks):
            hit = self.cache.longest(chain, tokens, limit)
        assert hit % self.size == 0
        assert hit <= limit
        wanted = self.prefixes(scope_, tokens)
        if self.exact:
            kept = {b.page for b in self.cache.blocks}
            there = {held for page, held in self.content.items() if page in kept}
            most = limit // self.size
            length = next((i for i in range(most) if wanted[i] not in there), most)
            assert hit == length * self.size
        free, held = self.pool.num_free, self.cache.num_held(chain, hit)
        rest = -(-len(tokens) // self.size) - hit // self.size
        if hit // self.size + rest - held > free:
            return
        pages = self.cache.take(chain, hit)
        assert [self.content[page] for page in pages] == wanted[: hit // self.size]
        assert self.pool.num_free == free - (len(pages) - held)
        pages += self.pool.allocate(rest)
        for page, held_content in list(zip(pages, wanted, strict=False))[hit // self.size :]:
            assert not self.pool.is_kept(page)
            assert self.pool.references(page) == 1
            self.content[page] = held_content
        self.tables.append(SimpleNamespace(chain=chain, tokens=tokens, pages=pages, wanted=wanted))

    @rule(choice=st.integers(0), length=st.integers(0, 8))
    def enter(self, choice, length):
        if self.tables:
            table = self.tables[choice % len(self.tables)]
            length = min(length, len(table.tokens))
            self.cache.enter(table.chain, table.tokens, table.pages, length)
            held = [self.content.get(page) for page in table.pages]
            assert held[: len(table.wanted)] == table.wanted

    @rule(choice=st.integers(0))
    def close(self, choice):
        if self.tables:
            self.pool.free(self.tables.pop(choice % len(self.tables)).pages)

    @rule(choice=st.integers(0))
    def reopen(self, choice):
        """Give all pages back and look again with the same chain, as after a preemption."""
        if self.tables:
            table = self.tables.pop(choice % len(self.tables))
            self.pool.free(table.pages)
            hit = self.cache.longest(table.chain, table.tokens, len(table.tokens) - 1)
            pages = self.cache.take(table.chain, hit)
            assert [self.content[page] for page in pages] == table.wanted[: hit // self.size]
            self.pool.free(pages)

    @rule()
    def clear(self):
        self.cache.clear()
        assert (self.cache.blocks, self.pool.num_idle) == ([], 0)

    @invariant()
    def entries_are_what_their_pages_hold(self):
        if not hasattr(self, "cache"):
            return
        blocks = self.cache.blocks
        assert len({block.page for block in blocks}) == len(blocks)
        for block in blocks:
            prefix, above = block.tokens, block
            while above.parent is not None:
                above = above.parent
                assert above.page, "a parent outlives its children"
                prefix = above.tokens + prefix
            assert self.content[block.page] == (block.scope, prefix)
            assert self.pool.is_kept(block.page)
        held = [page for table in self.tables for page in table.pages]
        for page in range(1, self.pool.num_pages):
            assert self.pool.references(page) == held.count(page)
        assert self.pool.num_free + len(set(held)) == self.pool.num_usable
        idle = {block.page for block in blocks} - set(held)
        assert self.pool.num_idle == len(idle)

    def teardown(self):
        if hasattr(self, "cache"):
            for table in self.tables:
                self.pool.free(table.pages)
            self.tables = []
            self.entries_are_what_their_pages_hold()
            self.clear()
            assert self.pool.num_free == self.pool.num_usable
            assert not self.content


PrefixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestPrefix = PrefixMachine.TestCase


def filled(tokens, page_size=2, num_pages=12, hashed=hash_block, **keys):
    """A cache that holds the full pages of one request that has ended; its pages."""
    pool = PagePool(num_pages)
    cache = PrefixCache(pool, page_size, hashed)
    pages = list(pool.allocate(-(-len(tokens) // page_size)))
    cache.enter(Chain(scope(**keys)), tokens, pages, len(tokens))
    pool.free(pages)
    return cache, pages


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(salt="x", adapter=None), dict(salt=None, adapter="x")),
        (dict(salt="ab", adapter="c"), dict(salt="a", adapter="bc")),
        (dict(salt="1"), dict(salt=1)),
        (dict(salt=1), dict(salt=True)),
        (dict(salt="x"), dict(salt=b"x")),
        (dict(salt="x"), dict()),
        (dict(salt=0), dict(salt=None)),
    ],
)
@pytest.mark.parametrize("hashed", [hash_block, lambda parent, tokens: 5])
def test_scopes_share_nothing(one, other, hashed):
    assert scope(**one) != scope(**other)
    cache, _ = filled([1, 2, 3, 4], hashed=hashed, **one)
    assert cache.longest(Chain(scope(**one)), [1, 2, 3, 4], 4) == (4 if hashed is hash_block else 2)
    assert cache.longest(Chain(scope(**other)), [1, 2, 3, 4], 4) == 0


def test_a_block_belongs_to_what_stands_before_it():
    """The same tokens behind another block, or at another place, are another block."""
    cache, _ = filled([1, 2, 3, 4, 5, 6])
    for tokens, hit in (([9, 2, 3, 4], 0), ([3, 4, 5, 6], 0), ([1, 2, 5, 6], 2), ([1, 2, 3, 4], 4)):
        assert cache.longest(Chain(scope()), tokens, 4) == hit


def test_a_bad_hash_costs_hits_and_no_wrong_page():
    cache, pages = filled([1, 2, 3, 4], hashed=lambda parent, tokens: 5)
    assert [block.tokens for block in cache.blocks] == [(1, 2)]
    for tokens, hit in (([1, 2, 3, 4], 2), ([1, 3], 0), ([3, 4], 0), ([1, 2, 1, 2], 2)):
        chain = Chain(scope())
        assert cache.longest(chain, tokens, len(tokens)) == hit
        assert cache.take(chain, hit) == pages[: hit // 2]


@pytest.mark.parametrize("page_size", [1, 2, 3])
def test_a_hit_is_as_long_as_the_limit_allows(page_size):
    tokens = list(range(3 * page_size + 1))
    cache, _ = filled(tokens, page_size)
    for length in range(1, len(tokens) + 1):
        for limit in range(length + 1):
            expected = max(x for x in range(limit + 1) if x % page_size == 0)
            assert cache.longest(Chain(scope()), tokens[:length], limit) == expected


def test_the_end_of_the_least_recently_used_prefix_goes_first():
    cache, old = filled([1, 2, 3, 4, 5, 6], num_pages=9)
    pool = cache.pool
    new = list(pool.allocate(2))
    cache.enter(Chain(scope()), [7, 8, 9, 9], new, 4)
    pool.free(new)
    chain = Chain(scope())  # use the old one's first page again
    cache.longest(chain, [1, 2], 2)
    pool.free(cache.take(chain, 2))
    taken = [pool.allocate(1)[0] for _ in range(8)]
    assert taken[3:] == [old[2], old[1], new[1], new[0], old[0]]
    assert cache.blocks == []
    assert pool.allocate(1) is None


def test_an_evicted_page_leaves_the_index_before_anyone_gets_it():
    events = []
    pool = PagePool(3, on_free=lambda pages: events.append((pages, list(cache.blocks))))
    cache = PrefixCache(pool, 1)
    pages = list(pool.allocate(2))
    cache.enter(Chain(scope()), [7, 8], pages, 2)
    pool.free(pages)
    assert events == []
    assert (pool.num_free, pool.num_idle) == (2, 2)
    first = [block.tokens for block in cache.blocks if block.page == pages[0]]
    pool.allocate(1)
    ((freed, blocks),) = events
    assert freed == (pages[1],)
    assert [block.tokens for block in blocks] == first == [(7,)]


def test_a_block_that_was_computed_twice_is_kept_once():
    """The second table changes over to the page of the first, and its own is free."""
    cache, first = filled([1, 2, 3, 4])
    second = list(cache.pool.allocate(3))
    chain, tokens = Chain(scope()), [1, 2, 3, 4, 5, 6]
    own = second[2]
    cache.enter(chain, tokens, second, 6)
    assert second == [*first, own]
    assert [cache.pool.references(page) for page in second] == [1, 1, 1]
    assert cache.pool.num_free == 11 - 3
    assert cache.longest(Chain(scope()), tokens, 6) == 6


def test_each_block_of_a_request_is_hashed_once():
    calls = []

    def counting(parent, tokens):
        calls.append(tokens)
        return hash_block(parent, tokens)

    cache, _ = filled([1, 2, 3, 4, 5, 6], hashed=counting)
    chain, tokens = Chain(scope()), [1, 2, 3, 4, 9, 9, 8, 8, 7]
    calls.clear()
    for _ in range(3):
        assert cache.longest(chain, tokens, 8) == 4
    assert calls == [(1, 2), (3, 4), (9, 9)]
    pages = [*cache.take(chain, 4), *cache.pool.allocate(3)]
    for length in (5, 6, 8, 9):
        cache.enter(chain, tokens, pages, length)
    cache.pool.free(pages)
    assert cache.longest(chain, tokens, 8) == 8
    assert calls == [(1, 2), (3, 4), (9, 9), (8, 8)]


def test_a_blocked_request_that_looks_again_sees_what_has_changed():
    cache, pages = filled([1, 2, 3, 4], num_pages=4)
    pool, chain = cache.pool, Chain(scope())
    assert cache.longest(chain, [1, 2, 3, 4, 5], 4) == 4
    pool.allocate(2)  # takes the free page, then the last page of the prefix
    assert cache.longest(chain, [1, 2, 3, 4, 5], 4) == 2
    assert cache.num_held(chain, 2) == 0
    assert cache.take(chain, 2) == pages[:1]
    assert cache.num_held(chain, 2) == 1


def test_a_running_request_stops_entering_after_a_clear():
    pool = PagePool(9)
    cache, chain, tokens = PrefixCache(pool, 2), Chain(scope()), [1, 2, 3, 4]
    pages = list(pool.allocate(2))
    cache.enter(chain, tokens, pages, 2)
    cache.clear()
    cache.enter(chain, tokens, pages, 4)
    assert (cache.blocks, chain.closed) == ([], True)
    pool.free(pages)
    assert pool.num_free == 8
    assert cache.longest(chain, tokens, 4) == 0
    assert cache.take(chain, 0) == []
    pages = list(pool.allocate(2))
    cache.enter(chain, tokens, pages, 4)
    assert len(cache.blocks) == 2


@given(
    sizes=st.lists(st.integers(1, 5), max_size=3),
    hits=st.lists(st.integers(0, 24), min_size=3, max_size=3),
    snapshots=st.sets(st.integers(1, 24), max_size=4),
    window=st.integers(1, 6),
    missing=st.sets(st.integers(0, 24), max_size=6),
    limit=st.integers(0, 24),
)
def test_the_common_hit_is_the_longest_that_every_group_can_use(
    sizes, hits, snapshots, window, missing, limit
):
    """Groups of pages, one with a state at some positions, one that needs a window of positions."""
    usable = [
        {x for x in range(hit + 1) if x % size == 0} for size, hit in zip(sizes, hits, strict=False)
    ]
    usable.append({0, *snapshots})
    usable.append({x for x in range(25) if not missing & set(range(max(x - window, 0), x))})

    def longest_of(lengths):
        return lambda limit: max(x for x in lengths if x <= limit)

    expected = max(x for x in range(limit + 1) if all(x in lengths for lengths in usable))
    assert common_hit(limit, [longest_of(lengths) for lengths in usable]) == expected


def test_without_groups_nothing_limits_the_hit():
    assert common_hit(7, []) == 7


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="page_size is 0"):
        PrefixCache(PagePool(3), 0)
    with pytest.raises(ValueError, match=r"salt is 1.5: expected a str"):
        scope(salt=1.5)
    cache, _ = filled([1, 2])
    chain = Chain(scope())
    cache.longest(chain, [1, 2], 2)
    cache.clear()
    with pytest.raises(ValueError, match="page 0 is the scratch page"):
        cache.take(chain, 2)
