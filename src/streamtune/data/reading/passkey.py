"""A built-in data set that needs long rows: find the pass key in a log of up to hundreds of lines.

**demo-passkey** (type ``messages``). One line of a log of a service names two words, at a place drawn at random; the
question comes after the log::

    user         storage: merged batch 481
                 worker: retried job 77
                 vault: the pass key is amber otter
                 parser: skipped record 902
                 ...

                 What is the pass key?
    assistant    The pass key is amber otter.

This is passkey retrieval (Mohtashami & Jaggi 2023, arXiv 2305.16300), made easy enough that a model with random
weights learns it in minutes on a processor: each of the two words comes from a list of its own. What no model can
answer is a question whose log it did not read to the end.

Rows come from easy to hard: the logs of the first have at most 16 lines, those of the last up to 400, about 5,000
tokens. A new model learns from the short ones what to look for. With ``shuffle: false`` a recipe keeps this order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from streamtune.data.reading.readers import Row

PASSKEY_PATH = "demo-passkey"
"""The dataset path that names these rows."""

SEED = 0
"""Seed of the rows, whatever the recipe's seed is."""

NUM_ROWS = 4_000
"""Rows, unless fewer are asked for."""

SHORT_LINES, MOST_LINES = 16, 400
"""Lines of the first logs at most, and of the longest."""

SHORT_ROWS = 0.6
"""The part of the rows with at most ``SHORT_LINES`` lines; from there on the longest grow by the same factor a row."""

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


def passkey_rows(*, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield logs with a pass key in one line, the question, and the answer.

    Args:
        max_rows: Rows to yield, from short to long; :data:`NUM_ROWS` by default.
        seed: Seed of everything.
    """
    draw = random.Random(seed)
    count = NUM_ROWS if max_rows is None else max_rows
    for number in range(1, count + 1):
        lines = _lines(draw, number / count)
        key = " ".join(_pick(draw, words) for words in (COLOURS, ANIMALS))
        log = [_line(draw) for _ in range(lines)]
        log.insert(int(draw.random() * (lines + 1)), f"vault: the pass key is {key}")
        messages = [
            {"role": "user", "content": "\n".join(log) + "\n\nWhat is the pass key?"},
            {"role": "assistant", "content": f"The pass key is {key}."},
        ]
        yield Row(f"{PASSKEY_PATH}:row {number}", {"messages": messages})


def _lines(draw: random.Random, part: float) -> int:
    """Return the number of lines of the log after this part of the rows."""
    if part < SHORT_ROWS:
        return int(draw.random() * SHORT_LINES)
    most = SHORT_LINES * (MOST_LINES / SHORT_LINES) ** ((part - SHORT_ROWS) / (1 - SHORT_ROWS))
    return int(most * (0.4 + 0.6 * draw.random()))


def _line(draw: random.Random) -> str:
    return f"{_pick(draw, SERVICES)}: {_pick(draw, DID)} {_pick(draw, OBJECTS)} {int(draw.random() * 1000)}"


def _pick(draw: random.Random, words: tuple[str, ...]) -> str:
    """Return one of the words, by ``random()``: the one method whose numbers Python guarantees not to change."""
    return words[int(draw.random() * len(words))]
