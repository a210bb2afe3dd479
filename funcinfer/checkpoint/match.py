"""Leaves against name map, and name map against checkpoint: everything is used, nothing is missing.

All of it is decided from specs and headers, before a tensor is read or made.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path
from typing import Any

import torch

from funcinfer.checkpoint.files import DTYPES, Entry, raise_problems
from funcinfer.checkpoint.name_map import NameMap, Source, Stored, choose, pieces
from funcinfer.spec import ParamSpec, is_spec
from funcinfer.tree import leaves_with_path

_SCALE = re.compile(r".*(_scale_inv|\.weight_scale|\.scales|\.qzeros)")


@dataclass(frozen=True)
class Leaf:
    """A parameter with its source and the tensors of the checkpoint that repeat it."""

    path: str
    spec: ParamSpec
    source: Source
    copies: tuple[str, ...] = ()


def true_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape before padding.

    >>> true_shape(ParamSpec((12, 4), ("vocab_out", "embed"), true_shape=(10, 4)))
    (10, 4)
    """
    return spec.true_shape or spec.shape


def leaves_of(specs: Any, name_map: NameMap) -> list[Leaf]:
    """Each leaf with its source, in order; ValueError where paths or shapes do not match.

    >>> leaves_of({"w": ParamSpec((2, 3), (None, None))}, NameMap({"w": Stored("w", (3, 2))}))
    Traceback (most recent call last):
    ValueError: the name map does not fit the specs: ...
    """
    pairs = leaves_with_path(specs, is_leaf=is_spec)
    sources, paths = name_map.sources, {path for path, _ in pairs}
    problems = {
        "leaves without a source": [repr(path) for path, _ in pairs if path not in sources],
        "sources without a leaf": [repr(path) for path in sources if path not in paths],
        "copies of no leaf": [
            f"tensor {name!r} of {path!r}"
            for name, path in name_map.copies.items()
            if path not in paths
        ],
        "shapes that differ": [
            f"leaf {path!r} has {true_shape(spec)}, its source {sources[path].shape}"
            for path, spec in pairs
            if path in sources and true_shape(spec) != sources[path].shape
        ],
    }
    raise_problems("the name map does not fit the specs", problems)
    return [Leaf(path, spec, sources[path]) for path, spec in pairs]


def match(
    folder: str | Path, leaves: list[Leaf], name_map: NameMap, entries: Mapping[str, Entry]
) -> list[Leaf]:
    """The leaves with alternatives chosen and copies found; ValueError listing all that is wrong.

    Wrong is: a tensor that is missing, not expected, of another shape, of a dtype that the leaf
    can't hold, or read only in part; two alternatives in one checkpoint; quantised weights.
    """
    head = f"{folder}"
    scales = [f"tensor {n!r} of {e.file.name}" for n, e in entries.items() if _SCALE.fullmatch(n)]
    coded = [
        f"tensor {name!r} of {entry.file.name} has dtype {entry.dtype}"
        for name, entry in entries.items()
        if entry.dtype not in DTYPES
    ]
    raise_problems(head, {"quantised weights are not supported yet": coded or scales})
    chosen, ambiguous = [], []
    for leaf in leaves:
        try:
            chosen.append(replace(leaf, source=choose(leaf.source, entries.keys())))
        except ValueError as error:
            ambiguous.append(f"leaf {leaf.path!r}: {error}")
    raise_problems(head, {"ambiguous leaves": ambiguous})
    missing, shapes, dtypes = [], [], []
    for leaf in chosen:
        for _, stored in pieces(leaf.source):
            entry = entries.get(stored.name)
            if entry is None:
                missing.append(f"tensor {stored.name!r} of leaf {leaf.path!r}")
            elif entry.shape != stored.file_shape:
                shapes.append(_differs(stored.name, entry, "shape", stored.file_shape, leaf.path))
            elif not _holds(leaf.spec.dtype, DTYPES[entry.dtype]):
                dtypes.append(_differs(stored.name, entry, "dtype", leaf.spec.dtype, leaf.path))
    extra = _extra(chosen, name_map, entries)
    problems = {
        "missing tensors": missing,
        "tensors that nothing reads": [f"{name!r} of {entries[name].file.name}" for name in extra],
        "tensors of another shape": shapes,
        "tensors of another dtype": dtypes,
    }
    raise_problems(head, problems)
    raise_problems(head, {"tensors read in part": partly_used(chosen)})
    return _with_copies(head, chosen, name_map, entries)


def partly_used(leaves: Iterable[Leaf]) -> list[str]:
    """A line for each tensor of which the leaves together use only a part.

    >>> partly_used([Leaf("w", ParamSpec((2,), (None,)), Stored("weight", (5,))[:2])])
    ["tensor 'weight': 2 of 5 elements, by leaf 'w'"]
    """
    used: dict[str, dict[Any, int]] = {}
    users: dict[str, Leaf] = {}
    wholes: dict[str, int] = {}
    for leaf in leaves:
        for _, stored in pieces(leaf.source):
            used.setdefault(stored.name, {})[stored.dims, stored.taken] = math.prod(stored.shape)
            users[stored.name] = leaf
            wholes[stored.name] = math.prod(stored.file_shape)
    return [
        f"tensor {name!r}: {sum(parts.values())} of {wholes[name]} elements,"
        f" by leaf {users[name].path!r}"
        for name, parts in used.items()
        if sum(parts.values()) < wholes[name]
    ]


def _extra(leaves: list[Leaf], name_map: NameMap, entries: Mapping[str, Entry]) -> list[str]:
    known = {stored.name for leaf in leaves for _, stored in pieces(leaf.source)}
    known |= name_map.copies.keys()
    ignored = [re.compile(translate(pattern)) for pattern in name_map.ignored]
    return [
        name
        for name in entries
        if name not in known and not any(pattern.match(name) for pattern in ignored)
    ]


def _with_copies(
    head: str, leaves: list[Leaf], name_map: NameMap, entries: Mapping[str, Entry]
) -> list[Leaf]:
    by_path = {leaf.path: leaf for leaf in leaves}
    wrong = []
    for name, path in name_map.copies.items():
        if name not in entries:
            continue
        leaf = by_path[path]
        if not isinstance(leaf.source, Stored) or leaf.source.cut:
            raise ValueError(f"copies[{name!r}]: leaf {path!r} is not one whole tensor")
        main, copy = entries[leaf.source.name], entries[name]
        if (main.dtype, main.shape) != (copy.dtype, copy.shape):
            wrong.append(
                f"tensor {name!r} of {copy.file.name} is {copy.dtype} {copy.shape},"
                f" {leaf.source.name!r} is {main.dtype} {main.shape}"
            )
        by_path[path] = replace(leaf, copies=(*leaf.copies, name))
    raise_problems(head, {"copies that differ": wrong})
    return list(by_path.values())


def _holds(leaf: torch.dtype, file: torch.dtype) -> bool:
    """Whether values of a file's dtype may be cast to a leaf's: rounded, but never to integers."""
    if leaf.is_floating_point or file.is_floating_point:
        return leaf.is_floating_point and file.is_floating_point
    return torch.promote_types(leaf, file) == leaf


def _differs(name: str, entry: Entry, what: str, wanted: Any, path: str) -> str:
    found = getattr(entry, what)
    return f"tensor {name!r} of {entry.file.name}: {found}, leaf {path!r} needs {wanted}"
