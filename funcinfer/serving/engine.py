"""The reference loop: add requests, step, read completions. Small, meant to be read and copied.

A step plans rows (`schedule`), places them in a Batch (`make_batch`), runs the model, samples one
token for each row that reached its request's end, and commits it. Prefill chunks and decode rows
share a batch. With data parallelism each requests group has a schedule and a pool of pages of its
own, and all run in lockstep: a group without work runs padding.

Nothing here depends on which rank it runs on, so processes that make the same calls in the same
order keep the same state. One thread at a time may use an engine; `on_token` may call it.
"""

import dataclasses
import operator
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.batch import Rows
from funcinfer.kvcache.layout import pages_needed
from funcinfer.serving import schedule
from funcinfer.serving.model import Model
from funcinfer.serving.params import check_vocab
from funcinfer.serving.sampling import (
    SamplingParams,
    choose,
    fresh_seed,
    stack_params,
    uniform,
)
from funcinfer.serving.schedule import Plan, Request, ScheduleState, Work
from funcinfer.sharding import P, axis_index
from funcinfer.tree import tree_leaves

# Fields of SamplingParams that a larger loop serves, from the same pieces.
UNSERVED = (
    "n",
    "stop",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "include_stop",
)
OnToken = Callable[["Completion", int], None]


@dataclass
class Completion:
    """What a request has become: its ids so far and, once it has ended, why.

    finish_reason: "stop" after a stop token, which is the last of `tokens`; "length" at max_tokens
    or at the model's max_length; "abort"; "error" where its logits gave no token, because they hold
    NaN or no finite number; None while it lives.
    """

    id: Hashable
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A paged-KV serving loop over a Model.

    num_pages: pages of each requests group, the scratch page included. page_size: tokens a page.
    token_budget: most tokens of one group in one step; with at least max_running, every running
    request decodes in every step. max_running: most running requests of one group. poison: fill
    new and freed pages with NaN, so that a stale read shows. on_token: called as
    `on_token(completion, token)` for each token once it is committed, group by group in order of
    arrival; it may add and abort requests. ValueError naming what can't be.

    The pool is allocated once; steps write it in place. A step that raises, also from `on_token`,
    leaves the engine usable: tokens that are committed stay, the other rows of the step are
    computed again.

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
        poison: bool = False,
        on_token: OnToken | None = None,
    ) -> None:
        if token_budget < 1 or max_running < 1:
            raise ValueError(
                f"token_budget is {token_budget} and max_running {max_running}:"
                f" both must be at least 1"
            )
        model.fns.check(model.mesh, page_size=page_size, specs=model.specs)
        self.model, self.page_size, self.on_token = model, page_size, on_token
        self.token_budget, self.max_running = token_budget, max_running
        self._freed: list[list[int]] = [[] for _ in range(model.num_groups)]
        self.states = [
            ScheduleState(
                PagePool(num_pages, on_free=freed.extend if poison else None),
                page_size,
                model.max_length,
            )
            for freed in self._freed
        ]
        fill = float("nan") if poison else 0.0
        self.caches = [
            model.local_cache(num_pages, page_size, fill=fill, coord=coord)
            for coord in model.runner.coords
        ]
        self.live: dict[Hashable, Completion] = {}
        self._group: dict[Hashable, int] = {}
        self._ended: list[Completion] = []  # those that no step has returned yet
        self._next_id = 0
        self._seeds = random.Random(_common_seed(model))

    @classmethod
    def sized_for(
        cls, model: Model, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> "Engine":
        """An engine that runs `prompts` together, at most 64 of each requests group at a time, with
        pages enough for these to reach their ends.
        """
        max_tokens = (sampling or SamplingParams()).max_tokens
        totals = [len(prompt) + max_tokens for prompt in prompts] or [1]
        if model.max_length is not None:
            totals = [min(total, model.max_length) for total in totals]
        running = min(-(-len(totals) // model.num_groups), 64)
        needs = sorted(pages_needed(total, model.page_size) for total in totals)
        return cls(
            model,
            num_pages=1 + sum(needs[-running:]),
            page_size=model.page_size,
            max_running=running,
        )

    def add(
        self,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        id: Hashable | None = None,
    ) -> Hashable:
        """Queue a prompt of token ids; its id comes back, `id` or a number that no live one has.

        The model's max_length, where it has one, counts prompt and output together: a prompt of
        max_length - 1 tokens gets one token, a longer one is refused, and max_tokens is cut to what
        is left. An id is free again once its request has ended. Without a seed in `sampling` the
        request gets a fresh one.

        ValueError, before anything is changed, for a prompt that is empty, too long or holds what
        is no token of the vocabulary, a stop token outside of it, a field of `sampling` that this
        loop leaves out (UNSERVED), a request that needs more pages than the pool has, and the id of
        a live request.
        """
        sampling = sampling or SamplingParams()
        tokens = self._token_ids(prompt)
        _check_served(sampling, self.model.cfg.vocab_size)
        group = min(range(len(self.states)), key=lambda g: _num_live(self.states[g]))
        state = self.states[group]
        max_total = _max_total(state, len(tokens), sampling.max_tokens)
        if id is None:
            while self._next_id in self.live:
                self._next_id += 1
            id, self._next_id = self._next_id, self._next_id + 1
        if id in self.live:
            raise ValueError(f"id {id!r} belongs to a live request")
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=self._seeds.getrandbits(64))
        stop = frozenset(() if sampling.ignore_eos else self.model.stop_ids)
        stop |= frozenset(sampling.stop_token_ids)
        schedule.add(state, id, tokens, max_total=max_total, stop=stop, sampling=sampling)
        self.live[id] = Completion(id, tokens)
        self._group[id] = group
        return id

    def abort(self, id: Hashable) -> Completion:
        """End a live request now, waiting or running, and get what it has become.

        No step returns it any more. ValueError where no live request has this id.
        """
        if id not in self.live:
            raise ValueError(f"no live request has the id {id!r}")
        schedule.finish(self.states[self._group[id]], id, "abort")
        return self._end(id, "abort")

    def step(self) -> list[Completion]:
        """One step of the model for all groups; the requests that ended in it, but for aborted
        ones.

        Does nothing without live requests. Where every row is the last token of its request, the
        step runs under the decode rules, else under those of prefill.
        """
        plans = [schedule.schedule(s, self.token_budget, self.max_running) for s in self.states]
        try:
            self._poison_freed()
            if any(plan.works for plan in plans):
                self._run(plans)
        except BaseException:
            for state, plan in zip(self.states, plans, strict=True):
                _take_back(state, plan)
            raise
        ended, self._ended = self._ended, []
        return ended

    def generate(
        self, prompts: Iterable[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Add all prompts, step until they have ended, and give their completions in order.

        Where one is refused, or a step raises, none of them stays in the engine. Requests that were
        added before run along; a later `step` returns those of them that have ended.
        """
        mine: dict[Hashable, Completion] = {}
        others: list[Completion] = []
        try:
            for prompt in prompts:
                id = self.add(prompt, sampling)
                mine[id] = self.live[id]
            while any(done.finish_reason is None for done in mine.values()):
                others += [done for done in self.step() if done is not mine.get(done.id)]
        finally:
            self._ended = others + [done for done in self._ended if done is not mine.get(done.id)]
            for id, completion in mine.items():
                if self.live.get(id) is completion:
                    self.abort(id)
        return list(mine.values())

    def _run(self, plans: list[Plan]) -> None:
        """Run the planned rows, and commit a token for each that wants one."""
        decode = all(w.num_tokens == 1 and w.wants_logits for p in plans for w in p.works)
        groups = [
            [Rows(w.tokens, w.start, w.pages, int(w.wants_logits)) for w in plan.works]
            for plan in plans
        ]
        batch = self.model.place(groups, page_size=self.page_size, decode=decode)
        with torch.no_grad():
            outs, self.caches = self.model.step(self.caches, batch, decode=decode)
        logits_LV = self.model.join_logits(outs, decode=decode, check=False)
        per_group = len(logits_LV) // len(plans)
        wanted: list[tuple[ScheduleState, Work]] = []
        places: list[int] = []
        for group, (state, plan) in enumerate(zip(self.states, plans, strict=True)):
            works = [work for work in plan.works if work.wants_logits]
            wanted += [(state, work) for work in works]
            places += range(group * per_group, group * per_group + len(works))
        if wanted:
            requests = [state.request(work.request_id) for state, work in wanted]
            rows_B = torch.tensor(places, device=logits_LV.device)
            tokens = _sample(logits_LV[rows_B, : self.model.cfg.vocab_size], requests)
            for (state, work), token in zip(wanted, tokens, strict=True):
                self._commit(state, work, token)

    def _commit(self, state: ScheduleState, work: Work, token: int) -> None:
        """Append the token of a row to its request, unless `on_token` of another has ended it."""
        request = state.running.get(work.request_id)
        if request is None or request.epoch != work.epoch:
            return
        if token < 0:
            schedule.finish(state, request.id, "error")
            self._ended.append(self._end(request.id, "error"))
            return
        _, reason = schedule.commit(state, work, [token])
        completion = self.live[request.id]
        completion.tokens.append(token)
        if reason is not None:
            self._ended.append(self._end(request.id, reason))
        if self.on_token is not None:
            self.on_token(completion, token)

    def _end(self, id: Hashable, reason: str) -> Completion:
        completion = self.live.pop(id)
        del self._group[id]
        completion.finish_reason = reason
        return completion

    def _token_ids(self, prompt: Iterable[int]) -> list[int]:
        """The prompt as ints; ValueError where one is no token of the vocabulary."""
        vocab_size, ids = self.model.cfg.vocab_size, []
        for value in prompt:
            try:
                ids.append(operator.index(value))
            except TypeError:
                raise ValueError(f"prompt: {value!r} is no token id; give whole numbers") from None
            if not 0 <= ids[-1] < vocab_size:
                raise ValueError(
                    f"prompt: token {ids[-1]} is outside of the vocabulary, 0 to {vocab_size - 1}"
                )
        return ids

    def _poison_freed(self) -> None:
        """Fill the pages that were freed since the last step with NaN, on the ranks of their
        group. The step has not written to those that it took again.
        """
        if not any(self._freed):
            return
        freed = [sorted(set(pages)) for pages in self._freed]
        requests = self.model.rules["requests"]

        def fill(cache: dict) -> None:
            pages = torch.tensor(freed[axis_index(requests)], dtype=torch.int64)
            for leaf in tree_leaves(cache):
                if leaf is not None:  # it is of this pipeline stage
                    leaf[pages.to(leaf.device)] = float("nan")

        self.model.runner.run(fill, self.caches)
        for pages in self._freed:
            pages.clear()


def _sample(logits_BV: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request; -1 where its logits give none."""
    params: list[SamplingParams] = [request.sampling for request in requests]
    draws = [uniform(p.seed or 0, r.num_output) for p, r in zip(params, requests, strict=True)]
    uniforms_B = torch.tensor(draws, dtype=torch.float64, device=logits_BV.device)
    return choose(logits_BV, *stack_params(params, logits_BV.device), uniforms_B).tolist()


def _check_served(sampling: SamplingParams, vocab_size: int) -> None:
    """ValueError naming a field that the vocabulary forbids, or that this loop has no use for."""
    check_vocab(sampling, vocab_size)
    for name in UNSERVED:
        if getattr(sampling, name) != getattr(SamplingParams(), name):
            raise ValueError(f"{name} is {getattr(sampling, name)!r}: Engine leaves it out")


def _max_total(state: ScheduleState, prompt_len: int, max_tokens: int) -> int:
    """Tokens of prompt and output at which a request ends; ValueError where it can't be served."""
    if prompt_len == 0:
        raise ValueError("prompt is empty: it needs at least one token id")
    max_total, max_length = prompt_len + max_tokens, state.max_length
    if max_length is not None:
        if prompt_len >= max_length:
            raise ValueError(
                f"prompt has {prompt_len} tokens; the model's max_length is {max_length}, prompt"
                f" and output together, so it can have {max_length - 1}"
            )
        max_total = min(max_total, max_length)
    reason = schedule.never_fits(
        prompt_len,
        max_total,
        num_pages=state.pool.num_pages,
        page_size=state.page_size,
        max_length=max_length,
    )
    if reason is not None:
        raise ValueError(f"prompt of {prompt_len} tokens and max_tokens={max_tokens}: {reason}")
    return max_total


def _take_back(state: ScheduleState, plan: Plan) -> None:
    """Have the rows of a failed step computed again, but for those of requests that have ended."""
    for work in plan.works:
        request = state.running.get(work.request_id)
        if request is not None and request.epoch == work.epoch:
            schedule.preempt(state, work.request_id)
            return


def _num_live(state: ScheduleState) -> int:
    return len(state.running) + len(state.waiting)


def _common_seed(model: Model) -> int:
    """A fresh seed that all processes of the model agree on: that of the first rank."""
    seeds = [torch.tensor(fresh_seed() >> 1, device=model.device) for _ in model.runner.coords]
    return int(model.runner.join(seeds, P(), check=False))
