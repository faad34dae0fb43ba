"""From files of prompts to token ids and the columns that reward functions take."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from preparing import prepare_prompts
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from streamtune.data import PreparedPrompts, Source, gather_columns
from streamtune.errors import ArgumentError, DataError

Write = Callable[..., str]
Prepared = Callable[..., PreparedPrompts]

ASKED = [{"role": "user", "content": "one?"}]
ANSWER = {"role": "assistant", "content": "1"}


@pytest.fixture
def prepared(tokenizer: PreTrainedTokenizerFast) -> Prepared:
    def run(*paths: str, type: str = "auto", **options: Any) -> PreparedPrompts:
        sources = [Source(path, type=type) for path in paths]
        return prepare_prompts(sources, tokenizer, **{"max_prompt_length": 64, **options})

    return run


def test_prompts(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = write("texts.jsonl", [{"prompt": "The quick", "answer": "4", "level": 2}])
    chats = write("chats.jsonl", [{"prompt": ASKED, "answer": 7, "completion": "c"}])
    data = prepared(texts, chats)
    text, chat = data.training
    assert text.input_ids == tokenizer("The quick")["input_ids"]
    assert tokenizer.decode(chat.input_ids) == "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    assert (text.prompt, chat.prompt) == ("The quick", ASKED)
    assert gather_columns([text, chat]) == {"answer": ["4", 7], "level": [2, None], "completion": [None, "c"]}
    assert [prompt.origin for prompt in data.training] == [f"{texts}:1", f"{chats}:1"]
    assert data.training[1:][0] == chat
    assert data.report.describe().startswith("2 rows; 2 to train on; prompts ")


def test_conversations_lose_their_last_answer_only_where_the_type_says_so(prepared: Prepared, write: Write) -> None:
    messages = [*ASKED, ANSWER, {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    path = write("a.jsonl", [{"messages": messages}, {"messages": messages[:3]}])
    data = prepared(path)
    assert [prompt.prompt for prompt in data.training] == [messages[:3]] * 2
    assert data.training[0].columns == {"messages": messages}, "the answer that was taken off is there for rewards"
    assert data.training[0].input_ids == data.training[1].input_ids
    path = write("b.jsonl", [{"prompt": messages}])
    with pytest.raises(DataError, match="'prompt' ends with an assistant message, so there is nothing to") as caught:
        prepared(path)
    assert caught.value.where == f"{path}:1"
    assert "type: messages" in caught.value.fix


def test_tools_reach_the_template(make_tokenizer: Callable[..., Any], write: Write) -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = "{{ tools[0]['function']['name'] }}: {{ messages[0]['content'] }}"
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    path = write("a.jsonl", [{"prompt": ASKED, "tools": tools}])
    (prompt,) = prepare_prompts([Source(path)], tokenizer, max_prompt_length=64).training
    assert tokenizer.decode(prompt.input_ids) == "weather: one?"
    assert prompt.columns == {"tools": tools}


def test_an_end_token_behind_a_text_is_taken_off(make_tokenizer: Callable[..., Any], write: Write) -> None:
    tokenizer = make_tokenizer(None)
    plain = tokenizer("The quick")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|im_end|>", special_tokens=[("<|begin_of_text|>", 3), ("<|im_end|>", 2)]
    )
    (prompt,) = prepare_prompts(
        [Source(write("a.jsonl", [{"prompt": "The quick"}]))], tokenizer, max_prompt_length=9
    ).training
    assert prompt.input_ids == [3, *plain]


def test_columns_come_back_as_they_were(prepared: Prepared, tmp_path: Path) -> None:
    columns = {"when": datetime.date(2024, 5, 17), "raw": b"\x00\xff", "tests": [{"in": "1", "out": "2"}], "x": 0.1}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "one?", **columns}]), path)
    (prompt,) = prepared(str(path)).training
    assert prompt.columns == columns


def test_lengths(prepared: Prepared, write: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write("a.jsonl", [{"prompt": "b" * 5 + "a" * n} for n in (5, 10, 20)])
    with pytest.raises(DataError, match="1 prompt has more than max_prompt_length = 20 tokens; the longest has 25"):
        prepared(path, max_prompt_length=20)
    told: list[str] = []
    data = prepared(path, max_prompt_length=20, overlength="truncate", notify=told.append)
    assert tokenizer.decode(data.training[2].input_ids) == "a" * 20
    assert told[-1] == "1 of 3 prompts exceed 20 tokens: truncated; 5 tokens lost"
    assert (data.report.truncated, data.report.tokens, data.report.length_percentiles["max"]) == (1, 45, 25)
    data = prepared(path, max_prompt_length=21, overlength="truncate", truncate_side="middle")
    assert tokenizer.decode(data.training[2].input_ids) == "b" * 5 + "a" * 16
    assert len(data.training[2].input_ids) == 21
    data = prepared(path, max_prompt_length=20, overlength="drop")
    assert (data.report.kept, data.report.dropped) == (2, 1)
    with pytest.raises(DataError, match="no prompt is left: all 3 were dropped"):
        prepared(path, max_prompt_length=2, overlength="drop")
    with pytest.raises(ArgumentError, match="unknown truncate_side 'right'"):
        prepared(path, overlength="truncate", truncate_side="right")
    with pytest.raises(ArgumentError, match="unknown overlength 'split'"):
        prepared(path, overlength="split")


def test_held_out_prompts_are_not_trained_on(prepared: Prepared, write: Write) -> None:
    path = write("a.jsonl", [{"prompt": f"{n % 10}?", "answer": n} for n in range(40)])
    data = prepared(path, val_size=0.2)
    train, held_out = ({prompt.prompt for prompt in part} for part in (data.training, data.validation))  # type: ignore[misc]
    assert (len(data.training), len(data.validation)) == (32, 8)
    assert not train & held_out


def test_fingerprint_follows_prompts_and_columns(prepared: Prepared, write: Write) -> None:
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(10)]
    first = prepared(write("a.jsonl", rows), val_size=2).fingerprint
    assert prepared(write("b.jsonl", rows), val_size=2).fingerprint == first
    others = [
        prepared(write("c.jsonl", [{**row, "answer": 0} for row in rows]), val_size=2),
        prepared(write("d.jsonl", rows[::-1]), val_size=2),
        prepared(write("e.jsonl", rows), val_size=3),
    ]
    assert len({first, *(data.fingerprint for data in others)}) == 4


@pytest.mark.parametrize(
    ("row", "type", "what"),
    [
        ({"question": "x"}, "auto", "a row needs the column 'prompt' or 'messages', found 'question'"),
        ({"question": "x"}, "prompts", "a 'prompts' row needs a prompt in the column 'prompt', found 'question'"),
        ({"prompt": None}, "auto", "needs a prompt in the column 'prompt', found null"),
        ({"prompt": ""}, "auto", "'prompt' is empty"),
        ({"prompt": []}, "auto", "'prompt' is an empty list"),
        ({"prompt": [*ASKED, *ASKED]}, "auto", "is the second 'user' message in succession"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "auto", "prompt\\[0\\] has the unknown role 'robot'"),
        ({"messages": [ANSWER]}, "auto", "'messages' ends with an assistant message"),
        ({"messages": "hello"}, "auto", "'messages' must be a list of messages, found a string"),
        ({"prompt": "x", "completions": "y"}, "auto", "a column must not be called 'completions'"),
    ],
)
def test_wrong_rows(prepared: Prepared, write: Write, row: dict[str, Any], type: str, what: str) -> None:
    path = write("a.jsonl", [row])
    with pytest.raises(DataError, match=what) as caught:
        prepared(path, type=type)
    assert caught.value.where == f"{path}:1"


def test_a_conversation_needs_a_template_that_takes_it(make_tokenizer: Callable[..., Any], write: Write) -> None:
    path = write("a.jsonl", [{"prompt": ASKED}])
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        prepare_prompts([Source(path)], make_tokenizer(None), max_prompt_length=9)
    path = write("b.jsonl", [{"prompt": [*ASKED, ANSWER, {"role": "tool", "content": "x"}]}])
    with pytest.raises(DataError, match="the chat template rejects the conversation") as caught:
        prepare_prompts([Source(path)], make_tokenizer("mistral"), max_prompt_length=99)
    assert caught.value.where == f"{path}:1"
