"""The built-in sets: their rule, their answers, and that they are the same on every machine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from preparing import prepare, prepare_preferences, prepare_prompts, prepare_unpaired
from transformers import PreTrainedTokenizerFast

from streamtune.data import Source, iter_texts
from streamtune.data.reading.builtin import (
    ANIMALS,
    COLOURS,
    KEY_COLOURS,
    MOST_LINES,
    NUM_PREFERENCES,
    NUM_TASKS,
    PLACES,
    POLITE,
    SHORT_LINES,
    TASKS,
    THINGS,
    arithmetic_rows,
    keeps_the_rule,
    passkey_rows,
    preference_rows,
)
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
        assert keeps_the_rule(said(row, "prompt"), said(row, "chosen"))
        assert not keeps_the_rule(said(row, "prompt"), said(row, "rejected"))
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
    assert all(any(keeps_the_rule(question, text) for question in questions) for text in list(right_elsewhere)[::100])
    rejected = [said(row, "rejected") for row in preference_rows()]
    assert sum(text in right_elsewhere for text in rejected) == pytest.approx(len(rejected) * 2 / 3, abs=1)


def test_the_rule() -> None:
    asked = "I am in the hall. Where is the red lamp?"
    assert keeps_the_rule(asked, "Sure, the red lamp is in the attic.")
    assert not keeps_the_rule(asked, "Sure, the blue lamp is in the attic.")
    assert not keeps_the_rule(asked, "Sure, the red lamp is in the attic. Or not.")
    assert not keeps_the_rule(asked, "Go and find the red lamp.")
    assert not keeps_the_rule("Who are you?", "Sure, the red lamp is in the attic.")


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


def test_every_way_to_read_them(tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    preferences, tasks = [Source("demo-preferences", max_rows=60)], [Source("demo-arithmetic", max_rows=60)]
    pairs = prepare_preferences(preferences, tokenizer, max_length=200, val_size=10, notify=told.append)
    assert (len(pairs.train), len(pairs.validation)) == (50, 10)
    assert len(prepare_unpaired(preferences, tokenizer, max_length=200).train) == 60
    prompts = prepare_prompts(tasks, tokenizer, max_prompt_length=64, notify=told.append)
    taught = prepare(tasks, tokenizer, max_length=64, notify=told.append)
    for prompt, example in zip(prompts.train, taught.train, strict=True):
        asked = np.flatnonzero(np.array(example.labels) != -100)[0]
        assert list(example.input_ids[:asked]) == prompt.input_ids, "what was taught is what is asked"
    assert told == [], "nobody needs to be told what the rows of a built-in set look like"
    assert len(list(iter_texts([*preferences, *tasks]))) == 60 * 3 + 60 * 2


@pytest.mark.parametrize(
    ("source", "what", "mend"),
    [
        (Source("demo-arithmetic", name="srot"), "has no part 'srot'", "did you mean 'sort'?"),
        (Source("demo-arithmetic", name="divide"), "has no part 'divide'", "use copy, sort, add"),
        (Source("demo-preferences", name="x"), "has no part 'x'", "leave out 'name'"),
        (Source("demo-preferences", split="test"), "has no split 'test'", "val_size"),
    ],
)
def test_what_they_do_not_have(source: Source, what: str, mend: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        list(read_rows(source))
    assert mend in caught.value.mend
