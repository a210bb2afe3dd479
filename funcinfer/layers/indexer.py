"""The lightning indexer: which positions a token's sparse attention looks at.

    q[T_q, I, H] = rope(a . wq)        gate[T_q, I] = x . weights * (I H)^-0.5
    k[T, H] = rope(layer_norm(x . wk)) -> index cache        one key head for all I
    chosen[T_q, K] = top K of sum_I gate * relu(q . k) over the positions that the token sees

T tokens, D model width, Q width of the query latent `a` of latent attention, I indexer heads, H
their width, K <= topk. RoPE turns the first dims of q and k by the angles of the main attention.
Every rank holds all keys and comes to the same choice. Source: DeepSeek-V3.2 (2025), section 2.1;
its Hadamard rotation of q and k is orthogonal and changes rounding alone, so it isn't done here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.kvcache.latent import IndexKeys, index_keys_specs, write_index_keys
from funcinfer.kvcache.layout import local_len, owner
from funcinfer.layers import primitives as ops
from funcinfer.sharding import P, Rules, axis_index, axis_size, drop, names, reshard
from funcinfer.spec import ParamSpec, ones, zeros

Params = dict[str, Any]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class IndexerConfig:
    """The architecture of an indexer. `rotate` is `ops.rotate_half_split` in DeepSeek-V3.2 and
    `ops.rotate_interleaved` in GLM-5. ValueError for a size below 1.
    """

    embed_dim: int
    q_lora: int
    num_heads: int
    head_dim: int
    topk: int
    rotate: Rotate
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("embed_dim", "q_lora", "num_heads", "head_dim", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"IndexerConfig {name}={getattr(self, name)} must be at least 1")


def indexer_specs(cfg: IndexerConfig) -> dict[str, ParamSpec]:
    """`wq` (I, H, Q), `wk` (H, D), weight and bias of the key norm (H), `weights` (I, D).

    >>> cfg = IndexerConfig(7168, 1536, 64, 128, topk=2048, rotate=ops.rotate_half_split)
    >>> indexer_specs(cfg)["wq"].shape
    (64, 128, 1536)
    """
    heads, width = cfg.num_heads, cfg.head_dim
    return dict(
        wq=ParamSpec((heads, width, cfg.q_lora), ("index_heads", None, "q_lora")),
        wk=ParamSpec((width, cfg.embed_dim), (None, "embed")),
        k_norm=ParamSpec((width,), (None,), init=ones),
        k_norm_bias=ParamSpec((width,), (None,), init=zeros),
        weights=ParamSpec((heads, cfg.embed_dim), (None, "embed")),
    )


def indexer_cache_specs(cfg: IndexerConfig, num_pages: int, page_size: int) -> IndexKeys:
    """The declaration of the indexer's cache of keys."""
    return index_keys_specs(num_pages, page_size, head_dim=cfg.head_dim)


def write_keys(
    p: Params, x_TD: torch.Tensor, keys: IndexKeys, step: Step, *, rules: Rules, cfg: IndexerConfig
) -> IndexKeys:
    """The cache with the keys of this step's tokens; `x` in the residual_tokens layout."""
    tokens = rules["tokens"]
    k_TH = ops.linear(x_TD, p["wk"])
    k_TH = ops.layer_norm(k_TH, p["k_norm"], p["k_norm_bias"], eps=cfg.eps)
    k_TH = reshard(k_TH, P(rules["residual_tokens"], None), P(tokens, None))
    k_TH = cfg.rotate(k_TH, *step.k_rope)
    k_TH = reshard(k_TH, P(tokens, None), P(rules["requests"], None))
    return write_index_keys(keys, k_TH, step.index_slots)


def index_queries(
    p: Params,
    x_TD: torch.Tensor,
    a_TQ: torch.Tensor,
    step: Step,
    *,
    rules: Rules,
    cfg: IndexerConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [T, I, H] and gates [T, I] of all heads, in q_tokens, for `ops.indexer_scores`.

    `x` is in residual_tokens, `a` in q_tokens. The gates hold the scales and are at least float32.
    """
    q_tokens, heads = rules["q_tokens"], rules["index_heads"]
    less = drop(q_tokens, heads)
    a_TQ = reshard(a_TQ, P(q_tokens, None), P(less, None))
    q_TIH = ops.linear(a_TQ, p["wq"])
    q_TIH = reshard(q_TIH, P(less, heads, None), P(q_tokens, None, None))
    gate_TI = ops.linear(x_TD, p["weights"])
    gate_TI = reshard(gate_TI, P(rules["residual_tokens"], None), P(q_tokens, None))
    gate_TI = gate_TI.to(torch.promote_types(gate_TI.dtype, torch.float32))
    return cfg.rotate(q_TIH, *step.q_rope), gate_TI * (cfg.num_heads * cfg.head_dim) ** -0.5


def select(
    p: Params,
    x_TD: torch.Tensor,
    a_TQ: torch.Tensor,
    keys: IndexKeys,
    step: Step,
    *,
    rules: Rules,
    cfg: IndexerConfig,
) -> tuple[torch.Tensor, IndexKeys]:
    """The positions [T, K] that each token attends over, int32, -1 for none; and the cache with the
    new keys.

    `x` is the layer's input in the residual_tokens layout, `a` the normed query latent in q_tokens.
    K is topk, or what the page table can hold if that is less. Keys are written whether or not any
    choice is left. The choice is in q_tokens less page_tokens, where attention runs, and counts
    whole positions of the request. ValueError where index_page_tokens is sharded.
    """
    if names(rules["index_page_tokens"]):
        raise ValueError(
            f"index_page_tokens={rules['index_page_tokens']!r} must be None: each rank chooses"
            f" among all keys of a request"
        )
    q_tokens, attend = rules["q_tokens"], drop(rules["q_tokens"], rules["page_tokens"])
    keys = write_keys(p, x_TD, keys, step, rules=rules, cfg=cfg)
    q_TIH, gate_TI = index_queries(p, x_TD, a_TQ, step, rules=rules, cfg=cfg)
    rows_T = reshard(step.rows, P(attend), P(q_tokens))
    hi_T = step.q_positions + 1
    # Where pages are dealt, those of the Step count this rank's positions, and not all.
    segments = step.segments if axis_size(rules["page_tokens"]) == 1 else None
    chosen_TK = ops.lightning_indexer(
        q_TIH,
        gate_TI,
        keys,
        step.page_table,
        rows_T,
        None,
        hi_T,
        topk=cfg.topk,
        segments=segments,
    )
    return reshard(chosen_TK, P(q_tokens, None), P(attend, None)), keys


def no_selection(x: torch.Tensor, step: Step, *, cfg: IndexerConfig) -> torch.Tensor:
    """A choice of nothing, of the shape, dtype and layout of what `select` chooses: all -1."""
    K = min(cfg.topk, step.page_table.shape[1] * step.page_size)
    return step.rows.new_full((step.rows.shape[0], K), -1)


def local_selection(chosen_TK: torch.Tensor, step: Step, *, rules: Rules) -> torch.Tensor:
    """The chosen positions as they are counted in this rank's pages; those of other ranks are -1.

    Ascending, -1 last. Where page_tokens deals nothing, the choice as it is.
    """
    dealt = rules["page_tokens"]
    n, r = axis_size(dealt), axis_index(dealt)
    if n == 1:
        return chosen_TK
    mine_TK = (chosen_TK >= 0) & (owner(chosen_TK, n, step.interleave) == r)
    last = torch.iinfo(chosen_TK.dtype).max
    local_TK = torch.where(mine_TK, local_len(chosen_TK, n, step.interleave, r), last)
    local_TK = local_TK.sort(-1).values
    return torch.where(local_TK == last, -1, local_TK)
