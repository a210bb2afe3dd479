"""Pytrees: order, paths, alignment by path, and dataclasses with static fields."""

import pickle
from collections import OrderedDict
from dataclasses import FrozenInstanceError
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.sharding import P
from funcinfer.spec import ParamSpec, is_spec
from funcinfer.tree import (
    align,
    leaves_with_path,
    map_with_path,
    pytree,
    static,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)


@pytree
class Cache:
    k: object
    v: object = None
    page: int = static(default=16)


class Pair(NamedTuple):
    a: object
    b: object


KEYS = st.text("abc", min_size=1, max_size=2)
TREES = st.recursive(
    st.integers(0, 99),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Cache, inner, inner, st.integers(1, 3))
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


def walk(tree: object, path: str = "") -> list[tuple[str, object]]:
    """The leaves and their paths by plain recursion."""
    if isinstance(tree, Cache):
        items = [("k", tree.k), ("v", tree.v)]
    elif isinstance(tree, Pair):
        items = [("a", tree.a), ("b", tree.b)]
    elif isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return [(path, tree)]
    return [pair for key, x in items for pair in walk(x, f"{path}.{key}" if path else str(key))]


@given(TREES)
def test_leaves_come_in_order_with_their_paths(tree):
    assert leaves_with_path(tree) == walk(tree)
    assert tree_leaves(tree) == [leaf for _, leaf in walk(tree)]
    leaves, structure = tree_flatten(tree)
    assert tree_unflatten(leaves, structure) == tree


@given(TREES)
def test_maps_keep_the_structure(tree):
    assert tree_map(lambda x: x, tree) == tree
    assert leaves_with_path(tree_map(lambda x: x + 1, tree)) == [(p, x + 1) for p, x in walk(tree)]
    told = map_with_path(lambda path, x, y: (path, x - y), tree, tree)
    pairs = leaves_with_path(told, is_leaf=lambda x: isinstance(x, tuple) and x[1:] == (0,))
    assert pairs == [(path, (path, 0)) for path, _ in walk(tree)]


def test_what_is_a_leaf():
    spec, layout = ParamSpec((2,), (None,)), P("tp")
    tree = {"none": None, "spec": spec, "layout": layout, "size": torch.Size([2]), "text": "ab"}
    assert [path for path, _ in leaves_with_path(tree)][:3] == ["none", "spec", "layout"]
    assert tree_leaves([spec, [spec]], is_leaf=is_spec) == [spec, spec]
    assert tree_leaves([]) == [] and tree_leaves({}) == [] and tree_leaves(3) == [3]


def test_dict_entries_keep_their_order():
    assert list(tree_map(lambda x: x, {"b": 1, "a": 2})) == ["b", "a"]
    assert leaves_with_path(OrderedDict(b=1, a=2)) == [("b", 1), ("a", 2)]


def test_trees_are_aligned_by_path_and_not_by_order():
    assert align({"b": [1, 2], "a": 3}, ["a", "b.1", "b.0"]) == [3, 2, 1]
    assert map_with_path(lambda p, x, y: x + y, {"a": 1, "b": 2}, {"b": 20, "a": 10}) == {
        "a": 11,
        "b": 22,
    }
    with pytest.raises(
        ValueError,
        match=r"the specs has 2 leaves where 7 are needed: missing 'm0', 'm1', 'm2', 'm3' and 2"
        r" more, not expected 'b'",
    ):
        align({"a": 1, "b": 2}, ["a", *(f"m{i}" for i in range(6))], what="the specs")


def test_two_leaves_with_one_path_are_refused():
    for tree in ({"a.b": 1, "a": {"b": 2}}, {1: 0, "1": 0}):
        with pytest.raises(ValueError, match=r"two leaves have the path '(a\.b|1)': rename"):
            leaves_with_path(tree)
        with pytest.raises(ValueError, match="two leaves have the path"):
            map_with_path(lambda path, x: x, tree)


def test_a_pytree_is_a_frozen_dataclass():
    cache = Cache(torch.ones(2), page=4)
    with pytest.raises(FrozenInstanceError):
        cache.page = 8
    doubled = tree_map(lambda x: None if x is None else x * 2, cache)
    assert isinstance(doubled, Cache) and doubled.page == 4 and doubled.k.tolist() == [2.0, 2.0]
    assert Cache(1).page == 16 and Cache(1, 2, 3) == Cache(1, 2, page=3)
    assert pickle.loads(pickle.dumps(Cache(1, page=3))) == Cache(1, page=3)


def test_static_fields_are_structure():
    same = tree_flatten(Cache(1, 2, page=4))[1]
    assert same == tree_flatten(Cache(5, 6, page=4))[1] != tree_flatten(Cache(1, 2, page=8))[1]
    with pytest.raises(ValueError):
        tree_map(lambda a, b: a, Cache(1, 2, page=4), Cache(1, 2, page=8))


def test_a_class_may_be_defined_again():
    """A notebook cell that is run twice."""
    made = []
    for _ in range(2):

        @pytree
        class Again:
            x: int

        made.append(Again)
    for cls in made:
        assert tree_map(lambda x: x + 1, cls(1)) == cls(2)


def test_dataclasses_go_through_compiled_functions():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda c: Cache(c.k + c.page, c.v, page=c.page), fullgraph=True, backend="eager"
    )
    out = compiled(Cache(torch.ones(2), torch.zeros(1), page=4))
    assert out.k.tolist() == [5.0, 5.0] and out.page == 4
