"""Layers: pure functions over parameter dicts, each beside the specs that declare its leaves."""
