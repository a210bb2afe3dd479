"""funcinfer where torch_npu is installed: with the stand-ins of CANN, and without any CANN.

Each case is a process of its own, because torch_npu changes torch when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import funcinfer

ROOT = Path(funcinfer.__file__).parent.parent
NO_TORCH_NPU = "import sys; sys.modules['torch_npu'] = None\n"


def run(source: str) -> subprocess.CompletedProcess[str]:
    """A script in a process without stand-ins, in the same environment."""
    env = {k: v for k, v in os.environ.items() if k != "SIM_CANN_FOLDER"}
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_funcinfer_imports_without_cann_and_loads_no_torch_npu():
    done = run("import funcinfer, sys; print('torch_npu' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


LOAD = "from funcinfer.layers.primitives.npu import load_torch_npu as load\nload()"
ASK = "import funcinfer, torch\nfuncinfer.load('.', dtype=torch.float32, device='npu')"
NO_CANN = ("can't be loaded", "libhccl.so", "CANN", "set_env.sh")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOAD, NO_CANN),
        (ASK, NO_CANN),
        (NO_TORCH_NPU + LOAD, ("not installed", "funcinfer[npu]")),
    ],
)
def test_what_is_missing_for_device_npu_is_named(source: str, said: tuple[str, ...]):
    done = run(source)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: ")
    assert all(word in last for word in said), last
