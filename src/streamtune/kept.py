"""Results that are kept on disk under a hash of everything they are made of, and what the code is made of.

This module is a leaf: it imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from streamtune.paths import cache_folder

__all__ = ["hash_of", "kept_result", "read_kept", "versions", "write_kept"]

_CHOOSES = ("triton", "flash_attn", "bitsandbytes", "torchao", "causal_conv1d", "fla", "mamba_ssm")
"""Packages whose presence may choose the operators of a step."""


def kept_result(kind: str, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result that was kept under a key, or compute and keep it; plain values.

    Where the folder cannot be read or written, the result is computed.
    """
    found = read_kept(kind, key)
    if found is None:
        found = compute()
        write_kept(kind, key, found)
    return found


def read_kept(kind: str, key: str) -> dict[str, Any] | None:
    """Return the result that was kept under a key; None if there is none, or its file cannot be read."""
    with suppress(OSError, ValueError):
        found = json.loads(_file(kind, key).read_text("utf-8"))
        if isinstance(found, dict):
            return found
    return None


def write_kept(kind: str, key: str, found: dict[str, Any]) -> None:
    """Keep a result under a key, if its file can be written."""
    file = _file(kind, key)
    temporary = file.with_name(f"{key}.{os.getpid()}.tmp")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(found), "utf-8")
        temporary.replace(file)


def hash_of(facts: Any) -> str:
    """Return a key for facts that JSON can write."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]


@cache
def versions() -> list[str]:
    """Return what a simulated step depends on besides the step: versions, packages, our own code."""
    found = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "peft")]
    found += [name for name in _CHOOSES if util.find_spec(name) is not None]
    package = Path(__file__).parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(file.read_bytes())
    return [*found, code.hexdigest()]


def _file(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.json"
