"""Global trees and the local trees of ranks: cutting one into the others, and joining them again.

`shard` cuts A to A[I_X] at a coordinate. `join_tree` is the inverse over all ranks; it is also
where "declared replicated, but the ranks differ" is found out. A leaf that exists on some stages
only (`P.on`) is None on the other ranks.
"""

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcinfer.sharding.mesh import Coord, Mesh, P, axis_of, is_p, show_ranks
from funcinfer.tree import align, leaves_with_path, tree_flatten, tree_unflatten

# How far declared replicas may differ, relative to the largest value. Other dtypes must be equal.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
Gather = Callable[[int, torch.Tensor], Sequence[torch.Tensor]]


def shard(x: torch.Tensor, spec: P, mesh: Mesh, coord: Coord, path: str = "") -> torch.Tensor:
    """The part of a global tensor at `coord`, contiguous; a view where the cut leaves it so.

    Only the dims are looked at, not `spec.on`. ValueError where one does not divide evenly.

    >>> shard(torch.arange(6), P("tp"), Mesh(tp=2), {"tp": 1})
    tensor([3, 4, 5])
    """
    shape = mesh.local_shape(x.shape, spec, path)
    for dim, (size, axis) in enumerate(zip(shape, spec, strict=True)):
        if mesh.size(axis) > 1:
            x = x.narrow(dim, mesh.index(axis, coord) * size, size)
    return x.contiguous()


def split_tree(
    tree: Any, specs: Any, mesh: Mesh, coord: Coord, *, copy: bool = False, what: str = "tree"
) -> Any:
    """The local tree at `coord`; None for leaves that another stage holds. Leaves that are not
    tensors go to every rank as they are.

    `specs` has a `P` for each tensor and None for each other leaf. With `copy` no part shares
    storage with `tree`. ValueError naming the leaf whose spec does not fit it.
    """
    pairs = leaves_with_path(tree)
    layouts = align(specs, [p for p, _ in pairs], is_leaf=is_p, what=f"the tree of specs of {what}")
    parts = []
    for (path, x), spec in zip(pairs, layouts, strict=True):
        name = f"{what}.{path}" if path else what
        if not _has_layout(x, spec, name):
            parts.append(x)
            continue
        if not mesh.holds(spec, coord):
            parts.append(None)
            continue
        part = shard(x, spec, mesh, coord, name)
        parts.append(part.clone() if copy and _share_storage(part, x) else part)
    return tree_unflatten(parts, tree_flatten(tree)[1])


def outline(tree: Any) -> str:
    """What must be the same on every rank, as text: structure, paths, dtypes and shapes of leaves.

    >>> outline({"y": torch.zeros(2, 3), "steps": 4})
    '{"leaves": {"y": "float32 (2, 3)", "steps": "4"}, "structure": "..."}'
    """
    leaves = {path: _describe(leaf) for path, leaf in leaves_with_path(tree)}
    return json.dumps({"leaves": leaves, "structure": str(tree_flatten(tree)[1])})


def join_tree(
    tree: Any,
    outlines: Sequence[str],
    gather: Gather,
    specs: Any,
    mesh: Mesh,
    *,
    check: bool = True,
    what: str = "output",
) -> Any:
    """The global tree of which `tree` is one rank's part.

    `outlines` are those of all ranks; `gather(i, leaf)` gives the i-th leaf of all ranks, in rank
    order, and for a rank without it anything of its shape. With `check`, parts that `specs`
    declares replicated must be equal. ValueError naming the leaf and the ranks where they do not
    fit together.
    """
    told = [json.loads(text) for text in outlines]
    _check_structures(told, mesh, what)
    pairs = leaves_with_path(tree)
    layouts = align(specs, [p for p, _ in pairs], is_leaf=is_p, what=f"the tree of specs of {what}")
    leaves = []
    for i, ((path, leaf), spec) in enumerate(zip(pairs, layouts, strict=True)):
        name = f"{what}.{path}" if path else what
        holders = _holders(spec, mesh)
        said = _check_leaf([rank["leaves"][path] for rank in told], holders, mesh, name)
        part: Any = _stand_in(said) if leaf is None and said != "None" else leaf
        if _has_layout(part, spec, name):
            part = join_leaf(gather(i, part), spec, mesh, name, check=check)
        leaves.append(part)
    return tree_unflatten(leaves, tree_flatten(tree)[1])


def join_leaf(
    parts: Sequence[torch.Tensor], spec: P, mesh: Mesh, path: str, *, check: bool = True
) -> torch.Tensor:
    """The global tensor of all ranks' parts, which are in rank order and of one shape and dtype.

    Where nothing is sharded it is the first holder's part itself. With `check`, ValueError where
    parts that hold the same by declaration differ.
    """
    owners: dict[tuple[int, ...], int] = {}
    for rank, (part, coord) in enumerate(zip(parts, mesh.coords(), strict=True)):
        if not mesh.holds(spec, coord):
            continue
        first = owners.setdefault(tuple(mesh.index(axis, coord) for axis in spec), rank)
        if first != rank and check and (gap := _difference(parts[first], part)):
            raise ValueError(_replica_error(f"{path}: declared {spec!r}", gap, mesh, first, rank))

    def joined(place: tuple[int, ...]) -> torch.Tensor:
        dim = len(place)
        if dim == len(spec):
            return parts[owners[place]]
        pieces = [joined((*place, i)) for i in range(mesh.size(spec[dim]))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    return joined(())


def _has_layout(x: Any, spec: Any, name: str) -> bool:
    """Whether leaf `x` is a tensor; ValueError where `spec` does not suit it."""
    if not isinstance(x, torch.Tensor):
        if spec is not None:
            raise ValueError(
                f"{name} is a {type(x).__name__}, not a tensor: its spec is None, not {spec!r}"
            )
        return False
    if not isinstance(spec, P) or len(spec) != x.ndim:
        raise ValueError(
            f"{name} is a tensor of shape {tuple(x.shape)}: its spec is a P of {x.ndim}"
            f" entr{'y' if x.ndim == 1 else 'ies'}, one a dim, not {spec!r}"
        )
    return True


def _share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _describe(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    plain = leaf is None or isinstance(leaf, bool | int | float | complex | str)
    return repr(leaf) if plain else f"a {type(leaf).__name__}"


def _holders(spec: Any, mesh: Mesh) -> list[int]:
    """The ranks that hold a leaf of layout `spec`; all of them where it is no P."""
    if not isinstance(spec, P) or spec.on is None:
        return list(range(mesh.num_ranks))
    return [rank for rank, coord in enumerate(mesh.coords()) if mesh.holds(spec, coord)]


def _stand_in(said: str) -> torch.Tensor:
    """A tensor of the dtype and shape that `_describe` told of another rank's."""
    dtype, shape = said.split(" ", 1)
    return torch.zeros(ast.literal_eval(shape), dtype=getattr(torch, dtype))


def _check_structures(told: Sequence[dict[str, Any]], mesh: Mesh, what: str) -> None:
    """ValueError where ranks returned trees of other leaves or of another structure."""
    ours = told[0]
    for rank, theirs in enumerate(told):
        if ours["leaves"].keys() != theirs["leaves"].keys():
            raise ValueError(
                f"{what}: {show_ranks(mesh, [0])} returned the leaves {list(ours['leaves'])},"
                f" {show_ranks(mesh, [rank])} returned {list(theirs['leaves'])}"
            )
        if ours["structure"] != theirs["structure"]:
            raise ValueError(
                f"{what}: {show_ranks(mesh, [0])} and {show_ranks(mesh, [rank])} returned trees"
                f" that differ in key order, container or static field: {ours['structure']} and"
                f" {theirs['structure']}"
            )


def _check_leaf(told: Sequence[str], holders: Sequence[int], mesh: Mesh, name: str) -> str:
    """What the holders of a leaf say it is; ValueError unless they agree and others have None."""
    said = told[holders[0]]
    for rank, theirs in enumerate(told):
        if rank not in holders and theirs != "None":
            raise ValueError(
                f"{name}: {show_ranks(mesh, [rank])} returned {theirs}, but by its layout it exists"
                f" on {show_ranks(mesh, holders)} alone: None is wanted"
            )
        if rank in holders and theirs != said:
            raise ValueError(
                f"{name}: {show_ranks(mesh, holders[:1])} returned {said},"
                f" {show_ranks(mesh, [rank])} returned {theirs}; shapes, dtypes and leaves that are"
                f" not tensors must be alike on all ranks"
            )
    return said


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    """How two replicas differ, in words; "" where they agree within the tolerance of their dtype.

    NaN agrees with NaN, so that poison does not look like a fault.
    """
    if a.is_floating_point() and a.dtype.itemsize == 1:
        same = a.view(torch.uint8) == b.view(torch.uint8)
    else:
        same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return ""
    bound = TOLERANCE.get(a.dtype, 0.0)
    if not bound:
        wide = torch.complex128 if a.is_complex() else torch.float64
    else:
        wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    sizes = torch.cat([a.flatten(), b.flatten()]).abs()
    scale = sizes[sizes.isfinite()].max().item() if bool(sizes.isfinite().any()) else 0.0
    if bound and torch.allclose(a, b, rtol=bound, atol=bound * scale, equal_nan=True):
        return ""
    gaps = (a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, -1)
    where = [int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape)]
    return (
        f"{int((~same).sum())} of {a.numel()} values differ, by up to {gaps.max().item():.3g}"
        f" at {where} (largest value {scale:.3g})"
    )


def _replica_error(what: str, gap: str, mesh: Mesh, i: int, j: int) -> str:
    a, b = mesh.coords()[i], mesh.coords()[j]
    axis = axis_of(k for k in a if a[k] != b[k])
    return (
        f"{what}, so {show_ranks(mesh, [i, j])} must hold the same, but {gap}. A psum over {axis!r}"
        f" may be missing, a replicated argument may be written in place, or the output is sharded"
        f" over {axis!r}"
    )
