"""Routers against loops over floats and `transformers`; ties, negative scores, precision."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcinfer.layers.router import (
    biased_router_specs,
    router_specs,
    sigmoid_group_top_k,
    sigmoid_top_k,
    softmax_group_top_k,
    softmax_top_k,
)
from funcinfer.spec import abstract, init, with_dtype
from tests.layers import slow_moe

T, E, D = 7, 12, 5


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def slow_of(route: partial, logits, bias):
    """The loop of a router with the same settings, on one token's logits."""
    s = dict(route.keywords)
    groups, keep = s.get("groups", 1), s.get("keep_groups", 1)
    if route.func is softmax_top_k:
        return slow_moe.softmax_top_k(logits, s["k"], s["normalise"])
    if route.func is sigmoid_top_k:
        return slow_moe.sigmoid_top_k(logits, bias, s["k"])
    if route.func is softmax_group_top_k:
        return slow_moe.softmax_group_top_k(logits, s["k"], groups, keep, s.get("scale", 1.0))
    normalise, scale = s.get("normalise", True), s.get("scale", 1.0)
    return slow_moe.sigmoid_group_top_k(logits, bias, s["k"], groups, keep, normalise, scale)


ROUTERS = {
    "softmax": partial(softmax_top_k, k=3, normalise=False),
    "softmax normalised": partial(softmax_top_k, k=3, normalise=True),
    "greedy": partial(softmax_group_top_k, k=3, scale=16.0),
    "group greedy": partial(softmax_group_top_k, k=3, groups=4, keep_groups=2, scale=2.5),
    "sigmoid": partial(sigmoid_top_k, k=3),
    "group": partial(sigmoid_group_top_k, k=3, groups=4, keep_groups=2, scale=2.5),
    "group raw": partial(sigmoid_group_top_k, k=5, groups=3, keep_groups=2, normalise=False),
    "one group": partial(sigmoid_group_top_k, k=E),
}
every_router = pytest.mark.parametrize("name", ROUTERS)


def on_logits(logits_TE: Tensor, bias_E: Tensor | None = None):
    """(p, x) whose logits are given: the weight is the identity."""
    E = logits_TE.shape[1]
    bias_E = logits_TE.new_zeros(E) if bias_E is None else bias_E
    return dict(weight=torch.eye(E, dtype=logits_TE.dtype), bias=bias_E), logits_TE


def chosen(routes) -> list[dict[int, float]]:
    weights_TK, ids_TK = routes
    pairs = zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)
    return [dict(zip(ids, weights, strict=True)) for ids, weights in pairs]


def spread(routes, num_experts: int) -> Tensor:
    """Weights [T, E], zero where an expert isn't chosen: they compare in any order of choice."""
    weights_TK, ids_TK = routes
    return weights_TK.new_zeros(len(ids_TK), num_experts).scatter(1, ids_TK, weights_TK)


# ---- against the loops


@every_router
def test_a_router_equals_its_loop_in_ids_order_and_weights(name):
    route = ROUTERS[name]
    p, x_TD = dict(weight=draw(E, D), bias=draw(E, seed=1)), draw(T, D, seed=2)
    got = chosen(route(p, x_TD))
    for t in range(T):
        logits = slow_moe.times(p["weight"].tolist(), x_TD[t].tolist())
        want = slow_of(route, logits, p["bias"].tolist())
        assert list(got[t]) == list(want)
        assert list(got[t].values()) == pytest.approx(list(want.values()), rel=1e-12)


@every_router
def test_equal_scores_go_to_the_lowest_ids(name):
    route = ROUTERS[name]
    _, ids_TK = route(*on_logits(torch.zeros(3, E)))
    assert ids_TK.tolist() == [list(range(route.keywords["k"]))] * 3


@given(
    st.lists(st.sampled_from([0.0, 0.7, 1.9, 3.1]), min_size=E, max_size=E),
    st.sampled_from([-2.0, -0.9, 0.0, 1.3]),
    st.sampled_from(sorted(ROUTERS)),
)
def test_ties_within_and_across_groups_equal_the_loop(logits, bias, name):
    """One bias for all: with more, sums of other terms could tie up to their last bits."""
    route = ROUTERS[name]
    p, x_TD = on_logits(torch.tensor([logits]).double(), torch.full((E,), bias).double())
    assert list(chosen(route(p, x_TD))[0]) == list(slow_of(route, logits, [bias] * E))


@given(st.floats(-10, 10), st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 6))
def test_a_dropped_group_is_never_chosen_for_any_bias(shift, seed, keep, k):
    logits_TE, noise_E = draw(5, E, seed=seed), draw(E, seed=seed + 1)
    bias_E = shift + 0.1 * noise_E
    k = min(k, keep * E // 4)
    route = partial(sigmoid_group_top_k, k=k, groups=4, keep_groups=keep)
    got = chosen(route(*on_logits(logits_TE, bias_E)))
    want = [slow_of(route, row, bias_E.tolist()) for row in logits_TE.tolist()]
    assert [list(c) for c in got] == [list(c) for c in want]
    assert all(len({e * 4 // E for e in c}) <= keep for c in got)


def test_negative_biased_scores_keep_to_the_kept_groups():
    """Scores .9 .. .2 less 2 are all negative: a group dropped by 0 would win with experts 4, 5."""
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]])
    p, x_TD = on_logits(scores.logit(), torch.full((8,), -2.0))
    weights_TK, ids_TK = sigmoid_group_top_k(p, x_TD, k=2, groups=4, keep_groups=2)
    assert ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(weights_TK, torch.tensor([[0.9, 0.8]]) / 1.7)
    zeroed = (scores - 2).masked_fill(torch.arange(8) >= 4, 0.0)
    assert sorted(zeroed.topk(2).indices[0].tolist()) != [0, 1]


def test_a_group_is_scored_by_its_best_two_and_not_by_its_best():
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]])
    p, x_TD = on_logits(scores.logit())
    assert sigmoid_group_top_k(p, x_TD, k=1, groups=2, keep_groups=1)[1].tolist() == [[2]]
    assert softmax_group_top_k(p, x_TD, k=1, groups=2, keep_groups=1)[1].tolist() == [[0]]


@pytest.mark.parametrize("name", ["sigmoid", "group", "group raw"])
def test_the_bias_chooses_and_does_not_weigh(name):
    route = ROUTERS[name]
    logits_TE = draw(T, E)
    p, x_TD = on_logits(logits_TE, draw(E, seed=1))
    shifted = dict(p, bias=p["bias"] + 0.75)
    assert torch.equal(route(p, x_TD)[0], route(shifted, x_TD)[0])
    other = dict(p, bias=-p["bias"])
    assert not torch.equal(route(p, x_TD)[1], route(other, x_TD)[1])


# ---- precision


def test_close_biases_stay_apart_from_specs_to_selection():
    """200 biases within 0.25 of each other near 7: in bfloat16 there are 9 different ones."""
    specs = with_dtype(biased_router_specs(16, 200), torch.bfloat16)
    assert {s.dtype for s in specs.values()} == {torch.float32}
    assert {x.dtype for x in init(specs).values()} == {torch.float32}
    bias_E = torch.linspace(6.80, 7.05, 200)
    assert len(bias_E.unique()) == 200 and len(bias_E.bfloat16().unique()) == 9
    p = dict(weight=draw(200, 16, dtype=torch.float32) * 0.02, bias=bias_E)
    x_TD = draw(32, 16, seed=1).bfloat16()
    rounded = dict(p, bias=bias_E.bfloat16().float())
    for route in (partial(sigmoid_group_top_k, k=8), partial(sigmoid_top_k, k=8)):
        got, coarse = chosen(route(p, x_TD)), chosen(route(rounded, x_TD))
        changed = 0
        for t, x in enumerate(x_TD.tolist()):
            logits = slow_moe.times(p["weight"].tolist(), x)
            want = slow_of(route, logits, bias_E.tolist())
            assert set(got[t]) == set(want)
            changed += set(coarse[t]) != set(want)
        assert changed > 16


@pytest.mark.parametrize(
    ("route", "weights_dtype"),
    [
        (ROUTERS["softmax normalised"], torch.bfloat16),
        (ROUTERS["group greedy"], torch.float32),
        (ROUTERS["sigmoid"], torch.float32),
        (ROUTERS["group"], torch.float32),
    ],
)
def test_weights_have_the_dtype_of_the_family(route, weights_dtype):
    specs = biased_router_specs(D, E)
    if route.func is softmax_top_k:
        specs = router_specs(D, E)
    x_TD = draw(T, D).bfloat16()
    weights_TK, ids_TK = route(init(specs), x_TD)
    assert (weights_TK.dtype, ids_TK.dtype) == (weights_dtype, torch.int64)
    # The same leaves as shapes without storage.
    meta_TK, meta_ids_TK = route(abstract(specs), x_TD.to("meta"))
    assert (meta_TK.shape, meta_TK.dtype) == (weights_TK.shape, weights_dtype)
    assert meta_ids_TK.shape == ids_TK.shape


@every_router
def test_weights_are_differentiable(name):
    bias = draw(E, seed=3)

    def weights(x_TD, weight_ED):
        return spread(ROUTERS[name](dict(weight=weight_ED, bias=bias), x_TD), E)

    args = draw(3, D).requires_grad_(), draw(E, D, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(weights, args)


# ---- against transformers


def settings_of(config):
    return dict(
        k=config.num_experts_per_tok,
        groups=config.n_group,
        keep_groups=config.topk_group,
        scale=config.routed_scaling_factor,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v2", {}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
        ("glm4_moe", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("minimax_m2", {}),
    ],
)
def test_a_router_equals_that_of_transformers(tiny_model, family, overrides, dtype):
    config, model = tiny_model(family, **overrides)
    block = model.model.layers[-1].mlp
    bias = getattr(block.gate, "e_score_correction_bias", None)
    extra, weight = (), block.gate.weight.detach()
    if family == "deepseek_v2":
        grouped = config.topk_method != "greedy"
        settings = settings_of(config) if grouped else {"k": 3, "scale": 16.0}
        route = partial(softmax_group_top_k, **settings)
    elif family == "qwen3_moe":
        route = partial(softmax_top_k, k=3, normalise=config.norm_topk_prob)
        weight = weight.to(dtype)
    elif family == "minimax_m2":
        route = partial(sigmoid_top_k, k=3)
        bias = block.e_score_correction_bias
        extra = (bias,)
    else:
        route = partial(sigmoid_group_top_k, normalise=config.norm_topk_prob, **settings_of(config))
    x_TD = draw(41, config.hidden_size, dtype=torch.float32).to(dtype)
    with torch.no_grad():
        moved = weight.dtype != block.gate.weight.dtype
        gate = type(block.gate)(config) if moved else block.gate
        gate.weight.data = weight
        _, weights_TK, ids_TK = gate(x_TD, *extra)
        got = route(dict(weight=weight, bias=bias), x_TD)
    assert got[0].dtype == weights_TK.dtype
    torch.testing.assert_close(spread(got, 8), spread((weights_TK, ids_TK), 8))


# ---- messages


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (partial(softmax_top_k, k=13, normalise=True), r"k=13 choices of 12 experts"),
        (partial(sigmoid_top_k, k=0), r"k=0 choices of 12 experts"),
        (partial(softmax_group_top_k, k=1, groups=5), r"12 experts can't be divided .* groups=5"),
        (partial(sigmoid_group_top_k, k=7, groups=4, keep_groups=2), r"leave at least k experts"),
        (partial(sigmoid_group_top_k, k=1, groups=4, keep_groups=5), r"must be from 1 to 4"),
        (partial(sigmoid_group_top_k, k=1, groups=12), r"12 groups of 1 expert: .* at least 2"),
    ],
)
def test_settings_that_the_experts_cannot_serve_are_refused(route, message):
    with pytest.raises(ValueError, match=message):
        route(*on_logits(torch.zeros(2, E)))
