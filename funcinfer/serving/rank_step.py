"""One launch on one rank: resolve what the host did not know, run the model, draw or verify, draft.

Every rank gets the same Inputs, whole, and takes its part where the model runs. Tokens, drafts and
slots are the same on all ranks, without a word to the host; so the next launch may be queued before
the tokens of this one have been read. Letters as in `funcinfer.serving.launch`; V vocabulary.
"""

import dataclasses
from dataclasses import dataclass

import torch

from funcinfer.kvcache.batch import Batch
from funcinfer.models.decoder import Cache, Params
from funcinfer.serving.drafting import Drafted, propose
from funcinfer.serving.edits import stack_edits
from funcinfer.serving.launch import FROM_SLOT, Hints, Inputs, LateInputs
from funcinfer.serving.local import (
    every_row,
    local_batch,
    local_params,
    local_rows,
    processed_law,
    slots_at,
    table_rows,
)
from funcinfer.serving.logprobs import Logprobs, logprobs
from funcinfer.serving.processors import edit_logits
from funcinfer.serving.sampling import choose
from funcinfer.serving.steps import ModelFns
from funcinfer.serving.verify import Emitted, Verifier, match, verify
from funcinfer.sharding import Rules, all_gather, axis_index
from funcinfer.tree import pytree


@pytree
class Slots:
    """What the device knows of each request, by slot; the last one, S, is that of padding.

    pending_SL: its last token, and the drafts that follow it; -1: none. rejected_S: how many drafts
    of its latest row were rejected, or were none. laws_SKV: what the drafts were drawn from; None:
    they were not.
    """

    pending_SL: torch.Tensor
    rejected_S: torch.Tensor
    laws_SKV: torch.Tensor | None


@pytree
class Result:
    """What the host reads of a launch. tokens_BL: as in `Emitted`. drafts_BK: what may follow; -1:
    none.
    """

    num_accepted_B: torch.Tensor
    tokens_BL: torch.Tensor
    drafts_BK: torch.Tensor
    logprobs_N: Logprobs | None


@dataclass(frozen=True)
class Law:
    """How drafts are verified. verifier: None: by `match`, so that each request gets the tokens
    that it would get without drafts. exact: as in `verify`.
    """

    verifier: Verifier | None = None
    exact: bool = True


def empty_slots(
    num_slots: int, num_drafts: int, vocab: int | None, device: torch.device | str = "cpu"
) -> Slots:
    """Slots of which nothing is known. vocab: the width of the laws, where they are kept."""
    pending_SL = torch.full((num_slots + 1, num_drafts + 1), -1, device=device)
    laws_SKV = None
    if vocab is not None:
        laws_SKV = torch.zeros(num_slots + 1, num_drafts, vocab, device=device)
    return Slots(pending_SL, torch.zeros_like(pending_SL[:, 0]), laws_SKV)


def rank_step(
    fns: ModelFns,
    params: Params,
    cache: Cache,
    slots: Slots,
    inputs: Inputs,
    hints: Hints,
    *,
    decode: bool = False,
    law: Law,
) -> tuple[Result, Cache, Slots]:
    """Run a launch on this rank, under the decode or the prefill rules. The cache is donated."""
    rules = fns.decode_rules if decode else fns.prefill_rules
    inputs = resolve(inputs, slots)
    run = fns.decode if decode else fns.prefill
    out, cache = run(params, cache, local_batch(inputs.batch, rules))
    emitted = emit(out.logits, inputs, hints, slots, rules=rules, law=law)
    scores = None
    if hints.num_top is not None:
        scores = _score(out.logits, inputs, emitted, hints.num_top, rules=rules)
    drafted = Drafted(torch.full_like(inputs.drafts_BK, -1), None)
    if inputs.drafting is not None:
        drafted, cache = propose(
            fns,
            params,
            cache,
            inputs,
            out.hidden,
            emitted,
            slots.rejected_S,
            decode=decode,
            drawn=slots.laws_SKV is not None,
        )
    slots = _keep(slots, inputs, emitted, drafted)
    return (
        Result(emitted.num_accepted_B, emitted.tokens_BL, drafted.drafts_BK, scores),
        cache,
        slots,
    )


def resolve(inputs: Inputs, slots: Slots) -> Inputs:
    """The inputs with the tokens, drafts and places that only the device knows."""
    known_BK = slots.pending_SL[inputs.slot_B, 1:]
    drafts_BK = torch.where(inputs.drafts_BK == FROM_SLOT, known_BK, inputs.drafts_BK)
    batch = inputs.batch
    if inputs.late is not None:
        batch = _resolve_batch(batch, inputs.late, slots, inputs.num_groups)
    return dataclasses.replace(inputs, batch=batch, drafts_BK=drafts_BK)


def _resolve_batch(batch: Batch, late: LateInputs, slots: Slots, num_groups: int) -> Batch:
    pending_T = slots.pending_SL[late.slot_T, late.source_T.clamp(min=0)]
    tokens_T = torch.where(late.source_T < 0, batch.tokens, pending_T.clamp(min=0))
    back_T = torch.where(late.moves_T, slots.rejected_S[late.slot_T], 0)
    back_R = torch.where(late.moves_R, slots.rejected_S[late.slot_R], 0)
    positions_T = batch.positions - back_T
    slots_T = slots_at(batch, table_rows(batch, num_groups), positions_T)
    return dataclasses.replace(
        batch,
        tokens=tokens_T.to(batch.tokens.dtype),
        positions=positions_T.to(batch.positions.dtype),
        slots=torch.where(late.moves_T, slots_T, batch.slots).to(batch.slots.dtype),
        kv_lens=(batch.kv_lens - back_R).to(batch.kv_lens.dtype),
        segments=None if slots.pending_SL.shape[1] > 1 else batch.segments,
    )


def emit(
    logits_NV: torch.Tensor,
    inputs: Inputs,
    hints: Hints,
    slots: Slots,
    *,
    rules: Rules,
    law: Law,
) -> Emitted:
    """What the rows that draw emit, of this rank's part of the logits."""
    requests, vocab = rules["requests"], rules["logits"]
    if hints.edits is not None:
        first = axis_index(vocab) * logits_NV.shape[-1]
        edits = stack_edits(
            hints.edits[axis_index(requests)],
            vocab=range(first, first + logits_NV.shape[-1]),
            device=logits_NV.device,
        )
        logits_NV = edit_logits(logits_NV, edits)
    uniforms_N, mine = _uniforms(inputs, slots), local_params(inputs.params, rules)
    if law.verifier is None or mine.temperature_B is None or uniforms_N is None:
        draws_N = None if uniforms_N is None else local_rows(uniforms_N, rules)
        tokens_N = choose(logits_NV, *mine, draws_N, axis=vocab)
        tokens_N = torch.nn.functional.pad(every_row(tokens_N, rules), (0, 1), value=-1)
        return match(tokens_N[inputs.logits_BL], inputs.drafts_BK)
    laws_NV = processed_law(logits_NV, mine, axis=vocab)
    laws_NV = every_row(all_gather(laws_NV, vocab, dim=1), rules)
    target_BLV = torch.cat([laws_NV, torch.zeros_like(laws_NV[:1])])[inputs.logits_BL]
    draft_BKV = None if slots.laws_SKV is None else slots.laws_SKV[inputs.slot_B]
    at_B = inputs.logits_BL[:, 0].clamp(max=len(uniforms_N) - 1)
    return verify(
        law.verifier,
        target_BLV,
        inputs.drafts_BK,
        draft_BKV,
        uniforms_N[at_B],
        exact=law.exact,
    )


def _uniforms(inputs: Inputs, slots: Slots) -> torch.Tensor | None:
    """The number of each row of logits, now that it is known how many drafts were rejected."""
    if inputs.uniforms_NJ is None:
        return None
    rejected_N = slots.rejected_S[inputs.slot_N].clamp(max=inputs.uniforms_NJ.shape[1] - 1)
    return inputs.uniforms_NJ.gather(1, rejected_N[:, None])[:, 0]


def _score(
    logits_NV: torch.Tensor, inputs: Inputs, emitted: Emitted, num_top: int, *, rules: Rules
) -> Logprobs:
    """Log-probabilities of the tokens emitted and of those that were given, of all rows."""
    drawn_N = torch.full_like(inputs.scored_N, -1)
    drawn_N = torch.nn.functional.pad(drawn_N, (0, 1))
    drawn_N = drawn_N.scatter(0, inputs.logits_BL.flatten(), emitted.tokens_BL.flatten())[:-1]
    tokens_N = torch.where(inputs.scored_N < 0, drawn_N, inputs.scored_N)
    found = logprobs(logits_NV, local_rows(tokens_N, rules), num_top, axis=rules["logits"])
    return Logprobs(*(every_row(x, rules) for x in found))


def _keep(slots: Slots, inputs: Inputs, emitted: Emitted, drafted: Drafted) -> Slots:
    """The slots after this launch; that of padding stays as it is."""
    # A draft that there turned out to be none has a place all the same.
    num_drafts_B = (inputs.logits_BL < len(inputs.slot_N)).sum(-1) - 1
    rejected_B = num_drafts_B - emitted.num_accepted_B
    real_B = inputs.slot_B < len(slots.rejected_S) - 1
    pending_BL = torch.cat([emitted.last_B[:, None], drafted.drafts_BK], 1)

    def put(kept_S: torch.Tensor, new_B: torch.Tensor) -> torch.Tensor:
        real = real_B.view(-1, *[1] * (new_B.ndim - 1))
        values_B = torch.where(real, new_B.to(kept_S.dtype), kept_S[inputs.slot_B])
        return kept_S.index_copy(0, inputs.slot_B, values_B)

    laws_SKV = slots.laws_SKV
    if laws_SKV is not None and drafted.laws_BKV is not None:
        laws_SKV = put(laws_SKV, drafted.laws_BKV)
    return Slots(put(slots.pending_SL, pending_BL), put(slots.rejected_S, rejected_B), laws_SKV)
