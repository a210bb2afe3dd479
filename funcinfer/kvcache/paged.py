"""PagedKV: keys and values of one attention layer in pages, and the write of new rows into them.

    k [num_pages, page_size, kv_heads, head_dim]   v [num_pages, page_size, kv_heads, v_head_dim]

A page holds `page_size` tokens of one request. Page 0 is the scratch page: no request owns it, and
rows without an owner (padding, positions of another rank) are written to its first slot. The
layout over a mesh is in the axes: `pages` goes with requests, `page_tokens` deals the offsets
inside a page, `kv_heads` shards heads.
"""

import torch

from funcinfer.layers import primitives as ops
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


def write(
    cache: PagedKV, k_TKH: torch.Tensor, v_TKV: torch.Tensor, slots_T: torch.Tensor
) -> PagedKV:
    """The cache with new rows at `slots_T` (local slots, 0 = scratch). The cache given is
    donated.
    """
    return PagedKV(*ops.write_kv(cache.k, cache.v, k_TKH, v_TKV, slots_T))
