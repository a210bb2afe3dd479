"""Architecture string -> family. A family is anything with `from_hf`, `decoder` and `name_map`:
mostly a module.

Modules are imported when they are first asked for. A researcher registers a family from a notebook
in one line.
"""

import importlib
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol, cast, runtime_checkable

from funcinfer.checkpoint import NameMap
from funcinfer.models.decoder import Decoder


@runtime_checkable
class Family(Protocol):
    """What a model family consists of."""

    def from_hf(self, config: Mapping[str, Any], /) -> Any:
        """The family's Config from a config.json's content; ValueError for a field it does not
        understand.
        """
        ...

    def decoder(self, cfg: Any, /) -> Decoder:
        """The decoder of a Config."""
        ...

    def name_map(self, cfg: Any, /) -> NameMap:
        """Where a checkpoint holds the decoder's parameters."""
        ...


_families: dict[str, "str | Family"] = {
    "LlamaForCausalLM": "funcinfer.models.llama",
    "Qwen2ForCausalLM": "funcinfer.models.qwen2",
    "Qwen3ForCausalLM": "funcinfer.models.qwen3",
    "Qwen3MoeForCausalLM": "funcinfer.models.qwen3_moe",
    "Glm4MoeForCausalLM": "funcinfer.models.glm4_moe",
    "MiniMaxM2ForCausalLM": "funcinfer.models.minimax_m2",
    "DeepseekV2ForCausalLM": "funcinfer.models.deepseek_v2",
    "DeepseekV3ForCausalLM": "funcinfer.models.deepseek_v3",
    "DeepseekV32ForCausalLM": "funcinfer.models.deepseek_v32",
    "Glm4MoeLiteForCausalLM": "funcinfer.models.glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "funcinfer.models.glm_moe_dsa",
}


def architectures() -> tuple[str, ...]:
    """Every architecture that is registered."""
    return tuple(sorted(_families))


def register(architecture: str, family: "str | Family") -> None:
    """Make `find(architecture)` give `family`: an object with the three functions, or the module's
    import path.

    Replacing a family is allowed and warns. TypeError where a function is missing.

    >>> from funcinfer.models import llama
    >>> register("MyLlamaForCausalLM", llama)
    >>> find("MyLlamaForCausalLM") is llama
    True
    """
    if not isinstance(family, str):
        _complete(architecture, family)
    if architecture in _families:
        warnings.warn(
            f"{architecture} is registered anew and replaces the family before", stacklevel=2
        )
    _families[architecture] = family


def find(architecture: str) -> Family:
    """The family of an architecture; ValueError naming near ones where there is none."""
    if architecture not in _families:
        near = get_close_matches(architecture, _families, n=3, cutoff=0.5)
        hint = f"; near ones: {', '.join(near)}" if near else ""
        raise ValueError(
            f"unknown architecture {architecture!r}{hint}. Known: {', '.join(architectures())}."
            f" Add one by funcinfer.models.registry.register({architecture!r}, family)"
        )
    family = _families[architecture]
    if isinstance(family, str):
        family = _families[architecture] = _complete(architecture, importlib.import_module(family))
    return family


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json's content, by its `architectures`; ValueError where it names
    none.
    """
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1:
        raise ValueError(f"config.json: architectures is {found!r}; it must name one architecture")
    return find(found[0])


def _complete(architecture: str, family: object) -> Family:
    missing = [
        n for n in ("from_hf", "decoder", "name_map") if not callable(getattr(family, n, None))
    ]
    if missing:
        raise TypeError(f"{architecture}: a family needs {', '.join(missing)}; {family!r} lacks it")
    return cast(Family, family)
