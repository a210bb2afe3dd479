"""From a Hugging Face folder to a Model."""

from collections.abc import Callable
from pathlib import Path

import torch

from funcinfer.checkpoint import load_params, load_ranks
from funcinfer.hf_config import read_config, read_generation_config
from funcinfer.models import registry
from funcinfer.serving.model import Model
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, Ranks, Rules, ThreadRanks, pad, presets
from funcinfer.spec import with_dtype


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    ranks: Callable[[Mesh], Ranks] = ThreadRanks,
    progress: bool = False,
) -> Model:
    """The model of a Hugging Face folder: config.json and safetensors, nothing else is read or run.

    `dtype` is that of weights, activations and caches; leaves declared wider stay wider. Without
    `rules` the axis names of `mesh` say which preset; `ranks` makes what runs the mesh: threads of
    this process by default, or processes (then only this one's slices are read). Errors name the
    file, field or tensor.
    """
    config = read_config(folder)
    family = registry.family_of(config)
    cfg = family.from_hf(config)
    mesh = mesh or Mesh()
    if rules is None:
        mesh, rules = presets.for_mesh(cfg.num_kv_heads, mesh)
    fns = build(family.decoder(cfg), rules)
    specs = pad(with_dtype(fns.specs, dtype), mesh, rules)
    rules.check(specs, mesh)
    runner, names = ranks(mesh), family.name_map(cfg)
    if len(runner.coords) == mesh.num_ranks:
        params = load_params(folder, specs, names, device=device, progress=progress)
    else:
        coords = runner.coords
        (params,) = load_ranks(
            folder, specs, names, mesh, rules, coords, device=device, progress=progress
        )
    generation = read_generation_config(folder)
    return Model(
        cfg=cfg,
        fns=fns,
        params=params,
        mesh=mesh,
        rules=rules,
        ranks=runner,
        stop_ids=generation.eos_ids,
        max_length=cfg.max_length,
    )
