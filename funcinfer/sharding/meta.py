"""Meta tensors made quick: the shape of each result is worked out once.

An operation on meta tensors has no values to compute, but torch works out the shape, strides and
dtype of its result in Python, in up to some milliseconds. They follow from those of its arguments
alone, so `QuickMeta` keeps them: layers that are alike pay once, and so do traces that are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcinfer.tree import tree_leaves

# A key holds some hundred bytes; a forward has a few hundred different ones.
MOST_KEPT = 2**17
_kept: dict[Any, Any] = {}


class QuickMeta(TorchDispatchMode):
    """A `with` block in which results of operations on meta tensors are looked up where known.

    Views are tensors of their own here: there is no storage to share. Operations on other tensors
    run as ever.

    >>> with QuickMeta():
    ...     x = torch.ones(3, 1, device="meta") + torch.ones(1, 2, device="meta", dtype=torch.int32)
    >>> x.shape, x.dtype
    (torch.Size([3, 2]), torch.float32)
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """The result of `func`, looked up or computed."""
        kwargs = kwargs or {}
        try:
            key = (func, _describe(args), *((k, _describe(v)) for k, v in kwargs.items()))
        except _NotAbstract:
            return func(*args, **kwargs)
        out = _look_up(key, func, args, kwargs)
        self.note(func, args, kwargs, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Called with each operation on meta tensors; for classes that look at them."""


def quick(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`f(*args, **kwargs)` of meta tensors, trees of them and plain values, as one operation whose
    result is looked up where known. It must give new meta tensors.

    >>> quick(torch.softmax, torch.ones(2, 3, device="meta"), dim=-1).shape
    torch.Size([2, 3])
    """
    try:
        leaves = tuple(map(_describe, tree_leaves((args, kwargs))))
    except _NotAbstract:
        return f(*args, **kwargs)
    key = (f, tuple(map(type, args)), tuple(kwargs), leaves)
    return _look_up(key, f, args, kwargs)


def _look_up(key: Any, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if key in _kept:
        return _rebuild(_kept[key], args)
    out = f(*args, **kwargs)
    try:
        form = _form(out, args)
    except _NotAbstract:
        return out
    if len(_kept) >= MOST_KEPT:
        _kept.clear()
    _kept[key] = form
    return out


class _NotAbstract(Exception):
    """Something that is neither a meta tensor nor a plain value."""


class _Same:
    """The form of a result that is the first argument, written in place."""


def _describe(x: Any) -> Any:
    """A key of arguments: of meta tensors, what their results depend on. 1 is not 1.0 or True."""
    if isinstance(x, torch.Tensor):
        if not x.is_meta:
            raise _NotAbstract
        return x.shape, x.stride(), x.dtype
    if isinstance(x, list | tuple):
        return tuple(map(_describe, x))
    return type(x), x


def _form(out: Any, args: tuple[Any, ...]) -> Any:
    if args and out is args[0]:
        return _Same
    if isinstance(out, torch.Tensor) and out.is_meta:
        return out.shape, out.stride(), out.dtype
    if isinstance(out, list | tuple):
        return [_form(o, ()) for o in out]
    raise _NotAbstract


def _rebuild(form: Any, args: tuple[Any, ...]) -> Any:
    if form is _Same:
        return args[0]
    if isinstance(form, list):
        return [_rebuild(f, ()) for f in form]
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
