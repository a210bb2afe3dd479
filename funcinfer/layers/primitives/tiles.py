"""Work on tokens of many requests in tiles, each of tokens of one request.

A request's pages are fetched once a tile and not once a token, and a block of tiles at a time, so
that memory stays bounded. The number of tiles is known from the shapes alone.

Legend: T tokens, R requests, M pages a request, S positions = M * page size, B tiles of a block,
Q places of a tile.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Elements fetched or computed at a time; 8 MB in float32 stays in cache, and bounds the memory.
BLOCK_ELEMENTS = 2**21


def tile_length(num_tokens: int, num_requests: int, largest: int) -> int:
    """Places of a tile: a request's share of the tokens, 1..largest.

    >>> tile_length(7, 2, 64)
    4
    """
    return max(1, min(-(-num_tokens // num_requests), largest))


def assign_tiles(rows_T: Tensor, R: int, tile: int) -> tuple[Tensor, Tensor]:
    """Give each token a place in a tile of its own request: (place of token [T], row of tile).

    n tokens of a request fill ceil(n / tile) tiles, so (T + R (tile - 1)) // tile tiles hold any
    distribution of T tokens over R requests. A tile left over has row 0 and no token.

    >>> assign_tiles(torch.tensor([1, 0, 1, 1]), 2, 2)
    (tensor([2, 0, 3, 4]), tensor([0, 1, 1]))
    """
    T, rows_T = rows_T.shape[0], rows_T.long()
    if tile == 1:
        return torch.arange(T, device=rows_T.device), rows_T
    mine_TR = (rows_T[:, None] == torch.arange(R, device=rows_T.device)).long()
    nth_T = mine_TR.cumsum(0).gather(1, rows_T[:, None])[:, 0] - 1
    tiles_R = (mine_TR.sum(0) + tile - 1) // tile
    first_R = tiles_R.cumsum(0) - tiles_R
    tile_T = first_R.index_select(0, rows_T) + nth_T // tile
    tile_rows = rows_T.new_zeros((T + R * (tile - 1)) // tile).scatter(0, tile_T, rows_T)
    return tile_T * tile + nth_T % tile, tile_rows


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
    place_T, tile_rows = assign_tiles(rows_T, page_table_RM.shape[0], tile)

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
