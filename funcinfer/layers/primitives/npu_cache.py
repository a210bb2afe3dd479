"""Writes of caches by torch_npu: npu_scatter_pa_kv_cache of two at a time, npu_scatter_nd_update_.

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
