"""The harness sees wrong layers: each mutation gives other logits, or copies that differ.

Without this, a comparison that never looks at what a mesh changes would pass for proof.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcinfer.kvcache import batch as kv_batch
from funcinfer.layers import attend, attention, embedding, mlp
from funcinfer.models import decoder as decoders
from funcinfer.sharding import P, Rules, all_gather, axis_index, axis_size, reduce_to, reshard
from tests.equivalence.harness import ONE_RANK, assert_same, draw, run
from tests.equivalence.layouts import LAYOUTS
from tests.equivalence.small import ONE_LAYER

Change = Callable[[pytest.MonkeyPatch], None]


def psum_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mlp, "reduce_to", lambda y, over, src, dst: reshard(y, src, dst))


def sum_over_the_wrong_axis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attend, "reduce_to", lambda y, over, src, dst: reduce_to(y, "rep", src, dst))


def bias_on_each_rank(patch: pytest.MonkeyPatch) -> None:
    def project_out(
        wo: torch.Tensor, o: torch.Tensor, *, rules: Rules, bias_D: torch.Tensor
    ) -> torch.Tensor:
        summed_bias_D = axis_size(rules["o_heads"]) * bias_D
        return attend.project_out(wo, o, rules=rules, bias_D=summed_bias_D)

    patch.setattr(attention, "project_out", project_out)


def queries_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def by_another_route(x: torch.Tensor, src: P, dst: P) -> torch.Tensor:
        moved = reshard(x, src, dst)
        return moved.flip(0) if src != dst and x.ndim == 3 else moved

    patch.setattr(attend, "reshard", by_another_route)


def parts_averaged(patch: pytest.MonkeyPatch) -> None:
    def merge(o: torch.Tensor, lse: torch.Tensor, over: Any, src: P, dst: P) -> torch.Tensor:
        if axis_size(over) == 1:
            return o
        return reshard(all_gather(o[None], over, dim=0).mean(0), src, dst)

    patch.setattr(attend, "merge_to", merge)


def bounds_not_localised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_batch, "local_len", lambda length, n, interleave, rank: length)


def slots_not_localised(patch: pytest.MonkeyPatch) -> None:
    def local_slots(slots: torch.Tensor, size: int, n: int, run: int, rank: int) -> torch.Tensor:
        return torch.where(slots // size * size // n > 0, slots // n, 0)

    patch.setattr(kv_batch, "local_slots", local_slots)


def vocabulary_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    def axis_index_backwards(axis: Any) -> int:
        return axis_size(axis) - 1 - axis_index(axis)

    patch.setattr(embedding, "axis_index", axis_index_backwards)


def rows_of_one_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        decoders, "take_rows", lambda x, out, *, rules: embedding.lookup(x, out.clamp(max=2), 0)
    )


MUTATIONS: dict[Change, str] = {
    psum_left_out: "tp2",
    sum_over_the_wrong_axis: "tp4 rep2",
    bias_on_each_rank: "tp2",
    queries_in_another_order: "tp4, queries dealt and caches whole",
    parts_averaged: "dcp2 tp2",
    bounds_not_localised: "dcp2 tp2",
    slots_not_localised: "dcp2 alone",
    vocabulary_of_another_rank: "tp4",
    rows_of_one_rank: "tp2 sp",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda f: f.__name__)
def test_a_wrong_layer_is_caught(mutation: Change, monkeypatch: pytest.MonkeyPatch):
    layout, params = LAYOUTS[MUTATIONS[mutation]], draw(ONE_LAYER)
    wanted = run(ONE_LAYER, params, ONE_RANK)
    assert_same(run(ONE_LAYER, params, layout), wanted)
    mutation(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=r"differ|must hold the same"):
        assert_same(run(ONE_LAYER, params, layout), wanted)
