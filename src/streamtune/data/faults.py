"""Faulty rows: collected and raised together, or counted and left out.

Readers and converters report the error of a row here and go on with the next row; an error of a whole file is raised as
it is. :class:`BadRows` decides what a report does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from streamtune.errors import DataError

ON_BAD_ROW = ("error", "skip")
"""Ways to handle a row that cannot be read or trained on."""

SHOWN = 10
"""Bad rows that an error lists."""
MOST_COUNTED = 1_000
"""Bad rows after which an error is raised without looking for more."""
LONGEST_LOOK = 30.0
"""Seconds that are spent on finding more bad rows after the first."""
MOST_KEPT = 10_000
"""Skipped rows whose errors are kept for the record of the run."""


class BadRows:
    """Collects the errors of rows. As a context manager it reports the ``DataError`` of the block, and ends it.

    Args:
        on_bad_row: ``raise`` raises the first; ``error`` collects them for :meth:`check`; ``skip`` counts them.
        limit: Rows that ``skip`` may leave out.
        notify: Called with each thing the user should know, as a line of text.

    Raises:
        DataError: From :meth:`report` and :meth:`check`.
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
        """Take the error of one row: raise it, or record it.

        Raises:
            DataError: The first one with ``raise``; with ``skip`` there are more than ``limit``; with ``error`` there
                are so many that no more are looked for.
        """
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
        """Take an error that the rows after this one share: raise it, or with ``skip`` record it.

        Raises:
            DataError: The error itself, or that of :meth:`report`.
        """
        if self.on_bad_row != "skip":
            raise error
        self.report(error)

    def check(self) -> None:
        """Raise the errors that were collected, or notify the user of the rows that are left out.

        Raises:
            DataError: A row is bad, and ``on_bad_row`` is not ``skip``.
        """
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
        """Raise if rows were left out: called where none is left.

        Raises:
            DataError: All rows are bad.
        """
        if self.count:
            raise self._together(f"no row is left: all {self.count:,} were bad")

    def to_json(self) -> list[dict[str, str]]:
        """Return the rows that were left out, the first 10,000 of them: ``row``, ``what`` and ``mend``."""
        return [{"row": error.where, "what": error.what, "mend": error.mend} for error in self.errors]

    def _together(self, what: str, mend: str = "leave them out with on_bad_row: skip") -> DataError:
        lines = [f"- {error.where}: {error.what}" for error in self.errors[:SHOWN]]
        if (more := self.count - len(lines)) > 0:
            lines.append(f"- and {more:,} more")
        mends = dict.fromkeys(error.mend for error in self.errors[:SHOWN] if error.mend)
        advice = f"{next(iter(mends))}; or {mend}" if len(mends) == 1 else f"mend the rows, or {mend}"
        return DataError("\n".join([f"{what}:", *lines]), where=self.errors[0].where, mend=advice)
