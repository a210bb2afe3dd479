"""An NPU in host memory: torch_npu's own C++ checks each call, and emulators compute the numbers.

    with Simulation() as npu:
        y, _ = torch.ops.npu.npu_rms_norm(x.npu(), w.npu())
    npu.calls                       # ["npu_rms_norm"]

An op of torch runs on the CPU, on the same memory. An op of torch_npu runs three times: its meta
kernel (tier 1), its C++ with a kernel that computes nothing (tier 2), and the emulator (tier 3);
shapes and dtypes of the three must agree. Which arguments there are and what they default to is
read from the schema in the wheel: emulators have no defaults.

Memory that nobody wrote holds NaN, or a large negative integer.
"""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.npu.emulators.rules import EMULATORS, Unsupported

UNWRITTEN = -(2**30) - 1

# Ops whose meta kernel is missing or known to differ from the C++, by name, with what was seen.
NO_META = {
    "npu_format_cast": "has no meta kernel",
    "npu_attention_update": "gives an LSE for update_type 0, where the C++ gives None",
}
# Ops whose host code asks CANN for something that the stand-ins can't answer.
NO_HOST = {"npu_format_cast": "takes the size of its result from CANN"}
# Ops that allocate results of other ops and compute nothing: their C++ alone runs.
ALLOCATES = {
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_infer_output",
}
FACTORIES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Disagreement(AssertionError):
    """The meta kernel, the C++ and the emulator differ in the shape or dtype of a result."""


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the memory of a simulated one."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    block = (ctypes.c_char * size).from_address(storage.data_ptr())
    host = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(host, *place)


def is_npu(value: object) -> bool:
    """Whether a value is a simulated tensor."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    host = on_host(tensor)
    if host.is_floating_point():
        host.fill_(torch.nan)
    elif host.dtype in (torch.int32, torch.int64):
        host.fill_(UNWRITTEN)
    return tensor


def arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the schema by name, defaults filled in."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in func._schema.arguments}


def emulate(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What the emulator of an op returns; Unsupported where there is none for these arguments."""
    name = func._opname
    if name not in EMULATORS:
        raise Unsupported(f"no emulator of {name}")
    if func._overloadname == "out":
        rest = {k: v for k, v in kwargs.items() if k not in ("out", "workspace")}
        results = emulate(getattr(torch.ops.npu, name).default, args, rest)
        return tuple(a.copy_(b) for a, b in zip(kwargs["out"], results, strict=True))
    values = arguments(func, args, kwargs)
    known = inspect.signature(EMULATORS[name]).parameters
    for a in func._schema.arguments:
        if a.name not in known and not _same(values[a.name], a.default_value):
            raise Unsupported(f"the emulator of {name} does not know {a.name}={values[a.name]!r}")
    return EMULATORS[name](**{key: values[key] for key in known})


def _same(value: Any, default: Any) -> bool:
    return value is default or (not isinstance(value, torch.Tensor) and value == default)


def _form(result: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    leaves = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return [(tuple(x.shape), x.dtype) for x in leaves]


class Simulation(TorchDispatchMode):
    """Runs what this thread does with NPU tensors; `calls` are the names of torch_npu's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        to_npu = device is not None and torch.device(device).type == "npu"
        from_npu = any(map(is_npu, tree_leaves((args, kwargs))))
        if func.is_view or not (to_npu or from_npu):
            return func(*args, **kwargs)
        if func._opname in FACTORIES and (to_npu or device is None):
            return _poison(func(*args, **kwargs))
        if func.namespace == "npu":
            return self._run(func, args, kwargs)
        return _on_host_memory(func, args, kwargs, to_npu or device is None)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = func._opname
        if name in ALLOCATES:
            return tree_map(_poison, func(*args, **kwargs))
        self.calls.append(name)
        forms = {}
        if name not in NO_META and func._overloadname != "out":
            meta = tree_map(lambda x: x.to("meta") if is_npu(x) else x, (args, kwargs))
            forms["meta kernel"] = _form(func(*meta[0], **meta[1]))
        if name not in NO_HOST:
            forms["C++"] = _form(func(*args, **kwargs))
        result = _on_host_memory(lambda *a, **k: emulate(func, a, k), args, kwargs, True)
        forms["emulator"] = _form(result)
        if any(form != forms["emulator"] for form in forms.values()):
            raise Disagreement(f"{name} returns {forms}")
        return result


def _on_host_memory(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], to_npu: bool
) -> Any:
    """Call on CPU tensors over the same memory; results that are new go to the NPU if `to_npu`."""
    hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def lower(value: Any) -> Any:
        if is_npu(value):
            return hosts.setdefault(id(value), (on_host(value), value))[0]
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        return value

    lowered_args, lowered_kwargs = tree_map(lower, (tuple(args), kwargs))
    result = function(*lowered_args, **lowered_kwargs)
    npu = {id(host): tensor for host, tensor in hosts.values()}

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not (to_npu or id(value) in npu):
            return value
        if id(value) in npu:
            return npu[id(value)]
        lifted = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")
        on_host(lifted).copy_(value)
        return lifted

    return tree_map(lift, result)
