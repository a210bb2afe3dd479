"""The pool of cache pages: who holds which page. Host side, no tensors.

Pages are numbered 0..num_pages-1. Page 0 is the scratch page: padding writes there, and it is
never handed out. Every other page is free (no reference) or held (one reference for each table
that lists it):

    num_free + number of pages with references = num_pages - 1

Pages are handed out last freed first, so a stale read of a freed page shows at once instead of
after a turn of the whole pool. Each call costs O(1) a page, and a call that raises, or that
returns None, has changed nothing.
"""

from collections.abc import Callable, Sequence


class PagePool:
    """Reference-counted pages 1..num_pages-1; page 0 is the scratch page.

    num_pages: size of the cache in pages, the scratch page included; at least 2.
    on_free: called with the ids of the pages that a `free` left without a reference, before any
        of them is handed out again. A debug mode fills them with NaN here.

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

    @property
    def num_free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that requests can hold at most: all but the scratch page."""
        return self.num_pages - 1

    def references(self, page: int) -> int:
        """How many tables hold this page; 0 for a free page.

        Raises ValueError for an id that is no page of requests.
        """
        self._check_id(page)
        return self._references[page]

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Take `count` free pages, one reference each; None when there are not that many.

        Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        keep = len(self._free) - count
        if keep < 0:
            return None
        pages = tuple(reversed(self._free[keep:]))
        del self._free[keep:]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each of these held pages.

        Raises ValueError, and adds none, when one of them is free or no page of requests.
        """
        for page in pages:
            self._check_id(page)
            if not self._references[page]:
                raise ValueError(f"page {page} is free: only a held page can be shared")
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference of each of these pages; those left without one become free.

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
        freed = tuple(dict.fromkeys(page for page in pages if not self._references[page]))
        self._free.extend(reversed(freed))
        if self.on_free is not None and freed:
            self.on_free(freed)

    def _check_id(self, page: int) -> None:
        if not 0 < page < self.num_pages:
            what = "the scratch page" if page == 0 else "outside the pool"
            raise ValueError(f"page {page} is {what}: pages of requests are 1..{self.num_usable}")
