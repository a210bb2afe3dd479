"""ParamSpec: what it refuses, seeded initialisation by path, dtypes, bytes and tables."""

import math

import pytest
import torch

from funcinfer.sharding import Mesh, Rules, ThreadRanks, pad
from funcinfer.spec import (
    Constant,
    Normal,
    ParamSpec,
    abstract,
    empty,
    init,
    nbytes,
    ones,
    pad_leaf,
    table,
    with_dtype,
    zeros,
)

SPECS = {
    "layers": [{"wq": ParamSpec((6, 5), ("heads", "embed"), torch.float32)} for _ in range(2)],
    "norm": ParamSpec((5,), ("embed",), torch.float32, ones),
    "bias": ParamSpec((), (), torch.float64, Constant(-2.5)),
}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (dict(shape=(2, 3), axes=("embed",)), r"shape \(2, 3\) names 1 axes .* each of the 2 dims"),
        (dict(shape=(2, -3), axes=(None, None)), r"shape \(2, -3\) has a negative dim"),
        (dict(shape=(2,), axes=(None,), true_shape=(3,)), r"true_shape \(3,\) does not fit into"),
        (dict(shape=(2,), axes=(None,), true_shape=()), r"true_shape \(\) does not fit into"),
    ],
)
def test_specs_that_can_not_be_are_refused(args, said):
    with pytest.raises(ValueError, match=said):
        ParamSpec(**args)


def test_a_spec_is_a_value():
    a, b = (ParamSpec([2, 3], ["embed", None]) for _ in range(2))
    assert a == b and hash(a) == hash(b) and a.shape == (2, 3) and a.axes == ("embed", None)
    assert a.dtype is torch.bfloat16 and a.nbytes == 12 and ParamSpec((), ()).nbytes == 2


def test_a_draw_depends_on_seed_and_path_alone():
    whole = init(SPECS, 7)
    alone = init({"layers": [{"wq": SPECS["layers"][0]["wq"]}]}, 7)
    assert torch.equal(whole["layers"][0]["wq"], alone["layers"][0]["wq"])
    assert not torch.equal(whole["layers"][0]["wq"], whole["layers"][1]["wq"])
    assert not torch.equal(whole["layers"][0]["wq"], init(SPECS, 8)["layers"][0]["wq"])
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    assert torch.equal(init(SPECS, 7)["layers"][1]["wq"], whole["layers"][1]["wq"])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_initialisers():
    drawn = init(SPECS)
    assert drawn["norm"].tolist() == [1.0] * 5 and drawn["bias"].item() == -2.5
    assert {k: v.dtype for k, v in drawn.items() if k != "layers"} == {
        "norm": torch.float32,
        "bias": torch.float64,
    }
    wide = init({"w": ParamSpec((200, 200), (None, None), torch.float64, Normal(0.5))})["w"]
    assert abs(wide.std().item() - 0.5) < 0.01 and abs(wide.mean().item()) < 0.01
    assert init({"z": ParamSpec((3,), (None,), torch.int32, zeros)})["z"].tolist() == [0, 0, 0]


def test_a_narrow_draw_is_the_wide_one_rounded():
    def draw(dtype):
        return init({"w": ParamSpec((9, 9), (None, None), dtype)})["w"]

    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(draw(dtype), draw(torch.float32).to(dtype))


def test_padding_does_not_change_the_draw():
    rules, mesh = Rules(vocab_in="tp"), Mesh(tp=4)
    specs = {"embed": ParamSpec((7, 3), ("vocab_in", "embed"), torch.float32)}
    padded = pad(specs, mesh, rules)
    whole, grown = init(specs)["embed"], init(padded)["embed"]
    assert grown.shape == (8, 3) and torch.equal(grown[:7], whole) and grown[7].eq(0).all()
    assert torch.equal(pad_leaf(whole, padded["embed"]), grown)
    assert pad_leaf(grown, padded["embed"]) is grown


def test_ranks_of_any_mesh_hold_parts_of_one_draw():
    rules = Rules(heads=("dp", "tp"))
    specs = {"w": ParamSpec((12, 5), ("heads", "embed"), torch.float32)}
    for mesh in (Mesh(dp=2, tp=3), Mesh(dp=1, tp=4)):
        ranks = ThreadRanks(mesh)
        parts = ranks.split(init(specs, 3), rules.specs(specs))
        assert torch.equal(ranks.join(parts, rules.specs(specs))["w"], init(specs, 3)["w"])


def test_abstract_and_empty_trees():
    shapes = abstract(SPECS)
    assert shapes["layers"][1]["wq"].is_meta and shapes["layers"][1]["wq"].shape == (6, 5)
    assert shapes["bias"].dtype is torch.float64
    assert empty(SPECS, fill=math.nan)["layers"][0]["wq"].isnan().all()
    assert empty(SPECS)["norm"].shape == (5,)
    assert empty(SPECS, device="meta")["norm"].is_meta


@pytest.mark.parametrize(
    ("declared", "asked", "made"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.float16, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.int32, torch.float32, torch.int32),
        (torch.int8, torch.bfloat16, torch.int8),
        (torch.float8_e4m3fn, torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_a_dtype_is_asked_for_without_narrowing_what_was_declared_wide(declared, asked, made):
    specs = {"w": ParamSpec((2,), (None,), declared)}
    assert with_dtype(specs, asked)["w"].dtype is made


def test_bytes_and_table():
    assert nbytes(SPECS) == 2 * 6 * 5 * 4 + 5 * 4 + 8
    assert table(SPECS).splitlines() == [
        "layers.0.wq  (6, 5)  ('heads', 'embed')  float32  120",
        "layers.1.wq  (6, 5)  ('heads', 'embed')  float32  120",
        "norm         (5,)    ('embed',)          float32  20",
        "bias         ()      ()                  float64  8",
    ]
    assert table({}) == ""
