"""What a request must be to be served, checked when it is added."""

import operator
from collections.abc import Collection, Iterable

from funcinfer.serving.params import SamplingParams, check_vocab
from funcinfer.serving.request import ScheduleState, never_fits


def token_ids(prompt: Iterable[int], vocab_size: int) -> list[int]:
    """The prompt as ints; ValueError where one is no token of the vocabulary.

    >>> token_ids((4, 9), 10)
    [4, 9]
    """
    ids = []
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


def check_params(
    params: SamplingParams, vocab_size: int, stop_ids: Collection[int], *, has_text: bool
) -> None:
    """ValueError for what the vocabulary forbids, and for stop texts without a tokenizer."""
    check_vocab(params, vocab_size, stop_ids)
    if params.stop and not has_text:
        raise ValueError(
            f"stop is {params.stop!r}: stop texts need a tokenizer; give the engine one, as"
            f" Engine(model, text=Text.from_folder(folder), ...)"
        )


def max_total(state: ScheduleState, prompt_len: int, max_tokens: int) -> int:
    """Tokens of prompt and output at which a request ends; ValueError where it can't be served."""
    if prompt_len == 0:
        raise ValueError("prompt is empty: it needs at least one token id")
    total, max_length = prompt_len + max_tokens, state.max_length
    if max_length is not None:
        if prompt_len >= max_length:
            raise ValueError(
                f"prompt has {prompt_len} tokens; the model's max_length is {max_length}, prompt"
                f" and output together, so it can have {max_length - 1}"
            )
        total = min(total, max_length)
    reason = never_fits(
        prompt_len,
        total,
        num_pages=state.pool.num_pages,
        page_size=state.page_size,
        max_length=max_length,
    )
    if reason is not None:
        raise ValueError(f"prompt of {prompt_len} tokens and max_tokens={max_tokens}: {reason}")
    return total
