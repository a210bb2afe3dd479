"""Ranks as threads of one process: the rendezvous in which their collectives meet.

A collective can go wrong in five ways, and each ends all ranks with one error: a rank raises; a
rank returns without the call the others wait in; ranks wait in different calls; their calls differ
in shape; or one is not there in time.
"""

import threading
import time
from dataclasses import dataclass, field

import torch

from funcinfer.sharding.comm import ExchangeComm, Group
from funcinfer.sharding.mesh import Mesh


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
    """Where the thread ranks of one run meet. Collectives match by group and by their order within
    it.
    """

    def __init__(self, mesh: Mesh, timeout: float) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.error: BaseException | None = None
        self._condition = threading.Condition()
        self._slots: dict[tuple[frozenset[int], int], _Slot] = {}
        self._count: dict[tuple[int, frozenset[int]], int] = {}
        self._waiting: dict[int, str] = {}
        self._ended: set[int] = set()

    def comm(self, rank: int) -> ExchangeComm:
        """The comm of one rank."""
        return ExchangeComm(rank, lambda x, group, what: self._exchange(rank, x, group, what))

    def fail(self, error: BaseException) -> None:
        """Record the first error of the run and wake the ranks that wait."""
        with self._condition:
            self._fail(error)

    def end(self, rank: int) -> None:
        """Say that `rank` has returned; ranks that wait for it fail at once."""
        with self._condition:
            self._ended.add(rank)
            self._check_deadlock()
            self._condition.notify_all()

    def wait_for_all(self, grace: float = 5.0) -> bool:
        """Wait until every rank has ended, at most `grace` s past an error; whether all did."""
        with self._condition:
            limit = None
            while len(self._ended) < self.mesh.num_ranks:
                if self.error is not None:
                    limit = limit or time.monotonic() + grace
                    if not self._condition.wait(max(limit - time.monotonic(), 0)):
                        return False
                else:
                    self._condition.wait()
            return True

    def _exchange(self, rank: int, x: torch.Tensor, group: Group, what: str) -> list[torch.Tensor]:
        everyone = frozenset(group.members)
        call = f"{what} over {group.axes[0] if len(group.axes) == 1 else group.axes!r}"
        with self._condition:
            nth = self._count[rank, everyone] = self._count.get((rank, everyone), 0) + 1
            slot = self._slots.setdefault((everyone, nth), _Slot(tuple(sorted(everyone))))
            slot.calls[rank], slot.tensors[rank] = call, x
            self._waiting[rank] = call
            if len(slot.tensors) == group.size:
                self._check_same(slot)
                for member in group.members:
                    self._waiting.pop(member, None)
                self._condition.notify_all()
            self._check_deadlock()
            self._wait(slot, group.size, call)
            slot.read += 1
            if slot.read == group.size:
                del self._slots[everyone, nth]
            return [slot.tensors[m] for m in group.members]

    def _wait(self, slot: _Slot, size: int, call: str) -> None:
        limit = time.monotonic() + self.timeout
        while len(slot.tensors) < size and self.error is None:
            if not self._condition.wait(max(limit - time.monotonic(), 0)):
                missing = [r for r in slot.members if r not in slot.tensors]
                self._fail(
                    TimeoutError(
                        f"{call}: {self._who(missing)} did not arrive within {self.timeout:g} s;"
                        f" {self._who(sorted(slot.tensors))} wait"
                    )
                )
        if self.error is not None:
            raise Aborted

    def _check_same(self, slot: _Slot) -> None:
        ragged = any("all_to_all_v" in c for c in slot.calls.values())
        seen: dict[str, list[int]] = {}
        for r in slot.members:
            x = slot.tensors[r]
            shape = "" if ragged else f" of shape {tuple(x.shape)}"
            seen.setdefault(f"{slot.calls[r]}{shape}, {x.dtype}", []).append(r)
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
        said = "; ".join(f"{self._who(ranks)}: waiting in {call}" for call, ranks in waits.items())
        if self._ended:
            said += f"; {self._who(sorted(self._ended))}: returned"
        self._fail(RuntimeError(f"no collective can be completed: {said}"))

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._condition.notify_all()

    def _who(self, ranks: list[int]) -> str:
        coords = self.mesh.coords()
        shown = [f"{r} ({', '.join(f'{a}={i}' for a, i in coords[r].items())})" for r in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{more}"
