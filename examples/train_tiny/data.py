"""The text: chapters of the King James Bible, a byte-level BPE tokenizer, and windows of tokens.

The King James Version (1611) is in the public domain; Debian's package bible-kjv-text, whose
copyright file says so, holds it packed, and bible-kjv prints it, one verse a line:

    apt-get install bible-kjv
    bible -f 'gen1:1-rev22:21' > kjv.txt

C chapters, B windows of T tokens.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|end|>"  # stands before and after every chapter, so it is id 0: begin and end of a text
END_ID = 0
HELD_OUT_EVERY = 20
VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+) (.+)")


def chapters(path: str | Path) -> list[str]:
    """The chapters in order, each its verses joined by line breaks, without their numbers.

    ValueError for a line that is no verse, as `Ge1:1 In the beginning ...` is one.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        verse = VERSE.fullmatch(line.strip())
        if verse is None:
            raise ValueError(
                f"{path}:{number}: {line!r} is no verse such as 'Ge1:1 In the beginning ...';"
                f" the file is what `bible -f 'gen1:1-rev22:21'` prints"
            )
        book, chapter, _, text = verse.groups()
        found.setdefault((book, chapter), []).append(text)
    return ["\n".join(verses) for verses in found.values()]


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(texts to train on, held-out texts): one of every 20 in order is held out.

    >>> [len(part) for part in split(["x"] * 40)]
    [38, 2]
    """
    held = [i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 for i in range(len(texts))]
    return (
        [text for text, out in zip(texts, held, strict=True) if not out],
        [text for text, out in zip(texts, held, strict=True) if out],
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, END and the 256 bytes among them.

    It puts END before a text that it encodes, and loses no byte.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)]),
        ]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """All texts as one row of ids, END before each of them and after the last."""
    ids = [i for text in tokenizer.encode_batch(list(texts)) for i in text.ids]
    return torch.tensor([*ids, END_ID])


def random_windows(
    ids: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """`count` windows [B, T] of the stream from random places."""
    if len(ids) < length:
        raise ValueError(f"a text of {len(ids)} tokens has no window of {length}")
    starts = torch.randint(len(ids) - length + 1, (count,), generator=generator)
    return ids[starts[:, None] + torch.arange(length)]


def all_windows(ids: torch.Tensor, count: int, length: int, overlap: int) -> Iterator[torch.Tensor]:
    """Windows [B, T], B up to `count`, that follow one another and share `overlap` tokens.

    What is left at the end and fills no window is left out.
    """
    rows = ids.unfold(0, length, length - overlap)
    yield from rows.split(count)
