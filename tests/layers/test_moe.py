"""Mixture of experts: against a loop and `transformers`, its factors one by one, and on meshes."""

import itertools
from functools import partial

import pytest
import torch
from torch import Tensor

from funcinfer.layers import primitives as ops
from funcinfer.layers.dispatch import local_ids, padded_exchange, ragged_exchange
from funcinfer.layers.moe import moe, moe_specs
from funcinfer.layers.router import (
    biased_router_specs,
    router_specs,
    sigmoid_group_top_k,
    sigmoid_top_k,
    softmax_group_top_k,
    softmax_top_k,
)
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks, bind, names, pad, shard_map, solo
from funcinfer.spec import init, is_spec, pad_leaf, with_dtype
from funcinfer.tree import leaves_with_path, map_with_path, tree_map
from tests.layers import slow, slow_moe

D, E, F, SHARED, K = 6, 10, 12, 4, 3
SPECS = with_dtype(
    moe_specs(D, E, F, router=biased_router_specs, shared_width=SHARED), torch.float64
)
PARAMS = map_with_path(
    lambda path, s: torch.randn(
        s.shape, generator=torch.Generator().manual_seed(len(path)), dtype=torch.float64
    ),
    SPECS,
    is_leaf=is_spec,
)
ROUTE = partial(sigmoid_group_top_k, k=K, groups=5, keep_groups=3, scale=2.5)


def tokens(count: int, seed: int = 0, alike: int = 0) -> Tensor:
    """[T, D]; the first `alike` are one token, which burdens few experts."""
    x_TD = torch.randn(count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([x_TD[:1].expand(alike, D), x_TD[alike:]])


def run(x_TD: Tensor, mesh: Mesh, rules: Rules, *, params=PARAMS, specs=SPECS, **options) -> Tensor:
    """The layer on a mesh; experts added by padding are NaN, so that their use can't go unseen."""
    padded = pad(specs, mesh, rules)
    rules.check(padded, mesh)
    params = map_with_path(nan_padded, padded, params, is_leaf=is_spec)
    layer = partial(moe, rules=rules, **{"route": ROUTE, **options})
    layout = P(rules["residual_tokens"], None)
    return shard_map(layer, mesh, (rules.specs(padded), layout), layout)(params, x_TD)


def nan_padded(path: str, spec, leaf: Tensor) -> Tensor:
    grown = pad_leaf(leaf, spec)
    grown[leaf.shape[0] :] = torch.nan
    return grown


def alone(x_TD: Tensor, **options) -> Tensor:
    return moe(PARAMS, x_TD, rules=Rules.none(), **{"route": ROUTE, **options})


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# ---- one device


def test_it_equals_the_loop():
    x_TD, p = tokens(7), tree_map(lambda leaf: leaf.tolist(), PARAMS)
    pairs = []
    for x in x_TD.tolist():
        logits = slow_moe.times(p["router"]["weight"], x)
        chosen = slow_moe.sigmoid_group_top_k(
            logits, p["router"]["bias"], K, groups=5, keep=3, normalise=True, scale=2.5
        )
        pairs.append(list(chosen.items()))
    want = torch.tensor(slow_moe.moe(p, x_TD.tolist(), pairs), dtype=torch.float64)
    same(alone(x_TD), want)
    swapped = dict(PARAMS, gate_up=PARAMS["gate_up"].flip(1))
    assert not torch.allclose(moe(swapped, x_TD, rules=Rules.none(), route=ROUTE), want)


def block_params(block, bias: Tensor | None):
    """The leaves of a block of `transformers`, as those of the specs."""

    def halves(stacked: Tensor) -> Tensor:
        return stacked.unflatten(-2, (2, -1))

    p = dict(
        router=dict(weight=block.gate.weight) | ({} if bias is None else dict(bias=bias)),
        gate_up=halves(block.experts.gate_up_proj),
        down=block.experts.down_proj,
    )
    if shared := getattr(block, "shared_experts", None):
        gate_up = torch.stack([shared.gate_proj.weight, shared.up_proj.weight])
        p["shared"] = dict(gate_up=gate_up, down=shared.down_proj.weight)
    return p


@pytest.mark.parametrize(
    ("family", "route"),
    [
        ("deepseek_v2", partial(softmax_group_top_k, k=3, groups=4, keep_groups=2, scale=16.0)),
        ("deepseek_v3", partial(sigmoid_group_top_k, k=3, groups=4, keep_groups=2, scale=2.5)),
        ("glm4_moe", partial(sigmoid_group_top_k, k=3, scale=2.5)),
        ("qwen3_moe", partial(softmax_top_k, k=3, normalise=True)),
        ("minimax_m2", partial(sigmoid_top_k, k=3)),
    ],
)
@torch.no_grad()
def test_it_equals_the_block_of_transformers(tiny_model, family, route):
    config, model = tiny_model(family)
    block = model.model.layers[-1].mlp
    bias = getattr(block, "e_score_correction_bias", None)
    bias = getattr(block.gate, "e_score_correction_bias", None) if bias is None else bias
    p = block_params(block, bias)
    specs = moe_specs(
        config.hidden_size,
        8,
        p["down"].shape[2],
        router=router_specs if bias is None else biased_router_specs,
        shared_width=p["shared"]["down"].shape[1] if "shared" in p else 0,
    )
    assert [(n, s.shape) for n, s in leaves_with_path(specs, is_leaf=is_spec)] == [
        (n, tuple(leaf.shape)) for n, leaf in leaves_with_path(p)
    ]
    x_TD = torch.randn(29, config.hidden_size, generator=torch.Generator().manual_seed(3))
    got = moe(p, x_TD, rules=Rules.none(), route=route)
    torch.testing.assert_close(got, block(x_TD[None])[0], rtol=1e-5, atol=1e-5)


def test_only_the_router_is_declared_wide():
    specs = with_dtype(
        moe_specs(D, E, F, router=biased_router_specs, shared_width=4), torch.bfloat16
    )
    wide = [n for n, s in leaves_with_path(specs, is_leaf=is_spec) if s.dtype != torch.bfloat16]
    assert wide == ["router.weight", "router.bias"]
    y_TD = moe(init(specs), tokens(5).bfloat16(), rules=Rules.none(), route=ROUTE)
    assert y_TD.dtype == torch.bfloat16


def test_a_traced_graph_and_meta_tensors_give_the_same():
    torch._dynamo.reset()
    p, x_TD = tree_map(lambda leaf: leaf.float(), PARAMS), tokens(7).float()
    layer = partial(moe, rules=Rules.none(), route=ROUTE)
    want = layer(p, x_TD)
    traced = torch.compile(layer, backend="aot_eager", fullgraph=True)(p, x_TD)
    torch.testing.assert_close(traced, want, rtol=1e-4, atol=1e-4)
    meta = layer(tree_map(lambda leaf: leaf.to("meta"), p), x_TD.to("meta"))
    assert (meta.shape, meta.dtype) == (want.shape, want.dtype)


# ---- factors, one by one


PATHS = {
    "loop": (Mesh(), Rules.none()),
    "static": (Mesh(), Rules.none()),
    "gather": (Mesh(tp=2), Rules(experts="tp")),
    "exchange": (Mesh(tp=2), Rules(experts="tp", moe_tokens="tp", residual_tokens="tp")),
    "width": (Mesh(tp=2), Rules(expert_mlp="tp", shared_mlp="tp")),
}


def routers(scale: float):
    for normalise in (True, False):
        yield partial(sigmoid_group_top_k, k=K, normalise=normalise, scale=scale), normalise
    yield partial(softmax_group_top_k, k=K, scale=scale), False


@pytest.mark.parametrize("path", PATHS)
def test_the_scale_reaches_the_routed_part_once_and_the_shared_part_never(path, monkeypatch):
    if path == "static":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    mesh, rules = PATHS[path]
    x_TD = tokens(8)
    no_experts = dict(PARAMS, down=torch.zeros_like(PARAMS["down"]))
    for (once, normalised), (scaled, _) in zip(routers(1.0), routers(2.5), strict=True):
        shared = run(x_TD, mesh, rules, params=no_experts, route=scaled)
        alike = slow_moe.moe(tree_map(Tensor.tolist, PARAMS), x_TD.tolist(), [[]] * 8)
        same(shared, torch.tensor(alike, dtype=torch.float64))
        plain = run(x_TD, mesh, rules, route=once) - shared
        same(run(x_TD, mesh, rules, route=scaled) - shared, 2.5 * plain)
        # Experts that all answer alike give that answer times the sum of the weights.
        one = {n: PARAMS[n][:1].expand_as(PARAMS[n]) for n in ("gate_up", "down")}
        part = run(x_TD, mesh, rules, params={**PARAMS, **one}, route=scaled) - shared
        total_T = scaled(PARAMS["router"], x_TD)[0].sum(1)
        answer = torch.tensor(
            [slow_moe.expert(*(PARAMS[n][0].tolist() for n in one), x) for x in x_TD.tolist()],
            dtype=torch.float64,
        )
        same(part, total_T[:, None] * answer)
        assert torch.allclose(total_T, torch.tensor(2.5).double()) == normalised


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_shares_are_normalised_only_on_request(path, normalise):
    mesh, rules = PATHS[path]
    specs = with_dtype(moe_specs(D, E, F), torch.float64)
    p = {n: PARAMS[n] for n in ("gate_up", "down")} | dict(
        router=dict(weight=PARAMS["router"]["weight"])
    )
    x_TD, lists = tokens(8), tree_map(Tensor.tolist, p)
    chosen = [
        slow_moe.softmax_top_k(slow_moe.times(lists["router"]["weight"], x), K, normalise)
        for x in x_TD.tolist()
    ]
    want = slow_moe.moe(lists, x_TD.tolist(), [list(c.items()) for c in chosen])
    route = partial(softmax_top_k, k=K, normalise=normalise)
    got = run(x_TD, mesh, rules, params=p, specs=specs, route=route)
    same(got, torch.tensor(want, dtype=torch.float64))


def test_another_activation_and_other_shared_experts_are_functions_passed_in():
    x_TD, lists = tokens(4), tree_map(Tensor.tolist, PARAMS)
    clamped = partial(ops.swiglu_clamped, limit=0.5)

    def doubled(p, x_TD, *, rules):
        return 2 * x_TD

    got = alone(x_TD, activation=clamped, shared=doubled)
    weights_TK, ids_TK = ROUTE(PARAMS["router"], x_TD)
    pairs = [
        list(zip(i, w, strict=True))
        for i, w in zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)
    ]
    lists.pop("shared")
    want = slow_moe.moe(lists, x_TD.tolist(), pairs, partial(slow.swiglu_clamped, limit=0.5))
    same(got, torch.tensor(want, dtype=torch.float64) + 2 * x_TD)


# ---- meshes


DP_TP = Mesh(dp=2, tp=2)
DP = dict(requests="dp", pages="dp", tokens="dp", q_tokens="dp", residual_tokens="dp")
EP = dict.fromkeys(
    ("requests", "pages", "tokens", "q_tokens", "residual_tokens", "moe_tokens"), ("dp", "ep")
)
SP = dict(DP, residual_tokens=("dp", "tp"))
VLLM = ("dp", "tp")
LAYOUTS = {
    "width over tp": (Mesh(tp=4), Rules(expert_mlp="tp", shared_mlp="tp")),
    "width over tp, dealt residual": (Mesh(tp=3), Rules(expert_mlp="tp", residual_tokens="tp")),
    "experts over tp": (Mesh(dp=1, tp=2), Rules(experts=VLLM, shared_mlp="tp")),
    "experts over 4, padded": (Mesh(tp=4), Rules(experts="tp", shared_mlp="tp")),
    "exchange over 4, padded": (
        Mesh(tp=4),
        Rules(experts="tp", moe_tokens="tp", residual_tokens="tp"),
    ),
    "exchange over dp": (Mesh(dp=2, tp=1), Rules(**DP, moe_tokens="dp", experts=VLLM)),
    "gather over dp": (Mesh(dp=2), Rules(**DP, experts="dp")),
    "gather over dp and tp": (DP_TP, Rules(**DP, experts=VLLM, shared_mlp="tp")),
    "exchange over dp, gather over tp": (DP_TP, Rules(**DP, moe_tokens="dp", experts=VLLM)),
    "exchange over dp and tp": (DP_TP, Rules(**DP, moe_tokens=VLLM, experts=VLLM)),
    "exchange over both, dealt": (DP_TP, Rules(**SP, moe_tokens=VLLM, experts=VLLM)),
    "experts in another order": (DP_TP, Rules(**SP, moe_tokens=VLLM, experts=("tp", "dp"))),
    "experts over dp, width over tp": (
        DP_TP,
        Rules(**SP, moe_tokens="dp", experts="dp", expert_mlp="tp"),
    ),
    "a data axis shares the experts": (Mesh(dp=2, ep=2), Rules(**EP, experts="ep")),
    "more ranks than some share": (Mesh(dp=3, ep=4), Rules(**EP, experts=("dp", "ep"))),
}
EXCHANGES = {"padded": padded_exchange, "ragged": ragged_exchange}
every_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


@every_exchange
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mesh_gives_what_one_device_gives(layout, exchange):
    mesh, rules = LAYOUTS[layout]
    multiple = mesh.size(
        max(rules["residual_tokens"], rules["moe_tokens"], key=lambda a: len(names(a)))
    )
    for count in (1, 7, 13):
        x_TD = tokens(count)
        rows = torch.full((-(-count // multiple) * multiple, D), 1e3, dtype=torch.float64)
        rows[:count] = x_TD  # the rest is padding, and may hold anything
        same(run(rows, mesh, rules, exchange=exchange)[:count], alone(x_TD))


@every_exchange
def test_ranks_may_be_without_tokens_or_hold_all_of_them(exchange):
    """All tokens alike: at most three of four ranks have work, and one has most of it."""
    mesh, rules = LAYOUTS["exchange over 4, padded"]
    for x_TD in (tokens(16, alike=16), tokens(16, alike=12)):
        same(run(x_TD, mesh, rules, exchange=exchange), alone(x_TD))
    nobody = run(tokens(0), mesh, rules, exchange=exchange)
    assert nobody.shape == (0, D)


def test_ragged_ranks_may_hold_different_numbers_of_tokens():
    mesh, rules = (
        Mesh(ep=3),
        Rules(**dict.fromkeys(("residual_tokens", "moe_tokens"), "ep"), experts="ep"),
    )
    specs, ranks, x_TD = pad(SPECS, mesh, rules), ThreadRanks(mesh), tokens(9)
    params = map_with_path(nan_padded, specs, PARAMS, is_leaf=is_spec)
    layer = partial(moe, rules=rules, route=ROUTE, exchange=ragged_exchange)
    parts = ranks.run(layer, ranks.split(params, rules.specs(specs)), list(x_TD.split([5, 0, 4])))
    assert [len(y) for y in parts] == [5, 0, 4]
    same(torch.cat(parts), alone(x_TD))


def test_owners_cover_the_experts_once():
    """Each of 10 experts has one rank of 4, and what padding added has none of the ids."""
    ids_TK = torch.arange(12)[:, None]  # 10, 11 are the padding; nobody routes to them
    experts = ("dp", "tp")

    def owned(_: Tensor) -> Tensor:
        return local_ids(ids_TK, 3, experts, None)[0, :, 0]

    ranks = ThreadRanks(Mesh(dp=2, tp=2))
    per_rank = ranks.run(owned, [ids_TK] * 4)
    assert [[e for e in range(12) if part[e] >= 0] for part in per_rank] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10, 11],
    ]
    assert all(part[part >= 0].tolist() == [0, 1, 2] for part in per_rank)
    with bind(Mesh(dp=1, tp=1), solo()):
        strangers = local_ids(torch.tensor([[-1, 12, 40]]), 12, experts, None)
    assert strangers.tolist() == [[[-1, -1, -1]]]


AXES = [None, "a", "b", "c", ("a", "b"), ("b", "a"), ("b", "c"), ("c", "a")]
AXES += [("a", "b", "c"), ("b", "c", "a"), ("c", "b", "a")]
CHAINS = [None, "a", "b", ("a", "b"), ("b", "a"), ("a", "b", "c"), ("b", "c", "a")]


@pytest.mark.parametrize("residual", CHAINS, ids=str)
def test_rules_that_pass_the_check_are_right_or_raise(residual):
    """Every product of rules over a 2 x 2 x 2 mesh; none may be silently wrong."""
    mesh, x_TD = Mesh(a=2, b=2, c=2), tokens(16, seed=5, alike=4)
    ranks, want = ThreadRanks(mesh), alone(x_TD)
    params = {8: PARAMS}
    right = refused = 0
    for number, (dealt, experts, width) in enumerate(
        itertools.product(CHAINS, AXES, [None, "b", "c", ("c", "b")])
    ):
        rules = Rules(residual_tokens=residual, moe_tokens=dealt, experts=experts, expert_mlp=width)
        specs = pad(SPECS, mesh, rules)
        if rules.problems(specs, mesh):
            refused += 1
            continue
        grown = params.setdefault(
            specs["down"].shape[0], map_with_path(nan_padded, specs, PARAMS, is_leaf=is_spec)
        )
        exchange = ragged_exchange if number % 5 == 0 else padded_exchange
        layer = partial(moe, rules=rules, route=ROUTE, exchange=exchange)
        layout = P(residual, None)
        f = shard_map(layer, mesh, (rules.specs(specs), layout), layout, ranks=ranks)
        gap = (f(grown, x_TD) - want).abs().max().item()
        assert gap < 1e-9, f"{rules!r} is off by {gap}"
        right += 1
    assert right >= 30 and refused >= 30


# ---- messages


def test_an_activation_that_the_shared_experts_would_not_follow_is_refused():
    with pytest.raises(ValueError, match=r"shared_mlp is SwiGLU; give shared="):
        alone(tokens(2), activation=ops.swiglu_oai)


def test_token_rules_off_the_chain_are_refused():
    with pytest.raises(ValueError, match=r"not on one chain"):
        alone_rules = Rules(residual_tokens="a", moe_tokens="b")
        moe(PARAMS, tokens(2), rules=alone_rules, route=ROUTE)


@every_exchange
def test_ids_need_a_row_for_each_rank(exchange):
    ids = torch.zeros(2, 3, K, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(2, 3, 3\) must be \[n, T, K\].* the 1 ranks of None"):
        exchange(lambda x, ids, weights: x, tokens(3), ids, torch.zeros(3, K), None)


def test_the_ragged_exchange_says_where_it_can_not_run():
    args = tokens(3), torch.zeros(1, 3, K, dtype=torch.int64), torch.zeros(3, K)
    with pytest.raises(ValueError, match=r"eager mode; use padded_exchange for meta tensors"):
        ragged_exchange(lambda x, ids, weights: x, *(a.to("meta") for a in args), None)
