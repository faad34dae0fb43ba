"""Print results on stdout, and notes, progress and errors on stderr."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.padding import PaddingDimensions
from rich.panel import Panel
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from streamtune import __version__
from streamtune.base.paths import open_nonblocking
from streamtune.base.privacy import redact_values, safe_text
from streamtune.errors import ArgumentError, RecipeError, StreamTuneError, UserError

if not os.environ.get("COLUMNS", "").strip("0"):  # rich would show nothing in no columns
    os.environ.pop("COLUMNS", None)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
MAX_RECIPE_BYTES = 64 * 1024
"""Maximum number of bytes read of a recipe to show the line of an error; no recipe may be larger."""
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Unprintable characters that `json.dumps` leaves unescaped."""
MIN_TABLE_WIDTH = 40
"""Width in columns below which a terminal gets plain lines instead of two-column tables."""
SCREEN_WIDTH = 80
"""Maximum width of a title with a right-aligned part, in columns."""

_stdout_needed = [True]


@contextmanager
def loading_libraries() -> Iterator[Status]:
    """Context manager: show a message while libraries are imported, with garbage collection off.

    Collections during the imports would find little garbage, and take a fifth of the time. Objects of the first import
    are frozen, so that later collections skip them.
    """
    collects, is_first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        with err.status("loading libraries") as status:
            yield status
    finally:
        if is_first:
            gc.freeze()
        if collects:
            gc.enable()


def set_command_needs_stdout(needs_stdout: bool) -> None:
    """Set whether the running command fails if its output to stdout cannot be written."""
    _stdout_needed[:] = [needs_stdout]


def command_needs_stdout() -> bool:
    return _stdout_needed[0]


def print_json(document: Any) -> None:
    """Print one JSON document on stdout, without colour or wrapping."""
    wide = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    text = json.dumps(redact_values(document), indent=2, ensure_ascii=not wide)
    print(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_rows(names_and_values: Iterable[tuple[str, str]], *, name_style: str = "dim", indent: str = "  ") -> None:
    """Print names and values in two columns on stdout.

    On a terminal long values wrap at words. Elsewhere each value stays on one line.
    """
    names_and_values = [(safe_text(name), safe_text(value)) for name, value in names_and_values]
    width = max((len(name) for name, _ in names_and_values), default=0)
    if not out.is_terminal or out.width < MIN_TABLE_WIDTH:
        for name, value in names_and_values:
            print(f"{indent}{name:<{width}}  {value}".rstrip(), flush=True)  # a log is read while it grows
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style=name_style, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in names_and_values:
        table.add_row(Text(f"{indent}{name}"), _bold_commands(value))  # a name may come from a file: no markup
    out.print(table)


def print_labelled(label: Text, text: Text, console: Console = out) -> None:
    """Print a label and a text, by default on stdout.

    On a terminal the text wraps at words, and its further lines are indented by the width of the label. Elsewhere it
    stays on one line.
    """
    if not console.is_terminal or console.width < MIN_TABLE_WIDTH:
        console.print(Text.assemble(label, text), soft_wrap=True)
        return
    if not label:
        console.print(text)
        return
    table = Table.grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(label, text)
    console.print(table)


def print_text(text: Text, *, indent: int = 0) -> None:
    """Print an indented text on stdout; on a terminal it wraps at words."""
    for line in text.split("\n"):
        print_labelled(Text(" " * indent), line)


def make_table(
    *columns: Column | str, header: Literal["bold", "dim"] | None = "bold", padding: PaddingDimensions | None = None
) -> Table:
    """Return an empty rich table without borders.

    Args:
        columns: Columns of the table. A string becomes a right-aligned column of that name, which does not wrap if the
            header is dim.
        header: Style of the column names; None shows no names.
        padding: Padding of each cell, as in rich; None takes the default for the header's style.
    """
    dim = header != "bold"
    return Table(
        *(Column(each, justify="right", no_wrap=dim) if isinstance(each, str) else each for each in columns),
        box=None,
        show_header=header is not None,
        header_style=header,
        pad_edge=False,
        padding=padding or ((0, 2, 0, 0) if dim else (0, 1)),
    )


def print_table(title: str, table: Table, *, blank_line_before: bool = True) -> None:
    if blank_line_before:
        out.print()
    print_labelled(Text(), Text(title, style="bold"))
    out.print(table)


def print_title(text: str, *, right: str = "") -> None:
    """Print the first line of a screen: version, ``text``, and ``right`` at the right edge."""
    title = Text.assemble((f"StreamTune {__version__}", "bold"), f"  {safe_text(text)}")
    if right:
        room = min(out.width, SCREEN_WIDTH) - title.cell_len - len(right) if out.is_terminal else 0
        title.append(" " * max(2, room)).append(right, style="bold yellow")
    print_labelled(Text(), title)


def print_note(note: str) -> None:
    """Print a note on stderr."""
    print_labelled(Text.assemble(("note", "yellow"), ": "), _bold_commands(safe_text(note)), err)


def print_error(error: StreamTuneError, console: Console = err) -> None:
    """Print an error, by default on stderr: as a panel on a terminal, else as plain lines."""
    if console.is_terminal and console.width >= MIN_TABLE_WIDTH:
        console.print(error_panel(error))
    else:
        console.print(Text(error_text(error)), soft_wrap=True)


def error_text(error: StreamTuneError) -> str:
    """Return an error as plain lines: ``error``, then ``where`` and ``fix`` if they are set."""
    lines = [f"error: {safe_text(error.what)}"]
    lines += [f"where: {safe_text(error.where)}"] if error.where else []
    lines += [f"fix: {safe_text(error.fix)}"] if error.fix else []
    return "\n".join(lines)


def error_panel(error: StreamTuneError) -> Panel:
    """Return an error as a rich panel: message, place (with the recipe's line) and fix."""
    first, *others = safe_text(error.what).splitlines() or [""]
    parts: list[RenderableType] = [Text(first, style="bold")]
    parts += [_render_error_line(line) for line in others]
    details = Table.grid(padding=(0, 2))
    details.add_column(style="dim", no_wrap=True)
    details.add_column(overflow="fold")
    if error.where:
        details.add_row("where", Text(safe_text(error.where), style="cyan"))
        if isinstance(error, RecipeError) and not others and (line := _read_recipe_line(error.where)):
            details.add_row("", Text(safe_text(line), style="dim", overflow="ellipsis", no_wrap=True))
    if error.fix:
        details.add_row("fix", _bold_commands(safe_text(error.fix)))
    if details.row_count:
        parts += ["", details]
    return Panel(
        Group(*parts),
        title=f"[bold red]{_error_title(error)}[/]",
        title_align="left",
        border_style="red",
        padding=(0, 1),
    )


def _error_title(error: StreamTuneError) -> str:
    if type(error) in (StreamTuneError, UserError):
        return "Error"
    if type(error).__name__ == "NothingFitsError":
        return "DOES NOT FIT"
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).capitalize()


def _render_error_line(line: str) -> RenderableType:
    """Format a line after the first of an error message; a line that starts with a dash becomes a list item."""
    if not line.startswith("- "):
        return _bold_commands(line)
    item = Table.grid(padding=(0, 1))
    item.add_column(no_wrap=True)
    item.add_column(overflow="fold")
    item.add_row("-", _bold_commands(line[2:]))
    return item


def _bold_commands(text: str) -> Text:
    shown = Text(text)
    shown.highlight_regex(r"`[^`]+`", "bold")
    return shown


def _read_recipe_line(where: str) -> str:
    """Return the line of a recipe that ``where`` names as ``file:line``; an empty string if it names none."""
    file, _, number = where.rpartition(":")
    if not (number.isdecimal() and file.endswith((".yaml", ".yml"))):
        return ""
    try:
        with open(file, encoding="utf-8-sig", opener=open_nonblocking) as lines:
            return lines.read(MAX_RECIPE_BYTES).splitlines()[int(number) - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


# --- files ------------------------------------------------------------------------------------------------------------


def replace_page(content: bytes, path: Path, option: str, *, signature: bytes = b"") -> None:
    """Write an HTML page or a picture.

    A page of StreamTune, or a picture of the same format, is replaced atomically.

    Args:
        content: Bytes of the file.
        path: Path of the file.
        option: Command-line option that sets the path, for errors.
        signature: First bytes of the picture's file format; empty for an HTML page.

    Raises:
        ArgumentError: The file cannot be written, or the path has a file that may not be replaced.
    """
    from streamtune.train.staging import replace_file

    try:
        if path.is_symlink() or (path.exists() and not _is_replaceable_page(path, signature)):
            what = "picture of this format" if signature else "StreamTune page"
            raise ArgumentError(
                f"{path} exists and is not a {what}; it is not overwritten",
                where=option,
                fix=f"give another path with {option}",
            )
        replace_file(path, content, durably=False)
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be written: {error.strerror or error}", where=option, fix=f"give another path with {option}"
        ) from error


def _is_replaceable_page(path: Path, signature: bytes) -> bool:
    """Return True if a file is empty, a page of StreamTune, or a picture that starts with ``signature``."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(4096)
    if signature and start:
        return start.startswith(signature)
    return not start or (start.startswith(b"<!doctype html>") and b"- StreamTune</title>" in start)
