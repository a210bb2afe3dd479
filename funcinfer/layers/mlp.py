"""SwiGLU MLP, its width over any mesh axes.

    h[T, F_m] = silu(x . gate) * (x . up)      y[T, D] {U_m} = h . down  -> y[T_residual, D]

T tokens, D model width, F MLP width. Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from typing import Any

import torch

from funcinfer.layers import primitives as ops
from funcinfer.sharding import P, Rules, drop, reduce_to, reshard
from funcinfer.spec import ParamSpec


def mlp_specs(embed: int, width: int, *, axis: str = "mlp") -> dict[str, ParamSpec]:
    """`gate_up` (2, F, D): gate first, then up; `down` (D, F). `axis` names the width."""
    return dict(
        gate_up=ParamSpec((2, width, embed), (None, axis, "embed")),
        down=ParamSpec((embed, width), ("embed", axis)),
    )


def mlp(p: dict[str, Any], x_TD: torch.Tensor, *, rules: Rules, axis: str = "mlp") -> torch.Tensor:
    """down(silu(gate x) * up x), from and to the residual_tokens layout.

    >>> p = dict(gate_up=torch.ones(2, 3, 2), down=torch.ones(2, 3))
    >>> mlp(p, torch.ones(1, 2), rules=Rules.none())
    tensor([[10.5696, 10.5696]])
    """
    residual, width = rules["residual_tokens"], rules[axis]
    whole = P(drop(residual, width), None)
    x_TD = reshard(x_TD, P(residual, None), whole)
    gate_TF, up_TF = ops.linear(x_TD, p["gate_up"]).unbind(-2)
    y_TD = ops.linear(ops.swiglu(gate_TF, up_TF), p["down"])
    return reduce_to(y_TD, width, whole, P(residual, None))
