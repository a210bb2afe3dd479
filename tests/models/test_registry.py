"""The registry: what it finds, what it says when it doesn't, and families from a notebook."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import funcinfer
from funcinfer.hf_config import read_config
from funcinfer.models import llama, registry
from tests import oracles


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    before = dict(registry._families)
    yield
    registry._families.clear()
    registry._families.update(before)


@pytest.mark.parametrize("name", oracles.NAMES)
def test_every_reference_family_is_found(name: str, tiny_folder) -> None:
    config = read_config(tiny_folder(name))
    cfg = registry.family_of(config).from_hf(config)
    assert cfg.vocab_size == config["vocab_size"]


def test_unknown_names_near_ones() -> None:
    with pytest.raises(ValueError, match="'LLamaForCausalLM'; near ones: LlamaForCausalLM"):
        registry.find("LLamaForCausalLM")
    with pytest.raises(ValueError, match=r"architectures is \['A', 'B'\]"):
        registry.family_of({"architectures": ["A", "B"]})
    with pytest.raises(ValueError, match="architectures is None"):
        registry.family_of({})


def test_replacing_warns_and_overrides() -> None:
    mine = SimpleNamespace(from_hf=llama.from_hf, decoder=llama.decoder, name_map=llama.name_map)
    with pytest.warns(UserWarning, match="LlamaForCausalLM is registered anew"):
        registry.register("LlamaForCausalLM", mine)
    assert registry.find("LlamaForCausalLM") is mine


def test_an_incomplete_family_is_refused() -> None:
    with pytest.raises(TypeError, match="MyForCausalLM: a family needs decoder, name_map"):
        registry.register("MyForCausalLM", SimpleNamespace(from_hf=llama.from_hf))


def test_a_family_from_a_notebook_loads(tiny_model, tiny_folder, tmp_path) -> None:
    """A family of one's own: Llama with the first MLP's output doubled."""

    def decoder(cfg):
        plain = llama.decoder(cfg)
        mlp = plain.layers[0].sublayers["mlp"]

        def twice(p, u, cache, step, shared, *, rules):
            y, cache, shared = mlp.apply(p, u, cache, step, shared, rules=rules)
            return 2 * y, cache, shared

        return plain.replace(0, mlp=funcinfer.models.decoder.Sublayer(mlp.specs, twice))

    registry.register(
        "TwiceForCausalLM",
        SimpleNamespace(from_hf=llama.from_hf, decoder=decoder, name_map=llama.name_map),
    )
    config, reference = tiny_model("llama")
    folder = oracles.save(reference, tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "TwiceForCausalLM"))
    ids_BT = oracles.token_ids(config, 2, 9, 1)
    found = funcinfer.load(folder, dtype=torch.float32).logits(ids_BT)

    down = reference.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        down.mul_(2)
        wanted = oracles.full_logits(reference, ids_BT)
        down.div_(2)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)


def test_families_are_imported_when_asked_for() -> None:
    code = (
        "import sys, funcinfer; from funcinfer.models import registry\n"
        "assert 'funcinfer.models.glm_moe_dsa' not in sys.modules\n"
        "registry.find('GlmMoeDsaForCausalLM')\n"
        "assert 'funcinfer.models.glm_moe_dsa' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
