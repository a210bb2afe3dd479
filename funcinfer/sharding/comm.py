"""The axis environment of a rank, and the protocol of what carries its collectives.

The environment is the one piece of ambient state in funcinfer: `shard_map` binds it for each of its
threads and `bind` for a serving process. It lives in a `threading.local`, which
`torch.compile(fullgraph=True)` can trace through.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from funcinfer.sharding.mesh import Axis, Coord, Mesh, names


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: `members` in index order along `axes`, and this rank's `index`
    among them.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.members)


class Comm(Protocol):
    """What carries collectives between ranks. Each method gives a new tensor and never writes its
    input.

    Semantics are those of `funcinfer.sharding.collectives`, which checks arguments before it calls
    these.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the mesh."""
        ...

    def psum(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum over the group."""
        ...

    def pmax(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The elementwise maximum over the group."""
        ...

    def all_gather(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """All parts joined along `dim`."""
        ...

    def psum_scatter(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """This rank's part along `dim` of the sum."""
        ...

    def all_to_all(self, x: torch.Tensor, group: Group, *, split: int, concat: int) -> torch.Tensor:
        """Part i along `split` goes to member i; what comes is joined along `concat`."""
        ...

    def all_to_all_v(
        self, x: torch.Tensor, group: Group, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """`counts[i]` rows go to member i; the rows that come, and how many from each."""
        ...

    def ppermute(
        self, x: torch.Tensor, group: Group, perm: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The tensor of the member that sends to this one, or zeros."""
        ...


@dataclass(frozen=True)
class Env:
    """One rank's place in a mesh and its way to the others."""

    mesh: Mesh
    coord: Coord
    comm: Comm

    def group(self, axis: Axis) -> Group:
        """The group of a collective over `axis`.

        NameError where an axis is not bound, ValueError where one is named twice.
        """
        self.require(axis)
        return _group(self.mesh, names(axis), tuple(self.coord.items()))

    def require(self, axis: Axis) -> None:
        """NameError where `axis` names a mesh axis that is not bound."""
        for a in names(axis):
            if a not in self.coord:
                raise NameError(_unbound(a, f"bound axes: {', '.join(self.mesh.names) or 'none'}"))


@lru_cache(maxsize=4096)
def _group(mesh: Mesh, axes: tuple[str, ...], place: tuple[tuple[str, int], ...]) -> Group:
    if len(set(axes)) != len(axes):
        raise ValueError(f"a collective over {axes!r} names a mesh axis twice")
    return Group(axes, mesh.group(axes, dict(place)), mesh.index(axes, dict(place)))


class _Local(threading.local):
    env: Env | None = None


_local = _Local()


def current() -> Env | None:
    """This thread's environment, or None outside of `shard_map` and `bind`."""
    return _local.env


def require_env(axis: Axis) -> Env:
    """This thread's environment with the mesh axes `axis` bound; NameError otherwise."""
    env = _local.env
    if env is None:
        raise NameError(_unbound(names(axis)[0], "no mesh is bound here"))
    env.require(axis)
    return env


@contextmanager
def use_env(env: Env | None) -> Iterator[None]:
    """Bind `env` in this thread for the length of a `with` block."""
    before = _local.env
    _local.env = env
    try:
        yield
    finally:
        _local.env = before


@contextmanager
def bind(mesh: Mesh, comm: Comm) -> Iterator[Env]:
    """Bind a mesh for functions on local tensors, one process a rank: the serving loop's way.

    `comm.rank` says which rank of the mesh this is. ValueError where the mesh has no such rank.

    >>> from funcinfer.sharding import Mesh, axis_size
    >>> with bind(Mesh(tp=1), solo()):
    ...     axis_size("tp")
    1
    """
    if not 0 <= comm.rank < mesh.num_ranks:
        raise ValueError(f"rank {comm.rank} is not one of the {mesh.num_ranks} ranks of {mesh!r}")
    env = Env(mesh, mesh.coords()[comm.rank], comm)
    with use_env(env):
        yield env


Exchange = Callable[[torch.Tensor, Group, str], list[torch.Tensor]]


@dataclass(frozen=True)
class ExchangeComm:
    """Every collective from one primitive: `exchange(x, group, what)` gives the tensors of all
    members in order.

    Threads meet in a rendezvous; a recorder on meta tensors answers with copies of its own. `what`
    says the operation and its arguments, so that ranks in different collectives can be told apart.
    """

    rank: int
    exchange: Exchange

    def psum(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Sum over the members, added in index order on every rank: all hold the same bits."""
        return _sum(self.exchange(x, group, "psum"))

    def pmax(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Elementwise maximum over the members."""
        return torch.stack(self.exchange(x, group, "pmax")).amax(0)

    def all_gather(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """The members' tensors joined along `dim`."""
        return torch.cat(self.exchange(x, group, f"all_gather dim={dim}"), dim)

    def psum_scatter(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """This rank's part along `dim` of the sum."""
        parts = self.exchange(x, group, f"psum_scatter dim={dim}")
        return _sum([t.chunk(group.size, dim)[group.index] for t in parts])

    def all_to_all(self, x: torch.Tensor, group: Group, *, split: int, concat: int) -> torch.Tensor:
        """Part `index` along `split` of each member, joined along `concat`."""
        parts = self.exchange(x, group, f"all_to_all split={split} concat={concat}")
        return torch.cat([t.chunk(group.size, split)[group.index] for t in parts], concat)

    def all_to_all_v(
        self, x: torch.Tensor, group: Group, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Rows of dim 0 that each member grouped for this rank, and how many came from each."""
        sizes = torch.tensor(counts, dtype=torch.int64)
        all_counts = self.exchange(sizes, group, "all_to_all_v counts")
        rows = self.exchange(x, group, "all_to_all_v")
        mine = [t.split(c.tolist())[group.index] for t, c in zip(rows, all_counts, strict=True)]
        return torch.cat(mine), tuple(len(m) for m in mine)

    def ppermute(
        self, x: torch.Tensor, group: Group, perm: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The tensor of the member that sends to this one; zeros where none does."""
        parts = self.exchange(x, group, f"ppermute {tuple(perm)}")
        source = {to: of for of, to in perm}.get(group.index)
        return torch.zeros_like(x) if source is None else parts[source].clone()


def solo() -> Comm:
    """The comm of a mesh of one rank: every collective meets itself alone."""
    return ExchangeComm(0, lambda x, group, what: [x])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _unbound(axis: str, state: str) -> str:
    return (
        f"mesh axis {axis!r} is not bound ({state}). Call the function through"
        f" shard_map(f, Mesh({axis}=...), ...) or inside `with bind(mesh, comm)`,"
        f" or take the axis out of the rules"
    )
