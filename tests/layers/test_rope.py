"""RoPE tables against loops over the equations and against transformers; the config reader."""

import dataclasses
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from funcinfer.layers import primitives as ops
from funcinfer.layers.rope import (
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Rope,
    Yarn,
    attention_factor,
    inverse_frequencies,
    rope_tables,
    softmax_mscale,
)
from tests.layers import slow

THETA, HEAD, LONGEST = 25000.0, 14, 240
SHORT = [1.0, 1.1, 1.25, 1.3, 1.7, 1.9, 2.3]
LONG = [1.5, 2.0, 3.0, 5.0, 6.0, 7.5, 9.0]
YARN = {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 40}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 60,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 120,
}
DICTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": YARN,
    "yarn exact range": {**YARN, "truncate": False, "beta_fast": 5.0, "beta_slow": 0.3},
    "yarn mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn mscale alone": {**YARN, "mscale": 0.7},
    "yarn attention factor": {
        **YARN,
        "attention_factor": 0.6,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn implied factor": {**YARN, "factor": None},
    "yarn shrinking": {**YARN, "factor": 0.5},
    "yarn of few turns": {**YARN, "original_max_position_embeddings": 3},
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "longrope factor": {**LONGROPE, "factor": 3.0},
    "longrope attention factor": {**LONGROPE, "factor": 3.0, "attention_factor": 1.2},
}


def of(facts: dict, head_dim: int = HEAD, **top) -> Rope:
    config = {"rope_theta": THETA, "max_position_embeddings": LONGEST, "rope_scaling": facts, **top}
    return Rope.from_hf(config, head_dim)[0]


def transformers_config(facts: dict) -> LlamaConfig:
    return LlamaConfig(
        head_dim=HEAD,
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": THETA, **facts},
    )


def slow_frequencies(rope: Rope, length: int) -> list[float]:
    base = rope.theta, rope.rotary_dim
    match rope.scaling:
        case None:
            return slow.frequencies(*base)
        case Linear(factor):
            return slow.linear(*base, factor)
        case DynamicNTK(factor, longest):
            return slow.dynamic_ntk(*base, factor, longest, length)
        case Llama3(factor, low, high, original):
            return slow.llama3(*base, factor, low, high, original)
        case LongRope(short, long, _, original):
            return slow.longrope(*base, short, long, original, length)
        case Yarn(factor, original, fast, slow_turns, truncate=truncate):
            return slow.yarn(*base, factor, original, fast, slow_turns, truncate)


@pytest.mark.parametrize("length", [None, 30, 60, 61, 240, 241, 900])
@pytest.mark.parametrize("name", DICTS)
def test_frequencies_equal_the_equations(name, length):
    rope = of(DICTS[name])
    want = torch.tensor(slow_frequencies(rope, LONGEST if length is None else length))
    got = inverse_frequencies(rope, length)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=2e-6, atol=0)


@pytest.mark.parametrize("length", [30, 240, 900])
@pytest.mark.parametrize("name", [name for name in DICTS if name != "default"])
@pytest.mark.filterwarnings("ignore")
def test_frequencies_and_factor_equal_transformers(name, length):
    config = transformers_config(DICTS[name])
    make = ROPE_INIT_FUNCTIONS[DICTS[name]["rope_type"]]
    want, factor = make(config, torch.device("cpu"), seq_len=length)
    rope = of(DICTS[name])
    torch.testing.assert_close(inverse_frequencies(rope, length), want, rtol=2e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_tables_equal_transformers(name):
    positions = torch.tensor([3, 0, 77, 5000, 120_001])
    module = LlamaRotaryEmbedding(transformers_config(DICTS[name]))
    cos, sin = rope_tables(of(DICTS[name]), positions)
    for got, want in zip((cos, sin), module(torch.zeros(1), positions[None]), strict=True):
        assert got.shape == (5, HEAD // 2)
        assert torch.equal(torch.cat([got, got], -1), want[0])


@pytest.mark.parametrize("name", DICTS)
def test_tables_equal_the_equations(name):
    rope, positions = of(DICTS[name]), torch.tensor([1, -1, 9, 239, 57], dtype=torch.int32)
    scale = attention_factor(rope)
    want = [
        [[g(t * f) * scale for f in slow_frequencies(rope, LONGEST)] for t in positions.tolist()]
        for g in (math.cos, math.sin)
    ]
    tables = torch.stack(rope_tables(rope, positions))
    assert tables.dtype == torch.float32
    torch.testing.assert_close(tables, torch.tensor(want), rtol=0, atol=3e-5)


def test_attention_factor_and_softmax_scale_by_hand():
    m = slow.yarn_magnitude
    yarn = Yarn(4.0, 4096)
    cases = [
        (None, 1.0, 1.0),
        (Linear(4.0), 1.0, 1.0),
        (yarn, m(4, 1), 1.0),
        (Yarn(32.0, 4096), 1.3465736, 1.0),
        (dataclasses.replace(yarn, mscale=0.7), m(4, 1), 1.0),
        (dataclasses.replace(yarn, mscale_all_dim=1.0), m(4, 1), m(4, 1) ** 2),
        (dataclasses.replace(yarn, mscale=1.0, mscale_all_dim=1.0), 1.0, m(4, 1) ** 2),
        (dataclasses.replace(yarn, mscale=0.7, mscale_all_dim=1.3), m(4, 0.7) / m(4, 1.3), None),
        (dataclasses.replace(yarn, attention_factor=0.0, mscale_all_dim=1.0), 0.0, m(4, 1) ** 2),
        (LongRope((1.0,), (2.0,), 4.0, 256, 1024), math.sqrt(1.25), 1.0),
        (LongRope((1.0,), (2.0,), 1.0, 256, 256), 1.0, 1.0),
    ]
    for scaling, factor, softmax in cases:
        rope = Rope(1e4, 2, scaling)
        assert attention_factor(rope) == pytest.approx(factor, rel=1e-7), scaling
        if softmax is not None:
            assert softmax_mscale(rope) == pytest.approx(softmax, rel=1e-12), scaling
    # 24^-0.5 m^2 of a DeepSeek model with 24-wide heads and factor 4
    deepseek = Rope(1e4, 8, Yarn(4.0, 64, mscale=1.0, mscale_all_dim=1.0))
    assert 24**-0.5 * softmax_mscale(deepseek) == pytest.approx(0.2646, abs=5e-5)


def test_attention_factor_multiplies_the_tables_once():
    positions = torch.tensor([2, 31])
    plain, scaled = (of({**YARN, "attention_factor": factor}) for factor in (1.0, 3.0))
    for one, three in zip(
        rope_tables(plain, positions), rope_tables(scaled, positions), strict=True
    ):
        torch.testing.assert_close(three, 3 * one)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_tables_depend_on_the_given_length_and_never_on_the_positions(name):
    rope = of(DICTS[name])
    short, long = torch.tensor([5]), torch.tensor([5, 3000])
    for length in (None, 30, 3001):
        alone = torch.stack(rope_tables(rope, short, length=length))
        together = torch.stack(rope_tables(rope, long, length=length))
        assert torch.equal(alone, together[:, :1])
    near, far = (inverse_frequencies(rope, length) for length in (30, 3001))
    assert not torch.allclose(near, far)


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_other_tables_do_not_depend_on_the_length(name):
    rope = of(DICTS[name])
    assert torch.equal(inverse_frequencies(rope, 3), inverse_frequencies(rope, 10**6))


@pytest.mark.parametrize("name", DICTS)
def test_each_kind_traces_and_runs_on_meta(name):
    rope, positions = of(DICTS[name]), torch.tensor([4, 90])
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: rope_tables(rope, x, dtype=torch.bfloat16), fullgraph=True, backend="eager"
    )
    for got, want in zip(
        compiled(positions), rope_tables(rope, positions, dtype=torch.bfloat16), strict=True
    ):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, want)
    cos, sin = rope_tables(rope, positions.to("meta"))
    assert cos.device.type == sin.device.type == "meta"
    assert cos.shape == sin.shape == (2, HEAD // 2)


def test_equal_facts_are_one_key_of_a_dict():
    tables = {of(DICTS["longrope"]): 1, of(DICTS["yarn"]): 2}
    assert tables[of(DICTS["longrope"])] == 1
    assert tables[of(DICTS["yarn"])] == 2


# ---- partial rotation: dims beyond the rotary dim pass through


@pytest.mark.parametrize(
    ("head_dim", "facts", "top", "default", "want"),
    [
        (16, {}, {}, 1.0, 16),
        (16, {}, {}, 0.5, 8),
        (16, {"partial_rotary_factor": 0.25}, {}, 0.5, 4),
        (16, {}, {"partial_rotary_factor": 0.25}, 0.5, 4),
        (16, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}, 1.0, 4),
        (16, {}, {"rotary_dim": 6}, 1.0, 6),
        (16, {}, {"rotary_dim": 8, "partial_rotary_factor": 0.5}, 1.0, 8),
        (192, {}, {"partial_rotary_factor": 0.334}, 1.0, 64),
    ],
)
def test_rotary_dim(head_dim, facts, top, default, want):
    rope, keys = Rope.from_hf(
        {"rope_parameters": {"rope_theta": THETA, **facts}, **top},
        head_dim,
        default_partial=default,
    )
    assert rope.rotary_dim == want
    assert keys == {"rope_parameters", *top}
    x = torch.randn(3, 2, head_dim, generator=torch.Generator().manual_seed(1))
    tables = rope_tables(rope, torch.tensor([5, 11, 2]))
    for rotate in (ops.rotate_half_split, ops.rotate_interleaved):
        y = rotate(x, *tables)
        assert torch.equal(y[..., want:], x[..., want:])
        assert (y[..., :want] != x[..., :want]).all()


# ---- reading configs


def test_both_spellings_give_the_same_facts():
    facts = {"factor": 6.0, "original_max_position_embeddings": 40, "mscale": 0.7, "beta_fast": 20}
    size = {"max_position_embeddings": LONGEST}
    new = {**facts, "rope_type": "yarn", "rope_theta": 7000, "partial_rotary_factor": 0.5}
    old = {**facts, "type": "yarn"}
    spellings = [
        ({"rope_parameters": new}, {"rope_parameters"}),
        ({"rope_parameters": new, "rope_scaling": new}, {"rope_parameters", "rope_scaling"}),
        ({"rope_parameters": new, "rope_theta": 7000}, {"rope_parameters", "rope_theta"}),
        (
            {"rope_theta": 7000, "partial_rotary_factor": 0.5, "rope_scaling": old},
            {"rope_theta", "partial_rotary_factor", "rope_scaling"},
        ),
        (
            {
                "rope_theta": 7000,
                "partial_rotary_factor": 0.5,
                "rope_parameters": None,
                "rope_scaling": {**old, "rope_type": "yarn", "attention_factor": None},
            },
            {"rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"},
        ),
    ]
    want = Rope(7000.0, 8, Yarn(6.0, 40, beta_fast=20.0, mscale=0.7))
    for config, keys in spellings:
        assert Rope.from_hf({**size, **config, "vocab_size": 7}, 16) == (want, keys)


def test_original_length_is_read_from_wherever_it_stands():
    facts = {key: LONGROPE[key] for key in ("rope_type", "short_factor", "long_factor")}
    top = {"max_position_embeddings": 240, "rope_theta": 100.0, "rope_scaling": facts}
    rope, keys = Rope.from_hf({**top, "original_max_position_embeddings": 60}, HEAD)
    assert rope.scaling == LongRope(tuple(SHORT), tuple(LONG), 4.0, 60, 240)
    assert keys == {*top, "original_max_position_embeddings"}
    rope, keys = Rope.from_hf(top, HEAD)
    assert rope.scaling == LongRope(tuple(SHORT), tuple(LONG), 1.0, 240, 240)
    assert keys == set(top)


def test_only_what_was_read_is_reported():
    config = {
        "max_position_embeddings": 240,
        "original_max_position_embeddings": 60,
        "rotary_dim": None,
        "factor": 3,
        "rope_theta": 100.0,
    }
    rope, keys = Rope.from_hf(config, 6)
    assert rope == Rope(100.0, 6)
    assert keys == {"rope_theta", "rotary_dim"}
    assert Rope.from_hf({}, 6, default_theta=123.0) == (Rope(123.0, 6), frozenset())


def test_layers_of_different_types_read_their_own_dict():
    nested = {
        "sliding": {"rope_type": "default", "rope_theta": 1e4},
        "full": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "none": None,
    }
    config = {"rope_parameters": nested}
    sliding, full = (Rope.from_hf(config, 6, layer_type=name)[0] for name in ("sliding", "full"))
    assert sliding == Rope(1e4, 6)
    assert full == Rope(1e6, 6, Linear(8.0))
    for name in (None, "none", "compressed"):
        with pytest.raises(ValueError, match=r"\['full', 'none', 'sliding'\].*layer_type="):
            Rope.from_hf(config, 6, layer_type=name)
    flat, _ = Rope.from_hf({"rope_parameters": nested["full"]}, 6, layer_type="sliding")
    assert flat == full


def test_irrelevant_keys_must_be_named():
    facts = {"rope_type": "default", "mrope_section": [1, 1, 1], "mrope_interleaved": True}
    with pytest.raises(ValueError, match=r"\['mrope_interleaved', 'mrope_section'\].*'default'"):
        of(facts)
    irrelevant = frozenset({"mrope_section", "mrope_interleaved"})
    rope, _ = Rope.from_hf({"rope_parameters": facts}, 6, irrelevant=irrelevant)
    assert rope == Rope(1e4, 6)


@pytest.mark.parametrize("name", DICTS)
def test_every_fact_of_the_dict_is_read_or_refused(name):
    with pytest.raises(ValueError, match=r"\['surprise'\]"):
        of({**DICTS[name], "surprise": 1})
    rope = of(DICTS[name])
    for key, value in DICTS[name].items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            assert of({**DICTS[name], key: value + 1}) != rope, key


@pytest.mark.parametrize(
    ("facts", "top", "message"),
    [
        ({"rope_type": "su"}, {}, r"unknown kind of RoPE 'su'; known are default"),
        ({"rope_type": "linear"}, {}, r"needs 'factor'"),
        ({"rope_type": "linear", "factor": "4"}, {}, r"factor is '4'; it must be a number"),
        ({"rope_type": "linear", "factor": True}, {}, r"factor is True; it must be a number"),
        ({"rope_type": "linear", "factor": 0}, {}, r"Linear\(factor=0.0\): factor must be"),
        ({"rope_type": "dynamic", "factor": -1}, {}, r"factor must be positive"),
        ({"rope_type": "yarn", "type": "linear"}, {}, r"'yarn' and type 'linear' disagree"),
        ({**YARN, "truncate": "no"}, {}, r"truncate is 'no'; it must be true or false"),
        ({**YARN, "beta_slow": 40}, {}, r"beta_fast >= beta_slow"),
        ({**YARN, "rope_theta": 5.0}, {}, r"rope_theta is 5.0 .* and 25000.0 at the top"),
        ({**LLAMA3, "high_freq_factor": 1.0}, {}, r"high_freq_factor > low_freq_factor"),
        ({**LONGROPE, "short_factor": SHORT[:3]}, {}, r"must have 7 numbers"),
        ({**LONGROPE, "long_factor": 4.0}, {}, r"long_factor is 4.0; it must be a list"),
        ({**LONGROPE, "long_factor": [-1.0] * 7}, {}, r"factors must be positive"),
        ({}, {"rope_parameters": {"factor": 2}, "rope_scaling": {"factor": 3}}, r"disagree"),
        ({}, {"rotary_dim": 6, "partial_rotary_factor": 1.0}, r"rotary_dim 6 and .* disagree"),
        ({}, {"rotary_dim": 16}, r"rotary dim of 16 does not fit in a head dim of 14"),
        ({}, {"partial_rotary_factor": 0.5}, r"rotary_dim must be even and positive"),
        ({}, {"partial_rotary_factor": 0.0}, r"rotary dim of 0 does not fit"),
        ({}, {"rope_theta": 1.0}, r"theta must be above 1"),
    ],
)
def test_messages(facts, top, message):
    with pytest.raises(ValueError, match=message):
        of(facts, **top)


def test_messages_of_facts_given_by_hand():
    with pytest.raises(ValueError, match="rotary_dim above 2"):
        Rope(1e4, 2, DynamicNTK(2.0, 64))
    with pytest.raises(ValueError, match="max_position_embeddings must be positive"):
        DynamicNTK(2.0, 0)
    with pytest.raises(ValueError, match="needs 'max_position_embeddings'"):
        Rope.from_hf({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8)
