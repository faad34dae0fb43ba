"""The templates of ``chat_template: NAME``: texts, masks, ends, refusals, compared with the makers' own templates."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from preparing import ListRenderer
from published import published
from test_chat_masks import trained_pieces
from tokenizers import Tokenizer
from trained_tokenizers import train_bpe, wrap
from transformers import PreTrainedTokenizerFast

from streamtune.base.chat_templates import CHAT_TEMPLATES, read_chat_template
from streamtune.data.inspect_rows import trained_end_tokens
from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.record_table import Example
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_types import Conversation, normalise_row
from streamtune.data.templates import ChatRequest, TemplateRefusalError, fix_template_date, render_chat
from streamtune.errors import ArgumentError, DataError
from streamtune.models.tokenizer import describe_missing_tokens, set_chat_template, train_tokenizer

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def calls(*names: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "call00001", "type": "function", "function": {"name": n, "arguments": arguments}} for n in names]


def result(content: str) -> Message:
    return {"role": "tool", "content": content, "name": "weather", "tool_call_id": "call00001"}


SYSTEM = {"role": "system", "content": " Be brief. "}
BRIEF = {"role": "system", "content": "Be brief."}
TURNS = [user("q1"), answer("A-1."), user("q2"), answer("A-2.")]

CHATS: dict[str, list[Message]] = {
    "one": [user("q1 "), answer(" A-1.\n")],
    "several": [*TURNS, user("q1"), answer("A-1.")],
    "system": [SYSTEM, *TURNS],
    "ends with the user": [SYSTEM, user("q1"), answer("A-1."), user("q2")],
    "unicode": [user("Grüße 👋🏽"), answer("世界!")],
    "a question": [user("q1")],
}
TOOL_CHATS: dict[str, list[Message]] = {
    "call": [SYSTEM, user("q1"), answer("", tool_calls=calls("weather", city="Paris")), result("sunny"), *TURNS[1:]],
    "two calls": [
        user("q1"),
        *(answer("", tool_calls=calls("weather", days=3)), result('{"a": "é"}')),
        *(answer("", tool_calls=calls("now")), result("12"), answer("A-1.")),
    ],
    "last call": [user("q1"), answer("", tool_calls=calls("now"))],
    "last result": [user("q1"), answer("", tool_calls=calls("now")), result("12")],
}
PARALLEL: dict[str, list[Message]] = {
    "calls at once": [user("q1"), answer("Look.", tool_calls=calls("weather", "now")), result("1"), result("2"), *TURNS]
}


def thoughts(field: str) -> dict[str, list[Message]]:
    first, second = {field: "\nfirst"}, {field: "second\n"}
    return {
        "reasoning": [user("q1"), answer("A-1.", **first), user("q2"), answer("A-2.", **second)],
        "reasoned calls": [
            *(user("q1"), answer("", tool_calls=calls("now"), **first), result("12")),
            *(answer("", tool_calls=calls("now"), **second), result("13")),
        ],
        "reasoned answer": [*TURNS[:2], user("q"), answer("", tool_calls=calls("now"), **first), result("1"), TURNS[1]],
    }


INLINE = {"inline": [user("q"), answer("<think>\n1\n</think>\n\nA-1."), user("q"), answer("<think>\n2\n</think>\n\nA")]}

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string", "description": "Name of the city"},
    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
    "days": {"type": "integer", "default": 3},
    "tags": {"type": "array", "items": {"type": "string"}},
    "points": {"type": "array", "items": {"type": "number"}, "nullable": True},
    "flags": {"type": "array", "items": {"type": "boolean"}},
    "maybe": {"type": "string", "nullable": True},
    "anything": {"description": "whatever"},
    "two": {"type": ["string", "null"]},
    "place": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "array"}}, "required": ["x"]},
    "free": {"type": "object"},
    "many": {"type": "array", "items": {"type": "object", "properties": {c: {"type": "string"} for c in "abc"}}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "é", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "bare", "description": "nothing"}},
]

_TRL = importlib.util.find_spec("trl")
MAKERS = Path(_TRL.origin).parent / "chat_templates" if _TRL and _TRL.origin else Path("trl is not installed")
"""The makers' templates, of which TRL keeps copies byte for byte."""

PUBLISHED: dict[str, tuple[str, dict[str, list[Message]], list[dict[str, Any]]]] = {
    "llama3": ("llama3", CHATS, [{}]),
    "llama3_tools": (
        "llama3_1",
        {**CHATS, **TOOL_CHATS},
        [{}, {"date_string": "01 Jan 2025"}, {"tools_in_user_message": False}],
    ),
    "qwen3": (
        "qwen3",
        {**CHATS, **TOOL_CHATS, **PARALLEL, **thoughts("reasoning_content"), **INLINE},
        [{}, {"enable_thinking": False}, {"enable_thinking": True}],
    ),
    "qwen3_nothink": ("qwen3_instruct_2507", {**CHATS, **TOOL_CHATS, **PARALLEL}, [{}]),
    "gemma": ("gemma", {name: chat for name, chat in CHATS.items() if chat[0] != SYSTEM}, [{}]),
    "gemma3": ("gemma3", CHATS, [{}]),
    "deepseek_r1": ("deepseek_r1_distill", {**CHATS, **INLINE}, [{}]),
    "gpt_oss": (
        "gptoss",
        {**CHATS, **TOOL_CHATS, **thoughts("thinking")},
        [{}, {"reasoning_effort": "high", "model_identity": "You are X."}],
    ),
}
"""Name -> the maker's template, the chats and the variables that are compared."""


@pytest.fixture(autouse=True)
def on_one_day() -> Iterator[None]:
    fix_template_date("2025-01-31")
    yield
    fix_template_date(None)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    marks = {mark for form in CHAT_TEMPLATES.values() for mark in (form.end, *form.marks, *form.added) if mark}
    return train_bpe(special=sorted({*marks, "<bos>", "<eos>"}))


def made(bpe: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    return wrap(bpe, template, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")


def rendered(tokenizer: Any, messages: list[Message], tools: Any = None, **options: Any) -> Rendered:
    row = Row("x:1", {"messages": messages, "tools": tools})
    render = ListRenderer(tokenizer, train_on="assistant", notify=lambda text: None, chat=ChatOptions(**options))
    return render(normalise_row(row, "messages"), "x:1")


@pytest.mark.skipif(not MAKERS.exists(), reason="left out: TRL, which has the makers' templates, is not installed")
@pytest.mark.parametrize("name", PUBLISHED)
def test_texts_are_those_of_the_makers_template(bpe: Tokenizer, name: str) -> None:
    maker, chats, variables = PUBLISHED[name]
    theirs = made(bpe, (MAKERS / f"{maker}.jinja").read_text(encoding="utf-8"))
    ours = made(bpe, read_chat_template(name))
    for chat, messages in chats.items():
        for options in variables:
            for tools in (None, TOOLS) if CHAT_TEMPLATES[name].tools else (None,):
                for generation in (False, True):
                    request = ChatRequest(messages, tools, generation, options)
                    assert render_chat(ours, request) == render_chat(theirs, request), (chat, options)


@pytest.mark.skipif(not MAKERS.exists(), reason="left out: TRL, which has the makers' templates, is not installed")
def test_qwen3_nothink_is_the_format_of_qwen2_5_with_its_system_message(bpe: Tokenizer) -> None:
    default = {"role": "system", "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}
    theirs = made(bpe, (MAKERS / "qwen2_5.jinja").read_text(encoding="utf-8"))
    ours = made(bpe, read_chat_template("qwen3_nothink"))
    for messages in {**CHATS, **TOOL_CHATS, **PARALLEL}.values():
        filled = messages if messages[0]["role"] == "system" else [default, *messages]
        for tools in (None, TOOLS):
            assert render_chat(ours, ChatRequest(filled, tools)) == render_chat(theirs, ChatRequest(messages, tools))


@pytest.mark.skipif(not MAKERS.exists(), reason="left out: TRL, which has the makers' templates, is not installed")
def test_cohere2_is_the_format_of_tiny_aya_without_its_preamble(bpe: Tokenizer) -> None:
    theirs = made(bpe, (MAKERS / "cohere2.jinja").read_text(encoding="utf-8"))
    ours = made(bpe, read_chat_template("cohere2"))
    system = re.compile(r"<\|START_OF_TURN_TOKEN\|><\|SYSTEM_TOKEN\|>.*?<\|END_OF_TURN_TOKEN\|>", re.DOTALL)
    for messages in CHATS.values():
        for generation in (False, True):
            request = ChatRequest(messages, None, generation)
            found = system.sub("", render_chat(ours, request), 1)
            assert found == system.sub("", render_chat(theirs, request), 1)
            if messages[0]["role"] == "system":
                assert f"<|SYSTEM_TOKEN|>{messages[0]['content']}<|END" in render_chat(ours, request)


@pytest.mark.full
@pytest.mark.skipif(not MAKERS.exists(), reason="left out: TRL, which has the makers' templates, is not installed")
@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_and_masks_are_those_of_the_makers_template(bpe: Tokenizer, name: str, reasoning: str) -> None:
    """Of the makers' templates the turns are found by comparing renderings, of ours by their marks."""
    maker, chats, variables = PUBLISHED[name]
    theirs = made(bpe, (MAKERS / f"{maker}.jinja").read_text(encoding="utf-8"))
    compare_rows(made(bpe, read_chat_template(name)), theirs, name, chats, variables, reasoning)


def compare_rows(
    ours: Any,
    theirs: Any,
    name: str,
    chats: dict[str, list[Message]],
    variables: list[dict[str, Any]],
    reasoning: str,
) -> None:
    for chat, messages in chats.items():
        if all(message["role"] != "assistant" for message in messages):
            continue
        for options in variables:
            tools = TOOLS if any("tool_calls" in message for message in messages) else None
            found = rendered(ours, messages, tools, variables=options, reasoning=reasoning)
            try:
                want = rendered(theirs, messages, tools, variables=options, reasoning=reasoning)
            except DataError:  # without marks, a call without arguments has no text that could be found
                assert name == "gpt_oss"
                continue
            assert found.input_ids == want.input_ids, (chat, options)
            assert trained_pieces(ours, found) == trained_pieces(theirs, want), (chat, options)


@pytest.mark.full
@pytest.mark.parametrize("reasoning", ["template", "keep"])
@pytest.mark.parametrize(
    ("name", "family", "split"),
    [
        ("qwen3", "qwen3", None),
        ("gemma3", "gemma3", None),
        ("llama3", "llama3_1", None),
        ("llama3_tools", "llama3_1", None),
        ("gpt_oss", "gptoss", None),
        ("deepseek_r1", "deepseek_v3", "splits <think> and </think>"),  # R1 has these tokens, V3 has not
    ],
)
def test_published_tokenizers(name: str, family: str, split: str | None, reasoning: str) -> None:
    """Real vocabularies: the published tokenizer gives the ids and masks of the maker's template."""
    ours, theirs = published(family), published(family)
    maker, chats, variables = PUBLISHED[name]
    if family not in ("qwen3", "gemma3"):  # packages without the template of this model
        if not MAKERS.exists():
            pytest.skip("left out: TRL, which has the makers' templates, is not installed")
        theirs.chat_template = (MAKERS / f"{maker}.jinja").read_text(encoding="utf-8")
    set_chat_template(ours, name)
    note = describe_missing_tokens(ours, name)
    assert note is None if split is None else split in str(note)
    compare_rows(ours, theirs, name, chats, variables, reasoning)


DOCUMENTED = {
    "mistral": "<bos>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]q1[/INST]A-1.<eos>[INST]q2[/INST]A-2.<eos>",
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>q1<|im_end|>"
        "<|im_start|>assistant<|im_sep|>A-1.<|im_end|><|im_start|>user<|im_sep|>q2<|im_end|>"
        "<|im_start|>assistant<|im_sep|>A-2.<|im_end|>"
    ),
    "granite": (
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>q1<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>A-1.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>q2<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>A-2.<|end_of_text|>\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
        "<|im_start|>assistant\nA-1.<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\nA-2.<|im_end|>\n"
    ),
    "smollm2": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n"
        "<|im_start|>assistant\nA-1.<|im_end|>\n<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\nA-2.<|im_end|>\n"
    ),
    "vicuna": "<bos>Be brief. USER: q1 ASSISTANT: A-1.<eos>USER: q2 ASSISTANT: A-2.<eos>",
    "alpaca": (
        "<bos>Be brief.\n\n### Instruction:\nq1\n\n### Response:\nA-1.<eos>\n\n### Instruction:\nq2\n\n"
        "### Response:\nA-2.<eos>"
    ),
}
"""A system message and two exchanges, as the makers document the format: the cards of Mistral Small 3, Phi-4 and
SmolLM2, IBM's prompt guide for Granite, FastChat's ``vicuna_v1.1``, Stanford Alpaca's prompt."""

DEFAULT_SYSTEM = {
    "mistral": "<bos>[INST]",
    "phi4": "<|im_start|>user<|im_sep|>",
    "granite": (
        "<|start_of_role|>system<|end_of_role|>You are a helpful assistant. Please ensure responses are professional, "
        "accurate, and safe.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
    ),
    "chatml": "<|im_start|>user\n",
    "smollm2": (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
    ),
    "vicuna": (
        "<bos>A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: "
    ),
    "alpaca": (
        "<bos>Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\n\n### Instruction:\n"
    ),
}
"""Text at the start of a conversation without a system message, by template."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_texts_are_those_of_the_documentation(bpe: Tokenizer, name: str) -> None:
    tokenizer = made(bpe, read_chat_template(name))
    assert render_chat(tokenizer, ChatRequest([BRIEF, *TURNS])) == DOCUMENTED[name]
    assert render_chat(tokenizer, ChatRequest(TURNS[:1])).startswith(f"{DEFAULT_SYSTEM[name]}q1")
    prompt = render_chat(tokenizer, ChatRequest([BRIEF, *TURNS[:3]], generation=True))
    assert DOCUMENTED[name].removeprefix(prompt).strip().startswith("A-2.")


def test_tools_of_granite(bpe: Tokenizer) -> None:
    """As IBM's prompt guide for Granite 4 prints tools, calls and results."""
    text = render_chat(made(bpe, read_chat_template("granite")), ChatRequest(PARALLEL["calls at once"], TOOLS[1:2]))
    assert text.startswith(
        "<|start_of_role|>system<|end_of_role|>You are a helpful assistant with access to the following tools. You may "
        "call one or more tools to assist with the user query.\n\nYou are provided with function signatures within "
        '<tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "now", "description": "é", '
        '"parameters": {"type": "object"}}}\n</tools>\n\nFor each tool call, return a json object with function name '
        'and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
        "<args-json-object>}\n</tool_call>. If a tool does not exist in the provided list of tools, notify the user "
        "that you do not have the ability to fulfill the request.<|end_of_text|>\n"
    )
    assert (
        '<|start_of_role|>assistant<|end_of_role|>Look.\n<tool_call>\n{"name": "weather", "arguments": {}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end_of_text|>\n'
        "<|start_of_role|>user<|end_of_role|>\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n"
        "</tool_response><|end_of_text|>\n"
    ) in text


AROUND: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "qwen3": (("", "<|im_end|>"), ("<think>\n\n</think>\n\n", "<|im_end|>")),
    "gpt_oss": (
        ("<|channel|>final<|message|>", "<|end|>"),
        ("<|channel|>final<|message|>", "<|return|>"),
    ),
    "cohere2": (("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),) * 2,
    "vicuna": ((" ", "<eos>"),) * 2,
}
"""Trained text (before, after) the first and the last answer, for templates that train more than the end of a turn."""


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_answers_and_ends_are_trained_and_generation_stops_at_the_end(bpe: Tokenizer, name: str) -> None:
    tokenizer, end = made(bpe, read_chat_template(name)), CHAT_TEMPLATES[name].end or "<eos>"
    messages = TURNS if name == "gemma" else [BRIEF, *TURNS]
    row = rendered(tokenizer, messages)
    first, last = AROUND.get(name, (("", end),) * 2)
    assert trained_pieces(tokenizer, row) == [f"{first[0]}A-1.{first[1]}", f"{last[0]}A-2.{last[1]}"]
    ends = trained_end_tokens([Example(row.input_ids, row.labels, "x:1")], tokenizer, ChatOptions())
    assert tokenizer.convert_ids_to_tokens(ends) == [end]
    assert tokenizer.convert_ids_to_tokens(trained_end_tokens([], tokenizer, ChatOptions())) == [end]


def test_calls_of_gpt_oss_end_a_turn(bpe: Tokenizer) -> None:
    tokenizer = made(bpe, read_chat_template("gpt_oss"))
    row = rendered(tokenizer, TOOL_CHATS["call"], TOOLS)
    ends = trained_end_tokens([Example(row.input_ids, row.labels, "x:1")], tokenizer, ChatOptions())
    assert set(tokenizer.convert_ids_to_tokens(ends)) == {"<|call|>", "<|return|>"}


@pytest.mark.parametrize("name", [name for name, form in CHAT_TEMPLATES.items() if not form.tools])
def test_formats_without_tools_refuse_calls_and_results(bpe: Tokenizer, name: str) -> None:
    tokenizer = made(bpe, read_chat_template(name))
    for messages in (TOOL_CHATS["two calls"], [user("q1"), answer("A-1."), result("12")]):
        with pytest.raises(DataError, match=f"{name} has"):
            ListRenderer(tokenizer, train_on="assistant", notify=print)(Conversation(messages), "x:1")


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        ("gemma", [BRIEF, *TURNS], "gemma has no system message"),
        ("gemma3", [*TURNS[:2], TURNS[1]], "must alternate"),
        ("cohere2", TURNS[1:2], "must alternate"),
        ("deepseek_r1", [*TURNS, BRIEF], "a system message only at the start"),
        ("llama3_tools", PARALLEL["calls at once"], "one tool call in a message"),
        ("gpt_oss", PARALLEL["calls at once"], "one tool call in a message"),
        ("gpt_oss", [user("q1"), answer("A <|channel|>")], "writes channels itself"),
        ("gpt_oss", [user("q1"), result("12")], "before any tool call"),
    ],
)
def test_what_a_format_cannot_print_is_refused(bpe: Tokenizer, name: str, messages: list[Message], said: str) -> None:
    with pytest.raises(TemplateRefusalError, match=said):
        render_chat(made(bpe, read_chat_template(name)), ChatRequest(messages))


def test_text_beside_a_call_that_the_format_drops_is_refused(bpe: Tokenizer) -> None:
    """Llama 3.1's format has no text beside a tool call; its own template drops the text silently."""
    messages = [user("q1"), answer("Look.", tool_calls=calls("now")), result("12"), answer("A-1.")]
    with pytest.raises(DataError, match=r"omits 'Look\.'"):
        rendered(made(bpe, read_chat_template("llama3_tools")), messages, TOOLS)


@pytest.mark.full
@pytest.mark.skipif(not MAKERS.exists(), reason="left out: TRL, which has the makers' templates, is not installed")
@pytest.mark.parametrize("train_on_eos", ["all", "last", "none"])
@pytest.mark.parametrize("roles", [("assistant",), ("assistant", "user"), ("user",)], ids="+".join)
@pytest.mark.parametrize("name", PUBLISHED)
def test_other_masks_are_those_of_the_makers_template(
    bpe: Tokenizer, name: str, roles: tuple[str, ...], train_on_eos: str
) -> None:
    maker, chats, _ = PUBLISHED[name]
    theirs = made(bpe, (MAKERS / f"{maker}.jinja").read_text(encoding="utf-8"))
    ours = made(bpe, read_chat_template(name))
    options = {"train_on_eos": train_on_eos, "roles_to_train": roles}
    for chat, messages in chats.items():
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        want = None
        with suppress(DataError):  # without marks, some turns cannot be found
            want = trained_pieces(theirs, rendered(theirs, messages, tools, **options))
        if want is not None:
            assert trained_pieces(ours, rendered(ours, messages, tools, **options)) == want, chat


def test_tokens_that_the_tokenizer_splits_are_named_with_the_keys_that_add_them() -> None:
    tokenizer = train_tokenizer(["one two three"], vocab_size=300)
    for name, form in CHAT_TEMPLATES.items():
        note = describe_missing_tokens(tokenizer, name)
        missing = {mark for mark in (form.end, *form.marks, *form.added) if mark} - {"<|im_start|>", "<|im_end|>"}
        assert (note is None) is (not missing), name
        assert all(mark in str(note) for mark in missing), name
    assert describe_missing_tokens(tokenizer, "phi4") == (
        "the tokenizer splits <|im_sep|>, which the chat template phi4 writes, into 10 tokens; to add each as one "
        'token, write special_tokens: {additional_special_tokens: ["<|im_sep|>"]}'
    )
    assert str(describe_missing_tokens(tokenizer, "qwen3")).endswith(
        'added_tokens: ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]'
    )
    tokenizer.eos_token = None
    with pytest.raises(ArgumentError, match="no EOS token") as caught:
        set_chat_template(tokenizer, "vicuna")
    assert "eos_token" in caught.value.fix
