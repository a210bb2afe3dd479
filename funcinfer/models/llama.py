"""Llama: dense grouped-query attention, no norms of q and k; biases where `attention_bias` says so.

Source: the reference is transformers' modeling_llama.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.gqa import Config, decoder, name_map, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a Llama config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    bias = fields.take("attention_bias", False, kind=bool)
    fields.require("mlp_bias", [False], False)
    cfg = read_config(fields, config, qkv_bias=bias, out_bias=bias)
    fields.finish()
    return cfg
