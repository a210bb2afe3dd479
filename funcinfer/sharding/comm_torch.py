"""Ranks as processes: collectives over `torch.distributed`: gloo on cpu, nccl on cuda, hccl on npu.

This is the only file that uses `torch.distributed`. It makes plain process groups, one for each
product of mesh axes, because a DeviceMesh gives groups of single axes and its way to a product of
them is private. torch numbers the ranks of a group by their size; a product of axes in another
order than the mesh's is served by permuting the parts.
"""

import atexit
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from funcinfer.sharding.comm import Comm, Group, bind
from funcinfer.sharding.mesh import Axis, Mesh, axis_of, show_ranks
from funcinfer.sharding.shard_map import check_locals
from funcinfer.sharding.split_join import join_tree, outline, split_tree

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
# What every back end can add and move. Others are added after a gather, and move as bytes.
NATIVE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
# torch 2.13 renamed both, and warns about the names before that.
if hasattr(dist, "all_gather_single"):
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
# The other groups made so far under each default group. A torch group is made once, by all
# processes together, so two meshes over the same ranks must share it. No other place holds groups:
# the threads of a group that outlives `end_process` abort the process when the interpreter ends.
Handles = dict[tuple[int, ...], dist.ProcessGroup | None]
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Handles] = weakref.WeakKeyDictionary()


def init_process(
    mesh: Mesh,
    *,
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
    axes: Sequence[Axis] | None = None,
) -> "TorchComm":
    """Join the other processes that torchrun started, one a rank of `mesh`.

    A mesh of one rank needs none. Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    A process group that exists already is used. A collective fails after `timeout` seconds. `axes`
    is that of `TorchComm`. ValueError where the number of processes is not that of the ranks.

    >>> init_process(Mesh(tp=1)).rank
    0
    """
    device = _placed(torch.device(device))
    if mesh.num_ranks > 1 and not dist.is_initialized():
        unset = [
            v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ
        ]
        if unset:
            raise ValueError(
                f"{mesh!r} needs {mesh.num_ranks} processes, but {', '.join(unset)} is not set:"
                f" start them with `torchrun --nproc-per-node {mesh.num_ranks} ...`,"
                f" or use shard_map, whose ranks are threads"
            )
        _check_world(mesh, int(os.environ["WORLD_SIZE"]))
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(
            BACKENDS[device.type],
            timeout=timedelta(seconds=timeout),
            device_id=None if device.type == "cpu" else device,
        )
        if device.type == "cpu":
            atexit.register(end_process)
    return TorchComm(mesh, device=device, axes=axes)


def end_process() -> None:
    """Leave the other processes: the counterpart of `init_process`, which a process that ends
    needs.

    On the CPU it is called by itself when the interpreter ends.
    """
    _made.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


class TorchComm:
    """`Comm` over the default process group, one process a rank of `mesh`, in rank order.

    All groups are made here, by every process in one order: one for each product of axes larger
    than 1, or only for the products named in `axes`. Tensors are on `device`. ValueError where the
    number of processes is not that of the ranks, or a collective has no group.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        device: torch.device | str = "cpu",
        axes: Sequence[Axis] | None = None,
    ) -> None:
        self.mesh, self.device = mesh, _placed(torch.device(device))
        self.rank, self._groups = 0, frozenset()
        if mesh.num_ranks > 1:
            if not dist.is_initialized():
                raise ValueError(f"{mesh!r} needs a process group: call init_process(mesh) first")
            _check_world(mesh, dist.get_world_size())
            self.rank = dist.get_rank()
            self._groups = _make_groups(mesh, _products(mesh) if axes is None else axes)

    def psum(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum over the group; on every rank the same bits."""
        if x.dtype not in NATIVE:
            return self._gather(x, group, "psum").sum(0, dtype=x.dtype)
        out = x.clone(memory_format=torch.contiguous_format)
        with self._named("psum", x, group) as handle:
            dist.all_reduce(out, group=handle)
        return out

    def pmax(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The elementwise maximum; NaN wins, which the maximum of a back end does not promise."""
        return self._gather(x, group, "pmax").amax(0)

    def all_gather(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """All parts joined along `dim`, in index order."""
        return _join(self._gather(x, group, "all_gather"), dim)

    def psum_scatter(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        """This rank's part along `dim` of the sum."""
        if x.dtype not in NATIVE:
            return self.psum(x, group).chunk(group.size, dim)[group.index]
        sent = _to_torch_order(_cut(x, group.size, dim), group).contiguous()
        out = torch.empty_like(sent[:1])
        with self._named("psum_scatter", x, group) as handle:
            _reduce_scatter(out, sent, group=handle)
        return out[0]

    def all_to_all(self, x: torch.Tensor, group: Group, *, split: int, concat: int) -> torch.Tensor:
        """Part i along `split` goes to member i; what comes is joined along `concat`."""
        sent = _to_torch_order(_cut(x, group.size, split), group)
        with self._named("all_to_all", x, group) as handle:
            came = _moved(sent, lambda out, sent: dist.all_to_all_single(out, sent, group=handle))
        return _join(_to_index_order(came, group), concat)

    def all_to_all_v(
        self, x: torch.Tensor, group: Group, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """`counts[i]` rows go to member i; the rows that come, and how many from each."""
        told = torch.tensor(counts, dtype=torch.int64, device=x.device)[:, None]
        expected = tuple(self.all_to_all(told, group, split=0, concat=0)[:, 0].tolist())
        order = _torch_order(group)
        sent = torch.cat([x.split(list(counts))[i] for i in order])
        rows = self._exchange_rows("all_to_all_v", sent, group, counts, expected)
        parts = dict(zip(order, rows.split([expected[i] for i in order]), strict=True))
        return torch.cat([parts[i] for i in range(group.size)]), expected

    def ppermute(
        self, x: torch.Tensor, group: Group, perm: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """The tensor of the member that sends to this one, or zeros.

        Every member takes part in one exchange of 0 or 1 rows: point-to-point calls in which some
        take no part hang the first time on nccl.
        """
        sends = [int((group.index, i) in perm) for i in range(group.size)]
        takes = [int((i, group.index) in perm) for i in range(group.size)]
        rows = self._exchange_rows("ppermute", x[None][: sum(sends)], group, sends, takes)
        return rows[0] if sum(takes) else torch.zeros_like(x)

    def _gather(self, x: torch.Tensor, group: Group, what: str) -> torch.Tensor:
        """The members' tensors in index order, along a new dim 0."""
        with self._named(what, x, group) as handle:
            came = _moved(
                x[None],
                lambda out, sent: _all_gather(out, sent, group=handle),
                rows=group.size,
            )
        return _to_index_order(came, group)

    def _exchange_rows(
        self,
        what: str,
        x: torch.Tensor,
        group: Group,
        sends: Sequence[int],
        takes: Sequence[int],
    ) -> torch.Tensor:
        """Rows of dim 0, grouped by target in torch's order -> the rows that come, by source."""
        order = _torch_order(group)
        out_sizes, in_sizes = [takes[i] for i in order], [sends[i] for i in order]
        with self._named(what, x, group) as handle:
            return _moved(
                x,
                lambda out, sent: dist.all_to_all_single(
                    out, sent, out_sizes, in_sizes, group=handle
                ),
                rows=sum(takes),
            )

    def _handle(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError(
                "the process groups have ended: init_process(mesh) starts them again"
            )
        handle = world if len(ranks) == self.mesh.num_ranks else _made[world][ranks]
        assert handle is not None, "a group that this process is not in"
        return handle

    @contextmanager
    def _named(self, what: str, x: torch.Tensor, group: Group) -> Iterator[dist.ProcessGroup]:
        """The torch group; an error of the back end gets a note that says where it came from."""
        axis = axis_of(group.axes)
        ranks = tuple(sorted(group.members))
        if ranks not in self._groups:
            raise ValueError(
                f"{what} over {axis!r}: no process group was made for it on {self.mesh!r};"
                f" name {axis!r} in TorchComm(mesh, axes=[...])"
            )
        if x.device.type != self.device.type:
            raise ValueError(
                f"{what} over {axis!r}: the tensor is on {x.device.type}, the process groups are"
                f" for {self.device.type}; move it, or init_process(mesh, device={x.device.type!r})"
            )
        try:
            yield self._handle(ranks)
        except Exception as error:
            error.add_note(
                f"in {what} over {axis!r} of {x.dtype} {list(x.shape)}, on rank {self.rank} of"
                f" {show_ranks(self.mesh, group.members)} of {self.mesh!r}"
            )
            raise


class ProcessRanks:
    """The one rank that this process is, with the interface of `ThreadRanks`.

    `run` gives a list of one entry; `join` gathers the parts of all processes to each of them.
    """

    def __init__(self, mesh: Mesh, comm: TorchComm) -> None:
        if comm.mesh != mesh:
            raise ValueError(f"a comm of {comm.mesh!r} does not fit {mesh!r}")
        self.mesh, self.comm = mesh, comm
        self._everyone = Group(mesh.names, tuple(range(mesh.num_ranks)), comm.rank)

    @property
    def coords(self) -> list[dict[str, int]]:
        """The coordinate of this process."""
        return [self.mesh.coords()[self.comm.rank]]

    def split(self, tree: Any, specs: Any, *, copy: bool = False, what: str = "tree") -> list[Any]:
        """This rank's part of a global tree that every process holds."""
        return [split_tree(tree, specs, self.mesh, self.coords[0], copy=copy, what=what)]

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        """`f(*locals)` on this rank. An error is raised here alone; the others wait in vain."""
        check_locals(args, 1)
        comm: Comm = self.comm
        try:
            with bind(self.mesh, comm):
                return [f(*(a[0] for a in args))]
        except BaseException as error:
            error.add_note(f"raised on {show_ranks(self.mesh, [self.comm.rank])} of {self.mesh!r}")
            raise

    def join(self, outs: list[Any], specs: Any, *, check: bool = True, what: str = "output") -> Any:
        """The global tree, on every process. All processes call it, with trees of one structure.

        With `check`, parts that `specs` declares replicated must be equal on all ranks.
        """
        check_locals([outs], 1)
        return join_tree(
            outs[0],
            self._gather_text(outline(outs[0])),
            lambda _, leaf: self._gather(leaf.detach().to(self.comm.device)),
            specs,
            self.mesh,
            check=check,
            what=what,
        )

    def broadcast(self, value: Any) -> Any:
        """The value of the first rank, on every process; all of them call it. It is pickled."""
        told = [value]
        if self.mesh.num_ranks > 1:
            dist.broadcast_object_list(told, src=0, device=self.comm.device)
        return told[0]

    def _gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.mesh.num_ranks == 1:
            return [x]
        return self.comm.all_gather(x[None], self._everyone, dim=0).unbind()

    def _gather_text(self, text: str) -> list[str]:
        """The text of every rank: first how long each is, then its bytes, padded to the longest."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.comm.device)
        lengths = [int(n) for n in self._gather(torch.tensor(len(data), device=data.device))]
        padded = data.new_zeros(max(lengths))
        padded[: len(data)] = data
        texts = zip(self._gather(padded), lengths, strict=True)
        return [bytes(t[:n].tolist()).decode() for t, n in texts]


def _placed(device: torch.device) -> torch.device:
    """`device` with the index that torchrun gave this process, where it has none."""
    if device.type not in BACKENDS:
        raise ValueError(f"no back end for device {device}: use one of {', '.join(BACKENDS)}")
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


def _check_world(mesh: Mesh, world: int) -> None:
    if world != mesh.num_ranks:
        raise ValueError(
            f"{mesh!r} has {mesh.num_ranks} ranks, but {world} processes were started:"
            f" one process a rank, as `torchrun --nproc-per-node {mesh.num_ranks} ...`"
        )


def _products(mesh: Mesh) -> list[Axis]:
    """Every product of mesh axes larger than 1, in one order."""
    large = [name for name, size in mesh.axes if size > 1]
    sizes = range(1, len(large) + 1)
    return [axis_of(axes) for n in sizes for axes in itertools.combinations(large, n)]


def _make_groups(mesh: Mesh, axes: Sequence[Axis]) -> frozenset[tuple[int, ...]]:
    """Make the torch groups of these products of axes; the sorted ranks of those that there are."""
    world = dist.group.WORLD
    assert world is not None
    made = _made.setdefault(world, {})
    everyone = tuple(range(mesh.num_ranks))
    groups = [tuple(sorted(mesh.group(a, c))) for a in axes for c in mesh.coords()]
    for ranks in dict.fromkeys(groups):
        if ranks != everyone and len(ranks) > 1 and ranks not in made:
            handle = dist.new_group(list(ranks))
            made[ranks] = handle if isinstance(handle, dist.ProcessGroup) else None
    return frozenset([everyone, *groups])


def _torch_order(group: Group) -> list[int]:
    """The members' indices along the axes, in the order of rank numbers, which is torch's."""
    return sorted(range(group.size), key=group.members.__getitem__)


def _to_torch_order(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """Parts along dim 0 in index order -> in torch's order."""
    order = _torch_order(group)
    return parts if order == sorted(order) else parts[order]


def _to_index_order(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """The inverse of `_to_torch_order`."""
    ranks = sorted(group.members)
    order = [ranks.index(member) for member in group.members]
    return parts if order == sorted(order) else parts[order]


def _cut(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """`count` even parts of dim `dim`, along a new dim 0."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0)


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `_cut`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _moved(
    sent: torch.Tensor,
    move: Callable[[torch.Tensor, torch.Tensor], Any],
    *,
    rows: int | None = None,
) -> torch.Tensor:
    """What `move(out, sent)` puts into an `out` of `rows` rows; as bytes where torch needs that."""
    dtype = sent.dtype
    sent = sent.contiguous()
    shape = (len(sent) if rows is None else rows, *sent.shape[1:])
    if dtype not in NATIVE:
        sent = sent[..., None].view(torch.uint8)
    out = sent.new_empty(shape[0], *sent.shape[1:])
    move(out, sent)
    return out.view(dtype).reshape(shape) if dtype not in NATIVE else out
