"""Rows rendered in several processes, and what the process of templates imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preparing import prepare, prepare_preferences, prepare_prompts
from transformers import PreTrainedTokenizerFast

from streamtune.data import ChatOptions, Source
from streamtune.data.templates import WORKER, fix_template_date
from streamtune.errors import DataError, RunError
from streamtune.models.tokenizer import train_tokenizer

TEXTS = [f"the {n} quick brown foxes jump over {n * n} lazy dogs" for n in range(400)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=300)


def write(path: Path, rows: list[Any]) -> Source:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Source(str(path), where="recipe.yaml:1")


def chat(number: int) -> dict[str, Any]:
    answer = "" if number % 50 == 7 else TEXTS[number][::-1]
    thinking = {"reasoning_content": "because"} if number % 9 == 0 else {}
    return {
        "messages": [{"role": "user", "content": TEXTS[number]}, {"role": "assistant", "content": answer, **thinking}]
    }


def preference(number: int) -> dict[str, Any]:
    return {"prompt": TEXTS[number], "chosen": "yes" * (number % 7 + 1), "rejected": "no", "unread": number}


def prompt(number: int) -> dict[str, Any]:
    return {"prompt": TEXTS[number], "answer": number}


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "rows": (prepare, {"max_length": 90, "overlength": "drop", "chat": ChatOptions(on_empty="drop")}, chat),
    "trees": (prepare_preferences, {"max_length": 200}, preference),
    "prompts": (prepare_prompts, {"max_prompt_length": 200}, prompt),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("rows")
def test_the_same_rows_counts_and_messages(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    function, options, make = KINDS[kind]
    rows: list[Any] = [make(number) for number in range(len(TEXTS))]
    sources = [
        write(tmp_path / "first.jsonl", [*rows[:150], "{broken", *rows[150:300]]),
        write(tmp_path / "empty.jsonl", ["[1]"]),
        write(tmp_path / "last.jsonl", [{"nothing": 1}, *rows[300:]]),
        write(tmp_path / "last.jsonl", [{"nothing": 1}, *rows[300:]]),
    ]
    found, told = [], []
    for processes in (1, 2):
        notes: list[str] = []
        options = {**options, "on_bad_row": "skip", "processes": processes}
        found.append(function(sources, tokenizer, **options, notify=notes.append))
        told.append(notes)
    assert sorted(told[0]) == sorted(told[1])
    assert found[0].report == found[1].report
    assert [source.rows for source in found[0].report.sources][1] == 0
    assert found[0].fingerprint == found[1].fingerprint
    assert sorted(map(str, found[0].bad_rows)) == sorted(map(str, found[1].bad_rows))
    for name, value in vars(found[0].measured).items():
        assert np.array_equal(value, getattr(found[1].measured, name)), name
    assert [row.origin for row in found[0].training] == [row.origin for row in found[1].training]


@pytest.mark.full
def test_every_process_prints_the_date_of_the_run(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}" + str(tokenizer.chat_template)
    source = write(tmp_path / "rows.jsonl", [chat(number) for number in range(7)])
    try:
        fix_template_date("2001-02-03")
        one, two = (prepare([source], tokenizer, max_length=900, processes=processes) for processes in (1, 2))
    finally:
        fix_template_date(None)
    assert one.fingerprint == two.fingerprint


@pytest.mark.full
def test_errors_of_rows_are_those_of_one_process(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write(tmp_path / "rows.jsonl", [chat(number) for number in range(30)])
    texts = []
    for processes in (1, 2):
        with pytest.raises(DataError) as error:
            prepare([source], tokenizer, max_length=900, processes=processes)  # an answer is empty
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.mark.full
def test_a_process_that_is_killed_is_one_clear_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hello " * 2000}, {"role": "assistant", "content": "yes"}]}
    ] * 4000
    source = write(tmp_path / "rows.jsonl", rows)

    def kill() -> None:
        me = os.getpid()
        while True:
            time.sleep(0.05)
            for process in Path("/proc").iterdir():
                try:
                    words = (process / "cmdline").read_bytes()
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, ValueError, IndexError):
                    continue
                if parent == me and b"spawn_main" in words:
                    os.kill(int(process.name), signal.SIGKILL)
                    return

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RunError, match="a process that prepares rows ended"):
        prepare([source], tokenizer, max_length=10**6, processes=2)


# -------- The process that renders chat templates imports the rendering of transformers, and all of it where that fails

PROGRAM = """
import importlib.util, runpy, sys
{first}
library = runpy.run_path(sys.argv[1], run_name="worker")["_import_library"]()
chat = [{{"role": "user", "content": "cat"}}]
texts, _ = library.render_jinja_template([chat], chat_template="{{{{ messages[0].content }}}}")
print(texts[0], getattr(sys.modules["transformers"], "__version__", "no version"))
"""
REFUSE = """
spec = importlib.util.module_from_spec
def refuse(found):
    if found.name == "transformers":
        raise AttributeError("a module that is set up otherwise")
    return spec(found)
importlib.util.module_from_spec = refuse
"""


@pytest.mark.parametrize(("first", "is_whole"), [("", False), (REFUSE, True)], ids=["alone", "refused"])
def test_library(first: str, is_whole: bool) -> None:
    program = [sys.executable, "-c", PROGRAM.format(first=first), str(WORKER)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    word, version = done.stdout.split(maxsplit=1)
    assert word == "cat"
    assert (version.strip() != "no version") == is_whole
