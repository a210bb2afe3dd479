"""Moves and whole trees on every kind of ranks. `cases` says how a case works."""

from typing import Any

import pytest
import torch

from funcinfer.sharding import Mesh, P, psum, reshard, shard_map
from tests.sharding import brute
from tests.sharding.brute import MESHES
from tests.sharding.cases import Make, case, expect


@case
def moves_between_layouts(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    names = [name for name, s in mesh.axes if s > 1][:2]
    whole = torch.arange(float(2 * size * 3 * size)).view(2 * size, 3 * size)
    ways = brute.layouts(names, 2)
    for src in ways:
        for dst in ways:
            # One dim keeps its axes or has none on one side: each such way is lawful and exact.
            grows = all(d[: len(s)] == s for s, d in zip(src, dst, strict=True))
            shrinks = all(s[: len(d)] == d for s, d in zip(src, dst, strict=True))
            if not (grows or shrinks):
                continue
            expect(
                make,
                mesh,
                lambda x, src=src, dst=dst: reshard(x, P(*src), P(*dst)),
                [brute.cut(whole, src, mesh, r) for r in range(size)],
                lambda r, dst=dst: brute.cut(whole, dst, mesh, r),
                f"reshard {src} -> {dst}",
            )
        turned = (src[1], src[0])
        if bool(src[0]) != bool(src[1]):
            expect(
                make,
                mesh,
                lambda x, src=src, dst=turned: reshard(x, P(*src), P(*dst)),
                [brute.cut(whole, src, mesh, r) for r in range(size)],
                lambda r, dst=turned: brute.cut(whole, dst, mesh, r),
                f"reshard {src} -> {turned}",
            )


def over(mesh: Mesh) -> tuple[str, ...]:
    """All axes of a mesh, last first: not in the order of the mesh."""
    return tuple(reversed(mesh.names))


@case
def shard_map_splits_and_joins_trees(make: Make, size: int) -> None:
    for mesh in MESHES[size]:
        axes = over(mesh)
        tree = {
            "w": torch.arange(6 * size * size).view(2 * size, 3 * size),
            "pair": [torch.ones(()), torch.zeros(0, 3)],
            "steps": 4,
            "name": None,
        }
        spec = {
            "name": None,
            "steps": None,
            "pair": [P(), P(axes, None)],
            "w": P(None, axes),
        }

        def f(t: dict[str, Any], size=size) -> dict[str, Any]:
            assert t["w"].shape == (2 * size, 3) and t["steps"] == 4 and t["name"] is None
            return {**t, "w": t["w"] + 1}

        out = shard_map(f, mesh, (spec,), spec, ranks=make(mesh))(tree)
        assert list(out) == ["w", "pair", "steps", "name"] and out["steps"] == 4
        torch.testing.assert_close(out["w"], tree["w"] + 1)
        torch.testing.assert_close(out["pair"], tree["pair"])


@case
def a_sharded_product_is_the_whole_product(make: Make, size: int) -> None:
    for mesh in MESHES[size]:
        axes = over(mesh)
        x, w = torch.arange(35.0).view(5, 7), torch.ones(7, 3 * size)
        v = torch.arange(12.0 * size).view(3 * size, 4)

        def f(x, w, v, axes=axes):
            return psum(x @ w @ v, axes)

        specs = (P(None, None), P(None, axes), P(axes, None))
        out = shard_map(f, mesh, specs, P(None, None), ranks=make(mesh))(x, w, v)
        torch.testing.assert_close(out, x @ w @ v)


@case
def replicas_that_differ_are_found(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = over(mesh)
    x = torch.arange(4.0 * size).view(size, 4)
    f = shard_map(
        lambda x: {"y": x.sum(0)}, mesh, (P(axes, None),), {"y": P(None)}, ranks=make(mesh)
    )
    with pytest.raises(
        ValueError, match=r"output\.y: declared P\(None\), so ranks 0 \(.*\) and \d"
    ):
        f(x)


@case
def replicas_written_in_place_are_found(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = over(mesh)

    def f(cache, i_am):
        cache[0, i_am] += 1.0
        return cache

    whole = torch.zeros(2, size)
    mapped = shard_map(
        f, mesh, (P(None, None), P(axes)), P(None, None), donate=(0,), ranks=make(mesh)
    )
    with pytest.raises(ValueError, match=r"2 of .* values differ, by up to 1 at"):
        mapped(whole, torch.arange(size))
    assert whole.eq(0).all()
    same = mapped(whole, torch.zeros(size, dtype=torch.int64))
    assert same[0, 0] == 1 and same.sum() == 1 and whole.eq(0).all()


@case
def parts_that_do_not_fit_are_found(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = over(mesh)
    ranks = make(mesh)
    spec = (P(axes),)
    x = torch.arange(size)

    def shapes(x):
        return torch.zeros(1 + int(x) // (size - 1))

    def types(x):
        return torch.zeros(2, dtype=torch.int64 if int(x) == size - 1 else torch.float32)

    def numbers(x):
        return {"n": int(x)}

    def keys(x):
        return {"a": x} if int(x) else {"b": x}

    for f, out, said in (
        (shapes, P(axes), r"rank 0 .* returned float32 \(1,\), rank .* float32 \(2,\)"),
        (types, P(axes), r"rank 0 .* returned float32 \(2,\), rank .* int64 \(2,\)"),
        (numbers, {"n": None}, r"output\.n: rank 0 .* returned 0, rank 1 .* returned [1-9]"),
        (
            keys,
            {"b": P(None)},
            r"rank 0 .* returned the leaves \['b'\], rank 1 .* returned \['a'\]",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            shard_map(f, mesh, spec, out, ranks=ranks)(x)


@case
def grad_mode_holds_in_the_ranks(make: Make, size: int) -> None:
    mesh = MESHES[size][0]

    def f(x):
        return torch.tensor([torch.is_grad_enabled(), torch.is_inference_mode_enabled()]) | (x < 0)

    mapped = shard_map(f, mesh, (P(None),), P(None), ranks=make(mesh))
    zeros = torch.zeros(2)
    assert mapped(zeros).tolist() == [True, False]
    with torch.no_grad():
        assert mapped(zeros).tolist() == [False, False]
    with torch.inference_mode():
        assert mapped(zeros).tolist() == [False, True]
