"""The reference loop: add requests, step, read completions. Small, meant to be read and copied.

A step plans rows (`schedule`), places them in a Batch (`make_batch`), runs the model, samples one
token for each row that reached its request's end, and commits it. Prefill chunks and decode rows
share a batch. With data parallelism each requests group has a schedule and a pool of pages of its
own, and all run in lockstep.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from funcinfer.kvcache.allocator import PagePool
from funcinfer.kvcache.batch import Rows
from funcinfer.kvcache.layout import pages_needed
from funcinfer.models.decoder import output_specs
from funcinfer.serving import schedule
from funcinfer.serving.model import Model
from funcinfer.serving.sampling import (
    SamplingParams,
    choose,
    fresh_seed,
    stack_params,
    uniform,
)
from funcinfer.sharding import axis_index
from funcinfer.tree import tree_leaves

OnToken = Callable[["Completion", int], None]


@dataclass
class Completion:
    """What a request has become: its ids so far and, once it has ended, why ("stop", "length",
    "abort", or "error" where the logits of a row hold NaN or no finite number).
    """

    id: Hashable
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A paged-KV serving loop over a Model.

    `num_pages` counts the pages of each requests group, scratch page included; `token_budget` the
    most tokens of one group in one step; `max_running` its most requests. With `poison`, freed
    pages are filled with NaN, so that a stale read shows.

    Streaming: `on_token(completion, token)` is called for each token as it is committed.
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
        model.fns.check(model.mesh, page_size=page_size, specs=model.specs)
        self.model, self.page_size, self.on_token = model, page_size, on_token
        self.token_budget, self.max_running = token_budget, max_running
        self._freed: list[list[int]] = [[] for _ in range(model.num_groups)]
        self.states = [
            schedule.ScheduleState(
                PagePool(num_pages, on_free=freed.extend if poison else None),
                page_size,
                model.max_length,
            )
            for freed in self._freed
        ]
        fill = float("nan") if poison else 0.0
        self.caches = [model.local_cache(num_pages, page_size, fill=fill) for _ in model.shards]
        self.live: dict[Hashable, Completion] = {}
        self._group: dict[Hashable, int] = {}
        self._next_id = 0

    @classmethod
    def sized_for(
        cls, model: Model, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> "Engine":
        """An engine whose pool holds all of `prompts` to their ends at once."""
        longest = (
            max((len(p) for p in prompts), default=1) + (sampling or SamplingParams()).max_tokens
        )
        page_size = model.page_size
        return cls(
            model,
            num_pages=1 + max(len(prompts), 1) * pages_needed(longest, page_size),
            page_size=page_size,
            max_running=max(len(prompts), 1),
        )

    def add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        id: Hashable | None = None,
    ) -> Hashable:
        """Queue a prompt of token ids; its id comes back. ValueError, naming what is wrong, for
        what can't be served.
        """
        sampling = sampling or SamplingParams()
        prompt = [int(t) for t in prompt]
        vocab = self.model.cfg.vocab_size
        if bad := [t for t in prompt if not 0 <= t < vocab]:
            raise ValueError(
                f"prompt: token {bad[0]} is outside of the vocabulary, 0 to {vocab - 1}"
            )
        if id is None:
            id, self._next_id = self._next_id, self._next_id + 1
        if id in self.live:
            raise ValueError(f"id {id!r} belongs to a live request")
        group = min(range(len(self.states)), key=lambda g: _load(self.states[g]))
        state = self.states[group]
        limit = len(prompt) + sampling.max_tokens
        stop = frozenset(() if sampling.ignore_eos else self.model.stop_ids)
        schedule.add(
            state,
            id,
            prompt,
            max_total=limit if state.max_length is None else min(limit, state.max_length),
            stop=stop | frozenset(sampling.stop_token_ids),
            sampling=sampling
            if sampling.seed is not None
            else dataclasses.replace(sampling, seed=fresh_seed()),
        )
        self.live[id] = Completion(id, prompt)
        self._group[id] = group
        return id

    def abort(self, id: Hashable) -> Completion:
        """End a live request now. ValueError where no live request has this id."""
        if id not in self.live:
            raise ValueError(f"no live request has the id {id!r}")
        schedule.finish(self.states[self._group[id]], id, "abort")
        return self._end(id, "abort")

    def step(self) -> list[Completion]:
        """One step of the model for all groups; the requests that ended in it. Without live
        requests, nothing.
        """
        plans = [schedule.schedule(s, self.token_budget, self.max_running) for s in self.states]
        self._poison_freed()
        if not any(plan.works for plan in plans):
            return []
        decode = all(w.num_tokens == 1 and w.wants_logits for p in plans for w in p.works)
        groups = [
            [Rows(w.tokens, w.start, w.pages, int(w.wants_logits)) for w in p.works] for p in plans
        ]
        batch = self.model.place(groups, page_size=self.page_size, decode=decode)
        with torch.no_grad():
            outs, self.caches = self.model.step(self.caches, batch, decode=decode)
        rules = self.model.fns.decode_rules if decode else self.model.fns.prefill_rules
        logits = self.model.runner.join(
            [o.logits for o in outs], output_specs(rules).logits, check=False
        )
        per_group = logits.unflatten(0, (len(plans), -1))
        wanted = [
            (g, w, per_group[g, i])
            for g, plan in enumerate(plans)
            for i, w in enumerate(w for w in plan.works if w.wants_logits)
        ]
        return self._commit(wanted) if wanted else []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Add all prompts, step until they have ended, and give their completions in order."""
        ids = [self.add(p, sampling) for p in prompts]
        found = {id: self.live[id] for id in ids}
        while any(c.finish_reason is None for c in found.values()):
            self.step()
        return [found[id] for id in ids]

    def _commit(self, wanted: list[tuple[int, schedule.Work, torch.Tensor]]) -> list[Completion]:
        requests = [self.states[g].request(w.request_id) for g, w, _ in wanted]
        logits = torch.stack([x for _, _, x in wanted])[:, : self.model.cfg.vocab_size]
        params: list[SamplingParams] = [r.sampling for r in requests]
        draws = [
            uniform(p.seed, r.num_output) if p.seed is not None else 0.0
            for p, r in zip(params, requests, strict=True)
        ]
        uniforms = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        tokens = choose(logits, *stack_params(params, logits.device), uniforms).tolist()
        ended = []
        for (g, work, _), token in zip(wanted, tokens, strict=True):
            if token < 0:
                schedule.finish(self.states[g], work.request_id, "error")
                ended.append(self._end(work.request_id, "error"))
                continue
            _, reason = schedule.commit(self.states[g], work, [token])
            completion = self.live[work.request_id]
            completion.tokens.append(token)
            if reason is not None:
                ended.append(self._end(work.request_id, reason))
            if self.on_token is not None:
                self.on_token(completion, token)
        return ended

    def _end(self, id: Hashable, reason: str) -> Completion:
        completion = self.live.pop(id)
        del self._group[id]
        completion.finish_reason = reason
        return completion

    def _poison_freed(self) -> None:
        """Fill the pages that were freed since the last step with NaN, on the ranks of their
        group.
        """
        if not any(self._freed):
            return
        freed = [sorted(set(pages)) for pages in self._freed]
        requests = self.model.rules["requests"]

        def fill(cache: dict) -> None:
            pages = torch.tensor(freed[axis_index(requests)], dtype=torch.int64)
            for leaf in tree_leaves(cache):
                leaf[pages.to(leaf.device)] = float("nan")

        self.model.runner.run(fill, self.caches)
        for pages in self._freed:
            pages.clear()


def _load(state: schedule.ScheduleState) -> int:
    return len(state.running) + len(state.waiting)
