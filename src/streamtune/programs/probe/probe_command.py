"""``streamtune probe-max-len``: the longest sequence this recipe can train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.text import parse_size, show_size
from streamtune.cli.console import err, make_table, out, print_json, print_note, print_rows
from streamtune.cli.options import JsonOption, NodesOption, RanksOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.cli.plan_screen import show_seconds, traffic_table

if TYPE_CHECKING:
    from streamtune.programs.probe.probe import Limit, ProbeReport, Trial

NAMES = {
    "plain": "plain autograd",
    "checkpoint": "checkpointing",
    "liger-loss": "Liger checkpointing",
    "liger-loss-offload": "Liger, host inputs",
    "stream": "StreamTune",
}


def probe_max_len(
    recipe: RecipeArgument,
    method: Annotated[
        str, typer.Option(metavar="measure|simulate", help="Train on the device, or simulate one that is not there.")
    ] = "measure",
    device_memory: Annotated[str | None, option("80GiB", "Budget on the device; else what it has.")] = None,
    host_memory: Annotated[str | None, option("128GiB", "For what the schedule keeps on the host.")] = None,
    disk_memory: Annotated[str | None, option("2TiB", "For what the schedule keeps on disk.")] = None,
    device: Annotated[str | None, option("NAME", "A device by name, with `simulate`.")] = None,
    baseline: Annotated[bool, option(None, "Also without streaming: checkpointing, plain.", "--baseline")] = False,
    batch_size: Annotated[bool, option(None, "Look for the largest batch, at one length.", "--batch-size")] = False,
    length: Annotated[int | None, option("N", "That length; else the recipe's max_length.")] = None,
    least: Annotated[int | None, option("N", "Try nothing smaller.", "--from")] = None,
    most: Annotated[int | None, option("N", "Try nothing larger.", "--to")] = None,
    trial_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="A trial that takes longer fails.")] = 1800,
    margin: Annotated[float | None, option("PART", "Part of a budget left free; else engine.margin.")] = None,
    output_dir: Annotated[Path | None, option("DIR", "Where probe.json and probe.png go.")] = None,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the longest sequence that the recipe can train, by whole training steps or by simulation.

    The search doubles the length until a step fails, then closes in until what fits and what fails are at most 1% or
    256 tokens apart, whichever is more. Each measured trial has a process of its own: one that crashes, or that the
    system kills, is a trial that failed.
    """
    sizes = [
        None if text is None else parse_size(text, where=option)
        for option, text in (
            ("--device-memory", device_memory),
            ("--host-memory", host_memory),
            ("--disk-memory", disk_memory),
        )
    ]
    loaded = read_recipe(recipe, set_)
    folder = output_dir or Path(loaded.recipe.output_dir)
    with err.status("loading libraries") as status:
        from streamtune.programs.probe.probe import draw_probe
        from streamtune.programs.probe.probe_recipe import ProbeOptions, probe_recipe
        from streamtune.train.staging import check_outputs, write_output

        check_outputs(folder, ["probe.json", "probe.png"])
        options = ProbeOptions(
            method=method,
            device_bytes=sizes[0],
            host_bytes=sizes[1],
            disk_bytes=sizes[2],
            device=device,
            baseline=baseline,
            batch_size=batch_size,
            length=length,
            least=least,
            most=most,
            trial_seconds=trial_timeout,
            margin=margin,
            ranks=ranks,
            nodes=nodes,
        )
        report, interrupted = probe_recipe(
            loaded, options, notify=status.update if err.is_terminal else _say_nothing, tried=_print_trial
        )
    document = report.to_json()
    write_output(folder / "probe.json", f"{json.dumps(document, indent=2)}\n".encode())
    write_output(folder / "probe.png", draw_probe(report, title=_title(report)))
    if as_json:
        print_json(document)
    else:
        _print_report(report, folder)
    if interrupted:
        print_note("stopped before the search was over: what is above is what was known by then")
        raise typer.Exit(130)


def _title(report: ProbeReport) -> str:
    task = report.task
    budget = f" in {show_size(report.device_bytes)}" if report.device_bytes else ""
    what = "Longest sequence" if task.scaled == "length" else f"Largest batch of {task.fixed:,} tokens"
    return f"{what}{budget}, {task.objective}, {task.method}d"


def _say_nothing(message: str) -> None:
    """Ignore a message about progress within a trial: a log lists only the trials themselves."""


def _print_trial(trial: Trial) -> None:
    shape, outcome = trial.shape, trial.outcome
    peak = outcome.peak_bytes
    if not err.is_terminal:
        pairs: dict[str, object] = {
            "mode": shape.mode,
            "length": shape.length,
            "batch_size": shape.batch_size,
            "fits": outcome.fits,
        }
        more = {"peak_bytes": peak, "step_s": outcome.step_seconds and round(outcome.step_seconds, 3)}
        pairs |= {key: value for key, value in more.items() if value is not None}
        line = " ".join(f"{key}={str(value).lower()}" for key, value in pairs.items())
        err.print(Text(line + ("" if outcome.fits else f' reason="{outcome.reason}"')), soft_wrap=True)
        return
    rows = f"{shape.batch_size:,} x " if shape.batch_size > 1 else ""
    mark = ("fits", "green") if outcome.fits else ("no  ", "red")
    why = show_size(peak) if outcome.fits and peak else outcome.reason
    amount = f"{rows}{shape.length:,} tokens"
    err.print(Text.assemble(f"{shape.mode:<10} {amount:>18}  ", mark, f"  {why}"), overflow="ellipsis", no_wrap=True)


def _print_report(report: ProbeReport, folder: Path) -> None:
    out.print(_title(report), style="bold")
    out.print(_table(report))
    rows = [("schedule", _describe_schedule(report))]
    if report.positions is not None:
        rows.append(("positions", report.positions))
    if report.task.objective != "sft":
        rows.insert(0, ("length", _describe_length(report)))
    for mode, limit in report.limits.items():
        if limit.trial is not None and limit.trial.outcome.terms and mode == "stream":
            terms = limit.trial.outcome.terms.items()
            rows.append(("memory", ", ".join(f"{name} {show_size(size)}" for name, size in terms if size)))
    for limit in report.limits.values():
        rows.append(("stopped" if limit.mode == "stream" else "", _stopped_by(limit)))
    if report.env:
        rows.append(("on", _describe_device(report)))
    if "cluster" in report.env:
        rows.append(("ranks", report.env["cluster"]["describe"]))
        streamed = report.limits["stream"].trial
        if streamed is not None and streamed.outcome.host_terms:
            terms = streamed.outcome.host_terms.items()
            rows.append(("host", ", ".join(f"{name} {show_size(size)}" for name, size in terms) + " of each node"))
    rows.append(("written", f"{folder / 'probe.json'}, {folder / 'probe.png'}"))
    print_rows(rows)
    shared = report.to_json()
    if shared.get("traffic"):
        out.print("what one device sends in a step of the longest", style="bold")
        out.print(traffic_table(shared["traffic"]))


def _describe_length(report: ProbeReport) -> str:
    task = report.task
    text = "tokens of a prompt with its longest completion"
    if task.scaled == "length":
        text += f"; {task.fixed:,} {task.unit}{'s' if task.fixed > 1 else ''} in a batch"
    if task.objective == "grpo":
        measured = "the end of its rollout is part of a trial" if task.method == "measure" else "without its rollout"
        text += f"; {measured}"
    return text


def _describe_schedule(report: ProbeReport) -> str:
    if report.schedule is None:
        return "the planner's"
    picked = ", picked by the planner" if report.task.schedule is None else ""
    return report.schedule.describe(report.env.get("layers")) + picked


def _describe_device(report: ProbeReport) -> str:
    env = report.env
    if report.task.method == "simulate":
        left = f", {report.task.margin:.0%} left free" if report.task.margin else ""
        host = f"; host {show_size(report.task.host_bytes)}" if report.task.host_bytes else ""
        return f"{env['device']}, {show_size(env['device_bytes'])}{host}{left}"
    return f"{env['device']}, {env['threads']} threads, torch {env['torch']}"


def _table(report: ProbeReport) -> Table:
    scaled = "tokens" if report.task.scaled == "length" else f"{report.task.unit}s"
    streamed = report.limits["stream"].fits if "stream" in report.limits else 0
    found = f"longest, {scaled}" if scaled == "tokens" else f"largest, {scaled}"
    table = make_table(Column(no_wrap=True), found, "ours is", "peak", "host", "a step", "trials")
    for mode in report.task.modes:
        limit = report.limits.get(mode)
        if limit is None:
            continue
        outcome = limit.trial.outcome if limit.trial else None
        table.add_row(
            NAMES[mode],
            _count(limit),
            _times(streamed / limit.fits) if limit.fits and mode != "stream" else "",
            show_size(outcome.peak_bytes) if outcome and outcome.peak_bytes else "",
            show_size(outcome.host_bytes) if outcome and outcome.host_bytes else "",
            show_seconds(outcome.step_seconds) if outcome and outcome.step_seconds else "",
            str(sum(trial.shape.mode == mode for trial in report.trials)),
            style="bold" if mode == "stream" else None,
        )
    return table


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _count(limit: Limit) -> Text:
    if not limit.fits:
        return Text("none" if limit.complete else "?")
    return Text(f"{limit.fits:,}" if limit.complete else f">= {limit.fits:,}")


def _stopped_by(limit: Limit) -> str:
    if limit.failed is None:
        return f"{NAMES[limit.mode]}: the end of the range"
    return f"{NAMES[limit.mode]} at {limit.fails:,}, {limit.failed.outcome.reason}"
