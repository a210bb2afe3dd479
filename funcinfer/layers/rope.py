"""Rotary position embedding: the facts of a model's RoPE, and its tables as pure functions of them.

    cos, sin[T, C] = m * cos, sin(position[T] * f[C])        f[i] = theta^(-2 i / d),  d = 2 C

The rule that stretches f to longer contexts is one of: none (Su et al. 2021), linear (Chen et al.
2023), dynamic NTK (bloc97 2023), YaRN (Peng et al. 2023), Llama 3.1, LongRoPE (Ding et al. 2024); m
is 1 but for YaRN and LongRoPE. A table depends on the facts and, for dynamic NTK and LongRoPE, on
one context length that is fixed for a whole run, never on the positions of a step: so a request's
numbers depend on neither its neighbours nor its chunks. The rotations are primitives
(`rotate_half_split`, `rotate_interleaved`, `rotate_deinterleaved`).

Legend: T tokens, C rotated pairs, d = 2 C the rotary dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcinfer.layers.rope_config import RopeReader


def _require(condition: bool, fact: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{fact}: {wanted}")


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _require(self.factor > 0, self, "factor must be positive")


@dataclass(frozen=True)
class DynamicNTK:
    """A larger theta for contexts beyond `max_position_embeddings`."""

    factor: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        _require(self.factor > 0, self, "factor must be positive")
        _require(self.max_position_embeddings > 0, self, "max_position_embeddings must be positive")


@dataclass(frozen=True)
class Yarn:
    """High frequencies kept, low ones divided by `factor`, a ramp between.

    The ramp runs over the pairs that turn `beta_fast` .. `beta_slow` times in the original context,
    rounded outwards if `truncate`. `mscale` and `mscale_all_dim` 0 mean unset; cos and sin are
    multiplied by `attention_factor`, or without it by m(mscale) / m(mscale_all_dim), or if either
    is unset by m(1), where m(a) = 0.1 a ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require(self.factor > 0, self, "factor must be positive")
        _require(self.original_max_position_embeddings > 0, self, "the original must be positive")
        _require(self.beta_fast >= self.beta_slow > 0, self, "wanted beta_fast >= beta_slow > 0")


@dataclass(frozen=True)
class Llama3:
    """Wavelengths above original / low_freq_factor divided by `factor`, below original /
    high_freq_factor kept, a blend between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _require(self.factor > 0, self, "factor must be positive")
        _require(self.original_max_position_embeddings > 0, self, "the original must be positive")
        _require(
            self.high_freq_factor > self.low_freq_factor > 0,
            self,
            "wanted high_freq_factor > low_freq_factor > 0",
        )


@dataclass(frozen=True)
class LongRope:
    """Each frequency divided by its own number: of `short_factor` up to the original context
    length, of `long_factor` beyond.

    cos and sin are multiplied by `attention_factor`, or without it by
    sqrt(1 + ln(factor) / ln(original)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    max_position_embeddings: int
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require(self.factor > 0, self, "factor must be positive")
        _require(self.original_max_position_embeddings > 1, self, "the original must be above 1")
        _require(self.max_position_embeddings > 0, self, "max_position_embeddings must be positive")
        _require(min(*self.short_factor, *self.long_factor) > 0, self, "factors must be positive")


Scaling = Linear | DynamicNTK | Yarn | Llama3 | LongRope


@dataclass(frozen=True)
class Rope:
    """The facts of a RoPE: its base, how many dims of a head it turns, how it is stretched.

    >>> Rope(10000.0, 4)
    Rope(theta=10000.0, rotary_dim=4, scaling=None)
    """

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _require(self.theta > 1, self, "theta must be above 1")
        even = self.rotary_dim > 0 and self.rotary_dim % 2 == 0
        _require(even, self, "rotary_dim must be even and positive")
        match self.scaling:
            case DynamicNTK():
                _require(self.rotary_dim > 2, self, "dynamic NTK needs a rotary_dim above 2")
            case LongRope(short_factor=short, long_factor=long):
                pairs = self.rotary_dim // 2
                fits = len(short) == pairs and len(long) == pairs
                _require(fits, self, f"short_factor and long_factor must have {pairs} numbers")

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        head_dim: int,
        *,
        default_theta: float = 10000.0,
        default_partial: float = 1.0,
        layer_type: str | None = None,
        irrelevant: frozenset[str] = frozenset(),
    ) -> tuple["Rope", frozenset[str]]:
        """The RoPE of a Hugging Face config.json, and the keys of the config that were read for it.

        Reads the dict `rope_parameters`, or the older `rope_scaling` (`rope_type` or `type`), and
        `rope_theta`, `partial_rotary_factor`, `rotary_dim`, `original_max_position_embeddings` in
        that dict or at the top level. `head_dim` is the width that the partial factor refers to;
        `layer_type` selects from a dict that is nested by layer type; `irrelevant` are keys of the
        dict that the family knows not to matter. ValueError on a key of the dict that isn't read, a
        missing one, an unknown kind, or two places that disagree.

        >>> scaling = {"type": "linear", "factor": 2}
        >>> rope, keys = Rope.from_hf({"rope_theta": 500000, "rope_scaling": scaling}, 8)
        >>> rope
        Rope(theta=500000.0, rotary_dim=8, scaling=Linear(factor=2.0))
        >>> sorted(keys)
        ['rope_scaling', 'rope_theta']
        """
        reader = RopeReader(config, layer_type)
        kind = reader.kind()
        theta = reader.number("rope_theta", default_theta)
        rotary_dim = reader.rotary_dim(head_dim, default_partial)
        scaling = _read_scaling(kind, reader)
        reader.finish(kind, irrelevant)
        return cls(theta, rotary_dim, scaling), reader.read_keys


def _read_scaling(kind: str, reader: RopeReader) -> Scaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return Linear(reader.number("factor"))
        case "dynamic":
            return DynamicNTK(reader.number("factor"), reader.max_length())
        case "llama3":
            return Llama3(
                reader.number("factor"),
                reader.number("low_freq_factor"),
                reader.number("high_freq_factor"),
                reader.original_length(),
            )
        case "yarn":
            return Yarn(
                reader.stretch(),
                reader.original_length(),
                beta_fast=reader.number("beta_fast", 32.0),
                beta_slow=reader.number("beta_slow", 1.0),
                mscale=reader.number("mscale", 0.0),
                mscale_all_dim=reader.number("mscale_all_dim", 0.0),
                attention_factor=reader.optional_number("attention_factor"),
                truncate=reader.flag("truncate", True),
            )
        case "longrope":
            return LongRope(
                reader.numbers("short_factor"),
                reader.numbers("long_factor"),
                reader.stretch(),
                reader.original_length(),
                reader.max_length(),
                reader.optional_number("attention_factor"),
            )
    raise ValueError(
        f"unknown kind of RoPE {kind!r}; known are default, linear, dynamic, yarn, llama3, longrope"
    )


def inverse_frequencies(
    rope: Rope, length: int | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Radians a position of each pair: float32 [rotary_dim / 2].

    `length` is the context length that dynamic NTK and LongRoPE choose by; None is the config's
    max_position_embeddings. The others don't read it.

    >>> inverse_frequencies(Rope(10000.0, 4))
    tensor([1.0000, 0.0100])
    """
    d = rope.rotary_dim
    exponents_C = torch.arange(0, d, 2, dtype=torch.float32, device=device) / d
    powers_C = rope.theta**exponents_C
    plain_C = 1.0 / powers_C
    match rope.scaling:
        case None:
            return plain_C
        case Linear(factor=factor):
            return plain_C / factor
        case DynamicNTK(factor=factor, max_position_embeddings=longest):
            length = longest if length is None else max(length, longest)
            ratio = length / longest  # 1 within the trained context: nothing changes there
            theta = rope.theta * (factor * ratio - (factor - 1)) ** (d / (d - 2))
            return 1.0 / theta**exponents_C
        case Yarn(factor=factor) as yarn:
            kept_C = 1 - _yarn_ramp(rope, yarn, device)
            return plain_C * kept_C + 1.0 / (factor * powers_C) * (1 - kept_C)
        case Llama3() as llama:
            return _blend_llama3(plain_C, llama)
        case LongRope() as long:
            length = long.max_position_embeddings if length is None else length
            is_long = length > long.original_max_position_embeddings
            numbers = long.long_factor if is_long else long.short_factor
            return 1.0 / (torch.tensor(numbers, dtype=torch.float32, device=device) * powers_C)


def _yarn_ramp(rope: Rope, yarn: Yarn, device: torch.device | str | None) -> Tensor:
    """0 where the pair keeps its frequency, 1 where it is divided by the factor: [C]."""

    def pair_that_turns(times: float) -> float:
        original = yarn.original_max_position_embeddings
        return (
            rope.rotary_dim * math.log(original / (2 * math.pi * times)) / 2 / math.log(rope.theta)
        )

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a division by 0
    pairs_C = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device=device)
    return ((pairs_C - low) / width).clamp(0, 1)


def _blend_llama3(plain_C: Tensor, llama: Llama3) -> Tensor:
    turns_C = llama.original_max_position_embeddings * plain_C / (2 * math.pi)
    span = llama.high_freq_factor - llama.low_freq_factor
    kept_C = ((turns_C - llama.low_freq_factor) / span).clamp(0, 1)
    return kept_C * plain_C + (1 - kept_C) * plain_C / llama.factor


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_factor(rope: Rope) -> float:
    """What cos and sin are multiplied by; 1 but for YaRN and LongRoPE.

    >>> round(attention_factor(Rope(10000.0, 4, Yarn(32.0, 4096))), 4)
    1.3466
    """
    match rope.scaling:
        case Yarn() | LongRope() as scaling if scaling.attention_factor is not None:
            return scaling.attention_factor
        case Yarn(factor=factor, mscale=mscale, mscale_all_dim=all_dim) if mscale and all_dim:
            return _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, all_dim)
        case Yarn(factor=factor):
            return _yarn_magnitude(factor, 1.0)
        case LongRope(factor=factor, original_max_position_embeddings=original) if factor > 1:
            return math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def softmax_mscale(rope: Rope) -> float:
    """What DeepSeek's attention multiplies its softmax scale by: m(mscale_all_dim)^2 of YaRN, or 1.

    Other families leave the softmax scale alone: their YaRN is wholly in `attention_factor`.

    >>> softmax_mscale(Rope(10000.0, 4))
    1.0
    """
    match rope.scaling:
        case Yarn(factor=factor, mscale_all_dim=all_dim) if all_dim:
            return _yarn_magnitude(factor, all_dim) ** 2
    return 1.0


def rope_tables(
    rope: Rope,
    positions_T: Tensor,
    *,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each token's angles, each [T, rotary_dim / 2], on the positions' device.

    They are cast to `dtype`; the angles are float32, as in transformers, whatever it is. `length`
    as in `inverse_frequencies`: one number for a whole run. Position -1 of a padding token is no
    special case: it gets a finite angle.

    >>> cos, sin = rope_tables(Rope(10000.0, 4), torch.tensor([0, 1]))
    >>> cos
    tensor([[1.0000, 1.0000],
            [0.5403, 0.9999]])
    """
    frequencies_C = inverse_frequencies(rope, length, device=positions_T.device)
    angles_TC = positions_T.to(torch.float32)[:, None] * frequencies_C
    factor = attention_factor(rope)
    return (angles_TC.cos() * factor).to(dtype), (angles_TC.sin() * factor).to(dtype)
