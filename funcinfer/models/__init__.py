"""Model families: each a Config, a list of layers and a map of checkpoint names."""
