"""The rules that the axis names of a mesh ask for, and the two presets that most people need.

    axis       deals or shards
    dp         requests, with their pages and tokens
    ep         requests too; its ranks share the experts
    pp         layers, in contiguous stages (pipeline parallelism)
    pcp        the tokens of a prompt (prefill context parallelism); at decode its ranks do alike
    tp         heads, widths and vocabulary
    rep        the same; its ranks hold copies of KV heads, of which there are too few
    dcp        the same; its ranks hold copies of KV heads too, but each the cache of some offsets
               in a page only (decode context parallelism); with pcp, whose ranks take part then

A `Preset` is a mesh with the rules of both phases. They are ordinary `Rules`: change one with
`rules.replace(...)`. `funcinfer.sharding.presets_parallel` has one function for each kind of
parallelism. The number of KV heads is None where the cache has none, as in latent attention.
"""

import math
from typing import NamedTuple

from funcinfer.sharding.mesh import Axis, Mesh, axis_of, drop, join_axes, names
from funcinfer.sharding.rules import Rules

AXES = ("dp", "ep", "pcp", "tp", "rep", "dcp")
STAGES = "pp"


class Preset(NamedTuple):
    """A mesh, and the rules of both phases over it."""

    mesh: Mesh
    prefill: Rules
    decode: Rules


def single() -> tuple[Mesh, Rules]:
    """One device, nothing sharded."""
    return Mesh(), Rules.none()


def tp(num_kv_heads: int | None, size: int, *, dp: int = 1, sp: bool = False) -> tuple[Mesh, Rules]:
    """Tensor parallelism over `size` ranks, times `dp` data-parallel groups; the same in both
    phases.

    `sp` deals the residual stream's tokens. With fewer KV heads than `size`, `tp` counts KV-head
    shards and `rep` their copies. ValueError where `size` and the number of KV heads do not divide
    one another.

    >>> tp(2, 4)[0]
    Mesh(tp=2, rep=2)
    """
    mesh = Mesh(**({"dp": dp} if dp > 1 else {}), tp=size)
    mesh, rules, _ = for_mesh(num_kv_heads, mesh, sp=sp)
    return mesh, rules


def for_mesh(
    num_kv_heads: int | None, mesh: Mesh, *, sp: bool = False, expert_parallel: bool = False
) -> Preset:
    """The preset that the axis names of `mesh` ask for; see the head of this file.

    `sp` deals the tokens of the residual stream over tp, rep and dcp (sequence parallelism).
    Experts lie over `ep` where the mesh has it, over all axes with `expert_parallel`, and else
    every rank of tp, rep and dcp holds a slice of each expert. A `tp` larger than the number of KV
    heads becomes `tp` x `rep`. ValueError for an axis name without a meaning here.

    >>> mesh, prefill, decode = for_mesh(2, Mesh(pcp=2, tp=4))
    >>> mesh, prefill["tokens"], decode["tokens"], decode["heads"]
    (Mesh(pcp=2, tp=2, rep=2), 'pcp', None, ('tp', 'rep'))
    """
    known = (*AXES, STAGES)
    for name in mesh.names:
        if name not in known:
            raise ValueError(
                f"no preset for axis {name!r} of {mesh!r}: presets know {', '.join(known)};"
                f" give rules=Rules(...)"
            )
    mesh = split_kv_heads(num_kv_heads, mesh)
    given = {name: name if name in mesh.names else None for name in AXES}
    data, wide = join_axes(given["dp"], given["ep"]), join_axes(*(given[a] for a in AXES[3:]))
    everything = join_axes(*(given[a] for a in AXES if a != "ep"), given["ep"])
    experts = everything if expert_parallel else given["ep"]
    weights: dict[str, Axis] = {
        **tensor_parallel(wide, None if num_kv_heads is None else given["tp"]),
        "linear_heads": join_axes(given["pcp"], wide),
        "experts": experts,
        "expert_mlp": drop(wide, experts),
        "page_tokens": join_axes(given["pcp"], given["dcp"]) if given["dcp"] else None,
        "layers": STAGES if STAGES in mesh.names else None,
    }

    def rules(tokens: Axis) -> Rules:
        residual = join_axes(tokens, wide) if sp else tokens
        return Rules(
            **weights,
            **data_parallel(data, tokens),
            residual_tokens=residual,
            moe_tokens=expert_tokens(tokens, residual, experts, exchange=sp or not expert_parallel),
        )

    return Preset(mesh, rules(join_axes(data, given["pcp"])), rules(data))


def data_parallel(axis: Axis, tokens: Axis) -> dict[str, Axis]:
    """The rules that deal requests and their pages over `axis`, and tokens over `tokens`."""
    requests = dict.fromkeys(("requests", "pages", "linear_tokens"), axis)
    return {**requests, "tokens": tokens, "q_tokens": tokens}


def tensor_parallel(heads: Axis, kv_heads: Axis) -> dict[str, Axis]:
    """Heads, widths and vocabulary sharded over `heads`, and KV heads over `kv_heads`."""
    wide = ("heads", "o_heads", "linear_heads", "mlp", "shared_mlp", "expert_mlp")
    return {**dict.fromkeys((*wide, "vocab_in", "vocab_out"), heads), "kv_heads": kv_heads}


def expert_tokens(tokens: Axis, residual: Axis, experts: Axis, *, exchange: bool) -> Axis:
    """The layout in which tokens are routed.

    With `exchange` it is the finer of the two where experts lie on their axes: ranks of `experts`
    that hold different tokens exchange them. Without, the axes of `experts` leave the tokens: they
    are gathered, and each rank adds its experts' part.

    >>> expert_tokens("dp", ("dp", "tp"), ("dp", "tp"), exchange=True)
    ('dp', 'tp')
    >>> expert_tokens("dp", "dp", ("dp", "tp"), exchange=False) is None
    True
    """
    if not exchange:
        return drop(tokens, experts)
    return axis_of(a for a in names(residual) if a in names(tokens) + names(experts))


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
