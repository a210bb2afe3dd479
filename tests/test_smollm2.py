"""The real checkpoint, token for token: the engine against `generate` of transformers, in float32.

Requests of different lengths are served together, under a token budget so small that chunks of
long prompts and decode rows share batches, on one rank, on threads and on processes. At every token
of every answer the best logit leads by more than 0.004, a hundred times what float32 loses.
"""

from pathlib import Path

import pytest
import torch

import funcinfer
from funcinfer import Engine, Mesh, Model, SamplingParams, ThreadRanks
from funcinfer.serving.text import Text
from tests.launch import Processes, process_ranks
from tests.serving.tiny import recorded_plans

COUNT = 64
STORY = (
    "The sea was calm that morning, and the old fisherman rowed out alone, as he had done for forty"
    " years. Behind him the village slept under a thin fog; before him the water lay like grey"
    " silk, without a wave, to the edge of the sky. He had salt in his beard and a knife at his"
    " belt, and he did not think of fish at all, but of the letter on his table. It had come from"
    " the city three days ago, and he had read it so often that its folds were worn through. My"
    " dear father, it began, you will not believe what I have found in the archives of the harbour"
    " office: a list of all the boats that left in the great storm, with the names of their crews,"
    " and yours is not among them."
)
# Start and length in tokens: on, before and behind the edges of pages, and over many of them.
PIECES = ((0, 1), (6, 3), (9, 7), (12, 15), (15, 16), (18, 17), (24, 48), (30, 97), (0, 149))
CHATS = ("What is the capital of France? Answer in one sentence.", "Count from 1 to 20.")
CONTINUED = "Die Hauptstadt von Deutschland ist"


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """Twelve prompts of 1 to 149 tokens."""
    text = Text.from_folder(smollm2)
    story = text.encode(STORY)
    pieces = [story[start : start + length] for start, length in PIECES]
    found = [*pieces, *map(text.chat, CHATS), text.encode(CONTINUED)]
    assert len(found) == len({len(prompt) for prompt in found}) == 12
    return found


@pytest.fixture(scope="module")
def reference(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, whatever end tokens come; in one batch, padded on the left."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    tokens = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=COUNT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[:, longest:].tolist()


def serve(model: Model, prompts: list[list[int]], **sampling: bool) -> list[list[int]]:
    """The tokens of each prompt, all served together."""
    return tokens_of(engine_of(model), prompts, **sampling)


def engine_of(model: Model, speculate: int = 0) -> Engine:
    return Engine(model, num_pages=1 + 80, page_size=16, token_budget=48, speculate=speculate)


def tokens_of(engine: Engine, prompts: list[list[int]], **sampling: bool) -> list[list[int]]:
    params = SamplingParams(max_tokens=COUNT, **sampling)
    return [completion.tokens for completion in engine.generate(prompts, params)]


def served_by_a_process(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """In the process that leads, the tokens."""
    model = funcinfer.load(folder, dtype=torch.float32, mesh=Mesh(tp=3), ranks=process_ranks)
    engine = engine_of(model)
    if not engine.leads:
        engine.follow()
        return []
    served = tokens_of(engine, prompts, ignore_eos=True)
    engine.close()
    return served


def test_one_rank(smollm2, prompts, reference):
    model = funcinfer.load(smollm2, dtype=torch.float32)
    with recorded_plans() as plans:
        assert serve(model, prompts, ignore_eos=True) == reference
    sizes = [{work.num_tokens for work in plan.works} for plan in plans]
    assert sum(1 in size and max(size) > 1 for size in sizes) > 5
    chat = next(i for i, tokens in enumerate(reference) if 2 in tokens)
    assert chat == prompts.index(Text.from_folder(smollm2).chat(CHATS[0]))
    end = reference[chat].index(2)  # the checkpoint's <|im_end|>
    assert serve(model, [prompts[chat]]) == [reference[chat][: end + 1]]


def test_drafts_by_n_grams_change_nothing(smollm2, prompts, reference):
    """And save steps: the accepted length is what a row with drafts gives on average."""
    engine = engine_of(funcinfer.load(smollm2, dtype=torch.float32), speculate=3)
    assert tokens_of(engine, prompts, ignore_eos=True) == reference
    metrics = engine.metrics
    print(f"accepted length {metrics.accepted_length:.2f} of {metrics.verified} rows with drafts")
    assert metrics.accepted > 0.2 * metrics.drafted > 20


def test_three_threads(smollm2, prompts, reference):
    model = funcinfer.load(smollm2, dtype=torch.float32, mesh=Mesh(tp=3))
    assert isinstance(model.runner, ThreadRanks)
    assert [shard["layers"][0]["attn"]["wq"].shape for shard in model.shards] == [(3, 64, 576)] * 3
    assert serve(model, prompts, ignore_eos=True) == reference


def test_three_processes(smollm2, prompts, reference):
    with Processes(3, timeout=900) as processes:
        served = processes.call("tests.test_smollm2:served_by_a_process", smollm2, prompts)
    assert served == [reference, [], []]
