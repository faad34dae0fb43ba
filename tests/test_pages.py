"""The pages of documentation: those made from the code are up to date, and all of them build with no broken link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.reference_pages import FOLDER, pages

ROOT = Path(__file__).parents[1]


def test_reference_pages_are_up_to_date() -> None:
    for name, text in pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text + "\n", f"{name}: make docs"


@pytest.mark.full
def test_pages_build(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/guide/quickstart/index.html").is_file()
    assert "fonts.googleapis.com" not in (tmp_path / "site/index.html").read_text(encoding="utf-8")
