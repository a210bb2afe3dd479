"""The loop without its users: plan rows, launch them, and hand on what comes back.

A step is in flight from its launch until its news have been taken. Only an asynchronous loop has
two of them at once.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.prefix import PrefixCache
from funcinfer.serving import schedule
from funcinfer.serving.drafters import Drafter, check_proposal
from funcinfer.serving.executor import Executor
from funcinfer.serving.flight import Flight, News, SlotTable, make_row
from funcinfer.serving.launch import Launch, Sizes
from funcinfer.serving.metrics import Metrics, count_plan
from funcinfer.serving.model import Model
from funcinfer.serving.rank_step import Law
from funcinfer.serving.schedule import Plan, ScheduleState


class Loop:
    """Schedules of all requests groups, the device that runs them, and the steps in flight.

    `Request.sampling` of its requests is a `Live`. The parameters are those of `Engine`; a drafter
    of None is the model's draft module.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int,
        token_budget: int,
        max_running: int,
        num_drafts: int,
        prefix_cache: bool,
        asynchronous: bool,
        drafter: Drafter | None,
        law: Law,
        chunk: Callable[[int], int] | None,
        poison: bool,
    ) -> None:
        self.model, self.drafter, self.asynchronous = model, drafter, asynchronous
        self.token_budget, self.max_running, self.chunk = token_budget, max_running, chunk
        modules = num_drafts > 0 and drafter is None
        self.sizes = Sizes(
            page_size,
            num_slots=2 * max_running * model.num_groups,
            num_drafts=num_drafts,
            modules=modules,
            laws=modules and law.verifier is not None,
        )
        self._freed: list[list[int]] = [[] for _ in range(model.num_groups)]
        self.states: list[ScheduleState] = []
        for freed in self._freed:
            pool = PagePool(num_pages, on_free=freed.extend if poison else None)
            prefix = PrefixCache(pool, page_size) if prefix_cache else None
            self.states.append(ScheduleState(pool, page_size, model.max_length, prefix=prefix))
        size = 2 * max_running  # so that a request that left need not be looked for at once
        self._slots = [SlotTable(range(size * g, size * (g + 1))) for g in range(model.num_groups)]
        fill = float("nan") if poison else 0.0
        self.executor = Executor(model, self.sizes, num_pages=num_pages, fill=fill, law=law)
        self.metrics = Metrics(pages=sum(state.pool.num_usable for state in self.states))
        self._flights: deque[Flight] = deque()
        self._landing: list[Flight] = []  # of these `take` is being told; it may step again

    def step(self, take: Callable[[News], None]) -> None:
        """Plan and launch a step, and take what earlier ones brought or, unless asynchronous, this
        one.

        Where something raises, `take` as well, all rows that are planned or in flight are computed
        again, but for those of requests that have ended.
        """
        started = time.perf_counter()
        planned: list[Plan] = []
        try:
            self._propose()
            for state in self.states:
                planned.append(self._plan(state))
            flight = self._launch(planned)
            if flight is not None:
                self._flights.append(flight)
            keep = int(self.asynchronous and flight is not None)
            while len(self._flights) > keep:
                self._land(take)
        except BaseException:
            self._take_back(planned)
            raise
        self.metrics.look(self.states, time.perf_counter() - started)

    def _land(self, take: Callable[[News], None]) -> None:
        """Take what the earliest step brought."""
        if self.asynchronous and self._landing:
            raise ValueError("on_token can't step an asynchronous engine: rows are taken in order")
        flight = self._flights.popleft()
        self._landing.append(flight)
        for news in flight.news(self.states):
            take(news)
        if flight in self._landing:  # unless a step that `take` made has failed
            self._landing.remove(flight)

    def keep_drafts(self, news: News) -> None:
        """Have the drafts that the model made for a request verified by its next row."""
        if self.sizes.modules:
            schedule.propose(news.state, news.work.request_id, news.drafts)

    def _propose(self) -> None:
        """Ask the drafter for what may follow the last token of each running request."""
        if self.drafter is None:
            return
        for state in self.states:
            ready = [r for r in state.running.values() if r.computed + 1 == len(r.tokens)]
            counts = [min(self.sizes.num_drafts, r.max_total - len(r.tokens) - 1) for r in ready]
            proposal = self.drafter.propose(
                [r.id for r in ready], [r.tokens for r in ready], counts
            )
            check_proposal(proposal, counts, self.model.cfg.vocab_size)
            for request, drafts in zip(ready, proposal.tokens, strict=True):
                schedule.propose(state, request.id, drafts)

    def _plan(self, state: ScheduleState) -> Plan:
        sizes = self.sizes
        plan = schedule.schedule(
            state,
            self.token_budget,
            self.max_running,
            ahead=int(self.asynchronous),
            num_drafts=sizes.num_drafts if self.asynchronous else 0,
            look_ahead=max(sizes.num_drafts - 1, 0) if sizes.modules else 0,
            chunk=self.chunk,
        )
        for id in plan.preempted:
            self._forget_drafts(state, id)
        return plan

    def _launch(self, plans: Sequence[Plan]) -> Flight | None:
        """Run the planned rows; None where there are none."""
        groups = tuple(
            tuple(make_row(state, work, slots) for work in plan.works)
            for state, plan, slots in zip(self.states, plans, self._slots, strict=True)
        )
        rows = [row for group in groups for row in group]
        freed = tuple(tuple(pages) for pages in self._freed)
        if not rows and not any(freed):
            return None
        launch = Launch(groups, all(row.is_decode for row in rows), freed)
        self.model.runner.broadcast(launch)
        for pages in self._freed:
            pages.clear()
        result = self.executor.launch(launch)
        if result is None:
            return None
        self.metrics.steps += 1
        for state, plan in zip(self.states, plans, strict=True):
            count_plan(self.metrics, state, plan)
        return Flight(plans, launch, result)

    def _take_back(self, planned: Sequence[Plan]) -> None:
        """Have the rows computed again that are planned or in flight, but for those of requests
        that have ended.
        """
        flights = [*self._landing, *self._flights]
        for plans in [*(flight.plans for flight in flights), planned]:
            for state, plan in zip(self.states, plans, strict=False):
                running = state.running
                for work in plan.works:
                    request = running.get(work.request_id)
                    if request is not None and request.epoch == work.epoch:
                        behind = list(running)[list(running).index(work.request_id) :]
                        schedule.preempt(state, work.request_id)
                        for id in behind:
                            self._forget_drafts(state, id)
                        break
        self._flights.clear()
        self._landing.clear()

    def _forget_drafts(self, state: ScheduleState, id: Hashable) -> None:
        """The laws that drafts were drawn from are kept by slot, which a preemption takes away."""
        if self.sizes.laws:
            schedule.propose(state, id, ())
