"""Grouped-query attention over a paged cache.

    q[T_q, N_h, H] = x . wq     k, v[T, K_k, H] = x . wk, x . wv -> new cache rows     y =
    attend(q) . wo

T tokens, N query heads, K KV heads (N = G * K), H head width, D model width. Source: Ainslie et
al., "GQA" (2023); biases as in Qwen2, norms of q and k as in Qwen3.
"""

from collections.abc import Callable
from typing import Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.kvcache.paged import PagedKV, write
from funcinfer.layers import primitives as ops
from funcinfer.layers.attend import attend, project_out
from funcinfer.sharding import P, Rules, axis_size, psum, reshard
from funcinfer.spec import ParamSpec, ones

Params = dict[str, Any]
QKNorm = Callable[..., torch.Tensor]


def attention_specs(
    embed: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> dict[str, ParamSpec]:
    """`wq` (N, H, D), `wk`, `wv` (K, H, D), `wo` (D, N, H); biases `bq` (N, H), `bk`, `bv` (K, H),
    `bo` (D).
    """
    q, kv = (num_heads, head_dim), (num_kv_heads, head_dim)
    specs = dict(
        wq=ParamSpec((*q, embed), ("heads", None, "embed")),
        wk=ParamSpec((*kv, embed), ("kv_heads", None, "embed")),
        wv=ParamSpec((*kv, embed), ("kv_heads", None, "embed")),
        wo=ParamSpec((embed, *q), ("embed", "o_heads", None)),
    )
    if qkv_bias:
        specs["bq"] = ParamSpec(q, ("heads", None))
        specs["bk"] = ParamSpec(kv, ("kv_heads", None))
        specs["bv"] = ParamSpec(kv, ("kv_heads", None))
    if out_bias:
        specs["bo"] = ParamSpec((embed,), ("embed",))
    return specs


def head_norm_specs(head_dim: int) -> dict[str, ParamSpec]:
    """Weights of norms over each head's width: `q_norm`, `k_norm` (H)."""
    return dict(
        q_norm=ParamSpec((head_dim,), (None,), init=ones),
        k_norm=ParamSpec((head_dim,), (None,), init=ones),
    )


def head_norm(eps: float) -> QKNorm:
    """RMSNorm over each head's width (Qwen3): a `qk_norm` of `attention`."""

    def norm(p: Params, x_TNH: torch.Tensor, which: str, *, rules: Rules) -> torch.Tensor:
        return ops.rms_norm(x_TNH, p[f"{which}_norm"], eps=eps)

    return norm


def full_width_norm_specs(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, ParamSpec]:
    """Weights of norms over all heads together: `q_norm` (N, H), `k_norm` (K, H)."""
    return dict(
        q_norm=ParamSpec((num_heads, head_dim), ("heads", None), init=ones),
        k_norm=ParamSpec((num_kv_heads, head_dim), ("kv_heads", None), init=ones),
    )


def full_width_norm(eps: float) -> QKNorm:
    """RMSNorm over the width of all heads together (MiniMax-M2): a `qk_norm` of `attention`.

    The mean of squares runs over every head once, on whatever ranks the heads lie.
    """

    def norm(p: Params, x_TNH: torch.Tensor, which: str, *, rules: Rules) -> torch.Tensor:
        axis = rules["heads"] if which == "q" else rules["kv_heads"]
        wide_TNH = x_TNH.to(torch.promote_types(x_TNH.dtype, torch.float32))
        total_T11 = psum(wide_TNH.square().sum((-2, -1), keepdim=True), axis)
        width = x_TNH.shape[-2] * x_TNH.shape[-1] * axis_size(axis)
        scaled_TNH = wide_TNH * torch.rsqrt(total_T11 / width + eps)
        return scaled_TNH.to(x_TNH.dtype) * p[f"{which}_norm"]

    return norm


def no_norm(p: Params, x_TNH: torch.Tensor, which: str, *, rules: Rules) -> torch.Tensor:
    """Queries and keys as they are (Llama, Qwen2): a `qk_norm` of `attention`."""
    return x_TNH


def project(p: Params, x_TD: torch.Tensor, which: str) -> torch.Tensor:
    """`x . w{which} + b{which}`, [T, heads, H]; the bias where the specs have one."""
    y_TNH = ops.linear(x_TD, p[f"w{which}"])
    return y_TNH + p[f"b{which}"] if f"b{which}" in p else y_TNH


def attention(
    p: Params,
    x_TD: torch.Tensor,
    cache: PagedKV,
    step: Step,
    *,
    rules: Rules,
    scale: float,
    qk_norm: QKNorm = no_norm,
) -> tuple[torch.Tensor, PagedKV]:
    """Causal attention of new tokens over their requests' pages, from and to the residual_tokens
    layout.

    New keys (normed, then rotated) and values are written first, so a token sees itself. RoPE is
    half-split over the first 2 * cos.shape[-1] dims of a head. `qk_norm(p, x, "q" or "k", rules=)`.
    """
    tokens, q_tokens, requests = rules["tokens"], rules["q_tokens"], rules["requests"]
    kv_heads = rules["kv_heads"]
    x_TD = reshard(x_TD, P(rules["residual_tokens"], None), P(tokens, None))
    k_TKH = qk_norm(p, project(p, x_TD, "k"), "k", rules=rules)
    k_TKH = ops.rotate_half_split(k_TKH, *step.k_rope)
    kv_TCKH = torch.stack([k_TKH, project(p, x_TD, "v")], 1)
    kv_TCKH = reshard(kv_TCKH, P(tokens, None, kv_heads, None), P(requests, None, kv_heads, None))
    cache = write(cache, kv_TCKH[:, 0], kv_TCKH[:, 1], step.slots)

    x_TD = reshard(x_TD, P(tokens, None), P(q_tokens, None))
    q_TNH = qk_norm(p, project(p, x_TD, "q"), "q", rules=rules)
    q_TNH = ops.rotate_half_split(q_TNH, *step.q_rope)
    o_TNH = attend(q_TNH, cache, step, rules=rules, scale=scale)
    return project_out(p["wo"], o_TNH, rules=rules, bias_D=p.get("bo")), cache
