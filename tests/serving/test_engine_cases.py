"""Faults that serving engines are known for, one by one, through the public Engine.

What must come out is `tiny.expected`, or is written down by hand.
"""

import dataclasses
import itertools
import math
from unittest import mock

import pytest
import torch

from funcinfer import Engine, SamplingParams
from funcinfer.kvcache.prefix import hash_block, scope
from funcinfer.serving import launch, schedule
from funcinfer.serving.drafters import ScriptedDrafter
from funcinfer.serving.sampling import child_seed
from funcinfer.serving.verify import BLOCK
from funcinfer.tree import tree_leaves
from tests.serving import tiny
from tests.serving.laws import scalar_edit
from tests.serving.test_engine import NO_END, drain, engine_of, outcome
from tests.serving.test_engine_traces import Drafts, check_logprobs
from tests.serving.tiny import VOCAB

MODES = {
    "plain": {},
    "ahead": dict(asynchronous=True),
    "drafts": dict(speculate=3),
    "drafts ahead": dict(speculate=3, asynchronous=True),
}


def engine_in(mode: str, **options) -> Engine:
    return engine_of(tiny.with_drafts() if "drafts" in mode else None, **MODES[mode] | options)


def greedy(history) -> int:
    """What the model says next, by itself."""
    return int(tiny.logits_after(tuple(history))[-1].argmax())


def knows_the_model(id, history, count) -> list[int]:
    """Drafts: what the model says next, without any processor."""
    whole = list(history)
    for _ in range(count):
        whole.append(greedy(whole))
    return whole[len(history) :]


# Pages


def check_blocks(engine: Engine) -> None:
    """Every page that can be found holds what one forward makes of the tokens it is found by."""
    (state,) = engine.states
    for block in state.prefix.blocks:
        whole, parent = block.tokens, block.parent
        while parent is not None:
            whole, parent = parent.tokens + whole, parent.parent
        assert len(block.tokens) == state.page_size
        before = block.scope if block.parent is None else block.parent.digest
        assert block.digest == hash_block(before, block.tokens)
        leaves = tree_leaves(engine.executor.caches)
        for leaf, rows in zip(leaves, tiny.cold_rows(whole), strict=True):
            torch.testing.assert_close(
                leaf[block.page], rows[-state.page_size :], rtol=0, atol=1e-9
            )


def test_pages_that_were_reused_are_not_found_as_what_they_were():
    engine = engine_of(num_pages=7)
    prompts = [tiny.piece(start, 13) for start in (0, 17, 33, 49)]
    handed_out = set()
    for prompt in (*prompts, prompts[0]):
        id = engine.add(prompt, NO_END)
        while engine.live:
            for done in engine.step():
                assert done.id == id
                assert outcome(done) == tiny.expected(prompt, NO_END)
            handed_out |= {p for r in engine.states[0].running.values() for p in r.pages}
            check_blocks(engine)
    assert handed_out == set(range(1, 7))
    assert engine.metrics.cached_positions == 0  # too much came in between


@pytest.mark.parametrize(
    ("page_size", "length"), [(1, 1), (1, 2), (1, 3), (4, 4), (4, 8), (4, 12), (4, 13), (2, 1)]
)
def test_a_prompt_that_is_cached_whole_computes_its_last_token(page_size, length):
    sampling = dataclasses.replace(NO_END, max_tokens=2, logprobs=3)
    prompt = tiny.piece(3, length)
    engine = engine_of(page_size=page_size)
    for hit in (0, (length - 1) // page_size * page_size):
        known = engine.metrics.cached_positions
        with tiny.recorded_plans() as plans:
            (done,) = engine.generate([prompt], sampling)
        assert [work.start for work in plans[0].works] == [hit]
        assert plans[0].num_tokens == length - hit >= 1
        assert engine.metrics.cached_positions - known == hit
        assert outcome(done) == tiny.expected(prompt, sampling)
        check_logprobs(done.logprobs, tiny.expected_logprobs(prompt, done.tokens, 3))


def test_two_salts_share_nothing():
    prompt, engine = tiny.piece(0, 9), engine_of()
    hits = []
    for salt in ("x", "y", None, "x"):
        id = engine.add(prompt, NO_END, scope=scope(salt=salt))
        assert outcome(drain(engine)[id]) == tiny.expected(prompt, NO_END)
        hits.append(engine.metrics.cached_positions)
    assert hits == [0, 0, 0, 8]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_prompts_of_every_length_around_page_edges(page_size):
    """Three at a time, so that the tables are of pages in any order."""
    engine = engine_of(page_size=page_size, num_pages=1 + 60 // page_size, max_running=3)
    prompts = [tiny.piece(5 * length, length) for length in range(1, 3 * page_size + 2)]
    prompts += [tiny.piece(length, length) for length in range(3 * page_size + 1, 0, -1)]
    done = engine.generate(prompts, NO_END)
    assert [outcome(c) for c in done] == [tiny.expected(p, NO_END) for p in prompts]


def test_preempted_requests_lose_and_repeat_no_token():
    """Each of four is preempted twice or more, of these at a page and a token, and at two pages."""
    seen, lengths, times = [], [], dict.fromkeys(range(4), 0)
    options = dict(page_size=2, num_pages=16, token_budget=7, max_running=4)
    engine = engine_of(on_token=lambda c, t: seen.append((c.id, t)), **options)
    prompts = [tiny.piece(11 * i, 2) for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add(prompt, dataclasses.replace(NO_END, max_tokens=9), id=i)
    (state,), ended = engine.states, {}
    with tiny.recorded_plans() as plans:
        while engine.live:
            ended |= {done.id: done for done in engine.step()}
            first = next(iter(state.running.values()), None)
            if first is not None and len(first.tokens) in (3, 4) and first.computed:
                lengths.append(len(first.tokens))
                for id in state.running:
                    times[id] += 1
                schedule.preempt(state, first.id)
    wanted = dataclasses.replace(NO_END, max_tokens=9)
    for i, prompt in enumerate(prompts):
        assert outcome(ended[i]) == tiny.expected(prompt, wanted)
        assert [token for id, token in seen if id == i] == ended[i].tokens
    times = {i: n + sum(i in plan.preempted for plan in plans) for i, n in times.items()}
    assert min(times.values()) >= 2
    assert {3, 4} <= set(lengths)
    assert all(plan.num_tokens <= 7 for plan in plans)


# Several tokens at once


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_stop_token_at_every_position(k):
    """With drafts that are right, every token of a greedy run is the stop token once."""
    prompt, most = tiny.piece(0, 6), 9
    free, _ = tiny.expected(prompt, dataclasses.replace(NO_END, max_tokens=most))
    script = Drafts([k])
    engine = engine_of(
        tiny.model(stop_ids=(free[2], 100)),
        speculate=k,
        drafter=ScriptedDrafter(script),
        num_pages=300,
    )
    wanted = {}
    for place, cap in itertools.product(range(most), (1, 2, 3, 5, most)):
        end = free.index(free[place]) + 1
        for ignores in (True, False):
            cut = end if ignores else min(end, 3)  # free[2] ends it too
            id = engine.add(
                prompt,
                SamplingParams(max_tokens=cap, stop_token_ids=(free[place],), ignore_eos=ignores),
            )
            script.wanted[id] = prompt, dataclasses.replace(NO_END, max_tokens=cap)
            wanted[id] = (free[:cut], "stop") if cut <= cap else (free[:cap], "length")
    assert free.index(free[2]) == 2
    done = drain(engine)
    assert {id: outcome(c) for id, c in done.items()} == wanted
    assert engine.metrics.tokens == sum(len(c.tokens) for c in done.values())
    assert engine.metrics.accepted == engine.metrics.drafted > 50


PROMPT = tiny.piece(0, 6)
FREE = tiny.expected(PROMPT, dataclasses.replace(NO_END, max_tokens=10))[0]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias={FREE[0]: -math.inf, FREE[2]: -math.inf}),
        SamplingParams(temperature=0.9, seed=3, logit_bias={FREE[0]: -math.inf, FREE[3]: -2}),
        SamplingParams(repetition_penalty=1.6, presence_penalty=1.0, frequency_penalty=-0.5),
        SamplingParams(temperature=1.1, min_p=0.2, seed=8),
        SamplingParams(min_tokens=6, stop_token_ids=(FREE[1], FREE[4])),
        SamplingParams(temperature=0.7, frequency_penalty=1.5, min_tokens=4, seed=1),
    ],
    ids=["bias", "bias, drawn", "penalties", "min_p", "min_tokens", "several"],
)
def test_verified_tokens_obey_every_parameter(sampling, k):
    """The drafts are what the model says without them, so that some must be rejected."""
    sampling = dataclasses.replace(sampling, max_tokens=10)
    wanted = tiny.expected(PROMPT, sampling)
    bans = {token for token, bias in sampling.bias_pairs if bias == -math.inf}
    assert bans.isdisjoint(wanted[0])
    for options in (dict(drafter=ScriptedDrafter(knows_the_model)), {}):
        engine = engine_of(tiny.with_drafts(), speculate=k, **options)
        (done,) = engine.generate([PROMPT], sampling)
        assert outcome(done) == wanted
        assert engine.metrics.drafted > 0


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_row_of_nan_among_drafts_is_an_error_of_its_request(place):
    """The row behind `place` drafts gives no token; those before it are good, the neighbour too."""
    calls = []

    def failing(params, cache, batch):
        out, cache = prefill(params, cache, batch)
        calls.append(1)
        if len(calls) == 2:  # four rows of the first request, then those of the other
            out.logits[place] = float("nan")
        return out, cache

    fns = tiny.alone().fns
    prefill = fns.prefill
    model = tiny.model(fns=dataclasses.replace(fns, prefill=failing, decode=failing))
    engine = engine_of(model, speculate=3, drafter=ScriptedDrafter(knows_the_model))
    sampling = dataclasses.replace(NO_END, max_tokens=8)
    sick, other = engine.add(PROMPT, sampling), engine.add(PROMPT[:3], sampling)
    done = drain(engine)
    assert outcome(done[sick]) == (FREE[: 1 + place], "error")
    assert outcome(done[other]) == tiny.expected(PROMPT[:3], sampling)
    assert engine.metrics.tokens == 1 + place + 8
    assert outcome(*engine.generate([PROMPT], sampling)) == (FREE[:8], "length")


# Extremes and draws


@pytest.mark.parametrize("mode", MODES)
def test_greedy_requests_use_no_randomness(mode):
    sampling = dataclasses.replace(NO_END, max_tokens=9)
    prompts = [tiny.piece(9 * i, 3 + i) for i in range(3)]
    for verifier in (None, BLOCK):
        with mock.patch.object(launch, "uniform", side_effect=AssertionError("a draw")) as drawn:
            done = engine_in(mode, verifier=verifier).generate(prompts, sampling)
            assert [outcome(c) for c in done] == [tiny.expected(p, sampling) for p in prompts]
        assert not drawn.called


def test_extremes_in_one_batch():
    """By any of these laws but the middle one and the flat one, the likeliest token is drawn."""
    base = SamplingParams(max_tokens=7, ignore_eos=True, temperature=0.7, seed=4)
    laws = [
        dataclasses.replace(base, temperature=0.0),
        base,
        *(dataclasses.replace(base, temperature=t) for t in (1e-8, 1e-300, 1e4)),
        *(dataclasses.replace(base, top_p=p) for p in (0.0, 1e-8)),
        dataclasses.replace(base, top_k=1),
        dataclasses.replace(base, min_p=1.0),
    ]
    for mode in ("plain", "drafts ahead"):
        engine = engine_in(mode)
        ids = [engine.add(PROMPT, sampling) for sampling in laws]
        ended = drain(engine)
        for id, sampling in zip(ids, laws, strict=True):
            assert outcome(ended[id]) == tiny.expected(PROMPT, sampling)
        assert [ended[id].tokens == FREE[:7] for id in ids] == [
            sampling is not base and sampling.temperature < 1e4 for sampling in laws
        ]


@pytest.mark.parametrize("mode", MODES)
def test_penalties_count_the_prompt_and_every_generated_token(mode):
    sampling = SamplingParams(
        max_tokens=10,
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.6,
    )
    for prompt in (PROMPT, [FREE[0], FREE[1], FREE[0]]):
        output: list[int] = []
        for _ in range(10):
            row = tiny.logits_after((*prompt, *output))[-1].tolist()
            row = scalar_edit(row, sampling, prompt, output)
            output.append(max(range(VOCAB), key=lambda i: row[i]))
        (done,) = engine_in(mode).generate([prompt], sampling)
        assert done.tokens == output


def test_the_j_th_draw_of_a_request_is_its_j_th_number():
    """Chunks, preemptions and neighbours draw nothing more."""
    sampling = SamplingParams(temperature=1.2, seed=42, max_tokens=8, ignore_eos=True)
    prompt = tiny.piece(3, 9)
    wanted = tiny.expected(prompt, sampling)
    engine = engine_of(token_budget=4, num_pages=12)
    ids = [engine.add(prompt, sampling)]
    ids += [engine.add(prompt[:i], dataclasses.replace(sampling, seed=i)) for i in (1, 2)]
    ended = {}
    with mock.patch.object(launch, "uniform", wraps=launch.uniform) as drawn:
        while engine.live:
            ended |= {done.id: done for done in engine.step()}
            if len(engine.live) > 2 and len(engine.live[0].tokens) in (2, 5):
                schedule.preempt(engine.states[0], 0)
            if len(engine.live) == 3 and len(engine.live[0].tokens) == 6:
                engine.abort(ids[1])
    assert outcome(ended[0]) == wanted
    assert (
        outcome(ended[2])[0][:1]
        == tiny.expected(prompt[:2], dataclasses.replace(sampling, seed=2, max_tokens=1))[0]
    )
    assert [call.args for call in drawn.call_args_list if call.args[0] == 42] == [
        (42, j) for j in range(8)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_the_completions_of_a_prompt_draw_apart_and_can_be_repeated(mode):
    sampling = SamplingParams(temperature=1.2, seed=42, max_tokens=8, ignore_eos=True)
    for prompt in (tiny.piece(3, 9), [7]):
        once, again = (
            [
                c.tokens
                for c in engine_in(mode).generate([prompt], dataclasses.replace(sampling, n=3))
            ]
            for _ in range(2)
        )
        (alone,) = engine_in(mode).generate([prompt], sampling)
        assert once == again
        assert len({tuple(tokens) for tokens in once}) == 3
        assert once[0] == alone.tokens == tiny.expected(prompt, sampling)[0]
        for child in (1, 2):
            own = dataclasses.replace(sampling, seed=child_seed(42, child))
            assert once[child] == tiny.expected(prompt, own)[0]
