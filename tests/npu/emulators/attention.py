"""Attention over whole or paged keys, and the merge of its parts.

Legend: T tokens of all sequences, Q tokens of one, S keys of one, N query heads, K kv heads, D
width of keys, V of values, W = D + rotated width.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.npu.emulators.rules import FLOATS, HALF, dense, dtypes, emulator, nothing, require

NAME = "npu_fused_infer_attention_score_v2"
COMPRESSED = 2048  # the side of the one mask that modes 2, 3 and 4 take


def softmax_attend(
    q_QNW: Tensor, k_SKW: Tensor, v_SKV: Tensor, scale: float, see_QS: Tensor, sinks_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(out [Q, N, V], lse [Q, N]) in float32; a row that sees nothing is NaN.

    Values are multiplied by their probabilities whether or not those are 0, as matrix units do.
    """
    heads = q_QNW.shape[1] // k_SKW.shape[1]
    k, v = (x.float().repeat_interleave(heads, 1) for x in (k_SKW, v_SKV))
    z_NQS = torch.einsum("qnw,snw->nqs", q_QNW.float(), k) * scale
    z_NQS = z_NQS.masked_fill(~see_QS, -torch.inf)
    sinks = sinks_N.float()[:, None, None].expand(-1, z_NQS.shape[1], 1)
    lse_NQ = torch.cat([z_NQS, sinks], -1).logsumexp(-1)
    out = torch.einsum("nqs,snv->qnv", (z_NQS - lse_NQ[..., None]).exp(), v)
    blind_Q = ~see_QS.any(-1)
    out[blind_Q], lse_NQ[:, blind_Q] = torch.nan, torch.nan
    return out, lse_NQ.T


class Sequences(NamedTuple):
    """One entry a sequence: queries [Q, N, W], keys [S, K, W], values [S, K, V]."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def from_sums(name: str, sums: Sequence[int], total: int) -> list[tuple[int, int]]:
    """(start, end) of each sequence, of cumulative lengths without the leading 0."""
    starts = [0, *sums[:-1]]
    ascending = all(a <= b for a, b in zip(starts, sums, strict=True))
    require(ascending, f"{name}: {list(sums)} are not sums of lengths, which never fall")
    require(sums[-1] == total, f"{name}: sums of lengths end at {sums[-1]}, not at T = {total}")
    return list(zip(starts, sums, strict=True))


def pages(name: str, cache: Tensor, table: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The first tokens of each sequence from a cache [blocks, block size, ...]."""
    size = cache.shape[1]
    require(table.dtype == torch.int32 and table.ndim == 2, f"{name}: block_table int32 [B, M]")
    require(len(lengths) == table.shape[0], f"{name}: a length for each row of block_table")
    require(min(lengths) >= 0, f"{name}: lengths from 0")
    need = -(-max(lengths) // size)
    require(need <= table.shape[1], f"{name}: {max(lengths)} tokens need {need} columns of blocks")
    parts = []
    for row, length in zip(table.tolist(), lengths, strict=True):
        used = row[: -(-length // size)]
        inside = all(0 <= page < cache.shape[0] for page in used)
        require(inside, f"{name}: blocks {used} of a cache of {cache.shape[0]}")
        parts.append(cache[used].flatten(0, 1)[:length])
    return parts


def visible(count: int, keys: int, mode: int, mask: Tensor | None, band: tuple[int, int]) -> Tensor:
    """Which keys [Q, S] each query sees."""
    i, j = torch.arange(count)[:, None], torch.arange(keys)[None, :]
    last = i + keys - count  # aligned at the bottom right
    if mode in (0, 1):
        return torch.ones(count, keys, dtype=torch.bool) if mask is None else mask == 0
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= last
    require(mode == 4, f"{NAME}: the emulator knows sparse modes 0 to 4, not {mode}")
    before, after = band
    return (j >= last - before) & (j <= last + after)


@emulator
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    atten_mask: Tensor | None,
    actual_seq_qlen: Sequence[int] | None,
    actual_seq_kvlen: Sequence[int] | None,
    block_table: Tensor | None,
    learnable_sink: Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    inner_precise: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    dtypes(NAME, HALF, query, key, value, query_rope, key_rope)
    dense(NAME, query, key, value, query_rope, key_rope, atten_mask)
    heads = num_query_heads
    kv_heads = num_key_value_heads or heads
    require(heads % kv_heads == 0 and heads // kv_heads <= 64, f"{NAME}: {heads} of {kv_heads}")
    require((query_rope is None) == (key_rope is None), f"{NAME}: both ropes or none")
    layout = _Layout(input_layout, heads, kv_heads, actual_seq_qlen, actual_seq_kvlen)
    paged = None if block_table is None else (block_table, block_size)
    seqs = layout.sequences(query, (key, value), paged)
    _check_widths(seqs, query_rope is not None, input_layout, paged is not None, heads, kv_heads)
    if query_rope is not None and key_rope is not None:
        ropes = layout.sequences(query_rope, (key_rope, key_rope), paged)
        require(ropes.q[0].shape[-1] == 64, f"{NAME}: 64 rotated dims")
        seqs = Sequences(*(map(_joined, seqs[:2], ropes[:2])), seqs.v)
    rows = max(q.shape[0] for q in seqs.q)
    if rows == 1 and query_rope is None and sparse_mode > 1:
        sparse_mode, atten_mask = 0, None  # "has no effect where Q_S is 1"
    _check_mask(sparse_mode, atten_mask)
    no_sink = torch.full((heads,), -torch.inf)
    if learnable_sink is not None:
        require("TND" in input_layout, f"{NAME}: a sink with TND alone")
        require(learnable_sink.shape == (heads,), f"{NAME}: a sink a head")
        require(seqs.v[0].shape[-1] <= 128, f"{NAME}: a sink with values of up to 128")
    outs, lses = [], []
    for b, (q, k, v) in enumerate(zip(*seqs, strict=True)):
        mask = None if atten_mask is None else _full_mask(atten_mask, b, q.shape[0], k.shape[0])
        see = visible(q.shape[0], k.shape[0], sparse_mode, mask, (pre_tokens, next_tokens))
        sink = no_sink if learnable_sink is None else learnable_sink
        out, lse = softmax_attend(q, k, v, softmax_scale, see, sink)
        if inner_precise & 2:  # rows that see nothing are set to 0
            out[~see.any(-1)] = 0.0
        outs.append(out.to(query.dtype))
        lses.append(lse)
    return layout.results(query, outs, lses, return_softmax_lse)


def _joined(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [torch.cat(pair, -1) for pair in zip(a, b, strict=True)]


class _Layout(NamedTuple):
    """How a layout string lays sequences into tensors."""

    name: str
    heads: int
    kv_heads: int
    q_lens: Sequence[int] | None
    kv_lens: Sequence[int] | None

    def sequences(
        self, q: Tensor, kv: tuple[Tensor, Tensor], paged: tuple[Tensor, int] | None
    ) -> Sequences:
        """Queries, keys and values of each sequence."""
        known = self.name in ("TND", "BSND", "BNSD", "BSH")
        require(known, f"the emulator of {NAME} does not know layout {self.name}")
        queries = self._split(q, self.q_lens, self.heads)
        if paged is None:
            keys, values = (self._split(x, self.kv_lens, self.kv_heads) for x in kv)
        else:
            keys, values = (self._pages(x, *paged) for x in kv)
        require(len(queries) == len(keys), f"{NAME}: {len(queries)} q and {len(keys)} kv lengths")
        return Sequences(queries, keys, values)

    def _split(self, x: Tensor, lengths: Sequence[int] | None, heads: int) -> list[Tensor]:
        if self.name == "TND":
            require(lengths is not None, f"{NAME}: TND needs lengths")
            require(x.ndim == 3 and x.shape[1] == heads, f"{NAME}: TND is [T, {heads}, D]")
            return [x[a:b] for a, b in from_sums(NAME, lengths or (), x.shape[0])]
        if self.name == "BSH":
            x = x.unflatten(-1, (heads, -1))
        elif self.name == "BNSD":
            x = x.transpose(1, 2)
        require(x.ndim == 4 and x.shape[2] == heads, f"{NAME}: {self.name} of {heads} heads")
        whole = [x.shape[1]] * x.shape[0]
        used = whole if lengths is None else list(lengths)
        fits = len(used) == len(whole) and all(0 <= a <= x.shape[1] for a in used)
        require(fits, f"{NAME}: lengths {used} of [B, S] = {tuple(x.shape[:2])}: one a sequence")
        return [sequence[:n] for sequence, n in zip(x, used, strict=True)]

    def _pages(self, cache: Tensor, table: Tensor, size: int) -> list[Tensor]:
        require(self.kv_lens is not None, f"{NAME}: pages need kv lengths, one a sequence")
        if cache.ndim == 3:  # [blocks, size, K D]
            require(cache.shape[2] <= 65535, f"{NAME}: K D <= 65535")
            cache = cache.unflatten(-1, (self.kv_heads, -1))
        else:  # [blocks, K, size, D]
            require(
                self.name in ("TND", "BNSD"), f"{NAME}: {self.name} pages are [blocks, size, H]"
            )
            cache = cache.transpose(1, 2)
        require(cache.shape[2] == self.kv_heads, f"{NAME}: pages of {self.kv_heads} heads")
        require(cache.shape[1] == size, f"{NAME}: block_size {size} of pages of {cache.shape[1]}")
        require(size % 16 == 0 and 0 < size <= 1024, f"{NAME}: block size {size}")
        if self.name != "TND" and self.q_lens is None:
            require(size % 128 == 0 and size <= 512, f"{NAME}: block size {size}, not 128 to 512")
        return pages(NAME, cache, table, list(self.kv_lens or ()))

    def results(
        self, query: Tensor, outs: list[Tensor], lses: list[Tensor], with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        """(out in the layout of the query, lse)."""
        if self.name == "TND":
            return torch.cat(outs), torch.cat(lses)[..., None] if with_lse else nothing()
        V = outs[0].shape[-1]
        S = max(query.shape[2 if self.name == "BNSD" else 1], 1)
        out = torch.full((len(outs), S, self.heads, V), torch.nan, dtype=query.dtype)
        lse = torch.full((len(outs), self.heads, S, 1), torch.nan)
        for b, (o, e) in enumerate(zip(outs, lses, strict=True)):
            out[b, : len(o)], lse[b, :, : len(o), 0] = o, e.T
        if self.name == "BNSD":
            out = out.transpose(1, 2).contiguous()
        return out.flatten(2) if self.name == "BSH" else out, lse if with_lse else nothing()


def _check_widths(
    seqs: Sequences, rope: bool, layout: str, paged: bool, heads: int, kv_heads: int
) -> None:
    D, V = seqs.k[0].shape[-1], seqs.v[0].shape[-1]
    require(seqs.q[0].shape[-1] == D, f"{NAME}: queries and keys of one width")
    require(D % 16 == 0 and D <= 512 and heads <= 256, f"{NAME}: D {D}, N {heads}")
    if rope:
        require(D in (512, 128), f"{NAME}: with ropes D is 512 or 128, not {D}")
        powers = heads & (heads - 1) == 0 and heads <= 128
        require(D == 128 or (powers and kv_heads == 1), f"{NAME}: latents: N a power of 2, K 1")
    else:
        require(D != 512 or layout != "TND", f"{NAME}: TND with D 512 needs ropes")
    if layout == "TND" and D != 512:
        allowed = [(128, 128), (192, 128)]
        if heads == kv_heads:
            allowed += [(64, 64)]
        elif not paged:
            allowed += [(192, 192)]
        require((D, V) in allowed, f"{NAME}: TND takes (D, V) of {allowed}, not {(D, V)}")


def _check_mask(mode: int, mask: Tensor | None) -> None:
    if mode in (2, 3, 4):
        require(mask is not None, f"{NAME}: sparse mode {mode} needs the compressed mask")
    if mode == 1:
        require(mask is not None, f"{NAME}: sparse mode 1 needs a mask")
    if mask is None:
        return
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"{NAME}: mask bool or 8 bits")
    if mode in (2, 3, 4):
        side = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
        fits = mask.shape[-2:] == side.shape and torch.equal(mask.reshape(side.shape) != 0, side)
        require(fits, f"{NAME}: mode {mode} takes triu(ones(2048, 2048), 1) and no other mask")


def _full_mask(mask: Tensor, sequence: int, count: int, keys: int) -> Tensor | None:
    """The part [Q, S] of a whole mask, True where masked; None for the compressed one."""
    if mask.shape[-1] == mask.shape[-2] == COMPRESSED:
        return None
    if mask.ndim > 2:
        mask = mask.reshape(-1, *mask.shape[-2:])
        mask = mask[sequence if mask.shape[0] > 1 else 0]
    return mask[:count, :keys]


@emulator
def npu_attention_update(
    lse: list[Tensor], local_out: list[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    name = "npu_attention_update"
    dtypes(name, (torch.float32,), *lse)
    dtypes(name, FLOATS, *local_out)
    require(len(lse) == len(local_out) <= 16, f"{name}: 1 to 16 parts, as many of each")
    rows, width = local_out[0].shape
    require(all(x.shape == (rows,) for x in lse), f"{name}: lse [{rows}]")
    require(8 <= width <= 512 and width % 8 == 0, f"{name}: width 8 to 512, a multiple of 8")
    lses = torch.stack(lse)
    merged = lses.logsumexp(0)
    weights = (lses - merged).exp()[..., None]
    out = (weights * torch.stack([x.float() for x in local_out])).sum(0)
    return out.to(local_out[0].dtype), merged if update_type == 1 else None
