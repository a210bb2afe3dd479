"""What the ranks of a real run really call: a comm that writes down each collective and passes it
on, in words of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcinfer.sharding import Comm, Group, current
from funcinfer.sharding.comm import Env, use_env

# (call, mesh axes, shape, dtype) of one collective of a rank.
Call = tuple[str, tuple[str, ...], tuple[int, ...], torch.dtype]


class Spy:
    """A comm between a rank and its own; `calls` are what the rank asked for, in order."""

    def __init__(self, inner: Comm) -> None:
        self.inner, self.calls = inner, []

    @property
    def rank(self) -> int:
        return self.inner.rank

    def note(self, call: str, x: torch.Tensor, group: Group) -> None:
        self.calls.append((call, group.axes, tuple(x.shape), x.dtype))

    def psum(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        self.note("psum", x, group)
        return self.inner.psum(x, group)

    def pmax(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        self.note("pmax", x, group)
        return self.inner.pmax(x, group)

    def all_gather(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        self.note(f"all_gather dim={dim}", x, group)
        return self.inner.all_gather(x, group, dim=dim)

    def psum_scatter(self, x: torch.Tensor, group: Group, *, dim: int) -> torch.Tensor:
        self.note(f"psum_scatter dim={dim}", x, group)
        return self.inner.psum_scatter(x, group, dim=dim)

    def all_to_all(self, x: torch.Tensor, group: Group, *, split: int, concat: int) -> torch.Tensor:
        self.note(f"all_to_all split={split} concat={concat}", x, group)
        return self.inner.all_to_all(x, group, split=split, concat=concat)

    def all_to_all_v(
        self, x: torch.Tensor, group: Group, counts: Sequence[int]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        sizes = torch.empty(len(counts), dtype=torch.int64)
        self.note("all_to_all_v counts", sizes, group)
        self.note("all_to_all_v", x, group)
        return self.inner.all_to_all_v(x, group, counts)

    def ppermute(
        self, x: torch.Tensor, group: Group, perm: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        self.note(f"ppermute {tuple(perm)}", x, group)
        return self.inner.ppermute(x, group, perm)


def spied(f: Callable[..., Any]) -> Callable[..., tuple[Any, list[Call]]]:
    """`f` as a function of a rank that gives its result and the collectives it called."""

    def run(*args: Any) -> tuple[Any, list[Call]]:
        env = current()
        assert env is not None
        spy = Spy(env.comm)
        with use_env(Env(env.mesh, env.coord, spy)):
            return f(*args), spy.calls

    return run
