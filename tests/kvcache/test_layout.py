"""Layout arithmetic against lists of positions that are dealt out one at a time."""

import numpy as np
import pytest
import torch

from funcinfer.kvcache.layout import (
    check_dealing,
    local_len,
    local_slots,
    owner,
    pages_needed,
    slot,
    zigzag,
)

PAGE_SIZES = (1, 2, 3, 4, 16)
# (n, interleave, page_size): every way to deal small pages, one and several rounds a page.
DEALINGS = [
    (n, interleave, n * interleave * rounds)
    for n in (1, 2, 3, 4, 5)
    for interleave in (1, 2, 3, 4)
    for rounds in (1, 2, 3)
]


def deal(positions: int, n: int, interleave: int) -> list[list[int]]:
    """Hands out positions like cards: runs of `interleave` to one rank after the other."""
    hands: list[list[int]] = [[] for _ in range(n)]
    rank = in_run = 0
    for position in range(positions):
        hands[rank].append(position)
        in_run += 1
        if in_run == interleave:
            rank, in_run = (rank + 1) % n, 0
    return hands


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_fill_the_pages_of_a_request_in_order(page_size):
    table = [9, 5, 2, 7]
    expected = [page * page_size + row for page in table for row in range(page_size)]
    for length in range(1, 3 * page_size + 2):
        needed = pages_needed(length, page_size)
        in_last_page = length - (needed - 1) * page_size
        assert 1 <= in_last_page <= page_size
        assert [slot(table, position, page_size) for position in range(length)] == expected[:length]
    positions = np.arange(4 * page_size)
    assert slot(np.array(table), positions, page_size).tolist() == expected
    assert slot(torch.tensor(table), torch.from_numpy(positions), page_size).tolist() == expected
    assert pages_needed(0, page_size) == 0


def test_known_slot():
    assert slot([5, 9], 7, 4) == 39


def test_padding_positions_get_the_scratch_slot():
    table, positions = [3, 4], [-1, 0, 5, -1, -7]
    expected = [0, 12, 17, 0, 0]
    assert [slot(table, position, 4) for position in positions] == expected
    for kind in (np.array, torch.tensor):
        assert slot(kind(table), kind(positions), 4).tolist() == expected


def test_a_position_behind_the_table_is_an_error():
    with pytest.raises(IndexError):
        slot([5, 9], 8, 4)
    with pytest.raises(IndexError):
        slot(np.array([5, 9]), np.array([0, 8]), 4)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_pages_needed_is_the_number_of_begun_pages(kind):
    for page_size in PAGE_SIZES:
        lengths = list(range(3 * page_size + 2))
        expected = [
            len({position // page_size for position in range(length)}) for length in lengths
        ]
        assert [pages_needed(length, page_size) for length in lengths] == expected
        assert pages_needed(kind(lengths), page_size).tolist() == expected


@pytest.mark.parametrize(("n", "interleave", "page_size"), DEALINGS)
def test_dealing_equals_handing_out_positions(n, interleave, page_size):
    check_dealing(page_size, n, interleave)
    total = 3 * page_size + 1
    hands = deal(total, n, interleave)
    for rank, hand in enumerate(hands):
        assert [x for x in range(total) if owner(x, n, interleave) == rank] == hand
        lengths = list(range(total + 1))
        expected = [sum(position < length for position in hand) for length in lengths]
        assert [local_len(length, n, interleave, rank) for length in lengths] == expected
        assert local_len(np.array(lengths), n, interleave, rank).tolist() == expected
        lengths_int32 = torch.tensor(lengths, dtype=torch.int32)
        local = local_len(lengths_int32, n, interleave, rank)
        assert local.tolist() == expected
        assert local.dtype == torch.int32


@pytest.mark.parametrize(("n", "interleave", "page_size"), DEALINGS)
def test_local_slots_number_the_rows_of_the_local_pages(n, interleave, page_size):
    """A rank's rows of a page, in order of position, are the rows of its local page, in order."""
    num_pages, local_size = 4, page_size // n
    slots = [*range(num_pages * page_size), -1]
    owners = np.zeros(len(slots), dtype=int)
    for rank, hand in enumerate(deal(page_size, n, interleave)):
        assert len(hand) == local_size
        expected = [0] * len(slots)
        for page in range(num_pages):
            for row, offset in enumerate(hand):
                expected[page * page_size + offset] = page * local_size + row
                owners[page * page_size + offset] += 1
        got = local_slots(torch.tensor(slots, dtype=torch.int32), page_size, n, interleave, rank)
        assert got.tolist() == expected
        assert got.dtype == torch.int32
        assert local_slots(np.array(slots), page_size, n, interleave, rank).tolist() == expected
        assert [local_slots(x, page_size, n, interleave, rank) for x in slots] == expected
    assert owners.tolist() == [1] * (len(slots) - 1) + [0]  # exactly one owner, none for padding


def test_slots_of_other_ranks_lie_in_the_scratch_page():
    """Never -1: what a rank does not own is written to row 0, and no page >= 1 maps there."""
    slots = torch.arange(4, 12)
    rows = torch.stack([local_slots(slots, 4, 2, 2, rank) for rank in range(2)])
    assert rows.min() == 0
    assert ((rows == 0).sum(0) == 1).all()
    assert sorted(rows[rows > 0].tolist()) == [2, 2, 3, 3, 4, 4, 5, 5]


def test_a_local_slot_is_found_through_the_local_table():
    """Position -> virtual slot -> local slot agrees with the local length below the position."""
    table, page_size, n, interleave = [3, 1, 2], 12, 3, 2
    for rank in range(n):
        for position in range(3 * page_size):
            if owner(position, n, interleave) == rank:
                virtual = slot(table, position, page_size)
                in_order = local_len(position, n, interleave, rank)
                expected = slot(table, in_order, page_size // n)
                assert local_slots(virtual, page_size, n, interleave, rank) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 5, 1), "page_size 12 cannot be dealt over 5 ranks in runs of 1.*for example 15"),
        ((12, 2, 4), "multiple of n \\* interleave = 8, for example 16"),
        ((0, 1, 1), "page_size is 0"),
        ((4, 0, 1), "n is 0"),
        ((4, 1, -1), "interleave is -1"),
    ],
)
def test_uneven_dealing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_dealing(*arguments)
    page_size, n, interleave = arguments
    with pytest.raises(ValueError, match=message):
        local_slots(torch.tensor([4]), page_size, n, interleave, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_dealing_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is outside 0..1"):
        local_len(7, 2, 1, rank)
    with pytest.raises(ValueError, match=f"rank {rank} is outside 0..1"):
        local_slots(7, 4, 2, 1, rank)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_zigzag_deals_every_token_once_and_balances_causal_pairs(parts):
    for count in range(6 * parts + 3):
        dealt = zigzag(count, parts)
        assert len(dealt) == parts
        assert sorted(offset for offsets in dealt for offset in offsets) == list(range(count))
        assert all(offsets == sorted(offsets) for offsets in dealt)
        sizes = [len(offsets) for offsets in dealt]
        assert max(sizes) - min(sizes) <= 1
        pairs = [sum(offset + 1 for offset in offsets) for offsets in dealt]
        assert max(pairs) - min(pairs) < max(2 * count, 1)


def test_zigzag_pairs_an_early_block_with_a_late_one():
    assert zigzag(8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag(13, 3) == [[0, 1, 2, 11, 12], [3, 4, 9, 10], [5, 6, 7, 8]]
    assert zigzag(2, 4) == [[0], [1], [], []]
    assert zigzag(0, 2) == [[], []]


@pytest.mark.parametrize(("count", "parts"), [(-1, 2), (3, 0)])
def test_zigzag_refuses_what_is_no_run(count, parts):
    with pytest.raises(ValueError, match=f"got {count} and {parts}"):
        zigzag(count, parts)
