"""Every field of a config.json is read, known to be irrelevant, or an error.

Each field of each family's folder is changed in turn. A change must be refused, or change the
logits or the longest context; only what says nothing about the model may be without effect.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import funcinfer
from funcinfer import Mesh, Model, Rules
from funcinfer.hf_config import IRRELEVANT
from funcinfer.models import registry
from funcinfer.models.decoder import decoder_specs
from tests.models.test_parity import FAMILIES, SETTINGS

Config = dict[str, Any]
NO_EFFECT = {
    **{name: reason for reason, names in IRRELEVANT.items() for name in names},
    "sliding_window": "no layer has one",
    "max_window_layers": "no layer has a sliding window",
}
LATENT = {"head_dim": "a sum of other sizes", "qk_head_dim": "a sum of other sizes"}
SPARSE = {"first_k_dense_replace": "mlp_layer_types says it of each layer"}
NO_EFFECT_IN = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | SPARSE,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT | SPARSE,
    "qwen3_moe": {"intermediate_size": "every layer has experts"},
}


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: tiny_folder(name, **SETTINGS.get(name, {}))


@pytest.fixture(scope="module")
def load(
    folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Config], Model]:
    """The model of a family's weights under another config."""

    def get(name: str, config: Config) -> Model:
        other = tmp_path_factory.mktemp(name)
        for file in folder(name).glob("*.safetensors*"):
            (other / file.name).symlink_to(file)
        (other / "config.json").write_text(json.dumps(config))
        return funcinfer.load(other, dtype=torch.float32)

    return get


def config_of(folder: Path) -> Config:
    return json.loads((folder / "config.json").read_text())


def others(name: str, value: Any) -> list[Any]:
    """Other values of a field, of the same kind: near ones and far ones."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, 2 * value, value // 32]
        case float():
            return [1000 * value if name.endswith("eps") else 1.5 * value]
        case str():
            return ["other"]
        case list():
            return [value[::-1], [*value[1:], "other"], value[1:], [0]]
    return [3]


def changes(config: Config) -> Iterator[tuple[str, list[Config]]]:
    """Each field, those of inner objects too, and the config with other values in it."""
    for name, value in config.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, old in inner:
            changed = []
            for new in others(key or name, old):
                place = copy.deepcopy(config)
                (place[name] if key else place)[key or name] = new
                changed.append(place)
            yield f"{name}.{key}" if key else name, [c for c in changed if c != config]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_field_is_refused_or_has_an_effect(
    name: str, folder: Callable[[str], Path], load: Callable[[str, Config], Model]
):
    config = config_of(folder(name))
    model = load(name, config)
    ids = torch.randint(3, 256, (1, 21), generator=torch.Generator().manual_seed(0))
    logits = model.logits(ids)

    def has_effect(changed: Config) -> bool:
        try:
            other = load(name, changed)
        except ValueError:
            return True
        if other.max_length != model.max_length:
            return True
        found = other.logits(ids)
        return found.shape != logits.shape or bool((found - logits).abs().max() > 1e-4)

    known = NO_EFFECT | NO_EFFECT_IN.get(name, {})
    silent = [
        field
        for field, changed in changes(config)
        if field not in known and not any(map(has_effect, changed))
    ]
    assert silent == []


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_field_is_refused_by_name(name: str, folder: Callable[[str], Path]):
    config = config_of(folder(name))
    from_hf = registry.family_of(config).from_hf
    for value in (None, 0, False, {"inner": 1}):
        with pytest.raises(ValueError, match="nothing reads attention_sharpness="):
            from_hf(config | {"attention_sharpness": value})
    with pytest.raises(ValueError, match=r"the RoPE dict has .*'sharpness'"):
        from_hf(config | {"rope_parameters": config["rope_parameters"] | {"sharpness": 2.0}})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_field_is_named_or_has_a_default(name: str, folder: Callable[[str], Path]):
    config = config_of(folder(name))
    family = registry.family_of(config)
    needed = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    for field in config.keys() - {"architectures"}:
        rest = {k: v for k, v in config.items() if k != field}
        if field in needed:
            with pytest.raises(ValueError, match=f"the field '{field}' is missing"):
                family.from_hf(rest)
        else:
            with contextlib.suppress(ValueError):
                family.decoder(family.from_hf(rest))


NONSENSE = (0, -1, 1.5, True, "other", [], {}, None)


@pytest.mark.parametrize("name", FAMILIES)
def test_nonsense_in_a_field_is_a_value_error(name: str, folder: Callable[[str], Path]):
    """Never another exception, and never a model of no layers or no heads."""
    config = config_of(folder(name))
    family = registry.family_of(config)
    for field in config.keys() - {"architectures"}:
        for value in NONSENSE:
            try:
                cfg = family.from_hf(config | {field: value})
            except ValueError:
                continue
            decoder_specs(family.decoder(cfg))
            family.name_map(cfg)
    for field in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
        for value in (0, -1):
            with pytest.raises(ValueError, match=f"{field}={value}, but it must be at least 1"):
                family.from_hf(config | {field: value})


def test_heads_that_do_not_go_together_are_refused(folder: Callable[[str], Path]):
    config = config_of(folder("llama"))
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        registry.family_of(config).from_hf(config | {"num_key_value_heads": 3})


def test_rules_of_decode_are_checked_before_weights_are_read(
    folder: Callable[[str], Path], tmp_path: Path
):
    """The folder has a config alone, and the complaint is about the rules."""
    (tmp_path / "config.json").write_text((folder("llama") / "config.json").read_text())
    rules = Rules(q_tokens="tp", o_heads="tp")
    with pytest.raises(ValueError, match="must extend tokens"):
        funcinfer.load(
            tmp_path,
            dtype=torch.float32,
            mesh=Mesh(tp=2, cp=2),
            rules=rules,
            decode_rules=rules.replace(tokens="cp"),
        )
