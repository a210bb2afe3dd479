"""Where a token lives: position -> (page, slot), and how pages and tokens are dealt over ranks.

A request's KV positions fill its pages in order. A *virtual slot* numbers every row of the cache:

    slot(x) = table[x // page_size] * page_size + x % page_size        page 0 is the scratch page

Page 0 belongs to no request: padding tokens write there, so no slot is ever negative.

When the offset inside a page is dealt over n ranks in runs of `interleave` tokens (context
parallelism at decode), a rank holds a *local page* of page_size / n rows of every page:

    owner(x)   = (x // I) % n
    local(x)   = x // (n I) * I + x % I                                 offset in the local page
    len_r(L)   = L // (n I) * I + clamp(L % (n I) - r I, 0, I)          rows of rank r below L

Because page_size is a multiple of n I, the three hold for a position as well as for its offset
inside the page.

Everything here is integer arithmetic without state. `Index` stands for an int, a numpy integer
array or a torch integer tensor: the answer is of the same kind.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

Index = TypeVar("Index", int, np.ndarray, torch.Tensor)


def pages_needed(length: Index, page_size: int) -> Index:
    """Number of pages that hold `length` positions.

    length: Index, >= 0. Rounds up; zero positions need no page.

    >>> [pages_needed(length, 4) for length in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-length // page_size)


def slot(
    page_table_row: Sequence[int] | np.ndarray | torch.Tensor, position: Index, page_size: int
) -> Index:
    """Virtual slot of a position of one request: page * page_size + offset.

    page_table_row: the request's page ids in order; an array when `position` is one.
    position: Index. A negative position is padding and gets slot 0, in the scratch page.
    Raises IndexError when the position lies behind the last page of the row.

    >>> slot([5, 9], 7, 4), slot([5, 9], -1, 4)
    (39, 0)
    >>> slot(np.array([5, 9]), np.array([3, 4, -1]), 4)
    array([23, 36,  0])
    """
    row: Any = page_table_row  # numpy and torch rows take arrays of indices, sequences take ints
    real = position >= 0
    page = row[position // page_size * real]
    return (page * page_size + position % page_size) * real


def check_dealing(page_size: int, n: int, interleave: int) -> None:
    """Raise ValueError unless pages can be dealt evenly over n ranks in runs of `interleave`.

    >>> check_dealing(16, 2, 4)
    >>> check_dealing(12, 5, 1)
    Traceback (most recent call last):
        ...
    ValueError: page_size 12 cannot be dealt over 5 ranks in runs of 1: ...
    """
    for name, value in (("page_size", page_size), ("n", n), ("interleave", interleave)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if page_size % (n * interleave):
        larger = pages_needed(page_size, n * interleave) * n * interleave
        raise ValueError(
            f"page_size {page_size} cannot be dealt over {n} ranks in runs of {interleave}: it "
            f"must be a multiple of n * interleave = {n * interleave}, for example {larger}"
        )


def owner(position: Index, n: int, interleave: int) -> Index:
    """Rank that holds a position (or an offset inside a page): (position // interleave) % n.

    >>> [owner(position, 2, 2) for position in range(6)]
    [0, 0, 1, 1, 0, 0]
    """
    return position // interleave % n


def local_len(length: Index, n: int, interleave: int, rank: int) -> Index:
    """How many of the first `length` positions rank `rank` of n owns.

    length: Index, >= 0; also a bound of visibility, since positions below it count the same way.
    Summed over the ranks it is `length` again. Raises ValueError for a rank outside 0..n-1.

    >>> [local_len(7, 2, 2, rank) for rank in range(2)]
    [4, 3]
    >>> local_len(torch.tensor([0, 3, 7]), 2, 2, 1)
    tensor([0, 1, 3])
    """
    _check_rank(n, rank)
    whole, rest = length // (n * interleave), length % (n * interleave)
    return whole * interleave + _clamp(rest - rank * interleave, interleave)


def local_slots(slots: Index, page_size: int, n: int, interleave: int, rank: int) -> Index:
    """Virtual slots -> rows of this rank's local pages of page_size / n rows.

    slots: Index; -1 marks padding. A slot of another rank, and padding, give 0: a row of the
    scratch page, never -1, which an indexed write would read as the last row.
    Raises ValueError when the page cannot be dealt evenly, and for a rank outside 0..n-1.

    >>> local_slots(torch.tensor([8, 9, 10, 11, -1]), 4, 2, 1, 1)
    tensor([0, 4, 0, 5, 0])
    """
    check_dealing(page_size, n, interleave)
    _check_rank(n, rank)
    page, offset = slots // page_size, slots % page_size
    local = page * (page_size // n) + offset // (n * interleave) * interleave + offset % interleave
    owned: Any = (slots >= 0) & (owner(offset, n, interleave) == rank)
    return local * owned


def zigzag(count: int, parts: int) -> list[list[int]]:
    """Deal a run of `count` tokens over `parts` ranks so that causal attention is balanced.

    The run is cut into 2 * parts blocks whose sizes differ by at most one, the longer ones first;
    rank r takes blocks r and 2 * parts - 1 - r, an early and a late one. Any count is legal: with
    fewer than 2 * parts tokens some blocks, and perhaps a rank, are empty.
    Returns the token offsets of each rank, ascending. Raises ValueError for a negative count or
    less than one part.

    >>> zigzag(9, 2)
    [[0, 1, 2, 7, 8], [3, 4, 5, 6]]
    """
    if count < 0 or parts < 1:
        raise ValueError(f"zigzag needs count >= 0 and parts >= 1; got {count} and {parts}")
    size, longer = divmod(count, 2 * parts)
    edges = [block * size + min(block, longer) for block in range(2 * parts + 1)]
    blocks = [range(start, end) for start, end in pairwise(edges)]
    return [[*blocks[rank], *blocks[-1 - rank]] for rank in range(parts)]


def _clamp(value: Index, top: int) -> Index:
    """Clamp to 0..top."""
    if isinstance(value, torch.Tensor):
        return value.clamp(0, top)
    if isinstance(value, int):
        return min(max(value, 0), top)
    return np.clip(value, 0, top)


def _check_rank(n: int, rank: int) -> None:
    if not 0 <= rank < n:
        raise ValueError(f"rank {rank} is outside 0..{n - 1}")
