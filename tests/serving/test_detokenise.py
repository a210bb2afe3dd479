"""The text of a request against `decode` of all tokens and a slow search for stop texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from funcinfer.serving.detokenise import TextStream
from funcinfer.serving.text import Text

LOST = "\ufffd"
SPECIAL, ADDED = "<|end|>", "<tool>"
LETTERS = bytes_to_unicode()


# The definition


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the stop text that ends first; the longest of those that end there."""
    for end in range(len(text) + 1):
        lengths = [len(word) for word in stop if text[:end].endswith(word)]
        if lengths:
            return end - max(lengths), end
    return None


def cut(text: str, stop: Sequence[str], include_stop: bool) -> str:
    found = first_stop(text, stop)
    return text if found is None else text[: found[int(include_stop)]]


def without_beginning(text: str, stop: Sequence[str]) -> str:
    """The text without its longest end that begins a stop text."""
    for start in range(len(text)):
        if any(word.startswith(text[start:]) for word in stop):
            return text[:start]
    return text


@cache
def parts_of_characters() -> frozenset[bytes]:
    """The first bytes of all characters, but not all of their bytes.

    Of surrogates too, though these are no characters: codecs look at their last byte first.
    """
    codes = (chr(code).encode(errors="surrogatepass") for code in range(0x80, 0x110000, 0x40))
    return frozenset(code[:size] for code in codes for size in range(1, len(code)))


@dataclass(frozen=True)
class Kind:
    """A tokenizer, and what is known of the text of its first tokens: `text`, which a stop text
    may end in, and `final`, which stays whatever comes.
    """

    text: Text
    size: int  # of the vocabulary; the ids behind it are no tokens
    known: Callable[["Kind", Sequence[int]], tuple[str, str]]

    def decode(self, ids: Sequence[int]) -> str:
        return self.text.tokenizer.decode(list(ids))


def all_is_final(kind: Kind, ids: Sequence[int]) -> tuple[str, str]:
    return kind.decode(ids), kind.decode(ids)


def nothing_is_final(kind: Kind, ids: Sequence[int]) -> tuple[str, str]:
    return kind.decode(ids), ""


def final_but_for_a_lost_character(kind: Kind, ids: Sequence[int]) -> tuple[str, str]:
    text = kind.decode(ids).removesuffix(LOST)
    return text, text


def final_but_for_the_last_bytes(kind: Kind, ids: Sequence[int]) -> tuple[str, str]:
    names = [(i, kind.text.tokenizer.id_to_token(token)) for i, token in enumerate(ids)]
    kept = [(i, name) for i, name in names if name is not None and name != SPECIAL]
    run: list[tuple[int, int]] = []  # place and value of the bytes at the end
    for i, name in reversed(kept):
        if not name.startswith("<0x"):
            break
        run.insert(0, (i, int(name[3:5], 16)))
    if not run:
        return all_is_final(kind, ids)
    before = kind.decode(ids[: run[0][0]])
    values = bytes(value for _, value in run)
    for size in range(4):
        whole, part = values[: len(values) - size], values[len(values) - size :]
        if is_utf8(whole) and (not part or part in parts_of_characters()):
            return kind.decode(ids[: run[-size][0]] if size else ids), before
    return all_is_final(kind, ids)


def is_utf8(values: bytes) -> bool:
    try:
        values.decode()
    except UnicodeDecodeError:
        return False
    return True


def check(
    kind: Kind, ids: Sequence[int], stop: Sequence[str] = (), include_stop: bool = False
) -> None:
    """One stream against the definition, token by token."""
    stream = TextStream(kind.text, stop, include_stop)
    for count in range(1, len(ids) + 1):
        text, final = kind.known(kind, ids[:count])
        ended = first_stop(text, stop) is not None
        assert stream.push(ids[count - 1]) == ended
        if ended:
            break
        assert stream.text == without_beginning(final, stop)
    else:
        text = kind.decode(ids)
    stream.finish()
    assert stream.text == cut(text, stop, include_stop)


def check_stop_token(kind: Kind, ids: Sequence[int], stop: Sequence[str]) -> None:
    """The end where the last token that is taken is a stop token, and the text is read once."""
    for include_stop in (False, True):
        stream, count, shown = TextStream(kind.text, stop, include_stop), 0, ""
        for count, token in enumerate(ids, 1):
            if stream.push(token):
                break
            if count == 3:
                shown = stream.text
        stream.finish(stop_token=True)
        assert not include_stop or stream.text.startswith(shown)
        kept = kind.decode(ids[: count if include_stop else max(count - 1, 0)])
        assert stream.text == cut(kept, stop, include_stop)


# Tokenizers


def byte_level(pieces: Sequence[bytes], decoder: Any = None) -> Text:
    """Token i is pieces[i]."""
    vocab = {"".join(LETTERS[byte] for byte in piece): i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoder or decoders.ByteLevel()
    return Text(tokenizer)


def kind_of(tokenizer: Tokenizer, decoder: Any, known: Any) -> Kind:
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([AddedToken(ADDED, special=False)])
    return Kind(Text(tokenizer), tokenizer.get_vocab_size(), known)


def words(names: Sequence[str], decoder: Any = None, known: Any = all_is_final) -> Kind:
    vocab = {name: i for i, name in enumerate(names)}
    return kind_of(Tokenizer(models.WordLevel(vocab, unk_token=names[0])), decoder, known)


def sentencepiece(*after: Any) -> Kind:
    names = [f"<0x{byte:02X}>" for byte in SOME_BYTES]
    names += ["a", "▁", "▁a", "ab", "b▁▁", "", LOST, "▁▁", "é"]
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    return words(names, decoders.Sequence(chain), final_but_for_the_last_bytes)


class Upper:
    """A decoder in Python."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.upper() for token in tokens]


SOME_BYTES = sorted({*b" ab", *"é€😀\ufffd".encode(), 0x80, 0xFF, 0xED, 0xA0})
PIECES = [bytes([byte]) for byte in SOME_BYTES]
PIECES += [
    b"",
    b"ab",
    b" a",
    b"b\xe2",
    b"\x82\xac",
    b"\xac a",
    b"\xf0\x9f\x98",
    "é".encode(),
    b"  ",
]
KINDS: dict[str, Callable[[], Kind]] = {
    "byte level": lambda: kind_of(
        byte_level(PIECES).tokenizer, decoders.ByteLevel(), final_but_for_a_lost_character
    ),
    "byte level, stripped": lambda: kind_of(
        byte_level(PIECES).tokenizer,
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
        final_but_for_a_lost_character,
    ),
    "sentencepiece": lambda: sentencepiece(),
    "sentencepiece, stripped": lambda: sentencepiece(decoders.Strip(" ", 1, 0)),
    "sentencepiece, stripped twice": lambda: sentencepiece(decoders.Strip(" ", 2, 0)),
    "metaspace": lambda: words(["a", "▁", "▁a", "ab▁", "b", ""], decoders.Metaspace()),
    "metaspace, never": lambda: words(
        ["a", "▁", "▁a", "b", ""], decoders.Metaspace(prepend_scheme="never")
    ),
    "wordpiece": lambda: words(
        ["a", "##a", "b", "##ab", ".", "n't", "'s", "", LOST], decoders.WordPiece()
    ),
    "suffixes": lambda: words(["a", "a</w>", "b", "ab</w>", "</w>", ""], decoders.BPEDecoder()),
    "none": lambda: words(["a", "b", "ab", " ", "", LOST]),
    "ctc": lambda: words(["<pad>", "|", "a", "b"], decoders.CTC(), nothing_is_final),
    "fused, then replaced": lambda: words(
        ["a", " ", "b", "."],
        decoders.Sequence([decoders.Fuse(), decoders.Replace(" .", ".")]),
        nothing_is_final,
    ),
    "in Python": lambda: words(["a", "b", " "], decoders.Decoder.custom(Upper()), nothing_is_final),
}
made = cache(lambda name: KINDS[name]())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Kind, list[int], list[str]]:
    kind = made(draw(st.sampled_from(sorted(KINDS))))
    ids = draw(st.lists(st.integers(0, kind.size + 1), max_size=30))
    text = kind.decode(ids)
    place = draw(st.integers(0, len(text)))  # so that stop texts overlap
    part = st.tuples(st.integers(0, 3), st.integers(1, 5)).map(
        lambda ends: text[place + ends[0] : place + sum(ends)] or "a"
    )
    other = st.sampled_from("ab é")
    word = st.one_of(part, st.tuples(part, other).map("".join), st.text("aAbB .é€", min_size=1))
    return kind, ids, draw(st.lists(word, max_size=4))


@given(cases(), st.booleans())
def test_a_stream_is_the_text_of_all_tokens_cut_at_the_first_stop(case, include_stop):
    check(*case, include_stop)


@given(cases())
def test_the_text_of_a_stop_token_is_kept_or_not(case):
    check_stop_token(*case)


@pytest.mark.parametrize("name", KINDS)
def test_every_sequence_of_a_few_tokens(name):
    kind = made(name)
    for ids in product(range(kind.size), repeat=2):
        check(kind, ids)
    few = range(0, kind.size, -(-kind.size // 5))
    for ids in product(few, repeat=4):
        check(kind, ids, ["a b", "b"])


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_every_sequence_of_bytes_whole_or_not(name):
    kind, values = made(name), b"a\xc3\xa9\xe2\xff"
    other = kind.text.tokenizer.token_to_id("ab")
    for indices in product([SOME_BYTES.index(value) for value in values], repeat=4):
        check(kind, indices, ["é", "a"])
        check(kind, [*indices, other], ["aé"])
        check_stop_token(kind, [other, other, *indices], ["aé", "a" + LOST])


# Concrete cases


def splits(data: bytes, most: int) -> Iterator[list[bytes]]:
    """Every way to cut the data into 1 to `most` pieces."""
    for count in range(most):
        for places in combinations(range(1, len(data)), count):
            ends = (*places, len(data))
            yield [data[a:b] for a, b in zip((0, *places), ends, strict=True)]


def stream_of(pieces: Sequence[bytes], *arguments: Any) -> tuple[str, list[str], int]:
    """The whole text, what was shown after each token, and how many tokens were taken."""
    own = sorted(set(pieces))
    stream, shown = TextStream(byte_level(own), *arguments), []
    for piece in pieces:
        ended = stream.push(own.index(piece))
        shown.append(stream.text)
        if ended:
            break
    stream.finish()
    for before, after in zip(shown, [*shown[1:], stream.text], strict=True):
        assert after.startswith(before)
    return stream.text, shown, len(shown)


@pytest.mark.parametrize(
    ("data", "stop", "wanted", "included"),
    [
        ("xxab cyy", ["ab c"], "xx", "xxab c"),
        ("xxab", ["ab c"], "xxab", "xxab"),
        ("xxab cyy", ["cy", "b c"], "xxa", "xxab c"),
        ("xxab cyy", ["b c", "ab c"], "xx", "xxab c"),
        ("xxab cyy", ["ab cyyy", " c"], "xxab", "xxab c"),
        ("ababac", ["abac"], "ab", "ababac"),
        ("xxab cyy", ["x"], "", "x"),
        ("a\n\n", ["\n\n\n", "\n\n"], "a", "a\n\n"),
    ],
)
def test_a_stop_text_over_any_tokens(data, stop, wanted, included):
    for pieces in splits(data.encode(), 4):
        text, shown, _ = stream_of(pieces, stop)
        assert text == wanted
        assert all(wanted.startswith(part) for part in shown)
        assert stream_of(pieces, stop, True)[0] == included


def test_a_request_ends_with_the_token_that_completes_a_stop_text():
    assert stream_of([b"x", b"ab", b" ", b"cy", b"y"], ["ab c"]) == ("x", ["x", "x", "x", "x"], 4)
    assert stream_of([b"x", b"a", b"b", b"x"], ["abc"]) == ("xabx", ["x", "x", "x", "xabx"], 4)
    # A part of a beginning is shown as soon as the rest alone may begin a stop text.
    assert stream_of([b"aa", b"a", b"b"], ["aab"]) == ("a", ["", "a", "a"], 3)


WORLD = "e\u0301 ü 漢字かな 🤖👩‍👩‍👧 \U0010ffff\ufffd עברית"


def test_characters_come_out_whole_wherever_they_are_split():
    data = WORLD.encode()
    assert stream_of([bytes([byte]) for byte in data])[0] == WORLD
    for pieces in splits(data, 2):
        text, shown, _ = stream_of(pieces)
        assert text == WORLD
        whole = pieces[0].decode(errors="ignore")
        assert shown[0] == whole.removesuffix(LOST)  # which might be a part of another
    for size in range(1, 4):
        for letter in WORLD:
            text, shown, _ = stream_of([letter.encode()[:size], letter.encode()[size:], b"."])
            assert (text, shown[-1]) == (letter + ".", letter + ".")


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_tokens_without_text_split_nothing(name):
    kind, data = made(name), "a😀é€".encode()
    nothing = [kind.text.tokenizer.token_to_id(SPECIAL), kind.size + 1]
    if name == "byte level":
        nothing.append(PIECES.index(b""))
    for token, count in product(nothing, (1, 2, 9)):
        ids = [id for byte in data for id in [SOME_BYTES.index(byte), *[token] * count]]
        assert kind.decode(ids) == data.decode()
        check(kind, ids)
        check(kind, ids, ["é"])


def test_spaces_are_stripped_at_the_beginning_of_the_text_alone():
    for count in (1, 2):
        kind = made("sentencepiece, stripped" + " twice" * (count - 1))
        a, few, space, two = map(kind.text.tokenizer.token_to_id, ("a", "", "▁", "▁▁"))
        for start, middle in product(([], [a] * 4), product((few, space), repeat=6)):
            check(kind, [*start, *middle, two, a, *middle, two, a])
        for spaces in range(4):
            ids = [SOME_BYTES.index(byte) for byte in b" " * spaces + b"ab ab"]
            check(kind, ids, [" a"])


def test_bytes_of_a_character_that_never_ends_are_lost():
    stream = TextStream(byte_level([b"a", b"\xe2\x82"]), [LOST])
    assert [stream.push(token) for token in (0, 1)] == [False, False]
    assert stream.text == "a"
    stream.finish()
    assert stream.text == "a"  # cut before the stop text
    assert stream_of([b"a", b"\xe2", b"\x82"])[:2] == ("a" + LOST, ["a", "a", "a"])


def test_a_stop_text_is_of_the_output_alone():
    assert stream_of([b"b c"], ["ab c"])[0] == "b c"


@pytest.mark.parametrize("stop", ["ab", [""], ["a", ""], [3], [b"a"]])
def test_stop_texts_that_are_none_are_refused(stop):
    with pytest.raises(ValueError, match=r"^stop is .*: expected texts, none of them empty"):
        TextStream(byte_level([b"a"]), stop)


def test_nothing_comes_after_the_end():
    for stop in (["a"], []):
        stream = TextStream(byte_level([b"a"]), stop)
        stream.push(0)
        if not stop:
            stream.finish()
        with pytest.raises(ValueError, match="token 0 comes after the end"):
            stream.push(0)
        stream.finish()
        stream.finish(stop_token=True)
        assert stream.text == ("" if stop else "a")


class Counting:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.count = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int]) -> str:
        self.count += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("byte level", ["ab", " a"]),
        ("byte level", ["\xff"]),
        ("byte level", ["\xc3"]),
        ("byte level", ["\xf0\x9f\x98", "\x80"]),
        ("sentencepiece, stripped", ["▁a", "ab"]),
        ("sentencepiece, stripped", ["<0xC3>", "<0xA9>"]),
        ("sentencepiece, stripped", ["<0xFF>"]),
        ("sentencepiece, stripped", ["<0xC3>", "ab"]),
        ("sentencepiece, stripped", ["<0xFF>", *["<0xC3>", "<0xA9>"] * 9, "ab", "ab"]),
        ("sentencepiece, stripped", [LOST]),
        ("metaspace", ["▁"]),
        ("wordpiece", ["##a"]),
    ],
)
def test_a_long_text_costs_a_few_tokens_for_each(name, tokens):
    kind = made(name)
    if name == "byte level":
        tokens = ["".join(LETTERS[ord(letter)] for letter in token) for token in tokens]
    cycle = [kind.text.tokenizer.token_to_id(token) for token in tokens]
    ids = (cycle * 2000)[:2000]
    counting = Counting(kind.text.tokenizer)
    stream = TextStream(Text(counting), ["no", "such"])
    assert not any(stream.push(token) for token in ids)
    stream.finish()
    assert stream.text == kind.decode(ids)
    assert counting.count < 10 * len(ids)


# A real tokenizer

TEXTS = [
    "One ring to rule them all, one ring to find them.\n\nOne ring\tto bring them all.",
    "def f(x):\n    return x ** 2  # squares\n\n\nprint(f(3.14159))\n",
    "Ünïcödé, 漢字かな, עברית, 🤖👩‍👩‍👧, e\u0301 and \u2028 end",
]


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Kind:
    text = Text.from_folder(smollm2)
    return Kind(text, text.tokenizer.get_vocab_size(), final_but_for_a_lost_character)


@pytest.mark.parametrize("words", TEXTS)
def test_a_real_tokenizer_with_stop_texts_at_every_place(words, real):
    ids = real.text.encode(words)
    check(real, ids)
    for size in (1, 3, 8):
        for start in range(len(words)):
            check(real, ids, [words[start : start + size]], include_stop=start % 2 == 0)
    end = real.text.tokenizer.token_to_id("<|im_end|>")
    for token in (end, *real.text.encode(words[:1])):
        stream = TextStream(real.text)
        assert not any(stream.push(token) for token in [*ids, token])
        stream.finish(stop_token=True)
        assert stream.text == words


@given(st.lists(st.integers(0, 49151), max_size=40), st.data())
def test_a_real_tokenizer_with_any_tokens(real, ids, data):
    text = real.decode(ids)
    start = data.draw(st.integers(0, len(text)))
    check(real, ids)
    check(real, ids, [text[start : start + 4] or "a", text[start + 2 : start + 4] or "b"])
