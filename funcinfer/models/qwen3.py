"""Qwen3: as Llama, with RMSNorm over each head of q and k before RoPE.

Source: the reference is transformers' modeling_qwen3.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.gqa import Config, decoder, name_map, no_sliding_window, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a Qwen3 config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    no_sliding_window(fields)
    bias = fields.take("attention_bias", False, kind=bool)
    cfg = read_config(fields, config, qkv_bias=bias, out_bias=bias, qk_norm="head")
    fields.finish()
    return cfg
