"""A live count of rows while they are tokenised."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["with_progress"]

Item = TypeVar("Item")


def with_progress(items: Iterable[Item]) -> Iterator[Item]:
    """Pass rows through, with a live count on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("tokenising, {task.completed:,} rows"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rows", total=None)
        for item in items:
            yield item
            progress.advance(task)
