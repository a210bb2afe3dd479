"""The prefix cache: full pages, found again by the tokens they hold. Host side, no tensors.

A *block* is what one full page holds. Keys and values at a position depend on all tokens up to it,
so a block is known by its tokens and by everything before them:

    digest_0 = H(scope, tokens_0)          digest_i = H(digest_i-1, tokens_i)

The scope is what else they depend on, or who may share them. A digest only finds a block. What is
found must have the tokens that are looked for, and its parent must be the very block found for the
tokens before, the first one the scope: a bad H costs hits, never a wrong page. Where two different
blocks have one digest, the earlier one stays.

The index keeps its pages in the pool: without a reference they are idle, and go in order of last
use. A table that holds a block holds its parents too, and gives back the last page first; so a
parent outlives its children, and a block that is in the index can be reached.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from funcinfer.kvcache.allocator import PagePool

Hash = Callable[[Hashable, tuple[int, ...]], int]


def hash_block(parent: Hashable, tokens: tuple[int, ...]) -> int:
    """Digest of a block: of the digest of its parent, or the scope, and of its tokens."""
    return hash((parent, tokens))


def scope(**keys: str | bytes | int | None) -> Hashable:
    """What the blocks of a request depend on besides tokens, such as salt=..., adapter=....

    Different keys give different scopes: each value goes with its name and type. None is the same
    as leaving the key out. Raises ValueError for a value of another type.

    >>> scope(salt="x", adapter=None) == scope(salt=None, adapter="x")
    False
    >>> scope(adapter=1, salt="x") == scope(salt="x", adapter=1), scope() == scope(salt=None)
    (True, True)
    """
    for name, value in keys.items():
        if value is not None and type(value) not in (str, bytes, int, bool):
            raise ValueError(f"{name} is {value!r}: expected a str, bytes, an int or None")
    given = sorted((name, value) for name, value in keys.items() if value is not None)
    return tuple((name, type(value).__name__, value) for name, value in given)


def common_hit(limit: int, groups: Sequence[Callable[[int], int]]) -> int:
    """The longest prefix, of at most `limit` positions, that every group of caches can go on from.

    groups: for each one a function limit -> its longest usable prefix of at most `limit`
    positions. They differ where layers keep different things: all positions, in pages of some
    size; a window of positions before the end of the prefix; a state at some positions.

    >>> pages_of_4 = lambda limit: min(limit, 13) // 4 * 4
    >>> snapshots = lambda limit: max(x for x in (0, 6, 8, 12) if x <= limit)
    >>> common_hit(11, [pages_of_4, snapshots])
    8
    """
    while (shorter := min((group(limit) for group in groups), default=limit)) < limit:
        limit = shorter
    return limit


@dataclass(slots=True, eq=False)
class Block:
    """An entry of the index. page: 0 once it has left the index."""

    parent: "Block | None"
    scope: Hashable
    tokens: tuple[int, ...]
    digest: int
    page: int


@dataclass(slots=True, eq=False)
class Chain:
    """What is known of the blocks of one request, so that each is hashed once.

    digests: of its full blocks so far. blocks: those of the index that its table begins with, or
    could begin with. closed: another block took the place of the next one in the index.
    """

    scope: Hashable
    digests: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    closed: bool = False


class PrefixCache:
    """Index of full pages of a pool.

    pool: may serve others too. page_size: positions a page. hash_block: see this file.

    >>> pool = PagePool(9)
    >>> cache = PrefixCache(pool, page_size=2)
    >>> pages, first = list(pool.allocate(3)), Chain(scope())
    >>> cache.enter(first, [7, 8, 9, 5, 6], pages, 5)
    >>> pool.free(pages)
    >>> second = Chain(scope())
    >>> cache.longest(second, [7, 8, 9, 5], limit=3), cache.take(second, 2) == pages[:1]
    (2, True)
    """

    def __init__(self, pool: PagePool, page_size: int, hash_block: Hash = hash_block) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}: it must be at least 1")
        self.pool, self.page_size = pool, page_size
        self._hash = hash_block
        self._index: dict[int, Block] = {}
        self._by_page: dict[int, Block] = {}
        self._on_evict = self._evicted  # one method object for all pages

    @property
    def blocks(self) -> list[Block]:
        """Everything in the index, copied."""
        return list(self._index.values())

    def longest(self, chain: Chain, tokens: Sequence[int], limit: int) -> int:
        """How many of the first `limit` positions are in the cache: a multiple of page_size.

        Remembers what it found in the chain, for `take` and for the next call: a request that
        looks again pays for what has changed. Changes nothing else.
        """
        blocks, most = chain.blocks, limit // self.page_size
        del blocks[most:]
        while blocks and not blocks[-1].page:  # a parent outlives its children
            blocks.pop()
        while len(blocks) < most:
            found, _, _ = self._find(chain, tokens)
            if found is None:
                break
            blocks.append(found)
        return len(blocks) * self.page_size

    def num_held(self, chain: Chain, length: int) -> int:
        """How many pages of the first `length` positions found by `longest` a table holds now.

        Taking these needs no page of `pool.num_free`; each of the others is one of them.
        """
        references = self.pool.references  # a table that holds a page holds those before it
        end = length // self.page_size
        return bisect_left(chain.blocks, True, hi=end, key=lambda block: not references(block.page))

    def take(self, chain: Chain, length: int) -> list[int]:
        """The pages of the first `length` of the positions found by `longest`, one more reference
        each.
        """
        del chain.blocks[length // self.page_size :]
        chain.closed = False
        pages = [block.page for block in chain.blocks]
        self.pool.share(pages)
        return pages

    def enter(self, chain: Chain, tokens: Sequence[int], pages: list[int], length: int) -> None:
        """Put the full pages of the first `length` positions of a table into the index.

        tokens, pages: of the request of this chain, whose blocks the table begins with. The keys
        and values of these positions must have been computed. Where the index has a block already,
        the page of the table is changed for that one, and given back.
        """
        blocks, size = chain.blocks, self.page_size
        if blocks and not blocks[-1].page:
            chain.closed = True  # the index was cleared
        while not chain.closed and (len(blocks) + 1) * size <= length:
            number = len(blocks)
            found, digest, wanted = self._find(chain, tokens)
            if found is not None:
                own, pages[number] = pages[number], found.page
                self.pool.share([found.page])
                self.pool.free([own])
            elif digest in self._index:
                chain.closed = True
                return
            else:
                found = self._add(chain, digest, wanted, pages[number])
            blocks.append(found)

    def clear(self) -> None:
        """Forget everything, as after a step that failed on the device; idle pages become free."""
        for block in self._index.values():
            self.pool.forget(block.page)
            block.page = 0
        self._index.clear()
        self._by_page.clear()

    def _find(
        self, chain: Chain, tokens: Sequence[int]
    ) -> tuple[Block | None, int, tuple[int, ...]]:
        """The block that follows those of the chain, if the index has it; its digest and tokens."""
        number, size = len(chain.blocks), self.page_size
        parent = chain.blocks[-1] if number else None
        wanted = tuple(tokens[number * size : (number + 1) * size])
        if number == len(chain.digests):
            before = chain.digests[-1] if number else chain.scope
            chain.digests.append(self._hash(before, wanted))
        digest = chain.digests[number]
        found = self._index.get(digest)
        if found is not None:
            same = found.parent is parent and found.tokens == wanted
            if not same or (parent is None and found.scope != chain.scope):
                found = None
        return found, digest, wanted

    def _add(self, chain: Chain, digest: int, tokens: tuple[int, ...], page: int) -> Block:
        parent = chain.blocks[-1] if chain.blocks else None
        block = Block(parent, chain.scope, tokens, digest, page)
        self.pool.keep(page, self._on_evict)
        self._index[digest] = self._by_page[page] = block
        return block

    def _evicted(self, page: int) -> None:
        block = self._by_page.pop(page)
        del self._index[block.digest]
        block.page = 0
