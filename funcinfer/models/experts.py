"""Experts of a family: which router and widths they have, their sublayer, their checkpoint
names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from funcinfer.checkpoint import Either, Source, Stack, Stored
from funcinfer.hf_config import HFConfig
from funcinfer.layers.moe import Router, moe, moe_specs
from funcinfer.layers.router import (
    biased_router_specs,
    router_specs,
    sigmoid_group_top_k,
    sigmoid_top_k,
    softmax_group_top_k,
    softmax_top_k,
)
from funcinfer.models.decoder import Sublayer, pure
from funcinfer.models.names import Names, mlp_names, vector
from funcinfer.spec import ParamSpec


@dataclass(frozen=True)
class Experts:
    """Routed experts of one width, `k` of them for a token, and shared ones as one MLP.

    `router` names the law of selection and weights (`funcinfer.layers.router`): "softmax"
    (Qwen3-MoE), "softmax_group" (DeepSeek-V2), "sigmoid" (MiniMax-M2), "sigmoid_group"
    (DeepSeek-V3, GLM). ValueError for numbers that do not go together.
    """

    num_experts: int
    k: int
    width: int
    router: Literal["softmax", "softmax_group", "sigmoid", "sigmoid_group"]
    shared_width: int = 0
    groups: int = 1
    keep_groups: int = 1
    normalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.num_experts:
            raise ValueError(f"k={self.k} experts a token, but there are {self.num_experts}")
        if self.num_experts % self.groups or not 1 <= self.keep_groups <= self.groups:
            raise ValueError(
                f"groups={self.groups} must divide {self.num_experts} experts, and keep_groups="
                f"{self.keep_groups} be from 1 to {self.groups}"
            )

    @property
    def biased(self) -> bool:
        """Whether selection adds a bias to the scores."""
        return self.router in ("sigmoid", "sigmoid_group")


def read_experts(fields: HFConfig) -> Experts:
    """The experts of V3, V3.2 and the GLMs: sigmoid scores, selection bias, groups."""
    fields.require("scoring_func", ["sigmoid"], "sigmoid")
    fields.require("topk_method", ["noaux_tc"], "noaux_tc")
    width = fields.take("moe_intermediate_size", kind=int)
    return Experts(
        num_experts=fields.take(
            "n_routed_experts", kind=int, aliases=("num_experts", "num_local_experts")
        ),
        k=fields.take("num_experts_per_tok", kind=int),
        width=width,
        router="sigmoid_group",
        shared_width=width * fields.take("n_shared_experts", kind=int),
        groups=fields.take("n_group", kind=int),
        keep_groups=fields.take("topk_group", kind=int),
        normalise=fields.take("norm_topk_prob", kind=bool),
        scale=fields.take("routed_scaling_factor", kind=float),
    )


def route_of(experts: Experts) -> Router:
    """The router with its settings bound."""
    k, scale = experts.k, experts.scale
    grouped = dict(k=k, groups=experts.groups, keep_groups=experts.keep_groups, scale=scale)
    match experts.router:
        case "softmax":
            return partial(softmax_top_k, k=k, normalise=experts.normalise)
        case "softmax_group":
            return partial(softmax_group_top_k, **grouped)
        case "sigmoid":
            return partial(sigmoid_top_k, k=k)
        case "sigmoid_group":
            return partial(sigmoid_group_top_k, normalise=experts.normalise, **grouped)


def experts_sublayer(embed: int, experts: Experts) -> Sublayer:
    """The mixture of experts as a sublayer."""
    specs = moe_specs(
        embed,
        experts.num_experts,
        experts.width,
        router=_router_specs(experts),
        shared_width=experts.shared_width,
    )
    return pure(partial(moe, route=route_of(experts)), specs)


def _router_specs(experts: Experts) -> Callable[[int, int], dict[str, ParamSpec]]:
    """Biased routers and DeepSeek-V2's are float32 in a model of any dtype, as in transformers."""
    if experts.biased:
        return biased_router_specs
    wide = experts.router == "softmax_group"
    return partial(router_specs, dtype=torch.float32) if wide else router_specs


@dataclass(frozen=True)
class ExpertStyle:
    """How a family's checkpoint names its experts, behind the layer's prefix."""

    block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"


MLP_STYLE = ExpertStyle()
SPARSE_BLOCK_STYLE = ExpertStyle("block_sparse_moe.", "w1", "w3", "w2", "e_score_correction_bias")


def expert_names(prefix: str, embed: int, experts: Experts, style: ExpertStyle) -> Names:
    """The sources of `moe_specs`: a tensor an expert, or all experts stacked, in the file."""
    block, E, F = prefix + style.block, experts.num_experts, experts.width

    def each(which: str, shape: tuple[int, int]) -> list[Source]:
        return [Stored(f"{block}experts.{e}.{which}.weight", shape) for e in range(E)]

    gate_up = zip(each(style.gate, (F, embed)), each(style.up, (F, embed)), strict=True)
    router: Names = dict(weight=Stored(f"{block}gate.weight", (E, embed)))
    if experts.biased:
        router["bias"] = vector(block + style.bias, E)
    names: Names = dict(
        router=router,
        gate_up=Either(
            (
                Stack(tuple(Stack(pair) for pair in gate_up)),
                Stored(f"{block}experts.gate_up_proj", (E, (2, F), embed)),
            )
        ),
        down=Either(
            (
                Stack(tuple(each(style.down, (embed, F)))),
                Stored(f"{block}experts.down_proj", (E, embed, F)),
            )
        ),
    )
    if experts.shared_width:
        names["shared"] = mlp_names(f"{block}shared_experts.", embed, experts.shared_width)
    return names
