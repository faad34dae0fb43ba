"""The table at the end of the run: how many names of transformers came out how, and which."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

PROPERTY = "conformance"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
    from tests.conformance.survey import FAULTS, Category  # imports torch, so not before it is needed

    terminalreporter.section(f"conformance: {len(findings)} names of the causal language models of transformers")
    by_category = {
        category: sorted((found for found in findings if found["category"] == category), key=lambda row: row["name"])
        for category in Category
    }
    for category, rows in by_category.items():
        terminalreporter.line(f"{category:<22}{len(rows):>5}")
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
