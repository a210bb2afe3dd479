"""What a caller sees of an engine while it runs: streams, callbacks, aborts, metrics, memory."""

import dataclasses
import gc
import itertools

import pytest
from tokenizers import Tokenizer, decoders, models

from funcinfer import SamplingParams
from funcinfer.serving.drafters import ScriptedDrafter
from funcinfer.serving.sampling import child_seed
from funcinfer.serving.text import Text
from tests.serving import tiny
from tests.serving.test_engine import NO_END, drain, engine_of, outcome
from tests.serving.test_engine_cases import FREE, MODES, PROMPT, engine_in, knows_the_model

LONG = dataclasses.replace(NO_END, max_tokens=9)
PROMPTS = [tiny.piece(11 * i, 4 + i) for i in range(3)]
WANTED = [tiny.expected(prompt, LONG) for prompt in PROMPTS]


# Stop texts


class Parrot:
    """A model that says the pieces of one text, which the number in its prompt chooses."""

    def __init__(self, script: str) -> None:
        ends = range(1, len(script))
        cuts = itertools.chain(*(itertools.combinations(ends, n) for n in range(4)))
        self.pieces = [
            [script[i:j] for i, j in itertools.pairwise((0, *cut, len(script)))] for cut in cuts
        ]
        words = sorted({piece for pieces in self.pieces for piece in pieces})
        self.ids = [[words.index(piece) for piece in pieces] for pieces in self.pieces]
        vocab = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=words[0]))
        tokenizer.decoder = decoders.Fuse()
        self.text = Text(tokenizer)
        self.prefill = tiny.alone().fns.prefill
        fns = dataclasses.replace(tiny.alone().fns, prefill=self.say, decode=self.say)
        self.model = tiny.model(fns=fns, stop_ids=())
        self.chosen: dict[int, int] = {}  # first page of a request -> its number

    def say(self, params, cache, batch):
        out, cache = self.prefill(params, cache, batch)
        first = batch.page_table[batch.rows.long(), 0].tolist()
        positions = batch.positions.tolist()
        for page, position, token in zip(first, positions, batch.tokens.tolist(), strict=True):
            if position == 0:
                self.chosen[page] = token
        for n, place in enumerate(batch.out.tolist()):
            ids = self.ids[self.chosen.get(first[place], 0)]
            out.logits[n, ids[min(positions[place], len(ids) - 1)]] += 1e3
        return out, cache

    def drafts(self, id, history, count):
        return self.ids[history[0]][len(history) - 1 :][:count]


@pytest.mark.parametrize("mode", ["plain", "drafts", "ahead"])
@pytest.mark.parametrize(
    ("script", "stop", "kept", "included"),
    [
        ("xxab cyy", ("ab c",), "xx", "xxab c"),
        ("xxab", ("ab c",), "xxab", "xxab"),
        ("xxab cyy", ("cy", "b c"), "xxa", "xxab c"),
    ],
)
def test_a_stop_text_over_tokens_is_never_shown(script, stop, kept, included, mode):
    """For every split into up to 4 tokens, streamed or not."""
    parrot, shown = Parrot(script), {}
    options = dict(speculate=3, drafter=ScriptedDrafter(parrot.drafts)) if mode == "drafts" else {}
    engine = engine_of(
        parrot.model,
        text=parrot.text,
        asynchronous=mode == "ahead",
        prefix_cache=False,
        num_pages=300,
        max_running=200,
        on_token=lambda c, t: shown.setdefault(c.id, []).append(c.text),
        **options,
    )
    wanted, streams = {}, []
    for number, pieces in enumerate(parrot.pieces):
        ends = list(itertools.accumulate(map(len, pieces)))
        count = next(n for n, end in enumerate(ends, 1) if end >= len(included))
        reason = "length" if kept == included else "stop"
        for include, text in ((False, kept), (True, included)):
            sampling = SamplingParams(max_tokens=len(pieces), stop=stop, include_stop=include)
            id = (number, include)
            wanted[id] = parrot.ids[number][:count], reason, text
            streams.append(engine.stream([number], sampling, id=id))
    updates = [u for round_ in itertools.zip_longest(*streams) for u in round_ if u is not None]
    done = {u.completion.id: u.completion for u in updates}
    assert {id: (*outcome(c), c.text) for id, c in done.items()} == wanted
    for id, (tokens, _, text) in wanted.items():
        assert "".join(u.text for u in updates if u.completion.id == id) == text
        assert [t for u in updates if u.completion.id == id for t in u.tokens] == tokens
        assert all(text.startswith(part) for part in shown[id])
    assert engine.metrics.tokens == sum(len(tokens) for tokens, *_ in wanted.values())
    assert (engine.metrics.accepted > 0) == (mode == "drafts")
    assert engine.states[0].pool.num_free == 299


# Streams


@pytest.mark.parametrize("mode", MODES)
def test_updates_of_interleaved_streams_make_up_their_completions(mode):
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, seed=6, n=3)
    engine = engine_in(mode, text=tiny.text())
    streams = [engine.stream(PROMPTS[0], sampling), engine.stream(PROMPTS[1], LONG)]
    other = engine.add(PROMPTS[2], LONG)
    updates = [[], []]
    for pair in itertools.zip_longest(*streams):
        for seen, update in zip(updates, pair, strict=True):
            if update is not None:
                assert update.tokens or update.text or update.completion.finish_reason
                seen.append(update)
    firsts = [dataclasses.replace(sampling, n=1, seed=child_seed(6, i)) for i in range(3)]
    wanted = [[(PROMPTS[0], s) for s in firsts], [(PROMPTS[1], LONG)]]
    for seen, requests in zip(updates, wanted, strict=True):
        done = {id(u.completion): u.completion for u in seen}
        family = sorted(done.values(), key=lambda c: c.id[1] if isinstance(c.id, tuple) else 0)
        assert [outcome(c) for c in family] == [tiny.expected(*r) for r in requests]
        for c, request in zip(family, requests, strict=True):
            mine = [u for u in seen if u.completion is c]
            assert [t for u in mine for t in u.tokens] == c.tokens
            assert "".join(u.text for u in mine) == c.text == tiny.expected_text(*request)
    if engine.live:
        assert outcome(drain(engine)[other]) == WANTED[2]
    else:  # it ended beside the streams
        (done,) = engine.step()
        assert (done.id, *outcome(done)) == (other, *WANTED[2])


@pytest.mark.parametrize("mode", ["plain", "drafts ahead"])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_stream_that_is_closed_aborts_its_requests(mode, taken):
    engine = engine_in(mode)
    other = engine.add(PROMPTS[1], LONG)
    updates = engine.stream(PROMPTS[0], dataclasses.replace(LONG, n=2))
    assert len(engine.live) == 3
    for _ in range(taken):
        next(updates)
    updates.close()
    assert list(engine.live) == [other]
    assert list(updates) == []
    assert {id: outcome(done) for id, done in drain(engine).items()} == {other: WANTED[1]}
    assert engine.states[0].pool.num_free == 39


def test_a_stream_tells_of_an_abort():
    engine = engine_of()
    updates = engine.stream(PROMPTS[0], LONG, id="a")
    assert next(updates).tokens == WANTED[0][0][:1]
    engine.abort("a")
    (last,) = updates
    assert (last.tokens, last.completion.finish_reason) == ([], "abort")


def test_the_smallest_priority_runs_first():
    engine, ended = engine_of(max_running=1, asynchronous=True), []
    for id, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 2), ("e", 1)):
        engine.add(PROMPT, LONG, id=id, priority=priority)
    while engine.live:
        ended += [done.id for done in engine.step()]
    assert ended == ["c", "a", "e", "b", "d"]


# Callbacks, aborts and failures, with steps ahead and drafts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_an_abort_between_steps_disturbs_nobody(mode, steps):
    engine = engine_in(mode)
    ids = [engine.add(prompt, LONG) for prompt in PROMPTS]
    ended = {}
    for _ in range(steps):
        ended |= {done.id: done for done in engine.step()}
    if ids[1] in engine.live:
        done = engine.abort(ids[1])
        assert done.finish_reason == "abort"
        assert done.tokens == WANTED[1][0][: len(done.tokens)]
    ids.append(engine.add(PROMPTS[1], LONG))
    ended |= drain(engine)
    for id, wanted in zip(ids, (*WANTED, WANTED[1]), strict=True):
        if id in ended:
            assert outcome(ended[id]) == wanted
    assert {ids[0], ids[2], ids[3]} <= set(ended)
    assert engine.states[0].pool.num_free == 39


@pytest.mark.parametrize("mode", ["scripted", *MODES])
@pytest.mark.parametrize("when", [1, 5, 14])
def test_a_callback_that_raises_loses_nothing_of_several_tokens(mode, when):
    seen = []

    def fail_once(completion, token):
        seen.append((completion.id, token))
        if len(seen) == when:
            raise RuntimeError("no more paper")

    if mode == "scripted":
        drafter = ScriptedDrafter(knows_the_model)
        engine = engine_of(speculate=3, drafter=drafter, on_token=fail_once)
    else:
        engine = engine_in(mode, on_token=fail_once)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, LONG, id=i)
    ended, most = {}, 0
    with pytest.raises(RuntimeError, match="no more paper"):
        for _ in range(20):
            ended |= {done.id: done for done in engine.step()}
    while engine.live:
        before = len(seen)
        ended |= {done.id: done for done in engine.step()}
        most = max(most, len(seen) - before)
    ended |= {done.id: done for done in engine.step()}
    assert [outcome(ended[i]) for i in range(3)] == WANTED
    for i in range(3):
        assert [token for id, token in seen if id == i] == ended[i].tokens
    assert mode != "scripted" or when > 6 or most > 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [2, 5, 6])
@pytest.mark.parametrize("before", [True, False])
def test_a_step_that_raises_is_computed_again(mode, call, before):
    """One run of the model or of its draft module fails, before or after it has written."""
    calls = []

    def failing(run):
        def once(*args, **kwargs):
            calls.append(1)
            if len(calls) == call and before:
                raise MemoryError("too large")
            out = run(*args, **kwargs)
            if len(calls) == call:
                raise MemoryError("too large")
            return out

        return once

    model = tiny.with_drafts()
    names = ("prefill", "decode", "prefill_draft", "decode_draft")
    fns = {name: failing(getattr(model.fns, name)) for name in names}
    model = dataclasses.replace(model, fns=dataclasses.replace(model.fns, **fns))
    engine = engine_of(model, token_budget=9, **({"speculate": 0} | MODES[mode]))
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, LONG, id=i)
    ended = {}
    with pytest.raises(MemoryError, match="too large"):
        for _ in range(20):
            ended |= {done.id: done for done in engine.step()}
    assert {*engine.live, *ended} == {0, 1, 2}
    ended |= drain(engine)
    assert [outcome(ended[i]) for i in range(3)] == WANTED
    assert engine.states[0].pool.num_free == 39


# Numbers


def test_metrics_are_those_of_a_count_by_hand():
    """The drafts are right at first, then wrong; the prompts have their first page in common."""
    drafts = {7: [FREE[1], FREE[2]], 10: [(FREE[4] + 1) % tiny.VOCAB]}
    script = ScriptedDrafter(lambda id, h, count: drafts.get(len(h), []) if id == "a" else [])
    engine = engine_of(num_pages=10, token_budget=8, speculate=2, drafter=script)
    metrics = engine.metrics
    engine.add(PROMPT, dataclasses.replace(NO_END, max_tokens=6), id="a")
    engine.add([*PROMPT[:4], 3], dataclasses.replace(NO_END, max_tokens=2), id="b", priority=1)
    names = [
        "running",
        "pages_free",
        "pages_idle",
        "tokens",
        "cached_positions",
        "prompt_positions",
    ]
    names += ["verified", "drafted", "accepted"]

    def look() -> list[int]:
        engine.step()
        return [getattr(metrics, name) for name in names]

    assert (metrics.pages, metrics.hit_rate, metrics.accepted_length) == (9, 0.0, 0.0)
    assert look() == [2, 6, 0, 1, 0, 8, 0, 0, 0]  # 6 tokens of a in 2 pages, 2 of b in another
    assert look() == [2, 4, 0, 5, 0, 11, 1, 2, 2]  # 3 tokens of each, in a third and a second page
    assert look() == [1, 6, 0, 7, 0, 11, 2, 3, 2]  # b ends
    assert look() == [0, 9, 2, 8, 0, 11, 2, 3, 2]  # a ends, and leaves two full pages
    for id in "cd":
        engine.add(PROMPT, dataclasses.replace(NO_END, max_tokens=1), id=id)
    assert look() == [0, 9, 2, 10, 8, 15, 2, 3, 2]  # two tokens of each behind a page of a
    assert (metrics.steps, metrics.waiting, metrics.preemptions) == (5, 0, 0)
    assert (metrics.hit_rate, metrics.accepted_length) == (8 / 23, 2.0)


def test_preemptions_are_counted():
    engine = engine_of(num_pages=6, prefix_cache=False)
    with tiny.recorded_plans() as plans:
        done = engine.generate(PROMPTS, LONG)
    assert [outcome(c) for c in done] == WANTED
    assert engine.metrics.preemptions == sum(len(plan.preempted) for plan in plans) > 0


@pytest.mark.parametrize("mode", ["plain", "ahead"])
def test_100_steps_leave_nothing_behind_but_tokens(mode):
    """Lists and what is in them grow, but no object is kept for a step or a token."""
    model = tiny.model(max_length=None)
    engine = engine_of(model, num_pages=40, poison=False, prefix_cache=False, **MODES[mode])
    engine.add(PROMPT, dataclasses.replace(NO_END, max_tokens=140))

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(20):
        engine.step()
    before = objects()
    for _ in range(100):
        engine.step()
    assert len(engine.live) == 1
    assert objects() - before < 15
