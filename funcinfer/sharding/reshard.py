"""Moves between layouts: the exact set of them.

    reshard    A[I_X] -> A[I_Y]          same values, another layout
    reduce_to  A[I]{U_X} -> A[I_Y]       finish partial sums over X, in the layout that is wanted

Dim 0 is the token dim and is a bag: each token carries its position, row and slot, which move by
the same route as the tensor, so an axis may leave it from any place and come back; axes that arrive
do so in the order in which the target names them. The other dims are ordered: axes join and leave
them at the minor end only. What can't be reached in that way is a ValueError that names both
layouts, before anything is sent.
"""

from typing import NamedTuple

import torch

from funcinfer.sharding.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    psum,
    psum_scatter,
)
from funcinfer.sharding.mesh import Axis, P, axis_of, both, drop, extends, names


def reshard(x: torch.Tensor, src: P, dst: P) -> torch.Tensor:
    """Same values in layout `dst`. Per mesh axis: it stays, leaves (all_gather), changes dim
    (all_to_all) or arrives.

    An axis that arrives is cut out of values that its ranks hold alike. Axes that leave one dim for
    the same target form one collective over their tuple.

    >>> from funcinfer.sharding import Mesh, shard_map
    >>> rows, columns = P("tp", None), P(None, "tp")
    >>> f = shard_map(lambda x: reshard(x, rows, columns), Mesh(tp=2), (rows,), columns)
    >>> f(torch.arange(4).view(2, 2))
    tensor([[0, 1],
            [2, 3]])
    """
    _same_rank(x, src, dst)
    for move in moves(src, dst):
        if move.kind == "cut":
            x = _cut(x, move.axes, move.dim)
        elif move.kind == "gather":
            x = all_gather(x, axis_of(move.axes), dim=move.dim)
        else:
            x = all_to_all(x, axis_of(move.axes), split=move.target, concat=move.dim)
    return x


class Move(NamedTuple):
    """One step of a reshard.

    "gather": `axes` leave `dim`. "exchange": they leave `dim` and arrive at `target`. "cut": they
    arrive at `dim`.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int
    target: int = 0


def moves(src: P, dst: P) -> list[Move]:
    """The steps from layout `src` to `dst`; ValueError where the moves of this file don't reach it.

    >>> moves(P(("dp", "tp"), None), P("dp", "tp"))
    [Move(kind='exchange', axes=('tp',), dim=0, target=1)]
    """
    have = [list(names(a)) for a in src]
    want = [list(names(a)) for a in dst]
    steps: list[Move] = []
    for dim in range(len(have)):
        while run := _leaving(have[dim], want, dim, src, dst):
            target = _target(run[0], want)
            have[dim] = [a for a in have[dim] if a not in run]
            if target is None:
                steps.append(Move("gather", run, dim))
            else:
                steps.append(Move("exchange", run, dim, target))
                have[target] += run
    for dim in range(len(have)):
        if new := tuple(a for a in want[dim] if a not in have[dim]):
            steps.append(Move("cut", new, dim))
            have[dim] += new
    arrived = [a for a in have[0] if a not in names(src[0])] if have else []
    if arrived != [a for a in names(dst[0]) if a in arrived]:
        raise ValueError(_unreachable(src, dst, f"axes reach dim 0 in the order {tuple(arrived)}"))
    for dim in range(1, len(have)):
        if have[dim] != want[dim]:
            raise ValueError(
                _unreachable(src, dst, f"dim {dim} would end with the order {tuple(have[dim])}")
            )
    return steps


def reduce_to(y: torch.Tensor, over: Axis, src: P, dst: P) -> torch.Tensor:
    """Finish sums that are partial over `over`: scatter those axes that `dst` deals, psum the rest,
    cut what is alike.

    `src` is the layout of the partial sums. Axes of one dim that are scattered next to each other
    form one collective. ValueError where `dst` drops or moves an axis of `src`, or `over` has one.
    """
    _same_rank(y, src, dst)
    if shared := both(over, src.axes):
        raise ValueError(
            f"sums over {over!r} can't be partial over {shared!r}, which shards {src!r}"
        )
    for dim, (s, d) in enumerate(zip(src, dst, strict=True)):
        if not (extends(d, s) if dim else set(names(s)) <= set(names(d))):
            raise ValueError(
                _unreachable(src, dst, f"dim {dim} may only gain axes, at its minor end")
            )
        scattered: list[str] = []
        for a in names(drop(d, s)):
            if a in names(over):
                scattered.append(a)
                continue
            y = psum_scatter(y, axis_of(scattered), dim=dim)
            y, scattered = _cut(y, (a,), dim), []
        y = psum_scatter(y, axis_of(scattered), dim=dim)
    return psum(y, axis_of(a for a in names(over) if a not in dst.axes))


def _target(axis: str, want: list[list[str]]) -> int | None:
    return next((dim for dim, axes in enumerate(want) if axis in axes), None)


def _leaving(have: list[str], want: list[list[str]], dim: int, src: P, dst: P) -> tuple[str, ...]:
    """The last run of axes that leave this dim for one target; () where none leaves."""
    gone = [a for a in have if a not in want[dim]]
    if not gone:
        return ()
    run = [gone.pop()]
    if dim and have[-1] != run[0]:
        raise ValueError(
            _unreachable(
                src,
                dst,
                f"{run[0]!r} leaves dim {dim}, but it is not the last of {tuple(have)};"
                f" reorder the rule so that it comes last",
            )
        )
    while gone and _target(gone[-1], want) == _target(run[0], want):
        if dim and have[-len(run) - 1] != gone[-1]:
            break
        run.insert(0, gone.pop())
    return tuple(run)


def _cut(x: torch.Tensor, axes: tuple[str, ...], dim: int) -> torch.Tensor:
    """This rank's part of values that the ranks along `axes` hold alike."""
    n = axis_size(axes)
    if x.shape[dim] % n:
        raise ValueError(
            f"dim {dim} of shape {tuple(x.shape)} is {x.shape[dim]}, which {axis_of(axes)!r} does"
            f" not divide into {n} even parts; pad it first"
        )
    return x if n == 1 else x.chunk(n, dim)[axis_index(axes)]


def _same_rank(x: torch.Tensor, src: P, dst: P) -> None:
    if not x.ndim == len(src) == len(dst):
        raise ValueError(f"a tensor of {x.ndim} dims can't go from {src!r} to {dst!r}")


def _unreachable(src: P, dst: P, why: str) -> str:
    return f"can't go from layout {src!r} to {dst!r}: {why}"
