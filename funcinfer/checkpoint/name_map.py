"""Which tensors of a checkpoint make up which parameter, as a value that is read both ways.

A leaf is a tensor of the checkpoint with its dims unfolded and perhaps cut, or a stack of such:

    Stored("q_proj.weight", ((N, H), D))             [N*H, D] in the file   -> (N, H, D)
    Stored("conv1d.weight", (C, (), K))              [C, 1, K]              -> (C, K)
    Stored("kv_b_proj.weight", ((N, K), C))[:, :k]   [N*K, C]               -> (N, k, C)
    Stack((gate_FD, up_FD))                          two of [F, D]          -> (2, F, D)
    Either((per_expert_E2FD, packed_E2FD))           whichever of the two the checkpoint holds

Letters: N heads, H head width, D model width, F MLP width, E experts, C channels, K width.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

Box = tuple[tuple[int, int], ...]
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint. Entry i of `dims` says how dim i of the file unfolds.

    An int is a dim as it is, a tuple the dims that it unfolds into, major first, and `()` drops a
    dim of size 1. Slicing takes a part of the unfolded dims; ValueError for a slice with a step,
    empty or out of range.

    >>> kv_b = Stored("kv_b_proj.weight", ((4, 5), 8))
    >>> kv_b.file_shape, kv_b.shape, kv_b[:, 3:].shape
    ((20, 8), (4, 5, 8), (4, 2, 8))
    """

    name: str
    dims: tuple[int | tuple[int, ...], ...]
    cut: Box | None = None

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The dims that each dim of the file unfolds into."""
        return tuple((d,) if isinstance(d, int) else d for d in self.dims)

    @cached_property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return tuple(math.prod(g) for g in self.groups)

    @cached_property
    def unfolded(self) -> tuple[int, ...]:
        """The shape of the whole tensor, unfolded."""
        return tuple(n for g in self.groups for n in g)

    @cached_property
    def taken(self) -> Box:
        """The range of each unfolded dim that is taken."""
        return self.cut or tuple((0, n) for n in self.unfolded)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is taken."""
        return tuple(high - low for low, high in self.taken)

    def __getitem__(self, slices: slice | tuple[slice, ...]) -> "Stored":
        slices = slices if isinstance(slices, tuple) else (slices,)
        if len(slices) > len(self.shape):
            raise ValueError(f"{self.name}: {len(slices)} slices for the shape {self.shape}")
        box = list(self.taken)
        for dim, s in enumerate(slices):
            first, n = box[dim][0], self.shape[dim]
            low, high = 0 if s.start is None else s.start, n if s.stop is None else s.stop
            if s.step is not None or not 0 <= low < high <= n:
                raise ValueError(
                    f"{self.name}: {s} of dim {dim}, which has size {n}:"
                    f" write a range within 0 and {n}, without a step"
                )
            box[dim] = (first + low, first + high)
        return replace(self, cut=tuple(box))

    def runs(self, box: Box) -> Iterator[tuple[tuple[slice, ...], Index]]:
        """The parts of the file that make up `box` of what is taken, each with its place there.

        A part is a contiguous range of each dim of the file; reshaped, it is `result[place]`.
        Together the parts hold the elements of the box and no others.

        >>> for part, place in Stored("w", ((2, 6),)).runs(((0, 2), (3, 5))):
        ...     print(part, place)
        (slice(3, 5, None),) (0, slice(None, None, None))
        (slice(9, 11, None),) (1, slice(None, None, None))
        """
        moved = [(t[0] + low, t[0] + high) for t, (low, high) in zip(self.taken, box, strict=True)]
        per_dim = []
        for group in self.groups:
            per_dim.append(_dim_runs(group, moved[: len(group)]))
            moved = moved[len(group) :]
        for parts in itertools.product(*per_dim):
            yield tuple(part for part, _ in parts), tuple(i for _, place in parts for i in place)


def _dim_runs(sizes: tuple[int, ...], box: list[tuple[int, int]]) -> list[tuple[slice, Index]]:
    """`runs` of one dim of the file. The dims after `split` are whole, those before it walked."""
    if not sizes:
        return [(slice(0, 1), ())]
    cuts = [dim for dim, n in enumerate(sizes) if box[dim] != (0, n)]
    split = max(cuts, default=0)
    inner = math.prod(sizes[split + 1 :])
    low, high = box[split]
    rest = (slice(None),) * (len(sizes) - split)
    found: list[tuple[slice, Index]] = []
    for outer in itertools.product(*(range(*b) for b in box[:split])):
        flat = 0
        for dim, index in enumerate(outer):
            flat = flat * sizes[dim] + index
        flat *= sizes[split]
        place = tuple(index - box[dim][0] for dim, index in enumerate(outer))
        found.append((slice((flat + low) * inner, (flat + high) * inner), place + rest))
    return found


@dataclass(frozen=True)
class Stack:
    """Sources of one shape, stacked along a new first dim. ValueError where their shapes differ.

    >>> Stack((Stored("gate", (3, 2)), Stored("up", (3, 2)))).shape
    (2, 3, 2)
    """

    parts: tuple["Source", ...]

    def __post_init__(self) -> None:
        _same_shape("Stack", self.parts)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return (len(self.parts), *self.parts[0].shape)


@dataclass(frozen=True)
class Either:
    """Sources of one shape, of which a checkpoint holds exactly one. The first is what is written.

    ValueError where their shapes differ.

    >>> Either((Stored("weight", (6,)), Stored("w", (6,)))).shape
    (6,)
    """

    options: tuple["Source", ...]

    def __post_init__(self) -> None:
        _same_shape("Either", self.options)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape that all options have."""
        return self.options[0].shape


Source = Stored | Stack | Either


@dataclass(frozen=True)
class NameMap:
    """The source of each leaf of a model, and what else a checkpoint of it may hold.

    - `sources`: path of a leaf -> its source.
    - `copies`: tensor of the checkpoint -> path of the leaf that it repeats (a tied head, the
      embedding beside a draft layer). It may be absent; where it is there it must be equal, which
      is checked on the part that is read.
    - `ignored`: patterns (as in `fnmatch`) of tensors that may be there and are not read.

    >>> names = NameMap({"norm": Stored("norm.weight", (8,))}, ignored=("*.rotary_emb.inv_freq",))
    >>> names.sources["norm"].shape
    (8,)
    """

    sources: Mapping[str, Source]
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def pieces(source: Source) -> Iterator[tuple[tuple[int, ...], Stored]]:
    """Each tensor of a source with its index in the stacked dims; of an Either its first option.

    >>> [(i, s.name) for i, s in pieces(Stack((Stored("a", (2,)), Stored("b", (2,)))))]
    [((0,), 'a'), ((1,), 'b')]
    """
    match source:
        case Stored():
            yield (), source
        case Stack():
            for i, part in enumerate(source.parts):
                for index, stored in pieces(part):
                    yield (i, *index), stored
        case Either():
            yield from pieces(source.options[0])


def choose(source: Source, present: Set[str]) -> Stored | Stack:
    """The source with each Either replaced by the option whose tensors are all `present`.

    Where none is complete, the one of which most is there. ValueError where several are.

    >>> choose(Either((Stored("a", (2,)), Stored("b", (2,)))), {"b"}).name
    'b'
    """
    match source:
        case Stored():
            return source
        case Stack():
            return Stack(tuple(choose(part, present) for part in source.parts))
        case Either():
            options = [choose(option, present) for option in source.options]
            shares = [_share(option, present) for option in options]
            complete = [o for o, share in zip(options, shares, strict=True) if share == 1]
            if len(complete) > 1:
                both = " and ".join(_first_name(o) for o in complete)
                raise ValueError(f"the checkpoint holds both {both}, which exclude each other")
            return options[shares.index(max(shares))]


def _share(source: Source, present: Set[str]) -> Fraction:
    """The share of a source's tensors that are present."""
    names = {stored.name for _, stored in pieces(source)}
    return Fraction(len(names & present), len(names))


def _same_shape(what: str, sources: tuple[Source, ...]) -> None:
    if not sources:
        raise ValueError(f"{what} needs at least one source")
    for other in sources[1:]:
        if other.shape != sources[0].shape:
            raise ValueError(
                f"{what} needs sources of one shape: {_first_name(sources[0])} has"
                f" {sources[0].shape}, {_first_name(other)} has {other.shape}"
            )


def _first_name(source: Source) -> str:
    return repr(next(pieces(source))[1].name)
