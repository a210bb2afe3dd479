"""GLM-4.7-Flash: as DeepSeek-V3, one group of experts, the first layer dense.

Source: the reference is transformers' modeling_glm4_moe_lite.
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
)

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a GLM-4.7-Flash config.json; ValueError for a field that it does not
    understand.
    """
    fields = HFConfig(config)
    experts = read_experts(fields)
    layers = read_expert_layers(fields, fields.take("first_k_dense_replace", 1, kind=int))
    cfg = read_config(fields, config, experts=experts if layers else None, expert_layers=layers)
    fields.finish()
    return cfg
