"""Model and load: logits of any batch on any mesh, gradients, models without a checkpoint."""

import dataclasses
from functools import partial

import pytest
import torch

import funcinfer
from funcinfer import Mesh, Model, Rules, SamplingParams, build
from funcinfer.models.decoder import pure
from funcinfer.sharding import ThreadRanks
from funcinfer.spec import ParamSpec, init, with_dtype
from funcinfer.tree import tree_leaves, tree_map
from tests import oracles
from tests.equivalence.harness import Layout
from tests.equivalence.layouts import LAYOUTS
from tests.serving import tiny
from tests.serving.tiny import VOCAB


def sequences(B: int, T: int) -> torch.Tensor:
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(B * 100 + T))


def one_by_one(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits of each prefix of each sequence in a batch of its own."""
    rows = [
        torch.stack([tiny.alone().logits(row[None, : t + 1])[0, -1] for t in range(len(row))])
        for row in tokens_BT
    ]
    return torch.stack(rows)


# Logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(name, tiny_model, tiny_folder):
    config, reference = tiny_model(name)
    tokens_BT = oracles.token_ids(config, batch=3, seq=21)
    model = funcinfer.load(tiny_folder(name), dtype=torch.float32)
    found = model.logits(tokens_BT)
    torch.testing.assert_close(
        found, oracles.full_logits(reference, tokens_BT), atol=5e-5, rtol=0.0
    )


@pytest.mark.parametrize(
    "name",
    ["one rank", "tp2", "tp2 sp", "dp2", "dp4, everything else over dp", "pcp2", "dcp2 tp2"],
)
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (2, 5), (3, 1), (5, 19)])
def test_logits_of_any_batch_on_any_mesh(name, B, T):
    found = tiny.model(LAYOUTS[name]).logits(sequences(B, T))
    torch.testing.assert_close(found, one_by_one(sequences(B, T)), atol=1e-11, rtol=0.0)


@pytest.mark.parametrize("name", ["one rank", "dp2"])
@pytest.mark.parametrize(("B", "T"), [(0, 0), (0, 3), (3, 0)])
def test_logits_of_nothing(name, B, T):
    found = tiny.model(LAYOUTS[name]).logits(torch.zeros(B, T, dtype=torch.int64))
    assert (found.shape, found.dtype) == ((B, T, VOCAB), torch.float64)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_tokens_have_any_integer_dtype(dtype):
    tokens_BT = sequences(2, 3)
    found, wanted = (tiny.alone().logits(x) for x in (tokens_BT.to(dtype), tokens_BT))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 2]), r"tokens must be whole numbers \[B, T\], not torch.int64 \[2\]"),
        (torch.ones(1, 2), r"not torch.float32 \[1, 2\]"),
        (torch.ones(1, 2, dtype=torch.bool), r"not torch.bool \[1, 2\]"),
        (torch.tensor([[1, VOCAB]]), r"token 101 is outside of the vocabulary, 0 to 100"),
        (torch.tensor([[1, 2], [-1, 2]]), r"token -1 is outside of the vocabulary, 0 to 100"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        tiny.alone().logits(tokens)


def test_ranks_that_disagree_are_reported():
    rules = Rules(mlp="tp")
    fns = build(tiny.DECODER, rules)
    model = tiny.model(fns=fns, mesh=Mesh(tp=2), rules=rules, ranks=ThreadRanks(Mesh(tp=2)))
    model.shards[1]["norm"] = model.shards[1]["norm"] * 2
    with pytest.raises(ValueError, match=r"logits: .*ranks 0 \(tp=0\) and 1 \(tp=1\) must hold"):
        model.logits(sequences(1, 3))


# Gradients


def loss(model: Model, params: dict, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of each next token."""
    logits_BTV = dataclasses.replace(model, params=params).logits(tokens_BT)
    law = logits_BTV[:, :-1].log_softmax(-1)
    return -law.gather(-1, tokens_BT[:, 1:, None]).mean()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.func.jvp
def test_gradients_are_those_of_differences():
    tokens_BT = sequences(2, 5)
    wanted = partial(loss, tiny.alone(), tokens_BT=tokens_BT)
    params = tree_map(lambda x: x.clone().requires_grad_(), tiny.params())
    wanted(params).backward()
    by_func = torch.func.grad(wanted)(tiny.params())
    for x, g in zip(tree_leaves(params), tree_leaves(by_func), strict=True):
        torch.testing.assert_close(x.grad, g, atol=1e-14, rtol=1e-10)
    direction = tree_map(
        lambda x: torch.randn(
            x.shape, generator=torch.Generator().manual_seed(x.numel()), dtype=x.dtype
        ),
        tiny.params(),
    )
    step = 1e-6
    ahead, behind = (
        wanted(tree_map(lambda x, d, s=sign: x + s * step * d, tiny.params(), direction))
        for sign in (1, -1)
    )
    along = sum(
        float((g * d).sum())
        for g, d in zip(tree_leaves(by_func), tree_leaves(direction), strict=True)
    )
    assert along == pytest.approx(float(ahead - behind) / (2 * step), rel=1e-6)
    _, tangent = torch.func.jvp(wanted, (tiny.params(),), (direction,))
    assert float(tangent) == pytest.approx(along, rel=1e-10)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_parameter_sets_at_once():
    tokens_BT = sequences(2, 5)
    scales = torch.tensor([1.0, 1.1, 0.7], dtype=torch.float64)
    many = tree_map(lambda x: torch.stack([x * s for s in scales]), tiny.params())
    found = torch.func.vmap(partial(loss, tiny.alone(), tokens_BT=tokens_BT))(many)
    for i, scale in enumerate(scales):
        params = tree_map(lambda x, s=scale: x * s, tiny.params())
        torch.testing.assert_close(found[i], loss(tiny.alone(), params, tokens_BT))


def test_gradients_over_ranks_are_refused():
    params = tree_map(lambda x: x.clone().requires_grad_(), tiny.model(LAYOUTS["tp2"]).params)
    with pytest.raises(RuntimeError, match="no gradient"):
        dataclasses.replace(tiny.model(LAYOUTS["tp2"]), params=params).logits(sequences(1, 3))


# Construction


def test_a_model_is_frozen_compared_by_identity_and_short_to_print():
    model = tiny.alone()
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.params = {}  # type: ignore[misc]
    assert model == model
    assert model != dataclasses.replace(model)
    assert {model: 1}[model] == 1
    assert len(repr(model)) < 600
    assert "tensor" not in repr(model)


def test_parameters_must_fit_their_specs():
    model = tiny.alone()
    without = {name: x for name, x in tiny.params().items() if name != "norm"}
    with pytest.raises(ValueError, match=r"params has .* missing 'norm'"):
        dataclasses.replace(model, params=without)
    with pytest.raises(ValueError, match=r"params has .* not expected 'gate'"):
        dataclasses.replace(model, params={**tiny.params(), "gate": torch.ones(1)})
    wide = {**tiny.params(), "norm": torch.ones(21)}
    with pytest.raises(ValueError, match=r"params.norm has shape \(21,\) .* has \(20,\)"):
        dataclasses.replace(model, params=wide)
    layout = LAYOUTS["tp2"]
    with pytest.raises(ValueError, match=r"params.embed has shape \(101, 20\) .* \(102, 20\)"):
        tiny.model(layout, params=tiny.params())


def test_rules_and_ranks_must_be_those_of_the_functions_and_the_mesh():
    with pytest.raises(ValueError, match=r"rules must be those .* Rules\(\), not Rules\(mlp='tp'"):
        tiny.model(rules=Rules(mlp="tp"))
    with pytest.raises(ValueError, match=r"ranks of Mesh\(tp=2\) can't run a model on Mesh\(\)"):
        tiny.model(ranks=ThreadRanks(Mesh(tp=2)))
    rules = Rules(heads="tp", o_heads="tp", kv_heads="tp")
    mesh = Mesh(tp=4)
    with pytest.raises(ValueError, match=r"kv_heads|2 .* does not divide into 4 even parts"):
        tiny.model(mesh=mesh, rules=rules, fns=build(tiny.DECODER, rules))


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (LAYOUTS["one rank"], 16),
        (LAYOUTS["dcp2 tp2"], 16),
        (Layout(Mesh(dcp=3), Rules(page_tokens="dcp"), interleave=2), 18),
        (Layout(Mesh(a=2, b=5), Rules(page_tokens="a", index_page_tokens="b")), 20),
    ],
)
def test_the_page_size_suits_the_mesh(layout, size):
    model = tiny.model(layout)
    assert model.page_size == size
    tokens_BT = sequences(2, 19)
    torch.testing.assert_close(model.logits(tokens_BT), one_by_one(tokens_BT), atol=1e-11, rtol=0.0)


def gated_specs(D: int, F: int) -> dict[str, ParamSpec]:
    return dict(
        gate_up=ParamSpec((2, F, D), (None, "mlp", "embed")),
        down=ParamSpec((D, F), ("embed", "mlp")),
    )


def gated(p: dict, x_TD: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    gate_TF, up_TF = torch.einsum("td,cfd->ctf", x_TD, p["gate_up"])
    y_TD = torch.einsum("tf,df->td", gate_TF.sigmoid() * up_TF, p["down"])
    return funcinfer.sharding.psum(y_TD, rules["mlp"])


def test_a_decoder_of_ones_own_needs_no_checkpoint_and_no_config():
    decoder = tiny.DECODER.replace(1, mlp=pure(gated, gated_specs(20, 10)))
    specs = with_dtype(build(decoder).specs, torch.float64)
    model = Model(decoder, build(decoder), init(specs, seed=3))
    assert (model.dtype, model.max_length, model.stop_ids) == (torch.float64, None, ())
    tokens_BT = sequences(2, 5)
    assert model.logits(tokens_BT).shape == (2, 5, VOCAB)
    (tokens,) = model.generate([tokens_BT[0].tolist()], SamplingParams(max_tokens=3))
    history = tokens_BT[0].tolist()
    for token in tokens:
        assert token == int(model.logits(torch.tensor([history]))[0, -1].argmax())
        history.append(token)


# Load


@pytest.mark.parametrize("mesh", [None, Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2)])
def test_a_checkpoint_generates_what_transformers_does(mesh, tiny_model, tiny_folder):
    config, reference = tiny_model("llama")
    prompts_BT = oracles.token_ids(config, batch=3, seq=9)
    wanted, _ = oracles.greedy(reference, prompts_BT, 8)
    model = funcinfer.load(tiny_folder("llama"), dtype=torch.float32, mesh=mesh)
    assert model.stop_ids == (config.eos_token_id,)
    assert model.max_length == config.max_position_embeddings
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    assert model.generate(prompts_BT.tolist(), sampling) == wanted.tolist()


def test_rules_of_ones_own_replace_the_preset(tiny_folder):
    mesh, rules = Mesh(x=2), Rules(mlp="x", vocab_in="x", vocab_out="x")
    model = funcinfer.load(tiny_folder("qwen3"), dtype=torch.float64, mesh=mesh, rules=rules)
    whole = funcinfer.load(tiny_folder("qwen3"), dtype=torch.float64)
    assert model.shards[0]["embed"].shape == (128, 64)
    torch.testing.assert_close(model.logits(sequences(1, 5)), whole.logits(sequences(1, 5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": Mesh(tp=3)}, r"tp=3 and 2 KV heads do not divide one another"),
        ({"mesh": Mesh(tb=2)}, r"no preset for axis 'tb'"),
        ({"rules": Rules(mlp="tp")}, r"rule mlp='tp': Mesh\(\) has no axis 'tp'"),
    ],
)
def test_a_mesh_that_does_not_suit_is_refused(options, message, tiny_folder):
    with pytest.raises(ValueError, match=message):
        funcinfer.load(tiny_folder("llama"), dtype=torch.float32, **options)
