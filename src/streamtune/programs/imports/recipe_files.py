"""Read a recipe file of another trainer: YAML, JSON, or a shell script with a training command."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamtune.errors import RecipeError
from streamtune.recipe.loader import read_recipe_text
from streamtune.recipe.yaml import KeyOrigins, parse_scalar, read_yaml

from .field_rules import UnconvertedError

LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
"""Programs that start a training script as several processes."""

COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "swift": ("swift", ("sft", "pt", "rlhf")),
    "llamafactory-cli": ("llamafactory", ("train",)),
    "lmf": ("llamafactory", ("train",)),
    "trl": ("trl", ("sft", "dpo", "grpo", "kto", "rloo", "reward", "orpo", "cpo")),
    "axolotl": ("axolotl", ("train", "preprocess")),
    **dict.fromkeys(("axolotl.cli.train", "sft.py", "rlhf.py", "dpo.py", "grpo.py"), ("", ())),
}
"""{program or script: (trainer, subcommands that train)}.

The trainer of a script is empty if only the script's path shows it.
"""

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
"""``$NAME``, ``${NAME}``, and ``${NAME:-VALUE}`` with the value for a variable that is not set."""
_COMPUTED = re.compile(r"\$[({]|`")
"""Beginning of text that the shell replaces by its own result."""


@dataclass
class PeerFile:
    """Fields of another trainer's recipe, with their lines in the file."""

    fields: dict[str, Any]
    marks: KeyOrigins
    path: Path
    trainer: str = ""
    """Trainer of the command, such as ``trl``; empty for YAML and JSON."""
    command: str = ""
    """Subcommand, such as ``sft``, ``dpo`` or ``rlhf``; empty for YAML and JSON."""
    environment: dict[str, tuple[str, int]] = field(default_factory=dict)
    """{environment variable set before the command: (value, line)}."""
    launcher: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """{option of the launcher, such as ``torchrun``: (value, line)}."""
    notes: list[str] = field(default_factory=list)

    def candidate_paths(self, name: str) -> tuple[Path, Path]:
        """Return two paths: ``name`` relative to the working directory, and relative to the recipe's folder."""
        return Path(name).expanduser(), self.path.resolve().parent / Path(name).expanduser()


def read_peer_file(path: Path) -> PeerFile:
    """Return the fields of a YAML or JSON file, or of the command in a shell script.

    Raises:
        RecipeError: The file has no keys and no training command, or cannot be read.
    """
    text = read_recipe_text(path)
    named_otherwise = path.suffix not in (".yaml", ".yml", ".json")
    if path.suffix in (".sh", ".bash") or (named_otherwise and _find_training_commands(text)):
        return _read_script(text, path)
    if path.suffix == ".json":
        text = text.replace("\t", "    ")  # YAML accepts JSON, except for tabs
    fields, marks, mistakes = read_yaml(text, str(path))
    if not isinstance(fields, dict) or not fields:
        raise RecipeError(
            "the file has no keys and values", where=str(path), fix="give a YAML or JSON recipe, or a shell script"
        )
    notes = [f"{path}:{mistake.line}: {mistake.what}" for mistake in mistakes]
    return PeerFile(fields, marks, path, notes=notes)


def _read_script(text: str, path: Path) -> PeerFile:
    commands, assigned = _find_training_commands(text), _find_assignments(text)
    if not commands:
        raise RecipeError(
            "the script has no training command",
            where=str(path),
            fix="supported commands: swift sft, swift pt, swift rlhf, llamafactory-cli train, trl sft, trl dpo, "
            "trl grpo",
        )
    words, at = commands[0]
    trainer, command, options = COMMANDS[Path(words[at][0]).name][0], "", at + 1
    if trainer:
        command, options = words[at + 1][0], at + 2
    else:
        trainer = next((name for name in ("swift", "trl", "axolotl") if name in words[at][0]), "")
        command = Path(words[at][0]).stem
    read = PeerFile({}, KeyOrigins(str(path)), path, trainer, command)
    exported = [word for each in _split_statements(text) if each[0][0] == "export" for word in each[1:]]
    for word, line in (*exported, *words[:at]):
        if found := _ASSIGNMENT.fullmatch(word):
            read.environment[found[1]] = (_expand_variables(found[2], assigned), line)
    read.launcher = _find_launcher_options(words[:at], assigned)
    name = ""
    for word, line in words[options:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            read.marks.lines[(name,)] = line
            read.fields[name] = _parse_value(value, assigned) if equals else True
        elif not name:
            raise RecipeError(
                f"the command reads its arguments from '{word}'",
                where=f"{path}:{line}",
                fix=f"import that file: `streamtune recipes import {word}`",
            )
        else:
            value, before = _parse_value(word, assigned), read.fields[name]
            several = [*before, value] if isinstance(before, list) else [before, value]
            read.fields[name] = value if before is True else several
    if trainer == "trl" and isinstance(config := read.fields.get("config"), str):
        told = f" and loss_type: {command}" if command in ("kto", "orpo", "cpo") else ""
        raise RecipeError(
            f"the command reads its arguments from '{config}'",
            where=f"{path}:{read.marks.lines[('config',)]}",
            fix=f"add the command's other options{told} to that file, then run `streamtune recipes import {config}`",
        )
    read.notes += [
        f"{path}:{line}: '${match[1] or match[3]}' is not set by the script"
        for word, line in words[options:]
        for match in _VARIABLE.finditer(word)
        if (match[1] or match[3]) not in assigned and match[2] is None
    ]
    read.notes += [
        f"{path}:{line}: the shell computes '{word}': write its value"
        for word, line in words[options:]
        if _COMPUTED.search(_expand_variables(word, assigned))
    ]
    if len(commands) > 1:
        read.notes.append(f"{path}:{commands[1][0][0][1]}: only the first training command is converted")
    return read


def _find_launcher_options(words: list[tuple[str, int]], assigned: dict[str, str]) -> dict[str, tuple[Any, int]]:
    """Return {option: (value, line)} for the launcher's options, which precede the training script."""
    found: dict[str, tuple[Any, int]] = {}
    starts = [place for place, (word, _) in enumerate(words) if Path(word).name in LAUNCHERS]
    name = ""
    for word, line in words[starts[-1] + 1 :] if starts else ():
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = (_parse_value(value, assigned) if equals else True, line)
            name = "" if equals else name
        elif name:
            found[name] = (_parse_value(word, assigned), line)
            name = ""
    return found


HASH, _IN_WORD = "\ue000", re.compile(r"(?<=[^\s'\"])#")
OPERATOR = "\ue001"
"""Mark before an operator of the shell, which is then a word of its own."""
_OPERATOR = re.compile(
    r"""(?P<other>'[^']*'|"(?:\\.|[^"\\])*"|\\.|\$\([^()]*\)|\$\{[^{}]*\}|(?:^|(?<=\s))\#[^\n]*)"""
    r"""|(?:(?<!\S)\d+)?(?:&>>?|[<>]+&?)|\|\|?|&&?|;+""",
    re.DOTALL,
)
"""Quoted text and comments, which have no operators, or an operator outside of them."""


def _find_training_commands(text: str) -> list[tuple[list[tuple[str, int]], int]]:
    """Return each training command of a script: its words with line numbers, and the index of the program."""
    found = []
    for words in _split_statements(text):
        for at, (word, _) in enumerate(words):
            known = COMMANDS.get(Path(word).name)
            follows = words[at + 1][0] if at + 1 < len(words) else ""
            if known and (not known[0] or follows in known[1]):
                found.append((words, at))
                break
    return found


def _split_statements(text: str) -> list[list[tuple[str, int]]]:
    """Return the statements of a script, as words with line numbers. Continued lines are one statement.

    Redirections are left out. Commands that ``;``, ``&``, ``|``, ``&&`` or ``||`` separate are statements of their own.
    """
    statements: list[list[tuple[str, int]]] = []
    words: list[tuple[str, int]] = []
    pending, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        continues = len(line) - len(line.rstrip("\\")) & 1 == 1
        start = start if pending else number
        pending += line[:-1] if continues else line
        try:
            # Within a word, `#` starts a comment for shlex but not for a shell: `own/rows#500`.
            marked = _OPERATOR.sub(lambda it: it["other"] or f" {OPERATOR}{it[0]} ", pending)
            parts = [part.replace(HASH, "#") for part in shlex.split(_IN_WORD.sub(HASH, marked), comments=True)]
        except ValueError:  # an unclosed quote: the statement continues
            pending += "\n"
            continue
        redirected = False  # the word after a redirection is a file
        for part in parts:
            if not part.startswith(OPERATOR):
                words += [] if redirected else [(part, start)]
                redirected = False
            elif not (redirected := "<" in part or ">" in part) and words:
                statements.append(words)
                words = []
        pending = ""
        if not continues and words:
            statements.append(words)
            words = []
    if words:
        statements.append(words)
    return statements


def _find_assignments(text: str) -> dict[str, str]:
    """Return {variable: value} for the variables that a script assigns in separate statements."""
    assigned: dict[str, str] = {}
    for words in _split_statements(text):
        for word, _ in words[1:] if words[0][0] == "export" else words:
            found = _ASSIGNMENT.fullmatch(word)
            if not found:
                break
            assigned[found[1]] = _expand_variables(found[2], assigned)
    return assigned


def _expand_variables(word: str, assigned: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda name: assigned.get(name[1] or name[3], name[0] if name[2] is None else name[2]), word)


def _parse_value(word: str, assigned: dict[str, str]) -> Any:
    return parse_scalar(_expand_variables(word, assigned))


def parse_json_text(value: Any) -> Any:
    """Parse JSON text such as ``'{"factor": 2.0}'``; return values of other types unchanged.

    Raises:
        UnconvertedError: The text is not a JSON object or list.
    """
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("{", "[")):
        raise UnconvertedError("expected a JSON object or list, or a mapping")
    try:
        return read_yaml(value, "JSON")[0]
    except RecipeError as error:
        raise UnconvertedError(error.what) from None
