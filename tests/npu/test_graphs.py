"""A captured decode step on the simulated NPU: torch_npu's NPUGraph, its update and its replay."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import Batch, Rows
from funcinfer.serving.capture import CapturedStep
from funcinfer.tree import tree_map
from tests.npu.graphs import GraphSimulation
from tests.npu.test_models import PAGE, model_of, on_npu

FIA = "npu_fused_infer_attention_score_v2"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphSimulation]:
    with GraphSimulation(monkeypatch) as simulation:
        yield simulation


def test_a_replay_reads_its_buffers_again(npu: GraphSimulation):
    x, w, graph = torch.ones(2, 4).npu(), torch.ones(4).npu(), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = torch.ops.npu.npu_rms_norm(x * 3, w)[0] + 1
    assert [n.func._opname for n in npu.noted] == ["mul", "npu_rms_norm", "add"]
    x.copy_(torch.tensor([[2.0, -2.0, 2.0, -2.0]] * 2))
    kept = y.data_ptr()
    graph.replay()
    assert y.data_ptr() == kept
    torch.testing.assert_close(y[0].cpu(), torch.tensor([2.0, 0.0, 2.0, 0.0]))


def batches(model: Any) -> list[Batch]:
    """Decode steps of two requests, of ever more tokens."""
    steps = ((3, 20), (4, 21), (17, 5))
    return [
        model.place(
            [[Rows([7 + n], n, [1, 2]), Rows([11 + m], m, [3, 4])]], page_size=PAGE, decode=True
        )
        for n, m in steps
    ]


@torch.no_grad()
@pytest.mark.parametrize("updated", (True, False))
def test_a_captured_step_is_the_step(
    npu: GraphSimulation, updated: bool, monkeypatch: pytest.MonkeyPatch
):
    """Where lengths aren't exchanged before a replay, it is not."""
    model = on_npu(model_of("qwen3", torch.bfloat16))
    caches = [model.local_cache(5, PAGE) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for cache in caches[:1]:
        tree_map(lambda x: x.copy_(torch.randn(x.shape, generator=generator)), cache)
    tree_map(lambda a, b: a.copy_(b), caches[1], caches[0])
    made = [tree_map(lambda x: x.npu(), batch) for batch in batches(model)]
    captured = CapturedStep(model.fns.decode, model.params, caches[0], made[0])
    attends = [n for n in npu.noted if n.func._opname == FIA]
    assert len(attends) == 2 and all(n.func._overloadname == "out" for n in attends)
    if not updated:
        monkeypatch.setattr(torch.npu.NPUGraph, "update", lambda self, cpu_update_input: None)
    for batch in made:
        wanted, caches[1] = model.fns.decode(model.params, caches[1], batch)
        found = captured(batch)
        assert torch.equal(found.logits.cpu(), wanted.logits.cpu()) == updated
