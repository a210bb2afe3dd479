"""Tiny random models of `transformers`, the independent reference for every family.

A model here is float32, in eval mode, with eager attention and the plain loop over experts.
`transformers` fills norms, biases and router corrections with constants; a comparison against such
a model cannot see a bias that is never read or a "1 + w" taken for a "w". So every parameter and
every saved buffer is drawn anew, in the order of the names.

Sizes differ from each other on purpose (head widths, latent ranks, expert widths), so that a
swapped dimension is a shape error. Letters: B batch, S sequence, N new tokens, V vocabulary.
"""

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_BASE = {
    "vocab_size": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}
_DENSE = _BASE | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_LATENT = _BASE | {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
}
_ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_GROUPED = _ROUTED | {"n_group": 4, "topk_group": 2}
_UNGROUPED = _ROUTED | {"n_group": 1, "topk_group": 1}
# With fewer heads relu makes many scores exactly zero, and which of the tied keys are chosen
# depends on the length.
_INDEXER = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}


def _yarn(mscale: float) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


@dataclass(frozen=True)
class Family:
    """How `transformers` spells a family, and the tiny configuration of it.

    `settings` go to the config class. `follows` names the settings that are a multiple of
    `num_attention_heads`, so that overriding the number of heads alone gives a legal model.
    """

    stem: str
    settings: Mapping[str, Any]
    follows: Mapping[str, int] = field(default_factory=dict)


_FAMILIES = {
    "llama": Family(
        "Llama",
        _DENSE
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"hidden_size": 16},
    ),
    # Has no head_dim of its own: the width of a head is hidden_size / num_attention_heads.
    "qwen2": Family("Qwen2", _DENSE | {"tie_word_embeddings": True}, {"hidden_size": 16}),
    "qwen3": Family("Qwen3", _DENSE | {"head_dim": 24}),
    "deepseek_v2": Family(
        "DeepseekV2",
        _LATENT
        | _GROUPED
        | {
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "rope_parameters": _yarn(0.707),
        },
        {"num_key_value_heads": 1},
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        _LATENT
        | _GROUPED
        | {
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "rope_parameters": _yarn(1.0),
        },
        {"num_key_value_heads": 1},
    ),
    "deepseek_v32": Family(
        "DeepseekV32",
        _LATENT | _GROUPED | _INDEXER | {"first_k_dense_replace": 1, "rope_parameters": _yarn(1.0)},
        {"num_key_value_heads": 1},
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        _DENSE
        | _UNGROUPED
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "glm4_moe_lite": Family("Glm4MoeLite", _LATENT | _UNGROUPED, {"num_key_value_heads": 1}),
    "glm_moe_dsa": Family(
        "GlmMoeDsa",
        _LATENT
        | _UNGROUPED
        | _INDEXER
        | {"first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
        {"num_key_value_heads": 1},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        _DENSE
        | {
            "head_dim": 24,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "minimax_m2": Family(
        "MiniMaxM2",
        _DENSE
        | {"head_dim": 24, "rotary_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3},
    ),
}
NAMES = tuple(_FAMILIES)


def config_of(name: str, **overrides: Any) -> Any:
    """The config of a tiny model of family `name`, without a model.

    `overrides` replace settings, e.g. `num_attention_heads=9, num_key_value_heads=3`; settings that
    follow the number of heads are adjusted unless they are overridden too.
    """
    if name not in _FAMILIES:
        raise ValueError(f"no family {name!r}; there are {', '.join(NAMES)}")
    import transformers

    family = _FAMILIES[name]
    heads = overrides.get("num_attention_heads", family.settings["num_attention_heads"])
    following = {key: multiple * heads for key, multiple in family.follows.items()}
    # The config class keeps and changes nested dicts, hence the copy.
    settings = copy.deepcopy(dict(family.settings) | following | overrides)
    return getattr(transformers, f"{family.stem}Config")(**settings)


def config_fields(name: str, **overrides: Any) -> dict[str, Any]:
    """What `save` would write as config.json of the tiny model of `config_of`."""
    config = config_of(name, **overrides)
    config.architectures = [f"{_FAMILIES[name].stem}ForCausalLM"]
    return json.loads(config.to_json_string())


def build(name: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
    """A tiny model of family `name` with random weights: `(config, model)`; see `config_of`."""
    config = config_of(name, **overrides)
    import transformers

    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model_class = getattr(transformers, f"{_FAMILIES[name].stem}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
    _draw(model, model.state_dict().keys(), torch.Generator().manual_seed(seed + 1))
    return config, model


def build_mtp(model: Any, seed: int = 0) -> Any:
    """The multi-token-prediction model of `transformers` over `model`, which keeps its own weights.

    `deepseek_v3` and `glm4_moe` have one. The embedding, the head and the rotary table are those
    of `model`.
    """
    from transformers.modeling_layers import MtpModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mtp = MtpModel(model, model.config.num_mtp_layers).float().eval()
    shared = {id(parameter) for parameter in model.parameters()}
    own = {name for name, parameter in mtp.named_parameters() if id(parameter) not in shared}
    own |= {name for name, _ in mtp.named_buffers() if name in mtp.state_dict()}
    _draw(mtp, own, torch.Generator().manual_seed(seed + 7))
    return mtp


def _draw(model: torch.nn.Module, names: Iterable[str], generator: torch.Generator) -> None:
    """Fill in place: matrices with deviation fan_in ** -0.5, vectors around what they are."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name in sorted(set(names) & set(tensors)):
            tensor = tensors[name]
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
            else:
                tensor.add_(0.3 * noise)


def token_ids(config: Any, batch: int = 2, seq: int = 37, seed: int = 0) -> torch.Tensor:
    """Random ordinary tokens `[B, S]`: no padding, begin or end token among them."""
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randint(3, config.vocab_size, (batch, seq), generator=generator)


@torch.no_grad()
def full_logits(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """Logits `[B, S, V]` of whole sequences, without a cache."""
    return model(input_ids=ids_BS, use_cache=False).logits


@torch.no_grad()
def greedy(model: Any, ids_BS: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` greedy tokens after each prompt, with a cache; an end token does not stop it.

    Returns the tokens `[B, N]` and the logits `[B, N, V]` that they come from.
    """
    tokens, logits, cache, step_BS = [], [], None, ids_BS
    for _ in range(n):
        out = model(
            input_ids=step_BS, use_cache=True, **({} if cache is None else {"cache": cache})
        )
        cache = out.cache
        logits.append(out.logits[:, -1])
        step_BS = logits[-1].argmax(-1, keepdim=True)
        tokens.append(step_BS)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def save(model: Any, folder: str | Path) -> Path:
    """Write `model` as a Hugging Face folder (config.json, safetensors) and return the folder."""
    model.save_pretrained(folder)
    return Path(folder)


def read_deepseek_v3(folder: Path, **settings: Any) -> Any:
    """transformers' DeepSeek-V3 of a folder that has a draft layer, in float32.

    The class leaves out the draft layer of DeepSeek-V3 itself, which is the 61st; here it is the
    one behind the layers that config.json counts.
    """
    from transformers import DeepseekV3ForCausalLM

    count = json.loads((folder / "config.json").read_text())["num_hidden_layers"]

    class Main(DeepseekV3ForCausalLM):
        _keys_to_ignore_on_load_unexpected = (rf"model\.layers\.{count}\.",)

    return Main.from_pretrained(folder, dtype=torch.float32, **settings)
