"""Built-in rewards on right and wrong completions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import ArgumentError, RunError
from streamtune.tasks.rewards import BUILTINS, load_rewards


def score(spec: str, completion: Any, **row: Any) -> float | None:
    rewards = load_rewards([spec])
    return rewards(["?"], [completion], {name: [value] for name, value in row.items()}).total[0]


@pytest.mark.parametrize(
    ("spec", "completion", "answer", "expected"),
    [
        ("exact_match", " Paris\n", "Paris", 1.0),
        ("exact_match", "paris", "Paris", 0.0),
        ("exact_match(ignore_case=True)", "paris", "Paris", 1.0),
        ("exact_match", "Paris, of course", "Paris", 0.0),
        ("exact_match", "7", 7, 1.0),
        ("exact_match", "b", ["a", "b"], 1.0),
        ("exact_match", "", "", 1.0),
        ("exact_match(tag='answer')", "<answer>1</answer> no: <answer> 2 </answer>.", "2", 1.0),
        ("exact_match(tag='answer')", "2", "2", 0.0),
        ("exact_match(tag='answer')", "<answer>2", "2", 0.0),
    ],
)
def test_exact_match(spec: str, completion: str, answer: Any, expected: float) -> None:
    assert score(spec, completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("The answer is 42.", 42, 1.0),
        ("First 1, then 2, so 3", "3", 1.0),
        ("First 1, then 2, so 3", "2", 0.0),
        (r"so \boxed{12} and not 13", "12", 1.0),
        (r"\boxed{1} is wrong, \boxed{\frac{3}{4}}.", "0.75", 1.0),
        (r"\boxed{-\dfrac{1}{2}}", "-0.5", 1.0),
        (r"\boxed{\text{about } 5{,} or 6}", "6", 1.0),
        (r"\boxed{7", "7", 1.0),
        ("2 + 2 = 4\n#### 4\n", "He has 2 + 2 = 4.\n#### 4", 1.0),
        ("#### $1,234,567.50", "1234567.5", 1.0),
        ("3/4", "0.75", 1.0),
        ("10-12", "12", 1.0),
        ("x = -12", "-12", 1.0),
        ("x = \N{MINUS SIGN}12", "-12", 1.0),
        ("50%", "50", 1.0),
        (".5", "1/2", 1.0),
        ("1.5e3", "1500", 1.0),
        ("1e400", "5", 0.0),
        ("1/0", "0", 0.0),
        ("no number at all", "5", 0.0),
        ("", "5", 0.0),
        ("0.3333333", "1/3", 1.0),
        ("0.333", "1/3", 0.0),
    ],
)
def test_numeric_answer(completion: str, answer: Any, expected: float) -> None:
    assert score("numeric_answer", completion, answer=answer) == expected


def test_numeric_answer_within_a_tolerance() -> None:
    assert score("numeric_answer(tolerance=0.01)", "0.333", answer="1/3") == 1.0
    assert score("numeric_answer(tolerance=0.01)", "1007", answer=1000) == 1.0


def test_an_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(RunError, match="'forty-two' has no finite number"):
        score("numeric_answer", "42", answer="forty-two")


@pytest.mark.parametrize(
    ("spec", "completion", "row", "expected"),
    [
        ("regex_match", "call 555-1234 now", {"pattern": r"\d{3}-\d{4}"}, 1.0),
        ("regex_match", "call me", {"pattern": r"\d"}, 0.0),
        ("regex_match(whole=True)", " 123\n", {"pattern": r"\d+"}, 1.0),
        ("regex_match(whole=True)", "123 and more", {"pattern": r"\d+"}, 0.0),
        ('regex_match(pattern="^[a-z]+:[0-9]+$")', "port:80", {}, 1.0),
        ('regex_match(column="form")', "abc", {"form": "b"}, 1.0),
    ],
)
def test_regex_match(spec: str, completion: str, row: dict[str, str], expected: float) -> None:
    assert score(spec, completion, **row) == expected


def test_a_pattern_that_is_none_is_an_error() -> None:
    with pytest.raises(RunError, match="is not a regular expression"):
        score("regex_match", "x", pattern="(")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>I see.</think><answer>4</answer>", 1.0),
        ("\n<think>\nI see.\n</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think>I see.</think> so <answer>4</answer>", 0.0),
        ("<answer>4</answer><think>I see.</think>", 0.0),
        ("<think>I see.</think><answer>4</answer> Bye", 0.0),
        ("<think></think><answer>4</answer>", 0.0),
        ("<think>I <think> see.</think><answer>4</answer>", 0.0),
        ("<think>I see.</think><answer>4", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_tags(completion: str, expected: float) -> None:
    assert score("format_tags", completion) == expected


def test_other_tags() -> None:
    assert score('format_tags(tags=["plan", "code", "test"])', "<plan>a</plan><code>b</code><test>c</test>") == 1.0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2, "uniqueItems": True},
        "size": {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 0.1}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"name": "Ann", "age": 3, "tags": ["a", "b"], "size": 0.3}', 1.0),
        ('```json\n{"name": "Ann"}\n```', 1.0),
        ('{"name": "Ann", "size": null, "age": 3.0}', 1.0),
        ('Here you are: {"name": "Ann"}', 0.0),
        ('{"name": ""}', 0.0),
        ('{"name": "ann"}', 0.0),
        ('{"age": 3}', 0.0),
        ('{"name": "Ann", "age": 3.5}', 0.0),
        ('{"name": "Ann", "age": true}', 0.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "age": 150}', 0.0),
        ('{"name": "Ann", "tags": ["c"]}', 0.0),
        ('{"name": "Ann", "tags": ["a", "a"]}', 0.0),
        ('{"name": "Ann", "tags": ["a", "b", "a"]}', 0.0),
        ('{"name": "Ann", "size": 0.25}', 0.0),
        ('{"name": "Ann", "size": NaN}', 0.0),
        ('{"name": "Ann", "size": 1e999}', 0.0),
        ('{"name": "Ann", "more": 1}', 0.0),
        ("[" * 100_000, 0.0),
        ("1" * 10_000, 0.0),
        ("[]", 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(completion: str, expected: float) -> None:
    assert score("json_schema", completion, schema=SCHEMA) == expected


@pytest.mark.parametrize(
    ("schema", "document", "expected"),
    [
        ({"const": 1}, "1.0", 1.0),
        ({"const": 1}, "true", 0.0),
        ({"enum": [{"a": [1]}]}, '{"a": [1]}', 1.0),
        ({"oneOf": [{"minimum": 2}, {"maximum": 4}]}, "3", 0.0),
        ({"oneOf": [{"minimum": 2}, {"maximum": 4}]}, "1", 1.0),
        ({"allOf": [{"minimum": 2}, {"maximum": 4}]}, "3", 1.0),
        ({"not": {"type": "string"}}, '"a"', 0.0),
        ({"type": ["string", "null"]}, "null", 1.0),
        ({"minItems": 1}, "[]", 0.0),
        ({"minItems": 1}, '"not a list"', 1.0),
        ({"additionalProperties": {"type": "number"}}, '{"a": "x"}', 0.0),
        ('{"type": "number"}', "3", 1.0),
        (True, "3", 1.0),
        (False, "3", 0.0),
    ],
)
def test_words_of_a_schema(schema: Any, document: str, expected: float) -> None:
    assert score("json_schema", document, schema=schema) == expected


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"$ref": "#/x"}, "the schema has '\\$ref', which is not supported"),
        ({"properties": {"a": {"if": True}}}, "the schema.properties.a has 'if', which is not supported"),
        ({"anyOf": [{"type": "text"}]}, "the schema.anyOf.0: type cannot be 'text'"),
        ({"minLength": -1}, "minLength cannot be -1"),
        ({"pattern": "("}, "pattern cannot be"),
        ({"items": 3}, "the schema.items must be an object, true or false, found int"),
        ({"properties": []}, "the schema.properties must be an object"),
        ("{", "the schema is not valid JSON"),
    ],
)
def test_a_schema_that_is_not_read_in_full_is_an_error(schema: Any, says: str) -> None:
    with pytest.raises(RunError, match=says):
        score("json_schema", "{}", schema=schema)


def test_messages_count_by_the_last_ones_content() -> None:
    for content in ("42", [{"type": "text", "text": "42"}]):
        messages = [{"role": "assistant", "content": "no"}, {"role": "assistant", "content": content}]
        assert score("exact_match", messages, answer="42") == 1.0


def test_a_row_with_nothing_to_compare_has_no_score() -> None:
    rewards = load_rewards(["exact_match"])
    assert rewards(["?", "?"], ["a", "a"], {"answer": [None, "a"]}).total == [None, 1.0]


def test_an_error_of_a_row_names_the_row_and_blames_no_function() -> None:
    rewards = load_rewards(["json_schema"])
    with pytest.raises(RunError, match="the reward 'json_schema' cannot be computed: the schema has") as error:
        rewards(["?"] * 2, ["{}"] * 2, {"schema": [{}, {"$ref": "x"}]}, origins=["rows.jsonl:4", "rows.jsonl:9"])
    assert error.value.where == "rows.jsonl:9"
    assert error.value.fix.startswith("fix the row")


@pytest.mark.parametrize("spec", ["regex_match(pattern='(')", "json_schema(schema={'$ref': 'x'})"])
def test_a_value_for_all_rows_is_checked_before_the_run(spec: str) -> None:
    with pytest.raises(ArgumentError, match=r"not a regular expression|which is not supported") as error:
        load_rewards([spec])
    assert error.value.where == "reward_funcs"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("format_tags(tags='think')", "must be list or tuple, found 'think'"),
        ("exact_match(ignore_case=1)", "must be bool, found 1"),
        ("exact_match(tag=3)", "must be str, found 3"),
        ("numeric_answer(tolerance=True)", "must be int or float, found True"),
    ],
)
def test_options_have_types(spec: str, says: str) -> None:
    with pytest.raises(ArgumentError, match="the option") as error:
        load_rewards([spec])
    assert error.value.what.endswith(says)


def test_a_value_and_a_column_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="exclude each other"):
        load_rewards(['exact_match(answer="a", column="b")'])


def test_every_builtin_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    for name, builtin in BUILTINS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        assert all(f"`{option}`" in row for option in builtin.option_names), name
