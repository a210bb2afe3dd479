"""Latent attention by one op before it: equal to the slow loop of the whole layer, on any mesh."""

import dataclasses
from functools import partial

import pytest
import torch

from funcinfer.layers import mla_prolog as module
from funcinfer.layers import primitives as ops
from funcinfer.layers.mla import mla_cache_specs, mla_specs
from funcinfer.layers.mla_prolog import prolog_mla, prolog_specs, with_prolog
from funcinfer.tree import tree_map
from tests.layers import latent
from tests.layers.latent import ALONE, MESHES, LayerUnderTest, compare, draw, steps
from tests.layers.test_mla import PLAIN, XS, slow

PARAMS = draw(mla_specs(PLAIN))


def layer() -> LayerUnderTest:
    def apply(p, x, cache, step, *, rules):
        return (*prolog_mla(p, x, cache, step, rules=rules, cfg=PLAIN), None)

    return LayerUnderTest(prolog_specs(PLAIN), partial(mla_cache_specs, PLAIN), apply)


@pytest.fixture(scope="module")
def truth() -> latent.Result:
    return slow(PLAIN, PARAMS, XS)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Notes each call of the primitive; the expanded form is never taken."""
    noted: list[str] = []

    def spy(*args, **settings):
        noted.append("mla_prolog")
        return found(*args, **settings)

    found = ops.mla_prolog
    monkeypatch.setattr(ops, "mla_prolog", spy)
    monkeypatch.setattr(module, "is_expanded", lambda *a, **k: False)
    return noted


@pytest.mark.parametrize("size", [99, 3, 1])
def test_layer_equals_the_slow_loop(size, truth, calls):
    work = steps(size)
    got, _ = latent.run(layer(), with_prolog(PARAMS), XS, work)
    compare(got, truth, 1e-6)
    assert len(calls) == len(work)


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_equals_one_rank(name, truth, calls):
    where = MESHES[name]
    got, _ = latent.run(layer(), with_prolog(PARAMS), XS, steps(4, decode=2), where)
    compare(got, truth, 1e-6)
    still = ("residual_tokens", "tokens", "q_tokens", "requests")
    moves = [len({r[x] for x in still}) > 1 for r in (where.rules, where.decode_rules) if r]
    assert bool(calls) == (not all(moves))


def test_the_expanded_form_is_taken_as_in_mla(truth, monkeypatch):
    monkeypatch.setattr(module, "is_expanded", lambda *a, **k: True)
    monkeypatch.setattr(ops, "mla_prolog", None)
    compare(latent.run(layer(), with_prolog(PARAMS), XS, steps(4))[0], truth, 1e-6)


@pytest.mark.parametrize(
    "path", ["prolog.dq", "prolog.uq_qr", "prolog.dkv_kr", "q_a_norm", "kv_a_norm", "w_uk"]
)
def test_each_parameter_is_read(path, truth, calls):
    params = tree_map(torch.clone, with_prolog(PARAMS))
    leaf = (params["prolog"] if "." in path else params)[path.split(".")[-1]]
    leaf.add_(0.5 * torch.rand_like(leaf))
    got, _ = latent.run(layer(), params, XS, steps(99), ALONE)
    assert max((got[n] - truth[n]).abs().max().item() for n in got) > 1e-2


@pytest.mark.parametrize(
    "change", [dict(q_lora=None), dict(bias=True), dict(rotate=ops.rotate_half_split)]
)
def test_attention_that_has_no_prolog(change):
    with pytest.raises(ValueError, match="has no prolog: it needs a query latent"):
        prolog_specs(dataclasses.replace(PLAIN, **change))


def test_shapes_that_do_not_go_together():
    p = with_prolog(PARAMS)
    copies, norms = p["prolog"], (p["q_a_norm"], p["kv_a_norm"])
    weights = ops.PrologWeights(
        copies["dq"], norms[0], copies["uq_qr"], p["w_uk"], copies["dkv_kr"][:, 1:], norms[1]
    )
    cos, sin = torch.ones(2, 2), torch.ones(2, 2)
    ckv, kpe = torch.zeros(2, 4, 11), torch.zeros(2, 4, 4)
    x, slots = torch.ones(2, 23), torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"mla_prolog: x \(2, 23\), .*dkv_kr \(23, 14\)"):
        ops.mla_prolog(x, weights, cos, sin, ckv, kpe, slots, eps=0.0)
