"""The primitives of latent attention and of the indexer against scalar loops, whatever hides in
slots that aren't seen.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import reference_indexer, reference_mla, tiles
from tests.layers import slow

SCALE = 0.7
N, C, E, I, H = 3, 5, 4, 3, 6


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """Tokens of requests with their intervals, and -1-padded choices of positions."""

    q: Tensor
    q_pe: Tensor
    ckv: Tensor
    kpe: Tensor
    index_q: Tensor
    gate: Tensor
    keys: Tensor
    table: Tensor
    rows: Tensor
    lo: Tensor
    hi: Tensor
    chosen: Tensor

    @property
    def cache(self) -> SimpleNamespace:
        return SimpleNamespace(ckv=self.ckv, kpe=self.kpe)

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.table, self.rows, self.lo, self.hi

    @property
    def length(self) -> int:
        return self.table.shape[1] * self.ckv.shape[1]

    def dense(self) -> tuple[Tensor, Tensor]:
        return ops.paged_mla_attention(self.q, self.q_pe, self.cache, *self.tokens, scale=SCALE)

    def sparse(self) -> tuple[Tensor, Tensor]:
        return ops.sparse_mla_attention(
            self.q, self.q_pe, self.cache, self.table, self.rows, self.chosen, scale=SCALE
        )

    def scores(self) -> Tensor:
        keys = SimpleNamespace(k=self.keys)
        return ops.indexer_scores(self.index_q, self.gate, keys, *self.tokens)

    def top(self, topk: int) -> Tensor:
        keys = SimpleNamespace(k=self.keys)
        return ops.lightning_indexer(self.index_q, self.gate, keys, *self.tokens, topk=topk)

    def place(self, token: int, s: int) -> tuple[int, int]:
        page = self.ckv.shape[1]
        return int(self.table[self.rows[token], s // page]), s % page

    def poisoned(self, seen: list[list[int]], poison: float) -> "Case":
        """Every slot that no token sees filled with `poison`, the scratch page included."""
        kept = {self.place(t, s) for t, row in enumerate(seen) for s in row}
        pools = {}
        for name in ("ckv", "kpe", "keys"):
            pool = torch.full_like(getattr(self, name), poison)
            for place in kept:
                pool[place] = getattr(self, name)[place]
            pools[name] = pool
        return dataclasses.replace(self, **pools)

    def intervals(self) -> list[list[int]]:
        bounds = zip(self.lo.tolist(), self.hi.tolist(), strict=True)
        return [[s for s in range(self.length) if lo <= s < hi] for lo, hi in bounds]

    def choices(self) -> list[list[int]]:
        return [[s for s in row if s >= 0] for row in self.chosen.tolist()]

    def slow_attention(self, seen: list[list[int]]) -> tuple[Tensor, Tensor]:
        outs = torch.zeros(len(seen), N, C, dtype=torch.float64)
        lses = torch.zeros(len(seen), N, dtype=torch.float64)
        for t, positions in enumerate(seen):
            places = [self.place(t, s) for s in positions]
            values = [self.ckv[place].tolist() for place in places]
            keys = [self.ckv[place].tolist() + self.kpe[place].tolist() for place in places]
            for n in range(N):
                query = self.q[t, n].tolist() + self.q_pe[t, n].tolist()
                scores = [SCALE * sum(a * b for a, b in zip(query, k, strict=True)) for k in keys]
                out, lse = slow.softmax_sum(scores, values, C)
                outs[t, n], lses[t, n] = torch.tensor(out, dtype=torch.float64), lse
        return outs, lses

    def slow_scores(self) -> Tensor:
        scores = torch.full((len(self.rows), self.length), -math.inf, dtype=torch.float64)
        for t, positions in enumerate(self.intervals()):
            gates, queries = self.gate[t].tolist(), self.index_q[t].tolist()
            for s in positions:
                key = self.keys[self.place(t, s)].tolist()
                scores[t, s] = sum(
                    gate * max(0.0, sum(a * b for a, b in zip(query, key, strict=True)))
                    for gate, query in zip(gates, queries, strict=True)
                )
        return scores


def make_case(
    rows, spans, choices, *, requests=3, pages=2, page=3, seed=0, dtype=torch.int64
) -> Case:
    total, T = requests * pages + 1, len(rows)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return Case(
        q=draw(T, N, C, seed=seed),
        q_pe=draw(T, N, E, seed=seed + 1),
        ckv=draw(total, page, C, seed=seed + 2),
        kpe=draw(total, page, E, seed=seed + 3),
        index_q=draw(T, I, H, seed=seed + 4),
        gate=draw(T, I, seed=seed + 5),
        keys=draw(total, page, H, seed=seed + 6),
        table=order[: requests * pages].view(requests, pages).to(dtype),
        rows=torch.tensor(rows, dtype=dtype),
        lo=torch.tensor([lo for lo, _ in spans], dtype=dtype),
        hi=torch.tensor([hi for _, hi in spans], dtype=dtype),
        chosen=torch.tensor(choices, dtype=dtype).reshape(T, len(choices[0]) if choices else 2),
    )


@st.composite
def cases(draw_from) -> Case:
    requests, pages, page = (draw_from(st.integers(1, n)) for n in (4, 3, 4))
    tokens, length = draw_from(st.integers(0, 9)), pages * page
    bound, width = st.integers(0, length), draw_from(st.integers(1, 4))

    def each(strategy):
        return draw_from(st.lists(strategy, min_size=tokens, max_size=tokens))

    pick = st.lists(st.integers(-1, length - 1), min_size=width, max_size=width)
    return make_case(
        each(st.integers(0, requests - 1)),
        each(st.tuples(bound, bound)),
        each(pick),
        requests=requests,
        pages=pages,
        page=page,
        seed=draw_from(st.integers(0, 99)),
        dtype=draw_from(st.sampled_from([torch.int32, torch.int64])),
    )


ROWS = [1, 0, 1, 1, 2, 1, 0]
SPANS = [(0, 1), (0, 6), (0, 2), (0, 3), (3, 6), (4, 4), (5, 2)]
CHOICES = [[0, -1], [5, 2], [-1, -1], [-1, 4], [3, 4], [1, -1], [2, 0]]
CASE = make_case(ROWS, SPANS, CHOICES)
POISONS = (math.nan, math.inf, -math.inf, -1e300)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@pytest.fixture(params=[(1, 1), (2, 300), (64, 2**21)])
def small_tiles(request, monkeypatch):
    longest, block = request.param
    monkeypatch.setattr(reference_mla, "MAX_TILE", longest)
    monkeypatch.setattr(reference_indexer, "PRODUCT_ROWS", longest * I)
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", block)


@given(case=cases())
def test_intervals_equal_the_loop(case):
    want = case.slow_attention(case.intervals())
    for poison in POISONS:
        assert_same(case.poisoned(case.intervals(), poison).dense(), want)


@given(case=cases())
def test_choices_equal_the_loop(case):
    want = case.slow_attention(case.choices())
    for poison in POISONS:
        assert_same(case.poisoned(case.choices(), poison).sparse(), want)


@given(case=cases(), topk=st.integers(1, 5))
def test_scores_and_their_top_equal_the_loop(case, topk):
    want = case.slow_scores()
    for poison in POISONS:
        hidden = case.poisoned(case.intervals(), poison)
        torch.testing.assert_close(hidden.scores(), want, rtol=1e-11, atol=1e-12)
        got = hidden.top(topk)
        assert got.shape == (len(case.rows), min(topk, case.length))
        assert torch.equal(got, ops.select_top(hidden.scores(), topk=topk))


def test_tiles_and_blocks_change_nothing(small_tiles):
    assert_same(CASE.dense(), CASE.slow_attention(CASE.intervals()))
    assert_same(CASE.sparse(), CASE.slow_attention(CASE.choices()))
    torch.testing.assert_close(CASE.scores(), CASE.slow_scores(), rtol=1e-11, atol=1e-12)
    assert torch.equal(CASE.top(2), ops.select_top(CASE.slow_scores(), topk=2))


def test_a_token_that_sees_nothing_gets_zero_and_minus_infinity():
    for (out, lse), empty in ((CASE.dense(), [5, 6]), (CASE.sparse(), [2])):
        assert [t for t in range(len(ROWS)) if (lse[t] == -math.inf).any()] == empty
        assert (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
    assert (CASE.top(3)[5:] == -1).all()


@pytest.mark.parametrize("name", ["ckv", "kpe"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_a_token_sees_is_not_hidden(name, poison):
    pool = getattr(CASE, name).clone()
    pool[CASE.place(1, 2)] = poison
    spoilt = dataclasses.replace(CASE, **{name: pool})
    for out, _ in (spoilt.dense(), spoilt.sparse()):
        assert out[1].isnan().any(-1).all()
        assert out[0].isfinite().all()


def test_nothing_unseen_reaches_a_gradient():
    hidden = CASE.poisoned(CASE.intervals(), math.nan)
    for kernel, case in (("dense", hidden), ("sparse", CASE.poisoned(CASE.choices(), math.nan))):
        leaves = {n: getattr(case, n).clone().requires_grad_() for n in ("q", "q_pe", "ckv", "kpe")}
        out, lse = getattr(dataclasses.replace(case, **leaves), kernel)()
        (out.sum() + lse[lse.isfinite()].sum()).backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_computed_in_float32(dtype):
    names = ("q", "q_pe", "ckv", "kpe", "index_q", "gate", "keys")
    low = dataclasses.replace(CASE, **{n: getattr(CASE, n).to(dtype) for n in names})
    wide = dataclasses.replace(low, **{n: getattr(low, n).float() for n in names})
    for got, want in ((low.dense(), wide.dense()), (low.sparse(), wide.sparse())):
        assert torch.equal(got[0], want[0].to(dtype)) and torch.equal(got[1], want[1])
    assert low.scores().dtype == torch.float32
    assert torch.equal(low.scores(), wide.scores())


def test_parts_over_dealt_positions_merge_to_the_whole():
    positions = [sorted(set(row)) for row in CASE.intervals()]
    width = max(len(row) for row in positions)

    def part(rank: int) -> tuple[Tensor, Tensor]:
        mine = [[s for s in row if s % 2 == rank] for row in positions]
        padded = [row + [-1] * (width - len(row)) for row in mine]
        return dataclasses.replace(CASE, chosen=torch.tensor(padded)).sparse()

    outs, lses = zip(part(0), part(1), strict=True)
    assert_same(ops.merge_lse(torch.stack(outs), torch.stack(lses)), CASE.dense())


def test_shapes_are_known_without_data():
    moved = {f.name: getattr(CASE, f.name).to("meta") for f in dataclasses.fields(CASE)}
    case = Case(**moved)
    for out, lse in (case.dense(), case.sparse()):
        assert (out.shape, lse.shape) == ((7, N, C), (7, N))
    assert case.scores().shape == (7, 6)
    assert case.top(4).shape == (7, 4)


@pytest.mark.parametrize(
    ("change", "call", "message"),
    [
        (dict(q=CASE.q[..., :4]), "dense", r"paged_mla_attention: q \(7, 3, 4\).*q \[T, N, C\]"),
        (dict(kpe=CASE.kpe[:, :2]), "dense", r"kpe \(7, 2, 4\)"),
        (dict(hi=CASE.hi[:6]), "dense", r"hi is \(6,\) but must have one entry a token: 7"),
        (dict(q_pe=CASE.q_pe[:, :2]), "sparse", r"sparse_mla_attention: .*q_pe \(7, 2, 4\)"),
        (dict(chosen=CASE.chosen[:6]), "sparse", r"positions \(6, 2\); wanted \[T, K\] with T = 7"),
        (dict(rows=CASE.rows[:1]), "sparse", r"rows is \(1,\)"),
        (dict(gate=CASE.gate[:, :1]), "scores", r"gate \(7, 1\).*wanted q \[T, I, H\]"),
        (dict(lo=CASE.lo[:1]), "scores", r"lo is \(1,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, call, message):
    with pytest.raises(ValueError, match=message):
        getattr(dataclasses.replace(CASE, **change), call)()


def test_top_of_nothing_is_refused():
    with pytest.raises(ValueError, match="topk 0 of scores"):
        CASE.top(0)
    with pytest.raises(ValueError, match=r"scores \(3,\); wanted topk >= 1 and scores \[T, S\]"):
        ops.select_top(torch.zeros(3), topk=1)
