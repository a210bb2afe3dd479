"""What the model card reports: losses, loads of experts, accepted drafts, samples.

B sequences, P tokens of a prompt, N new ones, k drafts of a step.

The acceptance of drafts is exact without a serving loop. Rejection sampling (Leviathan et al. 2023;
Chen et al. 2023) draws x by the draft's law q, accepts it with probability min(1, p(x) / q(x)), and
emits tokens by the model's own law p. An accepted x comes out with probability min(p(x), q(x)): so
given that x came out, it had been a draft with probability min(1, q(x) / p(x)), independently at
each place. It does to write sequences by plain decoding and to draw afterwards which of their
tokens had been drafts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from examples.train_tiny.data import END, stream
from examples.train_tiny.dense import BACKEND
from examples.train_tiny.model import chained, training_decoder, whole
from examples.train_tiny.sample import continued
from examples.train_tiny.training import held_out_losses
from funcinfer.layers.primitives import use_backend
from funcinfer.models.decoder import Decoder, Params
from funcinfer.models.mla import Config

PROMPT, SAMPLE_TOKENS = 48, 100
SAMPLES = ("In the beginning", "And the angel said unto them,", "Blessed are")


@dataclass(frozen=True)
class Acceptance:
    """Of steps that verify `k` drafts at one temperature.

    `drafts` is the share of all drafts that was accepted, `prefixes[d]` that of the steps that
    accepted the first d + 1, `length` the mean number of tokens that a step emits: the accepted
    drafts and one more.
    """

    k: int
    temperature: float
    drafts: float
    prefixes: tuple[float, ...]
    length: float


def prompts(ids: torch.Tensor, count: int, length: int = PROMPT) -> torch.Tensor:
    """`count` prompts [B, P] that lie evenly over a text."""
    starts = torch.linspace(0, len(ids) - length, count).long()
    return ids[(starts[:, None] + torch.arange(length)).to(ids.device)]


@torch.no_grad()
def acceptance_chances(
    decoder: Decoder, params: Params, tokens_BT: torch.Tensor, k: int, temperature: float
) -> torch.Tensor:
    """[k, B, T]: the probability that the chain that starts at place i had drafted right at each
    depth, given that all before were accepted and that `tokens` came out; at temperature 0 it is 0
    or 1. The row of depth d and place i is about token i + 2 + d; those past the end are 0.
    """
    (B, T), found = tokens_BT.shape, []
    main, cache = whole(decoder, params, tokens_BT, depths=k)
    hidden_TD = main.hidden
    for depth in range(k):
        next_BT, after_BT = (tokens_BT.roll(-n - depth, 1) for n in (1, 2))
        out, cache = chained(decoder, params, cache, next_BT, hidden_TD, depth=depth, depths=k)
        hidden_TD = out.hidden
        if temperature == 0:
            chance_BT = (out.logits.argmax(-1).view(B, T) == after_BT).float()
        else:
            p, q = (
                (x.logits.float() / temperature).log_softmax(-1).view(B, T, -1) for x in (main, out)
            )
            ratio = q - p.roll(-1 - depth, 1)
            chance_BT = ratio.gather(2, after_BT[..., None])[..., 0].exp().clamp(max=1)
        chance_BT[:, max(T - 2 - depth, 0) :] = 0
        found.append(chance_BT)
    return torch.stack(found)


def walked(
    chance_kBT: torch.Tensor, start: int, k: int, temperature: float, seed: int = 0
) -> Acceptance:
    """The Acceptance of steps that follow one another from place `start` of each sequence.

    A step at place i has k drafts; where a are accepted, the next one stands at i + a + 1. Steps
    whose drafts would pass the end are left out.
    """
    T = chance_kBT.shape[2]
    draws = torch.Generator().manual_seed(seed)
    accepts = (torch.rand(chance_kBT.shape, generator=draws) < chance_kBT.cpu())[:k]
    runs_BT = accepts.long().cumprod(0).sum(0).tolist()
    counts = [0] * (k + 1)
    for run in runs_BT:
        at = start
        while at + 1 + k < T:
            counts[run[at]] += 1
            at += run[at] + 1
    steps = sum(counts)
    accepted = sum(a * n for a, n in enumerate(counts))
    prefixes = tuple(sum(counts[d:]) / steps for d in range(1, k + 1))
    return Acceptance(k, temperature, accepted / (k * steps), prefixes, 1 + accepted / steps)


def acceptances(
    cfg: Config,
    plain: Decoder,
    params: Params,
    prompts_BP: torch.Tensor,
    new: int,
    temperatures: Sequence[float] = (0.0, 1.0),
    most: int = 3,
) -> list[Acceptance]:
    """The Acceptance of k = 1 .. most at each temperature, over `new` tokens of each prompt."""
    decoder, found = training_decoder(cfg, 0.0), []
    for temperature in temperatures:
        each_B = torch.full((len(prompts_BP),), temperature, device=prompts_BP.device)
        with use_backend(BACKEND):
            tokens_BT = continued(plain, params, prompts_BP, new, each_B, seed=0)
            chances = acceptance_chances(decoder, params, tokens_BT, most, temperature)
        found += [
            walked(chances, prompts_BP.shape[1] - 1, k, temperature) for k in range(1, most + 1)
        ]
    return found


def samples(
    plain: Decoder,
    params: Params,
    tokenizer: Tokenizer,
    new: int = SAMPLE_TOKENS,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """A text from each of SAMPLES, up to the end of the chapter."""
    found = []
    for text in SAMPLES:
        prompt = torch.tensor([tokenizer.encode(text).ids], device=params["embed"].device)
        each = torch.full((1,), temperature, device=prompt.device)
        with use_backend(BACKEND):
            ids = continued(plain, params, prompt, new, each, seed=seed)[0, 1:].tolist()
        written = tokenizer.decode(ids, skip_special_tokens=False)
        found.append(written.split(END)[0])
    return found


def losses(
    cfg: Config, params: Params, tokenizer: Tokenizer, texts: Sequence[str]
) -> dict[str, float]:
    """Losses and loads on texts, in windows of the model's length; perplexity of a token, and nats
    of a byte, which don't depend on the tokenizer.
    """
    ids = stream(tokenizer, texts).to(params["embed"].device)
    found = held_out_losses(training_decoder(cfg, 0.0), params, ids, 8, cfg.max_length)
    nats_of_byte = found["held_out"] * len(ids) / sum(len(t.encode()) for t in texts)
    return found | {"perplexity": math.exp(found["held_out"]), "nats_of_byte": nats_of_byte}
