"""Which layers count as alike, and which do not."""

import dataclasses
from functools import partial

import pytest
import torch

from funcinfer.models.decoder import Layer, Sublayer, pure
from funcinfer.plan.kinds import alike, cut, whole
from tests.equivalence import tiny


def scaled(by: float):
    def f(x: float) -> float:
        return by * x

    return f


def scaled_too(by: float):
    def f(x: float) -> float:
        return by * x

    return f


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (scaled(2.0), scaled(2.0), True),
        (scaled(2.0), scaled(3.0), False),
        (scaled(2.0), scaled_too(2.0), False),
        (scaled(partial(max, 1)), scaled(partial(max, 1)), True),
        (partial(max, 1, key=abs), partial(max, 1, key=abs), True),
        (partial(max, 1), partial(max, 2), False),
        (partial(max, 1), partial(min, 1), False),
        (partial(max, 1), max, False),
        ([1, (2, "x")], [1, (2, "x")], True),
        ([1, 2], [1], False),
        (1, 1.0, False),
        (1, True, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),  # sublayers run in this order
        (tiny.SIGMOID_EXPERTS, dataclasses.replace(tiny.SIGMOID_EXPERTS), True),
        (tiny.SIGMOID_EXPERTS, dataclasses.replace(tiny.SIGMOID_EXPERTS, scale=1.0), False),
        (torch.ones(1), torch.ones(1), False),
        (None, None, True),
        (int, float, False),
    ],
)
def test_alike(a: object, b: object, wanted: bool) -> None:
    assert alike(a, b) is wanted


def test_one_layer_that_differs_is_a_kind_of_its_own() -> None:
    decoder = tiny.decoder(tiny.latent(5, experts=True))
    assert cut(decoder).counts == (1, 4)
    mine = pure(lambda p, u, *, rules: u, {})
    changed = cut(decoder.replace(3, mlp=mine))
    assert (changed.layers, changed.counts) == ((0, 1, 3), (1, 3, 1))
    assert changed.decoder.layers[2].sublayers["mlp"] is mine
    wide = dataclasses.replace(decoder.layers[4], connect=lambda p, x, branch: branch(x))
    layers = (*decoder.layers[:4], wide)
    assert cut(dataclasses.replace(decoder, layers=layers)).counts == (1, 3, 1)


def test_layers_that_read_others_caches_are_all_kept() -> None:
    decoder = tiny.decoder(tiny.grouped(3))
    reader = Sublayer(
        {}, lambda p, u, cache, *rest, rules: (u, {}, {}), reads=("layers.0.attn.kv",)
    )
    layers = (*decoder.layers, Layer(dict(attn=reader)))
    assert cut(dataclasses.replace(decoder, layers=layers)).counts == (1, 1, 1, 1)


def test_draft_modules_are_kinds_too() -> None:
    decoder = tiny.decoder(tiny.latent(2, experts=True, num_drafts=3))
    assert (cut(decoder).drafts, cut(decoder).draft_counts) == ((0,), (3,))
    assert whole(decoder).draft_counts == (1, 1, 1)
