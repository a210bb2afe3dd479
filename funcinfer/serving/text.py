"""Text in and out: the tokenizer and chat template of a Hugging Face folder. Needs the extra
`text`.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Text:
    """A tokenizer with its chat template, from `tokenizer.json` and `tokenizer_config.json`."""

    tokenizer: Any
    template: str | None
    special: dict[str, str]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Text":
        """FileNotFoundError without a tokenizer.json; ImportError naming the extra where
        `tokenizers` is missing.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(
                "text needs the package tokenizers: install funcinfer[text]"
            ) from error
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: prompts can then only be given as token ids"
            )
        config = _read(folder / "tokenizer_config.json")
        special = {k: _content(v) for k, v in config.items() if k.endswith("_token") and v}
        file = folder / "chat_template.jinja"
        template = file.read_text() if file.is_file() else config.get("chat_template")
        return cls(Tokenizer.from_file(str(path)), template, special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.tokenizer.decode(ids)

    def chat(self, message: str) -> list[int]:
        """Token ids of a chat that consists of one user message, ready for the answer."""
        return self.chat_messages([{"role": "user", "content": message}])

    def chat_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of messages by the folder's chat template. ValueError where it has none or
        refuses them.
        """
        if not isinstance(self.template, str):
            raise ValueError("this model's folder has no chat template: leave out --chat")
        text = (
            _environment()
            .from_string(self.template)
            .render(messages=messages, add_generation_prompt=True, **self.special)
        )
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _environment() -> Any:
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "chat templates need the package jinja2: install funcinfer[text]"
        ) from error

    def refuse(message: str) -> None:
        raise ValueError(f"the chat template refuses these messages: {message}")

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda x, **options: json.dumps(
        x, ensure_ascii=False, **options
    )
    return environment


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
