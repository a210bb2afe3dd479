"""The lightning indexer's scores and its choice of positions, in plain torch.

    score[T, S] = sum_I gate[T, I] * relu(q[T, I, H] . k[S, H]) where lo[T] <= s < hi[T], else -inf
    chosen[T, K] = the positions of the K highest scores

Source: DeepSeek-V3.2 (2025), section 2.1; scales and weights of heads are folded into `gate`.

Legend: T tokens, R requests, M pages a request, S positions = M * page size, I indexer heads,
H indexer width, K selected positions, B tiles of a block, Q places of a tile.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcinfer.layers.primitives.segments import Segments
from funcinfer.layers.primitives.tiles import (
    check_tokens,
    fetch_pages,
    over_tiles,
    tile_length,
)

# Rows of one product, tokens times heads: enough for a matmul, and no more memory than that.
PRODUCT_ROWS = 256


class IndexCache(Protocol):
    """What the indexer reads: keys [pages, page, H]."""

    @property
    def k(self) -> Tensor:
        """Keys."""
        ...


def indexer_scores(
    q_TIH: Tensor,
    gate_TI: Tensor,
    keys: IndexCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor | None,
    hi_T: Tensor,
) -> Tensor:
    """Scores [T, S] of the positions of each token's request, -inf where it doesn't see.

    sum_I gate * relu(q . k), in at least float32; scales belong into `gate`. What a token doesn't
    see may be NaN. Intervals are as in `paged_attention`; without lo they begin at 0. ValueError if
    shapes don't fit together.

    >>> from types import SimpleNamespace
    >>> keys = SimpleNamespace(k=torch.tensor([[[9.0], [9.0]], [[2.0], [-1.0]]]))
    >>> q, gate = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, 10.0]])
    >>> row = torch.tensor([0])
    >>> indexer_scores(q, gate, keys, torch.tensor([[1]]), row, row, row + 2)
    tensor([[ 2., 10.]])
    """
    return _indexer((q_TIH, gate_TI), keys, page_table_RM, (rows_T, lo_T, hi_T), lambda x: x)


def select_top(scores_TS: Tensor, *, topk: int) -> Tensor:
    """Positions [T, min(topk, S)] of each row's highest scores, ascending, then -1: int32.

    A score of -inf is never selected, so a row may have fewer than `topk`. Of equal scores the
    lowest positions are taken, on every device alike. NaN counts as the highest score, so it is not
    hidden. ValueError if topk is less than 1 or scores aren't [T, S].

    >>> select_top(torch.tensor([[1.0, 3.0, 1.0, 2.0], [1.0, -torch.inf, 2.0, -torch.inf]]), topk=3)
    tensor([[ 0,  1,  3],
            [ 0,  2, -1]], dtype=torch.int32)
    """
    if topk < 1 or scores_TS.ndim != 2:
        raise ValueError(
            f"select_top: topk {topk} of scores {tuple(scores_TS.shape)}; wanted topk >= 1 and "
            "scores [T, S]"
        )
    (T, S), K = scores_TS.shape, min(topk, scores_TS.shape[1])
    scores_TS = scores_TS.nan_to_num(torch.inf, torch.inf, -torch.inf)
    lowest_T1 = scores_TS.topk(K, -1).values[:, -1:]
    above_TS = scores_TS > lowest_T1
    tied_TS = (scores_TS == lowest_T1) & (lowest_T1 > -torch.inf)
    free_T1 = K - above_TS.sum(-1, keepdim=True)
    chosen_TS = above_TS | (tied_TS & (tied_TS.cumsum(-1) <= free_T1))
    place_TS = torch.where(chosen_TS, chosen_TS.cumsum(-1) - 1, K)  # column K takes what is left
    s_TS = torch.arange(S, dtype=torch.int32, device=scores_TS.device).expand(T, S)
    none = torch.full((T, K + 1), -1, dtype=torch.int32, device=scores_TS.device)
    return none.scatter(1, place_TS, s_TS)[:, :K]


def lightning_indexer(
    q_TIH: Tensor,
    gate_TI: Tensor,
    keys: IndexCache,
    page_table_RM: Tensor,
    rows_T: Tensor,
    lo_T: Tensor | None,
    hi_T: Tensor,
    *,
    topk: int,
    segments: Segments | None = None,
) -> Tensor:
    """`select_top(indexer_scores(...))`: positions [T, min(topk, S)], int32, then -1 for none.

    Here they ascend; another back end may give them in another order, and choose among equal scores
    in its own way. Segments are as in `paged_attention`. The scores of all tokens don't exist at
    one time. ValueError as in both.

    >>> from types import SimpleNamespace
    >>> keys = SimpleNamespace(k=torch.tensor([[[9.0], [9.0]], [[2.0], [-1.0]]]))
    >>> q, gate = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, 10.0]])
    >>> row = torch.tensor([0])
    >>> lightning_indexer(q, gate, keys, torch.tensor([[1]]), row, row, row + 2, topk=1)
    tensor([[1]], dtype=torch.int32)
    """
    tokens = (rows_T, lo_T, hi_T)
    return _indexer(
        (q_TIH, gate_TI), keys, page_table_RM, tokens, lambda scores: select_top(scores, topk=topk)
    )


def _indexer(
    queries: tuple[Tensor, Tensor],
    keys: IndexCache,
    page_table_RM: Tensor,
    tokens: tuple[Tensor, Tensor | None, Tensor],
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """`finish(scores [tokens, S])` of all tokens, a block of tiles at a time."""
    (q_TIH, gate_TI), (rows_T, lo_T, hi_T) = queries, tokens
    check_indexer(q_TIH, gate_TI, keys, page_table_RM, tokens)
    lo_T = torch.zeros_like(hi_T) if lo_T is None else lo_T
    wide = torch.promote_types(q_TIH.dtype, torch.float32)
    s = torch.arange(page_table_RM.shape[1] * keys.k.shape[1], device=q_TIH.device)

    def score(
        pages_BM: Tensor, q_BQIH: Tensor, gate_BQI: Tensor, lo_BQ: Tensor, hi_BQ: Tensor
    ) -> Sequence[Tensor]:
        k_BSH = fetch_pages(keys.k, pages_BM).to(wide)
        z_BQIS = torch.einsum("bqih,bsh->bqis", q_BQIH.to(wide), k_BSH).relu()
        score_BQS = torch.einsum("bqis,bqi->bqs", z_BQIS, gate_BQI.to(wide))
        see_BQS = (s >= lo_BQ[..., None]) & (s < hi_BQ[..., None])
        score_BQS = torch.where(see_BQS, score_BQS, -torch.inf)
        return (finish(score_BQS.flatten(0, 1)).unflatten(0, lo_BQ.shape),)

    heads, width = q_TIH.shape[1:]
    tile = tile_length(rows_T.shape[0], page_table_RM.shape[0], max(1, PRODUCT_ROWS // heads))
    elements = s.shape[0] * (width + tile * heads)
    per_token = (q_TIH, gate_TI, lo_T, hi_T)
    return over_tiles(score, page_table_RM, rows_T, per_token, tile=tile, elements=elements)[0]


def check_indexer(
    q_TIH: Tensor,
    gate_TI: Tensor,
    keys: IndexCache,
    page_table_RM: Tensor,
    tokens: tuple[Tensor, Tensor | None, Tensor],
) -> None:
    """ValueError where the arguments of the indexer don't fit together."""
    rows_T, lo_T, hi_T = tokens
    fits = (
        q_TIH.ndim == keys.k.ndim == 3
        and gate_TI.shape == q_TIH.shape[:2]
        and q_TIH.shape[2] == keys.k.shape[2]
        and page_table_RM.ndim == 2
        and page_table_RM.numel() > 0
    )
    if not fits:
        raise ValueError(
            f"indexer: q {tuple(q_TIH.shape)}, gate {tuple(gate_TI.shape)}, k "
            f"{tuple(keys.k.shape)}, page_table {tuple(page_table_RM.shape)}; wanted q [T, I, H], "
            "gate [T, I], k [pages, page, H], page_table [R, M]"
        )
    bounds = dict(hi=hi_T) if lo_T is None else dict(lo=lo_T, hi=hi_T)
    check_tokens("indexer", q_TIH, rows=rows_T, **bounds)
