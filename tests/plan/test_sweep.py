"""The fronts of a sweep, against every plan made one by one and compared with every other."""

import itertools
from typing import Any

import pytest

from funcinfer.plan import Setting, Subject, find, plan, sweep, sweep_data, sweep_text
from funcinfer.plan.kinds import cut
from funcinfer.plan.meshes import Candidate, candidates, factors, without_data_axes
from funcinfer.plan.planning import traces_of
from funcinfer.plan.sweep import Point, doubled, front
from funcinfer.plan.trace import Load
from funcinfer.sharding import Mesh, presets, token_multiple
from funcinfer.sharding import presets_parallel as parallel
from tests.equivalence import tiny
from tests.plan import configs


def subject_of(cfg: Any) -> Subject:
    decoder = tiny.decoder(cfg)
    return Subject("tiny", cfg, decoder, cut(decoder))


TINY = subject_of(tiny.latent(3, experts=True))
# Of two devices, parameters take 34 to 63 kB each; a page of 8 tokens 360 or 720 bytes.
SMALL = find("h200").replace(memory=52e3, latency=1e-6)
SETTING = Setting(SMALL, page_size=8, utilisation=1.0)


def test_the_fronts_are_those_of_all_plans() -> None:
    context, prompt = 16, 24
    found = sweep(TINY, 2, SETTING, context=context, prompt=prompt)
    points: dict[str, list[tuple[str, int, float, float]]] = {"prefill": [], "decode": []}
    illegal = 0
    for candidate in candidates(TINY, 2):
        mesh, _, decode = candidate.preset
        groups = mesh.size(decode["requests"])
        batch = token_multiple(decode, mesh) * groups
        fits = []
        while True:
            try:
                made = plan(
                    TINY,
                    candidate.preset,
                    SETTING,
                    batch=batch,
                    context=context,
                    prompts=groups,
                    prompt=prompt,
                )
            except ValueError:
                illegal += 1
                break
            if not made.fits:
                break
            fits.append(made)
            batch *= 2
        if not fits:
            continue
        points["prefill"].append(row(candidate, fits[0].prefill))
        points["decode"] += [row(candidate, made.decode) for made in fits]
    assert (found.candidates, found.illegal) == (len(list(candidates(TINY, 2))), illegal)
    for phase, all_points in points.items():
        assert all_points
        best = {
            (seconds, rate)
            for _, _, seconds, rate in all_points
            if not any(
                s <= seconds and r >= rate and (s, r) != (seconds, rate)
                for _, _, s, r in all_points
            )
        }
        points_of = getattr(found, phase)
        for of, position in (("seconds", 0), ("tokens_per_second", 1)):
            wanted = sorted(point[position] for point in best)
            assert [getattr(p, of) for p in points_of] == pytest.approx(wanted)
        assert {(p.candidate.label, p.requests) for p in points_of} <= {p[:2] for p in all_points}


def row(candidate: Candidate, phase: Any) -> tuple[str, int, float, float]:
    return candidate.label, phase.requests, phase.floor.seconds, phase.tokens_per_second


def test_what_does_not_fit_is_counted_and_left_out() -> None:
    tight = Setting(SMALL.replace(memory=36e3), page_size=8, utilisation=1.0)
    found = sweep(TINY, 2, tight, context=16, prompt=24)
    assert 0 < found.too_large < found.candidates - found.illegal
    nothing = sweep(TINY, 4, Setting(SMALL.replace(memory=1)), context=16, prompt=24)
    assert nothing.too_large == nothing.candidates - nothing.illegal
    assert (nothing.decode, nothing.prefill) == ([], [])


def test_front() -> None:
    def point(seconds: float, rate: float) -> Point:
        return Point(Candidate(presets.for_mesh(None, Mesh())), 1, seconds, rate)

    points = [point(*p) for p in itertools.product((1.0, 2.0, 3.0), (5.0, 4.0))]
    points += [point(2.5, 9.0), point(0.5, 1.0), point(4.0, 9.0)]
    assert [(p.seconds, p.tokens_per_second) for p in front(points)] == [
        (0.5, 1.0),
        (1.0, 5.0),
        (2.5, 9.0),
    ]


@pytest.mark.parametrize(("product", "count"), [(1, 3), (7, 2), (12, 3), (16, 4)])
def test_factors(product: int, count: int) -> None:
    numbers = range(1, product + 1)
    wanted = [f for f in itertools.product(numbers, repeat=count) if _prod(f) == product]
    assert sorted(factors(product, count)) == wanted


def _prod(numbers: tuple[int, ...]) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


def test_batches_double() -> None:
    assert list(doubled(1, 9)) == [1, 2, 4, 8]
    assert list(doubled(5, 4)) == []


PRESETS = {
    "dp alone": parallel.tensor_parallelism(None, dp=6, tp=1),
    "experts cut": parallel.tensor_parallelism(None, dp=3, tp=4),
    "experts dealt": parallel.expert_parallelism(None, dp=4, tp=2, sp=True),
    "gathered": parallel.expert_parallelism(None, dp=4, tp=2),
    "fine-grained": parallel.fine_grained_tensor_parallelism(dp=4, group=2, dims=["mlp"]),
    "own axis": parallel.data_parallel_attention(dp=3, ep=2),
}


@pytest.mark.parametrize("name", PRESETS)
def test_axes_that_only_deal_requests_change_no_trace(name: str) -> None:
    mesh, _, rules = PRESETS[name]
    less = without_data_axes(mesh, rules)
    load, setting = Load(4, 1, 16), Setting(SMALL, page_size=8)
    (small,), (large,) = (traces_of(TINY, m, rules, load, setting) for m in (less, mesh))
    assert (small.sections, small.shape) == (large.sections, large.shape)
    sizes = {"dp alone": 1, "experts cut": 4, "own axis": 2}
    assert less.num_ranks == sizes.get(name, mesh.num_ranks)


def test_candidates_are_the_meshes_of_so_many_devices() -> None:
    labels = [c.label for c in candidates(TINY, 2)]
    assert sorted(labels) == sorted(
        [f"{axis}=2{ep}" for axis in ("dp", "pcp") for ep in ("", " ep")]
        + [
            f"{axis}=2{sp}{ep}"
            for axis in ("tp", "dcp")
            for sp in ("", " sp")
            for ep in ("", " ep")
        ]
    )
    dense = subject_of(tiny.grouped(2))
    assert {c.options for c in candidates(dense, 4)} == {(), ("sp",)}
    # 3 KV heads and 2 or 4 ranks of tp do not divide one another.
    odd = Subject("odd", tiny.grouped(num_kv_heads=4), dense.decoder, dense.cut)
    assert all(c.preset.mesh.num_ranks == 4 for c in candidates(odd, 4))
    assert [c.label for c in candidates(TINY, 1)] == ["one device"]


def test_a_sweep_needs_devices() -> None:
    with pytest.raises(ValueError, match="sweep over 0 devices"):
        sweep(TINY, 0, SETTING, context=16, prompt=24)


def test_deepseek_on_many_devices() -> None:
    """The whole of it: its weights fit on 16 devices of 144 GB where experts are dealt over all."""
    subject = Subject.from_config(configs.DEEPSEEK_V3)
    found = sweep(subject, 16, Setting(find("910c")), context=4096, prompt=1024)
    assert (found.decode, found.prefill) == ([], [])  # 1.3 TB of weights on 16 x 64 GB
    assert found.too_large == found.candidates - found.illegal > 50
    found = sweep(subject, 16, Setting(find("950dt")), context=4096, prompt=1024)
    assert found.too_large > 20
    assert len(found.decode) > 5
    seconds = [p.seconds for p in found.decode]
    rates = [p.tokens_per_second for p in found.decode]
    assert (seconds, rates) == (sorted(seconds), sorted(rates))
    assert all(p.candidate.preset.mesh.num_ranks == 16 for p in found.decode)
    text = sweep_text(found, subject.name, Setting(find("950dt")))
    assert f"{found.candidates} presets" in text
    assert found.decode[0].candidate.label in text
    data = sweep_data(found, subject.name)
    assert len(data["decode"]) == len(found.decode)
    assert data["decode"][0]["mesh"] == dict(found.decode[0].candidate.preset.mesh.axes)
