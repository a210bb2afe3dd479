"""The cases of `cases` on threads, and the same on gloo processes."""

from collections.abc import Iterator

import pytest
import torch

from funcinfer.sharding import (
    Mesh,
    P,
    ThreadRanks,
    all_gather,
    all_to_all,
    all_to_all_v,
    axis_index,
    axis_size,
    bind,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    shard_map,
    solo,
)
from tests.launch import Processes, process_ranks
from tests.sharding.cases import CASES


def on_this_process(name: str, size: int) -> None:
    CASES[name](process_ranks, size)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n}-processes")
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    with Processes(request.param) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_on_processes(processes, name):
    processes.call("tests.sharding.test_collectives:on_this_process", name, processes.count)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", CASES)
def test_on_threads(name, size):
    CASES[name](ThreadRanks, size)
