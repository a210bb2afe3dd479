"""Work on tokens of many requests in tiles, each of tokens of one request.

A request's pages are fetched once a tile and not once a token, and a block of tiles at a time, so
that memory stays bounded. The number of tiles is known from the shapes alone.

Legend: T tokens, R requests, M pages a request, S positions = M * page size, B tiles of a block,
Q places of a tile.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from funcinfer.layers.primitives.reference_attention import BLOCK_ELEMENTS, _assign_tiles


def tile_length(rows_T: Tensor, page_table_RM: Tensor, largest: int) -> int:
    """Places of a tile: a request's share of the tokens, 1..largest.

    >>> tile_length(torch.zeros(7), torch.zeros(2, 3), 64)
    4
    """
    return max(1, min(-(-rows_T.shape[0] // page_table_RM.shape[0]), largest))


def over_tiles(
    f: Callable[..., Sequence[Tensor]],
    page_table_RM: Tensor,
    rows_T: Tensor,
    per_token: Sequence[Tensor],
    *,
    tile: int,
    elements: int,
) -> tuple[Tensor, ...]:
    """`f(pages [B, M], *tiles [B, Q, ...])` over blocks of tiles; its results, in token order.

    They are tensors [B, Q, ...]. `elements` is what a tile needs, for the size of a block. Places
    without a token hold 0 in each of `per_token`.

    >>> rows, x = torch.tensor([1, 0, 1]), torch.tensor([10, 20, 30])
    >>> add = lambda pages_BM, x_BQ: (pages_BM + x_BQ,)
    >>> over_tiles(add, torch.tensor([[5], [7]]), rows, (x,), tile=2, elements=1)
    (tensor([17, 25, 37]),)
    """
    place_T, tile_rows = _assign_tiles(rows_T, page_table_RM.shape[0], tile)

    def spread(x: Tensor) -> Tensor:
        places = x.new_zeros(len(tile_rows) * tile, *x.shape[1:])
        return places.index_copy(0, place_T, x).unflatten(0, (len(tile_rows), tile))

    tiles = [spread(x) for x in per_token]
    block = max(1, BLOCK_ELEMENTS // (elements + 1))
    parts = []
    for i in range(0, max(1, len(tile_rows)), block):
        pages_BM = page_table_RM.index_select(0, tile_rows[i : i + block])
        parts.append(f(pages_BM, *(x[i : i + block] for x in tiles)))
    return tuple(
        torch.cat(x).flatten(0, 1).index_select(0, place_T) for x in zip(*parts, strict=True)
    )


def fetch_pages(pages: Tensor, pages_BM: Tensor) -> Tensor:
    """The rows [B, S, ...] of pages [pages, page, ...], in order of position.

    >>> fetch_pages(torch.arange(6).view(3, 2), torch.tensor([[2, 1]]))
    tensor([[4, 5, 2, 3]])
    """
    rows = pages.index_select(0, pages_BM.flatten())
    return rows.unflatten(0, tuple(pages_BM.shape)).flatten(1, 2)


def check_tokens(name: str, q: Tensor, **per_token: Tensor) -> None:
    """ValueError where a vector does not have one entry for each token of `q` [T, ...].

    >>> check_tokens("op", torch.zeros(2, 1), rows=torch.zeros(3))
    Traceback (most recent call last):
    ValueError: op: rows is (3,) but must have one entry a token: 2
    """
    for what, x in per_token.items():
        if x.shape != q.shape[:1]:
            raise ValueError(
                f"{name}: {what} is {tuple(x.shape)} but must have one entry a token: {q.shape[0]}"
            )
