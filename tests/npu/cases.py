"""Calls of each primitive with sizes that torch_npu's ops take, and with others.

`CASES` maps a name to a function of a generator and a dtype that gives a `Call`; `op` is the op of
torch_npu that the rule must choose on an Ascend 910B, None where it is composed of torch ops.

Pages are drawn all over, the unused ones too. Sizes are odd where the ops let them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from funcinfer.kvcache.batch import Rows, make_batch
from funcinfer.layers import primitives as ops

PAGE = 16


@dataclass
class Call:
    """A primitive's name and arguments, and the op that is to compute it."""

    primitive: str
    op: str | None
    args: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)


class Draw:
    """Tensors of one seed and dtype."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def rotary(self, T: int, C: int) -> tuple[Tensor, Tensor]:
        angles = torch.rand(T, C, generator=self.generator) * 6.3
        return angles.cos(), angles.sin()


def norm(draw: Draw, *, primitive: str, op: str | None, weight: bool = True) -> Call:
    args = (draw.normal(5, 3, 40), *([draw.normal(40)] if weight else []))
    if primitive == "layer_norm":
        args = (*args, draw.normal(40))
    return Call(primitive, op, args, dict(eps=1e-5))


def fp32_weight(draw: Draw) -> Call:
    args = draw.normal(5, 40), draw.normal(40, dtype=torch.float32)
    return Call("rms_norm_fp32_weight", "npu_rms_norm", args, dict(eps=1e-5))


def summed(draw: Draw, *, op: str, dtype: torch.dtype | None = None) -> Call:
    args = draw.normal(5, 3, 40), draw.normal(5, 3, 40), draw.normal(40, dtype=dtype)
    return Call("add_rms_norm", op, args, dict(eps=1e-5))


def gated(draw: Draw, *, primitive: str, op: str, apart: bool = False, **settings: float) -> Call:
    both = draw.normal(7, 2, 12, scale=4.0)
    gate, up = both.unbind(1)
    return Call(primitive, op, (gate, up.clone() if apart else up), settings)


def rotated(draw: Draw, *, primitive: str, width: int, heads: int | None) -> Call:
    x = draw.normal(5, heads, width) if heads else draw.normal(5, width)
    return Call(primitive, "npu_rotary_mul", (x, *draw.rotary(5, 8)))


def pairs_of_64(draw: Draw, *, heads: int | None) -> Call:
    x = draw.normal(5, heads, 80)[..., 8:] if heads else draw.normal(5, 80)[..., 8:]
    op = "npu_interleave_rope"
    return Call("rotate_deinterleaved", op, (x, *draw.rotary(5, 32)))


def linear(draw: Draw) -> Call:
    return Call("linear", None, (draw.normal(5, 24), draw.normal(3, 2, 24, scale=0.2)))


def merge(draw: Draw) -> Call:
    lses = draw.normal(3, 5, 2, dtype=torch.float32)
    lses[1, 2], lses[:, 4] = -torch.inf, -torch.inf
    outs = draw.normal(3, 5, 2, 16)
    outs[1, 2] = torch.nan
    return Call("merge_lse", "npu_attention_update", (outs, lses))


def write_kv(draw: Draw, *, heads: int | None) -> Call:
    inner = () if heads is None else (heads,)
    pages = [torch.zeros(4, PAGE, *inner, width, dtype=draw.dtype) for width in (24, 8)]
    new = [draw.normal(5, *inner, width) for width in (24, 8)]
    slots = torch.tensor([PAGE, 3 * PAGE + 5, 0, 2 * PAGE - 1, 0], dtype=torch.int32)
    return Call("write_kv", "npu_scatter_pa_kv_cache", (*pages, *new, slots))


def latent_rows(draw: Draw, *, pages: int = 4) -> Call:
    T = 21
    slots = torch.arange(PAGE, PAGE + T, dtype=torch.int32)
    slots[[3, 8]] = 0
    caches = [torch.zeros(pages, PAGE, width, dtype=draw.dtype) for width in (512, 64)]
    tables = draw.rotary(T, 32)
    args = (draw.normal(T, 576), draw.normal(512), *tables, *caches, slots)
    return Call("norm_rotate_write", "npu_kv_rmsnorm_rope_cache", args, dict(eps=1e-5))


def narrow_latent_rows(draw: Draw) -> Call:
    """Widths that the op doesn't take, which its parts do."""
    caches = [torch.zeros(4, PAGE, width, dtype=draw.dtype) for width in (48, 16)]
    slots = torch.tensor([PAGE, 3 * PAGE + 5, 0], dtype=torch.int32)
    args = (draw.normal(3, 64), draw.normal(48), *draw.rotary(3, 8), *caches, slots)
    return Call("norm_rotate_write", "npu_scatter_pa_kv_cache", args, dict(eps=1e-5))


def prolog(draw: Draw) -> Call:
    """The tables are of half precision already: the op rounds them, and the reference doesn't."""
    embed, q_lora, N, H, C, E, T = 1024, 1536, 2, 128, 512, 64, 5
    slots = torch.tensor([PAGE, 3 * PAGE + 5, 0, 2 * PAGE - 1, 0], dtype=torch.int32)
    tables = [t.bfloat16().float() for t in draw.rotary(T, E // 2)]
    caches = [torch.zeros(4, PAGE, width, dtype=draw.dtype) for width in (C, E)]
    weights = SimpleNamespace(
        dq=draw.normal(embed, q_lora, scale=embed**-0.5),
        q_norm=draw.normal(q_lora),
        uq_qr=draw.normal(q_lora, N * (H + E), scale=q_lora**-0.5),
        uk=draw.normal(N, H, C, scale=H**-0.5),
        dkv_kr=draw.normal(embed, C + E, scale=embed**-0.5),
        kv_norm=draw.normal(C),
    )
    args = (draw.normal(T, embed), weights, *tables, *caches, slots)
    return Call("mla_prolog", "npu_mla_prolog_v3", args, dict(eps=1e-5))


def write_rows(draw: Draw) -> Call:
    pages, new = torch.zeros(4, PAGE, 24, dtype=draw.dtype), draw.normal(3, 24)
    slots = torch.tensor([PAGE, 3 * PAGE + 5, 0], dtype=torch.int32)
    return Call("write_rows", "npu_scatter_nd_update_", (pages, new, slots))


# Three requests: a chunk after 18 tokens, one token after 30, a whole prompt. And two that decode.
CHUNKS = ((18, 5), (30, 1), (0, 7))
SINGLE = ((18, 1), (39, 1))


@dataclass
class Tokens:
    """A step's tokens, and how many pages there are."""

    page_table: Tensor
    rows: Tensor
    lo: Tensor
    hi: Tensor
    segments: ops.Segments | None
    num_pages: int


def gate(draw: Draw, *, primitive: str, groups: int = 1, keep: int = 1) -> Call:
    bias = [draw.normal(12, dtype=torch.float32, scale=0.1)] if primitive == "gate_sigmoid" else []
    args = (draw.normal(40, 12), *bias)
    settings = dict(k=3, groups=groups, keep_groups=keep)
    return Call(primitive, "npu_moe_gating_top_k", args, settings)


def tokens(of: tuple[tuple[int, int], ...], *, page: int = PAGE, multiple: int = 4) -> Tokens:
    pages = [
        [3 + 5 * i, 1 + 5 * i, 2 + 5 * i][: -(-(s + n) // page)] for i, (s, n) in enumerate(of)
    ]
    rows = [Rows([0] * n, s, p) for (s, n), p in zip(of, pages, strict=True)]
    batch = make_batch([rows], page_size=page, multiple=multiple, segments=True)
    hi = batch.positions + 1
    lo, num_pages = torch.zeros_like(hi), 5 * len(of) + 2
    return Tokens(batch.page_table, batch.rows, lo, hi, batch.segments, num_pages)


def attention(
    draw: Draw,
    *,
    of: tuple[tuple[int, int], ...] = CHUNKS,
    heads: tuple[int, int] = (6, 2),
    width: int = 128,
    op: str | None = "npu_fused_infer_attention_score_v2",
    window: int | None = None,
    sinks: bool = False,
) -> Call:
    page = PAGE if window is None else 128
    t = tokens(of, page=page)
    (N, K), T = heads, len(t.rows)
    num_pages = max(t.num_pages, T * t.page_table.shape[1] + 1)
    cache = SimpleNamespace(k=draw.normal(num_pages, page, K, width))
    cache.v = draw.normal(num_pages, page, K, width)
    lo = t.lo if window is None else (t.hi - window).clamp(min=0)
    settings: dict[str, Any] = dict(scale=width**-0.5)
    settings |= dict(segments=t.segments) if window is None else {}
    settings |= dict(sinks_N=draw.normal(N)) if sinks else {}
    args = (draw.normal(T, N, width), cache, t.page_table, t.rows, lo, t.hi)
    return Call("paged_attention", op, args, settings)


def expanded(draw: Draw, *, widths: tuple[int, int]) -> Call:
    """Keys and values made for this step: a page for each request."""
    t = tokens(CHUNKS)
    (R, M), (H, V), N = t.page_table.shape, widths, 3
    cache = SimpleNamespace(k=draw.normal(R, M * PAGE, N, H), v=draw.normal(R, M * PAGE, N, V))
    args = (draw.normal(len(t.rows), N, H), cache, torch.arange(R)[:, None], t.rows, t.lo, t.hi)
    settings = dict(scale=H**-0.5, segments=t.segments)
    return Call("paged_attention", "npu_fused_infer_attention_score_v2", args, settings)


def latents(
    draw: Draw, *, of: tuple[tuple[int, int], ...] = CHUNKS, heads: int = 4, hint: bool = True
) -> Call:
    t = tokens(of)
    cache = SimpleNamespace(ckv=draw.normal(t.num_pages, PAGE, 512))
    cache.kpe = draw.normal(t.num_pages, PAGE, 64)
    queries = draw.normal(len(t.rows), heads, 512), draw.normal(len(t.rows), heads, 64)
    settings = dict(scale=576**-0.5, segments=t.segments if hint else None)
    op = "npu_fused_infer_attention_score_v2" if hint and heads in (1, 2, 4, 8) else None
    args = (*queries, cache, t.page_table, t.rows, t.lo, t.hi)
    return Call("paged_mla_attention", op, args, settings)


def selected(draw: Draw, *, with_lse: bool) -> Call:
    t = tokens(CHUNKS)
    cache = SimpleNamespace(ckv=draw.normal(t.num_pages, PAGE, 512))
    cache.kpe = draw.normal(t.num_pages, PAGE, 64)
    K = 6
    chosen = torch.full((len(t.rows), K), -1, dtype=torch.int32)
    for i, n in enumerate(t.hi.tolist()):
        some = torch.randperm(n, generator=draw.generator)[:K].sort().values
        chosen[i, : len(some)] = some.int()
    queries = draw.normal(len(t.rows), 4, 512), draw.normal(len(t.rows), 4, 64)
    args = (*queries, cache, t.page_table, t.rows, chosen)
    op = None if with_lse else "npu_sparse_flash_attention"
    settings = dict(scale=576**-0.5, with_lse=with_lse)
    return Call("sparse_mla_attention", op, args, settings)


def indexer(
    draw: Draw,
    *,
    lo: bool = False,
    of: tuple[tuple[int, int], ...] = CHUNKS,
    hint: bool = False,
) -> Call:
    t = tokens(of)
    keys = SimpleNamespace(k=draw.normal(t.num_pages, PAGE, 128))
    q, gate = draw.normal(len(t.rows), 5, 128), draw.normal(len(t.rows), 5, dtype=torch.float32)
    args = (q, gate, keys, t.page_table, t.rows, t.lo if lo else None, t.hi)
    op = None if lo else "npu_lightning_indexer"
    settings = dict(topk=6, segments=t.segments) if hint else dict(topk=6)
    return Call("lightning_indexer", op, args, settings)


def scores(draw: Draw) -> Call:
    call = indexer(draw, lo=True)
    return Call("indexer_scores", None, call.args)


def top(draw: Draw) -> Call:
    scores_TS = draw.normal(5, 19, dtype=torch.float32).round(decimals=1)  # some are equal
    scores_TS[1, 3:], scores_TS[2] = -torch.inf, -torch.inf
    return Call("select_top", None, (scores_TS,), dict(topk=6))


def experts(draw: Draw, *, wide_weights: bool = False, ids: str = "some") -> Call:
    T, K, E, F, D = 7, 3, 5, 12, 20
    chosen = torch.stack([torch.randperm(E + 2, generator=draw.generator)[:K] for _ in range(T)])
    if ids == "none":
        chosen = torch.full((T, K), -1)
    weights = torch.rand(T, K, generator=draw.generator)
    weights = weights if wide_weights else weights.to(draw.dtype)
    gate_up = draw.normal(E, 2, F, D, scale=0.3)
    args = (draw.normal(T, D), chosen - 1, weights, gate_up, draw.normal(E, D, F, scale=0.3))
    return Call("expert_mlp", "npu_grouped_matmul", args, dict(activation=ops.swiglu))


def rows_to_quantise(draw: Draw) -> Call:
    """A row of zeros, one that is tiny, and one that is large."""
    x = draw.normal(5, 3, 40, scale=3.0)
    x[1, 2], x[0, 1], x[2, 0] = 0, x[0, 1] * 1e-30, x[2, 0] * 1e30
    return Call("dynamic_quant", "npu_dynamic_quant", (x,))


def quantised(draw: Draw, *, bias: torch.dtype | None, op: str | None) -> Call:
    x, w = draw.whole(256, 5, 3, 40) - 128, draw.whole(256, 24, 40) - 128
    scales = [
        (draw.normal(*shape, dtype=torch.float32).abs() + 0.1) / 99 for shape in [(5, 3), (24,)]
    ]
    settings = dict(dtype=draw.dtype, bias=None if bias is None else draw.normal(24, dtype=bias))
    return Call("quant_linear", op, (x.to(torch.int8), w.to(torch.int8), *scales), settings)


def quantised_experts(draw: Draw, *, embed: int = 16, op: str | None) -> Call:
    """One expert has no rows, one row is zeros, and two rows are no expert's."""
    x, w = draw.whole(256, 9, embed) - 128, draw.whole(256, 4, embed, 32) - 128
    x[3] = 0
    scales = [draw.normal(*s, dtype=torch.float32).abs() / 99 for s in [(9,), (4, 32)]]
    args = (x.to(torch.int8), w.to(torch.int8), *scales, torch.tensor([2, 0, 4, 1]))
    return Call("quant_expert_swiglu", op, args)


FIA = "npu_fused_infer_attention_score_v2"
CASES: dict[str, Callable[[Draw], Call]] = {
    "rms": partial(norm, primitive="rms", op="npu_rms_norm", weight=False),
    "rms_norm": partial(norm, primitive="rms_norm", op="npu_rms_norm"),
    "add_rms_norm": partial(summed, op="npu_add_rms_norm"),
    "add_rms_norm, parts": partial(summed, op="npu_rms_norm", dtype=torch.float16),
    "rms_norm_one_plus": partial(norm, primitive="rms_norm_one_plus", op="npu_gemma_rms_norm"),
    "rms_norm_fp32_weight": fp32_weight,
    "layer_norm": partial(norm, primitive="layer_norm", op=None),
    "linear": linear,
    "swiglu": partial(gated, primitive="swiglu", op="npu_swiglu"),
    "swiglu, apart": partial(gated, primitive="swiglu", op="npu_swiglu", apart=True),
    "swiglu_clamped": partial(
        gated, primitive="swiglu_clamped", op="npu_clipped_swiglu", limit=3.0
    ),
    "swiglu_oai": partial(
        gated, primitive="swiglu_oai", op="npu_clipped_swiglu", limit=3.0, alpha=1.3
    ),
    "half": partial(rotated, primitive="rotate_half_split", width=16, heads=3),
    "half, partial": partial(rotated, primitive="rotate_half_split", width=20, heads=3),
    "half, no heads": partial(rotated, primitive="rotate_half_split", width=16, heads=None),
    "interleaved": partial(rotated, primitive="rotate_interleaved", width=16, heads=3),
    "interleaved, partial": partial(rotated, primitive="rotate_interleaved", width=20, heads=None),
    "deinterleaved": partial(rotated, primitive="rotate_deinterleaved", width=16, heads=3),
    "deinterleaved, 64": partial(pairs_of_64, heads=3),
    "deinterleaved, no heads": partial(pairs_of_64, heads=None),
    "latent rows": latent_rows,
    "latent rows, narrow": narrow_latent_rows,
    "prolog": prolog,
    "merge_lse": merge,
    "gate_softmax": partial(gate, primitive="gate_softmax"),
    "gate_softmax, groups": partial(gate, primitive="gate_softmax", groups=4, keep=2),
    "gate_sigmoid": partial(gate, primitive="gate_sigmoid"),
    "gate_sigmoid, groups": partial(gate, primitive="gate_sigmoid", groups=3, keep=2),
    "write_rows": write_rows,
    "write_kv, heads": partial(write_kv, heads=3),
    "write_kv, latents": partial(write_kv, heads=None),
    "attention, chunks": attention,
    "attention, decode": partial(attention, of=SINGLE),
    "attention, mha": partial(attention, heads=(3, 3), width=64),
    "attention, sinks": partial(attention, sinks=True),
    "attention, window": partial(attention, window=9, width=48),
    "attention, odd width": partial(attention, width=20, op=None),
    "attention, gqa of 64": partial(attention, width=64, op=None),
    "expanded, split": partial(expanded, widths=(192, 128)),
    "expanded": partial(expanded, widths=(128, 128)),
    "latents, chunks": latents,
    "latents, decode": partial(latents, of=SINGLE),
    "latents, 3 heads": partial(latents, heads=3),
    "latents, no segments": partial(latents, hint=False),
    "selected": partial(selected, with_lse=False),
    "selected, lse": partial(selected, with_lse=True),
    "indexer": indexer,
    "indexer, lo": partial(indexer, lo=True),
    "indexer, runs": partial(indexer, hint=True),
    "indexer, decode": partial(indexer, of=SINGLE, hint=True),
    "scores": scores,
    "top": top,
    "quantised experts": partial(quantised_experts, op="npu_grouped_matmul_swiglu_quant_v2"),
    "quantised experts, odd width": partial(quantised_experts, embed=20, op=None),
    "quantised rows": rows_to_quantise,
    "quantised": partial(quantised, bias=None, op="npu_quant_matmul"),
    "quantised, bias": partial(quantised, bias=torch.bfloat16, op="npu_quant_matmul"),
    "quantised, wide bias": partial(quantised, bias=torch.float32, op="npu_quant_matmul"),
    "quantised, float64 bias": partial(quantised, bias=torch.float64, op=None),
    "experts": experts,
    "experts, wide weights": partial(experts, wide_weights=True),
    "experts, no choice": partial(experts, ids="none"),
}
# These ops have no float32.
HALF_ONLY = {
    FIA,
    "npu_sparse_flash_attention",
    "npu_lightning_indexer",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
    "npu_dynamic_quant",
    "npu_quant_matmul",
}
# And these have no float16 either: some of their results are bfloat16 whatever the arguments are.
BFLOAT16_ONLY = {"npu_mla_prolog_v3"}
