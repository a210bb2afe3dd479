"""The folder of the model that comes with the package."""

from pathlib import Path


def default_model() -> Path:
    """The Hugging Face folder of a small DeepSeek-V3-style model with a draft module.

    It has config.json, generation_config.json, model.safetensors, tokenizer.json and a model card,
    README.md, which says what it was trained on and what was measured. `examples/train_tiny` made
    it.

    >>> sorted(file.suffix for file in default_model().glob("model*"))
    ['.safetensors']
    """
    return Path(__file__).parent / "default_model"
