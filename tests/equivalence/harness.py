"""Runs a decoder on any mesh, under any rules, through a trace of steps; gives logits by token.

The trace mixes whole prompts, chunks, decode rows and verify rows of several requests that come and
go. Requests are dealt over the requests groups, their pages are in no order, and every page starts
as NaN. `run` gives {(request, position): logits}, which do not depend on the mesh, so two runs are
compared entry by entry. Any decoder will do: a whole family, or one layer with one sublayer.

How the ranks run is the caller's choice: `ranks` is ThreadRanks, or the ProcessRanks of a process.
"""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, BatchShape, Rows, batch_shape, batch_specs, make_batch
from funcinfer.kvcache.layout import pages_needed
from funcinfer.models.decoder import Decoder, cache_specs, decoder_specs, output_specs
from funcinfer.serving.steps import build
from funcinfer.sharding import Axis, Mesh, Ranks, Rules, ThreadRanks, drop, pad, token_multiple
from funcinfer.sharding.mesh import Coord
from funcinfer.spec import ParamSpec, init, is_spec, pad_leaf, with_dtype
from funcinfer.tree import map_with_path, tree_leaves, tree_map

Logits = dict[tuple[int, int], torch.Tensor]
Counts = Mapping[int, int]

PAGE_SIZE = 8
TOLERANCE = 5e-5
NAN = float("nan")


@dataclass(frozen=True)
class Layout:
    """A mesh with the rules of both phases; `decode` is that of prefill unless it is given."""

    mesh: Mesh
    prefill: Rules
    decode: Rules | None = None
    interleave: int = 1

    def rules(self, decode: bool) -> Rules:
        return self.decode if decode and self.decode is not None else self.prefill

    def replace(self, **rules: Axis) -> "Layout":
        """The layout with some rules replaced, in both phases."""
        decode = None if self.decode is None else self.decode.replace(**rules)
        return dataclasses.replace(self, prefill=self.prefill.replace(**rules), decode=decode)


ONE_RANK = Layout(Mesh(), Rules())


@dataclass(frozen=True)
class Trace:
    """The tokens of each request, and what each step runs: (decode phase?, tokens a request)."""

    lengths: Mapping[int, int]
    steps: Sequence[tuple[bool, Counts]]

    def tokens(self, vocab_size: int) -> dict[int, list[int]]:
        """The same tokens whenever the same request is asked for."""
        return {
            i: random.Random(i).choices(range(vocab_size), k=n) for i, n in self.lengths.items()
        }


TRACE = Trace(
    lengths={0: 20, 1: 10, 2: 13, 3: 7},
    steps=(
        (False, {0: 7, 1: 5, 2: 4}),  # two chunks and a whole prompt; request 3 is not there yet
        (False, {0: 6, 1: 1, 2: 5, 3: 1}),  # chunks, a decode row, a prompt of one token
        (True, {0: 1, 1: 1, 2: 1, 3: 1}),
        (True, {0: 3, 1: 3, 2: 3, 3: 3}),  # verify rows
        (True, {0: 3, 3: 2}),  # verify rows of two lengths; some groups have nothing to do
    ),
)


def whole_prompts(lengths: Mapping[int, int]) -> Trace:
    """Each request's prompt in a step of its own, so that the step has exactly so many tokens."""
    return Trace(lengths, tuple((False, {i: n}) for i, n in lengths.items()))


def draw(decoder: Decoder, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Random parameters: matrices with deviation fan_in ** -0.5, vectors around what they are."""

    def lively(s: ParamSpec) -> ParamSpec:
        def fill(
            shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
        ) -> torch.Tensor:
            noise = torch.randn(shape, generator=generator, dtype=dtype)
            if len(shape) > 1:
                return noise * shape[-1] ** -0.5
            return s.init(shape, generator, dtype) + 0.3 * noise

        return dataclasses.replace(s, init=fill)

    specs = with_dtype(decoder_specs(decoder), dtype)
    return init(tree_map(lively, specs, is_leaf=is_spec), seed)


class Runner:
    """A decoder on a mesh with its parameters and its poisoned caches, stepped by hand.

    `caches` are those of the ranks that this process runs. ValueError where the rules are illegal.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Any,
        layout: Layout,
        trace: Trace = TRACE,
        *,
        ranks: Ranks | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.decoder, self.layout, self.page_size = decoder, layout, page_size
        mesh, rules = layout.mesh, layout.prefill
        self.fns = build(decoder, rules, layout.decode, interleave=layout.interleave)
        dtype = tree_leaves(params["embed"])[0].dtype
        specs = pad(with_dtype(self.fns.specs, dtype), mesh, rules)
        self.fns.check(mesh, page_size=page_size, specs=specs)
        self.ranks = ThreadRanks(mesh) if ranks is None else ranks
        padded = map_with_path(lambda _, x, s: pad_leaf(x, s), params, specs)
        self.shards = self.ranks.split(padded, rules.specs(specs))

        self.num_groups = mesh.size(rules["requests"])
        self.tokens = trace.tokens(decoder.vocab_size)
        self.done = dict.fromkeys(self.tokens, 0)
        self.pages, num_pages = deal_pages(trace.lengths, self.num_groups, page_size)
        caches = cache_specs(decoder, num_pages * self.num_groups, page_size)

        def poisoned(s: ParamSpec, coord: Coord) -> torch.Tensor | None:
            layout = rules.layout(s)
            if not mesh.holds(layout, coord):
                return None
            shape = mesh.local_shape(s.shape, layout)
            return torch.full(shape, NAN, dtype=torch.promote_types(s.dtype, dtype))

        self.caches = [
            tree_map(partial(poisoned, coord=coord), caches, is_leaf=is_spec)
            for coord in self.ranks.coords
        ]

    def place(
        self, decode: bool, counts: Counts, room: int = 0
    ) -> tuple[Batch, list[tuple[int, int] | None]]:
        """The global batch of the next `counts` tokens, and the token of each row of its logits.

        `room` is how much larger than needed each size of the batch is.
        """
        rules, mesh = self.layout.rules(decode), self.layout.mesh
        groups: list[list[Rows]] = [[] for _ in range(self.num_groups)]
        wanted: list[list[tuple[int, int] | None]] = [[] for _ in groups]
        for i, n in counts.items():
            start, group = self.done[i], i % self.num_groups
            row = Rows(self.tokens[i][start : start + n], start, self.pages[i], wanted=n)
            groups[group].append(row)
            wanted[group] += [(i, start + j) for j in range(n)]
        parts = mesh.size(drop(rules["tokens"], rules["requests"]))
        multiple = token_multiple(rules, mesh)
        shape = batch_shape(groups, parts=parts, multiple=multiple)
        shape = BatchShape(
            tokens=shape.tokens + room * math.lcm(parts, multiple),
            requests=shape.requests + room,
            pages=shape.pages + room,
            out=shape.out + room,
        )
        batch = make_batch(groups, page_size=self.page_size, shape=shape, parts=parts)
        size = len(batch.out) // self.num_groups
        return batch, [key for keys in wanted for key in keys + [None] * (size - len(keys))]

    def forward(self, decode: bool, batch: Batch) -> torch.Tensor:
        """Global logits of a global batch; columns past the vocabulary are seen to be padding."""
        rules = self.layout.rules(decode)
        batches = self.ranks.split(batch, batch_specs(rules))
        step = self.fns.decode if decode else self.fns.prefill
        with torch.no_grad():
            results = self.ranks.run(step, self.shards, self.caches, batches)
        self.caches = [cache for _, cache in results]
        outputs = self.ranks.join([out for out, _ in results], output_specs(rules))
        logits, padding = outputs.logits.tensor_split([self.decoder.vocab_size], 1)
        assert bool((padding == -torch.inf).all()), (
            "padding of the vocabulary must not differ from -inf"
        )
        return logits

    def check_copies(self) -> None:
        """ValueError where ranks that hold copies of a page differ."""
        self.ranks.join(self.caches, self.layout.prefill.specs(cache_specs(self.decoder, 1, 1)))

    def step(self, decode: bool, counts: Counts) -> Logits:
        """Run the next `counts` tokens of some requests: their logits."""
        batch, wanted = self.place(decode, counts)
        logits = self.forward(decode, batch)
        for i, n in counts.items():
            self.done[i] += n
        return {key: row for key, row in zip(wanted, logits, strict=True) if key is not None}


def deal_pages(
    lengths: Mapping[int, int], num_groups: int, page_size: int
) -> tuple[dict[int, list[int]], int]:
    """Page ids of each request, shuffled within its group, and the pages that a group has."""
    need = {i: pages_needed(n, page_size) for i, n in lengths.items()}
    of_group = [sum(n for i, n in need.items() if i % num_groups == g) for g in range(num_groups)]
    num_pages = 2 + max(of_group)  # the scratch page, and one that nobody owns
    free = [random.Random(g).sample(range(1, num_pages), num_pages - 1) for g in range(num_groups)]
    return {i: [free[i % num_groups].pop() for _ in range(n)] for i, n in need.items()}, num_pages


def run(
    decoder: Decoder,
    params: Any,
    layout: Layout,
    trace: Trace = TRACE,
    *,
    ranks: Ranks | None = None,
    page_size: int = PAGE_SIZE,
) -> Logits:
    """The logits of every token of the trace."""
    runner = Runner(decoder, params, layout, trace, ranks=ranks, page_size=page_size)
    found: Logits = {}
    for decode, counts in trace.steps:
        found |= runner.step(decode, counts)
    runner.check_copies()
    return found


DRAFT_TRACE = Trace({0: 9, 1: 6}, ((False, {0: 5, 1: 4}), (True, {0: 3, 1: 2})))


def run_drafts(decoder: Decoder, params: Any, layout: Layout, trace: Trace = DRAFT_TRACE) -> Logits:
    """The logits that the first draft module gives of each token, beside the steps of a trace."""
    runner = Runner(decoder, params, layout, trace)
    found: Logits = {}
    for decode, counts in trace.steps:
        batch, wanted = runner.place(decode, counts)
        rules = layout.rules(decode)
        batches = runner.ranks.split(batch, batch_specs(rules))
        step, draft = runner.fns.prefill, runner.fns.prefill_draft
        if decode:
            step, draft = runner.fns.decode, runner.fns.decode_draft
        with torch.no_grad():
            results = runner.ranks.run(step, runner.shards, runner.caches, batches)
            hidden, caches = [out.hidden for out, _ in results], [cache for _, cache in results]
            results = runner.ranks.run(
                partial(draft, depth=0), runner.shards, caches, batches, hidden
            )
        runner.caches = [cache for _, cache in results]
        outputs = runner.ranks.join([out for out, _ in results], output_specs(rules))
        logits = outputs.logits[:, : decoder.vocab_size]
        found |= {key: row for key, row in zip(wanted, logits, strict=True) if key is not None}
        for i, n in counts.items():
            runner.done[i] += n
    runner.check_copies()
    return found


def distance(found: Logits, wanted: Logits) -> float:
    """The largest difference of any logit; infinite where one is NaN. Both have the same tokens."""
    assert found.keys() == wanted.keys()
    gaps = torch.stack([(found[key] - wanted[key]).abs().max() for key in wanted])
    return float(gaps.nan_to_num(torch.inf).max())


def assert_same(found: Logits, wanted: Logits, tolerance: float = TOLERANCE) -> None:
    """AssertionError naming the tokens whose logits differ."""
    assert found.keys() == wanted.keys()
    off = [key for key in wanted if not distance({0: found[key]}, {0: wanted[key]}) <= tolerance]
    assert not off, f"logits differ by up to {distance(found, wanted):.2g} at {off[:8]}"
