"""Qwen3-MoE: Qwen3's attention, softmax-routed experts without shared ones.

Source: the reference is transformers' modeling_qwen3_moe.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.experts import Experts
from funcinfer.models.gqa import Config, decoder, name_map, no_sliding_window, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a Qwen3-MoE config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    no_sliding_window(fields)
    bias = fields.take("attention_bias", False, kind=bool)
    num_layers = fields.take("num_hidden_layers", kind=int)
    every = fields.take("decoder_sparse_step", 1, kind=int)
    dense = fields.take("mlp_only_layers", None, kind=list | None) or []
    expert_layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
    experts = Experts(
        num_experts=fields.take("num_experts", kind=int, aliases=("num_local_experts",)),
        k=fields.take("num_experts_per_tok", kind=int),
        width=fields.take("moe_intermediate_size", kind=int),
        router="softmax",
        normalise=fields.take("norm_topk_prob", False, kind=bool),
    )
    cfg = read_config(
        fields,
        config,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        experts=experts if expert_layers else None,
        expert_layers=expert_layers,
    )
    fields.finish()
    return cfg
