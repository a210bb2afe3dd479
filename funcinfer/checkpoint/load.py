"""Parameters out of a Hugging Face folder: each rank reads the slices that are its own.

    leaf[S_X]  <-  the parts of the checkpoint's tensors that make up rank x's block of S

Two phases: first every name, shape and header is checked and all that is wrong is reported; then
the leaves are made and filled, each cast once, from the dtype of the file to that of its spec. Rows
past a leaf's `true_shape` are zero.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from funcinfer.checkpoint.files import Reader, read_entries
from funcinfer.checkpoint.match import Leaf, leaves_of, match, true_shape
from funcinfer.checkpoint.name_map import Box, NameMap, pieces
from funcinfer.sharding.mesh import Coord, Mesh
from funcinfer.sharding.rules import Rules
from funcinfer.spec import ParamSpec, is_spec
from funcinfer.tree import tree_flatten, tree_unflatten


def load_params(
    folder: str | Path,
    specs: Any,
    name_map: NameMap,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    coord: Coord | None = None,
    *,
    device: torch.device | str = "cpu",
    threads: int = 4,
    progress: bool = False,
) -> Any:
    """The parameters of `specs` at one coordinate of a mesh; whole ones without a mesh.

    `folder` holds `model.safetensors`, or shards and `model.safetensors.index.json`. Each leaf has
    the dtype of its spec. `progress` shows a bar (needs the extra `text`).

    Before a tensor is made: FileNotFoundError or ValueError for files that are missing, broken or
    disagree; ValueError for tensors that are missing, not expected, of another shape or dtype or
    read only in part, and for a dim that does not divide. While reading: ValueError for a copy that
    differs from what it repeats.

    >>> import tempfile
    >>> from funcinfer.checkpoint import NameMap, Stored, save_params
    >>> specs = {"wq": ParamSpec((4, 2, 3), ("heads", None, "embed"), torch.float32)}
    >>> names = NameMap({"wq": Stored("q_proj.weight", ((4, 2), 3))})
    >>> folder = tempfile.mkdtemp()
    >>> save_params({"wq": torch.arange(24.0).view(4, 2, 3)}, specs, names, folder)
    >>> load_params(folder, specs, names, Mesh(tp=4), Rules(heads="tp"), {"tp": 3})["wq"]
    tensor([[[18., 19., 20.],
             [21., 22., 23.]]])
    """
    if mesh is None:
        if rules is not None or coord is not None:
            raise ValueError(
                "rules and coord say nothing without a mesh: give it or leave them out"
            )
        mesh, rules, coord = Mesh(), Rules.none(), {}
    if rules is None or coord is None:
        raise ValueError(f"{mesh!r} needs rules and a coord; load_ranks loads several coordinates")
    options: dict[str, Any] = {"device": device, "threads": threads, "progress": progress}
    return load_ranks(folder, specs, name_map, mesh, rules, [coord], **options)[0]


def load_ranks(
    folder: str | Path,
    specs: Any,
    name_map: NameMap,
    mesh: Mesh,
    rules: Rules,
    coords: Sequence[Coord] | None = None,
    *,
    device: torch.device | str = "cpu",
    threads: int = 4,
    progress: bool = False,
) -> list[Any]:
    """The parameters at each of `coords`, by default of all ranks: the locals of ThreadRanks.

    As `load_params`. A block that several ranks hold is read once, and they share the tensor; a
    leaf of another pipeline stage is None, and nothing of it is read.
    """
    if threads < 1:
        raise ValueError(f"threads={threads}: at least 1 is needed")
    coords = mesh.coords() if coords is None else coords
    leaves = leaves_of(specs, name_map)
    boxes = [_boxes(leaves, mesh, rules, coord) for coord in coords]
    entries = read_entries(folder)
    leaves = match(folder, leaves, name_map, entries)
    jobs = dict.fromkeys(
        (i, box) for of_rank in boxes for i, box in enumerate(of_rank) if box is not None
    )
    total = sum(_nbytes(leaves[i].spec, box) for i, box in jobs)
    with _progress(total, progress) as advance:
        made = _read_all(Reader(entries), leaves, jobs, torch.device(device), threads, advance)
    structure = tree_flatten(specs, is_leaf=is_spec)[1]
    return [
        tree_unflatten(
            [None if b is None else made[i, b] for i, b in enumerate(of_rank)], structure
        )
        for of_rank in boxes
    ]


def _boxes(leaves: list[Leaf], mesh: Mesh, rules: Rules, coord: Coord) -> list[Box | None]:
    """The range of each dim of each leaf that a rank holds; None for one of another stage."""
    if set(coord) != set(mesh.names) or any(not 0 <= coord[a] < mesh.size(a) for a in mesh.names):
        raise ValueError(
            f"coord {dict(coord)} is none of {mesh!r}: give each axis an index below its size"
        )
    boxes: list[Box | None] = []
    for leaf in leaves:
        layout = rules.layout(leaf.spec)
        shape = mesh.local_shape(leaf.spec.shape, layout, leaf.path)
        if not mesh.holds(layout, coord):
            boxes.append(None)
            continue
        places = (mesh.index(axis, coord) for axis in layout)
        boxes.append(tuple((i * n, i * n + n) for i, n in zip(places, shape, strict=True)))
    return boxes


def _read_all(
    reader: Reader,
    leaves: list[Leaf],
    jobs: Iterable[tuple[int, Box]],
    device: torch.device,
    threads: int,
    advance: Callable[[int], Any],
) -> dict[tuple[int, Box], torch.Tensor]:
    """The block of each job (leaf, box), read by several threads; the first error ends the rest."""
    made: dict[tuple[int, Box], torch.Tensor] = {}
    with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
        futures = {pool.submit(_read, reader, leaves[i], box, device): (i, box) for i, box in jobs}
        try:
            for future in as_completed(futures):
                block = made[futures[future]] = future.result()
                advance(block.nbytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return made


def _read(reader: Reader, leaf: Leaf, box: Box, device: torch.device) -> torch.Tensor:
    """A rank's block of a leaf. Of each tensor only the elements in the block are read."""
    true = tuple(
        (min(low, n), min(high, n))
        for (low, high), n in zip(box, true_shape(leaf.spec), strict=True)
    )
    make = torch.empty if true == box else torch.zeros
    block = make([high - low for low, high in box], dtype=leaf.spec.dtype, device=device)
    filled = block[tuple(slice(high - low) for low, high in true)]
    if filled.numel() == 0:
        return block
    for index, stored in pieces(leaf.source):
        stacked, within = true[: len(index)], true[len(index) :]
        if not all(low <= i < high for i, (low, high) in zip(index, stacked, strict=True)):
            continue
        target = filled[tuple(i - low for i, (low, _) in zip(index, stacked, strict=True))]
        for part, place in stored.runs(within):
            values = reader.read(stored.name, part)
            for name in leaf.copies:
                if not torch.equal(values, reader.read(name, part)):
                    raise ValueError(
                        f"tensor {name!r} must repeat {stored.name!r}, but they differ"
                    )
            target[place].copy_(values.reshape(target[place].shape))
    return block


def _nbytes(spec: ParamSpec, box: Box) -> int:
    return math.prod(high - low for low, high in box) * spec.dtype.itemsize


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], Any]]:
    """The function that moves a bar of `total` bytes on by some; it does nothing unless `show`."""
    if not show:
        yield lambda nbytes: None
        return
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm: pip install 'funcinfer[text]', or leave progress out"
        ) from error
    with tqdm(total=total, unit="B", unit_scale=True, desc="load") as bar:
        yield bar.update
