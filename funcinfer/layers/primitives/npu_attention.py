"""Attention over pages by npu_fused_infer_attention_score_v2, and npu_attention_update.

Three forms, by what is known of the tokens and of the cache (see `npu_limits`):

    ragged    segments: queries [T, N, H] of runs, lengths of the runs and of their keys on the
              host. Causal from the bottom right (sparse_mode 3) for runs of several tokens; dense
              for single tokens, where the last key is the length.
    packed    the same for keys that were made for this step, a page a request: no page table, but
              the pages' rows joined one after another.
    masked    no segments (windows, calls without a Batch): each token is a request of its own, with
              a mask of all positions of its page table.

Queries of a run see one position more each: what the op's causal mode takes for granted. It does
not hold where pages are dealt over ranks, and so segments there are of single tokens.

Legend: T tokens, R requests, M pages a request, S positions = M * page, N q heads, K kv heads,
H head dim, V value dim, Z segments, L rows of all segments' keys, n parts.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference_attention
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.reference_attention import (
    PagedCache,
    check_paged,
    check_parts,
    with_sinks,
)
from funcinfer.layers.primitives.segments import Segments

MASK_SIZE = 2048  # of the fixed mask that the causal modes want, whatever the lengths
LOWEST = -1e30  # in place of -inf, which makes NaN where all parts have it
_masks: dict[torch.device, Tensor] = {}


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
    """As `reference_attention.paged_attention`.

    A sink is merged after the op, as one more part: what its own argument for them does to the LSE
    isn't documented. In the masked form, what a token doesn't see must be finite.
    """
    check_paged(q_TNH, cache, page_table_RM, (rows_T, lo_T, hi_T), sinks_N)
    check_segments("paged_attention", q_TNH, segments)
    args = (q_TNH, cache, page_table_RM, rows_T, lo_T, hi_T)
    settings: dict[str, Any] = dict(scale=scale, segments=segments)
    form = choice("paged_attention", *args, **settings).name
    if form == "ragged" and segments is not None:
        out, lse = _ragged(q_TNH, cache, page_table_RM, rows_T, segments, scale)
    elif form == "packed" and segments is not None:
        out, lse = _packed(q_TNH, cache, page_table_RM, segments, scale)
    elif form == "masked":
        out, lse = _masked(*args, scale)
    else:
        return reference_attention.paged_attention(*args, sinks_N=sinks_N, **settings)
    out, lse = empty_where(hi_T <= lo_T, out, lse)
    if sinks_N is not None:
        out, lse = with_sinks(out, lse, sinks_N)
    return out, lse


def check_segments(name: str, q: Tensor, segments: Segments | None) -> None:
    """ValueError where there are segments of another number of tokens."""
    if segments is not None and segments.num_tokens != q.shape[0]:
        raise ValueError(
            f"{name}: segments of {segments.num_tokens} tokens for q {tuple(q.shape)}; they must"
            f" be of all tokens, padding too"
        )


def empty_where(blind_T: Tensor, out_TNV: Tensor, lse_TN: Tensor) -> tuple[Tensor, Tensor]:
    """What a token that sees nothing gets: out 0, lse -inf. The ops leave it open."""
    out_TNV = out_TNV.masked_fill(blind_T[:, None, None], 0)
    return out_TNV, lse_TN.masked_fill(blind_T[:, None], -torch.inf)


def host_lengths(segments: Segments) -> dict[str, list[int]]:
    """The arguments of the op that are numbers of the host, and so change in a captured graph.

    Lengths of queries are added up, those of keys in pages are not. A run that sees nothing has one
    key, so that no length is 0: its result is replaced.
    """
    return dict(
        actual_seq_qlen=list(segments.ends),
        actual_seq_kvlen=[max(n, 1) for n in segments.kv_lens],
    )


def ragged_lengths(segments: Segments, device: torch.device) -> dict[str, Any]:
    """The arguments of the op that say which tokens see what.

    Single tokens see all of their keys, runs of several are causal from the bottom right.
    """
    lengths: dict[str, Any] = dict(host_lengths(segments))
    if segments.longest == 1:
        return dict(lengths, sparse_mode=0)
    return dict(lengths, sparse_mode=3, atten_mask=causal_mask(device))


def segment_pages(page_table_RM: Tensor, rows_T: Tensor, segments: Segments) -> Tensor:
    """The rows [Z, M] of the page table, one a segment, without a copy from the host."""
    if segments.longest == 1:
        return page_table_RM.index_select(0, rows_T).int()
    return _rows_of(page_table_RM, segments.rows).int()


def causal_mask(device: torch.device) -> Tensor:
    """The fixed mask [2048, 2048] of the causal modes: True, above the diagonal, hides."""
    if device not in _masks:
        ones = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
        mask = ones.triu(1)
        if type(mask) is not Tensor or mask.is_meta:
            return mask
        _masks[device] = mask
    return _masks[device]


def _ragged(
    q_TNH: Tensor,
    cache: PagedCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    segments: Segments,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out_TNV, lse_TN1 = torch.ops.npu.npu_fused_infer_attention_score_v2(
        q_TNH.contiguous(),
        cache.k.flatten(2),
        cache.v.flatten(2),
        block_table=segment_pages(page_table_RM, rows_T, segments),
        block_size=cache.k.shape[1],
        num_query_heads=q_TNH.shape[1],
        num_key_value_heads=cache.k.shape[2],
        softmax_scale=scale,
        input_layout="TND",
        return_softmax_lse=True,
        **ragged_lengths(segments, q_TNH.device),
    )
    return out_TNV, lse_TN1[..., 0]


def _packed(
    q_TNH: Tensor, cache: PagedCache, page_table_R1: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor]:
    """Without pages, lengths of keys are added up too."""
    lengths = ragged_lengths(segments, q_TNH.device)
    seen = lengths.pop("actual_seq_kvlen")
    page_Z = _rows_of(page_table_R1, segments.rows)[:, 0]
    k_LKH, v_LKV = (
        torch.cat([x[:n] for x, n in zip(pages.index_select(0, page_Z), seen, strict=True)])
        for pages in (cache.k, cache.v)
    )
    out_TNV, lse_TN1 = torch.ops.npu.npu_fused_infer_attention_score_v2(
        q_TNH.contiguous(),
        k_LKH,
        v_LKV,
        actual_seq_kvlen=list(accumulate(seen)),
        num_query_heads=q_TNH.shape[1],
        num_key_value_heads=cache.k.shape[2],
        softmax_scale=scale,
        input_layout="TND",
        return_softmax_lse=True,
        **lengths,
    )
    return out_TNV, lse_TN1[..., 0]


def _masked(
    q_TNH: Tensor,
    cache: PagedCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor,
    hi_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    S = page_table_RM.shape[1] * cache.k.shape[1]
    s_S = torch.arange(S, dtype=hi_T.dtype, device=q_TNH.device)
    hidden_TS = (s_S < lo_T[:, None]) | (s_S >= hi_T[:, None])
    out_T1NV, lse_TN11 = torch.ops.npu.npu_fused_infer_attention_score_v2(
        q_TNH.contiguous()[:, None],
        cache.k.flatten(2),
        cache.v.flatten(2),
        atten_mask=hidden_TS[:, None, None],
        actual_seq_kvlen=[S] * q_TNH.shape[0],
        block_table=page_table_RM.index_select(0, rows_T).int(),
        block_size=cache.k.shape[1],
        num_query_heads=q_TNH.shape[1],
        num_key_value_heads=cache.k.shape[2],
        softmax_scale=scale,
        input_layout="BSND",
        sparse_mode=0,
        return_softmax_lse=True,
    )
    return out_T1NV[:, 0], lse_TN11[..., 0, 0]


def _rows_of(page_table_RM: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Rows by numbers of the host, as slices of consecutive ones joined."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    slices = zip(starts, [*starts[1:], len(rows)], strict=True)
    return torch.cat([page_table_RM[rows[a] : rows[a] + b - a] for a, b in slices])


def merge_lse(outs_nTNV: Tensor, lses_nTN: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference_attention.merge_lse`; an LSE of -inf goes in as a very small one, of out 0."""
    check_parts(outs_nTNV, lses_nTN)
    if choice("merge_lse", outs_nTNV, lses_nTN).form is None:
        return reference_attention.merge_lse(outs_nTNV, lses_nTN)
    nothing_nTN = lses_nTN == -torch.inf
    outs = outs_nTNV.masked_fill(nothing_nTN[..., None], 0).flatten(1, -2)
    lses = lses_nTN.masked_fill(nothing_nTN, LOWEST).flatten(1)
    out, lse = torch.ops.npu.npu_attention_update(list(lses), list(outs), 1)
    out, lse = out.view(outs_nTNV.shape[1:]), lse.view(lses_nTN.shape[1:])
    return out, lse.masked_fill(nothing_nTN.all(0), -torch.inf)
