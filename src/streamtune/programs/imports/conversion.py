"""Convert the fields of another trainer's recipe: apply rules, check values, and record the outcome of each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from streamtune.base.privacy import find_secret, redact
from streamtune.errors import RecipeError, did_you_mean
from streamtune.recipe.aliases import ALIASES, VALUES
from streamtune.recipe.mistakes import describe_accepted_values, schema_at
from streamtune.recipe.schema import RECIPES, Recipe, objectives_with
from streamtune.recipe.yaml import KeyOrigins, KeyPath

from .field_rules import FieldRule, UnconvertedError
from .recipe_files import PeerFile

Kind = Literal["mapped", "default", "not_needed", "lost"]


@dataclass(frozen=True)
class FieldFinding:
    """Outcome of the conversion of one field, or a default of the other trainer that is written to the recipe."""

    kind: Kind
    """Outcome: ``mapped`` to a StreamTune key, ``default``, ``not_needed``, or ``lost`` (not converted)."""
    theirs: str
    """Original field, with its value if that is short and not a secret."""
    where: str = ""
    """Place of the field, ``file:line``; empty for a default."""
    ours: str = ""
    """StreamTune key with its value; empty if no key is written."""
    note: str = ""
    """Reason for the outcome, or advice."""
    changes_training: bool = False
    """True if the field is not converted and training changes without it."""


@dataclass(frozen=True)
class PeerTrainer:
    """Another trainer whose recipes can be converted, such as axolotl."""

    name: str
    title: str
    fields: Mapping[str, FieldRule]
    signs: str
    """Names of fields, separated by spaces, that identify the trainer's recipes."""
    objective: Callable[[Conversion], str]
    special: Callable[[Conversion], None]
    """Function that converts fields that depend on each other; called before the rules are applied."""
    defaults: Callable[[Conversion], None]
    """Function that writes the trainer's defaults that differ from StreamTune's; called after the rules."""

    def find_rule(self, name: str) -> FieldRule | None:
        """Return the conversion rule of a field; a field ``group.name`` without a rule has the rule of ``group``."""
        group, _, inner = name.rpartition(".")
        found = self.fields.get(name) or (self.find_rule(group) if group else None)
        if found is None and not inner.count(".") and any(other.startswith(f"{name}.") for other in self.fields):
            return FieldRule(why="a group of keys", needed=False)
        return found


@dataclass
class Conversion:
    """State of a conversion of another trainer's recipe (``file``) to StreamTune keys (``ours``) and findings."""

    file: PeerFile
    trainer: PeerTrainer
    kind: type[Recipe] = Recipe
    ours: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """{StreamTune key: comment on the key in the new recipe}."""
    findings: list[FieldFinding] = field(default_factory=list)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """{StreamTune key: line of the original field}."""
    written_by: dict[str, KeyPath] = field(default_factory=dict)
    """{StreamTune key: original field}."""

    def __post_init__(self) -> None:
        self.left = dict(self.file.fields)
        """Fields that are not reported yet."""

    @property
    def objective(self) -> str:
        return next(name for name, kind in RECIPES.items() if kind is self.kind)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field without reporting the field; ``default`` if the value is missing or empty."""
        value = self.file.fields.get(name)
        return default if value is None or value == "" else value

    def pop_field(self, name: str) -> Any:
        """Return the value of a field, or None if it is missing; the caller must report the outcome."""
        return self.left.pop(name, None)

    def mark_unneeded(self, *names: str, why: str) -> None:
        """Report fields as not needed, except fields whose outcome is reported already."""
        for name in names:
            if name in self.left:
                self.report_unneeded(name, why=why)

    def write_if_on(self, name: str, key: str, value: Any, *, why: str = "off, as here", note: str = "") -> None:
        """Write ``key: value`` if the field ``name`` is on; report the field as not needed if it is off."""
        if name in self.left and self.get(name):
            self.write_key(key, value, name, note=note)
        self.mark_unneeded(name, why=why)

    def write_key(
        self,
        key: str,
        value: Any,
        *path: str | int,
        note: str = "",
        changes_training: bool = True,
        replaces: bool = False,
    ) -> bool:
        """Write a StreamTune key for an original field, or report the field as lost.

        The field is lost if the schema rejects the value, or if another field has set the key to another value.

        Args:
            path: Names and indices that lead to the original field.
            note: Comment on the key in the new recipe.
            changes_training: True if training changes without the value.
            replaces: True if the value includes or overrides the value of another field.

        Returns:
            True if the key was written.
        """
        if key not in self.kind.model_fields and (others := objectives_with(key)):
            self.report_unneeded(*path, why=f"read by {' and '.join(others)} only")
            return False
        value = _resolve_value_alias(key, value)
        if wrong := self._why_rejected(key, value):
            self.report_lost(*path, why=wrong, changes_training=changes_training)
            return False
        other = self.written_by.get(key, path)
        if other != path and self.ours.get(key, value) != value and not replaces:
            why = f"'{_dotted_name(other)}' sets '{_show_field(key, self.ours[key])}'; '{key}' has one value"
            self.report_lost(*path, why=why, changes_training=changes_training)
            return False
        theirs = _dotted_name(path)
        if self.written_by.get(key) == path:
            self.findings = [found for found in self.findings if found.ours != _show_field(key, self.ours[key])]
        self.written_by[key] = path
        self.ours[key] = value
        self.lines[(key,)] = self.file.marks.key_line(path)
        self.notes[key] = "; ".join(part for part in (theirs if theirs != key else "", note) if part)
        self._add_finding("mapped", path, our_setting=_show_field(key, value), note=note)
        return True

    def merge_into_key(self, key: str, values: dict[str, Any], *path: str | int, note: str = "") -> bool:
        """Add entries to a key whose value is a mapping; return True if it was written."""
        return self.write_key(key, {**self.ours.get(key, {}), **values}, *path, note=note, replaces=True)

    def convert_key(
        self,
        key: str,
        convert: Callable[[Any], Any],
        value: Any,
        *path: str | int,
        changes_training: bool = True,
        replaces: bool = False,
    ) -> None:
        """Write a key with the value that ``convert`` returns; if ``convert`` fails, report the field as lost."""
        try:
            converted = convert(value)
        except UnconvertedError as error:
            self.report_lost(*path, why=str(error), changes_training=changes_training)
        else:
            self.write_key(key, converted, *path, changes_training=changes_training, replaces=replaces)

    def write_default(self, key: str, value: Any, note: str = "") -> None:
        """Write the other trainer's default for a key, unless the recipe already has the key."""
        if key in self.ours or self._why_rejected(key, value):
            return
        self.ours[key] = value
        text = f"default of {self.trainer.title}" + (f"; {note}" if note else "")
        self.notes[key] = text
        self.findings.append(FieldFinding("default", "", "", _show_field(key, value), note))

    def report_unneeded(self, *path: str | int, why: str) -> None:
        self._add_finding("not_needed", path, note=why)

    def report_lost(self, *path: str | int, why: str = "", changes_training: bool = True) -> None:
        """Report a field as not converted; ``changes_training`` is True if training changes without the field."""
        self._add_finding("lost", path, note=why, changes_training=changes_training)

    def make_lost_reporter(self, *path: str | int, prefix: str = "") -> Callable[[str], None]:
        """Return a function that takes a reason and reports the field as not converted."""
        return lambda why: self.report_lost(*path, why=prefix + why)

    def report_lost_setting(self, setting: str, why: str, *, changes_training: bool = True) -> None:
        """Report a setting that is not a field of the file, such as a trainer's default, as not converted."""
        self.findings.append(FieldFinding("lost", setting, "", "", why, changes_training))

    def report_other_file(self, setting: str, where: str, why: str, changes_training: bool | None) -> None:
        """Report a field of another file as not converted, or as not needed if ``changes_training`` is None."""
        lost = changes_training is not None
        self.findings.append(
            FieldFinding("lost" if lost else "not_needed", setting, where, "", why, bool(changes_training))
        )

    def write_other_file(self, key: str, value: Any, setting: str, where: str) -> None:
        """Write a key for a field of another file, or for a command-line option of a launcher."""
        if wrong := self._why_rejected(key, value):
            self.report_other_file(setting, where, wrong, True)
            return
        self.ours[key] = value
        self.notes[key] = setting.partition(":")[0]
        self.findings.append(FieldFinding("mapped", setting, where, _show_field(key, value)))

    def import_error(self, *path: str | int, what: str, fix: str = "") -> RecipeError:
        return RecipeError(what, where=self.file.marks.key_origin(*path), fix=fix)

    def apply_rules(self) -> None:
        """Apply the trainer's rules to all fields whose outcome is not reported yet."""
        groups = {name.partition(".")[0] for name in self.trainer.fields if "." in name}
        for name in list(self.left):
            value = self.left.pop(name)
            if name in groups and isinstance(value, dict) and name not in self.trainer.fields:
                for inner, inside in value.items():
                    self._apply_rule((name, inner), inside)
            else:
                self._apply_rule((name,), value)

    def _apply_rule(self, path: tuple[str, ...], value: Any) -> None:
        name = ".".join(path)
        rule = self.trainer.find_rule(name)
        if rule is None and name.startswith("no_") and value is True:  # a switch of a command: --no_bf16
            rule, value = self.trainer.fields.get(name.removeprefix("no_")), False
        if rule is None and name in ALIASES:
            rule = FieldRule(ALIASES[name])
        if rule is None:
            hint = did_you_mean(name, self.trainer.fields)
            self.report_lost(*path, why=f"unknown field of {self.trainer.title}" + (f"; {hint}" if hint else ""))
        elif rule.ours and value in (None, ""):
            self.report_unneeded(*path, why="no value")
        elif rule.ours:
            try:
                converted = rule.convert(value) if rule.convert else value
            except UnconvertedError as error:
                self.report_lost(*path, why=str(error), changes_training=rule.changes_training)
            else:
                if converted is None:
                    self.report_unneeded(*path, why="off, as in StreamTune")
                    return
                note = "" if rule.convert and converted == value else rule.why
                self.write_key(rule.ours, converted, *path, note=note, changes_training=rule.changes_training)
        elif not rule.needed:
            self.report_unneeded(*path, why=rule.why)
        elif rule.is_off(value):
            same = "off, as in StreamTune" if not value else "as in StreamTune"
            self.report_unneeded(*path, why="no value" if value in (None, "") else same)
        else:
            self.report_lost(*path, why=rule.why, changes_training=rule.changes_training)

    def _why_rejected(self, key: str, value: Any) -> str:
        if key not in self.kind.model_fields:
            return f"{self.objective} recipes have no key '{key}'"
        if find_secret(str(value)):
            return "the value contains a token or password; put a hub token into HF_TOKEN"
        try:
            _type_adapter(self.kind, key).validate_python(value)
        except ValidationError:
            path, fragment = schema_at((key,), self.kind)
            return f"StreamTune's '{path[0]}' must be {describe_accepted_values(fragment)}"
        return ""

    def _add_finding(
        self, kind: Kind, path: KeyPath, our_setting: str = "", note: str = "", changes_training: bool = False
    ) -> None:
        name, value = _dotted_name(path), _value_at(self.file.fields, path)
        if len(path) == 1:
            self.left.pop(name, None)
        named_secret = any(word in name.lower() for word in ("token", "key", "secret", "password"))
        theirs = name if named_secret and kind != "mapped" else _show_field(name, value)
        self.findings.append(
            FieldFinding(kind, theirs, self.file.marks.key_origin(*path), our_setting, note, changes_training)
        )

    def original_lines(self) -> KeyOrigins:
        return KeyOrigins(self.file.marks.file, dict(self.lines))


@cache
def _type_adapter(kind: type[Recipe], key: str) -> TypeAdapter[Any]:
    annotation: Any = kind.model_fields[key].annotation
    for constraint in kind.model_fields[key].metadata:
        annotation = Annotated[annotation, constraint]
    has_config = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return TypeAdapter(annotation, config=None if has_config else ConfigDict(strict=True, allow_inf_nan=False))


def _resolve_value_alias(key: str, value: Any) -> Any:
    """Return the value in StreamTune's spelling if ``value`` is a known alias; otherwise ``value``."""
    known = VALUES.get(key, {})
    if isinstance(value, list) and len(value) == 1 and str(value[0]) in known:
        value = value[0]
    return known[str(value)] if isinstance(value, str | int) and str(value) in known else value


def _value_at(fields: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            fields = fields[part]
        except (KeyError, IndexError, TypeError):
            return None
    return fields


def _dotted_name(path: KeyPath) -> str:
    return ".".join(str(part) for part in path if isinstance(part, str))


def _show_field(name: str, value: Any) -> str:
    """Return ``name: value`` in one line, without secrets; the value is cut to 80 characters."""
    if value is None:
        return name
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        text = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    elif isinstance(value, list):
        text = ", ".join(map(str, value)) or "[]"
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    text = " ".join(redact(text).split())
    return f"{name}: {text if len(text) <= 80 else text[:77] + '...'}"
