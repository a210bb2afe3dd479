"""Every mesh of so many devices that presets know, and which of them no other beats.

A point is a mesh with its rules and a batch. It is on the front of a phase where no other point has
a step as short and as many tokens a second and device. Only what fits into the devices' memory is
looked at. One trace serves all batches, and all sizes of axes that only deal requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from funcinfer.kvcache.layout import pages_needed
from funcinfer.plan.cost import cost_of
from funcinfer.plan.floor import floor_of
from funcinfer.plan.memory import Memory
from funcinfer.plan.meshes import Candidate, candidates, without_data_axes
from funcinfer.plan.planning import Setting, Subject, check, memories_of, traces_of
from funcinfer.plan.report import seconds
from funcinfer.plan.trace import Load, Trace
from funcinfer.sharding import Mesh, Rules, token_multiple
from funcinfer.spec import align_columns

# Of a requests group.
MOST_REQUESTS = 4096


@dataclass(frozen=True)
class Point:
    """A step: requests over the whole mesh, seconds, tokens a second and device."""

    candidate: Candidate
    requests: int
    seconds: float
    tokens_per_second: float


@dataclass
class Sweep:
    """The fronts of both phases, shortest step first; how many candidates there were, how many of
    them are not legal for the model and how many do not fit.
    """

    num_devices: int
    context: int
    prompt: int
    candidates: int = 0
    illegal: int = 0
    too_large: int = 0
    prefill: list[Point] = field(default_factory=list)
    decode: list[Point] = field(default_factory=list)


def sweep(
    subject: Subject, num_devices: int, setting: Setting, *, context: int, prompt: int
) -> Sweep:
    """All meshes of `num_devices`: decode with a context of `context` tokens in batches that double
    until they do not fit, prefill of one prompt of `prompt` tokens a requests group.

    ValueError for fewer than one device.
    """
    if num_devices < 1:
        raise ValueError(f"a sweep over {num_devices} devices: give at least 1")
    found = Sweep(num_devices, context, prompt)
    tracer = _Tracer(subject, setting)
    for candidate in candidates(subject, num_devices):
        found.candidates += 1
        mesh, prefill, decode = candidate.preset
        try:
            check(subject, candidate.preset, setting)
        except ValueError:
            found.illegal += 1
            continue
        (memory,) = memories_of(subject, mesh, decode, setting)
        most = most_requests(memory, setting, context)
        if not most or not most_requests(memory, setting, prompt):
            found.too_large += 1
            continue
        trace = tracer.get(mesh, prefill, Load(1, prompt, prompt))
        found.prefill.append(_point(candidate, trace, memory, setting, 1))
        first = min(token_multiple(decode, mesh), most)
        trace = tracer.get(mesh, decode, Load(first, 1, context))
        for requests in doubled(first, most):
            found.decode.append(_point(candidate, trace, memory, setting, requests))
    found.prefill, found.decode = front(found.prefill), front(found.decode)
    return found


class _Tracer:
    """Traces by rules, load and those sizes of the mesh that they depend on."""

    def __init__(self, subject: Subject, setting: Setting) -> None:
        self._subject, self._setting = subject, setting
        self._made: dict[tuple[Mesh, Rules, Load], Trace] = {}

    def get(self, mesh: Mesh, rules: Rules, load: Load) -> Trace:
        key = (without_data_axes(mesh, rules), rules, load)
        if key not in self._made:
            (self._made[key],) = traces_of(self._subject, *key, self._setting)
        return self._made[key]


def _point(
    candidate: Candidate, trace: Trace, memory: Memory, setting: Setting, requests: int
) -> Point:
    mesh = candidate.preset.mesh
    floor = floor_of([cost_of(trace, memory, requests=requests)], mesh, setting.hardware)
    everybody = requests * mesh.size(trace.rules["requests"])
    rate = everybody * trace.load.new / floor.seconds / mesh.num_ranks
    return Point(candidate, everybody, floor.seconds, rate)


def most_requests(memory: Memory, setting: Setting, context: int) -> int:
    """The most requests of a group that fit with `context` tokens each, up to MOST_REQUESTS."""
    if setting.memory is None or not memory.page:
        return MOST_REQUESTS
    pages = int(setting.memory - memory.param_bytes) // memory.page_bytes - 1
    return max(0, min(pages // pages_needed(context, memory.page_size), MOST_REQUESTS))


def doubled(first: int, most: int) -> Iterator[int]:
    """first, 2 first, 4 first, ... up to `most`.

    >>> list(doubled(3, 20))
    [3, 6, 12]
    """
    while first <= most:
        yield first
        first *= 2


def front(points: list[Point]) -> list[Point]:
    """Those that no other point equals or beats in both, the shortest step first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, -p.tokens_per_second)):
        if not best or point.tokens_per_second > best[-1].tokens_per_second:
            best.append(point)
    return best


def sweep_text(found: Sweep, name: str, setting: Setting) -> str:
    """A sweep as text."""
    lines = [
        f"{name} on {found.num_devices:,} devices, {setting.hardware.name}: {found.candidates}"
        f" presets, {found.illegal} not legal for the model, {found.too_large} do not fit",
    ]
    if missing := [n for n in setting.hardware.unknown if n != "latency"]:
        lines.append(f"note: not published, so not counted: {', '.join(missing)}")
    for phase, points, load in (
        ("decode", found.decode, f"context {found.context:,}"),
        ("prefill", found.prefill, f"prompts of {found.prompt:,}"),
    ):
        lines += ["", f"{phase}, {load}: what no other preset beats"]
        rows: list[tuple[str, ...]] = [("step", "tokens/s a device", "requests", "preset")]
        rows += [
            (
                seconds(p.seconds),
                f"{p.tokens_per_second:,.4g}",
                f"{p.requests:,}",
                p.candidate.label,
            )
            for p in points
        ]
        lines += ["  " + row for row in align_columns(rows).splitlines()]
    return "\n".join(lines)


def sweep_data(found: Sweep, name: str) -> dict[str, Any]:
    """A sweep as JSON-like data."""

    def points(of: list[Point]) -> list[dict[str, Any]]:
        return [
            {
                "mesh": dict(p.candidate.preset.mesh.axes),
                "options": list(p.candidate.options),
                "requests": p.requests,
                "seconds": p.seconds,
                "tokens_per_second_per_device": p.tokens_per_second,
            }
            for p in of
        ]

    return {
        "model": name,
        "devices": found.num_devices,
        "context": found.context,
        "prompt": found.prompt,
        "candidates": found.candidates,
        "illegal": found.illegal,
        "too_large": found.too_large,
        "decode": points(found.decode),
        "prefill": points(found.prefill),
    }
