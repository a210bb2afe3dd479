"""PagedKV: keys and values of one attention layer in pages, and the write of new rows into them.

    k [num_pages, page_size, kv_heads, head_dim]   v [num_pages, page_size, kv_heads, v_head_dim]

A page holds `page_size` tokens of one request. Page 0 is the scratch page: no request owns it, and
rows without an owner (padding, positions of another rank) are written to its first slot. The
layout over a mesh is in the axes: `pages` goes with requests, `page_tokens` deals the offsets
inside a page, `kv_heads` shards heads.
"""

import torch

from funcinfer.spec import ParamSpec
from funcinfer.tree import pytree


@pytree
class PagedKV:
    """Keys and values of one layer, [pages, page_size, kv_heads, width]; K and V may differ in
    width.
    """

    k: torch.Tensor
    v: torch.Tensor


def paged_kv_specs(
    num_pages: int,
    page_size: int,
    *,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
) -> PagedKV:
    """The declaration of a layer's cache: a PagedKV of ParamSpec.

    >>> paged_kv_specs(9, 16, num_kv_heads=2, head_dim=64).k.shape
    (9, 16, 2, 64)
    """
    axes = ("pages", "page_tokens", "kv_heads", None)

    def spec(width: int) -> ParamSpec:
        return ParamSpec((num_pages, page_size, num_kv_heads, width), axes)

    return PagedKV(k=spec(head_dim), v=spec(v_head_dim or head_dim))  # type: ignore[arg-type]


def write_rows(pages: torch.Tensor, new: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """Write `new` [T, ...] into slots of `pages` [pages, page_size, ...] in place; the same
    storage comes back.

    Slot 0 is the scratch row. Several rows may go there in any order, so it is set to zero
    afterwards. ValueError where the rows fit neither the pages nor the slots.
    """
    if new.shape != (*slots_T.shape, *pages.shape[2:]):
        raise ValueError(
            f"new rows of shape {tuple(new.shape)} for {len(slots_T)} slots in pages of shape"
            f" {tuple(pages.shape)}: wanted {(len(slots_T), *pages.shape[2:])}"
        )
    flat = pages.view(-1, *pages.shape[2:])
    flat.index_copy_(0, slots_T.long(), new.to(pages.dtype))
    flat[0].zero_()
    return pages


def write(
    cache: PagedKV, k_TKH: torch.Tensor, v_TKV: torch.Tensor, slots_T: torch.Tensor
) -> PagedKV:
    """The cache with new rows at `slots_T` (local slots, 0 = scratch). The cache given is
    donated.
    """
    return PagedKV(write_rows(cache.k, k_TKH, slots_T), write_rows(cache.v, v_TKV, slots_T))
