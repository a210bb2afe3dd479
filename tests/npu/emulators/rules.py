"""How emulators are registered, and how they refuse what the documentation refuses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

EMULATORS: dict[str, Callable[..., Any]] = {}
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)


class Unsupported(Exception):
    """The hardware or its documentation refuses this, or no emulator knows it."""


class _Lifted:
    dtypes = False


def emulator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register an emulator of the op of its name.

    It is called by keyword, on CPU tensors, with those arguments of the schema that it names. An
    argument that it doesn't name must have its default.
    """
    EMULATORS[function.__name__] = function
    return function


def require(condition: object, rule: str) -> None:
    """Raise Unsupported where a rule of the documentation does not hold."""
    if not condition:
        raise Unsupported(rule)


def dtypes(name: str, allowed: tuple[torch.dtype, ...], *tensors: torch.Tensor | None) -> None:
    """Require one dtype of all tensors, among those that the op takes."""
    found = {x.dtype for x in tensors if x is not None}
    require(len(found) == 1, f"{name}: one dtype for all, not {found}")
    require(_Lifted.dtypes or found <= set(allowed), f"{name}: dtype {found}, not {allowed}")


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Let the ops that take half precision alone take float32: the arithmetic without rounding."""
    _Lifted.dtypes = True
    try:
        yield
    finally:
        _Lifted.dtypes = False


def lifted() -> bool:
    """Whether `any_dtype` holds."""
    return _Lifted.dtypes


def dense(name: str, *tensors: torch.Tensor | None) -> None:
    """Require contiguous tensors."""
    for x in tensors:
        require(x is None or x.is_contiguous(), f"{name}: takes no strided tensors")


def nothing(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The empty result that stands for an output that was not asked for."""
    return torch.empty(0, dtype=dtype)


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A result that the op allocates and leaves as it is."""
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full(shape, torch.iinfo(dtype).min // 2 - 1, dtype=dtype)
