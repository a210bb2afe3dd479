"""Text against transformers' AutoTokenizer: ids, texts and chats, on the checkpoint and by hand."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models

from funcinfer.serving.text import Text

TEXTS = [
    "",
    " ",
    "Hello",
    " two  spaces   and a tail ",
    "one\n\ntwo\tthree\r\nfour",
    "Ünïcödé, 漢字かな, עברית, 🤖👩‍👩‍👧, e\u0301",
    "line\u2028separator, nul\x00 and bell\x07",
    "<|im_start|>user\nhi<|im_end|> and <|endoftext|>",
    "don't , stop . 3.14159 == x**2",
]


@pytest.fixture(scope="module")
def text(smollm2: Path) -> Text:
    return Text.from_folder(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(smollm2)


@pytest.mark.parametrize("words", TEXTS)
def test_ids_and_texts_are_those_of_transformers(words, text, reference):
    ids = text.encode(words)
    assert ids == reference(words)["input_ids"]
    assert text.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    for cut in range(len(ids)):  # also inside of a character
        part = ids[cut:]
        assert text.decode(part) == reference.decode(part, skip_special_tokens=True)


@pytest.mark.parametrize("words", TEXTS)
def test_chats_are_those_of_transformers(words, text, reference):
    chats = [
        [{"role": "user", "content": words}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": words},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Why?"},
        ],
    ]
    for chat in chats:
        wanted = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert text.chat_messages(chat) == wanted
    assert text.chat(words) == text.chat_messages(chats[0])


TEMPLATES = [
    "{%- if tools is none and documents is none %}\n  plain\n{% endif %}{{ bos_token }}!",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ {'b': '<é>', 'a': [1]} | tojson(indent=2, sort_keys=true, ensure_ascii=true) }}",
    "{{ strftime_now('100 %%') }}",
    "  {% set ns = namespace(n=1) %}\n  {% if add_generation_prompt %}\n {{ ns.n }}\n{% endif %}",
    "{{ messages[0]['content'].strip() }}{{ messages[0].missing }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_finds_what_transformers_gives(template, text, reference):
    chat = [{"role": "user", "content": " <é> & 'x' "}, {"role": "assistant", "content": "y"}]
    mine = Text(text.tokenizer, template, text.special)
    wanted = reference.apply_chat_template(
        chat, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert mine.chat_messages(chat) == reference(wanted, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .*: roles must alternate"),
        ("{% for %}", "the chat template fails: Expected"),
        ("{{ messages.append(1) }}", "the chat template fails: .* is unsafe"),
        ("{{ messages[0].content + 1 }}", "the chat template fails: can only concatenate"),
    ],
)
def test_a_template_that_fails_says_why(template, message, text):
    with pytest.raises(ValueError, match=message):
        Text(text.tokenizer, template).chat("x")


def test_what_is_no_text_is_refused(text):
    with pytest.raises(ValueError, match=r"'a\\udc80' is no text"):
        text.encode("a\udc80")


# Folders


def write(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        is_json = not isinstance(content, str)
        path = folder / (f"{name}.json" if is_json else f"{name}.jinja")
        path.write_text(json.dumps(content) if is_json else content, "utf-8")
    return folder


def letters() -> Tokenizer:
    return Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))


def test_lengths_that_training_cut_and_padded_to_are_forgotten(tmp_path):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "p": 2}, []))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8, pad_id=2, pad_token="p")
    assert Text.from_folder(write(tmp_path, tokenizer)).encode("abbab") == [0, 1, 1, 0, 1]


def test_the_template_file_comes_before_the_template_in_the_config(tmp_path):
    config = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "b"}, "bos_token": None}
    text = Text.from_folder(write(tmp_path, letters(), tokenizer_config=config))
    assert (text.chat("x"), text.special) == ([2], {"eos_token": "b"})
    write(tmp_path, letters(), chat_template="a")
    assert Text.from_folder(tmp_path).chat("x") == [1]


def test_of_several_templates_the_default_is_taken(tmp_path):
    several = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    write(tmp_path, letters(), tokenizer_config={"chat_template": several})
    assert Text.from_folder(tmp_path).chat("x") == [1]
    write(tmp_path, letters(), tokenizer_config={"chat_template": several[:1]})
    with pytest.raises(ValueError, match="no chat template"):
        Text.from_folder(tmp_path).chat("x")


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        Text.from_folder(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        Text.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be read"):
        Text.from_folder(tmp_path)
    letters().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: holds a list"):
        Text.from_folder(tmp_path)


@pytest.mark.parametrize(("package", "used"), [("tokenizers", "load"), ("jinja2", "chat")])
def test_a_missing_package_is_named_with_its_extra(package, used, tmp_path, monkeypatch):
    write(tmp_path, letters())
    text = Text(letters(), "a")
    for name in (package, f"{package}.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"package {package}: pip install 'funcinfer\[text\]'"):
        Text.from_folder(tmp_path) if used == "load" else text.chat("x")
