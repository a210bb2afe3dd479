"""The device's side of the engine: caches, slots, and launches run on every rank.

Where ranks are processes, each has an Executor. The first process launches; the others `follow`.
"""

from typing import Any

import torch

from funcinfer.serving.launch import Launch, Sizes, make_inputs
from funcinfer.serving.model import Model
from funcinfer.serving.rank_step import Law, Result, Slots, empty_slots, rank_step
from funcinfer.sharding import axis_index
from funcinfer.tree import tree_leaves, tree_map


class Executor:
    """Runs launches of one model, on all ranks of this process.

    num_pages: of each requests group. fill: what new pages hold. law: how drafts are verified.
    The caches are allocated once; launches write them in place.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        *,
        num_pages: int,
        fill: float = 0.0,
        law: Law,
    ) -> None:
        self.model, self.sizes, self.law = model, sizes, law
        coords = model.runner.coords
        self.caches = [
            model.local_cache(num_pages, sizes.page_size, fill=fill, coord=coord)
            for coord in coords
        ]
        vocab = model.fns.decoder.vocab_size if sizes.laws else None
        self.slots = [
            empty_slots(sizes.num_slots, sizes.num_drafts, vocab, model.device) for _ in coords
        ]

    def launch(self, launch: Launch) -> Result | None:
        """Run a launch on the ranks of this process; None where it has no rows.

        The result is the same on every process. Where the device works on its own, it need not be
        there yet when this returns.
        """
        if any(launch.freed):
            self._fill_freed(launch)
        if not any(launch.groups):
            return None
        inputs, hints = make_inputs(self.model, launch, self.sizes)
        device = self.model.device
        inputs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs)

        model = self.model

        def run(params: Any, cache: Any, slots: Slots) -> tuple[Result, Any, Slots]:
            return rank_step(
                model.fns,
                params,
                cache,
                slots,
                inputs,
                hints,
                decode=launch.decode,
                law=self.law,
            )

        with torch.no_grad():
            outs = model.runner.run(run, model.shards, self.caches, self.slots)
        self.caches = [cache for _, cache, _ in outs]
        self.slots = [slots for _, _, slots in outs]
        return outs[0][0]

    def _fill_freed(self, launch: Launch) -> None:
        """Fill the freed pages with NaN, on the ranks of their group."""
        requests = self.model.rules["requests"]

        def fill(cache: Any) -> None:
            pages = torch.tensor(sorted(set(launch.freed[axis_index(requests)])), dtype=torch.int64)
            for leaf in tree_leaves(cache):
                if leaf is not None:  # it is of this pipeline stage
                    leaf[pages.to(leaf.device)] = float("nan")

        self.model.runner.run(fill, self.caches)
