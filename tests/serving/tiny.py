"""A tiny model to serve, and what a request must become: `expected`, from whole sequences.

The truth knows no cache, page, chunk, batch or scheduler: each token comes from the logits of the
whole sequence before it, and the end of a request from its definition. Everything is float64, so
that no order of sums decides between two tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch

from funcinfer import Engine, Model, SamplingParams, build
from funcinfer.layers.rope import Rope
from funcinfer.models import gqa
from funcinfer.serving import schedule
from funcinfer.serving.sampling import choose, stack_params, uniform
from funcinfer.sharding import Ranks, pad
from funcinfer.spec import pad_leaf
from funcinfer.tree import map_with_path
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


def model(layout: Layout = ONE_RANK, ranks: Ranks | None = None, **fields: Any) -> Model:
    """The tiny model on a mesh; `fields` replace those of Model."""
    fns = build(DECODER, layout.prefill, layout.decode, interleave=layout.interleave)
    specs = pad(fns.specs, layout.mesh, layout.prefill)
    padded = map_with_path(lambda _, x, s: pad_leaf(x, s), params(), specs)
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
def alone() -> Model:
    """The model that `expected` asks for logits."""
    return model()


def piece(start: int, length: int) -> list[int]:
    """A prompt: `length` tokens of TEXT, round and round."""
    return [TEXT[i % len(TEXT)] for i in range(start, start + length)]


@cache
def stream(prompt: tuple[int, ...], sampling: SamplingParams, count: int) -> tuple[int, ...]:
    """The first tokens that a request would get if nothing ended it; `sampling` has a seed."""
    if count == 0:
        return ()
    tokens = stream(prompt, sampling, count - 1)
    with torch.no_grad():
        logits_1V = alone().logits(torch.tensor([[*prompt, *tokens]]))[:, -1]
    uniforms_1 = torch.tensor([uniform(sampling.seed or 0, count - 1)], dtype=torch.float64)
    return (*tokens, int(choose(logits_1V, *stack_params([sampling]), uniforms_1)))


def law_of(sampling: SamplingParams) -> SamplingParams:
    """The part of the parameters that tokens are drawn by."""
    return dataclasses.replace(sampling, max_tokens=1, stop_token_ids=(), ignore_eos=False)


def expected(prompt: Sequence[int], sampling: SamplingParams) -> tuple[list[int], str]:
    """The tokens of a request and why it ends."""
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else STOP_IDS)}
    most = min(sampling.max_tokens, MAX_LENGTH - len(prompt))
    for count in range(1, most + 1):
        tokens = stream(tuple(prompt), law_of(sampling), count)
        if tokens[-1] in stops:
            return list(tokens), "stop"
    return list(tokens), "length"


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


def served_by_processes(name: str, prompts: list[list[int]], sampling: SamplingParams) -> list:
    """In each of several processes: what an engine on a named layout makes of these prompts."""
    layout = LAYOUTS[name]
    engine = Engine(
        model(layout, process_ranks(layout.mesh)),
        num_pages=12,
        page_size=PAGE_SIZE,
        token_budget=9,
        poison=True,
    )
    done = engine.generate(prompts, sampling)
    return [(completion.tokens, completion.finish_reason) for completion in done]
