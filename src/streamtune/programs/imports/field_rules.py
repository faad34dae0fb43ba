"""Rules that convert the fields of another trainer's recipe to StreamTune keys.

A table maps each field of a trainer to its rule. ``"trl.beta"`` is the field ``beta`` of the group ``trl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamtune.base.adapters import NAMED_STARTS
from streamtune.recipe.aliases import ALIASES, SWITCHES

OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "None", "false", "no")
"""Values that disable a field, so that nothing is lost if the field is not converted."""


class UnconvertedError(ValueError):
    """Error for a value that cannot be converted; its text is the reason."""


@dataclass(frozen=True)
class FieldRule:
    """Rule that converts a field of another trainer."""

    ours: str = ""
    """StreamTune key; empty if there is none."""
    convert: Callable[[Any], Any] | None = None
    """Function that converts a value, or raises :class:`UnconvertedError`; None keeps the value."""
    why: str = ""
    """Reason why the field is not needed, or what is lost without it."""
    needed: bool = True
    """False if nothing is lost without the field, for example because StreamTune does the same automatically."""
    changes_training: bool = True
    """True if training changes without the field."""
    off: tuple[Any, ...] = ()
    """Values that disable the field, in addition to :data:`OFF`."""

    def is_off(self, value: Any) -> bool:
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in OFF + self.off)


def key_rule(
    our_key: str, convert: Callable[[Any], Any] | None = None, *, changes_training: bool = True, why: str = ""
) -> FieldRule:
    """Return the rule of a field that becomes the StreamTune key ``our_key``."""
    return FieldRule(our_key, convert, why, changes_training=changes_training)


def no_counterpart(why: str = "", *, changes_training: bool = True, off: tuple[Any, ...] = ()) -> FieldRule:
    """Return the rule of a field without a StreamTune key; ``off`` lists values that disable the field."""
    return FieldRule(why=why, changes_training=changes_training, off=off)


def same_name_rules(names: str, *, changes_training: bool = True) -> dict[str, FieldRule]:
    """Return the rules of fields named like a StreamTune key or an alias; ``names`` are separated by spaces."""
    return {
        name: key_rule(ALIASES.get(name, name.rpartition(".")[2]), changes_training=changes_training)
        for name in names.split()
    }


def switch_rules(names: str) -> dict[str, FieldRule]:
    """Return the rules of on/off fields in ``recipe.aliases.SWITCHES``; if on, a field sets a key to a value."""
    return {name: _switch_rule(*SWITCHES[name]) for name in names.split()}


def _switch_rule(our_key: str, value: str) -> FieldRule:
    return FieldRule(our_key, lambda on: value if on in (True, "true", "True") else None)


def field_table(
    rules: Mapping[str, FieldRule],
    *,
    renamed: Mapping[str, str] = {},
    not_needed: Mapping[str, str] = {},
    lost: Mapping[str, str] = {},
    lost_without_effect: Mapping[str, str] = {},
) -> dict[str, FieldRule]:
    """Return {field: rule} for all fields of a trainer.

    Args:
        renamed: {StreamTune key: fields that become this key}. Fields are separated by spaces, here and below. Values
            are copied, unless ``PeerTrainer.special`` converts them.
        not_needed: {reason: fields that are not needed}.
        lost: {what is lost: fields that are not converted and change training}.
        lost_without_effect: {what is lost: fields that are not converted and do not change training}.
    """
    table = dict(rules)
    for fields, rule in (
        (renamed, lambda ours: FieldRule(ours)),
        (not_needed, lambda why: FieldRule(why=why, needed=False)),
        (lost, no_counterpart),
        (lost_without_effect, lambda why: no_counterpart(why, changes_training=False)),
    ):
        for text, names in fields.items():
            table |= dict.fromkeys(names.split(), rule(text))
    return table


def convert_adapter_initialisation(value: Any) -> Any:
    """Convert peft's ``init_lora_weights`` to StreamTune's ``adapter_type``; None for LoRA's default."""
    name = str(value).lower().replace("-", "_").partition("_niter_")[0]
    if name in ("true", "none", "default"):
        return None
    if name in NAMED_STARTS:
        return name
    *others, last = NAMED_STARTS
    raise UnconvertedError(f"unknown initialisation of adapters; adapter_type supports {', '.join(others)} and {last}")


def none_if_empty(value: Any) -> Any:
    """Return None for 0 and empty values, which disable the field; otherwise the value."""
    return value or None


def negate_switch(value: Any) -> bool:
    return not value


def dft_if_on(value: Any) -> str | None:
    return "dft" if value else None


def zero_if_negative(value: Any) -> Any:
    """Return 0 for a negative number, which disables the field; otherwise the value."""
    return max(value, 0) if isinstance(value, int) else value


def convert_module_list(value: Any) -> Any:
    """Return a list of module names from a list or a comma-separated text; None if it is empty."""
    names = convert_module_names(value) if isinstance(value, str) else value
    return none_if_empty(names)


def lookup_converter(values: dict[Any, Any], why: str = "") -> Callable[[Any], Any]:
    """Return a converter that looks a value up in ``values``; for other values it raises an UnconvertedError."""

    def convert(value: Any) -> Any:
        for theirs, ours in values.items():
            if value == theirs and isinstance(value, bool) == isinstance(theirs, bool):
                return ours
        raise UnconvertedError(why or f"supported values: {', '.join(map(str, values))}")

    return convert


def convert_optimizer_name(value: Any) -> Any:
    """Return an optimizer name unchanged, if StreamTune's optimizer of this name takes the same steps.

    Raises:
        UnconvertedError: StreamTune's optimizer of this name takes other steps.
    """
    if isinstance(value, str) and value in OTHER_STEPS:
        raise UnconvertedError(OTHER_STEPS[value])
    return value


OTHER_STEPS = {
    "adafactor": "transformers' Adafactor takes absolute steps; StreamTune's takes steps relative to the weight",
    "muon": "write optim: muon, whose steps are scaled to the size of AdamW's steps",
    "galore_adamw": "write optim: galore, and compare its rank and scale with this recipe's",
    "apollo_adamw": "write optim: apollo, and compare its rank and scale with this recipe's",
    "schedule_free_adamw": "write optim: schedule_free, and compare its betas with this recipe's",
    "adopt_adamw": "write optim: adopt, and compare its betas with this recipe's",
    "came_pytorch": "write optim: came, and compare its betas with this recipe's",
}
"""{optimizer whose steps differ from StreamTune's optimizer of the same name: advice}."""


def convert_module_names(value: Any) -> Any:
    """Return a list of names from a list or a comma-separated text; ``all`` becomes ``all-linear``."""
    names = _split_list(value, "names")
    return "all-linear" if names in (["all"], ["all-linear"], ["all_linear"], ["ALL"]) else names


def names_all_layers(value: Any) -> bool:
    """Return True if a field that names layers for adapters stands for all linear layers."""
    try:
        return value is True or convert_module_names(value) == "all-linear"
    except UnconvertedError:
        return False


def convert_step_count(value: Any) -> Any:
    """Return a number of steps as an integer; other values are returned unchanged.

    Raises:
        UnconvertedError: The value is a fraction of all steps.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
        raise UnconvertedError("a fraction of all steps is not supported; write a number of steps")
    return int(value) if isinstance(value, float) and value == int(value) else value


def convert_special_tokens(value: Any) -> Any:
    """Convert a mapping with transformers' names (``pad_token``, ...) to StreamTune's ``special_tokens``.

    Raises:
        UnconvertedError: The value is not a mapping, or names another token.
    """
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens")
    if not isinstance(value, dict):
        raise UnconvertedError("special tokens must be a mapping of names to tokens")
    given = {name: token for name, token in value.items() if token not in (None, "")}
    if other := next((name for name in given if name not in names), None):
        raise UnconvertedError(f"'{other}' is not a special token of causal language models")
    return given


def convert_token_list(value: Any) -> Any:
    return _split_list(value, "tokens")


def _split_list(value: Any, what: str) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UnconvertedError(f"expected a list of {what}")
    return [text.strip() for text in texts if text.strip()]


def convert_additional_special_tokens(value: Any) -> Any:
    return {"additional_special_tokens": convert_token_list(value)}


def convert_rope_scaling(value: Any) -> Any:
    """Convert a RoPE scaling type or a mapping of settings to StreamTune's ``rope_scaling``.

    Raises:
        UnconvertedError: The type is not supported.
    """
    keys = {"rope_type": value} if isinstance(value, str) else dict(value) if isinstance(value, dict) else {}
    if "type" in keys:  # its name in older configurations
        keys["rope_type"] = keys.pop("type")
    if keys.get("rope_type") not in ("linear", "yarn", "llama3", "dynamic", "longrope"):
        raise UnconvertedError("StreamTune supports the types linear, yarn, llama3, dynamic and longrope")
    factor = keys.get("factor")
    return {**keys, "factor": float(factor)} if isinstance(factor, int) else keys
