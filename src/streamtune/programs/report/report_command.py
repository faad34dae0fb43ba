"""``streamtune report``: one page about one run or several."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamtune.cli.console import out, print_note, replace_page
from streamtune.cli.options import option

if TYPE_CHECKING:
    from streamtune.programs.report.run_records import RunRecords

PAGE = "report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Directories of runs; several are compared.", show_default=False),
    ],
    output: Annotated[
        Path | None, option("FILE", "The page to write; without it, report.html in the run, or here for several runs.")
    ] = None,
    open_: Annotated[bool, option(None, "Show the page in the browser.", "--open")] = False,
) -> None:
    """Write report.html: curves, memory, speed, samples, events and recipe of runs, in one file without network."""
    from streamtune.programs.report.run_records import read_run

    found = [read_run(run) for run in runs]
    page = output or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    write_page(found, page)
    out.print(f"{page}  {page.stat().st_size / 1024:,.0f} KiB", soft_wrap=True, markup=False)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def write_page(runs: list[RunRecords], page: Path) -> None:
    """Write the page about ``runs``; an earlier page is replaced at once, any other file is left alone.

    Raises:
        ArgumentError: It cannot be written, or there is a file that is no such page.
    """
    from streamtune.programs.report.page import render_page

    replace_page(render_page(runs).encode("utf-8"), page, "--output")


def write_report(run: Path) -> Path | None:
    """Write the page of a run at its end; a failure is a note, for the run is what counts."""
    from streamtune.programs.report.run_records import read_run

    page = run / PAGE
    try:
        write_page([read_run(run)], page)
    except Exception as error:  # whatever is in its files: a page is never the reason why a run fails
        print_note(f"{page} was not written: {getattr(error, 'what', error)}")
        return None
    return page
