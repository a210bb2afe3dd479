"""Laws of sampling as scalar loops over lists, one row at a time: what the library is held to."""

import math

from funcinfer.serving.params import SamplingParams

INF = math.inf


def scalar_edit(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], stop=()
) -> list[float]:
    """Bias, repetition, presence and frequency, min_tokens."""
    bias = dict(params.bias_pairs)
    edited = []
    for token, logit in enumerate(logits):
        z = logit + bias.get(token, 0.0)
        if token in prompt or token in output:
            r = params.repetition_penalty
            z = z / r if z > 0 else z * r
        count = output.count(token)
        z -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if token in stop and len(output) < params.min_tokens:
            z = -INF
        edited.append(z)
    return edited


def scalar_law(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[float]:
    """Temperature, then top-k, then top-p, then min-p."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return [float(i == ranked[0]) for i in range(len(logits))]
    top = logits[ranked[0]]
    weights = [math.exp((logit - top) / temperature) for logit in logits]
    if top_k:
        ranked = ranked[:top_k]
    mass = sum(weights[i] for i in ranked)
    if top_p < 1:
        kept, reached = [], 0.0
        for i in ranked:
            if kept and reached >= top_p:
                break
            kept.append(i)
            reached += weights[i] / mass
        ranked = kept
    largest = max(weights)
    ranked = [i for i in ranked if weights[i] >= min_p * largest]
    mass = sum(weights[i] for i in ranked)
    possible = set(ranked)
    return [weights[i] / mass if i in possible else 0.0 for i in range(len(logits))]


def scalar_tokenwise(
    p: list[list[float]], q: list[list[float]], drafts: list[int]
) -> tuple[list[float], list[list[float]]]:
    """How many drafts are accepted, and the law of the token after each number of them.

    p: the laws of the target, one more than drafts. q: the laws of the drafts.
    """
    accepted, last, reached = [], [], 1.0
    for i, x in enumerate(drafts):
        accept = min(1.0, p[i][x] / q[i][x])
        accepted.append(reached * (1 - accept))
        last.append(excess(1.0, p[i], q[i]))
        reached *= accept
    return [*accepted, reached], [*last, p[len(drafts)]]


def scalar_block(
    p: list[list[float]], q: list[list[float]], drafts: list[int]
) -> tuple[list[float], list[list[float]]]:
    """The same by the block rule, with its hits from the last one down."""
    k, reach = len(drafts), [1.0]
    for i, x in enumerate(drafts):
        reach.append(min(1.0, reach[-1] * p[i][x] / q[i][x]))
    accepted, missed = [0.0] * (k + 1), 1.0
    for i in range(k, 0, -1):
        hit = reach[i]
        if i < k:
            rest = sum(max(reach[i] * a - b, 0.0) for a, b in zip(p[i], q[i], strict=True))
            bound = rest + (1 - reach[i])
            hit = rest / bound if bound > 0 else 1.0
        accepted[i] = missed * hit
        missed *= 1 - hit
    accepted[0] = missed
    return accepted, [*(excess(reach[i], p[i], q[i]) for i in range(k)), p[k]]


def excess(scale: float, p: list[float], q: list[float]) -> list[float]:
    """norm(max(scale p - q, 0)); p where there is nothing."""
    rest = [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return [r / sum(rest) for r in rest] if sum(rest) > 0 else p
