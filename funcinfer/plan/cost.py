"""What a traced step costs a rank: operations, bytes moved, bytes sent.

    weights       each once; of experts those that are hit; of the embedding the rows looked up
    experts hit   held * (1 - (1 - choices / experts)^tokens), choices being uniform
    cache         read once by each request; where a token selects positions, those
    activations   in and out of products, attention and experts

Everything in a trace is proportional to the number of requests, but for experts hit: so one trace
serves every batch of the same rules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from funcinfer.plan.counting import Attention, Experts, Product, Work
from funcinfer.plan.memory import Memory
from funcinfer.plan.trace import Load, Trace
from funcinfer.sharding import Axis, both
from funcinfer.sharding.record import Collective


@dataclass(frozen=True)
class Sent:
    """A collective, `count` times a step; each time this rank puts in `nbytes`."""

    collective: Collective
    count: int
    nbytes: int


@dataclass(frozen=True)
class Cost:
    """Operations and bytes of one rank in one step."""

    flops: float
    weight_bytes: float
    cache_read_bytes: float
    cache_written_bytes: float
    activation_bytes: float
    sent: tuple[Sent, ...]

    @property
    def moved_bytes(self) -> float:
        """Bytes between memory and processor."""
        cache = self.cache_read_bytes + self.cache_written_bytes
        return self.weight_bytes + cache + self.activation_bytes


def cost_of(trace: Trace, memory: Memory, *, requests: int | None = None) -> Cost:
    """The cost of a traced step; with `requests` that of a batch with so many in each group, of
    which the trace's number must be a divisor.

    ValueError where it is not.
    """
    times, rest = divmod(requests or trace.load.requests, trace.load.requests)
    if rest or not times:
        raise ValueError(
            f"a trace of {trace.load.requests} requests a group can't tell the cost of {requests}"
        )
    flops = weights = read = activations = 0.0
    sent: dict[Collective, int] = {}
    for section in trace.sections.values():
        for c in section.collectives:
            sent[c] = sent.get(c, 0) + section.count
        for item in section.work:
            costs = (section.count * x for x in _work(item, trace, times))
            f, w, r, a = costs
            flops, weights, read, activations = flops + f, weights + w, read + r, activations + a
    load = trace.load
    written = memory.step_token_bytes * load.tokens * times
    return Cost(
        flops=flops,
        weight_bytes=weights + _dense_weights(trace, memory, times),
        cache_read_bytes=read,
        cache_written_bytes=written,
        activation_bytes=activations,
        sent=tuple(Sent(c, n, c.nbytes * times) for c, n in sent.items()),
    )


def in_turn(costs: Sequence[Cost], stages: Axis) -> Cost:
    """The cost of pipeline stages that work one after the other. Collectives over `stages` are all
    stages' own: each is once in it.
    """
    sent: dict[Collective, Sent] = {}
    for stage, cost in enumerate(costs):
        for s in cost.sent:
            if s.collective not in sent:
                sent[s.collective] = s
            elif not both(s.collective.axes, stages) or stage == 0:
                before = sent[s.collective]
                sent[s.collective] = replace(before, count=before.count + s.count)
    return Cost(
        flops=sum(c.flops for c in costs),
        weight_bytes=sum(c.weight_bytes for c in costs),
        cache_read_bytes=sum(c.cache_read_bytes for c in costs),
        cache_written_bytes=sum(c.cache_written_bytes for c in costs),
        activation_bytes=sum(c.activation_bytes for c in costs),
        sent=tuple(sent.values()),
    )


def _work(item: Work, trace: Trace, times: int) -> Iterable[float]:
    """(operations, weight bytes, cache bytes, activation bytes) of one item."""
    if isinstance(item, Product):
        return item.flops * times, 0, 0, item.activation_bytes * times
    if isinstance(item, Experts):
        rows = item.rows * times
        chosen = rows * item.choices * item.held / item.experts
        hit = item.held * (1 - (1 - item.choices / item.experts) ** rows)
        return chosen * item.flops, hit * item.weight_bytes, 0, chosen * item.activation_bytes
    return _attention(item, trace.load, trace.load.tokens / trace.shape.tokens, times)


def _attention(item: Attention, load: Load, real: float, times: int) -> Iterable[float]:
    """Padding rows see nothing: `real` is the part of rows that are tokens."""
    tokens = item.rows * times * real
    most = load.context if item.selected is None else item.selected
    pairs = tokens * load.seen_of(most) / item.parts
    everything = item.requests * times * load.context / item.parts
    rows = everything if item.selected is None else min(everything, pairs)
    return pairs * item.flops, 0, rows * item.row_bytes, item.activation_bytes * times


def _dense_weights(trace: Trace, memory: Memory, times: int) -> float:
    """Bytes of weights that every step reads: no experts, no draft modules, and of the embedding
    the rows of the tokens. An embedding that is the head too is read whole.
    """
    stages = trace.rules["layers"]
    stage, last = trace.mesh.index(stages, trace.coord), trace.mesh.size(stages) - 1
    tied = not any(h.path == "head" for h in memory.params)
    total = 0.0
    for h in memory.params:
        if h.path == "embed" and not (tied and stage == last):
            rows = trace.shape.tokens * times if stage == 0 else 0
            total += h.nbytes * min(1, rows / h.shape[0])
        elif "experts" not in h.axes and not h.path.startswith("mtp."):
            total += h.total
    return total
