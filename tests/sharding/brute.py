"""Meshes, groups and cuts by enumeration, straight from their definitions."""

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from funcinfer.sharding import Mesh

Axes = tuple[str, ...]
# By number of ranks.
MESHES = {
    2: [Mesh(tp=2), Mesh(one=1, tp=2)],
    3: [Mesh(tp=3)],
    4: [Mesh(tp=4), Mesh(dp=2, one=1, tp=2)],
    6: [Mesh(dp=3, tp=2)],
    8: [Mesh(a=2, b=2, c=2)],
}


def sizes_of(mesh: Mesh) -> dict[str, int]:
    return dict(mesh.axes)


@functools.cache
def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """Rank -> coordinate: counting with the last axis fastest."""
    found = []
    for rank in range(math.prod(sizes_of(mesh).values())):
        coord = {}
        for name, size in reversed(mesh.axes):
            coord[name] = rank % size
            rank //= size
        found.append({name: coord[name] for name, _ in mesh.axes})
    return found


@functools.cache
def group(mesh: Mesh, axes: Axes, rank: int) -> list[int]:
    """The ranks that agree with `rank` outside of `axes`, ordered by their coordinates along it."""
    coords = coordinates(mesh)
    mine = [
        r for r, c in enumerate(coords) if all(c[a] == coords[rank][a] for a in c if a not in axes)
    ]
    return sorted(mine, key=lambda r: [coords[r][a] for a in axes])


@functools.cache
def index(mesh: Mesh, axes: Axes, rank: int) -> int:
    return group(mesh, axes, rank).index(rank)


def products(mesh: Mesh) -> list[Axes]:
    """Every ordered choice of at least one axis."""
    names = [name for name, _ in mesh.axes]
    return [p for n in range(1, len(names) + 1) for p in itertools.permutations(names, n)]


def part(x: torch.Tensor, dim: int, count: int, i: int) -> torch.Tensor:
    """Part i of `count` even parts of a dim, picked index by index."""
    size = x.shape[dim] // count
    return x.index_select(dim, torch.arange(i * size, i * size + size))


def cut(x: torch.Tensor, layout: Sequence[Axes], mesh: Mesh, rank: int) -> torch.Tensor:
    """What `rank` holds of a global tensor: the part of each dim at its index along the axes."""
    for dim, axes in enumerate(layout):
        count = math.prod(sizes_of(mesh)[a] for a in axes)
        x = part(x, dim, count, index(mesh, axes, rank))
    return x


def layouts(names: Sequence[str], dims: int) -> list[tuple[Axes, ...]]:
    """Every way to lay some of the axes, in every order, over `dims` dims."""
    found = []
    for places in itertools.product([None, *range(dims)], repeat=len(names)):
        per_dim = [[n for n, p in zip(names, places, strict=True) if p == d] for d in range(dims)]
        found += itertools.product(*(itertools.permutations(axes) for axes in per_dim))
    return found
