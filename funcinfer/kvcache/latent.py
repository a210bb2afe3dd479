"""LatentKV and IndexKeys: the caches of latent attention and of its indexer, in pages.

    ckv [num_pages, page_size, C]   kpe [num_pages, page_size, E]    one latent a token, all heads
    k   [num_pages, page_size, H]                                    one indexer key a token

A token costs (C + E) * itemsize bytes a layer, whatever the number of heads: their keys and values
are made from the latent when they are needed and never stored. Heads don't divide it, so tensor
parallelism holds copies; `page_tokens` deals the offsets inside a page, and indexer keys have an
axis of their own for that, `index_page_tokens`. Page 0 is the scratch page, as in `PagedKV`.

C latent width, E rotated width, H indexer width, T new tokens, B rows of a page table of M pages,
S = M * page_size. Source: DeepSeek-V2 (2024), section 2.1; DeepSeek-V3.2 (2025), section 2.1.
"""

from typing import Any

import torch

from funcinfer.layers import primitives as ops
from funcinfer.spec import ParamSpec
from funcinfer.tree import pytree


@pytree
class LatentKV:
    """Normed latents `ckv` and rotated keys `kpe` of one layer, [pages, page_size, width]."""

    ckv: torch.Tensor
    kpe: torch.Tensor


@pytree
class IndexKeys:
    """Normed and rotated indexer keys `k` of one layer, [pages, page_size, width]."""

    k: torch.Tensor


def latent_kv_specs(num_pages: int, page_size: int, *, kv_lora: int, rope_dim: int) -> LatentKV:
    """The declaration of a layer's latent cache: a LatentKV of ParamSpec.

    >>> latent_kv_specs(9, 16, kv_lora=512, rope_dim=64).kpe.shape
    (9, 16, 64)
    """
    axes = ("pages", "page_tokens", None)
    specs: dict[str, Any] = dict(
        ckv=ParamSpec((num_pages, page_size, kv_lora), axes),
        kpe=ParamSpec((num_pages, page_size, rope_dim), axes),
    )
    return LatentKV(**specs)


def index_keys_specs(num_pages: int, page_size: int, *, head_dim: int) -> IndexKeys:
    """The declaration of a layer's indexer keys: an IndexKeys of ParamSpec.

    >>> index_keys_specs(9, 16, head_dim=128).k.axes
    ('pages', 'index_page_tokens', None)
    """
    axes = ("pages", "index_page_tokens", None)
    specs: dict[str, Any] = dict(k=ParamSpec((num_pages, page_size, head_dim), axes))
    return IndexKeys(**specs)


def write_latents(
    cache: LatentKV, ckv_TC: torch.Tensor, kpe_TE: torch.Tensor, slots_T: torch.Tensor
) -> LatentKV:
    """The cache with new rows at `slots_T` (local slots, 0 = scratch). The cache given is donated.

    ValueError where the rows are not as wide as the cache.

    >>> cache = LatentKV(torch.zeros(2, 2, 3), torch.zeros(2, 2, 1))
    >>> cache = write_latents(cache, torch.ones(1, 3), torch.ones(1, 1), torch.tensor([3]))
    >>> cache.ckv.sum().item(), cache.kpe[1, 1].item()
    (3.0, 1.0)
    """
    _same_width("ckv", cache.ckv, ckv_TC)
    _same_width("kpe", cache.kpe, kpe_TE)
    return LatentKV(*ops.write_kv(cache.ckv, cache.kpe, ckv_TC, kpe_TE, slots_T))


def write_index_keys(cache: IndexKeys, k_TH: torch.Tensor, slots_T: torch.Tensor) -> IndexKeys:
    """The cache with new keys at `slots_T`; donated, and ValueError, as in `write_latents`.

    >>> keys = IndexKeys(torch.zeros(2, 2, 3))
    >>> write_index_keys(keys, torch.ones(1, 3), torch.tensor([2])).k[1].sum(-1)
    tensor([3., 0.])
    """
    _same_width("k", cache.k, k_TH)
    return IndexKeys(ops.write_rows(cache.k, k_TH, slots_T))


def gather_latents(
    cache: LatentKV, page_table_BM: torch.Tensor, kv_lens_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents of whole requests in order of position: (ckv [B, S, C], kpe [B, S, E]), copies.

    Rows from a request's length on are 0, whatever its pages hold there.

    >>> cache = LatentKV(torch.arange(6.0).view(3, 2, 1), torch.zeros(3, 2, 1))
    >>> gather_latents(cache, torch.tensor([[2, 1]]), torch.tensor([3]))[0].flatten()
    tensor([4., 5., 2., 0.])
    """
    s = torch.arange(page_table_BM.shape[1] * cache.ckv.shape[1], device=cache.ckv.device)
    beyond_BS1 = (s >= kv_lens_B[:, None])[..., None]

    def gather(pages: torch.Tensor) -> torch.Tensor:
        rows = pages.index_select(0, page_table_BM.flatten())
        rows = rows.unflatten(0, tuple(page_table_BM.shape)).flatten(1, 2)
        return rows.masked_fill(beyond_BS1, 0)

    return gather(cache.ckv), gather(cache.kpe)


def _same_width(name: str, pages: torch.Tensor, new: torch.Tensor) -> None:
    if new.ndim != 2 or new.shape[1] != pages.shape[2]:
        raise ValueError(
            f"new rows of {name} have shape {tuple(new.shape)} and its pages {tuple(pages.shape)}:"
            f" wanted [tokens, {pages.shape[2]}]"
        )
