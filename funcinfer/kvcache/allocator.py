"""The pool of cache pages: who holds which page. Host side, no tensors.

Pages are numbered 0..num_pages-1. Page 0 is the scratch page: padding writes there, and it is
never handed out. Every other page is in one of three states:

    held    one reference for each table that lists it
    idle    no reference, but an index of contents keeps it: it can be shared again, or taken away
    free    neither

    num_free + number of held pages = num_pages - 1

`num_free` counts idle pages too: both can be handed out. Free pages go first, last freed first, so
a stale read of a freed page shows at once instead of after a turn of the whole pool; then idle
ones, least recently held first. Before an idle page is handed out, its index drops it.

Each call costs O(1) a page, and a call that raises, or that returns None, has changed nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

Evict = Callable[[int], None]


class PagePool:
    """Reference-counted pages 1..num_pages-1; page 0 is the scratch page.

    num_pages: size of the cache in pages, the scratch page included; at least 2.
    on_free: called with the ids of the pages that a call left neither held nor idle, before any of
        them is handed out again. A debug mode fills them with NaN here.

    >>> pool = PagePool(4)
    >>> pages = pool.allocate(2)
    >>> pages, pool.num_free, pool.allocate(2)
    ((1, 2), 1, None)
    >>> pool.free(pages)
    >>> pool.num_free
    3
    """

    def __init__(
        self, num_pages: int, on_free: Callable[[tuple[int, ...]], None] | None = None
    ) -> None:
        if num_pages < 2:
            raise ValueError(
                f"num_pages is {num_pages}: a pool needs the scratch page and at least one more"
            )
        self.num_pages = num_pages
        self.on_free = on_free
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the next page is the last one
        self._kept: dict[int, Evict] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next page is the first one

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages without a reference that an index keeps."""
        return len(self._idle)

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold at most: all but the scratch page."""
        return self.num_pages - 1

    def references(self, page: int) -> int:
        """How many tables hold this page; 0 for a free or idle page.

        Raises ValueError for an id that is no page of requests.
        """
        self._check_id(page)
        return self._references[page]

    def is_kept(self, page: int) -> bool:
        """Whether an index keeps this page; nobody may write to it then.

        Raises ValueError for an id that is no page of requests.
        """
        self._check_id(page)
        return page in self._kept

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` pages, one reference each; None when there are not that many.

        Raises ValueError for a negative count.
        """
        if count == 1 and self._free:  # what decode rows ask for, in fewer steps
            page = self._free.pop()
            self._references[page] = 1
            return (page,)
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        missing = count - len(self._free)
        if missing > len(self._idle):
            return None
        if missing > 0:
            self._drop(list(islice(self._idle, missing)))
        keep = len(self._free) - count
        pages = tuple(reversed(self._free[keep:]))
        del self._free[keep:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each of these pages, held or idle.

        Raises ValueError, and adds none, when one of them is free or no page of requests.
        """
        for page in pages:
            self._check_id(page)
            if not self._references[page] and page not in self._idle:
                raise ValueError(f"page {page} is free: only a held or idle page can be shared")
        for page in pages:
            self._idle.pop(page, None)
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference of each of these pages; those left without one become idle or free.

        pages: in the order of a table. Of those that become idle, the last is taken away first.
        Raises ValueError, and drops none, when a page has fewer references than times it is
        listed (a double free), or is no page of requests.
        """
        dropped = 0
        try:
            for page in pages:
                self._check_id(page)
                if not self._references[page]:
                    raise ValueError(f"page {page} is freed once more than it is held")
                self._references[page] -= 1
                dropped += 1
        except ValueError:
            for page in pages[:dropped]:
                self._references[page] += 1
            raise
        freed = []
        for page in reversed(dict.fromkeys(pages)):
            if self._references[page]:
                continue
            if page in self._kept:
                self._idle[page] = None
            else:
                freed.append(page)
        self._set_free(freed)

    def keep(self, page: int, on_evict: Evict) -> None:
        """Have a held page become idle, not free, when its last reference goes.

        on_evict: called with the page when it is about to be handed out for something else. It
        must not raise, nor call the pool.
        Raises ValueError when the page is not held, or is kept already.

        >>> pool = PagePool(3)
        >>> page, = pool.allocate(1)
        >>> pool.keep(page, lambda page: print("page", page, "is taken away"))
        >>> pool.free([page])
        >>> pool.num_free, pool.num_idle, pool.allocate(2)
        page 1 is taken away
        (2, 1, (1, 2))
        """
        self._check_id(page)
        if not self._references[page] or page in self._kept:
            state = "kept already" if page in self._kept else "free"
            raise ValueError(f"page {page} is {state}: only a held page can be kept, once")
        self._kept[page] = on_evict

    def forget(self, page: int) -> None:
        """Undo `keep`, without calling on_evict; an idle page becomes free.

        Raises ValueError for a page that is not kept.
        """
        if page not in self._kept:
            raise ValueError(f"page {page} is not kept")
        del self._kept[page]
        if page in self._idle:
            del self._idle[page]
            self._set_free([page])

    def _drop(self, pages: list[int]) -> None:
        """Make idle pages free, their index first."""
        for page in pages:
            del self._idle[page]
            self._kept.pop(page)(page)
        self._set_free(pages)

    def _set_free(self, pages: list[int]) -> None:
        self._free.extend(pages)
        if self.on_free is not None and pages:
            self.on_free(tuple(reversed(pages)))

    def _check_id(self, page: int) -> None:
        if not 0 < page < self.num_pages:
            what = "the scratch page" if page == 0 else "outside the pool"
            raise ValueError(f"page {page} is {what}: pages of requests are 1..{self.num_usable}")
