"""Parameters from Hugging Face folders and back: names, this rank's slices, strict both ways."""

from funcinfer.checkpoint.files import Entry, read_entries
from funcinfer.checkpoint.load import load_params, load_ranks
from funcinfer.checkpoint.name_map import Either, NameMap, Source, Stack, Stored
from funcinfer.checkpoint.save import save_params

__all__ = [
    "Either",
    "Entry",
    "NameMap",
    "Source",
    "Stack",
    "Stored",
    "load_params",
    "load_ranks",
    "read_entries",
    "save_params",
]
