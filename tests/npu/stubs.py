"""Stand-ins for the libraries of CANN, so that torch_npu can be imported without an NPU.

    python -m tests.npu.stubs FOLDER      # needs torch_npu (not imported), nm and a C compiler

The names come from the installed wheel: what its binaries link to, and what they look up by name at
run time. `runtime.c` and `kernels.c` define the few that do something; every other one is a
function that returns 0. A kernel that computes nothing leaves all of torch_npu's own C++ in place:
argument checks, shapes and dtypes of results, the conversion of arguments.
"""

import ctypes
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = (
    "libascendcl",
    "libhccl",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
)
KERNELS = ("libopapi", "libnnopbase", "libcust_opapi")

LINKED = re.compile(r"(acl|Hccl|Hcomm|rt[A-Z]|Msprof)\w+")
LOOKED_UP = re.compile(r"(acl(rt|mdl|op|sys)?|Hccl|Hcomm)[A-Z][A-Za-z0-9]+")
KERNEL = re.compile(r"aclnn[A-Z][A-Za-z0-9]+")
DESCRIPTOR = re.compile(r"aclCreate(\w*Array|Scalar|ScalarList|Tensor|TensorList)")
BASE = re.compile(r"acl[A-Z]\w+")
WORKSPACE = "GetWorkspaceSize"
DEFINED = re.compile(r"^(?!static)\w[\w ]*?[ *](\w+)\(.*\) *\{", re.MULTILINE)


def binaries() -> list[Path]:
    """The shared libraries of the installed wheel."""
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        raise SystemExit("torch_npu is not installed: make test-npu makes an environment with it")
    root = Path(found.origin).parent
    return [*sorted(root.glob("lib/*.so")), *sorted(root.glob("_C*.so"))]


def linked(library: Path) -> set[str]:
    """The undefined symbols of a library, without their versions."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines()}


def words(library: Path) -> set[str]:
    """The identifiers among the constant strings of a library."""
    found = re.findall(rb"\0([A-Za-z]\w{5,})(?=\0)", library.read_bytes())
    return {word.decode() for word in found}


def _zeros(names: Iterable[str]) -> list[str]:
    return [f"long {name}(void) {{ return 0; }}" for name in sorted(names)]


def runtime_source(links: set[str], strings: set[str]) -> str:
    """C of every library in `RUNTIME`."""
    source = (HERE / "runtime.c").read_text()
    names = {name for name in links if LINKED.fullmatch(name)}
    names |= {name for name in strings if LOOKED_UP.fullmatch(name)}
    return "\n".join([source, *_zeros(names - set(DEFINED.findall(source)))])


def kernels_source(strings: set[str]) -> str:
    """C of every library in `KERNELS`."""
    kernels = {name.removesuffix(WORKSPACE) for name in strings if KERNEL.fullmatch(name)}
    creators = {name for name in strings if DESCRIPTOR.fullmatch(name)}
    others = {name for name in strings if BASE.fullmatch(name)}
    others |= {name.replace("Create", "Destroy") for name in creators}
    return "\n".join(
        [
            (HERE / "kernels.c").read_text(),
            *_zeros(name + WORKSPACE for name in kernels),
            *(f'int {name}(void) {{ return launch("{name}"); }}' for name in sorted(kernels)),
            *(f"void *{name}(void) {{ return descriptor; }}" for name in sorted(creators)),
            *_zeros(others - creators),
        ]
    )


def generate(folder: Path) -> None:
    """Write and compile the stand-ins into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = binaries()
    links = set().union(*map(linked, libraries))
    strings = set().union(*(words(x) for x in libraries if x.name == "libtorch_npu.so"))
    for source, names in (
        (runtime_source(links, strings), RUNTIME),
        (kernels_source(strings), KERNELS),
    ):
        path = folder / f"{names[0]}.c"
        path.write_text(source)
        for name in names:
            compile_command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}.so"]
            subprocess.run(
                [*compile_command, "-o", str(folder / f"{name}.so"), str(path)], check=True
            )


def preload(folder: Path) -> ctypes.CDLL:
    """Load the stand-ins, for the loader to find by name; returns the one that notes launches."""
    handles = [
        ctypes.CDLL(str(folder / f"{name}.so"), mode=ctypes.RTLD_GLOBAL)
        for name in RUNTIME + KERNELS
    ]
    return handles[len(RUNTIME)]


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
