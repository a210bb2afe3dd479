"""Mixture of experts, its experts over any mesh axes: one function for every expert parallelism.

    w[T, K], ids[T, K] = route(x[T_moe, D])
    y[T, D] {U_experts, U_width} = sum_K w * down[ids] . act(gate_up[ids] . x)  -> y[T_residual, D]
    y += shared(x)

Where `moe_tokens` lacks an axis of `experts`, ranks along it hold the same tokens, each adds its
own experts' part, and a reduction joins the parts (gathered tokens). Where `moe_tokens` has it, the
ranks hold different tokens and exchange them (all-to-all). Both may hold at once, on different
axes. `expert_mlp` cuts every expert's width.

Legend: T tokens, K choices of a token, E experts, F width of an expert, D model width, n ranks that
exchange tokens. Source: Shazeer et al., "Outrageously large neural networks" (2017); shared experts
as in DeepSeekMoE (Dai et al., 2024).
"""

from collections.abc import Callable
from typing import Any

import torch

from funcinfer.layers import primitives as ops
from funcinfer.layers.dispatch import Exchange, local_ids, padded_exchange
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.router import Routes, router_specs
from funcinfer.sharding import P, Rules, both, drop, join_axes, longer, reduce_to, reshard
from funcinfer.spec import ParamSpec

Params = dict[str, Any]
Router = Callable[[Params, torch.Tensor], Routes]


def moe_specs(
    embed: int,
    num_experts: int,
    width: int,
    *,
    router: Callable[[int, int], dict[str, ParamSpec]] = router_specs,
    shared_width: int = 0,
) -> dict[str, Any]:
    """`router`; `gate_up` (E, 2, F, D), gate first; `down` (E, D, F); `shared`, if it has a width.

    `router(embed, num_experts)` gives the router's specs. `shared_width` is that of all shared
    experts together, which make one MLP.

    >>> moe_specs(64, 8, 32)["down"]
    ParamSpec(shape=(8, 64, 32), axes=('experts', 'embed', 'expert_mlp'), ...)
    """
    specs: dict[str, Any] = dict(
        router=router(embed, num_experts),
        gate_up=ParamSpec((num_experts, 2, width, embed), ("experts", None, "expert_mlp", "embed")),
        down=ParamSpec((num_experts, embed, width), ("experts", "embed", "expert_mlp")),
    )
    if shared_width:
        specs["shared"] = mlp_specs(embed, shared_width, axis="shared_mlp")
    return specs


def shared_mlp(p: Params, x_TD: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    """Shared experts: a SwiGLU MLP for every token, its width over `shared_mlp`; see `mlp`."""
    return mlp(p, x_TD, rules=rules, axis="shared_mlp")


def moe(
    p: Params,
    x_TD: torch.Tensor,
    *,
    rules: Rules,
    route: Router,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = ops.swiglu,
    shared: Callable[..., torch.Tensor] = shared_mlp,
    exchange: Exchange = padded_exchange,
) -> torch.Tensor:
    """Routed experts plus, where the specs have them, shared ones; from and to residual_tokens.

    `route(p["router"], x) -> (weights, ids)` is one of `funcinfer.layers.router` with its settings
    bound, weights already scaled; `shared(p["shared"], x, rules=rules)` is added as it is.
    ValueError for another activation than SwiGLU with shared experts that don't follow it.

    >>> from functools import partial
    >>> from funcinfer.layers.router import softmax_top_k
    >>> from funcinfer.spec import init, with_dtype
    >>> p = init(with_dtype(moe_specs(8, 4, 6, shared_width=5), torch.float32))
    >>> route = partial(softmax_top_k, k=2, normalise=True)
    >>> moe(p, torch.ones(3, 8), rules=Rules.none(), route=route).shape
    torch.Size([3, 8])
    """
    y_TD = _routed(p, x_TD, rules=rules, route=route, activation=activation, exchange=exchange)
    if "shared" not in p:
        return y_TD
    if shared is shared_mlp and activation is not ops.swiglu:
        raise ValueError(
            f"moe: the routed experts' activation is {activation!r}, but shared_mlp is SwiGLU;"
            f" give shared=..., the function of the shared experts"
        )
    return y_TD + shared(p["shared"], x_TD, rules=rules)


def _routed(
    p: Params,
    x_TD: torch.Tensor,
    *,
    rules: Rules,
    route: Router,
    activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    exchange: Exchange,
) -> torch.Tensor:
    """The routed experts' part of `moe`, from and to the residual_tokens layout."""
    residual, dealt = rules["residual_tokens"], rules["moe_tokens"]
    experts, width = rules["experts"], rules["expert_mlp"]
    exchanged, finest = both(experts, dealt), longer(dealt, residual)
    x_TD = reshard(x_TD, P(residual, None), P(dealt, None))
    weights_TK, ids_TK = route(p["router"], x_TD)
    ids_nTK = local_ids(ids_TK, p["gate_up"].shape[0], experts, exchanged)

    def compute(x_MD: torch.Tensor, ids_MK: torch.Tensor, weights_MK: torch.Tensor) -> torch.Tensor:
        return ops.expert_mlp(
            x_MD, ids_MK, weights_MK, p["gate_up"], p["down"], activation=activation
        )

    y_TD = exchange(compute, x_TD, ids_nTK, weights_TK, exchanged)
    partial_over = join_axes(drop(experts, exchanged), width)
    y_TD = reduce_to(y_TD, partial_over, P(dealt, None), P(finest, None))
    return reshard(y_TD, P(finest, None), P(residual, None))
