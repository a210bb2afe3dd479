"""The safetensors files of a Hugging Face folder: every header checked against file and index.

A file is 8 bytes (little-endian n), n bytes of JSON (name -> dtype, shape, data_offsets) and the
data, which the offsets cover without gap or overlap. A sharded folder names the file of each tensor
in `model.safetensors.index.json`. Pickle files are never opened.
"""

import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from funcinfer.hf_config import existing_folder, parse_json, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER = 100_000_000  # the limit of the format
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor: its file, dtype (the format's name) and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def raise_problems(head: str, problems: Mapping[str, list[str]], limit: int = 5) -> None:
    """ValueError listing the problems of each kind, the first few in words; nothing if none.

    >>> raise_problems("model.safetensors", {"missing": []})
    """
    lines = []
    for kind, found in problems.items():
        if found:
            lines.append(f"{kind} ({len(found)}):")
            lines += [f"  {line}" for line in found[:limit]]
            lines += [f"  and {len(found) - limit} more"] if len(found) > limit else []
    if lines:
        raise ValueError("\n  ".join([f"{head}:", *lines]))


def read_entries(folder: str | Path) -> dict[str, Entry]:
    """Every tensor of a Hugging Face folder, after each header was read and checked.

    Errors name files and tensors, all of one kind together. FileNotFoundError: no folder, no
    safetensors, a shard of the index is not there. ValueError: only pickle files, an index or
    header that can't be read, a file longer or shorter than its header says, index and shards that
    disagree, a tensor in two shards, a shard that the index does not name.
    """
    path = existing_folder(folder)
    files, index = _list_files(path)
    headers: dict[Path, dict[str, Entry]] = {}
    broken: list[str] = []
    for file in files:
        try:
            headers[file] = read_header(file)
        except ValueError as error:
            broken.append(str(error))
    raise_problems(f"{path}", {"broken files": broken})
    entries: dict[str, Entry] = {}
    twice, unlisted = [], []
    for file, header in headers.items():
        for name, entry in header.items():
            if name in entries:
                twice.append(f"tensor {name!r}: in {entries[name].file.name} and in {file.name}")
            elif index is not None and name not in index:
                unlisted.append(f"tensor {name!r} of {file.name}")
            entries[name] = entry
    absent = [
        f"tensor {name!r}: said to be in {file}, whose header does not name it"
        for name, file in (index or {}).items()
        if name not in headers[path / file]
    ]
    kinds = {
        "tensors in two files": twice,
        f"tensors that {INDEX} places wrongly": absent,
        f"tensors that {INDEX} does not name": unlisted,
    }
    raise_problems(f"{path}", kinds)
    return entries


def _list_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    index = _read_index(path / INDEX) if (path / INDEX).exists() else None
    wanted = sorted(set(index.values())) if index is not None else [SINGLE]
    found = sorted(f.name for f in path.glob("*.safetensors"))
    if missing := [name for name in wanted if not (path / name).is_file()]:
        if index is not None:
            raise FileNotFoundError(
                f"{path}: {INDEX} names {len(wanted)} files, of which {len(missing)} are missing:"
                f" {_listing(missing)}; one would hold tensor"
                f" {next(t for t, f in index.items() if f == missing[0])!r}"
            )
        if found:
            raise FileNotFoundError(
                f"{path}: neither {SINGLE} nor {INDEX} is there, only {_listing(found)}"
            )
        if pickles := sorted(f.name for pattern in _PICKLES for f in path.glob(pattern)):
            raise ValueError(
                f"{path}: the weights are pickle files ({_listing(pickles)}), which can run code"
                f" when they are opened and are never read: convert them to safetensors"
            )
        raise FileNotFoundError(f"{path}: no {SINGLE} and no {INDEX}")
    if extra := [name for name in found if _SHARD.fullmatch(name) and name not in wanted]:
        raise ValueError(
            f"{path}: {_listing(extra)} would not be read, because"
            f" {f'{INDEX} names other files' if index is not None else f'there is no {INDEX}'}"
        )
    return [path / name for name in wanted], index


def _read_index(path: Path) -> dict[str, str]:
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(
            f"{path}: needs a 'weight_map' from tensor to file, has {type(names).__name__}"
        )
    for tensor, file in names.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise ValueError(
                f"{path}: places tensor {tensor!r} in {file!r}, which can't be a safetensors file"
                f" of this folder"
            )
    return names


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file; ValueError where header, offsets and length of the file disagree."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(
                f"{file.name}: has {size} bytes, which can't hold its header of {length} bytes:"
                f" it is truncated or no safetensors file"
            )
        text = stream.read(length)
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        tensors = {name: _tensor(name, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file.name}: its header can't be read: {error}") from None
    ends, position = 8 + length, 0
    for name, (_, _, (begin, end)) in sorted(tensors.items(), key=lambda item: item[1][2]):
        if begin != position:
            raise ValueError(
                f"{file.name}: tensor {name!r} begins at byte {begin} of the data, but the one"
                f" before it ends at {position}"
            )
        position = end
    if size < ends + position:
        cut = [name for name, (_, _, (_, end)) in tensors.items() if ends + end > size]
        raise ValueError(
            f"{file.name}: truncated: has {size} bytes where its header needs {ends + position};"
            f" not whole: {_listing(cut)}"
        )
    if size > ends + position:
        raise ValueError(
            f"{file.name}: has {size} bytes, {size - ends - position} more than its header says"
        )
    return {name: Entry(file, dtype, shape) for name, (dtype, shape, _) in tensors.items()}


def _tensor(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Dtype, shape and offsets of a tensor, checked against each other."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(f"tensor {name!r} is described by {entry}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - begin
    if end - begin != needed or end < begin:
        raise ValueError(
            f"tensor {name!r}, {dtype} of shape {shape}, has {end - begin} bytes, not {needed}"
        )
    return dtype, tuple(shape), (begin, end)


def _listing(names: Iterable[str], limit: int = 5) -> str:
    names = [repr(n) for n in names]
    return ", ".join(names[:limit]) + (
        f" and {len(names) - limit} more" if len(names) > limit else ""
    )


class Reader:
    """Reads parts of tensors; each thread that reads has file handles of its own.

    >>> Reader({}).read("norm.weight", ())
    Traceback (most recent call last):
    KeyError: 'norm.weight'
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._local = threading.local()

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """One contiguous range of each dim of a tensor, in the dtype of the file; maybe a view."""
        file = self._entries[name].file
        handles = self._local.__dict__.setdefault("handles", {})
        if file not in handles:
            handles[file] = safe_open(file, "pt")
        return handles[file].get_slice(name)[part or ...]
