"""Ids and trained tokens of chats in nine families' formats, as they were looked at and written down.

``python tests/data/test_golden_chats.py`` writes them anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixed_tokenizer import SPECIAL, fixed_tokenizer

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import normalise_row
from streamtune.data.templates import fix_template_date
from streamtune.errors import DataError

GOLDEN = Path(__file__).with_name("golden_chats.json")
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]

ROWS: dict[str, dict[str, Any]] = {
    "system": {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "The answer is 1."},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "\n 2 \n"},
        ],
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": "1", "thinking": "first thought"},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": "2", "thinking": "second thought"},
        ]
    },
    "tools": {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "Rain in Paris?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "call00001"},
            {"role": "assistant", "content": "No."},
        ],
    },
}
WITHOUT_TOOLS = ("gemma3", "phi4", "deepseek_r1")
"""Formats whose templates know no tools."""


@pytest.fixture(autouse=True)
def on_one_day() -> Iterator[None]:
    fix_template_date("2025-01-31")
    yield
    fix_template_date(None)


def rendered(name: str, row: str, reasoning: str) -> dict[str, Any]:
    tokenizer = fixed_tokenizer(name)
    render = RowRenderer(
        tokenizer, train_on="assistant", notify=lambda text: None, chat=ChatOptions(reasoning=reasoning)
    )
    columns = json.loads(json.dumps(ROWS[row]))
    made = render(normalise_row(Row("x:1", columns), "messages"), "x:1")
    pieces: list[list[int]] = [[]]
    for label in made.labels:
        if label != IGNORE_INDEX:
            pieces[-1].append(label)
        elif pieces[-1]:
            pieces.append([])
    return {
        "text": tokenizer.decode(made.input_ids),
        "trained": [tokenizer.decode(piece) for piece in pieces if piece],
        "ids": " ".join(map(str, made.input_ids)),
        "masked": " ".join(str(index) for index, label in enumerate(made.labels) if label == IGNORE_INDEX),
    }


CASES = [
    (name, row, reasoning)
    for name in SPECIAL
    for row in ROWS
    for reasoning in (("template", "keep") if row == "reasoning" else ("template",))
    if row != "tools" or name not in WITHOUT_TOOLS
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ids_and_masks_are_those_written_down(case: tuple[str, str, str]) -> None:
    assert rendered(*case) == json.loads(GOLDEN.read_text(encoding="utf-8"))["-".join(case)]


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_formats_without_tools_refuse_calls_they_do_not_print(name: str) -> None:
    with pytest.raises(DataError, match=r"omits 'weather'|does not print the text of the message|roles must alternate"):
        rendered(name, "tools", "template")


if __name__ == "__main__":
    fix_template_date("2025-01-31")
    GOLDEN.write_text(
        json.dumps({"-".join(case): rendered(*case) for case in CASES}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
