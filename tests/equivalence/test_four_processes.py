"""The layouts and families of four ranks with one process a rank, all in one start of processes.

Among the layouts are axis tuples in other than mesh order, whose chunks a process group, which has
its ranks in order, must be made to permute.
"""

from collections.abc import Iterator

import pytest

from funcinfer.sharding import Mesh
from tests.equivalence.families import family, layout_of, trace_of
from tests.equivalence.harness import ONE_RANK, TOLERANCE, distance, draw, run
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.small import DECODERS
from tests.launch import Processes, process_ranks

HERE = "tests.equivalence.test_four_processes"
ON_FOUR_RANKS = [name for name, layout in LAYOUTS.items() if layout.mesh.num_ranks == 4]
FAMILIES = ("qwen3_moe", "minimax_m2", "deepseek_v3", "glm_moe_dsa")
PINNED = {
    "data, tensor": (Mesh(dp=2, tp=2), {}),
    "experts over all": (Mesh(dp=2, tp=2), dict(expert_parallel=True)),
    "experts over all, exchanged": (Mesh(dp=2, tp=2), dict(expert_parallel=True, sp=True)),
    "experts on an axis of their own": (Mesh(dp=2, ep=2), {}),
    "prompts and cache dealt": (Mesh(pcp=2, dcp=2), {}),
    "cache dealt in runs": (Mesh(dcp=4), dict(interleave=2)),
}
LENGTHS = (13, 1, 8)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as four:
        yield four


def of_layout(name: str) -> float:
    """Runs in each process: how far its logits are from those of one rank."""
    layout, decoder = LAYOUTS[name], DECODERS["whole layers"]
    params = draw(decoder)
    found = run(decoder, params, layout, ranks=process_ranks(layout.mesh))
    return distance(found, run(decoder, params, ONE_RANK))


def of_family(name: str, case: str) -> float:
    """The same for a family on a pinned mesh."""
    mesh, options = PINNED[case]
    _, decoder, params = family(name)
    layout, trace = layout_of(name, mesh, **options), trace_of(LENGTHS)
    found = run(decoder, params, layout, trace, ranks=process_ranks(layout.mesh))
    return distance(found, run(decoder, params, ONE_RANK, trace))


def test_some_axes_are_in_other_than_mesh_order() -> None:
    def reversed_pair(axes: tuple[str, ...], order: tuple[str, ...]) -> bool:
        places = [order.index(a) for a in axes]
        return places != sorted(places)

    found = [
        name
        for name in ON_FOUR_RANKS
        for axis in LAYOUTS[name].prefill.values()
        if isinstance(axis, tuple) and reversed_pair(axis, LAYOUTS[name].mesh.names)
    ]
    assert found


@pytest.mark.parametrize("layout", ON_FOUR_RANKS)
def test_layers_are_the_same(layout: str, processes: Processes) -> None:
    assert max(processes.call(f"{HERE}:of_layout", layout)) <= TOLERANCE


@pytest.mark.parametrize("case", PINNED)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_the_same(name: str, case: str, processes: Processes) -> None:
    assert max(processes.call(f"{HERE}:of_family", name, case)) <= TOLERANCE
