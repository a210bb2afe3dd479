"""A step run on paper: both phases on meta tensors, so that a move is refused here or never.

`Rules.check` knows laws of rules. What it can't know is what a layer does with its tensors: a step
on meta tensors makes every move of every layer, for one rank, without values, memory or other
ranks.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from funcinfer.kvcache.batch import Batch, BatchShape, Rows, batch_shape, batch_specs
from funcinfer.layers.primitives import reference, use_backend
from funcinfer.sharding import Mesh, Rules, drop, pad, token_multiple
from funcinfer.sharding.mesh import Coord
from funcinfer.sharding.meta import quick
from funcinfer.sharding.record import abstract_local, record, stage_coords

if TYPE_CHECKING:
    from funcinfer.serving.steps import ModelFns


def dry_run(
    fns: "ModelFns", mesh: Mesh, *, page_size: int | None = None, specs: Any = None
) -> None:
    """Run one step of each phase, and of each draft module, on meta tensors.

    `page_size` is by default the smallest that can be dealt; `specs` are the parameters as padded
    for the mesh, by default those of `fns`, padded. ValueError with the phase and what a layer
    refuses: mostly the two layouts between which it can't move a tensor.

    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> from funcinfer.serving.steps import build
    >>> from funcinfer.sharding import presets
    >>> cfg = llama.Config(96, 16, 1, 4, 2, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> mesh, *rules = presets.for_mesh(cfg.num_kv_heads, Mesh(pcp=2, tp=2, dcp=2))
    >>> dry_run(build(llama.decoder(cfg), *rules), mesh)
    """
    if page_size is None:
        dealt = (fns.prefill_rules[name] for name in ("page_tokens", "index_page_tokens"))
        page_size = fns.interleave * math.lcm(*map(mesh.size, dealt))
    specs = pad(fns.specs, mesh, fns.prefill_rules) if specs is None else specs
    phases = (
        ("prefill", fns.prefill_rules, fns.prefill, fns.prefill_draft),
        ("decode", fns.decode_rules, fns.decode, fns.decode_draft),
    )
    for phase, rules, step, draft in phases:
        try:
            for coord in stage_coords(rules, mesh):
                _run(fns, step, draft, specs, rules, mesh, coord, page_size)
        except ValueError as error:
            raise ValueError(f"{phase} on {mesh!r} under {rules!r}: {error}") from None


def _run(
    fns: "ModelFns",
    step: Any,
    draft: Any,
    specs: Any,
    rules: Rules,
    mesh: Mesh,
    coord: Coord,
    page_size: int,
) -> None:
    """One step, and one of each draft module, as the rank at `coord` sees it."""
    shape = smallest_shape(rules, mesh)
    pages = (1 + shape.pages) * mesh.size(rules["requests"])
    params = abstract_local(specs, rules, mesh, coord)
    cache = abstract_local(fns.cache_specs(pages, page_size), rules, mesh, coord)
    batch = abstract_batch(shape, rules, mesh, page_size=page_size)
    with record(mesh, coord), use_backend(QuickReference()), torch.no_grad():
        out, cache = step(params, cache, batch)
        for depth in range(fns.num_drafts):
            out, cache = draft(params, cache, batch, out.hidden, depth=depth)


class QuickReference:
    """The reference back end of the primitives, for meta tensors: each op of known shapes is looked
    up.
    """

    def __getattr__(self, name: str) -> Any:
        return partial(quick, getattr(reference, name))


def smallest_shape(rules: Rules, mesh: Mesh) -> BatchShape:
    """The sizes of a requests group's batch that holds one token."""
    parts = mesh.size(drop(rules["tokens"], rules["requests"]))
    rows = [Rows(tokens=[0], start=0, pages=[1])]
    return batch_shape([rows], parts=parts, multiple=token_multiple(rules, mesh))


def abstract_batch(shape: BatchShape, rules: Rules, mesh: Mesh, *, page_size: int) -> Batch:
    """One rank's part of a Batch with groups of these sizes, as meta tensors."""
    groups = mesh.size(rules["requests"])
    sizes = dict(
        tokens=(shape.tokens,),
        positions=(shape.tokens,),
        rows=(shape.tokens,),
        slots=(shape.tokens,),
        page_table=(shape.requests, shape.pages),
        kv_lens=(shape.requests,),
        out=(shape.out,),
    )
    layouts = batch_specs(rules)

    def local(name: str) -> torch.Tensor:
        size, *rest = sizes[name]
        part = mesh.local_shape((size * groups, *rest), getattr(layouts, name), name)
        return torch.empty(part, dtype=torch.int32, device="meta")

    tensors: dict[str, Any] = {name: local(name) for name in sizes}
    return Batch(**tensors, page_size=page_size)
