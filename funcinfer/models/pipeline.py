"""Pipeline parallelism: the list of layers over a mesh axis, in contiguous stages.

    stage s of n runs the layers i of L with i * n // L == s
    x[T, D] of stage s -> stage s + 1        out of stage n - 1 -> all stages

Every rank calls the same collectives in the same order; a stage that is not at work gives zeros and
takes none. One forward keeps one stage busy at a time: stages share memory, not time. A step moves
n - 1 times x and what later layers take of earlier ones; and it sums logits [L, V] and hidden
states [T, D] over the stages, all but the last of which add zeros, so that they are everywhere.

T tokens in residual_tokens, D model width, L rows that want logits, V vocabulary. On one stage
nothing is called and nothing is copied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from funcinfer.kvcache.batch import Step
from funcinfer.sharding import Rules, axis_index, axis_size, drop, ppermute, psum
from funcinfer.spec import Member, is_spec, stage_entries
from funcinfer.tree import tree_map

if TYPE_CHECKING:
    from funcinfer.models.decoder import Joined, Layer, State

Blank = Callable[[torch.Tensor, Step], torch.Tensor]


def of_layers(specs: Any, count: int, *entries: int) -> Any:
    """The specs as those of some entries of a list of `count` layers.

    >>> from funcinfer.spec import ParamSpec
    >>> of_layers(ParamSpec((4,), ("embed",)), 3, 0, 2).member.entries
    (0, 2)
    """
    member = Member("layers", tuple(sorted(set(entries))), count)
    return tree_map(lambda s: replace(s, member=member), specs, is_leaf=is_spec)


def stage_layers(count: int, *, rules: Rules) -> range:
    """Which of `count` layers this rank's stage runs; all of them where layers are not shared."""
    return stage_entries(count, axis_size(rules["layers"]), axis_index(rules["layers"]))


def on_first_stage(rules: Rules) -> bool:
    """Whether this rank is on the first stage, or the only one."""
    return axis_index(rules["layers"]) == 0


def on_last_stage(rules: Rules) -> bool:
    """Whether this rank is on the last stage, or the only one."""
    return axis_index(rules["layers"]) == axis_size(rules["layers"]) - 1


def through_stages(
    run: Callable[[torch.Tensor, "State"], "Joined"],
    x: torch.Tensor,
    state: "State",
    layers: Sequence["Layer"],
    step: Step,
    *,
    rules: Rules,
) -> "Joined":
    """`run(x, state)` on each stage in turn, with what the one before it gives.

    On the first stage `x` is its input; the others give a blank of its shape. What comes is of use
    on the last stage, but for the cache in `state`, which is each rank's own. ValueError where a
    stage changes the shape or the dtype of `x`.
    """
    stages, here = axis_size(rules["layers"]), axis_index(rules["layers"])
    for stage in range(stages):
        if stage == here:
            before = x
            x, state = run(x, state)
            if stages > 1:
                _check_stream(x, before, rules)
        if stage < stages - 1:
            x, shared = hand_on(x, state[1], layers, step, stage, rules=rules)
            state = (state[0], shared)
    return x, state


def hand_on(
    x: torch.Tensor,
    shared: Mapping[str, torch.Tensor],
    layers: Sequence["Layer"],
    step: Step,
    stage: int,
    *,
    rules: Rules,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """`x` and `shared` of stage `stage` on the next one; on other stages, what they were.

    Of `shared`, what later layers take goes along. ValueError where the stage did not leave it, or
    not in the shape that its `gives` promises.
    """
    axis = rules["layers"]
    here, perm = axis_index(axis), [(stage, stage + 1)]
    moved = {}
    for name, blank in crossing(layers, stage_entries(len(layers), axis_size(axis), stage).stop):
        value = blank(x, step)
        if here == stage:
            _check_left(name, shared.get(name), value)
            value = shared[name]
        moved[name] = ppermute(value, axis, perm)
    y = ppermute(x, axis, perm)
    return (y, moved) if here == stage + 1 else (x, shared)


def crossing(layers: Sequence["Layer"], cut: int) -> list[tuple[str, Blank]]:
    """The shared values that layers from `cut` on take of earlier ones, in order of their names;
    with each, the function that makes a blank one.
    """
    given: dict[str, Blank] = {}
    for layer in layers[:cut]:
        for sublayer in layer.sublayers.values():
            given |= sublayer.gives
    taken: set[str] = set()
    renewed: set[str] = set()
    for layer in layers[cut:]:
        for sublayer in layer.sublayers.values():
            taken |= set(sublayer.takes) - renewed
            renewed |= set(sublayer.gives)
    return [(name, given[name]) for name in sorted(taken) if name in given]


def blank_stream(norm_D: torch.Tensor, step: Step, *, rules: Rules) -> torch.Tensor:
    """Zeros of the residual stream's shape, [T, D], for a stage that will be given it.

    `norm_D` is the weight of a norm of the stream, which has its width and dtype.
    """
    parts = axis_size(drop(rules["residual_tokens"], rules["tokens"]))
    return norm_D.new_zeros(step.tokens.shape[0] // parts, norm_D.shape[0])


def blank_logits(
    x_TD: torch.Tensor, out_L: torch.Tensor, vocab_size: int, *, rules: Rules
) -> torch.Tensor:
    """Zeros of the shape of the logits, [L, V] in the (requests, logits) layout, padding as `pad`
    does it.
    """
    vocab, logits = rules["vocab_out"], rules["logits"]
    size = -(-vocab_size // axis_size(vocab))
    return x_TD.new_zeros(out_L.shape[0], size * axis_size(drop(vocab, logits)))


def from_last_stage(x: torch.Tensor, *, rules: Rules) -> torch.Tensor:
    """`x` of the last stage on every stage; the others give zeros of its shape."""
    return psum(x, rules["layers"])


def _check_stream(x: torch.Tensor, before: torch.Tensor, rules: Rules) -> None:
    if (x.shape, x.dtype) != (before.shape, before.dtype):
        raise ValueError(
            f"layers={rules['layers']!r}: a stage hands on what it is given, {before.dtype}"
            f" {list(before.shape)}, but these layers make {x.dtype} {list(x.shape)} of it"
        )


def _check_left(name: str, value: torch.Tensor | None, blank: torch.Tensor) -> None:
    if value is None:
        raise ValueError(f"a later stage takes {name!r}, but no layer of this step left it")
    if (value.shape, value.dtype) != (blank.shape, blank.dtype):
        raise ValueError(
            f"{name!r} is {value.dtype} {list(value.shape)}, but by the `gives` of its sublayer"
            f" {blank.dtype} {list(blank.shape)}, for which the next stage waits"
        )
