"""Pages and pictures that commands write over those of an earlier command, and over nothing else."""

from __future__ import annotations

from pathlib import Path

from streamtune.errors import ArgumentError


def replace_page(content: bytes, page: Path, named: str, *, begins: bytes = b"") -> None:
    """Write a page or a picture; an earlier one is replaced at once, any other file is left alone.

    Args:
        content: Of the file.
        page: The file.
        named: The option that names it, for errors.
        begins: The first bytes of a picture; empty of a page.

    Raises:
        ArgumentError: It cannot be written, or there is a file that this command did not make.
    """
    from streamtune.train.staging import replace_file

    try:
        if page.is_symlink() or (page.exists() and not _is_page(page, begins)):
            what = "picture" if begins else "page"
            raise ArgumentError(
                f"{page} is there, and is no {what} of this command", where=named, mend=f"give another {named}"
            )
        replace_file(page, content, durably=False)
    except OSError as error:
        raise ArgumentError(
            f"{page} cannot be written: {error.strerror or error}", where=named, mend=f"give another {named}"
        ) from error


def _is_page(page: Path, begins: bytes) -> bool:
    """Return True if a file is a page of this command or a picture, or empty."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        start = file.read(4096)
    if begins and start:
        return start.startswith(begins)
    return not start or (start.startswith(b"<!doctype html>") and b"- StreamTune</title>" in start)
