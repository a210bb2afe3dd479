"""Collectives and moves on every kind of ranks: each case runs on threads and on gloo processes.

A case is `case(make, size)`: `make(mesh)` gives the ranks of a mesh, `size` how many there are. It
knows the tensors of all ranks and checks those that its process holds, so it needs no join.
Expected values come from `brute`; sums are over whole numbers, hence exact.
"""

from collections.abc import Callable

import torch

from funcinfer.sharding import (
    Mesh,
    Ranks,
    all_gather,
    all_to_all,
    all_to_all_v,
    axis_index,
    axis_size,
    pmax,
    ppermute,
    psum,
    psum_scatter,
)
from tests.sharding import brute
from tests.sharding.brute import MESHES

Make = Callable[[Mesh], Ranks]
Case = Callable[[Make, int], None]
CASES: dict[str, Case] = {}

ADDED = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
MOVED = (*ADDED, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)


def case(f: Case) -> Case:
    CASES[f.__name__] = f
    return f


def tensors(mesh: Mesh, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One tensor a rank, of small whole numbers."""
    made = []
    for rank in range(mesh.num_ranks):
        generator = torch.Generator().manual_seed(rank)
        made.append(torch.randint(0, 9, shape, generator=generator).to(dtype))
    return made


def bits(x: torch.Tensor) -> torch.Tensor:
    """`x` in a dtype that can be compared."""
    return x.view(torch.uint8) if x.is_floating_point() and x.dtype.itemsize == 1 else x


def assert_same(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, (
        f"{where}: {got.dtype} {tuple(got.shape)},"
        f" expected {expected.dtype} {tuple(expected.shape)}"
    )
    torch.testing.assert_close(
        bits(got), bits(expected), rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
    )


def expect(
    make: Make,
    mesh: Mesh,
    f: Callable[[torch.Tensor], torch.Tensor],
    given: list[torch.Tensor],
    expected: Callable[[int], torch.Tensor],
    where: str,
) -> None:
    """`f` of each rank's tensor is what `expected` says for it, and the input is as it was."""
    ranks = make(mesh)
    mine = [brute.coordinates(mesh).index(c) for c in ranks.coords]
    local = [given[rank].clone() for rank in mine]
    outs = ranks.run(f, local)
    for rank, x, out in zip(mine, local, outs, strict=True):
        assert_same(out, expected(rank), f"{where} on rank {rank} of {mesh}")
        assert_same(x, given[rank], f"the input of {where}")


def each_axis(size: int) -> list[tuple[Mesh, brute.Axes]]:
    return [(mesh, axes) for mesh in MESHES[size] for axes in brute.products(mesh)]


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = (total + part).to(parts[0].dtype)
    return total


@case
def indices_count_the_ranks_of_an_axis(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        expect(
            make,
            mesh,
            lambda x, axes=axes: x * 0 + axis_index(axes) * 100 + axis_size(axes),
            tensors(mesh, 1),
            lambda r, m=mesh, a=axes: torch.tensor(
                [100.0 * brute.index(m, a, r) + len(brute.group(m, a, r))]
            ),
            f"index along {axes}",
        )


@case
def psum_adds_in_every_dtype(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        for dtype in ADDED:
            xs = tensors(mesh, 3, 5, dtype=dtype)
            expect(
                make,
                mesh,
                lambda x, axes=axes: psum(x, axes),
                xs,
                lambda r, m=mesh, a=axes, xs=xs: added([xs[i] for i in brute.group(m, a, r)]),
                f"psum over {axes} of {dtype}",
            )


@case
def pmax_takes_the_largest_and_keeps_nan(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        xs = tensors(mesh, 4, 3)
        for rank, x in enumerate(xs):
            x[0, 0] = torch.nan if rank == len(xs) - 1 else 1.0
            x[1, 1] = -torch.inf
        expect(
            make,
            mesh,
            lambda x, axes=axes: pmax(x, axes),
            xs,
            lambda r, m=mesh, a=axes, xs=xs: (
                torch.stack([xs[i] for i in brute.group(m, a, r)]).max(0).values
            ),
            f"pmax over {axes}",
        )
    mesh = MESHES[size][0]
    flags = [torch.arange(size) == rank for rank in range(size)]
    expect(
        make,
        mesh,
        lambda x: pmax(x, mesh.names),
        flags,
        lambda r: torch.ones(size, dtype=torch.bool),
        "pmax of bool",
    )


@case
def all_gather_joins_in_index_order(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        for dim in (0, 1, -1):
            xs = tensors(mesh, 3, 1, 5)
            expect(
                make,
                mesh,
                lambda x, axes=axes, dim=dim: all_gather(x, axes, dim=dim),
                xs,
                lambda r, m=mesh, a=axes, xs=xs, dim=dim: torch.cat(
                    [xs[i] for i in brute.group(m, a, r)], dim
                ),
                f"all_gather over {axes} along {dim}",
            )


@case
def psum_scatter_is_a_part_of_the_sum(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        for dim, dtype in ((0, torch.float32), (1, torch.bfloat16), (-1, torch.int16)):
            xs = tensors(mesh, 2 * size, size, 3 * size, dtype=dtype)

            def expected(r, m=mesh, a=axes, xs=xs, dim=dim):
                members = brute.group(m, a, r)
                total = added([xs[i] for i in members])
                return brute.part(total, dim, len(members), members.index(r))

            expect(
                make,
                mesh,
                lambda x, axes=axes, dim=dim: psum_scatter(x, axes, dim=dim),
                xs,
                expected,
                f"psum_scatter over {axes} along {dim}",
            )


@case
def all_to_all_sends_part_i_to_index_i(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        for split, concat in ((0, 1), (1, 0), (0, 0), (-1, 0)):
            xs = tensors(mesh, 2 * size, size, 3 * size)

            def expected(r, m=mesh, a=axes, xs=xs, split=split, concat=concat):
                members = brute.group(m, a, r)
                mine = members.index(r)
                came = [brute.part(xs[i], split, len(members), mine) for i in members]
                return torch.cat(came, concat)

            expect(
                make,
                mesh,
                lambda x, axes=axes, s=split, c=concat: all_to_all(x, axes, split=s, concat=c),
                xs,
                expected,
                f"all_to_all over {axes}, split {split}, concat {concat}",
            )


@case
def all_to_all_v_sends_rows_by_counts(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        # Uneven, some of them 0; the ranks whose number is a multiple of 3 send nothing at all.
        counts = [
            [
                0 if r % 3 == 0 and r else (2 * r + i) % 4
                for i in range(len(brute.group(mesh, axes, r)))
            ]
            for r in range(size)
        ]
        for dtype in (torch.float32, torch.float8_e4m3fn):
            xs = [
                (torch.arange(sum(counts[r]) * 2).view(-1, 2) + 16 * r).to(dtype)
                for r in range(size)
            ]

            def expected(r, m=mesh, a=axes, xs=xs, counts=counts):
                members = brute.group(m, a, r)
                mine, rows = members.index(r), []
                for i in members:
                    start = sum(counts[i][:mine])
                    rows += [xs[i][start + k] for k in range(counts[i][mine])]
                return torch.stack(rows) if rows else xs[r][:0]

            ranks = make(mesh)
            mine = [brute.coordinates(mesh).index(c) for c in ranks.coords]
            outs = ranks.run(
                lambda x, counts, axes=axes: all_to_all_v(x, axes, counts),
                [xs[r] for r in mine],
                [counts[r] for r in mine],
            )
            for r, (rows, came) in zip(mine, outs, strict=True):
                members = brute.group(mesh, axes, r)
                assert came == tuple(counts[i][members.index(r)] for i in members)
                assert_same(rows, expected(r), f"all_to_all_v over {axes} on rank {r}")


@case
def ppermute_sends_whole_tensors(make: Make, size: int) -> None:
    for mesh, axes in each_axis(size):
        n = len(brute.group(mesh, axes, 0))
        rotation = [(i, (i + 1) % n) for i in range(n)]
        for perm in (rotation, rotation[:1], [[i, i] for i in range(n)], []):
            for shape in ((2, 3), ()):
                xs = tensors(mesh, *shape)

                def expected(r, m=mesh, a=axes, xs=xs, perm=perm):
                    members = brute.group(m, a, r)
                    for source, target in perm:
                        if members[target] == r:
                            return xs[members[source]]
                    return xs[r] * 0

                expect(
                    make,
                    mesh,
                    lambda x, axes=axes, perm=perm: ppermute(x, axes, perm),
                    xs,
                    expected,
                    f"ppermute {perm} over {axes}",
                )


@case
def every_dtype_moves(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = brute.products(mesh)[-1]
    for dtype in MOVED:
        xs = tensors(mesh, size, 3, dtype=dtype)
        n = len(brute.group(mesh, axes, 0))
        expected = torch.cat([bits(xs[i]) for i in brute.group(mesh, axes, 0)], 1)
        expect(
            make,
            mesh,
            lambda x, a=axes: bits(all_gather(x, a, dim=1)),
            xs,
            lambda r, e=expected: e,
            f"all_gather of {dtype}",
        )
        expect(
            make,
            mesh,
            lambda x, a=axes: bits(all_to_all(x, a, split=0, concat=1)),
            xs,
            lambda r, e=expected, n=n, m=mesh, a=axes: brute.part(e, 0, n, brute.index(m, a, r)),
            f"all_to_all of {dtype}",
        )
        expect(
            make,
            mesh,
            lambda x, a=axes, n=n: bits(ppermute(x, a, [(0, n - 1), (n - 1, 0)])),
            xs,
            lambda r, m=mesh, a=axes, n=n, xs=xs: bits(_swapped(xs, brute.group(m, a, r), r, n)),
            f"ppermute of {dtype}",
        )


def _swapped(xs: list[torch.Tensor], members: list[int], r: int, n: int) -> torch.Tensor:
    swap = {members[0]: xs[members[n - 1]], members[n - 1]: xs[members[0]]}
    return swap.get(r, torch.zeros_like(xs[r]))


@case
def scalars_and_empty_tensors_go_through(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = brute.products(mesh)[-1]
    xs = tensors(mesh)
    total, largest = added(xs), torch.stack(xs).max()
    expect(make, mesh, lambda x: psum(x, axes), xs, lambda r: total, "psum of a scalar")
    expect(make, mesh, lambda x: pmax(x, axes), xs, lambda r: largest, "pmax of a scalar")
    for shape in ((0, size), (size, 0), (0, 0)):
        xs = tensors(mesh, *shape)
        doubled = torch.zeros(shape[0], size * shape[1])
        expect(make, mesh, lambda x: psum(x, axes), xs, lambda r, x=xs: x[0], f"psum of {shape}")
        expect(
            make,
            mesh,
            lambda x: all_gather(x, axes, dim=1),
            xs,
            lambda r, d=doubled: d,
            f"all_gather of {shape}",
        )
        expect(
            make,
            mesh,
            lambda x: psum_scatter(x, axes, dim=0),
            xs,
            lambda r, s=shape: torch.zeros(s[0] // size, s[1]),
            f"psum_scatter of {shape}",
        )
        expect(
            make,
            mesh,
            lambda x: all_to_all(x, axes, split=0, concat=1),
            xs,
            lambda r, s=shape: torch.zeros(s[0] // size, s[1] * size),
            f"all_to_all of {shape}",
        )
        expect(
            make,
            mesh,
            lambda x: ppermute(x, axes, [(0, 1)]),
            xs,
            lambda r, x=xs: x[0],
            f"ppermute of {shape}",
        )


@case
def strided_inputs_may_be_written_after_the_call(make: Make, size: int) -> None:
    mesh = MESHES[size][-1]
    axes = brute.products(mesh)[-1]
    members = brute.group(mesh, axes, 0)
    xs = tensors(mesh, 5, size)

    def f(x: torch.Tensor) -> torch.Tensor:
        turned = x.clone().T
        outs = []
        for _ in range(20):
            outs.append(
                all_gather(turned, axes, dim=0)
                + 0 * psum(turned, axes).repeat(size, 1)
                + all_to_all(turned, axes, split=0, concat=0).repeat(size, 1)
                + ppermute(turned, axes, [(0, 0)]).repeat(size, 1)
            )
            turned += 1  # the others may not see this in the calls above
        return torch.stack(outs)

    def expected(r: int) -> torch.Tensor:
        outs = []
        for step in range(20):
            now = [x.T + step for x in xs]
            mine = torch.cat([brute.part(now[i], 0, size, members.index(r)) for i in members])
            sent = now[r] if members.index(r) == 0 else now[r] * 0
            whole = torch.cat([now[i] for i in members])
            outs.append(whole + mine.repeat(size, 1) + sent.repeat(size, 1))
        return torch.stack(outs)

    expect(make, mesh, f, xs, expected, "calls on a transposed tensor that is then written")
