"""Every layer and every family gives on any mesh what it gives on one rank, token by token."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from funcinfer.hf_config import read_config
from funcinfer.models import registry
from funcinfer.models.decoder import Decoder, Layer
from funcinfer.sharding import Mesh, Rules, presets, shard
from tests.equivalence.harness import (
    ONE_RANK,
    TRACE,
    Layout,
    Logits,
    Runner,
    assert_same,
    draw,
    run,
    whole_prompts,
)
from tests.equivalence.layouts import LAYOUTS, data, dealt, tensor
from tests.equivalence.small import DECODERS, ONE_LAYER, TIED, attention_sublayer, decoder_of

FAMILIES = ("llama", "qwen2", "qwen3")
HEAD_COUNTS = ((8, 2), (9, 3), (24, 8))


@functools.cache
def one_rank(name: str) -> tuple[Decoder, Any, Logits]:
    decoder = DECODERS[name]
    params = draw(decoder)
    return decoder, params, run(decoder, params, ONE_RANK)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_are_the_same_on_every_mesh(layout: str, name: str):
    decoder, params, wanted = one_rank(name)
    assert_same(run(decoder, params, LAYOUTS[layout]), wanted)


def test_the_trace_covers_each_token_once():
    _, _, wanted = one_rank("whole layers")
    assert wanted.keys() == {(i, at) for i, n in TRACE.lengths.items() for at in range(n)}
    assert all(bool(row.isfinite().all()) for row in wanted.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_head_is_the_same_where_its_table_may_lie_so(layout: str):
    chosen = LAYOUTS[layout]
    params = draw(TIED)
    if chosen.prefill["vocab_in"] != chosen.prefill["vocab_out"]:
        with pytest.raises(ValueError, match="head is tied to the embedding"):
            run(TIED, params, chosen)
    else:
        assert_same(run(TIED, params, chosen), run(TIED, params, ONE_RANK))


@pytest.mark.parametrize("tp", (2, 4))
def test_sequence_parallelism_with_every_count_of_tokens(tp: int):
    """The tokens of a step are rarely a multiple of the ranks that share them."""
    trace = whole_prompts({i: i + 1 for i in range(2 * tp + 1)})
    params = draw(ONE_LAYER)
    wanted = run(ONE_LAYER, params, ONE_RANK, trace)
    layout = Layout(Mesh(tp=tp), Rules(**tensor("tp"), residual_tokens="tp"))
    assert_same(run(ONE_LAYER, params, layout, trace), wanted)


@pytest.mark.parametrize("pcp", (2, 4))
def test_context_parallelism_with_every_count_of_tokens(pcp: int):
    """Prompts shorter than two blocks a rank leave ranks without a token of theirs."""
    trace = whole_prompts({i: i + 1 for i in range(2 * pcp + 1)})
    params = draw(ONE_LAYER)
    wanted = run(ONE_LAYER, params, ONE_RANK, trace)
    layout = Layout(Mesh(pcp=pcp), Rules(**dealt("pcp"), page_tokens="pcp"))
    assert_same(run(ONE_LAYER, params, layout, trace), wanted)


@pytest.fixture(scope="module")
def family(tiny_folder: Callable[..., Path]) -> Callable[..., tuple[Any, Decoder, Any, Logits]]:
    """The Config, decoder, parameters and one-rank logits of a family with so many heads."""

    @functools.cache
    def get(name: str, heads: int, kv_heads: int) -> tuple[Any, Decoder, Any, Logits]:
        sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=1)
        config = read_config(tiny_folder(name, **sizes))
        found = registry.family_of(config)
        cfg = found.from_hf(config)
        decoder = found.decoder(cfg)
        params = draw(decoder)
        return cfg, decoder, params, run(decoder, params, ONE_RANK)

    return get


def legal(heads: int, kv_heads: int, tp: int) -> bool:
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


@pytest.mark.parametrize("tp", (2, 3, 4, 8))
@pytest.mark.parametrize(("heads", "kv_heads"), HEAD_COUNTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_the_same_on_tensor_parallel_ranks(
    name: str, heads: int, kv_heads: int, tp: int, family: Callable[..., Any]
):
    """Also where there are fewer KV heads than ranks; what does not divide is refused at once."""
    cfg, decoder, params, wanted = family(name, heads, kv_heads)
    if not legal(heads, kv_heads, tp):
        with pytest.raises(ValueError, match=r"do not divide one another|does not divide into"):
            Runner(decoder, params, Layout(*presets.tp(cfg.num_kv_heads, tp)))
        return
    for sp in (False, True):
        layout = Layout(*presets.tp(cfg.num_kv_heads, tp, sp=sp))
        assert_same(run(decoder, params, layout), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_the_same_on_data_and_tensor_parallel_ranks(
    name: str, family: Callable[..., Any]
):
    cfg, decoder, params, wanted = family(name, 8, 2)
    for mesh in (Mesh(dp=2), Mesh(dp=3), Mesh(dp=2, tp=2), Mesh(dp=2, tp=4)):
        assert_same(run(decoder, params, Layout(*presets.for_mesh(cfg.num_kv_heads, mesh))), wanted)


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (1, 8), (2, 4), (2, 8), (4, 4), (4, 2)])
def test_each_rank_holds_the_kv_heads_of_its_query_heads(kv_heads: int, tp: int):
    """No head is cut: rank r of tp holds heads from r * kv_heads // tp on."""
    mesh, rules = presets.tp(kv_heads, tp)
    wk = torch.arange(kv_heads)[:, None, None].expand(kv_heads, 3, 2)
    layout = rules.spec("kv_heads", None, "embed")
    local = mesh.local_shape(wk.shape, layout)[0]
    assert local == max(1, kv_heads // tp)
    for rank, coord in enumerate(mesh.coords()):
        held = shard(wk, layout, mesh, coord)[:, 0, 0].tolist()
        assert held == [rank * kv_heads // tp + i for i in range(local)]


def test_an_axis_of_size_one_copies_nothing():
    decoder, params, wanted = one_rank("attention")
    layout = Layout(Mesh(tp=2, rep=1), Rules(**tensor(("tp", "rep"))))
    assert_same(run(decoder, params, layout), wanted)


ILLEGAL = {
    "3 KV heads over 4": (Layout(Mesh(tp=4), Rules(**tensor("tp"))), "does not divide into 4"),
    "more dcp ranks than heads": (
        Layout(Mesh(tp=4, dcp=4), Rules(**tensor(("tp", "dcp")), page_tokens="dcp")),
        "does not divide into 16",
    ),
    "copies of KV heads that are not whole": (
        Layout(Mesh(tp=2, rep=2), Rules(**tensor(("tp", "rep")))),
        "one whole KV head a rank",
    ),
    "a page that can't be dealt": (
        Layout(Mesh(dcp=2), Rules(page_tokens="dcp"), interleave=3),
        "page_size 8 must be a multiple of 6",
    ),
    "tokens that leave their requests": (
        Layout(Mesh(dp=2), Rules(**data("dp") | dict(tokens=None))),
        "tokens=None must extend requests='dp'",
    ),
    "pages away from their requests": (
        Layout(Mesh(dp=2), Rules(**data("dp") | dict(pages=None))),
        "pages=None must equal requests='dp'",
    ),
    "heads and queries over one axis": (
        Layout(Mesh(tp=2), Rules(**tensor("tp"), q_tokens="tp")),
        "heads='tp' and q_tokens='tp' share 'tp'",
    ),
    "an axis that the mesh lacks": (
        Layout(Mesh(tp=2), Rules(**tensor("tpp"))),
        "has no axis 'tpp'; did you mean 'tp'",
    ),
    "another layout in decode": (
        Layout(Mesh(tp=2), Rules(**tensor("tp")), Rules(**tensor("tp") | dict(mlp=None))),
        "rule mlp is 'tp' and None",
    ),
    "another page layout in decode": (
        Layout(Mesh(dcp=2), Rules(), Rules(page_tokens="dcp")),
        "rule page_tokens is None and 'dcp'",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_meshes_are_refused_before_anything_runs(name: str):
    layout, message = ILLEGAL[name]
    heads = (9, 3) if name.startswith("3 KV") else (8, 4)
    decoder = decoder_of(Layer(dict(attn=attention_sublayer(*heads))), *ONE_LAYER.layers)
    with pytest.raises(ValueError, match=message):
        Runner(decoder, draw(decoder), layout)
