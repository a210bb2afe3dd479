"""Meshes with rules: every kind of parallelism, alone and combined, on up to 8 ranks.

They suit a model with 8 query heads, 4 KV heads, an MLP width that 4 and 8 divide, and any
vocabulary. `Layout.replace` fits them to another family, as `replace(kv_heads=None)` to latent
attention.
"""

from funcinfer.sharding import Axis, Mesh, Rules
from tests.equivalence.harness import ONE_RANK, Layout


def tensor(axis: Axis, kv_heads: Axis = "tp") -> dict[str, Axis]:
    """Heads, MLPs and vocabulary over `axis`."""
    wide: tuple[str, ...] = ("heads", "o_heads", "mlp", "vocab_in", "vocab_out")
    return {**dict.fromkeys(wide, axis), "kv_heads": kv_heads}


def data(axis: Axis) -> dict[str, Axis]:
    """Requests and their tokens over `axis`."""
    names = ("requests", "pages", "tokens", "q_tokens", "residual_tokens")
    return dict.fromkeys(names, axis)


def dealt(axis: Axis) -> dict[str, Axis]:
    """The tokens of a request over `axis`."""
    return dict.fromkeys(("tokens", "q_tokens", "residual_tokens"), axis)


DCP = tensor(("tp", "dcp"))

LAYOUTS = {
    "one rank": ONE_RANK,
    "tp2": Layout(Mesh(tp=2), Rules(**tensor("tp"))),
    "tp4": Layout(Mesh(tp=4), Rules(**tensor("tp"))),
    "tp4 rep2": Layout(Mesh(tp=4, rep=2), Rules(**tensor(("tp", "rep")))),
    "dp2": Layout(Mesh(dp=2), Rules(**data("dp"))),
    "dp2 tp2": Layout(Mesh(dp=2, tp=2), Rules(**data("dp"), **tensor("tp"))),
    "tp2 sp": Layout(Mesh(tp=2), Rules(**tensor("tp"), residual_tokens="tp")),
    "tp4 sp, sharded logits": Layout(
        Mesh(tp=4), Rules(**tensor("tp"), residual_tokens="tp", logits="tp")
    ),
    "dp4, everything else over dp": Layout(
        Mesh(dp=4), Rules(**data("dp"), o_heads="dp", mlp="dp", vocab_in="dp", vocab_out="dp")
    ),
    "dp2 dpi2, head and o_proj over dpi, embedding over dp": Layout(
        Mesh(dp=2, dpi=2),
        Rules(**data(("dp", "dpi")), vocab_out="dpi", o_heads="dpi", vocab_in="dp"),
    ),
    "dp2 tp2 sp, head and MLP over both, embedding over dp": Layout(
        Mesh(dp=2, tp=2),
        Rules(
            **data("dp")
            | tensor("tp")
            | dict(residual_tokens=("dp", "tp"), vocab_in="dp")
            | dict.fromkeys(("vocab_out", "mlp"), ("dp", "tp"))
        ),
    ),
    "dp2 tp2 sp, MLP over dp, o_proj over both": Layout(
        Mesh(dp=2, tp=2),
        Rules(
            **data("dp")
            | tensor("tp")
            | dict(residual_tokens=("dp", "tp"), mlp="dp", o_heads=("tp", "dp"))
        ),
    ),
    "pcp2": Layout(Mesh(pcp=2), Rules(**dealt("pcp")), Rules()),
    "pcp4 tp2 sp": Layout(
        Mesh(pcp=4, tp=2),
        Rules(**dealt("pcp") | tensor("tp") | dict(residual_tokens=("pcp", "tp"))),
        Rules(**tensor("tp"), residual_tokens="tp"),
    ),
    "dcp2 tp2": Layout(Mesh(tp=2, dcp=2), Rules(**DCP, page_tokens="dcp")),
    "dcp2, runs of 2": Layout(Mesh(tp=1, dcp=2), Rules(**DCP, page_tokens="dcp"), interleave=2),
    "tp2 dcp4 sp, runs of 2": Layout(
        Mesh(tp=2, dcp=4),
        Rules(**DCP, page_tokens="dcp", residual_tokens=("tp", "dcp")),
        interleave=2,
    ),
    "dcp2 alone": Layout(Mesh(dcp=2), Rules(page_tokens="dcp")),
    "pcp2 tp2 dcp2, pages over pcp and dcp": Layout(
        Mesh(pcp=2, tp=2, dcp=2),
        Rules(**DCP, **dealt("pcp"), page_tokens=("pcp", "dcp")),
        Rules(**DCP, page_tokens=("pcp", "dcp")),
    ),
    "tp4, queries dealt and caches whole": Layout(
        Mesh(tp=4), Rules(**tensor("tp", None) | dict(heads=None, q_tokens="tp"))
    ),
    "tpa2 tpb2, o_proj over tpa": Layout(
        Mesh(tpa=2, tpb=2),
        Rules(
            **tensor(("tpa", "tpb"), ("tpa", "tpb"))
            | dict(residual_tokens=("tpb", "tpa"), o_heads="tpa", o_tokens="tpb")
        ),
    ),
    "dp2 pcp2 dcp2, MLP over dp": Layout(
        Mesh(dp=2, pcp=2, dcp=2),
        Rules(
            **data("dp")
            | dealt(("dp", "pcp"))
            | tensor("dcp", None)
            | dict(page_tokens="dcp", mlp="dp")
        ),
        Rules(**data("dp") | tensor("dcp", None) | dict(page_tokens="dcp", mlp="dp")),
    ),
}
