"""``manifest.json`` of a checkpoint: every file with its size and SHA-256, and a digest of the list itself.

A checkpoint consists of the files in its manifest, no less and no more: a file that differs, is missing or was added is
refused, and so is a symbolic link. The manifest's own bytes have to be those that :func:`write_manifest` writes for its
values, digest included, so that no change of a byte goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from streamtune.errors import CheckpointError

__all__ = ["MANIFEST", "STATE", "Manifest", "read_manifest", "verify_files", "write_manifest"]

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
NEEDED = (STATE, "rng.safetensors", "optimizer-00001.safetensors")
"""Without these it is no checkpoint."""
LARGEST = 16 << 20
"""Bytes of a manifest; a real one has some hundred for each file."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    run: str
    """The run that wrote it."""
    step: int
    metric: float | None
    """The value to rank it by, where the best checkpoints are kept."""
    files: Mapping[str, Mapping[str, Any]]
    """Path with ``/`` -> ``{"bytes": n, "sha256": hex}``"""


def write_manifest(folder: Path, *, run: str, step: int, metric: float | None) -> None:
    """Write the manifest of all files below ``folder``, which are read back from where they were written."""
    files = {name: _describe(folder / name) for name in sorted(_files_below(folder))}
    (folder / MANIFEST).write_text(_text(Manifest(run, step, metric, files)), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``path``; none of its files is read.

    Raises:
        CheckpointError: There is none, or it is not as it was written, or names files that cannot be the checkpoint's.
    """
    try:
        if path.is_symlink() or stat.S_ISLNK((path / MANIFEST).lstat().st_mode):
            raise _damaged(path, "it is a symbolic link")
        if (path / MANIFEST).stat().st_size > LARGEST:
            raise _damaged(path, f"{MANIFEST} is larger than any")
        text = (path / MANIFEST).read_text(encoding="utf-8")
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {found['format']}; this version reads {FORMAT}",
                mend="use the version of streamtune that wrote it",
            )
        manifest = Manifest(found["run"], int(found["step"]), found["metric"], found["files"])
        if _text(manifest) != text or not isinstance(found["run"], str) or not isinstance(found["files"], dict):
            raise _damaged(path, f"{MANIFEST} is not what was written")
        if manifest.metric is not None and not isinstance(manifest.metric, float):
            raise _damaged(path, f"{MANIFEST} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint",
            mend="give a folder such as runs/NAME/checkpoints/step-000100",
        ) from error
    for name in manifest.files:
        if not _is_plain(name):
            raise _damaged(path, f"its manifest lists {name!r}, which is no file of a checkpoint")
    return manifest


def verify_files(path: Path, manifest: Manifest) -> None:
    """Compare every byte of a checkpoint with its manifest.

    Raises:
        CheckpointError: A file differs, is missing, was added, or is no plain file; it is named.
    """
    for name in NEEDED:
        if name not in manifest.files:
            raise _damaged(path, f"its manifest does not list {name}")
    try:
        there = set(_files_below(path))
        for name, expected in manifest.files.items():
            if name not in there:
                raise _damaged(path, f"{name} is missing")
            if _describe(path / name) != expected:
                raise _damaged(path, f"{name} is not what was written")
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    if added := sorted(there - manifest.files.keys() - {MANIFEST}):
        raise _damaged(path, f"{added[0]} is not in its manifest")


def _text(manifest: Manifest) -> str:
    body = {"format": FORMAT, **asdict(manifest)}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True) + "\n"


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files, with ``/``.

    Raises:
        CheckpointError: Something is neither a plain file nor a directory.
    """
    for directory, subfolders, names in os.walk(folder, onerror=_raise):
        for name in (*subfolders, *names):
            found = Path(directory, name)
            mode = found.lstat().st_mode
            if stat.S_ISREG(mode):
                yield found.relative_to(folder).as_posix()
            elif not stat.S_ISDIR(mode):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise _damaged(folder, f"{found.relative_to(folder).as_posix()} is {what}")


def _raise(error: OSError) -> None:
    raise error


def _is_plain(name: str) -> bool:
    """Return True if ``name`` is the path of a file below the checkpoint, in its one normal form."""
    path = PurePosixPath(name)
    safe = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
    return safe and name not in ("", ".", MANIFEST) and not any(mark in name for mark in ("\\", "\0", ":"))


def _describe(path: Path) -> dict[str, Any]:
    """Return size and SHA-256, read back from the file."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}", mend="use another checkpoint")
