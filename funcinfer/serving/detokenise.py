"""The text of a request while its tokens come, cut at stop texts.

What a decoder makes of the tokens so far is final but for its end, in two cases. A U+FFFD at the
end may be the first bytes of a character. And the tokens of a byte fallback, `<0xE6>`, are decoded
run by run: a run that isn't UTF-8 as a whole is a U+FFFD for each byte, so its text stays open
until another token ends it. Only a window of the latest tokens is decoded again, with a few before
it for context; a decoder of which that isn't known to be right decodes all tokens each time, and
its text is shown at the end.

Stop texts are found by the automaton of Aho and Corasick (Efficient string matching, 1975). Its
state is the longest end of the text that begins a stop text, which is what may not be shown yet.
"""

import re
import string
from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from json import loads
from typing import Any, NamedTuple

from funcinfer.serving.text import Text

_LOST = "\ufffd"
_CONTEXT = 4  # tokens; at least 3, which hold all but the last byte of a character
_WINDOW = 8  # tokens at which a window is cut to its context
# Decoders, as a chain of types, whose text of some tokens begins their text of more tokens.
_APPENDS = re.compile(
    r"(Replace |Strip |Metaspace )*(ByteFallback )?(Fuse (Strip )*)?|ByteLevel (Strip )*"
    r"|WordPiece |BPEDecoder "
)
_Utf8 = getincrementaldecoder("utf-8")


class TextStream:
    """The text of one request, token by token, cut at stop texts.

    stop: texts that end the request; the one that ends first counts, of those that end together the
    longest. The text is cut before it, or after it with include_stop. `text` is what may be shown
    so far: it only grows, and once the request has ended it is `Text.decode` of all its tokens, cut
    at a stop text. It ends at a whole character, and before what may be the beginning of a stop
    text. ValueError for stop texts that are none, or empty.

    >>> from tokenizers import Tokenizer, models
    >>> text = Text(Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2}, unk_token="or")))
    >>> stream = TextStream(text, stop=["be or"])
    >>> stream.push(0), stream.push(1), stream.text
    (False, False, 'to ')
    >>> stream.push(0), stream.push(1), stream.push(2), stream.text
    (False, False, True, 'to be to ')
    """

    __slots__ = (
        "_base",
        "_cut",
        "_ended",
        "_facts",
        "_held",
        "_include_stop",
        "_length",
        "_limit",
        "_mark",
        "_pieces",
        "_run",
        "_safe",
        "_state",
        "_stops",
        "_text",
        "_undo",
        "_utf8",
        "_window",
    )

    def __init__(self, text: Text, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        if isinstance(stop, str) or not all(isinstance(word, str) and word for word in stop):
            raise ValueError(f"stop is {stop!r}: expected texts, none of them empty")
        self._text, self._facts = text, _facts(text.tokenizer)
        self._stops = _Stops(stop) if stop else None
        self._include_stop = include_stop
        # The decoded text: its pieces, their length, how much of it may be shown, the state of the
        # automaton behind it, and where it ends if a stop text is complete.
        self._pieces: list[str] = []
        self._length = self._safe = self._state = 0
        self._cut: int | None = None
        # Where text that may still change begins: number of pieces, length, state.
        self._mark: tuple[int, int, int] | None = None
        # The tokens that are decoded; of their text, how much is among the pieces and how much is
        # held back at the end.
        self._window: list[int] = []
        self._base = self._held = 0
        self._limit = _WINDOW
        # The bytes of a run of byte tokens: their number and, unless they are lost, their decoder.
        self._run = 0
        self._utf8: IncrementalDecoder | None = None
        # Length, state and base before the last token; None if it is one that has no text.
        self._undo: tuple[int, int, int] | None = None
        self._ended = False

    @property
    def text(self) -> str:
        """What may be shown so far."""
        if self._mark is None:
            self._pieces = ["".join(self._pieces)]
        else:
            count, length, state = self._mark
            self._pieces[:count] = ["".join(self._pieces[:count])]
            self._mark = (1, length, state)
        return self._pieces[0][: self._safe]

    def push(self, token: int) -> bool:
        """Take one generated token in; True when a stop text is now complete: the request ends.

        ValueError after the end.
        """
        if self._ended or self._cut is not None:
            raise ValueError(f"token {token} comes after the end of the text")
        name = self._text.tokenizer.id_to_token(token)
        if name is None or token in self._facts.special or (self._facts.byte_level and not name):
            self._undo = None  # decode leaves it out
            return False
        if len(self._window) >= self._limit and self._mark is None and not self._run:
            self._shorten()
        _, length, state = self._mark or (0, self._length, self._state)
        self._undo = (length, state, self._base)
        self._window.append(token)
        byte = self._facts.bytes.get(token)
        if byte is not None:
            return self._push_byte(byte)
        self._roll_back()
        self._run = 0
        text = self._text.decode(self._window)
        self._held = int(self._facts.byte_level and text.endswith(_LOST))
        end = len(text) - self._held
        piece = text[self._base : end]
        if self._facts.appends:
            self._base = end
        else:
            self._set_mark()
        return self._take(piece)

    def finish(self, stop_token: bool = False) -> None:
        """The request has ended: what was held back comes out, unless a stop text has cut it off.

        stop_token: the token pushed last ended the request. Without include_stop, the text is that
        of the tokens before it.
        """
        if self._ended:
            return
        self._ended = True
        if stop_token and not self._include_stop and self._undo is not None:
            length, self._state, self._base = self._undo
            self._pieces = ["".join(self._pieces)[:length]]
            self._length, self._cut, self._mark = length, None, None
            self._window.pop()
        if self._cut is None:
            self._roll_back()
            if not self._take(self._text.decode(self._window)[self._base :]):
                self._safe = self._length

    def _push_byte(self, byte: int) -> bool:
        """The text of a run of bytes as it is now, or as it will be where they can't be UTF-8."""
        self._run += 1
        if self._run == 1:
            self._set_mark()
            self._utf8 = _Utf8()
        lost = 1
        if self._utf8 is not None:
            try:
                piece = self._utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._utf8, lost = None, self._run
                self._roll_back()
            else:
                if piece and not self._length:  # a decoder may strip the beginning of the text
                    piece = self._text.decode(self._window)
                return self._take(piece)
        self._base += lost
        return self._take(_LOST * lost)

    def _take(self, piece: str) -> bool:
        """Append decoded text; True when a stop text is complete in it."""
        self._pieces.append(piece)
        unclear = 0
        if self._stops is not None:
            self._state, end = self._stops.scan(self._state, piece)
            if end:
                cut = self._length + end
                if not self._include_stop:
                    cut -= self._stops.longest[self._state]
                self._cut = self._safe = cut
                self._mark = None
                return True
            unclear = self._stops.depth[self._state]
        self._length += len(piece)
        if self._mark is None:
            self._safe = self._length - unclear
        return False

    def _set_mark(self) -> None:
        self._mark = (len(self._pieces), self._length, self._state)

    def _roll_back(self) -> None:
        """Take text that may change back to where it begins."""
        if self._mark is not None:
            count, self._length, self._state = self._mark
            del self._pieces[count:]
            self._mark = None

    def _shorten(self) -> None:
        """Leave of the window what the text of later tokens can depend on.

        That is the token before, the bytes of a character that isn't whole, and some text: the
        decoder may do something else at the beginning.
        """
        window = self._window[-_CONTEXT:]
        base = len(self._text.decode(window)) - self._held
        if base > 0:
            self._window, self._base, self._limit = window, base, _WINDOW
        else:
            self._limit = 2 * len(self._window)


class _Stops:
    """The automaton of some stop texts. A state is a text that begins one; 0 is the empty one.

    depth: the length of each state's text. longest: that of the longest stop text at its end, or 0.
    """

    __slots__ = ("_fail", "_first", "_next", "depth", "longest")

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.longest = [0], [0]
        for word in stop:
            state = 0
            for letter in word:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = self._next[state][letter]
            self.longest[state] = len(word)
        self._first = frozenset(self._next[0])
        # Where to go on when a letter doesn't fit: the longest other state at the end of this one.
        self._fail = [0] * len(self._next)
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for letter, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], letter)
                self.longest[child] = self.longest[child] or self.longest[self._fail[child]]
                states.append(child)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """The state after `text` and 0, or after the first stop text in it and where that ends."""
        if not state and self._first.isdisjoint(text):
            return 0, 0
        for end, letter in enumerate(text, 1):
            state = self._step(state, letter)
            if self.longest[state]:
                return state, end
        return state, 0

    def _step(self, state: int, letter: str) -> int:
        while state and letter not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(letter, 0)


class _Facts(NamedTuple):
    """What a tokenizer does when it decodes.

    special: the tokens that it leaves out. bytes: the byte of each token of a byte fallback.
    appends: its text only grows at the end, in the sense of `_APPENDS`. byte_level: a token is
    bytes, and an empty one nothing.
    """

    special: frozenset[int]
    bytes: dict[int, int]
    appends: bool
    byte_level: bool


@lru_cache(maxsize=8)
def _facts(tokenizer: Any) -> _Facts:
    chain = _chain(tokenizer.decoder)
    appends = chain is not None and _APPENDS.fullmatch(chain) is not None
    added = tokenizer.get_added_tokens_decoder()
    byte_ids: dict[int, int] = {}
    if chain is not None and appends and "ByteFallback" in chain:
        for digits in map("".join, product(string.hexdigits, repeat=2)):
            token = tokenizer.token_to_id(f"<0x{digits}>")
            if token is not None:
                byte_ids[token] = int(digits, 16)
    special = frozenset(token for token, it in added.items() if it.special)
    return _Facts(special, byte_ids, appends, (chain or "").startswith("ByteLevel"))


def _chain(decoder: Any) -> str | None:
    """The types of a decoder and, in a sequence, of its parts; None where it can't be known."""
    if decoder is None:  # tokens are joined by spaces
        return ""
    try:
        state = loads(decoder.__getstate__())
    except Exception:  # of a decoder in Python; tokenizers raises nothing more special
        return None
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return "".join(f"{part['type']} " for part in parts)
