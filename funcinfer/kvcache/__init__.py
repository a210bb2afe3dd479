"""Paged caches: layout arithmetic, the page pool, cache pytrees and batches."""
