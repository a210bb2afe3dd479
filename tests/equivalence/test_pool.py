"""What a step does to the pool of pages: it writes the scheduled slots, in place, and no others."""

import dataclasses
import random
from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import Batch
from funcinfer.models.decoder import cache_specs
from funcinfer.tree import tree_leaves
from tests.equivalence.harness import NAN, ONE_RANK, TRACE, Layout, Runner, assert_same, draw
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.small import ONE_LAYER, VOCAB

POISONED_TOKEN = VOCAB - 1
SOME_LAYOUTS = (
    "one rank",
    "tp2 sp",
    "dp2 tp2",
    "pcp2",
    "dcp2 tp2",
    "pcp2 tp2 dcp2, pages over pcp and dcp",
)


def pointers(runner: Runner) -> list[list[int]]:
    return [[leaf.data_ptr() for leaf in tree_leaves(cache)] for cache in runner.caches]


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_no_step_copies_the_pool(layout: str):
    runner = Runner(ONE_LAYER, draw(ONE_LAYER), LAYOUTS[layout])
    before = pointers(runner)
    for decode, counts in TRACE.steps:
        runner.step(decode, counts)
        assert pointers(runner) == before


def runner_with_poison(layout: Layout) -> Runner:
    """A runner whose last token of the vocabulary, which no request has, embeds as NaN."""
    params = draw(ONE_LAYER)
    params["embed"][POISONED_TOKEN] = NAN
    runner = Runner(ONE_LAYER, params, layout)
    runner.tokens = TRACE.tokens(POISONED_TOKEN)
    return runner


def spoil(batch: Batch, num_pages: int, rng: random.Random) -> Batch:
    """NaN in the hidden states of padding, and stale page ids wherever no request has a page."""
    used = batch.page_table != 0
    stale = torch.tensor(
        [[rng.randrange(num_pages) for _ in row] for row in batch.page_table], dtype=torch.int32
    )
    padding = batch.positions < 0
    return dataclasses.replace(
        batch,
        tokens=torch.where(padding, POISONED_TOKEN, batch.tokens).int(),
        rows=torch.where(padding, rng.randrange(int(batch.rows.max()) + 1), batch.rows).int(),
        page_table=torch.where(used, batch.page_table, stale),
    )


def pages_of(runner: Runner) -> list[torch.Tensor]:
    """Rows of the pages that requests own: [pages, page_size, values], one tensor a cache."""
    specs = runner.layout.prefill.specs(cache_specs(ONE_LAYER, 1, 1))
    leaves = tree_leaves(runner.ranks.join(runner.caches, specs))
    size = len(leaves[0]) // runner.num_groups
    owned = [i for i in range(len(leaves[0])) if i % size]  # all but each group's scratch page
    return [leaf[owned].flatten(2).clone() for leaf in leaves]


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_padding_changes_no_logits_and_no_page(layout: str):
    chosen, rng = LAYOUTS[layout], random.Random(0)
    plain, padded = runner_with_poison(chosen), runner_with_poison(chosen)
    for decode, counts in TRACE.steps:
        wanted = plain.step(decode, counts)
        batch, keys = padded.place(decode, counts, room=3)
        num_pages = len(tree_leaves(padded.caches[0])[0])
        before = pages_of(padded)
        logits = padded.forward(decode, spoil(batch, num_pages, rng))
        for i, n in counts.items():
            padded.done[i] += n
        found = {key: row for key, row in zip(keys, logits, strict=True) if key is not None}
        assert_same(found, wanted)
        for old, new in zip(before, pages_of(padded), strict=True):
            changed = (torch.nan_to_num(old, 99.0) != torch.nan_to_num(new, 99.0)).any(-1)
            assert int(changed.sum()) == sum(counts.values())


def test_exactly_the_scheduled_slots_change():
    runner = Runner(ONE_LAYER, draw(ONE_LAYER), ONE_RANK)
    size = runner.page_size
    for leaf in tree_leaves(runner.caches):
        leaf.fill_(7.0)  # NaN differs from itself
    for decode, counts in TRACE.steps:
        slots = {
            runner.pages[i][at // size] * size + at % size
            for i, n in counts.items()
            for at in range(runner.done[i], runner.done[i] + n)
        }
        before = [leaf.clone().flatten(0, 1) for leaf in tree_leaves(runner.caches)]
        runner.step(decode, counts)
        for old, new in zip(before, tree_leaves(runner.caches), strict=True):
            changed = (old != new.flatten(0, 1)).flatten(1).any(-1).nonzero().flatten().tolist()
            assert {slot for slot in changed if slot >= size} == slots


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_a_step_without_rows_changes_nothing(layout: str):
    runner = runner_with_poison(LAYOUTS[layout])
    wanted: dict[Any, torch.Tensor] = {}
    for decode, counts in TRACE.steps:
        before = pages_of(runner)
        batch, _ = runner.place(decode, {})
        runner.forward(decode, spoil(batch, 2, random.Random(0)))
        for old, new in zip(before, pages_of(runner), strict=True):
            assert torch.equal(old.nan_to_num(99.0), new.nan_to_num(99.0))
        wanted |= runner.step(decode, counts)
    one = runner_with_poison(ONE_RANK)
    assert_same(wanted, {k: v for d, c in TRACE.steps for k, v in one.step(d, c).items()})
