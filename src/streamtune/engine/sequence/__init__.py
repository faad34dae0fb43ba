"""Ranks that share a sequence."""
