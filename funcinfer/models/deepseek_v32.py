"""DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer, half-split RoPE in it.

Source: the reference is transformers' modeling_deepseek_v32.
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
    """The Config of a DeepSeek-V3.2 config.json; ValueError for a field that it does not
    understand.
    """
    fields = HFConfig(config)
    experts = read_experts(fields)
    layers = read_expert_layers(fields, fields.take("first_k_dense_replace", 3, kind=int))
    index = read_indexer(fields, interleaved=False)
    cfg = read_config(
        fields,
        config,
        experts=experts if layers else None,
        expert_layers=layers,
        index=index,
        index_layers=tuple(range(fields.take("num_hidden_layers", kind=int))),
    )
    fields.finish()
    return cfg
