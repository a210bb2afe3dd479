"""Checkpoint names of the parts that families have in common, as trees of sources beside the trees
of specs.

A family's name map is such a tree for each of its layers; `name_map` makes it one. Prefixes end in
a dot.
"""

from collections.abc import Callable
from typing import Any

from funcinfer.checkpoint import Either, NameMap, Source, Stack, Stored
from funcinfer.layers.indexer import IndexerConfig
from funcinfer.layers.mla import MLAConfig
from funcinfer.tree import leaves_with_path, tree_map

Names = dict[str, Any]
NOT_READ = ("*.rotary_emb.inv_freq",)


def attention_names(
    prefix: str,
    embed: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> Names:
    """The sources of `attention_specs`: `{prefix}{q,k,v,o}_proj`."""
    q, kv = (num_heads, head_dim), (num_kv_heads, head_dim)
    names: Names = dict(
        wq=Stored(f"{prefix}q_proj.weight", (q, embed)),
        wk=Stored(f"{prefix}k_proj.weight", (kv, embed)),
        wv=Stored(f"{prefix}v_proj.weight", (kv, embed)),
        wo=Stored(f"{prefix}o_proj.weight", (embed, q)),
    )
    if qkv_bias:
        names["bq"] = Stored(f"{prefix}q_proj.bias", (q,))
        names["bk"] = Stored(f"{prefix}k_proj.bias", (kv,))
        names["bv"] = Stored(f"{prefix}v_proj.bias", (kv,))
    if out_bias:
        names["bo"] = Stored(f"{prefix}o_proj.bias", (embed,))
    return names


def head_norm_names(prefix: str, head_dim: int) -> Names:
    """The sources of `head_norm_specs`: `{prefix}{q,k}_norm`."""
    return {w: Stored(f"{prefix}{w}.weight", (head_dim,)) for w in ("q_norm", "k_norm")}


def full_width_norm_names(prefix: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Names:
    """The sources of `full_width_norm_specs`: `{prefix}{q,k}_norm`, one width in the file."""
    return dict(
        q_norm=Stored(f"{prefix}q_norm.weight", ((num_heads, head_dim),)),
        k_norm=Stored(f"{prefix}k_norm.weight", ((num_kv_heads, head_dim),)),
    )


def mla_names(prefix: str, cfg: MLAConfig) -> Names:
    """The sources of `mla_specs`: `{prefix}q_a_proj` and so on; kv_b_proj is cut in two."""
    D, N, C, Q = cfg.embed_dim, cfg.num_heads, cfg.kv_lora, cfg.q_lora
    qk, kv_a = cfg.nope_dim + cfg.rope_dim, C + cfg.rope_dim
    kv_b = Stored(f"{prefix}kv_b_proj.weight", ((N, cfg.nope_dim + cfg.v_dim), C))
    names: Names = dict(
        wkv_a=Stored(f"{prefix}kv_a_proj_with_mqa.weight", (kv_a, D)),
        kv_a_norm=vector(f"{prefix}kv_a_layernorm.weight", C),
        w_uk=kv_b[:, : cfg.nope_dim],
        w_uv=kv_b[:, cfg.nope_dim :],
        wo=Stored(f"{prefix}o_proj.weight", (D, (N, cfg.v_dim))),
    )
    if cfg.bias:
        names["bkv_a"] = vector(f"{prefix}kv_a_proj_with_mqa.bias", kv_a)
        names["bo"] = vector(f"{prefix}o_proj.bias", D)
    if Q is None:
        return names | dict(wq=Stored(f"{prefix}q_proj.weight", ((N, qk), D)))
    if cfg.bias:
        names["bq_a"] = vector(f"{prefix}q_a_proj.bias", Q)
    return names | dict(
        wq_a=Stored(f"{prefix}q_a_proj.weight", (Q, D)),
        q_a_norm=vector(f"{prefix}q_a_layernorm.weight", Q),
        wq_b=Stored(f"{prefix}q_b_proj.weight", ((N, qk), Q)),
    )


def indexer_names(prefix: str, cfg: IndexerConfig) -> Names:
    """The sources of `indexer_specs`: `{prefix}wq_b` and so on."""
    return dict(
        wq=Stored(f"{prefix}wq_b.weight", ((cfg.num_heads, cfg.head_dim), cfg.q_lora)),
        wk=Stored(f"{prefix}wk.weight", (cfg.head_dim, cfg.embed_dim)),
        k_norm=vector(f"{prefix}k_norm.weight", cfg.head_dim),
        k_norm_bias=vector(f"{prefix}k_norm.bias", cfg.head_dim),
        weights=Stored(f"{prefix}weights_proj.weight", (cfg.num_heads, cfg.embed_dim)),
    )


def mlp_names(prefix: str, embed: int, width: int) -> Names:
    """The sources of `mlp_specs`: `{prefix}{gate,up,down}_proj`."""
    gate, up = (Stored(f"{prefix}{w}_proj.weight", (width, embed)) for w in ("gate", "up"))
    return dict(
        gate_up=Stack((gate, up)),
        down=Stored(f"{prefix}down_proj.weight", (embed, width)),
    )


def vector(name: str, size: int) -> Source:
    """A tensor of one dim: a norm's weight, a bias."""
    return Stored(name, (size,))


def layer_names(prefix: str, embed: int, *, attn: Names, mlp: Names) -> Names:
    """The sources of a layer of attention and MLP, each with the norm before it."""
    return dict(
        attn_norm=vector(f"{prefix}input_layernorm.weight", embed),
        attn=attn,
        mlp_norm=vector(f"{prefix}post_attention_layernorm.weight", embed),
        mlp=mlp,
    )


def name_map(
    layer: Callable[[int, str], Names],
    num_layers: int,
    num_drafts: int = 0,
    *,
    vocab_size: int,
    embed: int,
    tied_head: bool,
) -> NameMap:
    """The NameMap of a decoder in Hugging Face's names; `layer(index, prefix)` names one layer.

    Draft modules stand behind the layers as `model.layers.{index}`, a layer with `enorm`, `hnorm`,
    `eh_proj` and `shared_head.norm` beside it, and maybe copies of the embedding and the head. A
    single one may also stand under `mtp`, in the names of Qwen3-Next.
    """
    tree: Names = dict(
        embed=Stored("model.embed_tokens.weight", (vocab_size, embed)),
        layers=[layer(i, f"model.layers.{i}.") for i in range(num_layers)],
        norm=vector("model.norm.weight", embed),
    )
    copies: dict[str, str] = {}
    if tied_head:
        copies["lm_head.weight"] = "embed"
    else:
        tree["head"] = Stored("lm_head.weight", (vocab_size, embed))
    if num_drafts:
        tree["mtp"] = []
    for i in range(num_layers, num_layers + num_drafts):
        prefix = f"model.layers.{i}."
        draft = _draft_names(prefix, _BESIDE_LAYERS, embed, layer(i, prefix))
        if num_drafts == 1:
            other = _draft_names("mtp.", _UNDER_MTP, embed, layer(i, "mtp.layers.0."))
            draft = tree_map(lambda a, b: Either((a, b)), draft, other)
        tree["mtp"].append(draft)
        copies[f"{prefix}embed_tokens.weight"] = "embed"
        copies[f"{prefix}shared_head.head.weight"] = "embed" if tied_head else "head"
    return NameMap(dict(leaves_with_path(tree)), copies, NOT_READ)


_BESIDE_LAYERS = dict(enorm="enorm", hnorm="hnorm", norm="shared_head.norm", eh_proj="eh_proj")
_UNDER_MTP = dict(
    enorm="pre_fc_norm_embedding", hnorm="pre_fc_norm_hidden", norm="norm", eh_proj="fc"
)


def _draft_names(prefix: str, called: dict[str, str], embed: int, layer: Names) -> Names:
    norms = {n: vector(f"{prefix}{called[n]}.weight", embed) for n in ("enorm", "hnorm", "norm")}
    eh_proj = Stored(f"{prefix}{called['eh_proj']}.weight", (embed, (2, embed)))
    return dict(**norms, eh_proj=eh_proj, layer=layer)
