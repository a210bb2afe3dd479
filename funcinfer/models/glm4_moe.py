"""GLM-4.5: partial RoPE, norms of q and k, sigmoid-routed and shared experts, draft modules.

Source: the reference is transformers' modeling_glm4_moe.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.experts import Experts
from funcinfer.models.gqa import Config, decoder, name_map, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a GLM-4.5 config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    num_layers = fields.take("num_hidden_layers", kind=int)
    width = fields.take("moe_intermediate_size", kind=int)
    first = fields.take("first_k_dense_replace", kind=int)
    experts = Experts(
        num_experts=fields.take("n_routed_experts", kind=int, aliases=("num_local_experts",)),
        k=fields.take("num_experts_per_tok", kind=int),
        width=width,
        router="sigmoid_group",
        shared_width=width * fields.take("n_shared_experts", kind=int),
        groups=fields.take("n_group", kind=int),
        keep_groups=fields.take("topk_group", kind=int),
        normalise=fields.take("norm_topk_prob", kind=bool),
        scale=fields.take("routed_scaling_factor", kind=float),
    )
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
