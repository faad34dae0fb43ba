"""Helpers for all other packages: paths, sizes, names, secrets, caches, signals. Nothing here imports torch."""
