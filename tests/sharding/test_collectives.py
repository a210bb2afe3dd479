"""Collectives: the cases on threads, identities, and what is refused. See also `test_processes`."""

from functools import partial

import pytest
import torch

from funcinfer.sharding import (
    Mesh,
    P,
    Rules,
    ThreadRanks,
    all_gather,
    all_to_all,
    all_to_all_v,
    axis_index,
    axis_size,
    bind,
    current,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    reduce_to,
    reshard,
    shard_map,
    solo,
)
from tests.sharding import cases_trees  # noqa: F401  (adds its cases)
from tests.sharding.cases import CASES


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", CASES)
def test_on_threads(name, size):
    CASES[name](ThreadRanks, size)


X = torch.arange(6.0).view(2, 3)


def everything(x: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    """Each collective and move once, over axes that are None or of size 1."""
    a, b = rules["mlp"], rules["heads"]
    x = reshard(x, rules.spec("residual_tokens", None), rules.spec("tokens", None))
    x = reduce_to(x @ x.T @ x, a, P(None, None), rules.spec("residual_tokens", None))
    x = pmax(psum(x, a), b)
    x = psum_scatter(all_gather(x, b, dim=1), a, dim=0)
    x = ppermute(all_to_all(x, a, split=0, concat=1), b, [(0, 0)])
    return x * axis_size(a) + axis_index(b)


RULES = [Rules.none(), Rules(mlp="tp", heads=("dp", "tp"), residual_tokens="tp")]


@pytest.mark.parametrize("rules", RULES, ids=["none", "size-1"])
def test_axes_that_are_none_or_of_size_1_are_the_identity(rules):
    expected = X @ X.T @ X
    with bind(Mesh(dp=1, tp=1), solo()):
        torch.testing.assert_close(everything(X, rules=rules), expected)
        assert psum(X, rules["mlp"]) is X
        assert all_to_all_v(X, rules["mlp"], [2]) == (X, (2,))
    assert current() is None
    if rules == Rules.none():
        torch.testing.assert_close(everything(X, rules=rules), expected)


@pytest.mark.parametrize("rules", RULES, ids=["none", "size-1"])
def test_axes_that_are_none_or_of_size_1_compile_whole(rules):
    torch.compiler.reset()
    compiled = torch.compile(partial(everything, rules=rules), fullgraph=True, backend="aot_eager")
    with bind(Mesh(dp=1, tp=1), solo()):
        torch.testing.assert_close(compiled(X), X @ X.T @ X)


def test_gradients_flow_where_nothing_is_sent():
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(partial(everything, rules=Rules.none()), (x,))


REFUSED = [
    (lambda x: psum(x, "pt"), NameError, r"mesh axis 'pt' is not bound \(bound axes: dp, tp\)"),
    (lambda x: psum(x > 0, "tp"), ValueError, "psum over 'tp': can't add torch.bool; cast it"),
    (
        lambda x: psum_scatter(x.to(torch.float8_e5m2), "tp", dim=0),
        ValueError,
        "psum_scatter over 'tp': can't add torch.float8_e5m2; cast it",
    ),
    (
        lambda x: psum_scatter(x, "tp", dim=1),
        ValueError,
        r"dim 1 of shape \(2, 3\) is 3, which the 2 ranks of 'tp' do not divide .* pad it first",
    ),
    (
        lambda x: all_to_all(x, ("tp", "dp"), split=0, concat=1),
        ValueError,
        r"dim 0 of shape \(2, 3\) is 2, which the 4 ranks of \('tp', 'dp'\) do not divide",
    ),
    (lambda x: all_gather(x, "tp", dim=2), ValueError, r"no dim 2 in shape \(2, 3\)"),
    (lambda x: all_gather(x.sum(), "tp", dim=0), ValueError, r"no dim 0 in shape \(\)"),
    (lambda x: psum(x, ("tp", "tp")), ValueError, r"over \('tp', 'tp'\) names a mesh axis twice"),
    (
        lambda x: all_to_all_v(x, "tp", [1, 2]),
        ValueError,
        r"counts \(1, 2\) must be 2 numbers from 0 that add up to the 2 rows",
    ),
    (lambda x: all_to_all_v(x, "tp", [3, -1]), ValueError, "must be 2 numbers from 0"),
    (lambda x: all_to_all_v(x, "tp", [2]), ValueError, "must be 2 numbers from 0"),
    (
        lambda x: ppermute(x, "tp", [(0, 1), (0, 0)]),
        ValueError,
        r"ppermute over 'tp' of 2: .* each source from 0 to 1 at most once",
    ),
    (lambda x: ppermute(x, "tp", [(0, 1), (1, 1)]), ValueError, "each target from 0 to 1"),
    (lambda x: ppermute(x, "tp", [(0, 2)]), ValueError, "each target from 0 to 1"),
    (
        lambda x: psum(x.clone().requires_grad_(), "tp"),
        RuntimeError,
        "psum: the tensor requires grad, and no gradient rule is defined across ranks",
    ),
]


@pytest.mark.parametrize(("f", "error", "said"), REFUSED)
def test_refused(f, error, said):
    mapped = shard_map(f, Mesh(dp=2, tp=2), (P(None, None),), P(None, None))
    with pytest.raises(error, match=said) as caught:
        mapped(X)
    assert any(note.startswith("raised on rank ") for note in caught.value.__notes__)


def test_a_tensor_that_requires_grad_may_be_sent_without_grad_mode():
    x = torch.ones(2, requires_grad=True)
    f = shard_map(lambda x: psum(x, "tp"), Mesh(tp=2), (P("tp"),), P(None))
    with torch.no_grad():
        assert f(x).tolist() == [2.0]


def test_outside_of_any_mesh_an_axis_is_not_bound():
    with pytest.raises(NameError, match=r"'tp' is not bound \(no mesh is bound here\).*shard_map"):
        psum(X, "tp")
    with pytest.raises(NameError, match="'tp' is not bound"):
        axis_index("tp")


def test_bind_refuses_a_rank_that_the_mesh_has_not():
    class Second:
        rank = 1

    with (
        pytest.raises(ValueError, match=r"rank 1 is not one of the 1 ranks of Mesh\(tp=1\)"),
        bind(Mesh(tp=1), Second()),
    ):
        pass
