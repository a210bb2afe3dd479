"""What every attention layer does with its queries and its heads' outputs, on any mesh.

    attend       q[T_q, N_h, H], pages dealt over c   -> o[T_q, N_h, V]
    project_out  o[T_q, N_h, V] . wo[D, N_o, V]       -> y[T_residual, D]

T tokens, N query heads, H and V widths of keys and values, D model width. Queries go to the keys:
ranks that hold different offsets of the pages each attend with all heads of their group, and the
parts are merged by their LSE.
"""

from typing import Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.layers import primitives as ops
from funcinfer.sharding import (
    P,
    Rules,
    all_gather,
    all_to_all,
    axis_size,
    both,
    drop,
    extends,
    longer,
    names,
    reduce_to,
    reshard,
)
from funcinfer.sharding.mesh import Axis, axis_of


def attend(
    q_TNH: torch.Tensor, cache: Any, step: Step, *, rules: Rules, scale: float
) -> torch.Tensor:
    """Softmax attention of queries over the pages of their requests, from and to (q_tokens,
    heads).
    """
    dealt = rules["page_tokens"]
    full = P(rules["q_tokens"], rules["heads"], None)
    whole = P(*(drop(axis, dealt) for axis in full))
    q_TNH = reshard(q_TNH, full, whole)
    o_TNV, lse_TN = ops.paged_attention(
        q_TNH,
        cache,
        step.page_table,
        step.rows,
        step.lo,
        step.hi,
        scale=scale,
        segments=step.segments,
    )
    return merge_to(o_TNV, lse_TN, dealt, whole, full)


def merge_to(o_TNV: torch.Tensor, lse_TN: torch.Tensor, over: Axis, src: P, dst: P) -> torch.Tensor:
    """Merge attention parts over disjoint keys on the axes `over`; `o` goes from layout `src` to
    `dst`.

    Axes of `over` that `dst` deals go by one all_to_all a dim of packed [o | lse], the rest by an
    all_gather: `reduce_to` with the monoid of (out, lse) in place of the sum. ValueError where
    `dst` drops, moves or adds another axis. Source: the split-key merge of FlashAttention-2 (Dao,
    2023).
    """
    for dim, (s, d) in enumerate(zip(src, dst, strict=True)):
        kept = extends(d, s) if dim else set(names(s)) <= set(names(d))
        if both(over, s) or drop(drop(d, s), over) or not kept:
            raise ValueError(
                f"parts over {over!r} can't go from {src!r} to {dst!r}:"
                f" dim {dim} may only gain axes of {over!r}, at its minor end"
            )
    if axis_size(over) == 1:
        return o_TNV
    packed = torch.cat([o_TNV.to(lse_TN.dtype), lse_TN[..., None]], -1)
    for dim, (s, d) in enumerate(zip(src, dst, strict=True)):
        run = axis_of(a for a in names(drop(d, s)) if a in names(over))
        if axis_size(run) > 1:
            parts = all_to_all(packed, run, split=dim, concat=dim)
            packed = _merge(torch.stack(parts.chunk(axis_size(run), dim)))
    rest = drop(over, dst.axes)
    if axis_size(rest) > 1:
        packed = _merge(all_gather(packed[None], rest, dim=0))
    return packed[..., :-1].to(o_TNV.dtype)


def _merge(parts: torch.Tensor) -> torch.Tensor:
    o_TNV, lse_TN = ops.merge_lse(parts[..., :-1], parts[..., -1])
    return torch.cat([o_TNV, lse_TN[..., None]], -1)


def project_out(
    wo_DNV: torch.Tensor, o_TNV: torch.Tensor, *, rules: Rules, bias_D: torch.Tensor | None = None
) -> torch.Tensor:
    """The output projection, its heads over `o_heads`: from (q_tokens, heads) to residual_tokens.

    The bias is added once, after the sum over ranks.
    """
    q_tokens, o_tokens, o_heads = rules["q_tokens"], rules["o_tokens"], rules["o_heads"]
    residual = rules["residual_tokens"]
    dealt = longer(q_tokens, residual)
    o_TNV = reshard(o_TNV, P(q_tokens, rules["heads"], None), P(o_tokens, o_heads, None))
    y_TD = ops.linear(o_TNV, wo_DNV, dims=2)
    y_TD = reduce_to(y_TD, o_heads, P(o_tokens, None), P(dealt, None))
    y_TD = reshard(y_TD, P(dealt, None), P(residual, None))
    return y_TD if bias_D is None else y_TD + bias_D
