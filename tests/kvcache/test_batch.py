"""Batches against lists made by the definition, one token at a time, and what `prepare` makes of
them on a rank.
"""

import itertools
import random
from dataclasses import fields
from typing import Any

import pytest
import torch

from funcinfer.kvcache.batch import (
    Batch,
    BatchShape,
    Rows,
    batch_shape,
    batch_specs,
    make_batch,
    prepare,
)
from funcinfer.kvcache.paged import PagedKV, paged_kv_specs, write
from funcinfer.sharding import Mesh, P, Rules, ThreadRanks

Lists = dict[str, list[Any]]
FIELDS = tuple(f.name for f in fields(Batch) if not f.metadata.get("static"))


def parts_of(count: int, parts: int) -> list[int]:
    """The part of each token of a run: 2 * parts blocks, the first and the last to part 0, ..."""
    sizes = [count // (2 * parts) + (b < count % (2 * parts)) for b in range(2 * parts)]
    return [min(b, 2 * parts - 1 - b) for b in range(2 * parts) for _ in range(sizes[b])]


def by_definition(groups: list[list[Rows]], page_size: int, parts: int, multiple: int) -> Lists:
    """The fields of the smallest batch, token by token."""
    dealt: list[list[list[tuple[int, int, int, int, int]]]] = []
    for rows in groups:
        of_part: list[list[tuple[int, int, int, int, int]]] = [[] for _ in range(parts)]
        for row, r in enumerate(rows):
            for offset, (token, part) in enumerate(
                zip(r.tokens, parts_of(len(r.tokens), parts), strict=True)
            ):
                at = r.start + offset
                slot = r.pages[at // page_size] * page_size + at % page_size
                of_part[part].append((token, at, row, slot, offset))
        dealt.append(of_part)
    length = max([len(tokens) for of_part in dealt for tokens in of_part] + [1])
    while length * parts % multiple:
        length += 1
    num_requests = max([1] + [len(rows) for rows in groups])
    num_pages = max([1] + [len(r.pages) for rows in groups for r in rows])
    num_out = max([1] + [sum(r.wanted for r in rows) for rows in groups])
    lists: Lists = {name: [] for name in FIELDS}
    for rows, of_part in zip(groups, dealt, strict=True):
        flat = [t for tokens in of_part for t in tokens + [None] * (length - len(tokens))]
        lists["tokens"] += [t[0] if t else 0 for t in flat]
        lists["positions"] += [t[1] if t else -1 for t in flat]
        lists["rows"] += [t[2] if t else 0 for t in flat]
        lists["slots"] += [t[3] if t else 0 for t in flat]
        place = {(t[2], t[4]): i for i, t in enumerate(flat) if t}
        out = [
            place[row, offset]
            for row, r in enumerate(rows)
            for offset in range(len(r.tokens) - r.wanted, len(r.tokens))
        ]
        lists["out"] += out + [0] * (num_out - len(out))
        tables = [list(r.pages) + [0] * (num_pages - len(r.pages)) for r in rows]
        lists["page_table"] += tables + [[0] * num_pages] * (num_requests - len(rows))
        lens = [r.start + len(r.tokens) for r in rows]
        lists["kv_lens"] += lens + [0] * (num_requests - len(rows))
    return lists


def random_rows(rng: random.Random, page_size: int) -> Rows:
    start, count = rng.choice([0, 0, 3, page_size, 7]), rng.randrange(0, 3 * page_size + 2)
    pages = -(-(start + count) // page_size) + rng.choice([0, 0, 1])
    return Rows(
        tokens=[rng.randrange(50) for _ in range(count)],
        start=start,
        pages=rng.sample(range(1, 40), pages),
        wanted=rng.randrange(0, count + 1),
    )


@pytest.mark.parametrize(("num_groups", "parts"), [*itertools.product((1, 2, 3), (1, 2, 3, 4))])
def test_batches_are_the_lists_of_their_definition(num_groups: int, parts: int):
    rng = random.Random(num_groups * 10 + parts)
    for _ in range(40):
        page_size, multiple = rng.choice([1, 2, 3, 4, 16]), rng.choice([1, 2, 3, 8])
        groups = [
            [random_rows(rng, page_size) for _ in range(rng.randrange(0, 4))]
            for _ in range(num_groups)
        ]
        batch = make_batch(groups, page_size=page_size, parts=parts, multiple=multiple)
        wanted = by_definition(groups, page_size, parts, multiple)
        for name in FIELDS:
            tensor = getattr(batch, name)
            assert tensor.dtype is torch.int32
            assert tensor.tolist() == wanted[name], name
        assert batch.page_size == page_size


def test_the_slots_of_a_request_follow_its_pages():
    """Position 7 of pages 5 and 9 of 4 tokens lies in slot 39."""
    batch = make_batch([[Rows([1, 2], start=6, pages=[5, 9])]], page_size=4)
    assert batch.slots.tolist() == [38, 39]
    assert batch.positions.tolist() == [6, 7]


def test_a_group_without_requests_is_all_padding():
    batch = make_batch([[], [Rows([4, 5, 6], 0, [3])]], page_size=4)
    assert batch.positions.tolist() == [-1, -1, -1, 0, 1, 2]
    assert batch.slots.tolist() == [0, 0, 0, 12, 13, 14]
    assert batch.page_table.tolist() == [[0], [3]]
    assert batch.kv_lens.tolist() == [0, 3]
    assert make_batch([[]], page_size=4).positions.tolist() == [-1]


def test_a_given_shape_pads_behind_what_is_there():
    rows = [Rows([4, 5, 6], 2, [3, 7], wanted=2)]
    batch = make_batch([rows], page_size=4, shape=BatchShape(5, 2, 4, 3))
    assert batch.tokens.tolist() == [4, 5, 6, 0, 0]
    assert batch.positions.tolist() == [2, 3, 4, -1, -1]
    assert batch.page_table.tolist() == [[3, 7, 0, 0], [0, 0, 0, 0]]
    assert batch.kv_lens.tolist() == [5, 0]
    assert batch.out.tolist() == [1, 2, 0]
    assert batch_shape([rows]) == BatchShape(tokens=3, requests=1, pages=2, out=2)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (Rows([1, 2], 3, [4]), {}, "row 0: positions up to 4 need more than its 1 pages of 4"),
        (Rows([1, 2], 0, [4], wanted=3), {}, "row 0: wants logits of 3 of its 2 tokens"),
        (Rows([1, 2], 0, [4], wanted=-1), {}, "row 0: wants logits of -1 of its 2 tokens"),
        (Rows([1, 2], 0, [0]), {}, "page 0 is the scratch page"),
        (Rows([1, 2], -1, [4]), {}, "start=-1"),
        (
            Rows([1, 2, 3], 0, [4]),
            dict(shape=BatchShape(2, 1, 1, 1)),
            "a group needs tokens=3, but the shape has tokens=2",
        ),
        (
            Rows([1], 0, [4, 5]),
            dict(shape=BatchShape(2, 1, 1, 1)),
            "a group needs pages=2, but the shape has pages=1",
        ),
        (
            Rows([1, 2], 0, [4], wanted=2),
            dict(shape=BatchShape(2, 1, 1, 1)),
            "a group needs out=2, but the shape has out=1",
        ),
        (
            Rows([1], 0, [4]),
            dict(shape=BatchShape(3, 1, 1, 1), parts=2),
            "3 tokens can't be dealt to 2 parts evenly",
        ),
    ],
)
def test_what_does_not_fit_is_refused(rows: Rows, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_batch([[rows]], page_size=4, **options)


def test_a_group_with_too_many_requests_is_refused():
    with pytest.raises(ValueError, match="a group needs requests=2, but the shape has requests=1"):
        make_batch([[Rows([1], 0, [4])] * 2], page_size=4, shape=BatchShape(2, 1, 1, 2))


def as_tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of RoPE: tables that are the positions, so that their layout shows."""
    return positions[:, None].float(), -positions[:, None].float()


def local_rows(page_size: int, num_pages: int, n: int, run: int) -> dict[int, tuple[int, int]]:
    """Virtual slot -> (rank that holds it, its row there), by dealing the slots of each page."""
    found, filled = {}, [0] * n
    for slot in range(num_pages * page_size):
        rank = slot % page_size // run % n
        found[slot] = (rank, filled[rank])
        filled[rank] += 1
    return found


@pytest.mark.parametrize("run", (1, 2))
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        (Mesh(), Rules()),
        (Mesh(dcp=2), Rules(page_tokens="dcp")),
        (Mesh(pcp=2), Rules(tokens="pcp", q_tokens="pcp", residual_tokens="pcp")),
        (
            Mesh(pcp=2, dcp=2),
            Rules(tokens="pcp", q_tokens="pcp", residual_tokens="pcp", page_tokens=("pcp", "dcp")),
        ),
        (Mesh(tp=4), Rules(q_tokens="tp", index_page_tokens="tp")),
        (
            Mesh(dp=2, tp=2),
            Rules(
                **dict.fromkeys(("requests", "pages", "tokens", "residual_tokens"), "dp"),
                q_tokens=("dp", "tp"),
                page_tokens="tp",
            ),
        ),
    ],
)
def test_a_step_has_the_slots_and_bounds_of_its_rank(mesh: Mesh, rules: Rules, run: int):
    page_size, parts = 8, mesh.size("pcp") if "pcp" in mesh.names else 1
    groups = [
        [Rows(range(5), 0, [3]), Rows(range(11), 6, [2, 5, 1], wanted=3), Rows([9], 7, [4])],
        [Rows(range(3), 14, [2, 6, 3])],
    ][: mesh.size(rules["requests"])]
    batch = make_batch(groups, page_size=page_size, parts=parts, multiple=8)
    ranks = ThreadRanks(mesh)
    steps = ranks.run(
        lambda local: prepare(local, rules=rules, rope=as_tables, interleave=run),
        ranks.split(batch, batch_specs(rules)),
    )

    def part(whole: torch.Tensor, axis: Any, coord: dict[str, int]) -> list[int]:
        return whole.chunk(mesh.size(axis))[mesh.index(axis, coord)].tolist()

    for coord, step in zip(ranks.coords, steps, strict=True):
        tokens, q_tokens = rules["tokens"], rules["q_tokens"]
        dealt, requests = rules["page_tokens"], rules["requests"]
        attending = tuple(a for a in P(q_tokens).axes if a not in P(dealt).axes)
        assert step.tokens.tolist() == part(batch.tokens, tokens, coord)
        assert step.positions.tolist() == part(batch.positions, tokens, coord)
        assert step.k_rope[0][:, 0].tolist() == part(batch.positions, tokens, coord)
        assert step.q_positions.tolist() == part(batch.positions, q_tokens, coord)
        assert step.q_rope[1][:, 0].neg().tolist() == part(batch.positions, q_tokens, coord)
        assert step.page_table.tolist() == part(batch.page_table, requests, coord)
        assert step.kv_lens.tolist() == part(batch.kv_lens, requests, coord)
        assert step.interleave == run

        seen = part(batch.positions, attending, coord)
        n, rank = mesh.size(dealt), mesh.index(dealt, coord)
        assert step.rows.tolist() == part(batch.rows, attending, coord)
        assert step.lo.tolist() == [0] * len(seen)
        mine = [[p for p in range(at + 1) if p // run % n == rank] for at in seen]
        assert step.hi.tolist() == [len(positions) for positions in mine]

        slots = part(batch.slots, requests, coord)
        for local, axis in ((step.slots, dealt), (step.index_slots, rules["index_page_tokens"])):
            rows = local_rows(page_size, 7, mesh.size(axis), run)
            owners = [rows[slot] for slot in slots]
            index = mesh.index(axis, coord)
            assert local.tolist() == [row if owner == index else 0 for owner, row in owners]


def test_a_page_that_can_not_be_dealt_is_refused():
    batch = make_batch([[Rows([1], 0, [1])]], page_size=4)
    with pytest.raises(ValueError, match="page_size 4 cannot be dealt over 1 ranks in runs of 3"):
        prepare(batch, rules=Rules(), rope=as_tables, interleave=3)


def test_new_rows_go_to_their_slots_in_place_and_scratch_is_zeroed():
    """Padding may carry anything, even NaN, and several rows of it meet in slot 0."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedKV(torch.full((3, 4, 2, 5), 7.0), torch.full((3, 4, 2, 3), 7.0))
    storage = (cache.k.data_ptr(), cache.v.data_ptr())
    k = torch.randn(4, 2, 5, generator=generator)
    v = torch.randn(4, 2, 3, generator=generator)
    k[0], v[2] = torch.nan, torch.nan
    written = write(cache, k, v, torch.tensor([0, 11, 0, 5], dtype=torch.int32))
    assert (written.k.data_ptr(), written.v.data_ptr()) == storage
    for pages, new in ((written.k, k), (written.v, v)):
        for slot in range(12):
            wanted = {0: torch.zeros_like(new[0]), 11: new[1], 5: new[3]}.get(
                slot, torch.full_like(new[0], 7.0)
            )
            assert torch.equal(pages[slot // 4, slot % 4], wanted)


def test_keys_and_values_of_a_cache_may_differ_in_width():
    specs = paged_kv_specs(3, 4, num_kv_heads=2, head_dim=6, v_head_dim=5)
    assert (specs.k.shape, specs.v.shape) == ((3, 4, 2, 6), (3, 4, 2, 5))
    assert specs.k.axes == specs.v.axes == ("pages", "page_tokens", "kv_heads", None)


@pytest.mark.parametrize("shape", [(2, 2, 4), (3, 2, 5), (2, 5)])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]):
    cache = PagedKV(torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5))
    with pytest.raises(ValueError, match=r"for 2 slots in pages of shape .* wanted \(2, 2, 5\)"):
        write(cache, torch.zeros(shape), torch.zeros(2, 2, 5), torch.tensor([5, 6]))
