"""Random chats: what is trained is what ``{% generation %}`` marks in the same template, token for token."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fixed_tokenizer import fixed_tokenizer

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Conversation, detect_type, normalise_row

TEMPLATES = ("chatml", "qwen3", "llama31", "phi4", "gemma3", "granite", "mistral3", "gpt_oss")
WITH_TOOLS = {"chatml", "qwen3", "llama31", "granite", "mistral3", "gpt_oss"}
WORDS = ["one", "the answer", " ", "\n", "\n\n", "Paris", "é", "e\u0301", "👋🏽", "世界", "42.", "<think>",
         "<|im_end|>", "assistant", "[/INST]", "  in", "\t", "{}", '"', "user\n"]  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def words(chance: random.Random, *, most: int = 6) -> str:
    """Words that begin and end with a letter, so that no template trims anything away to nothing."""
    return "a" + "".join(chance.choices(WORDS, k=chance.randint(0, most))) + "z"


def random_row(chance: random.Random, name: str) -> dict[str, Any]:
    """A row of messages: with a system column or message, tools, reasoning, and answers that are not trained."""
    messages: list[dict[str, Any]] = []
    has_tools = name in WITH_TOOLS and chance.random() < 0.4
    for number in range(chance.randint(1, 4)):
        # Mistral's template prints tools before every question that is equal to the last one: no two are.
        messages.append({"role": "user", "content": f"{number}{words(chance)}"})
        if has_tools and chance.random() < 0.6:
            call = {"name": "weather", "arguments": {"city": words(chance), "days": chance.randint(1, 9)}}
            calls = [{"id": "call00001", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": words(chance), "name": "weather", "tool_call_id": "call00001"})
        answer = {"role": "assistant", "content": words(chance)}
        if chance.random() < 0.3:
            answer[chance.choice(["reasoning_content", "thinking"])] = words(chance)
        if chance.random() < 0.2:
            answer[chance.choice(["train", "training", "loss", "weight"])] = chance.choice([True, False])
        messages.append(answer)
    row: dict[str, Any] = {"messages": messages, **({"tools": [TOOL]} if has_tools else {})}
    # Mistral's system message is elsewhere in a chat that ends with an answer: it has tests of its own.
    if name != "mistral3" and chance.random() < 0.5:
        text = words(chance)
        if chance.random() < 0.5:
            row["system"] = text
        else:
            messages.insert(0, {"role": "system", "content": text})
    return row


def compare(name: str, count: int) -> int:
    """Compare so many random rows, rendered together, with and without marks; return the number of trained tokens."""
    plain, marked = fixed_tokenizer(name), fixed_tokenizer(name, marked=True)
    options = ChatOptions(on_empty="train")
    renderers = [
        RowRenderer(tokenizer, train_on="assistant", notify=lambda text: None, chat=options)
        for tokenizer in (plain, marked)
    ]
    chance, trained = random.Random(name), 0
    for first in range(0, count, 32):
        some = [random_row(chance, name) for _ in range(first, min(first + 32, count))]
        contents = [content for columns in some if (content := trained_chat(columns)) is not None]
        for render in renderers:
            render.render_contents_ahead(contents)
            for content in contents:
                trained += compare_chat(render, marked, content)
    return trained


def trained_chat(columns: dict[str, Any]) -> Conversation | None:
    """Return a row as a conversation; None if no answer of it is trained."""
    row = Row("x:1", columns)
    content = normalise_row(row, detect_type(row))
    assert isinstance(content, Conversation)
    answers = [message for message in content.messages if message["role"] == "assistant"]
    return content if any(message.get("weight", 1) for message in answers) else None


def compare_chat(render: RowRenderer, marked: Any, content: Conversation) -> int:
    ours, shown = render(content, "x:1"), json.dumps(content.messages)
    answers = [message for message in content.messages if message["role"] == "assistant"]
    seen = [{key: value for key, value in message.items() if key != "weight"} for message in content.messages]
    theirs = marked.apply_chat_template(
        seen, tools=content.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(ours.input_ids)
    assert ids == theirs["input_ids"], shown
    spans = runs(theirs["assistant_masks"])
    assert len(spans) == len(answers), shown
    expected = [IGNORE_INDEX] * len(ids)
    for (start, end), message in zip(spans, answers, strict=True):
        if message.get("weight", 1):
            expected[start:end] = ids[start:end]
    assert list(ours.labels) == expected, shown
    return sum(label != IGNORE_INDEX for label in ours.labels)


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of ones."""
    edges = [0, *mask, 0]
    starts = [index for index in range(len(mask)) if edges[index + 1] > edges[index]]
    ends = [index for index in range(1, len(mask) + 1) if edges[index + 1] < edges[index]]
    return list(zip(starts, ends, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_few_random_chats(name: str) -> None:
    assert compare(name, 12) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_random_chats(name: str) -> None:
    assert compare(name, 300) > 0
