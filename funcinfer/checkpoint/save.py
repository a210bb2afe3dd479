"""Whole parameters written as a Hugging Face folder: the inverse of loading."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from funcinfer.checkpoint.files import INDEX, SINGLE, raise_problems
from funcinfer.checkpoint.match import leaves_of, partly_used, true_shape
from funcinfer.checkpoint.name_map import NameMap, pieces
from funcinfer.tree import align


def save_params(
    params: Any,
    specs: Any,
    name_map: NameMap,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write whole parameters under the checkpoint's names and in their own dtypes.

    Padding is left out; of alternatives the first is written; copies are not. More than
    `max_shard_bytes` go to several files with an index. ValueError where params and specs differ, a
    tensor would be written in part or would hold two dtypes; FileExistsError where the folder holds
    a model already.

    >>> import tempfile
    >>> from funcinfer.checkpoint import Stored, load_params
    >>> from funcinfer.spec import ParamSpec, init
    >>> specs = {"norm": ParamSpec((4,), ("embed",))}
    >>> names, folder = NameMap({"norm": Stored("model.norm.weight", (4,))}), tempfile.mkdtemp()
    >>> save_params(init(specs), specs, names, folder)
    >>> torch.equal(load_params(folder, specs, names)["norm"], init(specs)["norm"])
    True
    """
    path = Path(folder)
    if found := sorted(file.name for file in path.glob("model*.safetensors*")):
        raise FileExistsError(f"{path}: already holds {found[0]}; write into another folder")
    leaves = leaves_of(specs, name_map)
    raise_problems("save_params", {"tensors written in part": partly_used(leaves)})
    values = align(params, [leaf.path for leaf in leaves], what="params")
    tensors: dict[str, torch.Tensor] = {}
    for leaf, value in zip(leaves, values, strict=True):
        if tuple(value.shape) != leaf.spec.shape:
            raise ValueError(
                f"params.{leaf.path}: has shape {tuple(value.shape)}, its spec {leaf.spec.shape}"
            )
        value = value.detach().cpu()[tuple(slice(n) for n in true_shape(leaf.spec))]
        for index, stored in pieces(leaf.source):
            if stored.name not in tensors:
                tensors[stored.name] = value.new_empty(stored.file_shape)
            whole = tensors[stored.name]
            if whole.dtype != value.dtype:
                raise ValueError(
                    f"tensor {stored.name!r}: {value.dtype} from leaf {leaf.path!r},"
                    f" but {whole.dtype} from another"
                )
            place = whole.view(stored.unfolded)[tuple(slice(*taken) for taken in stored.taken)]
            place.copy_(value[index])
    path.mkdir(parents=True, exist_ok=True)
    _write(tensors, path, max_shard_bytes)


def _write(tensors: dict[str, torch.Tensor], path: Path, max_shard_bytes: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, path / SINGLE, metadata={"format": "pt"})
        return
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2))
