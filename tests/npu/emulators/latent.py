"""The ops of latent attention and of its indexer.

Legend: T tokens, N heads, S keys of a sequence, K chosen places.
"""

import torch
from torch import Tensor

from tests.npu.emulators.attention import from_sums, pages
from tests.npu.emulators.cache import write_slots
from tests.npu.emulators.norms import normalised
from tests.npu.emulators.rope import apart, rotated
from tests.npu.emulators.rules import HALF, dense, dtypes, emulator, nothing, require


def _split(
    name: str, x: Tensor, layout: str, lengths: Tensor | None, table: Tensor | None
) -> list[Tensor]:
    """The tokens [S, ...] of each sequence."""
    if layout == "PA_BSND":
        require(
            table is not None and lengths is not None, f"{name}: pages need a table and lengths"
        )
        assert table is not None and lengths is not None
        size = x.shape[1]
        require(size % 16 == 0 and size <= 1024, f"{name}: block size {size}")
        return pages(name, x, table, lengths.tolist())
    require(layout in ("TND", "BSND"), f"{name}: layout {layout}")
    if layout == "TND":
        require(lengths is not None, f"{name}: TND needs lengths")
        assert lengths is not None
        return [x[a:b] for a, b in from_sums(name, lengths.tolist(), x.shape[0])]
    used = [x.shape[1]] * x.shape[0] if lengths is None else lengths.tolist()
    return [sequence[:n] for sequence, n in zip(x, used, strict=True)]


def _int32(name: str, *tensors: Tensor | None) -> None:
    fits = all(x is None or x.dtype == torch.int32 for x in tensors)
    require(fits, f"{name}: lengths and indices are int32")


def _limit(mode: int, count: int, keys: int) -> Tensor:
    """How many keys each of `count` queries may see."""
    require(mode in (0, 3), f"sparse_mode 0 or 3, not {mode}")
    last = torch.arange(count) + keys - count + 1
    return last.clamp(min=0) if mode == 3 else torch.full((count,), keys)


@emulator
def npu_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    block_table: Tensor | None,
    layout_query: str,
    layout_key: str,
    sparse_count: int,
    sparse_mode: int,
) -> tuple[Tensor, Tensor]:
    """Places in falling order of score. Of equal scores, the later place comes first here."""
    name = "npu_lightning_indexer"
    dtypes(name, HALF, query, key)
    require(weights.dtype in (query.dtype, torch.float32), f"{name}: weights as q, or float32")
    dense(name, query, key, weights)
    _int32(name, actual_seq_lengths_query, actual_seq_lengths_key)
    N, D = query.shape[-2:]
    require(N <= 64 and key.shape[-2:] == (1, 128) and D == 128, f"{name}: N <= 64, D 128, one key")
    known = (*range(1, 2049), *range(3072, 8193, 1024))
    require(sparse_count in known, f"{name}: sparse_count {sparse_count}")
    require("PA" in layout_key or layout_key == layout_query, f"{name}: one layout for both")
    q = _split(name, query, layout_query, actual_seq_lengths_query, None)
    w = _split(name, weights, layout_query, actual_seq_lengths_query, None)
    k = _split(name, key, layout_key, actual_seq_lengths_key, block_table)
    require(len(q) == len(k), f"{name}: {len(q)} query and {len(k)} key lengths")
    chosen = []
    for q_TND, w_TN, k_S1D in zip(q, w, k, strict=True):
        z = torch.einsum("tnd,sd->tns", q_TND.float(), k_S1D[:, 0].float()).relu()
        score = torch.einsum("tns,tn->ts", z, w_TN.float())
        T, S = score.shape
        seen = torch.arange(S) < _limit(sparse_mode, T, S)[:, None]
        score = score.masked_fill(~seen, -torch.inf)
        order = S - 1 - score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        order = order.masked_fill(~seen.gather(1, order), -1)[:, :sparse_count]
        chosen.append(torch.nn.functional.pad(order, (0, sparse_count - order.shape[1]), value=-1))
    if layout_query == "TND":
        indices = torch.cat(chosen)
    else:
        indices = torch.full((*query.shape[:2], sparse_count), -1)
        for b, rows in enumerate(chosen):
            indices[b, : len(rows)] = rows
    return indices.int().unsqueeze(-2), nothing(query.dtype)


@emulator
def npu_sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    block_table: Tensor | None,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_kv: Tensor | None,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    sparse_block_size: int,
    layout_query: str,
    layout_kv: str,
    sparse_mode: int,
    attention_mode: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_sparse_flash_attention"
    require(attention_mode == 2, f"{name}: attention_mode 2 alone, not {attention_mode}")
    require(query_rope is not None and key_rope is not None, f"{name}: needs both ropes")
    assert query_rope is not None and key_rope is not None
    dtypes(name, HALF, query, key, value, query_rope, key_rope)
    dense(name, query, key, value, query_rope, key_rope, sparse_indices)
    _int32(name, sparse_indices, actual_seq_lengths_query, actual_seq_lengths_kv)
    N = query.shape[-2]
    require(N & (N - 1) == 0 and N <= 128, f"{name}: N a power of 2 up to 128, not {N}")
    require(query.shape[-1] == key.shape[-1] == 512, f"{name}: latents of 512")
    require(query_rope.shape[-1] == key_rope.shape[-1] == 64, f"{name}: 64 rotated dims")
    require(key.shape[-2] == 1, f"{name}: one key head")
    require(value is not None and torch.equal(_bits(value), _bits(key)), f"{name}: value is key")
    require(sparse_block_size & (sparse_block_size - 1) == 0, f"{name}: blocks of a power of 2")
    require("PA" in layout_kv or layout_kv == layout_query, f"{name}: one layout for both")
    q, q_pe, chosen = (
        _split(name, x, layout_query, actual_seq_lengths_query, None)
        for x in (query, query_rope, sparse_indices)
    )
    k, k_pe = (
        _split(name, x, layout_kv, actual_seq_lengths_kv, block_table) for x in (key, key_rope)
    )
    require(len(q) == len(k), f"{name}: {len(q)} query and {len(k)} key lengths")
    parts = []
    for q_T, q_pe_T, chosen_T, k_S, k_pe_S in zip(q, q_pe, chosen, k, k_pe, strict=True):
        places = _places(name, chosen_T[:, 0], sparse_block_size, k_S.shape[0])
        limit = _limit(sparse_mode, q_T.shape[0], k_S.shape[0])
        see = (places >= 0) & (places < limit[:, None])
        at = places.clamp(min=0)
        keys = torch.cat([k_S, k_pe_S], -1)[:, 0].float()[at]
        z = torch.einsum("tnd,tkd->tnk", torch.cat([q_T, q_pe_T], -1).float(), keys) * scale_value
        z = z.masked_fill(~see[:, None], -torch.inf)
        top = z.amax(-1)
        p = (z - top[..., None]).exp()
        total = p.sum(-1)
        out = torch.einsum("tnk,tkd->tnd", p, k_S[:, 0].float()[at]) / total[..., None]
        parts.append((out.to(query.dtype), top, total))
    outs, tops, totals = zip(*parts, strict=True)
    if layout_query == "TND":
        stats = [torch.cat(x)[None] for x in (tops, totals)]
        out = torch.cat(outs)
    else:
        stats = [_padded(x, query.shape[1])[:, None] for x in (tops, totals)]
        out = _padded(outs, query.shape[1])
    if not return_softmax_lse:
        return out, nothing(), nothing()
    require("PA" not in layout_kv, f"{name}: no lse of pages")
    return out, stats[0], stats[1]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def _padded(rows: tuple[Tensor, ...], length: int) -> Tensor:
    out = torch.full((len(rows), length, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    for b, x in enumerate(rows):
        out[b, : len(x)] = x
    return out


def _places(name: str, chosen_TK: Tensor, block: int, keys: int) -> Tensor:
    """Places [T, K * block] of the chosen blocks, -1 for none."""
    used = chosen_TK >= 0
    front = (used.int().diff(dim=-1) <= 0).all()
    require(front, f"{name}: what is chosen comes first, then -1")
    require((chosen_TK * block < keys).all(), f"{name}: places below {keys}")
    places = chosen_TK[..., None].long() * block + torch.arange(block)
    places = places.masked_fill(~used[..., None], -1).flatten(1)
    return places.masked_fill(places >= keys, -1)


@emulator
def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    perm_x1: list[int] | None,
    perm_x2: list[int] | None,
    perm_y: list[int] | None,
) -> Tensor:
    """Batched products of permuted arguments, [B, M, N] permuted by `perm_y`, [1, 0, 2] if None."""
    x = input.permute(perm_x1 or [0, 1, 2])
    w = weight.permute(perm_x2 or [0, 1, 2])
    y = torch.bmm(x.float(), w.float()).permute(perm_y or [1, 0, 2])
    return y.contiguous().to(input.dtype)


@emulator
def npu_mla_prolog_v3(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    cache_index: Tensor | None,
    rmsnorm_epsilon_cq: float,
    rmsnorm_epsilon_ckv: float,
    cache_mode: str,
    query_norm_flag: bool,
    qc_qr_scale: float,
    kc_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q . uk, rotated q, -, query latent, -) of tokens [T, He] without quantisation; both caches
    are written. A head's columns of `weight_uq_qr` are D to be absorbed, then Dr to be rotated.
    """
    name = "npu_mla_prolog_v3"
    weights = weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr
    norms = rmsnorm_gamma_cq, rmsnorm_gamma_ckv
    given = (token_x, *weights, *norms, rope_sin, rope_cos, kv_cache, kr_cache)
    dtypes(name, (torch.bfloat16,), *given)
    dense(name, *given, cache_index)
    require(token_x.ndim == 2, f"the emulator of {name} knows [T, He]")
    require(cache_mode == "PA_BSND", f"the emulator of {name} knows PA_BSND, not {cache_mode!r}")
    require(cache_index is not None and cache_index.dtype == torch.int64, f"{name}: int64 index")
    assert cache_index is not None
    (T, He), Hcq, (N, D, C) = token_x.shape, weight_dq.shape[1], weight_uk.shape
    Dr = rope_sin.shape[-1]
    require(He in (*range(1024, 8193, 1024), 7680), f"{name}: He {He}")
    require(Hcq in (1536, 2048) and D in (128, 192), f"{name}: Hcq {Hcq}, D {D}")
    require(N & (N - 1) == 0 and N <= 128, f"{name}: N a power of 2 up to 128, not {N}")
    require((C, Dr) == (512, 64), f"{name}: latents of 512 and 64, not {C} and {Dr}")
    shapes = [tuple(x.shape) for x in (*weights, *norms, rope_sin, rope_cos, cache_index)]
    wanted = [(He, Hcq), (Hcq, N * (D + Dr)), (N, D, C), (He, C + Dr), (Hcq,), (C,)]
    wanted += [(T, Dr), (T, Dr), (T,)]
    require(shapes == wanted, f"{name}: shapes {shapes}, not {wanted}")
    blocks, size = kv_cache.shape[:2]
    require(size % 16 == 0 and 16 <= size <= 1024, f"{name}: block size {size}")
    require(kv_cache.shape[2:] == (1, C), f"{name}: kv_cache [blocks, size, 1, {C}]")
    require(kr_cache.shape == (blocks, size, 1, Dr), f"{name}: kr_cache [blocks, size, 1, {Dr}]")
    x, sin, cos = token_x.float(), rope_sin, rope_cos
    latent, _ = normalised(x @ weight_dq.float(), rmsnorm_gamma_cq, rmsnorm_epsilon_cq)
    latent = latent * qc_qr_scale
    q = (latent @ weight_uq_qr.float()).unflatten(1, (N, D + Dr))
    query = torch.einsum("tnd,ndc->tnc", q[..., :D], weight_uk.float())
    turned = rotated(apart(q[..., D:]), cos[:, None], sin[:, None])
    kv = x @ weight_dkv_kr.float()
    rows, _ = normalised(kv[:, :C], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
    write_slots(name, kv_cache[:, :, 0], cache_index, rows * kc_scale)
    write_slots(name, kr_cache[:, :, 0], cache_index, rotated(apart(kv[:, C:]), cos, sin))
    half = token_x.dtype
    normed = latent.to(half) if query_norm_flag else nothing(half)
    return query.to(half), turned.to(half), nothing(), normed, nothing()
