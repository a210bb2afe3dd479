"""The table of `Rules.explain`: what each leaf costs a rank, and of what it holds copies."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from funcinfer.sharding.mesh import Axis, Mesh, P, join_axes, names
from funcinfer.spec import ParamSpec, align_columns, is_spec
from funcinfer.tree import leaves_with_path

if TYPE_CHECKING:
    from funcinfer.sharding.rules import Rules

HEADER = ("leaf", "axes", "shape", "layout", "local shape", "copies", "bytes a rank")


def explain(rules: "Rules", specs: Any, mesh: Mesh) -> str:
    """The table as text, headed by the mesh and the rules in force, footed by the total (of each
    pipeline stage) and notes on padding.
    """
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    notes = []
    pairs = leaves_with_path(specs, is_leaf=is_spec)
    for path, s in pairs:
        row = _row(rules, path, s, mesh)
        pattern = re.sub(r"\b\d+\b", "*", path)
        merged.setdefault((pattern, row), []).append(path)
        if s.true_shape and s.true_shape != s.shape:
            notes.append(f"{path} is padded from {s.true_shape} to {s.shape}")
    rows: list[tuple[str, ...]] = [HEADER]
    for (pattern, row), paths in merged.items():
        label = paths[0] if len(paths) == 1 else f"{pattern} x{len(paths)}"
        rows.append((label, *row))
    lines = [f"{mesh!r}: {mesh.num_ranks} ranks", _rule_line(rules), "", align_columns(rows), ""]
    lines += _totals([(rules.layout(s), s.nbytes) for _, s in pairs], mesh)
    lines += _rep_notes(rules, mesh) + notes
    return "\n".join(lines)


def _row(rules: "Rules", path: str, s: ParamSpec, mesh: Mesh) -> tuple[str, ...]:
    layout = rules.layout(s)
    local = mesh.local_shape(s.shape, layout, path)
    place = ", ".join(_short(e) for e in layout)
    if layout.on is not None:
        stages = layout.on.stages(mesh.size(layout.on.axis))
        place += f" on {_short(layout.on.axis)} {','.join(map(str, stages))}"
    return (
        ", ".join(a or "-" for a in s.axes),
        _times(s.shape),
        place,
        _times(local),
        str(mesh.copies(layout)),
        f"{s.nbytes // mesh.size(layout.axes):,}",
    )


def _totals(leaves: list[tuple[P, int]], mesh: Mesh) -> list[str]:
    """Bytes a rank, a line for each pipeline stage; `leaves` are layouts with their bytes."""
    staged = join_axes(*(layout.on.axis for layout, _ in leaves if layout.on is not None))
    lines = []
    for coord in mesh.coords():
        if any(i for axis, i in coord.items() if axis not in names(staged)):
            continue  # ranks that differ along other axes hold as much
        total, copied = 0, 0
        for layout, nbytes in leaves:
            if mesh.holds(layout, coord):
                size = nbytes // mesh.size(layout.axes)
                total += size
                copied += size if mesh.copies(layout) > 1 else 0
        at = [f"{axis}={coord[axis]}" for axis in names(staged)]
        where = f" where {', '.join(at)}" if at else ""
        lines.append(f"{total:,} bytes a rank{where}, {copied:,} of them also held by another rank")
    return lines


def _rule_line(rules: Mapping[str, Axis]) -> str:
    shown = [f"{name}={_short(axis)}" for name, axis in rules.items() if names(axis)]
    return "rules: " + (", ".join(shown) or "nothing sharded")


def _rep_notes(rules: Mapping[str, Axis], mesh: Mesh) -> list[str]:
    copies = [
        a
        for a in names(rules["heads"])
        if a not in names(rules["kv_heads"]) + names(rules["page_tokens"]) and mesh.size(a) > 1
    ]
    if not copies or not names(rules["kv_heads"]):
        return []
    return [f"each KV head is held {mesh.size(tuple(copies))} times, over {', '.join(copies)}"]


def _short(axis: Axis) -> str:
    return "*".join(names(axis)) or "-"


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
