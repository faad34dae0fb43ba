"""Rows of preference data: what their columns mean, and rows that mean nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from streamtune.data.preferences import Answers, detect_preference_type, normalise_preference
from streamtune.data.reading.readers import Row
from streamtune.data.row_types import Conversation, PromptCompletion, detect_type
from streamtune.errors import DataError

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def chats(*answers: list[Message], prompt: list[Message]) -> tuple[Conversation, ...]:
    return tuple(Conversation([*prompt, *turns], first_answer=len(prompt)) for turns in answers)


def normal(columns: dict[str, Any], row_type: str | None = None) -> Answers:
    row = Row("data.jsonl:3", columns)
    return normalise_preference(row, row_type or detect_preference_type(row))


ASKED = [user("one?")]
PAIR = chats([answer("good")], [answer("bad")], prompt=ASKED)
TEXT_PAIR = (PromptCompletion("one?", " good"), PromptCompletion("one?", " bad"))
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
TOOLS = [{"name": "f"}]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "one?", "chosen": " good", "rejected": " bad", "id": 7}, Answers("one?", TEXT_PAIR)),
        ({"prompt": ASKED, "chosen": [answer("good")], "rejected": [answer("bad")]}, Answers(ASKED, PAIR)),
        (
            {
                "prompt": json.dumps(ASKED),
                "chosen": json.dumps([answer("good")]),
                "rejected": json.dumps(answer("bad")),
            },
            Answers(ASKED, PAIR),
        ),
        ({"prompt": ASKED, "chosen": answer("good"), "rejected": answer("bad")}, Answers(ASKED, PAIR)),
        ({"prompt": ASKED, "chosen": "good", "rejected": "bad"}, Answers(ASKED, PAIR)),
        ({"prompt": "one?", "chosen": [answer("good")], "rejected": [answer("bad")]}, Answers(ASKED, PAIR)),
        ({"chosen": [*ASKED, answer("good")], "rejected": [*ASKED, answer("bad")]}, Answers(ASKED, PAIR)),
        (
            {"prompt": None, "chosen": [*ASKED, answer("good")], "rejected": [*ASKED, answer("bad")]},
            Answers(ASKED, PAIR),
        ),
        (  # the prompt as text beside whole conversations
            {"prompt": "one?", "chosen": [*ASKED, answer("good")], "rejected": [*ASKED, answer("bad")]},
            Answers(ASKED, PAIR),
        ),
        (  # the prompt as messages, repeated in both
            {"prompt": ASKED, "chosen": [*ASKED, answer("good")], "rejected": [*ASKED, answer("bad")]},
            Answers(ASKED, PAIR),
        ),
        (
            {
                "chosen": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "good"}],
                "rejected": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "bad"}],
            },
            Answers(ASKED, PAIR),
        ),
        (
            {"prompt": "[1, 2]", "chosen": "[3]", "rejected": '{"a": 4}'},
            Answers("[1, 2]", (PromptCompletion("[1, 2]", "[3]"), PromptCompletion("[1, 2]", '{"a": 4}'))),
        ),
    ],
)
def test_pairs(columns: dict[str, Any], expected: Answers) -> None:
    assert detect_preference_type(Row("x:1", columns)) == "preference"
    assert normal(columns) == expected


def test_a_pair_of_several_turns_with_tools() -> None:
    prompt = [{"role": "system", "content": "s"}, user("one?")]
    result = {"role": "tool", "content": "1"}
    columns = {"prompt": prompt, "chosen": [CALL, result, answer("1")], "rejected": [answer("2")], "tools": TOOLS}
    answers = normal(columns)
    assert answers.tools == TOOLS
    assert answers.contents == (
        Conversation([*prompt, CALL, result, answer("1")], TOOLS, first_answer=2),
        Conversation([*prompt, answer("2")], TOOLS, first_answer=2),
    )


def test_the_common_beginning_of_conversations_may_hold_answers() -> None:
    prompt = [user("one?"), answer("1"), user("two?")]
    columns = {"chosen": [*prompt, answer("2"), user("and?"), answer("3")], "rejected": [*prompt, answer("no")]}
    assert normal(columns).prompt == prompt
    assert [content.first_answer for content in normal(columns).contents] == [3, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("repeated", [[], [answer("Hello!"), user("one?")]], ids=["alone", "repeated"])
def test_a_prompt_that_begins_with_a_greeting_is_removed_from_its_answers(repeated: list[Message]) -> None:
    prompt = [answer("Hello!"), user("one?")]
    good, bad = [*repeated, answer("good")], [*repeated, answer("bad")]
    pair = chats([answer("good")], [answer("bad")], prompt=prompt)
    assert normal({"prompt": prompt, "chosen": good, "rejected": bad}) == Answers(prompt, pair)
    single = normal({"prompt": prompt, "completion": good, "label": True})
    assert single == Answers(prompt, pair[:1], labels=(True,))
    if repeated:
        assert normal({"prompt": "one?", "chosen": good, "rejected": bad}) == Answers(prompt, pair)
        assert normal({"prompt": "one?", "completion": good, "label": True}) == single


def test_an_answer_that_asks_the_prompt_again_is_no_repeated_prompt() -> None:
    again = [answer("What?"), user("one?"), answer("good")]
    answers = normal({"prompt": "one?", "chosen": again, "rejected": [answer("bad")]})
    assert answers == Answers(ASKED, chats(again, [answer("bad")], prompt=ASKED))


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Human: hi\n\nAssistant: Yes", "Human: hi\n\nAssistant: No", "Human: hi\n\nAssistant:"),
        ("Human: hi\n\nAssistant: It is", "Human: hi\n\nAssistant: In it", "Human: hi\n\nAssistant:"),
        ("Human: hi\n\nAssistant: Yes it", "Human: hi\n\nAssistant: Yes we", "Human: hi\n\nAssistant: Yes"),
        ("Q: two? A: 42", "Q: two? A: 4", "Q: two? A:"),
        ("Q: two? A: 4", "Q: two? A: 4, or 5", "Q: two? A:"),
        ("1+1=2", "1+1=3", "1+1="),
        ("Frage? Größe", "Frage? Grün", "Frage?"),
    ],
)
def test_the_common_beginning_of_texts_ends_between_words(chosen: str, rejected: str, prompt: str) -> None:
    answers = normal({"chosen": chosen, "rejected": rejected})
    assert answers.prompt == prompt
    texts = [
        content.prompt + content.completion for content in answers.contents if isinstance(content, PromptCompletion)
    ]
    assert texts == [chosen, rejected]


@pytest.mark.parametrize(
    ("scores", "margin"),
    [
        ({"score_chosen": 8, "score_rejected": 5.5}, 2.5),
        ({"chosen_score": "8", "rejected_score": " 9 "}, -1.0),
        ({"margin": 0.5}, 0.5),
        ({"score_chosen": None, "score_rejected": ""}, None),
        ({}, None),
    ],
)
def test_scores_are_kept_as_a_margin(scores: dict[str, Any], margin: float | None) -> None:
    assert normal({"prompt": "p", "chosen": "a", "rejected": "b", **scores}).margin == margin


@pytest.mark.parametrize(("label", "desirable"), [(True, True), (False, False), ("true", True), (" False", False)])
def test_unpaired(label: Any, desirable: bool) -> None:
    text = {"prompt": "one?", "completion": " good", "label": label}
    assert detect_preference_type(Row("x:1", text)) == "unpaired"
    assert normal(text) == Answers("one?", TEXT_PAIR[:1], labels=(desirable,))
    chat = {"prompt": ASKED, "completion": [answer("good")], "label": label}
    assert normal(chat) == Answers(ASKED, PAIR[:1], labels=(desirable,))


def test_identical_answers_are_marked() -> None:
    for columns in (
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        {"chosen": "all the same", "rejected": "all the same"},
        {"chosen": [*ASKED, answer("good")], "rejected": [*ASKED, answer("good")]},
    ):
        assert normal(columns).identical


def test_texts_for_a_tokenizer() -> None:
    assert normal({"prompt": "one?", "chosen": " good", "rejected": " bad"}).all_texts() == ["one?", " good", " bad"]
    assert normal({"prompt": ASKED, "chosen": answer("good"), "rejected": answer("bad")}).all_texts() == [
        "one?",
        "good",
        "bad",
    ]


P = {"prompt": "one?"}


@pytest.mark.parametrize(
    ("columns", "row_type", "what"),
    [
        ({"text": "x"}, None, "cannot recognise preference data from the columns 'text'"),
        ({**P, "chosen": "a"}, "preference", "needs the column 'rejected', found 'prompt', 'chosen'"),
        ({**P, "completion": "a"}, "unpaired", "needs the column 'label'"),
        ({"chosen": "one", "rejected": "two"}, None, "the row has no column 'prompt'"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("b")]}, None, "no common beginning"),
        ({"question": "q", "chosen": "The a", "rejected": "The b"}, None, "the column 'question' would be ignored"),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, None, "'prompt' is empty"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, None, "'prompt' is an empty list"),
        (
            {"prompt": 5, "chosen": "a", "rejected": "b"},
            None,
            "'prompt' must be a string or a list of messages, found a",
        ),
        ({**P, "chosen": "", "rejected": "b"}, None, "'chosen' is empty"),
        ({**P, "chosen": "a", "rejected": " \n"}, None, "'rejected' is empty"),
        ({**P, "chosen": "a", "rejected": None}, None, "'rejected' must be a string or a list of messages, found null"),
        (
            {**P, "chosen": "a", "rejected": [answer("b")]},
            None,
            "must both be text or both be messages, found text and a list of messages",
        ),
        ({**P, "chosen": [answer("a")], "rejected": [answer(" ")]}, None, "messages of 'rejected' are empty"),
        ({**P, "chosen": [answer("a")], "rejected": []}, None, "'rejected' is an empty list"),
        ({"chosen": [*ASKED, answer("a")], "rejected": ASKED}, None, "'rejected' is empty after the prompt, which"),
        ({"chosen": "A: yes.", "rejected": "A: yes. no"}, None, "'chosen' is empty after the prompt, which"),
        ({**P, "chosen": [user("x"), answer("a")], "rejected": [answer("b")]}, None, "must equal one of the user"),
        (
            {"prompt": ASKED, "chosen": [user("x"), answer("a")], "rejected": [answer("b")]},
            None,
            "'chosen' must begin with an assistant message or with the messages of 'prompt', found a 'user' message",
        ),
        (
            {"chosen": [*ASKED, answer("a"), user("b?"), answer("c")], "rejected": [*ASKED, answer("a"), user("d?")]},
            None,
            "must end with a user or tool message, found an assistant message",
        ),
        (
            {"prompt": [*ASKED, user("two?")], "chosen": [answer("a")], "rejected": [answer("b")]},
            None,
            "prompt[1] is the second 'user' message in succession",
        ),
        (
            {"prompt": ASKED, "chosen": [answer("a"), answer("b")], "rejected": [answer("b")]},
            None,
            "chosen[1] is the second 'assistant' message in succession",
        ),
        (
            {"prompt": [*ASKED, answer("x")], "chosen": [answer("a")], "rejected": [answer("b")]},
            None,
            "the prompt of 'chosen' must end with a user or tool message, found an assistant message",
        ),
        (
            {"prompt": ASKED, "chosen": [{"role": "asistant"}], "rejected": [answer("b")]},
            None,
            "chosen[0] has the unkno",
        ),
        (
            {**P, "chosen": "a", "rejected": "b", "score_chosen": 5},
            None,
            "'score_rejected' must be a finite number, found",
        ),
        (
            {**P, "chosen": "a", "rejected": "b", "score_chosen": "high", "score_rejected": 1},
            None,
            "'score_chosen' must be a finite number, found 'high'",
        ),
        (
            {**P, "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": float("nan")},
            None,
            "'score_rejected' must be a finite number, found nan",
        ),
        ({**P, "chosen": "a", "rejected": "b", "margin": True}, None, "'margin' must be a finite number, found True"),
        ({**P, "chosen": "a", "rejected": "b", "margin": [1]}, None, "'margin' must be a finite number, found [1]"),
        ({**P, "completion": "a", "label": 1}, None, "'label' must be true (desirable) or false, found 1"),
        ({**P, "completion": "a", "label": "good"}, None, "'label' must be true (desirable) or false, found 'good'"),
        ({**P, "completion": "a", "label": None}, None, "'label' must be true (desirable) or false, found None"),
        ({**P, "completion": "", "label": True}, None, "'completion' is empty"),
        ({**P, "chosen": "\ud83d", "rejected": "b"}, None, "lone surrogate"),
        ({**P, "chosen": [answer("a")], "rejected": [answer("b")], "tools": "f"}, None, "'tools' must be a list"),
    ],
)
def test_wrong_rows(columns: dict[str, Any], row_type: str | None, what: str) -> None:
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        normal(columns, row_type)
    assert caught.value.where == "data.jsonl:3"


def test_supervised_training_names_the_command_for_pairs() -> None:
    with pytest.raises(DataError) as caught:
        detect_type(Row("x:1", {"prompt": "p", "chosen": "a", "rejected": "b"}))
    assert "streamtune dpo" in caught.value.fix
