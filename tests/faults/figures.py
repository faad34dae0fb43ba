"""Figures of a fault suite: one JSON line each, and a file each for ``make faults``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["full", "tell"]


def full() -> bool:
    """Whether this is ``make faults`` rather than ``make test``."""
    return bool(os.environ.get("STREAMTUNE_FAULTS"))


def tell(name: str, done: int, of: int, **more: Any) -> None:
    """Print a figure, and hand it to ``make faults``, which makes docs/reference/reliability.md of such."""
    figure = {"name": name, "done": done, "of": of, **more}
    print(json.dumps(figure))
    if full():
        folder = Path(os.environ["STREAMTUNE_FAULTS"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(figure, indent=1) + "\n")
