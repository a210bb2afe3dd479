"""GLM-5: sparse latent attention, interleaved RoPE in the indexer, layers that share a selection.

Source: the reference is transformers' modeling_glm_moe_dsa.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.experts import read_experts
from funcinfer.models.mla import (
    Config,
    decoder,
    name_map,
    read_config,
    read_expert_layers,
    read_indexer,
)

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a GLM-5 config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    experts = read_experts(fields)
    layers = read_expert_layers(fields, fields.take("first_k_dense_replace", 3, kind=int))
    index = read_indexer(fields, interleaved=True)
    index_layers = read_index_layers(fields)
    cfg = read_config(
        fields,
        config,
        experts=experts if layers else None,
        expert_layers=layers,
        index=index,
        index_layers=index_layers,
    )
    fields.finish()
    return cfg


def read_index_layers(fields: HFConfig) -> tuple[int, ...]:
    """Layers with an indexer of their own, by `indexer_types`, a pattern of F and S, or a
    frequency.

    By frequency, layer i has one iff max(i - offset + 1, 0) is a multiple of it.
    """
    num_layers = fields.take("num_hidden_layers", kind=int)
    every = max(fields.take("index_topk_freq", 1, kind=int), 1)
    offset = fields.take("index_skip_topk_offset", 2, kind=int)
    pattern = fields.take("index_topk_pattern", None, kind=str | list | None)
    kinds = fields.take("indexer_types", None, kind=list | None)
    fields.ignore(
        "index_share_for_mtp_iteration", reason="each draft step selects positions of its own"
    )
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(c, c) for c in pattern]
    if kinds is None:
        kinds = pattern or [
            "full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(num_layers)
        ]
    if len(kinds) != num_layers or set(kinds) - {"full", "shared"}:
        raise ValueError(
            f"config.json: indexer types {kinds!r} must say 'full' or 'shared' for each of"
            f" {num_layers} layers"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "full")
