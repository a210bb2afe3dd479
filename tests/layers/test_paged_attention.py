"""Attention over a paged cache and the merge of its parts, against loops over floats."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import reference_attention, tiles
from tests.layers import slow

SCALE = 0.37


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Cache:
    k: Tensor
    v: Tensor


class Case(SimpleNamespace):
    """A random call: tokens of several requests in any order, pages dealt at random.

    Every slot that no token sees is NaN in the cache, whole unused pages included.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    rows: Tensor
    lo: Tensor
    hi: Tensor
    sinks: Tensor | None = None

    def poisoned(self, poison: float) -> "Case":
        seen = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        page = self.k.shape[1]
        for row, lo, hi in zip(self.rows, self.lo, self.hi, strict=True):
            for s in range(max(0, int(lo)), min(int(hi), self.table.shape[1] * page)):
                seen[self.table[row, s // page], s % page] = True
        hidden = ~seen[:, :, None, None]
        k, v = (x.masked_fill(hidden, poison) for x in (self.k, self.v))
        return Case(**{**vars(self), "k": k, "v": v})

    def arguments(self, rows: slice | Tensor = slice(None)) -> tuple:
        tokens = (x[rows] for x in (self.rows, self.lo, self.hi))
        return self.q[rows], Cache(self.k, self.v), self.table, *tokens

    def run(self) -> tuple[Tensor, Tensor]:
        return ops.paged_attention(*self.arguments(), scale=SCALE, sinks_N=self.sinks)

    def slowly(self) -> tuple[Tensor, Tensor]:
        lists = (self.q, self.k, self.v, self.table, self.rows, self.lo, self.hi)
        sinks = None if self.sinks is None else self.sinks.tolist()
        out, lse = slow.paged_attention(*(x.tolist() for x in lists), SCALE, sinks)
        shape = *self.q.shape[:2], self.v.shape[3]
        return (
            torch.tensor(out, dtype=torch.float64).reshape(shape),
            torch.tensor(lse, dtype=torch.float64).reshape(shape[:2]),
        )


def make_case(
    rows: list[int],
    spans: list[tuple[int, int]],
    *,
    requests: int = 3,
    pages: int = 3,
    page: int = 4,
    kv_heads: int = 2,
    group: int = 3,
    dims: tuple[int, int] = (5, 7),
    seed: int = 0,
    dtype: torch.dtype = torch.int64,
    sinks: bool = False,
) -> Case:
    total = requests * pages + 1
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return Case(
        q=draw(len(rows), kv_heads * group, dims[0], seed=seed),
        k=draw(total, page, kv_heads, dims[0], seed=seed + 1),
        v=draw(total, page, kv_heads, dims[1], seed=seed + 2),
        table=order[: requests * pages].view(requests, pages).to(dtype),
        rows=torch.tensor(rows, dtype=dtype),
        lo=torch.tensor([lo for lo, _ in spans], dtype=dtype),
        hi=torch.tensor([hi for _, hi in spans], dtype=dtype),
        sinks=draw(kv_heads * group, seed=seed + 3) if sinks else None,
    )


@st.composite
def cases(draw_from) -> Case:
    requests, pages, page = (draw_from(st.integers(1, n)) for n in (4, 3, 4))
    tokens = draw_from(st.integers(0, 12))
    length = pages * page
    row, bound = st.integers(0, requests - 1), st.integers(0, length)
    return make_case(
        draw_from(st.lists(row, min_size=tokens, max_size=tokens)),
        draw_from(st.lists(st.tuples(bound, bound), min_size=tokens, max_size=tokens)),
        requests=requests,
        pages=pages,
        page=page,
        kv_heads=draw_from(st.integers(1, 3)),
        group=draw_from(st.integers(1, 3)),
        dims=draw_from(st.tuples(st.integers(1, 5), st.integers(1, 5))),
        seed=draw_from(st.integers(0, 99)),
        dtype=draw_from(st.sampled_from([torch.int32, torch.int64])),
        sinks=draw_from(st.booleans()),
    )


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@given(
    case=cases(), max_tile=st.sampled_from([1, 2, 3, 64]), block=st.sampled_from([1, 300, 2**21])
)
def test_equals_the_loop_whatever_hides_in_unseen_slots(case, max_tile, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_attention, "MAX_TILE", max_tile)
        patch.setattr(tiles, "BLOCK_ELEMENTS", block)
        want = case.slowly()
        for poison in (math.nan, math.inf, -1e300):
            assert_same(case.poisoned(poison).run(), want)


ROWS = [1, 0, 1, 1, 2, 1, 0]
SPANS = [(0, 1), (0, 9), (0, 2), (0, 3), (3, 12), (4, 4), (7, 2)]


@pytest.mark.parametrize("sinks", [False, True])
def test_equals_the_loop_on_chunks_and_single_tokens(sinks):
    case = make_case(ROWS, SPANS, sinks=sinks)
    assert_same(case.poisoned(math.nan).run(), case.slowly())
    decode = make_case([0, 1, 2], [(0, 12), (0, 1), (5, 8)], sinks=sinks)
    assert_same(decode.poisoned(math.nan).run(), decode.slowly())


def test_every_boundary_of_a_small_table():
    """All (lo, hi) of two pages of 1, 2 and 3 slots, ends beyond the table included."""
    for page in (1, 2, 3):
        spans = [(lo, hi) for lo in range(-1, 2 * page + 2) for hi in range(-1, 2 * page + 2)]
        case = make_case([i % 2 for i in range(len(spans))], spans, requests=2, pages=2, page=page)
        assert_same(case.poisoned(math.nan).run(), case.slowly())


def test_a_token_does_not_depend_on_its_neighbours():
    case = make_case(ROWS, SPANS, sinks=True)
    whole = case.run()
    for i in range(len(ROWS)):
        one = torch.tensor([i])
        alone = ops.paged_attention(*case.arguments(one), scale=SCALE, sinks_N=case.sinks)
        assert_same(alone, (whole[0][one], whole[1][one]))


def test_a_visible_nan_reaches_only_those_who_see_it():
    case = make_case([0, 0, 0, 1], [(0, 3), (0, 6), (4, 9), (0, 9)])
    clean_out, clean_lse = case.run()
    for which in ("k", "v"):
        spoilt = Case(**{**vars(case), which: getattr(case, which).clone()})
        page = spoilt.table[0, 1]  # positions 4 .. 7 of request 0
        getattr(spoilt, which)[page, 1, 0, 2] = math.nan  # position 5, KV head 0
        out, lse = spoilt.run()
        for token, head in [(1, slice(0, 3)), (2, slice(0, 3))]:
            assert out[token, head].isnan().all()
            assert lse[token, head].isnan().all()
            assert torch.equal(out[token, 3:], clean_out[token, 3:])
        for token in (0, 3):
            assert torch.equal(out[token], clean_out[token])
            assert torch.equal(lse[token], clean_lse[token])


def test_a_token_that_sees_nothing():
    case = make_case([0, 1, 0, 2], [(0, 0), (0, 5), (3, 3), (0, 7)]).poisoned(math.nan)
    out, lse = case.run()
    assert out[[0, 2]].eq(0).all()
    assert lse[[0, 2]].eq(-math.inf).all()
    assert out.isfinite().all()
    case.sinks = draw(6, seed=9)
    case.sinks[2] = -math.inf  # a head without a sink
    with_out, with_lse = case.run()
    assert with_out[[0, 2]].eq(0).all()
    assert torch.equal(with_lse[[0, 2]], case.sinks.expand(2, 6))
    assert torch.equal(with_out[:, 2], out[:, 2])
    assert not torch.allclose(with_out[1, 3:], out[1, 3:])


def test_natural_logarithm_by_hand():
    """Keys of logit 0: log of their number; two against one merge with weights 2/3 and 1/3."""
    k, v = torch.zeros(1, 4, 1, 3), torch.tensor([6.0, 6.0, 9.0, 9.0]).view(1, 4, 1, 1)
    rows, lo, hi = (torch.tensor(x) for x in ([0, 0, 0], [0, 2, 0], [2, 3, 3]))
    q, table = draw(3, 1, 3).float(), torch.tensor([[0]])
    out, lse = ops.paged_attention(q, Cache(k, v), table, rows, lo, hi, scale=1.0)
    assert lse.exp().flatten().tolist() == pytest.approx([2, 1, 3])
    assert out.flatten().tolist() == pytest.approx([6, 9, 7])
    merged, merged_lse = ops.merge_lse(out[:2], lse[:2])
    assert merged.item() == pytest.approx(2 / 3 * 6 + 1 / 3 * 9)
    assert merged_lse.exp().item() == pytest.approx(3)


def test_lse_is_the_logsumexp_of_scaled_scores_whatever_their_size():
    k, v = 300 * draw(2, 4, 1, 3).float(), draw(2, 4, 1, 2, seed=1).float()
    q, table = draw(1, 2, 3, seed=2).float(), torch.tensor([[0, 1]])
    zero, eight = torch.tensor([0]), torch.tensor([8])
    _, lse = ops.paged_attention(q, Cache(k, v), table, zero, zero, eight, scale=2.0)
    scores = 2 * torch.einsum("tnh,skh->tns", q, k.flatten(0, 1))
    assert scores.abs().max() > 1000
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_conventions_change_the_result():
    case = make_case(ROWS, SPANS, sinks=True)
    out, lse = case.run()
    flipped = [
        {"sinks": None},
        {"sinks": case.sinks * SCALE},
        {"q": case.q / SCALE},
        {"table": case.table.flip(1)},
        {"hi": case.hi - 1},
        {"lo": case.lo + 1},
        {"q": case.q.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2)},  # head = g * K + k
    ]
    for change in flipped:
        other_out, other_lse = Case(**{**vars(case), **change}).run()
        assert not torch.allclose(out, other_out), change
        assert not torch.allclose(lse, other_lse), change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    case = make_case(ROWS, SPANS, sinks=True)
    low = Case(**{**vars(case), **{name: getattr(case, name).to(dtype) for name in "qkv"}})
    out, lse = low.run()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    exact = Case(**{**vars(case), **{name: getattr(low, name).double() for name in "qkv"}})
    want_out, want_lse = exact.slowly()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want_out, rtol=step, atol=max(step, 1e-5))


def test_meta_gives_shapes():
    case = make_case(ROWS, SPANS, sinks=True)
    meta = Case(**{name: x.to("meta") for name, x in vars(case).items()})
    out, lse = meta.run()
    assert out.device.type == lse.device.type == "meta"
    assert (out.shape, lse.shape) == ((7, 6, 7), (7, 6))


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients(sinks):
    rows, spans = [1, 0, 1, 1, 0], [(0, 1), (0, 5), (0, 2), (1, 4), (2, 2)]
    case = make_case(
        rows, spans, requests=2, pages=2, page=3, kv_heads=1, group=2, dims=(2, 3), sinks=sinks
    )

    def attend(q, k, v, *sinks_N):
        changed = Case(**{**vars(case), "q": q, "k": k, "v": v})
        changed.sinks = sinks_N[0] if sinks else None
        out, lse = changed.run()
        return out, lse[case.hi > case.lo]  # -inf has no finite difference

    inputs = [case.q, case.k, case.v] + ([case.sinks] if sinks else [])
    assert torch.autograd.gradcheck(attend, tuple(x.requires_grad_() for x in inputs))


def test_gradients_of_poisoned_pages_are_those_of_clean_ones():
    def gradients(case: Case) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v, case.sinks)]
        fields = dict(zip(("q", "k", "v", "sinks"), inputs, strict=True))
        out, lse = Case(**{**vars(case), **fields}).run()
        weights = draw(*out.shape, seed=5), draw(*lse.shape, seed=6)
        ((out * weights[0]).sum() + (lse * weights[1]).sum()).backward()
        return [x.grad for x in inputs]

    clean = make_case(ROWS, SPANS, sinks=True)
    for poison in (math.nan, math.inf):
        for got, want in zip(gradients(clean.poisoned(poison)), gradients(clean), strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got, want)


def test_functional_gradients_are_those_of_autograd():
    case = make_case(ROWS, SPANS).poisoned(math.nan)

    def total(q: Tensor) -> Tensor:
        return Case(**{**vars(case), "q": q}).run()[0].square().sum()

    q = case.q.clone().requires_grad_()
    total(q).backward()
    torch.testing.assert_close(torch.func.grad(total)(case.q), q.grad)
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("tokens", [3, 7])
def test_traces_whole(tokens):
    torch.compiler.reset()
    case = make_case(ROWS[:tokens], SPANS[:tokens], sinks=True)
    q, kv, *rest = case.arguments()

    def attend(q, k, v, *rest):
        return ops.paged_attention(q, Cache(k, v), *rest, scale=SCALE, sinks_N=case.sinks)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert_same(compiled(q, kv.k, kv.v, *rest), case.run())


# ---- merge


def split_attention(scores: Tensor, values: Tensor, owner: list[int], parts: int):
    """Each part's (out, lse) over the keys that it owns, by the loop."""
    pairs = []
    for part in range(parts):
        mine = [i for i, o in enumerate(owner) if o == part]
        pairs.append(slow.softmax_sum(scores[mine].tolist(), values[mine].tolist(), 3))
    outs, lses = zip(*pairs, strict=True)
    return torch.tensor(outs, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)


@given(
    owner=st.lists(st.integers(0, 4), max_size=11),
    grouping=st.integers(1, 4),
    order=st.permutations(range(5)),
    seed=st.integers(0, 99),
)
def test_merge_is_a_monoid(owner, grouping, order, seed):
    scores, values = 30 * draw(len(owner), seed=seed), draw(len(owner), 3, seed=seed + 1)
    outs, lses = split_attention(scores, values, owner, 5)
    whole = split_attention(scores, values, [0] * len(owner), 1)
    whole = whole[0][0], whole[1][0]
    assert_same(ops.merge_lse(outs, lses), whole)
    assert_same(ops.merge_lse(outs[list(order)], lses[list(order)]), whole)
    left, right = (ops.merge_lse(outs[s], lses[s]) for s in (slice(grouping), slice(grouping, 5)))
    pair = torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]])
    assert_same(ops.merge_lse(*pair), whole)


@given(case=cases(), cut=st.integers(0, 12))
def test_attention_over_a_split_interval_merges_to_the_whole(case, cut):
    """The sink belongs to one part; a part may be empty."""
    whole = case.run()
    middle = torch.full_like(case.hi, cut).clamp(case.lo, case.hi.maximum(case.lo))
    first = Case(**{**vars(case), "hi": middle}).run()
    second = Case(**{**vars(case), "lo": middle, "sinks": None}).run()
    outs, lses = (torch.stack(parts) for parts in zip(first, second, strict=True))
    assert_same(ops.merge_lse(outs, lses), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_identity_is_anything_at_minus_infinity(dtype):
    out, lse = draw(5, 2, 3).to(dtype), 9 * draw(5, 2, seed=1).float()
    nothing = torch.full_like(lse, -math.inf)
    for garbage in (math.nan, math.inf, 1e30):
        other = torch.full_like(out, garbage)
        for order in ([0, 1], [1, 0]):
            outs, lses = torch.stack([out, other])[order], torch.stack([lse, nothing])[order]
            merged, merged_lse = ops.merge_lse(outs, lses)
            assert merged.dtype == dtype
            assert torch.equal(merged, out)
            assert torch.equal(merged_lse, lse)
        merged, merged_lse = ops.merge_lse(
            torch.stack([other, other]), torch.stack([nothing, nothing])
        )
        assert merged.eq(0).all()
        assert merged_lse.eq(-math.inf).all()


def test_merge_has_gradients_and_traces():
    outs, lses = draw(3, 4, 2).requires_grad_(), draw(3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(ops.merge_lse, (outs, lses))
    torch.compiler.reset()
    compiled = torch.compile(lambda a, b: ops.merge_lse(a, b), fullgraph=True, backend="aot_eager")
    assert_same(compiled(outs, lses), ops.merge_lse(outs, lses))
    meta = ops.merge_lse(outs.to("meta"), lses.to("meta"))
    assert [x.shape for x in meta] == [(4, 2), (4,)]
    halves = ops.merge_lse(outs.bfloat16(), lses.bfloat16())
    assert [x.dtype for x in halves] == [torch.bfloat16, torch.float32]


# ---- messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": draw(7, 5, 5)}, r"5 q heads can't be grouped over 2 KV heads; q is \(7, 5, 5\)"),
        ({"q": draw(7, 6, 4)}, r"q has head dim 4 and k 5"),
        ({"q": draw(7, 5)}, r"wanted q \[T, N, H\]"),
        ({"v": draw(10, 4, 1, 7)}, r"k and v must agree .* v \(10, 4, 1, 7\)"),
        ({"table": torch.zeros(0, 3, dtype=torch.int64)}, r"at least one request and one page"),
        ({"table": torch.zeros(3, 0, dtype=torch.int64)}, r"at least one request and one page"),
        ({"hi": torch.zeros(1, dtype=torch.int64)}, r"hi is \(1,\) but must have .* token: 7"),
        ({"sinks": draw(2)}, r"sinks is \(2,\) but must have one entry a q head: 6"),
    ],
)
def test_messages(change, message):
    case = make_case(ROWS, SPANS)
    with pytest.raises(ValueError, match="paged_attention: .*" + message):
        Case(**{**vars(case), **change}).run()


def test_merge_messages():
    with pytest.raises(ValueError, match=r"outs \(3, 4, 2\) and lses \(3, 4, 1\); wanted"):
        ops.merge_lse(draw(3, 4, 2), draw(3, 4, 1))
    with pytest.raises(ValueError, match="with n >= 1"):
        ops.merge_lse(draw(0, 4, 2), draw(0, 4))
