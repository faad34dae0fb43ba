"""Files of prompts: text, JSON, JSON lines; what is none is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import DataError
from streamtune.programs.generate.prompt_files import ToolPrompt, read_prompts

ASK = {"role": "user", "content": "2 + 2?"}
SAY = {"role": "assistant", "content": "4"}


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.txt", "some text\n", ["some text\n"]),
        ("a.md", '{"no": "json"}', ['{"no": "json"}']),
        ("a.json", [ASK], [[ASK]]),
        ("a.json", [ASK, SAY], [[ASK]]),
        ("a.json", {"messages": [ASK, SAY, ASK]}, [[ASK, SAY, ASK]]),
        ("a.json", {"prompt": "text"}, ["text"]),
        ("a.json", [{"prompt": "one"}, {"messages": [ASK]}, "three"], ["one", [ASK], "three"]),
        ("a.json", ASK, [[ASK]]),
        ("a.jsonl", '{"prompt": "one"}\n\n"two"\n', ["one", "two"]),
        ("a.jsonl", '{"prompt": "a\u2028b\x85c"}\r\n"two\u2029"', ["a\u2028b\x85c", "two\u2029"]),
    ],
)
def test_what_a_file_asks(name: str, content: Any, want: list[Any], tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path, name, content)) == want


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}


def test_a_row_is_asked_as_it_is_trained(tmp_path: Path) -> None:
    """System, tools, variables, calls without content, flags and turns of sharegpt."""
    row = {
        "messages": [{**ASK, "train": False}, CALL, {"role": "tool", "content": "r", "name": "f"}, SAY],
        "system": "Be brief.",
        "tools": json.dumps(TOOLS),
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    other = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
    first, second = read_prompts(written(tmp_path, "a.json", [row, other]))
    assert first == ToolPrompt(
        [
            {"role": "system", "content": "Be brief."},
            ASK,
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "r", "name": "f"},
        ],
        TOOLS,
        {"enable_thinking": False},
    )
    assert second == [ASK]


def test_a_text_with_a_system_message_or_tools_is_a_user_message(tmp_path: Path) -> None:
    lines = [{"prompt": "a", "system": "Be brief."}, {"prompt": "b", "tools": TOOLS}, {"prompt": "c", "tools": None}]
    found = read_prompts(written(tmp_path, "a.json", lines))
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}
    assert found == [[system, asked], ToolPrompt([{"role": "user", "content": "b"}], TOOLS), "c"]


def test_messages_that_training_refuses_are_refused(tmp_path: Path) -> None:
    for messages, text in (
        ([{"role": "usr", "content": "x"}], "unknown role 'usr'"),
        ([{"role": "user"}], "content must be a string, found no value"),
    ):
        with pytest.raises(DataError, match=text):
            read_prompts(written(tmp_path, "a.json", {"messages": messages}))


@pytest.mark.parametrize(
    ("name", "content", "text", "where"),
    [
        ("a.txt", " \n", "is empty", "--file"),
        ("a.json", "{", "invalid JSON", "a.json"),
        ("a.jsonl", '"one"\n{"rows": 3}\n', "needs 'messages' or 'prompt'", "a.jsonl:2"),
        ("a.json", {"messages": [SAY]}, "has nothing to answer", "a.json: messages"),
        ("a.json", [], "expected text or a list of messages", "a.json"),
        ("a.json", [3], "expected text or a list of messages", "a.json[0]"),
        ("a.json", [{"prompt": ""}], "empty", "a.json[0]: prompt"),
    ],
)
def test_what_asks_nothing(name: str, content: Any, text: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text) as error:
        read_prompts(written(tmp_path, name, content))
    assert error.value.where.endswith(where)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts(tmp_path / "bytes.txt")
    with pytest.raises(DataError, match="cannot read"):
        read_prompts(tmp_path / "none.txt")
