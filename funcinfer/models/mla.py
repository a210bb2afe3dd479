"""Models of latent attention with experts: a Config, its decoder, checkpoint names.

DeepSeek V2, V3 and V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5 differ in their router and in whether an
indexer selects what is attended to; their own files read a config.json into this Config and say no
more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from funcinfer.checkpoint import NameMap
from funcinfer.hf_config import HFConfig
from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import IndexerConfig, indexer_cache_specs, no_selection
from funcinfer.layers.mla import (
    SELECTION,
    MLAConfig,
    mla,
    mla_cache_specs,
    mla_specs,
    shared_sparse_mla,
    sparse_mla,
    sparse_mla_specs,
)
from funcinfer.layers.mla_prolog import prolog_mla, prolog_specs, with_prolog
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.rope import Rope, softmax_mscale
from funcinfer.models import names
from funcinfer.models.decoder import Cache, Decoder, Draft, Layer, Sublayer, cached, pure
from funcinfer.models.experts import MLP_STYLE, Experts, expert_names, experts_sublayer


@dataclass(frozen=True)
class Config:
    """The architecture of such a model.

    With `index`, attention is sparse: layers in `index_layers` select positions by an indexer of
    their own, the others attend over the selection of the last one that did. Layers in
    `expert_layers` have experts. A draft module is like the last layer, with an indexer of its
    own. ValueError for what does not go together.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    mlp_dim: int
    norm_eps: float
    rope: Rope
    max_length: int
    attention: MLAConfig
    tied_head: bool = False
    index: IndexerConfig | None = None
    index_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()
    num_drafts: int = 0

    def __post_init__(self) -> None:
        if self.index is not None and 0 not in self.index_layers:
            raise ValueError("layer 0 must have an indexer of its own: no earlier layer selects")
        for name in ("index_layers", "expert_layers"):
            if bad := [i for i in getattr(self, name) if not 0 <= i < self.num_layers]:
                raise ValueError(f"{name} has {bad}, but there are {self.num_layers} layers")
        if bool(self.expert_layers) != (self.experts is not None):
            raise ValueError("experts and expert_layers go together: give both or neither")

    @property
    def num_kv_heads(self) -> None:
        """None: the latent cache has no KV heads to shard."""
        return None


def decoder(cfg: Config) -> Decoder:
    """The decoder: `attn` and `mlp` in each layer."""
    return _decoder(cfg, attention_sublayer)


def prolog_decoder(cfg: Config) -> Decoder:
    """`decoder` with `prolog_mla` in each layer, for parameters of `with_prologs`. ValueError where
    attention is sparse, or has no prolog.
    """
    return _decoder(cfg, prolog_sublayer)


def with_prologs(params: Any) -> Any:
    """Parameters of `decoder` as those of `prolog_decoder`: `with_prolog` of each attention. To be
    done once, after loading.
    """
    if isinstance(params, dict):
        if "wkv_a" in params:
            return with_prolog(params)
        return {name: with_prologs(x) for name, x in params.items()}
    return [with_prologs(x) for x in params] if isinstance(params, list) else params


def _decoder(cfg: Config, attention: Callable[[Config, bool], Sublayer]) -> Decoder:
    layers = tuple(_layer(cfg, i, attention) for i in range(cfg.num_layers))
    return Decoder(
        vocab_size=cfg.vocab_size,
        embed_dim=cfg.embed_dim,
        layers=layers,
        norm_eps=cfg.norm_eps,
        rope=cfg.rope,
        tied_head=cfg.tied_head,
        drafts=(Draft(_layer(cfg, cfg.num_layers - 1, attention, True)),) * cfg.num_drafts,
    )


def _layer(
    cfg: Config,
    index: int,
    attention: Callable[[Config, bool], Sublayer],
    selects: bool | None = None,
) -> Layer:
    selects = index in cfg.index_layers if selects is None else selects
    feed = pure(mlp, mlp_specs(cfg.embed_dim, cfg.mlp_dim))
    if cfg.experts is not None and index in cfg.expert_layers:
        feed = experts_sublayer(cfg.embed_dim, cfg.experts)
    return Layer(dict(attn=attention(cfg, selects), mlp=feed))


def attention_sublayer(cfg: Config, selects: bool) -> Sublayer:
    """Latent attention: dense, sparse by an indexer of its own, or over an earlier layer's
    selection.
    """
    attention, index = cfg.attention, cfg.index
    kv_specs = partial(mla_cache_specs, attention)
    if index is None:
        return cached(partial(mla, cfg=attention), mla_specs(attention), kv_specs)
    if not selects:
        apply = partial(shared_sparse_mla, cfg=attention)
        specs = mla_specs(attention)
        return Sublayer(specs, apply, lambda n, size: {"kv": kv_specs(n, size)}, takes=(SELECTION,))

    def caches(num_pages: int, page_size: int) -> Cache:
        keys = indexer_cache_specs(index, num_pages, page_size)
        return {"kv": kv_specs(num_pages, page_size), "index": keys}

    apply = partial(sparse_mla, cfg=attention, index=index)
    specs = sparse_mla_specs(attention, index)
    return Sublayer(specs, apply, caches, gives={SELECTION: partial(no_selection, cfg=index)})


def prolog_sublayer(cfg: Config, selects: bool) -> Sublayer:
    """Dense latent attention by `prolog_mla`."""
    if cfg.index is not None:
        raise ValueError("attention is sparse: prolog_mla is dense attention; use decoder")
    attention = cfg.attention
    apply, kv_specs = partial(prolog_mla, cfg=attention), partial(mla_cache_specs, attention)
    return cached(apply, prolog_specs(attention), kv_specs)


def read_config(fields: HFConfig, config: Mapping[str, Any], **differences: Any) -> Config:
    """The Config of the fields that all these families name alike; `differences` are its own.

    The caller takes its own fields first and calls `fields.finish()` after.
    """
    embed = fields.take("hidden_size", kind=int)
    num_heads = fields.take("num_attention_heads", kind=int)
    fields.require("num_key_value_heads", [num_heads], num_heads)
    fields.require("hidden_act", ["silu"], "silu")
    fields.require("mlp_bias", [False], False)
    fields.require("moe_layer_freq", [1], 1)
    fields.ignore("head_dim", "qk_head_dim", reason="follows from the dims of latent attention")
    fields.ignore("ep_size", reason="how another program was split")
    nope = fields.take("qk_nope_head_dim", kind=int)
    rotary = fields.take("qk_rope_head_dim", kind=int)
    rope, keys = Rope.from_hf(config, rotary)
    fields.ignore(*keys, reason="read for RoPE")
    interleaved = fields.take("rope_interleave", True, kind=bool)
    attention = MLAConfig(
        embed_dim=embed,
        num_heads=num_heads,
        kv_lora=fields.take("kv_lora_rank", kind=int),
        nope_dim=nope,
        rope_dim=rotary,
        v_dim=fields.take("v_head_dim", kind=int),
        scale=(nope + rotary) ** -0.5 * softmax_mscale(rope),
        q_lora=fields.take("q_lora_rank", kind=int | None),
        bias=fields.take("attention_bias", False, kind=bool),
        rotate=ops.rotate_deinterleaved if interleaved else ops.rotate_half_split,
    )
    return Config(
        vocab_size=fields.take("vocab_size", kind=int),
        embed_dim=embed,
        num_layers=fields.take("num_hidden_layers", kind=int),
        mlp_dim=fields.take("intermediate_size", kind=int),
        norm_eps=fields.take("rms_norm_eps", 1e-6, kind=float),
        rope=rope,
        max_length=fields.take("max_position_embeddings", kind=int),
        attention=attention,
        tied_head=fields.take("tie_word_embeddings", False, kind=bool),
        num_drafts=fields.take(
            "num_nextn_predict_layers", 0, kind=int, aliases=("num_mtp_layers",)
        ),
        **differences,
    )


def read_expert_layers(fields: HFConfig, first: int) -> tuple[int, ...]:
    """Which layers have experts: `mlp_layer_types`, or all from `first` on."""
    num_layers = fields.take("num_hidden_layers", kind=int)
    kinds = fields.take("mlp_layer_types", None, kind=list | None)
    if kinds is None:
        return tuple(range(first, num_layers))
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f"config.json: mlp_layer_types={kinds!r} must say 'dense' or 'sparse' for each of"
            f" {num_layers} layers"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")


def read_indexer(fields: HFConfig, *, interleaved: bool) -> IndexerConfig:
    """The lightning indexer of DSA models. Its fields are read here, layer types checked."""
    indexed = ["indexed_attention"] * fields.take("num_hidden_layers", kind=int)
    fields.require("layer_types", [None, indexed], None)
    return IndexerConfig(
        embed_dim=fields.take("hidden_size", kind=int),
        q_lora=fields.take("q_lora_rank", kind=int),
        num_heads=fields.take("index_n_heads", kind=int),
        head_dim=fields.take("index_head_dim", kind=int),
        topk=fields.take("index_topk", kind=int),
        rotate=ops.rotate_interleaved if interleaved else ops.rotate_half_split,
    )


def name_map(cfg: Config) -> NameMap:
    """Hugging Face's names."""
    return names.name_map(
        partial(_layer_names, cfg),
        cfg.num_layers,
        cfg.num_drafts,
        vocab_size=cfg.vocab_size,
        embed=cfg.embed_dim,
        tied_head=cfg.tied_head,
    )


def _layer_names(cfg: Config, index: int, prefix: str) -> names.Names:
    attn = names.mla_names(f"{prefix}self_attn.", cfg.attention)
    if cfg.index is not None and (index in cfg.index_layers or index >= cfg.num_layers):
        attn["indexer"] = names.indexer_names(f"{prefix}self_attn.indexer.", cfg.index)
    if cfg.experts is not None and min(index, cfg.num_layers - 1) in cfg.expert_layers:
        feed = expert_names(prefix, cfg.embed_dim, cfg.experts, MLP_STYLE)
    else:
        feed = names.mlp_names(f"{prefix}mlp.", cfg.embed_dim, cfg.mlp_dim)
    return names.layer_names(prefix, cfg.embed_dim, attn=attn, mlp=feed)
