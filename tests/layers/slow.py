"""The equations of the primitives as loops over Python floats, one token and one head at a time.

Written from the papers, not from the code under test; nested lists in, nested lists out.
"""

import math

Row = list[float]


def rms(row: Row, eps: float) -> Row:
    mean_square = sum(x * x for x in row) / len(row)
    return [x / math.sqrt(mean_square + eps) for x in row]


def layer_norm(row: Row, weight: Row, bias: Row, eps: float) -> Row:
    mean = sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [
        (x - mean) / math.sqrt(variance + eps) * w + b
        for x, w, b in zip(row, weight, bias, strict=True)
    ]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def swiglu(gate: float, up: float) -> float:
    return gate * sigmoid(gate) * up


def swiglu_clamped(gate: float, up: float, limit: float) -> float:
    return swiglu(min(gate, limit), max(-limit, min(up, limit)))


def swiglu_oai(gate: float, up: float, limit: float, alpha: float) -> float:
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate * sigmoid(alpha * gate) * (up + 1)


def rotate(row: Row, angles: Row, pairs: list[tuple[int, int]]) -> Row:
    """Turn each pair of coordinates by its angle; the others stay."""
    turned = list(row)
    for angle, (i, j) in zip(angles, pairs, strict=True):
        turned[i] = row[i] * math.cos(angle) - row[j] * math.sin(angle)
        turned[j] = row[i] * math.sin(angle) + row[j] * math.cos(angle)
    return turned


def half_split_pairs(rotary_dim: int) -> list[tuple[int, int]]:
    return [(i, i + rotary_dim // 2) for i in range(rotary_dim // 2)]


def interleaved_pairs(rotary_dim: int) -> list[tuple[int, int]]:
    return [(2 * i, 2 * i + 1) for i in range(rotary_dim // 2)]


def softmax_sum(scores: Row, values: list[Row], width: int) -> tuple[Row, float]:
    """(softmax-weighted sum of values, natural log of the sum of exponentials)."""
    if not scores:
        return [0.0] * width, -math.inf
    top = max(scores)
    lse = top + math.log(sum(math.exp(z - top) for z in scores))
    out = [
        sum(math.exp(z - lse) * value[j] for z, value in zip(scores, values, strict=True))
        for j in range(width)
    ]
    return out, lse


def paged_attention(q, k, v, page_table, rows, lo, hi, scale, sinks=None):
    """(out [T][N][V], lse [T][N]); k, v: [pages][page][K][...]. A sink is a key of value 0."""
    page, width = len(k[0]), len(v[0][0][0])
    outs, lses = [], []
    for token, heads in enumerate(q):
        table, group = page_table[rows[token]], len(heads) // len(k[0][0])
        seen = [s for s in range(len(table) * page) if lo[token] <= s < hi[token]]
        places = [(table[s // page], s % page) for s in seen]
        out_row, lse_row = [], []
        for n, query in enumerate(heads):
            keys = [k[a][b][n // group] for a, b in places]
            scores = [scale * sum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
            values = [v[a][b][n // group] for a, b in places]
            if sinks is not None and sinks[n] != -math.inf:
                scores, values = [*scores, sinks[n]], [*values, [0.0] * width]
            out, lse = softmax_sum(scores, values, width)
            out_row.append(out)
            lse_row.append(lse)
        outs.append(out_row)
        lses.append(lse_row)
    return outs, lses


def frequencies(theta: float, rotary_dim: int) -> Row:
    return [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def linear(theta, rotary_dim, factor):
    return [f / factor for f in frequencies(theta, rotary_dim)]


def dynamic_ntk(theta, rotary_dim, factor, max_position_embeddings, length):
    """theta grows so that the slowest pair is stretched by factor * L / L0 - (factor - 1)."""
    stretch = 1.0
    if length > max_position_embeddings:
        stretch = factor * length / max_position_embeddings - (factor - 1)
    # theta'^(-(d - 2) / d) = theta^(-(d - 2) / d) / stretch
    return frequencies(theta * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


def yarn(theta, rotary_dim, factor, original, beta_fast, beta_slow, truncate):
    def pair_that_turns(times):  # theta^(-2 i / d) * original = 2 pi times, solved for i
        return rotary_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    result = []
    for i, f in enumerate(frequencies(theta, rotary_dim)):
        ramp = min(max((i - low) / width, 0), 1)
        result.append(f * (1 - ramp) + f / factor * ramp)
    return result


def llama3(theta, rotary_dim, factor, low_freq_factor, high_freq_factor, original):
    result = []
    for f in frequencies(theta, rotary_dim):
        wavelength = 2 * math.pi / f
        if wavelength < original / high_freq_factor:
            result.append(f)
        elif wavelength > original / low_freq_factor:
            result.append(f / factor)
        else:
            smooth = (original / wavelength - low_freq_factor) / (
                high_freq_factor - low_freq_factor
            )
            result.append((1 - smooth) * f / factor + smooth * f)
    return result


def longrope(theta, rotary_dim, short_factor, long_factor, original, length):
    numbers = long_factor if length > original else short_factor
    return [f / x for f, x in zip(frequencies(theta, rotary_dim), numbers, strict=True)]


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
