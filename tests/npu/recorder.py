"""Where calls of torch_npu's ops go: to emulators through torch's dispatcher, or to the simulation.

Without torch_npu the schemas of `schemas.json` are defined here, so that torch itself checks each
call by them, and tensors are on the CPU. With it, its own schemas are there, and tensors are on the
simulated device. In both, `calls` are what was called, and `changed` changes arguments on the way.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from funcinfer.tree import tree_map
from tests.npu.cases import Call
from tests.npu.simulator import Simulation, arguments, emulate

SCHEMAS: dict[str, str] = json.loads(Path(__file__).with_name("schemas.json").read_text())
# Does an op of torch_npu exist already? Then it is imported here.
INSTALLED = hasattr(torch.ops.npu, "npu_rms_norm")
Changes = dict[str, Any]


class Recorder:
    """The names of ops in the order of their calls, and other arguments for some: a value, or a
    function of all arguments.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.changed: dict[str, Changes] = {}

    def named(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Note a call; all of its arguments by name, changed."""
        name = op._opname
        self.calls.append(name)
        named = arguments(op, args, kwargs)
        for key, change in self.changed.get(name, {}).items():
            named[key] = change(named) if callable(change) else change
        return named


_current = Recorder()


class _Recording(Simulation):
    """The simulation, but that the current recorder sees each call."""

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        named = _current.named(func, args, kwargs)
        by_place = [a.name for a in func._schema.arguments if not a.kwarg_only]
        rest = {k: v for k, v in named.items() if k not in by_place}
        return super()._run(func, [named[k] for k in by_place], rest)


@contextmanager
def recording() -> Iterator[Recorder]:
    """A fresh recorder; in the block, ops of torch_npu can be called."""
    _current.__init__()
    with _Recording() if INSTALLED else nullcontext():
        yield _current


def placed(call: Call) -> Call:
    """The call on the simulated device, where there is one."""
    return over_tensors(lambda x: x.to("npu"), call) if INSTALLED else call


def cast(call: Call, dtype: torch.dtype) -> Call:
    """The call with its numbers, but for whole ones, in another dtype."""
    return over_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, call)


def over_tensors(f: Callable[[Tensor], Tensor], call: Call) -> Call:
    """The call with `f(tensor)` for each tensor of its arguments."""

    def change(x: Any) -> Any:
        if isinstance(x, SimpleNamespace):
            return SimpleNamespace(**{k: change(v) for k, v in vars(x).items()})
        return f(x) if isinstance(x, Tensor) else x

    settings = {k: change(v) for k, v in call.settings.items()}
    return replace(call, args=tuple(map(change, call.args)), settings=settings)


def fetched(result: Any) -> Any:
    """A result on the CPU."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, result)


def _kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op = getattr(torch.ops.npu, name).default
        return emulate(op, (), _current.named(op, args, kwargs))

    return kernel


if not INSTALLED:
    library = torch.library.Library("npu", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(schema)
        library.impl(name, _kernel(name), "CPU")
