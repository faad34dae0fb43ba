"""Small data sets that every machine has: preferences with a rule, and sums and sequences with an answer to check.

Both are drawn from a seed, need no file, and have a vocabulary of a few dozen words, so that a model with random
weights learns them in minutes on a processor. No prompt occurs twice: held-out rows ask what was never trained on.

**demo-preferences** (type ``preference``). Somebody asks where a thing is::

    prompt      I am in the hall. Where is the red lamp?
    chosen      Sure, the red lamp is in the attic.
    rejected    Sure, the blue lamp is in the attic.

The rule: an answer is preferred if it names the very thing that was asked for and is polite. A rejected answer
breaks it in one way, a third of them each: it names another colour, or another thing, or it is rude (``Go and find the
red lamp.``). So two thirds can only be rejected by reading the prompt. :func:`keeps_the_rule` checks if an answer
keeps it.

**demo-arithmetic** (types ``prompts`` and ``prompt_completion``). One of three tasks on digits, with its answer in the
column ``answer`` for reward functions and as ``completion`` for supervised training::

    prompt      copy 3142        sort 3142        add 3142
    answer      3142             1234             10

The dataset's ``name`` chooses one of them: ``copy``, ``sort`` or ``add``; without it they take turns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import product

from streamtune.data.readers import Row

__all__ = ["ARITHMETIC_PATH", "PREFERENCES_PATH", "TASKS", "arithmetic_rows", "keeps_the_rule", "preference_rows"]

PREFERENCES_PATH = "demo-preferences"
"""The dataset path that names the preferences."""

ARITHMETIC_PATH = "demo-arithmetic"
"""The dataset path that names the tasks on digits."""

SEED = 0
"""Seed of both: a recipe's seed chooses what is held out and the order, not the rows."""

NUM_PREFERENCES = 4_000
"""Pairs, unless fewer are asked for."""

NUM_TASKS = 6_000
"""Tasks, unless fewer are asked for."""

PLACES = ("hall", "attic", "kitchen", "garden", "cellar", "office", "garage", "studio", "bedroom", "library")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
THINGS = ("lamp", "chair", "book", "coat", "clock", "cup", "key", "bag", "hat", "phone", "ball", "knife")
QUESTIONS = (
    "Where is the {thing}?",
    "Do you know where the {thing} is?",
    "Please tell me where the {thing} is.",
    "I am looking for the {thing}.",
    "Who has seen the {thing}?",
    "Can you find the {thing}?",
    "Where did you put the {thing}?",
    "I need the {thing}.",
)
POLITE = ("Sure, the {thing} is in the {place}.", "The {thing} is in the {place}.", "I saw the {thing} in the {place}.")
RUDE = ("Go and find the {thing}.", "Look for the {thing} yourself.", "Why ask me for the {thing}?")


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _pick(draw: random.Random, items: tuple[str, ...]) -> str:
    """Return one of the items, by ``random()``: the one method whose numbers Python guarantees not to change."""
    return items[int(draw.random() * len(items))]


def _at_most(wanted: int | None, there: int) -> int:
    return there if wanted is None else min(wanted, there)


def preference_rows(*, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield pairs of answers, one of which keeps the rule.

    Args:
        max_rows: Yield so many rows at most; fewer are the first of more.
        seed: Seed of everything.
    """
    draw = random.Random(seed)
    asked = list(product(PLACES, QUESTIONS, COLOURS, THINGS))
    asked.sort(key=lambda _: draw.random())
    kept = asked[: _at_most(max_rows, NUM_PREFERENCES)]
    for number, (here, question, colour, thing) in enumerate(kept, start=1):
        place = _pick(draw, tuple(item for item in PLACES if item != here))
        polite = _pick(draw, POLITE)
        other_colour = _pick(draw, tuple(item for item in COLOURS if item != colour))
        other_thing = _pick(draw, tuple(item for item in THINGS if item != thing))
        broken = (
            polite.format(thing=f"{other_colour} {thing}", place=place),
            polite.format(thing=f"{colour} {other_thing}", place=place),
            _pick(draw, RUDE).format(thing=f"{colour} {thing}"),
        )
        columns = {
            "prompt": _message("user", f"I am in the {here}. {question.format(thing=f'{colour} {thing}')}"),
            "chosen": _message("assistant", polite.format(thing=f"{colour} {thing}", place=place)),
            "rejected": _message("assistant", broken[number % 3]),
        }
        yield Row(f"{PREFERENCES_PATH}:row {number}", columns)


def keeps_the_rule(question: str, answer: str) -> bool:
    """Return True if an answer is polite and names the very thing that was asked for.

    Args:
        question: A prompt of ``demo-preferences``.
        answer: An answer to it.
    """
    asked = re.search(rf"the ({'|'.join(COLOURS)}) ({'|'.join(THINGS)})\b", question)
    if asked is None:
        return False
    thing = asked.group().removeprefix("the ")
    return any(answer == form.format(thing=thing, place=place) for form in POLITE for place in PLACES)


# -------------------------------------------------------------------------------------------------------- arithmetic


def _digits(draw: random.Random, count: int) -> str:
    return "".join(_pick(draw, tuple("0123456789")) for _ in range(count))


def _copy(draw: random.Random) -> tuple[str, str]:
    digits = _digits(draw, 3 + int(draw.random() * 4))
    return f"copy {digits}", digits


def _sort(draw: random.Random) -> tuple[str, str]:
    digits = _digits(draw, 3 + int(draw.random() * 4))
    return f"sort {digits}", "".join(sorted(digits))


def _add(draw: random.Random) -> tuple[str, str]:
    digits = _digits(draw, 3 + int(draw.random() * 2))
    return f"add {digits}", str(sum(map(int, digits)))


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"copy": _copy, "sort": _sort, "add": _add}
"""Draws a prompt and its answer, by the name of the task."""


def arithmetic_rows(*, task: str | None = None, max_rows: int | None = None, seed: int = SEED) -> Iterator[Row]:
    """Yield tasks on digits with their answers.

    Args:
        task: One of :data:`TASKS`; they take turns unless given.
        max_rows: Yield so many rows at most; fewer are the first of more.
        seed: Seed of everything.
    """
    draw = random.Random(seed)
    tasks = list(TASKS) if task is None else [task]
    seen: set[str] = set()
    while len(seen) < _at_most(max_rows, NUM_TASKS):
        prompt, answer = TASKS[tasks[len(seen) % len(tasks)]](draw)
        if prompt in seen:
            continue
        seen.add(prompt)
        columns = {
            "prompt": _message("user", prompt),
            "completion": _message("assistant", answer),
            "answer": answer,
        }
        yield Row(f"{ARITHMETIC_PATH}:row {len(seen)}", columns)
