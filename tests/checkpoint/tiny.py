"""Specs, name maps and references of tiny transformers models, for the tests of checkpoints.

A reference tree is made from a model's state dict with plain reshapes, slices and stacks.
Letters: D model width, F MLP width, E experts, N heads, K KV heads, H head width, V vocabulary,
R query latent, C key-value latent.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from funcinfer.checkpoint import Either, NameMap, Source, Stack, Stored
from funcinfer.sharding import Rules
from funcinfer.spec import ParamSpec

State = dict[str, torch.Tensor]
TP = Rules(
    heads="tp", kv_heads="tp", o_heads="tp", mlp="tp", shared_mlp="tp", experts="tp",
    vocab_in="tp", vocab_out="tp",
)  # fmt: skip
# Sizes that 2, 3 and 4 divide.
DIVISIBLE = {"num_attention_heads": 12, "vocab_size": 252}


@dataclass(frozen=True)
class Row:
    """One leaf: its declaration, where it comes from, and how a state dict gives it."""

    path: str
    spec: ParamSpec
    source: Source
    reference: Callable[[State], torch.Tensor]


def plain(path: str, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Row:
    """A leaf that is a tensor as it stands in the file."""
    spec = ParamSpec(shape, axes, torch.float32)
    return Row(path, spec, Stored(name, shape), lambda state: state[name])


def mlp(path: str, name: str, D: int, F: int, axis: str = "mlp") -> Iterator[Row]:
    gate, up = (f"{name}.{kind}_proj.weight" for kind in ("gate", "up"))
    yield Row(
        f"{path}.gate_up",
        ParamSpec((2, F, D), (None, axis, "embed"), torch.float32),
        Stack((Stored(gate, (F, D)), Stored(up, (F, D)))),
        lambda state: torch.stack([state[gate], state[up]]),
    )
    yield plain(f"{path}.down", f"{name}.down_proj.weight", (D, F), ("embed", axis))


def gqa(path: str, name: str, c: Any, bias: bool) -> Iterator[Row]:
    D, N, K = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    H = getattr(c, "head_dim", None) or D // N
    for letter, heads, axis in (("q", N, "heads"), ("k", K, "kv_heads"), ("v", K, "kv_heads")):
        weight = f"{name}.{letter}_proj.weight"
        yield Row(
            f"{path}.w{letter}",
            ParamSpec((heads, H, D), (axis, None, "embed"), torch.float32),
            Stored(weight, ((heads, H), D)),
            lambda state, weight=weight, n=heads: state[weight].view(n, H, D),
        )
        if bias:
            yield Row(
                f"{path}.b{letter}",
                ParamSpec((heads, H), (axis, None), torch.float32),
                Stored(f"{name}.{letter}_proj.bias", ((heads, H),)),
                lambda state, b=f"{name}.{letter}_proj.bias", n=heads: state[b].view(n, H),
            )
    yield output(path, name, D, N, H)


def output(path: str, name: str, D: int, N: int, H: int) -> Row:
    weight = f"{name}.o_proj.weight"
    return Row(
        f"{path}.wo",
        ParamSpec((D, N, H), ("embed", "o_heads", None), torch.float32),
        Stored(weight, (D, (N, H))),
        lambda state: state[weight].view(D, N, H),
    )


def latent(path: str, name: str, c: Any) -> Iterator[Row]:
    D, N, R, C = c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    nope, rope, v = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    q_b, kv_b = f"{name}.q_b_proj.weight", f"{name}.kv_b_proj.weight"
    yield plain(f"{path}.wq_a", f"{name}.q_a_proj.weight", (R, D), ("q_lora", "embed"))
    yield plain(f"{path}.q_norm", f"{name}.q_a_layernorm.weight", (R,), ("q_lora",))
    yield plain(
        f"{path}.wkv_a", f"{name}.kv_a_proj_with_mqa.weight", (C + rope, D), (None, "embed")
    )
    yield plain(f"{path}.kv_norm", f"{name}.kv_a_layernorm.weight", (C,), ("kv_lora",))
    yield Row(
        f"{path}.wq_b",
        ParamSpec((N, nope + rope, R), ("heads", None, "q_lora"), torch.float32),
        Stored(q_b, ((N, nope + rope), R)),
        lambda state: state[q_b].view(N, nope + rope, R),
    )
    both = Stored(kv_b, ((N, nope + v), C))
    yield Row(
        f"{path}.w_uk",
        ParamSpec((N, nope, C), ("heads", None, "kv_lora"), torch.float32),
        both[:, :nope],
        lambda state: state[kv_b].view(N, nope + v, C)[:, :nope],
    )
    yield Row(
        f"{path}.w_uv",
        ParamSpec((N, v, C), ("heads", None, "kv_lora"), torch.float32),
        both[:, nope:],
        lambda state: state[kv_b].view(N, nope + v, C)[:, nope:],
    )
    yield output(path, name, D, N, v)


def moe(path: str, name: str, c: Any) -> Iterator[Row]:
    D, E, F = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    yield plain(f"{path}.router", f"{name}.gate.weight", (E, D), ("experts", "embed"))
    bias = f"{name}.gate.e_score_correction_bias"
    yield plain(f"{path}.router_bias", bias, (E,), (None,))
    each = [f"{name}.experts.{e}" for e in range(E)]
    gate_up = f"{name}.experts.gate_up_proj"
    per_expert = Stack(
        tuple(
            Stack(tuple(Stored(f"{one}.{kind}_proj.weight", (F, D)) for kind in ("gate", "up")))
            for one in each
        )
    )
    yield Row(
        f"{path}.gate_up",
        ParamSpec((E, 2, F, D), ("experts", None, "expert_mlp", "embed"), torch.float32),
        Either((per_expert, Stored(gate_up, (E, (2, F), D)))),
        lambda state: state[gate_up].view(E, 2, F, D),
    )
    down = Stack(tuple(Stored(f"{one}.down_proj.weight", (D, F)) for one in each))
    yield Row(
        f"{path}.down",
        ParamSpec((E, D, F), ("experts", "embed", "expert_mlp"), torch.float32),
        Either((down, Stored(f"{name}.experts.down_proj", (E, D, F)))),
        lambda state: state[f"{name}.experts.down_proj"],
    )
    shared = F * c.n_shared_experts
    yield from mlp(f"{path}.shared", f"{name}.shared_experts", D, shared, "shared_mlp")


def rows(c: Any) -> Iterator[Row]:
    """The leaves of a llama, qwen2 or deepseek_v3 model with config `c`."""
    D, V = c.hidden_size, c.vocab_size
    yield plain("embed", "model.embed_tokens.weight", (V, D), ("vocab_in", "embed"))
    for i in range(c.num_hidden_layers):
        path, name = f"layers.{i}", f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield plain(f"{path}.{norm}", f"{name}.{norm}.weight", (D,), ("embed",))
        if c.model_type == "deepseek_v3":
            yield from latent(f"{path}.attn", f"{name}.self_attn", c)
        else:
            yield from gqa(f"{path}.attn", f"{name}.self_attn", c, c.model_type == "qwen2")
        if c.model_type == "deepseek_v3" and i >= c.first_k_dense_replace:
            yield from moe(f"{path}.moe", f"{name}.mlp", c)
        else:
            yield from mlp(f"{path}.mlp", f"{name}.mlp", D, c.intermediate_size)
    yield plain("norm", "model.norm.weight", (D,), ("embed",))
    if not c.tie_word_embeddings:
        yield plain("head", "lm_head.weight", (V, D), ("vocab_out", "embed"))


def nested(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Nested dicts of dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in pairs:
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def describe(config: Any) -> tuple[dict[str, Any], NameMap]:
    """The specs and the name map of a model."""
    table = list(rows(config))
    specs = nested((row.path, row.spec) for row in table)
    return specs, NameMap({row.path: row.source for row in table})


def reference(config: Any, model: Any) -> dict[str, Any]:
    """The parameters that a model's state dict says."""
    state = model.state_dict()
    return nested((row.path, row.reference(state)) for row in rows(config))


def stored_tensors(folder: Path) -> State:
    """All tensors in the files of a folder, read with safetensors alone."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: x for file in files for name, x in load_file(file).items()}
