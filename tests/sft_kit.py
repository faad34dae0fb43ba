"""A folder with rows and a tiny recipe, and the command run in it: what tests of ``streamtune sft`` begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamtune.cli import main

__all__ = ["run", "write_recipe", "write_rows"]


def write_rows(folder: Path, count: int) -> None:
    """``rows.jsonl``: short conversations of four lengths."""
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(count):
            answer = f"return a + b + {number}\n" * (1 + number % 4)
            messages = [{"role": "user", "content": f"Add {number}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_recipe(folder: Path, recipe: dict[str, Any]) -> Path:
    """``tiny.yaml``."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def run(*arguments: str) -> int:
    """Exit code of ``streamtune sft tiny.yaml`` in the current folder."""
    with pytest.raises(SystemExit) as left:
        main(["sft", "tiny.yaml", *arguments])
    return int(left.value.code or 0)
