"""Keep the result of an evaluation in a folder: eval.json, and its pictures.

``eval.json`` lists the files that were written with it. The next evaluation into the folder replaces these and no
others.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamtune.errors import ArgumentError, RunError
from streamtune.programs.evaluate.pictures import draw_needles, draw_positions
from streamtune.train.staging import replace_file, write_durably

DOCUMENT, POSITIONS, NEEDLES = "eval.json", "position.png", "needle.png"
NAMES = (DOCUMENT, POSITIONS, NEEDLES)
MEND = "give another --output DIR"


def check_folder(folder: Path) -> None:
    """Make a folder for results, before hours are spent on them.

    Raises:
        ArgumentError: It cannot be written to, or a file stands there that no evaluation wrote.
    """
    mine = _written_before(folder)
    for name in NAMES:
        path = folder / name
        if (path.exists() or path.is_symlink()) and name not in mine:
            raise ArgumentError(f"{path} is there, and no evaluation wrote it", where="--output", mend=MEND)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / ".probe", b"", durably=False)
        (folder / ".probe").unlink()
    except OSError as error:
        raise ArgumentError(
            f"nothing can be written to {folder}: {error.strerror or error}", where="--output", mend=MEND
        ) from error


def _written_before(folder: Path) -> set[str]:
    """Return the names of the files of the last evaluation into a folder; empty without one."""
    path = folder / DOCUMENT
    if path.is_symlink():
        return set()
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name for name in NAMES if name in files and not (folder / name).is_symlink()}
    return set()


def write_results(folder: Path, found: dict[str, Any], *, title: str) -> list[Path]:
    """Write a document and the pictures of it, and remove those that it does not have; return what was written.

    Args:
        folder: From :func:`check_folder`.
        found: The document; gets ``files``.
        title: Name of the model, for the pictures.

    Raises:
        RunError: They cannot be written.
    """
    pictures = {POSITIONS: draw_positions(found["splits"], title=title)}
    if found.get("needle") is not None:
        pictures[NEEDLES] = draw_needles(found["needle"], title=title)
    drawn = {name: picture for name, picture in pictures.items() if picture is not None}
    stale = _written_before(folder) - {DOCUMENT, *drawn}
    found["files"] = [DOCUMENT, *drawn]
    try:
        for name, picture in drawn.items():
            replace_file(folder / name, picture, durably=False)
        write_durably(folder / DOCUMENT, json.dumps(found, indent=2) + "\n")
        for name in stale:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"the result cannot be written to {folder}: {error.strerror or error}", mend=MEND) from error
    return [folder / name for name in found["files"]]
