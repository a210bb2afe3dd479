"""Drafters: what proposes the next tokens of a request, to be verified by the model.

    Drafter          the interface
    NgramDrafter     looks up how the history went on after its own last tokens; no model
    ScriptedDrafter  a function; for tests, and for drafts that come from elsewhere

A drafter changes how fast tokens come, never which law they have: the verifier sees to that, as
long as `Proposal.laws` are the laws that the drafts were drawn from.

K drafts, V tokens of the vocabulary. N-gram look-up: Saxena, prompt lookup decoding, 2023.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import torch

from funcinfer.serving.model import Model


class Proposal(NamedTuple):
    """Drafts of each request, no more than asked for, and their laws.

    laws: for each request, the laws [K, V] that its drafts were drawn from; None: they were not
    drawn, so the law of each is one-hot.
    """

    tokens: list[list[int]]
    laws: list[torch.Tensor] | None = None


class Drafter(Protocol):
    """Proposes tokens that may follow. Rank by rank the same, so a function of the histories."""

    def propose(
        self,
        ids: Sequence[Hashable],
        histories: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> Proposal:
        """At most counts[i] drafts to follow histories[i], prompt and output of request ids[i].

        The history of an id only grows, until `forget`. Which drafts are proposed, and how many,
        may depend on what precedes each of them, not on the tokens that the model will draw.
        """
        ...

    def forget(self, id: Hashable) -> None:
        """The request has ended; its id may come again with another history."""
        ...


class NgramDrafter:
    """Proposes what followed the latest earlier occurrence of the longest suffix of the history.

    longest, shortest: lengths of the suffixes that are looked for, the longest first. window: how
    many of the last tokens are looked at. Where the occurrence is so late that too few tokens
    follow, it is read on into the drafts, as if the history went round in a circle. Proposes
    nothing where no suffix occurs earlier.

    Each request has an index of its window, which follows its history: a step costs the same
    however long that is, and the index holds at most (longest - shortest + 1) window entries.
    Raises ValueError naming what is out of range.

    >>> drafter = NgramDrafter()
    >>> drafter.propose(["a", "b"], [[1, 2, 3, 4, 1, 2], [8, 8, 8]], [3, 2]).tokens
    [[3, 4, 1], [8, 8]]
    """

    def __init__(self, longest: int = 3, shortest: int = 2, window: int = 1024) -> None:
        if not 1 <= shortest <= longest < window:
            raise ValueError(
                f"shortest is {shortest}, longest {longest}, window {window}: expected "
                f"1 <= shortest <= longest < window"
            )
        self.lengths, self.window = range(longest, shortest - 1, -1), window
        self._indices: dict[Hashable, _Index] = {}

    def propose(
        self,
        ids: Sequence[Hashable],
        histories: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> Proposal:
        """See `Drafter`."""
        tokens = []
        for id, history, count in zip(ids, histories, counts, strict=True):
            index = self._indices.get(id)
            if index is None:
                index = self._indices[id] = _Index(max(0, len(history) - self.window))
            self._follow(index, history)
            tokens.append(self._look_up(index, history, count))
        return Proposal(tokens)

    def forget(self, id: Hashable) -> None:
        """See `Drafter`."""
        self._indices.pop(id, None)

    def _follow(self, index: "_Index", history: Sequence[int]) -> None:
        """Take in what came to the history since, and let go of what left the window."""
        start, ends = index.start, index.ends
        for end in range(index.next_end, len(history)):
            for n in self.lengths:
                if end - n >= start:
                    ends[tuple(history[end - n : end])] = end
        index.next_end = len(history)
        index.start = max(start, len(history) - self.window)
        for left in range(start, index.start):
            for n in self.lengths:
                gram = tuple(history[left : left + n])
                if ends.get(gram) == left + n:
                    del ends[gram]

    def _look_up(self, index: "_Index", history: Sequence[int], count: int) -> list[int]:
        for n in self.lengths:
            end = index.ends.get(tuple(history[-n:]))
            if end is not None:
                period = len(history) - end
                return [history[end + i % period] for i in range(count)]
        return []


class _Index:
    """Where each n-gram of the window ended last, before the end of the history.

    start: where the window starts. next_end: the first end that is not in yet.
    """

    __slots__ = ("ends", "next_end", "start")

    def __init__(self, start: int) -> None:
        self.start, self.next_end = start, start + 1
        self.ends: dict[tuple[int, ...], int] = {}


class ScriptedDrafter:
    """Proposes what a function of (id, history, count) gives, cut to count.

    >>> drafter = ScriptedDrafter(lambda id, history, count: [history[-1]] * 9)
    >>> drafter.propose(["a"], [[3, 4]], [2]).tokens
    [[4, 4]]
    """

    def __init__(self, script: Callable[[Hashable, Sequence[int], int], Sequence[int]]) -> None:
        self.script = script

    def propose(
        self,
        ids: Sequence[Hashable],
        histories: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> Proposal:
        """See `Drafter`."""
        rows = zip(ids, histories, counts, strict=True)
        return Proposal([list(self.script(id, h, count))[:count] for id, h, count in rows])

    def forget(self, id: Hashable) -> None:
        """Nothing is kept."""


def pick_drafter(
    model: Model, num_drafts: int, drafter: Drafter | None, *, asynchronous: bool
) -> Drafter | None:
    """Who proposes drafts for a loop: the drafter given, else None for the model's own draft
    module, else n-gram look-up.

    ValueError where there is none to do it: a drafter needs the tokens that are there so far, which
    an asynchronous loop has too late, and more than one draft module is not served.
    """
    if num_drafts == 0:
        if drafter is not None:
            raise ValueError("a drafter without drafts: give speculate=k, at least 1")
        return None
    modules = model.fns.num_drafts
    if drafter is None and modules == 1:
        return None
    if drafter is None and modules > 1:
        raise ValueError(
            f"the model has {modules} draft modules; the engine chains drafts over one: give a"
            f" drafter, as NgramDrafter()"
        )
    if asynchronous:
        raise ValueError(
            "asynchronous steps can't wait for a drafter on the host: speculate with a model that"
            " has a draft module, or with asynchronous=False"
        )
    return drafter or NgramDrafter()


def check_proposal(proposal: Proposal, counts: Sequence[int], vocab_size: int) -> None:
    """ValueError for drafts that are more than asked for, no tokens, or drawn from laws, which a
    loop can judge on the device only.
    """
    if proposal.laws is not None:
        raise ValueError("the drafter gives laws: the engine takes drafts that were not drawn")
    for drafts, count in zip(proposal.tokens, counts, strict=True):
        are_ids = all(hasattr(x, "__index__") and 0 <= x < vocab_size for x in drafts)
        if len(drafts) > count or not are_ids:
            raise ValueError(
                f"the drafter proposes {drafts}: expected at most {count} tokens of the vocabulary,"
                f" 0 to {vocab_size - 1}"
            )
