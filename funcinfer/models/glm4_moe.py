"""GLM-4.5: partial RoPE, norms of q and k, sigmoid-routed and shared experts, draft modules.

Source: the reference is transformers' modeling_glm4_moe.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.experts import read_experts
from funcinfer.models.gqa import Config, decoder, name_map, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a GLM-4.5 config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    num_layers = fields.take("num_hidden_layers", kind=int)
    first = fields.take("first_k_dense_replace", kind=int)
    experts = read_experts(fields)
    cfg = read_config(
        fields,
        config,
        default_partial=0.5,
        qkv_bias=fields.take("attention_bias", False, kind=bool),
        qk_norm="head" if fields.take("use_qk_norm", False, kind=bool) else "none",
        experts=experts if first < num_layers else None,
        expert_layers=tuple(range(first, num_layers)),
        num_drafts=fields.take(
            "num_nextn_predict_layers", 0, kind=int, aliases=("num_mtp_layers",)
        ),
    )
    fields.finish()
    return cfg
