"""The table of `Rules.explain`: what each leaf costs a rank, and of what it holds copies."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from funcinfer.sharding.mesh import Axis, Mesh, names
from funcinfer.spec import ParamSpec, align_columns, is_spec
from funcinfer.tree import leaves_with_path

if TYPE_CHECKING:
    from funcinfer.sharding.rules import Rules

HEADER = ("leaf", "axes", "shape", "layout", "local shape", "copies", "bytes a rank")


def explain(rules: "Rules", specs: Any, mesh: Mesh) -> str:
    """The table as text, headed by the mesh and the rules in force, footed by the total and notes
    on padding.
    """
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    total, copied, notes = 0, 0, []
    for path, s in leaves_with_path(specs, is_leaf=is_spec):
        row, size, copies = _row(rules, path, s, mesh)
        pattern = re.sub(r"\b\d+\b", "*", path)
        merged.setdefault((pattern, row), []).append(path)
        total += size
        copied += size if copies > 1 else 0
        if s.true_shape and s.true_shape != s.shape:
            notes.append(f"{path} is padded from {s.true_shape} to {s.shape}")
    rows: list[tuple[str, ...]] = [HEADER]
    for (pattern, row), paths in merged.items():
        label = paths[0] if len(paths) == 1 else f"{pattern} x{len(paths)}"
        rows.append((label, *row))
    lines = [f"{mesh!r}: {mesh.num_ranks} ranks", _rule_line(rules), "", align_columns(rows), ""]
    lines.append(f"{total:,} bytes a rank, {copied:,} of them also held by another rank")
    lines += _rep_notes(rules, mesh) + notes
    return "\n".join(lines)


def _row(rules: "Rules", path: str, s: ParamSpec, mesh: Mesh) -> tuple[tuple[str, ...], int, int]:
    layout = rules.spec(*s.axes)
    local = mesh.local_shape(s.shape, layout, path)
    parts = mesh.size(layout.axes)
    copies = mesh.num_ranks // parts
    size = s.nbytes // parts
    return (
        (
            ", ".join(a or "-" for a in s.axes),
            _times(s.shape),
            ", ".join(_short(e) for e in layout),
            _times(local),
            str(copies),
            f"{size:,}",
        ),
        size,
        copies,
    )


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
