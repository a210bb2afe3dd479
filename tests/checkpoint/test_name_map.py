"""Sources read through files, layouts and padding give what numpy says, and no byte more."""

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from funcinfer.checkpoint import Either, NameMap, Source, Stack, Stored, load_ranks
from funcinfer.checkpoint.files import Reader
from funcinfer.checkpoint.name_map import choose, pieces
from funcinfer.sharding import Mesh, Rules
from funcinfer.spec import ParamSpec


@st.composite
def stored_parts(draw: Any, count: int) -> list[tuple[Stored, np.ndarray, np.ndarray]]:
    """`count` tensors of one shape once unfolded and cut: source, content of the file, meaning."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    inner = range(1, len(shape))
    edges = sorted(draw(st.sets(st.sampled_from(inner)))) if len(inner) else []
    bounds = [0, *edges, len(shape)] if shape else [0]
    made = []
    for i in range(count):
        cuts = [(draw(st.integers(0, 2)), n, draw(st.integers(0, 2))) for n in shape]
        sizes = [a + n + b for a, n, b in cuts]
        groups = [tuple(sizes[a:b]) for a, b in itertools.pairwise(bounds)]
        dims: list[int | tuple[int, ...]] = [g[0] if len(g) == 1 else g for g in groups]
        dims.insert(draw(st.integers(0, len(dims))), ())
        rng = np.random.default_rng(i + 10 * draw(st.integers(0, 99)))
        data = rng.standard_normal([math.prod(g) for g in groups], dtype=np.float32)
        place = dims.index(())
        part = tuple(slice(a, a + n) for a, n, _ in cuts)
        stored = Stored(f"t{i}.weight", tuple(dims))
        stored = stored[part] if part else stored
        made.append((stored, np.expand_dims(data, place), data.reshape(sizes)[part]))
    return made


@st.composite
def cases(draw: Any) -> tuple[Source, dict[str, np.ndarray], np.ndarray]:
    """A random source, the files it reads, and its value."""
    outer, inner = draw(st.sampled_from([(None, None), (None, 3), (2, None), (3, 2)]))
    parts = draw(stored_parts((outer or 1) * (inner or 1)))
    files = {stored.name: data for stored, data, _ in parts}
    sources: list[Source] = [stored for stored, _, _ in parts]
    values = [value for _, _, value in parts]
    for count in (inner, outer):
        if count is not None:
            starts = range(0, len(sources), count)
            sources = [Stack(tuple(sources[i : i + count])) for i in starts]
            values = [np.stack(values[i : i + count]) for i in starts]
    return sources[0], files, values[0]


@given(cases(), st.data())
def test_a_rank_reads_its_block_and_nothing_else(case: Any, data: Any) -> None:
    source, files, value = case
    mesh = Mesh(x=2, y=3)
    free = ["x", "y"]
    layout: list[Any] = []
    for _ in value.shape:
        axis = data.draw(st.sampled_from([None, *free, *([("y", "x")] if len(free) == 2 else [])]))
        layout.append(axis)
        free = [a for a in free if a not in (axis or ())]
    names = tuple(f"dim{i}" for i in range(value.ndim))
    rules = Rules(**dict(zip(names, layout, strict=True)))
    padded = tuple(
        -(-n // mesh.size(a)) * mesh.size(a) for n, a in zip(value.shape, layout, strict=True)
    )
    leaf = ParamSpec(padded, names, torch.float32, true_shape=value.shape)
    wholes = {name: ParamSpec(x.shape, (None,) * x.ndim) for name, x in files.items()}
    sources = {f"whole.{name}": Stored(name, spec.shape) for name, spec in wholes.items()}
    read: list[int] = []

    class Counting(Reader):
        def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
            values = super().read(name, part)
            read.append(values.nbytes)
            return values

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("funcinfer.checkpoint.load.Reader", Counting)
        save_file(
            {n: np.ascontiguousarray(x) for n, x in files.items()},
            Path(folder, "model.safetensors"),
        )
        specs = {"leaf": leaf, "whole": wholes}
        ranks = load_ranks(
            folder, specs, NameMap({"leaf": source, **sources}), mesh, rules, threads=1
        )
    expected = np.zeros(padded, np.float32)
    expected[tuple(slice(n) for n in value.shape)] = value
    copies = mesh.num_ranks // math.prod(mesh.size(a) for a in layout)
    for coord, params in zip(mesh.coords(), ranks, strict=True):
        cut = tuple(
            slice(
                mesh.index(a, coord) * (n // mesh.size(a)),
                (mesh.index(a, coord) + 1) * (n // mesh.size(a)),
            )
            for n, a in zip(padded, layout, strict=True)
        )
        np.testing.assert_array_equal(params["leaf"].numpy(), expected[cut])
    assert sum(read) == value.nbytes + sum(x.nbytes for x in files.values())
    assert len({id(p["leaf"]) for p in ranks}) == mesh.num_ranks // copies


def test_alternatives_are_chosen_by_what_is_there() -> None:
    each = Stack(tuple(Stored(f"experts.{e}.weight", (3, 2)) for e in range(4)))
    source = Either((each, Stored("experts.packed", (4, 3, 2))))
    names = {s.name for _, s in pieces(each)}
    assert choose(source, names) is not source
    assert [s.name for _, s in pieces(choose(source, {"experts.packed"}))] == ["experts.packed"]
    assert {
        s.name for _, s in pieces(choose(source, names - {"experts.1.weight", "experts.2.weight"}))
    } == names
    with pytest.raises(ValueError, match=r"'experts\.0\.weight' and 'experts\.packed'"):
        choose(source, names | {"experts.packed"})


def test_a_slice_of_a_slice_is_a_part_of_the_part() -> None:
    once = Stored("w", ((4, 5), 8))[1:4, 2:, 3:7]
    twice = once[1:, 1:2]
    assert twice.taken == ((2, 4), (3, 4), (3, 7))
    assert (once.shape, twice.shape) == ((3, 3, 4), (2, 1, 4))
    assert twice.file_shape == (20, 8)


def test_wrong_sources_say_what_is_wrong() -> None:
    weight = Stored("w", ((4, 5), 8))
    with pytest.raises(ValueError, match=r"w: slice\(3, 6, None\) of dim 1, which has size 5"):
        weight[:, 3:6]
    with pytest.raises(ValueError, match="without a step"):
        weight[::2]
    with pytest.raises(ValueError, match=r"4 slices for the shape \(4, 5, 8\)"):
        weight[:, :, :, :]
    with pytest.raises(ValueError, match=r"'a' has \(2,\), 'b' has \(3,\)"):
        Stack((Stored("a", (2,)), Stored("b", (3,))))
    with pytest.raises(ValueError, match="at least one"):
        Either(())
