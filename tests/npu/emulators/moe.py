"""Routing: which rows go to which experts, their order, the grouped product, and the way back.

Legend: T tokens, E experts, K choices of a token, M = T K rows, G groups.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.npu.emulators.rules import FLOATS, dtypes, emulator, require, unwritten


@emulator
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the chosen experts. `bias` only chooses, and softmax is never normalised."""
    name = "npu_moe_gating_top_k"
    dtypes(name, FLOATS, x, bias)
    T, E = x.shape
    require(renorm == 0 and norm_type in (0, 1), f"{name}: renorm 0, norm_type 0 or 1")
    require(E <= 2048 and 1 <= k <= E, f"{name}: E {E}, k {k}")
    require(E % group_count == 0 and 1 <= k_group <= group_count, f"{name}: groups")
    require(group_count == 1 or E // group_count > 2, f"{name}: groups of more than 2 experts")
    require(k <= E // group_count * k_group, f"{name}: k {k} of {k_group} groups")
    score = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = score if bias is None else score + bias.float()
    if group_count > 1:
        grouped = choice.unflatten(1, (group_count, -1))
        best = grouped.topk(2 if group_select_mode == 1 else 1, -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
        open_TG = torch.zeros(T, group_count, dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.masked_fill(~open_TG[..., None], -torch.inf).flatten(1)
    index = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    y = score.gather(1, index)
    if norm_type == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    y = (y * routed_scaling_factor).to(x.dtype)
    return y, index.int(), score if out_flag else unwritten(T, E)


@emulator
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    T, E = x.shape
    order = x.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    index = order.indices[:, :k].int()
    if finished is not None:
        index = index.masked_fill(finished[:, None], E)
    rows = torch.arange(T * k, dtype=torch.int32).view(k, T).T.contiguous()
    return order.values[:, :k].to(x.dtype), index.contiguous(), rows


@emulator
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    active_num: int,
    expert_num: int,
    expert_tokens_num_type: int,
    expert_tokens_num_flag: bool,
    quant_mode: int,
    active_expert_range: list[int],
    row_idx_type: int,
    drop_pad_mode: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert, equal ones in their order; those outside the range come last."""
    name = "npu_moe_init_routing_v2"
    require(x.dtype in FLOATS and expert_idx.dtype == torch.int32, f"{name}: dtypes")
    require(drop_pad_mode == 0 and quant_mode in (-1, 1), f"the emulator of {name} drops nothing")
    (T, K), H = expert_idx.shape, x.shape[1]
    M = T * K
    require(active_num in (-1, 0, M), f"the emulator of {name} keeps all rows, not {active_num}")
    require(expert_num > 0, f"{name}: expert_num {expert_num}")
    start, end = active_expert_range or (0, expert_num)
    require(0 <= start < end <= expert_num, f"{name}: range {start, end} of {expert_num}")
    flat = expert_idx.flatten().long()
    require(not M or (flat.min() >= 0 and flat.max() < expert_num), f"{name}: experts in range")
    mine = (flat >= start) & (flat < end)
    order = torch.where(mine, flat, expert_num).sort(stable=True).indices
    used = int(mine.sum())
    if row_idx_type == 0:  # where each row went
        index = torch.full((M,), -1)
        index[order[:used]] = torch.arange(used)
    else:  # where each row came from
        index = order.clone()
        index[used:] = unwritten(M - used, dtype=torch.int64)
    rows = unwritten(M, H, dtype=x.dtype)
    rows[:used] = x[order[:used] // K]
    scale = unwritten(M)
    if quant_mode == 1:
        wide = rows.float()
        scale = wide.abs().amax(-1) / 127
        rows = (wide / scale[:, None]).round().nan_to_num(-128).to(torch.int8)
    counts = torch.bincount(flat[mine] - start, minlength=end - start)
    if not expert_tokens_num_flag:
        counts = unwritten(end - start, dtype=torch.int64)
    elif expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    elif expert_tokens_num_type == 2:
        pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
        hit = counts.nonzero()[:, 0]
        pairs[: len(hit)] = torch.stack([hit + start, counts[hit]], 1)
        counts = pairs
    return rows, index.int(), counts, scale


@emulator
def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    per_token_scales: Tensor | None,
    expert_token_num_type: int,
    idx_type: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From (rank, expert) order to (expert, rank) order."""
    name = "npu_moe_re_routing"
    require(expert_token_num_type == 1 and idx_type == 0, f"{name}: counts, and indices to gather")
    counts = expert_token_num_per_rank.long()
    require(counts.ndim == 2 and counts.sum() == tokens.shape[0], f"{name}: counts [ranks, E]")
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    index = torch.cat(
        [
            torch.arange(starts[r, e].item(), (starts[r, e] + counts[r, e]).item())
            for e in range(counts.shape[1])
            for r in range(counts.shape[0])
        ]
    )
    scales = unwritten(tokens.shape[0]) if per_token_scales is None else per_token_scales[index]
    totals = counts.sum(0).to(expert_token_num_per_rank.dtype)
    return tokens[index], scales, index.int(), totals


def group_bounds(groups: Tensor | Sequence[int], kind: int, rows: int) -> list[tuple[int, int]]:
    """(start, end) of each group; kind 0 has sums, 1 has counts, 2 has pairs (group, count)."""
    values = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    require(kind in (0, 1), f"the emulator of npu_grouped_matmul knows list types 0, 1, not {kind}")
    ends = torch.tensor(values).cumsum(0).tolist() if kind == 1 else values
    starts = [0, *ends[:-1]]
    rising = all(0 <= a <= b <= rows for a, b in zip(starts, ends, strict=True))
    require(rising, f"npu_grouped_matmul: groups {values} of {rows} rows as list type {kind}")
    return list(zip(starts, ends, strict=True))


@emulator
def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    group_list: Tensor | list[int] | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    act_type: int | None,
    output_dtype: int | None,
) -> list[Tensor]:
    """Rows past the last group are undefined."""
    name = "npu_grouped_matmul"
    require(not act_type, f"the emulator of {name} applies no activation")
    dtypes(name, (*FLOATS, torch.int8), *x, *weight)
    require(group_type == 0 and len(x) == len(weight) == 1, f"the emulator of {name} splits M")
    require(group_list is not None, f"{name}: groups of rows")
    assert group_list is not None
    require(split_item in (2, 3), f"{name}: one result: split_item 2 or 3, not {split_item}")
    if isinstance(group_list, Tensor):
        require(group_list.dtype == torch.int64, f"{name}: group_list is int64")
    a, b = x[0], weight[0]
    E, H, N = b.shape
    require(a.ndim == 2 and a.shape[1] == H, f"{name}: x [M, {H}]")
    require(max(H, N) < 65536, f"{name}: widths below 65536")
    require(len(group_list) == E, f"{name}: a group for each of {E} experts")
    quantised = a.dtype == torch.int8
    require(quantised == (scale is not None), f"{name}: int8 takes scales, others none")
    out_dtype = _out_dtype(output_dtype, a)
    y = unwritten(a.shape[0], N)
    for e, (start, end) in enumerate(group_bounds(group_list, group_list_type or 0, a.shape[0])):
        rows = a[start:end].float() @ b[e].float()
        if scale is not None:
            rows = rows * scale[0][e].float()
        if per_token_scale is not None:
            rows = rows * per_token_scale[0][start:end, None]
        if bias is not None:
            rows = rows + bias[0][e].float()
        y[start:end] = rows
    return [y.to(out_dtype)]


def _out_dtype(code: int | torch.dtype | None, x: Tensor) -> torch.dtype:
    if isinstance(code, torch.dtype):
        return code
    names = {1: torch.int8, 5: torch.float16, 15: torch.bfloat16, 6: torch.float32, 3: torch.int32}
    if code is None:
        return x.dtype
    require(code in names, f"npu_grouped_matmul: output_dtype {code}")
    return names[code]


@emulator
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None,
) -> Tensor:
    """The weighted sum over a token's rows. Modes 0, 1 count rows k T + t, modes 2, 3 t K + k."""
    name = "npu_moe_finalize_routing"
    rows, index = expanded_permuted_rows, expanded_src_to_dst_row
    dtypes(name, FLOATS, rows, skip1, skip2, bias)
    require(scales is None or scales.dtype in (rows.dtype, torch.float32), f"{name}: scales")
    require(index.dtype == torch.int32 and index.ndim == 1, f"{name}: rows int32 [T K]")
    require(skip1 is not None or skip2 is None, f"{name}: skip2 needs skip1")
    require(drop_pad_mode in (0, 1, 2, 3), f"{name}: drop_pad_mode {drop_pad_mode}")
    K = 1 if scales is None else scales.shape[1]
    T = index.shape[0] // K
    flat = rows.flatten(0, -2)
    if drop_pad_mode in (0, 2):
        require(rows.ndim == 2, f"{name}: without dropping, rows [T K, H]")
    require(not index.numel() or index.max() < flat.shape[0], f"{name}: rows below {len(flat)}")
    index_TK = index.view(K, T).T if drop_pad_mode in (0, 1) else index.view(T, K)
    out = torch.zeros(T, flat.shape[1])
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.float()
    for k in range(K):
        at = index_TK[:, k].long()
        part = torch.where((at >= 0)[:, None], flat[at.clamp(min=0)].float(), 0.0)
        if bias is not None and export_for_source_row is not None:
            part = part + bias[export_for_source_row[:, k].long()].float()
        out = out + (part if scales is None else scales[:, k, None].float() * part)
    return out.to(rows.dtype)
