"""The front door: Model, a decoder with its parameters on a mesh. A convenience over the
functions, not the only way.

On a mesh, the ranks are threads of this process unless other ranks (one a process) are given.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, Rows, batch_specs, make_batch
from funcinfer.kvcache.layout import pages_needed
from funcinfer.models.decoder import Cache, Output, Params, output_specs
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.steps import ModelFns
from funcinfer.sharding import Mesh, Ranks, Rules, ThreadRanks, drop, pad, token_multiple
from funcinfer.spec import ParamSpec, is_spec, with_dtype
from funcinfer.tree import tree_leaves, tree_map


@dataclass(frozen=True)
class Model:
    """A model ready to call: `cfg`, its functions, its parameters, and the mesh and rules they lie
    by.

    `params` are the global parameters or, where `ranks` has one rank a process, this process's
    part of them. `stop_ids` are the tokens that end a text, `max_length` the longest context; both
    may be empty. ValueError where the rules are not legal for the model on the mesh.
    """

    cfg: Any
    fns: ModelFns
    params: Params
    mesh: Mesh = field(default_factory=Mesh)
    rules: Rules = field(default_factory=Rules)
    ranks: Ranks | None = None
    stop_ids: tuple[int, ...] = ()
    max_length: int | None = None

    def __post_init__(self) -> None:
        self.fns.check(self.mesh, page_size=self.page_size, specs=self.specs)
        if self.rules not in (self.fns.prefill_rules, self.fns.decode_rules):
            raise ValueError("rules must be those that the functions were built with")

    @property
    def specs(self) -> Params:
        """The parameters' specs, padded for the mesh."""
        return pad(self.fns.specs, self.mesh, self.rules)

    @cached_property
    def runner(self) -> Ranks:
        """The ranks that run the model: those given, or threads."""
        return self.ranks or ThreadRanks(self.mesh)

    @cached_property
    def shards(self) -> list[Params]:
        """The parameters of each rank that this process runs."""
        if len(self.runner.coords) < self.mesh.num_ranks:
            return [self.params]
        return self.runner.split(self.params, self.rules.specs(self.specs))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which is that of activations and caches."""
        return tree_leaves(self.params["embed"])[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return tree_leaves(self.params["embed"])[0].device

    @property
    def page_size(self) -> int:
        """A page size that the rules allow: 16, or the next multiple of what its dealing needs."""
        dealt = (self.rules["page_tokens"], self.rules["index_page_tokens"])
        least = math.lcm(*(self.mesh.size(axis) for axis in dealt)) * self.fns.interleave
        return least * -(-16 // least)

    @property
    def num_groups(self) -> int:
        """The number of requests groups: data-parallel parts that hold requests of their own."""
        return self.mesh.size(self.rules["requests"])

    def local_cache(self, num_pages: int, page_size: int, *, fill: float = 0.0) -> Cache:
        """One rank's part of a cache of `num_pages` pages for each requests group, filled with
        `fill`.
        """
        specs = self.fns.cache_specs(num_pages * self.num_groups, page_size)
        specs = with_dtype(specs, self.dtype)

        def make(s: ParamSpec) -> torch.Tensor:
            shape = self.mesh.local_shape(s.shape, self.rules.spec(*s.axes))
            return torch.full(shape, fill, dtype=s.dtype, device=self.device)

        return tree_map(make, specs, is_leaf=is_spec)

    def place(self, groups: list[list[Rows]], *, page_size: int, decode: bool) -> Batch:
        """The global Batch of one step: `make_batch` with the sizes that the mesh and rules ask
        for.
        """
        rules = self.fns.decode_rules if decode else self.fns.prefill_rules
        parts = self.mesh.size(drop(rules["tokens"], rules["requests"]))
        multiple = token_multiple(rules, self.mesh)
        return make_batch(groups, page_size=page_size, parts=parts, multiple=multiple)

    def step(
        self, caches: list[Cache], batch: Batch, *, decode: bool = False
    ) -> tuple[list[Output], list[Cache]]:
        """One step of every rank that this process runs, on its part of the global batch."""
        rules = self.fns.decode_rules if decode else self.fns.prefill_rules
        batch = tree_map(lambda x: x.to(self.device), batch)
        batches = self.runner.split(batch, batch_specs(rules))
        run = self.fns.decode if decode else self.fns.prefill
        outs = self.runner.run(run, self.shards, caches, batches)
        return [o for o, _ in outs], [c for _, c in outs]

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of whole sequences [B, T] of token ids, every position seeing those
        before it.

        The cache is made inside, so on one device autograd and torch.func work through the call.
        ValueError for ids outside of the vocabulary.
        """
        (B, T), vocab = tokens_BT.shape, self.cfg.vocab_size
        if B == 0 or T == 0:
            return torch.empty(B, T, vocab, dtype=self.dtype, device=self.device)
        if int(tokens_BT.min()) < 0 or int(tokens_BT.max()) >= vocab:
            raise ValueError(
                f"token ids reach from {int(tokens_BT.min())} to {int(tokens_BT.max())};"
                f" the vocabulary has 0 to {vocab - 1}"
            )
        page_size = self.page_size
        per_group, pages = -(-B // self.num_groups), pages_needed(T, page_size)
        groups = [
            [
                Rows(
                    tokens=range(min(b, B - 1) * T, min(b, B - 1) * T + T),
                    start=0,
                    pages=range(1 + i * pages, 1 + i * pages + pages),
                    wanted=T,
                )
                for i, b in enumerate(range(g * per_group, g * per_group + per_group))
            ]
            for g in range(self.num_groups)
        ]
        batch = self.place(groups, page_size=page_size, decode=False)
        ids = tokens_BT.flatten().to(torch.int32)
        batch = dataclasses.replace(batch, tokens=ids[batch.tokens.to(ids.device).long()])
        caches = [self.local_cache(1 + per_group * pages, page_size) for _ in self.shards]
        outs, _ = self.step(caches, batch)
        specs = output_specs(self.fns.prefill_rules).logits
        logits = self.runner.join([o.logits for o in outs], specs)
        return logits.unflatten(0, (-1, T))[:B, :, :vocab]

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams | None = None
    ) -> list[list[int]]:
        """The generated ids of each prompt of ids, served together by an Engine with room for all
        of them.
        """
        from funcinfer.serving.engine import Engine

        return [
            c.tokens for c in Engine.sized_for(self, prompts, sampling).generate(prompts, sampling)
        ]
