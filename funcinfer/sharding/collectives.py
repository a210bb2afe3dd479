"""Collectives over named mesh axes, with JAX's names. `None` and axes of size 1 are the identity.

    psum            A[I]{U_X}  -> A[I]        pmax            the same with a maximum for the sum
    psum_scatter    A[I]{U_X}  -> A[I_X]      all_to_all      A[I_X, J] -> A[I, J_X]
    all_gather      A[I_X]     -> A[I]        ppermute        sends whole tensors

`axis` is a name, a tuple of names (major first) or None. Each call gives a new tensor; no input is
written, and a caller may write to it once the call has returned. Inference only: a tensor that
requires grad raises, because no gradient rule is defined across ranks.
"""

from collections.abc import Sequence

import torch

from funcinfer.sharding.comm import Comm, Group, require_env
from funcinfer.sharding.mesh import Axis, names


def axis_index(axis: Axis) -> int:
    """This rank's index along `axis`, major first; 0 for None."""
    if not names(axis):
        return 0
    env = require_env(axis)
    return env.mesh.index(axis, env.coord)


def axis_size(axis: Axis) -> int:
    """The number of ranks along `axis`; 1 for None. NameError for an axis that is not bound."""
    return require_env(axis).mesh.size(axis) if names(axis) else 1


def psum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over `axis`, on every rank of it. ValueError for bool and 8-bit float tensors.

    >>> from funcinfer.sharding import Mesh, P, shard_map
    >>> f = shard_map(lambda x: psum(x, "tp"), Mesh(tp=2), (P("tp"),), P(None))
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([3.])
    """
    if axis_size(axis) == 1:
        return x
    _reducible(x, axis, "psum")
    return _comm(x, axis, "psum").psum(x, _group(axis))


def pmax(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The elementwise maximum over `axis`, on every rank of it."""
    if axis_size(axis) == 1:
        return x
    return _comm(x, axis, "pmax").pmax(x, _group(axis))


def all_gather(x: torch.Tensor, axis: Axis, *, dim: int) -> torch.Tensor:
    """The parts of all ranks of `axis` joined along `dim`, in index order."""
    if axis_size(axis) == 1:
        return x
    dim = _dim(x, dim, "all_gather")
    return _comm(x, axis, "all_gather").all_gather(x, _group(axis), dim=dim)


def psum_scatter(x: torch.Tensor, axis: Axis, *, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum over `axis`. ValueError where `dim` does not divide
    evenly.
    """
    if axis_size(axis) == 1:
        return x
    dim = _dim(x, dim, "psum_scatter")
    _reducible(x, axis, "psum_scatter")
    _divides(x, axis, dim, "psum_scatter")
    return _comm(x, axis, "psum_scatter").psum_scatter(x, _group(axis), dim=dim)


def all_to_all(x: torch.Tensor, axis: Axis, *, split: int, concat: int) -> torch.Tensor:
    """Send part i along `split` to rank i of `axis`; join what comes along `concat`, in index
    order.
    """
    if axis_size(axis) == 1:
        return x
    split, concat = _dim(x, split, "all_to_all"), _dim(x, concat, "all_to_all")
    _divides(x, axis, split, "all_to_all")
    return _comm(x, axis, "all_to_all").all_to_all(x, _group(axis), split=split, concat=concat)


def all_to_all_v(
    x: torch.Tensor, axis: Axis, counts: Sequence[int]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Send `counts[i]` rows of dim 0 (grouped by target, in order) to rank i; the rows that come,
    and their counts.

    The counts are host integers and both sides must agree, so this waits for the host: the eager
    prefill option. ValueError where the counts do not add up to the rows of `x`.
    """
    _dim(x, 0, "all_to_all_v")
    if len(counts) != axis_size(axis) or min(counts) < 0 or sum(counts) != len(x):
        raise ValueError(
            f"all_to_all_v over {axis!r}: counts {tuple(counts)} must be {axis_size(axis)} numbers"
            f" from 0 that add up to the {len(x)} rows"
        )
    if axis_size(axis) == 1:
        return x, (len(x),)
    return _comm(x, axis, "all_to_all_v").all_to_all_v(x, _group(axis), counts)


def ppermute(x: torch.Tensor, axis: Axis, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send whole tensors along (source, target) pairs of indices; a rank that gets nothing holds
    zeros.

    ValueError where an index is out of range, or is source or target twice.
    """
    size, perm = axis_size(axis), tuple((source, target) for source, target in perm)
    for role, ends in (("source", [s for s, _ in perm]), ("target", [t for _, t in perm])):
        if len(set(ends)) != len(ends) or not all(0 <= e < size for e in ends):
            raise ValueError(
                f"ppermute over {axis!r} of {size}: perm {perm} must name each {role}"
                f" from 0 to {size - 1} at most once"
            )
    if size == 1:
        return x if perm else torch.zeros_like(x)
    return _comm(x, axis, "ppermute").ppermute(x, _group(axis), perm)


def _group(axis: Axis) -> Group:
    return require_env(axis).group(axis)


def _comm(x: torch.Tensor, axis: Axis, what: str) -> Comm:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            f"{what}: the tensor requires grad, and no gradient rule is defined across ranks;"
            f" differentiate the one-device function, or call under torch.no_grad()"
        )
    return require_env(axis).comm


def _reducible(x: torch.Tensor, axis: Axis, what: str) -> None:
    if x.dtype is torch.bool or (x.is_floating_point() and x.dtype.itemsize == 1):
        raise ValueError(f"{what} over {axis!r}: can't add {x.dtype}; cast it to a wider dtype")


def _dim(x: torch.Tensor, dim: int, what: str) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{what}: there is no dim {dim} in shape {tuple(x.shape)}")
    return dim % x.ndim


def _divides(x: torch.Tensor, axis: Axis, dim: int, what: str) -> None:
    if x.shape[dim] % axis_size(axis):
        raise ValueError(
            f"{what}: dim {dim} of shape {tuple(x.shape)} is {x.shape[dim]}, which the"
            f" {axis_size(axis)} ranks of {axis!r} do not divide evenly; pad it first"
        )
