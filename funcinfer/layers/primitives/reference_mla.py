"""Attention over paged latents, whole intervals or selected positions, in plain torch.

    z[T, N, S] = scale * (q[T, N, C] . ckv[S, C] + q_pe[T, N, E] . kpe[S, E])
    u[T, N, C] = softmax_S(z) ckv[S, C]         S: an interval, or the positions that were selected

All heads share one latent a position, which is key and value at once: the absorbed form of
multi-head latent attention (DeepSeek-V2 2024, section 2.1.2). What becomes of NaN is as in
`reference_attention`.

Legend: T tokens, R requests, M pages a request, S positions = M * page size, N heads, C latent
width, E rotated width, W = C + E, K selected positions, B tiles of a block, Q places of a tile.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcinfer.layers.primitives.reference_attention import MAX_TILE, attend_tiles
from funcinfer.layers.primitives.segments import Segments
from funcinfer.layers.primitives.tiles import (
    check_tokens,
    fetch_pages,
    over_tiles,
    tile_length,
)


class LatentCache(Protocol):
    """What latent attention reads: `ckv` [pages, page, C] and `kpe` [pages, page, E]."""

    @property
    def ckv(self) -> Tensor:
        """Latents."""
        ...

    @property
    def kpe(self) -> Tensor:
        """Rotated keys that all heads share."""
        ...


def paged_mla_attention(
    q_TNC: Tensor,
    q_pe_TNE: Tensor,
    cache: LatentCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    *,
    scale: float,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token over an interval of its request's latents: (u [T, N, C], lse [T, N]).

    `q` has the key up-projection absorbed. Intervals, dtypes, NaN, segments and a token that sees
    nothing are as in `paged_attention`. ValueError if shapes don't fit together.

    >>> from types import SimpleNamespace
    >>> pages = dict(ckv=torch.arange(8.0).view(2, 4, 1), kpe=torch.zeros(2, 4, 2))
    >>> one = torch.tensor([1])  # a token of request 1, which owns page 1; sees positions 1 and 2
    >>> q, q_pe, table = torch.zeros(1, 1, 1), torch.ones(1, 1, 2), torch.tensor([[0], [1]])
    >>> cache = SimpleNamespace(**pages)
    >>> u, lse = paged_mla_attention(q, q_pe, cache, table, one, one, 3 * one, scale=1.0)
    >>> u.item(), lse.exp().item()
    (5.5, 2.0)
    """
    check_latents("paged_mla_attention", (q_TNC, q_pe_TNE), cache, page_table_RM)
    check_tokens("paged_mla_attention", q_TNC, rows=rows_T, lo=lo_T, hi=hi_T)
    q_TNW = _scaled(q_TNC, q_pe_TNE, scale)
    s = torch.arange(page_table_RM.shape[1] * cache.ckv.shape[1], device=q_TNC.device)

    def attend(pages_BM: Tensor, q_BQNW: Tensor, lo_BQ: Tensor, hi_BQ: Tensor) -> Sequence[Tensor]:
        ckv_BSC, kpe_BSE = (fetch_pages(x, pages_BM) for x in (cache.ckv, cache.kpe))
        see_BQS = (s >= lo_BQ[..., None]) & (s < hi_BQ[..., None])
        return _attend_latents(q_BQNW, ckv_BSC, kpe_BSE, see_BQS)

    tile = tile_length(rows_T.shape[0], page_table_RM.shape[0], MAX_TILE)
    elements = s.shape[0] * (2 * q_TNW.shape[2] + tile * q_TNW.shape[1])
    u_TNC, lse_TN = over_tiles(
        attend, page_table_RM, rows_T, (q_TNW, lo_T, hi_T), tile=tile, elements=elements
    )
    return u_TNC.to(q_TNC.dtype), lse_TN


def sparse_mla_attention(
    q_TNC: Tensor,
    q_pe_TNE: Tensor,
    cache: LatentCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    positions_TK: Tensor,
    *,
    scale: float,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each token over selected positions of its request: (u [T, N, C], lse [T, N]).

    `positions_TK` count in this rank's pages; -1 is no position, and a position that is given twice
    counts twice. Here a -1 may stand anywhere; other back ends want them last. Only those rows of
    the cache are read. Without `with_lse` the second result is None. The rest is as in
    `paged_mla_attention`. ValueError if shapes don't fit together.

    >>> from types import SimpleNamespace
    >>> cache = SimpleNamespace(ckv=torch.arange(8.0).view(2, 4, 1), kpe=torch.zeros(2, 4, 2))
    >>> q, q_pe, row = torch.zeros(1, 1, 1), torch.ones(1, 1, 2), torch.tensor([0])
    >>> chosen = torch.tensor([[1, 3, -1]])
    >>> u, lse = sparse_mla_attention(q, q_pe, cache, row[None] + 1, row, chosen, scale=1.0)
    >>> u.item(), lse.exp().item()
    (6.0, 2.0)
    """
    check_selected((q_TNC, q_pe_TNE), cache, page_table_RM, rows_T, positions_TK)
    q_TNW = _scaled(q_TNC, q_pe_TNE, scale)
    page = cache.ckv.shape[1]

    def attend(pages_BM: Tensor, q_B1NW: Tensor, positions_B1K: Tensor) -> Sequence[Tensor]:
        see_B1K = positions_B1K >= 0
        at_BK = positions_B1K[:, 0].long().clamp_min(0)
        slots_BK = pages_BM.long().gather(1, at_BK // page) * page + at_BK % page
        ckv_BKC, kpe_BKE = (
            x.flatten(0, 1).index_select(0, slots_BK.flatten()).unflatten(0, slots_BK.shape)
            for x in (cache.ckv, cache.kpe)
        )
        return _attend_latents(q_B1NW, ckv_BKC, kpe_BKE, see_B1K)

    elements = positions_TK.shape[1] * (2 * q_TNW.shape[2] + q_TNW.shape[1])
    u_TNC, lse_TN = over_tiles(
        attend, page_table_RM, rows_T, (q_TNW, positions_TK), tile=1, elements=elements
    )
    return u_TNC.to(q_TNC.dtype), lse_TN if with_lse else None


def _scaled(q_TNC: Tensor, q_pe_TNE: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(q_TNC.dtype, torch.float32)
    return torch.cat([q_TNC.to(wide), q_pe_TNE.to(wide)], -1) * scale


def _attend_latents(
    q_BQNW: Tensor, ckv_BSC: Tensor, kpe_BSE: Tensor, see_BQS: Tensor
) -> tuple[Tensor, Tensor]:
    """(u [B, Q, N, C], lse [B, Q, N]): one KV head, its key the latent and the rotated part."""
    ckv_BSC, kpe_BSE = ckv_BSC.to(q_BQNW.dtype), kpe_BSE.to(q_BQNW.dtype)
    k_BS1W = torch.cat([ckv_BSC, kpe_BSE], -1)[:, :, None]
    u, lse = attend_tiles(q_BQNW[:, :, None], k_BS1W, ckv_BSC[:, :, None], see_BQS)
    return u[:, 0], lse[:, 0]


def check_latents(
    name: str, queries: tuple[Tensor, Tensor], cache: LatentCache, page_table_RM: Tensor
) -> None:
    """ValueError where queries, latents and page table don't fit together."""
    q_TNC, q_pe_TNE = queries
    fits = (
        q_TNC.ndim == q_pe_TNE.ndim == cache.ckv.ndim == cache.kpe.ndim == 3
        and q_TNC.shape[:2] == q_pe_TNE.shape[:2]
        and cache.ckv.shape[:2] == cache.kpe.shape[:2]
        and q_TNC.shape[2] == cache.ckv.shape[2]
        and q_pe_TNE.shape[2] == cache.kpe.shape[2]
        and page_table_RM.ndim == 2
        and page_table_RM.numel() > 0
    )
    if not fits:
        raise ValueError(
            f"{name}: q {tuple(q_TNC.shape)}, q_pe {tuple(q_pe_TNE.shape)}, ckv "
            f"{tuple(cache.ckv.shape)}, kpe {tuple(cache.kpe.shape)}, page_table "
            f"{tuple(page_table_RM.shape)}; wanted q [T, N, C], q_pe [T, N, E], ckv [pages, page, "
            "C], kpe [pages, page, E], page_table [R, M]"
        )


def check_selected(
    queries: tuple[Tensor, Tensor],
    cache: LatentCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    positions_TK: Tensor,
) -> None:
    """ValueError where the arguments of `sparse_mla_attention` don't fit together."""
    check_latents("sparse_mla_attention", queries, cache, page_table_RM)
    check_tokens("sparse_mla_attention", queries[0], rows=rows_T)
    if positions_TK.ndim != 2 or positions_TK.shape[0] != queries[0].shape[0]:
        raise ValueError(
            f"sparse_mla_attention: positions {tuple(positions_TK.shape)}; wanted [T, K] with "
            f"T = {queries[0].shape[0]}"
        )
