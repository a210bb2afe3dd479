"""The same comparison with one process a rank: gloo moves what threads hand over."""

from collections.abc import Iterator

import pytest

from tests.equivalence.harness import ONE_RANK, TOLERANCE, distance, draw, run
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.small import DECODERS
from tests.launch import Processes, process_ranks

ON_TWO_RANKS = [name for name, layout in LAYOUTS.items() if layout.mesh.num_ranks == 2]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as two:
        yield two


def distance_to_one_rank(layout: str) -> float:
    """Runs in each process: how far its logits are from those of one rank."""
    chosen, decoder = LAYOUTS[layout], DECODERS["whole layers"]
    params = draw(decoder)
    found = run(decoder, params, chosen, ranks=process_ranks(chosen.mesh))
    return distance(found, run(decoder, params, ONE_RANK))


@pytest.mark.parametrize("layout", ON_TWO_RANKS)
def test_layers_are_the_same_on_processes(layout: str, processes: Processes):
    gaps = processes.call(f"{__name__}:distance_to_one_rank", layout)
    assert max(gaps) <= TOLERANCE
