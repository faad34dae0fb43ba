"""Golden files: what a screen or a document was, byte for byte; ``STREAMTUNE_GOLDEN=write`` writes them anew."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (80, 120)
PINNED = re.search(r"^torch==([\d.]+)$", (Path(__file__).parents[1] / "constraints.txt").read_text(), re.MULTILINE)
of_pinned_torch = pytest.mark.skipif(
    PINNED is None or metadata.version("torch").partition("+")[0] != PINNED[1],
    reason="bytes and FLOPs of a simulated step depend on torch's operators",
)
"""Mark of tests whose golden files have plans."""


def check_golden(path: Path, found: str) -> None:
    """Compare text with a golden file."""
    if os.environ.get("STREAMTUNE_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.encode())
    assert found == path.read_bytes().decode()


@contextmanager
def terminal(width: int) -> Iterator[None]:
    """Make stdout a terminal of so many columns without colours, as far as screens can tell."""
    from streamtune.cli.console import out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(out, "_force_terminal", True)
        patch.setattr(out, "_color_system", None)
        patch.setattr(out, "_width", width)
        patch.setattr(out, "_height", 100)
        patch.setattr(out, "legacy_windows", False)
        yield


def screen(width: int, show: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a function prints on a terminal of so many columns."""
    capsys.readouterr()
    with terminal(width):
        show()
    return capsys.readouterr().out


def once(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let a function be called once only, so that several screens of one result cost no more than one."""
    function = pkgutil.resolve_name(name)
    results: list[Any] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    patch.setattr(name, called)


def masked(document: Any, names: set[str]) -> Any:
    """Return a document with the values of some keys replaced: times, versions, machines."""
    if isinstance(document, dict):
        return {key: "*" if key in names else masked(value, names) for key, value in document.items()}
    return [masked(item, names) for item in document] if isinstance(document, list) else document
