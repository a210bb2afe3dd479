"""Each named preset is legal for each kind of model that it is for, and gives what one rank gives.

The rules that axis names ask for are also compared with the table of parallelisms, written out.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcinfer
from funcinfer.models.decoder import Decoder
from funcinfer.sharding import Axis, Mesh, names, presets
from funcinfer.sharding import presets_parallel as parallel
from funcinfer.sharding.presets import Preset
from tests.equivalence.harness import ONE_RANK, Layout, Logits, Trace, assert_same, draw, run
from tests.equivalence.tiny import CONFIGS, DECODERS

Make = Callable[[int | None], Preset]

# Two chunks and a whole prompt, decode rows, verify rows of two lengths.
TRACE = Trace(
    lengths={0: 10, 1: 9, 2: 7},
    steps=((False, {0: 7, 1: 5, 2: 4}), (True, {0: 1, 1: 1, 2: 1}), (True, {0: 2, 1: 3, 2: 2})),
)

# For any model; the argument is the number of KV heads.
EVERYWHERE: dict[str, Make] = {
    "tensor": lambda kv: parallel.tensor_parallelism(kv, tp=2, dp=2),
    "tensor, copies of KV heads": lambda kv: parallel.tensor_parallelism(kv, tp=8),
    "sequence": lambda kv: parallel.sequence_parallelism(kv, tp=4),
    "sequence and data": lambda kv: parallel.sequence_parallelism(kv, tp=2, dp=2),
    "expert": lambda kv: parallel.expert_parallelism(kv, tp=2, dp=2),
    "expert, tokens dealt": lambda kv: parallel.expert_parallelism(kv, tp=2, dp=2, sp=True),
    "expert over data alone": lambda kv: parallel.expert_parallelism(kv, dp=3),
    "expert over everything": lambda kv: parallel.expert_parallelism(kv, pcp=2, tp=2, dcp=2),
    "expert, prompts dealt": lambda kv: parallel.expert_parallelism(kv, dp=2, pcp=2, tp=2, sp=True),
    "prefill context": lambda kv: parallel.prefill_context_parallelism(kv, pcp=4),
    "prefill context, sequence": lambda kv: parallel.prefill_context_parallelism(
        kv, pcp=2, tp=2, dp=2, sp=True
    ),
    "decode context": lambda kv: parallel.decode_context_parallelism(kv, dcp=2, tp=4),
    "decode context alone": lambda kv: parallel.decode_context_parallelism(kv, dcp=4),
    "decode context, sequence": lambda kv: parallel.decode_context_parallelism(
        kv, dcp=2, tp=2, dp=2, sp=True
    ),
    "context": lambda kv: parallel.context_parallelism(kv, pcp=2, dcp=2, tp=2),
    "context, sequence": lambda kv: parallel.context_parallelism(kv, pcp=2, dcp=2, tp=2, sp=True),
    "output projection in part": lambda kv: parallel.split_output_projection(kv, tp=4, o_proj=2),
    "output projection in part, data": lambda kv: parallel.split_output_projection(
        kv, tp=4, o_proj=1, dp=2
    ),
}
# Attention with requests of its own on each rank, or with all heads: KV heads are not cut.
REPLICATED: dict[str, Callable[[], Preset]] = {
    "data-parallel attention": lambda: parallel.data_parallel_attention(ep=4),
    "data-parallel attention, twice": lambda: parallel.data_parallel_attention(ep=2, dp=2),
    "fine-grained": lambda: parallel.fine_grained_tensor_parallelism(dp=4),
    "fine-grained, head over neighbours": lambda: parallel.fine_grained_tensor_parallelism(
        dp=4, group=2, dims=["vocab_out", "o_heads"]
    ),
    "sparse context": lambda: parallel.sparse_context_parallelism(tp=4),
    "sparse context, data, sequence": lambda: parallel.sparse_context_parallelism(
        tp=2, dp=2, sp=True
    ),
    "sparse context, experts": lambda: parallel.sparse_context_parallelism(
        tp=2, dp=2, sp=True, expert_parallel=True
    ),
}


@functools.cache
def one_rank(model: str) -> tuple[Decoder, Any, Logits]:
    decoder = DECODERS[model]
    params = draw(decoder)
    return decoder, params, run(decoder, params, ONE_RANK, TRACE)


def assert_equivalent(model: str, preset: Preset) -> None:
    decoder, params, wanted = one_rank(model)
    assert_same(run(decoder, params, Layout(*preset), TRACE), wanted)


@pytest.mark.parametrize("model", DECODERS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_presets_are_the_same_as_one_rank(name: str, model: str) -> None:
    assert_equivalent(model, EVERYWHERE[name](CONFIGS[model].num_kv_heads))


@pytest.mark.parametrize("model", DECODERS)
@pytest.mark.parametrize("name", REPLICATED)
def test_presets_of_whole_attention_are_the_same_as_one_rank(name: str, model: str) -> None:
    assert_equivalent(model, REPLICATED[name]())


# The table: what each parallelism asks of each axis, prefill / decode where they differ.
DP, WIDE = ("dp",), ("tp", "rep", "dcp")
TABLE: dict[str, tuple[Preset, dict[str, tuple[str, ...] | tuple[tuple[str, ...], ...]]]] = {
    "tensor": (
        parallel.tensor_parallelism(2, tp=4),
        dict(heads=("tp", "rep"), kv_heads=("tp",), mlp=("tp", "rep"), expert_mlp=("tp", "rep"))
        | dict(requests=(), tokens=(), residual_tokens=(), experts=(), vocab_out=("tp", "rep")),
    ),
    "sequence": (
        parallel.sequence_parallelism(4, tp=4),
        dict(heads=("tp",), tokens=(), residual_tokens=("tp",), moe_tokens=()),
    ),
    "expert": (
        parallel.expert_parallelism(None, dp=4, tp=16),
        dict(requests=DP, pages=DP, tokens=DP, residual_tokens=DP, heads=("tp",), kv_heads=())
        | dict(experts=("dp", "tp"), expert_mlp=(), moe_tokens=(), shared_mlp=("tp",)),
    ),
    "expert, tokens dealt": (
        parallel.expert_parallelism(None, dp=4, tp=16, sp=True),
        dict(experts=("dp", "tp"), residual_tokens=("dp", "tp"), moe_tokens=("dp", "tp")),
    ),
    "data-parallel attention": (
        parallel.data_parallel_attention(dp=2, ep=4),
        dict.fromkeys(("requests", "pages", "tokens", "moe_tokens"), ("dp", "ep"))
        | dict(experts=("ep",), expert_mlp=(), heads=(), mlp=(), vocab_in=()),
    ),
    "decode context": (
        parallel.decode_context_parallelism(4, dcp=2, tp=2),
        dict(page_tokens=("dcp",), index_page_tokens=(), heads=("tp", "dcp"), kv_heads=("tp",)),
    ),
    "sparse context": (
        parallel.sparse_context_parallelism(tp=4, dp=2),
        dict(q_tokens=("dp", "tp"), o_tokens=DP, o_heads=("tp",), heads=(), tokens=DP),
    ),
    "output projection in part": (
        parallel.split_output_projection(8, tp=8, o_proj=2),
        dict(o_heads=("tpa",), o_tokens=("tpb",), residual_tokens=("tpb", "tpa"), tokens=()),
    ),
    "fine-grained": (
        parallel.fine_grained_tensor_parallelism(dp=4),
        dict.fromkeys(("requests", "o_heads", "mlp", "vocab_in", "vocab_out", "experts"), DP)
        | dict(heads=(), kv_heads=(), shared_mlp=(), expert_mlp=()),
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_presets_say_what_the_table_says(name: str) -> None:
    preset, wanted = TABLE[name]
    for axis, over in wanted.items():
        assert names(preset.prefill[axis]) == over, axis
        assert preset.decode[axis] == preset.prefill[axis], axis


@pytest.mark.parametrize(
    ("preset", "axis", "prefill", "decode"),
    [
        (parallel.prefill_context_parallelism(4, pcp=2, dp=2), "tokens", ("dp", "pcp"), "dp"),
        (parallel.prefill_context_parallelism(4, pcp=2, dp=2), "requests", "dp", "dp"),
        (parallel.prefill_context_parallelism(4, pcp=2), "page_tokens", None, None),
        (parallel.context_parallelism(4, pcp=2, dcp=2), "q_tokens", "pcp", None),
        (parallel.context_parallelism(4, pcp=2, dcp=2), "page_tokens", *[("pcp", "dcp")] * 2),
        (
            parallel.context_parallelism(4, pcp=2, dcp=2, tp=2, sp=True),
            "residual_tokens",
            ("pcp", "tp", "dcp"),
            ("tp", "dcp"),
        ),
    ],
)
def test_phases_differ_where_prompts_are_dealt(
    preset: Preset, axis: str, prefill: Axis, decode: Axis
) -> None:
    assert (preset.prefill[axis], preset.decode[axis]) == (prefill, decode)


@pytest.mark.parametrize(
    "mesh", [Mesh(dcp=2), Mesh(tp=2, dcp=2), Mesh(pcp=2), Mesh(pcp=2, tp=2, dcp=2), Mesh(dp=2)]
)
def test_a_mesh_is_enough_to_load(mesh: Mesh, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("qwen3", num_attention_heads=8, num_key_value_heads=2)
    prompts, options = [[5, 6, 7, 8, 9], [3, 4]], funcinfer.SamplingParams(max_tokens=5)
    whole = funcinfer.load(folder, dtype=torch.float32)
    model = funcinfer.load(folder, dtype=torch.float32, mesh=mesh)
    assert (model.fns.prefill_rules, model.fns.decode_rules) == presets.for_mesh(2, mesh)[1:]
    assert model.generate(prompts, options) == whole.generate(prompts, options)


def test_a_latent_cache_is_dealt_without_heads(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("deepseek_v3", num_nextn_predict_layers=0)
    tokens = torch.arange(3, 14)[None]
    wanted = funcinfer.load(folder, dtype=torch.float32).logits(tokens)
    for mesh in (Mesh(dcp=4), Mesh(ep=2, tp=2)):
        model = funcinfer.load(folder, dtype=torch.float32, mesh=mesh)
        torch.testing.assert_close(model.logits(tokens), wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: presets.for_mesh(4, Mesh(tq=2)), "no preset for axis 'tq'.* dp, ep, pcp, tp"),
        (lambda: presets.for_mesh(3, Mesh(tp=2, dcp=2)), "tp=2 and 3 KV heads do not divide"),
        (lambda: parallel.split_output_projection(4, tp=4, o_proj=3), "o_proj=3 must divide tp=4"),
        (lambda: parallel.fine_grained_tensor_parallelism(dp=4, group=3), "group=3 must divide"),
    ],
)
def test_what_a_preset_cannot_do_is_refused(make: Callable[[], Preset], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_decode_rules_need_rules(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="decode_rules without rules"):
        funcinfer.load(
            tiny_folder("llama"), dtype=torch.float32, decode_rules=funcinfer.Rules.none()
        )
