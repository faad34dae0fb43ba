"""Chats whose generation prompt says more than the header of a turn in history: Qwen3 with ``enable_thinking: false``.

What is trained is what the assistant writes behind the generation prompt; what that supplies is masked.
"""

from __future__ import annotations

from typing import Any

import pytest
from preparing import ListRenderer
from published import published
from trained_tokenizers import read_template, wrap

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import TurnRenderer
from streamtune.data.row_types import normalise_row

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content, "name": "weather", "tool_call_id": "call00001"}


SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
FIRST, SECOND = "<think>\nfirst\n</think>\n\n", "<think>\nsecond\n</think>\n\n"
NONE = "<think>\n\n</think>\n\n"

CHATS: dict[str, list[Message]] = {
    "one": [user("q1"), answer("A-1.")],
    "two": [user("q1"), answer("A-1."), user("q2"), answer("A-2.")],
    "system": [SYSTEM, user("q1"), answer("A-1."), user("q2"), answer("A-2.")],
    "reasoning": [
        user("q1"),
        answer("A-1.", reasoning_content="first"),
        user("q2"),
        answer("A-2.", reasoning_content="second"),
    ],
    "inline": [user("q1"), answer(f"{FIRST}A-1."), user("q2"), answer(f"{SECOND}A-2.")],
    "tools": [
        user("q1"),
        answer("", tool_calls=CALLS),
        tool("r1"),
        answer("A-1."),
        user("q2"),
        answer("Look.", tool_calls=CALLS),
        tool("r2"),
        tool("r3"),
        answer("A-2."),
    ],
    "null content": [user("q1"), answer(None, tool_calls=CALLS), tool("r1"), answer("A-1.")],
    "reasoned calls": [
        user("q1"),
        answer("", reasoning_content="first", tool_calls=CALLS),
        tool("r1"),
        answer("A-1.", reasoning_content="second"),
        user("q2"),
        answer("A-2."),
    ],
    "reasoned last call": [user("q1"), answer("", reasoning_content="first", tool_calls=CALLS)],
    "two in a row": [user("q1"), answer("A-1."), answer("A-2."), user("q2"), answer("A-3.")],
    "two at the end": [user("q1"), answer("A-1."), answer("A-2.")],
    "ends with the user": [user("q1"), answer("A-1."), user("q2")],
    "ends with a tool": [user("q1"), answer("", tool_calls=CALLS), tool("r1")],
}

TRAINED: dict[str, list[str]] = {
    "one": ["A-1."],
    "two": ["A-1.", "A-2."],
    "system": ["A-1.", "A-2."],
    "reasoning": ["A-1.", f"{SECOND}A-2."],
    "inline": ["A-1.", f"{SECOND}A-2."],
    "tools": [CALL, "A-1.", f"Look.\n{CALL}", "A-2."],
    "null content": [CALL, "A-1."],
    "reasoned calls": [CALL, "A-1.", "A-2."],
    "reasoned last call": [f"{FIRST}{CALL}"],
    "two in a row": ["A-1.", "A-2.", "A-3."],
    "two at the end": ["A-1.", "A-2."],
    "ends with the user": ["A-1."],
    "ends with a tool": [CALL],
}
"""Trained text with ``enable_thinking: false``, without the end of the turns."""

KEPT = {
    "reasoning": [f"{FIRST}A-1.", f"{SECOND}A-2."],
    "inline": [f"{FIRST}A-1.", f"{SECOND}A-2."],
    "reasoned calls": [f"{FIRST}{CALL}", f"{SECOND}A-1.", "A-2."],
}
"""The same with ``reasoning: keep``, where it differs."""


def trained(tokenizer: Any, name: str, options: ChatOptions, told: list[str] | None = None) -> list[str]:
    """Return the runs of trained text; ids of an untouched rendering are those of the library."""
    has_tools = any("tool_calls" in message for message in CHATS[name])
    row = Row("x:1", {"messages": CHATS[name], "tools": TOOLS if has_tools else None})
    notes: list[str] = [] if told is None else told
    renderer = ListRenderer(tokenizer, train_on="assistant", notify=notes.append, chat=options)
    made = renderer(normalise_row(row, "messages"), row.origin)
    renderer.log.notify_or_raise()
    if options.reasoning == "template":
        messages = [
            {**each, "content": each["content"] or ""} if each["role"] == "assistant" else each for each in CHATS[name]
        ]
        whole = tokenizer.apply_chat_template(messages, tools=row.columns["tools"], **options.variables)
        assert made.input_ids == whole["input_ids"]
    return runs(tokenizer, made.labels)


def runs(tokenizer: Any, labels: Any) -> list[str]:
    found: list[list[int]] = [[]]
    for label in labels:
        if label != IGNORE_INDEX:
            found[-1].append(label)
        elif found[-1]:
            found.append([])
    return [tokenizer.decode(run) for run in found if run]


def expected(name: str, reasoning: str, *, thinks: bool) -> list[str]:
    """Return what is trained; a model that may think writes the empty reasoning of a last answer itself."""
    texts = list((KEPT if reasoning == "keep" else {}).get(name, TRAINED[name]))
    if thinks and CHATS[name][-1]["role"] == "assistant" and "</think>" not in texts[-1]:
        texts[-1] = NONE + texts[-1]
    return [f"{text}<|im_end|>" for text in texts]


@pytest.fixture
def qwen3(bpe: Any) -> Any:
    return wrap(bpe, read_template("qwen3"))


@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize("name", CHATS)
def test_what_the_generation_prompt_supplies_is_masked(qwen3: Any, name: str, reasoning: str) -> None:
    found = trained(qwen3, name, ChatOptions(reasoning=reasoning, variables={"enable_thinking": False}))
    assert found == expected(name, reasoning, thinks=False)


@pytest.mark.full
@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_published_qwen3(reasoning: str, variables: dict[str, Any]) -> None:
    tokenizer = published("qwen3")
    for name in CHATS:
        found = trained(tokenizer, name, ChatOptions(reasoning=reasoning, variables=variables))
        assert found == expected(name, reasoning, thinks=variables.get("enable_thinking") is not False), name


@pytest.mark.full
@pytest.mark.parametrize(("family", "end"), [("llama3_1", "<|eot_id|>"), ("gemma3", "<end_of_turn>")])
def test_published_templates_without_reasoning(family: str, end: str) -> None:
    tokenizer = published(family)
    alternating = ["one", "two", "system", "reasoning", "ends with the user"]
    for name in alternating if family == "gemma3" else [*alternating, "two in a row", "two at the end"]:
        plain = [text.removeprefix(SECOND) + end for text in TRAINED[name]]
        assert trained(tokenizer, name, ChatOptions()) == plain, name
        kept = [text + end for text in KEPT.get(name, TRAINED[name])]
        assert trained(tokenizer, name, ChatOptions(reasoning="keep")) == kept, name


def test_reasoning_behind_a_prompt_that_leaves_no_room_for_it_is_told(qwen3: Any) -> None:
    told: list[str] = []
    trained(qwen3, "reasoning", ChatOptions(reasoning="keep", variables={"enable_thinking": False}), told)
    assert [text for text in told if "2 answers are trained with reasoning" in text and "enable_thinking" in text]
    told.clear()
    trained(qwen3, "reasoning", ChatOptions(reasoning="keep"), told)
    trained(qwen3, "two", ChatOptions(variables={"enable_thinking": False}), told)
    assert not [text for text in told if "enable_thinking" in text]


def test_each_turn_by_itself(qwen3: Any) -> None:
    """``reasoning: per_turn``: each answer is rendered as the last one."""
    options = ChatOptions(reasoning="per_turn", variables={"enable_thinking": False})
    renderer = TurnRenderer(qwen3, notify=print, chat=options)
    content = normalise_row(Row("x:1", {"messages": CHATS["tools"], "tools": TOOLS}), "messages")
    rows = renderer.render_item(Item("x", "x:1", 100, content))
    assert rows is not None
    assert [runs(qwen3, row.labels) for row in rows] == [[f"{text}<|im_end|>"] for text in TRAINED["tools"]]


PROMPTS = {
    # GLM, DeepSeek: another spelling of no reasoning; and one with marks that are not <think>
    "closed": ("<|im_start|>assistant\n", "</think>"),
    "other marks": ("<|im_start|>assistant\n", "<|s|>thought\n<|e|>"),
    "two parts": ("<|im_start|>assistant\n", "<plan></plan>\n<think></think>\n"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_other_ways_to_say_that_there_is_no_reasoning(bpe: Any, name: str) -> None:
    """The last answer is printed behind the whole generation prompt, earlier ones behind their header alone."""
    header, supplied = PROMPTS[name]
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ supplied }}{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ header + supplied }}{% endif %}"
    )
    tokenizer = wrap(bpe, template)
    options = ChatOptions(variables={"header": header, "supplied": supplied})
    call = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    assert trained(tokenizer, "two", options) == ["A-1.<|im_end|>", "A-2.<|im_end|>"]
    assert trained(tokenizer, "tools", options) == [
        f"{text}<|im_end|>" for text in (call, "A-1.", f"Look.{call}", "A-2.")
    ]


REFUSES_NULL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if '</think>' in m.content %}?{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function | tojson }}]{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_null_content_is_an_empty_text_where_the_template_needs_one(bpe: Any) -> None:
    tokenizer = wrap(bpe, REFUSES_NULL)
    assert trained(tokenizer, "null content", ChatOptions())[-1] == "A-1.<|im_end|>"
