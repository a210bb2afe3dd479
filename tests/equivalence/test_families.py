"""Every family on meshes of up to 8 ranks: a pinned list, and a sample of all that axis names say.

Lengths are 1, primes and those around twice a prompt's parts; steps are chunks, whole prompts,
decode and verify rows; pages start as NaN.
"""

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcinfer.sharding import Mesh, presets
from tests.equivalence.families import FAMILIES, family, layout_of, trace_of
from tests.equivalence.harness import ONE_RANK, Layout, Logits, assert_same, run

PINNED = {
    "tensor, sequence": (Mesh(tp=2), dict(sp=True)),
    "data, tensor": (Mesh(dp=2, tp=2), {}),
    "experts over data and tensor": (Mesh(dp=2, tp=2), dict(expert_parallel=True)),
    "experts over data and tensor, exchanged": (
        Mesh(dp=2, tp=2),
        dict(expert_parallel=True, sp=True),
    ),
    "experts over three": (Mesh(dp=3), dict(expert_parallel=True)),
    "experts on an axis of their own": (Mesh(dp=2, ep=2), {}),
    "prompts and cache dealt": (Mesh(pcp=2, tp=2, dcp=2), {}),
    "data, cache dealt": (Mesh(dp=2, dcp=4), dict(interleave=2)),
    "stages": (Mesh(dp=2, pp=2, tp=2), {}),
}
LENGTHS = (13, 1, 8, 5)
AXES = ("dp", "ep", "pp", "pcp", "tp", "dcp")


@functools.cache
def one_rank(name: str, lengths: tuple[int, ...]) -> Logits:
    _, decoder, params = family(name)
    return run(decoder, params, ONE_RANK, trace_of(lengths))


@pytest.mark.parametrize("case", PINNED)
@pytest.mark.parametrize("name", FAMILIES)
def test_pinned_meshes(name: str, case: str) -> None:
    mesh, options = PINNED[case]
    _, decoder, params = family(name)
    layout = layout_of(name, mesh, **options)
    assert_same(run(decoder, params, layout, trace_of(LENGTHS)), one_rank(name, LENGTHS))


@pytest.mark.parametrize("tp", (2, 4, 8))
@pytest.mark.parametrize("name", ["minimax_m2", "qwen3_moe", "glm4_moe"])
def test_norms_of_queries_and_keys_with_copied_heads(name: str, tp: int) -> None:
    """2 KV heads on more ranks: norms over each head, and over the full width, counted once."""
    cfg, decoder, params = family(name, num_key_value_heads=2)
    layout = Layout(*presets.for_mesh(cfg.num_kv_heads, Mesh(tp=tp)))
    trace = trace_of(LENGTHS)
    assert_same(run(decoder, params, layout, trace), run(decoder, params, ONE_RANK, trace))


def meshes() -> st.SearchStrategy[Mesh]:
    """Meshes of 2 to 8 ranks over the axes that presets know, in their order."""
    sizes = st.lists(st.sampled_from([1, 1, 2, 2, 3, 4]), min_size=len(AXES), max_size=len(AXES))
    made = sizes.map(lambda s: Mesh(**{a: n for a, n in zip(AXES, s, strict=True) if n > 1}))
    return made.filter(lambda mesh: 2 <= mesh.num_ranks <= 8)


@settings(max_examples=70, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(FAMILIES),
    mesh=meshes(),
    sp=st.booleans(),
    expert_parallel=st.booleans(),
    interleave=st.sampled_from([1, 2]),
    lengths=st.sampled_from([LENGTHS, (3, 4, 5), (2, 7, 11), (16, 9)]),
)
def test_sampled_meshes(
    name: str,
    mesh: Mesh,
    sp: bool,
    expert_parallel: bool,
    interleave: int,
    lengths: tuple[int, ...],
) -> None:
    """Either there is no legal layout, said before anything runs, or the logits are the same."""
    _, decoder, params = family(name)
    options = dict(sp=sp, expert_parallel=expert_parallel)
    trace = trace_of(lengths)
    try:
        layout = layout_of(name, mesh, interleave=interleave, **options)
        refused = None
    except ValueError as error:
        layout, refused = None, str(error)
    if layout is None:
        assert "do not divide one another" in refused
        return
    try:
        found = run(decoder, params, layout, trace)
    except ValueError as error:
        assert "does not divide into" in str(error) or "must be a multiple of" in str(error)
        return
    assert_same(found, one_rank(name, lengths))
