"""Latent attention whose queries and new latents come from one op: a variant of `layers.mla`.

    u[T, N, C], q_pe[T, N, E], cache = mla_prolog(x[T, D], ...)      then as in `mla_absorbed`

npu_mla_prolog_v3 does in one call what are four products, two norms, two rotations and a write
otherwise. It wants the projections of x as [in, out], so a layer keeps copies of three of its
matrices, under `prolog`: the expanded form needs them as they are.

T tokens, D model width, N heads, Q width of the query latent, C of the latent, E of the rotated
part. Source: DeepSeek-V2 (2024), section 2.1.
"""

from typing import Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.kvcache.latent import LatentKV
from funcinfer.layers import primitives as ops
from funcinfer.layers.mla import (
    MLAConfig,
    Params,
    attend_latents,
    is_expanded,
    latent_kernel,
    mla_absorbed,
    mla_expanded,
    mla_specs,
)
from funcinfer.sharding import Rules
from funcinfer.spec import ParamSpec


def prolog_specs(cfg: MLAConfig) -> Params:
    """`mla_specs`, and under `prolog` the copies `dq` (D, Q), `uq_qr` (Q, N (H + E)), `dkv_kr`
    (D, C + E). ValueError for attention that the op doesn't know.

    >>> cfg = MLAConfig(8, 2, 6, nope_dim=3, rope_dim=2, v_dim=5, scale=1.0, q_lora=4)
    >>> prolog_specs(cfg)["prolog"]["uq_qr"].shape
    (4, 10)
    """
    D, N, Q, kv_a = cfg.embed_dim, cfg.num_heads, cfg.q_lora, cfg.kv_lora + cfg.rope_dim
    if Q is None or cfg.bias or cfg.rotate is not ops.rotate_deinterleaved:
        raise ValueError(
            f"attention with q_lora={Q}, bias={cfg.bias}, rotate={cfg.rotate.__name__} has no"
            f" prolog: it needs a query latent, no biases and rotate_deinterleaved; use mla"
        )
    # Blocks of `heads` are whole heads, where these divide by the ranks.
    copies = dict(
        dq=ParamSpec((D, Q), ("embed", "q_lora")),
        uq_qr=ParamSpec((Q, N * (cfg.nope_dim + cfg.rope_dim)), ("q_lora", "heads")),
        dkv_kr=ParamSpec((D, kv_a), ("embed", None)),
    )
    return {**mla_specs(cfg), "prolog": copies}


def with_prolog(p: Params) -> Params:
    """Parameters of `mla_specs` as those of `prolog_specs`: the copies are made, on an NPU in its
    own layout. To be done once, after loading. ValueError for what that layout can't hold.

    >>> p = {"wq_a": torch.ones(4, 8), "wq_b": torch.ones(2, 5, 4), "wkv_a": torch.ones(8, 8)}
    >>> [x.shape for x in with_prolog(p)["prolog"].values()]
    [torch.Size([8, 4]), torch.Size([4, 10]), torch.Size([8, 8])]
    """
    copies: dict[str, Any] = dict(
        dq=p["wq_a"].T.contiguous(),
        uq_qr=p["wq_b"].flatten(0, 1).T.contiguous(),
        dkv_kr=p["wkv_a"].T.contiguous(),
    )
    return {**p, "prolog": ops.fractal_weights(copies, list(copies))}


def prolog_mla(
    p: Params, x_TD: torch.Tensor, cache: LatentKV, step: Step, *, rules: Rules, cfg: MLAConfig
) -> tuple[torch.Tensor, LatentKV]:
    """`layers.mla.mla` with parameters of `prolog_specs`, its absorbed form by `ops.mla_prolog`.

    Where tokens move between x and the cache or the queries, which follows from the rules alone,
    the absorbed form is `mla_absorbed`.
    """
    if is_expanded(step, rules=rules, cfg=cfg):
        return mla_expanded(p, x_TD, cache, step, rules=rules, cfg=cfg)
    layouts = {rules[x] for x in ("residual_tokens", "tokens", "q_tokens", "requests")}
    if len(layouts) > 1:
        return mla_absorbed(p, x_TD, cache, step, rules=rules, cfg=cfg)
    copies = p["prolog"]
    weights = ops.PrologWeights(
        dq=copies["dq"],
        q_norm=p["q_a_norm"],
        uq_qr=copies["uq_qr"],
        uk=p["w_uk"],
        dkv_kr=copies["dkv_kr"],
        kv_norm=p["kv_a_norm"],
    )
    q_TNC, q_pe_TNE, *pages = ops.mla_prolog(
        x_TD, weights, *step.k_rope, cache.ckv, cache.kpe, step.slots, eps=cfg.eps
    )
    cache = LatentKV(*pages)
    kernel = latent_kernel(cache, step, cfg=cfg)
    return attend_latents(p, q_TNC, q_pe_TNE, kernel, rules=rules), cache
