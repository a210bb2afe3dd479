"""Sequences continued by the model itself: a decode loop over `funcinfer.models.decoder.forward`.

B sequences, P tokens of a prompt, N new ones, V vocabulary.
"""

import torch

from examples.train_tiny.model import ONE_RANK, new_cache, rows
from funcinfer.models.decoder import Decoder, Params, forward


@torch.no_grad()
def continued(
    decoder: Decoder,
    params: Params,
    prompts_BP: torch.Tensor,
    new: int,
    temperature_B: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    """Prompts and `new` more tokens of each, [B, P + N]; at temperature 0 the likeliest ones.

    An end token does not end a sequence: the next chapter begins.
    """
    (B, P), device = prompts_BP.shape, prompts_BP.device
    draws = torch.Generator(device).manual_seed(seed)
    cache = new_cache(decoder, params, B, P + new)
    tokens_BT, made, at = prompts_BP, [prompts_BP], 0
    for _ in range(new):
        batch = rows(tokens_BT, at, P + new, last=True)
        out, cache = forward(decoder, params, cache, batch, rules=ONE_RANK)
        at += tokens_BT.shape[1]
        tokens_BT = drawn(out.logits.float(), temperature_B, draws)[:, None]
        made.append(tokens_BT)
    return torch.cat(made, 1)


def drawn(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, draws: torch.Generator
) -> torch.Tensor:
    """One token of each row, from softmax(logits / temperature), by the Gumbel trick."""
    uniform_BV = torch.rand(logits_BV.shape, generator=draws, device=logits_BV.device)
    gumbel_BV = -torch.log(-torch.log(uniform_BV.clamp(1e-20, 1 - 1e-7)))
    return (logits_BV + temperature_B[:, None] * gumbel_BV).argmax(-1)
