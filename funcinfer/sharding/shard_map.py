"""Running a function on local tensors over a mesh: split global tensors, run every rank, join the
results.

`shard_map(f, mesh, in_specs, out_specs)` is the three in a row, with ranks as threads of this
process. A loop that must not copy its cache each step holds a `ThreadRanks` (or `ProcessRanks`, one
rank a process) and calls them itself.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from funcinfer.sharding.comm import Env, solo, use_env
from funcinfer.sharding.comm_threads import Aborted, Rendezvous
from funcinfer.sharding.mesh import Coord, Mesh, P, is_p
from funcinfer.tree import align, leaves_with_path, tree_flatten, tree_unflatten

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


class Ranks(Protocol):
    """The ranks that this process runs. A list of locals has one entry for each of them."""

    mesh: Mesh

    def split(self, tree: Any, specs: Any, *, copy: bool = False, what: str = "tree") -> list[Any]:
        """The local trees of a global one."""
        ...

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """`f(*locals)` on each rank."""
        ...

    def join(self, outs: list[Any], specs: Any, *, check: bool = True, what: str = "output") -> Any:
        """The global tree of local ones."""
        ...


def shard(x: torch.Tensor, spec: P, mesh: Mesh, coord: Coord, path: str = "") -> torch.Tensor:
    """The part of a global tensor at `coord`: a view where nothing is cut, else contiguous.

    >>> shard(torch.arange(6), P("tp"), Mesh(tp=2), {"tp": 1})
    tensor([3, 4, 5])
    """
    shape = mesh.local_shape(x.shape, spec, path)
    for dim, (size, axis) in enumerate(zip(shape, spec, strict=True)):
        if mesh.size(axis) > 1:
            x = x.narrow(dim, mesh.index(axis, coord) * size, size)
    return x.contiguous()


def split_tree(
    tree: Any, specs: Any, mesh: Mesh, coord: Coord, *, copy: bool = False, what: str = "tree"
) -> Any:
    """The local tree at `coord`. Leaves that are not tensors go to every rank as they are; their
    spec is None.
    """
    pairs = leaves_with_path(tree)
    layouts = align(specs, [p for p, _ in pairs], is_leaf=is_p, what=f"the specs of {what}")
    locals_ = []
    for (path, x), spec in zip(pairs, layouts, strict=True):
        name = f"{what}.{path}" if path else what
        if not isinstance(x, torch.Tensor):
            if spec is not None:
                raise ValueError(f"{name} is a {type(x).__name__}, not a tensor: its spec is None")
            locals_.append(x)
            continue
        if not isinstance(spec, P):
            raise ValueError(
                f"{name}: a tensor of {x.ndim} dims needs a P of {x.ndim} entries, not {spec!r}"
            )
        part = shard(x, spec, mesh, coord, name)
        alias = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        locals_.append(part.clone() if copy and alias else part)
    return tree_unflatten(locals_, tree_flatten(tree)[1])


def join_leaf(
    parts: Sequence[torch.Tensor], spec: P, mesh: Mesh, path: str, check: bool
) -> torch.Tensor:
    """The global tensor of all ranks' parts (rank order); ValueError where declared replicas
    differ.
    """
    coords = mesh.coords()
    if len(spec) != parts[0].ndim:
        raise ValueError(
            f"{path}: has shape {tuple(parts[0].shape)} on each rank, but its layout is {spec!r}"
        )
    for rank, part in enumerate(parts):
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise ValueError(
                f"{path}: rank 0 has {tuple(parts[0].shape)} {parts[0].dtype},"
                f" rank {rank} has {tuple(part.shape)} {part.dtype}"
            )
    shape = [n * mesh.size(axis) for n, axis in zip(parts[0].shape, spec, strict=True)]
    joined = parts[0].new_empty(shape)
    owners: dict[tuple[int, ...], int] = {}
    for rank, (part, coord) in enumerate(zip(parts, coords, strict=True)):
        place = tuple(mesh.index(axis, coord) for axis in spec)
        first = owners.setdefault(place, rank)
        if first == rank:
            cut = tuple(slice(i * n, i * n + n) for i, n in zip(place, part.shape, strict=True))
            joined[cut] = part
        elif check:
            _check_replica(parts[first], part, f"{path}: declared {spec!r}", coords, first, rank)
    return joined


def _check_replica(
    a: torch.Tensor, b: torch.Tensor, what: str, coords: list[dict[str, int]], i: int, j: int
) -> None:
    if torch.equal(a, b):
        return
    bound = TOLERANCE.get(a.dtype, 0.0)
    wide = (
        torch.promote_types(a.dtype, torch.float32) if a.dtype.is_floating_point else torch.float64
    )
    a, b = a.to(wide), b.to(wide)
    finite = a[a.isfinite()]
    scale = max(finite.abs().max().item() if finite.numel() else 1.0, 1e-30)
    if torch.allclose(a, b, rtol=bound, atol=bound * scale, equal_nan=True):
        return
    gap = (a - b).abs().nan_to_num(nan=float("inf")).max().item()
    axes = [k for k in coords[i] if coords[i][k] != coords[j][k]]
    raise ValueError(
        f"{what}, so ranks {i} ({coords[i]}) and {j} ({coords[j]}) must hold the same,"
        f" but they differ by up to {gap:.3g} (largest value {scale:.3g})."
        f" A psum over {axes} may be missing,"
        f" a replicated argument may be written in place, or the output is sharded over {axes}"
    )


class ThreadRanks:
    """All ranks of a mesh as threads of this process, kept from call to call.

    A collective whose ranks are not all there after `timeout` seconds fails, naming who is missing.

    >>> from funcinfer.sharding import psum
    >>> ranks = ThreadRanks(Mesh(tp=2))
    >>> x = ranks.split(torch.tensor([1.0, 2.0]), P("tp"))
    >>> ranks.join(ranks.run(lambda x: psum(x, "tp"), x), P(None))
    tensor([3.])
    """

    def __init__(self, mesh: Mesh, *, timeout: float = 60.0) -> None:
        self.mesh, self.timeout = mesh, timeout
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []

    def split(self, tree: Any, specs: Any, *, copy: bool = False, what: str = "tree") -> list[Any]:
        """One local tree a rank. Whole tensors are shared between ranks unless `copy`: donated ones
        need it.
        """
        return [
            split_tree(tree, specs, self.mesh, c, copy=copy, what=what) for c in self.mesh.coords()
        ]

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """`f(*locals)` on every rank at once; the first error of any rank is raised here.

        The caller's grad mode and inference mode hold in the ranks.
        """
        if self.mesh.num_ranks == 1:
            with use_env(Env(self.mesh, self.mesh.coords()[0], solo())):
                return [f(*(a[0] for a in args))]
        hub = Rendezvous(self.mesh, self.timeout)
        outs: list[Any] = [None] * self.mesh.num_ranks
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def task(rank: int, coord: Coord) -> None:
            env = Env(self.mesh, coord, hub.comm(rank))
            try:
                with torch.inference_mode(inference), torch.set_grad_enabled(grad), use_env(env):
                    outs[rank] = f(*(a[rank] for a in args))
            except Aborted:
                pass
            except BaseException as error:
                error.add_note(f"raised on rank {rank} of {self.mesh!r}, at {dict(coord)}")
                hub.fail(error)
            finally:
                hub.end(rank)

        for rank, (coord, jobs) in enumerate(zip(self.mesh.coords(), self._workers(), strict=True)):
            jobs.put(lambda rank=rank, coord=coord: task(rank, coord))
        self._finish(hub)
        return outs

    def join(self, outs: list[Any], specs: Any, *, check: bool = True, what: str = "output") -> Any:
        """The global tree. With `check`, parts that `specs` declares replicated must be equal on
        all ranks.
        """
        pairs = [leaves_with_path(o) for o in outs]
        paths = [p for p, _ in pairs[0]]
        for rank, other in enumerate(pairs):
            if [p for p, _ in other] != paths:
                raise ValueError(f"{what}: rank {rank} returned another structure than rank 0")
        layouts = align(specs, paths, is_leaf=is_p, what=f"the specs of the {what}")
        leaves = []
        for i, (path, spec) in enumerate(zip(paths, layouts, strict=True)):
            parts = [p[i][1] for p in pairs]
            name = f"{what}.{path}" if path else what
            tensors = isinstance(parts[0], torch.Tensor)
            leaves.append(join_leaf(parts, spec, self.mesh, name, check) if tensors else parts[0])
        return tree_unflatten(leaves, tree_flatten(outs[0])[1])

    def _finish(self, hub: Rendezvous) -> None:
        try:
            if not hub.wait_for_all():
                self._queues = []  # a rank is stuck: leave its thread behind, start anew next time
        except BaseException as interrupt:
            hub.fail(interrupt)
            raise
        if hub.error is not None:
            raise hub.error

    def _workers(self) -> list[queue.SimpleQueue[Callable[[], None] | None]]:
        while len(self._queues) < self.mesh.num_ranks:
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"rank-{len(self._queues)}"
            threading.Thread(target=_work, args=(jobs,), name=name, daemon=True).start()
            weakref.finalize(self, jobs.put, None)
            self._queues.append(jobs)
        return self._queues


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def shard_map(
    f: Callable[..., Any],
    mesh: Mesh,
    in_specs: Sequence[Any],
    out_specs: Any,
    *,
    check: bool = True,
    donate: Sequence[int] = (),
    ranks: Ranks | None = None,
) -> Callable[..., Any]:
    """`f` of local tensors as a function of global ones: one thread a rank, all in this process.

    `in_specs` has one tree of `P` an argument, of the argument's structure (None for what is not a
    tensor); `out_specs` likewise for the result. With `check`, outputs declared replicated must be
    equal on all ranks. An argument that `f` writes in place must be named in `donate`: each rank
    then gets a copy of its own. `ranks` runs it elsewhere than on threads. ValueError for a wrong
    number of specs, a dim that does not divide, ranks that differ or an argument written without
    being donated. Source: jax.shard_map.

    >>> from funcinfer.sharding import all_gather
    >>> f = shard_map(lambda x: all_gather(x, "tp", dim=0), Mesh(tp=2), (P("tp"),), P(None))
    >>> f(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    ranks = ranks or ThreadRanks(mesh)

    def mapped(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise ValueError(f"shard_map: {len(in_specs)} in_specs for {len(args)} arguments")
        locals_ = [
            ranks.split(a, s, copy=i in donate, what=f"argument {i}")
            for i, (a, s) in enumerate(zip(args, in_specs, strict=True))
        ]
        before = [_versions(tree) for tree in args]
        outs = ranks.run(f, *locals_)
        for i, (tree, old) in enumerate(zip(args, before, strict=True)):
            if i not in donate and (written := _written(tree, old)):
                raise ValueError(
                    f"argument {i}{written} was written in place; ranks share it,"
                    f" so name it: donate=({i},)"
                )
        return ranks.join(outs, out_specs, check=check)

    return mapped


def _versions(tree: Any) -> dict[str, int]:
    return {
        path: x._version
        for path, x in leaves_with_path(tree)
        if isinstance(x, torch.Tensor) and not x.is_inference()
    }


def _written(tree: Any, before: dict[str, int]) -> str | None:
    for path, version in _versions(tree).items():
        if before.get(path) != version:
            return f" ({path})" if path else " "
    return None
