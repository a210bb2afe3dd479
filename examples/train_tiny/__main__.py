"""Train, write and evaluate the model: see the package's docstring. Each finished part is kept in
`--work` and not done again; an interrupted one goes on from its last saved state.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from examples.train_tiny.data import chapters, random_windows, split, stream, train_tokenizer
from examples.train_tiny.dense import BACKEND
from examples.train_tiny.evaluate import acceptances, losses, prompts, samples
from examples.train_tiny.export import draw_curves, write_card, write_folder
from examples.train_tiny.model import CONFIG, cast, config, new_params
from examples.train_tiny.sample import continued
from examples.train_tiny.training import Settings, State, described, train_draft, train_model
from funcinfer import load
from funcinfer.layers.primitives import use_backend
from funcinfer.models import deepseek_v3
from funcinfer.models.mla import Config
from funcinfer.tree import tree_leaves

MODEL = Settings(
    steps=2200, batch=32, length=512, lr=3e-3, weight_decay=0.3, dropout=0.2, warmup=100
)
DRAFT = Settings(steps=2500, batch=128, length=224, lr=2e-3, weight_decay=0.1, warmup=50)
PROMPT = 32  # tokens of the text with which a sample of stage 2 begins


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in order; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.train_tiny", description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="what `bible -f` prints")
    parser.add_argument("--work", type=Path, required=True, help="where states are kept")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; new or empty")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=MODEL.steps, help="of stage 1")
    parser.add_argument("--draft-steps", type=int, default=DRAFT.steps, help="of stage 2")
    parser.add_argument("--batch", type=int, default=MODEL.batch, help="windows of stage 1")
    parser.add_argument("--dropout", type=float, default=MODEL.dropout)
    parser.add_argument("--weight-decay", type=float, default=MODEL.weight_decay)
    parser.add_argument("--lr", type=float, default=MODEL.lr)
    parser.add_argument("--samples", type=int, default=16384, help="sequences for stage 2")
    parser.add_argument("--prompts", type=int, default=50, help="of the measurement of drafts")
    parser.add_argument("--new", type=int, default=96, help="tokens of each of those prompts")
    parser.add_argument("--measure", action="store_true", help="only: write --out's card again")
    a = parser.parse_args(arguments)
    if a.measure:
        measure(a.text, a.out, a.device, a.prompts, a.new)
        return 0
    if a.out.exists() and any(a.out.iterdir()):
        print(f"{a.out} holds files; remove it or name another folder", file=sys.stderr)
        return 2
    a.work.mkdir(parents=True, exist_ok=True)
    dtype = torch.bfloat16 if a.device.startswith("cuda") else torch.float32
    first = replace(
        MODEL,
        steps=a.steps,
        batch=a.batch,
        dropout=a.dropout,
        weight_decay=a.weight_decay,
        lr=a.lr,
        warmup=min(MODEL.warmup, a.steps // 2),
        seed=a.seed,
        dtype=dtype,
    )
    second = replace(DRAFT, steps=a.draft_steps, seed=a.seed, dtype=dtype)
    train(a.text, a.work, a.out, a.device, first, second, a.samples)
    measure(a.text, a.out, a.device, a.prompts, a.new)
    return 0


def train(
    text: Path,
    work: Path,
    out: Path,
    device: str,
    first: Settings,
    second: Settings,
    num_samples: int,
) -> None:
    """Both stages, and the folder."""
    started, texts = time.perf_counter(), chapters(text)
    trained_on, held_out_texts = split(texts)
    tokenizer = _tokenizer(work / "tokenizer.json", trained_on)
    ids, held_out = (stream(tokenizer, part).to(device) for part in (trained_on, held_out_texts))
    cfg = config()
    model = _resumed(work / "model.pt", device, lambda: new_params(cfg, first.seed, device))
    model = train_model(cfg, model, ids, held_out, first, work / "model.pt")
    own = _samples(work / "samples.pt", cfg, model, ids, num_samples, second)
    draft = _resumed(work / "draft.pt", device, lambda: model.params)
    draft = train_draft(cfg, draft, own, second, work / "draft.pt")

    write_folder(out, draft.params, tokenizer)
    draw_curves(out / "loss.png", model.curve, draft.curve)
    settings = {"model": described(first), "draft": described(second)}
    (out / "training.json").write_text(json.dumps(settings, indent=2) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")


def measure(text: Path, folder: Path, device: str, count: int, new: int) -> None:
    """Write the model card of a folder: what is measured is what lies there, in float32."""
    texts = chapters(text)
    _, held_out_texts = split(texts)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load(folder, dtype=torch.float32, device=device)
    cfg, params, plain = model.cfg, model.params, model.fns.decoder
    held_out = stream(tokenizer, held_out_texts).to(device)
    found = losses(cfg, params, tokenizer, held_out_texts)
    accepted = acceptances(cfg, plain, params, prompts(held_out, count), new)
    written = samples(plain, params, tokenizer)
    counts = dict(
        chapters=len(texts), held_out_chapters=len(held_out_texts), prompts=count, new=new
    )
    size = sum(w.numel() for w in tree_leaves(params))
    write_card(folder, size, found | counts, accepted, written)
    print(json.dumps(found | {"acceptance": [asdict(a) for a in accepted]}, indent=2))
    print("\n\n".join(written))


def _tokenizer(path: Path, texts: Sequence[str]) -> Tokenizer:
    if not path.is_file():
        train_tokenizer(texts, CONFIG["vocab_size"]).save(str(path))
    return Tokenizer.from_file(str(path))


def _resumed(path: Path, device: str, new: Callable[[], dict]) -> State:
    return State.load(path, device) if path.is_file() else State(new())


def _samples(
    path: Path, cfg: Config, model: State, ids: torch.Tensor, count: int, settings: Settings
) -> torch.Tensor:
    """The model's own sequences [B, T], at temperatures from 0 to 1, from prompts of the text."""
    if path.is_file():
        return torch.load(path, map_location=ids.device, weights_only=True)
    draws = torch.Generator().manual_seed(settings.seed + 1)
    params, made = cast(model.params, settings.dtype), []
    for i in range(0, count, 4096):
        part = min(4096, count - i)
        begins = random_windows(ids.cpu(), part, PROMPT, draws).to(ids.device)
        temperatures = torch.linspace(0, 1, part, device=ids.device)
        with use_backend(BACKEND):
            decoder = deepseek_v3.decoder(cfg)
            made.append(
                continued(decoder, params, begins, settings.length - PROMPT, temperatures, seed=i)
            )
    shuffled = torch.randperm(count, generator=draws).to(ids.device)
    own = torch.cat(made)[shuffled]
    torch.save(own, path)
    return own


if __name__ == "__main__":
    raise SystemExit(main())
