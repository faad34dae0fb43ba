"""Print the output of ``streamtune data``: problems, counts, tables, a histogram, and rows with coloured tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.base.privacy import safe_text
from streamtune.data.data_report import (
    EPOCH_COLUMNS,
    CompletionReport,
    DataReport,
    SourceReport,
    format_epoch_shares,
)
from streamtune.data.image_files import ImageFile, Thumbnail
from streamtune.data.inspect_rows import RowPart, RowView, TokenGap, TokenRun, shorten_repeats

from .console import make_table, out, print_labelled, print_rows, print_table, print_text, print_title
from .options import recipe_name
from .plan_screen import draw_bar

if TYPE_CHECKING:
    from streamtune.data import BatchStatistics
    from streamtune.run.build import Inspection

WIDE_TERMINAL = 110
"""Minimum width of a terminal, in columns, to show all percentiles of row lengths."""
OPTIONAL_COLUMNS = ("dropped", "split", "truncated", "tokens_lost", "supervised_tokens_lost")
"""Columns of the table of datasets that are shown only if a dataset has a count other than zero."""


def print_inspection(inspection: Inspection, views: Sequence[tuple[str, RowView]], max_tokens: int) -> None:
    """Print problems, summary, datasets, row lengths, the effect of other length limits, and sample rows.

    Args:
        views: Rows to show, each with the reason why it was chosen.
        max_tokens: Approximate number of tokens to show of each row.
    """
    report = inspection.prepared.report
    print_title(f"data {recipe_name(inspection.loaded.path)}")
    facts = [("problems", "; ".join([*describe_problems(report), *_describe_duplicates(inspection)]) or "none found")]
    facts += [*describe_rows(report, with_problems=False), ("limit", _describe_length_limit(inspection))]
    facts += [("tokenizer", _describe_tokenizer(inspection)), *describe_batches(inspection.batches)]
    print_rows(facts)
    print_table("datasets", _datasets_table(inspection))
    if (epoch := _epoch_shares_table(inspection)) is not None:
        print_table("one epoch of weighted datasets", epoch)
    compared = ", prompt plus longest completion" if report.to_json().get("completions") else ""
    print_table(
        f"row lengths in tokens, before truncation{compared}: {report.rows:,} rows", _histogram_table(inspection)
    )
    batches = inspection.batches
    padded = f"; padding in batches of {batches.batch_size}" if batches is not None and batches.batch_size > 1 else ""
    print_table(
        f"other values of {inspection.limit_name}: longer rows and lost tokens{padded}",
        _length_limits_table(inspection),
    )
    if views:
        out.print()
        print_text(_token_legend())
    for reason, view in views:
        print_row_view(inspection, view, max_tokens=max_tokens, reason=reason)


def print_row_view(
    inspection: Inspection, view: RowView, max_tokens: int | None, *, reason: str = "", ids: bool = False
) -> None:
    """Print one row: a line with its origin and token counts, then its text.

    Args:
        max_tokens: Approximate number of tokens to show; None shows all.
        ids: True to print each token on its own line, with its id.
    """
    out.print()
    print_labelled(Text(f"row {view.number:,}  ", style="bold"), Text(describe_row_view(view, reason)))
    if view.images:
        shown = [f"{safe_text(file.name)}{_describe_size(file)}" for file in view.images[:MOST_IMAGES]]
        more = len(view.images) - len(shown)
        print_text(Text(f"images: {', '.join(shown)}{f' and {more:,} more' if more else ''}", style="dim"), indent=2)
    for part in view.parts:
        if len(view.parts) > 1:
            trained = (
                f", {_describe_trained_tokens(int(part.trained.sum()), len(part.input_ids))}"
                if part.trained.any()
                else ""
            )
            print_text(Text(f"{part.name}, {len(part.input_ids):,} tokens{trained}", style="dim"), indent=2)
        if ids:
            _print_token_ids(inspection, part)
            continue
        text = format_token_runs(inspection.rows.token_runs(part, max_tokens))
        if text.plain.endswith("\n"):
            text.right_crop(1)  # printing ends the line
        if out.is_terminal:
            out.print(Padding(text, (0, 0, 0, 4)))
        else:
            out.print(text, soft_wrap=True)


MOST_IMAGES = 8
"""Maximum number of images of a row that are named."""


def _describe_size(file: ImageFile) -> str:
    small = Thumbnail.of_file(file, 8)
    return "" if small is None else f" ({small.width} x {small.height})"


def describe_row_view(view: RowView, reason: str = "") -> str:
    """Return a row's origin and its numbers of tokens, trained tokens and truncated tokens, in one line."""
    parts = [safe_text(view.origin), f"{view.num_tokens:,} tokens"]
    parts += (
        [_describe_trained_tokens(view.num_trained, view.num_tokens)]
        if [part.name for part in view.parts] != ["prompt"]
        else []
    )
    parts += ["held out"] if view.held_out else []
    parts += [f"{view.lost:,} cut off"] if view.lost else []
    return ", ".join([*parts, *([reason] if reason else [])])


def _describe_trained_tokens(trained_tokens: int, all_tokens: int) -> str:
    return f"{trained_tokens:,} trained ({trained_tokens / all_tokens:.1%})" if trained_tokens else "none trained"


# --- tokens -----------------------------------------------------------------------------------------------------------


def format_token_runs(runs: Sequence[TokenRun | TokenGap]) -> Text:
    """Return a row as text; trained tokens are coloured, underlined without colours, or in brackets in a file."""
    text = Text()
    before = False
    opens, closes = ("⟦", "⟧") if out.encoding.startswith("utf") else ("[[", "]]")
    for run in runs:
        trained = isinstance(run, TokenRun) and run.trained
        if not out.is_terminal and trained != before:
            text.append(opens if trained else closes)
            before = trained
        if isinstance(run, TokenGap):
            line = "\n" if text.plain and not text.plain.endswith("\n") else ""
            text.append(f"{line}... {describe_token_gap(run)} ...\n", style="yellow")
        else:
            shown = safe_text(shorten_repeats(run.text) if run.special else run.text)
            # The sign makes the colour of a trained line break visible.
            text.append(shown.replace("\n", "↵\n") if out.is_terminal and trained else shown, style=_token_style(run))
    return text.append(closes) if before else text


def describe_token_gap(gap: TokenGap) -> str:
    """Return the number of tokens that are left out, such as ``14,203 tokens, 12 of them trained``."""
    return f"{gap.tokens:,} tokens" + (f", {gap.trained:,} of them trained" if gap.trained else "")


def _token_style(run: TokenRun) -> str:
    if out.no_color or out.color_system is None:
        return "underline" if run.trained else "bold" if run.special else ""
    if run.special:
        return "bold green" if run.trained else "magenta"
    return "green" if run.trained else "dim"


def _token_legend() -> Text:
    kinds = [(trained, special) for trained in (False, True) for special in (False, True)]
    names = [("trained" if trained else "masked") + (" special" if special else "") for trained, special in kinds]
    shown = [format_token_runs([TokenRun(name, 1, *kind)]) for name, kind in zip(names, kinds, strict=True)]
    return Text.assemble(("rows as the model sees them", "bold"), ": ", Text(", ").join(shown))


def _print_token_ids(inspection: Inspection, part: RowPart) -> None:
    special = inspection.rows.special_ids
    for position, (token, text, trained) in enumerate(
        zip(part.input_ids, inspection.rows.token_texts(part), part.trained.tolist(), strict=True)
    ):
        run = TokenRun(text, 1, trained=trained, special=token in special)
        kind = ("trained" if trained else "masked") + (" special" if run.special else "")
        shown = json.dumps(safe_text(text), ensure_ascii=False)
        line = Text(f"    {position:>7,}  {token:>7}  {kind:<15}  ").append(shown, style=_token_style(run))
        out.print(line, soft_wrap=True)


# --- facts ------------------------------------------------------------------------------------------------------------


def describe_rows(report: Any, *, with_problems: bool = True) -> list[tuple[str, str]]:
    """Return (name, text) lines about the training and held-out rows: their number, lengths and tokens.

    Args:
        report: Report of the prepared rows. For streamed rows, whose number is unknown, there is one line.
        with_problems: True to add a line with the problems, if there are any.
    """
    if not isinstance(report, DataReport | CompletionReport):
        return [("data", report.describe())]
    counts = f"{report.train_examples:,} train"
    if report.validation_examples:
        counts += f", {report.validation_examples:,} held out"
    if report.train_examples + report.validation_examples != report.rows:
        counts += f" (from {report.rows:,} rows{f', {report.split:,} split' if report.split else ''})"
    if any(source.weight is not None for source in report.sources):
        counts += f"; {sum(source.epoch_rows for source in report.sources):,} in a weighted epoch"
    if isinstance(report, DataReport):
        cut = " before truncation" if report.truncated or report.split else ""
        lines = [("data", f"{counts}; {_describe_length_range(report.length_percentiles, ' tokens')}{cut}")]
        lines.append(
            (
                "tokens",
                f"{report.tokens:,}, of which {_describe_trained_tokens(report.supervised_tokens, report.tokens)}",
            )
        )
        lines += _describe_shared_or_cut_rows(report)
    else:
        lengths = {"prompts": report.prompt_lengths, **report.completion_lengths}
        ranges = ", ".join(f"{name} {_describe_length_range(each)}" for name, each in lengths.items())
        lines = [("data", f"{counts}; tokens: {ranges}")]
        tokens = f"{report.tokens:,}"
        if report.completions:
            if report.tree_tokens < report.tokens:
                tokens += f"; {report.tree_tokens:,} with shared beginnings counted once"
            tokens += f"; {report.supervised_tokens:,} trained"
        lines.append(("tokens", tokens))
    found = describe_problems(report) if with_problems else []
    return [*lines, *([("problems", "; ".join(found))] if found else [])]


def _describe_shared_or_cut_rows(report: DataReport) -> list[tuple[str, str]]:
    """Return a line about shared prefixes of rows, or about the pieces that rows are split into; else an empty list."""
    if report.shared_tokens:
        text = f"{report.packs:,} sequences, {report.shared_tokens:,} tokens with shared beginnings counted once"
        return [("shared", text)]
    if report.pieces:
        text = (
            f"{report.pieces:,}; {report.piece_targets_lost:,} trained tokens at the start of a piece are not predicted"
        )
        if report.piece_tokens_lost:
            text += f"; {report.piece_tokens_lost:,} tokens are left out of all pieces"
        return [("pieces", text)]
    return []


def describe_problems(report: DataReport | CompletionReport) -> list[str]:
    """Return the problems of the rows: rows dropped or truncated, tokens lost, special tokens written as text."""
    found = [f"{report.dropped:,} of {report.rows:,} rows dropped"] if report.dropped else []
    found += [f"{report.truncated:,} rows truncated"] if report.truncated else []
    repeated = 0
    if isinstance(report, DataReport):
        repeated = report.tokens_repeated
        found += [f"{report.pieces_dropped:,} pieces without trained tokens dropped"] if report.pieces_dropped else []
        found += [f"{repeated:,} tokens repeated as context"] if repeated else []
    if report.tokens_lost:
        share = report.tokens_lost / (report.tokens - repeated + report.tokens_lost)
        about = "about " if isinstance(report, DataReport) and report.estimated else ""
        found.append(f"{about}{report.tokens_lost:,} tokens lost ({100 * share:.2g}%)")
    found += [f"{report.supervised_tokens_lost:,} trained tokens lost"] if report.supervised_tokens_lost else []
    if report.special_rows:
        found.append(f"{report.special_rows:,} row{'s spell' if report.special_rows > 1 else ' spells'} special tokens")
    return found


def _describe_length_range(lengths: dict[str, int], unit: str = "") -> str:
    """Return the range of lengths, such as ``41-3,425 tokens (median 148)``."""
    return f"{lengths['min']:,}-{lengths['max']:,}{unit} (median {lengths['p50']:,})"


def _describe_length_limit(inspection: Inspection) -> str:
    recipe = inspection.loaded.recipe
    longer = {"error": "an error", "truncate": "truncated", "drop": "dropped", "split": "split into pieces"}
    trained = f"; train_on: {recipe.train_on}" if recipe.objective == "sft" else ""
    return f"{inspection.limit_name} {inspection.limit:,}; longer rows are {longer[recipe.overlength]}{trained}"


def _describe_tokenizer(inspection: Inspection) -> str:
    recipe = inspection.loaded.recipe
    source = "trained on these rows"
    if recipe.tokenizer is None or recipe.tokenizer.train is None:
        source = safe_text(str(recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path))
    template = "with a chat template" if inspection.tokenizer.chat_template else "without a chat template"
    if recipe.chat_template in CHAT_TEMPLATES:
        template = f"chat template {recipe.chat_template}"
    return f"{source}, {len(inspection.tokenizer):,} entries, {template}"


def describe_batches(stats: BatchStatistics | None) -> list[tuple[str, str]]:
    """Return (name, text) lines about padding, packing and attention cost; an empty list without ``stats``."""
    if stats is None:
        return []
    lines = [("batches", _describe_step_sizes(stats))]
    if stats.packs:
        packed = "" if stats.packing and stats.batching != "buckets" else "would be "
        sequences = "1 sequence" if stats.packs == 1 else f"{stats.packs:,} sequences"
        lines.append(("packing", f"{packed}{sequences}, {stats.pack_fill:.1%} full (minimum {stats.fewest_packs:,})"))
    return [*lines, ("attention", _describe_attention_cost(stats))]


def _describe_step_sizes(stats: BatchStatistics) -> str:
    unit = "packed sequences" if stats.packing else {"buckets": "pieces"}.get(stats.batching, "rows")
    padding = f"{stats.batch_size} {unit}, {stats.padding:.1%} of the positions are padding"
    if stats.batch_size == 1:
        padding = f"1 {unit[:-1]}, no padding"
    if stats.batching == "rows":
        return padding
    steps = f"{stats.steps:,} step{'' if stats.steps == 1 else 's'}"
    text = f"{steps} of {stats.step_tokens['min']:,} to {stats.step_tokens['max']:,} tokens"
    if stats.pieces:
        text += f"; pieces by length: {', '.join(f'{count:,} of {size:,}' for size, count in stats.pieces.items())}"
    return f"{text}; batches of {padding}"


def _describe_attention_cost(stats: BatchStatistics) -> str:
    """Return the attention cost (sum of squared row lengths), and the relative cost of concatenated and cut rows."""
    ratio = stats.attention_ratio
    times = f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"
    own = f"sum of squared lengths {stats.squared_lengths:.3g}"
    return f"{own}; {times} if rows were concatenated and cut at max_length"


def _describe_duplicates(inspection: Inspection) -> list[str]:
    report = inspection.prepared.report
    total = report.train_examples + report.validation_examples
    if not report.duplicates:
        return []
    text = f"{report.duplicates:,} of {total:,} rows duplicate an earlier row"
    if report.held_out_duplicates:
        text += f", {report.held_out_duplicates:,} training rows are also held out"
    return [text]


# --- tables -----------------------------------------------------------------------------------------------------------


def _length_table(first_column: str, *number_columns: str) -> Table:
    return make_table(
        Column(first_column, overflow="fold", min_width=12),
        *(Column(name, justify="right", overflow="fold", no_wrap=True) for name in number_columns),
        header="dim",
    )


def _datasets_table(inspection: Inspection) -> Table:
    report = inspection.prepared.report
    counts = [name for name in OPTIONAL_COLUMNS if getattr(report, name)]
    trained = report.supervised_tokens > 0
    points = (
        ("min", "p50", "p90", "max") if out.width >= WIDE_TERMINAL else ("p50", "max") if len(counts) < 4 else ("max",)
    )
    short = {"truncated": "cut", "tokens_lost": "lost", "supervised_tokens_lost": "trained\nlost"}
    names = [short.get(name, name) for name in counts]
    kept = ["kept"] if out.width >= WIDE_TERMINAL or "dropped" not in counts else []  # else rows - dropped
    table = _length_table("  ", "rows", *kept, *names, "tokens", *(["trained"] if trained else []), *points)
    for source in [*report.sources, *([report] if len(report.sources) > 1 else [])]:
        lengths = source.length_percentiles
        share = f"{source.supervised_tokens / source.tokens:.1%}" if source.tokens else "-"
        name = source.title if isinstance(source, SourceReport) else "total"
        table.add_row(
            Text(f"  {safe_text(name)}"),
            f"{source.rows:,}",
            *([f"{source.kept:,}"] if kept else []),
            *(f"{getattr(source, count):,}" for count in counts),
            f"{source.tokens:,}",
            *([share] if trained else []),
            *(f"{lengths[point]:,}" if lengths else "-" for point in points),
            style="bold" if source is report else None,
        )
    return table


def _epoch_shares_table(inspection: Inspection) -> Table | None:
    lines = format_epoch_shares(inspection.prepared.report.sources)
    if not lines:
        return None
    table = _length_table("  ", *EPOCH_COLUMNS)
    for title, *cells in lines:
        table.add_row(Text(f"  {safe_text(title)}"), *cells)
    return table


def _histogram_table(inspection: Inspection) -> Table:
    table = make_table("", "", Column(no_wrap=True), header=None)
    most = max(each.rows for each in inspection.histogram)
    wide = len(f"{inspection.histogram[-1].longest:,}")
    width = max(10, min(80, out.width - 2 * wide - len(f"{most:,}") - 12))
    limit = Text(f"{inspection.limit_name} {inspection.limit:,} " + "╌" * 12, style="yellow")
    marked = False
    for each in inspection.histogram:
        if each.shortest > inspection.limit and not marked:
            table.add_row("", "", limit)
            marked = True
        drawn = Text(draw_bar(each.rows / most, width), style="red" if marked else "blue") if each.rows else Text()
        table.add_row(f"  {each.shortest:>{wide},} - {each.longest:>{wide},}", f"{each.rows:,}", drawn)
    if not marked:
        table.add_row("", "", limit)
    return table


def _length_limits_table(inspection: Inspection) -> Table:
    """Return a table of other length limits and the tokens lost with each; the recipe's limit is bold."""
    packed, padded = (
        inspection.batches is not None,
        inspection.batches is not None and inspection.batches.batch_size > 1,
    )
    cut = any(each.lost_if_truncated is not None for each in inspection.choices)
    columns = [*(["lost if cut"] if cut else []), "lost if dropped", *(["padding"] if padded else [])]
    columns += ["packs", "full"] if packed else []
    table = _length_table(f"  {inspection.limit_name}", "over", *columns)
    for each in inspection.choices:
        cells = [f"{each.lost_if_truncated or 0:,}"] if cut else []
        cells.append(f"{each.lost_if_dropped:,}")
        cells += [f"{each.padding or 0:.1%}"] if padded else []
        cells += [f"{each.packs or 0:,}", f"{each.pack_fill:.1%}" if each.packs else ""] if packed else []
        now = each.max_length == inspection.limit
        table.add_row(
            f"{'>' if now else ' '} {each.max_length:,}", f"{each.rows_over:,}", *cells, style="bold" if now else None
        )
    return table
