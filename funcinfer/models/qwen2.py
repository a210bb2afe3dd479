"""Qwen2: as Llama, with biases on q, k and v.

Source: the reference is transformers' modeling_qwen2.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.hf_config import HFConfig
from funcinfer.models.gqa import Config, decoder, name_map, no_sliding_window, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a Qwen2 config.json; ValueError for a field that it does not understand."""
    fields = HFConfig(config)
    no_sliding_window(fields)
    cfg = read_config(fields, config, qkv_bias=True)
    fields.finish()
    return cfg
