"""Weights in the layout of an NPU's matrix unit, FRACTAL_NZ, made once when they are loaded.

    w[N, K] row by row  ->  blocks of 16 x 16 elements, those of 16 columns one below the other

A product then reads its weight without turning it around. The layout is a matter of storage: shape,
dtype and values are the same, and the tensor can be read as ever. It suits matrices [out, in] that
go into a product as they are stored; a leaf with more dims is flattened first, which would undo it.
Whether it pays depends on sizes, so leaves are named by whoever knows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.primitives.npu_device import soc_of
from funcinfer.layers.primitives.npu_facts import dtype_of
from funcinfer.layers.primitives.npu_limits import require
from funcinfer.tree import leaves_with_path, map_with_path

FRACTAL_NZ = 29


def fractal_weights(params: Any, names: Sequence[str]) -> Any:
    """`params`, with those leaves in the fractal layout whose path ends in one of `names`, on an
    NPU; elsewhere they stay as they are.

    ValueError for a name that no leaf has, on any device, and for a leaf that has no such layout.

    >>> fractal_weights({"wo": torch.ones(2, 2)}, ["wq"])
    Traceback (most recent call last):
    ValueError: no leaf is called 'wq': there are wo
    """
    last = {path.rsplit(".", 1)[-1] for path, _ in leaves_with_path(params)}
    for name in names:
        if name not in last:
            raise ValueError(f"no leaf is called {name!r}: there are {', '.join(sorted(last))}")

    def cast(path: str, x: Tensor | None) -> Tensor | None:
        named = path.rsplit(".", 1)[-1] in names
        return to_fractal(x, path) if named and x is not None and x.device.type == "npu" else x

    return map_with_path(cast, params) if names else params


def to_fractal(x: Tensor, path: str = "weight") -> Tensor:
    """A matrix in the fractal layout. ValueError naming `path` where it has none."""
    rows, columns = x.shape if x.ndim == 2 else (0, 0)
    facts = dict(dims=x.ndim, dtype=dtype_of(x), rows=rows, columns=columns)
    try:
        require("fractal", "cast", soc_of(x), **facts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return torch.ops.npu.npu_format_cast(x.contiguous(), FRACTAL_NZ)
