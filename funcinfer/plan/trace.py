"""One step on paper: every collective and all counted work of one rank, by layer kind.

The forward itself is run, once a phase, on meta tensors under a recorder, with one layer of each
kind. So what is recorded is what a real step does; nothing here knows any layer.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from funcinfer.kvcache.batch import BatchShape, Rows, batch_shape
from funcinfer.kvcache.layout import pages_needed
from funcinfer.layers.primitives import use_backend
from funcinfer.models.decoder import Decoder, Layer, cache_specs, decoder_specs, forward
from funcinfer.plan.counting import CountingOps, CountProducts, Work
from funcinfer.plan.kinds import Cut
from funcinfer.serving.dry_run import abstract_batch
from funcinfer.sharding import Mesh, Rules, drop, pad, token_multiple
from funcinfer.sharding.mesh import Coord
from funcinfer.sharding.record import Collective, abstract_local, first_coord, record
from funcinfer.spec import is_spec, with_dtype
from funcinfer.tree import tree_leaves

REST = "embedding, head and the rest"


@dataclass(frozen=True)
class Load:
    """What a step serves in each requests group: so many requests, each with so many new tokens,
    the last of which sees `context` positions; the last `wanted` of them want logits.

    >>> Load(requests=4, new=1, context=4096).seen
    4096.0
    """

    requests: int
    new: int
    context: int
    wanted: int = 1

    def __post_init__(self) -> None:
        if self.requests < 1 or not 1 <= self.wanted <= self.new <= self.context:
            raise ValueError(
                f"{self.requests} requests of {self.new} new tokens, {self.wanted} of them with"
                f" logits, and a context of {self.context}: at least one request, and wanted <= new"
                f" <= context"
            )

    @property
    def tokens(self) -> int:
        """New tokens of a group."""
        return self.requests * self.new

    @property
    def seen(self) -> float:
        """Positions that a token sees, on average over the new tokens."""
        return self.context - (self.new - 1) / 2

    def seen_of(self, most: int) -> float:
        """The same where a token sees at most `most` positions."""
        first = self.context - self.new + 1
        whole = max(0, min(self.context, most) - first + 1)  # tokens that see all they could
        sees_all = whole * (first + min(self.context, most)) / 2
        return (sees_all + (self.new - whole) * most) / self.new


@dataclass
class Section:
    """What one layer of a kind does, or what is done once around the layers; `count` times."""

    count: int
    collectives: list[Collective] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """A step of one rank: sections by name, the sizes of the group's batch, and what it serves."""

    mesh: Mesh
    rules: Rules
    coord: Coord
    load: Load
    shape: BatchShape
    sections: dict[str, Section]


def trace(
    cut: Cut,
    mesh: Mesh,
    rules: Rules,
    load: Load,
    *,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    interleave: int = 1,
    coord: Coord | None = None,
) -> Trace:
    """One step of the decoder under `rules`, as the rank at `coord`, by default the first, sees it.

    With pipeline stages the decoder must be whole: a stage is a part of the list of layers.

    ValueError where a layer can't move its tensors so. Nothing is allocated.
    """
    coord = first_coord(mesh) if coord is None else coord
    shape = shape_of(load, rules, mesh, page_size=page_size)
    counts = dict(zip((f"layers like {i}" for i in cut.layers), cut.counts, strict=True))
    names = [REST, *counts]
    marks: list[tuple[str, int, int]] = [(REST, 0, 0)]
    work: list[Work] = []

    params, cache = abstract_state(cut.decoder, mesh, rules, coord, shape, page_size, dtype)
    batch = abstract_batch(shape, rules, mesh, page_size=page_size)
    weights = [x for x in tree_leaves(params) if x is not None]
    experts = experts_by_share(cut.decoder, mesh.size(rules["experts"]))
    ops = CountingOps(work, page_parts=mesh.size(rules["page_tokens"]), experts=experts)
    counting = CountProducts(work, weights)
    with record(mesh, coord, quick=counting) as collectives, use_backend(ops), torch.no_grad():

        @contextmanager
        def section(name: str) -> Iterator[None]:
            marks.append((name, len(collectives), len(work)))
            yield
            marks.append((REST, len(collectives), len(work)))

        layers = zip(names[1:], cut.decoder.layers, strict=True)
        marked = tuple(_marked(layer, section, name) for name, layer in layers)
        decoder = dataclasses.replace(cut.decoder, layers=marked)
        forward(decoder, params, cache, batch, rules=rules, interleave=interleave)
    sections = {name: Section(counts.get(name, 1)) for name in names}
    ends = [*marks[1:], ("", len(collectives), len(work))]
    for (name, c, w), (_, c_end, w_end) in zip(marks, ends, strict=True):
        sections[name].collectives += collectives[c:c_end]
        sections[name].work += work[w:w_end]
    return Trace(mesh, rules, coord, load, shape, sections)


def shape_of(load: Load, rules: Rules, mesh: Mesh, *, page_size: int) -> BatchShape:
    """The sizes of a requests group's batch of this load."""
    pages = pages_needed(load.context, page_size)
    row = Rows(range(load.new), load.context - load.new, range(1, 1 + pages), load.wanted)
    parts = mesh.size(drop(rules["tokens"], rules["requests"]))
    multiple = token_multiple(rules, mesh)
    return batch_shape([[row] * load.requests], parts=parts, multiple=multiple)


def experts_by_share(decoder: Decoder, parts: int) -> dict[int, int]:
    """The number of experts of a layer, by how many each of `parts` ranks holds of them."""
    found = {}
    for s in tree_leaves(decoder_specs(decoder), is_leaf=is_spec):
        for n, axis in zip(s.shape, s.axes, strict=True):
            if axis == "experts":
                found[-(-n // parts)] = n
    return found


def abstract_state(
    decoder: Decoder,
    mesh: Mesh,
    rules: Rules,
    coord: Coord,
    shape: BatchShape,
    page_size: int,
    dtype: torch.dtype,
) -> tuple[Any, Any]:
    """One rank's parameters, padded for the mesh, and caches for a batch, as meta tensors."""
    specs = pad(with_dtype(decoder_specs(decoder), dtype), mesh, rules)
    num_pages = (1 + shape.requests * shape.pages) * mesh.size(rules["requests"])
    caches = with_dtype(cache_specs(decoder, num_pages, page_size), dtype)
    return abstract_local(specs, rules, mesh, coord), abstract_local(caches, rules, mesh, coord)


def _marked(layer: Layer, section: Any, name: str) -> Layer:
    """`layer`, each of whose sublayers is joined to the stream inside of `section(name)`."""

    def connect(*args: Any) -> Any:
        with section(name):
            return layer.connect(*args)

    return dataclasses.replace(layer, connect=connect)
