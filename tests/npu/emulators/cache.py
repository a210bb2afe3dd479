"""Writes into paged caches. Slots are page * size + offset; one that occurs twice holds NaN."""

import torch
from torch import Tensor

from tests.npu.emulators.norms import normalised
from tests.npu.emulators.rope import apart, rotated
from tests.npu.emulators.rules import HALF, dense, dtypes, emulator, require


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [T, ...] at their slots of a cache [blocks, block size, ...], which may be strided."""
    block, offset = slots.long() // cache.shape[1], slots.long() % cache.shape[1]
    cache.index_put_((block, offset), rows.to(cache.dtype))
    slot, times = slots.long().unique(return_counts=True)
    twice = slot[times > 1]  # the order of the writes is undefined
    cache.index_put_((twice // cache.shape[1], twice % cache.shape[1]), _worst(cache.dtype))


def _worst(dtype: torch.dtype) -> Tensor:
    return torch.tensor(torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min).to(dtype)


def _slots(name: str, slots: Tensor, count: int) -> None:
    require(slots.dtype in (torch.int32, torch.int64), f"{name}: slots are int32 or int64")
    inside = not slots.numel() or (slots.min() >= 0 and slots.max() < count)
    require(inside, f"{name}: slots in 0 ... {count - 1}")


def write_slots(name: str, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Rows [T, ...] at their slots of a cache [blocks, block size, ...]; slots are in range."""
    _slots(name, slots, cache.shape[0] * cache.shape[1])
    _write(cache, slots, rows)


@emulator
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cache_mode: str | None,
) -> None:
    name = "npu_scatter_pa_kv_cache"
    dense(name, key, value, key_cache, value_cache, slot_mapping)
    require(key.dtype == key_cache.dtype == value.dtype == value_cache.dtype, f"{name}: one dtype")
    require(key.ndim == value.ndim == 3 and key.shape[:2] == value.shape[:2], f"{name}: [T, N, D]")
    require(key_cache.ndim == value_cache.ndim == 4, f"{name}: caches of 4 dims")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        if cache_mode == "PA_NZ":
            blocks, columns, size, part = cache.shape
            require(part == 32 // cache.itemsize, f"{name}: PA_NZ has parts of 32 bytes")
            require(columns * part == rows[0].numel(), f"{name}: [blocks, N D / 16, size, 16]")
            _slots(name, slot_mapping, blocks * size)
            _write(cache.transpose(1, 2), slot_mapping, rows.reshape(-1, columns, part))
        else:
            require(cache_mode in (None, "Norm"), f"{name}: cache_mode {cache_mode!r}")
            require(cache.shape[2:] == rows.shape[1:], f"{name}: Norm is [blocks, size, N, D]")
            _slots(name, slot_mapping, cache.shape[0] * cache.shape[1])
            _write(cache, slot_mapping, rows)


@emulator
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return npu_scatter_nd_update_(input.clone(), indices, updates)


@emulator
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    require(indices.dtype in (torch.int32, torch.int64), "npu_scatter_nd_update: integer indices")
    require(updates.dtype == input.dtype, "npu_scatter_nd_update: updates of the input's dtype")
    shape = (*indices.shape[:-1], *input.shape[indices.shape[-1] :])
    require(updates.shape == shape, f"npu_scatter_nd_update: updates {shape}")
    rows = indices.flatten(0, -2)
    require(not rows.numel() or rows.min() >= 0, "npu_scatter_nd_update: indices from 0")
    index, times = rows.long().unique(dim=0, return_counts=True)
    input.index_put_(tuple(indices.long().unbind(-1)), updates)
    return input.index_put_(tuple(index[times > 1].unbind(-1)), _worst(input.dtype))


@emulator
def npu_gather_pa_kv_cache_functional(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    is_seq_lens_cumsum: bool,
) -> tuple[Tensor, Tensor]:
    lengths = seq_lens.diff() if is_seq_lens_cumsum else seq_lens
    results = []
    for cache, room in ((key_cache, key), (value_cache, value)):
        parts = [cache[blocks.long()].flatten(0, 1) for blocks in block_tables]
        rows = torch.cat([part[:n] for part, n in zip(parts, lengths.tolist(), strict=True)])
        require(room.shape == rows.shape, "npu_gather_pa_kv_cache: room for all tokens")
        results.append(rows.contiguous())
    return results[0], results[1]


@emulator
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    epsilon: float,
    cache_mode: str,
    is_output_kv: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(k_cache, ckv_cache, rotated, latent); of kv, 512 dims are the latent and 64 are rotated."""
    name = "npu_kv_rmsnorm_rope_cache"
    dtypes(name, HALF, kv, gamma, cos, sin, k_cache, ckv_cache)
    dense(name, kv, gamma, cos, sin, index, k_cache, ckv_cache)
    B, one, S, width = kv.shape
    require(one == 1 and width == 576, f"{name}: kv [B, 1, S, 576]")
    require(gamma.shape == (512,), f"{name}: gamma [512]")
    require(cos.shape == sin.shape == (B, 1, S, 64), f"{name}: cos and sin [B, 1, S, 64]")
    require(index.dtype == torch.int64, f"{name}: index is int64")
    paged = cache_mode in ("PA", "PA_BNSD")
    require(paged, f"the emulator of {name} knows PA and PA_BNSD, not {cache_mode!r}")
    require(k_cache.shape[2:] == (1, 64), f"{name}: k_cache [blocks, size, 1, 64]")
    require(ckv_cache.shape[2:] == (1, 512), f"{name}: ckv_cache [blocks, size, 1, 512]")
    require(index.shape == (B * S,), f"{name}: index [B S]")
    require(k_cache.shape[0] >= -(-S // k_cache.shape[1]) * B, f"{name}: too few blocks")
    latent, _ = normalised(kv[..., :512], gamma, epsilon)
    turned = rotated(apart(kv[..., 512:]), cos, sin)
    latent, turned = latent.to(kv.dtype), turned.to(kv.dtype)
    kept = index >= 0
    for cache, rows in ((k_cache, turned), (ckv_cache, latent)):
        _slots(name, index[kept], cache.shape[0] * cache.shape[1])
        _write(cache[:, :, 0], index[kept], rows.flatten(0, 2)[kept])
    if not is_output_kv:
        turned, latent = (torch.full_like(x, torch.nan) for x in (turned, latent))
    return k_cache, ckv_cache, turned, latent


@emulator
def npu_format_cast(input: Tensor, acl_format: int) -> Tensor:
    """The same values: how they lie in memory is not emulated. 2 is row by row, 29 FRACTAL_NZ."""
    require(acl_format in (2, 29), f"the emulator of npu_format_cast knows 2 and 29: {acl_format}")
    return input.clone()
