"""From a Hugging Face folder to a Model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from funcinfer.checkpoint import load_params, load_ranks
from funcinfer.default import default_model
from funcinfer.hf_config import dtype_of, read_config, read_generation_config
from funcinfer.layers import primitives as ops
from funcinfer.models import registry
from funcinfer.serving.dry_run import dry_run
from funcinfer.serving.model import Model
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, Ranks, Rules, ThreadRanks, pad, presets
from funcinfer.spec import with_dtype


def load(
    folder: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    decode_rules: Rules | None = None,
    ranks: Callable[[Mesh], Ranks] = ThreadRanks,
    fractal: Sequence[str] = (),
    progress: bool = False,
) -> Model:
    """The model of a Hugging Face folder: config.json, generation_config.json and safetensors;
    nothing else is read, and nothing is run. Without a folder, the model that comes with the
    package: `funcinfer.default.default_model`.

    `dtype` is that of weights, activations and caches, by default the one that config.json names;
    leaves declared wider stay wider. Without
    `rules` the axis names of `mesh` say which preset, and its mesh is taken; `decode_rules` are
    those of decode, where they differ from `rules`. `ranks` makes what runs the mesh: threads of
    this process, or `lambda mesh: ProcessRanks(mesh, init_process(mesh))`, and then only this
    process's slices are read. `fractal` names leaves, as "wkv_a", whose matrices an NPU keeps in
    its own layout; elsewhere they stay as they are. `progress` shows a bar.

    FileNotFoundError and ValueError naming the file, field, tensor or rule that is wrong, before a
    tensor is made. ImportError for device npu where torch_npu or CANN is missing.

    >>> import json, tempfile
    >>> from funcinfer.checkpoint import save_params
    >>> from funcinfer.models import llama
    >>> from funcinfer.spec import init
    >>> config = {
    ...     "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 16,
    ...     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    ...     "intermediate_size": 24, "max_position_embeddings": 64, "eos_token_id": [2, 7],
    ... }
    >>> cfg, folder = llama.from_hf(config), tempfile.mkdtemp()
    >>> specs = build(llama.decoder(cfg)).specs
    >>> save_params(init(specs), specs, llama.name_map(cfg), folder)
    >>> _ = Path(folder, "config.json").write_text(json.dumps(config))
    >>> model = load(folder, dtype=torch.float32, mesh=Mesh(tp=2))
    >>> model.mesh, model.stop_ids, model.max_length
    (Mesh(tp=2), (2, 7), 64)
    """
    device = ops.find_device(device)
    folder = default_model() if folder is None else folder
    config = read_config(folder)
    dtype = dtype_of(config) if dtype is None else dtype
    family = registry.family_of(config)
    cfg = family.from_hf(config)
    stop_ids = read_generation_config(folder).eos_ids
    mesh = mesh or Mesh()
    if rules is None:
        if decode_rules is not None:
            raise ValueError("decode_rules without rules: give the rules of prefill too")
        mesh, rules, decode_rules = presets.for_mesh(cfg.num_kv_heads, mesh)
    fns = build(family.decoder(cfg), rules, decode_rules)
    specs = pad(with_dtype(fns.specs, dtype), mesh, rules)
    for of_phase in (fns.prefill_rules, fns.decode_rules):
        of_phase.check(specs, mesh)  # before anything is read
    if mesh.num_ranks > 1:
        dry_run(fns, mesh, specs=specs)
    runner, names = ranks(mesh), family.name_map(cfg)
    if len(runner.coords) == mesh.num_ranks:
        params = load_params(folder, specs, names, device=device, progress=progress)
    else:
        (params,) = load_ranks(
            folder, specs, names, mesh, rules, runner.coords, device=device, progress=progress
        )
    return Model(
        cfg=cfg,
        fns=fns,
        params=ops.fractal_weights(params, fractal),
        mesh=mesh,
        rules=rules,
        ranks=runner,
        stop_ids=stop_ids,
        max_length=cfg.max_length,
    )
