"""The simulated NPU of these tests; `make test-npu` runs them.

Only the process that `make test-npu` starts has stand-ins for CANN, whose folder SIM_CANN_FOLDER
names. In any other one, the modules that need torch_npu are not collected.
"""

import contextlib
import ctypes
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

# These check calls against a table of schemas, and need no torch_npu.
WITHOUT_TORCH_NPU = ("test_schema",)
FOLDER = os.environ.get("SIM_CANN_FOLDER")

if FOLDER is None:
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("*.py")
        if not path.stem.startswith((*WITHOUT_TORCH_NPU, "conftest"))
    ]
else:
    from tests.npu.stubs import preload

    KERNELS = preload(Path(FOLDER))
    KERNELS.sim_launched.restype = ctypes.c_char_p
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import torch
        import torch_npu  # noqa: F401

        torch.empty(1, device="npu")  # what it warns of at its first use

    from tests.npu import emulators  # noqa: F401
    from tests.npu.simulator import Simulation


@pytest.fixture
def npu() -> "Iterator[Simulation]":
    """The simulation, entered; `npu.calls` names the ops of torch_npu that ran."""
    with Simulation() as simulation:
        yield simulation


@pytest.fixture
def launched() -> "Iterator[list[str]]":
    """A function that gives the kernels launched since its last call."""
    KERNELS.sim_launched()
    yield lambda: KERNELS.sim_launched().decode().split()
