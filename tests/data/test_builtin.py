"""The built-in sets: their rule, their answers, and that they are the same on every machine."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from preparing import prepare, prepare_preferences, prepare_prompts, prepare_unpaired
from transformers import PreTrainedTokenizerFast

from streamtune.data import Source, iter_texts
from streamtune.data.reading.builtin import (
    ANIMALS,
    COLOURS,
    KEY_COLOURS,
    LONG_EVERY,
    LONG_FROM,
    LONGEST,
    MOST_LINES,
    NUM_PREFERENCES,
    NUM_TASKS,
    PLACES,
    POLITE,
    SHORT_LINES,
    TASKS,
    THINGS,
    arithmetic_rows,
    follows_preference_rule,
    passkey_rows,
    preference_rows,
    stdlib_rows,
)
from streamtune.data.reading.pages import CELL, DIGITS, DOT, PAINTS, SHADE, page_rows
from streamtune.data.reading.readers import Row
from streamtune.data.reading.sources import read_rows
from streamtune.errors import DataError


def said(row: Row, column: str) -> str:
    (message,) = row.columns[column]
    return str(message["content"])


def digest(rows: Iterable[Row]) -> str:
    return hashlib.sha256("".join(json.dumps(row.columns, sort_keys=True) for row in rows).encode()).hexdigest()[:16]


def test_the_chosen_answer_keeps_the_rule_and_the_rejected_one_breaks_it() -> None:
    rows = list(preference_rows())
    assert len(rows) == NUM_PREFERENCES
    assert len({said(row, "prompt") for row in rows}) == NUM_PREFERENCES, "no prompt occurs twice"
    for row in rows:
        assert follows_preference_rule(said(row, "prompt"), said(row, "chosen"))
        assert not follows_preference_rule(said(row, "prompt"), said(row, "rejected"))
    words = {word for row in rows for name in ("prompt", "chosen", "rejected") for word in said(row, name).split()}
    assert len(words) < 100


def test_two_thirds_of_the_pairs_can_only_be_judged_by_reading_the_prompt() -> None:
    """Their rejected answer would be the right one to another prompt."""
    questions = [f"Where is the {colour} {thing}?" for colour in COLOURS for thing in THINGS]
    right_elsewhere = {
        form.format(thing=f"{colour} {thing}", place=place)
        for form in POLITE
        for colour in COLOURS
        for thing in THINGS
        for place in PLACES
    }
    assert all(
        any(follows_preference_rule(question, text) for question in questions) for text in list(right_elsewhere)[::100]
    )
    rejected = [said(row, "rejected") for row in preference_rows()]
    assert sum(text in right_elsewhere for text in rejected) == pytest.approx(len(rejected) * 2 / 3, abs=1)


def test_the_rule() -> None:
    asked = "I am in the hall. Where is the red lamp?"
    assert follows_preference_rule(asked, "Sure, the red lamp is in the attic.")
    assert not follows_preference_rule(asked, "Sure, the blue lamp is in the attic.")
    assert not follows_preference_rule(asked, "Sure, the red lamp is in the attic. Or not.")
    assert not follows_preference_rule(asked, "Go and find the red lamp.")
    assert not follows_preference_rule("Who are you?", "Sure, the red lamp is in the attic.")


def test_tasks_have_the_right_answer() -> None:
    rows = list(arithmetic_rows())
    assert len(rows) == len({said(row, "prompt") for row in rows}) == NUM_TASKS
    for row in rows:
        task, digits = said(row, "prompt").split()
        wanted = {"copy": digits, "sort": "".join(sorted(digits)), "add": str(sum(map(int, digits)))}[task]
        assert row.columns["answer"] == said(row, "completion") == wanted
    assert Counter(said(row, "prompt").split()[0] for row in rows) == dict.fromkeys(TASKS, NUM_TASKS // 3)


@pytest.mark.parametrize("task", TASKS)
def test_one_task(task: str) -> None:
    rows = list(read_rows(Source("demo-arithmetic", name=task, max_rows=50)))
    assert len(rows) == 50
    assert all(said(row, "prompt").startswith(f"{task} ") for row in rows)


def test_a_pass_key_is_in_one_line_of_a_log_that_grows() -> None:
    rows = list(passkey_rows(max_rows=400))
    lengths = []
    for row in rows:
        asked, answer = (message["content"] for message in row.columns["messages"])
        log, question = asked.split("\n\n")
        (line,) = [line for line in log.split("\n") if "pass key" in line]
        key = line.removeprefix("vault: the pass key is ")
        assert (question, answer) == ("What is the pass key?", f"The pass key is {key}.")
        colour, animal = key.split()
        assert colour in KEY_COLOURS
        assert animal in ANIMALS
        assert not any(word in each for each in log.split("\n") if each != line for word in (colour, animal))
        lengths.append(log.count("\n"))
    assert max(lengths[:239]) < SHORT_LINES
    assert 0.6 * MOST_LINES < max(lengths) == max(lengths[-40:]) <= MOST_LINES
    assert digest(passkey_rows(max_rows=400)) == digest(rows) == "991489d621fc7869"


def test_the_same_rows_everywhere() -> None:
    assert (digest(preference_rows()), digest(arithmetic_rows())) == ("30ca45551565b836", "925661449f42a71b")
    assert digest(preference_rows(max_rows=9)) == digest(list(preference_rows())[:9])
    assert digest(arithmetic_rows(max_rows=9)) == digest(list(arithmetic_rows())[:9])
    assert digest(preference_rows(seed=1)) != digest(preference_rows())


def test_a_page_shows_what_its_answer_says() -> None:
    rows = list(page_rows(max_rows=60))
    seen, pixels = set(), hashlib.sha256()
    for row in rows:
        ((image,), (_, answer)) = row.columns["images"], row.columns["messages"]
        page = np.array(Image.open(io.BytesIO(image["bytes"])).convert("RGB"))
        pixels.update(page.tobytes())
        _, _, digit, _, colour = answer["content"].rstrip(".").split()
        painted = np.argwhere((page != 255).any(axis=2))
        assert len(painted) == DIGITS[int(digit)].count("1") * DOT**2
        assert np.abs(page[tuple(painted[0])].astype(int) - PAINTS[colour]).max() <= SHADE
        seen.add((digit, colour, tuple(painted.min(axis=0) // CELL)))
    assert len(seen) > 50
    assert pixels.hexdigest()[:16] == "a15d85be3ba99bfe"


def test_every_way_to_read_them(tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    preferences, tasks = [Source("demo-preferences", max_rows=60)], [Source("demo-arithmetic", max_rows=60)]
    pairs = prepare_preferences(preferences, tokenizer, max_length=200, val_size=10, notify=told.append)
    assert (len(pairs.training), len(pairs.validation)) == (50, 10)
    assert len(prepare_unpaired(preferences, tokenizer, max_length=200).training) == 60
    prompts = prepare_prompts(tasks, tokenizer, max_prompt_length=64, notify=told.append)
    taught = prepare(tasks, tokenizer, max_length=64, notify=told.append)
    for prompt, example in zip(prompts.training, taught.training, strict=True):
        asked = np.flatnonzero(np.array(example.labels) != -100)[0]
        assert list(example.input_ids[:asked]) == prompt.input_ids, "what was taught is what is asked"
    assert told == [], "nobody needs to be told what the rows of a built-in set look like"
    assert len(list(iter_texts([*preferences, *tasks]))) == 60 * 3 + 60 * 2


@pytest.mark.parametrize(
    ("source", "what", "fix"),
    [
        (Source("demo-arithmetic", name="srot"), "has no configuration 'srot'", "did you mean 'sort'?"),
        (Source("demo-arithmetic", name="divide"), "has no configuration 'divide'", "use copy, sort, add"),
        (Source("demo-preferences", name="x"), "has no configuration 'x'", "remove 'name'"),
        (Source("demo-preferences", split="test"), "has only the split 'train', found 'test'", "val_size"),
    ],
)
def test_what_they_do_not_have(source: Source, what: str, fix: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        list(read_rows(source))
    assert fix in caught.value.fix


# ------------------------------------------------------------------ The corpus built from the interpreter's own library

MODULE = '''"""A module.

More about it.
"""
raise RuntimeError("a module must not be executed")
\x0c
class Box(list):
    """A box
    with things."""

    @property
    def size(self) -> int:
        """How many things there are."""
        # a comment that makes the method long enough to be worth a row of its own
        return len(self)

def undocumented():
    return 1

async def open_box(box, *, key=None):
    """Open the box.

    With its key.
    """
    if key is None:
        raise ValueError("a box is opened with a key, there is none")
    return box
'''


def build(root: Path) -> dict[str, tuple[str, str]]:
    rows = stdlib_rows(library_folder=root)
    return {row.origin: tuple(message["content"] for message in row.columns["messages"]) for row in rows}


def test_rows_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/boxes.py").write_text(MODULE)
    rows = build(tmp_path)
    assert sorted(rows) == ["stdlib:pack/boxes.py:11", "stdlib:pack/boxes.py:20", "stdlib:pack/boxes.py:7"]
    instruction, source = rows["stdlib:pack/boxes.py:11"]
    assert instruction == (
        "Write the method `Box.size` of the module `pack.boxes`.\n\ndef size(self) -> int\n\nHow many things there are."
    )
    assert source.startswith("@property\ndef size(self) -> int:\n    ")
    assert source.endswith("    return len(self)\n")
    instruction, _ = rows["stdlib:pack/boxes.py:20"]
    assert "function `open_box`" in instruction
    assert "async def open_box(box, *, key=None)\n\nOpen the box.\n\nWith its key." in instruction
    assert "class Box(list)\n\nA box\nwith things." in rows["stdlib:pack/boxes.py:7"][0]


def test_long_rows_are_whole_modules(tmp_path: Path) -> None:
    long = MODULE + "# padding\n" * (LONG_FROM // 10)
    (tmp_path / "long.py").write_text(long)
    (tmp_path / "longer.py").write_text(long + "# padding\n" * (LONGEST // 10))
    rows = build(tmp_path)
    assert rows["stdlib:long.py:1"] == ("Write the module `long`.\n\nA module.", long)
    assert "stdlib:longer.py:1" not in rows


def test_what_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "coded.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    (tmp_path / "wrong.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/boxes.py").write_text(MODULE)
    assert build(tmp_path) == {}


def test_the_real_library() -> None:
    rows = list(stdlib_rows(max_rows=120))
    assert rows == list(stdlib_rows(max_rows=120))
    assert len(rows) == 120
    contents = [row.columns["messages"][1]["content"] for row in rows]
    instructions = [row.columns["messages"][0]["content"] for row in rows]
    assert sum(text.startswith("Write the module") for text in instructions) == 120 // LONG_EVERY
    assert all(len(text) <= LONGEST for text in contents)
    assert len({row.origin.split(":")[1] for row in rows}) > 20, "a capped corpus is a mix of modules"
    assert not any("/test/" in row.origin or "site-packages" in row.origin for row in rows)
    assert all(message["role"] in ("user", "assistant") for row in rows for message in row.columns["messages"])


def test_nothing_is_imported() -> None:
    before = set(sys.modules)
    list(stdlib_rows(max_rows=10))
    assert not {name for name in set(sys.modules) - before if name in ("antigravity", "this", "turtle")}
