"""Edits: what requests say about single tokens, gathered on the host for the rows of a batch.

Bias, penalties and min_tokens name few tokens out of many, so a batch's edits are lists of
(row, token) pairs, each pair once, instead of a count for each token of the vocabulary.
`funcinfer.serving.processors.edit_logits` applies them; how is said there.

E pairs.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from funcinfer.serving.params import SamplingParams

# Row number, token ids, and a value or two for each id.
Entry = tuple[int, *tuple[np.ndarray, ...]]


class Bias(NamedTuple):
    """Numbers to add."""

    rows_E: torch.Tensor
    ids_E: torch.Tensor
    values_E: torch.Tensor


class Penalties(NamedTuple):
    """Repetition penalties, and what presence and frequency subtract after them."""

    rows_E: torch.Tensor
    ids_E: torch.Tensor
    repetition_E: torch.Tensor
    subtracted_E: torch.Tensor


class Forbidden(NamedTuple):
    """Tokens that are not possible."""

    rows_E: torch.Tensor
    ids_E: torch.Tensor


class Edits(NamedTuple):
    """The edits of a batch in the order in which they are applied; None: there are none."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    forbidden: Forbidden | None = None


class History:
    """Which tokens a request has so far, and how often each stands in its output.

    Grows with the output, at one look-up a token. It is of the request, not of its pages: a
    preemption, a prefix that is cached, and chunks leave it as it is.

    >>> history = History([5, 5, 8], [7])
    >>> history.extend([8])
    >>> history.counts(drafts=[7])
    (array([5, 8, 7]), array([0, 1, 2]))
    """

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._place, dtype=np.int64)
        self._counts = np.zeros_like(self._ids)
        self.extend(output)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the output."""
        for token in tokens:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                room = np.zeros(place + 16, dtype=np.int64)
                self._ids = np.concatenate([self._ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._ids[place] = token
            self._counts[place] += 1

    def counts(self, drafts: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """The distinct tokens of prompt and output, and how often the output has each.

        drafts: tokens that count as the end of the output; those below 0 do not count.
        """
        size = len(self._place)
        ids, counts = self._ids[:size].copy(), self._counts[:size].copy()
        new: dict[int, int] = {}
        for token in drafts:
            place = self._place.get(token)
            if place is not None:
                counts[place] += 1
            elif token >= 0:
                new[token] = new.get(token, 0) + 1
        if new:
            ids = np.append(ids, list(new))
            counts = np.append(counts, list(new.values()))
        return ids, counts


class RowEdits(NamedTuple):
    """What one row of logits is edited by.

    num_output: length of the request's output. history: of the request; needed where
    `has_penalties`. drafts: in a verification, those before this row; they count as output.
    stop_token_ids: all tokens that end the request; not possible below min_tokens.
    """

    params: SamplingParams
    num_output: int = 0
    history: History | None = None
    drafts: Sequence[int] = ()
    stop_token_ids: Collection[int] = ()


def has_penalties(params: SamplingParams) -> bool:
    """Whether a request needs a History.

    >>> has_penalties(SamplingParams(frequency_penalty=0.5))
    True
    """
    off = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return off != (1, 0, 0)


def stack_edits(
    rows: Sequence[RowEdits],
    *,
    vocab: range | None = None,
    device: torch.device | str = "cpu",
) -> Edits:
    """Gather the edits of the rows of a batch into tensors, leaving out what no row uses.

    vocab: the ids of the columns of the logits, where they are a part of the vocabulary; None: all
    from 0 on. Raises ValueError for a row with penalties and without a history.

    >>> stack_edits([RowEdits(SamplingParams()), RowEdits(SamplingParams(logit_bias={3: 1}))]).bias
    Bias(rows_E=tensor([1]), ids_E=tensor([3]), values_E=tensor([1.]))
    """
    bias: list[Entry] = []
    penalties: list[Entry] = []
    forbidden: list[Entry] = []
    for row, edits in enumerate(rows):
        params = edits.params
        if params.bias_pairs:
            ids, values = zip(*params.bias_pairs, strict=True)
            bias.append((row, np.array(ids), np.array(values)))
        if has_penalties(params):
            penalties.append((row, *_penalties(row, edits)))
        if edits.num_output + len(edits.drafts) < params.min_tokens and edits.stop_token_ids:
            forbidden.append((row, np.array(sorted(set(edits.stop_token_ids)))))
    return Edits(
        Bias(*_columns(bias, vocab, device)) if bias else None,
        Penalties(*_columns(penalties, vocab, device)) if penalties else None,
        Forbidden(*_columns(forbidden, vocab, device)) if forbidden else None,
    )


def _penalties(row: int, edits: RowEdits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, their repetition penalties, and what is subtracted from their logits."""
    params = edits.params
    if edits.history is None:
        raise ValueError(f"row {row} has penalties: it needs the history of its request")
    ids, counts = edits.history.counts(edits.drafts)
    if params.repetition_penalty == 1:  # nothing befalls tokens of the prompt alone
        ids, counts = ids[counts > 0], counts[counts > 0]
    subtracted = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
    repetition = min(params.repetition_penalty, torch.finfo(torch.float32).max)
    return ids, np.full(len(ids), repetition), subtracted


def _columns(
    entries: list[Entry], vocab: range | None, device: torch.device | str
) -> list[torch.Tensor]:
    """Rows, ids within `vocab` counted from its start, and the values of each entry, end to end."""
    row_numbers, *columns = zip(*entries, strict=True)
    ids, *values = (np.concatenate(column) for column in columns)
    rows = np.repeat(row_numbers, [len(column) for column in columns[0]])
    if vocab is not None:
        mine = (ids >= vocab.start) & (ids < vocab.stop)
        rows, ids, values = rows[mine], ids[mine] - vocab.start, [v[mine] for v in values]
    whole = [torch.from_numpy(column.astype(np.int64)) for column in (rows, ids)]
    parts = [torch.from_numpy(value.astype(np.float32)) for value in values]
    return [column.to(device) for column in whole + parts]
