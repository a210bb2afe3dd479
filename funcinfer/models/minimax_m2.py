"""MiniMax-M2: partial RoPE, norms over the full width of q and k, sigmoid-routed experts.

Source: the reference is transformers' modeling_minimax_m2.
"""

from collections.abc import Mapping
from typing import Any

from funcinfer.checkpoint import NameMap
from funcinfer.hf_config import HFConfig
from funcinfer.models import gqa
from funcinfer.models.experts import SPARSE_BLOCK_STYLE, Experts
from funcinfer.models.gqa import Config, decoder, read_config

__all__ = ["Config", "decoder", "from_hf", "name_map"]


def from_hf(config: Mapping[str, Any]) -> Config:
    """The Config of a MiniMax-M2 config.json; ValueError for a field that it does not
    understand.
    """
    fields = HFConfig(config)
    experts = Experts(
        num_experts=fields.take("num_local_experts", kind=int, aliases=("num_experts",)),
        k=fields.take("num_experts_per_tok", kind=int),
        width=fields.take("intermediate_size", kind=int),
        router="sigmoid",
    )
    num_layers = fields.take("num_hidden_layers", kind=int)
    cfg = read_config(
        fields,
        config,
        qk_norm="full_width",
        experts=experts,
        expert_layers=tuple(range(num_layers)),
    )
    fields.finish()
    return cfg


def name_map(cfg: Config) -> NameMap:
    """The names of a MiniMax-M2 checkpoint."""
    return gqa.name_map(cfg, SPARSE_BLOCK_STYLE)
