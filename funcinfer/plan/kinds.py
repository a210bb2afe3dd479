"""Layers of one kind: a decoder cut to one layer of each, and how often each occurs.

A model of 61 layers has two or three kinds of them, and layers of a kind cost the same. Two layers
are of a kind where they are alike as data: their functions are made by the same code from the same
values.
"""

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from funcinfer.models.decoder import Decoder


@dataclass(frozen=True)
class Cut:
    """A decoder with one layer of each kind, in order of their first occurrence.

    `layers[i]` is the index of the i-th of them in the whole decoder, `counts[i]` how many of its
    kind there are; `drafts` and `draft_counts` the same for draft modules.
    """

    decoder: Decoder
    layers: tuple[int, ...]
    counts: tuple[int, ...]
    drafts: tuple[int, ...]
    draft_counts: tuple[int, ...]


def cut(decoder: Decoder) -> Cut:
    """`decoder` with one layer of each kind. Where a layer reads caches of others, by the names of
    those layers, every layer is kept.

    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> cfg = llama.Config(97, 16, 5, 2, 1, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> cut(llama.decoder(cfg)).counts
    (5,)
    """
    reading = any(s.reads for layer in decoder.layers for s in layer.sublayers.values())
    layers, counts = _kinds(decoder.layers, merge=not reading)
    drafts, draft_counts = _kinds(decoder.drafts, merge=not reading)
    small = dataclasses.replace(
        decoder,
        layers=tuple(decoder.layers[i] for i in layers),
        drafts=tuple(decoder.drafts[i] for i in drafts),
    )
    return Cut(small, layers, counts, drafts, draft_counts)


def whole(decoder: Decoder) -> Cut:
    """`decoder` with all of its layers."""
    layers, drafts = range(len(decoder.layers)), range(len(decoder.drafts))
    counts = (1,) * len(layers), (1,) * len(drafts)
    return Cut(decoder, tuple(layers), counts[0], tuple(drafts), counts[1])


def _kinds(items: tuple[Any, ...], *, merge: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of the first of each kind, and the number of each."""
    first: list[int] = []
    counts: list[int] = []
    for i, item in enumerate(items):
        found = next((k for k, j in enumerate(first) if merge and alike(items[j], item)), None)
        if found is None:
            first.append(i)
            counts.append(1)
        else:
            counts[found] += 1
    return tuple(first), tuple(counts)


def alike(a: Any, b: Any) -> bool:
    """Whether two values are made alike: equal data, and functions of the same code over values
    that are alike.

    >>> def scaled(by):
    ...     return lambda x: by * x
    >>> alike(scaled(2), scaled(2)), alike(scaled(2), scaled(3)), alike(partial(max, 1), max)
    (True, False, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, partial):
        return alike([a.func, a.args, a.keywords], [b.func, b.args, b.keywords])
    if isinstance(a, types.FunctionType):
        return a.__code__ is b.__code__ and alike(_captured(a), _captured(b))
    if isinstance(a, Mapping):
        return alike(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(alike(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return (a == b) is True  # tensors, which answer with a tensor, are alike only if they are one


def _captured(f: types.FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in f.__closure__ or ()]
    return cells, f.__defaults__ or (), f.__kwdefaults__ or {}
