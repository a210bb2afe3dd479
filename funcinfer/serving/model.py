"""The front door: Model, a decoder with its parameters on a mesh. A convenience over the
functions, not the only way.

On a mesh, the ranks are threads of this process unless other ranks (one a process) are given.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, Rows, batch_specs, make_batch
from funcinfer.kvcache.layout import pages_needed
from funcinfer.layers import primitives as ops
from funcinfer.models.decoder import Cache, Output, Params, output_specs
from funcinfer.serving.sampling import SamplingParams
from funcinfer.serving.steps import ModelFns
from funcinfer.sharding import Mesh, Ranks, Rules, ThreadRanks, drop, pad, token_multiple
from funcinfer.sharding.mesh import Coord
from funcinfer.spec import ParamSpec, is_spec, with_dtype
from funcinfer.tree import align, leaves_with_path, tree_leaves, tree_map

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Model:
    """A model ready to call: `cfg`, its functions, its parameters, and the mesh and rules they lie
    by.

    `load` makes one of a checkpoint. Without one, give a decoder's functions and parameters of
    their specs, padded where the mesh needs it: `init(pad(fns.specs, mesh, rules))`. `cfg` is the
    family's Config, or the Decoder itself: anything with a `vocab_size`.

    `params` are the global parameters or, where `ranks` has one rank a process, this process's
    part of them. `stop_ids` are the tokens that end a text, `max_length` the most tokens of a
    context; either may be missing. Models are compared by identity.

    ValueError where the rules are not legal for the model on the mesh, or not those of `fns`; where
    a parameter is missing, not expected or of another shape than its spec; and for ranks of another
    mesh.

    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> from funcinfer.serving.steps import build
    >>> from funcinfer.sharding import presets
    >>> from funcinfer.spec import init
    >>> cfg = llama.Config(97, 16, 1, 2, 2, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> decoder, (mesh, rules) = llama.decoder(cfg), presets.tp(cfg.num_kv_heads, 2)
    >>> fns = build(decoder, rules)
    >>> model = Model(decoder, fns, init(pad(fns.specs, mesh, rules)), mesh, rules)
    >>> model.logits(torch.tensor([[5, 6, 7]])).shape
    torch.Size([1, 3, 97])
    """

    cfg: Any
    fns: ModelFns = field(repr=False)
    params: Params = field(repr=False)
    mesh: Mesh = field(default_factory=Mesh)
    rules: Rules = field(default_factory=Rules)
    ranks: Ranks | None = field(default=None, repr=False)
    stop_ids: tuple[int, ...] = ()
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.rules not in (self.fns.prefill_rules, self.fns.decode_rules):
            raise ValueError(
                f"rules must be those that the functions were built with, as"
                f" {self.fns.prefill_rules!r}, not {self.rules!r}"
            )
        if self.runner.mesh != self.mesh:
            raise ValueError(f"ranks of {self.runner.mesh!r} can't run a model on {self.mesh!r}")
        self.fns.check(self.mesh, page_size=self.page_size, specs=self.specs)
        self._check_params()

    @cached_property
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
        if self._holds_all:
            return self.runner.split(self.params, self.rules.specs(self.specs))
        return [self.params]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which is that of activations and caches."""
        return self._some_weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._some_weight.device

    @property
    def page_size(self) -> int:
        """A page size that the rules allow: 16, or the next multiple of what they need."""
        dealt = (self.mesh.size(self.rules[a]) for a in ("page_tokens", "index_page_tokens"))
        least = math.lcm(*dealt) * self.fns.interleave
        return least * -(-16 // least)

    @property
    def num_groups(self) -> int:
        """The number of requests groups: data-parallel parts that hold requests of their own."""
        return self.mesh.size(self.rules["requests"])

    def local_cache(
        self, num_pages: int, page_size: int, *, fill: float = 0.0, coord: Coord | None = None
    ) -> Cache:
        """One rank's part of a cache of `num_pages` pages for each requests group, filled with
        `fill`.

        The rank is that at `coord`, by default the first of this process. None stands for what is
        of another pipeline stage.
        """
        specs = self.fns.cache_specs(num_pages * self.num_groups, page_size)
        coord = self.runner.coords[0] if coord is None else coord

        def make(s: ParamSpec) -> torch.Tensor | None:
            layout = self.rules.layout(s)
            if not self.mesh.holds(layout, coord):
                return None
            shape = self.mesh.local_shape(s.shape, layout)
            # Made from a parameter, so that torch.func.vmap over parameters reaches the cache.
            return self._some_weight.new_full(shape, fill, dtype=s.dtype)

        return tree_map(make, with_dtype(specs, self.dtype), is_leaf=is_spec)

    def place(self, groups: Sequence[Sequence[Rows]], *, page_size: int, decode: bool) -> Batch:
        """The global Batch of one step: `make_batch` with the sizes that mesh and rules ask for."""
        rules = self._rules_of(decode)
        parts = self.mesh.size(drop(rules["tokens"], rules["requests"]))
        multiple = token_multiple(rules, self.mesh)
        return make_batch(
            groups,
            page_size=page_size,
            parts=parts,
            multiple=multiple,
            segments=ops.wants_segments(self.device),
        )

    def step(
        self, caches: list[Cache], batch: Batch, *, decode: bool = False
    ) -> tuple[list[Output], list[Cache]]:
        """One step of every rank that this process runs, on its part of the global batch.

        The caches are donated. `decode` takes the decode rules, by which `place` must have made the
        batch.
        """
        batch = tree_map(lambda x: x.to(self.device), batch)
        batches = self.runner.split(batch, batch_specs(self._rules_of(decode)))
        run = self.fns.decode if decode else self.fns.prefill
        outs = self.runner.run(run, self.shards, caches, batches)
        return [out for out, _ in outs], [cache for _, cache in outs]

    def join_logits(
        self, outs: list[Output], *, decode: bool = False, check: bool = True
    ) -> torch.Tensor:
        """The global logits [L, V] of one step, the rows of each requests group in turn.

        Columns from the vocabulary's size on are padding: -inf. With `check`, ranks that hold the
        same rows must agree.
        """
        layout = output_specs(self._rules_of(decode)).logits
        return self.runner.join([out.logits for out in outs], layout, check=check, what="logits")

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] of whole sequences [B, T] of token ids, every position seeing those
        before it.

        The cache is made inside, so on one device autograd and torch.func work through the call;
        for a function of the parameters, call `dataclasses.replace(model, params=p).logits`.
        ValueError for what is no [B, T] of whole numbers, and for ids outside of the vocabulary.
        """
        vocab_size = self.cfg.vocab_size
        if tokens_BT.ndim != 2 or tokens_BT.dtype not in _WHOLE:
            raise ValueError(
                f"tokens must be whole numbers [B, T], not {tokens_BT.dtype}"
                f" {list(tokens_BT.shape)}"
            )
        (B, T), sequences = tokens_BT.shape, tokens_BT.tolist()
        if B == 0 or T == 0:
            return self._some_weight.new_empty(B, T, vocab_size)
        if bad := [t for tokens in sequences for t in tokens if not 0 <= t < vocab_size]:
            raise ValueError(f"token {bad[0]} is outside of the vocabulary, 0 to {vocab_size - 1}")
        # Groups are of one size; what is missing in the last ones is filled with the last sequence.
        per_group, pages = -(-B // self.num_groups), pages_needed(T, self.page_size)
        sequences += sequences[-1:] * (per_group * self.num_groups - B)
        rows = [
            Rows(tokens, 0, range(1 + i % per_group * pages, 1 + (i % per_group + 1) * pages), T)
            for i, tokens in enumerate(sequences)
        ]
        groups = [rows[i : i + per_group] for i in range(0, len(rows), per_group)]
        batch = self.place(groups, page_size=self.page_size, decode=False)
        num_pages, size = 1 + per_group * pages, self.page_size
        caches = [self.local_cache(num_pages, size, coord=c) for c in self.runner.coords]
        outs, _ = self.step(caches, batch)
        return self.join_logits(outs).unflatten(0, (-1, T))[:B, :, :vocab_size]

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[list[int]]:
        """The generated ids of each prompt of ids, served together by an Engine of fitting size; n
        lists for each prompt.

        Where ranks are processes, all of them call it, and the prompts of the first one count.
        ValueError for a prompt that `Engine.add` refuses.
        """
        from funcinfer.serving.engine import Engine

        engine = Engine.sized_for(self, prompts, sampling)
        found: list[list[int]] | None = None
        if engine.leads:
            try:
                tokens = found = [done.tokens for done in engine.generate(prompts, sampling)]
            finally:
                engine.close()
                self.runner.broadcast(found)
            return tokens
        engine.follow()
        found = self.runner.broadcast(None)
        if found is None:
            raise ValueError("the first process has failed: it says why")
        return found

    @cached_property
    def _some_weight(self) -> torch.Tensor:
        """A parameter of the embedding's dtype: the embedding itself, where its stage is here."""
        pairs = leaves_with_path(self.specs, is_leaf=is_spec)
        values = align(self.params, [path for path, _ in pairs], what="params")
        plain = tree_leaves(self.specs["embed"], is_leaf=is_spec)[0].dtype
        found = zip(pairs, values, strict=True)
        return next(x for (_, s), x in found if x is not None and s.dtype == plain)

    @property
    def _holds_all(self) -> bool:
        """Whether this process runs every rank, and so has the global parameters."""
        return len(self.runner.coords) == self.mesh.num_ranks

    def _rules_of(self, decode: bool) -> Rules:
        return self.fns.decode_rules if decode else self.fns.prefill_rules

    def _check_params(self) -> None:
        specs = leaves_with_path(self.specs, is_leaf=is_spec)
        values = align(self.params, [path for path, _ in specs], what="params")
        for (path, s), value in zip(specs, values, strict=True):
            layout, shape = self.rules.layout(s), s.shape
            if not self._holds_all:
                shape = self.mesh.local_shape(s.shape, layout)
                if not self.mesh.holds(layout, self.runner.coords[0]):
                    shape = None
            given = None if value is None else tuple(value.shape)
            if given != shape:
                raise ValueError(
                    f"params.{path} has shape {given} where its spec, padded for {self.mesh!r},"
                    f" has {shape} (None: it is of another pipeline stage)"
                )
