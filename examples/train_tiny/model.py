"""The model: its config.json, the decoder as it is trained, and whole sequences through both.

The training decoder has the parameters of the plain one. Its layers differ in how they are joined
(dropout), in that experts count their tokens into a cache entry of their own, and in the form of
attention (always expanded). These are the hooks that every decoder has; nothing is copied.

B sequences, T tokens of each, D model width, E experts. Rows of a batch are the sequences' tokens
one sequence after another: B * T.
"""

import dataclasses
from functools import partial
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, Step
from funcinfer.layers.mla import mla_cache_specs, mla_expanded
from funcinfer.models import deepseek_v3
from funcinfer.models.decoder import (
    Branch,
    Cache,
    Decoder,
    Joined,
    Layer,
    Output,
    Params,
    Shared,
    Sublayer,
    cache_specs,
    cached,
    decoder_specs,
    forward,
)
from funcinfer.models.draft import draft
from funcinfer.models.experts import Experts, route_of
from funcinfer.models.mla import Config
from funcinfer.sharding import Rules
from funcinfer.spec import ParamSpec, empty, init, with_dtype
from funcinfer.tree import map_with_path

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
ONE_RANK = Rules.none()
LOAD = "load"


def config(**overrides: Any) -> Config:
    """The Config of CONFIG with other fields, read as any checkpoint's is."""
    return deepseek_v3.from_hf(CONFIG | overrides)


def new_params(cfg: Config, seed: int, device: torch.device | str) -> Params:
    """Float32 parameters, drawn as their specs say."""
    specs = with_dtype(decoder_specs(deepseek_v3.decoder(cfg)), torch.float32)
    return init(specs, seed, device=device)


def training_decoder(cfg: Config, dropout: float) -> Decoder:
    """The decoder of `cfg` with dropout before each residual sum, and experts that count."""
    plain = deepseek_v3.decoder(cfg)
    change = partial(_training_layer, cfg, dropout)
    return dataclasses.replace(
        plain,
        layers=tuple(map(change, plain.layers)),
        drafts=tuple(dataclasses.replace(d, layer=change(d.layer)) for d in plain.drafts),
    )


def _training_layer(cfg: Config, dropout: float, layer: Layer) -> Layer:
    attn, feed = layer.sublayers["attn"], layer.sublayers["mlp"]
    form = partial(mla_expanded, cfg=cfg.attention)
    attn = cached(form, attn.specs, partial(mla_cache_specs, cfg.attention))
    if cfg.experts is not None and "router" in feed.specs:
        feed = counted(feed, cfg.experts)
    return Layer(dict(attn=attn, mlp=feed), connect=partial(dropped, rate=dropout))


def dropped(p: Params, x: torch.Tensor, branch: Branch, *, rate: float) -> Joined:
    """The residual connection with dropout: x + dropout(sublayer(norm(x)))."""
    y, state = branch(x)
    return x + torch.nn.functional.dropout(y, rate), state


def counted(sublayer: Sublayer, experts: Experts) -> Sublayer:
    """Experts that add how many choices each of them got to a cache entry `load` [E]."""
    route, E = route_of(experts), experts.num_experts

    def apply(
        p: Params, u: torch.Tensor, cache: Cache, step: Step, shared: Shared, *, rules: Rules
    ) -> tuple[torch.Tensor, Cache, Shared]:
        y, _, shared = sublayer.apply(p, u, {}, step, shared, rules=rules)
        with torch.no_grad():
            _, ids_TK = route(p["router"], u)
            load_E = (ids_TK[..., None] == torch.arange(E, device=u.device)).sum((0, 1))
        return y, {LOAD: cache[LOAD] + load_E}, shared

    load = ParamSpec((E,), (None,), torch.float32)
    return Sublayer(sublayer.specs, apply, lambda pages, size: {LOAD: load})


def cast(params: Params, dtype: torch.dtype) -> Params:
    """The parameters in `dtype`, selection biases as they are; gradients flow through."""
    return map_with_path(lambda path, w: w if path.endswith("router.bias") else w.to(dtype), params)


def new_cache(decoder: Decoder, params: Params, sequences: int, length: int) -> Cache:
    """A cache of one page of `length` slots a sequence, in the dtype of the embedding."""
    table = params["embed"]
    specs = with_dtype(cache_specs(decoder, sequences + 1, length), table.dtype)
    return empty(specs, fill=0.0, device=table.device)


def rows(
    tokens_BT: torch.Tensor, start: int, page_size: int, *, shift: int = 0, last: bool = False
) -> Batch:
    """The Batch of tokens at positions start, start + 1, ... of each sequence.

    Their KV rows lie `shift` slots behind their positions; logits are wanted of every row, or of
    each sequence's last one.
    """
    (B, T), device = tokens_BT.shape, tokens_BT.device
    row_B, place_T = torch.arange(B, device=device), start + torch.arange(T, device=device)
    slots_BT = (row_B[:, None] + 1) * page_size + shift + place_T
    out_BT = (row_B[:, None] * T + torch.arange(T, device=device))[:, -1 if last else 0 :]

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.expand(B, -1).flatten().int()

    return Batch(
        tokens=flat(tokens_BT),
        positions=flat(place_T),
        rows=flat(row_B[:, None].expand(B, T)),
        slots=flat(slots_BT),
        page_table=(row_B[:, None] + 1).int(),
        kv_lens=flat(torch.full((B, 1), shift + start + T, device=device)),
        out=flat(out_BT),
        page_size=page_size,
    )


def whole(
    decoder: Decoder, params: Params, tokens_BT: torch.Tensor, *, depths: int = 1
) -> tuple[Output, Cache]:
    """The main model over whole sequences; the cache has room for chained drafts of `depths`."""
    page_size = tokens_BT.shape[1] * depths
    cache = new_cache(decoder, params, len(tokens_BT), page_size)
    return forward(decoder, params, cache, rows(tokens_BT, 0, page_size), rules=ONE_RANK)


def chained(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    next_BT: torch.Tensor,
    hidden_TD: torch.Tensor,
    *,
    depth: int,
    depths: int = 1,
) -> tuple[Output, Cache]:
    """Drafts of `depth` 0, 1, ... from every place of whole sequences; needs `dense.BACKEND`.

    `hidden` is that of the main model or of the draft before. The row of place i carries token
    i + 1 + depth, which `next` holds, and drafts token i + 2 + depth. It sees the rows of depth 0
    up to place i, and of its own chain, as a chain does that starts at i.
    """
    T = next_BT.shape[1]
    batch = rows(next_BT, depth, T * depths, shift=depth * (T - 1))
    return draft(decoder, params, cache, batch, hidden_TD, depth=depth, rules=ONE_RANK)
