"""Define rules that refuse combinations of recipe keys, and the base class and value types of keys.

A rule table is a tuple of rules, in the same file of ``keys/`` as the keys that it checks. A condition maps keys to
values, and holds if every key has the value::

    Clash({"packing": True, "batching": "buckets"}, "'packing' does not combine with buckets", "delete the line")

The mistake is reported at the first key. A key of a group is written ``engine.weights``. A property of the recipe can
be used like a key. ``{key}`` in a text is replaced by the key's value, ``{key:,}`` by its value in Python's format.
Braces around text with a blank (``{prompt: ...}``) stay as they are.

Rules are evaluated in the order of the tables, and the first mistake is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from streamtune.base.text import SIZE_PATTERN

DELETE = "delete the line"
ONE_OF_TWO = "delete one of the two"
KEEP_ONE = "keep one of them"

Condition = Mapping[str, object]
"""Key -> the value that it must have, or one of the tests below."""


@dataclass(frozen=True)
class Given:
    """Test: the value of the key differs from its default."""


GIVEN = Given()


class Not:
    """Test: the key has none of these values."""

    def __init__(self, *values: object) -> None:
        self.values = values


class OneOf:
    """Test: the key has one of these values."""

    def __init__(self, *values: object) -> None:
        self.values = values


def names_where(table: Mapping[str, object], condition: Condition) -> OneOf:
    """Return the test that a key's value is the name of a table entry that meets a condition.

    Example: ``names_where(OPTIMIZERS, {"averages": True})``.
    """
    return OneOf(*(name for name, row in table.items() if condition_holds(row, condition)))


class Refusal(NamedTuple):
    """A mistake: the key whose line is reported, the error, and its fix."""

    key: str
    what: str
    fix: str = ""


class KeyRule(Protocol):
    """Protocol of a rule, which finds mistakes in a recipe or in a group of keys."""

    def refusals(self, spec: Any) -> Iterator[Refusal]:
        """Yield the mistakes in a recipe or a group of keys."""
        ...


@dataclass(frozen=True)
class Clash:
    """Rule: settings exclude each other.

    Args:
        when: Condition under which the settings are refused.
        what: Sentence of the error.
        fix: Fix of the error.
        key: Key whose line is reported; empty for the first key of ``when``.
    """

    when: Condition
    what: str
    fix: str = ""
    key: str = ""

    def refusals(self, spec: Any) -> Iterator[Refusal]:
        if condition_holds(spec, self.when):
            yield Refusal(
                self.key or next(iter(self.when)), fill_placeholders(self.what, spec), fill_placeholders(self.fix, spec)
            )


@dataclass(frozen=True)
class Reads:
    """Rule: a key is read only with one value of another key, and refused otherwise.

    Args:
        key: Key that is read.
        other: Other key.
        value: Value of the other key.
        why: Verb of the error, such as "is read only with".
        fix: Fix of the error; empty for "write OTHER: VALUE, or delete the line".
    """

    key: str
    other: str
    value: object
    why: str = "is read only with"
    fix: str = ""

    def refusals(self, spec: Any) -> Iterator[Refusal]:
        found = key_value(spec, self.other)
        if is_given(spec, self.key) and found != self.value:
            setting = f"{self.other}: {show_value(self.value)}"
            shown_value = f"'{found}'" if isinstance(found, str) else show_value(found)
            yield Refusal(
                self.key,
                f"'{self.key}' {self.why} '{setting}', and '{self.other}' is {shown_value}",
                self.fix or f"write {setting}, or {DELETE}",
            )


class OnlyFor:
    """Rule: only one objective reads some keys, and recipes of other objectives must not set them.

    Args:
        objective: Objective that reads the keys.
        keys: Keys that are refused in recipes of other objectives.
        what: Sentence of the error, with ``{key}`` and ``{objective}``.
    """

    def __init__(self, objective: str, *keys: str, what: str = "'{key}' is not read by {objective}") -> None:
        self.objective, self.keys, self.what = objective, keys, what

    def refusals(self, recipe: Any) -> Iterator[Refusal]:
        if recipe.objective != self.objective:
            for key in self.keys:
                if is_given(recipe, key):
                    yield Refusal(key, fill_placeholders(self.what.replace("{key}", key), recipe), DELETE)


class Where:
    """Rule: other rules are evaluated only if a condition holds.

    Args:
        when: Condition.
        rows: Rules to evaluate.
        text: Sentence of the error; the error of a rule replaces ``{}`` in it.
    """

    def __init__(self, when: Condition, *rows: KeyRule, text: str = "{}") -> None:
        self.when, self.rows, self.text = when, rows, text

    def refusals(self, spec: Any) -> Iterator[Refusal]:
        if condition_holds(spec, self.when):
            head, tail = (fill_placeholders(part, spec) for part in self.text.split("{}"))
            for key, what, fix in find_refusals(spec, self.rows):
                yield Refusal(key, f"{head}{what}{tail}", fix)


@dataclass(frozen=True)
class Custom:
    """Rule that calls a function, for conditions that depend on sums, list entries or names."""

    function: Callable[[Any], Iterator[Refusal]]

    def refusals(self, spec: Any) -> Iterator[Refusal]:
        return self.function(spec)


Rules = tuple[KeyRule, ...]
"""Rule table: rules in the order in which they are evaluated."""


def find_refusals(spec: Any, rules: Iterable[KeyRule]) -> Iterator[Refusal]:
    for rule in rules:
        yield from rule.refusals(spec)


def condition_holds(spec: Any, condition: Condition) -> bool:
    """Return True if in ``spec`` every key of ``condition`` has the given value or passes the given test."""
    return all(_meets_test(spec, key, wanted) for key, wanted in condition.items())


def _meets_test(spec: Any, key: str, test: object) -> bool:
    match test:
        case Given():
            return is_given(spec, key)
        case Not():
            return key_value(spec, key) not in test.values
        case OneOf():
            return key_value(spec, key) in test.values
        case _:
            return bool(key_value(spec, key) == test)


def key_value(spec: Any, key: str) -> Any:
    """Return the value of a key or property; None for a key of a missing group."""
    for part in key.split("."):
        spec = None if spec is None else getattr(spec, part)
    return spec


def is_given(spec: Any, key: str) -> bool:
    """Return True if a key's value differs from its default."""
    *groups, last = key.split(".")
    owner = key_value(spec, ".".join(groups)) if groups else spec
    default = type(owner).model_fields[last].get_default(call_default_factory=True)
    return bool(getattr(owner, last) != default)


def fill_placeholders(text: str, spec: Any) -> str:
    """Return a text with each ``{key}`` replaced by the key's value."""

    def show_key_value(found: re.Match[str]) -> str:
        value = key_value(spec, found[1])
        return format(value, found[2]) if found[2] else show_value(value)

    return re.sub(r"\{([a-z_.]+)(?::([^{} ]+))?\}", show_key_value, text)


def show_value(value: object) -> str:
    """Return a value as text, as it is written in a recipe."""
    return str(value).lower() if isinstance(value, bool) else str(value)


TOO_LARGE = "too_large"
"""Type of pydantic's error about a number above the limit of :func:`at_most`."""


def at_most(limit: int) -> AfterValidator:
    """Return a pydantic validator that refuses numbers above ``limit``.

    The limit is not part of the JSON schema: an error about text in place of a number is clearer without it.
    """

    def check(value: float) -> float:
        if value > limit:
            raise PydanticCustomError(TOO_LARGE, "too large", {"limit": limit})
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1), at_most(10**12)]
Steps = Annotated[int, Field(ge=0), at_most(10**12)]
Rows = Annotated[int, Field(ge=1), at_most(10**6)]
"""Number of rows in one forward, or of forwards in one step."""
Positive = Annotated[float, Field(gt=0), at_most(10**9)]
NotNegative = Annotated[float, Field(ge=0), at_most(10**9)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Size = Annotated[str, Field(pattern=SIZE_PATTERN, json_schema_extra={"examples": ["80GiB"]})]
"""Size in bytes as text with a unit; ``streamtune.base.text.parse_size`` converts it to a number."""


class Spec(BaseModel):
    """Base class of recipes and groups of keys.

    Types are strict, instances are frozen, and unknown keys and NaN are refused. The class variable ``rules`` checks
    combinations of keys.
    """

    rules: ClassVar[Rules] = ()
    """Rule table of these keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        defer_build=True,  # `--help` imports many classes that never check a value
    )

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for refusal in self.refusals():
            raise mistake(refusal.what, key=refusal.key, fix=refusal.fix)
        return self

    def refusals(self) -> Iterator[Refusal]:
        """Yield the mistakes that ``rules`` finds, in order."""
        return find_refusals(self, self.rules)


def mistake(what: str, *, key: str, fix: str = "") -> PydanticCustomError:
    """Return pydantic's error for a mistake in the value of ``key``; a key of a group is written ``engine.levels``."""
    # The text travels as context: a template would read braces in a user's value as its own placeholders.
    return PydanticCustomError("recipe", "{what}", {"what": what, "key": key, "mend": fix})
