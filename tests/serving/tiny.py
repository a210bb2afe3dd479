"""A tiny model to serve, and what a request must become: `expected`, from whole sequences.

The truth knows no cache, page, chunk, batch or scheduler: each token comes from the logits of the
whole sequence before it, and the end of a request from its definition. Everything is float64, so
that no order of sums decides between two tokens.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models

from funcinfer import Engine, Model, SamplingParams, build
from funcinfer.kvcache.batch import Rows
from funcinfer.layers.rope import Rope
from funcinfer.models import gqa
from funcinfer.models.decoder import Decoder, Draft
from funcinfer.serving import schedule
from funcinfer.serving.edits import History, RowEdits, has_penalties, stack_edits
from funcinfer.serving.processors import edit_logits
from funcinfer.serving.sampling import choose, stack_params, uniform
from funcinfer.serving.text import Text
from funcinfer.sharding import Ranks, pad
from funcinfer.spec import pad_leaf
from funcinfer.tree import map_with_path, tree_leaves
from tests.equivalence.harness import ONE_RANK, Layout, draw
from tests.equivalence.layouts import LAYOUTS
from tests.launch import process_ranks

VOCAB, MAX_LENGTH, PAGE_SIZE = 101, 44, 4
STOP_IDS = (41, 95)
CONFIG = gqa.Config(
    vocab_size=VOCAB,
    embed_dim=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=28,
    norm_eps=1e-6,
    rope=Rope(100.0, 6),
    max_length=MAX_LENGTH,
    qkv_bias=True,
    qk_norm="head",
)
DECODER = gqa.decoder(CONFIG)
# What prompts are pieces of. A piece that is asked for twice is computed once.
TEXT = torch.randint(VOCAB, (64,), generator=torch.Generator().manual_seed(3)).tolist()


@cache
def params() -> Any:
    """Random parameters, with sharp attention, so that the next token hangs on the whole past."""
    drawn = draw(DECODER, seed=1, dtype=torch.float64)
    for layer in drawn["layers"]:
        layer["attn"]["q_norm"] *= 6
        layer["attn"]["wv"] *= 3
    return drawn


def model(
    layout: Layout = ONE_RANK,
    ranks: Ranks | None = None,
    *,
    decoder: Decoder = DECODER,
    all_params: Any = None,
    **fields: Any,
) -> Model:
    """The tiny model on a mesh; `fields` replace those of Model."""
    fns = build(decoder, layout.prefill, layout.decode, interleave=layout.interleave)
    specs = pad(fns.specs, layout.mesh, layout.prefill)
    padded = map_with_path(lambda _, x, s: pad_leaf(x, s), all_params or params(), specs)
    if ranks is not None and len(ranks.coords) < layout.mesh.num_ranks:
        (padded,) = ranks.split(padded, layout.prefill.specs(specs))
    made = dict(
        cfg=CONFIG,
        fns=fns,
        params=padded,
        mesh=layout.mesh,
        rules=layout.prefill,
        ranks=ranks,
        stop_ids=STOP_IDS,
        max_length=MAX_LENGTH,
    )
    return Model(**made | fields)


@cache
def with_drafts(layout: Layout = ONE_RANK) -> Model:
    """The same model with a draft module."""
    return model(layout, decoder=DRAFTED, all_params={**params(), "mtp": [draft_params()]})


DRAFTED = dataclasses.replace(DECODER, drafts=(Draft(DECODER.layers[1]),))


@cache
def draft_params() -> Any:
    """A draft module that is right now and then: its layer is quiet beside `eh_proj`, which is
    fitted to what the model says after pieces of TEXT.
    """
    D, main = CONFIG.embed_dim, params()
    ones = torch.ones(D, dtype=torch.float64)
    prompts = [piece(7 * (i % 4), 1 + i % 17) for i in range(68)]
    outputs = alone().generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True))
    whole = [(*p, *out) for p, out in zip(prompts, outputs, strict=True)]
    longest = max(map(len, whole))
    tokens = torch.tensor([[*w, *[0] * (longest - len(w))] for w in whole])
    batch = alone().place(
        [[Rows(w, 0, [1 + i], longest) for i, w in enumerate(tokens.tolist())]],
        page_size=longest,
        decode=False,
    )
    with torch.no_grad():
        (out,), _ = alone().step([alone().local_cache(1 + len(whole), longest)], batch)
    hidden = normed(out.hidden[: tokens.numel()]).view(*tokens.shape, D)
    said = out.logits.argmax(-1).view(tokens.shape)
    seen = torch.cat([normed(main["embed"][tokens[:, 1:]]), hidden[:, :-1]], -1)
    good = torch.tensor(
        [
            [len(p) <= i + 2 < len(w) for i in range(longest - 1)]
            for p, w in zip(prompts, whole, strict=True)
        ]
    )
    seen, wanted = seen[good], said[:, 1:][good]
    w = torch.zeros(D, 2 * D, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    for _ in range(60):
        logits = normed(seen @ w.T) * main["norm"] @ main["head"].T
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    quiet = map_with_path(
        lambda path, x: 0.1 * x if path in ("attn.wo", "mlp.w_down") else x, main["layers"][1]
    )
    return dict(
        enorm=ones,
        hnorm=ones,
        norm=main["norm"],
        eh_proj=w.detach().view(D, 2, D).contiguous(),
        layer=quiet,
    )


def normed(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.norm_eps)


@cache
def alone() -> Model:
    """The model that `expected` asks for logits."""
    return model()


@cache
def cold_rows(tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """What the caches hold of a sequence, as [T, ...] of each leaf: of one forward, in one page."""
    size = 4 * -(-len(tokens) // 4)
    caches = [alone().local_cache(2, size)]
    batch = alone().place([[Rows(tokens, 0, [1])]], page_size=size, decode=False)
    with torch.no_grad():
        _, (cold,) = alone().step(caches, batch)
    return [leaf[1, : len(tokens)] for leaf in tree_leaves(cold)]


def piece(start: int, length: int) -> list[int]:
    """A prompt: `length` tokens of TEXT, round and round."""
    return [TEXT[i % len(TEXT)] for i in range(start, start + length)]


@cache
def logits_after(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] of a whole sequence."""
    with torch.no_grad():
        return alone().logits(torch.tensor([tokens]))[0]


@cache
def stream(
    prompt: tuple[int, ...], sampling: SamplingParams, count: int, stops: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The first tokens that a request would get if nothing ended it; `sampling` has a seed. `stops`
    are what would end it, which min_tokens forbids.
    """
    if count == 0:
        return ()
    tokens = stream(prompt, sampling, count - 1, stops)
    history = History(prompt, tokens) if has_penalties(sampling) else None
    row = RowEdits(sampling, count - 1, history, stop_token_ids=stops)
    logits_1V = edit_logits(logits_after((*prompt, *tokens))[-1:], stack_edits([row]))
    uniforms_1 = torch.tensor([uniform(sampling.seed or 0, count - 1)], dtype=torch.float64)
    return (*tokens, int(choose(logits_1V, *stack_params([sampling]), uniforms_1)))


def law_of(sampling: SamplingParams) -> SamplingParams:
    """The part of the parameters that tokens are drawn by."""
    rest = dict(n=1, stop=(), include_stop=False, logprobs=None, prompt_logprobs=None)
    ends = dict(stop_token_ids=(), ignore_eos=False)
    return dataclasses.replace(sampling, max_tokens=MAX_LENGTH, **rest, **ends)


def ending(prompt: Sequence[int], sampling: SamplingParams) -> Iterator[tuple[int, ...]]:
    """What a request has after each of its tokens, up to the most that it may have."""
    stops = stops_of(sampling) if sampling.min_tokens else ()
    most = min(sampling.max_tokens, MAX_LENGTH - len(prompt))
    for count in range(1, most + 1):
        yield stream(tuple(prompt), law_of(sampling), count, stops)


def stops_of(sampling: SamplingParams) -> tuple[int, ...]:
    """All tokens that end a request."""
    return tuple(sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else STOP_IDS)}))


def expected(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """The tokens of a request and why it ends."""
    for tokens in ending(prompt, sampling):
        by_text = any(stop in spelled(tokens) for stop in sampling.stop)
        if tokens[-1] in stops_of(sampling) or by_text:
            return list(tokens), "stop"
    return list(tokens), "length"


# Texts: token i is the i-th of the words over three letters, the short ones first.
WORDS = ["".join(w) for n in range(1, 5) for w in itertools.product("abc", repeat=n)][:VOCAB]


def spelled(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(WORDS[token] for token in tokens)


def text() -> Text:
    """A tokenizer of WORDS."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return Text(tokenizer)


def expected_text(prompt: Sequence[int], sampling: SamplingParams) -> str:
    """The text of a request that has ended: of the stop texts, the one that ends first cuts it. The
    text of a stop token is none of its text, unless it is wanted.
    """
    tokens, reason = expected(prompt, sampling)
    if tokens[-1] in stops_of(sampling) and reason == "stop" and not sampling.include_stop:
        return spelled(tokens[:-1])
    whole = spelled(tokens)
    for end in range(1, len(whole) + 1):
        found = [stop for stop in sampling.stop if whole[:end].endswith(stop)]
        if found:
            longest = max(map(len, found))
            return whole[:end] if sampling.include_stop else whole[: end - longest]
    return whole


def expected_logprobs(
    prompt: Sequence[int], tokens: Sequence[int], num_top: int
) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Of each token behind the prompt, by their definition."""
    whole, found = (*prompt, *tokens), []
    for end in range(len(prompt), len(whole)):
        row_V = logits_after(whole[:end])[-1]
        row_V = (row_V - row_V.logsumexp(-1)).tolist()
        best = sorted(range(VOCAB), key=lambda i: (-row_V[i], i))[:num_top]
        found.append((whole[end], row_V[whole[end]], [(i, row_V[i]) for i in best]))
    return found


@contextmanager
def recorded_plans() -> Iterator[list[schedule.Plan]]:
    """The plans of the steps that run inside."""
    plans = []
    original = schedule.schedule

    def recording(*args, **kwargs):
        plans.append(original(*args, **kwargs))
        return plans[-1]

    with mock.patch.object(schedule, "schedule", recording):
        yield plans


def served_by_processes(
    name: str, prompts: list[list[int]], sampling: SamplingParams, asynchronous: bool
) -> tuple[list, list]:
    """In each of several processes: what an engine on a named layout makes of these prompts, where
    the process leads; and the tokens that each step gave on this process.
    """
    layout, seen = LAYOUTS[name], []
    engine = Engine(
        model(layout, process_ranks(layout.mesh)),
        num_pages=12,
        page_size=PAGE_SIZE,
        token_budget=9,
        poison=True,
        asynchronous=asynchronous,
    )
    launch = engine.executor.launch

    def recording(step):
        result = launch(step)
        if result is not None:
            seen.append(result.tokens_BL.tolist())
        return result

    with mock.patch.object(engine.executor, "launch", recording):
        if not engine.leads:
            engine.follow()
            return [], seen
        done = engine.generate(prompts, sampling)
        engine.close()
    return [(completion.tokens, completion.finish_reason) for completion in done], seen
