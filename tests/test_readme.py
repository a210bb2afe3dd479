"""Every Python block of the README runs, in order, with `folder` a tiny checkpoint."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_python_blocks_run(tiny_folder: Callable[..., Path]) -> None:
    deepseek = tiny_folder("deepseek_v3", num_nextn_predict_layers=0)
    namespace: dict[str, Any] = {"folder": tiny_folder("llama"), "deepseek_folder": deepseek}
    assert len(blocks()) >= 4
    for number, block in enumerate(blocks()):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    assert namespace["next_token"].shape == (1,)
    assert all(0 < len(tokens) <= 8 for tokens in namespace["tokens"])
    assert namespace["logits_BTV"].shape[:2] == (1, 5)
    assert set(namespace["variant"].params["layers"][1]["attn"]) == {"gate_up", "down"}


def test_the_first_example_needs_its_collective() -> None:
    without = blocks()[0].replace('psum(y_TD, rules["mlp"])', "y_TD")
    assert without != blocks()[0]
    with pytest.raises(ValueError, match=r"ranks 0 .*differ, by up to"):
        exec(compile(without, "README.md without psum", "exec"), {})
