"""DeepSeek-V2: latent attention, softmax-routed experts by the best of each group.

Source: the reference is transformers' modeling_deepseek_v2.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.experts import Experts
from funcinfer.models.mla import Config, decoder, name_map, read_config, read_expert_layers

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a DeepSeek-V2 config.json; ValueError for a field that it does not
    understand.
    """
    fields = HFConfig(config)
    method = fields.require("topk_method", ["greedy", "group_limited_greedy"], "greedy")
    fields.require("scoring_func", ["softmax"], "softmax")
    fields.require("norm_topk_prob", [False], False)
    width = fields.take("moe_intermediate_size", kind=int)
    groups = fields.take("n_group", None, kind=int | None)
    keep = fields.take("topk_group", None, kind=int | None)
    grouped = method == "group_limited_greedy"
    experts = Experts(
        num_experts=fields.take("n_routed_experts", kind=int, aliases=("num_experts",)),
        k=fields.take("num_experts_per_tok", kind=int),
        width=width,
        router="softmax_group",
        shared_width=width * fields.take("n_shared_experts", kind=int),
        groups=groups or 1 if grouped else 1,
        keep_groups=keep or 1 if grouped else 1,
        scale=fields.take("routed_scaling_factor", kind=float),
    )
    layers = read_expert_layers(fields, fields.take("first_k_dense_replace", 0, kind=int))
    cfg = read_config(fields, config, experts=experts if layers else None, expert_layers=layers)
    fields.finish()
    return cfg
