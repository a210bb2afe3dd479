"""Splitting, joining, donation and the errors of shard_map. `cases_trees` has what also runs on
processes.
"""

import pytest
import torch

from funcinfer.sharding import Mesh, P, ThreadRanks, axis_index, psum, shard, shard_map
from funcinfer.sharding.split_join import TOLERANCE
from funcinfer.tree import pytree, static
from tests.sharding import brute

TP = Mesh(tp=2)
GRID = Mesh(dp=2, one=1, tp=3)


def identity(mesh: Mesh, spec: P, **options):
    return shard_map(lambda x: x, mesh, (spec,), spec, **options)


def test_every_layout_is_cut_and_joined():
    x = torch.arange(12 * 6 * 6).view(12, 6, 6)
    for layout in brute.layouts(GRID.names, 3):
        spec = P(*layout)
        seen = ThreadRanks(GRID).split(x, spec)
        for rank, part in enumerate(seen):
            assert torch.equal(part, brute.cut(x, layout, GRID, rank)), f"{spec} on rank {rank}"
            assert part.is_contiguous()
            assert torch.equal(shard(x, spec, GRID, GRID.coords()[rank]), part)
        assert torch.equal(ThreadRanks(GRID).join(seen, spec), x), spec


@pytest.mark.parametrize("shape", [(), (0,), (0, 6), (6, 0), (1,)], ids=str)
def test_scalars_and_empty_tensors(shape):
    x = torch.ones(shape)
    spec = P(*("tp" if n == 0 else None for n in shape))
    out = identity(TP, spec)(x)
    assert out.shape == x.shape and torch.equal(out, x)


def test_whole_tensors_are_shared_and_donated_ones_are_copied():
    ranks = ThreadRanks(TP)
    pool = torch.zeros(4, 4)
    shared = ranks.split(pool, P(None, None))
    assert {x.data_ptr() for x in shared} == {pool.data_ptr()}
    for spec in (P(None, None), P("tp", None), P(None, "tp")):
        copies = ranks.split(pool, spec, copy=True)
        storages = {x.untyped_storage().data_ptr() for x in (pool, *copies)}
        assert len(storages) == 3, spec


def test_a_loop_that_keeps_its_ranks_never_copies_the_pool():
    ranks = ThreadRanks(TP)
    pools = ranks.split(torch.zeros(4, 4), P("tp", None), copy=True)
    before = [p.data_ptr() for p in pools]

    def step(pool, x):
        pool[0] += psum(x, "tp")
        return pool

    for _ in range(3):
        pools = ranks.run(step, pools, [torch.ones(4)] * 2)
    assert [p.data_ptr() for p in pools] == before
    assert ranks.join(pools, P("tp", None))[:, 0].tolist() == [6.0, 0.0, 6.0, 0.0]


@pytest.mark.parametrize("spec", [P(None, None), P("tp", None), P(None, "tp")], ids=repr)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_an_argument_that_is_written_must_be_donated(spec, mode):
    def f(x, state):
        state["cache"].add_(x.sum())
        return state

    specs = (P(None), {"cache": spec})
    cache = {"cache": torch.zeros(4, 4)}
    # A cut of columns that is made in inference mode is the rank's own, and does not count writes.
    if not (mode is torch.inference_mode and spec[1]):
        told = r"argument 1 \(cache\) was written in place, .* donate=\(1,\)"
        with mode(), pytest.raises(ValueError, match=told):
            shard_map(f, TP, specs, {"cache": spec})(torch.ones(3), cache)
        cache = {"cache": torch.zeros(4, 4)}
    with mode():
        out = shard_map(f, TP, specs, {"cache": spec}, donate=(1,))(torch.ones(3), cache)
    assert out["cache"].eq(3).all() and cache["cache"].eq(0).all()


def test_two_replicas_that_a_write_made_differ_are_caught():
    def f(cache):
        cache[axis_index("tp")] = 1.0  # each rank writes another row of what should be one cache
        return cache

    spec = P(None)
    with pytest.raises(ValueError, match="argument 0 was written in place"):
        shard_map(f, TP, (spec,), spec)(torch.zeros(2))
    with pytest.raises(
        ValueError,
        match=r"output: declared P\(None\), so ranks 0 \(tp=0\) and 1 \(tp=1\) must hold the same,"
        r" but 2 of 2 values differ, by up to 1 at \[0\] \(largest value 1\)\. A psum over 'tp' may"
        r" be missing, a replicated argument may be written in place, or the output is sharded",
    ):
        shard_map(f, TP, (spec,), spec, donate=(0,))(torch.zeros(2))
    out = shard_map(f, TP, (spec,), spec, donate=(0,), check=False)(torch.zeros(2))
    assert out.tolist() == [1.0, 0.0]


def test_the_ranks_and_the_axis_that_differ_are_named():
    f = shard_map(lambda x: {"y": [x.sum()]}, Mesh(dp=2, tp=2), (P(("dp", "tp")),), {"y": [P()]})
    with pytest.raises(
        ValueError, match=r"output\.y\.0: declared P\(\), so ranks 0 .* and 2 .*'dp'"
    ):
        f(torch.tensor([1.0, 1.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match=r"ranks 0 .* and 1 \(dp=0, tp=1\) .* psum over 'tp'"):
        f(torch.tensor([1.0, 2.0, 1.0, 1.0]))


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the replica check refuses these two."""
    ranks = ThreadRanks(TP)
    try:
        ranks.join([a, b], P(*(None for _ in a.shape)))
    except ValueError as error:
        assert "must hold the same" in str(error)
        return True
    return False


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_float_replicas_may_differ_by_rounding_alone(dtype):
    x = torch.tensor([1.0, -300.0, 0.0, torch.inf, torch.nan], dtype=torch.float64)
    bound = TOLERANCE[dtype]

    def moved(i: int, by: float) -> torch.Tensor:
        y = x.clone()
        y[i] += by
        return y.to(dtype)

    assert not differ(x.to(dtype), x.to(dtype))
    assert not differ(x.to(dtype), moved(1, 300 * bound / 2))
    assert differ(x.to(dtype), moved(1, 300 * bound * 4))
    assert differ(x.to(dtype), moved(4, 1.0).nan_to_num(0.0))
    assert differ(x.to(dtype), moved(3, -torch.inf))
    flipped = x.clone().to(dtype)
    flipped[3] = -torch.inf
    assert differ(x.to(dtype), flipped)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
)
def test_other_replicas_must_be_equal(dtype):
    x = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    y = torch.tensor([1.0, 0.0, 0.0]).to(dtype)
    assert not differ(x, x.clone()) and differ(x, y)


def test_large_integers_that_floats_can_not_tell_apart_differ():
    assert differ(torch.tensor([2**60]), torch.tensor([2**60 + 1]))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_replicas_of_any_shape_are_compared(shape):
    assert not differ(torch.ones(shape), torch.ones(shape))
    assert differ(torch.ones(shape), torch.zeros(shape)) == (torch.ones(shape).numel() > 0)


def test_the_place_and_size_of_a_difference_are_told():
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    a[0, 0], b[1, 2], b[0, 1] = 4.0, 0.5, -0.25
    with pytest.raises(
        ValueError, match=r"3 of 6 values differ, by up to 4 at \[0, 0\] \(largest value 4\)"
    ):
        ThreadRanks(TP).join([a, b], P(None, None))
    with pytest.raises(ValueError, match=r"1 of 1 values differ, by up to inf at \[\]"):
        ThreadRanks(TP).join([torch.tensor(1.0), torch.tensor(torch.nan)], P())


@pytree
class Pages:
    data: torch.Tensor
    size: int = static(default=16)


def test_pytree_dataclasses_keep_their_static_fields():
    spec = Pages(P("tp"), size=4)
    out = shard_map(lambda p: Pages(p.data * 2, p.size), TP, (spec,), spec)(
        Pages(torch.arange(4), size=4)
    )
    assert out.size == 4 and out.data.tolist() == [0, 2, 4, 6]
    with pytest.raises(ValueError, match=r"rank 0 .* and rank 1 .* differ in key order, container"):
        shard_map(lambda x: Pages(x, size=axis_index("tp")), TP, (P(None),), Pages(P(None)))(
            torch.ones(2)
        )


X = torch.arange(6).view(2, 3)
REFUSED = [
    ((P(None, None), P(None)), P(), (X,), "2 in_specs for 1 arguments; give one each"),
    (
        (P("tp"),),
        P(),
        (X,),
        r"argument 0 is a tensor of shape \(2, 3\): its spec is a P of 2 entri",
    ),
    ((("tp", None),), P(), (X,), r"the tree of specs of argument 0 has 2 leaves where 1"),
    (
        (None,),
        P(),
        (X,),
        "argument 0 is a tensor .* its spec is a P of 2",
    ),
    ((P(),), P(), (3,), r"argument 0 is a int, not a tensor: its spec is None, not P\(\)"),
    (({"a": P(None, None)},), P(), ({"b": X},), "missing 'b', not expected 'a'"),
    (
        (P(None, "tp"),),
        P(),
        (X,),
        r"argument 0: dim 1 of shape \(2, 3\) is 3, which 'tp' of",
    ),
    (({"w": P("pp", None)},), P(), ({"w": X},), r"argument 0\.w: layout .* has no axis 'pp'"),
    (
        (P(None, None),),
        P(None),
        (X,),
        r"output is a tensor of shape \(2, 3\): its spec is a P of 2",
    ),
    ((P(None, None),), None, (X,), "output is a tensor of shape .* not None"),
    (
        (P(None, None),),
        (P(), P()),
        (X,),
        "the tree of specs of output has 2 leaves where 1 are need",
    ),
]


@pytest.mark.parametrize(("in_specs", "out_specs", "args", "said"), REFUSED)
def test_specs_that_do_not_fit_are_refused(in_specs, out_specs, args, said):
    f = shard_map(lambda x, *_: x, TP, in_specs, out_specs)
    with pytest.raises(ValueError, match=said):
        f(*args)


def test_mistakes_in_the_call_are_refused_at_once():
    for in_specs in (P("tp"), None, {"x": P("tp")}):
        with pytest.raises(ValueError, match="in_specs is a tuple with one entry an argument"):
            shard_map(lambda x: x, TP, in_specs, P("tp"))
    with pytest.raises(ValueError, match=r"donate=\(1,\) must be indices of the 1 arguments"):
        shard_map(lambda x: x, TP, (P("tp"),), P("tp"), donate=(1,))
    with pytest.raises(
        ValueError, match=r"ranks of Mesh\(tp=2\) can't run a function over Mesh\(t"
    ):
        shard_map(lambda x: x, Mesh(tp=3), (P("tp"),), P("tp"), ranks=ThreadRanks(TP))


def test_outputs_do_not_depend_on_the_order_of_keys_in_specs():
    f = shard_map(
        lambda t: {"b": t["a"], "a": t["b"]},
        TP,
        ({"b": P("tp"), "a": P(None)},),
        {"a": P("tp"), "b": P(None)},
    )
    out = f({"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 3.0])})
    assert list(out) == ["b", "a"] and out["a"].tolist() == [2.0, 3.0]


def test_gradients_flow_through_a_function_without_collectives():
    x = torch.arange(4.0, requires_grad=True)
    w = torch.tensor([2.0], requires_grad=True)
    f = shard_map(lambda x, w: x * x * w, TP, (P("tp"), P(None)), P("tp"))
    f(x, w).sum().backward()
    assert x.grad is not None and w.grad is not None
    assert x.grad.tolist() == [0.0, 4.0, 8.0, 12.0] and w.grad.tolist() == [14.0]
