"""Fingerprints of the files that a model is read from: by content, so that a folder may move and may not change.

A folder of 16 GB is read once, by several threads, at the speed of its disk; its pages are in memory then for the
loading that follows. What was read is remembered below the user's cache directory by each file's place, size and times,
of which the system sets one itself (``ctime``): the next start on the same machine reads nothing again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from transformers.utils.hub import cached_file, extract_commit_hash

from streamtune.errors import ArgumentError
from streamtune.paths import cache_folder, escape_of

__all__ = ["adapter_base", "fingerprint_files", "fingerprint_model", "fingerprint_tokenizer", "is_folder"]

SETTINGS = ("config.json", "generation_config.json", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json")
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
             "additional_chat_templates/*")  # fmt: skip
SETTINGS_BYTES = 1 << 20
REMEMBERED_BYTES = 64 << 20
"""Smaller files are always read."""
SETTLED_SECONDS = 3.0
"""A file that changed so recently may change again without another time."""
THREADS = 8


def fingerprint_model(name_or_path: str, *, code: bool = False) -> str | None:
    """Return the fingerprint of a model: of a folder its configuration and weights, of a hub's model its commit.

    Args:
        name_or_path: As the recipe has it.
        code: Whether Python files that come with the model are run.

    Returns:
        None where there is no such model, which its loading says.

    Raises:
        ArgumentError: A file cannot be read.
    """
    if not is_folder(name_or_path):
        return _commit_of(name_or_path)
    folder = Path(name_or_path).expanduser()
    weights = _names(folder, WEIGHTS) or _names(folder, PICKLES)
    names = {*_names(folder, SETTINGS), *weights, *(_names(folder, ("*.py",)) if code else ())}
    return fingerprint_files({name: folder / name for name in names}.items())


def adapter_base(name_or_path: str) -> str | None:
    """Return the folder of the base that adapters at ``name_or_path`` name; None where they name none."""
    try:
        folder = Path(name_or_path).expanduser()
        settings = folder / "adapter_config.json"
        if not settings.is_file() or settings.stat().st_size > SETTINGS_BYTES:
            return None
        found = Path(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]).expanduser()
        return str(found) if found.is_dir() and found.resolve() != folder.resolve() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def is_folder(name_or_path: str) -> bool:
    """Return whether a name is that of a folder here, and not of a model on a hub."""
    try:
        return Path(name_or_path).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # no name of a file: too long, or ``~`` of nobody
        return False


def fingerprint_tokenizer(name_or_path: str) -> str | None:
    """Return the fingerprint of the tokenizer's files in a folder; None where it is no folder."""
    if not is_folder(name_or_path):
        return None
    folder = Path(name_or_path).expanduser()
    return fingerprint_files({name: folder / name for name in _names(folder, TOKENIZER)}.items())


def fingerprint_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return one fingerprint of files by what they are called and hold.

    Args:
        files: Names that count, and where each is.

    Raises:
        ArgumentError: One cannot be read.
    """
    ordered = sorted(files)
    with ThreadPoolExecutor(THREADS) as pool:  # hashing lets go of the interpreter's lock
        found = list(pool.map(_hash_of, [path for _, path in ordered]))
    digest = hashlib.sha256()
    for (name, _), content in zip(ordered, found, strict=True):
        digest.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _names(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return sorted({path.relative_to(folder).as_posix() for path in found if path.is_file()})


def _commit_of(name: str) -> str | None:
    """Return the commit of a model on a hub that is loaded by this name."""
    if escape_of(name):
        return None
    try:
        found = cached_file(
            name,
            "config.json",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception:  # whatever it is, loading the model meets it as well and says so
        return None
    return extract_commit_hash(found, None)


def _hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, or what is remembered of it."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            known = _remembered(path, state) if state.st_size >= REMEMBERED_BYTES else None
            with suppress(OSError, AttributeError):
                if known is not None and len(text := known.read_text(encoding="ascii")) == 64:
                    return text
            content = hashlib.file_digest(file, "sha256").hexdigest()
            changed = os.fstat(file.fileno())
    except OSError as error:
        raise ArgumentError(
            f"{path} cannot be read: {error}", where="model_name_or_path", mend="use a whole copy of the model"
        ) from error
    same = (state.st_size, state.st_mtime_ns, state.st_ctime_ns) == (
        changed.st_size, changed.st_mtime_ns, changed.st_ctime_ns
    )  # fmt: skip
    if known is not None and same and time.time() - max(state.st_mtime, state.st_ctime) > SETTLED_SECONDS:
        with suppress(OSError):
            known.parent.mkdir(parents=True, exist_ok=True)
            staged = known.with_name(f"{known.name}.{os.getpid()}.tmp")
            staged.write_text(content, encoding="ascii")
            staged.replace(known)
    return content


def _remembered(path: Path, state: os.stat_result) -> Path:
    """Return where the hash of a file in this state is kept."""
    facts = (str(path.resolve()), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return cache_folder() / "files" / hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()
