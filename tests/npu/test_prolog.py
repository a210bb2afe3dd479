"""A model whose queries and latents come from npu_mla_prolog_v3, in sizes that the op takes."""

import dataclasses

import torch

from funcinfer.models import deepseek_v3, mla
from funcinfer.serving.steps import build
from funcinfer.tree import tree_map
from tests.npu.simulator import Simulation
from tests.npu.test_models import CONFIGS, Stepped, model_of, on_npu

SIZES = dict(hidden_size=1024, q_lora_rank=1536, qk_nope_head_dim=128, num_hidden_layers=1)


@torch.no_grad()
def test_logits(npu: Simulation, monkeypatch):
    """As far from those without rounding as the plain model's on the CPU, up to half as much."""
    monkeypatch.setitem(CONFIGS, "deepseek_v3", CONFIGS["deepseek_v3"] | SIZES)
    plain = model_of("deepseek_v3", torch.bfloat16)
    cfg = deepseek_v3.from_hf(CONFIGS["deepseek_v3"])
    fns = build(mla.prolog_decoder(cfg), plain.rules)
    moved = on_npu(plain)
    fused = dataclasses.replace(moved, fns=fns, params=mla.with_prologs(moved.params))
    assert npu.calls == ["npu_format_cast"] * 3
    found = Stepped(fused).run()
    assert {"npu_mla_prolog_v3", "npu_fused_infer_attention_score_v2"} <= set(npu.calls)
    of_float = model_of("deepseek_v3", torch.float32)
    same = tree_map(torch.Tensor.float, plain.params)
    exact = Stepped(dataclasses.replace(of_float, params=same)).run()
    rounded = Stepped(plain).run()

    def distance(logits) -> float:
        return max((logits[k].float() - exact[k]).square().mean().sqrt().item() for k in exact)

    assert 0 < distance(found) < 1.5 * distance(rounded)
