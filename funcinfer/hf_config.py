"""The JSON files of a Hugging Face folder, and config.json read so that no field is overlooked.

A family's `from_hf` takes every field that it understands, and `finish` raises for each one that
nobody took, unless it is known to have no effect on inference (`IRRELEVANT`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IRRELEVANT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "what found the family": ("architectures", "model_type", "auto_map"),
        "book-keeping of transformers": (
            "_name_or_path",
            "transformers_version",
            "dtype",
            "torch_dtype",
            "use_cache",
            "output_router_logits",
        ),
        "training": (
            "initializer_range",
            "attention_dropout",
            "aux_loss_alpha",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "seq_aux",
            "pretraining_tp",
        ),
        "read by read_generation_config": ("bos_token_id", "eos_token_id", "pad_token_id"),
    }
)
# Sizes that no model has zero of. Other whole numbers are at least zero.
AT_LEAST_ONE = frozenset(
    {
        "decoder_sparse_step",
        "head_dim",
        "hidden_size",
        "kv_lora_rank",
        "max_position_embeddings",
        "n_group",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "q_lora_rank",
        "topk_group",
        "v_head_dim",
        "vocab_size",
    }
)
_REQUIRED: Any = object()


class HFConfig:
    """The fields of a config.json. What is read is recorded, and `finish` refuses the rest.

    >>> config = HFConfig({"hidden_size": 64, "num_experts": 8, "hidden_act": "silu"})
    >>> config.take("hidden_size", kind=int)
    64
    >>> config.take("num_local_experts", aliases=("num_experts",))
    8
    >>> config.finish()
    Traceback (most recent call last):
    ValueError: config.json: nothing reads hidden_act='silu'. ...
    """

    def __init__(self, fields: Mapping[str, Any], *, where: str = "config.json") -> None:
        self._fields, self._where = dict(fields), where
        self._consumed: dict[str, str] = {}
        self._groups: dict[str, HFConfig] = {}

    @property
    def consumed(self) -> Mapping[str, str]:
        """Each field that was consumed so far -> "taken", or the reason why it is ignored."""
        return MappingProxyType(self._consumed)

    def take(
        self, name: str, default: Any = _REQUIRED, *, kind: Any = None, aliases: Iterable[str] = ()
    ) -> Any:
        """The value of a field, under its name or an alias; `default` where the file has neither.

        null is a value like any other. `kind` is a type or a union of types: bool is no int, and an
        int becomes a float where only float is asked for. ValueError for a field that is missing
        and has no default, of another kind, negative where an int is asked for (or zero, of those
        in `AT_LEAST_ONE`), or given under two names with different values.
        """
        found = [n for n in (name, *aliases) if n in self._fields]
        for n in found:
            self._consumed[n] = "taken"
        if not found:
            if default is _REQUIRED:
                others = f" (or {', '.join(aliases)})" if aliases else ""
                raise ValueError(f"{self._where}: the field {name!r}{others} is missing")
            return default
        value = self._fields[found[0]]
        for other in found[1:]:
            if not _same(value, self._fields[other]):
                raise ValueError(
                    f"{self._where}: {found[0]}={value!r} and {other}={self._fields[other]!r} mean"
                    f" the same field, but differ"
                )
        return value if kind is None else self._checked(found[0], value, kind)

    def require(
        self,
        name: str,
        allowed: Iterable[Any],
        default: Any = _REQUIRED,
        *,
        aliases: Iterable[str] = (),
    ) -> Any:
        """As `take`, for a field of which only the values in `allowed` are supported.

        >>> HFConfig({"hidden_act": "gelu"}).require("hidden_act", ["silu"])
        Traceback (most recent call last):
        ValueError: config.json: hidden_act='gelu' is not supported; supported: 'silu'
        """
        value, allowed = self.take(name, default, aliases=aliases), list(allowed)
        if not any(_same(value, a) for a in allowed):
            raise ValueError(
                f"{self._where}: {name}={_short(value)} is not supported;"
                f" supported: {', '.join(map(_short, allowed))}"
            )
        return value

    def group(self, name: str, *, aliases: Iterable[str] = ()) -> "HFConfig | None":
        """A field that is an object, as a reader of its own that `finish` covers; None if absent.

        >>> config = HFConfig({"linear_attn_config": {"head_dim": 128}})
        >>> config.group("linear_attn_config").take("head_dim")
        128
        """
        value = self.take(name, None, kind=dict | None, aliases=aliases)
        if value is not None and name not in self._groups:
            self._groups[name] = HFConfig(value, where=f"{self._where}: {name}")
        return self._groups.get(name)

    def ignore(self, *names: str, reason: str) -> None:
        """Consume fields that say nothing about inference, there or not; `reason` tells why."""
        for name in names:
            if name in self._fields:
                self._consumed.setdefault(name, reason)

    def finish(self) -> None:
        """ValueError listing every field that was not consumed and is not in `IRRELEVANT`."""
        for reason, names in IRRELEVANT.items():
            self.ignore(*names, reason=reason)
        unread = [n for n in self._fields if n not in self._consumed]
        if unread:
            shown = ", ".join(f"{n}={_short(self._fields[n])}" for n in unread)
            raise ValueError(
                f"{self._where}: nothing reads {shown}. The model may need something that this"
                f" family does not compute; name a field without effect in ignore(..., reason=)"
            )
        for group in self._groups.values():
            group.finish()

    def _checked(self, name: str, value: Any, kind: Any) -> Any:
        kinds = get_args(kind) or (kind,)
        least = 1 if name in AT_LEAST_ONE else 0
        if int in kinds and type(value) is int and value < least:
            raise ValueError(f"{self._where}: {name}={value}, but it must be at least {least}")
        if bool in kinds if isinstance(value, bool) else isinstance(value, kinds):
            return value
        if type(value) is int and float in kinds:
            return float(value)
        wanted = " or ".join("null" if k is NoneType else k.__name__ for k in kinds)
        raise ValueError(
            f"{self._where}: {name}={_short(value)} is a {type(value).__name__}, needs {wanted}"
        )


@dataclass(frozen=True)
class GenerationConfig:
    """The special tokens of a checkpoint. Any of `eos_ids` ends a generation."""

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None


def read_config(folder: str | Path) -> dict[str, Any]:
    """The fields of `config.json`; FileNotFoundError without folder or file, ValueError if broken.

    >>> read_config("/no/such/folder")
    Traceback (most recent call last):
    FileNotFoundError: /no/such/folder: no such folder
    """
    path = existing_folder(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no config.json; give a folder in Hugging Face's format")
    return read_json(path)


def read_generation_config(folder: str | Path) -> GenerationConfig:
    """The special tokens in `generation_config.json`, each else from `config.json`.

    FileNotFoundError without config.json; ValueError for a token that is no whole number from 0.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text('{"eos_token_id": [2, 7], "bos_token_id": 1}')
    >>> read_generation_config(folder)
    GenerationConfig(eos_ids=(2, 7), bos_id=1, pad_id=None)
    """
    path = existing_folder(folder) / "generation_config.json"
    fields = read_config(folder)
    if path.is_file():
        fields |= {name: value for name, value in read_json(path).items() if value is not None}
    eos, bos, pad = (
        _token_ids(folder, fields, f"{name}_token_id") for name in ("eos", "bos", "pad")
    )
    return GenerationConfig(eos, bos[0] if bos else None, pad[0] if pad else None)


def dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that a config.json names; ValueError where it names none that a model runs in.

    >>> dtype_of({"torch_dtype": "bfloat16"})
    torch.bfloat16
    """
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config.json: dtype is {name}: choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _token_ids(folder: str | Path, fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = fields.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ValueError(f"{folder}: {name}={value!r}: tokens are whole numbers from 0")
    return tuple(dict.fromkeys(ids))


def existing_folder(folder: str | Path) -> Path:
    """The path; FileNotFoundError where nothing is there, NotADirectoryError where it is a file."""
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder")
    if not path.is_dir():
        raise NotADirectoryError(
            f"{path}: is a file, not a folder with config.json and safetensors"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where it holds none or names a key twice."""
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__} where an object is needed")
    return value


def parse_json(data: bytes) -> Any:
    """The value of JSON text in UTF-8; ValueError also where an object names a key twice.

    >>> parse_json(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' is there twice
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(
                f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice"
            )
        return made

    return json.loads(data.decode(), object_pairs_hook=unique)


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON values: true is not 1, but 1 is 1.0."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
