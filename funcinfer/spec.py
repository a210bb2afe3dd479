"""ParamSpec: the one declaration of a tensor (shape, logical axes, dtype, initialiser) that
everything else reads.

Initialisation, sharding, checkpoint slicing, memory arithmetic and cache allocation are all maps
over a tree of specs. Caches are declared with the same type as weights.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from funcinfer.tree import leaves_with_path, map_with_path, tree_leaves, tree_map

Initialiser = Callable[[tuple[int, ...], torch.Generator, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Normal:
    """Draws from N(0, std^2)."""

    std: float = 0.02

    def __call__(
        self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of `shape`, drawn in at least float32."""
        draw = torch.randn(
            shape, generator=generator, dtype=torch.promote_types(dtype, torch.float32)
        )
        return (draw * self.std).to(dtype)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0

    def __call__(
        self, shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor of `shape`; the generator is not used."""
        return torch.full(shape, self.value, dtype=dtype)


ones, zeros = Constant(1.0), Constant(0.0)


@dataclass(frozen=True)
class Member:
    """What belongs to some `entries` of a list of `count` along an axis, as a layer's weight does.

    Where n ranks share the list, they hold contiguous stages of it: entry i lies on stage
    i * n // count. ValueError for entries that the list does not have.

    >>> Member("layers", (0, 4), 5).stages(3)
    (0, 2)
    """

    axis: str | tuple[str, ...]
    entries: tuple[int, ...]
    count: int

    def __post_init__(self) -> None:
        if not self.entries or any(not 0 <= i < self.count for i in self.entries):
            raise ValueError(
                f"entries {self.entries} of a list of {self.count} along {self.axis!r}:"
                f" give one or more from 0 to {self.count - 1}"
            )

    def stages(self, n: int) -> tuple[int, ...]:
        """The stages, of `n`, that hold one of the entries."""
        return tuple(sorted({i * n // self.count for i in self.entries}))


def stage_entries(count: int, n: int, stage: int) -> range:
    """The entries of a list of `count` that lie on stage `stage` of `n`.

    >>> [list(stage_entries(5, 3, stage)) for stage in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    return range(-(-stage * count // n), -(-(stage + 1) * count // n))


@dataclass(frozen=True)
class ParamSpec:
    """A tensor's global shape, one logical axis (or None) a dim, dtype and initialiser.

    `true_shape` is the shape before `sharding.pad` enlarged it; rows past it hold zeros and are
    masked by the layer that reads them. `member` says to which entries of a list the tensor
    belongs, where that list may be shared among ranks. ValueError where `axes` and `shape` differ
    in length or a dim is negative.

    >>> ParamSpec((8, 64, 512), ("heads", None, "embed")).nbytes
    524288
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: torch.dtype = torch.bfloat16
    init: Initialiser = field(default=Normal(), repr=False)
    true_shape: tuple[int, ...] | None = None
    member: Member | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "axes", tuple(self.axes))
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"ParamSpec with shape {self.shape} names {len(self.axes)} axes {self.axes}:"
                f" name each of the {len(self.shape)} dims, None where it is never sharded"
            )
        if min(self.shape, default=0) < 0:
            raise ValueError(f"ParamSpec shape {self.shape} has a negative dim")
        true = self.shape if self.true_shape is None else tuple(self.true_shape)
        if len(true) != len(self.shape) or any(
            t > n for t, n in zip(true, self.shape, strict=True)
        ):
            raise ValueError(f"ParamSpec true_shape {true} does not fit into shape {self.shape}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole (global) tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_spec(x: Any) -> bool:
    """Whether `x` is a ParamSpec: the `is_leaf` of spec trees."""
    return isinstance(x, ParamSpec)


def init(specs: Any, seed: int = 0, *, device: torch.device | str = "cpu") -> Any:
    """Tensors for a tree of specs. Each leaf's draw depends on (seed, its path) alone.

    So neither a mesh nor a sibling leaf changes it. Leaves are made on the CPU and moved to
    `device`.

    >>> init({"w": ParamSpec((2, 3), (None, "embed"), torch.float32)})["w"].shape
    torch.Size([2, 3])
    """

    def make(path: str, spec: ParamSpec) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        shape = spec.shape if spec.true_shape is None else spec.true_shape
        leaf = spec.init(shape, generator, spec.dtype)
        return pad_leaf(leaf, spec).to(device)

    return map_with_path(make, specs, is_leaf=is_spec)


def pad_leaf(leaf: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """`leaf` of `spec.true_shape` grown with zeros at the end of each dim to `spec.shape`."""
    if tuple(leaf.shape) == spec.shape:
        return leaf
    padded = leaf.new_zeros(spec.shape)
    padded[tuple(slice(0, n) for n in leaf.shape)] = leaf
    return padded


def abstract(specs: Any) -> Any:
    """The same tree of meta tensors: shapes and dtypes without storage."""
    return tree_map(
        lambda s: torch.empty(s.shape, dtype=s.dtype, device="meta"), specs, is_leaf=is_spec
    )


def empty(specs: Any, *, fill: float | None = None, device: torch.device | str = "cpu") -> Any:
    """Tensors of the specs' shapes, uninitialised or filled with `fill`. For caches."""

    def make(s: ParamSpec) -> torch.Tensor:
        if fill is None:
            return torch.empty(s.shape, dtype=s.dtype, device=device)
        return torch.full(s.shape, fill, dtype=s.dtype, device=device)

    return tree_map(make, specs, is_leaf=is_spec)


def with_dtype(specs: Any, dtype: torch.dtype) -> Any:
    """The specs with their 16-bit leaves in `dtype`. Leaves declared wider stay at least as wide as
    declared.

    A router bias declared float32 stays float32 in a bfloat16 model and becomes float64 in a
    float64 one. Integer and 8-bit leaves are left alone.
    """

    def cast(s: ParamSpec) -> ParamSpec:
        if not s.dtype.is_floating_point or s.dtype.itemsize < 2:
            return s
        wide = s.dtype.itemsize > 2
        return replace(s, dtype=torch.promote_types(s.dtype, dtype) if wide else dtype)

    return tree_map(cast, specs, is_leaf=is_spec)


def nbytes(specs: Any) -> int:
    """Bytes of all leaves, each counted whole."""
    return sum(s.nbytes for s in tree_leaves(specs, is_leaf=is_spec))


def table(specs: Any) -> str:
    """A text table of a spec tree: path, shape, axes, dtype, bytes.

    >>> print(table({"w": ParamSpec((2, 3), (None, "embed"))}))
    w  (2, 3)  (None, 'embed')  bfloat16  12
    """
    rows = [
        (path, str(s.shape), str(s.axes), str(s.dtype).removeprefix("torch."), str(s.nbytes))
        for path, s in leaves_with_path(specs, is_leaf=is_spec)
    ]
    return align_columns(rows)


def align_columns(rows: list[tuple[str, ...]]) -> str:
    """Rows of text in columns two spaces apart."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    )
