"""Recording and quick meta tensors: shapes are those of the real thing, nothing is kept that should
not be.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.sharding import (
    Mesh,
    Rules,
    ThreadRanks,
    all_gather,
    all_to_all,
    all_to_all_v,
    pmax,
    ppermute,
    psum,
    psum_scatter,
)
from funcinfer.sharding.meta import QuickMeta, quick
from funcinfer.sharding.record import abstract_local, record, stage_coords
from funcinfer.spec import Member, ParamSpec

MESH = Mesh(a=2, b=3)
CALLS = {
    "psum": lambda x, axis, n: psum(x, axis),
    "pmax": lambda x, axis, n: pmax(x, axis),
    "all_gather": lambda x, axis, n: all_gather(x, axis, dim=1),
    "psum_scatter": lambda x, axis, n: psum_scatter(x, axis, dim=0),
    "all_to_all": lambda x, axis, n: all_to_all(x, axis, split=0, concat=2),
    "all_to_all back": lambda x, axis, n: all_to_all(x, axis, split=-3, concat=-3),
    "all_to_all_v": lambda x, axis, n: all_to_all_v(x, axis, [12 // n] * n)[0],
    "ppermute": lambda x, axis, n: ppermute(x, axis, [(0, n - 1)]),
}


@pytest.mark.parametrize("axis", ["a", "b", ("b", "a")])
@pytest.mark.parametrize("call", CALLS)
def test_results_on_paper_have_the_shapes_of_real_ones(call: str, axis) -> None:
    f, n = CALLS[call], MESH.size(axis)
    ranks = ThreadRanks(MESH)
    x = torch.randn(12, 5, 7)
    real = ranks.run(lambda x: f(x, axis, n), [x] * MESH.num_ranks)
    for coord, wanted in zip(MESH.coords(), real, strict=True):
        with record(MESH, coord) as found:
            got = f(x.to("meta"), axis, n)
        assert (got.shape, got.dtype, got.device.type) == (wanted.shape, wanted.dtype, "meta")
        assert found[-1].shape == (12, 5, 7)
        assert found[-1].nbytes == x.nbytes
        assert found[-1].op == call.split()[0]


def test_only_what_moves_is_recorded() -> None:
    with record(Mesh(a=1, b=2)) as found:
        x = psum(torch.empty(3, device="meta"), None)
        x = psum(x, "a")
        psum(x, ("a", "b"))
    assert [c.axes for c in found] == [("a", "b")]


def test_what_collectives_refuse_is_refused_on_paper() -> None:
    x = torch.empty(3, 2, device="meta")
    with record(Mesh(a=2)), pytest.raises(ValueError, match="do not divide evenly"):
        psum_scatter(x, "a", dim=0)
    with record(Mesh(a=2)), pytest.raises(NameError, match="'b' is not bound"):
        psum(x, "b")


def test_the_environment_is_left_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="inside"), record(Mesh(a=2)):
        raise RuntimeError("inside")
    with pytest.raises(NameError, match="no mesh is bound"):
        psum(torch.ones(1), "a")


def test_a_rank_holds_its_stage_only() -> None:
    specs = {
        "layers": [
            {"w": ParamSpec((6, 4), ("heads", None), member=Member("layers", (i,), 3))}
            for i in range(3)
        ]
    }
    mesh, rules = Mesh(pp=2, tp=2), Rules(layers="pp", heads="tp")
    coords = stage_coords(rules, mesh)
    assert coords == [{"pp": 0, "tp": 0}, {"pp": 1, "tp": 0}]
    held = [[x["w"] for x in abstract_local(specs, rules, mesh, c)["layers"]] for c in coords]
    assert [[x is not None for x in stage] for stage in held] == [
        [True, True, False],
        [False, False, True],
    ]
    assert held[0][0].shape == (3, 4)


def test_a_part_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers\.w: dim 0 .* is 5"):
        abstract_local({"layers": {"w": ParamSpec((5,), ("mlp",))}}, Rules(mlp="a"), Mesh(a=2))


OPS = (
    lambda x, y: x + y,
    lambda x, y: x * 2,
    lambda x, y: x * 2.0,
    lambda x, y: (x > y).sum(0),
    lambda x, y: x.T @ y,
    lambda x, y: torch.einsum("ab,cb->ac", x, y),
    lambda x, y: torch.cat([x, y], 1)[:, ::2],
    lambda x, y: x.to(torch.float64).softmax(-1),
    lambda x, y: x.sort(dim=-1, descending=True, stable=True).indices,
    lambda x, y: x.topk(1, -1).values + y.amax(),
    lambda x, y: x.unflatten(0, (1, -1)).transpose(1, 2).flatten(1),
    lambda x, y: x.new_zeros(4, 2).index_copy(0, x.new_zeros(3, dtype=torch.int64), x),
)


@given(st.data())
def test_quick_results_are_the_slow_ones(data: st.DataObject) -> None:
    """Shape, strides and dtype, the first time and again."""
    f = data.draw(st.sampled_from(OPS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
    other = data.draw(st.sampled_from([dtype, torch.float32]))
    x, y = torch.ones(3, 2, dtype=dtype, device="meta"), torch.ones(3, 2, device="meta")
    y = y.to(other)
    try:
        wanted = f(x, y)
    except RuntimeError:  # dtypes that do not multiply
        with QuickMeta(), pytest.raises(RuntimeError):
            f(x, y)
        return
    for _ in range(2):
        with QuickMeta():
            got = f(x, y)
        assert (got.shape, got.stride(), got.dtype) == (
            wanted.shape,
            wanted.stride(),
            wanted.dtype,
        )


def test_arguments_that_look_alike_are_told_apart() -> None:
    x = torch.ones(3, dtype=torch.int32, device="meta")
    with QuickMeta():
        assert [(x * by).dtype for by in (1, 1.0, True, 1, 1.0)] == [
            torch.int32,
            torch.float32,
            torch.int32,
            torch.int32,
            torch.float32,
        ]


def test_writes_in_place_give_the_same_tensor() -> None:
    with QuickMeta():
        for _ in range(2):
            x = torch.ones(3, device="meta")
            assert x.add_(1) is x


def test_tensors_with_values_are_computed() -> None:
    with QuickMeta():
        for _ in range(2):
            x = torch.arange(3)
            x += 1
            assert (x + x).tolist() == [2, 4, 6]
            assert quick(torch.add, x, x).tolist() == [2, 4, 6]
            assert torch.ones(2, device="meta").is_meta


def test_a_function_of_trees_is_looked_up_as_one_operation() -> None:
    calls = []

    def f(tree: dict, *, by: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        calls.append(by)
        return tree["a"] * by, [tree["b"].sum(0)]

    for shape in ((2, 3), (2, 3), (4, 3)):
        tree = {"a": torch.ones(shape, device="meta"), "b": torch.ones(5, 6, device="meta")}
        first, (second,) = quick(f, tree, by=2)
        assert (first.shape, second.shape) == (shape, (6,))
    assert calls == [2, 2]
