"""Sparse attention over any mesh: queries dealt over tp (DSA-CP), pages dealt over dcp, both.

DeepSeek-V3.2, where each layer selects, and GLM-5, where a layer attends over the selection of the
one before it. A request has several times the positions that its tokens select. Rules are written
out here, so that the presets are not what proves them.
"""

import functools
from typing import Any

import pytest
import torch

from funcinfer.kvcache.layout import owner
from funcinfer.layers import indexer, mla
from funcinfer.models import mla as latent_models
from funcinfer.models.decoder import Decoder, cache_specs
from funcinfer.sharding import Axis, Mesh, Rules, axis_size
from tests.equivalence import tiny
from tests.equivalence.families import family
from tests.equivalence.harness import (
    ONE_RANK,
    TOLERANCE,
    TRACE,
    Layout,
    Logits,
    Runner,
    Trace,
    assert_same,
    distance,
    draw,
    run,
    run_drafts,
    whole_prompts,
)
from tests.equivalence.layouts import data, dealt

NAMES = ("deepseek_v32", "glm_moe_dsa")
WIDE = ("mlp", "shared_mlp", "expert_mlp", "vocab_in", "vocab_out")
# A chunk as long as a rank's part, prompts of one token, decode and verify rows, idle requests.
SHORT = Trace(
    lengths={0: 19, 1: 3, 2: 12},
    steps=(
        (False, {0: 9, 1: 1}),
        (False, {0: 5, 2: 7}),
        (True, {0: 1, 1: 1, 2: 1}),
        (True, {0: 3, 2: 3}),
        (True, {0: 1}),
    ),
)


def sparse_cp(**rules: Axis) -> Rules:
    """DSA-CP: all heads and whole caches on each rank, queries dealt by tokens, o_proj by heads."""
    over_tp = dict.fromkeys((*WIDE, "q_tokens", "o_heads"), "tp")
    return Rules(**{**over_tp, **rules})


DCP = dict.fromkeys(("heads", "o_heads", *WIDE), ("tp", "dcp")) | {"page_tokens": "dcp"}
LAYOUTS = {
    "queries over tp2": Layout(Mesh(tp=2), sparse_cp()),
    "queries over tp4": Layout(Mesh(tp=4), sparse_cp()),
    "queries over tp4, residual too": Layout(Mesh(tp=4), sparse_cp(residual_tokens="tp")),
    "dp2, queries over tp2": Layout(
        Mesh(dp=2, tp=2), sparse_cp(**data("dp") | dict(q_tokens=("dp", "tp")))
    ),
    "dp2, queries over tp2, experts over both": Layout(
        Mesh(dp=2, tp=2),
        sparse_cp(
            **data("dp")
            | dict(q_tokens=("dp", "tp"), residual_tokens=("dp", "tp"), moe_tokens=("dp", "tp"))
            | dict(experts=("dp", "tp"), expert_mlp=None)
        ),
    ),
    "queries over tp2, pages over dcp2": Layout(
        Mesh(tp=2, dcp=2), sparse_cp(heads="dcp", o_heads=("dcp", "tp"), page_tokens="dcp")
    ),
    "queries and pages over tp2": Layout(Mesh(tp=2), sparse_cp(page_tokens="tp")),
    "tp2, pages over dcp2": Layout(Mesh(tp=2, dcp=2), Rules(**DCP)),
    "tp2, pages over dcp2, runs of 2": Layout(Mesh(tp=2, dcp=2), Rules(**DCP), interleave=2),
    "pages over dcp4, residual too": Layout(
        Mesh(tp=1, dcp=4), Rules(**DCP, residual_tokens=("tp", "dcp"))
    ),
    "pages over dcp4, runs of 2": Layout(Mesh(tp=1, dcp=4), Rules(**DCP), interleave=2),
    "prompts over pcp2, pages over pcp2 and dcp2": Layout(
        Mesh(pcp=2, tp=1, dcp=2),
        Rules(**DCP | dict(page_tokens=("pcp", "dcp")), **dealt("pcp")),
        Rules(**DCP | dict(page_tokens=("pcp", "dcp"))),
        interleave=2,
    ),
}


@functools.cache
def one_rank(name: str) -> tuple[Decoder, Any, Logits]:
    _, decoder, params = family(name)
    return decoder, params, run(decoder, params, ONE_RANK, SHORT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_is_the_same_as_one_rank(name: str, layout: str) -> None:
    decoder, params, wanted = one_rank(name)
    assert_same(run(decoder, params, LAYOUTS[layout], SHORT), wanted)


@pytest.mark.parametrize("interleave", (1, 2))
@pytest.mark.parametrize("name", NAMES)
def test_pages_over_three_ranks(name: str, interleave: int) -> None:
    """Whole heads on each; a page of 6 tokens leaves a rank 2, in one run or two."""
    decoder, params, wanted = one_rank(name)
    layout = Layout(Mesh(dcp=3), Rules(page_tokens="dcp"), interleave=interleave)
    assert_same(run(decoder, params, layout, SHORT, page_size=6), wanted)


@pytest.mark.parametrize("tp", (2, 4))
@pytest.mark.parametrize("name", NAMES)
def test_every_count_of_tokens(name: str, tp: int) -> None:
    """With fewer tokens than ranks some rank has no query, and yet writes the keys of all."""
    trace = whole_prompts({i: i + 1 for i in range(2 * tp + 1)})
    decoder, params, _ = one_rank(name)
    wanted = run(decoder, params, ONE_RANK, trace)
    assert_same(run(decoder, params, Layout(Mesh(tp=tp), sparse_cp()), trace), wanted)


@pytest.mark.parametrize(
    "layout",
    ["queries over tp4", "tp2, pages over dcp2, runs of 2", "queries over tp2, pages over dcp2"],
)
def test_drafts_select_on_their_own(layout: str) -> None:
    decoder = latent_models.decoder(tiny.latent(2, index_layers=(0,), num_drafts=1))
    params = draw(decoder)
    found = run_drafts(decoder, params, LAYOUTS[layout])
    assert_same(found, run_drafts(decoder, params, ONE_RANK))


# What is held, and what is chosen.


@pytest.mark.parametrize("n", (2, 4))
def test_explain_shows_copies_of_keys_beside_parts_of_latents(n: int) -> None:
    """By hand: 9 pages of 8 tokens, a key of 16 numbers and a latent of 24 of two bytes each."""
    _, decoder, _ = family("deepseek_v32")
    rules, mesh = Rules(**DCP), Mesh(tp=2, dcp=n)
    table = rules.explain(cache_specs(decoder, 9, 8), mesh)
    rows = {line.split("  ")[0]: line.split() for line in table.splitlines()}
    keys, latents = rows["layers.*.attn.index.k x3"], rows["layers.*.attn.kv.ckv x3"]
    assert keys[-3:] == ["9x8x16", str(2 * n), f"{9 * 8 * 16 * 2:,}"]
    assert latents[-3:] == [f"9x{8 // n}x24", "2", f"{9 * 8 * 24 * 2 // n:,}"]


def test_the_selection_leaves_most_positions_out() -> None:
    """Else no layout could choose wrongly: to attend over everything gives other logits."""
    cfg, _, params = family("deepseek_v32")
    _, _, wanted = one_rank("deepseek_v32")
    _, everything, _ = family("deepseek_v32", index_topk=64)
    gaps = run(everything, params, ONE_RANK, SHORT)
    assert distance(gaps, wanted) > 1000 * TOLERANCE
    early = {key for key in wanted if key[1] < cfg.index.topk}
    assert_same({k: gaps[k] for k in early}, {k: wanted[k] for k in early})


def not_remapped(chosen: torch.Tensor, step: Any, *, rules: Rules) -> torch.Tensor:
    return torch.where(chosen < 8 // axis_size(rules["page_tokens"]), chosen, -1)


def of_every_rank(chosen: torch.Tensor, step: Any, *, rules: Rules) -> torch.Tensor:
    """Positions are counted in the rank's pages, but those of other ranks stay."""
    return torch.where(chosen >= 0, chosen // axis_size(rules["page_tokens"]), -1)


def another_owner(chosen: torch.Tensor, n: int, interleave: int) -> torch.Tensor:
    return owner(chosen, n, 3 - interleave)


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        (mla, "local_selection", not_remapped),
        (mla, "local_selection", of_every_rank),
        (indexer, "owner", another_owner),
    ],
    ids=["not remapped", "of every rank", "another owner"],
)
@pytest.mark.parametrize("interleave", (1, 2))
def test_a_selection_that_is_remapped_wrongly_is_seen(
    module: Any, name: str, change: Any, interleave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, params, wanted = one_rank("deepseek_v32")
    monkeypatch.setattr(module, name, change)
    layout = Layout(Mesh(tp=1, dcp=2), Rules(**DCP), interleave=interleave)
    with pytest.raises(AssertionError, match="logits differ by up to"):
        assert_same(run(decoder, params, layout, SHORT), wanted)


def test_dealt_index_keys_are_refused() -> None:
    decoder, params, _ = one_rank("deepseek_v32")
    rules = Rules(**DCP, index_page_tokens="dcp")
    with pytest.raises(ValueError, match="index_page_tokens='dcp' must be None"):
        run(decoder, params, Layout(Mesh(tp=1, dcp=2), rules), SHORT)


def test_heads_that_queries_are_dealt_over_are_refused() -> None:
    decoder, params, _ = one_rank("deepseek_v32")
    with pytest.raises(ValueError, match="heads='tp' and q_tokens='tp' share 'tp'"):
        Runner(decoder, params, Layout(Mesh(tp=2), sparse_cp(heads="tp")), TRACE)
