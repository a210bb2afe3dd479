"""Models of grouped-query attention, dense or with experts: a Config, its decoder, checkpoint
names.

Llama, the Qwens, GLM-4.5 and MiniMax-M2 differ in biases and norms of their attention and in which
layers have experts; their own files read a config.json into this Config and say no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from funcinfer.checkpoint import NameMap
from funcinfer.hf_config import HFConfig
from funcinfer.kvcache.paged import PagedKV, paged_kv_specs
from funcinfer.layers.attention import (
    attention,
    attention_specs,
    full_width_norm,
    full_width_norm_specs,
    head_norm,
    head_norm_specs,
    no_norm,
)
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.rope import Rope
from funcinfer.models import names
from funcinfer.models.decoder import Decoder, Draft, Layer, Sublayer, cached, pure
from funcinfer.models.experts import (
    MLP_STYLE,
    Experts,
    ExpertStyle,
    expert_names,
    experts_sublayer,
)


@dataclass(frozen=True)
class Config:
    """The architecture of such a model. `qk_norm` says over what q and k are normed.

    Layers in `expert_layers` have experts in place of the MLP; draft modules too, where the last
    layer has. ValueError for sizes that do not go together.
    """

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
    qk_norm: Literal["none", "head", "full_width"] = "none"
    experts: Experts | None = None
    expert_layers: tuple[int, ...] = ()
    num_drafts: int = 0

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if bool(self.expert_layers) != (self.experts is not None):
            raise ValueError("experts and expert_layers go together: give both or neither")
        if bad := [i for i in self.expert_layers if not 0 <= i < self.num_layers]:
            raise ValueError(f"expert_layers names {bad}, but there are {self.num_layers} layers")


def read_config(
    fields: HFConfig, config: Mapping[str, Any], *, default_partial: float = 1.0, **differences: Any
) -> Config:
    """The Config of the fields that all these families name alike; `differences` are its own.

    The caller takes its own fields first and calls `fields.finish()` after.
    """
    embed = fields.take("hidden_size", kind=int)
    num_heads = fields.take("num_attention_heads", kind=int)
    head_dim = fields.take("head_dim", None, kind=int | None) or embed // num_heads
    rope, keys = Rope.from_hf(config, head_dim, default_partial=default_partial)
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
    full = ["full_attention"] * fields.take("num_hidden_layers", kind=int)
    fields.require("layer_types", [None, full], None)


def decoder(cfg: Config) -> Decoder:
    """The decoder: `attn` and `mlp` in each layer, the latter perhaps of experts."""
    attn = attention_sublayer(cfg)
    dense = Layer(dict(attn=attn, mlp=pure(mlp, mlp_specs(cfg.embed_dim, cfg.mlp_dim))))
    sparse = dense
    if cfg.experts is not None:
        sparse = dense.replace(mlp=experts_sublayer(cfg.embed_dim, cfg.experts))
    layers = tuple(sparse if i in cfg.expert_layers else dense for i in range(cfg.num_layers))
    return Decoder(
        vocab_size=cfg.vocab_size,
        embed_dim=cfg.embed_dim,
        layers=layers,
        norm_eps=cfg.norm_eps,
        rope=cfg.rope,
        tied_head=cfg.tied_head,
        drafts=(Draft(layers[-1]),) * cfg.num_drafts,
    )


def attention_sublayer(cfg: Config) -> Sublayer:
    """Grouped-query attention with the biases and norms of the config."""
    sizes = (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    specs = attention_specs(cfg.embed_dim, *sizes, qkv_bias=cfg.qkv_bias, out_bias=cfg.out_bias)
    qk_norm = no_norm
    if cfg.qk_norm == "head":
        specs |= head_norm_specs(cfg.head_dim)
        qk_norm = head_norm(cfg.norm_eps)
    elif cfg.qk_norm == "full_width":
        specs |= full_width_norm_specs(*sizes)
        qk_norm = full_width_norm(cfg.norm_eps)

    def kv_specs(num_pages: int, page_size: int) -> PagedKV:
        return paged_kv_specs(
            num_pages, page_size, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim
        )

    return cached(partial(attention, scale=cfg.head_dim**-0.5, qk_norm=qk_norm), specs, kv_specs)


def name_map(cfg: Config, style: ExpertStyle = MLP_STYLE) -> NameMap:
    """Hugging Face's names. `style` says how a family names its experts."""
    return names.name_map(
        partial(_layer_names, cfg, style),
        cfg.num_layers,
        cfg.num_drafts,
        vocab_size=cfg.vocab_size,
        embed=cfg.embed_dim,
        tied_head=cfg.tied_head,
    )


def _layer_names(cfg: Config, style: ExpertStyle, index: int, prefix: str) -> names.Names:
    attn, sizes = f"{prefix}self_attn.", (cfg.num_heads, cfg.num_kv_heads, cfg.head_dim)
    sources = names.attention_names(
        attn, cfg.embed_dim, *sizes, qkv_bias=cfg.qkv_bias, out_bias=cfg.out_bias
    )
    if cfg.qk_norm == "head":
        sources |= names.head_norm_names(attn, cfg.head_dim)
    elif cfg.qk_norm == "full_width":
        sources |= names.full_width_norm_names(attn, *sizes)
    if cfg.experts is not None and min(index, cfg.num_layers - 1) in cfg.expert_layers:
        mlp_sources = expert_names(prefix, cfg.embed_dim, cfg.experts, style)
    else:
        mlp_sources = names.mlp_names(f"{prefix}mlp.", cfg.embed_dim, cfg.mlp_dim)
    return names.layer_names(prefix, cfg.embed_dim, attn=sources, mlp=mlp_sources)
