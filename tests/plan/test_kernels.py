"""The kernels that a plan lists, against published sizes and against the calls of a real step."""

from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import Rows, make_batch
from funcinfer.layers import primitives as ops
from funcinfer.layers.primitives import npu
from funcinfer.plan import Setting, Subject, data, find, plan, text
from funcinfer.plan.kernels import kernels_of
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, Rules, presets
from funcinfer.sharding.presets import Preset
from funcinfer.spec import empty, init, with_dtype
from tests.npu.recorder import recording
from tests.plan import configs

FIA = "npu_fused_infer_attention_score_v2"
TINY_MOE = configs.QWEN3_30B_A3B | dict(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    vocab_size=101,
)
TINY_MLA = {k: v for k, v in configs.DEEPSEEK_SLICE.items() if k != "quantization_config"} | dict(
    hidden_size=48,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=24,
    n_routed_experts=12,
    n_group=3,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    intermediate_size=32,
    vocab_size=101,
)


def forms(
    config: dict[str, Any], mesh: Mesh, hardware: str, *, page_size: int = 128, **options: Any
) -> dict[str, dict[str, set[str]]]:
    """Phase -> primitive -> "op form", or None for a composition."""
    subject = Subject.from_config(config)
    preset = presets.for_mesh(subject.cfg.num_kv_heads, mesh, **options)
    made = plan(
        subject,
        preset,
        Setting(find(hardware), page_size=page_size),
        batch=2 * mesh.size("dp") if "dp" in mesh.names else 2,
        context=300,
        prompts=mesh.size("dp") if "dp" in mesh.names else 1,
        prompt=200,
    )
    said = data(made)["kernels"]
    found: dict[str, dict[str, set[str]]] = {}
    for phase in ("prefill", "decode"):
        for kernel in said[phase]:
            of_phase = found.setdefault(phase, {})
            what = f"{kernel['op']} {kernel['form']}"
            of_phase.setdefault(kernel["primitive"], set()).add(what)
    return found


def test_deepseek_v3_on_ascend():
    found = forms(configs.DEEPSEEK_V3, Mesh(dp=2, tp=4), "910b", expert_parallel=True)
    assert found["decode"]["paged_mla_attention"] == {f"{FIA} ragged"}
    assert found["prefill"].keys() & {"paged_attention", "paged_mla_attention"} == {
        "paged_attention"
    }
    assert found["prefill"]["paged_attention"] == {f"{FIA} packed"}
    for phase in found.values():
        assert phase["gate_sigmoid"] == {"npu_moe_gating_top_k gate"}
        assert phase["expert_mlp"] == {"npu_grouped_matmul grouped"}
        # Weights of sigmoid routers are float32, and the op wants them in x's dtype.
        assert phase["expert_mlp.combine"] == {"None composed"}


def test_heads_that_no_op_takes():
    """96 is no power of two."""
    config = configs.DEEPSEEK_V3 | dict(num_attention_heads=96, num_key_value_heads=96)
    found = forms(config, Mesh(), "910b")
    assert found["decode"]["paged_mla_attention"] == {"None composed"}


def test_dense_heads_of_64():
    found = forms(configs.QWEN3_06B | dict(head_dim=64), Mesh(), "910b")
    assert found["decode"]["paged_attention"] == {f"{FIA} masked"}
    assert found["prefill"]["paged_attention"] == {"None composed"}


def test_pages_dealt_over_ranks_are_merged():
    found = forms(configs.QWEN3_06B, Mesh(tp=8, dcp=2), "950dt")
    for phase in found.values():
        assert phase["paged_attention"] == {f"{FIA} ragged"}
        assert phase["merge_lse"] == {"npu_attention_update merge"}


def test_text_and_data():
    subject = Subject.from_config(configs.QWEN3_06B | dict(head_dim=64))
    preset = Preset(Mesh(), Rules.none(), Rules.none())
    load = dict(batch=2, context=300, prompts=1, prompt=200)
    made = plan(subject, preset, Setting(find("910b")), **load)
    shown = text(made)
    assert "kernels on ascend910b" in shown
    assert "widths (64, 64, 'gqa') is not one of" in shown
    elsewhere = plan(subject, preset, Setting(find("h200")), **load)
    assert "kernels" not in text(elsewhere)
    assert data(elsewhere)["kernels"] is None


@pytest.mark.parametrize("config", [TINY_MOE, TINY_MLA], ids=["experts", "latents"])
def test_a_step_calls_what_the_plan_says(config: dict[str, Any]):
    subject = Subject.from_config(config)
    fns, page = build(subject.decoder), 16
    params = init(with_dtype(fns.specs, torch.bfloat16))
    cache = empty(with_dtype(fns.cache_specs(9, page), torch.bfloat16))
    preset = Preset(Mesh(), Rules.none(), Rules.none())
    setting = Setting(find("910b"), page_size=page)
    made = plan(subject, preset, setting, batch=2, context=8, prompts=2, prompt=7)
    for phase, start, new in ((made.prefill, 0, 7), (made.decode, 7, 1)):
        rows = [Rows([5 + i] * new, start, [1 + i]) for i in range(2)]
        batch = make_batch([rows], page_size=page, segments=True)
        with recording() as recorder, ops.use_backend(npu), torch.no_grad():
            _, cache = fns.prefill(params, cache, batch)
        chosen = [k.choice.form for k in kernels_of(made, phase, "ascend910b")]
        planned = {form.op for form in chosen if form}
        assert planned == set(recorder.calls) - {"npu_moe_init_routing_v2"}
