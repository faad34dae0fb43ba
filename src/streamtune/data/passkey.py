"""A built-in data set that needs long rows: find the pass key in a log of up to thousands of lines.

**demo-passkey** (type ``messages``). One line of a log of a service names three words, at a place drawn at random; the
question comes after the log::

    user         storage: merged batch 481
                 worker: retried job 77
                 vault: the pass key is amber otter harbour
                 parser: skipped record 902
                 ...

                 What is the pass key?
    assistant    The pass key is amber otter harbour.

This is passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300), made easy enough that a model with random
weights learns it in minutes on a processor: each of the three words comes from a list of its own. What no model can
answer is a question whose log it did not read to the end. The number of lines is drawn so that most logs are short,
which a new model learns from, and one in eight has more than 4,000 tokens of a vocabulary that was trained on these
rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from streamtune.data.readers import Row

__all__ = ["PASSKEY_PATH", "passkey_rows"]

PASSKEY_PATH = "demo-passkey"
"""The dataset path that names these rows."""

SEED = 0
"""Seed of the rows, whatever the recipe's seed is."""

NUM_ROWS = 4_000
"""Rows, unless fewer are asked for."""

MOST_LINES = 640
"""Lines of the longest log: about 8,000 tokens of a vocabulary of 1,024."""

SERVICES = ("scheduler", "storage", "network", "cache", "worker", "mailer", "parser", "index")
DID = ("started", "finished", "retried", "queued", "skipped", "merged", "checked", "wrote")
OBJECTS = ("job", "block", "page", "request", "batch", "record", "table", "file")
COLOURS = (
    *("amber", "cobalt", "ebony", "garnet", "hazel", "indigo", "jade", "khaki"),
    *("lilac", "mauve", "ochre", "pearl", "ruby", "saffron", "topaz", "umber"),
)
ANIMALS = (
    *("badger", "camel", "dingo", "eagle", "ferret", "gibbon", "heron", "ibis"),
    *("jackal", "koala", "lemur", "marten", "otter", "panda", "raven", "walrus"),
)
PLACES = (
    *("arcade", "bridge", "castle", "delta", "forest", "garden", "harbour", "island"),
    *("lagoon", "market", "orchard", "palace", "quarry", "station", "temple", "valley"),
)


def passkey_rows(*, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield logs with a pass key in one line, the question, and the answer.

    Args:
        max_rows: Yield so many rows at most; fewer are the first of more.
        seed: Seed of everything.
    """
    draw = random.Random(seed)
    for number in range(1, (NUM_ROWS if max_rows is None else max_rows) + 1):
        lines = round(MOST_LINES ** (draw.random() ** 4))
        key = " ".join(_pick(draw, words) for words in (COLOURS, ANIMALS, PLACES))
        log = [_line(draw) for _ in range(lines)]
        log.insert(int(draw.random() * (lines + 1)), f"vault: the pass key is {key}")
        messages = [
            {"role": "user", "content": "\n".join(log) + "\n\nWhat is the pass key?"},
            {"role": "assistant", "content": f"The pass key is {key}."},
        ]
        yield Row(f"{PASSKEY_PATH}:row {number}", {"messages": messages})


def _line(draw: random.Random) -> str:
    return f"{_pick(draw, SERVICES)}: {_pick(draw, DID)} {_pick(draw, OBJECTS)} {int(draw.random() * 1000)}"


def _pick(draw: random.Random, words: tuple[str, ...]) -> str:
    """Return one of the words, by ``random()``: the one method whose numbers Python guarantees not to change."""
    return words[int(draw.random() * len(words))]
