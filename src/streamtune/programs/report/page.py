"""``streamtune report``: write an HTML report about one or several training runs."""

from __future__ import annotations

import shlex
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from streamtune.base.adapters import ADAPTERS
from streamtune.base.text import eval_set_names
from streamtune.cli.console import out, print_labelled, print_note, replace_page
from streamtune.cli.options import option
from streamtune.programs.report.charts import GIB, Curve, line_chart, memory_chart, show_gib, show_number
from streamtune.programs.report.run_records import RunRecords, read_run

MAX_SAMPLES, MAX_EVENTS = 60, 300
"""Maximum numbers of samples (the newest) and of events (the first and the newest) shown for each run."""
MAX_CHARTS = 100
"""Maximum number of charts of metrics that are in neither :data:`FIRST` nor :data:`LATER`."""
FIRST = {"loss": "Loss", "reward": "Reward", "rewards/accuracies": "Accuracy of preferences"}
"""Metrics whose charts come first on the page -> titles of the charts."""
LATER = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "moved": "Share of weights changed by a step",
    "loss_scale": "Loss scale of float16",
    "aux_loss": "Load-balancing loss of the MoE routers",
}
"""Metrics whose charts come last -> titles of the charts."""
NOT_DRAWN = {
    "step",
    "tokens",
    "supervised_tokens",
    "tokens_per_s",
    "peak_mem_gib",
    "epoch",
    "skipped",
    "overflow",
    "flops",
    "mfu",
    "seconds",
}
"""Fields of a training step in ``metrics.jsonl`` that are not drawn as training metrics."""
NOT_HIGHLIGHTED = ("start", "finish", "checkpoint")
"""Names of events that are not highlighted."""
PAGE = "report.html"


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Directories of runs; several runs are compared on one page.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "HTML file to write. [default: report.html in the folder of the run; for several runs, in the "
            "current folder]",
        ),
    ] = None,
    open_: Annotated[bool, option(None, "Open the written page in the browser.", "--open")] = False,
) -> None:
    """Write one self-contained HTML page about runs: curves, memory, speed, samples, events and recipes."""
    found = [read_run(run) for run in runs]
    page = output or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    _write_page(found, page)
    out.print(f"written: {page} ({page.stat().st_size / 1024:,.0f} KiB)", soft_wrap=True, markup=False)
    if open_:
        webbrowser.open(page.resolve().as_uri())
        return
    command = ["streamtune", "report", *map(str, runs), *(["--output", str(output)] if output else []), "--open"]
    print_labelled(Text("Next: ", style="bold"), Text(shlex.join(command)))


def write_report(run: Path) -> Path | None:
    """Write the report of a run that has ended, and return its path. On an error, print a note and return None."""
    page = run / PAGE
    try:
        _write_page([read_run(run)], page)
    except Exception as error:
        print_note(f"could not write {page}: {getattr(error, 'what', error)}")
        return None
    return page


def _write_page(runs: Sequence[RunRecords], page: Path) -> None:
    """Write the page; raise an ArgumentError if ``page`` exists and StreamTune did not write it."""
    replace_page(render_page(runs).encode("utf-8"), page, "--output")


def render_page(runs: Sequence[RunRecords]) -> str:
    """Return the HTML of a report; the curves of several runs are drawn in the same charts."""
    names = _run_names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    sections = [
        f"<h1>{escape(title)}</h1>",
        *_facts_html(runs, names),
        *_iterate_section("Training", _metric_charts(runs, names)),
        *_iterate_section("Memory and speed", _memory_and_speed_charts(runs, names)),
        *_lengths_html(runs, names),
        *_samples_html(runs, names),
        *_events_html(runs, names),
        *_recipes_html(runs, names),
        *_versions_html(runs, names),
    ]
    template = Template(files("streamtune.programs.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(title=escape(f"{title} - StreamTune"), body="\n".join(sections))


def _run_names(runs: Sequence[RunRecords]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _iterate_section(title: str, charts: Sequence[str]) -> Iterator[str]:
    if any(charts):
        yield f"<h2>{escape(title)}</h2><div class=charts>{''.join(charts)}</div>"


# --- facts ------------------------------------------------------------------------------------------------------------


def _facts_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        if len(runs) > 1:
            yield f"<h2>{escape(name)}</h2>"
        yield f"<p class=dim>{escape(_describe_run(run))}</p>"
        if run.unreadable:
            yield f"<p class=bad>Unreadable: {escape('; '.join(run.unreadable))}</p>"
        facts = "".join(f"<div>{escape(title)}<b>{escape(value)}</b></div>" for title, value in _key_figures(run))
        yield f"<div class=facts>{facts}</div>"


def _describe_run(run: RunRecords) -> str:
    recipe = run.recipe
    model = recipe.get("model_name_or_path") or _nested_value(recipe, "model", "init", "model_type") or "a model"
    parts = [f"{recipe.get('objective', 'sft')} of {model}"]
    if recipe.get("finetuning_type", "full") != "full":
        parts.append(_describe_adapters(recipe))
    parts += [f"{key}: {_show_list(recipe[key])}" for key in ("trainable_layers", "freeze", "train") if recipe.get(key)]
    sources = [str(each.get("path")) for each in _as_sequence(recipe.get("datasets")) if isinstance(each, Mapping)]
    if sources:
        parts.append(f"on {', '.join(sources[:4])}{' ...' if len(sources) > 4 else ''}")
    parts.append(_describe_state(run))
    return "; ".join(parts)


def _show_list(value: Any) -> str:
    return ", ".join(map(str, _as_sequence(value))) if not isinstance(value, str) else value


def _describe_adapters(recipe: Mapping[str, Any]) -> str:
    tuning, kind = str(recipe["finetuning_type"]), str(recipe.get("adapter_type", "lora"))
    if recipe.get("adapter_name_or_path") is not None:  # the folder sets their kind and rank
        return f"{tuning} from {recipe['adapter_name_or_path']}"
    has_rank = kind in ADAPTERS and "lora_r" in ADAPTERS[kind].own_recipe_keys and "lora_r" in recipe
    return tuning + (f" ({kind})" if kind != "lora" else "") + (f" of rank {recipe['lora_r']}" if has_rank else "")


def _describe_state(run: RunRecords) -> str:
    open_end = "running or killed"  # a run that is killed writes no event
    states = {"finish": "finished", "stop": "stopped", "failure": "failed", "start": open_end, "resume": open_end}
    found = [event for event in run.events if str(event.get("event")) in states]
    if not found:
        return "no events"
    last = found[-1]
    why = last.get("what") or last.get("reason")
    return f"{states[str(last['event'])]}{f': {why}' if why else ''}"


def _key_figures(run: RunRecords) -> Iterator[tuple[str, str]]:
    if run.steps:
        yield "steps", _show_count(run.steps[-1].get("step"))
    for key, held_out, title in (
        ("loss", False, "loss"),
        ("eval_loss", True, "held-out loss"),
        ("reward", False, "reward"),
    ):
        course = run.metric_points(key, held_out=held_out)
        if course:
            first, last = show_number(course[0][1]), show_number(course[-1][1])
            yield title, last if len(course) == 1 else f"{first} → {last}"
    for name in _eval_set_names(run):
        for key in ("loss", "reward"):
            if course := run.metric_points(f"eval_{name}_{key}", held_out=True):
                yield f"{key} of {name}", show_number(course[-1][1])
    tokens = sum(record["tokens"] for record in run.steps if isinstance(record.get("tokens"), int))
    seconds = sum(value for _, value in run.step_times())
    if tokens:
        yield "tokens trained", f"{tokens:,}"
    if seconds:
        yield "time in steps", _show_duration(seconds)
        yield "tokens per second", f"{tokens / seconds:,.0f}"
    peaks = [value for _, value in run.metric_points("peak_mem_gib")]
    if peaks:
        yield "peak memory", show_gib(max(peaks) * GIB)
    longest, most = _nested_value(run.data, "length_percentiles", "max"), _length_limit(run)
    if isinstance(longest, int):
        cut = f" ({longest:,} in the data)" if most is not None and longest > most else ""
        yield "longest row", f"{longest if most is None else min(longest, most):,} tokens{cut}"


def _length_limit(run: RunRecords) -> int | None:
    """Return the recipe's ``max_length`` (for GRPO ``max_prompt_length``) in tokens; None if it is not set."""
    key = "max_prompt_length" if run.recipe.get("objective") == "grpo" else "max_length"
    limit = run.recipe.get(key)
    return limit if isinstance(limit, int) else None


def _show_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- charts -----------------------------------------------------------------------------------------------------------


def _metric_charts(runs: Sequence[RunRecords], names: Sequence[str]) -> list[str]:
    """Return one HTML chart for each metric: :data:`FIRST`, then other metrics by name, then :data:`LATER`."""
    found: dict[str, None] = {}
    for run in runs:
        for record in run.steps:
            found |= dict.fromkeys(record)
        named = tuple(f"{name}_" for name in _eval_set_names(run))
        for record in run.evaluations:
            keys = (key.removeprefix("eval_") for key in record)
            found |= dict.fromkeys(key for key in keys if not key.startswith(named))
    others = {key: key for key in sorted(found) if key not in FIRST and key not in LATER and key not in NOT_DRAWN}
    others = dict(list(others.items())[:MAX_CHARTS])
    return [
        _metric_chart(key, title, runs, names) for key, title in {**FIRST, **others, **LATER}.items() if key in found
    ]


def _eval_set_names(run: RunRecords) -> list[str]:
    records = [*run.steps, *run.evaluations]
    return list(dict.fromkeys(name for metric in ("loss", "reward") for name in eval_set_names(records, metric)))


def _metric_chart(key: str, title: str, runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    curves = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        alone = len(runs) == 1
        held_out, sets = run.metric_points(f"eval_{key}", held_out=True), _eval_set_names(run)
        named = "all held out" if sets else "held out"
        curves.append(Curve("training" if alone else name, run.metric_points(key), index if not alone else 0))
        curves.append(
            Curve(named if alone else f"{name}, {named}", held_out, 1 if alone else index, marked=len(held_out) < 60)
        )
        for style, called in enumerate(sets, start=2):
            points = run.metric_points(f"eval_{called}_{key}", held_out=True)
            label = called if alone else f"{name}, {called}"
            curves.append(Curve(label, points, style if alone else index, marked=len(points) < 60))
    return line_chart(title, curves)


def _memory_and_speed_charts(runs: Sequence[RunRecords], names: Sequence[str]) -> list[str]:
    charts = []
    for run, name in zip(runs, names, strict=True):
        terms = {
            key: float(size)
            for key, size in _as_mapping(run.plan.get("terms")).items()
            if isinstance(size, int | float)
        }
        peaks = [value for _, value in run.metric_points("peak_mem_gib")]
        device = _nested_value(run.plan, "limits", "device_bytes")
        chart = memory_chart(
            terms,
            max(peaks) * GIB if peaks else None,
            device if isinstance(device, int) else None,
            is_whole_process=_nested_value(run.plan, "limits", "shared") is True,
        )
        charts.append(chart.replace("<figcaption>", f"<figcaption>{escape(name)}: ", 1) if len(runs) > 1 else chart)
    steps: list[Curve] = []
    rates: list[Curve] = []
    memory: list[Curve] = []
    use: list[Curve] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = "step" if len(runs) == 1 else name
        steps.append(Curve(label, run.step_times(), index))
        rates.append(Curve(label, run.metric_points("tokens_per_s"), index))
        memory.append(Curve("peak of a step" if len(runs) == 1 else name, run.metric_points("peak_mem_gib"), index))
        use.append(Curve(label, run.metric_points("mfu"), index))
        planned = run.plan.get("step_seconds")
        if len(runs) == 1 and isinstance(planned, int | float) and run.step_times():
            ends = [run.step_times()[0][0], run.step_times()[-1][0]]
            steps.append(Curve("predicted for the longest rows", [(step, float(planned)) for step in ends], 1))
    return [
        *charts,
        line_chart("Time of a step", steps, unit="seconds", from_zero=True),
        line_chart("Speed", rates, unit="tokens per second", from_zero=True),
        line_chart("Peak memory", memory, unit="GiB", from_zero=True),
        line_chart("Model FLOPs utilisation", use, from_zero=True),
    ]


# --- tables -----------------------------------------------------------------------------------------------------------


def _lengths_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    keys = ("min", "p50", "p90", "p95", "p99", "max")
    rows = []
    for run, name in zip(runs, names, strict=True):
        lengths = _as_mapping(run.data.get("length_percentiles"))
        if lengths:
            cells = "".join(f"<td class=n>{_show_count(lengths.get(key))}</td>" for key in keys)
            rows.append(f"<tr><td>{escape(name)}</td><td class=n>{_show_count(run.data.get('rows'))}</td>{cells}</tr>")
    if rows:
        head = "".join(f"<th class=n>{escape(key)}</th>" for key in ("rows", *keys))
        table = f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
        yield f"<h2>Row lengths in the data, in tokens</h2><div class=box>{table}</div>"


def _show_count(value: Any) -> str:
    """Return an integer with thousands separators; for any other value, a question mark."""
    return f"{value:,}" if isinstance(value, int) else "?"


def _samples_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    for run, name in zip(runs, names, strict=True):
        if not run.samples:
            continue
        yield f"<h2>Samples{'' if len(runs) == 1 else f', {escape(name)}'}</h2>"
        for number_of, sample in enumerate(reversed(run.samples[-MAX_SAMPLES:])):
            step, prompt, text = (str(sample.get(key, "")) for key in ("step", "prompt", "completion"))
            if "right" in sample:
                verdict = "right" if sample["right"] else f"wrong, expected {sample.get('expected', '')}"
                step += f", held-out row of {sample.get('prompt_tokens', '?')} tokens: {verdict}"
            yield (
                f"<details{' open' if number_of < 2 else ''}><summary>step {escape(step)}</summary><div class=sample>"
                f"<pre class=dim>{escape(prompt)}</pre><pre class=answer>{escape(text) or '(nothing)'}</pre>"
                "</div></details>"
            )


def _events_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    rows = []
    for run, name in zip(runs, names, strict=True):
        shown = list(run.events)
        left_out = len(shown) - MAX_EVENTS
        if left_out > 0:
            shown = [*shown[: MAX_EVENTS // 2], *shown[-MAX_EVENTS // 2 :]]
        for event in shown:
            kind = str(event.get("event", ""))
            details = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("event", "time"))
            of = f"<td>{escape(name)}</td>" if len(runs) > 1 else ""
            style = "" if kind in NOT_HIGHLIGHTED else " class=bad"
            rows.append(
                f"<tr>{of}<td class=dim>{escape(_show_time(event.get('time')))}</td>"
                f"<td{style}>{escape(kind)}</td><td>{escape(details)}</td></tr>"
            )
        if left_out > 0:
            rows.append(f"<tr><td colspan=4 class=dim>{left_out:,} more in events.jsonl</td></tr>")
    if rows:
        yield f"<h2>Events <small>UTC</small></h2><div class=box><table>{''.join(rows)}</table></div>"


def _show_time(value: Any) -> str:
    return str(value or "").removesuffix("+00:00").replace("T", " ")


def _recipes_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    if len(runs) > 1:
        flat = [dict(_flatten(run.recipe)) for run in runs]
        keys = dict.fromkeys(key for each in flat for key in each)
        rows = [
            _html_row([key, *(each.get(key, "") for each in flat)])
            for key in keys
            if len({each.get(key) for each in flat}) > 1
        ]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        table = (
            f"<table><tr><th>key</th>{head}</tr>{''.join(rows)}</table>" if rows else "<p>The recipes are equal.</p>"
        )
        yield f"<h2>Differences between the recipes</h2><div class=box>{table}</div>"
    recipes = [(run, name) for run, name in zip(runs, names, strict=True) if run.recipe]
    if recipes:
        yield "<h2>Recipe</h2>"
    for run, name in recipes:
        text = yaml.safe_dump(dict(run.recipe), sort_keys=False, allow_unicode=True, width=100)
        yield f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{prefix}.{index}")
    else:
        yield prefix, "" if value is None else str(value)


def _versions_html(runs: Sequence[RunRecords], names: Sequence[str]) -> Iterator[str]:
    rows = [
        _html_row([name, ", ".join(f"{key} {value}" for key, value in run.versions.items())])
        for run, name in zip(runs, names, strict=True)
        if run.versions
    ]
    if rows:
        yield f"<h2>Versions</h2><div class=box><table>{''.join(rows)}</table></div>"


def _html_row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _nested_value(value: Any, *keys: str) -> Any:
    for key in keys:
        value = _as_mapping(value).get(key)
    return value
