"""Rules: look-up, layouts, each law of `check` with its own message, padding, presets, explain."""

import itertools
import random

import pytest
import torch

from funcinfer import ParamSpec
from funcinfer.sharding import (
    LIBRARY_AXES,
    Mesh,
    P,
    Rules,
    drop,
    pad,
    presets,
    token_multiple,
)
from funcinfer.sharding.rules import NEVER_SHARDED
from tests.sharding import brute

MESH = Mesh(dp=2, tp=2, x=2)
N, K, D, F, V = 8, 4, 12, 16, 24
SPECS = {
    "embed": ParamSpec((V, D), ("vocab_in", "embed")),
    "layers": [
        {
            "wq": ParamSpec((N, 3, D), ("heads", "head_dim", "embed")),
            "wk": ParamSpec((K, 3, D), ("kv_heads", "head_dim", "embed")),
            "wo": ParamSpec((N, 3, D), ("o_heads", "head_dim", "embed")),
            "gate_up": ParamSpec((2, F, D), (None, "mlp", "embed")),
        }
        for _ in range(2)
    ],
    "head": ParamSpec((V, D), ("vocab_out", "embed")),
}
TP = dict(heads="tp", kv_heads="tp", o_heads="tp", mlp="tp", vocab_in="tp", vocab_out="tp")
DP = dict.fromkeys(
    ("requests", "pages", "tokens", "q_tokens", "residual_tokens", "moe_tokens"), "dp"
)


def problems(**rules) -> list[str]:
    return Rules(**rules).problems(SPECS, MESH)


def test_every_library_axis_has_a_rule():
    rules = Rules.none()
    for name in LIBRARY_AXES:
        assert rules[name] is None
    assert rules.spec("heads", None, "embed") == P(None, None, None)


def test_rules_are_values():
    rules = Rules(heads="tp", mlp=["dp", "tp"], mine=None)
    assert rules == Rules(mlp=("dp", "tp"), heads=("tp",), mine=None)
    assert hash(rules) == hash(Rules(mlp=("dp", "tp"), heads="tp", mine=None))
    assert rules != Rules.none() != Rules(mine=None)
    assert repr(rules) == "Rules(heads='tp', mlp=('dp', 'tp'))"
    changed = rules.replace(heads=None, kv_heads="x")
    assert changed["heads"] is None and changed["kv_heads"] == "x" and rules["heads"] == "tp"
    assert changed["mlp"] == ("dp", "tp") and changed["mine"] is None


def test_an_unknown_logical_axis_is_refused_with_a_suggestion():
    with pytest.raises(KeyError, match="no rule for logical axis 'haeds'; did you mean 'heads'"):
        Rules.none()["haeds"]
    with pytest.raises(KeyError, match=r"'windows'\. Known: .*Give it: Rules\(windows=None\)"):
        Rules.none().spec("windows")
    assert Rules(windows=None).spec("windows") == P(None)


def test_values_that_are_not_axes_are_refused():
    with pytest.raises(ValueError, match="rule heads 2: write a mesh axis, a tuple of mesh axes"):
        Rules(heads=2)
    with pytest.raises(ValueError, match=r"rule heads=\('tp', 'tp'\) names a mesh axis twice"):
        Rules(heads=("tp", "tp"))


def test_one_mesh_axis_on_two_dims_is_refused():
    with pytest.raises(
        ValueError,
        match=r"logical axes \('heads', 'mlp'\): P\('tp', 'tp'\): mesh axis 'tp' is used",
    ):
        Rules(heads="tp", mlp="tp").spec("heads", "mlp")


def test_layouts_of_a_tree():
    layouts = Rules(**TP).specs(SPECS)
    assert layouts["layers"][1]["gate_up"] == P(None, "tp", None)
    assert layouts["embed"] == P("tp", None)


def test_o_tokens_are_what_o_heads_leave_of_q_tokens():
    assert Rules(q_tokens=("dp", "tp"), o_heads="tp")["o_tokens"] == "dp"
    assert Rules(q_tokens=("dp", "tp"), o_heads="tp", o_tokens="x")["o_tokens"] == "x"


LEGAL = {
    "one device": {},
    "tp": TP,
    "tp, sp": {**TP, "residual_tokens": "tp"},
    "dp": DP,
    "dp x tp, sp": {**DP, **TP, "residual_tokens": ("dp", "tp"), "logits": "tp"},
    "fine-grained over dp": {
        **DP,
        "o_heads": "dp",
        "mlp": "dp",
        "vocab_in": "dp",
        "vocab_out": "dp",
    },
    "kv heads fewer than tp": {
        **TP,
        "heads": ("tp", "x"),
        "kv_heads": ("tp", "x"),
        "o_heads": "tp",
    },
    "dcp": {**TP, "heads": ("tp", "x"), "o_heads": ("tp", "x"), "page_tokens": "x"},
    "dsa-cp": {"q_tokens": "tp", "o_heads": "tp", "mlp": "tp"},
    "flashcomm2": {
        "heads": ("tp", "x"),
        "kv_heads": ("tp", "x"),
        "o_heads": "tp",
        "o_tokens": "x",
        "residual_tokens": ("x", "tp"),
    },
    "moe gathers tokens": {**DP, "moe_tokens": None, "experts": "dp", "expert_mlp": "tp"},
}


@pytest.mark.parametrize("name", LEGAL)
def test_legal_rules_pass(name):
    assert problems(**LEGAL[name]) == []
    Rules(**LEGAL[name]).check(SPECS, MESH)


ILLEGAL = [
    ({"tokens": "tp", "requests": "dp", "pages": "dp"},
     "tokens='tp' must extend requests='dp' at its minor end"),
    ({**DP, "residual_tokens": ("x", "dp")},
     "residual_tokens=('x', 'dp') must extend tokens='dp' at its minor end"),
    ({**DP, "q_tokens": None}, "q_tokens=None must extend tokens='dp' at its minor end"),
    ({"q_tokens": "tp", "residual_tokens": "x"},
     "q_tokens='tp' and residual_tokens='x' must be on one chain: one extends the other"),
    ({"moe_tokens": "tp", "residual_tokens": "x"},
     "moe_tokens='tp' and residual_tokens='x' must be on one chain"),
    ({**DP, "pages": None}, "pages=None must equal requests='dp': a request's pages live with it"),
    ({**DP, "page_tokens": "dp"},
     "page_tokens='dp' and requests='dp' share 'dp': they must be disjoint"),
    ({**TP, "page_tokens": "tp"}, "page_tokens='tp' and kv_heads='tp' share 'tp'"),
    ({**DP, "index_page_tokens": "dp"}, "index_page_tokens='dp' and requests='dp' share 'dp'"),
    ({**TP, **DP, "tokens": ("dp", "tp"), "q_tokens": ("dp", "tp"), "residual_tokens": ("dp", "tp"),
      "heads": None, "o_heads": None}, "kv_heads='tp' and tokens=('dp', 'tp') share 'tp'"),
    ({**TP, "q_tokens": "tp"}, "heads='tp' and q_tokens='tp' share 'tp'"),
    ({"o_heads": "x", "o_tokens": "x"}, "o_heads='x' and o_tokens='x' share 'x'"),
    ({**DP, "expert_mlp": "dp"}, "expert_mlp='dp' and moe_tokens='dp' share 'dp'"),
    ({"expert_mlp": "tp", "experts": ("x", "tp")}, "expert_mlp='tp' and experts=('x', 'tp') share"),
    ({"linear_heads": "tp", "linear_tokens": "tp"},
     "linear_heads='tp' and linear_tokens='tp' share 'tp'"),
    ({**TP, "heads": ("x", "tp"), "page_tokens": "x"},
     "page_tokens='x' must be the minor axes of heads=('x', 'tp')"),
    ({**TP, "heads": ("x", "tp")}, "heads=('x', 'tp') must start with the axes of kv_heads='tp'"),
    ({**TP, "heads": ("tp", "x"), "o_heads": ("tp", "x")},
     "heads=('tp', 'x') is finer than kv_heads='tp' by 'x', which copies KV heads; that needs one"
     " whole KV head a rank, but 4 heads lie on 2: give kv_heads 4 ranks, or put 'x' into page"),
    ({**TP, "heads": "tp", "o_heads": ("x", "tp")},
     "o_heads=('x', 'tp') can't be reached from heads='tp': can't go from layout"),
    ({**LEGAL["flashcomm2"], "residual_tokens": ("tp", "x")},
     "o_tokens='x': tokens would come back from o_proj in another order than ('tp', '"),
    ({"o_tokens": "x"},
     "o_tokens='x': tokens would come back from o_proj in another order than None"),
    ({"logits": "tp"}, "logits='tp' must be None or vocab_out less requests, here None"),
    ({**DP, "vocab_out": ("dp", "tp"), "logits": ("dp", "tp")},
     "logits=('dp', 'tp') must be None or vocab_out less requests, here 'tp'"),
    ({**dict.fromkeys(DP, ("dp", "x")), "vocab_out": ("x", "dp")},
     "vocab_out=('x', 'dp') does not let logits return to their requests: can't go from layout"),
    ({"embed": "tp"}, "rule embed='tp': embed is never sharded; use None"),
    ({"heads": "tpp"},
     "rule heads='tpp': Mesh(dp=2, tp=2, x=2) has no axis 'tpp'; did you mean 'tp'?"),
    ({"haeds": "tp"}, "rule haeds='tp' names an axis that no spec uses; did you mean 'heads'"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "said"), ILLEGAL, ids=[said[:40] for _, said in ILLEGAL])
def test_each_law_has_its_message(rules, said):
    found = problems(**rules)
    assert any(line.startswith(said) for line in found), found
    with pytest.raises(ValueError, match="these rules are not legal:\n  "):
        Rules(**rules).check(SPECS, MESH)


def test_a_law_that_is_broken_alone_is_told_alone():
    alone = [(rules, said) for rules, said in ILLEGAL if len(problems(**rules)) == 1]
    assert len(alone) >= 20


@pytest.mark.parametrize("name", NEVER_SHARDED)
def test_widths_that_are_summed_over_are_never_sharded(name):
    assert problems(**{name: "tp"}) == [f"rule {name}='tp': {name} is never sharded; use None"]


def test_a_tied_head_shards_as_the_embedding_does():
    tied = {"embed": SPECS["embed"]}
    found = Rules(vocab_in="tp", vocab_out="dp").problems(tied, MESH)
    assert found == [
        "the head is tied to the embedding, so vocab_in='tp' must equal vocab_out='dp'"
    ]
    assert Rules(vocab_in="tp", vocab_out="tp").problems(tied, MESH) == []
    assert problems(vocab_in="tp", vocab_out="dp") == []


def test_uneven_dims_are_told_with_path_shape_layout_and_fix():
    specs = {"embed": ParamSpec((25, 12), ("vocab_in", None)), "w": ParamSpec((7,), ("mlp",))}
    rules = Rules(vocab_in="tp", mlp="x", vocab_out="tp")
    uneven, other = rules.problems(specs, MESH)
    assert uneven.startswith(
        "embed: dim 0 of shape (25, 12) is 25, which 'tp' of Mesh(dp=2, tp=2, x=2) does not divide"
        " into 2 even parts (layout P('tp', None))"
    )
    assert uneven.endswith("; pad(specs, mesh, rules) enlarges vocab_in")
    assert other.startswith("w: dim 0 of shape (7,) is 7") and "pad(" not in other


def test_specs_with_an_unknown_axis_are_told():
    specs = {"w": ParamSpec((4,), ("haeds",))}
    (found,) = Rules.none().problems(specs, MESH)
    assert found.startswith("no rule for logical axis 'haeds'; did you mean 'heads'")
    assert Rules(haeds="tp").problems(specs, MESH) == []


def comes_back(q: brute.Axes, o: brute.Axes, final: brute.Axes) -> bool:
    """Whether tokens that go q -> o -> final lie as `final` deals them; found by moving them.

    Tokens are numbers. Where an axis leaves, a rank's list becomes those of the ranks along it, in
    order; where one arrives, it becomes the rank's part.
    """
    ranks = range(CUBE.num_ranks)
    tokens = torch.arange(CUBE.num_ranks)
    held = [brute.cut(tokens, (q,), CUBE, r).tolist() for r in ranks]
    left = tuple(a for a in q if a not in o)
    held = [[t for member in brute.group(CUBE, left, r) for t in held[member]] for r in ranks]
    for axis in [*(a for a in o if a not in q), *(a for a in final if a not in o)]:
        for r in ranks:
            half = len(held[r]) // 2
            start = brute.index(CUBE, (axis,), r) * half
            held[r] = held[r][start : start + half]
    return held == [brute.cut(tokens, (final,), CUBE, r).tolist() for r in ranks]


CUBE = Mesh(a=2, b=2, c=2)


def test_the_law_of_o_tokens_is_exact():
    """Over every choice of q_tokens, o_tokens and residual_tokens that no other law refuses."""
    choices = [tuple(p) for n in range(4) for p in itertools.permutations("abc", n)]
    kept = refused = 0
    for q, o, residual in itertools.product(choices, choices, choices):
        final = max(q, residual, key=len)
        if final[: len(q)] != q or final[: len(residual)] != residual:
            continue
        heads = tuple(a for a in o if a not in q)
        rules = Rules(q_tokens=q, o_tokens=o, residual_tokens=residual, heads=heads, kv_heads=heads)
        found = rules.problems({}, CUBE)
        told = [line for line in found if "would come back" in line]
        if found == told:
            assert bool(told) != comes_back(q, o, final), f"{rules}, o_tokens={o}: {found}"
            kept, refused = kept + (not told), refused + bool(told)
    assert kept > 100 and refused > 100


def test_padding_is_visible_and_enough():
    mesh = Mesh(dp=2, tp=3)
    rules = Rules(vocab_in="tp", vocab_out=("dp", "tp"), mlp="tp")
    specs = {
        "embed": ParamSpec((25, 8), ("vocab_in", "embed")),
        "head": ParamSpec((25, 8), ("vocab_out", "embed")),
        "even": ParamSpec((30, 8), ("vocab_out", "embed")),
        "w": ParamSpec((25,), ("mlp",)),
    }
    padded = pad(specs, mesh, rules)
    assert padded["embed"].shape == (27, 8) and padded["embed"].true_shape == (25, 8)
    assert padded["head"].shape == (30, 8) and padded["head"].true_shape == (25, 8)
    assert padded["even"] == specs["even"] and padded["w"] == specs["w"]
    assert pad(padded, mesh, rules) == padded
    shown = rules.replace(mlp=None).explain(padded, mesh)
    assert "embed is padded from (25, 8) to (27, 8)" in shown
    assert "even is padded" not in shown


def test_token_multiple_serves_every_token_layout_and_is_the_least():
    rng = random.Random(0)
    for _ in range(200):
        mesh = Mesh(dp=rng.choice([1, 2]), a=rng.choice([1, 2, 3, 4]), b=rng.choice([2, 6]), c=3)
        tokens = ["dp", *rng.sample("abc", rng.choice([0, 1]))]
        rest = [a for a in "abc" if a not in tokens]
        rules = Rules(
            requests="dp",
            tokens=tuple(tokens),
            q_tokens=(*tokens, *rng.sample(rest, rng.choice([0, 1]))),
            residual_tokens=(*tokens, *rng.sample(rest, rng.choice([0, 1, len(rest)]))),
            o_heads=tuple(rng.sample("abc", rng.choice([0, 1]))),
        )
        layouts = ("tokens", "q_tokens", "residual_tokens", "moe_tokens", "o_tokens")
        sizes = [mesh.size(drop(rules[name], "dp")) for name in layouts]
        fits = [n for n in range(1, 300) if all(n % size == 0 for size in sizes)]
        assert token_multiple(rules, mesh) == fits[0]


def test_token_multiple_is_the_least_common_one():
    mesh = Mesh(a=4, b=6)
    assert token_multiple(Rules(residual_tokens="a", q_tokens="b"), mesh) == 12


@pytest.mark.parametrize(
    ("kv_heads", "size", "mesh"),
    [
        (8, 1, Mesh(tp=1)),
        (8, 4, Mesh(tp=4)),
        (8, 8, Mesh(tp=8)),
        (2, 4, Mesh(tp=2, rep=2)),
        (3, 6, Mesh(tp=3, rep=2)),
        (1, 8, Mesh(tp=1, rep=8)),
        (None, 8, Mesh(tp=8)),
    ],
)
def test_tp_counts_kv_heads_and_rep_their_copies(kv_heads, size, mesh):
    made, rules = presets.tp(kv_heads, size)
    assert made == mesh and made.num_ranks == size
    assert mesh.size(rules["heads"]) == size
    assert rules["kv_heads"] == (None if kv_heads is None else "tp")
    specs = {"wq": ParamSpec((24, 2), ("heads", None)), "head": ParamSpec((24,), ("vocab_out",))}
    if kv_heads:
        specs["wk"] = ParamSpec((kv_heads, 2), ("kv_heads", None))
    rules.check(specs, made)


def test_presets_put_dp_before_tp_and_deal_the_residual_on_request():
    mesh, rules = presets.tp(2, 4, dp=3, sp=True)
    assert mesh == Mesh(dp=3, tp=2, rep=2)
    assert rules["requests"] == rules["pages"] == rules["tokens"] == "dp"
    assert rules["residual_tokens"] == ("dp", "tp", "rep")
    assert presets.tp(2, 4, dp=3)[1]["residual_tokens"] == "dp"
    assert presets.single() == (Mesh(), Rules.none())


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 4), (3, 2), (4, 6), (8, 12)])
def test_kv_heads_that_do_not_divide_are_refused(kv_heads, size):
    with pytest.raises(
        ValueError, match=rf"tp={size} and {kv_heads} KV heads do not divide one another: use tp in"
    ):
        presets.tp(kv_heads, size)


def test_a_mesh_axis_without_a_preset_is_refused():
    with pytest.raises(
        ValueError, match=r"no preset for axis 'mine' of Mesh\(tp=2, mine=2\): .* give rules=Rules"
    ):
        presets.for_mesh(4, Mesh(tp=2, mine=2))


TABLE = """
leaf            axes                       shape   layout        local shape  copies  bytes a rank
embed           vocab_in, embed            28x12   rep*tp, -     7x12         2       168
layers.*.wq x2  heads, head_dim, embed     8x3x12  tp*rep, -, -  2x3x12       2       144
layers.*.wk x2  kv_heads, head_dim, embed  2x3x12  tp, -, -      1x3x12       4       72
layers.1.scale                             scalar                scalar       8       4
"""
EXPLAINED = f"""\
Mesh(dp=2, tp=2, rep=2): 8 ranks
rules: heads=tp*rep, kv_heads=tp, vocab_in=rep*tp, requests=dp
{TABLE}
604 bytes a rank, 604 of them also held by another rank
each KV head is held 2 times, over rep
embed is padded from (25, 12) to (28, 12)"""


def test_explain_is_a_table():
    mesh = Mesh(dp=2, tp=2, rep=2)
    rules = Rules(heads=("tp", "rep"), kv_heads="tp", vocab_in=("rep", "tp"), requests="dp")
    layer = {
        "wq": ParamSpec((8, 3, 12), ("heads", "head_dim", "embed")),
        "wk": ParamSpec((2, 3, 12), ("kv_heads", "head_dim", "embed")),
    }
    specs = {
        "embed": ParamSpec((25, 12), ("vocab_in", "embed")),
        "layers": [layer, {**layer, "scale": ParamSpec((), (), torch.float32)}],
    }
    assert rules.explain(pad(specs, mesh, rules), mesh) == EXPLAINED
    assert "rules: nothing sharded" in Rules.none().explain(specs, Mesh())


def test_explain_names_the_leaf_that_does_not_fit():
    with pytest.raises(ValueError, match=r"layers\.0\.wq: dim 0 of shape \(9, 3\) is 9"):
        Rules(heads="tp").explain(
            {"layers": [{"wq": ParamSpec((9, 3), ("heads", None))}]}, Mesh(tp=2)
        )
