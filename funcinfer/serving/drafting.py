"""Drafts by the model's own multi-token-prediction module, on a rank, behind its main step.

The first draft comes from a step over all rows of the launch, which also fills the module's cache:
the place of position i takes the token of position i + 1, known, accepted or just emitted. Each
further draft comes from a step of one token a row: the place behind takes the draft before it and
the module's own hidden state. What these steps write at positions that turn out otherwise is
written again by the launch that computes them. A row that has no page for such a position ends its
drafts there.

Letters as in `funcinfer.serving.launch`; V vocabulary, D model width. Source: DeepSeek-V3 technical
report, section 2.2; the chain over one module is that of vLLM's proposer.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from funcinfer.kvcache.batch import Batch
from funcinfer.layers.embedding import take_rows
from funcinfer.models.decoder import Cache, Params
from funcinfer.serving.launch import DraftInputs, Inputs
from funcinfer.serving.local import (
    every_row,
    local_batch,
    local_params,
    local_rows,
    processed_law,
    rows_of,
    slots_at,
    table_rows,
)
from funcinfer.serving.processors import argmax
from funcinfer.serving.sampling import RowParams, draw
from funcinfer.serving.steps import ModelFns
from funcinfer.serving.verify import Emitted
from funcinfer.sharding import P, Rules, all_gather, reshard


class Drafted(NamedTuple):
    """Drafts, -1 from the first on that there is none; the laws they were drawn from, or None."""

    drafts_BK: torch.Tensor
    laws_BKV: torch.Tensor | None


class Ends(NamedTuple):
    """Where the accepted part of each row ends. out_B: its place in the group. place_B: the same,
    counted over all groups. real_B: False for padding.
    """

    out_B: torch.Tensor
    place_B: torch.Tensor
    real_B: torch.Tensor


def propose(
    fns: ModelFns,
    params: Params,
    cache: Cache,
    inputs: Inputs,
    hidden_TD: torch.Tensor,
    emitted: Emitted,
    rejected_S: torch.Tensor,
    *,
    decode: bool,
    drawn: bool,
) -> tuple[Drafted, Cache]:
    """K drafts to follow what was emitted: the likeliest tokens or, with `drawn`, drawn ones.

    hidden_TD: of the main step, this rank's part. The cache is donated.
    """
    drafting = inputs.drafting
    assert drafting is not None
    rules = fns.decode_rules if decode else fns.prefill_rules
    run = fns.decode_draft if decode else fns.prefill_draft
    ends = _ends(inputs, emitted)
    batch = _shifted(inputs.batch, drafting, ends, emitted)
    laws = _Laws(inputs, emitted, ends, rejected_S) if drawn else None
    drafts: list[torch.Tensor] = []
    live_B = ends.real_B
    for depth in range(inputs.drafts_BK.shape[1]):
        if depth:
            rows_BD = take_rows(hidden_TD, local_rows(batch.out, rules), rules=rules)
            batch, has_page_B = _chained(inputs, drafting, ends, drafts[-1], depth)
            live_B = live_B & has_page_B
            rules, run = fns.decode_rules, fns.decode_draft
            rows_BD = pad(rows_BD, (0, 0, 0, drafting.num_chained - len(rows_BD)))
            hidden_TD = reshard(
                rows_BD, P(rules["requests"], None), P(rules["residual_tokens"], None)
            )
        out, cache = run(params, cache, local_batch(batch, rules), hidden_TD, depth=0)
        hidden_TD = out.hidden
        if laws is None:
            draft_B = every_row(argmax(out.logits, rules["logits"]), rules)
        else:
            draft_B = laws.draw(out.logits, depth, rules)
        live_B = live_B & (draft_B >= 0)
        drafts.append(torch.where(live_B, draft_B, -1))
    found = None if laws is None else torch.stack(laws.made, 1)
    return Drafted(torch.stack(drafts, 1), found), cache


def _ends(inputs: Inputs, emitted: Emitted) -> Ends:
    out_N = inputs.batch.out.long()
    last_B = inputs.logits_BL.gather(1, emitted.num_accepted_B[:, None])[:, 0]
    real_B = last_B < len(out_N)
    out_B = torch.where(real_B, pad(out_N, (0, 1))[last_B], 0)
    T = len(inputs.batch.tokens) // inputs.num_groups
    return Ends(out_B, _groups(len(out_B), inputs) * T + out_B, real_B)


def _groups(count: int, inputs: Inputs) -> torch.Tensor:
    """The requests group of each of `count` rows."""
    rows = torch.arange(count, device=inputs.slot_B.device)
    return rows // (count // inputs.num_groups)


def _shifted(batch: Batch, drafting: DraftInputs, ends: Ends, emitted: Emitted) -> Batch:
    """The batch with the token that follows each; its logits are those of the ends."""
    next_T = batch.tokens[drafting.next_place_T.clamp(min=0)].long()
    next_T = torch.where(drafting.next_place_T < 0, drafting.next_token_T, next_T)
    places_B = torch.where(ends.real_B, ends.place_B, len(next_T))  # padding goes behind the end
    next_T = pad(next_T, (0, 1)).scatter(0, places_B, emitted.last_B.clamp(min=0))[:-1]
    return dataclasses.replace(
        batch, tokens=next_T.to(batch.tokens.dtype), out=ends.out_B.to(batch.out.dtype)
    )


def _chained(
    inputs: Inputs, drafting: DraftInputs, ends: Ends, draft_B: torch.Tensor, depth: int
) -> tuple[Batch, torch.Tensor]:
    """The batch of one token a row, `depth` positions behind the ends, and which rows have a page
    there.
    """
    batch, size = inputs.batch, inputs.batch.page_size
    positions_B = batch.positions[ends.place_B].long() + depth
    has_page_B = ends.real_B & (positions_B // size < drafting.num_pages_B)
    live_B = has_page_B & (draft_B >= 0)
    table_B = table_rows(batch, inputs.num_groups)[ends.place_B]
    slots_B = torch.where(live_B, slots_at(batch, table_B, positions_B), 0)
    per_group = len(draft_B) // inputs.num_groups

    def places(x_B: torch.Tensor, fill: int) -> torch.Tensor:
        x_GB = x_B.view(inputs.num_groups, per_group)
        x_GB = pad(x_GB, (0, drafting.num_chained - per_group), value=fill)
        return x_GB.flatten().to(batch.tokens.dtype)

    entries_B = torch.where(ends.real_B, table_B, len(batch.kv_lens))  # padding goes behind the end
    ends_B = (positions_B + 1).to(batch.kv_lens.dtype)
    kv_lens = pad(batch.kv_lens, (0, 1)).scatter(0, entries_B, ends_B)[:-1]
    out_B = torch.arange(per_group, device=draft_B.device).repeat(inputs.num_groups)
    chained = dataclasses.replace(
        batch,
        tokens=places(draft_B.clamp(min=0), 0),
        positions=places(torch.where(live_B, positions_B, -1), -1),
        rows=places(batch.rows[ends.place_B], 0),
        slots=places(slots_B, 0),
        kv_lens=kv_lens,
        out=out_B.to(batch.out.dtype),
        segments=None,
    )
    return chained, has_page_B


class _Laws:
    """Draws drafts by the temperature and the filters of their requests."""

    def __init__(
        self, inputs: Inputs, emitted: Emitted, ends: Ends, rejected_S: torch.Tensor
    ) -> None:
        self.made: list[torch.Tensor] = []
        first_B = inputs.logits_BL[:, 0].clamp(max=len(inputs.slot_N) - 1)
        self.params = rows_of(inputs.params, first_B)
        drafting = inputs.drafting
        assert drafting is not None and drafting.uniforms_BJK is not None
        K = inputs.drafts_BK.shape[1]
        late_B = torch.zeros_like(first_B, dtype=torch.bool)
        if inputs.late is not None:
            late_B = inputs.late.moves_T[ends.place_B]
        back_B = torch.where(late_B, rejected_S[inputs.slot_B], 0)
        j_B = K + emitted.num_accepted_B - back_B
        self.uniforms_BK = drafting.uniforms_BJK.gather(1, j_B[:, None, None].expand(-1, 1, K))[
            :, 0
        ]

    def draw(self, logits_BV: torch.Tensor, depth: int, rules: Rules) -> torch.Tensor:
        """A draft for each row, of all groups; its laws are kept."""
        vocab = rules["logits"]
        params = local_params(self.params, rules)
        if params.temperature_B is None:
            params = RowParams(torch.zeros_like(logits_BV[:, 0]))
        laws_BV = processed_law(logits_BV, params, axis=vocab)
        laws_BV = every_row(all_gather(laws_BV, vocab, dim=1), rules)
        self.made.append(laws_BV)
        return draw(laws_BV, self.uniforms_BK[:, depth])
