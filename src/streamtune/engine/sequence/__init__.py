"""Sequence parallelism: several ranks share each sequence."""
