"""Read YAML text as plain values, with the line of every key, and write a recipe as YAML.

A recipe is read by stricter rules than YAML 1.1:

- Scalars follow the YAML 1.2 core schema. ``1e-5`` and ``012`` (twelve) are numbers; ``no`` and ``on`` are text.
- A key may occur only once in a mapping.
- Anchors, aliases, merge keys, tags and second documents are refused.
- Size, depth and number of values are limited, so that a hostile file cannot exhaust time or memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from streamtune.errors import RecipeError

from .keys.adapters import keys_without_effect
from .rules import is_given
from .schema import Recipe

KeyPath = tuple[str | int, ...]
"""Path of a value, such as ``("datasets", 0, "path")``."""

MAX_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_VALUES = 2048
"""Maximum number of keys and values. A large recipe has about a hundred."""
MAX_DIGITS = 1000
MAX_KEY = 200
"""Maximum number of characters of a key."""

# The YAML 1.2 core schema (yaml.org/spec/1.2.2, section 10.3.2).
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_FORBIDDEN = re.compile("[\0\ud800-\udfff]")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Mistake:
    """Mistake in a recipe.

    Args:
        path: Path of the key. For a missing key, the line of its nearest parent is shown.
        what: Sentence of the error.
        fix: Fix of the error; may be empty.
        line: Line in the file, if the path alone does not give it (a duplicate key).
    """

    path: KeyPath
    what: str
    fix: str = ""
    line: int | None = None


@dataclass
class KeyOrigins:
    """Place where each key of a recipe was set: a line of the file, or a command-line setting.

    Args:
        file: Path of the recipe, as the user gave it.
        lines: Line of each key and list item, counted from 1.
        settings: Command-line setting that set a key, such as ``--set max_length=4096``.
    """

    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    settings: dict[KeyPath, str] = field(default_factory=dict)

    def key_origin(self, *path: str | int) -> str:
        """Return ``file:line`` of a key or of its nearest parent, or the setting that set it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.settings:
                return self.settings[path[:end]]
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}"
        return f"{self.file}:1"

    def rename_key(self, old: KeyPath, new: KeyPath) -> None:
        """Move the origins of a key, and of all keys below it, to a new path."""

        def renamed_path(path: KeyPath) -> KeyPath:
            return (*new, *path[len(old) :]) if path[: len(old)] == old else path

        self.lines = {renamed_path(path): line for path, line in self.lines.items()}
        self.settings = {renamed_path(path): setting for path, setting in self.settings.items()}

    def set_origin(self, path: KeyPath, setting: str) -> None:
        """Record that a setting set this key, and delete earlier origins of this key and of all keys below it."""
        self.lines = {old: line for old, line in self.lines.items() if old[: len(path)] != path}
        self.settings = {old: by for old, by in self.settings.items() if old[: len(path)] != path}
        self.settings[path] = setting

    def key_line(self, path: KeyPath) -> int:
        """Return the line of a key or of its nearest parent.

        For a key that a command-line setting set, return a number larger than all line numbers.
        """
        for end in range(len(path), 0, -1):
            if path[:end] in self.settings:
                break
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return MAX_BYTES


def show_path(path: KeyPath) -> str:
    """Return a path as a user writes it: ``datasets[0].path`` for ``("datasets", 0, "path")``."""
    shown = ""
    for part in path:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else part
    return shown


def parse_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar in the YAML 1.2 core schema."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _INT.fullmatch(text):
        if len(text) > MAX_DIGITS:  # more than Python converts, to a number or back to text
            return text
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def read_yaml(text: str, file: str) -> tuple[Any, KeyOrigins, list[Mistake]]:
    """Read one YAML document.

    Args:
        text: Document.
        file: Name of the document in error messages.

    Returns:
        The values (``dict``, ``list``, ``str``, ``int``, ``float``, ``bool``, ``None``; ``None`` for an empty
        document), the line of each key, and an error for each duplicate key. Of duplicate keys the first is kept.

    Raises:
        RecipeError: The text is not YAML, or uses a feature of YAML that a recipe may not use.
    """
    reader = _Reader(text, file)
    try:
        return reader.read_document(), reader.origins, reader.mistakes
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, file) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"the character U+{ord(text[error.position]):04X} is not allowed in a text file"
        raise RecipeError(what, where=f"{file}:{line}", fix="save the file as plain UTF-8 text") from error


class _Reader:
    """Builds values from PyYAML's events one by one, so that reading stops at a limit."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.origins = KeyOrigins(file)
        self.mistakes: list[Mistake] = []
        self.values = 0
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)

    def read_document(self) -> Any:
        next(self.events)  # start of the stream
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return None
        value = self.read_value(next(self.events), ())
        next(self.events)  # end of the document
        if not isinstance(after := next(self.events), yaml.StreamEndEvent):
            raise self.error_at(after, "a recipe has only one document; a second one starts here", "delete the '---'")
        return value

    def read_value(self, event: yaml.Event, path: KeyPath) -> Any:
        if anchor := getattr(event, "anchor", None):
            name = f"*{anchor}" if isinstance(event, yaml.AliasEvent) else f"&{anchor}"
            raise self.error_at(
                event, f"anchors and aliases are not allowed: '{name}'", "write the full value, or quote it"
            )
        if tag := getattr(event, "tag", None):
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            raise self.error_at(event, f"tags are not allowed: '{shown}'", "delete the tag, or quote the value")
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.error_at(
                event, f"a recipe has at most {MAX_VALUES} keys and values", "write the path of data under datasets"
            )
        if len(path) > MAX_DEPTH:
            raise self.error_at(
                event, f"a recipe has at most {MAX_DEPTH} levels", "`streamtune schema` lists every key"
            )
        if isinstance(event, yaml.MappingStartEvent):
            return self.read_mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self.read_sequence(path)
        assert isinstance(event, yaml.ScalarEvent), event
        if wrong := _FORBIDDEN.search(event.value):  # written as an escape: "\\0"
            raise self.error_at(event, f"the character U+{ord(wrong[0]):04X} is not allowed in text", "delete it")
        return parse_scalar(event.value) if event.implicit[0] else event.value

    def read_mapping(self, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line_number(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                raise self.error_at(event, "a key must be plain text", "write braces and brackets after 'key: '")
            self.read_value(event, path)  # refuses an anchor or a tag on the key
            key = event.value
            if len(key) > MAX_KEY:
                raise self.error_at(
                    event, f"a key must have at most {MAX_KEY} characters; found {len(key):,}", "write a shorter key"
                )
            if key == "<<":
                raise self.error_at(event, "merge keys are not allowed: '<<'", "write all keys")
            if key in found:
                what = f"'{key}' occurs twice, first on line {self.origins.lines[*path, key]}"
                self.mistakes.append(Mistake((*path, key), what, "delete one of the two", line=line))
            # The first of two is kept, with its lines. The second is read too, because limits apply to it.
            self.origins.lines.setdefault((*path, key), line)
            found.setdefault(key, self.read_value(next(self.events), (*path, key)))
        return found

    def read_sequence(self, path: KeyPath) -> list[Any]:
        found: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            self.origins.lines.setdefault((*path, len(found)), _line_number(event.start_mark))
            found.append(self.read_value(event, (*path, len(found))))
        return found

    def error_at(self, event: yaml.Event, what: str, fix: str) -> RecipeError:
        return RecipeError(what, where=f"{self.file}:{_line_number(event.start_mark)}", fix=fix)


def _line_number(mark: Any) -> int:
    assert mark is not None, "the pure-Python reader marks every event"
    return int(mark.line) + 1


def _syntax_error(error: yaml.MarkedYAMLError, file: str) -> RecipeError:
    problem = error.problem or error.context or "cannot be read"
    where = f"{file}:{_line_number(error.problem_mark or error.context_mark)}"
    if "'\\t'" in problem:
        return RecipeError("YAML does not allow tabs as indentation", where=where, fix="indent with spaces")
    if "mapping values are not allowed" in problem:
        return RecipeError(
            "unexpected ': ' in a value, or a key indented too far",
            where=where,
            fix="quote the value, or align the key",
        )
    if "cannot start any token" in problem:
        character = problem.split("'")[1]
        return RecipeError(f"a value cannot start with '{character}'", where=where, fix="quote the value")
    if "expected <block end>" in problem:
        return RecipeError(
            "the line is not aligned with the lines above",
            where=where,
            fix="indent keys of one level equally, and close every quote",
        )
    opened = f"{file}:{_line_number(error.context_mark)}" if error.context_mark else where
    if error.context == "while scanning a quoted scalar":
        return RecipeError(
            "the quote opened here is not closed", where=opened, fix="close the quote; write '' for a quote inside"
        )
    if (error.context or "").startswith("while parsing a flow"):
        return RecipeError(
            "the bracket or brace opened here is not closed", where=opened, fix="close the bracket or brace"
        )
    return RecipeError(
        f"the file is not YAML: {problem}", where=where, fix="quote the value, or see `streamtune recipes`"
    )


def dump_recipe(recipe: Recipe, *, comment: str = "") -> str:
    """Return the recipe as YAML, with every default written out, except of adapter keys that have no effect.

    Args:
        recipe: Recipe; keys without a value are left out.
        comment: Lines to write above it as comments.

    Returns:
        YAML that ``load_recipe`` reads as an equal recipe.

    Example:
        >>> from streamtune.recipe import load_recipe
        >>> dump_recipe(load_recipe("quickstart").recipe).splitlines()[0]
        'objective: sft'
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    # mode="json" turns tuples into lists.
    unread = {key for key in keys_without_effect(recipe) if not is_given(recipe, key)}
    values = recipe.model_dump(mode="json", exclude_none=True, exclude=unread)
    return head + dump_yaml(values)


def dump_yaml(values: dict[str, Any]) -> str:
    """Return keys and values as YAML that ``read_yaml`` reads as equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which would be read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    folded = any(character in text for character in "\r\x85\u2028\u2029")  # line breaks a reader would fold
    if folded or text.endswith("\n\n") or text.isspace():  # a block of which the end cannot be seen
        style = '"'
    elif "\n" in text:
        style = "|"
    elif parse_scalar(text) != text:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
