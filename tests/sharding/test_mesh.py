"""Meshes, layouts and the algebra of axes, against enumeration."""

import copy
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.sharding import Mesh, P, both, drop, extends, join_axes, longer, names
from funcinfer.sharding.mesh import axis_of, show_ranks
from tests.sharding import brute

MESHES = [
    Mesh(),
    Mesh(tp=3),
    Mesh(dp=2, tp=3),
    Mesh(dp=1, tp=2),
    Mesh(a=2, one=1, b=3, c=2),
]
AXES = st.lists(st.sampled_from("abcde"), unique=True, max_size=5).map(axis_of)


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_ranks_count_with_the_last_axis_fastest(mesh):
    assert mesh.coords() == brute.coordinates(mesh)
    assert mesh.num_ranks == len(mesh.coords())
    assert [mesh.rank(c) for c in mesh.coords()] == list(range(mesh.num_ranks))
    for rank, coord in enumerate(mesh.coords()):
        for axes in brute.products(mesh):
            assert mesh.group(axes, coord) == tuple(brute.group(mesh, axes, rank))
            assert mesh.index(axes, coord) == brute.index(mesh, axes, rank)
            assert mesh.size(axes) == len(brute.group(mesh, axes, rank))
        assert mesh.group(None, coord) == (rank,) and mesh.index(None, coord) == 0
    assert mesh.size(None) == 1


def test_a_mesh_is_a_value():
    assert Mesh(dp=2, tp=2) == Mesh(dp=2, tp=2) != Mesh(tp=2, dp=2)
    assert len({Mesh(tp=2), Mesh(tp=2), Mesh(tp=3)}) == 2
    assert repr(Mesh(dp=2, tp=4)) == "Mesh(dp=2, tp=4)" == repr(eval("Mesh(dp=2, tp=4)"))
    assert pickle.loads(pickle.dumps(Mesh(tp=2))) == Mesh(tp=2)


def test_a_mesh_reads_text():
    assert Mesh.parse("dp=2, tp=4") == Mesh(dp=2, tp=4)
    assert Mesh.parse("") == Mesh()
    for text in ("tp", "tp=", "=2", "tp=two", "tp=2,tp=2", "2=tp", "tp=-1", "tp=²", "tp=2;dp=2"):
        with pytest.raises(ValueError, match=r"can't read .*; write axis=size, as dp=2,tp=4"):
            Mesh.parse(text)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None])
def test_sizes_that_are_not_whole_numbers_from_1_are_refused(size):
    with pytest.raises(ValueError, match=r"mesh axis tp=.*: sizes are whole numbers from 1"):
        Mesh(tp=size)


def test_an_unknown_axis_is_refused_with_a_suggestion():
    with pytest.raises(
        ValueError, match=r"Mesh\(data=2, tp=2\) has no axis 'date'; did you mean 'data'\? Known:"
    ):
        Mesh(data=2, tp=2).size(("tp", "date"))


def test_local_shapes():
    mesh = Mesh(dp=2, tp=3)
    assert mesh.local_shape((12, 5, 6), P(("tp", "dp"), None, None)) == (2, 5, 6)
    assert mesh.local_shape((), P()) == ()
    assert mesh.local_shape((0, 4), P("tp", "dp")) == (0, 2)
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.wq: dim 1 of shape \(4, 8\) is 8, which 'tp' of Mesh\(dp=2, tp=3\) does"
        r" not divide into 3 even parts \(layout P\('dp', 'tp'\)\); make it a multiple of 3",
    ):
        mesh.local_shape((4, 8), P("dp", "tp"), "layers.0.wq")
    with pytest.raises(ValueError, match=r"wq: shape \(4, 8\) has 2 dims, P\('dp'\) has 1"):
        mesh.local_shape((4, 8), P("dp"), "wq")
    with pytest.raises(
        ValueError, match=r"wq: layout P\('pp', None\) of shape \(4, 8\): Mesh.* has no axis 'pp'"
    ):
        mesh.local_shape((4, 8), P("pp", None), "wq")


def test_a_layout_is_a_canonical_tuple():
    assert P("dp", None, ("ep", "tp")) == ("dp", None, ("ep", "tp"))
    assert P(("tp",), (), ["a", "b"]) == P("tp", None, ("a", "b"))
    assert repr(P("dp", None, ("a", "b"))) == "P('dp', None, ('a', 'b'))"
    assert P("dp", None, ("ep", "tp")).axes == ("dp", "ep", "tp")
    assert {P("tp"): 1}[P("tp")] == 1
    for same in (copy.deepcopy(P("a", None)), pickle.loads(pickle.dumps(P("a", None)))):
        assert type(same) is P and same == P("a", None)


@pytest.mark.parametrize("entries", [("tp", "tp"), (("dp", "tp"), None, "tp"), (("tp", "tp"),)])
def test_one_mesh_axis_on_two_dims_is_refused(entries):
    with pytest.raises(ValueError, match=r"P\(.*\): mesh axis 'tp' is used twice; each may shard"):
        P(*entries)


@pytest.mark.parametrize("entry", [0, True, 1.5, ("tp", 0), {"tp"}])
def test_an_entry_that_is_not_an_axis_is_refused(entry):
    with pytest.raises(
        ValueError, match=r"P entry .*: write a mesh axis, a tuple of mesh axes, or"
    ):
        P("dp", entry)


@given(AXES, AXES)
def test_the_algebra_of_axes(a, b):
    left, right = names(a), names(b)
    assert axis_of(left) == a
    assert names(drop(a, b)) == tuple(x for x in left if x not in right)
    assert names(both(a, b)) == tuple(x for x in left if x in right)
    assert names(join_axes(a, b)) == left + tuple(x for x in right if x not in left)
    prefixes = [left[:n] for n in range(len(left) + 1)]
    assert extends(a, b) == (right in prefixes)
    if extends(a, b) or extends(b, a):
        assert names(longer(a, b)) == max(left, right, key=len)
    else:
        with pytest.raises(ValueError, match="are not on one chain: one must extend the other"):
            longer(a, b)


def test_ranks_are_shown_with_their_coordinates():
    mesh = Mesh(dp=2, tp=3)
    assert show_ranks(mesh, [4]) == "rank 4 (dp=1, tp=1)"
    assert show_ranks(mesh, [0, 5]) == "ranks 0 (dp=0, tp=0) and 5 (dp=1, tp=2)"
    shown = ", ".join(
        f"{r} (dp={d}, tp={t})"
        for r, (d, t) in zip(range(4), itertools.product(range(2), range(3)), strict=False)
    )
    assert show_ranks(mesh, range(6)) == f"ranks {shown} and 2 more"
