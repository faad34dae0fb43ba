"""Row types: what columns mean, and rows that mean nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from streamtune.data.preferences import normalise_preference
from streamtune.data.reading.readers import Row
from streamtune.data.row_types import (
    Content,
    Conversation,
    Document,
    PromptCompletion,
    detect_type,
    normalise_row,
    read_loss_weight,
)
from streamtune.errors import DataError

CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
TWICE = '[{"role": "assistant", "content": "right", "content": "wrong"}]'
SHAREGPT = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}


def normal(columns: dict[str, Any], row_type: str | None = None) -> Content:
    row = Row("data.jsonl:3", columns)
    return normalise_row(row, row_type or detect_type(row))


@pytest.mark.parametrize(
    ("columns", "row_type", "content"),
    [
        ({"messages": CHAT, "id": 7}, "messages", Conversation(CHAT)),
        ({"messages": CHAT, "text": "rendered", "prompt": "one"}, "messages", Conversation(CHAT)),
        ({"conversations": CHAT}, "messages", Conversation(CHAT)),
        ({"messages": json.dumps(CHAT)}, "messages", Conversation(CHAT)),
        ({"messages": CHAT, "tools": "[]"}, "messages", Conversation(CHAT)),
        ({"messages": CHAT, "tools": '[{"name": "f"}]'}, "messages", Conversation(CHAT, [{"name": "f"}])),
        ({"conversations": SHAREGPT}, "sharegpt", Conversation(CHAT)),
        (
            {"conversations": SHAREGPT, "system": "Be brief."},
            "sharegpt",
            Conversation([{"role": "system", "content": "Be brief."}, *CHAT]),
        ),
        ({"prompt": "one", "completion": "two"}, "prompt_completion", PromptCompletion("one", "two")),
        ({"prompt": "", "completion": "two"}, "prompt_completion", PromptCompletion("", "two")),
        ({"prompt": "[1, 2]", "completion": "[3]"}, "prompt_completion", PromptCompletion("[1, 2]", "[3]")),
        *(  # JSON that is no message
            ({"prompt": text, "completion": text}, "prompt_completion", PromptCompletion(text, text))
            for text in (
                '{"a": 1, "a": NaN}',
                '[{"role": "clerk", "name": "x"}]',
                '{"from": "a@b.c", "to": "d"}',
                '{"role"',
            )
        ),
        *(
            ({"prompt": prompt, "completion": completion}, "prompt_completion", Conversation(CHAT, first_answer=1))
            for prompt in (CHAT[:1], CHAT[0], json.dumps(CHAT[:1]), "one", SHAREGPT[:1], json.dumps(SHAREGPT[0]))
            for completion in (CHAT[1:], CHAT[1], json.dumps(CHAT[1:]), "two", CHAT, SHAREGPT)
            if not isinstance(prompt, str) or prompt != "one" or completion != "two"
        ),
        ({"instruction": "one", "output": "two", "text": "x"}, "alpaca", Conversation(CHAT)),
        (
            {"instruction": "add", "input": "1 2", "output": "3"},
            "alpaca",
            Conversation([{"role": "user", "content": "add\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        ),
        (
            {"instruction": "b", "output": "B", "system": "S", "history": [["a", "A"]]},
            "alpaca",
            Conversation(
                [
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "A"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "B"},
                ]
            ),
        ),
        ({"text": "one"}, "text", Document("one")),
    ],
)
def test_types(columns: dict[str, Any], row_type: str, content: Content) -> None:
    assert detect_type(Row("x:1", columns)) == row_type
    assert normal(columns) == content


@pytest.mark.parametrize(("separator", "asked"), [("\n", "add\n1 2"), ("\n\n", "add\n\n1 2"), (" ", "add 1 2")])
def test_the_separator_of_alpaca_rows(separator: str, asked: str) -> None:
    columns = {"instruction": "add", "input": "1 2", "output": "3"}
    content = normalise_row(Row("x:1", columns, separator), "alpaca")
    assert isinstance(content, Conversation)
    assert content.messages[0]["content"] == asked


SCHEMA = {"name": "f", "description": "adds", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}


@pytest.mark.parametrize(
    ("given", "wanted", "wrapped"),
    [
        ([TOOL], [TOOL], False),
        ([SCHEMA], [TOOL], True),
        (json.dumps([SCHEMA]), [TOOL], True),
        ([{"type": "function", **SCHEMA}, TOOL], [TOOL, TOOL], True),
        ([{"type": "web_search", **SCHEMA}], [{"type": "web_search", **SCHEMA}], False),
        ([{"name": "f"}], [{"name": "f"}], False),
        ([{**SCHEMA, "function": None}], [TOOL], True),
    ],
)
def test_a_schema_of_a_function_is_put_into_the_form_of_a_tool(given: Any, wanted: list[Any], wrapped: bool) -> None:
    content = normal({"messages": CHAT, "tools": given})
    assert isinstance(content, Conversation)
    assert (content.tools, content.wrapped_tools) == (wanted, wrapped)
    pair = normalise_preference(
        Row("x:1", {"prompt": CHAT[:1], "chosen": "a", "rejected": "b", "tools": given}), "preference"
    )
    assert pair.tools == wanted


def test_messages_are_put_in_the_form_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "result", "tool_call_id": "1"},
        {"role": "assistant", "reasoning_content": "hm", "content": "three"},
    ]
    content = normal({"messages": messages})
    assert isinstance(content, Conversation)
    assert content.messages[0] == {"role": "user", "content": "one two"}
    assert "content" not in content.messages[1]
    assert content.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert content.messages[2:] == messages[2:]


def test_sharegpt_speakers() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "g"},
    ]
    content = normal({"conversations": turns})
    assert isinstance(content, Conversation)
    assert [message["role"] for message in content.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert content.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    turns[2] |= {"reasoning_content": "hm", "train": False}
    content = normal({"conversations": turns})
    assert isinstance(content, Conversation)
    assert (content.messages[2]["reasoning_content"], content.messages[2]["weight"]) == ("hm", 0)


@pytest.mark.parametrize(
    ("columns", "row_type", "what"),
    [
        ({"body": "x", "title": "y"}, None, "cannot recognise the row type from the columns 'body', 'title'"),
        ({}, None, "no column"),
        ({"text": "x"}, "messages", "needs the column 'messages', found 'text'"),
        ({"prompt": "x"}, "prompt_completion", "needs the column 'completion', found 'prompt'"),
        ({"messages": []}, None, "'messages' is an empty list"),
        ({"messages": "hello"}, None, "must be a list of messages, found a string"),
        ({"messages": {"role": "user"}}, None, "must be a list of messages, found an object"),
        ({"messages": None}, None, "must be a list of messages, found null"),
        ({"messages": ["hello"]}, None, "messages[0] must be an object"),
        ({"messages": [CHAT[0], {"role": "asistant", "content": "x"}]}, None, "messages[1] has the unknown role 'asis"),
        ({"messages": [{"content": "x"}]}, None, "messages[0] has no 'role'"),
        ({"messages": CHAT[:1]}, None, "has no assistant message"),
        ({"messages": [CHAT[0], {"role": "assistant"}]}, None, "messages[1].content must be a string, found no value"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": 5}]}, None, "must be a string, found type int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]}, None, "no column 'images'"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, CHAT[1]]}, None, "must be a text part"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, None, "weight must be 0 (not trained) or 1"),
        ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": "f"}]}, None, "tool_calls must be a list"),
        ({"messages": [CHAT[0], {"role": "assistant", "tool_calls": ["f"]}]}, None, "with a function 'name'"),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            None,
            "the arguments are malformed JSON",
        ),
        ({"messages": CHAT, "tools": "search"}, None, "'tools' must be a list"),
        ({"messages": [{"role": "user", "content": "\ud83d"}, CHAT[1]]}, None, "lone surrogate"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, None, "unknown speaker 'alien'"),
        ({"conversations": [{"from": "human"}]}, None, "must be an object with 'from' and 'value'"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, None, "must be a tool call in JSON"),
        ({"prompt": 1, "completion": "x"}, None, "'prompt' must be a string or a list of messages, found a number"),
        (
            {"prompt": "one", "completion": None},
            None,
            "'completion' must be a string or a list of messages, found null",
        ),
        ({"prompt": " ", "completion": CHAT[1:]}, None, "'prompt' is empty or only whitespace"),
        ({"prompt": CHAT[:1], "completion": CHAT[:1]}, None, "has no assistant message"),
        ({"messages": TWICE}, None, "'messages' is JSON with the key 'content' twice in one object"),
        ({"messages": '[{"role": "user", "content": NaN}]'}, None, "malformed JSON: JSON does not allow NaN"),
        ({"prompt": CHAT[:1], "completion": TWICE}, None, "'completion' is JSON with the key 'content' twice"),
        (
            {"messages": CHAT, "tools": '[{"name": "f", "name": "g"}]'},
            None,
            "'tools' is JSON with the key 'name' twice",
        ),
        ({"messages": [CHAT[0], call('{"a": 1, "a": 2}')]}, None, "the arguments are JSON with the key 'a' twice"),
        ({"messages": [CHAT[0], call('{"a": Infinity}')]}, None, "JSON does not allow Infinity"),
        ({"messages": [CHAT[0], call("[" * 100_000)]}, None, "the arguments are JSON that is nested too deeply"),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "name": "g"}'}]},
            None,
            "conversations[0].value must be a tool call in JSON, but is JSON with the key 'name' twice",
        ),
        ({"instruction": "a", "output": ["b"]}, None, "'output' must be a string"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, None, "'history' must be a list"),
        ({"text": ""}, None, "'text' is an empty string"),
        ({"text": ["a"]}, None, "'text' must be a string, found type list"),
    ],
)
def test_wrong_rows(columns: dict[str, Any], row_type: str | None, what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        normal(columns, row_type)
    assert caught.value.where == "data.jsonl:3"


@pytest.mark.parametrize(
    ("value", "weight"), [(None, 1.0), ("", 1.0), (2, 2.0), ("0.5", 0.5), (" 3 ", 3.0), (1e-10, 1e-10), (1e10, 1e10)]
)
def test_loss_weights(value: Any, weight: float) -> None:
    assert read_loss_weight(Row("x:1", {"text": "one", "loss_weight": value})) == weight


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("half", "must be a number above 0, found the text 'half'"),
        ("0", "must be a number above 0, found the text '0'"),
        (float("inf"), "must be a number above 0, found inf"),
        (10**400, "must be a number above 0, found 1000"),
        ([1], "must be a number above 0, found [1]"),
        (1e39, "must be from 1e-10 to 1e+10, found 1e+39"),
        (1e-46, "must be from 1e-10 to 1e+10, found 1e-46"),
    ],
)
def test_wrong_loss_weights(value: Any, what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)):
        read_loss_weight(Row("x:1", {"text": "one", "loss_weight": value}))


def test_hints() -> None:
    with pytest.raises(DataError) as caught:
        normal({"messages": [{"role": "asistant", "content": "x"}]})
    assert "did you mean 'assistant'?" in caught.value.fix
    with pytest.raises(DataError) as caught:
        normal({"text": "x"}, "messages")
    assert "this row looks like 'text'" in caught.value.fix
    with pytest.raises(DataError) as caught:
        normal({"mesages": CHAT}, "messages")
    assert "did you mean 'mesages'?" in caught.value.fix
