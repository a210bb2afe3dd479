"""Named sets of rules, and the preset that a mesh's axis names ask for.

Each preset is a function of a model's KV-head count (None where the cache has no KV heads, as MLA)
and sizes; it gives the mesh and the rules. They are ordinary `Rules`: change one with
`rules.replace(...)`.
"""

import math

from funcinfer.sharding.mesh import Axis, Mesh, join_axes
from funcinfer.sharding.rules import Rules


def single() -> tuple[Mesh, Rules]:
    """One device, nothing sharded."""
    return Mesh(), Rules.none()


def tp(num_kv_heads: int | None, size: int, *, dp: int = 1, sp: bool = False) -> tuple[Mesh, Rules]:
    """Tensor parallelism over `size` ranks, times `dp` data-parallel groups; `sp` deals the
    residual stream's tokens.

    With fewer KV heads than `size`, `tp` counts KV-head shards and `rep` their copies. ValueError
    where `size` and the number of KV heads do not divide one another.

    >>> tp(2, 4)[0]
    Mesh(tp=2, rep=2)
    """
    return for_mesh(num_kv_heads, Mesh(**({"dp": dp} if dp > 1 else {}), tp=size), sp=sp)


def for_mesh(num_kv_heads: int | None, mesh: Mesh, *, sp: bool = False) -> tuple[Mesh, Rules]:
    """The preset that the axis names of `mesh` ask for: `dp` deals requests; `tp` (with `rep`)
    shards heads, MLPs and vocabulary.

    A `tp` larger than the number of KV heads becomes `tp` x `rep`. ValueError for an axis name
    without a meaning here.
    """
    known = ("dp", "tp", "rep")
    for name in mesh.names:
        if name not in known:
            raise ValueError(
                f"no preset for axis {name!r} of {mesh!r}: presets know {', '.join(known)};"
                f" give rules=Rules(...)"
            )
    mesh = split_kv_heads(num_kv_heads, mesh)
    data: Axis = "dp" if "dp" in mesh.names else None
    kv: Axis = "tp" if "tp" in mesh.names else None
    heads = join_axes(kv, "rep" if "rep" in mesh.names else None)
    return mesh, Rules(
        **data_parallel(data),
        **tensor_parallel(heads, None if num_kv_heads is None else kv),
        **({"residual_tokens": join_axes(data, heads)} if sp else {"residual_tokens": data}),
    )


def data_parallel(axis: Axis) -> dict[str, Axis]:
    """The rules that deal requests, their pages and tokens over `axis`."""
    dealt = ("requests", "pages", "tokens", "q_tokens", "moe_tokens", "linear_tokens")
    return dict.fromkeys(dealt, axis)


def tensor_parallel(heads: Axis, kv_heads: Axis) -> dict[str, Axis]:
    """Heads, widths and vocabulary sharded over `heads`, and KV heads over `kv_heads`."""
    wide = ("heads", "o_heads", "linear_heads", "mlp", "shared_mlp", "expert_mlp")
    return {**dict.fromkeys((*wide, "vocab_in", "vocab_out"), heads), "kv_heads": kv_heads}


def split_kv_heads(num_kv_heads: int | None, mesh: Mesh) -> Mesh:
    """`mesh` with a `tp` that is larger than the number of KV heads factored into `tp` x `rep`."""
    sizes = dict(mesh.axes)
    size = sizes.get("tp", 1)
    if num_kv_heads is None or size <= num_kv_heads or "rep" in sizes:
        if num_kv_heads is not None and num_kv_heads % size:
            raise ValueError(_uneven(num_kv_heads, size))
        return mesh
    if size % num_kv_heads:
        raise ValueError(_uneven(num_kv_heads, size))
    factored: dict[str, int] = {}
    for name, n in sizes.items():
        factored[name] = num_kv_heads if name == "tp" else n
        if name == "tp":
            factored["rep"] = size // num_kv_heads
    return Mesh(**factored)


def _uneven(num_kv_heads: int, size: int) -> str:
    near = [
        n for n in range(1, 4 * num_kv_heads + 1) if math.gcd(n, num_kv_heads) in (n, num_kv_heads)
    ]
    return (
        f"tp={size} and {num_kv_heads} KV heads do not divide one another:"
        f" use tp in {{{', '.join(map(str, near))}, ...}}"
    )
