"""Attacks on a run: each does to a real, forked run something that no other test does, and returns what came of it.

A module holds attacks of one kind; ``lab`` is what they are made of. ``tests/faults/test_attacks.py`` runs them, and
docs/reference/reliability.md lists each with its outcome.
"""

from tests.faults.attacks import content, environment, files, links, races, signals, streams, words
from tests.faults.attacks.lab import Attack, Lab

__all__ = ["ATTACKS", "Attack", "Lab"]

ATTACKS: list[Attack] = [
    *files.ATTACKS,
    *links.ATTACKS,
    *races.ATTACKS,
    *content.ATTACKS,
    *signals.ATTACKS,
    *streams.ATTACKS,
    *environment.ATTACKS,
    *words.ATTACKS,
]
