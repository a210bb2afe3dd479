"""A residual sum and its norm, against loops over floats."""

import pytest
import torch

from funcinfer.layers import primitives as ops
from tests.layers import slow
from tests.layers.test_primitives import EPS, W, X, assert_equal_floats, draw


def test_both_results_equal_the_loop():
    y = draw(3, 5, 7, seed=3)
    normed, total = ops.add_rms_norm(X, y, W, eps=EPS)
    pairs = zip(X.flatten(0, 1).tolist(), y.flatten(0, 1).tolist(), strict=True)
    sums = [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs]
    want = [[x * w for x, w in zip(slow.rms(s, EPS), W.tolist(), strict=True)] for s in sums]
    assert_equal_floats(total.flatten(0, 1), sums)
    assert_equal_floats(normed.flatten(0, 1), want)


def test_the_sum_is_rounded_before_its_norm():
    """257 and 259 have no place in bfloat16: what is normed are the rounded sums."""
    x, y = torch.full((1, 2), 256.0).bfloat16(), torch.tensor([[1.0, 3.0]]).bfloat16()
    normed, total = ops.add_rms_norm(x, y, torch.tensor([512.0, 512.0]), eps=0.0)
    assert total.tolist() == [[256.0, 260.0]]
    apart = ops.rms_norm(total, torch.tensor([512.0, 512.0]), eps=0.0)
    assert torch.equal(normed, apart)
    assert normed.dtype == total.dtype == torch.bfloat16


def test_terms_that_do_not_fit():
    for y in (X[:1], X.float()):
        with pytest.raises(ValueError, match=r"add_rms_norm: x is torch.float64 \(3, 5, 7\) and y"):
            ops.add_rms_norm(X, y, W, eps=EPS)
    with pytest.raises(ValueError, match=r"rms_norm: weight of shape \(1,\)"):
        ops.add_rms_norm(X, X, W[:1], eps=EPS)
