"""Edits of logits and log-probabilities against scalar loops over lists of token ids."""

import math
import random

import pytest
import torch

from funcinfer.serving.edits import Edits, History, RowEdits, has_penalties, stack_edits
from funcinfer.serving.filters import largest
from funcinfer.serving.logprobs import logprobs
from funcinfer.serving.params import SamplingParams, check_vocab
from funcinfer.serving.processors import edit_logits, processed_probabilities
from funcinfer.serving.sampling import choose, stack_params
from tests.serving.laws import scalar_edit

INF, NAN = math.inf, math.nan
F64 = torch.float64
V = 11


def row_edits(params, prompt=(), output=(), drafts=(), stop=()) -> RowEdits:
    return RowEdits(params, len(output), History(prompt, output), drafts, stop)


def random_params(source: random.Random) -> SamplingParams:
    """Each edit on or off, with numbers that float32 holds exactly."""

    def pick(off, *others):
        return source.choice((off, off, *others))

    return SamplingParams(
        max_tokens=20,
        min_tokens=pick(0, 3, 6),
        repetition_penalty=pick(1.0, 1.5, 0.75),
        presence_penalty=pick(0.0, 0.5, -1.25),
        frequency_penalty=pick(0.0, 0.375, -2.0),
        logit_bias=pick({}, {source.randrange(V): 1.5, source.randrange(V): -INF}),
    )


def random_rows(seed: int, num: int) -> list[tuple]:
    """(params, prompt, output, drafts, tokens that end the request) of so many rows."""
    source = random.Random(seed)

    def tokens(most):
        return [source.randrange(V) for _ in range(source.randrange(most))]

    return [
        (random_params(source), [1, *tokens(6)], tokens(6), tokens(4), source.sample(range(V), 2))
        for _ in range(num)
    ]


def random_logits(num: int, dtype=F64) -> torch.Tensor:
    return 3 * torch.randn(num, V, generator=torch.Generator().manual_seed(4), dtype=dtype)


def test_penalties_by_hand():
    """Repetition is of prompt and output; presence and frequency of the output alone."""
    params = SamplingParams(repetition_penalty=1.5)
    logits_BV = torch.tensor([[2.0] * 8, [-2.0] * 8], dtype=F64)
    rows = [row_edits(params, [5, 5], [7])] * 2
    third = 4 / 3
    expected = [[2, 2, 2, 2, 2, third, 2, third], [-2, -2, -2, -2, -2, -3, -2, -3]]
    edited_BV = edit_logits(logits_BV, stack_edits(rows))
    torch.testing.assert_close(edited_BV, torch.tensor(expected, dtype=F64))
    for params in (SamplingParams(presence_penalty=0.5), SamplingParams(frequency_penalty=0.5)):
        edited_BV = edit_logits(logits_BV, stack_edits([row_edits(params, [5, 5], [7])] * 2))
        assert edited_BV.tolist() == [[2] * 7 + [1.5], [-2] * 7 + [-2.5]]
    twice = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5)
    edited_BV = edit_logits(logits_BV[:1], stack_edits([row_edits(twice, [5], [7, 6, 7])]))
    assert edited_BV.tolist() == [[2] * 6 + [1.25, 0.75]]


def test_edits_equal_the_scalar_loop():
    rows = random_rows(0, 200)
    logits_BV = random_logits(200)
    edits = stack_edits([row_edits(*row) for row in rows])
    expected = [
        scalar_edit(logits, params, prompt, output + drafts, stop)
        for logits, (params, prompt, output, drafts, stop) in zip(
            logits_BV.tolist(), rows, strict=True
        )
    ]
    before_BV = logits_BV.clone()
    edited_BV = edit_logits(logits_BV, edits)
    torch.testing.assert_close(edited_BV, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-14)
    assert torch.equal(logits_BV, before_BV)
    single = edit_logits(logits_BV.float(), edits)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), edited_BV, rtol=1e-6, atol=1e-6)
    assert edit_logits(logits_BV.bfloat16(), edits).dtype == torch.float32


def test_bias_comes_before_penalties():
    """1 + 2 is positive and divided by 2; -1 + 2 too; penalties first would multiply the -1."""
    params = SamplingParams(logit_bias={0: 2.0, 1: 2.0}, repetition_penalty=2.0)
    edits = stack_edits([row_edits(params, [0, 1])])
    assert edit_logits(torch.tensor([[1.0, -1.0]]), edits).tolist() == [[1.5, 0.5]]
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)
    edits = stack_edits([row_edits(params, [1], [0])])
    assert edit_logits(torch.tensor([[1.5, 1.0]]), edits).tolist() == [[-0.25, 0.5]]


def test_rows_without_edits_change_no_bit():
    logits_BV = random_logits(3, torch.float32)
    logits_BV[1, 3], logits_BV[1, 4], logits_BV[1, 5] = -0.0, NAN, INF
    off = row_edits(SamplingParams(temperature=0.7, top_k=3), [1, 2], [3], [4], [5])
    assert stack_edits([off] * 3) == Edits(None, None, None)
    assert edit_logits(logits_BV, stack_edits([off] * 3)) is logits_BV
    on = SamplingParams(
        logit_bias={3: 1.0}, frequency_penalty=0.5, repetition_penalty=1.25, min_tokens=9
    )
    edits = stack_edits([row_edits(on, [1], [3], [], [5]), off, row_edits(on, [1], [3], [], [5])])
    edited_BV = edit_logits(logits_BV, edits)
    assert torch.equal(edited_BV[1].view(torch.int32), logits_BV[1].view(torch.int32))
    assert not torch.equal(edited_BV[0], logits_BV[0])


def test_a_row_does_not_depend_on_its_neighbours():
    rows = [row_edits(*row) for row in random_rows(1, 60)]
    logits_BV = random_logits(60, torch.float32)
    together_BV = edit_logits(logits_BV, stack_edits(rows))
    for b, row in enumerate(rows):
        alone_BV = edit_logits(logits_BV[b : b + 1], stack_edits([row]))
        assert torch.equal(alone_BV[0], together_BV[b])


def test_parts_of_the_vocabulary_joined_are_the_whole():
    rows = [row_edits(*row) for row in random_rows(2, 60)]
    logits_BV = random_logits(60)
    whole_BV = edit_logits(logits_BV, stack_edits(rows))
    parts = [
        edit_logits(logits_BV[:, start:stop], stack_edits(rows, vocab=range(start, stop)))
        for start, stop in ((0, 4), (4, 5), (5, V))
    ]
    assert torch.equal(torch.cat(parts, -1), whole_BV)


def test_drafts_count_as_the_end_of_the_output():
    """Row j of a verification equals plain decoding after the first j drafts; -1 is no token."""
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=3
    )
    prompt, output, drafts, stop = [4, 4, 9], [2, 4], [2, 8, 8, 0], [6]
    history = History(prompt, output)
    rows = [RowEdits(params, 2, history, drafts[:j], stop) for j in range(5)]
    logits_BV = random_logits(5)
    expected = [
        scalar_edit(logits, params, prompt, output + drafts[:j], stop)
        for j, logits in enumerate(logits_BV.tolist())
    ]
    edited_BV = edit_logits(logits_BV, stack_edits(rows))
    torch.testing.assert_close(edited_BV, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-14)
    assert (edited_BV[:, 6] == -INF).tolist() == [True, False, False, False, False]
    ids, counts = history.counts([2, -1, -1])
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {4: 1, 9: 0, 2: 2}


def test_a_history_that_grows_is_that_of_the_whole_output():
    source = random.Random(5)
    prompt = [source.randrange(50) for _ in range(30)]
    output = [source.randrange(90) for _ in range(300)]
    history, seen = History(prompt), 0
    while seen < len(output):
        step = source.randrange(1, 5)
        history.extend(output[seen : seen + step])
        seen = min(seen + step, len(output))
        ids, counts = history.counts()
        found = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        assert found == {token: output[:seen].count(token) for token in {*prompt, *output[:seen]}}
    before = history.counts()
    history.counts(drafts=[1, 95, 95])
    assert all((a == b).all() for a, b in zip(before, history.counts(), strict=True))


def test_a_forbidden_token_never_appears():
    params = SamplingParams(temperature=1.0, logit_bias={3: -INF}, min_tokens=2)
    logits_BV = random_logits(4, torch.float32)
    logits_BV[:, 3], logits_BV[:, 6] = 50.0, 40.0
    edits = stack_edits([row_edits(params, stop=[6]), row_edits(params, output=[1, 1], stop=[6])])
    edited_BV = edit_logits(logits_BV[:2], edits)
    for u in (1e-6, 0.5, 0.999):
        tokens_B = choose(edited_BV, *stack_params([params] * 2), torch.full((2,), u))
        assert 3 not in tokens_B
        assert tokens_B[0] != 6
        assert tokens_B[1] == 6
    assert choose(edited_BV).tolist() == [edited_BV[0].argmax(), 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("repetition", [1e-300, 1e-38, 1.0, 1e38, 1e300])
def test_extreme_penalties_leave_a_law(dtype, repetition):
    """What is finite stays finite, so something stays possible."""
    params = SamplingParams(
        max_tokens=9,
        repetition_penalty=repetition,
        presence_penalty=2,
        frequency_penalty=-2,
        logit_bias={0: 100, 1: -100, 2: -INF},
    )
    for logits in ([3e38, -3e38, 1.0, 0.0, -1e-38], [-3e38] * 5, [0.0] * 5, [-INF, -1, 1, 2, -INF]):
        logits_BV = torch.tensor([logits], dtype=dtype)
        edited_BV = edit_logits(
            logits_BV, stack_edits([row_edits(params, [0, 1, 2, 3, 4], [4, 4])])
        )
        assert edited_BV[0, 2] == -INF
        others = [0, 1, 3, 4]
        assert torch.equal(edited_BV.isfinite()[0, others], logits_BV.isfinite()[0, others])
        law_BV = processed_probabilities(edited_BV, torch.ones(1))
        torch.testing.assert_close(law_BV.sum(-1), torch.ones(1, dtype=law_BV.dtype))


def test_penalties_without_a_history_are_refused():
    assert not has_penalties(SamplingParams(logit_bias={1: 1.0}, min_tokens=3))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        params = SamplingParams(**{name: 0.5})
        assert has_penalties(params)
        with pytest.raises(ValueError, match="row 1 has penalties: it needs the history"):
            stack_edits([RowEdits(SamplingParams()), RowEdits(params)])


def test_edits_of_what_is_no_batch_are_refused():
    with pytest.raises(ValueError, match=r"expected floating-point values \[B, V\].*\[5\]"):
        edit_logits(torch.zeros(5), Edits())


# --- against a vocabulary


@pytest.mark.parametrize(
    ("arguments", "stop", "message"),
    [
        ({"logit_bias": {7: 1.0}}, (), "logit_bias: token 7 is outside of the vocabulary, 0 to 6"),
        ({"stop_token_ids": [3, 9]}, (), "stop_token_ids: token 9 is outside"),
        ({"logprobs": 8}, (), "logprobs is 8: the vocabulary has 7 tokens"),
        ({"prompt_logprobs": 9}, (), "prompt_logprobs is 9"),
        ({"logit_bias": dict.fromkeys(range(7), -INF)}, (), "logit_bias forbids all 7 tokens"),
        (
            {"logit_bias": dict.fromkeys(range(5), -INF), "min_tokens": 1},
            (5, 6),
            "min_tokens is 1, but logit_bias and the tokens that end the request leave no other",
        ),
    ],
)
def test_parameters_are_checked_against_a_vocabulary(arguments, stop, message):
    with pytest.raises(ValueError, match=message):
        check_vocab(SamplingParams(**arguments), 7, stop)
    if "bias" in message:
        check_vocab(SamplingParams(**arguments), 8, stop)


def test_parameters_that_leave_a_token_pass():
    check_vocab(SamplingParams(logit_bias=dict.fromkeys(range(6), -INF), logprobs=7), 7)
    check_vocab(SamplingParams(logit_bias=dict.fromkeys(range(5), -INF)), 7, (5, 6))
    check_vocab(SamplingParams(min_tokens=3), 7, (5, 6, 99))


# --- log-probabilities


def scalar_logprobs(logits: list[float]) -> list[float]:
    top = max(logits)
    log_total = top + math.log(sum(math.exp(z - top) for z in logits))
    return [z - log_total for z in logits]


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_logprobs_equal_the_scalar_loop(dtype):
    logits_BV = random_logits(9, dtype)
    logits_BV[2:5] = logits_BV[2:5].round()  # ties
    logits_BV[5, 1:] = -INF
    tokens = [0, 10, 3, 7, 7, 0, 2, 5, -1]
    for num_top in (0, 1, 4, V):
        found = logprobs(logits_BV, torch.tensor(tokens), num_top)
        assert found.token_B.dtype == torch.promote_types(dtype, torch.float32)
        assert found.top_BM.shape == found.top_ids_BM.shape == (9, num_top)
        for b, logits in enumerate(logits_BV.tolist()):
            expected = scalar_logprobs(logits)
            ranked = sorted(range(V), key=lambda i, e=expected: (-e[i], i))[:num_top]
            close = {"rel": 1e-12, "abs": 1e-12} if dtype == F64 else {"rel": 1e-5, "abs": 1e-5}
            assert found.top_ids_BM[b].tolist() == ranked
            assert found.top_BM[b].tolist() == pytest.approx([expected[i] for i in ranked], **close)
            if tokens[b] >= 0:
                assert found.token_B[b].item() == pytest.approx(expected[tokens[b]], **close)
        assert found.token_B[8].isnan()


@pytest.mark.parametrize("bad", [[NAN, 1.0, 2.0], [-INF] * 3, [0.0, INF, 1.0]])
def test_rows_without_a_law_have_no_logprobs(bad):
    found = logprobs(torch.tensor([[0.0, 1.0, 2.0], bad]), torch.tensor([1, 1]), 2)
    assert found.token_B.isnan().tolist() == [False, True]
    assert found.top_BM.isnan().any(-1).tolist() == [False, True]


@pytest.mark.parametrize("num_top", [-1, V + 1])
def test_more_alternatives_than_tokens_are_refused(num_top):
    with pytest.raises(ValueError, match=rf"num_top is {num_top}: expected a number in 0..11"):
        logprobs(torch.zeros(1, V), torch.tensor([0]), num_top)


def test_the_largest_of_a_row_are_those_of_a_stable_sort():
    values_BV = torch.randn(30, 40, generator=torch.Generator().manual_seed(2)).round()
    values_BV[:3, ::2] = -INF
    for num in (1, 7, 39, 40):
        found, places = largest(values_BV, num)
        for row, f, p in zip(values_BV.tolist(), found.tolist(), places.tolist(), strict=True):
            assert p == sorted(range(40), key=lambda i, row=row: (-row[i], i))[:num]
            assert f == [row[i] for i in p]
