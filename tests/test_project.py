"""The shape of the project itself: who may import whom, file sizes, the cost of an import, paths.

Every checker is a function of source text, so each is also shown a text that it must refuse.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "funcinfer"

# From left to right: a module imports from its own room and from rooms to the left of it. A module
# that no line names comes after `serving`.
ROOMS = (
    ("funcinfer.tree", "funcinfer.spec"),
    ("funcinfer.sharding",),
    ("funcinfer.checkpoint", "funcinfer.hf_config", "funcinfer.default"),
    ("funcinfer.layers.primitives",),
    ("funcinfer.kvcache",),
    ("funcinfer.layers",),
    ("funcinfer.models",),
    ("funcinfer.serving",),
    ("any other module",),
    ("funcinfer.plan", "funcinfer.parity"),
    ("funcinfer",),
    ("funcinfer.cli", "funcinfer.__main__"),
)
OTHER = ROOMS.index(("any other module",))

# A module of torch that one file alone may use.
OWNERS = {
    "torch.distributed": "funcinfer.sharding.comm_torch",
    "torch_npu": "funcinfer.layers.primitives.npu",
    "torch.utils._pytree": "funcinfer.tree",
    "torch.utils._cxx_pytree": "funcinfer.tree",
    "torch.utils._python_dispatch": "funcinfer.sharding.meta",
}
MAX_LINES = 400


def sources() -> dict[str, str]:
    """Module name -> source text, for every Python file of the package."""
    return {module_name(path): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, module: str) -> bool:
    """Whether `name` is `module` or something inside it."""
    return name == module or name.startswith(module + ".")


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of a chain of attributes on a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def imported(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """`(line, local name, full name)` of every import in the file, by statement or by call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                yield node.lineno, local, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called, first = dotted(node.func) or "", node.args[0]
            by_name = called.rsplit(".", 1)[-1] in ("import_module", "__import__")
            if by_name and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, "", first.value


def room(name: str) -> int:
    """The room of a module, or of a name imported from one."""
    # Whoever imports the primitives runs the package around them first.
    if name == "funcinfer.layers":
        name = "funcinfer.layers.primitives"
    if name == "funcinfer":
        return ROOMS.index(("funcinfer",))
    fitting = [
        (len(module), place)
        for place, modules in enumerate(ROOMS)
        for module in modules
        if module != "funcinfer" and within(name, module)
    ]
    return max(fitting)[1] if fitting else OTHER


def wrong_way(module: str, source: str) -> list[str]:
    """The imports of a module that are relative or go to a room on its right."""
    faults = []
    for line, _, name in imported(ast.parse(source)):
        if name.startswith("."):
            faults.append(f"{module}:{line} imports {name}: write the absolute name")
        elif within(name, "funcinfer") and room(name) > room(module):
            faults.append(
                f"{module}:{line} imports {name}, but {' / '.join(ROOMS[room(name)])} "
                f"is to the right of {' / '.join(ROOMS[room(module)])}"
            )
    return faults


def trespasses(module: str, source: str) -> list[str]:
    """The uses of a module of torch that belongs to another file."""
    tree = ast.parse(source)
    found = list(imported(tree))
    # `import a.b` binds `a`; every other form binds the full name.
    local = {short: short if name.startswith(f"{short}.") else name for _, short, name in found}
    uses = [(line, name) for line, _, name in found]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted(node)):
            head, _, rest = chain.partition(".")
            uses.append((node.lineno, f"{local.get(head, head)}.{rest}"))
    return sorted(
        {
            f"{module}:{line} uses {owned}: only {owner} may"
            for line, name in uses
            for owned, owner in OWNERS.items()
            if within(name, owned) and module != owner
        }
    )


def too_long(name: str, source: str) -> list[str]:
    lines = len(source.splitlines())
    return [f"{name} has {lines} lines; split it at {MAX_LINES}"] if lines > MAX_LINES else []


ABSOLUTE = re.compile(
    r"(?<![\w./:$})\]-])(?:~|/(?:home|root|tmp|opt|mnt|media|srv|Users|workspace|work))/"
)
UPWARDS = re.compile(r"(?<![\w./])(?:\.\./)+")


def outside_paths(name: str, text: str) -> list[str]:
    """The lines of a file that name a place outside of the project: absolute, or too far up."""
    depth = len(Path(name).parts) - 1
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        climbs = [match.group().count("../") for match in UPWARDS.finditer(line)]
        if ABSOLUTE.search(line) or any(climb > depth for climb in climbs):
            faults.append(f"{name}:{number} names a path outside of the project: {line.strip()}")
    return faults


def project_texts() -> dict[str, str]:
    """Name -> text of every file that is not made by a tool."""
    made = re.compile(
        r"\.git|\.venv.*|\.cache|\.hypothesis|\..*_cache|__pycache__|build|dist|.*\.egg-info"
    )
    texts = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not made.fullmatch(name)]
        for path in (Path(folder) / name for name in files):
            try:
                texts[path.relative_to(ROOT).as_posix()] = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
    return texts


def expect_none(check: Callable[[str, str], list[str]], texts: dict[str, str]) -> None:
    faults = [fault for item in texts.items() for fault in check(*item)]
    assert not faults, "\n".join(faults)


def test_modules_import_leftwards_only():
    expect_none(wrong_way, sources())


def test_torch_internals_have_one_owner_each():
    expect_none(trespasses, sources())


def test_files_of_the_package_are_short():
    expect_none(too_long, sources())


def test_no_file_names_a_path_outside_of_the_project():
    texts = project_texts()
    assert {"pyproject.toml", "Makefile", "tests/test_project.py", ".ci/run"} <= set(texts)
    expect_none(outside_paths, texts)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("funcinfer.spec", "import funcinfer.sharding.mesh"),
        ("funcinfer.tree", "from funcinfer import sharding"),
        ("funcinfer.sharding.mesh", "from funcinfer import ParamSpec"),
        ("funcinfer.sharding.mesh", "import funcinfer"),
        ("funcinfer.layers.primitives.reference", "from funcinfer.layers.norm import rms_norm"),
        ("funcinfer.layers.primitives", "def f():\n    from funcinfer.kvcache import paged"),
        ("funcinfer.layers", "from funcinfer.layers.attention import attention"),
        ("funcinfer.kvcache.paged", "from funcinfer.layers import norm"),
        ("funcinfer.layers.norm", "import importlib\nimportlib.import_module('funcinfer.models')"),
        ("funcinfer.models.llama", "from funcinfer.serving.steps import build"),
        ("funcinfer.serving.engine", "from funcinfer.load import load"),
        ("funcinfer.parity", "from funcinfer.cli import main"),
        ("funcinfer", "from funcinfer.cli import main"),
        ("funcinfer.sharding.rules", "from .mesh import Mesh"),
    ],
)
def test_an_import_to_the_right_is_found(module, source):
    assert len(wrong_way(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("funcinfer.spec", "from funcinfer.tree import map_with_path\nimport torch"),
        ("funcinfer.kvcache.paged", "from funcinfer.layers.primitives import paged_attention"),
        ("funcinfer.kvcache.paged", "from funcinfer.layers import primitives"),
        ("funcinfer.layers.mla", "from funcinfer.layers.norm import rms_norm"),
        ("funcinfer.layers.attention", "from funcinfer.kvcache.paged import PagedKV"),
        ("funcinfer.load", "from funcinfer.serving.engine import Engine"),
        ("funcinfer", "from funcinfer.load import load\nfrom funcinfer.parity import compare"),
        ("funcinfer.cli", "import funcinfer\nfrom funcinfer.plan import plan"),
    ],
)
def test_an_import_to_the_left_is_allowed(module, source):
    assert wrong_way(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch\ndef f():\n    return torch.distributed.get_rank()",
        "import torch as t\nt.distributed.barrier()",
        "import torch_npu",
        "import importlib\nimportlib.import_module('torch_npu')",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as pytree",
        "import torch\ntorch.utils._pytree.tree_map(f, x)",
    ],
)
def test_a_use_of_somebody_elses_module_is_found(source):
    assert trespasses("funcinfer.layers.norm", source)


@pytest.mark.parametrize(("name", "owner"), OWNERS.items())
def test_an_owner_may_use_its_module(name, owner):
    assert trespasses(owner, f"import {name}\n{name}.f()") == []


def test_a_long_file_is_found():
    assert too_long("m", "x = 1\n" * MAX_LINES) == []
    assert too_long("m", "x = 1\n" * (MAX_LINES + 1)) == ["m has 401 lines; split it at 400"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.py", "open('{}home/me/x')"),
        ("docs/a.md", "see {}tmp/log"),
        ("a.py", "'~{}models'"),
        ("a.md", "[notes](..{}notes.md)"),
        ("docs/a.md", "[notes](..{}../notes.md)"),
    ],
)
def test_a_path_outside_is_found(name, line):
    assert len(outside_paths(name, line.format("/"))) == 1


def test_a_path_inside_is_allowed():
    inside = "a{}tmp/b 1{}work/2".replace("{}", "/")
    text = f"[map](../README.md)\n#!/usr/bin/env bash\n.cache/smollm2 and/or {inside}"
    assert outside_paths("docs/a.md", text) == []


IMPORT_SCRIPT = """
import json, sys, threading
import torch
def state():
    return [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
            torch.random.get_rng_state().sum().item(), torch.cuda.is_initialized(),
            threading.active_count()]
before = state()
import funcinfer
print(json.dumps({"modules": list(sys.modules), "same": before == state()}))
"""


def test_importing_funcinfer_loads_and_changes_nothing_else():
    """In a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    heavy = {"transformers", "tokenizers", "jinja2", "matplotlib", "torch_npu", "funcinfer.cli"}
    assert heavy.isdisjoint(found["modules"])
    assert found["same"], "importing funcinfer changed torch's global state"
