"""Chunk sizes that take equal times: a cost model fitted to measurements, and its inverse.

A prompt of n tokens takes a n^2 + b n + c: attention, all else, and what a step costs by itself. So
x tokens behind a context of L take

    T(L, x) = a ((L + x)^2 - L^2) + b x = a x^2 + (2 a L + b) x

besides c, which no chunk size changes. The chunk that takes T is the positive root

    x = 2 T / (B + sqrt(B^2 + 4 a T))        B = 2 a L + b

written so that it holds for a = 0 too, and loses no digits for small a.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ChunkCost:
    """Time of a chunk: quadratic and linear coefficient, of any unit of time; not both 0.

    >>> cost = ChunkCost(quadratic=0.5, linear=2.0)
    >>> cost.time(context=3, size=4), cost.size(context=3, time=28.0)
    (28.0, 4.0)
    """

    quadratic: float
    linear: float

    def __post_init__(self) -> None:
        values = self.quadratic, self.linear
        if not all(math.isfinite(value) and value >= 0 for value in values) or not any(values):
            raise ValueError(
                f"quadratic is {self.quadratic} and linear {self.linear}: expected finite numbers "
                f">= 0, one of them above 0"
            )

    def time(self, context: int, size: float) -> float:
        """Time of `size` tokens behind `context` others."""
        return (self.quadratic * (size + 2 * context) + self.linear) * size

    def size(self, context: int, time: float) -> float:
        """How many tokens behind `context` others take this time: the inverse of `time`.

        Raises ValueError for a time that is not above 0.
        """
        if not time > 0:
            raise ValueError(f"time is {time}: a chunk takes some time above 0")
        slope = 2 * self.quadratic * context + self.linear
        return 2 * time / (slope + math.sqrt(slope**2 + 4 * self.quadratic * time))


def fit_chunk_cost(samples: Iterable[tuple[int, float]]) -> ChunkCost:
    """The cost that is closest to measured (length, time) pairs of whole prompts.

    Least squares of time = a n^2 + b n + c, with a and b at least 0; needs three different
    lengths. Raises ValueError for fewer, for a length below 1 or a time below 0 or not finite, and
    where times do not grow with the length.

    >>> cost = fit_chunk_cost([(n, 0.5 * n**2 + 2 * n + 7) for n in (4, 8, 32, 64)])
    >>> round(cost.quadratic, 9), round(cost.linear, 9)
    (0.5, 2.0)
    """
    pairs = [(int(length), float(time)) for length, time in samples]
    if len({length for length, _ in pairs}) < 3:
        raise ValueError(f"samples {pairs} have fewer than three different lengths")
    for length, time in pairs:
        if length < 1 or not 0 <= time < math.inf:
            raise ValueError(f"sample ({length}, {time}): expected a length >= 1 and a time >= 0")
    lengths = np.array([length for length, _ in pairs], np.float64)
    times = np.array([time for _, time in pairs], np.float64)
    fits = [_least_squares(lengths, times, powers) for powers in ((2, 1), (1,), (2,))]
    # The best fit with a, b >= 0 is the free one, or else has one of them at 0.
    legal = [fit for fit in fits if min(fit[1:]) >= 0 and max(fit[1:]) > 0]
    if not legal:
        raise ValueError(f"samples {pairs}: the times do not grow with the length")
    _, quadratic, linear = min(legal)
    return ChunkCost(quadratic, linear)


def chunk_sizes(cost: ChunkCost, first: int, *, multiple: int = 1) -> Callable[[int], int]:
    """For `schedule(chunk=...)`: start -> size of the chunk that takes as long as the first one.

    first: size of the chunk at position 0. multiple: sizes are rounded down to a multiple of it,
    and are at least one. Raises ValueError for a first or multiple below 1.

    >>> size = chunk_sizes(ChunkCost(quadratic=1.0, linear=16.0), first=64, multiple=8)
    >>> [size(start) for start in (0, 64, 120)]
    [64, 24, 16]
    """
    if first < 1 or multiple < 1:
        raise ValueError(f"first is {first} and multiple {multiple}: both must be at least 1")
    time = cost.time(0, first) * (1 + 1e-12)  # the first chunk is not rounded down itself

    def size(start: int) -> int:
        return max(int(cost.size(start, time)) // multiple, 1) * multiple

    return size


def _least_squares(
    lengths: np.ndarray, times: np.ndarray, powers: Sequence[int]
) -> tuple[float, float, float]:
    """Squared error, quadratic and linear coefficient of the best fit of these powers and 1."""
    scale = float(lengths.max())
    columns = np.stack([(lengths / scale) ** power for power in (*powers, 0)], axis=1)
    solution = np.linalg.lstsq(columns, times, rcond=None)[0]
    error = float(np.square(columns @ solution - times).sum())
    found = dict(zip(powers, solution.tolist(), strict=False))
    return error, found.get(2, 0.0) / scale**2, found.get(1, 0.0) / scale
