"""Faulty rows: collected and raised together, or counted and left out.

Readers and converters report a faulty row and continue with the next; an error of a whole file is raised at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from streamtune.errors import DataError

ON_BAD_ROW = ("error", "skip")
"""Handling of a row that cannot be read or trained on."""

SHOWN = 10
"""Most bad rows that an error lists."""
MOST_COUNTED = 1_000
"""Bad rows after which an error is raised without looking for more."""
LONGEST_LOOK = 30.0
"""Seconds spent on finding more bad rows after the first."""
MOST_KEPT = 10_000
"""Most errors of skipped rows that the record of the run keeps."""


class BadRows:
    """Collects the errors of rows. As a context manager it reports the ``DataError`` of the block, and ends the block.

    Args:
        on_bad_row: ``raise`` raises the first; ``error`` collects them for :meth:`check`; ``skip`` counts them.
        limit: Most rows that ``skip`` leaves out.
    """

    def __init__(
        self,
        on_bad_row: str = "raise",
        limit: int = 100,
        notify: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.on_bad_row, self.limit, self.notify = on_bad_row, limit, notify
        self.count = 0
        self.errors: list[DataError] = []
        self._look_until = float("inf")

    def __enter__(self) -> BadRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, DataError):
            return False
        self.report(error)
        return True

    def report(self, error: DataError) -> None:
        """Raise or record the error of a row."""
        if self.on_bad_row == "raise":
            raise error
        self.count += 1
        if len(self.errors) < MOST_KEPT:
            self.errors.append(error)
        if self.on_bad_row == "skip":
            if self.count > self.limit:
                raise self._together(f"more than max_bad_rows = {self.limit:,} rows are bad", "raise max_bad_rows")
            return
        if self.count == 1:
            self._look_until = time.monotonic() + LONGEST_LOOK
        if self.count >= MOST_COUNTED or time.monotonic() > self._look_until:
            raise self._together(f"{self.count:,} rows are bad, and those after them were not read")

    def report_first(self, error: DataError) -> None:
        """Record, with ``skip``, an error that the rows after this one share; otherwise raise it."""
        if self.on_bad_row != "skip":
            raise error
        self.report(error)

    def check(self) -> None:
        """Raise the collected errors, or notify the user of skipped rows."""
        if not self.count:
            return
        if self.on_bad_row == "skip":
            first = self.errors[0]
            rows = "1 bad row is" if self.count == 1 else f"{self.count:,} bad rows are"
            self.notify(f"{rows} left out; the first, {first.where}: {first.what}")
        elif self.count == 1:
            raise self.errors[0]
        else:
            raise self._together(f"{self.count:,} rows are bad")

    def nothing_left(self) -> None:
        """Raise if rows were left out; called if no row is left."""
        if self.count:
            raise self._together(f"no row is left: all {self.count:,} were bad")

    def to_json(self) -> list[dict[str, str]]:
        """Return the first 10,000 rows that were left out: ``row``, ``what`` and ``fix``."""
        return [{"row": error.where, "what": error.what, "mend": error.fix} for error in self.errors]

    def _together(self, what: str, fix: str = "leave them out with on_bad_row: skip") -> DataError:
        lines = [f"- {error.where}: {error.what}" for error in self.errors[:SHOWN]]
        if (more := self.count - len(lines)) > 0:
            lines.append(f"- and {more:,} more")
        fixes = dict.fromkeys(error.fix for error in self.errors[:SHOWN] if error.fix)
        advice = f"{next(iter(fixes))}; or {fix}" if len(fixes) == 1 else f"fix the rows, or {fix}"
        return DataError("\n".join([f"{what}:", *lines]), where=self.errors[0].where, fix=advice)
