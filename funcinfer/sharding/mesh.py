"""P and Mesh: named mesh axes and the layout of a tensor over them. Pure description; no process
group, no device.

Ranks are numbered with the last axis fastest. A product of axes is a tuple, major first: on `("dp",
"tp")` the index of a rank is `dp_index * tp_size + tp_index`, whatever order the mesh declares them
in.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from funcinfer.spec import Member

Axis = str | tuple[str, ...] | None
Coord = Mapping[str, int]


def names(axis: Axis) -> tuple[str, ...]:
    """The mesh axes of a rule, major first: `names(None) == ()`, `names("tp") == ("tp",)`."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def axis_of(axes: Iterable[str]) -> Axis:
    """The canonical form of a product of axes: None, a name, or a tuple of at least two."""
    axes = tuple(axes)
    return None if not axes else axes[0] if len(axes) == 1 else axes


def as_axis(value: Any, what: str) -> Axis:
    """`value` in its canonical form; ValueError where it is not a product of axes."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple | list) and all(isinstance(a, str) for a in value):
        return axis_of(value)
    raise ValueError(f"{what} {value!r}: write a mesh axis, a tuple of mesh axes, or None")


def drop(axis: Axis, used: Axis) -> Axis:
    """The axes of `axis` that are not in `used`.

    >>> drop(("dp", "tp"), "tp")
    'dp'
    """
    return axis_of(a for a in names(axis) if a not in names(used))


def both(axis: Axis, used: Axis) -> Axis:
    """The axes of `axis` that are in `used` too, in the order of `axis`."""
    return axis_of(a for a in names(axis) if a in names(used))


def join_axes(*parts: Axis) -> Axis:
    """The product of several axes, major first, each name once.

    >>> join_axes("dp", ("tp", "dp"))
    ('dp', 'tp')
    """
    return axis_of(dict.fromkeys(a for part in parts for a in names(part)))


def extends(finer: Axis, coarser: Axis) -> bool:
    """Whether `finer` begins with `coarser`: the order law of the token axes."""
    return names(finer)[: len(names(coarser))] == names(coarser)


def longer(a: Axis, b: Axis) -> Axis:
    """The finer of two token layouts of one chain; ValueError where neither extends the other at
    its minor end.

    >>> longer("dp", ("dp", "tp"))
    ('dp', 'tp')
    """
    if extends(a, b):
        return a
    if extends(b, a):
        return b
    raise ValueError(
        f"token rules {a!r} and {b!r} are not on one chain:"
        f" one must extend the other at its minor end"
    )


class P(tuple[Axis, ...]):
    """How a tensor lies over a mesh: one entry a dim, full rank always, `None` for a dim held
    whole.

    With `on` the tensor exists on some ranks only: on those stages along a mesh axis that hold its
    entries of a list. Elsewhere its leaf is None. ValueError where one mesh axis is put on two
    dims, or on a dim and into `on`.

    >>> P("dp", None, ("ep", "tp"))
    P('dp', None, ('ep', 'tp'))
    >>> P("tp", on=Member("pp", (4,), 5))
    P('tp', on=Member(axis='pp', entries=(4,), count=5))
    """

    on: Member | None = None

    def __new__(cls, *entries: Axis, on: Member | None = None) -> "P":
        """One argument a dim: a mesh axis, a tuple of them, or None."""
        spec = super().__new__(cls, (as_axis(e, "P entry") for e in entries))
        used = [a for e in spec for a in names(e)]
        if on is not None:
            spec.on = on
            used += names(on.axis)
        if twice := sorted({a for a in used if used.count(a) > 1}):
            raise ValueError(
                f"{spec!r}: mesh axis {twice[0]!r} is used twice; each may shard one dim once"
            )
        return spec

    def __getnewargs__(self) -> tuple[Axis, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        on = [] if self.on is None else [f"on={self.on!r}"]
        return f"P({', '.join([*map(repr, self), *on])})"

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.on == getattr(other, "on", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self) if self.on is None else hash((tuple(self), self.on))

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis that shards a dim, in order of the dims."""
        return tuple(a for e in self for a in names(e))


def is_p(x: Any) -> bool:
    """Whether `x` is a P: the `is_leaf` of trees of layouts."""
    return isinstance(x, P)


@dataclass(frozen=True, init=False)
class Mesh:
    """Named axes and their sizes. Frozen and hashable; the last axis is the fastest.

    >>> Mesh(dp=2, tp=4).size(("dp", "tp"))
    8
    >>> Mesh(tp=2).local_shape((6, 5), P("tp", None))
    (3, 5)
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name}={size!r}: sizes are whole numbers from 1")
        object.__setattr__(self, "axes", tuple(sizes.items()))

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """`Mesh.parse("dp=2,tp=4")`; ValueError naming the part that can't be read."""
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, _, size = part.partition("=")
            if not (name.isidentifier() and size.isdecimal()) or name in sizes:
                raise ValueError(
                    f"mesh {text!r}: can't read {part!r}; write axis=size, as dp=2,tp=4"
                )
            sizes[name] = int(size)
        return cls(**sizes)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{n}={s}' for n, s in self.axes)})"

    @property
    def names(self) -> tuple[str, ...]:
        """The axis names, slowest first."""
        return tuple(n for n, _ in self.axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks: the product of all sizes."""
        return math.prod(s for _, s in self.axes)

    def size(self, axis: Axis) -> int:
        """The number of ranks along an axis or a product of axes; 1 for None."""
        sizes = dict(self.axes)
        product = 1  # a loop, because torch.compile does not trace math.prod of a generator
        for a in names(axis):
            if a not in sizes:
                raise ValueError(f"{self!r} has no axis {a!r}{suggest(a, sizes)}")
            product *= sizes[a]
        return product

    def coords(self) -> list[dict[str, int]]:
        """Each rank's coordinate, in rank order."""
        ranges = (range(s) for _, s in self.axes)
        return [dict(zip(self.names, c, strict=True)) for c in itertools.product(*ranges)]

    def index(self, axis: Axis, coord: Coord) -> int:
        """The index of a rank along a product of axes, major first."""
        i = 0
        for a in names(axis):
            i = i * self.size(a) + coord[a]
        return i

    def rank(self, coord: Coord) -> int:
        """The rank number of a coordinate."""
        return self.index(self.names, coord)

    def group(self, axis: Axis, coord: Coord) -> tuple[int, ...]:
        """The ranks that differ from `coord` along `axis` only, in index order along `axis`."""
        ranges = (range(self.size(a)) for a in names(axis))
        return tuple(
            self.rank({**coord, **dict(zip(names(axis), c, strict=True))})
            for c in itertools.product(*ranges)
        )

    def holds(self, spec: P, coord: Coord) -> bool:
        """Whether the rank at `coord` has a part of a tensor: whether it is on one of its stages.

        >>> spec = P(None, on=Member("pp", (4,), 5))
        >>> [Mesh(pp=2).holds(spec, {"pp": stage}) for stage in range(2)]
        [False, True]
        """
        on = spec.on
        return on is None or self.index(on.axis, coord) in on.stages(self.size(on.axis))

    def copies(self, spec: P) -> int:
        """How many ranks hold the same part of a tensor."""
        on = spec.on
        holders = self.num_ranks
        if on is not None:
            stages = self.size(on.axis)
            holders = holders // stages * len(on.stages(stages))
        return holders // self.size(spec.axes)

    def local_shape(self, shape: Sequence[int], spec: P, path: str = "") -> tuple[int, ...]:
        """The shape of a part, on each rank that has one; ValueError for a wrong rank or a dim that
        does not divide evenly.
        """
        where = f"{path}: " if path else ""
        if len(spec) != len(shape):
            raise ValueError(
                f"{where}shape {tuple(shape)} has {len(shape)} dims, {spec!r} has {len(spec)}"
            )
        for dim, (n, axis) in enumerate(zip(shape, spec, strict=True)):
            if unknown := [a for a in names(axis) if a not in self.names]:
                raise ValueError(
                    f"{where}layout {spec!r} of shape {tuple(shape)}: {self!r} has no axis"
                    f" {unknown[0]!r}{suggest(unknown[0], self.names)}"
                )
            if n % self.size(axis):
                raise ValueError(
                    f"{where}dim {dim} of shape {tuple(shape)} is {n}, which {axis!r} of {self!r}"
                    f" does not divide into {self.size(axis)} even parts (layout {spec!r});"
                    f" make it a multiple of {self.size(axis)} or lay this dim out otherwise"
                )
        return tuple(n // self.size(axis) for n, axis in zip(shape, spec, strict=True))


def show_ranks(mesh: Mesh, ranks: Sequence[int]) -> str:
    """Ranks with their coordinates, for messages; at most four of them.

    >>> show_ranks(Mesh(dp=2, tp=2), [1, 2])
    'ranks 1 (dp=0, tp=1) and 2 (dp=1, tp=0)'
    """
    coords = mesh.coords()
    shown = [f"{r} ({', '.join(f'{a}={i}' for a, i in coords[r].items())})" for r in ranks[:4]]
    if len(ranks) > 4:
        shown.append(f"{len(ranks) - 4} more")
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def suggest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'heads'? Known: ..."`: the tail of an error about an unknown name."""
    known = list(known)
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}"
