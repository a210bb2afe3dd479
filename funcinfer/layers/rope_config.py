"""Reading the RoPE facts of a Hugging Face config.json, key by key, so that none goes unread.

Two spellings are in use: `rope_parameters` (transformers 5), a dict that holds everything or one
such dict a layer type, and `rope_scaling` beside top-level `rope_theta` and
`partial_rotary_factor`. A key with value None counts as absent. Where a fact stands in two places,
both must agree.
"""

from collections.abc import Mapping
from typing import Any

# Facts that may stand at the top level of the config as well as in the RoPE dict.
TOP_LEVEL = frozenset(
    {
        "max_position_embeddings",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rotary_dim",
    }
)


class RopeReader:
    """Hands out the RoPE facts of a config and remembers what was read.

    >>> reader = RopeReader({"rope_theta": 10000, "rope_scaling": None, "vocab_size": 7}, None)
    >>> reader.kind(), reader.number("rope_theta"), sorted(reader.read_keys)
    ('default', 10000.0, ['rope_scaling', 'rope_theta'])
    """

    def __init__(self, config: Mapping[str, Any], layer_type: str | None) -> None:
        self._config = config
        self._read: set[str] = set()
        self._facts = self._pick(layer_type)
        self._unread = {name for name, value in self._facts.items() if value is not None}

    @property
    def read_keys(self) -> frozenset[str]:
        """The top-level keys of the config that were read."""
        return frozenset(self._read)

    def _top(self, name: str) -> Any:
        if name in self._config:
            self._read.add(name)
        return self._config.get(name)

    def _pick(self, layer_type: str | None) -> Mapping[str, Any]:
        new, old = self._top("rope_parameters"), self._top("rope_scaling")
        for name, value in (("rope_parameters", new), ("rope_scaling", old)):
            if not isinstance(value, Mapping | None):
                raise ValueError(f"{name} is {value!r}; it must be an object or null")
        if new and old and new != old:
            raise ValueError(f"rope_parameters {new!r} and rope_scaling {old!r} disagree")
        facts = new or old or {}
        if not any(isinstance(value, Mapping) for value in facts.values()):
            return facts
        chosen = facts.get(layer_type)
        if not isinstance(chosen, Mapping):
            raise ValueError(
                f"the RoPE dict is nested by layer type {sorted(facts)}; "
                f"layer_type={layer_type!r} has no RoPE in it"
            )
        return chosen

    def _take(self, name: str) -> Any:
        """The fact of that name, from the dict, the top level, or both alike; None if absent."""
        self._unread.discard(name)
        inner = self._facts.get(name)
        outer = self._top(name) if name in TOP_LEVEL else None
        if inner is not None and outer is not None and inner != outer:
            raise ValueError(f"{name} is {inner!r} in the RoPE dict and {outer!r} at the top level")
        return outer if inner is None else inner

    def kind(self) -> str:
        """`rope_type`, or its older name `type`; "default" if neither is there."""
        new, old = self._take("rope_type"), self._take("type")
        if new and old and new != old:
            raise ValueError(f"rope_type {new!r} and type {old!r} disagree")
        return new or old or "default"

    def optional_number(self, name: str) -> float | None:
        """The number of that name, or None."""
        value = self._take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"RoPE's {name} is {value!r}; it must be a number")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """The number of that name, or the default; ValueError if there is neither."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"RoPE needs {name!r}, which the config doesn't have")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """The list of numbers of that name."""
        value = self._take(name)
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"RoPE's {name} is {value!r}; it must be a list of numbers")
        return tuple(float(x) for x in value)

    def flag(self, name: str, default: bool) -> bool:
        """The boolean of that name, or the default."""
        value = self._take(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"RoPE's {name} is {value!r}; it must be true or false")
        return default if value is None else value

    def max_length(self) -> int:
        """`max_position_embeddings`."""
        return int(self.number("max_position_embeddings"))

    def original_length(self) -> int:
        """`original_max_position_embeddings`, or without it `max_position_embeddings`."""
        value = self.optional_number("original_max_position_embeddings")
        return self.max_length() if value is None else int(value)

    def stretch(self) -> float:
        """`factor`, or without it max_position_embeddings / original_max_position_embeddings."""
        value = self.optional_number("factor")
        return self.max_length() / self.original_length() if value is None else value

    def rotary_dim(self, head_dim: int, default_partial: float) -> int:
        """How many dims of a head are turned: `rotary_dim`, or `partial_rotary_factor` of head_dim.

        ValueError if both are given and disagree, or if it isn't within the head.
        """
        given = self.optional_number("rotary_dim")
        partial = self.optional_number("partial_rotary_factor")
        size = int(head_dim * (default_partial if partial is None else partial))
        if given is not None:
            if partial is not None and size != given:
                raise ValueError(
                    f"rotary_dim {given:g} and partial_rotary_factor {partial} of head dim "
                    f"{head_dim} disagree"
                )
            size = int(given)
        if not 0 < size <= head_dim:
            raise ValueError(f"a rotary dim of {size} does not fit in a head dim of {head_dim}")
        return size

    def finish(self, kind: str, irrelevant: frozenset[str]) -> None:
        """ValueError if the dict holds a fact that nobody read and that isn't irrelevant."""
        unread = sorted(self._unread - irrelevant)
        if unread:
            raise ValueError(
                f"the RoPE dict has {unread}, which kind {kind!r} doesn't read; name them as "
                "irrelevant if they change nothing"
            )
