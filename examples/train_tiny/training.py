"""Two stages of training: the whole model on text, then the draft module on the model's samples.

    stage 1   cross entropy of the next token + MTP_WEIGHT * that of the token after the next
    stage 2   mean over depths d of KL(the model's law of token i + 2 + d || the d-th chained
              draft's), on what the model itself writes; all but the draft module is frozen

Experts are balanced without a loss: after each step the selection bias of an expert that got less
than its share grows by BIAS_RATE, of one that got more it shrinks. Sources: DeepSeek-V3 technical
report (2024), sections 2.1.2 and 2.2; Wang et al., "Auxiliary-loss-free load balancing" (2024).

B sequences, T tokens of each, V vocabulary, E experts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from examples.train_tiny.data import all_windows, random_windows
from examples.train_tiny.dense import BACKEND
from examples.train_tiny.model import LOAD, cast, chained, training_decoder, whole
from funcinfer.layers.primitives import use_backend
from funcinfer.models.decoder import Cache, Decoder, Params
from funcinfer.models.mla import Config
from funcinfer.tree import leaves_with_path, tree_map

MTP_WEIGHT = 0.3
BIAS_RATE = 0.003
Losses = dict[str, torch.Tensor]
LossFn = Callable[[Params, int], tuple[torch.Tensor, Losses, Cache]]


@dataclass(frozen=True)
class Settings:
    """How one stage trains: `steps` of `batch` windows of `length` tokens."""

    steps: int
    batch: int
    length: int
    lr: float
    weight_decay: float = 0.0
    dropout: float = 0.0
    warmup: int = 50
    seed: int = 0
    dtype: torch.dtype = torch.float32
    every: int = 50  # steps between evaluations and saved states


@dataclass
class State:
    """What a stage has come to: `params`, which it changes in place, the optimiser's state, and the
    curve so far.
    """

    params: Params
    step: int = 0
    optimiser: dict[str, Any] | None = None
    curve: list[dict[str, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write beside, then rename: a file is whole or not there."""
        beside = path.with_suffix(".partial")
        torch.save(vars(self), beside)
        beside.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device | str) -> "State":
        """The state in a file that `save` wrote."""
        return cls(**torch.load(path, map_location=device, weights_only=True))


def train_model(
    cfg: Config,
    state: State,
    ids: torch.Tensor,
    held_out: torch.Tensor,
    settings: Settings,
    path: Path | None = None,
    *,
    until: int | None = None,
) -> State:
    """Stage 1, from `state` on to `until`, by default to the end; saved to `path` as it goes."""
    decoder, device = training_decoder(cfg, settings.dropout), ids.device
    quiet = training_decoder(cfg, 0.0)

    def loss(params: Params, step: int) -> tuple[torch.Tensor, Losses, Cache]:
        draws = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        tokens = random_windows(ids.cpu(), settings.batch, settings.length + 2, draws).to(device)
        next_token, after, cache = text_losses(decoder, params, tokens)
        total = next_token + MTP_WEIGHT * after
        return total, {"train": next_token, "train_draft": after}, cache

    def evaluate(params: Params) -> dict[str, float]:
        return held_out_losses(quiet, params, held_out, settings.batch, settings.length)

    return _run("", state, loss, evaluate, settings, path, until)


def train_draft(
    cfg: Config,
    state: State,
    samples_BT: torch.Tensor,
    settings: Settings,
    path: Path | None = None,
    *,
    depths: int = 3,
    until: int | None = None,
) -> State:
    """Stage 2 on the model's own samples: the parameters under `mtp` alone change."""
    decoder, device = training_decoder(cfg, 0.0), samples_BT.device
    kept = len(samples_BT) // 20 or 1

    def laws(params: Params, tokens_BT: torch.Tensor) -> tuple[list[torch.Tensor], Cache]:
        return chain_losses(decoder, params, tokens_BT, depths)

    def loss(params: Params, step: int) -> tuple[torch.Tensor, Losses, Cache]:
        draws = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        chosen = torch.randint(kept, len(samples_BT), (settings.batch,), generator=draws)
        found, cache = laws(params, samples_BT[chosen.to(device)])
        return torch.stack(found).mean(), {f"train_{d}": x for d, x in enumerate(found)}, cache

    def evaluate(params: Params) -> dict[str, float]:
        with torch.no_grad():
            found = [laws(params, part)[0] for part in samples_BT[:kept].split(settings.batch)]
        return {
            f"held_out_{d}": float(sum(x) / len(x)) for d, x in enumerate(zip(*found, strict=True))
        }

    return _run("mtp.", state, loss, evaluate, settings, path, until)


def text_losses(
    decoder: Decoder, params: Params, tokens_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Cache]:
    """(loss of the next token, of the token after it, the cache) of windows of T + 2 tokens."""
    out, cache = whole(decoder, params, tokens_BT[:, :-2])
    drafted, cache = chained(decoder, params, cache, tokens_BT[:, 1:-1], out.hidden, depth=0)
    after = cross_entropy(drafted.logits.float(), tokens_BT[:, 2:].flatten())
    return cross_entropy(out.logits.float(), tokens_BT[:, 1:-1].flatten()), after, cache


def chain_losses(
    decoder: Decoder, params: Params, tokens_BT: torch.Tensor, depths: int
) -> tuple[list[torch.Tensor], Cache]:
    """The cross entropy of the model's law and each depth's, less the law's entropy: KL >= 0."""
    (B, T), found = tokens_BT.shape, []
    with torch.no_grad():
        out, cache = whole(decoder, params, tokens_BT, depths=depths)
        law_BTV = out.logits.float().log_softmax(-1).unflatten(0, (B, T))
    hidden_TD = out.hidden
    for depth in range(depths):
        # The last 1 + depth rows of a sequence carry tokens of its begin; they are left out below.
        next_BT = tokens_BT.roll(-1 - depth, 1)
        out, cache = chained(decoder, params, cache, next_BT, hidden_TD, depth=depth, depths=depths)
        hidden_TD, wanted_BTV = out.hidden, law_BTV[:, 1 + depth :]
        draft_BTV = out.logits.float().log_softmax(-1).unflatten(0, (B, T))
        draft_BTV = draft_BTV[:, : T - 1 - depth]
        found.append((wanted_BTV.exp() * (wanted_BTV - draft_BTV)).sum(-1).mean())
    return found, cache


@torch.no_grad()
def held_out_losses(
    decoder: Decoder, params: Params, ids: torch.Tensor, batch: int, length: int
) -> dict[str, float]:
    """Mean losses on a text that follows on, and the load of the experts on it.

    `load` is the largest, over layers, of an expert's share over the mean share.
    """
    found, loads = [], []
    with use_backend(BACKEND):
        for tokens in all_windows(ids, batch, length + 2, overlap=2):
            *losses, cache = text_losses(decoder, params, tokens)
            found.append(torch.stack([*losses, losses[0].new_tensor(1.0)]) * len(tokens))
            loads.append(torch.stack([v for k, v in cache.items() if k.endswith(LOAD)]))
    next_token, after, windows = torch.stack(found).sum(0)
    load_LE = torch.stack(loads).sum(0)
    return {
        "held_out": float(next_token / windows),
        "held_out_draft": float(after / windows),
        "load": float((load_LE.amax(1) / load_LE.mean(1)).max()),
        "least_load": float((load_LE.amin(1) / load_LE.mean(1)).min()),
    }


def rate_at(step: int, settings: Settings) -> float:
    """The learning rate: a linear rise, then a cosine down to a twentieth of the peak."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def balance(params: Params, cache: Cache, prefix: str = "") -> None:
    """Move selection biases, in place, towards even loads as the cache counted them.

    Only those of layers whose cache names begin with `prefix`.
    """
    for layer, p in _layers(params):
        load_E = cache.get(f"{layer}.mlp.{LOAD}")
        if load_E is not None and layer.startswith(prefix):
            p["mlp"]["router"]["bias"].add_(BIAS_RATE * (load_E.mean() - load_E).sign())


def _layers(params: Params) -> Iterator[tuple[str, Params]]:
    """Layers by what the names of their cache entries begin with."""
    yield from ((f"layers.{i}", p) for i, p in enumerate(params["layers"]))
    yield from ((f"mtp.{i}", p["layer"]) for i, p in enumerate(params["mtp"]))


def _optimiser(trained: list[tuple[str, torch.Tensor]], settings: Settings) -> torch.optim.AdamW:
    """AdamW; vectors, the weights of norms, don't decay."""
    groups = [
        dict(params=[w for _, w in trained if w.ndim > 1], weight_decay=settings.weight_decay),
        dict(params=[w for _, w in trained if w.ndim == 1], weight_decay=0.0),
    ]
    fused = trained[0][1].is_cuda
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=fused)


def _run(
    prefix: str,
    state: State,
    loss: LossFn,
    evaluate: Callable[[Params], dict[str, float]],
    settings: Settings,
    path: Path | None,
    until: int | None,
) -> State:
    """The loop of both stages: it changes the parameters under `prefix`, and no others.

    What it draws depends on (seed, step) alone.
    """
    params, curve = state.params, state.curve
    trained = [
        (name, w)
        for name, w in leaves_with_path(params)
        if name.startswith(prefix) and not name.endswith("router.bias")
    ]
    weights = [w.requires_grad_() for _, w in trained]
    optimiser = _optimiser(trained, settings)
    if state.optimiser is not None:
        optimiser.load_state_dict(state.optimiser)
    end = settings.steps if until is None else until
    bar = tqdm(
        range(state.step, end), desc=prefix or "model", initial=state.step, total=end, mininterval=5
    )
    for step in bar:
        torch.manual_seed(settings.seed * 1_000_003 + step)  # dropout
        for group in optimiser.param_groups:
            group["lr"] = rate_at(step, settings)
        with use_backend(BACKEND):
            total, losses, cache = loss(cast(params, settings.dtype), step)
            optimiser.zero_grad()
            total.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        with torch.no_grad():
            balance(params, cache, prefix)
        state.step = step + 1
        if state.step % settings.every == 0 or state.step == end:
            with use_backend(BACKEND):
                point = {"step": float(state.step), **evaluate(cast(params, settings.dtype))}
            curve.append(point | {k: float(v.detach()) for k, v in losses.items()})
            bar.set_postfix({k: f"{v:.3f}" for k, v in curve[-1].items() if k != "step"})
            state.optimiser = optimiser.state_dict()
            if path is not None:
                state.save(path)
    state.params = tree_map(lambda w: w.detach(), params)
    return state


def described(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values."""
    return {k: str(v) if isinstance(v, torch.dtype) else v for k, v in asdict(settings).items()}
