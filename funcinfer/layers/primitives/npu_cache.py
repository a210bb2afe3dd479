"""Writes of caches by torch_npu: npu_scatter_pa_kv_cache of two at a time, npu_scatter_nd_update_,
and npu_kv_rmsnorm_rope_cache, which norms and rotates latents before.

The reference casts new rows to the pages' dtype and empties the scratch row; so do these. Several
tokens may go to the scratch row, whose content the ops then leave open.

Legend: T tokens.
"""

import torch
from torch import Tensor

from funcinfer.layers.primitives import reference_cache
from funcinfer.layers.primitives.npu_device import choice
from funcinfer.layers.primitives.reference_cache import check_rows


def write_rows(pages: Tensor, new: Tensor, slots_T: Tensor) -> Tensor:
    """As `reference_cache.write_rows`."""
    check_rows(pages, new, slots_T)
    if choice("write_rows", pages, new, slots_T).form is None:
        return reference_cache.write_rows(pages, new, slots_T)
    flat = pages.view(pages.shape[0] * pages.shape[1], *pages.shape[2:])
    torch.ops.npu.npu_scatter_nd_update_(flat, slots_T[:, None], new.to(pages.dtype))
    flat[0].zero_()
    return pages


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_new: Tensor, v_new: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference_cache.write_kv`. The op wants a dim of heads: latents get one of size 1."""
    check_rows(k_pages, k_new, slots_T)
    check_rows(v_pages, v_new, slots_T)
    if choice("write_kv", k_pages, v_pages, k_new, v_new, slots_T).form is None:
        return reference_cache.write_kv(k_pages, v_pages, k_new, v_new, slots_T)
    pages = [x if x.ndim == 4 else x[:, :, None] for x in (k_pages, v_pages)]
    new = [x.to(k_pages.dtype).contiguous() for x in (k_new, v_new)]
    new = [x if x.ndim == 3 else x[:, None] for x in new]
    torch.ops.npu.npu_scatter_pa_kv_cache(*new, *pages, slots_T, cache_mode="Norm")
    for x in pages:
        x[0, 0].zero_()
    return k_pages, v_pages


def write_latents(
    kv_TW: Tensor,
    weight_C: Tensor,
    cos_TC: Tensor,
    sin_TC: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    slots_T: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The fused form of `norm_rotate_write`, as one sequence of T tokens.

    The op calls the cache of rotated keys `k_cache` and that of latents `ckv_cache`. Slots that
    repeat are undefined, and those below 0 left out: tokens of the scratch row get -1.
    """
    cos, sin = (torch.cat([t, t], -1).to(kv_TW.dtype)[None, None] for t in (cos_TC, sin_TC))
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(
        kv_TW.contiguous()[None, None],
        weight_C,
        cos,
        sin,
        torch.where(slots_T == 0, -1, slots_T).long(),
        kpe_pages[:, :, None],
        ckv_pages[:, :, None],
        epsilon=eps,
        cache_mode="PA",
    )
    for pages in (ckv_pages, kpe_pages):
        pages[0, 0].zero_()
    return ckv_pages, kpe_pages
