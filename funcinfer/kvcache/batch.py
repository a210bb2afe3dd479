"""Batch, Step and how they are made: flat tokens of many requests, with visibility as an interval
per token.

Prefill, chunk, decode and verify rows mix freely: a token sees the positions [lo, hi) of its own
request, nothing else is said about it. `make_batch` builds a Batch on the host; `prepare` turns
it, once a forward and on each rank, into a Step whose slots and bounds are local to the rank's
part of the cache.

    T tokens, T' new KV rows (the tokens in the requests layout), R requests, M pages a request, L
    rows that want logits
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from funcinfer.kvcache.layout import local_len, local_slots, zigzag
from funcinfer.layers.primitives import Segments
from funcinfer.layers.primitives.segments import from_runs
from funcinfer.sharding import P, Rules, axis_index, axis_size, drop, reshard
from funcinfer.tree import pytree, static

Tables = tuple[torch.Tensor, torch.Tensor]
RopeTables = Callable[[torch.Tensor], Tables]


@pytree
class Batch:
    """One step's input, int32. Position -1 is padding: it sees nothing and writes to the scratch
    page.

    `rows` indexes `page_table`; `slots` is page * page_size + offset of each new KV row, where
    `page_size` counts tokens of a request, whatever part of a page a rank holds; `out` indexes
    tokens in the requests layout. On a mesh each of them counts within its own requests group.

    `segments`, where there are any, say on the host which tokens are runs of one request: a hint
    for kernels that take lengths from there, and of all tokens on every rank.
    """

    tokens: torch.Tensor  # [T]      tokens
    positions: torch.Tensor  # [T]   tokens
    rows: torch.Tensor  # [T]        tokens
    slots: torch.Tensor  # [T']      requests
    page_table: torch.Tensor  # [R, M] requests
    kv_lens: torch.Tensor  # [R]     requests
    out: torch.Tensor  # [L]         requests
    page_size: int = static()
    segments: Segments | None = static(default=None)


@pytree
class Step:
    """What the layers read: the Batch with bounds, slots and rope tables of this rank.

    `tokens`, `positions`, `k_rope` are in the tokens layout; `q_positions`, `q_rope` in q_tokens;
    `rows`, `lo`, `hi` in q_tokens less page_tokens, where attention runs; `slots` are local, and so
    are `index_slots`, of caches that index_page_tokens deals; cos and sin are [T, rotary_dim / 2].
    `page_size` counts tokens of a request. `segments` are those of `rows` and `hi`, if the Batch
    has any.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    q_positions: torch.Tensor
    rows: torch.Tensor
    lo: torch.Tensor
    hi: torch.Tensor
    slots: torch.Tensor
    index_slots: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor
    k_rope: Tables
    q_rope: Tables
    page_size: int = static()
    interleave: int = static()
    segments: Segments | None = static(default=None)


def batch_specs(rules: Rules) -> Batch:
    """The layout of each tensor of a Batch."""
    tokens, requests = P(rules["tokens"]), P(rules["requests"])
    layouts: dict[str, Any] = dict(
        tokens=tokens,
        positions=tokens,
        rows=tokens,
        slots=requests,
        page_table=P(rules["requests"], None),
        kv_lens=requests,
        out=requests,
    )
    return Batch(**layouts, page_size=0)


def prepare(batch: Batch, *, rules: Rules, rope: RopeTables, interleave: int = 1) -> Step:
    """The Step of a rank, from its part of the Batch: the only place where bounds and slots are
    localised.

    `interleave` is the run of offsets that one rank of page_tokens owns; `rope(positions)` gives
    (cos, sin).
    """
    tokens, q_tokens, dealt = rules["tokens"], rules["q_tokens"], rules["page_tokens"]
    n, r = axis_size(dealt), axis_index(dealt)
    index_dealt = rules["index_page_tokens"]
    index_n, index_r = axis_size(index_dealt), axis_index(index_dealt)
    q_positions = reshard(batch.positions, P(tokens), P(q_tokens))
    rows = reshard(batch.rows, P(tokens), P(q_tokens))
    attend = P(drop(q_tokens, dealt))
    seen = reshard(q_positions, P(q_tokens), attend) + 1
    segments = local_segments(batch, rules=rules, interleave=interleave)
    if segments is not None and segments.num_tokens != seen.shape[0]:
        raise ValueError(
            f"segments of {segments.num_tokens} tokens on this rank, which has {seen.shape[0]}:"
            f" they must be those of the whole batch"
        )
    return Step(
        tokens=batch.tokens,
        positions=batch.positions,
        q_positions=q_positions,
        rows=reshard(rows, P(q_tokens), attend),
        lo=torch.zeros_like(seen),
        hi=local_len(seen, n, interleave, r),
        slots=local_slots(batch.slots, batch.page_size, n, interleave, r),
        index_slots=local_slots(batch.slots, batch.page_size, index_n, interleave, index_r),
        page_table=batch.page_table,
        kv_lens=batch.kv_lens,
        k_rope=rope(batch.positions),
        q_rope=rope(q_positions),
        page_size=batch.page_size,
        interleave=interleave,
        segments=segments,
    )


def local_segments(batch: Batch, *, rules: Rules, interleave: int = 1) -> Segments | None:
    """The segments of a rank's Step, if the Batch has any: those of its own tokens, with the
    positions that lie in its part of the pages.

    Where pages are dealt, each token is a run of its own: of consecutive tokens only some see one
    more of this rank's positions.
    """
    if batch.segments is None:
        return None
    dealt = rules["page_tokens"]
    axis, n, r = drop(rules["q_tokens"], dealt), axis_size(dealt), axis_index(dealt)
    count = batch.segments.num_tokens // axis_size(axis)
    segments = batch.segments.cut(axis_index(axis) * count, (axis_index(axis) + 1) * count)
    if n == 1:
        return segments
    return segments.one_by_one(lambda seen: local_len(seen, n, interleave, r))


@dataclass(frozen=True)
class Rows:
    """One request's part in a step: tokens at positions start, start + 1, ...; its pages; how many
    of the last tokens want logits.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wanted: int = 1


@dataclass(frozen=True)
class BatchShape:
    """The padded sizes of one requests group's Batch: T, R, M and L."""

    tokens: int
    requests: int
    pages: int
    out: int


def batch_shape(
    groups: Sequence[Sequence[Rows]], *, parts: int = 1, multiple: int = 1
) -> BatchShape:
    """The smallest sizes that hold every group. T is a multiple of `multiple` and of `parts`.

    `multiple` is `token_multiple(rules, mesh)`; `parts` the number of ranks that share a request's
    tokens (PCP).
    """
    multiple = int(np.lcm(multiple, parts))
    longest = max((_longest_part(rows, parts) for rows in groups), default=0)
    return BatchShape(
        tokens=max(-(-longest * parts // multiple), 1) * multiple,
        requests=max([len(rows) for rows in groups] + [1]),
        pages=max([len(r.pages) for rows in groups for r in rows] + [1]),
        out=max([sum(r.wanted for r in rows) for rows in groups] + [1]),
    )


def make_batch(
    groups: Sequence[Sequence[Rows]],
    *,
    page_size: int,
    shape: BatchShape | None = None,
    parts: int = 1,
    multiple: int = 1,
    segments: bool = False,
) -> Batch:
    """The global Batch: one group of requests for each coordinate of `requests`, padded alike and
    joined in order.

    Rows of logits come in order of the requests and, in a request, of its last `wanted` tokens;
    those past a group's own are padding. With `segments` the Batch has them too. ValueError where a
    request lacks pages or has the scratch page, or a group does not fit into `shape`.

    >>> batch = make_batch([[Rows([7, 8, 9], start=2, pages=[3, 5])]], page_size=4)
    >>> batch.slots.tolist(), batch.out.tolist()
    ([14, 15, 20], [2])
    """
    shape = shape or batch_shape(groups, parts=parts, multiple=multiple)
    made = [_group(rows, shape, page_size, parts) for rows in groups]
    fields = {f: torch.from_numpy(np.concatenate([m[f] for m in made])) for f in made[0]}
    found = segments_of(groups, shape, parts) if segments else None
    return Batch(**fields, page_size=page_size, segments=found)


def segments_of(groups: Sequence[Sequence[Rows]], shape: BatchShape, parts: int = 1) -> Segments:
    """The segments of the Batch that `make_batch` makes of these arguments.

    Padding is one run a part, or, where all runs are single tokens, single tokens too: a decode
    step has as many runs as tokens, however many requests it serves.

    >>> row = Rows([7, 8, 9], start=2, pages=[3])
    >>> segments_of([[row]], BatchShape(tokens=5, requests=1, pages=1, out=1)).lens
    (3, 2)
    """
    size, made = shape.tokens // parts, []
    single = all(len(r.tokens) <= 1 for rows in groups for r in rows)
    for rows in groups:
        runs: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
        for row, r in enumerate(rows):
            for part, offsets in enumerate(zigzag(len(r.tokens), parts)):
                runs[part] += [(row, n, r.start + last + 1) for last, n in _runs(offsets)]
        for of_part in runs:
            rest = size - sum(n for _, n, _ in of_part)
            padding = [(0, 1, 0)] * rest if single else [(0, rest, 0)] * (rest > 0)
            made += of_part + padding
    return from_runs(made)


def _runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """(last, length) of each run of consecutive numbers."""
    breaks = [i for i in range(1, len(offsets)) if offsets[i] != offsets[i - 1] + 1]
    bounds = pairwise([0, *breaks, len(offsets)]) if offsets else ()
    return [(offsets[stop - 1], stop - start) for start, stop in bounds]


def _group(
    rows: Sequence[Rows], shape: BatchShape, page_size: int, parts: int
) -> dict[str, np.ndarray]:
    tokens, kv_lens, out = (
        np.zeros(n, np.int32) for n in (shape.tokens, shape.requests, shape.out)
    )
    positions, slots = np.full(shape.tokens, -1, np.int32), np.zeros(shape.tokens, np.int32)
    owners = np.zeros(shape.tokens, np.int32)
    table = np.zeros((shape.requests, shape.pages), np.int32)
    _fits(rows, shape, parts)
    part_size = shape.tokens // parts
    filled, wants = [0] * parts, 0
    for row, r in enumerate(rows):
        count = len(r.tokens)
        if len(r.pages) * page_size < r.start + count:
            raise ValueError(
                f"row {row}: positions up to {r.start + count - 1} need more than its"
                f" {len(r.pages)} pages of {page_size} tokens"
            )
        pages = np.asarray(r.pages, np.int64)
        if pages.min(initial=1) < 1 or r.start < 0:
            raise ValueError(
                f"row {row}: start={r.start} and pages={list(r.pages)} must be at least 0 and 1:"
                f" page 0 is the scratch page"
            )
        table[row, : len(pages)] = pages
        kv_lens[row] = r.start + count
        places = np.empty(count, np.int64)
        for part, offsets in enumerate(zigzag(count, parts)):
            first = part * part_size + filled[part]
            places[offsets] = np.arange(first, first + len(offsets))
            filled[part] += len(offsets)
        at = r.start + np.arange(count)
        tokens[places], positions[places], owners[places] = r.tokens, at, row
        slots[places] = pages[at // page_size] * page_size + at % page_size
        out[wants : wants + r.wanted] = places[count - r.wanted :]
        wants += r.wanted
    return dict(
        tokens=tokens,
        positions=positions,
        rows=owners,
        slots=slots,
        page_table=table,
        kv_lens=kv_lens,
        out=out,
    )


def _fits(rows: Sequence[Rows], shape: BatchShape, parts: int) -> None:
    for row, r in enumerate(rows):
        if not 0 <= r.wanted <= len(r.tokens):
            raise ValueError(f"row {row}: wants logits of {r.wanted} of its {len(r.tokens)} tokens")
    if shape.tokens % parts:
        raise ValueError(f"{shape.tokens} tokens can't be dealt to {parts} parts evenly")
    needs = batch_shape([rows], parts=parts)
    for name in ("tokens", "requests", "pages", "out"):
        if getattr(needs, name) > getattr(shape, name):
            raise ValueError(
                f"a group needs {name}={getattr(needs, name)}, but the shape has"
                f" {name}={getattr(shape, name)}"
            )


def _longest_part(rows: Sequence[Rows], parts: int) -> int:
    filled = [0] * parts
    for r in rows:
        for part, offsets in enumerate(zigzag(len(r.tokens), parts)):
            filled[part] += len(offsets)
    return max(filled)
