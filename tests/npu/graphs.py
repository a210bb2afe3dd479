"""Graphs on the simulated NPU: torch_npu's own capture, update and replay, and the numbers of it.

While torch_npu says that a stream captures, ops run and are noted. A replay does them again and
copies their results to where they were. What torch_npu calls inside of an update of a task group is
not run: it exchanges what the group's op is given that is no tensor.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch_npu.npu import graphs

from tests.npu.simulator import Simulation, is_npu


@dataclass
class Noted:
    """An op of a graph."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def again(self) -> None:
        """Do it, and put the results where they were."""
        new = self.func(*self.args, **self.kwargs)
        for a, b in zip(tree_leaves(self.result), tree_leaves(new), strict=True):
            if is_npu(a) and a.data_ptr() != b.data_ptr():
                a.copy_(b)


class GraphSimulation(Simulation):
    """A simulation in which one graph can be captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.noted: list[Noted] = []
        self._groups: list[tuple[Any, int]] = []  # handles, and which op each is of
        self._updated: int | None = None
        ended, begun, replay = (
            graphs.graph_task_group_end,
            graphs.graph_task_update_begin,
            torch.npu.NPUGraph.replay,
        )

        def end(stream: Any) -> Any:
            handle = ended(stream)
            self._groups.append((handle, len(self.noted) - 1))
            return handle

        def begin(stream: Any, handle: Any) -> None:
            begun(stream, handle)
            self._updated = next(i for known, i in self._groups if known is handle)

        def replayed(graph: Any) -> None:
            self._updated = None
            replay(graph)
            for noted in self.noted:
                noted.again()

        monkeypatch.setattr(graphs, "graph_task_group_end", end)
        monkeypatch.setattr(graphs, "graph_task_update_begin", begin)
        monkeypatch.setattr(torch.npu.NPUGraph, "replay", replayed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._updated is not None and func.namespace == "npu":
            noted, self._updated = self.noted[self._updated], None
            plain = {k: v for k, v in kwargs.items() if not _has_tensor(v)}
            noted.kwargs = noted.kwargs | plain
            return noted.result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view and torch.npu.is_current_stream_capturing():
            self.noted.append(Noted(func, args, kwargs, result))
        return result


def _has_tensor(value: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in tree_leaves(value))
