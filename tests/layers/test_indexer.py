"""The lightning indexer and sparse latent attention: scores, choice, shared choices, meshes."""

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcinfer.kvcache.batch import Rows, make_batch, prepare
from funcinfer.kvcache.latent import IndexKeys
from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import (
    IndexerConfig,
    index_queries,
    indexer_cache_specs,
    indexer_specs,
    local_selection,
    select,
    write_keys,
)
from funcinfer.layers.mla import (
    MLAConfig,
    mla_absorbed,
    mla_cache_specs,
    mla_specs,
    shared_sparse_mla,
    sparse_mla,
    sparse_mla_specs,
)
from funcinfer.layers.rope import rope_tables
from funcinfer.sharding import Mesh, P, Rules, shard_map
from funcinfer.spec import empty, with_dtype
from funcinfer.tree import tree_map
from tests.layers import latent, slow_mla
from tests.layers.hf_latent import LENGTH, Module
from tests.layers.latent import MESHES, LayerUnderTest, Placement, compare, draw, steps

D, TOPK = 23, 3
CFG = MLAConfig(D, 4, 11, nope_dim=5, rope_dim=4, v_dim=7, scale=0.41, q_lora=13)
HALF = IndexerConfig(D, 13, num_heads=16, head_dim=6, topk=TOPK, rotate=ops.rotate_half_split)
INTERLEAVED = dataclasses.replace(HALF, rotate=ops.rotate_interleaved)
LAYOUTS = {"half_split": HALF, "interleaved": INTERLEAVED}
PARAMS = draw(sparse_mla_specs(CFG, HALF))
XS = latent.inputs(D)
SIZES = slow_mla.Sizes(CFG.kv_lora, CFG.nope_dim, CFG.rope_dim, CFG.scale, latent.THETA)


def sparse(index: IndexerConfig, cfg: MLAConfig = CFG) -> LayerUnderTest:
    def caches(num_pages: int, page_size: int) -> dict[str, Any]:
        keys = indexer_cache_specs(index, num_pages, page_size)
        return dict(kv=mla_cache_specs(cfg, num_pages, page_size), index=keys)

    def apply(p, x, cache, step, *, rules):
        y, cache, shared = sparse_mla(p, x, cache, step, {}, rules=rules, cfg=cfg, index=index)
        return y, cache, shared["selection"]

    return LayerUnderTest(sparse_mla_specs(cfg, index), caches, apply)


def dense(cfg: MLAConfig = CFG) -> LayerUnderTest:
    def apply(p, x, cache, step, *, rules):
        return (*mla_absorbed(p, x, cache, step, rules=rules, cfg=cfg), None)

    return LayerUnderTest(mla_specs(cfg), partial(mla_cache_specs, cfg), apply)


def two_layers(index: IndexerConfig) -> LayerUnderTest:
    """A layer that selects, then one that reuses the selection, both of the same input."""
    first = sparse(index)

    def caches(num_pages: int, page_size: int) -> dict[str, Any]:
        second = dict(kv=mla_cache_specs(CFG, num_pages, page_size))
        return dict(first=first.cache_specs(num_pages, page_size), second=second)

    def apply(p, x, cache, step, *, rules):
        y, one, shared = sparse_mla(
            p["first"], x, cache["first"], step, {}, rules=rules, cfg=CFG, index=index
        )
        z, two, shared = shared_sparse_mla(
            p["second"], x, cache["second"], step, shared, rules=rules, cfg=CFG
        )
        return y + 2 * z, dict(first=one, second=two), shared["selection"]

    return LayerUnderTest(dict(first=first.specs, second=mla_specs(CFG)), caches, apply)


def lists(tree):
    return tree_map(lambda x: x.tolist(), tree)


def slow_choice(params, x, layout: str, topk: int) -> list[list[int]]:
    p = lists(params)
    sizes = dataclasses.replace(SIZES, layout=layout)
    latents = slow_mla.query_latents(p, x.tolist(), SIZES)
    scores = slow_mla.index_scores(p["indexer"], x.tolist(), latents, sizes)
    return [slow_mla.top(row, topk) for row in scores]


def slow(params, xs, layout: str = "half_split", topk: int = TOPK) -> latent.Result:
    result = {}
    for i, x in enumerate(xs):
        seen = slow_choice(params, x, layout, topk)
        rows = slow_mla.attention(lists(params), x.tolist(), SIZES, seen)
        result |= {(i, t): torch.tensor(row, dtype=torch.float64) for t, row in enumerate(rows)}
    return result


def chosen(selection: latent.Result) -> dict[tuple[int, int], list[int]]:
    """What was selected, after checking that it is ascending and that -1 comes last."""
    result = {}
    for name, row in selection.items():
        kept = [s for s in row.tolist() if s >= 0]
        assert row.dtype == torch.int32
        assert row.tolist() == sorted(set(kept)) + [-1] * (len(row) - len(kept))
        result[name] = kept
    return result


@pytest.fixture(scope="module")
def truth() -> latent.Result:
    return slow(PARAMS, XS)


@pytest.fixture(scope="module")
def choice() -> dict[tuple[int, int], list[int]]:
    rows = [slow_choice(PARAMS, x, "half_split", TOPK) for x in XS]
    return {(i, t): row for i, choice in enumerate(rows) for t, row in enumerate(choice)}


def layer_scores(index: IndexerConfig, x: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """The indexer's scores [t + 1] of each token of one request, computed in chunks."""
    rules, page = Rules.none(), 4
    num_pages = -(-len(x) // page)
    spec = with_dtype(indexer_cache_specs(index, num_pages + 1, page), torch.float64)
    keys, rows = empty(spec, fill=float("nan")), []
    latents = torch.tensor(slow_mla.query_latents(lists(PARAMS), x.tolist(), SIZES)).double()
    tables = partial(rope_tables, latent.ROPE, dtype=torch.float64)
    for start in range(0, len(x), chunk):
        part = slice(start, min(start + chunk, len(x)))
        request = Rows(range(part.stop - start), start, range(num_pages, 0, -1), wanted=0)
        step = prepare(make_batch([[request]], page_size=page), rules=rules, rope=tables)
        p = PARAMS["indexer"]
        keys = write_keys(p, x[part], keys, step, rules=rules, cfg=index)
        q, gate = index_queries(p, x[part], latents[part], step, rules=rules, cfg=index)
        tokens = (step.page_table, step.rows, step.lo, step.hi)
        scores = ops.indexer_scores(q, gate, keys, *tokens)
        for position, row in enumerate(scores, start):
            assert (row[position + 1 :] == -torch.inf).all()
            rows.append(row[: position + 1])
    return rows


@pytest.mark.parametrize("chunk", [1, 3, 99])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_equal_the_slow_loop(layout, chunk):
    sizes = dataclasses.replace(SIZES, layout=layout)
    p, x = lists(PARAMS), XS[0]
    latents = slow_mla.query_latents(p, x.tolist(), SIZES)
    want = slow_mla.index_scores(p["indexer"], x.tolist(), latents, sizes)
    got = layer_scores(LAYOUTS[layout], x, chunk)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, torch.tensor(b).double(), atol=1e-5, rtol=0)


def test_the_two_layouts_of_rope_give_different_scores():
    half, interleaved = (torch.cat(layer_scores(cfg, XS[0], 99)) for cfg in LAYOUTS.values())
    apart = torch.cat([torch.arange(t + 1) != t for t in range(len(XS[0]))])
    # A rotation cancels only between a token and itself.
    assert (half - interleaved).abs()[apart].min() > 1e-6
    assert (half - interleaved).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 99])
def test_layer_equals_the_slow_loop_in_any_chunks(size, layout):
    got, selection = latent.run(sparse(LAYOUTS[layout]), PARAMS, XS, steps(size, decode=2))
    compare(got, slow(PARAMS, XS, layout), 1e-6)
    for (i, t), row in chosen(selection).items():
        assert row == slow_choice(PARAMS, XS[i], layout, TOPK)[t]


@pytest.mark.parametrize("length", [TOPK - 1, TOPK, TOPK + 1])
def test_lengths_about_topk(length):
    x = latent.inputs(D, [length])
    for plan in (steps(99, 0, [length]), steps(1, 0, [length])):
        got, selection = latent.run(sparse(HALF), PARAMS, x, plan)
        compare(got, slow(PARAMS, x), 1e-6)
        for (_, t), row in chosen(selection).items():
            assert len(row) == min(TOPK, t + 1)
            if t < TOPK:
                assert row == list(range(t + 1))


@pytest.mark.parametrize("extra", [0, 1, 7])
@pytest.mark.parametrize("size", [99, 4])
def test_topk_of_at_least_the_length_is_dense_attention(extra, size):
    """Not bitwise: the sparse kernel's products have other shapes, and so another order of sums."""
    longest = max(len(x) for x in XS)
    index = dataclasses.replace(HALF, topk=longest + extra)
    got, selection = latent.run(sparse(index), PARAMS, XS, steps(size))
    want, _ = latent.run(dense(), {k: PARAMS[k] for k in mla_specs(CFG)}, XS, steps(size))
    compare(got, want, 1e-12)
    assert all(row == list(range(t + 1)) for (_, t), row in chosen(selection).items())


def test_ties_take_the_lowest_positions_in_any_chunks():
    params = PARAMS | {"indexer": PARAMS["indexer"] | {"weights": torch.zeros(16, D).double()}}
    for size in (1, 4, 99):
        for where in (latent.ALONE, MESHES["dcp2"], MESHES["dp2 tp2 sp"]):
            _, selection = latent.run(sparse(HALF), params, XS, steps(size), where)
            for (_, t), row in chosen(selection).items():
                assert row == list(range(min(TOPK, t + 1)))


def test_keys_are_written_while_all_positions_are_selected():
    """The first chunk needs no choice, but its keys take part in the later ones."""
    x = latent.inputs(D, [9])
    plan = [{0: (0, TOPK)}, {0: (TOPK, 9)}]
    got, _ = latent.run(sparse(HALF), PARAMS, x, plan)
    compare(got, slow(PARAMS, x), 1e-6)


@pytest.mark.parametrize("leaf", indexer_specs(HALF))
def test_each_parameter_is_read(leaf, choice):
    changed = PARAMS["indexer"] | {leaf: torch.rand_like(PARAMS["indexer"][leaf]) - 0.5}
    _, selection = latent.run(sparse(HALF), PARAMS | {"indexer": changed}, XS, steps(99))
    assert chosen(selection) != choice


def test_norm_of_keys_uses_its_eps():
    index = dataclasses.replace(HALF, eps=10.0)
    a, b = (torch.cat(layer_scores(cfg, XS[0], 99)) for cfg in (HALF, index))
    assert (a - b).abs().max() > 0.1


def test_a_later_layer_reuses_the_selection(choice):
    second = draw(mla_specs(CFG), seed=8)
    params = dict(first=PARAMS, second=second)
    for where in (latent.ALONE, MESHES["tp2 dcp2 sp"], MESHES["queries over tp"]):
        got, selection = latent.run(two_layers(HALF), params, XS, steps(4, decode=2), where)
        assert chosen(selection) == choice
        want = {}
        for i, x in enumerate(XS):
            seen = [choice[i, t] for t in range(len(x))]
            y = slow_mla.attention(lists(PARAMS), x.tolist(), SIZES, seen)
            z = slow_mla.attention(lists(second), x.tolist(), SIZES, seen)
            for t in range(len(x)):
                want[i, t] = torch.tensor(
                    [a + 2 * b for a, b in zip(y[t], z[t], strict=True)]
                ).double()
        compare(got, want, 1e-5)


SPARSE_MESHES = MESHES | {
    "index heads over tp": Placement(
        Mesh(tp=2), Rules(heads="tp", o_heads="tp", index_heads="tp", residual_tokens="tp")
    ),
    "index heads and queries over tp": Placement(
        Mesh(tp=2), Rules(q_tokens="tp", residual_tokens="tp", o_heads="tp", index_heads="tp")
    ),
}


@pytest.mark.parametrize("plan", ["whole", "chunks"])
@pytest.mark.parametrize("name", SPARSE_MESHES)
def test_every_mesh_equals_one_rank(name, plan, truth, choice):
    work = steps(99) if plan == "whole" else steps(4, decode=2)
    got, selection = latent.run(sparse(HALF), PARAMS, XS, work, SPARSE_MESHES[name])
    compare(got, truth, 1e-6)
    assert chosen(selection) == choice


@pytest.mark.parametrize("name", ["tp4", "tp2 dcp2 sp", "pcp2 x dcp2"])
def test_ranks_agree_in_float32(name):
    """`join` of the harness fails where two ranks that hold the same token chose differently."""
    params = tree_map(torch.Tensor.float, PARAMS)
    latent.run(sparse(HALF), params, [x.float() for x in XS], steps(4, 2), SPARSE_MESHES[name])


@pytest.mark.parametrize(("n", "interleave"), [(2, 1), (2, 2), (3, 2)])
def test_selection_is_dealt_to_owners(n, interleave):
    generator = torch.Generator().manual_seed(0)
    picks = [torch.randperm(24, generator=generator)[:7].sort().values for _ in range(5)]
    rows = torch.stack(picks).to(torch.int32)
    rows[0, 4:] = -1
    rows[1] = -1
    rules = Rules(page_tokens="dcp")

    def local(rows):
        step = dataclasses.replace(_step(), interleave=interleave)
        return local_selection(rows, step, rules=rules)[None]

    f = shard_map(local, Mesh(dcp=n), (P(None, None),), P("dcp", None, None))
    for rank, part in enumerate(f(rows).tolist()):
        mine = [s for s in range(24) if s // interleave % n == rank]
        for got, row in zip(part, rows.tolist(), strict=True):
            want = [mine.index(s) for s in row if s in mine]
            assert got == want + [-1] * (7 - len(want))


def _step():
    batch = make_batch([[Rows([1], 0, [1], wanted=0)]], page_size=4)
    return prepare(batch, rules=Rules.none(), rope=partial(rope_tables, latent.ROPE))


values = st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.0, 1.5]), min_size=5, max_size=5)


@given(st.lists(values, min_size=0, max_size=4), st.integers(1, 7))
def test_select_top_equals_a_sort(rows, topk):
    got = ops.select_top(torch.tensor(rows).reshape(-1, 5), topk=topk)
    assert got.shape == (len(rows), min(topk, 5))
    for row, positions in zip(rows, got.tolist(), strict=True):
        seen = sorted((s for s in range(5) if row[s] > -math.inf), key=lambda s: (-row[s], s))
        want = sorted(seen[:topk])
        assert positions == want + [-1] * (min(topk, 5) - len(want))


def test_a_score_that_is_not_a_number_is_not_hidden():
    scores = torch.tensor([[1.0, math.nan, 2.0, math.inf], [math.nan] * 4])
    assert ops.select_top(scores, topk=2).tolist() == [[1, 3], [0, 1]]


@pytest.mark.parametrize(
    ("layout", "family"), [("half_split", "deepseek_v32"), ("interleaved", "glm_moe_dsa")]
)
def test_layer_equals_transformers(layout, family, tiny_model):
    module = Module(*tiny_model(family), 2)
    x, index = module.inputs(), module.index_cfg(LAYOUTS[layout].rotate)
    want = {(0, t): row for t, row in enumerate(module.run(x)[0])}
    for size, decode in ((99, 0), (5, 0), (30, 7)):
        got, selection = latent.run(
            sparse(index, module.cfg), module.params(), [x], steps(size, decode, [LENGTH]),
            rope=module.rope,
        )  # fmt: skip
        assert [set(row) for row in chosen(selection).values()] == module.selection(x)
        compare(got, want, 1e-5)


def test_the_other_layout_does_not_equal_transformers(tiny_model):
    module = Module(*tiny_model("deepseek_v32"), 2)
    x, index = module.inputs(), module.index_cfg(ops.rotate_interleaved)
    plan = steps(99, 0, [LENGTH])
    _, selection = latent.run(
        sparse(index, module.cfg), module.params(), [x], plan, rope=module.rope
    )
    assert [set(row) for row in chosen(selection).values()] != module.selection(x)


def test_a_shared_layer_equals_transformers(tiny_model):
    config, model = tiny_model("glm_moe_dsa")
    full, shared = Module(config, model, 0), Module(config, model, 1)
    x, index = full.inputs(), full.index_cfg(ops.rotate_interleaved)
    first, more = full.run(x)
    second, _ = shared.run(x, prev_topk_indices=more[1])
    assert "indexer" not in shared.params()
    cfg = full.cfg

    def caches(num_pages, page_size):
        one = mla_cache_specs(cfg, num_pages, page_size)
        return [dict(kv=one, index=indexer_cache_specs(index, num_pages, page_size)), dict(kv=one)]

    def apply(p, x, cache, step, *, rules):
        options = dict(rules=rules, cfg=cfg)
        y, one, left = sparse_mla(p[0], x, cache[0], step, {}, index=index, **options)
        z, two, _ = shared_sparse_mla(p[1], x, cache[1], step, left, **options)
        return torch.cat([y, z], -1), [one, two], None

    specs = [sparse_mla_specs(cfg, index), mla_specs(cfg)]
    got, _ = latent.run(
        LayerUnderTest(specs, caches, apply), [full.params(), shared.params()], [x],
        steps(6, 3, [LENGTH]), rope=full.rope,
    )  # fmt: skip
    want = torch.cat([first, second], -1)
    compare(got, {(0, t): row for t, row in enumerate(want)}, 1e-5)


def test_compiles_without_graph_breaks(truth):
    got, _ = latent.run(sparse(HALF), PARAMS, XS, steps(99), compiled="aot_eager")
    compare(got, truth, 1e-6)


def test_gradients():
    """Of the attention over a fixed choice: the choice itself has none."""
    rows = [Rows(range(5), 0, [2, 1], wanted=0), Rows(range(2), 0, [3], wanted=0)]
    tables = partial(rope_tables, latent.ROPE, dtype=torch.float64)
    step = prepare(make_batch([rows], page_size=4), rules=Rules.none(), rope=tables)
    specs = with_dtype(sparse(HALF).cache_specs(4, 4), torch.float64)
    names = list(mla_specs(CFG))

    def f(x, *leaves):
        p = PARAMS | dict(zip(names, leaves, strict=True))
        cache = empty(specs, fill=float("nan"))
        options = dict(rules=Rules.none(), cfg=CFG, index=HALF)
        return sparse_mla(p, x, cache, step, {}, **options)[0]

    x = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    leaves = [leaf.clone().requires_grad_() for leaf in (x, *(PARAMS[n] for n in names))]
    torch.autograd.gradcheck(f, leaves, fast_mode=True)


def test_dealt_index_keys_are_refused():
    rules = Rules(page_tokens="dcp", index_page_tokens="dcp")
    with pytest.raises(ValueError, match=r"index_page_tokens='dcp' must be None"):
        latent.run(sparse(HALF), PARAMS, XS, steps(99), Placement(Mesh(dcp=2), rules))


def test_a_shared_layer_without_a_selection_is_refused():
    with pytest.raises(ValueError, match=r"no earlier layer left a 'selection'.*\['taps'\]"):
        shared_sparse_mla({}, XS[0], {}, _step(), {"taps": 0}, rules=Rules.none(), cfg=CFG)


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="topk=0 must be at least 1"):
        dataclasses.replace(HALF, topk=0)
    with pytest.raises(ValueError, match="q_lora=13, its indexer 23 and 12"):
        sparse_mla_specs(CFG, dataclasses.replace(HALF, q_lora=12))


def test_select_refuses_queries_of_another_width():
    p = PARAMS["indexer"] | {"wq": torch.ones(16, 5, 13).double()}
    keys = IndexKeys(torch.zeros(2, 4, 6).double())
    with pytest.raises(ValueError, match=r"indexer: q \(1, 16, 5\).*k \(2, 4, 6\)"):
        select(p, XS[3], torch.zeros(1, 13).double(), keys, _step(), rules=Rules.none(), cfg=HALF)
