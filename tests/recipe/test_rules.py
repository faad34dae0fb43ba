"""Rule tables: rows name existing keys, and each kind of row yields its error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from streamtune.recipe import RECIPES, DatasetSpec, EngineSpec, TokenizerSpec
from streamtune.recipe.keys.optimizer import LearningRateGroup
from streamtune.recipe.rules import (
    GIVEN,
    Clash,
    KeyRule,
    Not,
    OneOf,
    OnlyFor,
    Reads,
    Refusal,
    Spec,
    Where,
    fill_placeholders,
    find_refusals,
)

KINDS: tuple[type[Spec], ...] = (*RECIPES.values(), DatasetSpec, EngineSpec, TokenizerSpec, LearningRateGroup)


class Lunch(Spec):
    """Keys for the rules of these tests."""

    objective: str = "sft"
    soup: str = "none"
    bread: bool = False
    guests: int = 1


def rows(rules: Iterable[KeyRule]) -> Iterator[KeyRule]:
    """Yield all rows of a table, including rows under a condition."""
    for rule in rules:
        yield rule
        if isinstance(rule, Where):
            yield from rows(rule.rows)


def names_of(rule: KeyRule) -> Iterator[str]:
    """Return the keys that a row names, in conditions and in the braces of its texts."""
    if isinstance(rule, Clash):
        yield from (*rule.when, *placeholders(rule.what + rule.fix))
    if isinstance(rule, Where):
        yield from (*rule.when, *placeholders(rule.text))
    if isinstance(rule, Reads):
        yield from (rule.key, rule.other)
    if isinstance(rule, OnlyFor):
        yield from rule.keys


def placeholders(text: str) -> list[str]:
    return [name for name, _ in re.findall(r"\{([a-z_.]+)(:[^{} ]+)?\}", text)]


def is_key(kind: type[Spec], name: str) -> bool:
    """Return True if a name is a key or property; of groups other than ``engine`` only the first part is checked."""
    first, _, rest = name.partition(".")
    if first == "engine" and rest:
        return is_key(EngineSpec, rest)
    return first in kind.model_fields or isinstance(getattr(kind, first, None), property)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_name_keys_that_are_there(kind: type[Spec]) -> None:
    kinds = (*RECIPES.values(), kind) if kind in RECIPES.values() else (kind,)
    tables = (*kind.rules, *getattr(kind, "whole_weights", ()))
    names = {name for rule in rows(tables) for name in names_of(rule)}
    assert [name for name in names if not any(is_key(each, name) for each in kinds)] == []


def found(*rules: KeyRule, **keys: Any) -> list[Refusal]:
    return list(find_refusals(Lunch.model_validate(keys), rules))


def test_a_clash_is_reported_at_its_first_key_with_the_values_of_the_recipe() -> None:
    row = Clash({"guests": GIVEN, "soup": OneOf("hot", "cold"), "bread": Not(True)}, "{guests:,} eat {soup}", "none")
    assert found(row, guests=1000, soup="hot") == [Refusal("guests", "1,000 eat hot", "none")]
    assert found(row, guests=1, soup="hot") == found(row, guests=2, bread=True, soup="hot") == []
    assert found(Clash({"bread": True}, "{bread}", key="soup"), bread=True) == [Refusal("soup", "true", "")]


def test_a_key_that_is_read_with_one_value() -> None:
    assert found(Reads("bread", "soup", "hot"), bread=True, soup="cold") == [
        Refusal(
            "bread",
            "'bread' is read only with 'soup: hot', and 'soup' is 'cold'",
            "write soup: hot, or delete the line",
        )
    ]
    assert found(Reads("bread", "soup", "hot"), bread=True, soup="hot") == []


def test_keys_of_one_objective() -> None:
    assert found(OnlyFor("sft", "soup", "bread"), objective="dpo", bread=True) == [
        Refusal("bread", "'bread' is not read by dpo", "delete the line")
    ]
    assert found(OnlyFor("sft", "bread"), bread=True) == []


def test_rows_below_a_condition_share_a_sentence() -> None:
    row = Where({"soup": GIVEN}, Clash({"bread": True}, "bread swells", "eat it"), text="{}, and soup is {soup}")
    assert found(row, bread=True, soup="{}") == [Refusal("bread", "bread swells, and soup is {}", "eat it")]
    assert found(row, bread=True) == []


@pytest.mark.parametrize("text", ["add sample: {prompt: ...}", "{path: NAME}", "{", "{}"])
def test_braces_of_yaml_are_text(text: str) -> None:
    assert fill_placeholders(text, Lunch()) == text
