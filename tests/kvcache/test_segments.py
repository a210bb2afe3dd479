"""Segments against what they stand for: the rows and bounds that a Step says token by token."""

import random

import pytest
import torch

from funcinfer.kvcache.batch import Batch, Rows, batch_specs, make_batch, prepare
from funcinfer.layers.primitives import Segments
from funcinfer.sharding import Mesh, Rules, ThreadRanks, token_multiple

PAGE = 4


def draw_groups(rng: random.Random, groups: int, *, longest: int = 11) -> list[list[Rows]]:
    """Requests with consecutive pages, one group after another."""

    def row(first: int) -> Rows:
        start, count = rng.choice([0, 3, 9]), rng.randrange(1, longest + 1)
        pages = -(-(start + count) // PAGE)
        tokens = [rng.randrange(50) for _ in range(count)]
        return Rows(tokens, start, range(first, first + pages))

    return [[row(1 + 7 * i) for i in range(rng.randrange(1, 4))] for _ in range(groups)]


def no_rope(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return positions, positions


def said(batch: Batch, rules: Rules, interleave: int) -> tuple[Segments, list[int], list[int]]:
    """A rank's segments, and its rows and bounds token by token."""
    step = prepare(batch, rules=rules, rope=no_rope, interleave=interleave)
    assert step.segments is not None
    return step.segments, step.rows.tolist(), step.hi.tolist()


def assert_same(segments: Segments, rows: list[int], hi: list[int]) -> None:
    found_rows, found_hi = segments.expand()
    assert found_hi == hi
    # A token that sees nothing has no request: what its row says doesn't matter.
    assert [r for r, h in zip(found_rows, hi, strict=True) if h] == [
        r for r, h in zip(rows, hi, strict=True) if h
    ]


MESHES = [
    (Mesh(), Rules.none(), 1),
    (Mesh(dp=2), Rules(requests="dp", tokens="dp", pages="dp", residual_tokens="dp"), 1),
    (Mesh(tp=2), Rules(q_tokens="tp"), 1),
    (Mesh(pcp=2), Rules(tokens="pcp", residual_tokens="pcp", q_tokens="pcp"), 1),
    (Mesh(dcp=2), Rules(page_tokens="dcp"), 1),
    (Mesh(dcp=2), Rules(page_tokens="dcp"), 2),
    (Mesh(pcp=2), Rules(tokens="pcp", q_tokens="pcp", page_tokens="pcp"), 1),
]


@pytest.mark.parametrize(("mesh", "rules", "interleave"), MESHES)
def test_segments_expand_to_rows_and_bounds(mesh: Mesh, rules: Rules, interleave: int):
    rng = random.Random(0)
    parts = mesh.size("pcp") if "pcp" in mesh.names else 1
    multiple = token_multiple(rules, mesh)
    for _ in range(12):
        groups = draw_groups(rng, mesh.size(rules["requests"]), longest=rng.choice([1, 11]))
        batch = make_batch(groups, page_size=PAGE, parts=parts, multiple=multiple, segments=True)
        ranks = ThreadRanks(mesh)
        for segments, rows, hi in ranks.run(
            lambda batch: said(batch, rules, interleave), ranks.split(batch, batch_specs(rules))
        ):
            assert_same(segments, rows, hi)


def test_runs_are_as_long_as_they_can_be():
    rows = [Rows([1] * 5, 2, [1, 2]), Rows([2], 0, [3]), Rows([3] * 4, 0, [4])]
    segments = make_batch([rows], page_size=PAGE, multiple=16, segments=True).segments
    assert segments == Segments((0, 1, 2, 0), (5, 1, 4, 6), (7, 1, 4, 0))


def test_a_step_of_single_tokens_has_a_run_for_each_place():
    """So that a captured decode step has the same shapes, whatever it serves."""
    for count in (1, 3, 4):
        rows = [Rows([1], 5, [1 + 2 * i, 2 + 2 * i]) for i in range(count)]
        segments = make_batch([rows], page_size=PAGE, multiple=4, segments=True).segments
        assert segments is not None
        assert (segments.lens, segments.kv_lens) == ((1,) * 4, (6,) * count + (0,) * (4 - count))


def test_a_batch_has_none_unless_asked():
    assert make_batch([[Rows([1], 0, [1])]], page_size=PAGE).segments is None


def test_messages():
    with pytest.raises(ValueError, match="one of each a segment, and lengths of at least 1"):
        Segments((0,), (0,), (3,))
    batch = make_batch([[Rows([1, 2, 3], 0, [1])]], page_size=PAGE, segments=True)
    part = Batch(**{**vars(batch), "positions": batch.positions[:2], "rows": batch.rows[:2]})
    with pytest.raises(ValueError, match="segments of 3 tokens on this rank, which has 2"):
        prepare(part, rules=Rules.none(), rope=no_rope)
