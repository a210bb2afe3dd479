"""What a rank holds: bytes of parameters and of a cache page, and of what there are copies.

parameters of a rank  = sum over leaves of bytes / ranks that the leaf is cut over
copies of a leaf      = ranks / ranks that it is cut over
context that fits     = pages of the memory that is left, less the scratch page, shared evenly
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcinfer.models.decoder import cache_specs, decoder_specs
from funcinfer.plan.kinds import Cut
from funcinfer.sharding import Mesh, Rules, pad
from funcinfer.sharding.mesh import Coord
from funcinfer.sharding.record import first_coord
from funcinfer.spec import is_spec, with_dtype
from funcinfer.tree import leaves_with_path


@dataclass(frozen=True)
class Held:
    """A leaf, or `count` leaves that are alike: shape and bytes of one on a rank, and how many
    ranks of the mesh hold the same.
    """

    path: str
    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    nbytes: int
    copies: int
    count: int

    @property
    def total(self) -> int:
        """Bytes of all of them on a rank."""
        return self.count * self.nbytes


@dataclass(frozen=True)
class Memory:
    """Leaves of the parameters, and of one page of the caches, of draft modules too."""

    params: tuple[Held, ...]
    page: tuple[Held, ...]
    page_size: int

    @property
    def param_bytes(self) -> int:
        """Bytes of parameters on a rank."""
        return sum(h.total for h in self.params)

    @property
    def copied_bytes(self) -> int:
        """Bytes of those parameters on a rank that other ranks hold too."""
        return sum(h.total for h in self.params if h.copies > 1)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on a rank, over all layers."""
        return sum(h.total for h in self.page)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token of a request on a rank, over all layers."""
        return self.page_bytes / self.page_size

    @property
    def step_token_bytes(self) -> float:
        """The same without draft modules."""
        main = sum(h.total for h in self.page if not h.path.startswith("mtp."))
        return main / self.page_size

    def largest_context(self, memory: float, requests: int) -> int:
        """The most tokens that each of `requests` of a requests group can have; 0 where the
        parameters do not fit. `memory` is what a rank may use.
        """
        if not self.page:
            return 0
        pages = int(memory - self.param_bytes) // self.page_bytes
        return max(0, (pages - 1) // requests) * self.page_size

    def cache_bytes(self, context: int, requests: int) -> int:
        """Bytes of a pool in which each of `requests` of a group can have `context` tokens."""
        return (1 + requests * -(-context // self.page_size)) * self.page_bytes


def memory_of(
    cut: Cut,
    mesh: Mesh,
    rules: Rules,
    *,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    coord: Coord | None = None,
) -> Memory:
    """The memory of the rank at `coord`, by default the first, under `rules`.

    ValueError for a dim that does not divide evenly.

    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> from funcinfer.plan.kinds import cut
    >>> cfg = llama.Config(96, 16, 5, 2, 2, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> small = cut(llama.decoder(cfg))
    >>> memory_of(small, Mesh(tp=2), Rules(vocab_in="tp"), page_size=16).page_bytes
    5120
    """
    params = pad(with_dtype(decoder_specs(cut.decoder), dtype), mesh, rules)
    page = with_dtype(cache_specs(cut.decoder, mesh.size(rules["requests"]), page_size), dtype)
    coord = first_coord(mesh) if coord is None else coord
    params, page = (held(specs, cut, mesh, rules, coord) for specs in (params, page))
    return Memory(params, page, page_size)


def held(
    specs: Mapping[str, Any], cut: Cut, mesh: Mesh, rules: Rules, coord: Coord
) -> tuple[Held, ...]:
    """The leaves of a cut decoder's specs that the rank at `coord` holds, by the names and as often
    as in the whole decoder.
    """
    kinds = {"layers": (cut.layers, cut.counts), "mtp": (cut.drafts, cut.draft_counts)}
    found = []
    for path, s in leaves_with_path(specs, is_leaf=is_spec):
        layout = rules.layout(s)
        if not mesh.holds(layout, coord):
            continue
        place, count = re.match(r"(layers|mtp)\.(\d+)\.", path), 1
        if place:
            first, count = (of_kind[int(place[2])] for of_kind in kinds[place[1]])
            path = f"{place[1]}.{first}.{path[place.end() :]}"
        shape = mesh.local_shape(s.shape, layout, path)
        nbytes = s.nbytes // mesh.size(layout.axes)
        found.append(Held(path, s.axes, shape, nbytes, mesh.copies(layout), count))
    return tuple(found)
