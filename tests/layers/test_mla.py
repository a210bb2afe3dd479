"""Latent attention: its two forms, chunks, meshes, and what it leaves in the cache."""

import dataclasses
from functools import partial

import pytest
import torch

from funcinfer.kvcache.batch import Rows, make_batch, prepare
from funcinfer.kvcache.latent import LatentKV
from funcinfer.layers import mla as mla_module
from funcinfer.layers import primitives as ops
from funcinfer.layers.mla import (
    MLAConfig,
    is_expanded,
    mla,
    mla_absorbed,
    mla_cache_specs,
    mla_expanded,
    mla_specs,
    no_rope,
)
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.sharding import Mesh, Rules
from funcinfer.spec import empty, with_dtype
from funcinfer.tree import tree_map
from tests.layers import latent, slow_mla
from tests.layers.hf_latent import Module
from tests.layers.latent import ALONE, LENGTHS, MESHES, LayerUnderTest, compare, draw, steps

D = 23
PLAIN = MLAConfig(D, 4, 11, nope_dim=5, rope_dim=4, v_dim=7, scale=0.41, q_lora=13)
CONFIGS = {
    "query latent": PLAIN,
    "biases": dataclasses.replace(PLAIN, bias=True),
    "no query latent": dataclasses.replace(PLAIN, q_lora=None, bias=True),
    "half split": dataclasses.replace(PLAIN, rotate=ops.rotate_half_split),
    "no rope": dataclasses.replace(PLAIN, rotate=no_rope),
    "no rotated part": dataclasses.replace(PLAIN, rope_dim=0, rotate=no_rope),
}
LAYOUTS = {ops.rotate_half_split: "half_split", no_rope: "none"}
FORMS = {"absorbed": mla_absorbed, "expanded": mla_expanded, "by cost": mla}
BIASED = CONFIGS["biases"]
PARAMS = draw(mla_specs(BIASED))
XS = latent.inputs(D)


def layer(cfg: MLAConfig, form=mla) -> LayerUnderTest:
    def apply(p, x, cache, step, *, rules):
        return (*form(p, x, cache, step, rules=rules, cfg=cfg), None)

    return LayerUnderTest(mla_specs(cfg), partial(mla_cache_specs, cfg), apply)


def lists(params):
    return tree_map(lambda x: x.tolist(), params)


def slow(cfg: MLAConfig, params, xs) -> latent.Result:
    sizes = slow_mla.Sizes(
        cfg.kv_lora, cfg.nope_dim, cfg.rope_dim, cfg.scale, latent.THETA, cfg.eps,
        LAYOUTS.get(cfg.rotate, "interleaved"),
    )  # fmt: skip
    p = lists(params)
    return {
        (i, t): torch.tensor(row, dtype=torch.float64)
        for i, x in enumerate(xs)
        for t, row in enumerate(slow_mla.attention(p, x.tolist(), sizes, slow_mla.causal(len(x))))
    }


@pytest.fixture(scope="module")
def truth() -> latent.Result:
    return slow(BIASED, PARAMS, XS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_equals_the_slow_loop(name, form):
    cfg = CONFIGS[name]
    params = draw(mla_specs(cfg))
    got, _ = latent.run(layer(cfg, FORMS[form]), params, XS, steps(99))
    compare(got, slow(cfg, params, XS), 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_any_chunks_and_decode_equal_one_pass(size, form, truth):
    got, _ = latent.run(layer(BIASED, FORMS[form]), PARAMS, XS, steps(size, decode=3))
    compare(got, truth, 1e-6)


def test_a_request_alone_equals_the_request_among_others(truth):
    for i, x in enumerate(XS):
        got, _ = latent.run(layer(BIASED), PARAMS, [x], steps(3, lengths=[len(x)]))
        compare(got, {(0, t): truth[i, t] for t in range(len(x))}, 1e-6)


def test_forms_agree_in_float32():
    params, xs = draw(mla_specs(PLAIN), dtype=torch.float32), [x.float() for x in XS]
    a, _ = latent.run(layer(PLAIN, mla_absorbed), params, xs, steps(4, decode=2))
    b, _ = latent.run(layer(PLAIN, mla_expanded), params, xs, steps(4, decode=2))
    compare(a, b, 1e-5)


def test_forms_agree_in_bfloat16():
    params = draw(mla_specs(PLAIN), dtype=torch.bfloat16)
    xs = [x.bfloat16() for x in XS]
    a, _ = latent.run(layer(PLAIN, mla_absorbed), params, xs, steps(4))
    b, _ = latent.run(layer(PLAIN, mla_expanded), params, xs, steps(4))
    wide, _ = latent.run(
        layer(PLAIN), tree_map(torch.Tensor.double, params), [x.double() for x in xs], steps(4)
    )
    assert next(iter(a.values())).dtype == torch.bfloat16
    for form in (a, b):
        compare({k: v.double() for k, v in form.items()}, wide, 0.15)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("rotation", dict(rotate=ops.rotate_half_split)),
        ("no rotation", dict(rotate=no_rope)),
        ("scale", dict(scale=0.5)),
        ("eps", dict(eps=1e-1)),
    ],
)
def test_each_convention_matters(what, change, truth):
    got, _ = latent.run(layer(dataclasses.replace(BIASED, **change)), PARAMS, XS, steps(99))
    # Position 0 sees itself alone: only the norms of the latents reach it.
    worst = max((got[n] - truth[n]).abs().max().item() for n in truth if n[1] > 0)
    assert worst > 1e-2, what


@pytest.mark.parametrize("leaf", mla_specs(BIASED))
def test_each_parameter_is_read(leaf, truth):
    params = PARAMS | {leaf: PARAMS[leaf] + 0.5 * torch.rand_like(PARAMS[leaf])}
    for form in (mla_absorbed, mla_expanded):
        got, _ = latent.run(layer(BIASED, form), params, XS[:1], steps(99, lengths=LENGTHS[:1]))
        assert max((got[n] - truth[n]).abs().max().item() for n in got) > 1e-2


def test_the_form_is_the_one_with_fewer_products():
    cfg = MLAConfig(7168, 128, 512, nope_dim=128, rope_dim=64, v_dim=128, scale=1.0, q_lora=1536)

    def products(tokens: int, requests: int, expanded: bool) -> int:
        up = requests * 512 * 128 + requests * 512 * 128
        scores, values = (128 + 64, 128) if expanded else (512 + 64, 512)
        return up * expanded + tokens * (scores + values)

    for requests in (1, 3):
        for tokens in (1, 169 * requests, 172 * requests, 4096):
            step = _step(tokens, requests)
            fewer = products(tokens, requests, True) < products(tokens, requests, False)
            assert is_expanded(step, rules=Rules.none(), cfg=cfg) == fewer
    assert not is_expanded(_step(169, 1), rules=Rules.none(), cfg=cfg)
    assert is_expanded(_step(172, 1), rules=Rules.none(), cfg=cfg)


@pytest.mark.parametrize("wanted", ["absorbed", "expanded"])
def test_layer_takes_the_form_that_is_expanded_says(wanted, monkeypatch):
    monkeypatch.setattr(mla_module, "is_expanded", lambda *a, **k: wanted == "expanded")
    called = []
    for form in ("absorbed", "expanded"):
        monkeypatch.setattr(mla_module, f"mla_{form}", lambda *a, f=form, **k: called.append(f))
    empty_cache = LatentKV(*torch.zeros(2, 1))
    mla({}, torch.zeros(1, D), empty_cache, _step(1, 1), rules=Rules.none(), cfg=PLAIN)
    assert called == [wanted]


def _step(tokens: int, requests: int):
    share = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    rows = [Rows(range(n), 0, range(1, 1 + -(-n // 16)), wanted=0) for n in share]
    batch = make_batch([rows], page_size=16)
    return prepare(batch, rules=Rules.none(), rope=partial(rope_tables, Rope(100.0, 4)))


@pytest.mark.parametrize("plan", ["whole", "chunks"])
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_equals_one_rank(name, plan, truth):
    work = steps(99) if plan == "whole" else steps(4, decode=2)
    got, _ = latent.run(layer(BIASED), PARAMS, XS, work, MESHES[name])
    compare(got, truth, 1e-6)


@pytest.mark.parametrize("name", [n for n, w in MESHES.items() if not w.rules["page_tokens"]])
def test_expanded_form_on_meshes(name, truth):
    got, _ = latent.run(layer(BIASED, mla_expanded), PARAMS, XS, steps(4), MESHES[name])
    compare(got, truth, 1e-6)


def test_output_bias_is_added_once_on_every_mesh():
    zeros = tree_map(torch.zeros_like, PARAMS) | {"bo": PARAMS["bo"]}
    for where in (ALONE, *MESHES.values()):
        got, _ = latent.run(layer(BIASED), zeros, XS, steps(99), where)
        assert all(torch.equal(row, PARAMS["bo"]) for row in got.values())


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_compiles_without_graph_breaks(form, truth):
    got, _ = latent.run(layer(BIASED, FORMS[form]), PARAMS, XS, steps(99), compiled="aot_eager")
    compare(got, truth, 1e-6)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_gradients(form):
    cfg, page = dataclasses.replace(BIASED, num_heads=2), 4
    rows = [Rows(range(5), 0, [2, 1], wanted=0), Rows(range(2), 0, [3], wanted=0)]
    batch = make_batch([rows], page_size=page)
    rope = partial(rope_tables, Rope(100.0, 4), dtype=torch.float64)
    step = prepare(batch, rules=Rules.none(), rope=rope)
    params = draw(mla_specs(cfg))
    names = list(params)
    specs = with_dtype(mla_cache_specs(cfg, 4, page), torch.float64)

    def f(x, *leaves):
        p = dict(zip(names, leaves, strict=True))
        cache = empty(specs, fill=float("nan"))
        return FORMS[form](p, x, cache, step, rules=Rules.none(), cfg=cfg)[0]

    x = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    leaves = [x, *params.values()]
    torch.autograd.gradcheck(f, [leaf.requires_grad_() for leaf in leaves], fast_mode=True)


def test_expanded_form_refuses_dealt_pages():
    with pytest.raises(ValueError, match=r"page_tokens='dcp' deals them: use mla_absorbed"):
        latent.run(layer(BIASED, mla_expanded), PARAMS, XS, steps(99), MESHES["dcp2"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_heads=0), "num_heads=0 must be at least 1"),
        (dict(q_lora=0), "q_lora=0 must be at least 1, or None"),
        (dict(rope_dim=3), "rope_dim=3 must be even"),
        (dict(rope_dim=0), "rope_dim=0 leaves nothing to rotate: give rotate=no_rope"),
    ],
)
def test_config_refuses_sizes_that_do_not_go_together(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **change)


def test_heads_that_do_not_divide_are_refused_at_config_time():
    with pytest.raises(ValueError, match=r"wq_b.*4"):
        Rules(heads="tp", o_heads="tp").check(mla_specs(PLAIN), Mesh(tp=3))


HF = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "no query latent": ("deepseek_v3", {"q_lora_rank": None}),
    "biases": ("deepseek_v3", {"attention_bias": True}),
    "half split": ("deepseek_v3", {"rope_interleave": False}),
}


@pytest.mark.parametrize("name", HF)
def test_layer_equals_transformers(name, tiny_model):
    family, overrides = HF[name]
    module = Module(*tiny_model(family, **overrides), 1)
    x = module.inputs()
    want = {(0, t): row for t, row in enumerate(module.run(x)[0])}
    assert set(module.params()) == set(mla_specs(module.cfg))
    for form in FORMS.values():
        for size, decode in ((99, 0), (5, 0), (30, 7)):
            plan = steps(size, decode, [len(x)])
            under_test = layer(module.cfg, form)
            got, _ = latent.run(under_test, module.params(), [x], plan, rope=module.rope)
            compare(got, want, 1e-5)
