"""The plan of a model on a mesh: memory, and for each phase collectives, work and floor times."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcinfer.models import registry
from funcinfer.models.decoder import Decoder
from funcinfer.plan.cost import Cost, cost_of, in_turn
from funcinfer.plan.floor import Floor, floor_of
from funcinfer.plan.hardware import Hardware
from funcinfer.plan.kinds import Cut, cut, whole
from funcinfer.plan.memory import Memory, memory_of
from funcinfer.plan.trace import Load, Trace, trace
from funcinfer.serving.steps import build
from funcinfer.sharding import Mesh, Rules, pad
from funcinfer.sharding.presets import Preset
from funcinfer.sharding.record import stage_coords

PAGE_SIZE, UTILISATION = 128, 0.9


@dataclass(frozen=True)
class Subject:
    """A model to plan for: its Config, its decoder and that cut to one layer of each kind."""

    name: str
    cfg: Any
    decoder: Decoder
    cut: Cut
    notes: tuple[str, ...] = ()

    def looked_at(self, mesh: Mesh, rules: Rules) -> Cut:
        """One layer of each kind; all of them where the list of layers is cut into stages."""
        return self.cut if mesh.size(rules["layers"]) == 1 else whole(self.decoder)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Subject":
        """The model of a config.json's content. Quantised weights are planned for as if they were
        not, which is noted. ValueError for a field that the family does not understand.
        """
        fields, notes = dict(config), []
        if scheme := fields.pop("quantization_config", None):
            method = scheme.get("quant_method", "?") if isinstance(scheme, Mapping) else scheme
            notes.append(f"quantization_config ({method}) is not counted: weights have the dtype")
        family = registry.family_of(fields)
        cfg = family.from_hf(fields)
        decoder = family.decoder(cfg)
        return cls(fields["architectures"][0], cfg, decoder, cut(decoder), tuple(notes))


@dataclass(frozen=True)
class Setting:
    """What a plan is made for besides mesh and rules.

    `utilisation` is the part of a device's memory that parameters and caches may take.
    """

    hardware: Hardware
    dtype: torch.dtype = torch.bfloat16
    page_size: int = PAGE_SIZE
    interleave: int = 1
    utilisation: float = UTILISATION

    def __post_init__(self) -> None:
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation {self.utilisation} must be above 0, and at most 1")

    @property
    def memory(self) -> float | None:
        """Bytes that parameters and caches may take; None where the device's are not known."""
        figure = self.hardware.memory
        return None if figure is None else figure.value * self.utilisation


@dataclass(frozen=True)
class Phase:
    """One step of a phase: what it serves, costs and takes at least.

    `requests` are those of the whole mesh, filled up to a whole number a requests group; `costs`
    are those of a rank of each pipeline stage.
    """

    name: str
    rules: Rules
    load: Load
    requests: int
    costs: tuple[Cost, ...]
    floor: Floor
    num_ranks: int

    @property
    def cost(self) -> Cost:
        """What a rank does, and after it the ranks of later pipeline stages."""
        return in_turn(self.costs, self.rules["layers"])

    @property
    def tokens(self) -> int:
        """New tokens of the step, over the whole mesh."""
        return self.requests * self.load.new

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second and device, at the floor."""
        return self.tokens / self.floor.seconds / self.num_ranks if self.floor.seconds else 0.0


@dataclass(frozen=True)
class Plan:
    """A model on a mesh: what a rank of each pipeline stage holds, and the two phases."""

    subject: Subject
    preset: Preset
    setting: Setting
    memories: tuple[Memory, ...]
    prefill: Phase
    decode: Phase

    @property
    def fullest(self) -> int:
        """The pipeline stage whose ranks hold most."""
        return max(range(len(self.memories)), key=lambda i: self._used(self.memories[i]))

    @property
    def memory(self) -> Memory:
        """What a rank of that stage holds."""
        return self.memories[self.fullest]

    @property
    def largest_context(self) -> int | None:
        """The longest context that each request of the decode batch can have; None where the
        device's memory is not known.
        """
        usable, requests = self.setting.memory, self.decode.load.requests
        if usable is None:
            return None
        return min(m.largest_context(usable, requests) for m in self.memories)

    @property
    def cache_copies(self) -> int:
        """How many ranks hold the same pages."""
        return max((h.copies for h in self.memory.page), default=1)

    @property
    def used_bytes(self) -> int:
        """Bytes of a rank's parameters, and of caches for the decode batch at its context."""
        return self._used(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether these bytes fit; None where the device's memory is not known."""
        limit = self.setting.memory
        return None if limit is None else self.used_bytes <= limit

    def _used(self, memory: Memory) -> int:
        load = self.decode.load
        return memory.param_bytes + memory.cache_bytes(load.context, load.requests)


def plan(
    subject: Subject,
    preset: Preset,
    setting: Setting,
    *,
    batch: int,
    context: int,
    prompts: int,
    prompt: int,
) -> Plan:
    """Plan a step that prefills `prompts` of `prompt` tokens and one that decodes `batch` requests
    with a context of `context` tokens, both counted over the whole mesh.

    ValueError where the rules are not legal for the model on the mesh, or a layer can't move its
    tensors by them. Nothing is allocated.
    """
    check(subject, preset, setting)
    mesh, prefill, decode = preset
    memories = memories_of(subject, mesh, decode, setting)
    phases = []
    for name, rules, requests, new, seen in (
        ("prefill", prefill, prompts, prompt, prompt),
        ("decode", decode, batch, 1, context),
    ):
        groups = mesh.size(rules["requests"])
        load = Load(-(-requests // groups), new, seen)
        traces = traces_of(subject, mesh, rules, load, setting)
        costs = tuple(cost_of(t, m) for t, m in zip(traces, memories, strict=True))
        floor = floor_of(costs, mesh, setting.hardware, stages=rules["layers"])
        filled = load.requests * groups
        phases.append(Phase(name, rules, load, filled, costs, floor, mesh.num_ranks))
    return Plan(subject, preset, setting, memories, *phases)


def memories_of(subject: Subject, mesh: Mesh, rules: Rules, setting: Setting) -> tuple[Memory, ...]:
    """What a rank of each pipeline stage holds."""
    size, dtype = setting.page_size, setting.dtype
    looked_at = subject.looked_at(mesh, rules)
    return tuple(
        memory_of(looked_at, mesh, rules, page_size=size, dtype=dtype, coord=coord)
        for coord in stage_coords(rules, mesh)
    )


def traces_of(
    subject: Subject, mesh: Mesh, rules: Rules, load: Load, setting: Setting
) -> tuple[Trace, ...]:
    """A step as a rank of each pipeline stage sees it."""
    looked_at = subject.looked_at(mesh, rules)
    return tuple(
        trace(
            looked_at,
            mesh,
            rules,
            load,
            page_size=setting.page_size,
            dtype=setting.dtype,
            interleave=setting.interleave,
            coord=coord,
        )
        for coord in stage_coords(rules, mesh)
    )


def check(subject: Subject, preset: Preset, setting: Setting) -> None:
    """ValueError where `preset` is not legal for the model, by the laws of rules."""
    mesh, prefill, decode = preset
    decoder = subject.looked_at(mesh, prefill).decoder
    fns = build(decoder, prefill, decode, interleave=setting.interleave)
    fns.check(mesh, page_size=setting.page_size, specs=pad(fns.specs, mesh, prefill))
