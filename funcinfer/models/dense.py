"""What the dense families share: a Config, its decoder of (attention, MLP) layers, and the
checkpoint names.

Llama, Qwen2 and Qwen3 differ in which biases and norms their attention has; their own files read a
config.json into this Config and say no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from funcinfer.checkpoint import NameMap
from funcinfer.hf_config import HFConfig
from funcinfer.kvcache.paged import PagedKV, paged_kv_specs
from funcinfer.layers.attention import (
    attention,
    attention_specs,
    head_norm,
    head_norm_specs,
    no_norm,
)
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.rope import Rope
from funcinfer.models import names
from funcinfer.models.decoder import Decoder, Layer, Sublayer, cached, pure


@dataclass(frozen=True)
class Config:
    """The architecture of a dense model. ValueError for sizes that do not go together."""

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    rope: Rope
    max_length: int
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )


def read_config(fields: HFConfig, config: Mapping[str, Any], **differences: Any) -> Config:
    """The Config of the fields that all dense families name alike; `differences` are a family's
    own.

    The caller takes its own fields first and calls `fields.finish()` after.
    """
    embed, num_heads = (
        fields.take("hidden_size", kind=int),
        fields.take("num_attention_heads", kind=int),
    )
    head_dim = fields.take("head_dim", None, kind=int | None) or embed // num_heads
    rope, keys = Rope.from_hf(config, head_dim)
    fields.ignore(*keys, reason="read for RoPE")
    fields.require("hidden_act", ["silu"], "silu")
    return Config(
        vocab_size=fields.take("vocab_size", kind=int),
        embed_dim=embed,
        num_layers=fields.take("num_hidden_layers", kind=int),
        num_heads=num_heads,
        num_kv_heads=fields.take("num_key_value_heads", None, kind=int | None) or num_heads,
        head_dim=head_dim,
        mlp_dim=fields.take("intermediate_size", kind=int),
        norm_eps=fields.take("rms_norm_eps", 1e-6, kind=float),
        rope=rope,
        max_length=fields.take("max_position_embeddings", kind=int),
        tied_head=fields.take("tie_word_embeddings", False, kind=bool),
        **differences,
    )


def no_sliding_window(fields: HFConfig) -> None:
    """Take Qwen's fields of sliding windows; ValueError where one is in use."""
    fields.require("use_sliding_window", [False], False)
    fields.ignore("sliding_window", "max_window_layers", reason="no layer has a sliding window")
    kinds = fields.take("layer_types", None, kind=list | None) or []
    if other := sorted(set(kinds) - {"full_attention"}):
        raise ValueError(f"config.json: layer_types has {other}; supported: 'full_attention'")


def decoder(cfg: Config) -> Decoder:
    """The decoder of a dense model: `attn` and `mlp` in each layer."""
    layer = Layer(dict(attn=attention_sublayer(cfg), mlp=mlp_sublayer(cfg)))
    return Decoder(
        vocab_size=cfg.vocab_size,
        embed_dim=cfg.embed_dim,
        layers=(layer,) * cfg.num_layers,
        norm_eps=cfg.norm_eps,
        rope=cfg.rope,
        tied_head=cfg.tied_head,
    )


def attention_sublayer(cfg: Config) -> Sublayer:
    """Grouped-query attention with the biases and norms of the config."""
    specs = attention_specs(
        cfg.embed_dim,
        cfg.num_heads,
        cfg.num_kv_heads,
        cfg.head_dim,
        qkv_bias=cfg.qkv_bias,
        out_bias=cfg.out_bias,
    )
    if cfg.head_norms:
        specs |= head_norm_specs(cfg.head_dim)
    apply = partial(
        attention,
        scale=cfg.head_dim**-0.5,
        qk_norm=head_norm(cfg.norm_eps) if cfg.head_norms else no_norm,
    )

    def kv_specs(num_pages: int, page_size: int) -> PagedKV:
        return paged_kv_specs(
            num_pages, page_size, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim
        )

    return cached(apply, specs, kv_specs)


def mlp_sublayer(cfg: Config) -> Sublayer:
    """The SwiGLU MLP of the config."""
    return pure(mlp, mlp_specs(cfg.embed_dim, cfg.mlp_dim))


def name_map(cfg: Config) -> NameMap:
    """Hugging Face's names of a dense model."""
    return names.name_map(
        [_layer_names(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers)],
        vocab_size=cfg.vocab_size,
        embed=cfg.embed_dim,
        tied_head=cfg.tied_head,
    )


def _layer_names(cfg: Config, prefix: str) -> names.Names:
    attn = f"{prefix}self_attn."
    sources = names.attention_names(
        attn,
        cfg.embed_dim,
        cfg.num_heads,
        cfg.num_kv_heads,
        cfg.head_dim,
        qkv_bias=cfg.qkv_bias,
        out_bias=cfg.out_bias,
    )
    if cfg.head_norms:
        sources |= names.head_norm_names(attn, cfg.head_dim)
    return dict(
        attn_norm=names.vector(f"{prefix}input_layernorm.weight", cfg.embed_dim),
        attn=sources,
        mlp_norm=names.vector(f"{prefix}post_attention_layernorm.weight", cfg.embed_dim),
        mlp=names.mlp_names(f"{prefix}mlp.", cfg.embed_dim, cfg.mlp_dim),
    )
