"""funcinfer where CANN or torch_npu is missing: it can be imported, and says what device npu needs.

Each case is a process of its own, without the stand-ins of CANN.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import funcinfer

ROOT = Path(funcinfer.__file__).parent.parent
ASK = """
import sys
import funcinfer, torch
assert sys.modules.get("torch_npu") is None
funcinfer.load(".", dtype=torch.float32, device="npu")
"""
NO_TORCH_NPU = "import sys; sys.modules['torch_npu'] = None"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", ("can't be loaded", "libhccl.so", "CANN", "set_env.sh")),
        (NO_TORCH_NPU, ("not installed", "funcinfer[npu]")),
    ],
    ids=("no CANN", "no torch_npu"),
)
def test_what_is_missing_for_device_npu_is_named(before: str, said: tuple[str, ...]):
    """And funcinfer itself can be imported, which doesn't import torch_npu."""
    env = {k: v for k, v in os.environ.items() if k != "SIM_CANN_FOLDER"}
    script = [sys.executable, "-c", before + ASK]
    done = subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: ")
    assert all(word in last for word in said), last
