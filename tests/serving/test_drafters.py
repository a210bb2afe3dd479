"""Drafters against a search through the whole window, history by history."""

import random

import pytest

from funcinfer.serving.drafters import Drafter, NgramDrafter, ScriptedDrafter


def searched(history, count, longest, shortest, window) -> list[int]:
    """The longest suffix, its latest earlier occurrence, what follows, read on into the drafts."""
    recent = history[-window:]
    for n in range(min(longest, len(recent)), shortest - 1, -1):
        for end in range(len(recent) - 1, n - 1, -1):
            if recent[end - n : end] == recent[len(recent) - n :]:
                drafts: list[int] = []
                while len(drafts) < count:
                    drafts.append([*recent, *drafts][end + len(drafts)])
                return drafts
    return []


@pytest.mark.parametrize(
    ("longest", "shortest", "window"), [(3, 1, 1000), (3, 2, 12), (1, 1, 2), (4, 4, 7), (2, 1, 30)]
)
def test_drafts_are_those_of_a_search(longest, shortest, window):
    """Histories that grow by several tokens a step, in one drafter, and some that pause."""
    source = random.Random(longest)
    drafter: Drafter = NgramDrafter(longest, shortest, window)
    histories = [[source.randrange(size) for _ in range(size * 3)] for size in (1, 2, 3, 5, 9)]
    found = 0
    for _ in range(80):
        live = [i for i in range(5) if source.random() < 0.7]
        counts = [source.randrange(6) for _ in live]
        drafts = drafter.propose(live, [histories[i] for i in live], counts)
        assert drafts.laws is None
        for i, count, tokens in zip(live, counts, drafts.tokens, strict=True):
            assert tokens == searched(histories[i], count, longest, shortest, window)
            found += len(tokens)
            new = tokens or [source.randrange((1, 2, 3, 5, 9)[i])]
            histories[i] += new[: source.randrange(1, 4)]
            if source.random() < 0.3:
                histories[i].append(source.randrange((1, 2, 3, 5, 9)[i]))
    assert found > 50


def test_an_id_that_comes_again_has_a_history_of_its_own():
    drafter = NgramDrafter(longest=2, shortest=1)
    assert drafter.propose(["a"], [[1, 2, 3, 1, 2]], [1]).tokens == [[3]]
    drafter.forget("a")
    drafter.forget("never seen")
    assert drafter.propose(["a"], [[2, 4, 2]], [1]).tokens == [[4]]


def test_the_index_is_bounded_by_the_window():
    drafter = NgramDrafter(longest=3, shortest=1, window=20)
    history = list(range(100))
    for token in range(100, 400):
        history.append(token)
        drafter.propose([0], [history], [2])
        assert len(drafter._indices[0].ends) <= 3 * 20


def test_short_histories_propose_nothing():
    drafter = NgramDrafter()
    assert drafter.propose([0, 1, 2], [[], [5], [5, 6]], [3, 3, 3]).tokens == [[], [], []]


@pytest.mark.parametrize("sizes", [(0, 0, 9), (3, 4, 9), (3, 1, 3)])
def test_sizes_out_of_range_are_named(sizes):
    longest, shortest, window = sizes
    message = f"shortest is {shortest}, longest {longest}, window {window}: expected"
    with pytest.raises(ValueError, match=message):
        NgramDrafter(longest, shortest, window)


def test_a_script_is_called_for_each_request():
    calls = []

    def script(id, history, count):
        calls.append((id, list(history), count))
        return (7, 8, 9)

    drafter: Drafter = ScriptedDrafter(script)
    assert drafter.propose(["a", "b"], [[1], [2, 3]], [2, 5]) == ([[7, 8], [7, 8, 9]], None)
    assert calls == [("a", [1], 2), ("b", [2, 3], 5)]
    drafter.forget("a")
