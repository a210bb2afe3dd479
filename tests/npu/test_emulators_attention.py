"""Emulators of attention and of its indexer, against loops over tokens, heads and keys.

A loop is told which keys each token sees as a list, so that no rule of a mask is shared with the
emulator. Keys that no list has are NaN wherever that may not matter.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.emulators.rules import Unsupported, any_dtype
from tests.npu.simulator import Simulation
from tests.npu.test_emulators import BF16, call, normal

MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
SCALE = 0.11
Seen = list[list[int]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, *, sinks: Sequence[float] | None = None
) -> tuple[Tensor, Tensor]:
    """(out [Q, N, V], lse [Q, N]) of one sequence in double precision."""
    (Q, N, _), heads = q.shape, q.shape[1] // k.shape[1]
    out, lse = torch.zeros(Q, N, v.shape[-1], dtype=torch.float64), torch.zeros(Q, N).double()
    for i in range(Q):
        for n in range(N):
            keys, values = k[:, n // heads].double(), v[:, n // heads].double()
            z = {s: SCALE * float(q[i, n].double() @ keys[s]) for s in seen[i]}
            total = sum(math.exp(x) for x in z.values())
            total += 0.0 if sinks is None else math.exp(sinks[n])
            lse[i, n] = math.log(total)
            out[i, n] = sum((math.exp(x) / total * values[s] for s, x in z.items()), out[i, n])
    return out, lse


def visible(mode: int, queries: int, keys: int, before: int = 0, after: int = 0) -> Seen:
    """The keys of each query, counted out."""
    lists: Seen = []
    for i in range(queries):
        end = i + keys - queries  # the key at the query's own place
        lists.append(
            {
                0: list(range(keys)),
                2: list(range(min(i + 1, keys))),
                3: list(range(end + 1)),
                4: [s for s in range(keys) if end - before <= s <= end + after],
            }[mode]
        )
    return lists


def assert_close(found: Any, wanted: tuple[Tensor, Tensor]) -> None:
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    torch.testing.assert_close(out.cpu().double(), wanted_out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=2e-5, atol=2e-5)


def paged(rows: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """(pages [blocks, size, K D], table) of sequences; what no sequence owns is NaN."""
    need = [-(-len(x) // size) for x in rows]
    order = torch.randperm(sum(need) + 1, generator=torch.Generator().manual_seed(5)).tolist()
    pages = torch.full((len(order), size, rows[0][0].numel()), torch.nan, dtype=rows[0].dtype)
    table = torch.full((len(rows), max(need) + 1), len(order) - 1, dtype=torch.int32)
    for r, x in enumerate(rows):
        for m in range(need[r]):
            part = x[m * size : (m + 1) * size].flatten(1)
            page = order.pop()
            pages[page, : len(part)], table[r, m] = part, page
    return pages, table


@pytest.fixture
def wide() -> Any:
    """The ops take float32 too, to be compared without rounding."""
    with any_dtype():
        yield


def fia(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    moved = {a: x.npu() if isinstance(x, Tensor) else x for a, x in settings.items()}
    common: dict[str, Any] = dict(softmax_scale=SCALE, return_softmax_lse=True)
    return call.npu_fused_infer_attention_score_v2(q.npu(), k.npu(), v.npu(), **common | moved)


LENGTHS = ((3, 8), (1, 5), (4, 4))  # queries and keys of each sequence
Q_SUMS = list(accumulate(q for q, _ in LENGTHS))
HEADS = dict(num_query_heads=4, num_key_value_heads=2)


def ragged(seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (
            normal(q, 4, 128, seed=seed + i),
            normal(s, 2, 128, seed=seed + 10 + i),
            normal(s, 2, 128, seed=seed + 20 + i),
        )
        for i, (q, s) in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("pages", (True, False), ids=("pages", "rows"))
@pytest.mark.parametrize("mode", (0, 2, 3, 4))
def test_ragged_attention(npu: Simulation, wide: None, mode: int, pages: bool):
    seqs = ragged()
    settings = dict(HEADS, input_layout="TND", sparse_mode=mode, actual_seq_qlen=Q_SUMS)
    if mode:
        settings |= dict(atten_mask=MASK, pre_tokens=2, next_tokens=0)
    if pages:
        k, table = paged([k for _, k, _ in seqs], 16)
        v, _ = paged([v for _, _, v in seqs], 16)
        lengths = [s for _, s in LENGTHS]
        settings |= dict(actual_seq_kvlen=lengths, block_table=table, block_size=16)
    else:
        k, v = (torch.cat([x[i] for x in seqs]) for i in (1, 2))
        settings |= dict(actual_seq_kvlen=list(accumulate(s for _, s in LENGTHS)))
    out, lse = fia(torch.cat([q for q, _, _ in seqs]), k, v, **settings)
    assert lse.shape == (8, 4, 1)
    start = 0
    for q, k, v in seqs:
        end = start + len(q)
        wanted = attend(q, k, v, visible(mode, len(q), len(k), before=2))
        assert_close((out[start:end], lse[start:end, :, 0]), wanted)
        start = end


@pytest.mark.parametrize("layout", ("BSND", "BNSD", "BSH"))
def test_padded_attention(npu: Simulation, wide: None, layout: str):
    lens = ((2, 6), (4, 3))
    q, k, v = normal(2, 4, 4, 32), normal(2, 6, 2, 32, seed=1), normal(2, 6, 2, 32, seed=2)
    k[1, 3:], v[1, 3:] = torch.nan, torch.nan
    change = dict(
        BSND=lambda x: x, BNSD=lambda x: x.transpose(1, 2).contiguous(), BSH=lambda x: x.flatten(2)
    )[layout]
    settings = dict(HEADS, input_layout=layout)
    out, lse = fia(
        *map(change, (q, k, v)),
        actual_seq_qlen=[a for a, _ in lens],
        actual_seq_kvlen=[b for _, b in lens],
        **settings,
    )
    assert lse.shape == (2, 4, 4, 1)  # heads before tokens, in every layout
    out = out.cpu()
    out = out.transpose(1, 2) if layout == "BNSD" else out.reshape(2, 4, 4, 32)
    for b, (n, s) in enumerate(lens):
        wanted = attend(q[b, :n], k[b, :s], v[b, :s], visible(0, n, s))
        assert_close((out[b, :n], lse[b, :, :n, 0].T), wanted)


def test_a_mask_is_true_where_a_key_is_hidden(npu: Simulation, wide: None):
    q, k, v = normal(2, 1, 4, 32), normal(2, 6, 2, 32, seed=1), normal(2, 6, 2, 32, seed=2)
    hidden = torch.tensor([[0, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 1]], dtype=torch.bool)
    settings = dict(HEADS, input_layout="BSND", atten_mask=hidden[:, None, None])
    out, lse = fia(q, k, v, **settings)
    for b in range(2):
        wanted = attend(q[b], k[b], v[b], [(~hidden[b]).nonzero()[:, 0].tolist()])
        assert_close((out[b], lse[b, :, :, 0].T), wanted)


@pytest.mark.parametrize("fix", (False, True))
def test_a_row_that_sees_nothing(npu: Simulation, wide: None, fix: bool):
    q, k = normal(1, 2, 4, 32), normal(1, 3, 2, 32, seed=1)
    mask = torch.tensor([[True] * 3, [False] * 3])[None, None]
    settings = dict(HEADS, input_layout="BSND", atten_mask=mask, inner_precise=2 * fix)
    out, lse = fia(q, k, k, **settings)
    assert (out[0, 0] == 0).all() if fix else out[0, 0].isnan().all()
    assert lse[0, :, 0].isnan().all() and lse[0, :, 1].isfinite().all()


def test_a_sink_adds_to_the_sum_alone(npu: Simulation, wide: None):
    q, k, v = (x[:3] for x in ragged()[0])
    sinks = normal(4, seed=7)
    settings = dict(HEADS, input_layout="TND", actual_seq_qlen=[3], actual_seq_kvlen=[3])
    out, lse = fia(q, k, v, learnable_sink=sinks, **settings)
    wanted = attend(q, k, v, visible(0, 3, 3), sinks=sinks.tolist())
    assert_close((out, lse[..., 0]), wanted)


@pytest.mark.parametrize("mode", (0, 3))
def test_latents_are_keys_and_values(npu: Simulation, wide: None, mode: int):
    rows = [normal(s, 1, 576, seed=i) for i, (_, s) in enumerate(LENGTHS)]
    queries = [normal(n, 4, 576, seed=9 + i) for i, (n, _) in enumerate(LENGTHS)]
    latent, table = paged([x[..., :512] for x in rows], 16)
    rope, _ = paged([x[..., 512:] for x in rows], 16)
    q = torch.cat(queries)
    out, lse = fia(
        q[..., :512].contiguous(),
        latent,
        latent,
        query_rope=q[..., 512:].contiguous(),
        key_rope=rope,
        num_query_heads=4,
        num_key_value_heads=1,
        input_layout="TND",
        sparse_mode=mode,
        atten_mask=MASK if mode else None,
        actual_seq_qlen=Q_SUMS,
        actual_seq_kvlen=[s for _, s in LENGTHS],
        block_table=table,
        block_size=16,
    )
    start = 0
    for x, row in zip(queries, rows, strict=True):
        end = start + len(x)
        wanted = attend(x, row, row[..., :512], visible(mode, len(x), len(row)))
        assert_close((out[start:end], lse[start:end, :, 0]), wanted)
        start = end


def good() -> dict[str, Any]:
    """A paged ragged call in bfloat16 that is right."""
    seqs = [tuple(x.to(BF16) for x in seq) for seq in ragged()]
    k, table = paged([k for _, k, _ in seqs], 16)
    return dict(
        HEADS,
        q=torch.cat([q for q, _, _ in seqs]),
        k=k,
        v=paged([v for _, _, v in seqs], 16)[0],
        input_layout="TND",
        sparse_mode=3,
        atten_mask=MASK,
        actual_seq_qlen=Q_SUMS,
        actual_seq_kvlen=[s for _, s in LENGTHS],
        block_table=table,
        block_size=16,
    )


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(atten_mask=None), "needs the compressed mask"),
        (dict(atten_mask=~MASK), "no other mask"),
        (dict(atten_mask=torch.ones(8, 8, dtype=torch.bool).triu(1)), "no other mask"),
        (dict(actual_seq_qlen=[3, 1, 4]), "never fall"),
        (dict(actual_seq_qlen=[3, 4, 7]), "not at T"),
        (dict(actual_seq_kvlen=[8, 13, 60]), "need 4 columns"),
        (dict(actual_seq_kvlen=None), "lengths"),
        (dict(block_size=128), "block_size 128 of pages of 16"),
        (dict(num_key_value_heads=0), "of"),
        (dict(input_layout="BSND"), "BSND|dim"),
        (dict(sparse_mode=6), "modes 0 to 4"),
    ],
    ids=str,
)
def test_what_the_documentation_forbids(npu: Simulation, change: dict[str, Any], rule: str):
    fia(**good())
    with pytest.raises((Unsupported, RuntimeError), match=rule):
        fia(**good() | change)


def test_lengths_of_keys_in_pages_are_not_added_up(npu: Simulation):
    right, wrong = (
        fia(**good() | change)[0] for change in ({}, dict(actual_seq_kvlen=[8, 13, 17]))
    )
    assert torch.equal(right[:3], wrong[:3]) and right.isfinite().all()
    assert wrong[3:].isnan().any(-1).all()


@pytest.mark.parametrize("width", (64, 96, 512))
def test_ragged_heads_have_128_dims(npu: Simulation, width: int):
    q, k = normal(2, 4, width, dtype=BF16), normal(2, 2, width, dtype=BF16)
    settings = dict(HEADS, input_layout="TND", actual_seq_qlen=[2], actual_seq_kvlen=[2])
    with pytest.raises(Unsupported):
        fia(q, k, k, **settings)


def test_half_precision_alone_is_taken(npu: Simulation):
    with pytest.raises(Unsupported, match="float32"):
        fia(*ragged()[2], **HEADS, input_layout="TND", actual_seq_qlen=[4], actual_seq_kvlen=[4])


def test_attention_update_merges_parts(npu: Simulation):
    q, k, v = normal(3, 2, 16), normal(9, 2, 16, seed=1), normal(9, 2, 16, seed=2)
    cuts = [(0, 2), (2, 7), (7, 9)]
    parts = [attend(q, k, v, [list(range(a, b))] * 3) for a, b in cuts]
    lses = [lse.flatten().float().npu() for _, lse in parts]
    outs = [out.flatten(0, 1).float().npu() for out, _ in parts]
    out, lse = call.npu_attention_update(lses, outs, 1)
    wanted = attend(q, k, v, visible(0, 3, 9))
    assert_close((out.cpu().view(3, 2, 16), lse.cpu().view(3, 2)), wanted)
    assert call.npu_attention_update(lses, outs, 0)[1] is None
    with pytest.raises(Unsupported, match="multiple of 8"):
        call.npu_attention_update(lses, [x[:, :12].contiguous() for x in outs], 1)


# ---- the indexer, and attention over what it chooses


def indexed(mode: int, count: int) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    q = [normal(n, 5, 128, seed=i) for i, (n, _) in enumerate(LENGTHS)]
    w = [normal(n, 5, seed=5 + i) for i, (n, _) in enumerate(LENGTHS)]
    k = [normal(s, 1, 128, seed=9 + i) for i, (_, s) in enumerate(LENGTHS)]
    pages, table = paged(k, 16)
    found, values = call.npu_lightning_indexer(
        torch.cat(q).npu(),
        pages[:, :, None].npu(),
        torch.cat(w).npu(),
        actual_seq_lengths_query=torch.tensor(Q_SUMS, dtype=torch.int32).npu(),
        actual_seq_lengths_key=torch.tensor([s for _, s in LENGTHS], dtype=torch.int32).npu(),
        block_table=table.npu(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=count,
        sparse_mode=mode,
    )
    assert values.shape == (0,)
    return found.cpu(), q, w, k


@pytest.mark.parametrize("mode", (0, 3))
@pytest.mark.parametrize("count", (3, 11))
def test_lightning_indexer(npu: Simulation, wide: None, mode: int, count: int):
    found, *parts = indexed(mode, count)
    assert found.shape == (8, 1, count) and found.dtype == torch.int32
    rows = iter(found[:, 0].tolist())
    for q, w, k in zip(*parts, strict=True):
        for i, seen in enumerate(visible(mode, len(q), len(k))):
            score = {
                s: sum(
                    float(w[i, n]) * max(0.0, float(q[i, n].double() @ k[s, 0].double()))
                    for n in range(5)
                )
                for s in seen
            }
            best = sorted(score, key=lambda s: -score[s])[:count]
            assert next(rows) == best + [-1] * (count - len(best))


def test_of_equal_scores_the_indexer_may_take_any(npu: Simulation):
    """The documentation says no order: here it is not the one that a reader would guess."""
    q = torch.zeros(1, 1, 128, dtype=BF16).npu()
    key = torch.zeros(1, 16, 1, 128, dtype=BF16).npu()
    one = torch.tensor([1], dtype=torch.int32)
    found, _ = call.npu_lightning_indexer(
        q,
        key,
        torch.ones(1, 1, dtype=BF16).npu(),
        actual_seq_lengths_query=one.npu(),
        actual_seq_lengths_key=(one * 5).npu(),
        block_table=torch.zeros(1, 1, dtype=torch.int32).npu(),
        layout_query="TND",
        layout_key="PA_BSND",
        sparse_count=2,
    )
    assert found.flatten().tolist() == [4, 3]


def sparse(chosen: list[list[int]], mode: int = 0, **change: Any) -> tuple[Any, Tensor, Tensor]:
    q, k = normal(3, 4, 576), normal(7, 1, 576, seed=1)
    latent, table = paged([k[..., :512]], 16)
    rope, _ = paged([k[..., 512:]], 16)
    settings: dict[str, Any] = dict(
        block_table=table.npu(),
        actual_seq_lengths_query=torch.tensor([3], dtype=torch.int32).npu(),
        actual_seq_lengths_kv=torch.tensor([7], dtype=torch.int32).npu(),
        query_rope=q[..., 512:].contiguous().npu(),
        key_rope=rope[:, :, None].npu(),
        layout_query="TND",
        layout_kv="PA_BSND",
        sparse_mode=mode,
        attention_mode=2,
    )
    latents = latent[:, :, None].npu()
    indices = torch.tensor(chosen, dtype=torch.int32)[:, None].npu()
    found = call.npu_sparse_flash_attention(
        q[..., :512].contiguous().npu(), latents, latents, indices, SCALE, **settings | change
    )
    return found[0].cpu(), q, k


@pytest.mark.parametrize("mode", (0, 3))
def test_sparse_flash_attention(npu: Simulation, wide: None, mode: int):
    chosen = [[6, 0, 2, -1], [1, 5, 6, 3], [4, -1, -1, -1]]
    out, q, k = sparse(chosen, mode)
    causal = visible(3, 3, 7)
    seen = [
        [s for s in row if s >= 0 and (mode == 0 or s in causal[i])] for i, row in enumerate(chosen)
    ]
    wanted, _ = attend(q, k, k[..., :512], seen)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("chosen", "change", "rule"),
    [
        ([[0, 1], [0, 1], [0, 1]], dict(attention_mode=0), "attention_mode 2"),
        ([[0, 1], [-1, 1], [0, 1]], {}, "comes first"),
        ([[0, 1], [7, 1], [0, 1]], {}, "below 7"),
        ([[0, 1], [0, 1], [0, 1]], dict(query_rope=None), "ropes"),
    ],
)
def test_sparse_flash_attention_refuses(
    npu: Simulation, wide: None, chosen: list[list[int]], change: dict[str, Any], rule: str
):
    with pytest.raises((Unsupported, RuntimeError), match=rule):
        sparse(chosen, **change)
