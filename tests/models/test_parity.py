"""Every family against transformers: whole prompts, every chunking, paged decode, greedy tokens.

Both read the same folder, which `save_pretrained` wrote. A family joins by having its architecture
in the registry and its name in `tests.oracles.NAMES`.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import funcinfer
from funcinfer import Model, SamplingParams
from funcinfer.hf_config import read_config
from funcinfer.models import registry
from funcinfer.models.decoder import Decoder
from tests import oracles
from tests.equivalence.harness import ONE_RANK, Logits, Runner, Trace, assert_same

TOLERANCE = 5e-5
FAMILIES = oracles.NAMES
LENGTH = 9
CHUNKS = [
    *[(cut, LENGTH - cut) for cut in range(1, LENGTH)],
    (3, 3, 3),
    (4, 4, 1),
    (1, 2, 6),
    (2, 1, 1, 5),
    (1,) * LENGTH,
]
HEAD_COUNTS = ((8, 2), (9, 3), (24, 8))
# transformers saves no draft layers, so a folder that announces them would be refused.
SETTINGS = {name: {"num_nextn_predict_layers": 0} for name in ("deepseek_v3", "glm4_moe")}


class Pair(NamedTuple):
    """The same checkpoint in transformers and in funcinfer."""

    config: Any
    reference: Any
    model: Model
    decoder: Decoder


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Any], tiny_folder: Callable[..., Path]) -> Callable[..., Pair]:
    @functools.cache
    def get(name: str, heads: tuple[int, int] | None = None) -> Pair:
        settings = dict(SETTINGS.get(name, {}))
        if heads is not None:
            settings |= dict(num_attention_heads=heads[0], num_key_value_heads=heads[1])
        folder = tiny_folder(name, **settings)
        config = read_config(folder)
        family = registry.family_of(config)
        decoder = family.decoder(family.from_hf(config))
        model = funcinfer.load(folder, dtype=torch.float32)
        return Pair(*tiny_model(name, **settings), model, decoder)

    return get


def check_whole(found: Pair, batch: int, length: int) -> None:
    ids = oracles.token_ids(found.config, batch, length)
    with torch.no_grad():
        logits = found.model.logits(ids)
    wanted = oracles.full_logits(found.reference, ids)
    torch.testing.assert_close(logits, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_whole_prompts(name: str, pair: Callable[..., Pair]):
    check_whole(pair(name), batch=2, length=37)
    check_whole(pair(name), batch=3, length=1)


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize("name", ("llama", "qwen2", "qwen3"))
def test_other_counts_of_heads(name: str, heads: tuple[int, int], pair: Callable[..., Pair]):
    check_whole(pair(name, heads), batch=2, length=23)


def stepped(found: Pair, ids: torch.Tensor, steps: Sequence[tuple[bool, dict[int, int]]]) -> Logits:
    """Logits by (request, position), through pages of 4 tokens that start as NaN."""
    trace = Trace({i: len(prompt) for i, prompt in enumerate(ids)}, steps)
    runner = Runner(found.decoder, found.model.params, ONE_RANK, trace, page_size=4)
    runner.tokens = {i: prompt.tolist() for i, prompt in enumerate(ids)}
    logits: Logits = {}
    for decode, counts in steps:
        logits |= runner.step(decode, counts)
    return logits


def by_position(logits_BSV: torch.Tensor) -> Logits:
    return {(i, at): row for i, rows in enumerate(logits_BSV) for at, row in enumerate(rows)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_chunking_of_a_prompt(name: str, pair: Callable[..., Pair]):
    """Wherever a prompt is cut, each position has the logits of the whole."""
    found = pair(name)
    ids = oracles.token_ids(found.config, 1, LENGTH, seed=3)
    wanted = by_position(oracles.full_logits(found.reference, ids))
    for sizes in CHUNKS:
        logits = stepped(found, ids, [(False, {0: n}) for n in sizes])
        assert_same(logits, wanted, TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_paged_decode(name: str, pair: Callable[..., Pair]):
    """Requests of different ages decode together, past the ends of their pages."""
    found = pair(name)
    ids = oracles.token_ids(found.config, 3, 18, seed=4)
    steps: list[tuple[bool, dict[int, int]]] = [(False, {0: 6, 1: 1}), (False, {2: 11})]
    steps += [(True, {0: 1, 1: 1, 2: 1}) for _ in range(7)]
    steps += [(True, {0: 3, 1: 2}), (True, {1: 8, 0: 2})]
    wanted = by_position(oracles.full_logits(found.reference, ids))
    logits = stepped(found, ids, steps)
    assert_same(logits, {key: wanted[key] for key in logits}, TOLERANCE)
    assert {key for key in wanted if key not in logits} == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(name: str, pair: Callable[..., Pair]):
    """32 tokens of prompts of several lengths, served together."""
    config, reference, model, _ = pair(name)
    prompts = [oracles.token_ids(config, 1, n, seed=n) for n in (5, 17, 2)]
    wanted = [oracles.greedy(reference, prompt, 32)[0][0].tolist() for prompt in prompts]
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    assert model.generate([p[0].tolist() for p in prompts], sampling) == wanted
