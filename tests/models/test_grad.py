"""Gradients of unsharded layers against finite differences, and dtypes from the file to the logits.

Nothing trains here: gradients serve calibration, attribution and adversarial checks, and a layer
that autograd can follow has no hidden write.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import funcinfer
from funcinfer import Mesh, Model, Rules, build
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
from funcinfer.layers.embedding import embed, lm_head, take_rows
from funcinfer.layers.mlp import mlp, mlp_specs
from funcinfer.layers.rope import Rope, rope_tables
from funcinfer.spec import is_spec, with_dtype
from funcinfer.tree import leaves_with_path, map_with_path, tree_leaves, tree_map
from tests.equivalence.harness import draw
from tests.equivalence.small import ONE_LAYER, VOCAB
from tests.models.test_parity import FAMILIES, SETTINGS

D, N, K, H, PAGE = 3, 4, 2, 2, 2
ALONE = Rules()


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def check(f: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(f, inputs)


NORMS = {
    "none": (no_norm, {}),
    "head": (head_norm(1e-5), head_norm_specs(H)),
    "full_width": (full_width_norm(1e-5), full_width_norm_specs(N, K, H)),
}


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_attention(norm: str):
    """Two requests, one with a chunk before; the cache is made inside and starts as NaN."""
    qk_norm, norm_specs = NORMS[norm]
    specs = attention_specs(D, N, K, H, qkv_bias=True, out_bias=True) | norm_specs
    layer = partial(attention, rules=ALONE, scale=H**-0.5, qk_norm=qk_norm)
    rope = partial(rope_tables, Rope(10.0, H))
    steps = [
        make_batch([rows], page_size=PAGE, multiple=3)
        for rows in ([Rows(range(2), 0, [3, 1])], [Rows([7], 2, [3, 1]), Rows([8], 0, [2])])
    ]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        p = dict(zip(specs, weights, strict=True))
        cache = PagedKV(*(x.new_full((4, PAGE, K, H), torch.nan) for _ in range(2)))
        found = []
        for rows, batch in zip(x.split(3), steps, strict=True):
            y, cache = layer(p, rows, cache, prepare(batch, rules=ALONE, rope=rope))
            found.append(y)
        return torch.cat(found)

    weights = [leaf(*s.shape, seed=i) for i, s in enumerate(specs.values())]
    check(run, leaf(6, D, seed=99), *weights)


def test_gradients_of_the_mlp():
    specs = mlp_specs(D, 3)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return mlp(dict(zip(specs, weights, strict=True)), x, rules=ALONE)

    check(run, leaf(3, D), *(leaf(*s.shape, seed=i) for i, s in enumerate(specs.values(), 1)))


def test_gradients_of_embedding_and_head():
    ids, out = torch.tensor([2, 0, 2, 6]), torch.tensor([3, 1])

    def run(table: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        x = take_rows(embed(table, ids, rules=ALONE), out, rules=ALONE)
        return lm_head(head, x, vocab_size=6, rules=ALONE)[:, :6]

    check(run, leaf(7, D), leaf(7, D, seed=1))


def small_model(dtype: torch.dtype) -> Model:
    return Model(ONE_LAYER, build(ONE_LAYER), draw(ONE_LAYER, dtype=dtype))


def test_functional_gradients_of_a_whole_model():
    """The directional derivative of a loss over every parameter, by a central difference."""
    model = small_model(torch.float64)
    ids = torch.tensor([[4, 9, 1, 9, 30], [7, 7, 2, 0, 11]])

    def loss(params: Any) -> torch.Tensor:
        logits = dataclasses.replace(model, params=params).logits(ids)
        return logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()

    gradients = torch.func.grad(loss)(model.params)
    assert all(bool((g != 0).any()) for g in tree_leaves(gradients))
    seeds = {path: i for i, (path, _) in enumerate(leaves_with_path(model.params))}
    direction = map_with_path(
        lambda path, w: leaf(*w.shape, seed=seeds[path]).detach(), model.params
    )
    wanted = sum(
        float((g * d).sum())
        for g, d in zip(tree_leaves(gradients), tree_leaves(direction), strict=True)
    )
    up, down = (
        loss(tree_map(lambda w, d, s=step: w + s * d, model.params, direction))
        for step in (1e-6, -1e-6)
    )
    assert float(up - down) / 2e-6 == pytest.approx(wanted, rel=1e-5)


def test_gradients_are_refused_across_ranks():
    """No rule says what the gradient of a collective is, so none is given."""
    rules = Rules(heads="tp", kv_heads="tp", o_heads="tp", mlp="tp")
    model = Model(ONE_LAYER, build(ONE_LAYER, rules), draw(ONE_LAYER), mesh=Mesh(tp=2), rules=rules)
    for weight in tree_leaves(model.params):
        weight.requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient rule is defined across ranks"):
        model.logits(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("name", FAMILIES)
def test_leaves_declared_wider_stay_wider(
    name: str, dtype: torch.dtype, tiny_folder: Callable[..., Path]
):
    """From the file to the logits: what is declared in float32 never passes through half."""
    model = funcinfer.load(tiny_folder(name, **SETTINGS.get(name, {})), dtype=dtype)
    declared = dict(leaves_with_path(model.fns.specs, is_leaf=is_spec))
    for path, weight in leaves_with_path(model.params):
        wide = declared[path].dtype is torch.float32
        wanted = torch.promote_types(torch.float32, dtype) if wide else dtype
        assert weight.dtype is wanted, path
    cache = model.local_cache(2, model.page_size)
    declared = dict(leaves_with_path(model.fns.cache_specs(2, model.page_size), is_leaf=is_spec))
    for path, pages in leaves_with_path(cache):
        assert pages.dtype is with_dtype(declared[path], dtype).dtype
    with torch.no_grad():
        assert model.logits(torch.tensor([[5, 9, 3]])).dtype is dtype


def test_half_precision_is_near_single_precision(tiny_folder: Callable[..., Path]):
    """Sums, norms and softmax are wider inside, so that only rounding of the weights is seen."""
    ids = torch.randint(3, VOCAB, (2, 19), generator=torch.Generator().manual_seed(0))
    folder = tiny_folder("llama")
    single, half = (
        funcinfer.load(folder, dtype=dtype).logits(ids).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    gaps = (single - half).abs()
    assert 1e-4 < gaps.mean() < 0.03 and gaps.max() < 0.3
