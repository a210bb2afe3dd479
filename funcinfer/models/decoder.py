"""The generic decoder: embeds tokens, runs a list of layers, norms, and gives logits.

A layer is an ordered dict of sublayers; each is normed and joined to the residual stream by the
layer's `connect`. A family is a short list of such layers, and a variant is another sublayer in
one of them.

    x = embed(ids)
    for each sublayer of each layer: x = connect(x, u -> sublayer(norm(u)))
    logits = head(norm(x))
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from funcinfer.kvcache.batch import Batch, RopeTables, Step, prepare
from funcinfer.layers import primitives as ops
from funcinfer.layers.embedding import embed, embedding_specs, lm_head, lm_head_specs, take_rows
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.models.pipeline import (
    Blank,
    blank_logits,
    blank_stream,
    from_last_stage,
    of_layers,
    on_first_stage,
    on_last_stage,
    stage_layers,
    through_stages,
)
from funcinfer.sharding import P, Rules
from funcinfer.spec import ParamSpec, ones
from funcinfer.tree import pytree

Params = dict[str, Any]
Cache = dict[str, Any]
Shared = Mapping[str, Any]
State = tuple[Cache, Shared]
Joined = tuple[torch.Tensor, State]
Branch = Callable[[torch.Tensor], Joined]


@dataclass(frozen=True)
class Sublayer:
    """A function with the specs of its parameters and of the caches it owns.

    `apply(p, u, cache, step, shared, *, rules) -> (y, cache, shared)`: `u` and `y` are [T, D] in
    the residual_tokens layout. `cache` holds this sublayer's own entries by their names in
    `cache_specs`, and those it `reads` (entries of earlier layers, by their full names), which it
    must not write. `shared` holds tensors of this step that later layers read; give back
    `{**shared, name: value}`. `cache_specs(num_pages, page_size)` is a dict of cache pytrees of
    ParamSpec.

    `takes` names what is read of `shared`, and `gives` what is left there, each with a function
    `(u, step) -> tensor` of the same shape and dtype: pipeline stages hand on what these name.
    """

    specs: Any
    apply: Callable[..., tuple[torch.Tensor, Cache, Shared]]
    cache_specs: Callable[[int, int], Cache] = lambda num_pages, page_size: {}
    reads: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    gives: Mapping[str, Blank] = field(default_factory=dict)


def pure(f: Callable[..., torch.Tensor], specs: Any) -> Sublayer:
    """Lift `f(p, u, *, rules) -> y`, which has no cache, to a Sublayer: an MLP, or a layer from a
    notebook.
    """

    def apply(
        p: Params, u: torch.Tensor, cache: Cache, step: Step, shared: Shared, *, rules: Rules
    ) -> tuple[torch.Tensor, Cache, Shared]:
        return f(p, u, rules=rules), cache, shared

    return Sublayer(specs, apply)


def cached(
    f: Callable[..., tuple[torch.Tensor, Any]],
    specs: Any,
    cache_specs: Callable[[int, int], Any],
) -> Sublayer:
    """Lift `f(p, u, cache, step, *, rules) -> (y, cache)`, which has one cache entry, to a
    Sublayer.
    """

    def apply(
        p: Params, u: torch.Tensor, cache: Cache, step: Step, shared: Shared, *, rules: Rules
    ) -> tuple[torch.Tensor, Cache, Shared]:
        y, kv = f(p, u, cache["kv"], step, rules=rules)
        return y, {**cache, "kv": kv}, shared

    return Sublayer(specs, apply, lambda pages, size: {"kv": cache_specs(pages, size)})


def residual(p: Params, x: torch.Tensor, branch: Branch) -> Joined:
    """The plain connection: x + sublayer(norm(x))."""
    y, state = branch(x)
    return x + y, state


@dataclass(frozen=True)
class Layer:
    """Sublayers by name, in order, and how each is joined to the residual stream.

    Parameters of sublayer `attn` are `attn` and, for the norm before it, `attn_norm`.
    `connect(p, x, branch) -> (x, state)` calls `branch(u) -> (y, state)`, which norms `u` and runs
    the sublayer, once; only `connect` knows the shape of `x`.
    """

    sublayers: Mapping[str, Sublayer]
    connect: Callable[[Params, torch.Tensor, Branch], Joined] = residual

    def replace(self, **sublayers: Sublayer) -> "Layer":
        """The layer with some sublayers replaced; ValueError for a name that it does not have."""
        for name in sublayers:
            if name not in self.sublayers:
                raise ValueError(
                    f"no sublayer {name!r}: this layer has {', '.join(self.sublayers)}"
                )
        return dataclasses.replace(self, sublayers={**self.sublayers, **sublayers})


@dataclass(frozen=True)
class Draft:
    """One multi-token-prediction module: its layer, run on the joined embedding and hidden state.

    With `zero_first` the embedding beside position 0 is zeroed, as vLLM does; transformers does
    not.
    """

    layer: Layer
    zero_first: bool = False


@dataclass(frozen=True)
class Decoder:
    """A decoder-only language model as data: its layers in order, and the sizes around them.

    `drafts` are its multi-token-prediction modules, run by `funcinfer.models.draft`.
    """

    vocab_size: int
    embed_dim: int
    layers: tuple[Layer, ...]
    norm_eps: float
    rope: Rope
    tied_head: bool = False
    norm: Callable[..., torch.Tensor] = ops.rms_norm
    drafts: tuple[Draft, ...] = ()

    def replace(self, index: int, **sublayers: Sublayer) -> "Decoder":
        """The decoder with sublayers of one layer replaced: `decoder.replace(3, attn=mine)`."""
        layers = list(self.layers)
        layers[index] = layers[index].replace(**sublayers)
        return dataclasses.replace(self, layers=tuple(layers))


@pytree
class Output:
    """`logits` [L, V] in the (requests, logits) layout; `hidden` [T, D], after the final norm, in
    residual_tokens.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


def output_specs(rules: Rules) -> Output:
    """The layout of an Output: the same pytree of `P`."""
    layouts: dict[str, Any] = dict(
        logits=P(rules["requests"], rules["logits"]), hidden=P(rules["residual_tokens"], None)
    )
    return Output(**layouts)


def norm_specs(embed_dim: int) -> ParamSpec:
    """The weight of a norm over the model width."""
    return ParamSpec((embed_dim,), ("embed",), init=ones)


def decoder_specs(decoder: Decoder) -> Params:
    """The parameters: `embed`, `layers` (a list), `norm`, and `head` where it is not tied to
    `embed`.

    What is not of a layer goes with the first one or, as head and drafts do, with the last one.
    """
    V, D, count = decoder.vocab_size, decoder.embed_dim, max(len(decoder.layers), 1)
    last = count - 1
    readers = (0, last) if decoder.tied_head or decoder.drafts else (0,)
    specs: Params = dict(
        embed=of_layers(embedding_specs(V, D), count, *readers),
        layers=[
            of_layers(_layer_specs(layer, D), count, i) for i, layer in enumerate(decoder.layers)
        ],
        norm=of_layers(norm_specs(D), count, last),
    )
    if not decoder.tied_head:
        specs["head"] = of_layers(lm_head_specs(V, D), count, last)
    if decoder.drafts:
        drafts = [_draft_specs(draft, D) for draft in decoder.drafts]
        specs["mtp"] = of_layers(drafts, count, last)
    return specs


def cache_specs(decoder: Decoder, num_pages: int, page_size: int) -> Cache:
    """The caches of all layers: `layers.{index}.{sublayer}.{name}` -> cache pytree of ParamSpec.

    Those of drafts begin with `mtp.{index}`.
    """
    count = max(len(decoder.layers), 1)
    layers = [(i, layer_prefix(i), layer) for i, layer in enumerate(decoder.layers)]
    layers += [(count - 1, draft_prefix(i), d.layer) for i, d in enumerate(decoder.drafts)]
    return {
        f"{prefix}{sublayer_name}.{name}": of_layers(entry, count, index)
        for index, prefix, layer in layers
        for sublayer_name, sublayer in layer.sublayers.items()
        for name, entry in sublayer.cache_specs(num_pages, page_size).items()
    }


def forward(
    decoder: Decoder,
    params: Params,
    cache: Cache,
    batch: Batch,
    *,
    rules: Rules,
    interleave: int = 1,
    length: int | None = None,
) -> tuple[Output, Cache]:
    """One step on this rank: logits of the rows that `batch.out` names, and the cache with the new
    rows.

    The cache is donated. `length` is the context length for which RoPE tables that depend on it
    are chosen; None is the model's own. The same function serves prefill, chunks, decode and
    verification, under any legal rules.
    """
    step = prepare(batch, rules=rules, rope=rope_of(decoder, length), interleave=interleave)
    if on_first_stage(rules):
        x_TD = embed(params["embed"], batch.tokens, rules=rules)
    else:
        x_TD = blank_stream(_first_norm(decoder, params, rules), step, rules=rules)
    run = partial(run_layers, decoder, params, step=step, rules=rules)
    x_TD, (cache, _) = through_stages(run, x_TD, (cache, {}), decoder.layers, step, rules=rules)
    return finish(decoder, params, x_TD, params["norm"], batch, rules=rules), cache


def finish(
    decoder: Decoder,
    params: Params,
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    batch: Batch,
    *,
    rules: Rules,
) -> Output:
    """The Output of the last layer's `x`, on every stage: the norm of weight `weight_D`, the head.

    On stages before the last, `x` and the weight are not looked at, but for the shape of `x`.
    """
    if on_last_stage(rules):
        hidden_TD = decoder.norm(x_TD, weight_D, eps=decoder.norm_eps)
        logits_LV = head(decoder, params, hidden_TD, batch, rules=rules)
    else:
        hidden_TD = torch.zeros_like(x_TD)
        logits_LV = blank_logits(x_TD, batch.out, decoder.vocab_size, rules=rules)
    logits_LV = from_last_stage(logits_LV, rules=rules)
    return Output(logits_LV, from_last_stage(hidden_TD, rules=rules))


def head(
    decoder: Decoder, params: Params, hidden_TD: torch.Tensor, batch: Batch, *, rules: Rules
) -> torch.Tensor:
    """Logits of the rows of normed hidden states that `batch.out` names."""
    x_LD = take_rows(hidden_TD, batch.out, rules=rules)
    weight = params["embed"] if decoder.tied_head else params["head"]
    return lm_head(weight, x_LD, vocab_size=decoder.vocab_size, rules=rules)


def rope_of(decoder: Decoder, length: int | None, shift: int = 0) -> RopeTables:
    """The function from positions to RoPE tables that `prepare` takes; `shift` is added to
    positions.
    """

    def rope(positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(decoder.rope, positions_T + shift, length=length)

    return rope


def run_layers(
    decoder: Decoder, params: Params, x: torch.Tensor, state: State, *, step: Step, rules: Rules
) -> Joined:
    """The layers of this rank's stage, in order; all of them where layers are not shared."""
    norm = partial(decoder.norm, eps=decoder.norm_eps)
    mine = stage_layers(len(decoder.layers), rules=rules)
    for i, (layer, p) in enumerate(zip(decoder.layers, params["layers"], strict=True)):
        if i in mine:
            x, state = run_layer(layer, layer_prefix(i), p, x, state, step, rules=rules, norm=norm)
    return x, state


def run_layer(
    layer: Layer,
    prefix: str,
    p: Params,
    x: torch.Tensor,
    state: State,
    step: Step,
    *,
    rules: Rules,
    norm: Callable[..., torch.Tensor],
) -> Joined:
    """One layer: its sublayers in order, each with its own cache entries.

    The entries of sublayer `attn` have names that begin with `{prefix}attn.`.
    """
    for name, sublayer in layer.sublayers.items():
        # The annotations are names: torch.compile does not trace `tuple[...]` of a nested function.
        def branch(
            u: torch.Tensor, name: str = name, sublayer: Sublayer = sublayer, state: State = state
        ) -> Joined:
            cache, shared = state
            start = f"{prefix}{name}."
            own = {k.removeprefix(start): v for k, v in cache.items() if k.startswith(start)}
            read = {k: cache[k] for k in sublayer.reads}
            u = norm(u, p[f"{name}_norm"])
            y, new, shared = sublayer.apply(p[name], u, {**own, **read}, step, shared, rules=rules)
            return y, ({**cache, **{start + k: new[k] for k in own}}, shared)

        x, state = layer.connect(p, x, branch)
    return x, state


def layer_prefix(index: int) -> str:
    """What the names of a layer's cache entries begin with."""
    return f"layers.{index}."


def draft_prefix(index: int) -> str:
    """What the names of a draft's cache entries begin with."""
    return f"mtp.{index}."


def _first_norm(decoder: Decoder, params: Params, rules: Rules) -> torch.Tensor:
    """The weight of the first norm of this rank's stage."""
    first = stage_layers(len(decoder.layers), rules=rules)[0]
    return params["layers"][first][f"{next(iter(decoder.layers[first].sublayers))}_norm"]


def _layer_specs(layer: Layer, embed_dim: int) -> Params:
    specs: Params = {}
    for name, sublayer in layer.sublayers.items():
        specs[f"{name}_norm"] = norm_specs(embed_dim)
        specs[name] = sublayer.specs
    return specs


def _draft_specs(draft: Draft, embed_dim: int) -> Params:
    return dict(
        **{name: norm_specs(embed_dim) for name in ("enorm", "hnorm", "norm")},
        eh_proj=ParamSpec((embed_dim, 2, embed_dim), ("embed", None, None)),
        layer=_layer_specs(draft.layer, embed_dim),
    )
