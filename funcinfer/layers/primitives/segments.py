"""Segments: runs of tokens with whole numbers that a kernel wants on the host.

    segment (row, length, kv_len): `length` tokens that stand next to one another, of request `row`;
    the i-th of them sees the positions 0 <= s < kv_len - length + i + 1 of its request

Kernels for ragged batches take the lengths of runs as numbers of the host, and not as tensors. What
a token sees is said by `rows`, `lo` and `hi` alone; segments say the same again, in another form,
and are a hint: whoever has none gets the same result. They hold for tokens that see all positions
from 0 on. Padding is a run with kv_len 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Segments:
    """Runs in order of the tokens: request, number of tokens, and positions that the last of them
    sees. ValueError where the three differ in number, or a run is empty.

    >>> Segments((3, 0), (2, 1), (7, 0)).expand()
    ([3, 3, 0], [6, 7, 0])
    """

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = {len(self.rows), len(self.lens), len(self.kv_lens)}
        if len(counts) > 1 or any(n < 1 for n in self.lens):
            raise ValueError(
                f"segments of {len(self.rows)} rows, lengths {list(self.lens)} and"
                f" {len(self.kv_lens)} kv_lens: one of each a segment, and lengths of at least 1"
            )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each run ends: lengths added up, with no 0 in front."""
        return tuple(accumulate(self.lens))

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(self.lens)

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return max(self.lens, default=0)

    def expand(self) -> tuple[list[int], list[int]]:
        """The request and the bound `hi` of each token."""
        runs = list(zip(self.rows, self.lens, self.kv_lens, strict=True))
        rows = [row for row, n, _ in runs for _ in range(n)]
        return rows, [max(0, kv - n + i + 1) for _, n, kv in runs for i in range(n)]

    def cut(self, start: int, stop: int) -> "Segments":
        """The runs of the tokens start <= t < stop, cut where they reach over these.

        >>> Segments((3, 0), (4, 2), (7, 2)).cut(1, 5)
        Segments(rows=(3, 0), lens=(3, 1), kv_lens=(7, 1))
        """
        if (start, stop) == (0, self.num_tokens):
            return self
        found = []
        for row, n, kv, end in zip(self.rows, self.lens, self.kv_lens, self.ends, strict=True):
            low, high = max(start, end - n), min(stop, end)
            if low < high:
                found.append((row, high - low, max(0, kv - (end - high))))
        return from_runs(found)

    def one_by_one(self, seen: Callable[[int], int]) -> "Segments":
        """A run for each token, which sees `seen(hi)` positions: where the rest is on other ranks,
        consecutive tokens don't see one position more each.

        >>> Segments((3,), (2,), (7,)).one_by_one(lambda hi: hi // 2)
        Segments(rows=(3, 3), lens=(1, 1), kv_lens=(3, 3))
        """
        rows, bounds = self.expand()
        return Segments(tuple(rows), (1,) * len(rows), tuple(map(seen, bounds)))


def from_runs(runs: list[tuple[int, int, int]]) -> Segments:
    """Segments of a list of (row, length, kv_len).

    >>> from_runs([(3, 2, 7), (0, 1, 0)])
    Segments(rows=(3, 0), lens=(2, 1), kv_lens=(7, 0))
    """
    rows, lens, kv_lens = (tuple(x) for x in zip(*runs, strict=True)) if runs else ((), (), ())
    return Segments(rows, lens, kv_lens)
