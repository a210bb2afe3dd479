"""Drafts in the engine: which ones the model makes, what garbage does, the laws of verifiers."""

import dataclasses
from collections import Counter
from functools import cache
from unittest import mock

import pytest
import torch

from funcinfer import SamplingParams
from funcinfer.kvcache.batch import Rows
from funcinfer.serving import rank_step
from funcinfer.serving.drafters import ScriptedDrafter
from funcinfer.serving.verify import BLOCK, TOKENWISE, verify
from tests.serving import tiny
from tests.serving.laws import scalar_law
from tests.serving.test_engine import NO_END, drain, engine_of, outcome
from tests.serving.test_engine_cases import PROMPT, knows_the_model

LONG = dataclasses.replace(NO_END, max_tokens=10)


# Drafts of the model


@cache
def cold_drafts(tokens: tuple[int, ...], count: int) -> list[int]:
    """The drafts that follow a sequence: main model and module run over the whole of it, then the
    module goes on, with the draft before and its own hidden state.
    """
    model, length = tiny.with_drafts(), len(tokens)
    fns, size = model.fns, length + count
    cache = model.local_cache(2, size)

    def place(row: list[int], start: int):
        return model.place([[Rows(row, start, [1])]], page_size=size, decode=False)

    with torch.no_grad():
        out, cache = fns.prefill(model.params, cache, place(list(tokens[:-1]), 0))
        hidden, row, start, drafts = out.hidden, list(tokens[1:]), 0, []
        for _ in range(count):
            out, cache = fns.prefill_draft(model.params, cache, place(row, start), hidden, depth=0)
            drafts.append(int(out.logits[-1].argmax()))
            hidden, start, row = (
                out.hidden[len(row) - 1 :][:1],
                length - 2 + len(drafts),
                drafts[-1:],
            )
    return drafts


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_are_those_of_a_chain_over_the_whole_sequence(asynchronous):
    engine = engine_of(
        tiny.with_drafts(),
        speculate=3,
        asynchronous=asynchronous,
        prefix_cache=False,
        token_budget=7,
    )
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=10, ignore_eos=True)
    ids = [engine.add(tiny.piece(11 * i, 4 + i), s) for i, s in enumerate((LONG, drawn, LONG))]
    made = []

    def noting(news):
        take(news)
        if news.drafts:
            done = engine.live.get(news.work.request_id)
            if done is not None:
                made.append(((*done.prompt, *done.tokens), news.drafts))

    take = engine._take
    with mock.patch.object(engine, "_take", noting):
        ended = drain(engine)
    assert set(ended) == set(ids)
    assert len(made) > 12
    assert Counter(len(drafts) for _, drafts in made)[3] > 10
    for tokens, drafts in made:
        assert drafts == cold_drafts(tokens, 3)[: len(drafts)]
    assert 0 < engine.metrics.accepted < engine.metrics.drafted


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("asynchronous", [True])
def test_drafts_that_find_no_page_leave_no_trace(page_size, asynchronous):
    """More drafts than a page, in pools of every size from the smallest on: of the drafts that a
    row was planned with, the device has made fewer.
    """
    prompts = [tiny.piece(7 * i, 5 + 3 * i) for i in range(3)]
    law = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True)
    samplings = [dataclasses.replace(LONG, max_tokens=8), law, law]
    wanted = [tiny.expected(*request) for request in zip(prompts, samplings, strict=True)]
    least = -(-18 // page_size)
    for num_pages in range(1 + least, 2 + least + 8 // page_size, 2):
        engine = engine_of(
            tiny.with_drafts(),
            num_pages=num_pages,
            page_size=page_size,
            speculate=5,
            asynchronous=asynchronous,
        )
        for i, request in enumerate(zip(prompts, samplings, strict=True)):
            engine.add(*request, id=i)
        ended = drain(engine)
        assert [outcome(ended[i]) for i in range(3)] == wanted


# Drafters


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_target_as_its_own_drafter_is_always_accepted(k):
    engine = engine_of(speculate=k, drafter=ScriptedDrafter(knows_the_model))
    (done,) = engine.generate([PROMPT], dataclasses.replace(NO_END, max_tokens=13))
    assert outcome(done) == tiny.expected(PROMPT, dataclasses.replace(NO_END, max_tokens=13))
    metrics = engine.metrics
    assert metrics.accepted == metrics.drafted
    assert metrics.steps == 1 + -(-12 // (k + 1))
    assert metrics.accepted_length == 1 + metrics.drafted / metrics.verified > 1


@pytest.mark.parametrize(
    "garbage", [[tiny.VOCAB], [-1], [3, -1], [3.5], [float("nan")], [None], "ab", 7, None]
)
def test_a_drafter_that_proposes_garbage_is_refused_and_disturbs_nobody(garbage):
    calls = []

    def script(id, history, count):
        calls.append(id)
        return garbage if len(calls) == 3 else knows_the_model(id, history, count)

    engine = engine_of(speculate=2, drafter=ScriptedDrafter(script))
    prompts = [tiny.piece(9 * i, 3 + i) for i in range(2)]
    ids = [engine.add(prompt, LONG) for prompt in prompts]
    with pytest.raises((ValueError, TypeError)):
        for _ in range(9):
            engine.step()
    ended = drain(engine)
    assert [outcome(ended[i]) for i in ids] == [tiny.expected(p, LONG) for p in prompts]
    assert engine.states[0].pool.num_free == 39


# Laws


def exact_law(prompt: list[int], sampling: SamplingParams, count: int) -> dict:
    """The probability of each possible beginning of an output."""
    law = {(): 1.0}
    for _ in range(count):
        longer = {}
        for tokens, mass in law.items():
            row = tiny.logits_after((*prompt, *tokens))[-1].tolist()
            p = scalar_law(row, sampling.temperature, sampling.top_k, sampling.top_p)
            longer |= {(*tokens, i): mass * x for i, x in enumerate(p) if x}
        law = longer
    return law


@pytest.mark.parametrize(
    ("verifier", "asynchronous", "num_pages"),
    [
        (TOKENWISE, False, 400),
        (BLOCK, True, 400),
        (TOKENWISE, False, 80),
        (BLOCK, True, 80),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_the_law_of_the_first_tokens_is_the_target_law(verifier, asynchronous, num_pages):
    """Pearson's test of 27 outcomes; of 1,000 right engines with other seeds, one would fail."""
    count, runs, most = 3, 300 if num_pages == 400 else 150, 4 if num_pages == 400 else 6
    sampling = SamplingParams(temperature=1.3, top_k=3, max_tokens=most, ignore_eos=True)
    law = exact_law(PROMPT, sampling, count)
    assert len(law) == 27
    engine = engine_of(
        tiny.with_drafts(),
        page_size=2,
        num_pages=num_pages,
        token_budget=512,
        max_running=64 if num_pages == 400 else 24,
        prefix_cache=False,
        speculate=2,
        asynchronous=asynchronous,
        verifier=verifier,
        poison=False,
    )
    for seed in range(runs):
        engine.add(PROMPT, dataclasses.replace(sampling, seed=seed), id=seed)
    found: Counter = Counter()
    with mock.patch.object(rank_step, "verify", verify_possible):
        while engine.live:
            for done in engine.step():
                found[tuple(done.tokens[:count])] += 1
    assert set(found) <= set(law)
    rare = [tokens for tokens, p in law.items() if p * runs < 5]
    bins = [[t] for t in law if t not in rare] + ([rare] if rare else [])
    pairs = [(sum(found[t] for t in b), runs * sum(law[t] for t in b)) for b in bins]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert statistic < chi_square_bound(len(bins) - 1)
    assert 0 < engine.metrics.accepted < engine.metrics.drafted
    assert (engine.metrics.preemptions > 5) == (num_pages == 80)


def verify_possible(verifier, target_BLV, drafts_BK, draft_BKV, uniforms_B, *, exact):
    """Verifies drafts that can have been drawn from what are said to be their laws."""
    real_BK = drafts_BK >= 0
    masses_BK = draft_BKV.gather(-1, drafts_BK.clamp(min=0)[..., None])[..., 0]
    assert bool((masses_BK[real_BK] > 0).all())
    return verify(verifier, target_BLV, drafts_BK, draft_BKV, uniforms_B, exact=exact)


def chi_square_bound(freedom: int) -> float:
    """What a chi-square variable exceeds once in 1,000 times."""
    x = torch.linspace(0, 200, 20001, dtype=torch.float64)
    cdf = torch.special.gammainc(torch.tensor(freedom / 2, dtype=torch.float64), x / 2)
    return float(x[(cdf > 0.999).nonzero()[0]])
