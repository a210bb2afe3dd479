"""Grouped-query attention over pages, against dense causal attention with loops over heads."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import Rows, make_batch, prepare
from funcinfer.kvcache.paged import PagedKV
from funcinfer.layers.attention import (
    attention,
    attention_specs,
    full_width_norm,
    full_width_norm_specs,
    head_norm,
    head_norm_specs,
    no_norm,
)
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.sharding import Mesh, Rules
from funcinfer.spec import is_spec
from funcinfer.tree import tree_map

D, N, K, H, THETA, EPS, PAGE = 11, 6, 3, 8, 50.0, 1e-5, 4
Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Convention:
    """How the reference reads the equations; each change of one gives a wrong layer."""

    group: Callable[[int], int] = lambda n: n // (N // K)
    pair: Callable[[int], tuple[int, int]] = lambda i: (i, i + H // 2)
    norm_first: bool = True
    first_seen: int = 0
    scale: float = H**-0.5
    future: int = 0
    bias: tuple[str, ...] = ("bq", "bk", "bv", "bo")


def rotated(x_H: torch.Tensor, position: int, convention: Convention) -> torch.Tensor:
    turned = x_H.clone()
    for i in range(H // 2):
        angle = position * THETA ** (-2 * i / H)
        a, b = convention.pair(i)
        turned[a] = x_H[a] * math.cos(angle) - x_H[b] * math.sin(angle)
        turned[b] = x_H[a] * math.sin(angle) + x_H[b] * math.cos(angle)
    return turned


def heads_of(p: Params, x_D: torch.Tensor, which: str, convention: Convention) -> torch.Tensor:
    y = torch.stack([weight @ x_D for weight in p[f"w{which}"]])
    used = f"b{which}" in p and f"b{which}" in convention.bias
    return y + p[f"b{which}"] if used else y


def normed(p: Params, x_NH: torch.Tensor, which: str, norm: str) -> torch.Tensor:
    if norm == "none":
        return x_NH
    squares = x_NH.square()
    mean = squares.mean() if norm == "full_width" else squares.mean(-1, keepdim=True)
    return x_NH / (mean + EPS).sqrt() * p[f"{which}_norm"]


def dense(
    p: Params, x_TD: torch.Tensor, norm: str, convention: Convention | None = None
) -> torch.Tensor:
    """The layer on one whole sequence, in float64, by the equations."""
    c = Convention() if convention is None else convention
    p, x_TD = {name: w.double() for name, w in p.items()}, x_TD.double()

    def turned(x_NH: torch.Tensor, which: str, at: int) -> torch.Tensor:
        if c.norm_first:
            x_NH = normed(p, x_NH, which, norm)
        x_NH = torch.stack([rotated(head, at, c) for head in x_NH])
        return x_NH if c.norm_first else normed(p, x_NH, which, norm)

    keys = [turned(heads_of(p, x, "k", c), "k", at) for at, x in enumerate(x_TD)]
    values = [heads_of(p, x, "v", c) for x in x_TD]
    result = []
    for at, x in enumerate(x_TD):
        query = turned(heads_of(p, x, "q", c), "q", at)
        seen = range(min(c.first_seen, at), min(at + 1 + c.future, len(x_TD)))
        y = p["bo"].clone() if "bo" in p and "bo" in c.bias else torch.zeros(D).double()
        for n in range(N):
            scores = torch.stack([c.scale * query[n] @ keys[s][c.group(n)] for s in seen])
            weights = scores.softmax(0)
            mixed = sum(w * values[s][c.group(n)] for w, s in zip(weights, seen, strict=True))
            y = y + p["wo"][:, n] @ mixed
        result.append(y)
    return torch.stack(result)


NORMS: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "none": (no_norm, dict),
    "head": (head_norm(EPS), lambda: head_norm_specs(H)),
    "full_width": (full_width_norm(EPS), lambda: full_width_norm_specs(N, K, H)),
}


def make_params(norm: str, bias: bool = True, seed: int = 0) -> Params:
    specs = attention_specs(D, N, K, H, qkv_bias=bias, out_bias=bias) | NORMS[norm][1]()
    generator = torch.Generator().manual_seed(seed)
    return tree_map(lambda s: torch.randn(s.shape, generator=generator), specs, is_leaf=is_spec)


def paged(p: Params, sequences: list[torch.Tensor], cuts: list[list[int]], norm: str) -> list[Any]:
    """The layer on several sequences, in steps: step i runs the tokens from cuts[i] to cuts[i + 1]
    of each.
    """
    cache = PagedKV(*(torch.full((9, PAGE, K, H), torch.nan) for _ in range(2)))
    pages = [[7, 2, 4], [1, 8, 3]]
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for starts, ends in itertools.pairwise(cuts):
        rows = [
            Rows(range(end - start), start, pages[i], wanted=0)
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        step = prepare(
            make_batch([rows], page_size=PAGE),
            rules=Rules(),
            rope=lambda positions: rope_tables(Rope(THETA, H), positions),
        )
        x = torch.cat([s[a:b] for s, a, b in zip(sequences, starts, ends, strict=True)])
        scale, qk_norm = H**-0.5, NORMS[norm][0]
        y, cache = attention(p, x, cache, step, rules=Rules(), scale=scale, qk_norm=qk_norm)
        sizes = [b - a for a, b in zip(starts, ends, strict=True)]
        for i, part in enumerate(y.split(sizes)):
            found[i].append(part)
    return [torch.cat(parts) for parts in found]


def sequences_of(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, D, generator=generator) for n in lengths]


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("norm", NORMS)
def test_attention_is_dense_causal_attention(norm: str, bias: bool):
    p, sequences = make_params(norm, bias), sequences_of((11, 7))
    for cuts in ([[0, 0], [11, 7]], [[0, 0], [4, 1], [5, 6], [8, 6], [11, 7]]):
        for found, x in zip(paged(p, sequences, cuts, norm), sequences, strict=True):
            torch.testing.assert_close(
                found, dense(p, x, norm).float(), rtol=1e-5, atol=1e-4, check_dtype=True
            )


WRONG = {
    "heads in groups of every K-th": Convention(group=lambda n: n % K),
    "interleaved pairs": Convention(pair=lambda i: (2 * i, 2 * i + 1)),
    "turned the other way": Convention(pair=lambda i: (i + H // 2, i)),
    "no scale": Convention(scale=1.0),
    "not causal": Convention(future=1),
    "first token unseen": Convention(first_seen=1),
    "no bias of q": Convention(bias=("bk", "bv", "bo")),
    "no bias of k": Convention(bias=("bq", "bv", "bo")),
    "no bias of v": Convention(bias=("bq", "bk", "bo")),
    "no bias of the output": Convention(bias=("bq", "bk", "bv")),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_convention_matters(name: str):
    """A layer read in another way gives other numbers, so the comparison above can see it."""
    p, (x,) = make_params("head"), sequences_of((7,))
    assert (dense(p, x, "head") - dense(p, x, "head", WRONG[name])).abs().max() > 1e-2


@pytest.mark.parametrize("norm", ("head", "full_width"))
def test_norms_come_before_the_rotation(norm: str):
    p, (x,) = make_params(norm), sequences_of((7,))
    late = dense(p, x, norm, Convention(norm_first=False))
    assert (dense(p, x, norm) - late).abs().max() > 1e-2
    assert (dense(p, x, norm) - dense(p, x, "none")).abs().max() > 1e-2


def test_a_token_that_is_padding_gives_the_bias_alone():
    p = make_params("none")
    rows = Rows(range(2), 0, [1])
    step = prepare(
        make_batch([[rows]], page_size=PAGE, multiple=5),
        rules=Rules(),
        rope=lambda positions: rope_tables(Rope(THETA, H), positions),
    )
    cache = PagedKV(*(torch.full((2, PAGE, K, H), torch.nan) for _ in range(2)))
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    y, _ = attention(p, x, cache, step, rules=Rules(), scale=1.0)
    assert torch.equal(y[2:], p["bo"].expand(3, D))


def test_heads_that_do_not_divide_are_refused():
    specs = attention_specs(D, N, K, H)
    with pytest.raises(ValueError, match=r"wk: dim 0 of shape \(3, 8, 11\) is 3"):
        Rules(heads="tp", kv_heads="tp", o_heads="tp").check(specs, Mesh(tp=2))
