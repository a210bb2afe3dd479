"""The SwiGLU MLP against a loop over its width, and on ranks that share the width."""

import pytest
import torch

from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.sharding import Mesh, Rules, shard_map
from tests.layers import slow

D, F, T = 5, 12, 8


def make(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = {name: torch.randn(s.shape, generator=generator) for name, s in mlp_specs(D, F).items()}
    return p, torch.randn(T, D, generator=generator)


def by_loops(gate: list, up: list, down: list, x: list) -> list:
    def dot(a: list[float], b: list[float]) -> float:
        return sum(i * j for i, j in zip(a, b, strict=True))

    rows = []
    for row in x:
        hidden = [slow.swiglu(dot(g, row), dot(u, row)) for g, u in zip(gate, up, strict=True)]
        rows.append([dot(weights, hidden) for weights in down])
    return rows


def test_the_mlp_is_its_equation():
    p, x = make()
    gate, up = p["gate_up"].tolist()
    wanted = torch.tensor(by_loops(gate, up, p["down"].tolist(), x.tolist()))
    found = mlp(p, x, rules=Rules())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    swapped = torch.tensor(by_loops(up, gate, p["down"].tolist(), x.tolist()))
    assert (found - swapped).abs().max() > 0.1


LAYOUTS = {
    "tp2": (Mesh(tp=2), Rules(mlp="tp")),
    "tp4": (Mesh(tp=4), Rules(mlp="tp")),
    "tp3": (Mesh(tp=3), Rules(mlp="tp")),
    "tp4 sp": (Mesh(tp=4), Rules(mlp="tp", residual_tokens="tp")),
    "dp2 tp2, over both": (Mesh(dp=2, tp=2), Rules(mlp=("tp", "dp"), residual_tokens="dp")),
    "dp2, over dp": (Mesh(dp=2), Rules(mlp="dp", residual_tokens="dp")),
    "dp2 tp2 sp, over dp": (Mesh(dp=2, tp=2), Rules(mlp="dp", residual_tokens=("dp", "tp"))),
    "dp2, whole": (Mesh(dp=2), Rules(residual_tokens="dp")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_mlp_is_the_same_on_every_mesh(layout: str):
    mesh, rules = LAYOUTS[layout]
    p, x = make()
    tokens = rules.spec("residual_tokens", None)
    f = shard_map(
        lambda p, x: mlp(p, x, rules=rules), mesh, (rules.specs(mlp_specs(D, F)), tokens), tokens
    )
    torch.testing.assert_close(f(p, x), mlp(p, x, rules=Rules()), rtol=1e-5, atol=1e-4)


def test_the_width_may_have_an_axis_of_its_own():
    p, x = make()
    rules = Rules(shared_mlp="tp")
    specs = rules.specs(mlp_specs(D, F, axis="shared_mlp"))
    none = rules.spec("residual_tokens", None)
    f = shard_map(
        lambda p, x: mlp(p, x, rules=rules, axis="shared_mlp"), Mesh(tp=2), (specs, none), none
    )
    torch.testing.assert_close(f(p, x), mlp(p, x, rules=Rules()), rtol=1e-5, atol=1e-4)


def test_zero_input_gives_zero():
    p, x = make()
    assert torch.equal(mlp(p, 0 * x, rules=Rules()), torch.zeros(T, D))


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"gate_up: dim 1 of shape \(2, 12, 5\) is 12"):
        Rules(mlp="tp").check(mlp_specs(D, F), Mesh(tp=5))
    with pytest.raises(KeyError, match="did you mean 'mlp'"):
        mlp(*make(), rules=Rules(), axis="mpl")
