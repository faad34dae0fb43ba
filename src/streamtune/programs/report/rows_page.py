"""Render an HTML page about a training set: row counts, row lengths, and sample rows with trained tokens marked."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from streamtune.base.privacy import safe_text
from streamtune.data.data_report import EPOCH_COLUMNS, SourceReport, format_epoch_shares
from streamtune.data.image_files import ImageFile, Thumbnail
from streamtune.data.inspect_rows import RowPart, RowView, TokenGap, shorten_repeats
from streamtune.run.build import Inspection

MAX_TOKENS = 600
"""Number of tokens above which only parts of a row are shown."""
MAX_BYTES = 1_400_000
"""Maximum size of the HTML of all sample rows together, in bytes."""


def render_rows(inspection: Inspection, views: Sequence[tuple[str, RowView]]) -> str:
    """Return the HTML page.

    Args:
        views: (reason, row) pairs to show; the reason says why the row was chosen, and may be empty. Rows beyond
            :data:`MAX_BYTES` are left out.
    """
    title = f"Rows of {safe_text(inspection.loaded.path.name)}"
    facts = "".join(f"<div>{name}<b>{value}</b></div>" for name, value in _summary_lines(inspection))
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=dim>{escape(safe_text(inspection.prepared.report.describe()))}</p>",
        f"<div class=facts>{facts}</div>",
        f"<h2>Datasets</h2><div class=box>{_sources_table(inspection)}</div>",
        "<h2>Row lengths <small>tokens, before truncation</small></h2>",
        f"<div class=box>{_histogram_html(inspection)}</div>",
        f"<h2>With other limits</h2><div class=box>{_length_limits_table(inspection)}</div>",
        "<h2>Rows as the model sees them</h2><p class=dim>",
        "<span class=tokens>masked</span>, <span class=t>trained</span>, <span class=x>special token</span>, "
        "<span class='t x'>special token that is trained</span></p>",
        *_rows_html(inspection, views),
    ]
    template = Template(files("streamtune.programs.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(f"{title} - StreamTune"), body="\n".join(body))


def _summary_lines(inspection: Inspection) -> Iterator[tuple[str, str]]:
    report, batches = inspection.prepared.report, inspection.batches
    yield "rows", f"{report.rows:,}"
    yield "tokens", f"{report.tokens:,}"
    if report.supervised_tokens:
        yield "trained", f"{report.supervised_tokens / report.tokens:.1%}"
    yield "tokens lost", f"{report.tokens_lost:,}"
    if report.supervised_tokens_lost:
        yield "trained tokens lost", f"{report.supervised_tokens_lost:,}"
    yield inspection.limit_name, f"{inspection.limit:,}"
    yield "duplicates", f"{report.duplicates:,}"
    if batches is not None:
        yield f"padding, batches of {batches.batch_size}", f"{batches.padding:.1%}"
        yield "packing efficiency" if batches.packing else "packing efficiency if packed", f"{batches.pack_fill:.1%}"
        yield "attention cost if concatenated and cut", f"{batches.attention_ratio:.2f}x"


def _html_table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return an HTML table; each row is a (CSS class, cells) pair, and all cells but the first are right-aligned."""
    cells = "".join(f"<th{' class=n' if place else ''}>{escape(name)}</th>" for place, name in enumerate(head))
    lines = [f"<tr>{cells}</tr>"]
    for style, row in rows:
        cells = "".join(f"<td{' class=n' if place else ''}>{escape(cell)}</td>" for place, cell in enumerate(row))
        lines.append(f"<tr{style and f' class={style}'}>{cells}</tr>")
    return f"<table class=counts>{''.join(lines)}</table>"


def _sources_table(inspection: Inspection) -> str:
    """Return a table of row and token counts for each dataset, without columns that contain only zeros.

    If datasets have weights, a second table has their shares of an epoch.
    """
    report = inspection.prepared.report
    names = ("rows", "kept", "dropped", "split", "truncated", "tokens", "tokens_lost", "supervised_tokens_lost")
    counts = [name for name in names if getattr(report, name)]
    points = ("min", "p50", "p90", "p99", "max")
    rows = []
    for source in [*report.sources, *([report] if len(report.sources) > 1 else [])]:
        name = source.title if isinstance(source, SourceReport) else "total"
        share = f"{source.supervised_tokens / source.tokens:.1%}" if source.tokens else "-"
        lengths = [f"{source.length_percentiles[point]:,}" if source.length_percentiles else "-" for point in points]
        counted = [f"{getattr(source, count):,}" for count in counts]
        rows.append(("now" if source is report else "", [safe_text(name), *counted, share, *lengths]))
    named = [name.replace("supervised", "trained").replace("_", " ") for name in counts]
    tables = [_html_table(["", *named, "trained", *points], rows)]
    if epoch := format_epoch_shares(report.sources):
        lines = [("", [safe_text(title), *cells]) for title, *cells in epoch]
        tables.append(f"<h3>An epoch, by weight</h3>{_html_table(['', *EPOCH_COLUMNS], lines)}")
    return "".join(tables)


def _histogram_html(inspection: Inspection) -> str:
    most = max(each.rows for each in inspection.histogram)
    name = f"<tr class=limit><td colspan=3>{inspection.limit_name} {inspection.limit:,}</td></tr>"
    lines, marked = [], False
    for each in inspection.histogram:
        if each.shortest > inspection.limit and not marked:
            lines.append(name)
            marked = True
        drawn = f'<span class=bar style="width:{100 * each.rows / most:.1f}%"></span>' if each.rows else ""
        lines.append(
            f"<tr{' class=over' if marked else ''}><td class=n>{each.shortest:,} - {each.longest:,}</td>"
            f"<td class=n>{each.rows:,}</td><td>{drawn}</td></tr>"
        )
    return f"<table class=bars>{''.join(lines)}{'' if marked else name}</table>"


def _length_limits_table(inspection: Inspection) -> str:
    cut = any(each.lost_if_truncated is not None for each in inspection.choices)
    head = [
        inspection.limit_name,
        "rows over",
        *(["tokens lost if truncated"] if cut else []),
        "tokens lost if dropped",
    ]
    if inspection.batches is not None:
        head += [f"padding, batches of {inspection.batches.batch_size}", "packs", "packs full"]
    rows = []
    for each in inspection.choices:
        row = [f"{each.max_length:,}", f"{each.rows_over:,}"]
        row += [f"{each.lost_if_truncated or 0:,}"] if cut else []
        row.append(f"{each.lost_if_dropped:,}")
        if inspection.batches is not None:
            row += [f"{each.padding or 0:.1%}", f"{each.packs or 0:,}", f"{each.pack_fill or 0:.1%}"]
        rows.append(("now" if each.max_length == inspection.limit else "", row))
    return _html_table(head, rows)


MOST_IMAGES = 24
"""Maximum number of images of a row that are shown."""


def _images_html(files: Sequence[ImageFile]) -> str:
    if not files:
        return ""
    more = f"<figcaption>{len(files) - MOST_IMAGES:,} more images</figcaption>" if len(files) > MOST_IMAGES else ""
    return f"<div class=images>{''.join(map(_image_html, files[:MOST_IMAGES]))}{more}</div>"


def _image_html(file: ImageFile) -> str:
    small = Thumbnail.of_file(file)
    name = escape(safe_text(file.name), quote=True)
    if small is None:
        return f"<figure><figcaption>{name}: missing or changed</figcaption></figure>"
    title = f"{name}, {small.width} x {small.height}"
    image = f'<img src="data:image/jpeg;base64,{b64encode(small.jpeg).decode()}" alt="{title}">'
    return f"<figure>{image}<figcaption>{title}</figcaption></figure>"


def _rows_html(inspection: Inspection, views: Sequence[tuple[str, RowView]]) -> Iterator[str]:
    left = MAX_BYTES
    for place, (reason, view) in enumerate(views):
        tokens, trained = view.num_tokens, view.num_trained
        facts: list[Any] = [view.origin, f"{tokens:,} tokens"]
        facts += [f"{trained:,} trained ({trained / tokens:.1%})"] if trained else []
        facts += ["held out"] if view.held_out else []
        facts += [f"{view.lost:,} truncated"] if view.lost else []
        summary = f"row {view.number:,} <small>{escape(safe_text(', '.join(facts)))}</small>"
        summary += f" <b>{escape(reason)}</b>" if reason else ""
        parts = _images_html(view.images) + "".join(
            _part_html(inspection, part, with_name=len(view.parts) > 1) for part in view.parts
        )
        text = f"<details{' open' if place < 4 else ''}><summary>{summary}</summary>{parts}</details>"
        left -= len(text.encode())
        if left < 0:
            yield f"<p class=dim>{len(views) - place:,} more rows are left out: the page would be too large.</p>"
            return
        yield text


def _part_html(inspection: Inspection, part: RowPart, *, with_name: bool) -> str:
    name = f"<p class=dim>{part.name}, {len(part.input_ids):,} tokens</p>" if with_name else ""
    runs = inspection.rows.token_runs(part, MAX_TOKENS)
    return f"{name}<pre class=tokens>{''.join(_token_run_html(each) for each in runs)}</pre>"


def _token_run_html(run: Any) -> str:
    if isinstance(run, TokenGap):
        trained = f", {run.trained:,} of them trained" if run.trained else ""
        return f"<span class=gap>... {run.tokens:,} tokens{trained} ...</span>"
    text = escape(safe_text(shorten_repeats(run.text) if run.special else run.text))
    style = " ".join([*(["t"] if run.trained else []), *(["x"] if run.special else [])])
    return f"<span class='{style}'>{text}</span>" if style else text
