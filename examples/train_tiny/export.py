"""The trained model as a Hugging Face folder, with its card and the picture of its losses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.train_tiny.data import END
from examples.train_tiny.evaluate import PROMPT, SAMPLE_TOKENS, Acceptance
from examples.train_tiny.model import CONFIG, cast
from funcinfer.checkpoint import save_params
from funcinfer.models import deepseek_v3
from funcinfer.models.decoder import Params, decoder_specs

Curve = Sequence[Mapping[str, float]]

CARD = Path(__file__).with_name("card.md")


def write_folder(
    folder: Path, params: Params, tokenizer: Tokenizer, fields: Mapping[str, Any] | None = None
) -> None:
    """config.json, generation_config.json, weights in bfloat16 and the tokenizer."""
    fields = CONFIG | dict(fields or {})
    cfg = deepseek_v3.from_hf(fields)
    specs = decoder_specs(deepseek_v3.decoder(cfg))
    save_params(cast(params, torch.bfloat16), specs, deepseek_v3.name_map(cfg), folder)
    special = {"bos_token": END, "eos_token": END}
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": fields,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": fields["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def write_card(
    folder: Path,
    params_count: int,
    facts: Mapping[str, Any],
    accepted: Sequence[Acceptance],
    texts: Sequence[str],
) -> None:
    """README.md; `facts` are the measured losses, and the counts that the card names."""
    c = CONFIG
    quoted = ("> " + text.replace("\n", "  \n> ") for text in texts)
    (folder / "README.md").write_text(
        CARD.read_text("utf-8").format(
            millions=params_count / 1e6,
            layers=c["num_hidden_layers"],
            width=c["hidden_size"],
            experts=c["n_routed_experts"],
            chosen=c["num_experts_per_tok"],
            q_lora=c["q_lora_rank"],
            kv_lora=c["kv_lora_rank"],
            length=c["max_position_embeddings"],
            vocab=c["vocab_size"],
            end=END,
            prompt=PROMPT,
            acceptance=acceptance_table(accepted),
            sample_tokens=SAMPLE_TOKENS,
            samples_text="\n\n".join(quoted),
            **facts,
        ),
        "utf-8",
    )


def acceptance_table(accepted: Sequence[Acceptance]) -> str:
    """The table of a model card."""
    lines = [
        "| temperature | k | drafts accepted | first / first two / ... | tokens a step |",
        "|---|---|---|---|---|",
    ]
    for a in accepted:
        prefixes = " / ".join(f"{100 * p:.0f} %" for p in a.prefixes)
        lines.append(
            f"| {a.temperature:g} | {a.k} | {100 * a.drafts:.1f} % | {prefixes} | {a.length:.2f} |"
        )
    return "\n".join(lines)


def draw_curves(path: Path, model: Curve, draft: Curve) -> None:
    """The losses of both stages over their steps, side by side, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    titles = ("stage 1: text", "stage 2: the draft module on samples")
    for panel, curve, title in zip(axes, (model, draft), titles, strict=True):
        names = [n for n in (curve[0] if curve else ()) if n != "step" and "load" not in n]
        for name in sorted(names):
            panel.plot([p["step"] for p in curve], [p[name] for p in curve], label=name)
        panel.set(
            title=title, xlabel="step", ylabel="KL, nats" if curve is draft else "nats a token"
        )
        if names:
            panel.legend()
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
