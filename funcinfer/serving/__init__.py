"""Serving: scheduling, sampling, step functions and the reference loop."""
