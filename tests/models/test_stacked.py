"""A checkpoint with stacked experts loads as one with a tensor an expert: the same parameters."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import funcinfer
from funcinfer.tree import leaves_with_path

STYLES = {
    "qwen3_moe": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "minimax_m2": ("block_sparse_moe.", "w1", "w3", "w2"),
    "deepseek_v2": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v32": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe_lite": ("mlp.", "gate_proj", "up_proj", "down_proj"),
    "glm_moe_dsa": ("mlp.", "gate_proj", "up_proj", "down_proj"),
}
SETTINGS = {name: {"num_nextn_predict_layers": 0} for name in ("deepseek_v3", "glm4_moe")}


def stack(tensors: dict[str, torch.Tensor], style: tuple[str, str, str, str]) -> None:
    """Replace the experts of each layer by `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]."""
    block, *which = style
    pattern = re.compile(rf"(.*{re.escape(block)}experts)\.(\d+)\.(\w+)\.weight")
    found = {n: m for n in tensors if (m := pattern.fullmatch(n))}
    for prefix in {m[1] for m in found.values()}:
        count = 1 + max(int(m[2]) for m in found.values() if m[1] == prefix)
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{w}.weight") for e in range(count)])
            for w in which
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{prefix}.down_proj"] = down


@pytest.mark.parametrize("name", STYLES)
def test_both_spellings_give_the_same_parameters(
    name: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_folder(name, **SETTINGS.get(name, {}))
    with safe_open(folder / "model.safetensors", "pt") as f:
        tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    stack(tensors, STYLES[name])
    assert any(n.endswith("experts.gate_up_proj") for n in tensors)
    assert not any(re.search(r"experts\.\d", n) for n in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    apart, together = (
        leaves_with_path(funcinfer.load(of, dtype=torch.float32).params)
        for of in (folder, tmp_path)
    )
    for (path, a), (other, b) in zip(apart, together, strict=True):
        assert path == other and torch.equal(a, b), path
