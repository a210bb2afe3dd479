"""Ranks as threads of one process: the rendezvous in which their collectives meet.

A collective can go wrong in five ways, and each ends all ranks with one error: a rank raises; a
rank returns without the call the others wait in; ranks wait in different calls; their calls differ
in shape; or one is not there in time.
"""

import threading
from dataclasses import dataclass, field

import torch

from funcinfer.sharding.comm import ExchangeComm, Group
from funcinfer.sharding.mesh import Mesh, axis_of, show_ranks


class Aborted(BaseException):
    """Raised in the ranks that were waiting when another one failed; never reaches the caller."""


@dataclass
class _Slot:
    """One collective of one group: what each member said it is doing, and its tensor."""

    members: tuple[int, ...]
    calls: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    read: int = 0


class Rendezvous:
    """Where the thread ranks of one run meet.

    Collectives match by the set of their ranks and by their order within it.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout
        self._error: BaseException | None = None
        self._failed = False
        self._condition = threading.Condition()
        self._slots: dict[tuple[frozenset[int], int], _Slot] = {}
        self._count: dict[tuple[int, frozenset[int]], int] = {}
        # Ranks in a collective that is not complete. Whoever completes one takes its members out
        # in the same critical section, so that a rank which may go on is never counted as waiting.
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()

    def comm(self, rank: int) -> ExchangeComm:
        """The comm of one rank."""
        return ExchangeComm(rank, lambda x, group, what: self._exchange(rank, x, group, what))

    def fail(self, error: BaseException) -> None:
        """Record the first error of the run and wake the ranks that wait."""
        with self._condition:
            self._fail(error)

    def take_error(self) -> BaseException | None:
        """The first error of the run. It is not kept: its traceback holds the ranks' tensors."""
        error, self._error = self._error, None
        return error

    def end(self, rank: int) -> None:
        """Say that `rank` has returned; ranks that wait for it fail at once."""
        with self._condition:
            self._ended.add(rank)
            self._check_deadlock()
            self._condition.notify_all()

    def wait_for_all(self, grace: float = 5.0) -> bool:
        """Wait until every rank has ended, at most `grace` s past an error; whether all did."""
        with self._condition:
            self._condition.wait_for(lambda: self._failed or self._all_ended())
            return self._condition.wait_for(self._all_ended, min(grace, self.timeout))

    def _all_ended(self) -> bool:
        return len(self._ended) == self.mesh.num_ranks

    def _exchange(self, rank: int, x: torch.Tensor, group: Group, what: str) -> list[torch.Tensor]:
        everyone = frozenset(group.members)
        call = f"{what} over {axis_of(group.axes)!r}"
        # The others read what was in `x` at the call, whatever its owner writes to it afterwards.
        x = x.clone()
        with self._condition:
            nth = self._count[rank, everyone] = self._count.get((rank, everyone), 0) + 1
            slot = self._slots.setdefault((everyone, nth), _Slot(tuple(sorted(everyone))))
            slot.calls[rank], slot.tensors[rank] = call, x
            self._waiting[rank] = call
            if len(slot.tensors) == group.size:
                self._check_same(slot)
                for member in group.members:
                    del self._waiting[member]
                self._condition.notify_all()
            self._check_deadlock()
            self._wait(slot, group.size, call)
            slot.read += 1
            if slot.read == group.size:
                del self._slots[everyone, nth]
            return [slot.tensors[m] for m in group.members]

    def _wait(self, slot: _Slot, size: int, call: str) -> None:
        def ready() -> bool:
            return self._failed or len(slot.tensors) == size

        if not self._condition.wait_for(ready, self.timeout):
            missing = [r for r in slot.members if r not in slot.tensors]
            elsewhere = [r for r in missing if r in self._waiting]
            self._fail(
                TimeoutError(
                    f"{call}: {self._who(missing)} did not arrive within {self.timeout:g} s, while"
                    f" {self._who(sorted(slot.tensors))} waited"
                    + "".join(f"; rank {r} waits in {self._waiting[r]}" for r in elsewhere)
                )
            )
        if self._failed:
            raise Aborted

    def _check_same(self, slot: _Slot) -> None:
        ragged = any(c.startswith("all_to_all_v ") for c in slot.calls.values())
        seen: dict[str, list[int]] = {}
        for r in slot.members:
            x = slot.tensors[r]
            dims = ["any", *x.shape[1:]] if ragged else x.shape
            said = f"{slot.calls[r]} of {x.dtype} [{', '.join(map(str, dims))}]"
            seen.setdefault(said.replace("torch.", ""), []).append(r)
        if len(seen) > 1:
            said = "; ".join(f"{self._who(ranks)}: {call}" for call, ranks in seen.items())
            self._fail(ValueError(f"ranks met in different collectives: {said}"))

    def _check_deadlock(self) -> None:
        """Every rank waits or has returned, so no collective can ever be completed."""
        if not self._waiting or len(self._waiting) + len(self._ended) < self.mesh.num_ranks:
            return
        waits: dict[str, list[int]] = {}
        for rank, call in sorted(self._waiting.items()):
            waits.setdefault(call, []).append(rank)
        said = [f"{self._who(ranks)}: waiting in {call}" for call, ranks in waits.items()]
        if self._ended:
            said.append(f"{self._who(sorted(self._ended))}: returned")
        self._fail(RuntimeError(f"no collective can be completed: {'; '.join(said)}"))

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed, self._error = True, error
        self._condition.notify_all()

    def _who(self, ranks: list[int]) -> str:
        return show_ranks(self.mesh, ranks)
