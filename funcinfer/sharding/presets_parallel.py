"""Presets named after what they are: one function for each kind of parallelism.

Each gives a `Preset`: the mesh, the rules of prefill and the rules of decode. `num_kv_heads` is
None where the cache has no KV heads (latent attention). Most of them are what the axis names of
their mesh ask for (`presets.for_mesh`); the last three lay out tensors in ways that axis names do
not tell. Sources: Megatron-LM (Shoeybi et al., 2019); sequence parallelism, Korthikanti et al.
(2022); expert, context and fine-grained parallelism as in vLLM and vLLM-Ascend.
"""

from collections.abc import Sequence

from funcinfer.sharding.mesh import Axis, Mesh, join_axes
from funcinfer.sharding.presets import (
    Preset,
    data_parallel,
    expert_tokens,
    for_mesh,
    tensor_parallel,
)
from funcinfer.sharding.rules import Rules

FINE_GRAINED = ("o_heads", "mlp", "vocab_in", "vocab_out")


def tensor_parallelism(num_kv_heads: int | None, *, tp: int, dp: int = 1) -> Preset:
    """Heads, widths and vocabulary over `tp`, in each of `dp` groups; each expert is cut too.

    >>> tensor_parallelism(8, tp=4).decode["expert_mlp"]
    'tp'
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, tp=tp))


def sequence_parallelism(num_kv_heads: int | None, *, tp: int, dp: int = 1) -> Preset:
    """Tensor parallelism whose residual stream is dealt over `tp` by tokens, norms included.

    >>> sequence_parallelism(8, tp=4).decode["residual_tokens"]
    'tp'
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, tp=tp), sp=True)


def expert_parallelism(
    num_kv_heads: int | None,
    *,
    tp: int = 1,
    dp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    sp: bool = False,
) -> Preset:
    """Whole experts over the product of all axes. Tokens are gathered or, with `sp`, exchanged.

    >>> expert_parallelism(None, tp=16, dp=4).decode["experts"]
    ('dp', 'tp')
    """
    mesh = _mesh(dp=dp, pcp=pcp, tp=tp, dcp=dcp)
    return for_mesh(num_kv_heads, mesh, sp=sp, expert_parallel=True)


def data_parallel_attention(*, ep: int, dp: int = 1) -> Preset:
    """Attention with requests of its own on each rank; experts over `ep`, in each of `dp` groups.

    >>> data_parallel_attention(ep=8).decode["moe_tokens"]
    'ep'
    """
    return for_mesh(None, _mesh(dp=dp, ep=ep))


def prefill_context_parallelism(
    num_kv_heads: int | None, *, pcp: int, tp: int = 1, dp: int = 1, sp: bool = False
) -> Preset:
    """The tokens of each prompt over `pcp`, whose ranks hold whole caches and decode alike.

    >>> _, prefill, decode = prefill_context_parallelism(8, pcp=2)
    >>> prefill["tokens"], decode["tokens"]
    ('pcp', None)
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, pcp=pcp, tp=tp), sp=sp)


def decode_context_parallelism(
    num_kv_heads: int | None, *, dcp: int, tp: int = 1, dp: int = 1, sp: bool = False
) -> Preset:
    """Tensor parallelism over `tp` times `dcp`, which would hold copies of KV heads and deals the
    cache instead, by offsets in a page.

    >>> decode_context_parallelism(8, dcp=2, tp=8).decode["page_tokens"]
    'dcp'
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, tp=tp, dcp=dcp), sp=sp)


def context_parallelism(
    num_kv_heads: int | None, *, pcp: int, dcp: int, tp: int = 1, dp: int = 1, sp: bool = False
) -> Preset:
    """Prompts over `pcp`, the cache over `pcp` times `dcp` in both phases.

    >>> context_parallelism(8, pcp=2, dcp=2).prefill["page_tokens"]
    ('pcp', 'dcp')
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, pcp=pcp, tp=tp, dcp=dcp), sp=sp)


def pipeline_parallelism(
    num_kv_heads: int | None, *, pp: int, tp: int = 1, dp: int = 1, sp: bool = False
) -> Preset:
    """The layers in `pp` contiguous stages, each on `tp` ranks of each of `dp` groups.

    >>> pipeline_parallelism(8, pp=4, tp=2).decode["layers"]
    'pp'
    """
    return for_mesh(num_kv_heads, _mesh(dp=dp, pp=pp, tp=tp), sp=sp)


def sparse_context_parallelism(
    *, tp: int, dp: int = 1, sp: bool = False, expert_parallel: bool = False
) -> Preset:
    """Queries of sparse attention dealt over `tp` by tokens, all heads on each rank, whole caches
    (DSA-CP); heads come back for the output projection.

    >>> sparse_context_parallelism(tp=4).decode["q_tokens"]
    'tp'
    """
    mesh, whole, _ = for_mesh(None, _mesh(dp=dp, tp=tp), sp=sp, expert_parallel=expert_parallel)
    over_tp: Axis = "tp" if tp > 1 else None
    rules = whole.replace(heads=None, q_tokens=join_axes(whole["tokens"], over_tp))
    return Preset(mesh, rules, rules)


def split_output_projection(
    num_kv_heads: int | None, *, tp: int, o_proj: int, dp: int = 1
) -> Preset:
    """Sequence parallelism whose output projection is cut in `o_proj` parts only, not in `tp`
    (FlashComm2): heads are exchanged for tokens before it, and less is summed after it.

    ValueError where `o_proj` does not divide `tp`.

    >>> split_output_projection(8, tp=4, o_proj=2).mesh
    Mesh(tpa=2, tpb=2)
    """
    if o_proj < 1 or tp % o_proj:
        raise ValueError(f"o_proj={o_proj} must divide tp={tp}")
    mesh = Mesh(**({"dp": dp} if dp > 1 else {}), tpa=o_proj, tpb=tp // o_proj)
    heads, data = ("tpa", "tpb"), "dp" if dp > 1 else None
    rules = Rules(
        **tensor_parallel(heads, None if num_kv_heads is None else heads)
        | data_parallel(data, data)
        | dict(
            o_heads="tpa",
            o_tokens=join_axes(data, "tpb"),
            residual_tokens=join_axes(data, "tpb", "tpa"),
            moe_tokens=data,
        )
    )
    return Preset(mesh, rules, rules)


def fine_grained_tensor_parallelism(
    *, dp: int, group: int | None = None, dims: Sequence[str] = FINE_GRAINED
) -> Preset:
    """Attention with requests of its own on each of `dp` ranks; `dims` cut over all of them, or
    over each `group` of neighbours. Whole experts over all ranks.

    ValueError where `group` does not divide `dp`.

    >>> fine_grained_tensor_parallelism(dp=8, group=2, dims=["vocab_out"]).mesh
    Mesh(dp=4, dpi=2)
    """
    inner = dp if group is None else group
    if inner < 1 or dp % inner:
        raise ValueError(f"group={group} must divide dp={dp}")
    over: Axis = "dp" if inner == dp else "dpi"
    data: Axis = "dp" if inner == dp else ("dp", "dpi")
    rules = Rules(
        **dict.fromkeys(dims, over),
        **data_parallel(data, data),
        residual_tokens=data,
        experts=data,
        moe_tokens=expert_tokens(data, data, data, exchange=True),
    )
    mesh = Mesh(dp=dp) if inner == dp else Mesh(dp=dp // inner, dpi=inner)
    return Preset(mesh, rules, rules)


def _mesh(**sizes: int) -> Mesh:
    """The mesh of the axes that are larger than 1; of one axis at least."""
    large = {name: n for name, n in sizes.items() if n != 1}
    return Mesh(**(large or {"tp": 1}))
