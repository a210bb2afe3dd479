"""Multi-head latent attention over a latent cache, dense or over selected positions.

    c, kpe = the parts of x . wkv_a    ckv[T, C] = rms(c)    kpe[T, E] = rope(kpe)  -> cache
    a[T_q, Q] = rms(x . wq_a)          q[T_q, N_h, H], q_pe[T_q, N_h, E] = the parts of a . wq_b
    k_n = [w_uk_n ckv | kpe]           v_n = w_uv_n ckv
    y[T, D] = softmax(scale * [q_n | rope(q_pe_n)] . k_n) v_n . wo

It is computed in one of two forms, equal but for rounding:

    expanded    k, v[S, N_h, .] of the step's requests are made from their latents: for many tokens
    absorbed    u[T_q, N_h, C] = attention of q . w_uk over ckv itself, then u . w_uv: for few

T tokens, D model width, N heads, Q width of the query latent, C of the latent, E of the rotated
part, H of the rest of a head's key, V of its value, R requests, S positions, K selected ones. The
latents are never sharded; heads are. Source: DeepSeek-V2 (2024), section 2.1; sparse: DeepSeek-V3.2
(2025), section 2.1; layers that share a selection: GLM-5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.kvcache.latent import LatentKV, gather_latents, latent_kv_specs, write_latents
from funcinfer.kvcache.paged import PagedKV
from funcinfer.layers import primitives as ops
from funcinfer.layers.attend import merge_to, project_out
from funcinfer.layers.indexer import IndexerConfig, Rotate, indexer_specs, local_selection, select
from funcinfer.sharding import P, Rules, axis_size, drop, reshard
from funcinfer.spec import ParamSpec, ones

Params = dict[str, Any]
Cache = dict[str, Any]
Shared = Mapping[str, Any]
Kernel = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]

SELECTION = "selection"


def no_rope(x: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """`x` as it is: the `rotate` of a model without positions (NoPE)."""
    return x


@dataclass(frozen=True)
class MLAConfig:
    """The architecture of latent attention.

    `scale` is (nope_dim + rope_dim)^-0.5, times the mscale^2 of a stretched RoPE. `bias` puts one
    on wq_a, wkv_a and wo. `eps` is that of the norms of both latents. `rope_dim` may be 0, with
    `rotate=no_rope`. ValueError for sizes that don't go together.

    >>> cfg = MLAConfig(7168, 128, 512, nope_dim=128, rope_dim=64, v_dim=128, scale=192**-0.5)
    >>> mla_specs(cfg)["wq"].shape
    (128, 192, 7168)
    """

    embed_dim: int
    num_heads: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    q_lora: int | None = None
    bias: bool = False
    eps: float = 1e-6
    rotate: Rotate = ops.rotate_deinterleaved

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_heads", "kv_lora", "nope_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"MLAConfig {name}={getattr(self, name)} must be at least 1")
        if self.q_lora is not None and self.q_lora < 1:
            raise ValueError(f"MLAConfig q_lora={self.q_lora} must be at least 1, or None")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise ValueError(f"MLAConfig rope_dim={self.rope_dim} must be even and not negative")
        if self.rope_dim == 0 and self.rotate is not no_rope:
            raise ValueError("MLAConfig rope_dim=0 leaves nothing to rotate: give rotate=no_rope")


def mla_specs(cfg: MLAConfig) -> dict[str, ParamSpec]:
    """The parameters, in the checkpoint's [out, in] order.

    `wq_a` (Q, D), `q_a_norm` (Q), `wq_b` (N, H + E, Q); without a query latent `wq` (N, H + E, D);
    `wkv_a` (C + E, D), `kv_a_norm` (C), `w_uk` (N, H, C), `w_uv` (N, V, C), `wo` (D, N, V); biases
    `bq_a` (Q), `bkv_a` (C + E), `bo` (D). `w_uk` and `w_uv` are the two parts of kv_b_proj.
    """
    D, N, C, Q = cfg.embed_dim, cfg.num_heads, cfg.kv_lora, cfg.q_lora
    qk, kv_a = cfg.nope_dim + cfg.rope_dim, C + cfg.rope_dim
    if Q is None:
        specs = dict(wq=ParamSpec((N, qk, D), ("heads", None, "embed")))
    else:
        specs = dict(
            wq_a=ParamSpec((Q, D), ("q_lora", "embed")),
            q_a_norm=ParamSpec((Q,), ("q_lora",), init=ones),
            wq_b=ParamSpec((N, qk, Q), ("heads", None, "q_lora")),
        )
    specs |= dict(
        wkv_a=ParamSpec((kv_a, D), (None, "embed")),
        kv_a_norm=ParamSpec((C,), ("kv_lora",), init=ones),
        w_uk=ParamSpec((N, cfg.nope_dim, C), ("heads", None, "kv_lora")),
        w_uv=ParamSpec((N, cfg.v_dim, C), ("heads", None, "kv_lora")),
        wo=ParamSpec((D, N, cfg.v_dim), ("embed", "o_heads", None)),
    )
    if cfg.bias:
        specs |= dict(bkv_a=ParamSpec((kv_a,), (None,)), bo=ParamSpec((D,), ("embed",)))
        specs |= {} if Q is None else dict(bq_a=ParamSpec((Q,), ("q_lora",)))
    return specs


def mla_cache_specs(cfg: MLAConfig, num_pages: int, page_size: int) -> LatentKV:
    """The declaration of a layer's latent cache."""
    return latent_kv_specs(num_pages, page_size, kv_lora=cfg.kv_lora, rope_dim=cfg.rope_dim)


def mla(
    p: Params, x_TD: torch.Tensor, cache: LatentKV, step: Step, *, rules: Rules, cfg: MLAConfig
) -> tuple[torch.Tensor, LatentKV]:
    """Causal latent attention, from and to the residual_tokens layout, in the form that costs less.

    New latents are written first, so a token sees itself. The form follows from shapes alone, see
    `is_expanded`; `mla_absorbed` and `mla_expanded` are the two of them, with these arguments.

    >>> from funcinfer.kvcache.batch import Rows, make_batch, prepare
    >>> from funcinfer.layers.rope import Rope, rope_tables
    >>> from funcinfer.spec import empty, init
    >>> cfg = MLAConfig(8, 2, 6, nope_dim=3, rope_dim=2, v_dim=5, scale=5**-0.5)
    >>> batch = make_batch([[Rows([7, 8, 9], start=0, pages=[1])]], page_size=4)
    >>> rules, rope = Rules.none(), partial(rope_tables, Rope(10000.0, 2))
    >>> step = prepare(batch, rules=rules, rope=rope)
    >>> params, cache = init(mla_specs(cfg)), empty(mla_cache_specs(cfg, 2, 4))
    >>> x = torch.ones(3, 8, dtype=torch.bfloat16)
    >>> y, cache = mla(params, x, cache, step, rules=rules, cfg=cfg)
    >>> y.shape, cache.ckv.shape
    (torch.Size([3, 8]), torch.Size([2, 4, 6]))
    """
    form = mla_expanded if is_expanded(step, rules=rules, cfg=cfg) else mla_absorbed
    return form(p, x_TD, cache, step, rules=rules, cfg=cfg)


def is_expanded(step: Step, *, rules: Rules, cfg: MLAConfig) -> bool:
    """Whether the expanded form takes fewer products, a head and position of the page table:

        R C (H + V) + T (H + E + V)  <  T (2 C + E)

    that is from some 170 tokens a request on, in DeepSeek-V3. Where page_tokens deals the latents,
    the queries of several ranks' heads come together at each part and w_uk, w_uv of the others'
    heads aren't here: absorbed, always.
    """
    if axis_size(rules["page_tokens"]) > 1:
        return False
    T, R = step.rows.shape[0], step.page_table.shape[0]
    once = cfg.kv_lora * (cfg.nope_dim + cfg.v_dim)
    each = cfg.nope_dim + cfg.rope_dim + cfg.v_dim
    return R * once + T * each < T * (2 * cfg.kv_lora + cfg.rope_dim)


def mla_absorbed(
    p: Params, x_TD: torch.Tensor, cache: LatentKV, step: Step, *, rules: Rules, cfg: MLAConfig
) -> tuple[torch.Tensor, LatentKV]:
    """`mla` over the latents themselves: no position is expanded."""
    cache = _write(p, x_TD, cache, step, rules=rules, cfg=cfg)
    q_TNH, q_pe_TNE = _queries(p, _query_latent(p, x_TD, rules=rules, cfg=cfg), step, cfg=cfg)
    q_TNC, kernel = _absorb(p, q_TNH), latent_kernel(cache, step, cfg=cfg)
    return attend_latents(p, q_TNC, q_pe_TNE, kernel, rules=rules), cache


def mla_expanded(
    p: Params, x_TD: torch.Tensor, cache: LatentKV, step: Step, *, rules: Rules, cfg: MLAConfig
) -> tuple[torch.Tensor, LatentKV]:
    """`mla` with keys and values of this rank's heads made for all positions of the page table.

    They exist for this call only. ValueError where page_tokens deals the latents.
    """
    if axis_size(rules["page_tokens"]) > 1:
        raise ValueError(
            f"mla_expanded needs whole requests on each rank, but page_tokens="
            f"{rules['page_tokens']!r} deals them: use mla_absorbed"
        )
    cache = _write(p, x_TD, cache, step, rules=rules, cfg=cfg)
    q_TNH, q_pe_TNE = _queries(p, _query_latent(p, x_TD, rules=rules, cfg=cfg), step, cfg=cfg)
    latents = gather_latents(cache, step.page_table, step.kv_lens)
    ckv_RSC, kpe_RSE = (x.to(x_TD.dtype) for x in latents)
    k_RSNH = ops.linear(ckv_RSC, p["w_uk"])
    kpe_RSNE = kpe_RSE[:, :, None].expand(-1, -1, k_RSNH.shape[2], -1)
    v_RSNV = ops.linear(ckv_RSC, p["w_uv"])
    pages = torch.arange(step.page_table.shape[0], device=x_TD.device)[:, None]  # one a request
    o_TNV, _ = ops.paged_attention(
        torch.cat([q_TNH, q_pe_TNE], -1),
        PagedKV(torch.cat([k_RSNH, kpe_RSNE], -1), v_RSNV),
        pages,
        step.rows,
        step.lo,
        step.hi,
        scale=cfg.scale,
        segments=step.segments,
    )
    return project_out(p["wo"], o_TNV, rules=rules, bias_D=p.get("bo")), cache


def sparse_mla_specs(cfg: MLAConfig, index: IndexerConfig) -> Params:
    """`mla_specs`, and those of the indexer under `indexer`. ValueError where the two don't fit."""
    if (cfg.embed_dim, cfg.q_lora) != (index.embed_dim, index.q_lora):
        raise ValueError(
            f"attention has embed_dim={cfg.embed_dim} and q_lora={cfg.q_lora}, its indexer"
            f" {index.embed_dim} and {index.q_lora}: they must be equal"
        )
    return {**mla_specs(cfg), "indexer": indexer_specs(index)}


def sparse_mla(
    p: Params,
    x_TD: torch.Tensor,
    cache: Cache,
    step: Step,
    shared: Shared,
    *,
    rules: Rules,
    cfg: MLAConfig,
    index: IndexerConfig,
) -> tuple[torch.Tensor, Cache, Shared]:
    """Latent attention over the positions that the layer's own indexer selects: an `apply` of a
    sublayer.

    `cache` holds `kv`, a LatentKV, and `index`, an IndexKeys. The selection [T, K] is left in
    `shared["selection"]`, in q_tokens less page_tokens, for later layers.
    """
    kv = _write(p, x_TD, cache["kv"], step, rules=rules, cfg=cfg)
    a_TQ = _query_latent(p, x_TD, rules=rules, cfg=cfg)
    chosen_TK, keys = select(p["indexer"], x_TD, a_TQ, cache["index"], step, rules=rules, cfg=index)
    y_TD = _attend_selected(p, a_TQ, kv, step, chosen_TK, rules=rules, cfg=cfg)
    return y_TD, {**cache, "kv": kv, "index": keys}, {**shared, SELECTION: chosen_TK}


def shared_sparse_mla(
    p: Params,
    x_TD: torch.Tensor,
    cache: Cache,
    step: Step,
    shared: Shared,
    *,
    rules: Rules,
    cfg: MLAConfig,
) -> tuple[torch.Tensor, Cache, Shared]:
    """`sparse_mla` over the selection of an earlier layer: no indexer, no cache of keys, parameters
    as in `mla_specs`.

    ValueError where no earlier layer of this step has selected.
    """
    if SELECTION not in shared:
        raise ValueError(
            f"no earlier layer left a {SELECTION!r}: this step shares {sorted(shared)};"
            f" a layer with an indexer must come first"
        )
    kv = _write(p, x_TD, cache["kv"], step, rules=rules, cfg=cfg)
    a_TQ = _query_latent(p, x_TD, rules=rules, cfg=cfg)
    y_TD = _attend_selected(p, a_TQ, kv, step, shared[SELECTION], rules=rules, cfg=cfg)
    return y_TD, {**cache, "kv": kv}, shared


def _write(
    p: Params, x_TD: torch.Tensor, cache: LatentKV, step: Step, *, rules: Rules, cfg: MLAConfig
) -> LatentKV:
    """The cache with this step's latents. They travel, and not x, which is wider; where they stay
    where they are, one op does all of it.
    """
    tokens, C = rules["tokens"], cfg.kv_lora
    kv_TW = _project(p, x_TD, "kv_a")
    in_place = rules["residual_tokens"] == tokens == rules["requests"]
    if in_place and cfg.rotate is ops.rotate_deinterleaved:
        weight, pages, slots = p["kv_a_norm"], (cache.ckv, cache.kpe), step.slots
        return LatentKV(
            *ops.norm_rotate_write(kv_TW, weight, *step.k_rope, *pages, slots, eps=cfg.eps)
        )
    ckv_TC = ops.rms_norm(kv_TW[:, :C], p["kv_a_norm"], eps=cfg.eps)
    kv_TW = torch.cat([ckv_TC, kv_TW[:, C:]], -1)
    kv_TW = reshard(kv_TW, P(rules["residual_tokens"], None), P(tokens, None))
    kv_TW = torch.cat([kv_TW[:, :C], cfg.rotate(kv_TW[:, C:], *step.k_rope)], -1)
    kv_TW = reshard(kv_TW, P(tokens, None), P(rules["requests"], None))
    return write_latents(cache, kv_TW[:, :C], kv_TW[:, C:], step.slots)


def _query_latent(p: Params, x_TD: torch.Tensor, *, rules: Rules, cfg: MLAConfig) -> torch.Tensor:
    """The normed query latent [T, Q] in q_tokens; x itself where there is none."""
    a_TQ = x_TD
    if cfg.q_lora is not None:
        a_TQ = ops.rms_norm(_project(p, x_TD, "q_a"), p["q_a_norm"], eps=cfg.eps)
    return reshard(a_TQ, P(rules["residual_tokens"], None), P(rules["q_tokens"], None))


def _queries(
    p: Params, a_TQ: torch.Tensor, step: Step, *, cfg: MLAConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [T, N, H], rotated q_pe [T, N, E]) of this rank's heads, in q_tokens."""
    w_NWQ = p["wq"] if cfg.q_lora is None else p["wq_b"]
    q_TNW = ops.linear(a_TQ, w_NWQ)
    q_pe_TNE = cfg.rotate(q_TNW[..., cfg.nope_dim :], *step.q_rope)
    return q_TNW[..., : cfg.nope_dim], q_pe_TNE


def _attend_selected(
    p: Params,
    a_TQ: torch.Tensor,
    cache: LatentKV,
    step: Step,
    chosen_TK: torch.Tensor,
    *,
    rules: Rules,
    cfg: MLAConfig,
) -> torch.Tensor:
    q_TNH, q_pe_TNE = _queries(p, a_TQ, step, cfg=cfg)
    kernel = partial(
        ops.sparse_mla_attention,
        cache=cache,
        page_table_RM=step.page_table,
        rows_T=step.rows,
        positions_TK=local_selection(chosen_TK, step, rules=rules),
        scale=cfg.scale,
        with_lse=axis_size(rules["page_tokens"]) > 1,
    )
    return attend_latents(p, _absorb(p, q_TNH), q_pe_TNE, kernel, rules=rules)


def _absorb(p: Params, q_TNH: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tnh,nhc->tnc", q_TNH, p["w_uk"])


def latent_kernel(cache: LatentKV, step: Step, *, cfg: MLAConfig) -> Kernel:
    """Dense attention of this step over the latents, for `attend_latents`."""
    return partial(
        ops.paged_mla_attention,
        cache=cache,
        page_table_RM=step.page_table,
        rows_T=step.rows,
        lo_T=step.lo,
        hi_T=step.hi,
        scale=cfg.scale,
        segments=step.segments,
    )


def attend_latents(
    p: Params, q_TNC: torch.Tensor, q_pe_TNE: torch.Tensor, kernel: Kernel, *, rules: Rules
) -> torch.Tensor:
    """`kernel(q, q_pe) -> (u, lse)` over this rank's latents, merged, then w_uv and wo; from
    q_tokens to the residual_tokens layout.

    `q` has w_uk absorbed. lse may be None where nothing is to be merged.
    """
    dealt = rules["page_tokens"]
    full = P(rules["q_tokens"], rules["heads"], None)
    whole = P(*(drop(axis, dealt) for axis in full))
    q_TNW = reshard(torch.cat([q_TNC, q_pe_TNE], -1), full, whole)
    u_TNC, lse_TN = kernel(*q_TNW.split([q_TNC.shape[2], q_pe_TNE.shape[2]], -1))
    if lse_TN is not None:
        u_TNC = merge_to(u_TNC, lse_TN, dealt, whole, full)
    o_TNV = torch.einsum("tnc,nvc->tnv", u_TNC, p["w_uv"])
    return project_out(p["wo"], o_TNV, rules=rules, bias_D=p.get("bo"))


def _project(p: Params, x_TD: torch.Tensor, which: str) -> torch.Tensor:
    """`x . w{which} + b{which}`; the bias where the specs have one."""
    y_TF = ops.linear(x_TD, p[f"w{which}"])
    return y_TF + p[f"b{which}"] if f"b{which}" in p else y_TF
