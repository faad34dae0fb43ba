"""Conversion of another trainer's fields: apply its rules, account for every field, check each value of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from streamtune.base.privacy import find_secret, redact
from streamtune.errors import RecipeError, did_you_mean
from streamtune.recipe.aliases import ALIASES, VALUES
from streamtune.recipe.mistakes import expected, field_at
from streamtune.recipe.schema import RECIPES, Recipe, objectives_with
from streamtune.recipe.yaml import KeyPath, Marks

from .field_rules import FieldRule, UnconvertedError
from .peer_files import PeerFile

Kind = Literal["mapped", "default", "not_needed", "lost"]


@dataclass(frozen=True)
class FieldFinding:
    """The answer to one field."""

    kind: Kind
    """``default`` is a key of ours that is written because their default differs"""
    theirs: str
    """their field, with its value where the value is short and no secret"""
    where: str = ""
    """``file:line``; empty for a default"""
    ours: str = ""
    """our key and value"""
    note: str = ""
    """the reason, or what to look at"""
    trains: bool = False
    """True for a lost field without which another model is trained"""


@dataclass(frozen=True)
class PeerTrainer:
    """A trainer whose recipes can be read."""

    name: str
    """value of ``--from``"""
    title: str
    fields: Mapping[str, FieldRule]
    signs: str
    """fields that no other trainer has, with blanks between them; they identify its recipes"""
    objective: Callable[[Conversion], str]
    special: Callable[[Conversion], None]
    """converts the fields that depend on each other, before the rules are applied"""
    defaults: Callable[[Conversion], None]
    """writes the defaults that differ from ours, after the rules were applied"""

    def rule(self, name: str) -> FieldRule | None:
        """Return the rule of a field; ``group.field`` without a rule has the rule of its group."""
        group, _, inner = name.rpartition(".")
        found = self.fields.get(name) or (self.rule(group) if group else None)
        if found is None and not inner.count(".") and any(other.startswith(f"{name}.") for other in self.fields):
            return FieldRule(why="a group of keys", needed=False)
        return found


@dataclass
class Conversion:
    """A recipe on its way to ours; every field of ``file`` ends as one or several findings, and leaves ``left``."""

    file: PeerFile
    trainer: PeerTrainer
    kind: type[Recipe] = Recipe
    ours: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """our key -> its comment"""
    findings: list[FieldFinding] = field(default_factory=list)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    """our key -> the line of their field"""

    def __post_init__(self) -> None:
        self.left = dict(self.file.fields)
        """fields without an answer yet"""

    @property
    def objective(self) -> str:
        return next(name for name, kind in RECIPES.items() if kind is self.kind)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default for None and an empty text; the field stays without an answer."""
        value = self.file.fields.get(name)
        return default if value is None or value == "" else value

    def take(self, name: str) -> Any:
        """Return the value of a field that the caller answers; None for a missing field."""
        return self.left.pop(name, None)

    def dismiss(self, *names: str, why: str) -> None:
        """Report fields as not needed, except those that have an answer."""
        for name in names:
            if name in self.left:
                self.unneeded(name, why=why)

    def switch(self, name: str, key: str, value: Any, *, why: str = "off, as here", note: str = "") -> None:
        """Write ``key: value`` where a field is on; report the field as not needed where it is off."""
        if name in self.left and self.get(name):
            self.put(key, value, name, note=note)
        self.dismiss(name, why=why)

    def put(self, key: str, value: Any, *path: str | int, note: str = "", trains: bool = True) -> bool:
        """Write a top-level key of ours for a field of theirs; report a value that our schema refuses as lost.

        Args:
            key: Our key.
            value: Our value.
            path: Their field.
            note: Comment on it.
            trains: True if the loss of the value changes what is trained.

        Returns:
            True if it was written.
        """
        if key not in self.kind.model_fields and (others := objectives_with(key)):
            self.unneeded(*path, why=f"read by {' and '.join(others)} only")
            return False
        value = _known_value(key, value)
        if wrong := self._refusal(key, value):
            self.lose(*path, why=wrong, trains=trains)
            return False
        self.ours[key] = value
        self.lines[(key,)] = self.file.marks.line(path)
        theirs = _name(path)
        self.notes[key] = "; ".join(part for part in (theirs if theirs != key else "", note) if part)
        self._add("mapped", path, ours=_short(key, value), note=note)
        return True

    def merge(self, key: str, values: dict[str, Any], *path: str | int, note: str = "") -> bool:
        """Add entries to a key of ours that is a table."""
        return self.put(key, {**self.ours.get(key, {}), **values}, *path, note=note)

    def convert(
        self, key: str, convert: Callable[[Any], Any], value: Any, *path: str | int, trains: bool = True
    ) -> None:
        """Write a key of ours with the converted value; report the field as lost if the conversion fails."""
        try:
            converted = convert(value)
        except UnconvertedError as error:
            self.lose(*path, why=str(error), trains=trains)
        else:
            self.put(key, converted, *path, trains=trains)

    def default(self, key: str, value: Any, note: str = "") -> None:
        """Write a default of theirs that differs from ours, unless the recipe has the key."""
        if key in self.ours or self._refusal(key, value):
            return
        self.ours[key] = value
        text = f"default of {self.trainer.title}" + (f"; {note}" if note else "")
        self.notes[key] = text
        self.findings.append(FieldFinding("default", "", "", _short(key, value), note))

    def unneeded(self, *path: str | int, why: str) -> None:
        self._add("not_needed", path, note=why)

    def lose(self, *path: str | int, why: str = "", trains: bool = True) -> None:
        self._add("lost", path, note=why, trains=trains)

    def losing(self, *path: str | int, prefix: str = "") -> Callable[[str], None]:
        """Return a function that reports a loss of the field."""
        return lambda why: self.lose(*path, why=prefix + why)

    def missing(self, theirs: str, why: str, *, trains: bool = True) -> None:
        """Report a loss that belongs to no field of the file."""
        self.findings.append(FieldFinding("lost", theirs, "", "", why, trains))

    def report(self, theirs: str, where: str, why: str, trains: bool | None) -> None:
        """Report a field of another file: not needed for ``trains=None``, else lost."""
        lost = trains is not None
        self.findings.append(FieldFinding("lost" if lost else "not_needed", theirs, where, "", why, bool(trains)))

    def write(self, key: str, value: Any, theirs: str, where: str) -> None:
        """Write a key of ours for a field of another file or of a launcher."""
        if wrong := self._refusal(key, value):
            self.report(theirs, where, wrong, True)
            return
        self.ours[key] = value
        self.notes[key] = theirs.partition(":")[0]
        self.findings.append(FieldFinding("mapped", theirs, where, _short(key, value)))

    def refuse(self, *path: str | int, what: str, fix: str = "") -> RecipeError:
        """Return the error for a recipe that cannot be imported."""
        return RecipeError(what, where=self.file.marks.where(*path), fix=fix)

    def apply(self) -> None:
        """Apply the trainer's rules to all fields without an answer."""
        groups = {name.partition(".")[0] for name in self.trainer.fields if "." in name}
        for name in list(self.left):
            value = self.left.pop(name)
            if name in groups and isinstance(value, dict) and name not in self.trainer.fields:
                for inner, inside in value.items():
                    self._apply((name, inner), inside)
            else:
                self._apply((name,), value)

    def _apply(self, path: tuple[str, ...], value: Any) -> None:
        name = ".".join(path)
        rule = self.trainer.rule(name)
        if rule is None and name.startswith("no_") and value is True:  # a switch of a command: --no_bf16
            rule, value = self.trainer.fields.get(name.removeprefix("no_")), False
        if rule is None and name in ALIASES:
            rule = FieldRule(ALIASES[name])
        if rule is None:
            hint = did_you_mean(name, self.trainer.fields)
            self.lose(*path, why=f"no field of {self.trainer.title} that is known here" + (f"; {hint}" if hint else ""))
        elif rule.ours and value in (None, ""):
            self.unneeded(*path, why="no value")
        elif rule.ours:
            try:
                converted = rule.convert(value) if rule.convert else value
            except UnconvertedError as error:
                self.lose(*path, why=str(error), trains=rule.trains)
            else:
                if converted is None:
                    self.unneeded(*path, why="off, as here")
                    return
                note = "" if rule.convert and converted == value else rule.why
                self.put(rule.ours, converted, *path, note=note, trains=rule.trains)
        elif not rule.needed:
            self.unneeded(*path, why=rule.why)
        elif rule.is_off(value):
            same = "off, as here" if not value else "as here"
            self.unneeded(*path, why="no value" if value in (None, "") else same)
        else:
            self.lose(*path, why=rule.why, trains=rule.trains)

    def _refusal(self, key: str, value: Any) -> str:
        """Return the reason that our key does not take a value; empty if it does."""
        if key not in self.kind.model_fields:
            return f"recipes of {self.objective} have no '{key}'"
        if find_secret(str(value)):
            return "it holds a token or a password; a token for the hub belongs in HF_TOKEN"
        try:
            _adapter(self.kind, key).validate_python(value)
        except ValidationError:
            path, fragment = field_at((key,), self.kind)
            return f"our '{path[0]}' takes {expected(fragment)}"
        return ""

    def _add(self, kind: Kind, path: KeyPath, ours: str = "", note: str = "", trains: bool = False) -> None:
        name, value = _name(path), _at(self.file.fields, path)
        if len(path) == 1:
            self.left.pop(name, None)
        named_secret = any(word in name.lower() for word in ("token", "key", "secret", "password"))
        theirs = name if named_secret and kind != "mapped" else _short(name, value)
        self.findings.append(FieldFinding(kind, theirs, self.file.marks.where(*path), ours, note, trains))

    def marks(self) -> Marks:
        """Return the marks of our keys: the lines of their fields."""
        return Marks(self.file.marks.file, dict(self.lines))


@cache
def _adapter(kind: type[Recipe], key: str) -> TypeAdapter[Any]:
    annotation: Any = kind.model_fields[key].annotation
    for constraint in kind.model_fields[key].metadata:
        annotation = Annotated[annotation, constraint]
    has_config = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return TypeAdapter(annotation, config=None if has_config else ConfigDict(strict=True, allow_inf_nan=False))


def _known_value(key: str, value: Any) -> Any:
    """Translate a value that has another name here."""
    known = VALUES.get(key, {})
    if isinstance(value, list) and len(value) == 1 and str(value[0]) in known:
        value = value[0]
    return known[str(value)] if isinstance(value, str | int) and str(value) in known else value


def _at(fields: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            fields = fields[part]
        except (KeyError, IndexError, TypeError):
            return None
    return fields


def _name(path: KeyPath) -> str:
    return ".".join(str(part) for part in path if isinstance(part, str))


def _short(name: str, value: Any) -> str:
    """Return ``name: value`` in one line of at most 80 characters of value, without secrets."""
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
