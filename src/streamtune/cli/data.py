"""``streamtune data``: show rows as the model sees them, counts, lengths, and the effect of other length limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.base.paths import cache_folder
from streamtune.base.text import show_size
from streamtune.errors import ArgumentError

from .console import err, loading_libraries, out, print_json, print_note, replace_page
from .options import JsonOption, RecipeArgument, SetOption, option, read_recipe
from .programs import PARTS, import_object

if TYPE_CHECKING:
    from streamtune.data.inspect_rows import RowView, TokenGap, TokenRun
    from streamtune.run.build import Inspection

SHOWN_TOKENS = 320
"""Number of tokens above which only parts of a row are shown, without `--row`."""
PAGE_ROWS = 40
PNG = b"\x89PNG\r\n\x1a\n"


def _clear_cache(is_requested: bool) -> None:
    if not is_requested:
        return
    from streamtune.data.row_cache import RowCache

    cache = RowCache(cache_folder() / "rows")
    entries, size = cache.clear()
    out.print(
        f"deleted {'1 set' if entries == 1 else f'{entries:,} sets'} of prepared rows, {show_size(size)}, "
        f"from {cache.root}",
        soft_wrap=True,
        markup=False,
    )
    raise typer.Exit


def data(
    recipe: RecipeArgument,
    rows: Annotated[
        int | None, option("N", "Number of rows to show, evenly spaced over the data. [default: 3]", min_value=0)
    ] = None,
    row: Annotated[
        str | None,
        option(
            "N|FILE:LINE",
            "Show only this row, in full: its number, or its file and line as in error messages.",
            "--row",
        ),
    ] = None,
    template: Annotated[
        str | None,
        option("NAME", f"Render the rows with this chat template: {', '.join(CHAT_TEMPLATES)}, or a Jinja file."),
    ] = None,
    ids: Annotated[
        bool, option(None, "With --row: print the row as one token per line, with token ids.", "--ids")
    ] = False,
    worst: Annotated[
        bool,
        option(
            None,
            "Show the longest rows, the rows with the fewest trained tokens and the rows that lose most by "
            "truncation, instead of evenly spaced rows.",
            "--worst",
        ),
    ] = False,
    png: Annotated[
        Path | None, option("FILE", "Write a histogram of the row lengths to this PNG file.", "--png")
    ] = None,
    html: Annotated[
        Path | None, option("FILE", "Write the rows and counts as a self-contained page to this HTML file.", "--html")
    ] = None,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache",
            help="Delete the cached rows and tokenizers of all recipes, and exit.",
            is_eager=True,
            callback=_clear_cache,
            show_default=False,
        ),
    ] = False,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rows of a recipe as the model sees them: trained, masked and special tokens, counts, lengths.

    Rows are read and tokenized as in training, without loading the model. A row that training would reject is reported
    with the same error.

        streamtune data recipe.yaml

        streamtune data recipe.yaml --worst --set overlength=truncate --set max_length=8192

        streamtune data recipe.yaml --row chats.jsonl:17 --ids

        streamtune data recipe.yaml --template llama3
    """
    settings = [*(set_ or []), *([] if template is None else [f"chat_template={json.dumps(template)}"])]
    loaded = read_recipe(recipe, settings)
    if ids and row is None:
        raise ArgumentError("--ids needs --row", where="--ids", fix="name the row: --row N --ids")
    with loading_libraries():
        from streamtune.cli.data_screen import print_inspection, print_row_view
        from streamtune.run.build import inspect_recipe
    for note in loaded.notes:
        print_note(note)
    found = inspect_recipe(loaded, notify=print_note, doing=err.status)
    views = _choose_rows(found, 3 if rows is None else rows, row, worst)
    if png is not None:
        _write_histogram(found, png)
    if html is not None:
        with err.status("writing the page"):
            _write_page(found, PAGE_ROWS if rows is None else rows, html)
    if as_json:
        print_json({**found.to_json(), "samples": [_sample_document(found, *each, ids, row) for each in views]})
    elif row is not None:
        for _, view in views:
            print_row_view(found, view, max_tokens=None, ids=ids)
    else:
        print_inspection(found, views, max_tokens=SHOWN_TOKENS)
    for written in (png, html):
        if written is not None:
            err.print(f"wrote {written}  {written.stat().st_size / 1024:,.0f} KiB", soft_wrap=True, markup=False)


def _choose_rows(
    inspection: Inspection, max_rows: int, row_name: str | None, prefers_worst: bool
) -> list[tuple[str, RowView]]:
    """Return (reason, row) pairs of the rows to show; the reason is empty for evenly spaced rows.

    Raises:
        ArgumentError: The row does not exist.
    """
    rows = inspection.rows
    if row_name is None:
        spaced = [("", number) for number in rows.evenly_spaced(max_rows)]
        chosen = rows.most_extreme_records(max_rows) if prefers_worst else spaced
        return [(reason, rows.get_view(number)) for reason, number in chosen]
    if row_name.isdecimal():
        if not 0 < int(row_name) <= len(rows):
            raise ArgumentError(
                f"row {row_name} does not exist", where="--row", fix=f"give a number from 1 to {len(rows)}"
            )
        return [("", rows.get_view(int(row_name)))]
    numbers = rows.record_numbers(row_name)
    if not numbers:
        raise ArgumentError(
            f"no row was prepared from '{row_name}'",
            where="--row",
            fix=f"give a number from 1 to {len(rows)}, or FILE:LINE such as {rows.get_view(1).origin}; dropped "
            "rows are not shown",
        )
    return [("", rows.get_view(number)) for number in numbers]


# --- documents --------------------------------------------------------------------------------------------------------


def _sample_document(
    inspection: Inspection, reason: str, view: RowView, ids: bool, row_name: str | None
) -> dict[str, Any]:
    parts = []
    for part in view.parts:
        runs = inspection.rows.token_runs(part, SHOWN_TOKENS if row_name is None else None)
        parts.append(
            {
                "name": part.name,
                "tokens": len(part.input_ids),
                "trained": int(part.trained.sum()),
                "shown": [_token_run_document(each) for each in runs],
                **({"input_ids": part.input_ids} if ids else {}),
            }
        )
    return {
        "number": view.number,
        "origin": view.origin,
        "dataset": view.source,
        "held_out": view.held_out,
        "tokens": view.num_tokens,
        "supervised_tokens": view.num_trained,
        "tokens_lost": view.lost,
        "images": [vars(file) for file in view.images],
        "reason": reason or None,
        "parts": parts,
    }


def _token_run_document(run: TokenRun | TokenGap) -> dict[str, Any]:
    return dict(vars(run)) if hasattr(run, "text") else {"text": None, **vars(run)}


def _write_histogram(inspection: Inspection, path: Path) -> None:
    from streamtune.data.length_measures import draw_length_histogram

    report = inspection.prepared.report
    title = f"{inspection.loaded.path.name}: {report.rows:,} rows, {report.tokens + report.tokens_lost:,} tokens"
    picture = draw_length_histogram(inspection.histogram, inspection.limit, title, inspection.limit_name)
    replace_page(picture, path, "--png", signature=PNG)


def _write_page(inspection: Inspection, max_rows: int, path: Path) -> None:
    views = [*_choose_rows(inspection, 2, None, True), *_choose_rows(inspection, max_rows, None, False)]
    replace_page(import_object(PARTS["page of rows"])(inspection, views).encode("utf-8"), path, "--html")
