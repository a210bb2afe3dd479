"""Attention over a paged cache, and the merge of attention over disjoint keys, in plain torch.

    z[T, N, S] = scale * q[T, N, H] . k[S, K, H] + (0 where lo[T] <= s < hi[T], else -inf)
    lse[T, N] = log sum_S exp(z)          out[T, N, V] = sum_S exp(z - lse) v[S, K, V]

The G query heads of a group share KV head n // G. A sink is one more logit, unscaled and with value
0 (Agarwal et al. 2025, gpt-oss). (out, lse) pairs of disjoint key sets form a monoid under
`merge_lse` (Milakov & Gimelshein 2018); its identity is (anything, -inf).

Legend: T tokens, R requests, M pages a request, N q heads, K kv heads, G = N / K, H head dim,
V value dim, S kv positions, B tiles of a block, Q places of a tile, n parts.
"""

from typing import Protocol

import torch
from torch import Tensor

from funcinfer.layers.primitives.segments import Segments
from funcinfer.layers.primitives.tiles import fetch_pages, over_tiles, tile_length

# A tile longer than this gains nothing: the fetch of its keys is already small beside its products.
MAX_TILE = 64


class PagedCache(Protocol):
    """What `paged_attention` reads: keys [pages, page, K, H] and values [pages, page, K, V]."""

    @property
    def k(self) -> Tensor:
        """Keys."""
        ...

    @property
    def v(self) -> Tensor:
        """Values."""
        ...


def paged_attention(
    q_TNH: Tensor,
    cache: PagedCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    *,
    scale: float,
    sinks_N: Tensor | None = None,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token over an interval of its request's paged keys, with natural-log LSE.

    Token t sees the positions lo_T[t] <= s < hi_T[t] of request rows_T[t]; position s lies in page
    page_table_RM[row, s // page] at offset s % page. Integers are int32 or int64; rows and page ids
    must be valid for padding too. Returns out [T, N, V] in q's dtype and lse [T, N] in at least
    float32 = logsumexp of the visible scaled scores and, if given, the sink. A token that sees
    nothing gets out 0 and lse -inf (lse = its sink, if given). What a token doesn't see may be NaN
    or infinite and doesn't reach its result or its gradient; what it sees does. `segments`,
    where lo is 0, are what rows and hi say, for kernels of ragged batches; they are not looked at
    here.
    ValueError if shapes don't fit together.

    >>> from types import SimpleNamespace
    >>> cache = SimpleNamespace(k=torch.zeros(2, 4, 1, 3), v=torch.arange(8.0).view(2, 4, 1, 1))
    >>> one = torch.tensor([1])  # a token of request 1, which owns page 1; sees positions 1 and 2
    >>> q, table = torch.ones(1, 1, 3), torch.tensor([[0], [1]])
    >>> out, lse = paged_attention(q, cache, table, one, one, 3 * one, scale=1.0)
    >>> out.item(), lse.exp().item()
    (5.5, 2.0)
    """
    check_paged(q_TNH, cache, page_table_RM, (rows_T, lo_T, hi_T), sinks_N)
    (T, N, H), (R, M) = q_TNH.shape, page_table_RM.shape
    _, page, K, V = cache.v.shape
    S = M * page
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    q_TKGH = (q_TNH.to(wide) * scale).unflatten(1, (K, -1))
    s = torch.arange(S, device=q_TNH.device)

    def attend(pages_BM: Tensor, q_BQKGH: Tensor, lo_BQ: Tensor, hi_BQ: Tensor) -> list[Tensor]:
        k_BSKH, v_BSKV = (fetch_pages(x, pages_BM).to(wide) for x in (cache.k, cache.v))
        see_BQS = (s >= lo_BQ[..., None]) & (s < hi_BQ[..., None])
        return [x.movedim(1, 2) for x in attend_tiles(q_BQKGH, k_BSKH, v_BSKV, see_BQS)]

    tile = tile_length(T, R, MAX_TILE)
    elements = S * (K * (H + V) + tile * N)
    out, lse = over_tiles(
        attend, page_table_RM, rows_T, (q_TKGH, lo_T, hi_T), tile=tile, elements=elements
    )
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if sinks_N is not None:
        out, lse = with_sinks(out, lse, sinks_N)
    return out.to(q_TNH.dtype), lse


def attend_tiles(
    q_BQKGH: Tensor, k_BSKH: Tensor, v_BSKV: Tensor, see_BQS: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [B, K, Q, G, V], lse [B, K, Q, G]) of tiles of scaled queries, each over its own keys.

    One product a KV head: batching over (B, K) would make a transposed copy of all keys.
    """
    K = k_BSKH.shape[2]
    # What isn't finite is replaced by 0 and makes its score NaN instead, which visibility hides.
    # Keys need it for the gradient of q only, which multiplies them by 0 where they are unseen.
    spoilt_BSK = v_BSKV.detach().sum(-1) * 0
    v_BSKV = v_BSKV.nan_to_num(0.0, 0.0, 0.0)
    if q_BQKGH.requires_grad:
        spoilt_BSK = spoilt_BSK + k_BSKH.detach().sum(-1) * 0
        k_BSKH = k_BSKH.nan_to_num(0.0, 0.0, 0.0)
    z_BKQGS = torch.stack(
        [torch.einsum("bqgh,bsh->bqgs", q_BQKGH[:, :, j], k_BSKH[:, :, j]) for j in range(K)], 1
    )
    z_BKQGS = z_BKQGS + spoilt_BSK.movedim(2, 1)[:, :, None, None]
    # A query that sees nothing gets equal scores, to keep NaN out of the gradient; dropped below.
    empty_BKQG = ~see_BQS.any(-1)[:, None, :, None]
    unseen_BKQGS = torch.zeros_like(empty_BKQG, dtype=z_BKQGS.dtype).masked_fill(
        ~empty_BKQG, -torch.inf
    )[..., None]
    z_BKQGS = torch.where(see_BQS[:, None, :, None], z_BKQGS, unseen_BKQGS)
    p_BKQGS = z_BKQGS.softmax(-1)
    lse_BKQG = z_BKQGS.amax(-1) - p_BKQGS.amax(-1).log()  # logsumexp's exp is slow at -inf
    out_BKQGV = torch.stack(
        [torch.einsum("bqgs,bsv->bqgv", p_BKQGS[:, j], v_BSKV[:, :, j]) for j in range(K)], 1
    )
    return (
        torch.where(empty_BKQG[..., None], 0.0, out_BKQGV),
        torch.where(empty_BKQG, -torch.inf, lse_BKQG),
    )


def with_sinks(out_TNV: Tensor, lse_TN: Tensor, sinks_N: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with a sink for each head: one more part, of value 0."""
    sinks_TN = sinks_N.to(lse_TN.dtype).expand_as(lse_TN)
    parts = torch.stack([out_TNV, torch.zeros_like(out_TNV)])
    return merge_lse(parts, torch.stack([lse_TN, sinks_TN]))


def merge_lse(outs_nTNV: Tensor, lses_nTN: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention results over disjoint key sets: (out [T, N, V], lse [T, N]).

    outs: [n, ..., V]; lses: [n, ...], natural logarithms. A part with lse -inf is ignored whatever
    its out is, NaN included; if all are, out is 0 and lse -inf. A sink belongs to one part only.
    out has outs' dtype, lse at least float32. ValueError if the shapes don't fit or n is 0.

    >>> outs, lses = torch.tensor([[3.0], [6.0]]), torch.tensor([2.0, 1.0]).log()
    >>> out, lse = merge_lse(outs, lses)
    >>> out.round(decimals=3), lse.exp().round(decimals=3)
    (tensor([4.]), tensor(3.))
    """
    check_parts(outs_nTNV, lses_nTN)
    lses = lses_nTN.to(torch.promote_types(lses_nTN.dtype, torch.float32))
    outs = outs_nTNV.to(torch.promote_types(outs_nTNV.dtype, lses.dtype))
    top = lses.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = (lses - top).exp()
    outs = torch.where((lses == -torch.inf)[..., None], 0.0, outs)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out.to(outs_nTNV.dtype), torch.where(empty, -torch.inf, total.log() + top)


def check_parts(outs_nTNV: Tensor, lses_nTN: Tensor) -> None:
    """ValueError where the arguments of `merge_lse` don't fit together."""
    if outs_nTNV.shape[:-1] != lses_nTN.shape or not lses_nTN.shape[0]:
        raise ValueError(
            f"merge_lse: outs {tuple(outs_nTNV.shape)} and lses {tuple(lses_nTN.shape)}; wanted "
            "outs [n, ..., V] and lses [n, ...] with n >= 1"
        )


def check_paged(
    q_TNH: Tensor,
    cache: PagedCache,
    page_table_RM: Tensor,
    per_token: tuple[Tensor, Tensor, Tensor],
    sinks_N: Tensor | None,
) -> None:
    """ValueError where the arguments of `paged_attention` don't fit together."""

    def fail(problem: str) -> None:
        raise ValueError(
            f"paged_attention: {problem}; q is {tuple(q_TNH.shape)}, k {tuple(cache.k.shape)}, "
            f"v {tuple(cache.v.shape)}, page_table {tuple(page_table_RM.shape)}"
        )

    if q_TNH.ndim != 3 or cache.k.ndim != 4 or cache.v.ndim != 4 or page_table_RM.ndim != 2:
        fail("wanted q [T, N, H], k [pages, page, K, H], v [pages, page, K, V], page_table [R, M]")
    if cache.k.shape[:3] != cache.v.shape[:3]:
        fail("k and v must agree on pages, page size and KV heads")
    if q_TNH.shape[2] != cache.k.shape[3]:
        fail(f"q has head dim {q_TNH.shape[2]} and k {cache.k.shape[3]}; they must be equal")
    if q_TNH.shape[1] % cache.k.shape[2]:
        fail(f"{q_TNH.shape[1]} q heads can't be grouped over {cache.k.shape[2]} KV heads")
    if not page_table_RM.shape[0] or not page_table_RM.shape[1]:
        fail("the page table needs at least one request and one page a request")
    for name, x in zip(("rows", "lo", "hi"), per_token, strict=True):
        if x.shape != q_TNH.shape[:1]:
            fail(f"{name} is {tuple(x.shape)} but must have one entry a token: {q_TNH.shape[0]}")
    if sinks_N is not None and sinks_N.shape != q_TNH.shape[1:2]:
        fail(f"sinks is {tuple(sinks_N.shape)} but must have one entry a q head: {q_TNH.shape[1]}")
