"""A model with latent attention by one op before it gives the logits of the plain model."""

import dataclasses

import pytest
import torch

from funcinfer.layers import primitives as ops
from funcinfer.layers.indexer import IndexerConfig
from funcinfer.models import deepseek_v3, mla
from funcinfer.sharding import Mesh
from funcinfer.sharding.presets import for_mesh
from tests.equivalence.harness import ONE_RANK, Layout, assert_same, draw, run
from tests.plan.test_kernels import TINY_MLA

CONFIG = TINY_MLA | dict(num_hidden_layers=2, num_nextn_predict_layers=1)
MESHES = {"one rank": {}, "tp": dict(tp=2), "dp": dict(dp=2), "dcp": dict(dcp=2)}


def layout(**sizes: int) -> Layout:
    mesh, prefill, decode = for_mesh(None, Mesh(**sizes))
    return Layout(mesh, prefill, decode)


@pytest.mark.parametrize("name", MESHES)
def test_logits(name, monkeypatch):
    cfg = deepseek_v3.from_hf(CONFIG)
    plain = mla.decoder(cfg)
    params = draw(plain)
    wanted = run(plain, params, ONE_RANK)
    calls, found = [], ops.mla_prolog
    monkeypatch.setattr(ops, "mla_prolog", lambda *a, **k: (calls.append(1), found(*a, **k))[1])
    copied = mla.with_prologs(params)
    assert_same(run(mla.prolog_decoder(cfg), copied, layout(**MESHES[name])), wanted)
    assert calls
    projections = params["layers"][1]["attn"]["wkv_a"], params["mtp"][0]["layer"]["attn"]["wkv_a"]
    copies = (copied["layers"][1], copied["mtp"][0]["layer"])
    for w, layer in zip(projections, copies, strict=True):
        assert torch.equal(layer["attn"]["prolog"]["dkv_kr"], w.T)


def test_sparse_attention_has_no_prolog():
    cfg = deepseek_v3.from_hf(CONFIG)
    index = IndexerConfig(
        cfg.embed_dim, cfg.attention.q_lora or 0, 2, 16, topk=4, rotate=ops.rotate_interleaved
    )
    sparse = dataclasses.replace(cfg, index=index, index_layers=(0, 1))
    with pytest.raises(ValueError, match="attention is sparse: prolog_mla is dense"):
        mla.prolog_decoder(sparse)
