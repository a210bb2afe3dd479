"""Sampling from a vocabulary over ranks: the laws, tokens and log-probabilities of the whole one.

Ranks are threads. The vocabulary does not divide by them, so the last ones hold padding of -inf.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from funcinfer.layers.embedding import lm_head
from funcinfer.serving import filters as filters_module
from funcinfer.serving import processors as processors_module
from funcinfer.serving import sampling as sampling_module
from funcinfer.serving.edits import History, RowEdits, stack_edits
from funcinfer.serving.logprobs import logprobs
from funcinfer.serving.params import SamplingParams
from funcinfer.serving.processors import argmax, edit_logits, processed_probabilities
from funcinfer.serving.sampling import choose, draw, stack_params
from funcinfer.serving.verify import match
from funcinfer.sharding import Mesh, P, Rules, all_gather, axis_index, shard_map
from tests.serving.laws import scalar_law

INF, NAN = math.inf, math.nan
F64 = torch.float64
RANKS = (1, 2, 4)
COLUMNS, ROWS = P(None, "tp"), P(None)


def padded(logits_BV: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.nn.functional.pad(logits_BV, (0, -logits_BV.shape[-1] % ranks), value=-INF)


def on_ranks(f: Callable, ranks: int, logits_BV: torch.Tensor, *arguments, out=ROWS):
    """f of this rank's columns and whole arguments, along the axis; equal outputs are checked."""
    whole = [P(*[None] * x.ndim) if isinstance(x, torch.Tensor) else None for x in arguments]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]

    def run(logits, *given):
        rest = iter(given)
        filled = [
            next(rest) if spec is not None else x for spec, x in zip(whole, arguments, strict=True)
        ]
        return f(logits, *filled, axis="tp")

    specs = (COLUMNS, *(spec for spec in whole if spec is not None))
    return shard_map(run, Mesh(tp=ranks), specs, out)(padded(logits_BV, ranks), *tensors)


GRID = list(itertools.product((0.0, 0.3, 1.0), (0, 1, 3, 9), (0.0, 0.31, 0.93, 1.0), (0.0, 0.17)))


def grid_batch(vocab: int, dtype=F64) -> tuple[torch.Tensor, ...]:
    """Random logits for every point of GRID, many tied, some impossible, on the first rank too."""
    generator = torch.Generator().manual_seed(3)
    logits_BV = 2 * torch.randn(len(GRID), vocab, generator=generator, dtype=F64)
    logits_BV[::3] = logits_BV[::3].round()
    logits_BV[1::5, : vocab // 2] = -INF
    temperature, top_k, top_p, min_p = (list(column) for column in zip(*GRID, strict=True))
    floats = [torch.tensor(column, dtype=F64) for column in (temperature, top_p, min_p)]
    return logits_BV.to(dtype), floats[0], torch.tensor(top_k), *floats[1:]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("candidates", [None, 1000])
def test_laws_equal_those_of_the_whole_vocabulary(ranks, candidates):
    arguments = grid_batch(7)
    expected = torch.tensor(
        [scalar_law(row, *point) for row, point in zip(arguments[0].tolist(), GRID, strict=True)],
        dtype=F64,
    )
    law_BV = on_ranks(processed_probabilities, ranks, *arguments, candidates, out=COLUMNS)
    assert not law_BV[:, 7:].any()
    torch.testing.assert_close(law_BV[:, :7], expected, rtol=0, atol=1e-14)
    assert torch.equal(law_BV[:, :7] == 0, expected == 0)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_laws_over_many_tokens(ranks, dtype):
    """Rows that need more candidates than are gathered at first, and ties across ranks."""
    logits_BV, *rest = grid_batch(1501, dtype)
    logits_BV[4::7] /= 8
    logits_BV[5::7] = 1.25
    whole_BV = processed_probabilities(logits_BV, *rest)
    law_BV = on_ranks(processed_probabilities, ranks, logits_BV, *rest, out=COLUMNS)[:, :1501]
    assert torch.equal(law_BV == 0, whole_BV == 0)
    torch.testing.assert_close(law_BV, whole_BV, rtol=1e-5 if dtype != F64 else 1e-13, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_same_tokens_as_from_gathered_logits(ranks):
    """Around every break point of the distribution function, through the whole of `choose`."""
    logits_BV, *rest = grid_batch(7)
    laws = [scalar_law(row, *point) for row, point in zip(logits_BV.tolist(), GRID, strict=True)]
    points = []
    for law in laws:
        edges = list(itertools.pairwise([0.0, *itertools.accumulate(law)]))
        points.append(
            [
                (u, token)
                for token, (low, high) in enumerate(edges)
                if law[token] > 0
                for u in (low + 1e-13, (low + high) / 2, high - 1e-13)
            ]
        )
    for i in range(max(map(len, points))):
        uniforms, expected = zip(*(row[i % len(row)] for row in points), strict=True)
        uniforms_B = torch.tensor(uniforms, dtype=F64)
        tokens_B = on_ranks(choose, ranks, logits_BV, *rest, None, uniforms_B)
        assert tokens_B.dtype == torch.int64
        assert tokens_B.tolist() == list(expected)
        assert torch.equal(choose(logits_BV, *rest, uniforms_B=uniforms_B), tokens_B)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_tied_ids(ranks, dtype):
    rows = [
        [0.0, 3.0, 1.0, 3.0, 2.0, 3.0, 3.0],
        [-INF, -INF, -INF, -INF, -INF, -INF, -2.0],
        [1.0] * 7,
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    ]
    logits_BV = torch.tensor(rows, dtype=dtype)
    for f in (argmax, choose):
        assert on_ranks(f, ranks, logits_BV).tolist() == [1, 6, 0, 6]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_law_give_no_token(ranks, temperature):
    """Wherever the NaN or inf lies, and whatever else the row has."""
    rows = [[0.0, 1.0, 2.0, 3.0, 2.0]] + [
        [bad if i == at else 1.0 for i in range(5)] for at in range(5) for bad in (NAN, INF)
    ]
    logits_BV = torch.tensor([*rows, [-INF] * 5])
    B = len(logits_BV)
    per_row = torch.full((B,), temperature), torch.full((B,), 3), torch.full((B,), 0.9)
    tokens_B = on_ranks(
        choose, ranks, logits_BV, *per_row, torch.full((B,), 0.1), None, torch.full((B,), 0.5)
    )
    assert tokens_B[0] >= 0
    assert tokens_B[1:].tolist() == [-1] * (B - 1)
    assert on_ranks(argmax, ranks, logits_BV).tolist() == [3] + [-1] * (B - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_uniform_that_rounds_to_one_draws_the_last_possible_token(ranks):
    law = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]])
    for u, expected in ((1.0, [2, 1]), (0.0, [0, 1]), (NAN, [2, 1])):
        shards = torch.nn.functional.pad(law, (0, -5 % ranks))
        tokens_B = shard_map(partial(draw, axis="tp"), Mesh(tp=ranks), (COLUMNS, ROWS), ROWS)(
            shards, torch.full((2,), u)
        )
        assert tokens_B.tolist() == expected


@pytest.mark.parametrize("ranks", RANKS)
def test_edits_of_a_part_of_the_vocabulary(ranks):
    """Each rank edits its own columns; the same tokens come out."""
    params = SamplingParams(
        temperature=0.7,
        top_k=3,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        logit_bias={0: -1.0, 6: 2.0, 3: -INF},
        min_tokens=2,
    )
    rows = [RowEdits(params, n, History([1, 6], [4, 6][:n]), stop_token_ids=[5]) for n in range(3)]
    logits_BV = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=F64)
    stacked = stack_params([params] * 3)
    size = padded(logits_BV, ranks).shape[-1] // ranks

    def run(logits_BV, uniforms_B):
        start = axis_index("tp") * size
        edits = stack_edits(rows, vocab=range(start, start + size))
        return choose(edit_logits(logits_BV, edits), *stacked, uniforms_B, axis="tp")

    f = shard_map(run, Mesh(tp=ranks), (COLUMNS, ROWS), ROWS)
    whole_BV = edit_logits(logits_BV, stack_edits(rows))
    for u in (0.01, 0.3, 0.6, 0.99):
        uniforms_B = torch.full((3,), u, dtype=F64)
        assert torch.equal(
            f(padded(logits_BV, ranks), uniforms_B), choose(whole_BV, *stacked, uniforms_B)
        )


@pytest.mark.parametrize("ranks", RANKS)
def test_verification_by_matching(ranks):
    """Drafts are matched with what is drawn from parts of the vocabulary, place by place."""
    generator = torch.Generator().manual_seed(5)
    logits_BV = torch.randn(20, 7, generator=generator, dtype=F64)
    uniforms_B = torch.rand(20, generator=generator, dtype=F64)
    temperature_B = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=F64).repeat_interleave(5)
    plain_BL = choose(logits_BV, temperature_B, uniforms_B=uniforms_B).unflatten(0, (5, 4))
    drafts_BK = plain_BL[:, :3].clone()
    drafts_BK[1, 1], drafts_BK[2, 0], drafts_BK[3, 2] = -1, 6 - drafts_BK[2, 0], -1
    sampled_B = on_ranks(
        choose, ranks, logits_BV, temperature_B, None, None, None, None, uniforms_B
    )
    emitted = match(sampled_B.unflatten(0, (5, 4)), drafts_BK)
    assert torch.equal(emitted.tokens_BL, match(plain_BL, drafts_BK).tokens_BL)


@pytest.mark.parametrize("ranks", RANKS)
def test_logprobs_equal_those_of_the_whole_vocabulary(ranks):
    logits_BV = grid_batch(7)[0]
    logits_BV[3, 2] = NAN
    tokens_B = torch.arange(len(logits_BV)) % 8 - 1
    for num_top in (0, 1, 5, 7):
        expected = logprobs(logits_BV, tokens_B, num_top)
        f = shard_map(
            lambda z, t, num_top=num_top: tuple(logprobs(z, t, num_top, axis="tp")),
            Mesh(tp=ranks),
            (COLUMNS, ROWS),
            (ROWS, P(None, None), P(None, None)),
        )
        token_B, top_BM, ids_BM = f(padded(logits_BV, ranks), tokens_B)
        close = {"rtol": 1e-13, "atol": 1e-13, "equal_nan": True}
        torch.testing.assert_close(token_B, expected.token_B, **close)
        torch.testing.assert_close(top_BM, expected.top_BM, **close)
        possible_BM = expected.top_BM.isfinite()
        assert torch.equal(ids_BM[possible_BM], expected.top_ids_BM[possible_BM])


@pytest.mark.parametrize("ranks", [2, 4])
def test_sampling_behind_a_head_whose_logits_stay_on_their_ranks(ranks):
    """The head's layout is the rule `logits`; a batch of requests lies over another axis."""
    generator = torch.Generator().manual_seed(6)
    w_VD = torch.randn(8, 3, generator=generator, dtype=F64)
    x_LD = torch.randn(6, 3, generator=generator, dtype=F64)
    temperature_L = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.7, 2.0])
    top_k_L = torch.tensor([0, 3, 0, 5, 2, 0])
    uniforms_L = torch.rand(6, generator=generator, dtype=F64)
    rules = Rules(requests="dp", vocab_out="tp", logits="tp")

    def run(w, x, temperature, top_k, uniforms):
        logits_LV = lm_head(w, x, vocab_size=7, rules=rules)
        return choose(logits_LV, temperature, top_k, uniforms_B=uniforms, axis=rules["logits"])

    f = shard_map(
        run,
        Mesh(dp=2, tp=ranks),
        (P("tp", None), P("dp", None), P("dp"), P("dp"), P("dp")),
        P("dp"),
    )
    logits_LV = torch.einsum("ld,vd->lv", x_LD, w_VD[:7])
    expected = choose(logits_LV, temperature_L, top_k_L, uniforms_B=uniforms_L)
    assert torch.equal(f(w_VD, x_LD, temperature_L, top_k_L, uniforms_L), expected)


@pytest.mark.parametrize(
    ("filters", "most"),
    [({}, 1), ({"top_k": 5, "top_p": 0.9}, 5), ({"min_p": 0.1}, 1), ({"top_p": 0.5}, 128)],
)
def test_no_more_than_candidates_is_gathered(monkeypatch, filters, most):
    """Of 1,024 columns a rank sends as many as top_k asks for, else single numbers."""
    sent = []

    def counting(x, axis, *, dim):
        sent.append(x.numel() // len(x))
        return all_gather(x, axis, dim=dim)

    for module in (filters_module, processors_module, sampling_module):
        monkeypatch.setattr(module, "all_gather", counting)
    params = SamplingParams(temperature=0.5, **filters)
    logits_BV = 9 * torch.randn(2, 2048, generator=torch.Generator().manual_seed(2))
    rows = stack_params([params] * 2)
    on_ranks(choose, 2, logits_BV, *rows, torch.tensor([0.2, 0.7]))
    assert max(sent) == most
    assert len(sent) <= 2 * 5
