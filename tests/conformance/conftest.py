"""The table at the end of the run: names of transformers by outcome; docs/reference/families.md is made from it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from streamtune.base.libraries import quiet_imports

PROPERTY = "conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families", metavar="FILE", help="write the table of all families to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    findings: list[dict[str, Any]] = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.when == "call"
        for key, value in report.user_properties
        if key == PROPERTY
    ]
    if not findings:
        return
    quiet_imports()  # with several workers, torchao and bitsandbytes are first imported here, outside pytest's capture
    from tests.conformance.reducer import IMAGE_TEXT
    from tests.conformance.survey import FAULTS, Category  # imports torch, so not before it is needed
    from tests.conformance.table import summary

    terminalreporter.section(f"conformance: {len(findings)} names of the causal language models of transformers")
    by_category = {
        category: sorted((found for found in findings if found["category"] == category), key=lambda row: row["name"])
        for category in Category
    }
    for category, rows in by_category.items():
        terminalreporter.line(f"{category:<22}{len(rows):>5}")
    _, decoders, percent = summary([found for found in findings if not found["name"].endswith(IMAGE_TEXT)])
    terminalreporter.line(f"{percent:.1f}% of {decoders} causal decoder families are exact")
    for category, rows in by_category.items():
        if rows:
            terminalreporter.line("")
            terminalreporter.line(f"{category}:")
            names = " ".join(row["name"] for row in rows)
            terminalreporter.line(textwrap.fill(names, 110, initial_indent="  ", subsequent_indent="  "))
        if category in (Category.NOT_BUILT, *FAULTS):
            for row in rows:
                terminalreporter.line(f"  {row['name']}: {row['reason']}")
    notes = [f"  {row['name']}: {note}" for row in findings for note in row["notes"]]
    if notes:
        terminalreporter.line("")
        terminalreporter.line("notes:")
        for note in notes:
            terminalreporter.line(note)
    if config.getoption("--families", None):
        _write(terminalreporter, findings, Path(config.getoption("--families")))


def _write(terminalreporter: pytest.TerminalReporter, findings: list[dict[str, Any]], path: Path) -> None:
    import transformers

    from tests.conformance.table import render
    from tests.conformance.test_conformance import NAMES

    terminalreporter.line("")
    if missing := set(NAMES) - {row["name"] for row in findings}:
        terminalreporter.line(f"{path} not written: {len(missing)} names were not tried")
        return
    path.write_text(render(findings, transformers.__version__), encoding="utf-8")
    terminalreporter.line(f"{path} written")
