from __future__ import annotations

from collections.abc import Iterator

import pytest

TABLE = pytest.StashKey[dict[str, dict[str, float]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = {}


@pytest.fixture
def error_table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, float]]]:
    """Rows by family and columns by batch, printed when the run ends: the measured error, beside the bound it met."""
    return request.config.stash[TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    table = config.stash.get(TABLE, {})
    if not table:
        return
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    terminalreporter.section("largest relative gradient error of any parameter against fp64")
    terminalreporter.line(f"{'family':<14}" + "".join(f"{column:>11}" for column in columns))
    for family, row in table.items():
        cells = "".join(f"{row[column]:>11.1e}" if column in row else f"{'':>11}" for column in columns)
        terminalreporter.line(f"{family:<14}{cells}")
