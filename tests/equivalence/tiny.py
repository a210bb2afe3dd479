"""Tiny decoders of each kind of model: grouped-query and latent attention, experts, an indexer.

8 query heads on 4 KV heads; 8 experts, of which no mesh of 3 ranks has a whole share; a vocabulary
that no mesh divides. The layers of a model differ: the first has a dense MLP where others have
experts, and a GLM-5 has layers with and without an indexer of their own.
"""

from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import IndexerConfig
from funcinfer.layers.mla import MLAConfig
from funcinfer.layers.rope import Rope
from funcinfer.models import gqa, mla
from funcinfer.models.decoder import Decoder
from funcinfer.models.experts import Experts

EMBED, WIDTH, VOCAB = 20, 24, 45
SOFTMAX_EXPERTS = Experts(num_experts=8, k=3, width=16, router="softmax")
SIGMOID_EXPERTS = Experts(8, 3, 16, "sigmoid_group", 16, groups=4, keep_groups=2, scale=2.5)


def grouped(num_layers: int = 2, *, experts: bool = False, num_kv_heads: int = 4) -> gqa.Config:
    """Grouped-query attention, with experts from the second layer on."""
    return gqa.Config(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=6,
        mlp_dim=WIDTH,
        norm_eps=1e-6,
        rope=Rope(100.0, 6),
        max_length=64,
        qkv_bias=True,
        out_bias=True,
        qk_norm="head",
        experts=SOFTMAX_EXPERTS if experts else None,
        expert_layers=tuple(range(1, num_layers)) if experts else (),
    )


def latent(
    num_layers: int = 2,
    *,
    experts: bool = False,
    index_layers: tuple[int, ...] = (),
    num_drafts: int = 0,
) -> mla.Config:
    """Latent attention, with experts from the second layer on; sparse with `index_layers`."""
    attention = MLAConfig(
        EMBED, 8, kv_lora=11, nope_dim=6, rope_dim=4, v_dim=5, scale=10**-0.5, q_lora=13
    )
    index = IndexerConfig(EMBED, 13, 16, 8, topk=5, rotate=ops.rotate_half_split)
    return mla.Config(
        vocab_size=VOCAB,
        embed_dim=EMBED,
        num_layers=num_layers,
        mlp_dim=WIDTH,
        norm_eps=1e-6,
        rope=Rope(100.0, 4),
        max_length=64,
        attention=attention,
        index=index if index_layers else None,
        index_layers=index_layers,
        experts=SIGMOID_EXPERTS if experts else None,
        expert_layers=tuple(range(1, num_layers)) if experts else (),
        num_drafts=num_drafts,
    )


CONFIGS = {
    "grouped": grouped(experts=True),
    "latent": latent(experts=True),
    "sparse": latent(3, experts=True, index_layers=(0, 2)),
}


def decoder(cfg: gqa.Config | mla.Config) -> Decoder:
    """The decoder of a Config of either kind."""
    return gqa.decoder(cfg) if isinstance(cfg, gqa.Config) else mla.decoder(cfg)


DECODERS = {name: decoder(cfg) for name, cfg in CONFIGS.items()}
