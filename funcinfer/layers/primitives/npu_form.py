"""What a form of a primitive is: an op of torch_npu and the limits of what it takes.

The table of them is `npu_limits`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SOCS = ("ascend910b", "ascend910c", "ascend950")
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32")


@dataclass(frozen=True)
class Limit:
    """A demand on one fact about a call; `wanted` says it in words."""

    fact: str
    wanted: str
    holds: Callable[[Any], bool]

    def refusal(self, facts: Mapping[str, Any]) -> str | None:
        """What is wrong; None where the limit holds. KeyError for a fact that is not given."""
        value = facts[self.fact]
        return None if self.holds(value) else f"{self.fact} {value} is not {self.wanted}"


def one_of(fact: str, *values: Any) -> Limit:
    """The fact is one of these values."""
    shown = ", ".join(map(str, values))
    return Limit(fact, shown if len(values) == 1 else f"one of {shown}", lambda v: v in values)


def between(fact: str, low: int, high: int | None = None, *, step: int = 1) -> Limit:
    """The fact is a multiple of `step`, at least `low` and at most `high`.

    >>> between("page_size", 16, 1024, step=16).refusal({"page_size": 24})
    'page_size 24 is not a multiple of 16, 16 to 1024'
    """
    bounds = f"at least {low}" if high is None else f"{low} to {high}"
    words = bounds if step == 1 else f"a multiple of {step}, {bounds}"

    def holds(value: int) -> bool:
        return low <= value and (high is None or value <= high) and value % step == 0

    return Limit(fact, words, holds)


def is_true(fact: str, wanted: str) -> Limit:
    """The fact, a boolean, holds; `wanted` says what that means."""
    return Limit(fact, wanted, bool)


@dataclass(frozen=True)
class Form:
    """One op that computes a primitive: a name, the op, its limits, and more of them by SoC.

    `socs` are those that have the op.
    """

    name: str
    op: str
    limits: tuple[Limit, ...]
    socs: tuple[str, ...] = SOCS
    by_soc: Mapping[str, tuple[Limit, ...]] = field(default_factory=dict)

    def refusals(self, soc: str, facts: Mapping[str, Any]) -> list[str]:
        """Everything in which a call is outside of the form."""
        if soc not in self.socs:
            return [f"not on {soc}, only on {', '.join(self.socs)}"]
        limits = (*self.limits, *self.by_soc.get(soc, ()))
        return [r for limit in limits if (r := limit.refusal(facts))]
