"""Random rules: each set that the check lets through gives the one-rank logits, or raises.

The presets are a handful of layouts that somebody thought of. Most layout bugs show only where an
axis stands in an unusual place: a token axis that also shards heads, axes in another order than the
mesh's, an embedding over half of the data axis.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from funcinfer.models import gqa, mla
from funcinfer.sharding import Mesh, Rules, ThreadRanks
from tests.equivalence.harness import (
    ONE_RANK,
    TOLERANCE,
    Layout,
    Logits,
    Runner,
    Trace,
    distance,
    draw,
    run,
)
from tests.equivalence.small import ONE_LAYER
from tests.equivalence.tiny import SIGMOID_EXPERTS, grouped, latent

MESH = Mesh(a=2, b=2, c=2)
WITH_EXPERTS = replace(grouped(1), experts=SIGMOID_EXPERTS, expert_layers=(0,))
# A model of each kind, and how many rule sets it is tried with.
MODELS = {
    "grouped-query attention": (ONE_LAYER, 240),
    "latent attention": (mla.decoder(latent(1)), 120),
    "experts": (gqa.decoder(WITH_EXPERTS), 180),
}
SHORT = Trace(
    lengths={0: 9, 1: 6, 2: 5, 3: 4},
    steps=((False, {0: 5, 1: 3, 2: 1}), (True, {0: 3, 1: 3, 2: 3, 3: 1})),
)
Axes = tuple[str, ...]


def random_rules(rng: random.Random) -> Rules:
    """Rules that often obey the laws of the token axes and of heads, and often enough do not."""
    requests = few(rng, MESH.names, 0.7)
    tokens = extended(rng, requests, 0.25)
    rules: dict[str, Axes] = {
        name: few(rng, MESH.names)
        for name in ("heads", "kv_heads", "o_heads", "mlp", "vocab_in", "vocab_out", "page_tokens")
    }
    rules |= dict(requests=requests, pages=requests, tokens=tokens)
    rules |= {name: extended(rng, tokens, 0.35) for name in ("residual_tokens", "q_tokens")}
    if rng.random() < 0.3:
        rules["logits"] = tuple(a for a in rules["vocab_out"] if a not in requests)
    if rng.random() < 0.85:
        free = [a for a in MESH.names if a not in rules["q_tokens"]]
        kv_heads = rules["kv_heads"] = few(rng, free, 0.6)
        pages = few(rng, [a for a in MESH.names if a not in kv_heads + requests], 0.6)
        rules["page_tokens"] = pages
        rules["heads"] = kv_heads + tuple(a for a in pages if a in free and rng.random() < 0.7)
        if rng.random() < 0.5:
            more = rng.choice([(), rules["q_tokens"][:1]])
            rules["o_heads"] = rules["heads"] + more
    rules |= {name: few(rng, MESH.names) for name in ("experts", "shared_mlp")}
    free = [a for a in MESH.names if a not in rules["experts"]]
    rules["moe_tokens"] = extended(rng, rng.choice([requests, rules["residual_tokens"]]), 0.25)
    rules["expert_mlp"] = few(rng, [a for a in free if a not in rules["moe_tokens"]])
    if rng.random() < 0.15:
        rules["o_tokens"] = few(rng, MESH.names, 1)
    if rng.random() < 0.1:
        rules["residual_tokens"] = few(rng, MESH.names)
    return Rules(**rules)


def few(rng: random.Random, axes: Sequence[str], chance: float = 0.5) -> Axes:
    """Nothing, one axis or two."""
    count = rng.choice([0, 1, 1, 2]) if rng.random() < chance else 0
    return tuple(rng.sample(list(axes), min(count, len(axes))))


def extended(rng: random.Random, axes: Axes, chance: float) -> Axes:
    """`axes` with others behind them, in any order."""
    others = rng.sample([a for a in MESH.names if a not in axes], 3 - len(axes))
    return axes + tuple(a for a in others if rng.random() < chance)


@pytest.mark.parametrize("model", MODELS)
def test_no_legal_rules_are_silently_wrong(model: str):
    decoder, rule_sets = MODELS[model]
    params = draw(decoder)
    wanted = run(decoder, params, ONE_RANK, SHORT)
    ranks, rng = ThreadRanks(MESH), random.Random(0)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    sharded: Counter[str] = Counter()
    for _ in range(rule_sets):
        rules = random_rules(rng)
        try:
            runner = Runner(decoder, params, Layout(MESH, rules), SHORT, ranks=ranks)
        except ValueError:
            outcomes["refused"] += 1
            continue
        found: Logits = {}
        try:
            for decode, counts in SHORT.steps:
                found |= runner.step(decode, counts)
            runner.check_copies()
        except ValueError as error:
            wrong.append(f"{rules!r} passed the check, then: {error}")
            continue
        if not (gap := distance(found, wanted)) <= TOLERANCE:
            wrong.append(f"{rules!r} is off by {gap:.2g}")
            continue
        outcomes["right"] += 1
        sharded.update(name for name, axis in rules.items() if axis is not None)
    assert not wrong, "\n".join(wrong)
    # The rules that were right are many, and each logical axis was sharded in some of them.
    assert outcomes["right"] >= rule_sets // 4
    assert outcomes["refused"] >= rule_sets // 10
    for name in ("requests", "tokens", "residual_tokens", "q_tokens", "page_tokens", "heads"):
        assert sharded[name] >= rule_sets // 16, name
    for name in ("kv_heads", "o_heads", "mlp", "vocab_in", "vocab_out", "experts", "moe_tokens"):
        assert sharded[name] >= rule_sets // 50, name
    for name in ("o_tokens", "logits", "expert_mlp"):
        assert sharded[name] >= 1, name
