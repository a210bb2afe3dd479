"""A step captured once and replayed: one form for CUDA graphs, NPU graphs, and no graph at all.

A captured step reads its inputs from buffers that stay where they are. To serve a batch, its
tensors are copied there, numbers that kernels take from the host are exchanged in the graph, and
the graph runs: no Python of the model. Shapes are those of the batch that it was captured for, so a
decode step is captured once for each padded size. Parameters and caches are closed over; the cache
is written in place.

    graph        record(f) -> what f returned        replay(lengths): the same work, same buffers
    CUDA         torch.cuda.CUDAGraph                no such numbers
    NPU          torch.npu.NPUGraph                  update(lengths), then replay
    elsewhere    f is called again                   f reads them itself
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from funcinfer.kvcache.batch import Batch, local_segments
from funcinfer.layers.primitives import Segments, host_lengths
from funcinfer.models.decoder import Cache, Output, Params
from funcinfer.serving.steps import StepFn
from funcinfer.sharding import Rules
from funcinfer.tree import leaves_with_path, tree_leaves, tree_map

Lengths = Mapping[str, list[int]]
# The first calls of a kernel may allocate, or choose between variants: not while it is captured.
WARM_UP = 2


class Graph(Protocol):
    """Work recorded once."""

    def record(self, work: Callable[[], Any]) -> Any:
        """Run `work` while it is recorded; its result, whose tensors each replay writes."""
        ...

    def replay(self, lengths: Lengths) -> None:
        """Do the work again; `lengths` are the arguments by name that kernels take from the
        host.
        """
        ...


class Repeated:
    """No graph: the work is called again, and its results copied to those of the first time.

    >>> x, graph = torch.ones(2), Repeated()
    >>> y = graph.record(lambda: x + 1)
    >>> _ = x.fill_(5)
    >>> graph.replay({})
    >>> y
    tensor([6., 6.])
    """

    def record(self, work: Callable[[], Any]) -> Any:
        """Call it."""
        self._work, self._result = work, work()
        return self._result

    def replay(self, lengths: Lengths) -> None:
        """Call it again."""
        for kept, new in zip(tree_leaves(self._result), tree_leaves(self._work()), strict=True):
            if isinstance(kept, torch.Tensor):
                kept.copy_(new)


class DeviceGraph:
    """A graph of a device that has them: CUDA's or an NPU's, which are used alike.

    `pool` is memory that graphs share which never run at one time (`graph_pool_handle()`).
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._module, self._pool = torch.get_device_module(device), pool
        self._updates = device.type == "npu"
        self._graph = (self._module.NPUGraph if self._updates else self._module.CUDAGraph)()

    def record(self, work: Callable[[], Any]) -> Any:
        """Run it some times on a stream of its own, then capture it."""
        side = self._module.Stream()
        side.wait_stream(self._module.current_stream())
        with self._module.stream(side):
            for _ in range(WARM_UP):
                work()
        self._module.current_stream().wait_stream(side)
        # An NPU notes which ops take lengths from the host, so that `update` finds them.
        options = dict(auto_dispatch_capture=True) if self._updates else {}
        with self._module.graph(self._graph, pool=self._pool, **options):
            return work()

    def replay(self, lengths: Lengths) -> None:
        """Exchange the lengths of every op that takes some, then run the graph."""
        if self._updates and lengths:
            self._graph.update(cpu_update_input=[dict(lengths)])
        self._graph.replay()


def graph_for(device: torch.device, pool: Any = None) -> Graph:
    """What captures work on a device."""
    return DeviceGraph(device, pool) if device.type in ("cuda", "npu") else Repeated()


class CapturedStep:
    """`step(params, cache, batch)` for batches like `batch`, captured.

    `batch` is this rank's part, and gives sizes alone: the step is captured with nothing but
    padding. The cache is donated, and stays that of every call. `rules` and `interleave` are those
    that the step was built with. Where kernels take lengths from the host, a captured step serves
    one token a request. ValueError for a batch that is not like the first.

    >>> from funcinfer import build
    >>> from funcinfer.kvcache.batch import Rows, make_batch
    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> from funcinfer.spec import empty, init
    >>> cfg = llama.Config(97, 16, 1, 2, 1, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> fns = build(llama.decoder(cfg))
    >>> batch = make_batch([[Rows([5], start=0, pages=[1])]], page_size=4)
    >>> captured = CapturedStep(fns.decode, init(fns.specs), empty(fns.cache_specs(2, 4)), batch)
    >>> captured(batch).logits.shape
    torch.Size([1, 97])
    """

    def __init__(
        self,
        step: StepFn,
        params: Params,
        cache: Cache,
        batch: Batch,
        *,
        rules: Rules | None = None,
        interleave: int = 1,
        graph: Graph | None = None,
    ) -> None:
        self._rules, self._interleave = rules or Rules.none(), interleave
        self._batch = _padding(batch)
        self._graph = graph or graph_for(batch.tokens.device)
        self._cache = cache

        def work() -> Output:
            with torch.no_grad():
                out, self._cache = step(params, self._cache, self._batch)
            return out

        self._out: Output = self._graph.record(work)

    @property
    def cache(self) -> Cache:
        """The cache that the step writes."""
        return self._cache

    def __call__(self, batch: Batch) -> Output:
        """The step's Output for a batch; its tensors are overwritten by the next call."""
        self._check(batch)
        for (_, kept), (_, new) in zip(
            leaves_with_path(self._batch), leaves_with_path(batch), strict=True
        ):
            kept.copy_(new, non_blocking=True)
        self._batch = dataclasses.replace(self._batch, segments=batch.segments)
        self._graph.replay(self._lengths(batch))
        return self._out

    def _lengths(self, batch: Batch) -> Lengths:
        segments = local_segments(batch, rules=self._rules, interleave=self._interleave)
        return {} if segments is None else host_lengths(segments)

    def _check(self, batch: Batch) -> None:
        mine, given = (
            {path: (tuple(x.shape), x.dtype) for path, x in leaves_with_path(b)}
            for b in (self._batch, batch)
        )
        if mine != given or batch.page_size != self._batch.page_size:
            raise ValueError(
                f"the step was captured for a batch of {mine} in pages of"
                f" {self._batch.page_size}, not of {given} in pages of {batch.page_size}"
            )
        if (batch.segments is None) != (self._batch.segments is None):
            raise ValueError("segments must be in all batches of a captured step, or in none")
        _check_single(batch.segments)


def _check_single(segments: Segments | None) -> None:
    if segments is not None and segments.longest > 1:
        raise ValueError(
            f"a captured step takes one token a request, but a run has {segments.longest}: its"
            f" kernels were chosen for single tokens"
        )


def _padding(batch: Batch) -> Batch:
    """Buffers of the batch's sizes, with padding in all places: what runs writes nothing."""
    blank = tree_map(torch.zeros_like, batch)
    blank.positions.fill_(-1)
    if batch.segments is None:
        return blank
    _check_single(batch.segments)
    count = batch.segments.num_tokens
    single = Segments((0,) * count, (1,) * count, (0,) * count)
    return dataclasses.replace(blank, segments=single)
