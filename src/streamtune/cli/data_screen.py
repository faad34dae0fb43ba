"""The screen of ``streamtune data``: facts, tables, the histogram, and rows with their tokens coloured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.privacy import plain
from streamtune.data.data_report import EPOCH_COLUMNS, SourceReport, epoch_table
from streamtune.data.inspect_rows import RowPart, RowView, TokenGap, TokenRun

from .console import make_table, out, print_rows, print_table, print_title
from .plan_screen import bar

if TYPE_CHECKING:
    from streamtune.data import BatchFacts
    from streamtune.run.build import Inspection

WIDE = 110
"""Columns of a terminal with room for all percentiles beside the names of datasets."""
COUNTS = ("dropped", "split", "truncated", "tokens_lost", "supervised_tokens_lost")
"""Columns that are shown where they are not zero."""


def print_inspection(found: Inspection, views: Sequence[tuple[str, RowView]], most: int) -> None:
    """Print everything: facts, datasets, lengths, other limits, and rows.

    Args:
        found: The rows of a recipe.
        views: The rows to show, each with the reason for which it was chosen.
        most: Tokens of a row that are shown, about.
    """
    report = found.prepared.report
    print_title(f"data {found.loaded.path}")
    facts = [("rows", report.describe()), ("limit", _describe_limit(found)), ("tokenizer", _describe_tokenizer(found))]
    facts += describe_batches(found.batches)
    facts.append(("duplicates", _describe_duplicates(found)))
    print_rows(facts)
    print_table("datasets", _sources_table(found))
    if (epoch := _epoch_table(found)) is not None:
        print_table("an epoch, by weight", epoch)
    compared = ", of a prompt with its longest answer" if report.to_json().get("completions") else ""
    print_table(f"tokens of {report.rows:,} rows before any cut{compared}", _histogram(found))
    batches = found.batches
    padded = f", padding of batches of {batches.batch_size}" if batches is not None and batches.batch_size > 1 else ""
    packs = ", packs" if batches is not None else ""
    print_table(f"with other lengths: rows over, tokens lost{padded}{packs}", _choices_table(found))
    if views:
        out.print()
        out.print(_legend(), soft_wrap=True)
    for reason, view in views:
        print_view(found, view, most=most, reason=reason)


def print_view(found: Inspection, view: RowView, most: int | None, *, reason: str = "", ids: bool = False) -> None:
    """Print one row: a line about it, and its text.

    Args:
        found: The rows of a recipe.
        view: The row.
        most: Tokens to show, about; None shows all.
        reason: Reason why the row is shown.
        ids: Print every token on a line of its own, with its id.
    """
    out.print()
    out.print(Text.assemble((f"row {view.number:,}", "bold"), f"  {describe_view(view, reason)}"), soft_wrap=True)
    for part in view.parts:
        if len(view.parts) > 1:
            trained = f", {_share(int(part.trained.sum()), len(part.input_ids))}" if part.trained.any() else ""
            out.print(Text(f"  {part.name}, {len(part.input_ids):,} tokens{trained}", style="dim"), soft_wrap=True)
        if ids:
            _print_ids(found, part)
            continue
        text = tokens_text(found.rows.runs(part, most))
        if text.plain.endswith("\n"):
            text.right_crop(1)  # printing ends the line
        if out.is_terminal:
            out.print(Padding(text, (0, 0, 0, 4)))
        else:
            out.print(text, soft_wrap=True)


def describe_view(view: RowView, reason: str = "") -> str:
    """Return one line about a row, without its number."""
    parts = [plain(view.origin), f"{view.tokens:,} tokens"]
    parts += [_share(view.trained, view.tokens)] if [part.name for part in view.parts] != ["prompt"] else []
    parts += ["held out"] if view.held_out else []
    parts += [f"{view.lost:,} cut off"] if view.lost else []
    return ", ".join([*parts, *([reason] if reason else [])])


def _share(trained: int, tokens: int) -> str:
    return f"{trained:,} trained ({trained / tokens:.1%})" if trained else "none trained"


# --- tokens -----------------------------------------------------------------------------------------------------------


def tokens_text(runs: Sequence[TokenRun | TokenGap]) -> Text:
    """Return a row as text: coloured on a terminal, underlined where it has no colours, bracketed in a file."""
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
            text.append(f"{line}... {describe_gap(run)} ...\n", style="yellow")
        else:
            shown = plain(run.text)
            # An end of line shows its colour, which it would not have by itself.
            text.append(shown.replace("\n", "↵\n") if out.is_terminal and trained else shown, style=_style(run))
    return text.append(closes) if before else text


def describe_gap(gap: TokenGap) -> str:
    """Return the tokens that are not shown: ``14,203 tokens, 12 of them trained``."""
    return f"{gap.tokens:,} tokens" + (f", {gap.trained:,} of them trained" if gap.trained else "")


def _style(run: TokenRun) -> str:
    if out.no_color or out.color_system is None:
        return "underline" if run.trained else "bold" if run.special else ""
    if run.special:
        return "bold green" if run.trained else "magenta"
    return "green" if run.trained else "dim"


def _legend() -> Text:
    kinds = [(trained, special) for trained in (False, True) for special in (False, True)]
    names = [("trained" if trained else "masked") + (" special" if special else "") for trained, special in kinds]
    shown = [tokens_text([TokenRun(name, 1, *kind)]) for name, kind in zip(names, kinds, strict=True)]
    return Text.assemble(("rows as the model sees them", "bold"), ": ", Text(", ").join(shown))


def _print_ids(found: Inspection, part: RowPart) -> None:
    """Print place, id, kind and text of every token."""
    special = found.rows.special_ids
    for place, (token, text, trained) in enumerate(
        zip(part.input_ids, found.rows.texts(part), part.trained.tolist(), strict=True)
    ):
        run = TokenRun(text, 1, trained=trained, special=token in special)
        kind = ("trained" if trained else "masked") + (" special" if run.special else "")
        shown = json.dumps(plain(text), ensure_ascii=False)
        line = Text(f"    {place:>7,}  {token:>7}  {kind:<15}  ").append(shown, style=_style(run))
        out.print(line, soft_wrap=True)


# --- facts ------------------------------------------------------------------------------------------------------------


def _describe_limit(found: Inspection) -> str:
    recipe = found.loaded.recipe
    longer = {"error": "an error", "truncate": "cut", "drop": "left out", "split": "cut into pieces"}
    trained = f"; trained on: {recipe.train_on}" if recipe.objective == "sft" else ""
    return f"{found.limit_name} {found.limit:,}, longer rows are {longer[recipe.overlength]}{trained}"


def _describe_tokenizer(found: Inspection) -> str:
    recipe = found.loaded.recipe
    source = "trained on these rows"
    if recipe.tokenizer is None or recipe.tokenizer.train is None:
        source = plain(str(recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path))
    template = "with a chat template" if found.tokenizer.chat_template else "without chat template"
    return f"{source}, {len(found.tokenizer):,} entries, {template}"


def describe_batches(facts: BatchFacts | None) -> list[tuple[str, str]]:
    """Return lines about padding, packing and attention, as (name, text); none of trees and prompts."""
    if facts is None:
        return []
    lines = [("batches", _describe_steps(facts))]
    if facts.packs:
        does = "fill" if facts.packing and facts.batching != "buckets" else "would fill"
        best = f"no packing needs fewer than {facts.fewest_packs:,}"
        sequences = "1 sequence" if facts.packs == 1 else f"{facts.packs:,} sequences"
        lines.append(("packing", f"packs {does} {sequences} to {facts.pack_fill:.1%}; {best}"))
    return [*lines, ("attention", _describe_attention(facts))]


def _describe_steps(facts: BatchFacts) -> str:
    """Describe what steps and batches hold: ``68 steps of 8,000 to 8,192 tokens; ...``."""
    unit = "packed sequences" if facts.packing else {"buckets": "pieces"}.get(facts.batching, "rows")
    padding = f"{facts.padding:.1%} of the positions of batches of {facts.batch_size} {unit} are padding"
    if facts.batch_size == 1:
        padding = f"of one {unit[:-1]}: no padding"
    if facts.batching == "rows":
        return padding
    if facts.batch_size == 1:
        padding = f"batches {padding}"
    steps = f"{facts.steps:,} step{'' if facts.steps == 1 else 's'}"
    text = f"{steps} of {facts.step_tokens['min']:,} to {facts.step_tokens['max']:,} tokens"
    if facts.pieces:
        text += f"; pieces of {', '.join(f'{size:,}: {count:,}' for size, count in facts.pieces.items())}"
    return f"{text}; {padding}"


def _describe_attention(facts: BatchFacts) -> str:
    """Describe the sum of the squares of lengths, relative to rows that are joined and cut."""
    ratio = facts.attention_ratio
    times = f"{ratio:.2f} times that" if ratio >= 0.1 else f"{ratio:.2g} of that"
    return f"sum of squared lengths {facts.squared_lengths:.3g}; of rows joined and cut to max_length it is {times}"


def _describe_duplicates(found: Inspection) -> str:
    report = found.prepared.report
    total = report.train_examples + report.validation_examples
    if not report.duplicates:
        return f"no two of {total:,} are the same"
    text = f"{report.duplicates:,} of {total:,} are the same as an earlier one"
    if not report.validation_examples:
        return text
    held_out = report.held_out_duplicates
    return f"{text}; {held_out:,} to train on are held out as well" if held_out else f"{text}; none is held out as well"


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(first: str, *names: str) -> Table:
    return make_table(
        Column(first, overflow="fold", min_width=12),
        *(Column(name, justify="right", overflow="fold", no_wrap=True) for name in names),
        header="dim",
    )


def _sources_table(found: Inspection) -> Table:
    """Return a table with one row for each dataset and one for all; counts that are zero everywhere are left out."""
    report = found.prepared.report
    counts = [name for name in COUNTS if getattr(report, name)]
    trained = report.supervised_tokens > 0
    points = ("min", "p50", "p90", "max") if out.width >= WIDE else ("p50", "max") if len(counts) < 4 else ("max",)
    short = {"truncated": "cut", "tokens_lost": "lost", "supervised_tokens_lost": "trained\nlost"}
    names = [short.get(name, name) for name in counts]
    kept = ["kept"] if out.width >= WIDE or "dropped" not in counts else []  # else it is the rest
    table = _table("  ", "rows", *kept, *names, "tokens", *(["trained"] if trained else []), *points)
    for source in [*report.sources, *([report] if len(report.sources) > 1 else [])]:
        lengths = source.length_percentiles
        share = f"{source.supervised_tokens / source.tokens:.1%}" if source.tokens else "-"
        name = source.title if isinstance(source, SourceReport) else "in all"
        table.add_row(
            Text(f"  {plain(name)}"),
            f"{source.rows:,}",
            *([f"{source.kept:,}"] if kept else []),
            *(f"{getattr(source, count):,}" for count in counts),
            f"{source.tokens:,}",
            *([share] if trained else []),
            *(f"{lengths[point]:,}" if lengths else "-" for point in points),
            style="bold" if source is report else None,
        )
    return table


def _epoch_table(found: Inspection) -> Table | None:
    """Return a table of what an epoch takes of each dataset; None where none has a weight."""
    lines = epoch_table(found.prepared.report.sources)
    if not lines:
        return None
    table = _table("  ", *EPOCH_COLUMNS)
    for title, *cells in lines:
        table.add_row(Text(f"  {plain(title)}"), *cells)
    return table


def _histogram(found: Inspection) -> Table:
    """Return the histogram: a line for each bin, and one where the limit is."""
    table = make_table("", "", Column(no_wrap=True), header=None)
    most = max(each.rows for each in found.histogram)
    wide = len(f"{found.histogram[-1].longest:,}")
    width = max(10, min(80, out.width - 2 * wide - len(f"{most:,}") - 12))
    limit = Text(f"{found.limit_name} {found.limit:,} " + "╌" * 12, style="yellow")
    marked = False
    for each in found.histogram:
        if each.shortest > found.limit and not marked:
            table.add_row("", "", limit)
            marked = True
        drawn = Text(bar(each.rows / most, width), style="red" if marked else "blue") if each.rows else Text()
        table.add_row(f"  {each.shortest:>{wide},} - {each.longest:>{wide},}", f"{each.rows:,}", drawn)
    if not marked:
        table.add_row("", "", limit)
    return table


def _choices_table(found: Inspection) -> Table:
    """Return a table of other limits; the present one is bold."""
    packed, padded = found.batches is not None, found.batches is not None and found.batches.batch_size > 1
    cut = any(each.lost_if_truncated is not None for each in found.choices)
    columns = [*(["lost if cut"] if cut else []), "lost if dropped", *(["padding"] if padded else [])]
    columns += ["packs", "full"] if packed else []
    table = _table(f"  {found.limit_name}", "over", *columns)
    for each in found.choices:
        cells = [f"{each.lost_if_truncated or 0:,}"] if cut else []
        cells.append(f"{each.lost_if_dropped:,}")
        cells += [f"{each.padding or 0:.1%}"] if padded else []
        cells += [f"{each.packs or 0:,}", f"{each.pack_fill:.1%}" if each.packs else ""] if packed else []
        now = each.max_length == found.limit
        table.add_row(
            f"{'>' if now else ' '} {each.max_length:,}", f"{each.rows_over:,}", *cells, style="bold" if now else None
        )
    return table
