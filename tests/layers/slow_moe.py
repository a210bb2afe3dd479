"""Routers and experts as loops over Python floats, one token and one expert at a time.

Written from the equations of the papers and of `transformers`, not from the code under test; nested
lists in, nested lists out. A router gives {expert: weight}, in order of choice.
"""

import math
from collections.abc import Callable

from tests.layers import slow

Row = list[float]
Matrix = list[Row]
Chosen = dict[int, float]


def times(w: Matrix, x: Row) -> Row:
    return [sum(a * b for a, b in zip(row, x, strict=True)) for row in w]


def best(scores: dict[int, float], k: int) -> list[int]:
    """The k largest, the largest first; of equal ones the lowest id."""
    return sorted(scores, key=lambda e: (-scores[e], e))[:k]


def softmax(logits: Row) -> Row:
    top = max(logits)
    total = sum(math.exp(z - top) for z in logits)
    return [math.exp(z - top) / total for z in logits]


def in_best_groups(choice: Row, groups: int, keep: int, score: Callable[[Row], float]):
    """The choices of the experts in the `keep` best groups: the others can't be chosen at all."""
    size = len(choice) // groups
    scores = {g: score(choice[g * size : (g + 1) * size]) for g in range(groups)}
    kept = best(scores, keep)
    return {e: z for e, z in enumerate(choice) if e // size in kept}


def weigh(chosen: list[int], score: Row, normalise: bool, scale: float) -> Chosen:
    total = sum(score[e] for e in chosen) if normalise else 1.0
    return {e: score[e] / total * scale for e in chosen}


def softmax_top_k(logits: Row, k: int, normalise: bool) -> Chosen:
    score = softmax(logits)
    return weigh(best(dict(enumerate(score)), k), score, normalise, 1.0)


def softmax_group_top_k(logits: Row, k: int, groups: int, keep: int, scale: float) -> Chosen:
    score = softmax(logits)
    return weigh(best(in_best_groups(score, groups, keep, max), k), score, False, scale)


def sigmoid_top_k(logits: Row, bias: Row, k: int) -> Chosen:
    return sigmoid_group_top_k(logits, bias, k, 1, 1, True, 1.0)


def sigmoid_group_top_k(
    logits: Row, bias: Row, k: int, groups: int, keep: int, normalise: bool, scale: float
) -> Chosen:
    score = [slow.sigmoid(z) for z in logits]
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    allowed = in_best_groups(choice, groups, keep, lambda group: sum(sorted(group)[-2:]))
    return weigh(best(allowed, k), score, normalise, scale)


def expert(gate_up: list[Matrix], down: Matrix, x: Row, activation=slow.swiglu) -> Row:
    gate, up = times(gate_up[0], x), times(gate_up[1], x)
    return times(down, [activation(g, u) for g, u in zip(gate, up, strict=True)])


def moe(p, xs: Matrix, chosen: list[list[tuple[int, float]]], activation=slow.swiglu) -> Matrix:
    """Each token's weighted sum over its (expert, weight) pairs, and its shared experts once."""
    outs = []
    for x, pairs in zip(xs, chosen, strict=True):
        parts = [
            [w * y for y in expert(p["gate_up"][e], p["down"][e], x, activation)] for e, w in pairs
        ]
        if "shared" in p:
            parts.append(expert(p["shared"]["gate_up"], p["shared"]["down"], x, activation))
        outs.append([sum(part[d] for part in parts) for d in range(len(x))])
    return outs
