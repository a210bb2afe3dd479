"""The engine's contract, point by point; random traces are in test_engine_traces."""

import dataclasses
import gc

import numpy as np
import pytest
import torch

from funcinfer import Engine, SamplingParams
from funcinfer.kvcache.layout import pages_needed
from funcinfer.serving import schedule
from funcinfer.tree import tree_leaves
from tests.equivalence.layouts import LAYOUTS
from tests.serving import tiny
from tests.serving.tiny import MAX_LENGTH, VOCAB

NO_END = SamplingParams(max_tokens=6, ignore_eos=True)


def engine_of(model=None, **options) -> Engine:
    options = dict(num_pages=40, page_size=tiny.PAGE_SIZE, poison=True) | options
    return Engine(model or tiny.alone(), **options)


def drain(engine: Engine) -> dict:
    """Step until nothing is live: the completions, also those of a step that raised before."""
    ended = {}
    for _ in range(100):
        ended |= {done.id: done for done in engine.step()}
        if not engine.live:
            return ended
    raise AssertionError(f"{list(engine.live)} never end")


def outcome(completion) -> tuple[list[int], str]:
    return completion.tokens, completion.finish_reason


# Refusals


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, r"prompt is empty"),
        ([3, -1], {}, r"prompt: token -1 is outside of the vocabulary, 0 to 100"),
        ([3, VOCAB], {}, r"prompt: token 101 is outside of the vocabulary, 0 to 100"),
        ([3, 2.5], {}, r"prompt: 2\.5 is no token id"),
        ("ab", {}, r"prompt: 'a' is no token id"),
        (tiny.piece(0, MAX_LENGTH), {}, r"prompt has 44 tokens; .* max_length is 44, .* have 43"),
        (tiny.piece(0, 99), {}, r"prompt has 99 tokens; .* max_length is 44, .* have 43"),
        ([3], {"stop_token_ids": (7, VOCAB)}, r"stop_token_ids: token 101 is outside"),
        ([3], {"stop": "."}, r"stop is \('\.',\): stop texts need a tokenizer"),
        ([3], {"logit_bias": {VOCAB: 1}}, r"logit_bias: token 101 is outside"),
        ([3], {"logprobs": VOCAB + 1}, r"logprobs is 102: the vocabulary has 101 tokens"),
        (
            tiny.piece(0, 20),
            {"max_tokens": 14},
            r"prompt of 20 tokens and max_tokens=14: .* 34 tokens needs 9 pages of 4; .* has 8",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_and_disturbs_nobody(prompt, fields, message):
    engine = engine_of(num_pages=9)
    good = tiny.piece(5, 7)
    id = engine.add(good, NO_END)
    before = engine.step(), engine.states[0].counter, dict(engine.live)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, dataclasses.replace(NO_END, **fields))
    assert before == ([], engine.states[0].counter, engine.live)
    assert outcome(drain(engine)[id]) == tiny.expected(good, NO_END)
    with pytest.raises(ValueError, match=message):
        engine.generate([good, prompt], dataclasses.replace(NO_END, **fields))
    assert not engine.live
    assert engine.states[0].pool.num_free == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token_budget": 0}, "token_budget is 0"),
        ({"max_running": 0}, "max_running 0"),
        ({"speculate": -1}, "speculate -1"),
        ({"num_pages": 1}, "num_pages is 1"),
    ],
)
def test_an_engine_that_could_not_run_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine_of(**options)


def test_a_page_size_that_the_mesh_cannot_deal_is_refused():
    with pytest.raises(ValueError, match=r"page_size 5 must be a multiple of 2"):
        engine_of(tiny.model(LAYOUTS["dcp2 tp2"]), page_size=5)


# Lengths


@pytest.mark.parametrize("room", [1, 2, 5])
def test_max_tokens_is_cut_at_max_length(room):
    prompt = tiny.piece(9, MAX_LENGTH - room)
    sampling = dataclasses.replace(NO_END, max_tokens=10)
    (done,) = engine_of().generate([prompt], sampling)
    assert len(done.tokens) == room
    assert outcome(done) == tiny.expected(prompt, sampling)


def test_the_last_token_needs_no_place_in_the_cache():
    """A pool of 2 pages serves 8 cached positions and the token after them."""
    prompt = tiny.piece(2, 3)
    for max_tokens in (5, 6):
        sampling = dataclasses.replace(NO_END, max_tokens=max_tokens)
        (done,) = engine_of(num_pages=3).generate([prompt], sampling)
        assert outcome(done) == tiny.expected(prompt, sampling)
    with pytest.raises(ValueError, match="needs 3 pages of 4; the pool has 2"):
        engine_of(num_pages=3).add(prompt, dataclasses.replace(NO_END, max_tokens=7))


def test_a_model_without_a_max_length_is_bounded_by_the_pool_alone():
    engine = engine_of(tiny.model(max_length=None), num_pages=20)
    (done,) = engine.generate([tiny.piece(0, MAX_LENGTH + 9)], NO_END)
    assert len(done.tokens) == 6


# Ids


def test_ids_are_unique_among_the_living_and_free_again_after():
    engine = engine_of()
    first, second = tiny.piece(0, 5), tiny.piece(8, 3)
    assert engine.add(first, NO_END, id=("a", 1)) == ("a", 1)
    with pytest.raises(ValueError, match=r"id \('a', 1\) belongs to a live request"):
        engine.add(second, NO_END, id=("a", 1))
    assert outcome(drain(engine)["a", 1]) == tiny.expected(first, NO_END)
    engine.add(second, NO_END, id=("a", 1))
    engine.step()
    engine.abort(("a", 1))
    engine.add(second, NO_END, id=("a", 1))
    assert outcome(drain(engine)["a", 1]) == tiny.expected(second, NO_END)
    with pytest.raises(TypeError, match="unhashable"):
        engine.add(first, id=[1])
    assert not engine.live


def test_numbers_are_given_around_ids_of_the_caller():
    engine = engine_of()
    assert engine.add([3], id=1) == 1
    assert [engine.add([4]), engine.add([5]), engine.add([6])] == [0, 2, 3]


@pytest.mark.parametrize("ids", [np.array([4, 9]), torch.tensor([4, 9]), (4, 9), iter([4, 9])])
def test_a_prompt_is_anything_that_gives_whole_numbers(ids):
    engine = engine_of()
    completion = engine.live[engine.add(ids, NO_END)]
    assert completion.prompt == [4, 9]
    assert all(type(token) is int for token in completion.prompt)
    drain(engine)
    assert outcome(completion) == tiny.expected([4, 9], NO_END)


# Ends


def test_any_stop_token_of_the_model_ends_a_request_unless_it_ignores_them():
    prompt = tiny.piece(0, 6)
    free, _ = tiny.expected(prompt, dataclasses.replace(NO_END, max_tokens=9))
    assert len(set(free[:4])) == 4
    for index in range(4):
        model = tiny.model(stop_ids=(100, free[index]))
        (done,) = engine_of(model).generate([prompt], SamplingParams(max_tokens=9))
        assert outcome(done) == (free[: index + 1], "stop")
        ignoring = SamplingParams(max_tokens=9, ignore_eos=True)
        assert outcome(*engine_of(model).generate([prompt], ignoring)) == (free, "length")
        own = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(free[1], 100))
        assert outcome(*engine_of(model).generate([prompt], own)) == (free[:2], "stop")
    # At the last token that it may have, a stop token is the reason.
    (done,) = engine_of(model).generate([prompt], SamplingParams(max_tokens=4))
    assert outcome(done) == (free[:4], "stop")


def test_logits_without_a_token_end_their_request_alone():
    engine = engine_of(token_budget=64)
    prompts = [tiny.piece(11 * i, 4 + i) for i in range(3)]
    ids = [engine.add(prompt, NO_END) for prompt in prompts]
    engine.step()
    engine.step()
    sick = engine.states[0].request(ids[1])
    for leaf in tree_leaves(engine.executor.caches):
        leaf[sick.pages[0], 2] = float("nan")
    (done,) = engine.step()
    assert outcome(done) == (tiny.expected(prompts[1], NO_END)[0][:2], "error")
    ended = drain(engine)
    for i in (0, 2):
        assert outcome(ended[ids[i]]) == tiny.expected(prompts[i], NO_END)
    # Its pages serve the next one.
    assert outcome(*engine.generate([prompts[1]], NO_END)) == tiny.expected(prompts[1], NO_END)


def test_abort_needs_a_live_request():
    engine = engine_of()
    id = engine.add([3], NO_END)
    assert engine.abort(id).finish_reason == "abort"
    with pytest.raises(ValueError, match="no live request has the id 0"):
        engine.abort(id)
    assert engine.step() == []


# Callbacks


def test_tokens_are_streamed_in_order_of_arrival_before_the_step_returns():
    seen = []
    engine = engine_of(on_token=lambda c, t: seen.append((c.id, t, c.tokens[-1], c.finish_reason)))
    prompts = [tiny.piece(11 * i, 5 - i) for i in range(3)]
    ids = [engine.add(prompt, SamplingParams(max_tokens=2 + i)) for i, prompt in enumerate(prompts)]
    wanted = [
        tiny.expected(prompt, SamplingParams(max_tokens=2 + i))[0]
        for i, prompt in enumerate(prompts)
    ]
    engine.step()
    assert [(id, token) for id, token, *_ in seen] == [(i, wanted[i][0]) for i in ids]
    engine.step()
    assert [(id, token) for id, token, *_ in seen[3:]] == [(i, wanted[i][1]) for i in ids]
    assert [reason for *_, reason in seen] == [None, None, None, "length", None, None]
    assert all(token == last for _, token, last, _ in seen)


def test_a_callback_may_add_and_abort():
    later = tiny.piece(30, 3)

    def react(completion, token):
        if completion.id == "first" and len(completion.tokens) == 2:
            aborted.append(engine.abort("second"))  # its row of this step is not committed yet
            engine.abort("waiting")
            engine.add(later, NO_END, id="second")

    aborted = []
    engine = engine_of(on_token=react, max_running=3)
    prompts = {"first": tiny.piece(0, 4), "second": tiny.piece(9, 6), "third": tiny.piece(20, 2)}
    for id in (*prompts, "waiting"):
        engine.add(prompts.get(id, [1]), NO_END, id=id)
    ended = drain(engine)
    assert outcome(aborted[0]) == (tiny.expected(prompts["second"], NO_END)[0][:1], "abort")
    assert outcome(ended.pop("second")) == tiny.expected(later, NO_END)
    assert {id: outcome(done) for id, done in ended.items()} == {
        id: tiny.expected(prompts[id], NO_END) for id in ("first", "third")
    }
    assert engine.states[0].pool.num_free == 39


def test_a_row_that_is_late_is_dropped():
    """While the token of 1 is on its way, 1 starts again, or another 1 does."""
    prompt, other = tiny.piece(0, 4), tiny.piece(9, 6)

    def restart(completion, token):
        if completion.id == 0 and len(completion.tokens) == 2:
            schedule.preempt(engine.states[0], 1)
        if completion.id == 0 and len(completion.tokens) == 4:
            assert engine.abort(1).tokens == tiny.expected(prompt, NO_END)[0][:2]
            engine.add(other, NO_END, id=1)
            engine.step()

    engine = engine_of(on_token=restart)
    for id in range(2):
        engine.add(prompt, NO_END, id=id)
    done = drain(engine)
    assert outcome(done[0]) == tiny.expected(prompt, NO_END)
    assert outcome(done[1]) == tiny.expected(other, NO_END)


@pytest.mark.parametrize("layout", ["one rank", "dp2"])
@pytest.mark.parametrize("when", [1, 2, 5, 9])
def test_a_callback_that_raises_loses_no_token_and_no_completion(when, layout):
    seen = []

    def fail_once(completion, token):
        seen.append((completion.id, token))
        if len(seen) == when:
            raise RuntimeError("no more paper")

    engine = engine_of(tiny.model(LAYOUTS[layout]), on_token=fail_once)
    prompts = {i: tiny.piece(11 * i, 4 + i) for i in range(3)}
    samplings = {i: dataclasses.replace(NO_END, max_tokens=3 + 2 * (i % 2)) for i in prompts}
    for i, prompt in prompts.items():
        engine.add(prompt, samplings[i])
    ended = {}
    with pytest.raises(RuntimeError, match="no more paper"):
        for _ in range(9):
            ended |= {done.id: done for done in engine.step()}
    ended |= drain(engine)
    wanted = {i: tiny.expected(prompt, samplings[i]) for i, prompt in prompts.items()}
    assert {id: outcome(done) for id, done in ended.items()} == wanted
    for i in prompts:
        assert [token for id, token in seen if id == i] == wanted[i][0]


# Failing steps


@pytest.mark.parametrize("before", [True, False])
def test_a_step_that_raises_can_be_repeated(before):
    """The third run of the model fails, before or after it has written to the cache."""
    calls = []

    def failing(params, cache, batch):
        calls.append(1)
        if len(calls) == 3 and before:
            raise MemoryError("too large")
        out = prefill(params, cache, batch)
        if len(calls) == 3:
            raise MemoryError("too large")
        return out

    fns = tiny.alone().fns
    prefill = fns.prefill
    model = tiny.model(fns=dataclasses.replace(fns, prefill=failing, decode=failing))
    engine = engine_of(model, token_budget=8)
    prompts = [tiny.piece(11 * i, 5 + i) for i in range(3)]
    ids = [engine.add(prompt, NO_END) for prompt in prompts]
    engine.step()
    engine.step()
    pool = engine.states[0].pool
    with pytest.raises(MemoryError, match="too large"):
        engine.step()
    assert set(engine.live) == set(ids)
    ended = drain(engine)
    assert {i: outcome(ended[i]) for i in ids} == {
        i: tiny.expected(prompt, NO_END) for i, prompt in zip(ids, prompts, strict=True)
    }
    assert pool.num_free == pool.num_usable


def test_generate_leaves_nothing_behind_when_a_step_raises():
    def refuse(completion, token):
        raise KeyboardInterrupt

    engine = engine_of(on_token=refuse)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([tiny.piece(0, 3), tiny.piece(9, 5)], SamplingParams(max_tokens=1))
    engine.on_token = None
    assert not engine.live
    assert engine.states[0].pool.num_free == 39
    assert engine.step() == []


def test_generate_keeps_the_completions_of_others():
    engine = engine_of()
    mine, others = tiny.piece(0, 3), tiny.piece(9, 5)
    id = engine.add(others, NO_END)
    (done,) = engine.generate([mine], dataclasses.replace(NO_END, max_tokens=9))
    assert outcome(done) == tiny.expected(mine, dataclasses.replace(NO_END, max_tokens=9))
    (other,) = engine.step()
    assert (other.id, *outcome(other)) == (id, *tiny.expected(others, NO_END))
    assert engine.generate([]) == []


# Draws


def test_a_seed_fixes_the_tokens_whatever_runs_beside():
    sampling = SamplingParams(temperature=1.2, seed=42, max_tokens=8, ignore_eos=True)
    prompt = tiny.piece(3, 9)
    wanted = tiny.expected(prompt, sampling)
    unseeded = SamplingParams(temperature=1.2, max_tokens=8, ignore_eos=True)
    for budget in (1, 4, 30):
        engine = engine_of(num_pages=12, token_budget=budget)
        for start in range(3):
            engine.add(tiny.piece(start, 4), unseeded)
        id = engine.add(prompt, sampling)
        engine.step()
        engine.abort(1)
        assert outcome(drain(engine)[id]) == wanted


def test_requests_without_a_seed_draw_apart():
    sampling = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)
    one, two = engine_of().generate([[5, 6]] * 2, sampling)
    (three,) = engine_of().generate([[5, 6]], sampling)
    assert len({tuple(done.tokens) for done in (one, two, three)}) == 3


# Sizes, phases, groups, memory


def test_sized_for_holds_all_prompts_but_no_more_than_they_can_use():
    model = tiny.alone()
    prompts = [tiny.piece(i, 1 + i % 40) for i in range(70)]
    sampling = dataclasses.replace(NO_END, max_tokens=10)
    engine = Engine.sized_for(model, prompts, sampling)
    assert engine.max_running == 64
    totals = sorted(min(len(prompt) + 10, MAX_LENGTH) for prompt in prompts)[-64:]
    assert engine.states[0].pool.num_usable == sum(pages_needed(t, 16) for t in totals)
    far = dataclasses.replace(NO_END, max_tokens=10**9)
    assert Engine.sized_for(model, [[1], [2]], far).states[0].pool.num_usable == 2 * 3
    done = Engine.sized_for(model, prompts[:7], NO_END).generate(prompts[:7], NO_END)
    assert [outcome(c) for c in done] == [tiny.expected(p, NO_END) for p in prompts[:7]]
    dealt = Engine.sized_for(tiny.model(LAYOUTS["dp2"]), prompts[:5], NO_END)
    assert (dealt.max_running, len(dealt.states)) == (3, 2)
    assert Engine.sized_for(model, []).generate([]) == []


def test_a_step_of_decode_rows_alone_takes_the_decode_rules():
    ran = []

    def noting(name):
        original = getattr(tiny.alone().fns, name)

        def run(params, cache, batch):
            ran.append(name)
            return original(params, cache, batch)

        return run

    fns = dataclasses.replace(tiny.alone().fns, prefill=noting("prefill"), decode=noting("decode"))
    engine = engine_of(tiny.model(fns=fns), token_budget=4)
    engine.add(tiny.piece(0, 6), NO_END)
    for _ in range(4):
        engine.step()
    engine.add(tiny.piece(9, 5), NO_END)
    for _ in range(3):
        engine.step()
    chunks, decodes, mixed = ["prefill"] * 2, ["decode"] * 2, ["prefill"] * 2
    assert ran == [*chunks, *decodes, *mixed, "decode"]


def test_groups_share_the_requests_and_an_idle_one_runs_along():
    engine = engine_of(tiny.model(LAYOUTS["dp2"]))
    ids = [engine.add(tiny.piece(9 * i, 3), NO_END) for i in range(3)]
    assert [len(state.waiting) for state in engine.states] == [2, 1]
    engine.abort(ids[0])
    engine.abort(ids[2])
    ended = drain(engine)  # the first group has nothing to do
    assert outcome(ended[ids[1]]) == tiny.expected(tiny.piece(9, 3), NO_END)


def test_steps_leave_no_tensors_behind():
    engine = engine_of(num_pages=20)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for i in range(4):
        engine.add(tiny.piece(i, 4), dataclasses.replace(NO_END, max_tokens=14))
    engine.step()
    engine.step()
    before = tensors()
    for _ in range(8):
        engine.step()
    assert tensors() == before
    drain(engine)
    assert tensors() == before
