"""One step as data: the rows that every rank is to run, and the tensors made of them.

The scheduler's plans become a Launch, which is plain Python: where ranks are processes, the first
one makes it and the others get it. Each process then makes the same Inputs of it.

    G requests groups, padded alike    B rows that draw a token    N rows of logits
    K drafts at most, L = K + 1        T token places              R rows of the page table
    S slots: places for what the device knows of a request
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from funcinfer.kvcache.batch import Batch, Rows
from funcinfer.serving.edits import History, RowEdits, has_penalties
from funcinfer.serving.model import Model
from funcinfer.serving.params import SamplingParams
from funcinfer.serving.request import LATE
from funcinfer.serving.sampling import RowParams, draft_seed, stack_params, uniform
from funcinfer.tree import pytree, static

FROM_SLOT = LATE - 1  # stands for a draft that the device has in the slot of its request


class Draw(NamedTuple):
    """How a row draws. num_output: how many tokens the request has before the first draw; of a
    late row the most that it can have. history: where there are penalties.
    """

    params: SamplingParams
    num_output: int
    stop_ids: frozenset[int] = frozenset()
    history: History | None = None


class Row(NamedTuple):
    """Tokens of one request at positions start, start + 1, ..., the last num_drafts of them drafts.

    tokens: LATE where only the device knows them. pages: all pages of the request. slot: where the
    device keeps what it knows of the request; that of a row without `draw` is not looked at. late:
    as in `Work`. draw: None for a row that draws no token. scored: how many alternatives are wanted
    with the log-probabilities of its own tokens; None: nothing. following: the token behind a row
    that does not draw.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    slot: int = -1
    num_drafts: int = 0
    late: bool = False
    draw: Draw | None = None
    scored: int | None = None
    following: int = 0

    @property
    def wanted(self) -> int:
        """How many of its last tokens want logits."""
        if self.scored is not None:
            return len(self.tokens)
        return 0 if self.draw is None else 1 + self.num_drafts

    @property
    def is_decode(self) -> bool:
        """Whether it draws behind a single token, and behind drafts that follow it."""
        return self.draw is not None and len(self.tokens) == 1 + self.num_drafts


@dataclass(frozen=True)
class Launch:
    """One step of all requests groups.

    decode: whether each row draws behind a single token; then the decode rules hold. freed: pages
    of each group to fill with NaN before anything is written.
    """

    groups: tuple[tuple[Row, ...], ...]
    decode: bool = False
    freed: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Sizes:
    """What is the same for every launch of an engine.

    num_drafts: K. num_slots: S. modules: whether the model's draft modules propose. laws: whether
    drafts are drawn from laws.
    """

    page_size: int
    num_slots: int
    num_drafts: int = 0
    modules: bool = False
    laws: bool = False


@pytree
class LateInputs:
    """Where tokens come from that only the device knows, and which places move back."""

    source_T: torch.Tensor  # -1: known; 0: the last token of the slot; i: its i-th draft
    slot_T: torch.Tensor
    moves_T: torch.Tensor  # whether the position is too high by the rejected drafts of the slot
    slot_R: torch.Tensor
    moves_R: torch.Tensor


@pytree
class DraftInputs:
    """What draft modules read: the place of the token that follows each token; where that is -1,
    the token itself. num_pages_B: of the request. uniforms_BJK: to draw drafts with, where K +
    accepted drafts - those rejected before is j. num_chained: token places of each group in a step
    for chained drafts.
    """

    next_place_T: torch.Tensor
    next_token_T: torch.Tensor
    num_pages_B: torch.Tensor
    uniforms_BJK: torch.Tensor | None
    num_chained: int = static()


@pytree
class Inputs:
    """Global tensors of one launch, int64 but for the Batch and numbers; each rank takes its part.

    slot_B, slot_N: S for padding. logits_BL: the row of logits at each place of a row that draws;
    N: none. drafts_BK: -1: none. params: of all rows of logits. uniforms_NJ: the number of a row of
    logits where j drafts of the row before it are rejected. scored_N: the token whose
    log-probability is wanted; -1: the one that is drawn.
    """

    batch: Batch
    late: LateInputs | None
    drafting: DraftInputs | None
    slot_B: torch.Tensor
    logits_BL: torch.Tensor
    drafts_BK: torch.Tensor
    slot_N: torch.Tensor
    uniforms_NJ: torch.Tensor | None
    params: RowParams
    scored_N: torch.Tensor
    num_groups: int = static()


class Hints(NamedTuple):
    """What is known on the host alone.

    edits: of the rows of logits of each group; None: none has
    any. num_top: most alternatives wanted with log-probabilities; None: these are not wanted.
    """

    edits: list[list[RowEdits]] | None
    num_top: int | None


class _Place(NamedTuple):
    """A row of logits that draws: of row number b, behind j of its drafts."""

    row: Row
    draw: Draw
    b: int
    j: int
    n: int


def make_inputs(model: Model, launch: Launch, sizes: Sizes) -> tuple[Inputs, Hints]:
    """The tensors of a launch, on the host, and what stays there."""
    groups = [[Rows(r.tokens, r.start, r.pages, r.wanted) for r in rows] for rows in launch.groups]
    batch = model.place(groups, page_size=sizes.page_size, decode=launch.decode)
    per_group = max(1, *(sum(row.draw is not None for row in rows) for rows in launch.groups))
    B, N = per_group * len(groups), len(batch.out)
    drawn = list(_drawn(launch, per_group, N // len(groups)))
    slot_B, logits_BL = np.full(B, sizes.num_slots), np.full((B, 1 + sizes.num_drafts), N)
    drafts_BK, slot_N = np.full((B, sizes.num_drafts), -1), np.full(N, sizes.num_slots)
    params = [SamplingParams()] * N
    for row, draw, b, j, n in drawn:
        slot_B[b], slot_N[n], logits_BL[b, j], params[n] = row.slot, row.slot, n, draw.params
        if j:
            draft = row.tokens[len(row.tokens) - row.num_drafts + j - 1]
            drafts_BK[b, j - 1] = FROM_SLOT if draft == LATE else draft
    stacked = stack_params(params)
    late = bool((batch.tokens == LATE).any())
    places = _places(batch, launch) if late or sizes.modules else []
    inputs = Inputs(
        batch=batch,
        late=_late(batch, launch, places) if late else None,
        drafting=_drafting(model, batch, launch, places, drawn, B, sizes)
        if sizes.modules
        else None,
        slot_B=torch.from_numpy(slot_B),
        logits_BL=torch.from_numpy(logits_BL),
        drafts_BK=torch.from_numpy(drafts_BK),
        slot_N=torch.from_numpy(slot_N),
        uniforms_NJ=_uniforms(drawn, N, sizes, stacked),
        params=stacked,
        scored_N=_scored(launch, drawn, N),
        num_groups=len(groups),
    )
    edits = _edits(drawn, N, len(groups))
    return inputs, Hints(edits, _num_top(launch))


def _drawn(launch: Launch, per_group: int, num_logits: int) -> Iterator[_Place]:
    """Every row of logits that draws, in order."""
    for group, rows in enumerate(launch.groups):
        b, end = group * per_group, group * num_logits
        for row in rows:
            end += row.wanted
            if row.draw is not None:
                for j in range(1 + row.num_drafts):
                    yield _Place(row, row.draw, b, j, end - 1 - row.num_drafts + j)
                b += 1


def _places(batch: Batch, launch: Launch) -> list[list[np.ndarray]]:
    """The token places of each row of each group, in order of position."""
    size = len(batch.tokens) // len(launch.groups)
    found = []
    for group, rows in enumerate(launch.groups):
        part = slice(group * size, (group + 1) * size)
        positions, owners = batch.positions[part].numpy(), batch.rows[part].numpy()
        real = np.flatnonzero(positions >= 0)
        real = real[np.lexsort((positions[real], owners[real]))] + group * size
        ends = np.cumsum([len(row.tokens) for row in rows])
        found.append(np.split(real, ends[:-1]) if rows else [])
    return found


def _late(batch: Batch, launch: Launch, places: list[list[np.ndarray]]) -> LateInputs:
    T, R = len(batch.tokens), len(batch.page_table)
    source_T, slot_T, moves_T = np.full(T, -1), np.zeros(T, np.int64), np.zeros(T, bool)
    slot_R, moves_R = np.zeros(R, np.int64), np.zeros(R, bool)
    for group, rows in enumerate(launch.groups):
        for number, (row, at) in enumerate(zip(rows, places[group], strict=True)):
            r = group * (R // len(launch.groups)) + number
            slot_T[at], moves_T[at] = row.slot, row.late
            slot_R[r], moves_R[r] = row.slot, row.late
            before = len(at) - row.num_drafts
            for i, token in enumerate(row.tokens):
                if token == LATE:
                    source_T[at[i]] = i - before + 1
    arrays = (source_T, slot_T, moves_T, slot_R, moves_R)
    return LateInputs(*map(torch.from_numpy, arrays))


def _drafting(
    model: Model,
    batch: Batch,
    launch: Launch,
    places: list[list[np.ndarray]],
    drawn: list[_Place],
    B: int,
    sizes: Sizes,
) -> DraftInputs:
    place_T, token_T = np.full(len(batch.tokens), -1), np.zeros(len(batch.tokens), np.int64)
    for rows, placed in zip(launch.groups, places, strict=True):
        for row, at in zip(rows, placed, strict=True):
            place_T[at[:-1]] = at[1:]
            token_T[at[-1]] = row.following
    num_pages_B = np.zeros(B, np.int64)
    K = sizes.num_drafts
    uniforms_BJK = np.zeros((B, 2 * K + 1, K)) if sizes.laws else None
    for row, draw, b, j, _ in drawn:
        num_pages_B[b] = len(row.pages)
        if uniforms_BJK is not None and not j and draw.params.temperature > 0:
            for offset in range(-K if row.late else 0, row.num_drafts + 1):
                output = max(draw.num_output + 1 + offset, 0)
                seed = draft_seed(draw.params.seed or 0, output)
                uniforms_BJK[b, K + offset] = [uniform(seed, i) for i in range(K)]
    chained = [[Rows([0], 0, [1])] * (B // len(launch.groups))] * len(launch.groups)
    chain = model.place(chained, page_size=batch.page_size, decode=True)
    return DraftInputs(
        torch.from_numpy(place_T),
        torch.from_numpy(token_T),
        torch.from_numpy(num_pages_B),
        None if uniforms_BJK is None else torch.from_numpy(uniforms_BJK),
        num_chained=len(chain.tokens) // len(launch.groups),
    )


def _uniforms(drawn: list[_Place], N: int, sizes: Sizes, stacked: RowParams) -> torch.Tensor | None:
    if stacked.temperature_B is None:
        return None
    late = any(place.row.late for place in drawn)
    uniforms_NJ = torch.zeros(N, 1 + sizes.num_drafts if late else 1, dtype=torch.float64)
    for row, draw, _, j, n in drawn:
        if draw.params.temperature > 0:
            seed, index = draw.params.seed or 0, draw.num_output + j
            uniforms_NJ[n] = uniform(seed, index)
            for rejected in range(1, uniforms_NJ.shape[1] if row.late else 1):
                uniforms_NJ[n, rejected] = uniform(seed, max(index - rejected, 0))
    return uniforms_NJ


def _scored(launch: Launch, drawn: list[_Place], N: int) -> torch.Tensor:
    scored_N = np.full(N, -1)
    for group, rows in enumerate(launch.groups):
        end = group * (N // len(launch.groups))
        for row in rows:
            end += row.wanted
            if row.scored is not None:
                scored_N[end - row.wanted : end] = [*row.tokens[1:], row.following]
    for place in drawn:
        scored_N[place.n] = -1
    return torch.from_numpy(scored_N)


def _num_top(launch: Launch) -> int | None:
    rows = [row for group in launch.groups for row in group]
    counts = [row.scored for row in rows]
    counts += [row.draw.params.logprobs for row in rows if row.draw is not None]
    return max((count for count in counts if count is not None), default=None)


def _edits(drawn: list[_Place], N: int, num_groups: int) -> list[list[RowEdits]] | None:
    edits = [RowEdits(SamplingParams())] * N
    needed = False
    for row, draw, _, j, n in drawn:
        params, count = draw.params, draw.num_output
        if params.bias_pairs or has_penalties(params) or count + j < params.min_tokens:
            needed = True
            end = len(row.tokens) - row.num_drafts
            edits[n] = RowEdits(
                params, count, draw.history, row.tokens[end : end + j], draw.stop_ids
            )
    per_group = N // num_groups
    return [edits[g * per_group :][:per_group] for g in range(num_groups)] if needed else None
