"""Latent attention and its indexer as loops over Python floats, one sequence without a cache.

Written from the equations of DeepSeek-V2 and V3.2: keys and values of every head are expanded. All
tensors come as nested lists; `Sizes` holds what the parameters don't say.
"""

from dataclasses import dataclass

from tests.layers import slow

Row = list[float]


@dataclass(frozen=True)
class Sizes:
    kv_lora: int
    nope: int
    rope: int
    scale: float
    theta: float = 100.0
    eps: float = 1e-6
    layout: str = "interleaved"  # or "half_split", or "none"


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def times(matrix: list[Row], row: Row, bias: Row | None = None) -> Row:
    bias = bias or [0.0] * len(matrix)
    return [dot(out, row) + b for out, b in zip(matrix, bias, strict=True)]


def norm(row: Row, weight: Row, eps: float) -> Row:
    return [x * w for x, w in zip(slow.rms(row, eps), weight, strict=True)]


def rope(row: Row, position: int, width: int, theta: float, layout: str) -> Row:
    """Turn the first `width` entries; the others stay."""
    if layout == "none" or width == 0:
        return row
    pairs = {"interleaved": slow.interleaved_pairs, "half_split": slow.half_split_pairs}[layout]
    angles = [position * theta ** (-2 * i / width) for i in range(width // 2)]
    return slow.rotate(row, angles, pairs(width))


def query_latents(p, x, sizes: Sizes) -> list[Row]:
    if "wq" in p:
        return x
    return [norm(times(p["wq_a"], row, p.get("bq_a")), p["q_a_norm"], sizes.eps) for row in x]


def attention(p, x, sizes: Sizes, seen: list[list[int]]) -> list[Row]:
    """The layer's output of a sequence; token t attends over the positions seen[t]."""
    keys, values = [], []
    for position, row in enumerate(x):
        kv = times(p["wkv_a"], row, p.get("bkv_a"))
        latent = norm(kv[: sizes.kv_lora], p["kv_a_norm"], sizes.eps)
        shared = rope(kv[sizes.kv_lora :], position, sizes.rope, sizes.theta, sizes.layout)
        keys.append([times(head, latent) + shared for head in p["w_uk"]])
        values.append([times(head, latent) for head in p["w_uv"]])
    outs = []
    for position, latent in enumerate(query_latents(p, x, sizes)):
        heads = []
        for n, weight in enumerate(p.get("wq_b", p.get("wq"))):
            q = times(weight, latent)
            turned = rope(q[sizes.nope :], position, sizes.rope, sizes.theta, sizes.layout)
            q = q[: sizes.nope] + turned
            scores = [sizes.scale * dot(q, keys[s][n]) for s in seen[position]]
            chosen = [values[s][n] for s in seen[position]]
            heads.append(slow.softmax_sum(scores, chosen, len(p["w_uv"][n]))[0])
        outs.append([sum(dot(w, o) for w, o in zip(row, heads, strict=True)) for row in p["wo"]])
    bias = p.get("bo") or [0.0] * len(p["wo"])
    return [[y + b for y, b in zip(row, bias, strict=True)] for row in outs]


def causal(length: int) -> list[list[int]]:
    return [list(range(t + 1)) for t in range(length)]


def index_scores(p, x, latents, sizes: Sizes) -> list[Row]:
    """Scores of the positions 0..t of each token t; `p` are the indexer's parameters."""
    keys = []
    for position, row in enumerate(x):
        key = slow.layer_norm(times(p["wk"], row), p["k_norm"], p["k_norm_bias"], sizes.eps)
        keys.append(rope(key, position, sizes.rope, sizes.theta, sizes.layout))
    scores = []
    for position, (row, latent) in enumerate(zip(x, latents, strict=True)):
        gates = [gate * len(p["weights"]) ** -0.5 for gate in times(p["weights"], row)]
        queries = [
            rope(times(head, latent), position, sizes.rope, sizes.theta, sizes.layout)
            for head in p["wq"]
        ]
        scores.append(
            [
                sum(
                    gate * max(0.0, dot(q, keys[s]) * len(q) ** -0.5)
                    for gate, q in zip(gates, queries, strict=True)
                )
                for s in range(position + 1)
            ]
        )
    return scores


def top(scores: Row, topk: int) -> list[int]:
    """Positions of the highest scores, the lower position first where they are equal; ascending."""
    return sorted(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:topk])
