"""A captured step against the step itself, and what the graph of an NPU is told."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from funcinfer import build
from funcinfer.kvcache.batch import Batch, Rows, make_batch
from funcinfer.serving.capture import CapturedStep, DeviceGraph, Repeated, graph_for
from funcinfer.spec import empty, with_dtype
from funcinfer.tree import tree_leaves
from tests.serving.tiny import DECODER, params

PAGE, PAGES = 4, 9
FNS = build(DECODER)


def cache() -> Any:
    torch.manual_seed(0)
    return {
        name: type(kv)(*(torch.randn_like(x) for x in tree_leaves(kv)))
        for name, kv in empty(with_dtype(FNS.cache_specs(PAGES, PAGE), torch.float64)).items()
    }


def batch(lengths: list[int], *, size: int = 3, segments: bool = False) -> Batch:
    """A decode step of requests of so many tokens, padded to `size` requests."""
    rows = [Rows([7 + i], n, [1 + 2 * i, 2 + 2 * i]) for i, n in enumerate(lengths)]
    # A request without tokens makes the sizes those of `size` requests.
    rows += [Rows([], 0, [], wanted=0)] * (size - len(rows))
    made = make_batch([rows], page_size=PAGE, multiple=size, segments=segments)
    out = torch.zeros(size, dtype=torch.int32)
    out[: len(made.out)] = made.out
    return Batch(**{**vars(made), "out": out})


def test_a_captured_step_is_the_step():
    captured = CapturedStep(FNS.decode, params(), cache(), batch([1]), graph=Repeated())
    wanted_cache = cache()
    for lengths in ([5, 2], [6, 3, 1], [7]):
        wanted, wanted_cache = FNS.decode(params(), wanted_cache, batch(lengths))
        found = captured(batch(lengths))
        for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
            assert torch.equal(a, b)
    for a, b in zip(tree_leaves(captured.cache), tree_leaves(wanted_cache), strict=True):
        assert torch.equal(a, b)


def test_capturing_writes_nothing_but_the_scratch_row():
    before, captured = cache(), CapturedStep(FNS.decode, params(), cache(), batch([5, 2]))
    for a, b in zip(tree_leaves(captured.cache), tree_leaves(before), strict=True):
        assert torch.equal(a.flatten(0, 1)[1:], b.flatten(0, 1)[1:])


def test_a_result_is_overwritten_by_the_next_call():
    captured = CapturedStep(FNS.decode, params(), cache(), batch([1]))
    first = captured(batch([5, 2])).logits
    kept = first.clone()
    assert captured(batch([6, 3])).logits is first
    assert not torch.equal(first, kept)


class Told:
    """A device whose graphs note what they are told."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        log = self.log

        class NPUGraph:
            def update(self, cpu_update_input: list[dict[str, list[int]]]) -> None:
                log.append(("update", cpu_update_input))

            def replay(self) -> None:
                log.append("replay")

        self.NPUGraph = self.CUDAGraph = NPUGraph
        self.Stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
        self.current_stream = self.Stream

    @contextmanager
    def stream(self, stream: Any) -> Any:
        self.log.append("side stream")
        yield

    @contextmanager
    def graph(self, graph: Any, pool: Any = None, **options: Any) -> Any:
        self.log.append(("capture", options))
        yield


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_a_graph_of_a_device_is_told_lengths_before_it_runs(device: str, monkeypatch):
    told = Told()
    monkeypatch.setattr(torch, "get_device_module", lambda device: told)
    graph = DeviceGraph(SimpleNamespace(type=device))  # pyright: ignore[reportArgumentType]
    some = batch([5, 2], segments=True)
    captured = CapturedStep(FNS.decode, params(), cache(), some, graph=graph)
    options = dict(auto_dispatch_capture=True) if device == "npu" else {}
    assert told.log == ["side stream", ("capture", options)]
    captured(some)
    lengths = dict(actual_seq_qlen=[1, 2, 3], actual_seq_kvlen=[6, 3, 1])
    updates = [("update", [lengths])] if device == "npu" else []
    assert told.log[2:] == [*updates, "replay"]


def test_which_graph_a_device_has():
    assert isinstance(graph_for(torch.device("cpu")), Repeated)


def test_messages():
    captured = CapturedStep(FNS.decode, params(), cache(), batch([1], segments=True))
    with pytest.raises(ValueError, match=r"captured for a batch of .*'tokens': \(\(3,\)"):
        captured(batch([1], size=4, segments=True))
    with pytest.raises(ValueError, match="in all batches of a captured step, or in none"):
        captured(batch([1]))
    chunk = make_batch([[Rows([1, 2], 0, [1])]], page_size=PAGE, segments=True)
    with pytest.raises(ValueError, match="takes one token a request, but a run has 2"):
        CapturedStep(FNS.decode, params(), cache(), chunk)
