"""Samplers against a scalar loop over sorted lists, at the break points of every law."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from funcinfer.serving.params import SamplingParams
from funcinfer.serving.processors import processed_probabilities
from funcinfer.serving.sampling import (
    RowParams,
    child_seed,
    choose,
    draft_seed,
    draw,
    fresh_seed,
    invert,
    sample,
    stack_params,
    uniform,
)
from tests.serving.laws import scalar_law

INF, NAN = math.inf, math.nan
F64 = torch.float64


def rows(*values, dtype=F64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


GRID = list(
    itertools.product(
        (0.0, 0.3, 1.0, 2.5),
        (0, 1, 2, 3, 5, 9),
        (0.0, 1e-8, 0.31, 0.6, 0.93, 1.0),
        (0.0, 0.17, 1.0),
    )
)


def grid_batch() -> tuple[torch.Tensor, ...]:
    """Random logits for every point of GRID, some tied and some impossible."""
    generator = torch.Generator().manual_seed(3)
    logits_BV = torch.randn(len(GRID), 5, generator=generator, dtype=F64)
    logits_BV[::4, 3] = logits_BV[::4, 1]
    logits_BV[1::5, 2] = -INF
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*GRID, strict=True))
    return logits_BV, rows(*temperature), torch.tensor(top_k), rows(*top_p), rows(*min_p)


def test_laws_equal_the_scalar_loop():
    arguments = grid_batch()
    law_BV = processed_probabilities(*arguments)
    expected = [
        scalar_law(row, *point) for row, point in zip(arguments[0].tolist(), GRID, strict=True)
    ]
    torch.testing.assert_close(law_BV, rows(*expected), rtol=0, atol=1e-14)
    assert ((law_BV == 0) == (rows(*expected) == 0)).all()
    half = processed_probabilities(arguments[0].float(), *arguments[1:])
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), law_BV, rtol=0, atol=1e-6)


def break_points(law: list[float]) -> list[tuple[float, int]]:
    """Just inside both ends, and in the middle, of the interval of each possible token."""
    edges = [0.0, *itertools.accumulate(law)]
    return [
        (u, token)
        for token, (low, high) in enumerate(itertools.pairwise(edges))
        if law[token] > 0
        for u in (low + 1e-13, (low + high) / 2, high - 1e-13)
    ]


def test_tokens_change_exactly_at_the_break_points_of_the_law():
    """Around every value of the scalar distribution function; the interval lengths are the law."""
    arguments = grid_batch()
    points = [
        break_points(scalar_law(logits, *point))
        for logits, point in zip(arguments[0].tolist(), GRID, strict=True)
    ]
    for i in range(max(map(len, points))):
        uniforms, expected = zip(*(row[i % len(row)] for row in points), strict=True)
        tokens_B = sample(*arguments, uniforms_B=rows(*uniforms))
        assert tokens_B.dtype == torch.int64
        assert tokens_B.tolist() == list(expected)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draw_at_exact_break_points(dtype):
    """Dyadic laws have exact sums: token i for u in [cdf_{i-1}, cdf_i)."""
    law = [0.25, 0.0, 0.5, 0.0, 0.125, 0.125, 0.0]
    number = np.float32 if dtype == torch.float32 else np.float64
    for token, low, high in ((0, 0, 0.25), (2, 0.25, 0.75), (4, 0.75, 0.875), (5, 0.875, 1)):
        below = float(np.nextafter(number(high), number(0)))
        uniforms_B = torch.tensor([low, below], dtype=dtype)
        assert draw(torch.tensor([law, law], dtype=dtype), uniforms_B).tolist() == [token, token]


def test_draw_of_weights_that_do_not_sum_to_one():
    weights = rows([3.0, 0.0, 1.0, 0.0], [3.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0])
    assert draw(weights, rows(0.7499, 0.75, 0.5)).tolist() == [0, 2, -1]


def test_a_uniform_that_rounds_to_one_draws_the_last_possible_token():
    law = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float32)
    assert draw(law, rows(1 - 2**-53)).tolist() == [1]


def test_a_sum_that_is_not_monotone_draws_no_impossible_token():
    """As parallel cumulative sums may be: one step down, over tokens of weight 0."""
    weights_BV = rows([1.0, 0.0, 2.0, 0.0]).expand(4, 4)
    cdf_BV = rows([1.0, 1.5, 3.0, 2.5]).expand(4, 4)
    assert invert(weights_BV, cdf_BV, torch.tensor([[0.0], [1.0], [2.9], [3.0]])).tolist() == [
        [0],
        [2],
        [2],
        [2],
    ]


def test_top_p_includes_the_token_that_reaches_the_mass():
    logits = rows([0.5, 0.3, 0.2]).log().expand(4, 3)
    top_p_B = rows(0.5 - 1e-9, 0.5 + 1e-9, 0.8 - 1e-9, 0.8 + 1e-9)
    law_BV = processed_probabilities(logits, torch.ones(4), None, top_p_B)
    assert (law_BV > 0).sum(-1).tolist() == [1, 2, 2, 3]


def test_top_p_counts_mass_after_top_k_and_temperature():
    """Order: temperature, top-k, top-p. Each other order would keep another number of tokens."""
    logits = rows([0.4, 0.3, 0.2, 0.1]).log()
    law = processed_probabilities(logits, torch.ones(1), torch.tensor([2]), rows(0.55))
    torch.testing.assert_close(law, rows([1.0, 0.0, 0.0, 0.0]))  # 0.4 / 0.7 reaches 0.55
    law = processed_probabilities(logits, rows(0.5), None, rows(0.5))
    torch.testing.assert_close(law, rows([1.0, 0.0, 0.0, 0.0]))  # 0.16 / 0.3 reaches 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_ties_go_to_the_lowest_id(dtype):
    logits_BV = rows([1.0, 4.0, 4.0, 0.0, 4.0], [2.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.0], dtype=dtype)
    assert sample(logits_BV).tolist() == [1, 0, 4]
    zeros, last = torch.zeros(3), torch.full((3,), 0.999)
    assert sample(logits_BV, zeros, uniforms_B=last).tolist() == [1, 0, 4]
    law_BV = processed_probabilities(logits_BV, torch.ones(3), torch.full((3,), 2))
    assert [row.nonzero().flatten().tolist() for row in law_BV] == [[1, 2], [0, 1], [0, 4]]
    law_BV = processed_probabilities(logits_BV[1:2], torch.ones(1), None, torch.tensor([0.5]))
    assert law_BV[0].nonzero().flatten().tolist() == [0, 1, 2]  # two fifths do not reach a half


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.0, 1e-8])
def test_a_tiny_top_p_is_the_argmax(dtype, top_p):
    logits_BV = torch.randn(7, 101, generator=torch.Generator().manual_seed(1)).to(dtype)
    top_p_B, uniforms_B = torch.full((7,), top_p), torch.linspace(0, 0.999, 7)
    tokens_B = sample(logits_BV, torch.full((7,), 0.7), top_p_B=top_p_B, uniforms_B=uniforms_B)
    assert torch.equal(tokens_B, logits_BV.argmax(-1))


LOGITS = {
    "equal": [2.0] * 6,
    "one finite": [-INF, -INF, 3.0, -INF, -INF, -INF],
    "some impossible": [1.0, -INF, 0.5, -2.0, -INF, 1.0],
    "huge": [3e38, -3e38, 3e38, 0.0, 1e38, -1e38],
    "tiny": [1e-40, 0.0, -1e-40, 1e-30, 0.0, 1e-38],
    "far apart": [6e4, -6e4, 1.0, 0.0, -1.0, 5e4],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("name", LOGITS)
def test_extremes_give_a_finite_law_over_possible_tokens(dtype, name):
    """Nothing is inf or NaN, something is possible, and only what is possible is drawn."""
    temperatures = (0.0, 1e-300, 1e-45, 1e-38, 1e-8, 0.7, 1e4, 3e38, 1e300)
    points = list(
        itertools.product(
            temperatures, (0, 1, 3, 6, 10**9), (0.0, 1e-8, 0.5, 1 - 1e-7, 1.0), (0.0, 1e-300, 1.0)
        )
    )
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*points, strict=True))
    logits_BV = rows(LOGITS[name], dtype=dtype).expand(len(points), 6)
    arguments = logits_BV, rows(*temperature), torch.tensor(top_k), rows(*top_p), rows(*min_p)
    law_BV = processed_probabilities(*arguments)
    assert torch.isfinite(law_BV).all()
    assert (law_BV >= 0).all()
    torch.testing.assert_close(law_BV.sum(-1), torch.ones(len(points), dtype=law_BV.dtype))
    assert not law_BV[logits_BV == -INF].any()
    likeliest_B1 = logits_BV.argmax(-1, keepdim=True)
    assert torch.equal(law_BV.gather(-1, likeliest_B1), law_BV.amax(-1, keepdim=True))
    first_B = (arguments[1] == 0) | (arguments[2] == 1) | (arguments[3] == 0)
    assert (law_BV.gather(-1, likeliest_B1)[first_B] == 1).all()
    for u in (0.0, 0.5, 1 - 2**-53):
        tokens_B = sample(*arguments, uniforms_B=torch.full((len(points),), u, dtype=F64))
        assert (law_BV.gather(-1, tokens_B[:, None]) > 0).all()


def test_greedy_low_and_middle_temperature_in_one_batch():
    logits_BV = torch.tensor([[1.0, 3.0, 2.0]]).expand(3, 3)
    temperature_B = torch.tensor([0.0, 0.7, 1e-8])
    law_BV = processed_probabilities(logits_BV, temperature_B)
    assert law_BV[0].tolist() == law_BV[2].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(law_BV[1].double(), rows(*scalar_law([1, 3, 2], 0.7, 0, 1.0)))
    tokens = sample(logits_BV, temperature_B, uniforms_B=torch.full((3,), 0.999))
    assert tokens.tolist() == [1, 2, 1]


def test_filters_that_are_off_change_no_bit():
    logits_BV = torch.randn(4, 101, generator=torch.Generator().manual_seed(5))
    temperature_B = torch.tensor([0.7, 1.0, 1.3, 1e4])
    plain_BV = processed_probabilities(logits_BV, temperature_B)
    off = torch.zeros(4, dtype=torch.int64), torch.ones(4)
    assert torch.equal(processed_probabilities(logits_BV, temperature_B, *off), plain_BV)
    mixed = torch.tensor([0, 3, 0, 0]), torch.tensor([1.0, 1.0, 0.4, 1.0])
    mixed_BV = processed_probabilities(logits_BV, temperature_B, *mixed)
    assert torch.equal(mixed_BV[[0, 3]], plain_BV[[0, 3]])
    assert not torch.equal(mixed_BV[[1, 2]], plain_BV[[1, 2]])


def test_top_p_one_keeps_the_tail_that_a_rounded_sum_cannot_see():
    law_BV = processed_probabilities(
        torch.tensor([[0.0, -30.0]]), torch.ones(1), None, torch.ones(1)
    )
    assert law_BV[0, 0] == 1
    assert law_BV[0, 1] > 0


def test_top_p_never_widens_top_k():
    """Seven probabilities may sum to less than the largest number below one."""
    logits_BV = torch.randn(500, 50, generator=torch.Generator().manual_seed(6))
    top_p_B = torch.full((500,), float(np.nextafter(np.float32(1), np.float32(0))))
    law_BV = processed_probabilities(logits_BV, torch.ones(500), torch.full((500,), 7), top_p_B)
    assert ((law_BV > 0).sum(-1) <= 7).all()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [101, 40_001])
def test_a_row_does_not_depend_on_its_neighbours(dtype, vocab):
    """Nor do rows that need ever more candidates, or are long enough for several threads."""
    generator = torch.Generator().manual_seed(7)
    logits_BV = (3 * torch.randn(9, vocab, generator=generator)).to(dtype)
    temperature_B = torch.tensor([0.0, 0.7, 1e-8, 1.0, 2.0, 0.5, 1e4, 0.9, 1.1])
    top_k_B = torch.tensor([0, 5, 0, 0, 50, 1, 0, 7, 0])
    top_p_B = torch.tensor([1.0, 0.9, 0.5, 1.0, 0.7, 1.0, 0.6, 1.0, 0.3])
    min_p_B = torch.tensor([0.0, 0.0, 0.0, 0.4, 0.1, 0.0, 0.0, 1.0, 0.0])
    uniforms_B = torch.rand(9, generator=generator)
    arguments = logits_BV, temperature_B, top_k_B, top_p_B, min_p_B
    law_BV = processed_probabilities(*arguments)
    tokens_B = sample(*arguments, uniforms_B=uniforms_B)
    poisoned_BV = logits_BV.clone()
    poisoned_BV[4] = NAN
    poisoned_B = choose(poisoned_BV, *arguments[1:], uniforms_B=uniforms_B)
    for b in range(9):
        solo = [x[b : b + 1] for x in arguments]
        assert torch.equal(processed_probabilities(*solo), law_BV[b : b + 1])
        token_B = sample(*solo, uniforms_B=uniforms_B[b : b + 1])
        assert token_B == tokens_B[b]
        assert poisoned_B[b] == (-1 if b == 4 else tokens_B[b])


def filtered_rows() -> tuple[list, tuple[torch.Tensor, ...]]:
    """Rows of 2,003 tokens: flat, peaked, all equal and with many ties; and their parameters."""
    generator = torch.Generator().manual_seed(8)
    shapes = torch.randn(4, 2003, generator=generator, dtype=F64)
    shapes[1] *= 4
    shapes[2] = 1.25
    shapes[3] = shapes[3].round()
    points = list(itertools.product((0, 3, 127, 400), (0.4003, 0.8987, 1.0), (0.0, 0.2)))
    logits_BV = shapes.repeat_interleave(len(points), 0)
    top_k, top_p, min_p = (list(column) * 4 for column in zip(*points, strict=True))
    temperature_B = torch.full((len(logits_BV),), 0.8, dtype=F64)
    return points * 4, (logits_BV, temperature_B, torch.tensor(top_k), rows(*top_p), rows(*min_p))


def test_laws_over_many_tokens_equal_the_scalar_loop():
    points, arguments = filtered_rows()
    expected = [
        scalar_law(logits, 0.8, *point)
        for logits, point in zip(arguments[0].tolist(), points, strict=True)
    ]
    law_BV = processed_probabilities(*arguments)
    torch.testing.assert_close(law_BV, rows(*expected), rtol=0, atol=1e-14)
    assert ((law_BV == 0) == (rows(*expected) == 0)).all()


def test_the_number_of_candidates_changes_no_bit():
    points, arguments = filtered_rows()
    law_BV = processed_probabilities(*arguments)
    for candidates in (401, 1000, 2003, 10**9):
        enough = [k > 0 or p == 1 or candidates >= 2003 for k, p, _ in points]
        found_BV = processed_probabilities(*arguments, candidates)
        assert torch.equal(found_BV[enough], law_BV[enough])


def test_greedy_rows_use_no_randomness():
    logits_BV = torch.randn(5, 11, generator=torch.Generator().manual_seed(2))
    expected = sample(logits_BV)
    for u in (0.0, 0.5, 1.0, NAN):
        uniforms_B = torch.full((5,), u)
        assert torch.equal(sample(logits_BV, torch.zeros(5), uniforms_B=uniforms_B), expected)


@pytest.mark.parametrize("temperature", [None, 0.0, 0.7])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0], [0.0, NAN, -INF], [-INF] * 3, [0.0, INF, 1.0]])
def test_a_row_without_a_law_is_named(bad, filtered, temperature):
    logits_BV = torch.tensor([[0.0, 1.0, 2.0], bad, [3.0, 1.0, -INF], bad])
    if temperature is None:
        arguments = (logits_BV,)
    else:
        top_k_B, top_p_B = torch.full((4,), 2), torch.full((4,), 0.6)
        filters = (top_k_B, top_p_B, top_p_B, 2) if filtered else (None, None, None, None)
        arguments = (logits_BV, torch.full((4,), temperature), *filters, torch.full((4,), 0.1))
    with pytest.raises(ValueError, match=r"logits of rows \[1, 3\] give no token"):
        sample(*arguments)
    tokens_B = choose(*arguments)
    assert tokens_B[[1, 3]].tolist() == [-1, -1]
    good = [x[[0, 2]] if isinstance(x, torch.Tensor) else x for x in arguments]
    assert torch.equal(tokens_B[[0, 2]], choose(*good))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sample(torch.zeros(5)), r"expected floating-point values \[B, V\].*\[5\]"),
        (lambda: sample(torch.zeros(2, 0)), r"V >= 1, got torch.float32 \[2, 0\]"),
        (lambda: sample(torch.zeros(2, 5, dtype=torch.int64)), "got torch.int64"),
        (lambda: sample(torch.zeros(2, 5), torch.ones(2)), "uniforms_B is None"),
        (
            lambda: sample(torch.zeros(2, 5), torch.ones(3), uniforms_B=torch.zeros(2)),
            r"temperature_B has shape \[3\]: expected one number for each of the 2 rows",
        ),
        (
            lambda: processed_probabilities(torch.zeros(2, 5), torch.ones(2), torch.ones(1)),
            r"top_k_B has shape \[1\]",
        ),
        (lambda: draw(torch.ones(2, 5), torch.zeros(2, 1)), r"uniforms_B has shape \[2, 1\]"),
    ],
)
def test_shapes_that_do_not_match_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- uniform numbers


@pytest.mark.parametrize(
    ("seed", "index", "numerator"),
    [
        (0, 0, 508604106994858),
        (42, 0, 124684577936728),
        (42, 1, 8896912390139086),
        (1, 42, 475943424741970),
        (2**64 - 1, 2**64 - 1, 1390843749066413),
        (2**63 + 5, 7, 303118957490690),
    ],
)
def test_uniforms_are_the_same_everywhere(seed, index, numerator):
    """Computed with `b2sum -l 64` over the 16 bytes: the high 53 bits of its answer."""
    assert uniform(seed, index) == numerator / 2**53


def test_a_uniform_depends_on_seed_and_index_only():
    pairs = list(itertools.product(range(20), range(20)))
    numbers = {pair: uniform(*pair) for pair in pairs}
    assert len(set(numbers.values())) == len(pairs)
    assert all(0 <= number < 1 for number in numbers.values())
    assert {pair: uniform(*pair) for pair in reversed(pairs)} == numbers


def test_the_numbers_of_a_seed_and_of_an_index_fill_the_unit_interval():
    """The largest distance to the uniform distribution function, for 1,000 numbers: below 0.06."""
    for numbers in ([uniform(5, j) for j in range(1000)], [uniform(s, 5) for s in range(1000)]):
        ranked = sorted(numbers)
        assert max(abs(number - (i + 0.5) / 1000) for i, number in enumerate(ranked)) < 0.06


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (2**64, 0), (0, -1)])
def test_a_uniform_outside_its_counters_is_refused(seed, index):
    with pytest.raises(OverflowError):
        uniform(seed, index)


def test_seeds_of_children_and_of_drafts_are_apart():
    assert child_seed(42, 0) == 42
    seeds = [child_seed(seed, child) for seed in (0, 42, 2**64 - 1) for child in range(20)]
    seeds += [draft_seed(seed, n) for seed in (0, 42, 2**64 - 1) for n in range(20)]
    assert len(set(seeds)) == 120
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert child_seed(42, 3) == child_seed(42, 3)
    numbers = {uniform(seed, j) for seed in seeds for j in range(5)}
    assert len(numbers) == 600


def test_requests_without_a_seed_draw_apart():
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_seeded_request_gives_the_same_tokens_in_every_company():
    """Tokens of one seed alone, beside others, and drawn again from the middle."""
    table_LV = 2 * torch.randn(12, 23, generator=torch.Generator().manual_seed(4))

    def run(seeds: list[int], first: int = 0) -> list[list[int]]:
        params = [SamplingParams(temperature=0.8, top_k=9, top_p=0.95)] * len(seeds)
        columns = []
        for j in range(first, 12):
            uniforms_B = torch.tensor([uniform(seed, j) for seed in seeds], dtype=F64)
            logits_BV = table_LV[j].expand(len(seeds), 23)
            columns.append(sample(logits_BV, *stack_params(params), uniforms_B).tolist())
        return [list(tokens) for tokens in zip(*columns, strict=True)]

    (alone,) = run([42])
    assert run([7, 42, 8])[1] == alone
    assert run([42], first=5) == [alone[5:]]
    assert len({tuple(tokens) for tokens in run([42, 43, 44])}) == 3


# --- parameters


def test_parameters_are_kept_in_a_form_that_can_be_compared_and_given_again():
    params = SamplingParams(
        logit_bias={9: 1, 2: -INF, np.int64(5): np.float32(0.5)}, stop="ab", stop_token_ids=[4]
    )
    assert params.logit_bias == params.bias_pairs == ((2, -INF), (5, 0.5), (9, 1.0))
    assert params.stop == ("ab",)
    assert dataclasses.replace(params, seed=3) == dataclasses.replace(params, seed=3)
    same = SamplingParams(logit_bias={2: -INF, 5: 0.5, 9: 1.0}, stop=["ab"], stop_token_ids=(4,))
    assert same == params
    assert hash(same) == hash(params)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")


def test_parameters_default_to_greedy():
    params = SamplingParams()
    assert (params.min_p, params.min_tokens, params.n) == (0.0, 0, 1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.0, 0.0)
    assert (params.frequency_penalty, params.logit_bias, params.stop) == (0.0, (), ())
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (16, 0.0, 0, 1.0)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (None, (), False)
    assert params.include_stop is False
    assert hash(SamplingParams(stop_token_ids=[3, 4])) == hash(
        SamplingParams(stop_token_ids=(3, 4))
    )


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": [0, -1, 1.0, True, None, "3", NAN],
        "temperature": [-0.1, NAN, INF, -INF, True, None, "1", 10**400, 1j],
        "top_k": [-1, 1.5, True, None, NAN],
        "top_p": [-1e-9, 1.0000001, NAN, INF, True, None, "1"],
        "seed": [-1, 2**64, 1.0, True, "42"],
        "stop_token_ids": [[-1], [1.0], [True], "12", 5, None, [None]],
        "ignore_eos": [1, None, "yes"],
        "include_stop": [1, None, "yes"],
        "min_p": [-1e-9, 1.0000001, NAN, True, None, "1"],
        "min_tokens": [-1, 17, 1.0, True, None],
        "repetition_penalty": [0, 0.0, -1.0, NAN, INF, True, None, 10**400],
        "presence_penalty": [-2.1, 2.1, NAN, INF, True, None],
        "frequency_penalty": [-2.1, 2.1, NAN, INF, True, None],
        "logit_bias": [
            {-1: 1.0},
            {1.0: 1.0},
            {True: 1.0},
            {1: 101},
            {1: -101},
            {1: INF},
            {1: NAN},
            {1: None},
            {1: True},
            [1, 2],
            [(1, 2, 3)],
            [(1, 0.5), (1, 0.25)],
            "12",
            None,
            5,
        ],
        "logprobs": [-1, 1.0, True, "3"],
        "prompt_logprobs": [-1, 1.0, True, "3"],
        "stop": ["", ["a", ""], [3], None, 5, b"a", {"a"}],
        "n": [0, -1, 1.0, True, None],
    }.items(),
)
def test_parameters_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{field} is .*: expected "):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 1, "temperature": 0, "top_k": 10**12, "top_p": 0, "seed": 0},
        {"temperature": 1e-300, "top_p": 1, "seed": 2**64 - 1, "ignore_eos": True},
        {"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.float64(0.5)},
        {"temperature": 1e300, "stop_token_ids": [0, np.int32(7)]},
        {"min_p": 1, "min_tokens": 16, "logprobs": 0, "prompt_logprobs": 3, "n": 10**6},
        {"temperature": 1, "repetition_penalty": 1e-300, "presence_penalty": -2, "min_p": 1e-300},
        {"temperature": 2, "frequency_penalty": np.float32(2), "logit_bias": {0: 100, 5: -INF}},
    ],
)
def test_extremes_that_have_a_meaning_are_accepted_and_drawn_from(arguments):
    params = SamplingParams(**arguments)
    tokens = sample(torch.tensor([[0.0, 1.0, -INF]]), *stack_params([params]), torch.tensor([0.99]))
    assert tokens.item() in (0, 1)


def test_stacking_leaves_out_what_no_drawn_row_uses():
    greedy = SamplingParams(top_k=5, top_p=0.5, min_p=0.5)
    assert stack_params([greedy, greedy]) == RowParams(None, None, None, None, None)
    drawn = SamplingParams(temperature=0.5)
    stacked = stack_params([greedy, drawn])
    assert stacked[0].tolist() == [0.0, 0.5]
    assert stacked[1:] == (None, None, None, None)
    full = SamplingParams(temperature=1.0, top_k=10**12, top_p=0.5, min_p=0.25)
    _, top_k_B, top_p_B, min_p_B, num_candidates = stack_params([drawn, full])
    assert top_k_B.tolist() == [0, 2**31 - 1]
    assert top_p_B.tolist() == [1.0, 0.5]
    assert min_p_B.tolist() == [0.0, 0.25]
    assert num_candidates == 2**31 - 1


def test_stacking_knows_how_many_candidates_suffice():
    few = SamplingParams(temperature=1.0, top_k=7, top_p=0.5)
    more = SamplingParams(temperature=1.0, top_k=20)
    greedy = SamplingParams(top_k=50, top_p=0.5)
    alone = SamplingParams(temperature=1.0, top_p=0.5)
    assert stack_params([few, more, greedy]).num_candidates == 20
    assert stack_params([few, alone]).num_candidates is None
