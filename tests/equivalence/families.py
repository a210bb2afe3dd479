"""Every family of the registry as a tiny decoder, and the meshes on which each must be the same.

Importable by worker processes: nothing here needs a fixture or transformers' weights; parameters
are drawn, and only the family's config comes from transformers.
"""

import functools
from typing import Any

from funcinfer.models import registry
from funcinfer.models.decoder import Decoder
from funcinfer.sharding import Mesh, presets
from tests import oracles
from tests.equivalence.harness import Layout, Trace, draw

FAMILIES = tuple(oracles.NAMES)
HEADS = dict(num_attention_heads=8, num_key_value_heads=4)
LATENT = dict(num_attention_heads=8, num_key_value_heads=8)


@functools.cache
def family(name: str, **overrides: int) -> tuple[Any, Decoder, Any]:
    """The Config, decoder and random parameters of a family with 8 query heads."""
    latent = name.startswith(("deepseek", "glm4_moe_lite", "glm_moe_dsa"))
    settings: dict[str, Any] = dict(LATENT if latent else HEADS)
    if name in ("deepseek_v3", "glm4_moe"):
        settings["num_nextn_predict_layers"] = 0
    config = oracles.config_fields(name, **settings | overrides)
    module = registry.family_of(config)
    cfg = module.from_hf(config)
    decoder = module.decoder(cfg)
    return cfg, decoder, draw(decoder)


def layout_of(name: str, mesh: Mesh, *, interleave: int = 1, **options: bool) -> Layout:
    """The preset of a mesh for a family; ValueError where there is none."""
    cfg, _, _ = family(name)
    return Layout(*presets.for_mesh(cfg.num_kv_heads, mesh, **options), interleave=interleave)


def trace_of(lengths: tuple[int, ...]) -> Trace:
    """Requests of these lengths: a chunk or the whole prompt, the rest, a decode row, 3 verify
    rows.
    """
    first = {i: max(1, (n - 4) // 2) for i, n in enumerate(lengths)}
    rest = {i: n - 4 - first[i] for i, n in enumerate(lengths) if n - 4 > first[i]}
    steps = [(False, first), (False, rest)] if rest else [(False, first)]
    left = {i: n - first[i] - rest.get(i, 0) for i, n in enumerate(lengths)}
    one = {i: 1 for i, n in left.items() if n > 0}
    verify = {i: n - 1 for i, n in left.items() if n > 1}
    return Trace(
        dict(enumerate(lengths)),
        tuple(step for step in [*steps, (True, one), (True, verify)] if step[1]),
    )
