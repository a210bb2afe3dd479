"""The reference loop: add requests, step, read completions. Small, meant to be read and copied.

A step plans rows (`schedule`), has every rank run them (`Executor`), and commits what comes back:
one token, or with drafts several, for each row that reached its request's end. Prefill chunks,
decode rows and rows with drafts share a batch. With data parallelism each requests group has a
schedule and a pool of pages of its own, and all run in lockstep: a group without work runs padding.

Asynchronous stepping plans and launches a step before the tokens of the one before are read. A row
whose token is not known yet is planned all the same, and the device fills it in; what comes back
for a request that has ended or was preempted since is dropped, by its epoch.

Where ranks are processes, the first one has the schedule and is called as here; the others run its
launches: they `follow`. One thread at a time may use an engine; `on_token` may call it.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from funcinfer.kvcache.layout import pages_needed
from funcinfer.serving import checks, schedule
from funcinfer.serving.completion import Completion, Live, Update, new_live
from funcinfer.serving.drafters import Drafter, pick_drafter
from funcinfer.serving.edits import has_penalties
from funcinfer.serving.executor import Executor
from funcinfer.serving.flight import News
from funcinfer.serving.loop import Loop
from funcinfer.serving.metrics import count_row
from funcinfer.serving.model import Model
from funcinfer.serving.rank_step import Law
from funcinfer.serving.sampling import SamplingParams, fresh_seed
from funcinfer.serving.schedule import ScheduleState
from funcinfer.serving.text import Text
from funcinfer.serving.verify import Verifier

OnToken = Callable[[Completion, int], None]


class Engine:
    """A paged-KV serving loop over a Model.

    num_pages: pages of each requests group, the scratch page included. page_size: tokens a page.
    token_budget: most tokens of one group in one step; with at least max_running, every running
    request decodes in every step. max_running: most running requests of one group.

    speculate: most drafts for a request in a step. drafter: who proposes them; None: the model's
    draft module if it has one, else `NgramDrafter()`. verifier: None: a draft is accepted where it
    is the token that is drawn anyway, so each request gets the same tokens with drafts as without;
    another, as `verify.BLOCK`: drafts of the model are drawn, and judged by laws. exact: refuse a
    verifier that changes the law of the tokens.

    prefix_cache: keep full pages of requests that have ended, for prompts that begin alike.
    asynchronous: launch a step before the tokens of the one before are read; they come one step
    later, and are the same. chunk: see `schedule`.

    text: the tokenizer, for stop texts and `Completion.text`. poison: fill new and freed pages with
    NaN, so that a stale read shows. on_token: called as `on_token(completion, token)` for each
    token once it is committed, group by group in order of arrival; it may add and abort requests.

    The pool is allocated once; steps write it in place. A step that raises, also from `on_token`,
    leaves the engine usable: tokens that are committed stay, the other rows of the step are
    computed again. ValueError naming what can't be.

    >>> from funcinfer import Model, build
    >>> from funcinfer.layers.rope import Rope
    >>> from funcinfer.models import llama
    >>> from funcinfer.spec import init
    >>> cfg = llama.Config(97, 16, 1, 2, 1, 8, 24, 1e-6, Rope(10000.0, 8), max_length=64)
    >>> fns = build(llama.decoder(cfg))
    >>> engine = Engine(Model(cfg, fns, init(fns.specs)), num_pages=9, page_size=4)
    >>> id = engine.add([5, 6, 7], SamplingParams(max_tokens=2))
    >>> engine.step()
    []
    >>> [(done.id == id, len(done.tokens), done.finish_reason) for done in engine.step()]
    [(True, 2, 'length')]
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        page_size: int = 16,
        token_budget: int = 512,
        max_running: int = 64,
        speculate: int = 0,
        prefix_cache: bool = True,
        asynchronous: bool = False,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        exact: bool = True,
        chunk: Callable[[int], int] | None = None,
        text: Text | None = None,
        poison: bool = False,
        on_token: OnToken | None = None,
    ) -> None:
        if token_budget < 1 or max_running < 1 or speculate < 0:
            raise ValueError(
                f"token_budget is {token_budget}, max_running {max_running}, speculate {speculate}:"
                f" they must be at least 1, 1 and 0"
            )
        model.fns.check(model.mesh, page_size=page_size, specs=model.specs)
        self.model, self.page_size, self.text, self.on_token = model, page_size, text, on_token
        self.token_budget, self.max_running = token_budget, max_running
        self.drafter = pick_drafter(model, speculate, drafter, asynchronous=asynchronous)
        self._loop = Loop(
            model,
            num_pages=num_pages,
            page_size=page_size,
            token_budget=token_budget,
            max_running=max_running,
            num_drafts=speculate,
            prefix_cache=prefix_cache,
            asynchronous=asynchronous,
            drafter=self.drafter,
            law=Law(verifier, exact),
            chunk=chunk,
            poison=poison,
        )
        self.states, self.metrics = self._loop.states, self._loop.metrics
        self.live: dict[Hashable, Completion] = {}
        self._lives: dict[Hashable, Live] = {}
        self._ended: list[Completion] = []  # those that no step has returned yet
        self._untold: deque[tuple[Completion, int]] = deque()  # what on_token has not been told
        self._next_id = 0
        self._seeds = random.Random(fresh_seed())

    @classmethod
    def sized_for(
        cls,
        model: Model,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> "Engine":
        """An engine that runs `prompts` together, at most 64 of each requests group at a time, with
        pages enough for these to reach their ends. `options` are those of Engine.
        """
        sampling = sampling or SamplingParams()
        ends = [len(prompt) + sampling.max_tokens for prompt in prompts] * sampling.n or [1]
        if model.max_length is not None:
            ends = [min(end, model.max_length) for end in ends]
        running = min(-(-len(ends) // model.num_groups), 64)
        needs = sorted(pages_needed(end, model.page_size) for end in ends)
        sizes: dict[str, Any] = dict(
            num_pages=1 + sum(needs[-running:]), page_size=model.page_size, max_running=running
        )
        return cls(model, **sizes | options)

    @property
    def leads(self) -> bool:
        """Whether this process schedules: it has the first of the ranks."""
        return not any(self.model.runner.coords[0].values())

    @property
    def executor(self) -> Executor:
        """What runs the steps on the ranks of this process, and has their caches."""
        return self._loop.executor

    def add(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        id: Hashable | None = None,
        priority: int = 0,
        scope: Hashable = None,
    ) -> Hashable:
        """Queue a prompt of token ids; its id comes back, `id` or a number that no live one has.

        With n > 1 there are n requests, which share the prompt's pages: the first one has the id,
        the others (id, 1), (id, 2), .... The model's max_length, where it has one, counts prompt
        and output together: a prompt of max_length - 1 tokens gets one token, a longer one is
        refused, and max_tokens is cut to what is left. An id is free again once its request has
        ended. Without a seed in `sampling` the request gets a fresh one.

        priority: a smaller number runs first. scope: who may share cached pages with it: requests
        of an equal one, as `kvcache.prefix.scope(salt="...")` makes it. With prompt_logprobs
        nothing is shared, so that all of them are computed.

        ValueError, before anything is changed, for a prompt that is empty, too long or holds what
        is no token of the vocabulary, what `sampling` can't say of this vocabulary, a request that
        needs more pages than the pool has, the id of a live request, and on a process that follows.
        """
        self._must_lead()
        params = sampling or SamplingParams()
        tokens = checks.token_ids(prompt, self.model.cfg.vocab_size)
        stop_ids = frozenset(() if params.ignore_eos else self.model.stop_ids)
        stop_ids |= frozenset(params.stop_token_ids)
        checks.check_params(
            params, self.model.cfg.vocab_size, stop_ids, has_text=self.text is not None
        )
        group, state = min(enumerate(self.states), key=lambda pair: _num_live(pair[1]))
        max_total = checks.max_total(state, len(tokens), params.max_tokens)
        if id is None:
            while any(i in self.live for i in _ids(self._next_id, params.n)):
                self._next_id += 1
            id, self._next_id = self._next_id, self._next_id + 1
        ids = _ids(id, params.n)
        if taken := [i for i in ids if i in self.live]:
            raise ValueError(f"id {taken[0]!r} belongs to a live request")
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._seeds.getrandbits(64))
        if params.prompt_logprobs is not None:
            scope = object()
        made = [
            new_live(i, tokens, params, stop_ids, child=child, group=group, text=self.text)
            for child, i in enumerate(ids)
        ]
        schedule.add(
            state,
            ids[0],
            tokens,
            max_total=max_total,
            stop=stop_ids,
            sampling=made[0],
            priority=priority,
            scope=scope,
            can_be_late=not has_penalties(params) and not params.min_tokens,
        )
        for child, live in zip(ids[1:], made[1:], strict=True):
            live.completion.prompt_logprobs = made[0].completion.prompt_logprobs
            schedule.fork(state, ids[0], child, sampling=live)
        self._lives |= {live.completion.id: live for live in made}
        self.live |= {live.completion.id: live.completion for live in made}
        return ids[0]

    def abort(self, id: Hashable) -> Completion:
        """End a live request now, waiting or running, and get what it has become.

        No step returns it any more. ValueError where no live request has this id.
        """
        if id not in self.live:
            raise ValueError(f"no live request has the id {id!r}")
        return self._finish(id, "abort")

    def step(self) -> list[Completion]:
        """One step of the model for all groups; the requests that ended in it, but for aborted
        ones.

        Does nothing without live requests. Where every row is the last token of its request, and
        drafts behind it, the step runs under the decode rules, else under those of prefill. With
        `asynchronous`, what a step brings is told by the next one.
        """
        self._must_lead()
        self._tell()
        self._loop.step(self._take)
        ended, self._ended = self._ended, []
        return ended

    def stream(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        id: Hashable | None = None,
        priority: int = 0,
        scope: Hashable = None,
    ) -> Iterator[Update]:
        """Add a prompt as `add` does, and step while the result is iterated: what each step brings
        to it, until it has ended; of each of its n completions.

        Closing the iterator aborts it. Other requests run along, as in `generate`.
        """
        id = self.add(prompt, sampling, id=id, priority=priority, scope=scope)
        updates = self._updates(self._family(id, (sampling or SamplingParams()).n))
        next(updates)  # to where closing it aborts
        return updates

    def generate(
        self, prompts: Iterable[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Add all prompts, step until they have ended, and give their completions in order, n for
        each prompt.

        Where one is refused, or a step raises, none of them stays in the engine. Requests that were
        added before run along; a later `step` returns those of them that have ended.
        """
        mine: list[Completion] = []
        try:
            for prompt in prompts:
                mine += self._family(self.add(prompt, sampling), (sampling or SamplingParams()).n)
            while any(done.finish_reason is None for done in mine):
                self._step_for(mine)
        finally:
            self._drop(mine)
        return mine

    def follow(self) -> None:
        """On the other processes: run what the first one launches, until it calls `close`."""
        if self.leads:
            raise ValueError("this process schedules: it calls add and step, the others follow")
        while (launch := self.model.runner.broadcast(None)) is not None:
            self.executor.launch(launch)

    def close(self) -> None:
        """Let the other processes return from `follow`; nothing else is needed."""
        self._must_lead()
        self.model.runner.broadcast(None)

    def _take(self, news: News) -> None:
        """Commit what a row brought, unless its request has ended or was preempted since."""
        state, work = news.state, news.work
        request = state.running.get(work.request_id)
        if request is None or request.epoch != work.epoch:
            return
        live: Live = request.sampling
        live.add_prompt_logprobs(work.start + 1, news.prompt_logprobs)
        if not news.tokens:
            return
        tokens = [token for token in news.tokens if token >= 0]
        reason = None if tokens == news.tokens else "error"
        if tokens:
            count, ended = schedule.commit(state, work, tokens)
            reason = ended or reason
            known = len(live.completion.tokens)
            for token, logprob in zip_longest(tokens[:count], news.logprobs[:count]):
                self._untold.append((live.completion, token))
                if live.push(token, logprob):
                    reason = "stop"
                    break
            count_row(self.metrics, work, len(news.tokens), len(live.completion.tokens) - known)
        if reason == "error" and state.prefix is not None:
            state.prefix.clear()  # its pages may hold what gave no token
        if reason is not None:
            self._ended.append(self._finish(request.id, reason))
        elif not request.in_flight:
            self._loop.keep_drafts(news)
        self._tell()

    def _updates(self, mine: list[Completion]) -> Iterator[Update]:
        told = {id(done): (0, 0) for done in mine}
        left = list(mine)
        try:
            yield Update(mine[0], [], "")  # for `stream`
            while left:
                self._step_for(mine)
                for done in list(left):
                    num_tokens, num_chars = told[id(done)]
                    tokens, text = done.tokens[num_tokens:], done.text[num_chars:]
                    told[id(done)] = num_tokens + len(tokens), num_chars + len(text)
                    if done.finish_reason is not None:
                        left.remove(done)
                    if tokens or text or done.finish_reason is not None:
                        yield Update(done, tokens, text)
        finally:
            self._drop(mine)

    def _step_for(self, mine: list[Completion]) -> None:
        """A step whose completions, but for `mine`, are kept for a later one."""
        self._ended = [done for done in self.step() if not _among(done, mine)]

    def _drop(self, mine: list[Completion]) -> None:
        """Leave nothing of these requests in the engine."""
        self._ended = [done for done in self._ended if not _among(done, mine)]
        for done in mine:
            if self.live.get(done.id) is done:
                self.abort(done.id)

    def _family(self, id: Hashable, n: int) -> list[Completion]:
        """The live completions of a prompt."""
        return [self.live[i] for i in _ids(id, n)]

    def _finish(self, id: Hashable, reason: str) -> Completion:
        live = self._lives.pop(id)
        del self.live[id]
        state = self.states[live.group]
        if id in state.running or id in state.waiting:
            schedule.finish(state, id, reason)
        if self.drafter is not None:
            self.drafter.forget(id)
        live.end(reason)
        return live.completion

    def _tell(self) -> None:
        """Tell on_token of what was committed."""
        while self._untold:
            completion, token = self._untold.popleft()
            if self.on_token is not None:
                self.on_token(completion, token)

    def _must_lead(self) -> None:
        if not self.leads:
            raise ValueError("the first process schedules: the others call `follow`")


def _ids(id: Hashable, n: int) -> list[Hashable]:
    """The ids of the n completions of a request."""
    return [id, *((id, child) for child in range(1, n))]


def _num_live(state: ScheduleState) -> int:
    return len(state.running) + len(state.waiting)


def _among(completion: Completion, others: list[Completion]) -> bool:
    return any(completion is other for other in others)
