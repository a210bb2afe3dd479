"""Chunk sizes of equal time against the cost model written out token by token."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.kvcache.allocator import PagePool
from funcinfer.serving.chunking import ChunkCost, chunk_sizes, fit_chunk_cost
from funcinfer.serving.schedule import ScheduleState, add, commit, schedule

COEFFICIENTS = st.floats(1e-6, 1e3)


def token_by_token(quadratic: float, linear: float, context: int, size: int) -> float:
    """A token costs twice `quadratic` for each position before it, and once for its own."""
    return sum(quadratic * (2 * x + 1) + linear for x in range(context, context + size))


@given(a=COEFFICIENTS, b=COEFFICIENTS, context=st.integers(0, 40), size=st.integers(1, 30))
def test_the_time_is_that_of_its_tokens_and_the_size_its_inverse(a, b, context, size):
    cost = ChunkCost(a, b)
    time = token_by_token(a, b, context, size)
    assert math.isclose(cost.time(context, size), time, rel_tol=1e-12)
    assert math.isclose(cost.size(context, time), size, rel_tol=1e-12)


@pytest.mark.parametrize(("a", "b"), [(0.0, 3.0), (2.0, 0.0), (1e-300, 3.0), (1e-18, 5.0)])
def test_the_root_holds_without_either_term(a, b):
    cost = ChunkCost(a, b)
    for context in (0, 7, 100_000):
        for size in (1, 512):
            time = a * size**2 + (2 * a * context + b) * size
            assert math.isclose(cost.size(context, time), size, rel_tol=1e-12)


@given(
    a=COEFFICIENTS,
    b=COEFFICIENTS,
    c=st.floats(0, 1e3),
    lengths=st.sets(st.integers(1, 5000), min_size=3, max_size=8),
)
def test_the_fit_recovers_what_the_times_were_made_of(a, b, c, lengths):
    samples = [(n, a * n**2 + b * n + c) for n in lengths]
    cost = fit_chunk_cost(samples)
    longest = max(lengths)
    for n in lengths:  # the coefficients themselves may drown in a larger term
        exact = a * n**2 + b * n
        assert abs(cost.time(0, n) - exact) < 1e-6 * (a * longest**2 + b * longest + c)


def test_the_fit_finds_the_coefficients():
    a, b, c = 3e-5, 0.02, 4.0
    random = np.random.default_rng(3)
    lengths = [64, 128, 301, 512, 1000, 2048, 4096] * 5
    samples = [(n, (a * n**2 + b * n + c) * (1 + 0.01 * random.standard_normal())) for n in lengths]
    cost = fit_chunk_cost(samples)
    assert math.isclose(cost.quadratic, a, rel_tol=0.05)
    assert math.isclose(cost.linear, b, rel_tol=0.15)


@pytest.mark.parametrize(
    ("times", "zero"),
    [([1, 2.1, 4.1, 8.0], "quadratic"), ([7, 10, 58, 250], "linear")],
)
def test_a_coefficient_that_would_be_negative_is_left_out(times, zero):
    """The fit is the best of a grid of those with coefficients of at least 0."""
    lengths = [1, 2, 4, 8]
    cost = fit_chunk_cost(zip(lengths, times, strict=True))
    assert getattr(cost, zero) == 0

    def error(a: float, b: float) -> float:
        rest = [t - a * n**2 - b * n for n, t in zip(lengths, times, strict=True)]
        return float(np.var(rest))

    grid = [error(a, b) for a in np.linspace(0, 6, 241) for b in np.linspace(0, 6, 241)]
    assert error(cost.quadratic, cost.linear) <= min(grid) + 1e-12


@given(
    a=COEFFICIENTS,
    b=COEFFICIENTS,
    first=st.integers(1, 4000),
    multiple=st.sampled_from([1, 2, 16]),
    starts=st.lists(st.integers(0, 100_000), min_size=1, max_size=5),
)
def test_chunks_are_the_largest_that_take_no_longer_than_the_first(a, b, first, multiple, starts):
    size, cost = chunk_sizes(ChunkCost(a, b), first, multiple=multiple), ChunkCost(a, b)
    time = token_by_token(a, b, 0, first) * (1 + 1e-9)
    assert size(0) == max(first // multiple, 1) * multiple
    for start in starts:
        chunk = size(start)
        assert chunk % multiple == 0
        assert chunk >= multiple
        assert chunk == multiple or cost.time(start, chunk) <= time
        assert cost.time(start, chunk + multiple) > time * (1 - 2e-9)


def test_the_scheduler_cuts_a_prompt_into_chunks_of_equal_time():
    cost = ChunkCost(1.0, 64.0)
    state = ScheduleState(PagePool(200), page_size=16)
    add(state, "a", [7] * 2000, max_total=2003)
    rows = []
    while not rows or not rows[-1].wants_logits:
        rows += schedule(state, 4096, 4, chunk=chunk_sizes(cost, 256)).works
    ends = [work.start + work.num_tokens for work in rows]
    assert [work.start for work in rows] == [0, *ends[:-1]]
    assert (rows[0].num_tokens, ends[-1]) == (256, 2000)
    whole = token_by_token(1.0, 64.0, 0, 256)
    for work in rows[:-1]:
        one_more = token_by_token(1.0, 64.0, work.start + work.num_tokens, 1)
        time = token_by_token(1.0, 64.0, work.start, work.num_tokens)
        assert whole - one_more < time <= whole
    commit(state, rows[-1], [5])
    (decode,) = schedule(state, 4096, 4, chunk=chunk_sizes(cost, 256)).works
    assert decode.num_tokens == 1


def test_a_row_has_a_token_whatever_the_chunk_size():
    state = ScheduleState(PagePool(9), page_size=4)
    add(state, "a", [7] * 5, max_total=7)
    assert [w.num_tokens for w in schedule(state, 8, 1, chunk=lambda start: 0).works] == [1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ChunkCost(-1.0, 2.0), "quadratic is -1.0 and linear 2.0"),
        (lambda: ChunkCost(0.0, 0.0), "one of them above 0"),
        (lambda: ChunkCost(1.0, math.nan), "expected finite numbers"),
        (lambda: ChunkCost(1.0, 1.0).size(0, 0.0), "time is 0.0: a chunk takes some time"),
        (lambda: fit_chunk_cost([(1, 1), (2, 2), (1, 3)]), "fewer than three different lengths"),
        (lambda: fit_chunk_cost([(1, 1), (2, 2), (0, 3)]), r"sample \(0, 3.0\)"),
        (lambda: fit_chunk_cost([(1, 1), (2, math.nan), (3, 3)]), r"sample \(2, nan\)"),
        (lambda: fit_chunk_cost([(1, 3), (2, 2), (3, 1)]), "the times do not grow"),
        (lambda: chunk_sizes(ChunkCost(1.0, 1.0), 0), "first is 0 and multiple 1"),
        (lambda: chunk_sizes(ChunkCost(1.0, 1.0), 4, multiple=0), "multiple 0"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
