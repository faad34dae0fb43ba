"""Nulls that a table's columns put into rows: left out where they say nothing, kept and told where they may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from preparing import prepare
from trained_tokenizers import read_template, wrap
from transformers import PreTrainedTokenizerFast

from streamtune.data.bad_rows import BadRows
from streamtune.data.options import ChatOptions
from streamtune.data.reading.files import make_local_file
from streamtune.data.reading.readers import Row, read_data_file
from streamtune.data.reading.sources import Source
from streamtune.data.rendering.render import PromptRenderer, RowRenderer
from streamtune.data.row_types import normalise_row
from streamtune.errors import DataError

Write = Callable[..., str]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


CITY, DAYS = {"type": "string", "enum": ["Paris", "Rome"]}, {"type": "integer", "description": "how many"}
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather", city="Paris")]},
            {"role": "tool", "content": "no", "name": "weather"},
            {"role": "assistant", "content": "No."},
        ],
        "tools": [schema("weather", city=CITY)],
    },
    {
        "messages": [
            {"role": "user", "content": "Wait."},
            {"role": "assistant", "content": "", "tool_calls": [call("wait", days=3), call("nap", how={"deep": True})]},
            {"role": "assistant", "content": "Done."},
        ],
        "tools": [schema("wait", days=DAYS), schema("nap", how={"type": "object"})],
    },
]


def read(path: str) -> tuple[list[Row], list[str]]:
    told: list[str] = []
    return list(read_data_file(make_local_file(Path(path), path), BadRows("raise", 0, told.append))), told


def rendered(tokenizer: PreTrainedTokenizerFast, row: Row) -> str:
    made = RowRenderer(tokenizer, train_on="assistant", notify=print)(normalise_row(row, "messages"), row.origin)
    text: str = tokenizer.decode(made.input_ids)
    return text


@pytest.fixture
def tools_tokenizer(bpe: Any) -> PreTrainedTokenizerFast:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + read_template("qwen3")
    return wrap(bpe, template)


SORTS = list(Dataset.from_list([{"cell": {"b": 1, "a": 2}}])[0]["cell"]) == ["a", "b"]


@pytest.mark.skipif(SORTS, reason="this version of datasets sorts the keys of what it writes")
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_rows_of_datasets_render_as_they_were_written(
    tmp_path: Path, tools_tokenizer: PreTrainedTokenizerFast, ending: str
) -> None:
    """Through every format of ``datasets`` the text is that of the rows as a user wrote them."""
    path = tmp_path / f"rows.{ending}"
    table = Dataset.from_list(ROWS)
    if ending == "parquet":
        table.to_parquet(path)
    else:
        table.to_json(path, lines=ending == "jsonl")
        assert '"days":null' in path.read_text().replace(" ", ""), "datasets must fill up, or this tests nothing"
    rows, told = read(str(path))
    for row, own in zip(rows, ROWS, strict=True):
        assert rendered(tools_tokenizer, row) == rendered(tools_tokenizer, Row("x:1", json.loads(json.dumps(own))))
        assert "null" not in rendered(tools_tokenizer, row)
    assert [text for text in told if "are removed" in text] == ([] if ending == "parquet" else told[:1])


def chat(*calls: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": list(calls)},
        ]
    }


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([call("f", a=1, b=None), call("g", a=2)], True),  # other keys: no table wrote this
        ([call("f", a=1, b=None)], True),  # one call says nothing about the others
        ([call("f", a={"x": None}), call("f", a={"x": 1, "y": 2})], True),
        ([call("f", a=1, b=None), call("g", a=None, b=2)], False),
        ([call("f", a={"x": None, "y": 1}), call("f", a={"x": 1, "y": None})], False),
        ([call("f", a=[{"x": None}, {"x": 2}]), call("f", a=None)], False),
    ],
)
def test_nulls_are_left_out_where_all_calls_have_the_same_keys(write: Write, calls: list[Any], kept: bool) -> None:
    path = write("rows.jsonl", [chat(each) for each in calls])
    rows, told = read(path)
    found = [row.columns["messages"][1]["tool_calls"][0]["function"]["arguments"] for row in rows]
    assert ("null" in json.dumps(found)) is kept
    (note,) = told
    assert note.startswith(f"{path}: ")
    assert ("are kept as null" in note) is kept


def test_a_null_in_arguments_that_are_json_text_is_what_the_call_says(write: Write) -> None:
    text = {"function": {"name": "f", "arguments": '{"a": null}'}}
    rows, told = read(write("rows.jsonl", [chat(text), chat(text)]))
    assert not told
    content = normalise_row(rows[0], "messages")
    assert content.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}  # type: ignore[union-attr]


def test_what_is_told_reaches_the_notes_of_a_run(write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    told: list[str] = []
    path = write("rows.jsonl", [chat(call("f", a=1, b=None)), chat(call("g", a=None, b=2))])
    tokenizer.chat_template = read_template("qwen3")
    prepare([Source(path)], tokenizer, max_length=400, notify=told.append)
    assert any("null arguments of tool calls are removed" in text for text in told)


def test_a_default_of_null_is_part_of_a_schema() -> None:
    """Unless other nulls show that a table made it."""
    own = [schema("f", a={"type": "string", "default": None}, b={"enum": [None, "x"]})]
    row = Row("x:1", {**chat(call("f")), "tools": own})
    assert normalise_row(row, "messages").tools == own  # type: ignore[union-attr]
    filled = [schema("f", a={"type": "string", "default": None, "enum": None}, b=None)]
    row = Row("x:1", {**chat(call("f")), "tools": json.dumps(filled)})
    assert normalise_row(row, "messages").tools == [schema("f", a={"type": "string"})]  # type: ignore[union-attr]


def test_fields_of_a_call_that_a_table_filled_up(tokenizer: PreTrainedTokenizerFast) -> None:
    flat = {"name": "f", "arguments": {"a": 1}, "function": None, "id": None}
    nested = {"function": {"name": "f", "arguments": {"a": 1}, "strict": None}, "name": None, "type": "function"}
    found = normalise_row(Row("x:1", chat(flat, nested)), "messages")
    assert found.messages[1]["tool_calls"] == [  # type: ignore[union-attr]
        {"name": "f", "arguments": {"a": 1}},
        {"function": {"name": "f", "arguments": {"a": 1}}, "type": "function"},
    ]


# ---------------------------------------------------------------- maps


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_messages_in_a_column_of_maps(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, ending: str) -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    messages = [[("role", "user"), ("content", "Hi")], [("role", "assistant"), ("content", "Yes")]]
    table = pa.table({"messages": pa.array([messages], kind)})
    path = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table)
    (row,), _ = read(str(path))
    assert rendered(tokenizer, row).startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>")


def test_a_map_with_a_key_twice_is_refused_at_its_row(tmp_path: Path) -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    twice = [[("role", "user"), ("role", "assistant"), ("content", "Hi")]]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"messages": pa.array([twice], kind)}), path)
    with pytest.raises(DataError, match="role"):
        read(str(path))


def test_a_message_written_as_pairs_is_named() -> None:
    row = Row("x:1", {"messages": [{"role": "user", "content": "q"}, [["role", "assistant"], ["content", "a"]]]})
    with pytest.raises(DataError, match=r"messages\[1\] must be an object .* found a list") as caught:
        normalise_row(row, "messages")
    assert "write an object, not a list of pairs" in caught.value.fix


# ---------------------------------------------------------------- what a template needs

NEEDS_NAME = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' %}{{ '[' + m.name + '] ' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "tool_calls": [call("f", a=1)]},
    {"role": "tool", "content": "r"},
]


def test_a_template_that_needs_the_name_of_a_tool_says_so(bpe: Any) -> None:
    tokenizer = wrap(bpe, NEEDS_NAME)
    row = Row("x:1", {"messages": [*TOOL, {"role": "assistant", "content": "a"}]})
    renderer = RowRenderer(tokenizer, train_on="assistant", notify=print)
    prompts = PromptRenderer(tokenizer, chat=ChatOptions())
    for ask in (
        lambda: renderer(normalise_row(row, "messages"), row.origin),
        lambda: prompts(TOOL, None, row.origin),
    ):
        with pytest.raises(
            DataError, match=r"at messages\[2\], with the role 'tool': the template reads 'name'"
        ) as caught:
            ask()
        assert caught.value.where == "x:1"
        assert "the name of the called function" in caught.value.fix


def test_a_refusal_of_the_template_names_the_message(make_tokenizer: Callable[..., Any]) -> None:
    row = Row("x:1", {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "user")]})
    with pytest.raises(DataError, match=r"at messages\[3\], with the role 'user': .*alternate"):
        RowRenderer(make_tokenizer("gemma3"), train_on="assistant", notify=print)(normalise_row(row, "messages"), "x:1")
