"""What the dense families share: a Config, its decoder of (attention, MLP) layers, and the checkpoint names.

Llama, Qwen2 and Qwen3 differ in which biases and norms their attention has; their own files read a config.json
into this Config and say no more.
"""

from dataclasses import dataclass
from functools import partial

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
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )


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
