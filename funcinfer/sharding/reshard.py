"""Moves between layouts: the exact set of them.

    reshard    A[I_X] -> A[I_Y]          same values, another layout
    reduce_to  A[I]{U_X} -> A[I_Y]       finish partial sums over X, in the layout that is wanted

Dim 0 is the token dim and is a bag: each token carries its position, row and slot, which move by
the same route as the tensor, so an axis may leave it from any place and come back. The other dims
are ordered: axes join and leave them at the minor end only. What can't be reached in that way is a
ValueError that names both layouts.
"""

import torch

from funcinfer.sharding.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    psum,
    psum_scatter,
)
from funcinfer.sharding.mesh import Axis, P, axis_of, drop, extends, names


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
    have = [list(names(a)) for a in src]
    want = [list(names(a)) for a in dst]
    for dim in range(x.ndim):
        while run := _leaving(have[dim], want, dim):
            target = _target(run[0], want)
            if target == 0 and [a for a in want[0] if a in run] != list(run):
                raise ValueError(
                    _unreachable(src, dst, f"axes {run} reach the token dim in another order")
                )
            x = _move(x, run, dim, target)
            have[dim] = [a for a in have[dim] if a not in run]
            if target is not None:
                have[target] += run
    for dim in range(x.ndim):
        for a in want[dim]:
            if a not in have[dim]:
                x = _cut(x, a, dim)
                have[dim].append(a)
        same = sorted(have[dim]) == sorted(want[dim]) if dim == 0 else have[dim] == want[dim]
        if not same:
            raise ValueError(_unreachable(src, dst, f"dim {dim} would end with axes {have[dim]}"))
    return x


def reduce_to(y: torch.Tensor, over: Axis, src: P, dst: P) -> torch.Tensor:
    """Finish sums that are partial over `over`: scatter those axes that `dst` deals, psum the rest,
    cut what is alike.

    `src` is the layout of the partial sums. ValueError where `dst` drops or moves an axis of `src`.
    """
    _same_rank(y, src, dst)
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
            y, scattered = _cut(y, a, dim), []
        y = psum_scatter(y, axis_of(scattered), dim=dim)
    return psum(y, axis_of(a for a in names(over) if a not in dst.axes))


def _target(axis: str, want: list[list[str]]) -> int | None:
    return next((dim for dim, axes in enumerate(want) if axis in axes), None)


def _leaving(have: list[str], want: list[list[str]], dim: int) -> tuple[str, ...]:
    """The last run of axes that leave this dim for one target; () where none leaves."""
    gone = [a for a in have if a not in want[dim]]
    if not gone:
        return ()
    run = [gone.pop()]
    while gone and _target(gone[-1], want) == _target(run[0], want):
        if dim and have[-len(run) - 1 :] != [gone[-1], *run]:
            break
        run.insert(0, gone.pop())
    if dim and have[-len(run) :] != run:
        raise ValueError(
            f"dim {dim}: axes {tuple(run)} leave, but they are not the minor axes of {tuple(have)};"
            f" reorder the rule so that they come last"
        )
    return tuple(run)


def _move(x: torch.Tensor, run: tuple[str, ...], dim: int, target: int | None) -> torch.Tensor:
    if target is None:
        return all_gather(x, axis_of(run), dim=dim)
    return all_to_all(x, axis_of(run), split=target, concat=dim)


def _cut(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    n = axis_size(axis)
    if x.shape[dim] % n:
        raise ValueError(
            f"dim {dim} of shape {tuple(x.shape)} is {x.shape[dim]}, which {axis!r} does not divide"
            f" into {n} even parts; pad it first"
        )
    return x if n == 1 else x.chunk(n, dim)[axis_index(axis)]


def _same_rank(x: torch.Tensor, src: P, dst: P) -> None:
    if not x.ndim == len(src) == len(dst):
        raise ValueError(f"a tensor of {x.ndim} dims can't go from {src!r} to {dst!r}")


def _unreachable(src: P, dst: P, why: str) -> str:
    return f"can't go from layout {src!r} to {dst!r}: {why}"
