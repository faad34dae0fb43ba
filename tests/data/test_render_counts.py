"""Counts of rendering, and the notes about them: reasoning, system messages, empty answers, borders, columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fixed_tokenizer import fixed_tokenizer
from preparing import prepare, prepare_preferences, prepare_prompts
from tokenizers import Tokenizer, processors
from trained_tokenizers import read_template, wrap
from transformers import PreTrainedTokenizerFast

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import ChatOptions, DataOptions, RowStream, Source, StreamPosition
from streamtune.data.templates import fix_template_date
from streamtune.errors import ArgumentError, DataError, UserError
from streamtune.models.tokenizer import set_chat_template

Write = Callable[..., str]
Rows = list[dict[str, Any]]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


class Made:
    """Rows, prepared: their texts, trained texts and notes without the name of the file."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerFast, train_on: str = "assistant", **chat: Any) -> None:
        told: list[str] = []
        self.prepared = prepare([Source(path)], tokenizer, max_length=4096, train_on=train_on, notify=told.append,
                                chat=ChatOptions(**chat))  # fmt: skip
        self.told = [text.removeprefix(f"{path}: ") for text in told if "detected row type" not in text]
        self.texts = [tokenizer.decode(row.input_ids) for row in self.prepared.training]
        self.trained = [
            tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX]) for row in self.prepared.training
        ]


# --- reasoning


THOUGHTS: Rows = [
    {"messages": [user("q1"), answer("<think>\nfirst\n</think>\n\na1"), user("q2"), answer("a2", reasoning="second")]},
    {"messages": [user("q3"), answer("a3"), user("q4"), answer("a4", thinking="  \n")]},
    {"messages": [user("q5"), answer("fourth\n</think>\n\na5"), user("q6"), answer("a6", train=False, thinking="x")]},
]


def test_dropped_reasoning_is_counted(write: Write) -> None:
    made = Made(write("a.jsonl", THOUGHTS), fixed_tokenizer("qwen3"))
    assert made.told == ["the chat template drops the reasoning of 2 of 5 answers; reasoning: keep would train on it"]
    assert "first" not in made.texts[0]
    assert "second" in made.texts[0]
    assert Made(write("b.jsonl", THOUGHTS), fixed_tokenizer("chatml")).told == []


def test_reasoning_is_kept_as_the_template_prints_the_last_answer(write: Write) -> None:
    made = Made(write("a.jsonl", THOUGHTS), fixed_tokenizer("qwen3"), reasoning="keep")
    assert made.trained[0] == "<think>\nfirst\n</think>\n\na1<|im_end|><think>\nsecond\n</think>\n\na2<|im_end|>"
    assert made.trained[2] == "<think>\nfourth\n</think>\n\na5<|im_end|>"
    assert made.told == ["reasoning that the chat template drops was restored in 2 of 5 answers (reasoning: keep)"]


def test_reasoning_that_is_an_error(write: Write) -> None:
    path = write("a.jsonl", THOUGHTS * 6)
    with pytest.raises(DataError, match="the chat template drops the reasoning of 12 of 30 answers") as caught:
        Made(path, fixed_tokenizer("qwen3"), reasoning="error")
    places = caught.value.where.split("; ")
    assert places[:2] == [f"{path}:1 messages[1]", f"{path}:3 messages[1]"]
    assert len(places) == 10


def test_reasoning_that_the_template_prints_in_another_form_is_not_dropped(write: Write) -> None:
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("thinking.strip('\\n')", "thinking | upper")
    made = Made(write("a.jsonl", THOUGHTS[:1]), tokenizer)
    assert "SECOND" in made.texts[0]
    assert made.told == []


IN_ITS_ANSWER = "Paris is the capital of it"


@pytest.mark.parametrize(
    "asked",
    [
        answer(f"{IN_ITS_ANSWER}, France.", reasoning_content=IN_ITS_ANSWER),
        answer(f"<think>\n{IN_ITS_ANSWER}\n</think>\n\n{IN_ITS_ANSWER}, France."),
        answer("think of Paris", reasoning_content="think"),
    ],
    ids=["field", "content", "short"],
)
@pytest.mark.parametrize("template", ["qwen3", "deepseek_r1"])
def test_reasoning_that_also_occurs_in_its_answer_is_missed(write: Write, template: str, asked: dict[str, Any]) -> None:
    path = write("a.jsonl", [{"messages": [user("q1"), asked, user("q2"), answer("a2")]}])
    with pytest.raises(DataError, match="the chat template drops the reasoning of 1 of 2 answers"):
        Made(path, fixed_tokenizer(template), reasoning="error")
    made = Made(path, fixed_tokenizer(template), reasoning="keep")
    assert made.told == ["reasoning that the chat template drops was restored in 1 of 2 answers (reasoning: keep)"]
    reasoning, text = asked.get("reasoning_content", IN_ITS_ANSWER), asked["content"].rpartition("</think>")[2].strip()
    assert f"{reasoning}\n</think>\n\n{text}" in made.trained[0]


def test_an_answer_that_is_not_printed_is_refused_although_another_contains_it(write: Write) -> None:
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.chat_template = read_template("chatml").replace("messages %}", "messages if message.content != 'a' %}", 1)
    with pytest.raises(DataError, match=r"messages\[1\] cannot be masked exactly"):
        Made(write("a.jsonl", [{"messages": [user("q1"), answer("a"), user("q2"), answer("ab")]}]), tokenizer)


def test_kept_reasoning_goes_with_flags_ends_and_every_token(write: Write) -> None:
    rows = [{"messages": [user("q1"), answer("a1", thinking="first"), user("q2"), answer("a2", thinking="second")]}]
    path, tokenizer = write("a.jsonl", rows), fixed_tokenizer("gpt_oss")
    made = Made(path, tokenizer, reasoning="keep", train_on_eos="none")
    assert made.trained == [
        "<|channel|>analysis<|message|>first<|end|><|start|>assistant<|channel|>final<|message|>a1"
        "<|channel|>analysis<|message|>second<|end|><|start|>assistant<|channel|>final<|message|>a2"
    ]
    every = Made(path, tokenizer, reasoning="keep", train_on="all")
    assert every.texts == made.texts
    assert every.trained[0] in every.texts[0]
    assert "first" in every.trained[0]


# --- system, tools


def test_a_system_message_that_is_printed_with_the_last_question(write: Write) -> None:
    chat = [user("q1"), answer("a1"), user("q2"), answer("2")]
    tokenizer = fixed_tokenizer("mistral3")
    made = Made(write("a.jsonl", [{"messages": chat, "system": "Be brief."}] * 2), tokenizer)
    asked = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, *chat[:-1]], tokenize=False)
    assert made.texts[0] == f"{asked} 2</s>", "as the template asks for the last answer"
    assert made.trained[0] == " a1</s> 2</s>"
    assert made.told == [
        "the chat template prints the system message only before the user's last message: 2 rows affected, with 2 "
        "earlier answers trained without a system message"
    ]


def test_a_system_message_that_is_never_printed(write: Write) -> None:
    tokenizer = fixed_tokenizer("phi4")
    tokenizer.chat_template = "{% for message in messages if message.role != 'system' %}" + "".join(
        tokenizer.chat_template.split("{%- for message in messages %}")[1:]
    )
    made = Made(write("a.jsonl", [{"messages": [user("q1"), answer("a1")], "system": "Be brief."}]), tokenizer)
    assert made.told == ["the chat template does not print the system message of 1 row"]
    assert made.trained == ["a1<|im_end|>"]


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
LEFT_OUT: list[tuple[str, Rows, list[str]]] = [
    ("qwen3", [{"role": "developer", "content": "q"}, user("q"), answer("a")], ["developer"]),
    ("qwen3", [user("q"), CALL, {"role": "tool", "content": "a"}, answer("a")], []),
    ("deepseek_r1", [user("18 C?"), answer("a"), {"role": "tool", "content": "18 C"}, answer("b")], ["tool"]),
    ("mistral3", [user("q"), answer("a"), {"role": "system", "content": "q"}, user("r"), answer("b")], ["system"]),
    ("chatml", [{"role": "developer", "content": "q"}, user("q"), {"role": "tool", "content": "q"}, answer("a")], []),
    ("chatml", [user("q"), {"role": "tool", "content": " "}, answer("a")], []),
]


@pytest.mark.parametrize(("template", "messages", "roles"), LEFT_OUT)
def test_messages_that_the_template_does_not_print(
    write: Write, template: str, messages: Rows, roles: list[str]
) -> None:
    made = Made(write("a.jsonl", [{"messages": messages}] * 3), fixed_tokenizer(template))
    assert made.told == [f"the chat template does not print 3 '{role}' messages" for role in roles]
    told: list[str] = []
    path = write("p.jsonl", [{"prompt": messages[:-1] + ([] if messages[-2]["role"] == "user" else [user("?")])}])
    prepare_prompts([Source(path)], fixed_tokenizer(template), max_prompt_length=4096, notify=told.append)
    found = [text.removeprefix(f"{path}: ") for text in told if "not print" in text]
    # Mistral's prints a system message in a prompt, but only at the start.
    assert found == [f"the chat template does not print 1 '{role}' message" for role in roles]


def test_a_system_message_whose_text_occurs_elsewhere_is_missed(write: Write) -> None:
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.chat_template = read_template("chatml").replace("messages %}", "messages if message.role != 'system' %}")
    rows = [{"messages": [{"role": "system", "content": "Be brief"}, user("Be brief please"), answer("a")]}]
    note = "the chat template does not print the system message of 1 row"
    assert Made(write("a.jsonl", rows), tokenizer).told == [note]
    told: list[str] = []
    prompts = write("p.jsonl", [{"prompt": rows[0]["messages"][:2]}])
    prepare_prompts([Source(prompts)], tokenizer, max_prompt_length=4096, notify=told.append)
    assert f"{prompts}: {note}" in told


def test_a_row_that_is_rendered_several_times_is_counted_once(write: Write) -> None:
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.chat_template = read_template("chatml").replace("messages %}", "messages if message.role in roles %}")
    tokenizer.chat_template = "{% set roles = ['user', 'assistant'] %}" + tokenizer.chat_template
    system, schema = {"role": "system", "content": "S <|im_end|>"}, {"name": "f", "parameters": {}}
    columns = {"tools": [schema], "system": "T"}
    asked = [system, {**user("q"), "train": True}, {"role": "tool", "content": "r"}]
    chat = {"messages": [*asked, answer("a"), user("r"), answer("b"), user("s"), answer("c")], **columns}
    pair = {"prompt": asked, "chosen": [answer("a")], "rejected": [answer("b")], **columns}
    notes = {
        "the column 'system' of 1 row is ignored: the messages have another system message",
        'the tools of 1 row are bare function schemas; converted to {"type": "function", "function": ...}',
        "the chat template does not print the system message of 1 row",
        "the chat template does not print 1 'tool' message",
        "the chat template does not print the tools of 1 row",
        "the text of 1 row contains special tokens (<|im_end|>; system: 1): tokenized as special tokens, as an "
        "inference server does; split_special_tokens: true keeps them as text",
    }
    flagged = "1 'user' message is flagged for training, but roles_to_train is assistant: not trained"
    for options in ({}, {"reasoning": "per_turn"}):
        told = Made(write("a.jsonl", [chat]), tokenizer, **options).told
        assert {text for text in told if not text.startswith("reasoning: per_turn")} == {*notes, flagged}
    path, told = write("p.jsonl", [pair]), []
    prepare_preferences([Source(path)], tokenizer, max_length=4096, notify=told.append)
    assert {text.removeprefix(f"{path}: ") for text in told if "detected" not in text} == notes


def test_a_stream_tells_its_findings_once_and_not_the_sum_of_all_passes(write: Write) -> None:
    path = write("a.jsonl", [{"messages": [user("<|im_end|>"), answer("a")], "id": 1}])
    told: list[str] = []
    stream = RowStream([Source(path)], fixed_tokenizer("chatml"), DataOptions(max_length=99), told.append)
    for _, position in stream.examples(StreamPosition()):
        if position.epoch == 3:
            break
    findings = [text.removeprefix(f"{path}: ") for text in told if text.startswith(path)]
    assert [text[:26] for text in findings] == [
        "detected row type 'message",
        "column not read: 'id'",
        "the text of 1 row contains",
    ]


@pytest.mark.parametrize("template", ["chatml", "qwen3", "llama31"])
def test_system_column_and_default_system(write: Write, template: str) -> None:
    chat = [user("q1"), answer("a1")]
    inside = {"messages": [{"role": "system", "content": "inside"}, *chat], "system": "outside"}
    rows = [{"messages": chat, "system": "outside"}, {"messages": chat}, inside]
    made = Made(write("a.jsonl", rows), fixed_tokenizer(template), default_system="default")
    for text, (there, *others) in zip(
        made.texts, (("outside", "default"), ("default", "outside"), ("inside", "outside", "default")), strict=True
    ):
        assert there in text
        assert not any(other in text for other in others)
    assert made.told == ["the column 'system' of 1 row is ignored: the messages have another system message"]
    assert all(re.fullmatch(r"(<think>\n\n</think>\n\n)?a1<\|(im_end|eot_id)\|>", text) for text in made.trained)


def test_default_system_of_preferences_and_prompts(write: Write) -> None:
    tokenizer, options = fixed_tokenizer("chatml"), ChatOptions(default_system="Be brief.")
    pair = write("a.jsonl", [{"prompt": [user("q")], "chosen": "a", "rejected": "b", "system": ""}])
    trees = prepare_preferences([Source(pair)], tokenizer, max_length=200, chat=options)
    prompts = prepare_prompts([Source(pair, type="prompts")], tokenizer, max_prompt_length=200, chat=options)
    assert tokenizer.decode(trees.training[0].prompt) == tokenizer.decode(prompts.training[0].input_ids)
    assert "system\nBe brief.<|im_end|>" in tokenizer.decode(trees.training[0].prompt)
    own = write("b.jsonl", [{"prompt": [user("q")], "chosen": "a", "rejected": "b", "system": "Own."}])
    trees = prepare_preferences([Source(own)], tokenizer, max_length=200, chat=options)
    prompts = prepare_prompts([Source(own, type="prompts")], tokenizer, max_prompt_length=200, chat=options)
    assert tokenizer.decode(trees.training[0].prompt) == tokenizer.decode(prompts.training[0].input_ids)
    assert "Own." in tokenizer.decode(trees.training[0].prompt)
    assert "Be brief." not in tokenizer.decode(trees.training[0].prompt)


# --- variables of a template


def test_variables_of_the_template(write: Write) -> None:
    chat = [user("q1"), answer("a1")]
    rows = [{"messages": chat}, {"messages": chat, "chat_template_kwargs": '{"reasoning_effort": "low"}'}]
    tokenizer = fixed_tokenizer("gpt_oss")
    made = Made(write("a.jsonl", rows), tokenizer, variables={"reasoning_effort": "high"})
    assert ["Reasoning: high" in made.texts[0], "Reasoning: low" in made.texts[1]] == [True, True]
    prompts = prepare_prompts([Source(write("b.jsonl", rows))], tokenizer, max_prompt_length=500)
    assert ["medium" in tokenizer.decode(row.input_ids) for row in prompts.training] == [True, False]


@pytest.mark.parametrize("where", ["recipe", "row"])
def test_variables_that_the_template_does_not_read(write: Write, where: str) -> None:
    row: dict[str, Any] = {"messages": [user("q1"), answer("a1")]}
    unread, options = {"reasoning_efort": "low"}, {}
    if where == "row":
        row["chat_template_kwargs"] = unread
    else:
        options["variables"] = unread
    path = write("a.jsonl", [row])
    for act in (
        lambda: Made(path, fixed_tokenizer("gpt_oss"), **options),
        lambda: prepare_prompts([Source(path)], fixed_tokenizer("gpt_oss"), max_prompt_length=99,
                                chat=ChatOptions(**options)),
    ):  # fmt: skip
        with pytest.raises(UserError, match="'reasoning_efort', which the chat template does not read") as caught:
            act()
        assert "did you mean 'reasoning_effort'" in caught.value.fix
        assert caught.value.where == ("chat_template_kwargs" if where == "recipe" else f"{path}:1")
    with pytest.raises(ArgumentError, match="does not read") as caught:
        Made(write("b.jsonl", [{"messages": row["messages"]}]), fixed_tokenizer("phi4"), variables={"x": 1})
    assert caught.value.fix == "remove it; the template reads none"
    bad = write("c.jsonl", [{"messages": row["messages"], "chat_template_kwargs": "low"}])
    with pytest.raises(DataError, match="'chat_template_kwargs' must be an object, found a string"):
        Made(bad, fixed_tokenizer("gpt_oss"))


def test_one_date(write: Write) -> None:
    path = write("a.jsonl", [{"messages": [user("q1"), answer("a1")]}])
    try:
        fix_template_date("2024-02-29")
        first = Made(path, fixed_tokenizer("llama31"))
        assert "Today Date: 29 Feb 2024" in first.texts[0]
        assert Made(path, fixed_tokenizer("llama31")).prepared.fingerprint == first.prepared.fingerprint
        fix_template_date(None)
        assert Made(path, fixed_tokenizer("llama31")).prepared.fingerprint != first.prepared.fingerprint
        with pytest.raises(ArgumentError, match="expected an ISO 8601 date, found 'tomorrow'"):
            fix_template_date("tomorrow")
    finally:
        fix_template_date(None)


# --- empty answers, columns


EMPTY: Rows = [
    {"messages": [user("q1"), answer("a1")]},
    {"messages": [user("q2"), answer(" \n"), user("q3"), answer("a3")]},
    {"messages": [user("q4"), answer("", train=False), user("q5"), answer("", tool_calls=[{"name": "f"}])]},
]


def test_empty_answers(write: Write) -> None:
    path, tokenizer = write("a.jsonl", EMPTY), fixed_tokenizer("chatml")
    with pytest.raises(DataError, match="1 answer is empty") as caught:
        Made(path, tokenizer)
    assert caught.value.where == f"{path}:2"
    assert "on_empty: drop" in caught.value.fix
    dropped, trained = (Made(path, tokenizer, on_empty=which) for which in ("drop", "train"))
    assert dropped.told == ["1 row with an empty answer dropped (on_empty: drop)"]
    assert (dropped.prepared.report.rows, dropped.prepared.report.dropped, len(dropped.texts)) == (3, 1, 2)
    assert trained.told == ["1 of 4 trained answers are empty (on_empty: train)"]
    assert trained.trained[1] == " \n<|im_end|>a3<|im_end|>"


def test_empty_completions(write: Write) -> None:
    path = write("a.jsonl", [{"prompt": "q", "completion": ""}, {"prompt": "q", "completion": "a"}])
    with pytest.raises(DataError, match="1 answer is empty"):
        Made(path, fixed_tokenizer("chatml"))
    assert Made(path, fixed_tokenizer("chatml"), on_empty="drop").trained == ["a<|im_end|>"]
    assert Made(path, fixed_tokenizer("chatml"), on_empty="train").trained == ["<|im_end|>", "a<|im_end|>"]


def test_columns_that_are_not_read_are_named_once(write: Write) -> None:
    rows = [
        {"messages": [user("q"), answer("a")], "id": 1, "tools": []},
        {"messages": [user("q"), answer("a")], "x": "y"},
    ]
    assert Made(write("a.jsonl", rows), fixed_tokenizer("chatml")).told == ["columns not read: 'id', 'x'"]
    text = write("b.jsonl", [{"prompt": "q ", "completion": "a", "system": "Be brief."}])
    assert "column not read: 'system'" in Made(text, fixed_tokenizer("chatml")).told


# --- plain text


@pytest.mark.parametrize(("template", "printed"), [("llama3", False), ("gemma3", False), ("chatml_tools", True)])
def test_tools_that_the_template_does_not_print_are_told(
    write: Write, bpe: Tokenizer, template: str, printed: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    rows: Rows = [{"messages": [user("the weather?"), answer("a")], "tools": tools}]
    path = write("a.jsonl", rows * 2)
    text = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + read_template("chatml")
    made = Made(path, wrap(bpe, text if printed else read_template(template), bos_token="<s>"))
    note = "the chat template does not print the tools of 2 rows"
    assert (note in made.told) is not printed


def test_the_first_token_is_not_doubled(write: Write, bpe: Tokenizer) -> None:
    begins = Tokenizer.from_str(bpe.to_str())
    begins.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bpe.token_to_id("<s>"))]
    )
    tokenizer = wrap(begins, bos_token="<s>")
    texts = write("a.jsonl", [{"text": "<s>The fox"}, {"text": "The fox"}, {"text": "<s>"}])
    made = Made(texts, tokenizer)
    assert made.texts == ["<s>The fox<|im_end|>", "<s>The fox<|im_end|>", "<s><|im_end|>"]
    assert made.told == ["2 texts already begin with BOS: no second BOS is added"]
    pairs = Made(write("b.jsonl", [{"prompt": "<s>The", "completion": " fox"}]), tokenizer)
    assert (pairs.texts, pairs.trained) == (["<s>The fox<|im_end|>"], [" fox<|im_end|>"])
    prompts = prepare_prompts([Source(write("c.jsonl", [{"prompt": "<s>The"}]))], tokenizer, max_prompt_length=9)
    assert tokenizer.decode(prompts.training[0].input_ids) == "<s>The"


def test_a_token_over_the_border_is_counted(write: Write) -> None:
    rows = [{"prompt": "the", "completion": " answer"}, {"prompt": "is th", "completion": "e"}]
    made = Made(write("a.jsonl", rows), fixed_tokenizer("chatml"))
    assert made.trained == [" answer<|im_end|>", " the<|im_end|>"]
    assert made.told == [
        "in 1 of 2 texts a token crosses the border between prompt and completion; it is trained with the completion"
    ]


def test_schemas_of_functions_become_tools_and_are_counted(write: Write) -> None:
    """Schemas as in LLaMA-Factory's rows, ``[{"name": ..., "parameters": ...}]``, are printed as tools."""
    schema = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": schema}
    tokenizer = fixed_tokenizer("chatml")
    set_chat_template(tokenizer, "chatml")
    rows: Rows = [{"messages": [user("q"), answer("a")], "tools": tools} for tools in ([schema], [tool])]
    made = Made(write("a.jsonl", rows), tokenizer)
    assert made.texts[0] == made.texts[1]
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in made.texts[0]
    note = 'the tools of 1 row are bare function schemas; converted to {"type": "function", "function": ...}'
    assert made.told == [note]
    told: list[str] = []
    pairs: Rows = [{"prompt": [user("q")], "chosen": "a", "rejected": "b", "tools": [schema]}]
    prepare_preferences([Source(write("p.jsonl", pairs))], tokenizer, max_length=4096, notify=told.append)
    asked: Rows = [{"prompt": [user("q")], "tools": [schema]}]
    prepare_prompts([Source(write("q.jsonl", asked))], tokenizer, max_prompt_length=4096, notify=told.append)
    assert len([text for text in told if "bare function schemas" in text]) == 2
