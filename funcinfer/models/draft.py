"""Multi-token prediction: a module that drafts the token after the next one.

    x[T, D] = eh_proj . [enorm(embed(t_{i+1})) ; hnorm(h_i)]      y = layer(x)      h' = norm(y)
    logits of t_{i+2} = head(h')

T tokens, D model width. A row of position i carries the token of position i + 1 and the main
model's hidden state of position i, after its final norm. Its RoPE position is i + 1, its KV row
the slot of position i in a cache of the module's own, so page table, slots and visibility are
those of the main model's batch. Chained drafts feed h' and the drafted token to the next module.
Of pipeline stages, the last one runs them.
Source: DeepSeek-V3 technical report, section 2.2; transformers' MtpModel.
"""

import torch

from funcinfer.kvcache.batch import Batch, prepare
from funcinfer.layers import primitives as ops
from funcinfer.layers.embedding import embed
from funcinfer.models.decoder import (
    Cache,
    Decoder,
    Output,
    Params,
    draft_prefix,
    finish,
    rope_of,
    run_layer,
)
from funcinfer.models.pipeline import on_last_stage
from funcinfer.sharding import P, Rules, reshard


def draft(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    batch: Batch,
    hidden_TD: torch.Tensor,
    *,
    depth: int,
    rules: Rules,
    interleave: int = 1,
    length: int | None = None,
) -> tuple[Output, Cache]:
    """One step of draft module `depth`: logits of the tokens after the next, and its normed hidden
    states.

    `batch.tokens` are the next tokens of the rows' positions; `hidden_TD` is `Output.hidden` of
    the main model, or of the module before, for the same rows. The cache is donated. ValueError
    where the decoder has no such module.

    A chain that is longer than the list of modules runs the last ones again: `depth` counts modulo
    their number.
    """
    if not decoder.drafts:
        raise ValueError(
            "this model has no draft modules: its config says num_nextn_predict_layers=0"
        )
    index = depth % len(decoder.drafts)
    module, p = decoder.drafts[index], params["mtp"][index]
    rope = rope_of(decoder, length, shift=1)
    step = prepare(batch, rules=rules, rope=rope, interleave=interleave)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return decoder.norm(x, weight, eps=decoder.norm_eps)

    x_TD = hidden_TD
    if on_last_stage(rules):
        e_TD = embed(params["embed"], batch.tokens, rules=rules)
        if module.zero_first:
            positions_T = reshard(batch.positions, P(rules["tokens"]), P(rules["residual_tokens"]))
            e_TD = torch.where(positions_T[:, None] == 0, 0, e_TD)
        joined_TCD = torch.stack([norm(e_TD, p["enorm"]), norm(hidden_TD, p["hnorm"])], 1)
        x_TD = ops.linear(joined_TCD, p["eh_proj"], dims=2)
        x_TD, (cache, _) = run_layer(
            module.layer,
            draft_prefix(index),
            p["layer"],
            x_TD,
            (cache, {}),
            step,
            rules=rules,
            norm=norm,
        )
    return finish(decoder, params, x_TD, p["norm"], batch, rules=rules), cache
