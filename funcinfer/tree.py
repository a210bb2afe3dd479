"""Pytrees: nested dicts, lists, tuples and `@pytree` dataclasses, and the paths of their leaves.

This is the only file that imports torch's pytree, which is private in torch 2.11 to 2.14. A leaf is
whatever is not a registered container: tensors, `ParamSpec`, `P`, numbers and None. A path joins
keys with dots: `layers.3.attn.wq`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch.utils import _pytree
from typing_extensions import dataclass_transform

T = TypeVar("T")
Leaf = Callable[[Any], bool]


def static(**options: Any) -> Any:
    """A dataclass field that is part of a pytree's structure and not one of its leaves.

    >>> @pytree
    ... class Pages:
    ...     data: object
    ...     size: int = static(default=16)
    >>> tree_map(lambda x: x + 1, Pages(1, size=4))
    Pages(data=2, size=4)
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields, but for the `static` ones, are children of a
    pytree.

    torch's own `register_dataclass` loses the values of fields it is told to drop, so static fields
    travel in the node's context here and take part in the comparison of two structures.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(node, n) for n in children], tuple(getattr(node, n) for n in statics)

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, context = flatten(node)
        return [(_pytree.GetAttrKey(n), v) for n, v in zip(children, values, strict=True)], context

    def unflatten(values: Iterable[Any], context: tuple[Any, ...]) -> Any:
        fields_by_name = dict(zip(children, values, strict=True))
        return cls(**fields_by_name, **dict(zip(statics, context, strict=True)))

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def tree_flatten(tree: Any, is_leaf: Leaf | None = None) -> tuple[list[Any], Any]:
    """The leaves of `tree` in order, and the structure that `tree_unflatten` takes."""
    return _pytree.tree_flatten(tree, is_leaf=is_leaf)


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """The tree of `structure` over `leaves`: the inverse of `tree_flatten`."""
    return _pytree.tree_unflatten(leaves, structure)


def tree_leaves(tree: Any, is_leaf: Leaf | None = None) -> list[Any]:
    """The leaves of `tree`, in order; dict entries in the order they were put in."""
    return _pytree.tree_leaves(tree, is_leaf=is_leaf)


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Leaf | None = None) -> Any:
    """`f(leaf, *others)` over the leaves of `tree` and of trees of the same structure.

    >>> tree_map(lambda a, b: a + b, {"x": 1, "y": [2]}, {"x": 10, "y": [20]})
    {'x': 11, 'y': [22]}
    """
    return _pytree.tree_map(f, tree, *rest, is_leaf=is_leaf)


def leaves_with_path(tree: Any, is_leaf: Leaf | None = None) -> list[tuple[str, Any]]:
    """Each leaf with its path.

    ValueError where two leaves have the same, as the key "a.b" and the key "b" inside of "a".

    >>> leaves_with_path({"layers": [{"wq": 1}, {"wq": 2}]})
    [('layers.0.wq', 1), ('layers.1.wq', 2)]
    """
    pairs, _ = _pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    found = [(".".join(_key(k) for k in path), leaf) for path, leaf in pairs]
    if len(dict(found)) < len(found):
        paths = [path for path, _ in found]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(
            f"two leaves have the path {twice!r}: rename a key that has a dot or number"
        )
    return found


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Leaf | None = None) -> Any:
    """`f(path, leaf, *others)` over the leaves of `tree`; `rest` are matched to it leaf by leaf, by
    path.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": 1, "b": [2]})
    {'a': 'a=1', 'b': ['b.0=2']}
    """
    paths = [p for p, _ in leaves_with_path(tree, is_leaf)]
    leaves, structure = tree_flatten(tree, is_leaf)
    others = [align(r, paths, is_leaf=is_leaf) for r in rest]
    return tree_unflatten([f(*row) for row in zip(paths, leaves, *others, strict=True)], structure)


def align(
    tree: Any, paths: list[str], *, is_leaf: Leaf | None = None, what: str = "tree"
) -> list[Any]:
    """The leaves of `tree` in the order of `paths`; ValueError naming paths that are missing or too
    many.
    """
    found = dict(leaves_with_path(tree, is_leaf))
    missing = [p for p in paths if p not in found]
    wanted = set(paths)
    extra = [p for p in found if p not in wanted]
    if missing or extra:
        raise ValueError(
            f"{what} has {len(found)} leaves where {len(paths)} are needed:"
            f" missing {_few(missing)}, not expected {_few(extra)}"
        )
    return [found[p] for p in paths]


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _few(paths: list[str]) -> str:
    shown = ", ".join(repr(p) for p in paths[:4]) or "none"
    return shown + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
