"""Running a function on local tensors over a mesh: split global tensors, run every rank, join.

`shard_map(f, mesh, in_specs, out_specs)` is the three in a row, with ranks as threads of this
process. A loop that must not copy its cache each step holds a `ThreadRanks` (or a `ProcessRanks`,
one rank a process) and calls them itself.
"""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from funcinfer.sharding.comm import Env, use_env
from funcinfer.sharding.comm_threads import Aborted, Rendezvous
from funcinfer.sharding.mesh import Coord, Mesh, P, show_ranks
from funcinfer.sharding.split_join import join_tree, outline, split_tree
from funcinfer.tree import leaves_with_path, tree_leaves

Job = Callable[[], None]


class Ranks(Protocol):
    """The ranks that this process runs. A list of locals has one entry for each of them."""

    mesh: Mesh

    @property
    def coords(self) -> list[dict[str, int]]:
        """The coordinates of these ranks, in rank order."""
        ...

    def split(self, tree: Any, specs: Any, *, copy: bool = False, what: str = "tree") -> list[Any]:
        """The local trees of a global one."""
        ...

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """`f(*locals)` on each rank."""
        ...

    def join(self, outs: list[Any], specs: Any, *, check: bool = True, what: str = "output") -> Any:
        """The global tree of local ones."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The value of the process that has the first rank, in every process."""
        ...


class ThreadRanks:
    """All ranks of a mesh as threads of this process, kept from call to call.

    A collective whose ranks are not all there after `timeout` seconds fails, naming who is missing.
    The one rank of a mesh without others runs in the calling thread.

    >>> from funcinfer.sharding import psum
    >>> ranks = ThreadRanks(Mesh(tp=2))
    >>> x = ranks.split(torch.tensor([1.0, 2.0]), P("tp"))
    >>> ranks.join(ranks.run(lambda x: psum(x, "tp"), x), P(None))
    tensor([3.])
    """

    def __init__(self, mesh: Mesh, *, timeout: float = 60.0) -> None:
        self.mesh, self.timeout = mesh, timeout
        self._idle: list[_Crew] = []
        weakref.finalize(self, _dismiss_all, self._idle)

    @property
    def coords(self) -> list[dict[str, int]]:
        """The coordinates that this process runs, here all of them, in rank order."""
        return self.mesh.coords()

    def split(self, tree: Any, specs: Any, *, copy: bool = False, what: str = "tree") -> list[Any]:
        """One local tree a rank.

        Whole tensors are shared between ranks unless `copy`: donated ones need it.
        """
        return [split_tree(tree, specs, self.mesh, c, copy=copy, what=what) for c in self.coords]

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """`f(*locals)` on every rank at once; the first error of any rank is raised here.

        The caller's grad mode and inference mode hold in the ranks. Calls from several threads, or
        from inside a rank, do not disturb each other: each has threads of its own. A rank that is
        stuck when another fails is left behind after some seconds.
        """
        check_locals(args, self.mesh.num_ranks)
        hub = Rendezvous(self.mesh, self.timeout)
        outs: list[Any] = [None] * self.mesh.num_ranks
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def call(rank: int, coord: Coord) -> None:
            try:
                with use_env(Env(self.mesh, coord, hub.comm(rank))):
                    outs[rank] = f(*(a[rank] for a in args))
            except Aborted:
                pass
            except BaseException as error:
                error.add_note(f"raised on {show_ranks(self.mesh, [rank])} of {self.mesh!r}")
                hub.fail(error)
            finally:
                hub.end(rank)

        def job(rank: int, coord: Coord) -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                call(rank, coord)

        if self.mesh.num_ranks == 1:
            call(0, self.coords[0])
        else:
            self._run_crew([lambda r=r, c=c: job(r, c) for r, c in enumerate(self.coords)], hub)
        if error := hub.take_error():
            try:
                raise error
            finally:
                del error  # else its traceback, which has this frame, holds itself
        return outs

    def join(self, outs: list[Any], specs: Any, *, check: bool = True, what: str = "output") -> Any:
        """The global tree of one local tree a rank.

        With `check`, parts that `specs` declares replicated must be equal on all ranks.
        """
        check_locals([outs], self.mesh.num_ranks)
        leaves = [tree_leaves(o) for o in outs]
        outlines = [outline(o) for o in outs]
        return join_tree(
            outs[0],
            outlines,
            lambda i, _: [rank[i] for rank in leaves],
            specs,
            self.mesh,
            check=check,
            what=what,
        )

    def broadcast(self, value: Any) -> Any:
        """`value`: there is no other process."""
        return value

    def _run_crew(self, jobs: Sequence[Job], hub: Rendezvous) -> None:
        try:
            crew = self._idle.pop()
        except IndexError:
            crew = _Crew(len(jobs))
        all_ended = False
        try:
            crew.start(jobs)
            all_ended = hub.wait_for_all()
        except BaseException as interrupt:
            hub.fail(interrupt)
            raise
        finally:
            if all_ended:
                self._idle.append(crew)
            else:
                crew.dismiss()


class _Crew:
    """Threads, one a rank, that wait for jobs until they are dismissed."""

    def __init__(self, size: int) -> None:
        self._queues: list[queue.SimpleQueue[Job | None]] = []
        for rank in range(size):
            jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name=f"rank-{rank}", daemon=True).start()
            self._queues.append(jobs)

    def start(self, jobs: Sequence[Job]) -> None:
        for jobs_of_rank, job in zip(self._queues, jobs, strict=True):
            jobs_of_rank.put(job)

    def dismiss(self) -> None:
        for jobs in self._queues:
            jobs.put(None)


def _work(jobs: "queue.SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # its tensors must not live until the next one comes


def _dismiss_all(crews: list[_Crew]) -> None:
    for crew in crews:
        crew.dismiss()


def check_locals(args: Sequence[list[Any]], count: int) -> None:
    """ValueError unless each argument has one entry for each rank that this process runs."""
    for i, a in enumerate(args):
        if not isinstance(a, list) or len(a) != count:
            came = f"{len(a)} entries" if isinstance(a, list) else f"a {type(a).__name__}"
            raise ValueError(
                f"argument {i} must be a list with one entry for each of {count} ranks, not {came};"
                f" split(tree, specs) makes it"
            )


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
    ranks = ThreadRanks(mesh) if ranks is None else ranks
    _check_shard_map(mesh, in_specs, donate, ranks)

    def guarded(*args: Any) -> Any:
        before = [_versions(a) for a in args]
        out = f(*args)
        for i, (tree, old) in enumerate(zip(args, before, strict=True)):
            if i not in donate:
                _check_unwritten(tree, old, i)
        return out

    def mapped(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise ValueError(
                f"shard_map: {len(in_specs)} in_specs for {len(args)} arguments; give one each"
            )
        local = [
            ranks.split(a, s, copy=i in donate, what=f"argument {i}")
            for i, (a, s) in enumerate(zip(args, in_specs, strict=True))
        ]
        return ranks.join(ranks.run(guarded, *local), out_specs, check=check)

    return mapped


def _check_shard_map(
    mesh: Mesh, in_specs: Sequence[Any], donate: Sequence[int], ranks: Ranks
) -> None:
    if isinstance(in_specs, P) or not isinstance(in_specs, tuple | list):
        raise ValueError(
            f"shard_map: in_specs is a tuple with one entry an argument, as (P('tp'), P(None)),"
            f" not {in_specs!r}"
        )
    if not set(donate) <= set(range(len(in_specs))):
        raise ValueError(
            f"shard_map: donate={donate!r} must be indices of the {len(in_specs)} arguments"
        )
    if ranks.mesh != mesh:
        raise ValueError(f"shard_map: ranks of {ranks.mesh!r} can't run a function over {mesh!r}")


def _versions(tree: Any) -> dict[str, int]:
    """How often each tensor was written; those made in inference mode do not count it."""
    return {
        path: x._version
        for path, x in leaves_with_path(tree)
        if isinstance(x, torch.Tensor) and not x.is_inference()
    }


def _check_unwritten(tree: Any, before: dict[str, int], i: int) -> None:
    for path, version in _versions(tree).items():
        if before[path] != version:
            raise ValueError(
                f"argument {i}{f' ({path})' if path else ''} was written in place, but ranks share"
                f" it: name it in donate=({i},), or return a new tensor"
            )
