"""Messages that are trained and those that are not: flags, roles, the ends of turns, the last turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fixed_tokenizer import fixed_tokenizer
from preparing import prepare
from transformers import PreTrainedTokenizerFast

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data import ChatOptions, Source
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.render import RowRenderer, TurnRenderer
from streamtune.data.row_types import Conversation, detect_type, normalise_row
from streamtune.errors import ArgumentError, DataError

Write = Callable[..., str]
FLAGS = ("train", "training", "loss", "weight")


def chat(*flags: Any) -> list[dict[str, Any]]:
    """Questions and answers, a flag for each answer; None is none."""
    messages: list[dict[str, Any]] = []
    for number, flag in enumerate(flags, start=1):
        messages.append({"role": "user", "content": f"q{number}"})
        messages.append({"role": "assistant", "content": f"a{number}", **(flag or {})})
    return messages


def pieces(
    columns: dict[str, Any], template: str = "chatml", train_on: str = "assistant", **options: Any
) -> tuple[list[str], str]:
    """The runs of trained tokens, and the whole text."""
    tokenizer = fixed_tokenizer(template)
    row = Row("x:1", columns)
    render = RowRenderer(tokenizer, train_on=train_on, notify=lambda text: None, chat=ChatOptions(**options))
    rendered = render(normalise_row(row, detect_type(row)), row.origin)
    runs: list[list[int]] = [[]]
    for label in rendered.labels:
        if label != IGNORE_INDEX:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run], tokenizer.decode(rendered.input_ids)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_every_flag_switches_an_answer_off(name: str, value: Any) -> None:
    trained, text = pieces({"messages": chat({name: value}, {name: not value})})
    assert trained == ["a2<|im_end|>"]
    assert "a1<|im_end|>" in text
    turns = [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1", name: value}]
    turns += [{"from": "human", "value": "q2"}, {"from": "function_call", "value": '{"name": "f"}', name: value}]
    turns += [{"from": "observation", "value": "r"}, {"from": "gpt", "value": "a3"}]
    assert pieces({"conversations": turns})[0] == ["a3<|im_end|>"]


def test_no_template_sees_a_flag() -> None:
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.keys() | list | join(',') }} {{ m.content }}<|im_end|>{% endfor %}"
    )
    row = Row("x:1", {"messages": chat({"train": True, "loss": 1}, {"weight": 0})})
    content = normalise_row(row, "messages")
    assert isinstance(content, Conversation)
    rendered = RowRenderer(tokenizer, train_on="all", notify=print)(content, "x:1")
    assert set(tokenizer.decode(rendered.input_ids).replace("<|im_end|>", " ").split()) == {
        "role,content", "q1", "a1", "q2", "a2"
    }  # fmt: skip


def test_train_on_all_leaves_out_what_is_switched_off() -> None:
    messages = chat(None, None)
    messages[0]["train"] = messages[3]["train"] = False
    trained, text = pieces({"messages": messages}, train_on="all")
    assert "q1" not in "".join(trained)
    assert "a2" not in "".join(trained)
    assert "".join(trained) == text.replace("q1<|im_end|>", "").replace("a2<|im_end|>", "").removeprefix("<|im_start|>")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"train": "false"}, r"messages\[1\].train must be true or false, found the text 'false'"),
        ({"weight": "0"}, r"messages\[1\].weight must be 0 \(not trained\) or 1, found the text '0'"),
        ({"weight": 0.5}, r"messages\[1\].weight must be 0 \(not trained\) or 1, found 0.5"),
        ({"loss": 2}, r"messages\[1\].loss must be true or false, found 2"),
        ({"training": [True]}, r"messages\[1\].training must be true or false"),
        ({"train": True, "weight": 0}, r"messages\[1\]: 'train: true' and 'weight: 0' contradict each other"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_flags_that_say_nothing_clear(flags: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=what) as caught:
        pieces({"messages": chat(flags)})
    assert caught.value.where == "x:1"


ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "tool", "content": "r1"},
    {"role": "assistant", "content": "a2"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a3"},
]


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("assistant",), ["a1<E>", "a2<E>", "a3<E>"]),
        (("assistant", "tool"), ["a1<E>", "r1", "a2<E>", "a3<E>"]),
        (("user",), ["q1<E>", "q2<E>"]),
        (("system", "assistant"), ["Be brief.<E>", "a1<E>", "a2<E>", "a3<E>"]),
    ],
)
@pytest.mark.parametrize("template", ["chatml", "qwen3", "granite"])
def test_roles_to_train(roles: tuple[str, ...], expected: list[str], template: str) -> None:
    trained, _ = pieces({"messages": ASKED}, template, roles_to_train=roles)
    end = "<|end_of_text|>" if template == "granite" else "<|im_end|>"
    trained = [piece.replace("<think>\n\n</think>\n\n", "") for piece in trained]
    if template == "granite":  # results of tools are a turn of their own there
        expected = [f"{piece}<E>" if piece == "r1" else piece for piece in expected]
    assert trained == [piece.replace("<E>", end) for piece in expected]


def test_a_flag_takes_a_message_out_and_brings_no_role_in(write: Write) -> None:
    messages = chat(None)
    messages[0]["train"] = True
    told: list[str] = []
    prepare([Source(write("a.jsonl", [{"messages": messages}]))], fixed_tokenizer("chatml"), max_length=99,
            notify=told.append)  # fmt: skip
    assert told[-1].endswith("1 'user' message is flagged for training, but roles_to_train is assistant: not trained")
    assert pieces({"messages": messages}, roles_to_train=("user", "assistant"))[0] == ["q1<|im_end|>", "a1<|im_end|>"]
    messages[0]["train"] = False
    assert pieces({"messages": messages}, roles_to_train=("user", "assistant"))[0] == ["a1<|im_end|>"]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("turn", ["a1<E>", "a3<E>"]),
        ("none", ["a1", "a3"]),
        ("last", ["a1", "a3<E>"]),
        ("all", ["<E>", "<E>", "a1<E>", "<E>", "<E>", "a3<E>"]),
    ],
)
def test_train_on_eos(which: str, expected: list[str]) -> None:
    messages = [dict(message) for message in ASKED if message["role"] != "tool"]
    messages[3]["train"] = False
    messages.insert(3, {"role": "user", "content": "q"})
    expected = ["<E>", "<E>", "a1<E>", "<E>", "<E>", "<E>", "a3<E>"] if which == "all" else expected
    trained, _ = pieces({"messages": messages}, train_on_eos=which)
    assert trained == [piece.replace("<E>", "<|im_end|>") for piece in expected]
    # Of Mistral's format the end of an answer is the end of no question.
    trained, _ = pieces({"messages": chat(None, None)}, "mistral3", train_on_eos="all")
    assert trained == [" a1</s>", " a2</s>"]


def trained_text(messages: list[dict[str, Any]], train_on: str = "assistant", **options: Any) -> str:
    """The trained text under a tokenizer whose EOS is not the end of a turn."""
    tokenizer = fixed_tokenizer("chatml")
    tokenizer.eos_token = "<|endoftext|>"
    render = RowRenderer(tokenizer, train_on=train_on, notify=print, chat=ChatOptions(**options))
    rendered = render(normalise_row(Row("x:1", {"messages": messages}), "messages"), "x:1")
    return tokenizer.decode([label for label in rendered.labels if label != IGNORE_INDEX])


@pytest.mark.parametrize(
    ("which", "expected"),
    [("turn", "q1<E>q2<E>"), ("none", "q1q2"), ("last", "q1q2<E>"), ("all", "q1<E><E>q2<E><E>")],
)
def test_ends_of_turns_where_no_answer_is_trained(which: str, expected: str) -> None:
    expected = expected.replace("<E>", "<|im_end|>")
    assert trained_text(chat(None, None), roles_to_train=("user",), train_on_eos=which) == expected
    off = chat({"weight": 0}, {"weight": 0})
    assert trained_text(off, roles_to_train=("user", "assistant"), train_on_eos=which) == expected


def test_the_end_of_a_last_turn_of_the_user() -> None:
    asked = [*chat(None), {"role": "user", "content": "q2"}]
    assert trained_text(asked, "last", roles_to_train=("user", "assistant")) == "q2<|im_end|>"
    tokenizer, told = fixed_tokenizer("chatml"), list[str]()
    tokenizer.eos_token = "<|endoftext|>"
    chat_options = ChatOptions(roles_to_train=("user", "assistant"))
    item = Item("x", "x:1", 9, normalise_row(Row("x:1", {"messages": chat(None)}), "messages"))
    turns = TurnRenderer(tokenizer, notify=told.append, chat=chat_options).render_item(item) or []
    labels = [[label for label in turn.labels if label != IGNORE_INDEX] for turn in turns]
    assert tokenizer.batch_decode(labels) == ["q1<|im_end|>", "a1<|im_end|>"]


def test_the_last_turn() -> None:
    assert pieces({"messages": chat(None, None)}, train_on="last")[0] == ["a2<|im_end|>"]
    columns = {"prompt": [{"role": "user", "content": "q0"}], "completion": chat(None, None)[1:]}
    assert pieces(columns, train_on="completion")[0] == ["a1<|im_end|>", "a2<|im_end|>"]
    assert pieces(columns, train_on="last")[0] == ["a2<|im_end|>"]


def test_options_that_mean_nothing() -> None:
    for options in ({"reasoning": "drop"}, {"on_empty": "skip"}, {"train_on_eos": "yes"}, {"roles_to_train": ("gpt",)},
                    {"roles_to_train": ()}):  # fmt: skip
        with pytest.raises(ArgumentError, match=next(iter(options))):
            ChatOptions(**options)


def test_the_blank_before_an_answer_is_trained() -> None:
    """Of a template without generation prompt: a model that is asked writes it, also where it is a token of its own."""
    tokenizer: PreTrainedTokenizerFast = fixed_tokenizer("mistral3")
    assert tokenizer.tokenize(" 2") == ["Ġ", "2"]
    messages = chat(None)
    messages[1]["content"] = "2"
    assert pieces({"messages": messages}, "mistral3")[0] == [" 2</s>"]
