"""Rules for the fields of another trainer's recipe: our key, the reason that a field is not needed, or what is lost.

A trainer's table is a dict, field -> rule. ``"trl.beta"`` is the field ``beta`` of the group ``trl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamtune.base.adapters import NAMED_STARTS
from streamtune.recipe.aliases import ALIASES, SWITCHES

OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None", "false", "no")
"""Values with which a field does nothing, so that nothing is lost without it."""


class UnconvertedError(ValueError):
    """A value that has no counterpart, with the reason."""


@dataclass(frozen=True)
class FieldRule:
    """The answer to a field of another trainer."""

    ours: str = ""
    """our key; empty where there is none"""
    convert: Callable[[Any], Any] | None = None
    """turns their value into ours, or raises :class:`UnconvertedError`; None keeps the value"""
    why: str = ""
    """the reason that the field is not needed, or what is lost without it"""
    needed: bool = True
    """False where StreamTune does the same automatically"""
    trains: bool = True
    """True if another model is trained without the field"""
    off: tuple[Any, ...] = ()
    """values with which the field does nothing, besides :data:`OFF`"""

    def is_off(self, value: Any) -> bool:
        """Return True if the field does nothing with this value."""
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in OFF + self.off)


def to(ours: str, convert: Callable[[Any], Any] | None = None, *, trains: bool = True, why: str = "") -> FieldRule:
    return FieldRule(ours, convert, why, trains=trains)


def no_counterpart(why: str = "", *, trains: bool = True, off: tuple[Any, ...] = ()) -> FieldRule:
    """Return the rule of a field without counterpart; with a value in ``off`` it does nothing."""
    return FieldRule(why=why, trains=trains, off=off)


def same(names: str, *, trains: bool = True) -> dict[str, FieldRule]:
    """Return the rules of fields that have our key's name, or a name that ``recipe.aliases`` knows."""
    return {name: to(ALIASES.get(name, name.rpartition(".")[2]), trains=trains) for name in names.split()}


def switches(names: str) -> dict[str, FieldRule]:
    """Return the rules of switches that ``recipe.aliases`` knows: each is a value of a key of ours."""
    return {name: _switch(*SWITCHES[name]) for name in names.split()}


def _switch(ours: str, value: str) -> FieldRule:
    return FieldRule(ours, lambda on: value if on in (True, "true", "True") else None)


def field_table(
    rules: Mapping[str, FieldRule],
    *,
    renamed: Mapping[str, str] = {},
    not_needed: Mapping[str, str] = {},
    lost: Mapping[str, str] = {},
    lost_beside_training: Mapping[str, str] = {},
) -> dict[str, FieldRule]:
    """Return the table of a trainer's fields; texts name several fields with blanks between them.

    Args:
        rules: Fields with a rule of their own.
        renamed: Our key -> fields that become this key, by their value or by the trainer's ``special``.
        not_needed: Reason -> fields that mean nothing here.
        lost: Loss -> fields without counterpart that change what is trained.
        lost_beside_training: Loss -> fields without counterpart that do not.
    """
    table = dict(rules)
    for fields, rule in (
        (renamed, lambda ours: FieldRule(ours)),
        (not_needed, lambda why: FieldRule(why=why, needed=False)),
        (lost, no_counterpart),
        (lost_beside_training, lambda why: no_counterpart(why, trains=False)),
    ):
        for text, names in fields.items():
            table |= dict.fromkeys(names.split(), rule(text))
    return table


def first_values(value: Any) -> Any:
    """Return our ``adapter_type`` for peft's ``init_lora_weights``; None for LoRA's own first values."""
    name = str(value).lower().replace("-", "_").partition("_niter_")[0]
    if name in ("true", "none", "default"):
        return None
    if name in NAMED_STARTS:
        return name
    *others, last = NAMED_STARTS
    raise UnconvertedError(f"first values of the adapters: adapter_type has {', '.join(others)} and {last}")


def or_none(value: Any) -> Any:
    """Return None for an empty value or 0, which switch the field off."""
    return value or None


def negated(value: Any) -> bool:
    return not value


def dft_or_nll(value: Any) -> str:
    return "dft" if value else "nll"


def not_negative(value: Any) -> Any:
    """Return 0 for a negative number, which switches the field off."""
    return max(value, 0) if isinstance(value, int) else value


def whole_modules(value: Any) -> Any:
    """Return a list of module names, given a list or a text with commas; None for none."""
    names = split_names(value) if isinstance(value, str) else value
    return or_none(names)


def one_of(values: dict[Any, Any], why: str = "") -> Callable[[Any], Any]:
    """Return a converter that looks a value up; other values are lost, for the reason ``why``."""

    def convert(value: Any) -> Any:
        for theirs, ours in values.items():
            if value == theirs and isinstance(value, bool) == isinstance(theirs, bool):
                return ours
        raise UnconvertedError(why or f"known here: {', '.join(map(str, values))}")

    return convert


def optimizer(value: Any) -> Any:
    """Return the name of an optimizer; refuse an optimizer of our name with other steps."""
    if isinstance(value, str) and value in OTHER_STEPS:
        raise UnconvertedError(OTHER_STEPS[value])
    return value


OTHER_STEPS = {
    "adafactor": "transformers' takes absolute steps; optim: adafactor is torch's, relative to the size of the weight",
    "muon": "write optim: muon, whose steps are scaled to the size of AdamW's",
    "galore_adamw": "write optim: galore, and compare the rank and the scale",
    "apollo_adamw": "write optim: apollo, and compare the rank and the scale",
    "schedule_free_adamw": "write optim: schedule_free, and compare its betas",
    "adopt_adamw": "write optim: adopt, and compare its betas",
    "came_pytorch": "write optim: came, and compare its betas",
}
"""Optimizers of other trainers that differ from ours of the same name."""


def split_names(value: Any) -> Any:
    """Return a list of names, given a list or a text with commas; ``all`` and ``all-linear`` are all linear layers."""
    names = _split(value, "names")
    return "all-linear" if names in (["all"], ["all-linear"], ["all_linear"], ["ALL"]) else names


def fraction_or_count(value: Any) -> Any:
    """Return a number of steps; refuse a part of all steps, which some trainers take as well."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        raise UnconvertedError("a part of all steps; write a number of steps")
    return int(value) if isinstance(value, float) and value == int(value) else value


def special_tokens(value: Any) -> Any:
    """Return our ``special_tokens``, given a table by the names of transformers; refuse tokens of classifiers."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
    if not isinstance(value, dict):
        raise UnconvertedError("a table of tokens was expected")
    given = {name: token for name, token in value.items() if token not in (None, "")}
    if other := next((name for name in given if name not in names), None):
        raise UnconvertedError(f"'{other}' is not a token of a causal language model")
    return given


def token_list(value: Any) -> Any:
    """Return a list of tokens, given a list or a text with commas."""
    return _split(value, "tokens")


def _split(value: Any, what: str) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UnconvertedError(f"a list of {what} was expected")
    return [text.strip() for text in texts if text.strip()]


def more_special_tokens(value: Any) -> Any:
    """Return our ``special_tokens`` for tokens without a role."""
    return {"additional_special_tokens": token_list(value)}


def rope_scaling(value: Any) -> Any:
    """Return our ``rope_scaling``, given the name of a type or the keys of a configuration; refuse other types."""
    keys = {"rope_type": value} if isinstance(value, str) else dict(value) if isinstance(value, dict) else {}
    if "type" in keys:  # its name in older configurations
        keys["rope_type"] = keys.pop("type")
    if keys.get("rope_type") not in ("linear", "yarn", "llama3", "dynamic", "longrope"):
        raise UnconvertedError("linear, yarn, llama3, dynamic and longrope are known here")
    factor = keys.get("factor")
    return {**keys, "factor": float(factor)} if isinstance(factor, int) else keys
