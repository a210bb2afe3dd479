"""The meshes of so many devices that presets know, and which of their sizes a trace depends on."""

from collections.abc import Iterator
from dataclasses import dataclass

from funcinfer.plan.planning import Subject
from funcinfer.sharding import LIBRARY_AXES, Mesh, Rules, names, presets
from funcinfer.sharding.presets import Preset
from funcinfer.spec import is_spec
from funcinfer.tree import tree_leaves

AXES = ("dp", "pcp", "tp", "dcp")
# Prompts are seldom long enough to be worth more.
MOST_PCP = 8
TOKEN_RULES = (
    "requests",
    "pages",
    "tokens",
    "q_tokens",
    "residual_tokens",
    "o_tokens",
    "moe_tokens",
    "linear_tokens",
)


@dataclass(frozen=True)
class Candidate:
    """A preset and the options that it was made with: `sp`, `ep`."""

    preset: Preset
    options: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The sizes and options, short.

        >>> Candidate(presets.for_mesh(None, Mesh(dp=2, tp=4)), ("sp",)).label
        'dp=2,tp=4 sp'
        """
        sizes = ",".join(f"{name}={n}" for name, n in self.preset.mesh.axes if n > 1)
        return " ".join([sizes or "one device", *self.options])


def candidates(subject: Subject, num_devices: int) -> Iterator[Candidate]:
    """Presets of all meshes dp x pcp x tp x dcp, without and with sequence parallelism and, where
    the model has experts, expert parallelism over all axes.
    """
    routed = has_experts(subject) and num_devices > 1
    for sizes in factors(num_devices, len(AXES)):
        mesh = Mesh(**{name: n for name, n in zip(AXES, sizes, strict=True) if n > 1})
        if dict(mesh.axes).get("pcp", 1) > MOST_PCP:
            continue
        dealing = "tp" in mesh.names or "dcp" in mesh.names
        for expert_parallel in (False, True) if routed else (False,):
            for sp in (False, True) if dealing else (False,):
                try:
                    preset = presets.for_mesh(
                        subject.cfg.num_kv_heads, mesh, sp=sp, expert_parallel=expert_parallel
                    )
                except ValueError:
                    continue  # tp and the number of KV heads do not divide one another
                options = (("sp", sp), ("ep", expert_parallel))
                yield Candidate(preset, tuple(name for name, on in options if on))


def has_experts(subject: Subject) -> bool:
    """Whether any layer has experts."""
    specs = [s.specs for layer in subject.cut.decoder.layers for s in layer.sublayers.values()]
    return any("experts" in s.axes for s in tree_leaves(specs, is_leaf=is_spec))


def factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of so many.

    >>> list(factors(4, 2))
    [(1, 4), (2, 2), (4, 1)]
    """
    if count == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            for rest in factors(product // first, count - 1):
                yield (first, *rest)


def without_data_axes(mesh: Mesh, rules: Rules) -> Mesh:
    """`mesh` with size 1 for axes that deal requests and do nothing else: no shape and no
    collective of a rank depends on how many requests groups there are beside its own.

    >>> mesh, rules, _ = presets.for_mesh(None, Mesh(dp=8, tp=2))
    >>> without_data_axes(mesh, rules)
    Mesh(dp=1, tp=2)
    """
    others = [name for name in LIBRARY_AXES if name not in TOKEN_RULES]
    used = {a for name in others for a in names(rules[name])}
    everywhere = set.intersection(*(set(names(rules[name])) for name in TOKEN_RULES))
    alone = everywhere - used
    return Mesh(**{name: 1 if name in alone else n for name, n in mesh.axes})
