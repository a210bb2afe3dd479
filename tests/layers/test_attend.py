"""Merging attention over keys that lie on several ranks, against one sum over all keys."""

import itertools
from typing import Any

import pytest
import torch

from funcinfer.layers.attend import merge_to, project_out
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks, shard_map

MESH = Mesh(a=2, b=3)
T, N, V = 12, 6, 5


def parts_of(over: tuple[str, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of each index along `over`; some see nothing, and then hold NaN or infinity."""
    generator = torch.Generator().manual_seed(seed)
    n = MESH.size(over)
    outs = torch.randn(n, T, N, V, generator=generator)
    lses = 4 * torch.randn(n, T, N, generator=generator)
    lses[0, ::3] = -torch.inf
    outs[0, ::3] = torch.nan
    lses[:, 1] = -torch.inf
    outs[n - 1, 1] = torch.inf
    return outs, lses


def merged(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """sum_i exp(lse_i) out_i / sum_i exp(lse_i), one entry at a time; 0 where nothing is seen."""
    result = torch.zeros(T, N, V)
    for t, n in itertools.product(range(T), range(N)):
        pairs = [
            (lse[t, n].double().exp(), out[t, n].double())
            for out, lse in zip(outs, lses, strict=True)
            if lse[t, n] > -torch.inf
        ]
        if pairs:
            total = sum(weight for weight, _ in pairs)
            result[t, n] = sum(weight / total * out for weight, out in pairs)
    return result


def merge(over: Any, src: P, dst: P, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What `merge_to` gives over the mesh, and what it should."""
    axes = P(over).axes
    outs, lses = parts_of(axes, seed)

    def local(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
        return merge_to(outs[0], lses[0], over, src, dst)

    f = shard_map(local, MESH, (P(over, *src), P(over, *src[:2])), dst)
    return f(outs, lses), merged(outs, lses)


@pytest.mark.parametrize(
    ("over", "src", "dst"),
    [
        ("a", P(None, None, None), P(None, None, None)),
        ("a", P(None, None, None), P("a", None, None)),
        ("a", P(None, None, None), P(None, "a", None)),
        ("a", P("b", None, None), P("b", None, None)),
        ("a", P("b", None, None), P(("b", "a"), None, None)),
        ("a", P("b", None, None), P("b", "a", None)),
        ("b", P(None, "a", None), P("b", "a", None)),
        ("b", P(None, "a", None), P(None, ("a", "b"), None)),
        (("a", "b"), P(None, None, None), P(None, None, None)),
        (("a", "b"), P(None, None, None), P(("a", "b"), None, None)),
        (("a", "b"), P(None, None, None), P(("b", "a"), None, None)),
        (("b", "a"), P(None, None, None), P(None, ("a", "b"), None)),
        (("a", "b"), P(None, None, None), P("b", "a", None)),
        (("a", "b"), P(None, None, None), P(None, "b", None)),
    ],
)
def test_parts_merge_to_the_whole(over: Any, src: P, dst: P):
    found, wanted = merge(over, src, dst)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_merge_is_weighted():
    """A plain mean of the parts is another result, so the weights are seen."""
    found, _ = merge("a", P(None, None, None), P(None, None, None))
    outs, lses = parts_of(("a",))
    both = (lses > -torch.inf).all(0)
    assert (found - outs.mean(0))[both].abs().max() > 0.1


def test_without_ranks_the_only_part_is_the_result():
    o = torch.randn(3, 2, 4)
    whole = P(None, None, None)
    assert torch.equal(merge_to(o, torch.zeros(3, 2), None, whole, whole), o)


@pytest.mark.parametrize(
    ("over", "src", "dst"),
    [
        ("a", P(None, None, None), P("b", None, None)),  # b arrives, but holds no parts
        ("a", P("a", None, None), P("a", None, None)),  # parts over what shards the tokens
        ("a", P("b", None, None), P(None, "a", None)),  # b is dropped
        ("a", P(None, "b", None), P(None, ("a", "b"), None)),  # a arrives at the major end
        (None, P(None, None, None), P("a", None, None)),
    ],
)
def test_layouts_that_a_merge_can_not_reach_are_refused(over: Any, src: P, dst: P):
    o, lse = torch.zeros(6, 6, V), torch.zeros(6, 6)
    with pytest.raises(ValueError, match=r"can't go from P\(.* may only gain axes of"):
        merge_to(o, lse, over, src, dst)


BIAS_LAYOUTS = {
    "one rank": (Mesh(), Rules()),
    "tp2": (Mesh(tp=2), Rules(heads="tp", o_heads="tp")),
    "tp4": (Mesh(tp=4), Rules(heads="tp", o_heads="tp")),
    "tp4 sp": (Mesh(tp=4), Rules(heads="tp", o_heads="tp", residual_tokens="tp")),
    "queries dealt": (Mesh(tp=4), Rules(q_tokens="tp", o_heads="tp")),
    "o_proj over half": (
        Mesh(a=2, b=2),
        Rules(heads=("a", "b"), o_heads="a", o_tokens="b", residual_tokens=("b", "a")),
    ),
}


@pytest.mark.parametrize("layout", BIAS_LAYOUTS)
def test_the_bias_of_the_output_is_added_once(layout: str):
    """Zero heads give exactly the bias on every mesh; heads without it give what it adds to."""
    mesh, rules = BIAS_LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    wo = torch.randn(7, 8, 3, generator=generator)
    bias = 100 * torch.randn(7, generator=generator)
    o = torch.randn(16, 8, 3, generator=generator)

    def out(o: torch.Tensor) -> torch.Tensor:
        f = shard_map(
            lambda wo, o, bias: project_out(wo, o, rules=rules, bias_D=bias),
            mesh,
            (rules.spec("embed", "o_heads", None), rules.spec("q_tokens", "heads", None), P(None)),
            rules.spec("residual_tokens", None),
        )
        return f(wo, o, bias)

    assert torch.equal(out(torch.zeros_like(o)), bias.expand(16, 7))
    wanted = torch.stack([(row * wo).sum((1, 2)) for row in o[:, None]]) + bias
    torch.testing.assert_close(out(o), wanted, rtol=1e-5, atol=1e-4)


def test_rules_of_no_chain_are_refused_by_the_projection():
    rules = Rules(q_tokens=("a",), residual_tokens=("b",))
    local = (torch.zeros(7, 8, 3), torch.zeros(6, 8, 3))
    with pytest.raises(ValueError, match="are not on one chain"):
        ThreadRanks(Mesh(a=2, b=2)).run(
            lambda wo, o: project_out(wo, o, rules=rules), [local[0]] * 4, [local[1]] * 4
        )
