"""Which op of torch_npu computes each primitive of a step on an Ascend device, or why none does.

The forward is run on meta tensors, as in `trace`, and each call of a primitive goes to the rule of
the back end, which looks at shapes and dtypes alone. So what is listed is what a real step does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcinfer.kvcache.batch import Rows, segments_of
from funcinfer.kvcache.layout import pages_needed
from funcinfer.layers.primitives import use_backend
from funcinfer.layers.primitives.npu_device import assume_soc, choice
from funcinfer.layers.primitives.npu_facts import FACTS
from funcinfer.layers.primitives.npu_limits import Choice
from funcinfer.models.decoder import forward
from funcinfer.plan.counting import CountingOps
from funcinfer.plan.hardware import HARDWARE, Hardware
from funcinfer.plan.planning import Phase, Plan
from funcinfer.plan.trace import abstract_state, experts_by_share, shape_of
from funcinfer.serving.dry_run import abstract_batch
from funcinfer.sharding import drop
from funcinfer.sharding.mesh import Coord
from funcinfer.sharding.record import record, stage_coords
from funcinfer.spec import align_columns

SOCS = {
    HARDWARE["910b"].name: "ascend910b",
    HARDWARE["910c"].name: "ascend910c",
    HARDWARE["950dt"].name: "ascend950",
}


@dataclass(frozen=True)
class Kernel:
    """A primitive and what computes it, somewhere in a step."""

    primitive: str
    choice: Choice


class ChoosingOps:
    """A back end of the primitives that notes what the rule chooses for each call in `found`, and
    leaves the work to `inner`, another back end.
    """

    def __init__(self, inner: Any, soc: str, found: dict[tuple[str, str], Kernel]) -> None:
        self._inner, self._soc, self.found = inner, soc, found

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **settings: Any) -> Any:
        self._note(name, *args, **settings)
        if name == "expert_mlp":
            self._note("expert_mlp.combine", *args, **settings)
            self._note_activation(*args, **settings)
        settings.pop("segments", None)
        return getattr(self._inner, name)(*args, **settings)

    def _note(self, name: str, *args: Any, **settings: Any) -> None:
        with assume_soc(self._soc):
            chosen = choice(name, *args, **settings)
        self.found.setdefault((name, str(chosen)), Kernel(name, chosen))

    def _note_activation(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up_ECFD: Tensor,
        down_EDF: Tensor,
        *,
        activation: Any,
    ) -> None:
        """An inner back end that looks results up may not call it."""
        function = activation.func if isinstance(activation, partial) else activation
        if getattr(function, "__name__", None) in FACTS:
            gate = x_TD.new_empty(ids_TK.numel(), down_EDF.shape[2])
            self._note(function.__name__, gate, gate, **getattr(activation, "keywords", {}))


def soc_of(hardware: Hardware) -> str | None:
    """The SoC of a device; None for one that is no Ascend device.

    >>> soc_of(HARDWARE["910c"]), soc_of(HARDWARE["h200"])
    ('ascend910c', None)
    """
    return SOCS.get(hardware.name)


def kernels_of(plan: Plan, phase: Phase, soc: str) -> list[Kernel]:
    """What computes the primitives of a step, in the order of their first calls; a primitive that
    is computed in several ways is there several times.
    """
    found: dict[tuple[str, str], Kernel] = {}
    for coord in stage_coords(phase.rules, plan.preset.mesh):
        _run(found, soc, plan, phase, coord)
    return list(found.values())


def _run(
    found: dict[tuple[str, str], Kernel], soc: str, plan: Plan, phase: Phase, coord: Coord
) -> None:
    """One step of the rank at `coord`."""
    mesh, rules, setting, load = plan.preset.mesh, phase.rules, plan.setting, phase.load
    page_size, groups = setting.page_size, mesh.size(rules["requests"])
    decoder = plan.subject.looked_at(mesh, rules).decoder
    shape = shape_of(load, rules, mesh, page_size=page_size)
    params, cache = abstract_state(decoder, mesh, rules, coord, shape, page_size, setting.dtype)
    batch = abstract_batch(shape, rules, mesh, page_size=page_size)
    pages = pages_needed(load.context, page_size)
    row = Rows(range(load.new), load.context - load.new, range(1, 1 + pages))
    parts = mesh.size(drop(rules["tokens"], rules["requests"]))
    segments = segments_of([[row] * load.requests] * groups, shape, parts)
    batch = type(batch)(**{**vars(batch), "segments": segments})
    experts = experts_by_share(decoder, mesh.size(rules["experts"]))
    parts = mesh.size(rules["page_tokens"])
    ops = ChoosingOps(CountingOps([], page_parts=parts, experts=experts), soc, found)
    with record(mesh, coord), use_backend(ops), torch.no_grad():
        forward(decoder, params, cache, batch, rules=rules, interleave=setting.interleave)


def kernel_lines(plan: Plan) -> list[str]:
    """The kernels of both phases as text; nothing for a device that is no Ascend device."""
    soc = soc_of(plan.setting.hardware)
    if soc is None:
        return []
    lines = [f"kernels on {soc}"]
    for phase in (plan.prefill, plan.decode):
        rows = [(k.primitive, str(k.choice)) for k in kernels_of(plan, phase, soc)]
        lines += [f"  {phase.name}", *("    " + row for row in align_columns(rows).splitlines())]
    return [*lines, ""]


def kernel_data(plan: Plan) -> dict[str, Any] | None:
    """The same as JSON-like data; an `op` that is null is composed of torch ops, and `why` says in
    what the call is outside of each op's limits.
    """
    soc = soc_of(plan.setting.hardware)
    if soc is None:
        return None
    phases = (plan.prefill, plan.decode)
    return {"soc": soc} | {
        phase.name: [_data(k) for k in kernels_of(plan, phase, soc)] for phase in phases
    }


def _data(kernel: Kernel) -> dict[str, Any]:
    form = kernel.choice.form
    return {
        "primitive": kernel.primitive,
        "op": form.op if form else None,
        "form": kernel.choice.name,
        "why": {f"{f.op} ({f.name})": list(found) for f, found in kernel.choice.refused},
    }
