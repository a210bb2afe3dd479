"""ModelFns: a model as functions that a serving loop calls, one `forward` under two sets of
rules.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from funcinfer.kvcache.batch import Batch
from funcinfer.models.decoder import (
    Cache,
    Decoder,
    Output,
    Params,
    cache_specs,
    decoder_specs,
    forward,
)
from funcinfer.models.draft import draft
from funcinfer.sharding import Mesh, Rules, names
from funcinfer.spec import ParamSpec, is_spec
from funcinfer.tree import leaves_with_path

StepFn = Callable[[Params, Cache, Batch], tuple[Output, Cache]]
DraftFn = Callable[..., tuple[Output, Cache]]


@dataclass(frozen=True)
class ModelFns:
    """Specs and step functions of one model.

    `specs` declare the parameters; `cache_specs(num_pages, page_size)` the caches, a dict by name.
    `prefill` and `decode` take this rank's `(params, cache, batch)` and give `(Output, cache)`;
    the cache is donated. Both serve any mix of rows: they differ in their rules alone.
    """

    specs: Params
    cache_specs: Callable[[int, int], Cache]
    prefill: StepFn
    decode: StepFn
    prefill_draft: DraftFn
    decode_draft: DraftFn
    num_drafts: int
    prefill_rules: Rules
    decode_rules: Rules
    interleave: int
    decoder: Decoder = field(repr=False)

    def check(self, mesh: Mesh, *, page_size: int, specs: Params | None = None) -> None:
        """ValueError where either set of rules can't lay out parameters and caches on `mesh`.

        `specs` are the parameters as padded for the mesh; by default as declared.
        """
        caches = self.cache_specs(mesh.size(self.decode_rules["requests"]), page_size)
        for rules in (self.prefill_rules, self.decode_rules):
            for name in ("page_tokens", "index_page_tokens"):
                dealt = mesh.size(rules[name]) * self.interleave
                if page_size % dealt:
                    raise ValueError(
                        f"page_size {page_size} must be a multiple of {dealt}: {name}="
                        f"{rules[name]!r} of {mesh!r} times interleave {self.interleave}"
                    )
            rules.check([self.specs if specs is None else specs, caches], mesh)
            _check_reads(self.decoder, mesh.size(rules["layers"]))


def build(
    decoder: Decoder,
    prefill_rules: Rules | None = None,
    decode_rules: Rules | None = None,
    *,
    interleave: int = 1,
    length: int | None = None,
) -> ModelFns:
    """The step functions of a decoder under rules for prefill and, where they differ, for decode.

    `interleave` is the run of offsets in a page that one rank of page_tokens owns; `length` the
    context length for which RoPE tables that depend on it are chosen (None: the model's own).
    ValueError where the two sets of rules want different layouts of a parameter or a cache: there
    is one copy of each.

    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> cfg = llama.Config(97, 16, 1, 2, 1, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> sorted(build(llama.decoder(cfg)).specs)
    ['embed', 'head', 'layers', 'norm']
    """
    if interleave < 1:
        raise ValueError(f"interleave {interleave} must be at least 1")
    prefill_rules = prefill_rules or Rules.none()
    decode_rules = decode_rules or prefill_rules
    specs = decoder_specs(decoder)
    if decode_rules != prefill_rules:
        _same_layout(specs, prefill_rules, decode_rules)
        _same_layout(cache_specs(decoder, 1, interleave), prefill_rules, decode_rules)
    step = partial(forward, decoder, interleave=interleave, length=length)
    drafted = partial(draft, decoder, interleave=interleave, length=length)
    return ModelFns(
        specs=specs,
        cache_specs=partial(cache_specs, decoder),
        prefill=partial(step, rules=prefill_rules),
        decode=partial(step, rules=decode_rules),
        prefill_draft=partial(drafted, rules=prefill_rules),
        decode_draft=partial(drafted, rules=decode_rules),
        num_drafts=len(decoder.drafts),
        prefill_rules=prefill_rules,
        decode_rules=decode_rules,
        interleave=interleave,
        decoder=decoder,
    )


def _check_reads(decoder: Decoder, stages: int) -> None:
    """ValueError where a layer would read the cache of a layer on another pipeline stage."""
    caches = leaves_with_path(cache_specs(decoder, 1, 1), is_leaf=is_spec)
    last = len(decoder.layers) - 1
    layers = [*enumerate(decoder.layers), *((last, d.layer) for d in decoder.drafts)]
    links = [
        (index, name, s.member)
        for index, layer in layers
        for sublayer in layer.sublayers.values()
        for name in sublayer.reads
        for path, s in caches
        if path == name or path.startswith(f"{name}.")
    ]

    def cut(n: int) -> list[str]:
        return [
            f"layer {index} reads {name!r}"
            for index, name, member in links
            if index * n // member.count not in member.stages(n)
        ]

    if found := list(dict.fromkeys(cut(stages))):
        fine = [str(n) for n in range(1, last + 2) if not cut(n)]
        raise ValueError(
            f"{stages} pipeline stages part caches from their readers: {'; '.join(found)}."
            f" These layers can be cut into {', '.join(fine)} stages"
        )


def _same_layout(specs: Any, prefill: Rules, decode: Rules) -> None:
    for path, s in leaves_with_path(specs, is_leaf=is_spec):
        if prefill.layout(s) != decode.layout(s):
            raise ValueError(_differs(path, s, prefill, decode))


def _differs(path: str, s: ParamSpec, prefill: Rules, decode: Rules) -> str:
    axes = [a for a in s.axes if a is not None]
    axes += [] if s.member is None else names(s.member.axis)
    axis = next(a for a in axes if prefill[a] != decode[a])
    return (
        f"{path} would lie as {prefill.layout(s)!r} in prefill and as"
        f" {decode.layout(s)!r} in decode: rule {axis} is {prefill[axis]!r} and"
        f" {decode[axis]!r}. Only tokens, residual_tokens, q_tokens, o_tokens, moe_tokens and"
        " logits may differ between the phases"
    )
