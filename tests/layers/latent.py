"""Running a latent-attention layer over requests in pages, in any chunks and on any mesh.

Requests have lengths that are odd and different; pages start as NaN, and so do the inputs of
padding tokens. A result is a dict (request, position) -> row.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, Rows, batch_specs, make_batch, prepare
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks, drop, token_multiple
from funcinfer.spec import ParamSpec, empty, is_spec, with_dtype
from funcinfer.tree import map_with_path

THETA = 100.0
ROPE = Rope(THETA, 4)
LENGTHS = (11, 5, 7, 1)
Result = dict[tuple[int, int], torch.Tensor]


def draw(specs: Any, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Random parameters, none of them 0 or 1: norms around 1, biases as large as activations."""
    generator = torch.Generator().manual_seed(seed)

    def one(path: str, spec: ParamSpec) -> torch.Tensor:
        x = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        if len(spec.shape) > 1:
            x = x / spec.shape[-1] ** 0.5
        return (x * 0.3 + 1 if path.endswith("norm") else x).to(dtype)

    return map_with_path(one, specs, is_leaf=is_spec)


def inputs(embed: int, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[torch.Tensor]:
    """The layer's input of each request, [length, embed] float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, embed, generator=generator, dtype=torch.float64) for n in lengths]


@dataclass(frozen=True)
class Placement:
    """Where a run takes place: mesh, rules of each phase, and what the batches need to know."""

    mesh: Mesh
    rules: Rules
    decode_rules: Rules | None = None
    parts: int = 1
    interleave: int = 1
    page_size: int = 4

    @property
    def groups(self) -> int:
        return self.mesh.size(self.rules["requests"])


ALONE = Placement(Mesh(), Rules.none())
DP = dict.fromkeys(("requests", "pages", "tokens", "q_tokens", "residual_tokens"), "dp")
TP = dict.fromkeys(("heads", "o_heads"), "tp")
DCP = dict.fromkeys(("heads", "o_heads"), ("tp", "dcp")) | {"page_tokens": "dcp"}
PCP = dict.fromkeys(("tokens", "q_tokens", "residual_tokens"), "pcp")
MESHES = {
    "tp2": Placement(Mesh(tp=2), Rules(**TP)),
    "tp4": Placement(Mesh(tp=4), Rules(**TP)),
    "dp2": Placement(Mesh(dp=2), Rules(**DP)),
    "dp3, one rank idle at the end": Placement(Mesh(dp=3), Rules(**DP)),
    "dp2 tp2": Placement(Mesh(dp=2, tp=2), Rules(**DP, **TP)),
    "tp4 sp": Placement(Mesh(tp=4), Rules(**TP, residual_tokens="tp")),
    "dp2 tp2 sp": Placement(Mesh(dp=2, tp=2), Rules(**DP | TP | {"residual_tokens": ("dp", "tp")})),
    "dcp2": Placement(Mesh(tp=1, dcp=2), Rules(**DCP)),
    "dcp2 I=2": Placement(Mesh(tp=1, dcp=2), Rules(**DCP), interleave=2),
    "tp2 dcp2 sp": Placement(
        Mesh(tp=2, dcp=2), Rules(**DCP, residual_tokens=("tp", "dcp")), interleave=2
    ),
    "dcp4, whole heads": Placement(Mesh(dcp=4), Rules(page_tokens="dcp")),
    "pcp2, decode replicated": Placement(
        Mesh(pcp=2), Rules(**PCP), decode_rules=Rules.none(), parts=2
    ),
    "pcp2 tp2 sp": Placement(
        Mesh(pcp=2, tp=2),
        Rules(**PCP | TP | {"residual_tokens": ("pcp", "tp")}),
        decode_rules=Rules(**TP, residual_tokens="tp"),
        parts=2,
    ),
    "pcp2 x dcp2": Placement(
        Mesh(pcp=2, dcp=2),
        Rules(**PCP | {"heads": "dcp", "o_heads": "dcp", "page_tokens": ("pcp", "dcp")}),
        parts=2,
    ),
    "queries over tp": Placement(
        Mesh(dp=2, tp=2),
        Rules(**DP | {"q_tokens": ("dp", "tp"), "residual_tokens": ("dp", "tp"), "o_heads": "tp"}),
    ),
    "o_proj over dp": Placement(Mesh(dp=2), Rules(**DP, o_heads="dp")),
    "two-level o_proj": Placement(
        Mesh(tpa=2, tpb=2),
        Rules(heads=("tpa", "tpb"), o_heads="tpa", o_tokens="tpb", residual_tokens=("tpb", "tpa")),
    ),
}


def chunks(length: int, size: int, decode: int = 0) -> list[tuple[int, int]]:
    """[start, end) of a request's chunks of `size`, its last `decode` tokens one at a time."""
    prompt = max(0, length - decode)
    edges = [*range(0, prompt, size), *range(prompt, length), length]
    return list(itertools.pairwise(edges))


def steps(size: int, decode: int = 0, lengths: Sequence[int] = LENGTHS) -> list[dict]:
    """Steps {request: (start, end)}; requests that are done drop out."""
    plans = [chunks(n, size, decode) for n in lengths]
    longest = max(len(plan) for plan in plans)
    return [{i: p[k] for i, p in enumerate(plans) if k < len(p)} for k in range(longest)]


@dataclass(frozen=True)
class LayerUnderTest:
    """`apply(p, x, cache, step, *, rules) -> (y, cache, extra)`; extra is [T, .] where attention
    runs, or None. `cache_specs(num_pages, page_size)`.
    """

    specs: Any
    cache_specs: Callable[[int, int], Any]
    apply: Callable[..., tuple[torch.Tensor, Any, torch.Tensor | None]]


def run(
    layer: LayerUnderTest,
    params: Any,
    xs: Sequence[torch.Tensor],
    plan: Sequence[dict],
    where: Placement = ALONE,
    *,
    rope: Rope = ROPE,
    compiled: str | None = None,
) -> tuple[Result, Result]:
    """(outputs, extras) of all requests after the steps of `plan`, in the dtype of the inputs."""
    size, groups = where.page_size, where.groups
    dtype, width = xs[0].dtype, xs[0].shape[1]
    pages = {i: _pages(i, xs, groups, size) for i in range(len(xs))}
    num_pages = 1 + max(page for own in pages.values() for page in own)
    cache_specs = with_dtype(layer.cache_specs(num_pages * groups, size), dtype)
    cache = empty(cache_specs, fill=float("nan"))
    ranks = ThreadRanks(where.mesh)
    layouts = where.rules.specs(cache_specs)
    locals_ = ranks.split(cache, layouts, copy=True)
    where.rules.check([layer.specs, cache_specs], where.mesh)
    outs: tuple[Result, Result] = {}, {}
    for number, work in enumerate(plan):
        decoding = where.decode_rules is not None and all(b - a == 1 for a, b in work.values())
        rules = where.decode_rules if decoding and where.decode_rules else where.rules
        batch, names = _batch(work, pages, where, rules, 1 if decoding else where.parts)
        x = torch.full((len(names), width), torch.nan, dtype=dtype)
        for place, name in enumerate(names):
            if name is not None:
                x[place] = xs[name[0]][name[1]]
        f = partial(_step, layer, rules, where.interleave, rope)
        f = torch.compile(f, backend=compiled, fullgraph=True) if compiled else f
        residual = P(rules["residual_tokens"], None)
        extra = P(drop(rules["q_tokens"], rules["page_tokens"]), None)
        results = ranks.run(
            f,
            ranks.split(params, rules.specs(layer.specs)),
            ranks.split(x, residual),
            locals_,
            ranks.split(batch, batch_specs(rules)),
        )
        locals_ = [r[1] for r in results]
        joined = [ranks.join([r[0] for r in results], residual, what=f"output of step {number}")]
        if results[0][2] is not None:
            joined.append(ranks.join([r[2] for r in results], extra, what="selection"))
        for out, values in zip(outs, joined, strict=False):
            out |= {n: v for n, v in zip(names, values, strict=True) if n is not None}
    return outs


def compare(got: Result, want: Result, atol: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def _step(layer, rules, interleave, rope, p, x, cache, batch):
    tables = partial(rope_tables, rope, dtype=x.dtype)
    step = prepare(batch, rules=rules, rope=tables, interleave=interleave)
    return layer.apply(p, x, cache, step, rules=rules)


def _pages(request: int, xs: Sequence[torch.Tensor], groups: int, size: int) -> list[int]:
    """Pages of a request within its group; not in order, so that a table is needed."""
    before = sum(-(-len(xs[i]) // size) for i in range(request % groups, request, groups))
    count = -(-len(xs[request]) // size)
    return [1 + before + j for j in reversed(range(count))]


def _batch(
    work: dict, pages: dict, where: Placement, rules: Rules, parts: int
) -> tuple[Batch, list[tuple[int, int] | None]]:
    """The global batch of a step, and the (request, position) of each of its tokens."""
    groups: list[list[Rows]] = [[] for _ in range(where.groups)]
    coded = {}
    for i, (start, end) in work.items():
        ids = [1000 * i + t + 1 for t in range(start, end)]
        coded |= {1000 * i + t + 1: (i, t) for t in range(start, end)}
        groups[i % where.groups].append(Rows(ids, start, pages[i], wanted=0))
    batch = make_batch(
        groups, page_size=where.page_size, parts=parts, multiple=token_multiple(rules, where.mesh)
    )
    return batch, [coded.get(token) for token in batch.tokens.tolist()]
