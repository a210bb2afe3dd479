"""Text in and out: the tokenizer and chat template of a Hugging Face folder. Needs the extra
`text`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from funcinfer.hf_config import existing_folder, read_json


@dataclass(frozen=True)
class Text:
    """A tokenizer of the package `tokenizers`, and a chat template in jinja or none.

    `special` are the variables of the template that name special tokens, as `bos_token`.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> tokenizer = Tokenizer(models.WordLevel({"?": 0, "to": 1, "be": 2}, unk_token="?"))
    >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> text = Text(tokenizer, "{{ messages[0].content }} ?")
    >>> text.encode("to be"), text.decode([2, 1]), text.chat("be")
    ([1, 2], 'be to', [2, 0])
    """

    tokenizer: Any
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Text":
        """Of `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

        The first must be there. FileNotFoundError where it is not, ValueError for a file that can't
        be read, ImportError naming the extra where `tokenizers` is missing.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                "text needs the package tokenizers: pip install 'funcinfer[text]'"
            ) from error
        folder = existing_folder(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: prompts can then only be given as token ids"
            )
        try:
            tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # tokenizers raises nothing more special
            raise ValueError(f"{path} can't be read: {error}") from None
        # A file keeps what training cut and padded texts to.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        file = folder / "tokenizer_config.json"
        config = read_json(file) if file.is_file() else {}
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        file = folder / "chat_template.jinja"
        template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(template, list):  # several templates by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        return cls(tokenizer, template, special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds.

        ValueError for what is no text, such as half a surrogate pair.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.tokenizer.decode(list(ids))

    def chat(self, message: str) -> list[int]:
        """Token ids of a chat that consists of one user message, ready for the answer."""
        return self.chat_messages([{"role": "user", "content": message}])

    def chat_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages (`role`, `content`) by the chat template, ready for the answer.

        ValueError where there is no template, or it refuses them or fails. Source: transformers'
        apply_chat_template, whose variables and functions a template finds here too.
        """
        try:
            text = self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self.special,
            )
        except (_jinja2().TemplateError, TypeError) as error:
            raise ValueError(f"the chat template fails: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError(f"{text!r} is no text that can be encoded") from None

    @cached_property
    def _compiled(self) -> Any:
        if self.template is None:
            raise ValueError(
                "the model has no chat template: neither chat_template.jinja nor chat_template in"
                " tokenizer_config.json"
            )
        return _environment().from_string(self.template)


def _jinja2() -> Any:
    try:
        import jinja2.sandbox
    except ImportError as error:
        raise ImportError(
            "chat templates need the package jinja2: pip install 'funcinfer[text]'"
        ) from error
    return jinja2


def _environment() -> Any:
    """What transformers gives to a chat template."""

    def refuse(message: str) -> None:
        raise ValueError(f"the chat template refuses these messages: {message}")

    environment = _jinja2().sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda x, **options: json.dumps(
        x, **{"ensure_ascii": False, **options}
    )
    return environment
