"""Collect the errors of bad rows and raise them together, or skip and count bad rows.

A bad row does not end the reading of its file. A bad file raises its error at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from streamtune.errors import DataError

ON_BAD_ROW = ("error", "skip")
"""Actions for a row that cannot be read or trained on."""

SHOWN = 10
"""Maximum number of bad rows that an error lists."""
MOST_COUNTED = 1_000
"""Number of bad rows at which the error is raised without reading further rows."""
LONGEST_LOOK = 30.0
"""Seconds after the first bad row during which reading continues, to find more bad rows."""
MOST_KEPT = 10_000
"""Maximum number of errors that :meth:`BadRows.to_json` lists."""


class BadRows:
    """Collects the errors of bad rows: rows that cannot be read or trained on.

    As a context manager it catches a ``DataError`` of the block and passes it to :meth:`report`. Execution then
    continues after the block.

    Args:
        on_bad_row: ``raise`` raises the first error; ``error`` collects errors for :meth:`raise_or_notify`; ``skip``
            counts them and lists them for :meth:`to_json`.
        limit: Maximum number of rows that ``skip`` may leave out.
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
        """Raise or record the error of a row, depending on ``on_bad_row``.

        Raises:
            DataError: The error itself, or one error that lists several bad rows if too many rows are bad.
        """
        if self.on_bad_row == "raise":
            raise error
        self.count += 1
        if len(self.errors) < MOST_KEPT:
            self.errors.append(error)
        if self.on_bad_row == "skip":
            if self.count > self.limit:
                raise self._combined_error(f"more than {self.limit:,} bad rows (max_bad_rows)", "raise max_bad_rows")
            return
        if self.count == 1:
            self._look_until = time.monotonic() + LONGEST_LOOK
        if self.count >= MOST_COUNTED or time.monotonic() > self._look_until:
            raise self._combined_error(f"{self.count:,} rows are bad; the rows after them were not read")

    def report_repeating_error(self, error: DataError) -> None:
        """Raise an error that every later row would have too, or record it if ``on_bad_row`` is ``skip``."""
        if self.on_bad_row != "skip":
            raise error
        self.report(error)

    def raise_or_notify(self) -> None:
        """Raise all collected errors as one error; with ``skip``, tell the user how many rows were skipped."""
        if not self.count:
            return
        if self.on_bad_row == "skip":
            first = self.errors[0]
            rows = "1 bad row" if self.count == 1 else f"{self.count:,} bad rows"
            self.notify(f"{rows} skipped; the first is at {first.where}: {first.what}")
        elif self.count == 1:
            raise self.errors[0]
        else:
            raise self._combined_error(f"{self.count:,} rows are bad")

    def raise_if_all_bad(self) -> None:
        """Raise ``DataError`` if rows were skipped.

        Call this method only if no row is left.
        """
        if self.count:
            raise self._combined_error(f"no row is left: all {self.count:,} were bad")

    def to_json(self) -> list[dict[str, str]]:
        """Return the first 10,000 recorded errors as ``row`` (file and line), ``what`` and ``mend`` (the fix)."""
        return [{"row": error.where, "what": error.what, "mend": error.fix} for error in self.errors]

    def _combined_error(self, what: str, fix: str = "skip them with on_bad_row: skip") -> DataError:
        lines = [f"- {error.where}: {error.what}" for error in self.errors[:SHOWN]]
        if (more := self.count - len(lines)) > 0:
            lines.append(f"- and {more:,} more")
        fixes = dict.fromkeys(error.fix for error in self.errors[:SHOWN] if error.fix)
        advice = f"{next(iter(fixes))}; or {fix}" if len(fixes) == 1 else f"fix the rows, or {fix}"
        return DataError("\n".join([f"{what}:", *lines]), where=self.errors[0].where, fix=advice)
