"""Writes of new rows into paged caches, in plain torch.

    pages[slot // page, slot % page] = new[t]    where slot = slots[t]; slot 0 is the scratch row

Page 0 belongs to no request: rows without an owner go to its first slot, several of them in any
order, so it is set to zero afterwards.

Legend: T tokens.
"""

from torch import Tensor


def write_rows(pages: Tensor, new: Tensor, slots_T: Tensor) -> Tensor:
    """Write `new` [T, ...] into slots of `pages` [pages, page, ...] in place; the same storage
    comes back.

    Slots are page * page size + offset, each at most once, but for 0. `new` is cast to the pages'
    dtype. ValueError where the rows fit neither the pages nor the slots.

    >>> import torch
    >>> write_rows(torch.zeros(2, 2, 1), torch.ones(2, 1), torch.tensor([3, 0])).flatten()
    tensor([0., 0., 0., 1.])
    """
    check_rows(pages, new, slots_T)
    flat = pages.view(pages.shape[0] * pages.shape[1], *pages.shape[2:])
    flat.index_copy_(0, slots_T.long(), new.to(pages.dtype))
    flat[0].zero_()
    return pages


def write_kv(
    k_pages: Tensor, v_pages: Tensor, k_new: Tensor, v_new: Tensor, slots_T: Tensor
) -> tuple[Tensor, Tensor]:
    """`write_rows` of two caches with the same slots, such as keys and values; their widths may
    differ, and one may be 0.

    >>> import torch
    >>> k, v, row = torch.zeros(2, 2, 1), torch.zeros(2, 2, 3), torch.tensor([2])
    >>> [x[1].sum().item() for x in write_kv(k, v, torch.ones(1, 1), torch.ones(1, 3), row)]
    [1.0, 3.0]
    """
    return write_rows(k_pages, k_new, slots_T), write_rows(v_pages, v_new, slots_T)


def check_rows(pages: Tensor, new: Tensor, slots_T: Tensor) -> None:
    """ValueError where new rows fit neither the pages nor the slots."""
    if new.shape != (*slots_T.shape, *pages.shape[2:]):
        raise ValueError(
            f"new rows of shape {tuple(new.shape)} for {len(slots_T)} slots in pages of shape"
            f" {tuple(pages.shape)}: wanted {(len(slots_T), *pages.shape[2:])}"
        )
