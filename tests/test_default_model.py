"""The model that ships with the package: its folder, transformers' view of it, and what its card
claims, on held-out chapters.

`kjv_held_out.txt` holds 15 of the 59 chapters that training never saw (King James Version, public
domain). T positions.
"""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import funcinfer
from examples.train_tiny import data, evaluate
from funcinfer import Model
from funcinfer.default import default_model
from funcinfer.serving.text import Text
from tests import oracles
from tests.models.test_draft import run_drafts

HELD_OUT = Path(__file__).with_name("kjv_held_out.txt")
ROOT = Path(__file__).parents[1]
TOLERANCE = 5e-5
MOST_BYTES = 14_000_000
T = 21


@pytest.fixture(scope="module")
def model() -> Model:
    return funcinfer.load(default_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, Any]:
    """transformers' (main model, MtpModel), both read from the folder."""
    from transformers.modeling_layers import MtpModel

    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    main = oracles.read_deepseek_v3(default_model(), **settings)
    return main, MtpModel.from_pretrained(main)


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    """The stream of held-out tokens, by the shipped tokenizer."""
    text = Text.from_folder(default_model())
    return data.stream(text.tokenizer, data.chapters(HELD_OUT))


def test_the_folder_is_small_and_part_of_the_package() -> None:
    folder = default_model()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(sizes.values()) <= MOST_BYTES
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "loss.png",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    # hatchling packs every file of a package that neither .gitignore nor a setting leaves out.
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["funcinfer"]}
    assert "/funcinfer" in build["targets"]["sdist"]["include"]
    assert folder.parent == Path(funcinfer.__file__).parent
    ignored = (ROOT / ".gitignore").read_text()
    assert not any(name in ignored for name in ("default_model", "safetensors", ".json", ".png"))


def test_weights_are_bfloat16_under_the_standard_names() -> None:
    with safe_open(default_model() / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wide = {name for name, x in tensors.items() if x.dtype is not torch.bfloat16}
    assert wide == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(1, 6)}
    draft = {n.removeprefix("model.layers.5.") for n in tensors if n.startswith("model.layers.5.")}
    block = {n.removeprefix("model.layers.4.") for n in tensors if n.startswith("model.layers.4.")}
    beside = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert draft == block | beside and "self_attn.q_a_proj.weight" in block


def test_logits_equal_those_of_transformers(
    model: Model, reference: tuple[Any, Any], held_out: torch.Tensor
) -> None:
    main, _ = reference
    for start, length in ((0, 67), (4321, 512)):
        ids_BT = held_out[None, start : start + length]
        with torch.no_grad():
            wanted = main(input_ids=ids_BT, use_cache=False).logits
        torch.testing.assert_close(model.logits(ids_BT), wanted, atol=TOLERANCE, rtol=0)


def test_drafts_equal_those_of_transformers(
    model: Model, reference: tuple[Any, Any], held_out: torch.Tensor
) -> None:
    from transformers.cache_utils import MtpCache

    (main, mtp), ids_T = reference, held_out[100 : 100 + T]
    assert mtp.num_mtp_layers == 1
    with torch.no_grad():
        out = main(input_ids=ids_T[None, :-1], output_hidden_states=True, use_cache=False)
        hidden = mtp.forward_layer(
            0,
            out.hidden_states[-1],
            torch.arange(1, T)[None],
            MtpCache(config=mtp.config),
            input_ids=ids_T[None, 1:],
        )
        wanted = main.lm_head(hidden)[0]
    for cuts in ([], [7, 8]):
        (found,) = run_drafts(model, ids_T, 1, cuts)
        torch.testing.assert_close(found.logits, wanted, atol=TOLERANCE, rtol=0)


def test_transformers_drafts_with_it_and_writes_the_same(reference: tuple[Any, Any]) -> None:
    main, _ = reference
    ids = torch.tensor([Text.from_folder(default_model()).encode("In the beginning")])
    settings: dict[str, Any] = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    plain = main.generate(ids, **settings)
    assert torch.equal(main.generate(ids, use_mtp=True, **settings), plain)


def card_figure(row: str) -> float:
    found = re.search(rf"^\| {re.escape(row)} \| ([\d.]+)", card(), re.MULTILINE)
    assert found is not None, row
    return float(found[1])


def card() -> str:
    return (default_model() / "README.md").read_text()


def test_experts_share_held_out_text_evenly(
    reference: tuple[Any, Any], held_out: torch.Tensor
) -> None:
    """By transformers' routers, in each layer: no expert has twice its share, none is dead."""
    main, _ = reference
    counts: dict[int, torch.Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, out, i=i: counts.__setitem__(
                i, counts.get(i, 0) + torch.bincount(out[2].flatten(), minlength=8)
            )
        )
        for i, layer in enumerate(main.model.layers)
        if i >= 1
    ]
    windows = held_out[: 16 * 512].view(16, 512)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                main(input_ids=part, use_cache=False).logits[:, :-1].flatten(0, 1),
                part[:, 1:].flatten(),
            )
            for part in windows.split(8)
        ]
    for hook in hooks:
        hook.remove()
    assert sorted(counts) == [1, 2, 3, 4]
    for layer, count_E in counts.items():
        share_E = count_E / count_E.float().mean()
        assert share_E.max() <= 2.0 and share_E.min() >= 0.2, (layer, share_E)
    # Other chapters than the card's: near its figure, far from that of a model of random text.
    loss = float(sum(losses)) / len(losses)
    assert loss == pytest.approx(card_figure("loss, nats a token"), abs=0.2)


def test_drafts_are_accepted(model: Model, held_out: torch.Tensor) -> None:
    """Fewer prompts than the card's; the bounds are those the model was made for."""
    prompts_BP = evaluate.prompts(held_out, 10)
    found = evaluate.acceptances(model.cfg, model.fns.decoder, model.params, prompts_BP, 48)
    by = {(a.temperature, a.k): a for a in found}
    assert by[0.0, 1].drafts >= 0.75 and by[0.0, 3].length >= 2.5
    assert by[1.0, 1].drafts >= 0.6
    # A module that is not this model's drafts worse: the figures are not those of any draft.
    other = dict(
        model.params, mtp=[{**model.params["mtp"][0], "eh_proj": torch.zeros(256, 2, 256)}]
    )
    (blind,) = evaluate.acceptances(
        model.cfg, model.fns.decoder, other, prompts_BP, 48, temperatures=(0.0,), most=1
    )
    assert blind.drafts < 0.3


def test_the_card_says_what_it_must() -> None:
    text = card()
    for word in (
        "King James",
        "Apache-2.0",
        "bible-kjv-text",
        "held out",
        "temperature",
        "Samples",
    ):
        assert word in text, word
    assert text.count("\n> ") >= 3 and "{" not in text
    assert card_figure("most / mean load of an expert, worst layer") <= 2.0
    assert card_figure("0 | 1") >= 75.0
    length = re.search(r"^\| 0 \| 3 \|.*\| ([\d.]+) \|$", text, re.MULTILINE)
    assert length is not None and float(length[1]) >= 2.5


def test_text_goes_in_and_out(model: Model) -> None:
    text = Text.from_folder(default_model())
    ids = text.encode("In the beginning")
    assert ids[0] == data.END_ID and model.stop_ids == (data.END_ID,)
    assert text.decode(ids) == "In the beginning"
    sampling = funcinfer.SamplingParams(max_tokens=12)
    (made,) = model.generate([ids], sampling)
    written = text.decode(made)
    assert re.fullmatch(r"[ A-Za-z,;:.?!'()\n-]+", written), written
    half = funcinfer.load(default_model(), dtype=torch.bfloat16)
    assert half.params["layers"][1]["mlp"]["router"]["bias"].dtype is torch.float32
    assert dataclasses.asdict(half.cfg) == dataclasses.asdict(model.cfg)
