"""Adapters: added to a model, started, saved and loaded. The kinds are rows of ``base/adapters.py``."""
