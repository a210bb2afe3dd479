"""The least time that a step can take on a hardware, and what it is made of.

    floor          = max(operations / flops, bytes moved / memory bandwidth) + communication
    communication  = sum over collectives of max(bytes by links / link bandwidth,
                                                 bytes by the network / network bandwidth) + latency

Bytes sent are those of the best algorithm between n ranks of which k are in a domain of fast links;
b is what a rank puts in. A gather brings each rank (n - 1) b; what is outside of a domain comes in
once and is handed on, so that its k ranks share the network: (n - k) b / k each. A scattered sum is
a gather turned round, with b / n for b, a sum is both. An exchange has nothing to share:
(n - k) b / n by the network, (k - 1) b / n by links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from funcinfer.plan.cost import Cost, Sent, in_turn
from funcinfer.plan.hardware import Hardware
from funcinfer.sharding import Axis, Mesh
from funcinfer.sharding.record import Collective


@dataclass(frozen=True)
class Floor:
    """Seconds of a step's parts; None where the hardware has no figure for one.

    `work` is the longer of compute and memory, summed over pipeline stages, which work in turn;
    `latency_known` says whether communication has the latencies of collectives in it.
    """

    compute: float | None
    memory: float | None
    work: float
    communication: float | None
    latency_known: bool

    @property
    def seconds(self) -> float:
        """Work + communication, of what is known."""
        return self.work + (self.communication or 0.0)

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts that no figure is known for."""
        parts = ("compute", "memory", "communication")
        return tuple(p for p in parts if getattr(self, p) is None)


def floor_of(
    costs: Sequence[Cost], mesh: Mesh, hardware: Hardware, *, stages: Axis = None
) -> Floor:
    """The floor of a step, of the costs of a rank of each pipeline stage over `stages`."""
    flops, bandwidth = hardware.flops, hardware.memory_bandwidth
    compute = [c.flops / flops.value if flops else 0.0 for c in costs]
    memory = [c.moved_bytes / bandwidth.value if bandwidth else 0.0 for c in costs]
    together = in_turn(costs, stages)
    return Floor(
        compute=sum(compute) if flops else None,
        memory=sum(memory) if bandwidth else None,
        work=sum(map(max, compute, memory)),
        communication=_communication(together, mesh, hardware),
        latency_known=hardware.latency is not None or not together.sent,
    )


def _communication(cost: Cost, mesh: Mesh, hardware: Hardware) -> float | None:
    """Seconds of all collectives; None where one of them has no bandwidth that is known."""
    latency = hardware.latency.value if hardware.latency else 0.0
    total = 0.0
    for sent in cost.sent:
        seconds = seconds_of(sent, mesh, hardware)
        if seconds is None:
            return None
        total += sent.count * (seconds + latency)
    return total


def seconds_of(sent: Sent, mesh: Mesh, hardware: Hardware) -> float | None:
    """Seconds of one collective without its latency; None without a bandwidth."""
    domain = int(hardware.domain.value) if hardware.domain else mesh.num_ranks
    size, inside = group_sizes(mesh, sent.collective.axes, domain)
    seconds = 0.0
    by_links, by_network = bytes_sent(sent.collective, sent.nbytes, size, inside)
    for nbytes, bandwidth in (
        (by_links, hardware.link_bandwidth),
        (by_network, hardware.network_bandwidth),
    ):
        if nbytes and bandwidth is None:
            return None
        seconds = max(seconds, nbytes / bandwidth.value if bandwidth else 0.0)
    return seconds


def bytes_sent(collective: Collective, nbytes: float, n: int, k: int) -> tuple[float, float]:
    """Bytes that a rank receives by links and by the network, of `n` ranks with `k` in its domain.

    >>> import torch
    >>> psum = Collective("psum", ("tp",), (3,), torch.float32)
    >>> bytes_sent(psum, 12.0, 4, 4)
    (18.0, 0.0)
    """

    def gather(b: float) -> tuple[float, float]:
        by_network = (n - k) * b / k
        return (n - 1) * b - by_network, by_network

    match collective.op:
        case "all_gather":
            return gather(nbytes)
        case "psum_scatter":
            return gather(nbytes / n)
        case "psum" | "pmax":
            links, network = gather(nbytes / n)
            return 2 * links, 2 * network
        case "ppermute":
            return (nbytes, 0.0) if n == k else (0.0, nbytes)
        case _:
            return (k - 1) * nbytes / n, (n - k) * nbytes / n


@lru_cache(maxsize=4096)
def group_sizes(mesh: Mesh, axes: tuple[str, ...], domain: int) -> tuple[int, int]:
    """The ranks of a group, and those of them in the first rank's domain.

    Ranks that follow each other share a domain.
    """
    members = mesh.group(axes, dict.fromkeys(mesh.names, 0))
    return len(members), sum(rank < domain for rank in members)
