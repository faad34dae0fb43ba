"""The parts of every recipe type: one base class, a few ranges, and an error for a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from streamtune.base.text import SIZE_PATTERN
from streamtune.recipe.rules import Refusal, Rules, refusals_of

TOO_LARGE = "too_large"
"""Type of the error that a number is larger than any run needs."""


def at_most(limit: int) -> AfterValidator:
    """Return a check that refuses absurd numbers: a slip, which would end as no memory, no time, or an overflow.

    It is none of the schema's ranges: an error about a text in a number's place is clearer without it.
    """

    def check(value: float) -> float:
        if value > limit:
            raise PydanticCustomError(TOO_LARGE, "too large", {"limit": limit})
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1), at_most(10**12)]
Steps = Annotated[int, Field(ge=0), at_most(10**12)]
Rows = Annotated[int, Field(ge=1), at_most(10**6)]
"""Rows in one forward, or forwards in one step."""
Positive = Annotated[float, Field(gt=0), at_most(10**9)]
NotNegative = Annotated[float, Field(ge=0), at_most(10**9)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Size = Annotated[str, Field(pattern=SIZE_PATTERN, json_schema_extra={"examples": ["80GiB"]})]
"""Bytes, as people write them; ``streamtune.base.text.parse_size`` reads it."""


class Spec(BaseModel):
    """The base of all recipe types: strict, frozen, no unknown key, no NaN, and the rules of its keys."""

    rules: ClassVar[Rules] = ()
    """Table of rules about these keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        for refusal in self.refusals():
            raise mistake(refusal.what, key=refusal.key, mend=refusal.mend)
        return self

    def refusals(self) -> Iterator[Refusal]:
        """Yield what the rules refuse, in the order of the tables."""
        return refusals_of(self, self.rules)


def mistake(what: str, *, key: str, mend: str = "") -> PydanticCustomError:
    """Return the error of a mistake in the value of ``key`` (``engine.levels`` for one in a group), in words."""
    # The text travels as context: a template would read braces in a user's value as its own placeholders.
    return PydanticCustomError("recipe", "{what}", {"what": what, "key": key, "mend": mend})
