"""Tiny models end to end on the simulated NPU, against the reference on the CPU.

Sizes that the ops ask for are real (widths of heads and latents), the others are small. A trace of
steps mixes whole prompts, chunks, single tokens and verify rows of several requests, in pages that
start as NaN. In float32 the ops that take half precision alone are left out by rule; where the rule
is lifted, they compute without rounding, and the logits must agree as closely.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from funcinfer import Model, SamplingParams
from funcinfer.kvcache.batch import Rows
from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import npu as back_end
from funcinfer.layers.primitives import npu_device, reference
from funcinfer.layers.primitives.segments import Segments
from funcinfer.models import registry
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, ThreadRanks
from funcinfer.sharding.presets import for_mesh
from funcinfer.tree import tree_map
from tests.equivalence.harness import TRACE, Logits, Trace, deal_pages, draw
from tests.npu.cases import Call
from tests.npu.emulators import rules
from tests.npu.recorder import fetched
from tests.npu.simulator import Simulation
from tests.npu.test_schema import compare

PAGE = 16
SHARED = dict(
    vocab_size=60,
    hidden_size=48,
    intermediate_size=40,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    rope_parameters=dict(rope_type="default", rope_theta=10000.0),
)
EXPERTS = dict(
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_routed_experts=12,
    n_shared_experts=1,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_group=3,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)
LATENTS = dict(
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=512,
    qk_nope_head_dim=24,
    qk_rope_head_dim=64,
    v_head_dim=40,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": SHARED
    | dict(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=128,
    ),
    "qwen3_moe": SHARED
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "deepseek_v3": SHARED
    | LATENTS
    | EXPERTS
    | dict(architectures=["DeepseekV3ForCausalLM"], num_hidden_layers=2),
    "deepseek_v32": SHARED
    | LATENTS
    | EXPERTS
    | dict(
        architectures=["DeepseekV32ForCausalLM"],
        num_hidden_layers=2,
        index_topk=6,
        index_head_dim=128,
        index_n_heads=16,
    ),
}
FIA = "npu_fused_infer_attention_score_v2"
PARTS = {"npu_rotary_mul", "npu_scatter_pa_kv_cache"}
DENSE = {"npu_rms_norm", "npu_swiglu"} | PARTS
# In float32, the ops of PARTS do what these do.
LATENT = {"npu_rms_norm", "npu_swiglu", "npu_interleave_rope", "npu_kv_rmsnorm_rope_cache"}
ROUTED = {
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_moe_finalize_routing",
}
SPARSE = {
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_scatter_nd_update_",
    "npu_rotary_mul",
}
USED = {
    "qwen3": DENSE | {FIA},
    "qwen3_moe": DENSE | ROUTED | {FIA},
    "deepseek_v3": LATENT | ROUTED | {FIA},
    "deepseek_v32": LATENT | ROUTED | SPARSE,
}
HALF_ONLY = {
    FIA,
    "npu_lightning_indexer",
    "npu_sparse_flash_attention",
    "npu_interleave_rope",
    "npu_kv_rmsnorm_rope_cache",
}


def model_of(name: str, dtype: torch.dtype, **mesh: int) -> Model:
    """The model on the CPU, with random parameters."""
    config = CONFIGS[name]
    family = registry.family_of(config)
    cfg = family.from_hf(config)
    decoder = family.decoder(cfg)
    on, prefill, decode = for_mesh(cfg.num_kv_heads, Mesh(**mesh))
    fns = build(decoder, prefill, decode)
    return Model(
        cfg=cfg,
        fns=fns,
        params=draw(decoder, dtype=dtype),
        mesh=on,
        rules=prefill,
    )


class SimulatedRanks(ThreadRanks):
    """Ranks as threads, each with a simulation; `calls` are those of all."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.calls: set[str] = set()

    def run(self, f: Callable[..., Any], *args: list[Any]) -> list[Any]:
        def simulated(*local: Any) -> Any:
            with Simulation() as npu:
                out = f(*local)
            self.calls |= set(npu.calls)
            return out

        return super().run(simulated, *args)


def on_npu(model: Model) -> Model:
    """The same model on the simulated device."""
    params = tree_map(lambda x: x.npu(), model.params)
    ranks = SimulatedRanks(model.mesh) if model.mesh.num_ranks > 1 else None
    return dataclasses.replace(model, params=params, ranks=ranks)


@dataclass
class Stepped:
    """A model with poisoned caches, stepped through a trace."""

    model: Model
    page_size: int = PAGE
    trace: Trace = TRACE
    logits: Logits = field(default_factory=dict)

    def run(self) -> Logits:
        """The logits of every token of the trace."""
        tokens = self.trace.tokens(self.model.cfg.vocab_size)
        pages, num_pages = deal_pages(self.trace.lengths, self.model.num_groups, self.page_size)
        coords = self.model.runner.coords
        caches = [
            self.model.local_cache(num_pages, self.page_size, fill=float("nan"), coord=c)
            for c in coords
        ]
        done = dict.fromkeys(tokens, 0)
        for decode, counts in self.trace.steps:
            rows = [
                Rows(tokens[i][done[i] : done[i] + n], done[i], pages[i], wanted=n)
                for i, n in counts.items()
            ]
            batch = self.model.place([rows], page_size=self.page_size, decode=decode)
            outs, caches = self.model.step(caches, batch, decode=decode)
            logits = self.model.join_logits(outs, decode=decode).cpu()
            for i, n in counts.items():
                for _ in range(n):
                    self.logits[i, done[i]], logits = logits[0], logits[1:]
                    done[i] += 1
        return self.logits


def assert_same(found: Logits, wanted: Logits, *, atol: float = 5e-5) -> None:
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        worst = (found[key] - row).abs().max()
        assert worst <= atol, f"request and position {key}: {worst}"


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Float32 tensors count as bfloat16, to our table of limits and to the emulators."""
    choose = npu_device.choose

    def widely(primitive: str, soc: str, **facts: Any) -> Any:
        if facts.get("dtype") == "float32":
            facts["dtype"] = "bfloat16"
        return choose(primitive, soc, **facts)

    monkeypatch.setattr(npu_device, "choose", widely)
    with rules.any_dtype():
        yield


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_float32(name: str, npu: Simulation):
    model = model_of(name, torch.float32)
    assert_same(Stepped(on_npu(model)).run(), Stepped(model).run())
    assert set(npu.calls) == USED[name] - HALF_ONLY | PARTS


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_fused_op_without_rounding(name: str, npu: Simulation, widened: None):
    model = model_of(name, torch.float32)
    assert_same(Stepped(on_npu(model)).run(), Stepped(model).run())
    assert set(npu.calls) == USED[name]


class Compared:
    """A back end that runs each op on the NPU and, on copies, by the reference; both must agree."""

    def __init__(self) -> None:
        self.ops: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def op(*args: Any, **settings: Any) -> Any:
            copies = fetched((args, settings))
            found = getattr(back_end, name)(*args, **settings)
            with ops.force_reference():
                if name.startswith("rotate"):
                    # The reference rounds three times, the op once: compare with a rounding of its
                    # own at the end, of the same rounded tables.
                    wide = [x.bfloat16().float() for x in copies[0]]
                    wanted = getattr(reference, name)(*wide).bfloat16()
                else:
                    wanted = getattr(reference, name)(*copies[0], **copies[1])
            self.ops.add(name)
            compare(Call(name, None, args, settings), fetched(found), wanted, torch.bfloat16)
            return found

        return op


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_each_op_of_a_model_in_bfloat16(name: str, npu: Simulation):
    """Every op, on what the model gives it, to one unit in the last place."""
    compared = Compared()
    model = on_npu(model_of(name, torch.bfloat16))
    with ops.use_backend(compared):
        assert all(row.isfinite().all() for row in Stepped(model).run().values())
    # The sigmoid gate's weights are float32, which the op that sums in bfloat16 doesn't take.
    apart = {"npu_moe_finalize_routing"} if name.startswith("deepseek") else set()
    assert set(npu.calls) == USED[name] - apart
    assert {"rms_norm", "linear", "swiglu"} < compared.ops


@torch.no_grad()
@pytest.mark.parametrize("mesh", (dict(tp=2), dict(dcp=2)), ids=str)
@pytest.mark.parametrize("name", ("qwen3", "deepseek_v3", "deepseek_v32"))
def test_logits_on_a_mesh(name: str, mesh: dict[str, int], npu: Simulation, widened: None):
    model = model_of(name, torch.float32, **mesh)
    found = on_npu(model)
    wanted = Stepped(model_of(name, torch.float32)).run()
    assert_same(Stepped(found, 2 * PAGE).run(), wanted)
    assert isinstance(found.ranks, SimulatedRanks)
    assert found.ranks.calls | set(npu.calls) >= {"npu_rms_norm", "npu_swiglu"}
    merged = "npu_attention_update" in found.ranks.calls
    assert merged == ("dcp" in mesh)


@torch.no_grad()
def test_causal_runs_on_a_part_of_the_pages_are_wrong(
    npu: Simulation, widened: None, monkeypatch: pytest.MonkeyPatch
):
    """Under DCP, tokens of a run must go in one by one: sparse mode 3 takes the wrong keys."""
    wanted = Stepped(model_of("qwen3", torch.float32)).run()

    def as_they_are(self: Segments, seen: Callable[[int], int]) -> Segments:
        return Segments(self.rows, self.lens, tuple(map(seen, self.kv_lens)))

    monkeypatch.setattr(Segments, "one_by_one", as_they_are)
    found = Stepped(on_npu(model_of("qwen3", torch.float32, dcp=2)), 2 * PAGE).run()
    with pytest.raises(AssertionError):
        assert_same(found, wanted, atol=1e-2)


@torch.no_grad()
def test_the_engine_serves_the_same_tokens(npu: Simulation):
    model = model_of("qwen3", torch.float32)
    prompts = [[5, 9, 11, 2, 7], [1], [8, 8, 3]]
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    assert on_npu(model).generate(prompts, sampling) == model.generate(prompts, sampling)
    assert "npu_scatter_pa_kv_cache" in npu.calls
