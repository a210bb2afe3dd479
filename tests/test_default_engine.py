"""The model that ships with the package, served with its own drafts: real weights, exact text.

50 held-out prompts of 48 tokens with 96 new ones, in float32, on one rank and on meshes.
"""

from typing import Any

import pytest
import torch

import funcinfer
from examples.train_tiny import data, evaluate
from funcinfer import Engine, Mesh, Model, SamplingParams
from funcinfer.default import default_model
from funcinfer.serving import verify
from funcinfer.serving.metrics import Metrics
from funcinfer.serving.text import Text
from funcinfer.sharding import presets
from tests import oracles
from tests.test_default_model import HELD_OUT

NUM_PROMPTS, COUNT = 50, 96
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Text.from_folder(default_model()).tokenizer
    return evaluate.prompts(data.stream(tokenizer, data.chapters(HELD_OUT)), NUM_PROMPTS).tolist()


@pytest.fixture(scope="module")
def model() -> Model:
    return funcinfer.load(dtype=torch.float32)


def serve(
    model: Model, prompts: list[list[int]], params: SamplingParams, **options: Any
) -> tuple[list[list[int]], Metrics]:
    engine = Engine(model, num_pages=600, page_size=16, max_running=64, **options)
    done = engine.generate(prompts, params)
    return [completion.tokens for completion in done], engine.metrics


@pytest.fixture(scope="module")
def plain(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    return serve(model, prompts, GREEDY)[0]


def test_plain_decoding_writes_what_transformers_writes(plain, prompts):
    main = oracles.read_deepseek_v3(default_model())
    ids = torch.tensor(prompts[:8])
    settings: dict[str, Any] = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    seen = torch.ones_like(ids)  # 0 stands in the prompts
    out = main.generate(ids, attention_mask=seen, max_new_tokens=COUNT, **settings)
    assert out[:, ids.shape[1] :].tolist() == plain[:8]


@pytest.mark.parametrize(("k", "least"), [(1, 0.75), (2, 0.65), (3, 0.6)])
def test_drafts_are_accepted_and_change_nothing(k, least, model, prompts, plain):
    tokens, metrics = serve(model, prompts, GREEDY, speculate=k, asynchronous=k == 2)
    assert tokens == plain
    assert metrics.accepted >= least * metrics.drafted > 0
    if k == 3:
        assert metrics.accepted_length >= 2.5


@pytest.mark.parametrize(
    ("mesh", "expert_parallel"), [(Mesh(tp=2), True), (Mesh(dcp=2), False)], ids=["tp", "dcp"]
)
def test_every_mesh_writes_the_same(mesh, expert_parallel, prompts, plain):
    """Two ranks: heads over tp and experts over both, or cached tokens over dcp."""
    preset = presets.for_mesh(None, mesh, expert_parallel=expert_parallel)
    model = funcinfer.load(
        dtype=torch.float32, mesh=preset.mesh, rules=preset.prefill, decode_rules=preset.decode
    )
    tokens, metrics = serve(model, prompts, GREEDY, speculate=1)
    assert tokens == plain
    assert metrics.accepted >= 0.75 * metrics.drafted > 0


def test_drafts_at_temperature_1_change_no_token(model, prompts):
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)
    tokens, metrics = serve(model, prompts[:16], params, speculate=2, asynchronous=True)
    assert tokens == serve(model, prompts[:16], params)[0]
    assert metrics.accepted > 0.2 * metrics.drafted > 0


def test_drawn_drafts_keep_the_law(model, prompts):
    """2,000 draws of the first two tokens, which drafts may bring, against their exact law."""
    prompt, count = prompts[7], 2000
    engine = Engine(model, num_pages=900, speculate=2, max_running=256, verifier=verify.BLOCK)
    params = [SamplingParams(max_tokens=3, temperature=1.0, seed=s) for s in range(count)]
    ids = [engine.add(prompt, p) for p in params]
    done = [engine.live[i] for i in ids]
    while engine.live:
        engine.step()
    assert engine.metrics.accepted > 0.2 * engine.metrics.drafted > 0
    drawn = [tuple(c.tokens[:2]) for c in done]
    first = [tokens[0] for tokens in drawn]
    check_law(first, law(model, [prompt])[0] * count)
    goes_on = [tokens for tokens in drawn if len(tokens) == 2]
    firsts = sorted({tokens[0] for tokens in goes_on})
    laws = dict(zip(firsts, law(model, [[*prompt, x] for x in firsts]), strict=True))
    check_law([second for _, second in goes_on], sum(laws[x] for x, _ in goes_on))


def law(model: Model, sequences: list[list[int]]) -> torch.Tensor:
    """The law [B, V] of the token after each of these sequences of one length."""
    return model.logits(torch.tensor(sequences))[:, -1].double().softmax(-1)


def check_law(tokens: list[int], expected_V: torch.Tensor) -> None:
    """Pearson's test at five deviations: tokens of fewer than five expected draws count as one."""
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(expected_V)).double()
    often = expected_V >= 5
    counts = torch.cat([counts_V[often], counts_V[~often].sum()[None]])
    expected = torch.cat([expected_V[often], expected_V[~often].sum()[None]])
    statistic, freedom = float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1
    assert freedom > 10
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
