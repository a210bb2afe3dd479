"""Collectives written down and not carried out: one rank of any mesh, on meta tensors.

Meta tensors have shapes and no values, and the shapes of ranks are alike, so one rank sees what
every rank would: each call with its axes, shape and dtype, in order. Nothing is allocated, and no
other rank is needed.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from funcinfer.sharding.comm import Env, Group, use_env
from funcinfer.sharding.mesh import Coord, Mesh, names
from funcinfer.sharding.meta import QuickMeta
from funcinfer.sharding.rules import Rules
from funcinfer.spec import ParamSpec, is_spec
from funcinfer.tree import map_with_path


@dataclass(frozen=True)
class Collective:
    """One call: the operation with its arguments, the mesh axes, and this rank's tensor.

    >>> Collective("all_gather dim=0", ("tp",), (3, 4), torch.bfloat16).nbytes
    24
    """

    call: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def op(self) -> str:
        """The name of the operation."""
        return self.call.split()[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that this rank puts in."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RecordingComm:
    """Notes each collective in `found`, and answers with a meta tensor of the shape that comes out.

    Collectives by counts are answered as if every rank had this one's counts.
    """

    rank: int
    found: list[Collective]

    def psum(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The same shape."""
        return self._note("psum", x, group, x.shape)

    def pmax(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The same shape."""
        return self._note("pmax", x, group, x.shape)

    def all_gather(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """`dim` times the size of the group."""
        return self._note(f"all_gather dim={dim}", x, group, _grown(x.shape, dim, group.size))

    def psum_scatter(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """`dim` divided by the size of the group."""
        shape = list(x.shape)
        shape[dim] //= group.size
        return self._note(f"psum_scatter dim={dim}", x, group, shape)

    def all_to_all(self, x: torch.Tensor, group: Group, *, split: int, concat: int) -> torch.Tensor:
        """`split` divided by the size of the group, `concat` times it."""
        shape = list(x.shape)
        shape[split] //= group.size
        shape = _grown(shape, concat, group.size)
        return self._note(f"all_to_all split={split} concat={concat}", x, group, shape)

    def all_to_all_v(
        self, x: torch.Tensor, group: Group, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The rows that would come, if every rank sent as many as this one to this one."""
        sizes = torch.empty(len(counts), dtype=torch.int64, device="meta")
        self._note("all_to_all_v counts", sizes, group, sizes.shape)
        coming = (counts[group.index],) * group.size
        return self._note("all_to_all_v", x, group, (sum(coming), *x.shape[1:])), coming

    def ppermute(
        self, x: torch.Tensor, group: Group, perm: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The same shape."""
        return self._note(f"ppermute {tuple(perm)}", x, group, x.shape)

    def _note(self, call: str, x: torch.Tensor, group: Group, shape: Sequence[int]) -> torch.Tensor:
        self.found.append(Collective(call, group.axes, tuple(x.shape), x.dtype))
        return x.new_empty(tuple(shape))


def _grown(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [size * n if i == dim else size for i, size in enumerate(shape)]


@contextmanager
def record(
    mesh: Mesh, coord: Coord | None = None, *, quick: QuickMeta | None = None
) -> Iterator[list[Collective]]:
    """Bind one rank of `mesh`, by default the first, for functions on local meta tensors; the
    collectives they call, as they come. `quick` may note other operations too.

    >>> from funcinfer.sharding import all_gather
    >>> with record(Mesh(tp=4)) as found:
    ...     all_gather(torch.empty(3, 2, device="meta"), "tp", dim=0).shape
    torch.Size([12, 2])
    >>> found
    [Collective(call='all_gather dim=0', axes=('tp',), shape=(3, 2), dtype=torch.float32)]
    """
    found: list[Collective] = []
    coord = dict.fromkeys(mesh.names, 0) if coord is None else coord
    env = Env(mesh, coord, RecordingComm(mesh.rank(coord), found))
    with use_env(env), quick or QuickMeta():
        yield found


def abstract_local(specs: Any, rules: Rules, mesh: Mesh, coord: Coord | None = None) -> Any:
    """The part of a tree of specs that the rank at `coord`, by default the first, holds, as meta
    tensors; None for a leaf of another pipeline stage.

    ValueError for a dim that does not divide evenly.

    >>> w = ParamSpec((8, 6), ("heads", None))
    >>> abstract_local({"w": w}, Rules(heads="tp"), Mesh(tp=2))["w"].shape
    torch.Size([4, 6])
    """
    coord = first_coord(mesh) if coord is None else coord

    def make(path: str, s: ParamSpec) -> torch.Tensor | None:
        layout = rules.layout(s)
        shape = mesh.local_shape(s.shape, layout, path)
        if not mesh.holds(layout, coord):
            return None
        return torch.empty(shape, dtype=s.dtype, device="meta")

    return map_with_path(make, specs, is_leaf=is_spec)


def first_coord(mesh: Mesh) -> dict[str, int]:
    """The coordinate of the first rank."""
    return dict.fromkeys(mesh.names, 0)


def stage_coords(rules: Rules, mesh: Mesh) -> list[dict[str, int]]:
    """The first rank of each pipeline stage: ranks that differ otherwise are alike.

    >>> stage_coords(Rules(layers="pp"), Mesh(pp=2, tp=4))
    [{'pp': 0, 'tp': 0}, {'pp': 1, 'tp': 0}]
    """
    stages = names(rules["layers"])
    places = itertools.product(*(range(mesh.size(a)) for a in stages))
    return [{**first_coord(mesh), **dict(zip(stages, at, strict=True))} for at in places]
