"""What every test shares: thread counts, hypothesis profiles, reference models, the checkpoint."""

import os

# Ranks are threads in many tests. New threads take their size from this variable, which torch reads
# once, when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import oracles

torch.set_num_threads(1)

# Draws are the same in every run, and no test depends on the speed of the machine.
# HYPOTHESIS_PROFILE=search looks for new counterexamples.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

ROOT = Path(__file__).resolve().parent.parent


def _key(name: str, seed: int, overrides: dict[str, Any]) -> str:
    return repr((name, seed, sorted(overrides.items())))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., tuple[Any, Any]]:
    """`tiny_model(name, seed=0, **overrides) -> (config, model)`: built once, for reading only."""
    made: dict[str, tuple[Any, Any]] = {}

    def get(name: str, seed: int = 0, **overrides: Any) -> tuple[Any, Any]:
        key = _key(name, seed, overrides)
        if key not in made:
            made[key] = oracles.build(name, seed, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def tiny_folder(
    tiny_model: Callable[..., tuple[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`tiny_folder(name, seed=0, **overrides)`: the same model as a folder, for reading only."""
    made: dict[str, Path] = {}

    def get(name: str, seed: int = 0, **overrides: Any) -> Path:
        key = _key(name, seed, overrides)
        if key not in made:
            _, model = tiny_model(name, seed, **overrides)
            made[key] = oracles.save(model, tmp_path_factory.mktemp(name))
        return made[key]

    return get


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the SmolLM2-135M-Instruct checkpoint; `make smollm2` writes it."""
    folder = Path(os.environ.get("FUNCINFER_SMOLLM2", ROOT / ".cache" / "smollm2"))
    if not (folder / "config.json").is_file():
        pytest.fail(
            f"no SmolLM2 checkpoint in {folder}: write it with `make smollm2`, "
            "or let FUNCINFER_SMOLLM2 name its folder"
        )
    return folder
