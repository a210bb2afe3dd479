"""Every field of a config.json is read, known to be irrelevant, or an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funcinfer.hf_config import (
    GenerationConfig,
    HFConfig,
    read_config,
    read_generation_config,
)


def test_only_fields_without_effect_go_unread(tiny_folder: Callable[..., Path]) -> None:
    """Of what transformers writes for a llama, all but book-keeping must be taken."""
    fields = read_config(tiny_folder("llama"))
    with pytest.raises(ValueError) as caught:
        HFConfig(fields).finish()
    needed = {
        "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
        "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
        "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
        "vocab_size",
    }  # fmt: skip
    assert {name for name in fields if f"{name}=" in str(caught.value)} == needed
    config = HFConfig(fields)
    for name in needed:
        config.take(name)
    config.finish()
    assert {n for n, why in config.consumed.items() if why == "taken"} == needed
    assert config.consumed.keys() == fields.keys()


@pytest.mark.parametrize("name", ["hidden_size", "rope_parameters", "vocab_size"])
def test_one_field_left_unread_is_named(name: str, tiny_folder: Callable[..., Path]) -> None:
    fields = read_config(tiny_folder("llama"))
    config = HFConfig(fields)
    for other in fields.keys() - {name}:
        config.take(other)
    with pytest.raises(ValueError, match=rf"config\.json: nothing reads {name}="):
        config.finish()


def test_take_reads_aliases_defaults_and_null() -> None:
    config = HFConfig({"num_experts": 8, "q_lora_rank": None, "eps": 1, "scale": 2.5})
    assert config.take("num_local_experts", aliases=("num_experts",), kind=int) == 8
    assert config.take("q_lora_rank", 1536, kind=int | None) is None
    assert config.take("head_dim", 64, kind=int) == 64
    eps = config.take("eps", kind=float)
    assert eps == 1.0 and isinstance(eps, float)
    assert config.take("scale", kind=float | None) == 2.5
    config.finish()
    with pytest.raises(ValueError, match=r"field 'hidden_size' \(or d_model\) is missing"):
        config.take("hidden_size", aliases=("d_model",))
    both = HFConfig({"num_experts": 8, "num_local_experts": 9})
    with pytest.raises(ValueError, match="num_local_experts=9 and num_experts=8 mean the same"):
        both.take("num_local_experts", aliases=("num_experts",))
    agreed = HFConfig({"num_experts": 8, "num_local_experts": 8})
    assert agreed.take("num_local_experts", aliases=("num_experts",)) == 8
    agreed.finish()


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("64", int, "size='64' is a str, needs int"),
        (64.0, int, "size=64.0 is a float, needs int"),
        (True, int, "size=True is a bool, needs int"),
        (None, int, "size=None is a NoneType, needs int"),
        (1, bool, "size=1 is a int, needs bool"),
        (True, float | None, "size=True is a bool, needs float or null"),
        ([1], dict, r"size=\[1\] is a list, needs dict"),
    ],
)
def test_a_value_of_another_kind_is_refused(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        HFConfig({"size": value}).take("size", kind=kind)


def test_require_names_what_is_supported() -> None:
    config = HFConfig({"hidden_act": "silu", "norm_topk_prob": 1, "factor": 1})
    assert config.require("hidden_act", ["silu", "swish"]) == "silu"
    assert config.require("scoring_func", ["sigmoid"], "sigmoid") == "sigmoid"
    assert config.require("factor", [1.0]) == 1
    with pytest.raises(ValueError, match="norm_topk_prob=1 is not supported; supported: True"):
        config.require("norm_topk_prob", [True])
    with pytest.raises(ValueError, match=r"topk_method='greedy' is not .* supported: 'noaux_tc'"):
        config.require("topk_method", ["noaux_tc"], "greedy")
    with pytest.raises(ValueError, match="field 'mlp_bias' is missing"):
        config.require("mlp_bias", [False])


def test_groups_are_finished_with_the_whole() -> None:
    config = HFConfig({"linear": {"heads": 4, "width": 16}, "absent": None})
    assert config.group("missing") is None and config.group("absent") is None
    linear = config.group("linear")
    assert linear is not None and linear.take("heads") == 4
    with pytest.raises(ValueError, match=r"config\.json: linear: nothing reads width=16"):
        config.finish()
    again = config.group("linear")
    assert again is linear and linear.take("width") == 16
    config.finish()
    with pytest.raises(ValueError, match="linear=3 is a int, needs dict or null"):
        HFConfig({"linear": 3}).group("linear")


def test_ignored_fields_keep_their_reason() -> None:
    config = HFConfig({"max_window_layers": 28, "sliding_window": None})
    config.take("sliding_window")
    config.ignore("max_window_layers", "sliding_window", "not_there", reason="no window")
    config.finish()
    assert config.consumed == {"max_window_layers": "no window", "sliding_window": "taken"}


def test_read_config_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for text, message in (
        ('{"a": 1', "not valid JSON"),
        ("[1]", "holds a list where an object is needed"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            read_config(tmp_path)
        assert str(file) in str(caught.value)
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)
    with pytest.raises(NotADirectoryError, match="is a file"):
        read_config(file)


def test_special_tokens_come_from_both_files(
    tmp_path: Path, tiny_folder: Callable[..., Path]
) -> None:
    assert read_generation_config(tiny_folder("qwen2")) == GenerationConfig((2,), 1, 0)

    def read(config: dict[str, Any], generation: dict[str, Any] | None) -> GenerationConfig:
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_generation_config(tmp_path)

    assert read({}, None) == GenerationConfig((), None, None)
    assert read({"eos_token_id": 5, "bos_token_id": 1}, None) == GenerationConfig((5,), 1, None)
    both = read({"eos_token_id": 5, "pad_token_id": 3}, {"eos_token_id": [7, 9, 7]})
    assert both == GenerationConfig((7, 9), None, 3)
    assert read({"eos_token_id": 5}, {"eos_token_id": None}).eos_ids == (5,)
    for wrong in ("2", 2.0, True, -1, [2, None]):
        with pytest.raises(ValueError, match=r"eos_token_id=.*whole numbers from 0"):
            read({"eos_token_id": wrong}, None)
