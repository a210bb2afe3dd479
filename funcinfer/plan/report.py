"""A plan as text for people, and as plain data for programs."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from funcinfer.plan.floor import seconds_of
from funcinfer.plan.hardware import Hardware
from funcinfer.plan.kernels import kernel_data, kernel_lines
from funcinfer.plan.memory import Held
from funcinfer.plan.planning import Phase, Plan
from funcinfer.sharding import Axis, Rules, names
from funcinfer.spec import align_columns

UNITS = {
    "memory": "B",
    "memory_bandwidth": "B/s",
    "flops": "FLOP/s",
    "link_bandwidth": "B/s",
    "domain": "devices",
    "network_bandwidth": "B/s",
    "latency": "s",
}


def text(plan: Plan) -> str:
    """The plan as text."""
    mesh, memory, setting = plan.preset.mesh, plan.memory, plan.setting
    lines = [
        f"{plan.subject.name} on {mesh!r}: {mesh.num_ranks} ranks,"
        f" {str(setting.dtype).removeprefix('torch.')}, {setting.hardware.name}",
        *(f"note: {note}" for note in plan.subject.notes),
        *_rule_lines(plan.preset.prefill, plan.preset.decode),
        "",
        "memory of a rank" + (f" of stage {plan.fullest}" if len(plan.memories) > 1 else ""),
        f"  parameters       {amount(memory.param_bytes, 'B')}, of which"
        f" {amount(memory.copied_bytes, 'B')} other ranks hold too",
        *_copied_lines(plan),
        f"  cache            {amount(memory.token_bytes, 'B')} a token of a request"
        + (f", in {plan.cache_copies} copies" if plan.cache_copies > 1 else ""),
        f"  {_fit_line(plan)}",
        "",
    ]
    for phase in (plan.prefill, plan.decode):
        lines += [*_phase_lines(phase, plan), ""]
    return "\n".join([*lines, *kernel_lines(plan), *_figure_lines(setting.hardware)])


def data(plan: Plan) -> dict[str, Any]:
    """The plan as JSON-like data: bytes, operations and seconds."""
    mesh, memory, setting = plan.preset.mesh, plan.memory, plan.setting
    return {
        "model": plan.subject.name,
        "notes": list(plan.subject.notes),
        "mesh": dict(mesh.axes),
        "ranks": mesh.num_ranks,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "hardware": hardware_data(setting.hardware),
        "rules": {p.name: rules_data(p.rules) for p in (plan.prefill, plan.decode)},
        "memory": {
            "parameters": memory.param_bytes,
            "parameters_copied": memory.copied_bytes,
            "cache_per_token": memory.token_bytes,
            "cache_copies": plan.cache_copies,
            "used": plan.used_bytes,
            "usable": setting.memory,
            "fits": plan.fits,
            "largest_context": plan.largest_context,
            "copied": [
                {"leaf": path, "bytes": nbytes, "copies": copies}
                for path, nbytes, copies in copied(plan)
            ],
        },
        "prefill": phase_data(plan.prefill, plan),
        "decode": phase_data(plan.decode, plan),
        "kernels": kernel_data(plan),
    }


def phase_data(phase: Phase, plan: Plan) -> dict[str, Any]:
    """One phase as JSON-like data."""
    cost, floor = phase.cost, phase.floor
    return {
        "requests": phase.requests,
        "requests_per_group": phase.load.requests,
        "new_tokens": phase.load.new,
        "context": phase.load.context,
        "flops": cost.flops,
        "bytes": {
            "weights": cost.weight_bytes,
            "cache_read": cost.cache_read_bytes,
            "cache_written": cost.cache_written_bytes,
            "activations": cost.activation_bytes,
        },
        "seconds": {
            "compute": floor.compute,
            "memory": floor.memory,
            "communication": floor.communication,
            "floor": floor.seconds,
        },
        "latency_counted": floor.latency_known,
        "tokens_per_second_per_device": phase.tokens_per_second,
        "collectives": [
            {
                "op": sent.collective.op,
                "call": sent.collective.call,
                "axes": list(sent.collective.axes),
                "ranks": plan.preset.mesh.size(sent.collective.axes),
                "shape": list(sent.collective.shape),
                "dtype": str(sent.collective.dtype).removeprefix("torch."),
                "bytes": sent.nbytes,
                "count": sent.count,
                "seconds": seconds_of(sent, plan.preset.mesh, plan.setting.hardware),
            }
            for sent in cost.sent
        ],
    }


def hardware_data(hardware: Hardware) -> dict[str, Any]:
    """The figures with their sources; null where none is published."""
    figures = {f.name: getattr(hardware, f.name) for f in dataclasses.fields(hardware)}
    name = figures.pop("name")
    return {"name": name} | {
        key: None if figure is None else {"value": figure.value, "source": figure.source}
        for key, figure in figures.items()
    }


def rules_data(rules: Rules) -> dict[str, list[str]]:
    """The logical axes that are sharded, and the mesh axes that they lie over."""
    return {name: list(names(axis)) for name, axis in rules.items() if names(axis)}


def copied(plan: Plan) -> list[tuple[str, int, int]]:
    """(leaf, bytes on a rank, copies) of what ranks hold copies of, the largest first; leaves that
    are alike in one row.
    """
    merged: dict[tuple[str, int, int], list[Held]] = {}
    for h in plan.memory.params:
        if h.copies > 1:
            key = (re.sub(r"\b\d+\b", "*", h.path), h.nbytes, h.copies)
            merged.setdefault(key, []).append(h)
    rows = []
    for (_, nbytes, copies), alike in merged.items():
        count = sum(h.count for h in alike)
        label = alike[0].path + (f" x{count}" if count > 1 else "")
        rows.append((label, count * nbytes, copies))
    return sorted(rows, key=lambda row: -row[1])


def amount(value: float, unit: str) -> str:
    """A number with a decimal prefix: `amount(1.5e9, "B") == "1.5 GB"`.

    >>> amount(0, "B"), amount(999, "B"), amount(123456, "FLOP")
    ('0 B', '999 B', '123 kFLOP')
    """
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def seconds(value: float | None) -> str:
    """Milliseconds, or what stands for a time that is not known."""
    return "unknown" if value is None else f"{1000 * value:.3g} ms"


def _rule_lines(prefill: Rules, decode: Rules) -> list[str]:
    def show(rules: Rules) -> str:
        shown = [f"{name}={_axis(axis)}" for name, axis in rules.items() if names(axis)]
        return ", ".join(shown) or "nothing sharded"

    if prefill == decode:
        return [f"rules: {show(prefill)}"]
    return [f"rules of prefill: {show(prefill)}", f"rules of decode:  {show(decode)}"]


def _axis(axis: Axis) -> str:
    return "*".join(names(axis)) or "-"


def _copied_lines(plan: Plan) -> list[str]:
    rows = copied(plan)
    lines = [f"    {path}: {amount(nbytes, 'B')} x {copies}" for path, nbytes, copies in rows[:4]]
    rest = sum(nbytes for _, nbytes, _ in rows[4:])
    return lines + ([f"    {len(rows) - 4} more: {amount(rest, 'B')}"] if rest else [])


def _fit_line(plan: Plan) -> str:
    load, usable = plan.decode.load, plan.setting.memory
    used = f"in use           {amount(plan.used_bytes, 'B')} with {load.requests} requests a group"
    used += f" of {load.context:,} tokens"
    if usable is None:
        return f"{used}; the device's memory is not known"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{used}: {verdict} in {amount(usable, 'B')}; largest context {plan.largest_context:,}"
        f" tokens (the model's own: {plan.subject.cfg.max_length:,})"
    )


def _phase_lines(phase: Phase, plan: Plan) -> list[str]:
    cost, floor, load = phase.cost, phase.floor, phase.load
    what = f"{load.new:,} tokens each" if load.new > 1 else f"context {load.context:,}"
    moved = (
        f"weights {amount(cost.weight_bytes, 'B')}, cache read"
        f" {amount(cost.cache_read_bytes, 'B')} and written"
        f" {amount(cost.cache_written_bytes, 'B')},"
        f" activations {amount(cost.activation_bytes, 'B')}"
    )
    lines = [
        f"{phase.name}: {phase.requests} requests, {what}",
        f"  compute        {seconds(floor.compute):>10}  {amount(cost.flops, 'FLOP')}",
        f"  memory         {seconds(floor.memory):>10}  {moved}",
        f"  communication  {seconds(floor.communication):>10}"
        f"  {sum(s.count for s in cost.sent)} collectives"
        + ("" if floor.latency_known else "; their latency is not published, not counted"),
        f"  floor          {seconds(floor.seconds):>10}"
        f"  {phase.tokens_per_second:,.4g} tokens/s a device"
        + (f" (without {' and '.join(floor.missing)}: no figure)" if floor.missing else ""),
    ]
    return lines + ["    " + row for row in _collective_rows(phase, plan)]


def _collective_rows(phase: Phase, plan: Plan) -> Sequence[str]:
    if not phase.cost.sent:
        return ["no collectives"]
    mesh, hardware = plan.preset.mesh, plan.setting.hardware
    rows: list[tuple[str, ...]] = [
        ("count", "collective", "axes", "ranks", "shape", "dtype", "bytes", "each")
    ]
    for sent in phase.cost.sent:
        c = sent.collective
        rows.append(
            (
                str(sent.count),
                c.call,
                "*".join(c.axes),
                str(mesh.size(c.axes)),
                "x".join(map(str, c.shape)),
                str(c.dtype).removeprefix("torch."),
                amount(sent.nbytes, "B"),
                seconds(seconds_of(sent, mesh, hardware)),
            )
        )
    return align_columns(rows).splitlines()


def _figure_lines(hardware: Hardware) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for f in dataclasses.fields(hardware):
        figure = getattr(hardware, f.name)
        if f.name == "name":
            continue
        if figure is None:
            rows.append((f.name, "-", "not published"))
        else:
            rows.append((f.name, amount(figure.value, UNITS[f.name]), figure.source))
    return [
        f"figures of {hardware.name}",
        *("  " + row for row in align_columns(rows).splitlines()),
    ]
