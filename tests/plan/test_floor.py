"""Times of steps by hand; what is sent by links and by the network; figures that are not known."""

import itertools
from typing import Any

import pytest
import torch

from funcinfer.plan import HARDWARE, Figure, Hardware, find
from funcinfer.plan.cost import Cost, Sent, in_turn
from funcinfer.plan.floor import bytes_sent, floor_of, group_sizes
from funcinfer.sharding import Mesh
from funcinfer.sharding.record import Collective

GATHER = Collective("all_gather dim=0", ("tp",), (10,), torch.bfloat16)
SUM = Collective("psum", ("tp",), (10,), torch.bfloat16)


def hardware(**figures: float) -> Hardware:
    return Hardware("test").replace(**figures)


def cost(sent: tuple[Sent, ...] = (), **values: float) -> Cost:
    fields: dict[str, Any] = dict.fromkeys(
        (
            "flops",
            "weight_bytes",
            "cache_read_bytes",
            "cache_written_bytes",
            "activation_bytes",
        ),
        0.0,
    )
    return Cost(**{**fields, **values}, sent=sent)


def test_a_step_takes_the_longer_of_work_and_memory_and_then_communicates() -> None:
    sent = (Sent(GATHER, 3, 20),)
    spent = cost(
        sent,
        flops=1000,
        weight_bytes=30,
        cache_read_bytes=20,
        cache_written_bytes=2,
        activation_bytes=8,
    )
    device = hardware(flops=100, memory_bandwidth=5, link_bandwidth=10, latency=0.25)
    floor = floor_of([spent], Mesh(tp=4), device)
    assert (floor.compute, floor.memory) == (10, 12)
    assert floor.communication == 3 * (3 * 20 / 10 + 0.25)
    assert floor.seconds == 12 + 18.75
    assert (floor.latency_known, floor.missing) == (True, ())


def test_stages_work_in_turn_and_hand_on_once() -> None:
    over_stages = Collective("ppermute ((0, 1),)", ("pp",), (10,), torch.bfloat16)
    first = cost((Sent(over_stages, 1, 40), Sent(SUM, 2, 8)), flops=1000, weight_bytes=10)
    second = cost((Sent(over_stages, 1, 40), Sent(SUM, 5, 8)), flops=100, weight_bytes=50)
    device = hardware(flops=100, memory_bandwidth=5, link_bandwidth=10)
    floor = floor_of([first, second], Mesh(pp=2, tp=2), device, stages="pp")
    assert (floor.compute, floor.memory, floor.work) == (11, 12, 10 + 10)
    assert floor.communication == pytest.approx(40 / 10 + 7 * (2 * 8 / 2) / 10)
    assert {s.collective: s.count for s in in_turn([first, second], "pp").sent} == {
        over_stages: 1,
        SUM: 7,
    }


@pytest.mark.parametrize("missing", ["flops", "memory_bandwidth", "link_bandwidth"])
def test_what_is_not_known_is_left_out_and_said(missing: str) -> None:
    figures = dict(flops=100.0, memory_bandwidth=5.0, link_bandwidth=10.0)
    device = hardware(**{k: v for k, v in figures.items() if k != missing})
    floor = floor_of([cost((Sent(SUM, 1, 20),), flops=700, weight_bytes=30)], Mesh(tp=2), device)
    part = {"flops": "compute", "memory_bandwidth": "memory"}.get(missing, "communication")
    assert floor.missing == (part,)
    assert getattr(floor, part) is None
    assert floor.seconds == {"compute": 8, "memory": 9, "communication": 7}[part]
    assert not floor.latency_known


def test_without_collectives_no_link_is_needed() -> None:
    floor = floor_of([cost(flops=100)], Mesh(), hardware(flops=100))
    assert (floor.communication, floor.latency_known, floor.seconds) == (0, True, 1)


# (links, network) bytes that a rank receives; n ranks, k of them in its domain; 12 bytes put in.
SENT = {
    "all_gather dim=0": {(4, 4): (36, 0), (4, 2): (24, 12), (4, 1): (0, 36), (6, 3): (48, 12)},
    "psum_scatter dim=1": {(4, 4): (9, 0), (4, 2): (6, 3), (4, 1): (0, 9)},
    "psum": {(4, 4): (18, 0), (4, 2): (12, 6), (4, 1): (0, 18), (1, 1): (0, 0)},
    "pmax": {(2, 2): (12, 0)},
    "all_to_all split=0 concat=1": {(4, 4): (9, 0), (4, 2): (3, 6), (4, 1): (0, 9)},
    "all_to_all_v": {(3, 3): (8, 0)},
    "ppermute ((0, 1),)": {(4, 4): (12, 0), (4, 2): (0, 12)},
}


@pytest.mark.parametrize(
    ("call", "n", "k"), [(call, *sizes) for call, cases in SENT.items() for sizes in cases]
)
def test_bytes_by_links_and_by_the_network(call: str, n: int, k: int) -> None:
    collective = Collective(call, ("x",), (3,), torch.float32)
    assert bytes_sent(collective, 12.0, n, k) == pytest.approx(SENT[call][n, k])


@pytest.mark.parametrize("domain", [1, 2, 3, 4, 8, 100])
@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "c"), ("c", "b"), ("a", "b", "c")])
def test_ranks_that_follow_each_other_share_a_domain(axes: tuple[str, ...], domain: int) -> None:
    sizes = dict(a=2, b=3, c=4)
    everybody = list(itertools.product(*(range(n) for n in sizes.values())))
    group = [
        rank
        for rank, place in enumerate(everybody)
        if all(i == 0 for name, i in zip(sizes, place, strict=True) if name not in axes)
    ]
    near = sum(rank // domain == 0 for rank in group)
    assert group_sizes(Mesh(**sizes), axes, domain) == (len(group), near)


def test_the_network_is_slower_than_links() -> None:
    """16 ranks of one domain of 8: half of what an exchange brings comes by the network."""
    exchange = Collective("all_to_all split=0 concat=0", ("ep",), (16,), torch.float32)
    device = hardware(link_bandwidth=100, network_bandwidth=10, domain=8)
    floor = floor_of([cost((Sent(exchange, 1, 1600),))], Mesh(ep=16), device)
    assert floor.communication == 800 / 10
    no_network = hardware(link_bandwidth=100, domain=8)
    assert floor_of([cost((Sent(exchange, 1, 1600),))], Mesh(ep=16), no_network).missing == (
        "compute",
        "memory",
        "communication",
    )


def test_every_figure_has_a_source() -> None:
    for name, device in HARDWARE.items():
        figures = [v for v in vars(device).values() if isinstance(v, Figure)]
        assert len(figures) + len(device.unknown) == 7, name
        assert all(f.value > 0 and len(f.source) > 10 for f in figures), name
        assert device.memory_bandwidth, name
        assert device.flops, name
    assert set(HARDWARE) == {"910b", "910c", "950dt", "h200", "cpu"}


def test_hardware_is_found_and_changed_by_name() -> None:
    device = find("h200").replace(latency=1e-5)
    assert device.latency == Figure(1e-5, "given")
    assert device.memory == find("h200").memory
    with pytest.raises(ValueError, match="unknown hardware 'h20'; known: 910b, 910c"):
        find("h20")
    with pytest.raises(ValueError, match="no figure 'link': memory, memory_bandwidth"):
        device.replace(link=1)
    with pytest.raises(ValueError, match="flops=0 must be a number above 0"):
        device.replace(flops=0)
