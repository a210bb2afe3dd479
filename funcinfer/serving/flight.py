"""Between the scheduler and the device: plans become a Launch, and its Result news of requests."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcinfer.serving.completion import Live, TokenLogprob
from funcinfer.serving.launch import Draw, Launch, Row
from funcinfer.serving.logprobs import Logprobs
from funcinfer.serving.rank_step import Result
from funcinfer.serving.request import Plan, Request, ScheduleState, Work


class SlotTable:
    """Which slot the device keeps a request in, of those in `slots`: one for each stay in the
    running set.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(reversed(slots))
        self._taken: dict[int, int] = {}  # epoch -> slot

    def slot(self, state: ScheduleState, epoch: int) -> int:
        """The slot of a running request."""
        found = self._taken.get(epoch)
        if found is None:
            if not self._free:
                epochs = {request.epoch for request in state.running.values()}
                gone = [e for e in self._taken if e not in epochs]
                self._free += [self._taken.pop(e) for e in gone]
            found = self._taken[epoch] = self._free.pop()
        return found


def make_row(state: ScheduleState, work: Work, slots: SlotTable) -> Row:
    """The row of a launch for a planned one."""
    request = state.running[work.request_id]
    live: Live = request.sampling
    end = work.start + work.num_tokens
    scored = None
    if live.params.prompt_logprobs is not None and _has_news(live, request, work.start, end):
        scored = live.params.prompt_logprobs
    if not work.wants_logits:
        return Row(
            work.tokens, work.start, work.pages, scored=scored, following=request.tokens[end]
        )
    num_output = end - work.num_drafts - request.prompt_len
    return Row(
        work.tokens,
        work.start,
        work.pages,
        slots.slot(state, work.epoch),
        work.num_drafts,
        work.late,
        Draw(live.params, num_output, live.stop_ids, live.history),
        scored,
    )


def _has_news(live: Live, request: Request, start: int, end: int) -> bool:
    """Whether log-probabilities of tokens of the prompt are missing that a row can tell."""
    known = live.completion.prompt_logprobs or []
    return start + 1 < request.prompt_len and len(known) <= min(end, request.prompt_len - 1)


class News(NamedTuple):
    """What a row brought. tokens: emitted, empty for a row that drew none; the last is -1 where
    there was no law. drafts: what may follow. logprobs: of the tokens. prompt_logprobs: of the
    tokens of the prompt that the row's own tokens precede.
    """

    state: ScheduleState
    work: Work
    tokens: list[int]
    drafts: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


@dataclass(frozen=True, eq=False)
class Flight:
    """A launch and the plans that it was made of, one for each requests group."""

    plans: Sequence[Plan]
    launch: Launch
    result: Result

    def news(self, states: Sequence[ScheduleState]) -> Iterator[News]:
        """What each row brought, group by group in order of its plan. Waits for the device."""
        accepted = self.result.num_accepted_B.tolist()
        tokens, drafts = self.result.tokens_BL.tolist(), self.result.drafts_BK.tolist()
        scores = None if self.result.logprobs_N is None else Scores(self.result.logprobs_N)
        num_groups = len(self.plans)
        for group, (state, plan) in enumerate(zip(states, self.plans, strict=True)):
            b, n = group * len(tokens) // num_groups, 0
            if scores is not None:
                n = group * len(scores) // num_groups
            for work, row in zip(plan.works, self.launch.groups[group], strict=True):
                end = n + row.wanted
                emitted: list[int] = []
                follow: list[int] = []
                found: list[TokenLogprob] = []
                if row.draw is not None:
                    emitted = tokens[b][: accepted[b] + 1]
                    follow = [draft for draft in drafts[b] if draft >= 0]
                    if row.draw.params.logprobs is not None and scores is not None:
                        first = end - 1 - row.num_drafts
                        found = scores.entries(first, emitted, row.draw.params.logprobs)
                    b += 1
                of_prompt: list[TokenLogprob] = []
                if row.scored is not None and scores is not None:
                    given = [*row.tokens[1 : len(row.tokens) - row.num_drafts]]
                    given += [row.following] if row.draw is None else []
                    of_prompt = scores.entries(n, given, row.scored)
                yield News(state, work, emitted, follow, found, of_prompt)
                n = end


class Scores:
    """The log-probabilities of a launch, as numbers."""

    def __init__(self, found: Logprobs) -> None:
        self._values, self._top, self._ids = (x.tolist() for x in found)

    def __len__(self) -> int:
        return len(self._values)

    def entries(self, first: int, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
        """Those of `tokens`, which the rows of logits from `first` on are about."""
        return [
            TokenLogprob(token, self._values[n], self._alternatives(n, num_top))
            for n, token in enumerate(tokens, first)
        ]

    def _alternatives(self, n: int, num_top: int) -> list[tuple[int, float]]:
        pairs = zip(self._ids[n], self._top[n], strict=True)
        return [pair for pair, _ in zip(pairs, range(num_top), strict=False)]
