"""Routers: which k of E experts each token goes to, and with what weights.

    softmax_top_k        s = softmax(W x)         k of all                      (Qwen3-MoE)
    softmax_group_top_k  s = softmax(W x)         k of the groups with the best expert (DeepSeek-V2)
    sigmoid_top_k        s = sigmoid(W x)         k of all by s + b             (MiniMax-M2)
    sigmoid_group_top_k  s = sigmoid(W x)         k of the groups with the best two by s + b
                                                              (DeepSeek-V3, GLM-4.5, GLM-5, Kimi-K2)

Each is `route(p, x_TD, ...) -> (weights[T, K], ids[T, K])`, and a layer takes any function of that
form. The bias b chooses experts and never weighs them (Wang et al., "Auxiliary-loss-free load
balancing", 2024); groups of experts are those of DeepSeek-V2 (2024), section 2.2.3. Equal scores go
to the lowest id, so that ranks that hold the same token choose alike.

Legend: T tokens, D model width, E experts, K choices of a token, G groups, S = E / G experts of a
group, J groups that are kept.
"""

from typing import Any

import torch
from torch.nn.functional import linear

from funcinfer.layers import primitives as ops
from funcinfer.spec import ParamSpec

Params = dict[str, Any]
Routes = tuple[torch.Tensor, torch.Tensor]


def router_specs(
    embed: int, num_experts: int, *, dtype: torch.dtype = torch.bfloat16
) -> dict[str, ParamSpec]:
    """`weight` (E, D), whole on every rank: each token is compared with all experts."""
    return dict(weight=ParamSpec((num_experts, embed), (None, "embed"), dtype))


def biased_router_specs(embed: int, num_experts: int) -> dict[str, ParamSpec]:
    """`weight` (E, D) and the selection bias `bias` (E), float32 in a model of any dtype.

    Biases of a trained model lie close together far from 0: bfloat16 would merge them.
    """
    return dict(
        **router_specs(embed, num_experts, dtype=torch.float32),
        bias=ParamSpec((num_experts,), (None,), torch.float32),
    )


def softmax_top_k(p: Params, x_TD: torch.Tensor, *, k: int, normalise: bool) -> Routes:
    """The k most probable experts; the probabilities, or with `normalise` their shares, as weights.

    Logits and weights have x's dtype, the softmax over all experts is float32 inside. ValueError
    for a k that the experts can't serve.

    >>> p = dict(weight=torch.tensor([[1.0], [3.0], [2.0]]).log())
    >>> softmax_top_k(p, torch.ones(1, 1), k=2, normalise=False)
    (tensor([[0.5000, 0.3333]]), tensor([[1, 2]]))
    """
    logits_TE = linear(x_TD, p["weight"])
    weight_TK, ids_TK = ops.gate_softmax(logits_TE, k=k)
    if normalise:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return weight_TK.to(logits_TE.dtype), ids_TK


def softmax_group_top_k(
    p: Params,
    x_TD: torch.Tensor,
    *,
    k: int,
    groups: int = 1,
    keep_groups: int = 1,
    scale: float = 1.0,
) -> Routes:
    """The k most probable experts of the `keep_groups` groups with the most probable expert.

    Weights are the probabilities times `scale`, not normalised, in at least float32, in which the
    logits are computed too. One group is DeepSeek-V2's "greedy". ValueError for groups that don't
    divide the experts, or leave fewer than k of them.

    >>> p = dict(weight=torch.tensor([[3.0], [0.0], [2.0], [2.0]]))
    >>> softmax_group_top_k(p, torch.ones(1, 1), k=2, groups=2, keep_groups=1)[1]
    tensor([[0, 1]])
    """
    weight_TK, ids_TK = ops.gate_softmax(
        _wide_logits(p, x_TD), k=k, groups=groups, keep_groups=keep_groups
    )
    return weight_TK * scale, ids_TK


def sigmoid_top_k(p: Params, x_TD: torch.Tensor, *, k: int) -> Routes:
    """The k experts with the largest sigmoid(W x) + b; their shares of sigmoid(W x) as weights.

    Logits have the weight's dtype, the rest and the result at least float32. ValueError for a k
    that the experts can't serve.

    >>> p = dict(weight=torch.zeros(3, 1), bias=torch.tensor([0.0, 2.0, 1.0]))
    >>> sigmoid_top_k(p, torch.ones(1, 1), k=2)
    (tensor([[0.5000, 0.5000]]), tensor([[1, 2]]))
    """
    logits_TE = linear(x_TD.to(p["weight"].dtype), p["weight"])
    weight_TK, ids_TK = ops.gate_sigmoid(logits_TE, p["bias"], k=k)
    return weight_TK / weight_TK.sum(-1, keepdim=True), ids_TK


def sigmoid_group_top_k(
    p: Params,
    x_TD: torch.Tensor,
    *,
    k: int,
    groups: int = 1,
    keep_groups: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> Routes:
    """The k largest s + b, s = sigmoid(W x), in the `keep_groups` groups with the best two.

    A group's score is the sum of its two largest s + b. Weights are s, or with `normalise` its
    shares, times `scale`; all in at least float32. ValueError for groups that don't divide the
    experts, hold one expert, or leave fewer than k.

    >>> p = dict(weight=torch.zeros(4, 1), bias=torch.tensor([-3.0, -3.0, -1.0, -6.0]))
    >>> sigmoid_group_top_k(p, torch.ones(1, 1), k=1, groups=2, keep_groups=1, scale=2.5)
    (tensor([[2.5000]]), tensor([[0]]))
    """
    weight_TK, ids_TK = ops.gate_sigmoid(
        _wide_logits(p, x_TD), p["bias"], k=k, groups=groups, keep_groups=keep_groups
    )
    if normalise:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
    return weight_TK * scale, ids_TK


def _wide_logits(p: Params, x_TD: torch.Tensor) -> torch.Tensor:
    """W x, multiplied and summed in at least float32."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return linear(x_TD.to(wide), p["weight"].to(wide))
