"""How tokens that are dealt over ranks get to the ranks that hold their experts, and back.

    x[T_X, D], ids[n, T_X, K], weights[T_X, K]  ->  y[T_X, D] = sum over the n ranks of X of
                                                    compute(x, ids[rank], weights) on that rank

An exchange is `exchange(compute, x, ids, weights, axis) -> y`, with
`compute(x[M, D], ids[M, K], weights[M, K]) -> y[M, D]` run where the experts are. A token goes to a
rank at most once, with all of its choices there, and comes back as one weighted sum. So a rank has
one slot for each (source rank, token): no token can be dropped, and every shape is static.

Legend: T tokens of a rank, K choices of a token, D model width, n ranks of the axis, M rows at the
experts' rank, S slots of n * T that are in use.
"""

from collections.abc import Callable

import torch

from funcinfer.sharding import (
    all_gather,
    all_to_all,
    all_to_all_v,
    axis_index,
    axis_size,
    psum_scatter,
)
from funcinfer.sharding.mesh import Axis, names

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Exchange = Callable[[Compute, torch.Tensor, torch.Tensor, torch.Tensor, Axis], torch.Tensor]


def local_ids(ids_TK: torch.Tensor, held: int, experts: Axis, exchanged: Axis) -> torch.Tensor:
    """Ids among the `held` experts of each rank of `exchanged`, [n, T, K]; -1 for another's.

    Global expert e lies with rank e // held of `experts`. On those axes of `experts` that are not
    exchanged, other ranks hold the same tokens: there a rank keeps the choices of its own part.

    >>> local_ids(torch.tensor([[5, 0]]), 4, None, None)  # one rank of 4 experts; 5 is another's
    tensor([[[-1,  0]]])
    """
    owner_TK = ids_TK // held
    rank_TK = torch.zeros_like(owner_TK)
    mine_TK = (owner_TK >= 0) & (owner_TK < axis_size(experts))
    for i, axis in enumerate(names(experts)):
        part_TK = owner_TK // axis_size(names(experts)[i + 1 :]) % axis_size(axis)
        if axis in names(exchanged):
            rank_TK = rank_TK * axis_size(axis) + part_TK
        else:
            mine_TK = mine_TK & (part_TK == axis_index(axis))
    ranks_n = torch.arange(axis_size(exchanged), device=ids_TK.device)
    chosen_nTK = mine_TK & (rank_TK == ranks_n[:, None, None])
    return torch.where(chosen_nTK, ids_TK % held, -1)


def padded_exchange(
    compute: Compute,
    x_TD: torch.Tensor,
    ids_nTK: torch.Tensor,
    weights_TK: torch.Tensor,
    axis: Axis,
) -> torch.Tensor:
    """All slots move, the empty ones too: static shapes, no host waits, the same T on every rank.

    Every rank then gets every token, so the way there is an all_gather and the way back, where each
    rank adds its part of the sum, a psum_scatter. ValueError where ids have no row for each rank.

    >>> double = lambda x, ids, weights: 2.0 * x
    >>> padded_exchange(double, torch.ones(1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1), None)
    tensor([[2.]])
    """
    _check_ranks("padded_exchange", ids_nTK, axis)
    x_MD = all_gather(x_TD, axis, dim=0)
    ids_MK = all_to_all(ids_nTK.flatten(0, 1), axis, split=0, concat=0)
    weights_MK = all_gather(weights_TK, axis, dim=0)
    return psum_scatter(compute(x_MD, ids_MK, weights_MK), axis, dim=0)


def ragged_exchange(
    compute: Compute,
    x_TD: torch.Tensor,
    ids_nTK: torch.Tensor,
    weights_TK: torch.Tensor,
    axis: Axis,
) -> torch.Tensor:
    """Only the slots in use move: the fewest bytes, for a large prefill in eager mode.

    Their number is read on the host, so it can't be traced or captured; ranks may differ in T.
    ValueError for meta tensors and in a traced graph, and where ids have no row for each rank.

    >>> double = lambda x, ids, weights: 2.0 * x
    >>> ids = torch.tensor([[[0], [-1]]])  # the second token has no choice anywhere
    >>> ragged_exchange(double, torch.ones(2, 1), ids, torch.ones(2, 1), None)
    tensor([[2.],
            [0.]])
    """
    _check_ranks("ragged_exchange", ids_nTK, axis)
    if x_TD.is_meta or torch.compiler.is_compiling():
        raise ValueError(
            "ragged_exchange reads on the host how many tokens go where: it needs real tensors in"
            " eager mode; use padded_exchange for meta tensors, torch.compile and captured graphs"
        )
    T, D = x_TD.shape
    used_nT = (ids_nTK >= 0).any(-1)
    slot_S, counts = used_nT.flatten().nonzero()[:, 0], used_nT.sum(1).tolist()
    x_MD, arrived = all_to_all_v(x_TD[slot_S % T], axis, counts)
    ids_MK, _ = all_to_all_v(ids_nTK.flatten(0, 1)[slot_S], axis, counts)
    weights_MK, _ = all_to_all_v(weights_TK[slot_S % T], axis, counts)
    y_SD, _ = all_to_all_v(compute(x_MD, ids_MK, weights_MK), axis, arrived)
    y_nTD = y_SD.new_zeros(len(counts) * T, D).index_copy(0, slot_S, y_SD)
    return y_nTD.unflatten(0, (len(counts), T)).sum(0)


def _check_ranks(name: str, ids_nTK: torch.Tensor, axis: Axis) -> None:
    if ids_nTK.ndim != 3 or ids_nTK.shape[0] != axis_size(axis):
        raise ValueError(
            f"{name}: ids of shape {tuple(ids_nTK.shape)} must be [n, T, K], with a row for each of"
            f" the {axis_size(axis)} ranks of {axis!r}"
        )
