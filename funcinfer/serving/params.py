"""What a request may ask for: SamplingParams, validated field by field, and against a vocabulary.

Ranges of bias and penalties are those of OpenAI's API, where it has them.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

_MAX_SEED = 2**64 - 1
_MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Greedy unless a temperature is given.

    max_tokens: most tokens to generate, at least 1.
    min_tokens: before so many are generated, no token that ends the request is possible.
    temperature: 0 for greedy, which uses no randomness; else the divisor of the logits.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: in 0..1, keep the most likely tokens up to this mass; 1 keeps all, 0 only the first.
    min_p: in 0..1, keep the tokens that have this fraction of the largest probability; 0 keeps all.
    repetition_penalty: above 0; divides positive and multiplies other logits of the tokens of
        prompt and output; 1 is off.
    presence_penalty, frequency_penalty: in -2..2, subtracted from the logits of the tokens of the
        output, once and for each occurrence; 0 is off.
    logit_bias: token id -> number in -100..100 to add, or -inf, which forbids the token. Kept as
        pairs in order of id.
    seed: 0..2**64-1, fixes every draw; None: a fresh one for each request (`fresh_seed`).
    n: number of completions, which draw apart (`child_seed`).
    stop_token_ids: tokens that end the request, besides those of the checkpoint.
    stop: a text or several that end the request.
    ignore_eos: do not end at the stop tokens of the checkpoint.
    logprobs: for each generated token, report its log-probability and so many alternatives.
    prompt_logprobs: the same for the tokens of the prompt. None: report nothing.
    include_stop: keep the stop text, or the text of the stop token, in the text of the completion.
    The order of all this, and what a log-probability is: `funcinfer.serving.processors`.
    Raises ValueError naming the field.

    >>> params = SamplingParams(temperature=0.7, stop_token_ids=[2], logit_bias={5: -1})
    >>> params.stop_token_ids, params.logit_bias
    ((2,), ((5, -1.0),))
    >>> SamplingParams(top_p=1.5)
    Traceback (most recent call last):
        ...
    ValueError: top_p is 1.5: expected a number in 0..1
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] = ()
    n: int = 1
    include_stop: bool = False

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        ids = self.stop_token_ids
        ids_are_fine = isinstance(ids, list | tuple) and all(_is_count(i, 0) for i in ids)
        self._require("stop_token_ids", ids_are_fine, "a tuple of token ids >= 0")
        for name in ("ignore_eos", "include_stop"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop_is_fine = isinstance(stop, list | tuple) and all(
            isinstance(text, str) and text for text in stop
        )
        self._require("stop", stop_is_fine, "a text or a tuple of texts, none of them empty")
        object.__setattr__(self, "stop_token_ids", tuple(ids))
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "logit_bias", self._sorted_bias())

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """The pairs of `logit_bias`, in order of id."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def _check_counts(self) -> None:
        self._require("max_tokens", _is_count(self.max_tokens, 1), "an integer of at least 1")
        self._require(
            "min_tokens",
            _is_count(self.min_tokens, 0) and self.min_tokens <= self.max_tokens,
            f"an integer in 0..{self.max_tokens}, which is max_tokens",
        )
        self._require(
            "top_k", _is_count(self.top_k, 0), "an integer of at least 0, where 0 keeps all"
        )
        seed_is_fine = self.seed is None or (_is_count(self.seed, 0) and self.seed <= _MAX_SEED)
        self._require("seed", seed_is_fine, "None or an integer in 0..2**64-1")
        self._require("n", _is_count(self.n, 1), "an integer of at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._require(
                name, value is None or _is_count(value, 0), "None or a number of alternatives >= 0"
            )

    def _check_numbers(self) -> None:
        self._require(
            "temperature", _is_number(self.temperature, 0, _MAX_FLOAT), "a finite number >= 0"
        )
        for name in ("top_p", "min_p"):
            self._require(name, _is_number(getattr(self, name), 0, 1), "a number in 0..1")
        repetition = self.repetition_penalty
        self._require(
            "repetition_penalty",
            _is_number(repetition, 0, _MAX_FLOAT) and repetition > 0,
            "a finite number above 0, where 1 is off",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, _is_number(getattr(self, name), -2, 2), "a number in -2..2")

    def _sorted_bias(self) -> tuple[tuple[int, float], ...]:
        bias = self.logit_bias
        pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
        fine = isinstance(pairs, list | tuple) and all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and _is_count(pair[0], 0)
            and (_is_number(pair[1], -100, 100) or _is_number(pair[1], -math.inf, -math.inf))
            for pair in pairs
        )
        fine = fine and len({int(token) for token, _ in pairs}) == len(pairs)
        self._require(
            "logit_bias", fine, "a mapping of token ids >= 0 to numbers in -100..100 or -inf"
        )
        return tuple(sorted((int(token), float(value)) for token, value in pairs))

    def _require(self, name: str, fine: bool, expected: str) -> None:
        if not fine:
            raise ValueError(f"{name} is {getattr(self, name)!r}: expected {expected}")


def check_vocab(
    params: SamplingParams, vocab_size: int, stop_token_ids: Collection[int] = ()
) -> None:
    """Check what the parameters say of tokens against a vocabulary, when a request is added.

    stop_token_ids: all tokens that will end the request, those of the checkpoint among them.
    Raises ValueError, naming the field, for an id that is no token, for more alternatives than
    there are tokens, and where bias and min_tokens together leave no token that may come first.

    >>> check_vocab(SamplingParams(logit_bias={7: 1.0}), 7)
    Traceback (most recent call last):
        ...
    ValueError: logit_bias: token 7 is outside of the vocabulary, 0 to 6
    """
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", [token for token, _ in params.bias_pairs]),
    ):
        for token in ids:
            if token >= vocab_size:
                raise ValueError(
                    f"{name}: token {token} is outside of the vocabulary, 0 to {vocab_size - 1}"
                )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            raise ValueError(f"{name} is {count}: the vocabulary has {vocab_size} tokens")
    forbidden = {token for token, value in params.bias_pairs if value == -math.inf}
    if len(forbidden) == vocab_size:
        raise ValueError(f"logit_bias forbids all {vocab_size} tokens of the vocabulary")
    if params.min_tokens:
        forbidden.update(token for token in stop_token_ids if token < vocab_size)
        if len(forbidden) == vocab_size:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but logit_bias and the tokens that end the "
                f"request leave no other of the {vocab_size} tokens of the vocabulary"
            )


def _is_count(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= least)


def _is_number(value: object, least: float, most: float) -> bool:
    """A number in least..most, and no bool; NaN compares false."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()  # a float32 could not be compared with the largest float64
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return least <= value <= most
