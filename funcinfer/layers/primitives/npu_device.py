"""Which SoC a call runs on, and the rule that picks its form.

A tensor of an NPU is on the SoC of its device. Tensors elsewhere, in tests and plans, are taken to
be on the SoC of `assume_soc`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives.npu_facts import FACTS
from funcinfer.layers.primitives.npu_limits import SOCS, Choice, choose, soc_of_device_name


class _Assumed(threading.local):
    soc: str = SOCS[0]


_assumed = _Assumed()


@contextmanager
def assume_soc(soc: str) -> Iterator[None]:
    """Take tensors of this thread that are on no NPU to be on `soc`.

    >>> with assume_soc("ascend950"):
    ...     soc_of(torch.zeros(1))
    'ascend950'
    """
    before, _assumed.soc = _assumed.soc, soc
    try:
        yield
    finally:
        _assumed.soc = before


def soc_of(x: Tensor) -> str:
    """The SoC that `x` is on."""
    return _soc_of_device(x.device.index) if x.device.type == "npu" else _assumed.soc


def choice(primitive: str, *args: Any, **settings: Any) -> Choice:
    """What computes this call of a primitive."""
    return choose(primitive, soc_of(args[0]), **FACTS[primitive](*args, **settings))


@cache
def _soc_of_device(index: int | None) -> str:
    return soc_of_device_name(torch.get_device_module("npu").get_device_name(index))
