"""Latent attention over pages, dense and over selected positions, and the indexer's choice.

    paged_mla_attention     npu_fused_infer_attention_score_v2 with query_rope and key_rope: key and
                            value are both the latent, all heads share one
    sparse_mla_attention    npu_sparse_flash_attention, its absorbed mode; no LSE over pages
    lightning_indexer       npu_lightning_indexer
    mla_prolog              npu_mla_prolog_v3 over caches of PA_BSND, with their one head

Sparse attention and the indexer take lengths from the device. In sparse attention each token goes
in as a request of its own, which costs nothing: it reads its own keys anyway. So do tokens in the
indexer where there are no segments, or single ones; runs of several read their keys once.

Legend: T tokens, R requests, M pages a request, N heads, C latent width, E rotated width, I indexer
heads, H indexer width, K selected positions.
"""

from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference_indexer, reference_mla
from funcinfer.layers.primitives.npu_attention import (
    check_segments,
    empty_where,
    ragged_lengths,
    segment_pages,
)
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.reference_indexer import IndexCache, check_indexer
from funcinfer.layers.primitives.reference_mla import (
    LatentCache,
    check_latents,
    check_selected,
)
from funcinfer.layers.primitives.reference_prolog import PrologWeights
from funcinfer.layers.primitives.segments import Segments
from funcinfer.layers.primitives.tiles import check_tokens

ABSORBED = 2  # the one attention_mode that npu_sparse_flash_attention has


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
    """As `reference_mla.paged_mla_attention`."""
    check_latents("paged_mla_attention", (q_TNC, q_pe_TNE), cache, page_table_RM)
    check_tokens("paged_mla_attention", q_TNC, rows=rows_T, lo=lo_T, hi=hi_T)
    check_segments("paged_mla_attention", q_TNC, segments)
    args = (q_TNC, q_pe_TNE, cache, page_table_RM, rows_T, lo_T, hi_T)
    settings: dict[str, Any] = dict(scale=scale, segments=segments)
    form = choice("paged_mla_attention", *args, **settings).form
    if form is None or segments is None:
        return reference_mla.paged_mla_attention(*args, **settings)
    u_TNC, lse_TN1 = torch.ops.npu.npu_fused_infer_attention_score_v2(
        q_TNC.contiguous(),
        cache.ckv,
        cache.ckv,
        query_rope=q_pe_TNE.contiguous(),
        key_rope=cache.kpe,
        block_table=segment_pages(page_table_RM, rows_T, segments),
        block_size=cache.ckv.shape[1],
        num_query_heads=q_TNC.shape[1],
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="TND",
        return_softmax_lse=True,
        **ragged_lengths(segments, q_TNC.device),
    )
    return empty_where(hi_T <= lo_T, u_TNC, lse_TN1[..., 0])


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
    """As `reference_mla.sparse_mla_attention`; a token's positions stand before its -1."""
    check_selected((q_TNC, q_pe_TNE), cache, page_table_RM, rows_T, positions_TK)
    args = (q_TNC, q_pe_TNE, cache, page_table_RM, rows_T, positions_TK)
    settings: dict[str, Any] = dict(scale=scale, with_lse=with_lse)
    if choice("sparse_mla_attention", *args, **settings).form is None:
        return reference_mla.sparse_mla_attention(*args, **settings)
    T, (M, page) = q_TNC.shape[0], (page_table_RM.shape[1], cache.ckv.shape[1])
    latents, rotated = cache.ckv[:, :, None], cache.kpe[:, :, None]
    whole_T = torch.full((T,), M * page, dtype=torch.int32, device=q_TNC.device)
    u_TNC, _, _ = torch.ops.npu.npu_sparse_flash_attention(
        q_TNC.contiguous(),
        latents,
        latents,
        positions_TK[:, None].int().contiguous(),
        scale,
        block_table=page_table_RM.index_select(0, rows_T).int(),
        actual_seq_lengths_query=_one_each(T, q_TNC.device),
        actual_seq_lengths_kv=whole_T,
        query_rope=q_pe_TNE.contiguous(),
        key_rope=rotated,
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=0,
        attention_mode=ABSORBED,
    )
    blind_T = (positions_TK < 0).all(-1)
    return u_TNC.masked_fill(blind_T[:, None, None], 0), None


def lightning_indexer(
    q_TIH: Tensor,
    gate_TI: Tensor,
    keys: IndexCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor | None,
    hi_T: Tensor,
    *,
    topk: int,
    segments: Segments | None = None,
) -> Tensor:
    """As `reference_indexer.lightning_indexer`; positions come in order of their scores."""
    check_segments("lightning_indexer", q_TIH, segments)
    check_indexer(q_TIH, gate_TI, keys, page_table_RM, (rows_T, lo_T, hi_T))
    args = (q_TIH, gate_TI, keys, page_table_RM, rows_T, lo_T, hi_T)
    if choice("lightning_indexer", *args, topk=topk).form is None:
        return reference_indexer.lightning_indexer(*args, topk=topk)
    chosen_T1K, _ = torch.ops.npu.npu_lightning_indexer(
        q_TIH.contiguous(),
        keys.k[:, :, None],
        gate_TI.contiguous(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=min(topk, page_table_RM.shape[1] * keys.k.shape[1]),
        **_device_lengths(page_table_RM, rows_T, hi_T, segments),
    )
    return chosen_T1K[:, 0].masked_fill((hi_T <= 0)[:, None], -1)


def fused_prolog(
    x_TD: Tensor,
    weights: PrologWeights,
    tables: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    slots_T: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fused form of `mla_prolog`. What repeated slots hold is undefined: the scratch row is
    emptied after it.
    """
    cos, sin = (torch.cat([t, t], -1).to(x_TD.dtype) for t in tables)
    u_TNC, q_pe_TNE, *_ = torch.ops.npu.npu_mla_prolog_v3(
        x_TD.contiguous(),
        weights.dq,
        weights.uq_qr,
        weights.uk.contiguous(),
        weights.dkv_kr,
        weights.q_norm,
        weights.kv_norm,
        sin,
        cos,
        *(x[:, :, None] for x in pages),
        cache_index=slots_T.long(),
        rmsnorm_epsilon_cq=eps,
        rmsnorm_epsilon_ckv=eps,
        cache_mode="PA_BSND",
    )
    for x in pages:
        x[0, 0].zero_()
    return u_TNC, q_pe_TNE, *pages


def _device_lengths(
    page_table_RM: Tensor, rows_T: Tensor, hi_T: Tensor, segments: Segments | None
) -> dict[str, Any]:
    """Which tokens see what, for an op that takes lengths as tensors: runs, causal from the bottom
    right; or single tokens, whose lengths are on the device already.
    """
    if segments is None or segments.longest == 1:
        return dict(
            actual_seq_lengths_query=_one_each(rows_T.shape[0], rows_T.device),
            actual_seq_lengths_key=hi_T.int(),
            block_table=page_table_RM.index_select(0, rows_T).int(),
            sparse_mode=0,
        )
    ends_Z, kv_lens_Z = (
        torch.tensor(x, dtype=torch.int32, device=rows_T.device)
        for x in (segments.ends, segments.kv_lens)
    )
    return dict(
        actual_seq_lengths_query=ends_Z,
        actual_seq_lengths_key=kv_lens_Z,
        block_table=segment_pages(page_table_RM, rows_T, segments),
        sparse_mode=3,
    )


def _one_each(T: int, device: torch.device) -> Tensor:
    """Lengths of T one-token requests, added up."""
    return torch.arange(1, T + 1, dtype=torch.int32, device=device)
