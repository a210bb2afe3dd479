"""What a request becomes: tokens, text, log-probabilities, and why it ended."""

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcinfer.serving.detokenise import TextStream
from funcinfer.serving.edits import History, has_penalties
from funcinfer.serving.params import SamplingParams
from funcinfer.serving.sampling import child_seed
from funcinfer.serving.text import Text


class TokenLogprob(NamedTuple):
    """The log-probability of a token, and of the likeliest ones as (token, log-probability), the
    likeliest first. Of the raw logits, see `funcinfer.serving.logprobs`.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Completion:
    """What a request has become: its ids so far and, once it has ended, why.

    tokens: a stop token is the last of them. logprobs: of each of these, prompt_logprobs: of each
    token of the prompt, None for the first one; None where they are not asked for.

    finish_reason: "stop" after a stop token or a stop text; "length" at max_tokens or at the
    model's max_length; "abort"; "error" where its logits gave no token, because they hold NaN or no
    finite number; None while it lives.
    """

    id: Hashable
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    stream: TextStream | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The text of its tokens, as far as it can be shown: whole characters, and nothing that may
        turn out to be the beginning of a stop text. Empty where the engine has no tokenizer.
        """
        return self.stream.text if self.stream is not None else ""


class Update(NamedTuple):
    """What a step brought to a request that is streamed: its new tokens, and the new text that can
    be shown.
    """

    completion: Completion
    tokens: list[int]
    text: str


@dataclass(slots=True, eq=False)
class Live:
    """What the engine knows of a live request, besides what the scheduler does.

    params: with a seed. stop_ids: all tokens that end it. group: the requests group it is in.
    history: where it has penalties.
    """

    completion: Completion
    params: SamplingParams
    stop_ids: frozenset[int]
    group: int
    history: History | None = None

    def push(self, token: int, logprob: TokenLogprob | None = None) -> bool:
        """Take a token in; whether it ends the request, as a stop token or by its text."""
        completion = self.completion
        completion.tokens.append(token)
        if logprob is not None and completion.logprobs is not None:
            completion.logprobs.append(logprob)
        if self.history is not None:
            self.history.extend([token])
        by_text = completion.stream is not None and completion.stream.push(token)
        return by_text or token in self.stop_ids

    def add_prompt_logprobs(self, first: int, found: Sequence[TokenLogprob]) -> None:
        """Take in those of tokens `first`, `first` + 1, ... of the prompt; some may be known."""
        known, prompt = self.completion.prompt_logprobs, self.completion.prompt
        if known is not None:
            news = found[max(len(known) - first, 0) :]
            known.extend(news[: len(prompt) - len(known)])

    def end(self, reason: str) -> None:
        """The request has ended."""
        completion = self.completion
        completion.finish_reason = reason
        if completion.stream is not None:
            last = completion.tokens[-1] if completion.tokens else None
            completion.stream.finish(stop_token=reason == "stop" and last in self.stop_ids)


def new_live(
    id: Hashable,
    prompt: list[int],
    params: SamplingParams,
    stop_ids: frozenset[int],
    *,
    child: int,
    group: int,
    text: Text | None,
) -> Live:
    """The record of a new request; `child` is its number among the n completions of a prompt."""
    completion = Completion(
        id,
        prompt,
        logprobs=None if params.logprobs is None else [],
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        stream=None if text is None else TextStream(text, params.stop, params.include_stop),
    )
    if child:
        params = dataclasses.replace(params, seed=child_seed(params.seed or 0, child))
    history = History(prompt) if has_penalties(params) else None
    return Live(completion, params, stop_ids, group, history)
