"""Command ``streamtune probe-max-len``: find the longest sequence that a recipe can train."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.text import parse_size, show_size
from streamtune.cli.console import err, make_table, out, print_json, print_labelled, print_note, print_rows
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
        str,
        typer.Option(
            metavar="measure|simulate",
            help="Way to test a length: measure runs training steps on this device; simulate predicts their "
            "memory, without a device or weights.",
        ),
    ] = "measure",
    device_memory: Annotated[
        str | None,
        option(
            "80GiB",
            "Device memory that a step may use, such as 80GiB. [default: engine.device_memory; if that is "
            "auto, all memory of --device, or the free memory of this machine's device]",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        option(
            "128GiB",
            "Host memory that offloaded tensors may use, such as 128GiB. [default: engine.host_memory; if that is"
            " auto, the free memory]",
        ),
    ] = None,
    disk_memory: Annotated[
        str | None,
        option(
            "2TiB",
            "Disk space that offloaded tensors may use, such as 2TiB. [default: engine.disk_memory; if that is "
            "auto, the free space]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        option(
            "NAME",
            "With --method simulate: name of the device to simulate, such as h100-80gb. [default: this machine's "
            "device; without a GPU, the known device whose memory is nearest to --device-memory]",
        ),
    ] = None,
    baseline: Annotated[
        bool,
        option(
            None,
            "For comparison, also find the longest sequence without streaming: with gradient checkpointing, with "
            "plain autograd and, for simulated sft, with Liger's fused loss.",
            "--baseline",
        ),
    ] = False,
    batch_size: Annotated[
        bool,
        option(
            None,
            "Find the largest number of rows of one length (--length) in a batch, instead of the longest row.",
            "--batch-size",
        ),
    ] = False,
    length: Annotated[
        int | None, option("N", "With --batch-size: length of the rows, in tokens. [default: the recipe's max_length]")
    ] = None,
    least: Annotated[
        int | None,
        option("N", "Smallest length to try, in tokens; with --batch-size, the smallest number of rows.", "--from"),
    ] = None,
    most: Annotated[
        int | None,
        option("N", "Largest length to try, in tokens; with --batch-size, the largest number of rows.", "--to"),
    ] = None,
    trial_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Number of seconds after which a measured trial is stopped and counts as failed."
        ),
    ] = 1800,
    margin: Annotated[
        float | None,
        option(
            "FRACTION",
            "Fraction of device, host and disk memory to leave free, from 0 to below 1. [default: engine.margin]",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, option("DIR", "Folder for probe.json and probe.png. [default: the recipe's output_dir]")
    ] = None,
    ranks: RanksOption = None,
    nodes: NodesOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the longest sequence that the recipe can train, by running or simulating training steps.

    The search doubles the length until a step fails, then bisects. It ends when the longest length that fits and the
    shortest that fails differ by at most 1% or 256 tokens, whichever is more. Each measured trial runs in its own
    process. If that process crashes or is killed, the trial counts as failed.
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
    for note in loaded.notes:
        print_note(note)
    folder = output_dir or Path(loaded.recipe.output_dir)
    with err.status("loading libraries") as status:
        from streamtune.programs.probe.probe import draw_probe
        from streamtune.programs.probe.probe_recipe import ProbeOptions, probe_recipe
        from streamtune.train.staging import check_output_files, write_output

        check_output_files(folder, ["probe.json", "probe.png"])
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
            loaded, options, notify=status.update if err.is_terminal else _ignore_progress, on_trial=_print_trial
        )
    document = report.to_json()
    write_output(folder / "probe.json", f"{json.dumps(document, indent=2)}\n".encode())
    write_output(folder / "probe.png", draw_probe(report, title=_plot_title(report)))
    if as_json:
        print_json(document)
    else:
        _print_report(report, folder)
        simulated = {
            "device": device,
            "device-memory": device_memory,
            "host-memory": host_memory,
            "disk-memory": disk_memory,
            "ranks": ranks,
            "nodes": nodes,
        }
        settings = [*(set_ or []), *([] if margin is None else [f"engine.margin={margin:g}"])]
        if report.complete and (command := _next_command(report, recipe, settings, simulated)):
            print_labelled(Text("Next: ", style="bold"), Text(command))
    if interrupted:
        print_note("stopped before the end of the search: the result covers the finished trials only")
        raise typer.Exit(130)


def _plot_title(report: ProbeReport) -> str:
    task = report.task
    budget = f" in {show_size(report.device_bytes)}" if report.device_bytes else ""
    what = "Longest sequence" if task.scaled == "length" else f"Largest batch of {task.fixed:,} tokens"
    return f"{what}{budget}, {task.objective}, {task.method}d"


def _describe_answer(report: ProbeReport) -> str:
    task, limit = report.task, report.limits.get("stream")
    count = str(_show_limit(limit)) if limit is not None else "?"
    budget = f" in {show_size(report.device_bytes)} of device memory" if report.device_bytes else ""
    found = (
        f"Longest sequence: {count} tokens"
        if task.scaled == "length"
        else f"Largest batch: {count} {task.unit}s of {task.fixed:,} tokens"
    )
    return f"{found}{budget} ({task.objective}, {task.method}d)"


def _next_command(
    report: ProbeReport, recipe: Path, settings: list[str], simulated: dict[str, str | int | None]
) -> str:
    """Return the command to run next: training if trials were measured, else ``plan``; empty if nothing fits.

    Args:
        settings: Values of ``--set``, with the margin of the search.
        simulated: {name: value} of the options that describe the simulated machine.
    """
    task, limit = report.task, report.limits.get("stream")
    if limit is None or not limit.fits:
        return ""
    if task.scaled == "length":
        found = [f"max_length={limit.fits}"]
    else:
        found = [f"max_length={task.fixed}", f"per_device_train_batch_size={limit.fits}"]
    words = ["streamtune", "plan" if task.method == "simulate" else task.objective, str(recipe)]
    words += [part for setting in [*settings, *found] for part in ("--set", setting)]
    if task.method == "simulate":
        words += [part for name, value in simulated.items() if value for part in (f"--{name}", str(value))]
    return shlex.join(words)


def _ignore_progress(message: str) -> None:
    """Ignore a message about progress; without a terminal, only finished trials are printed."""


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
    out.print(Text(_describe_answer(report), style="bold"), soft_wrap=not out.is_terminal)
    out.print()
    out.print(_modes_table(report))
    out.print()
    step = "predicted" if report.task.method == "simulate" else "measured"
    rows = [("figures", f"peaks are {report.task.method}d, step times {step}")]
    if report.not_measured:
        keys = " and ".join(report.not_measured)
        rows.append(("", f"on one device, without {keys}: --method simulate, with --ranks, counts several"))
    rows.append(("schedule", _describe_schedule(report)))
    if report.positions is not None:
        rows.append(("positions", report.positions))
    if report.task.objective != "sft":
        rows.insert(0, ("length", _describe_length(report)))
    for mode, limit in report.limits.items():
        if limit.trial is not None and limit.trial.outcome.terms and mode == "stream":
            terms = limit.trial.outcome.terms.items()
            rows.append(("device peak", ", ".join(f"{name} {show_size(size)}" for name, size in terms if size)))
    for limit in report.limits.values():
        rows.append(("limited by" if limit.mode == "stream" else "", _describe_limit_cause(limit)))
    if report.env:
        rows.append(("device", _describe_device(report)))
    if "cluster" in report.env:
        rows.append(("ranks", report.env["cluster"]["describe"]))
        streamed = report.limits["stream"].trial
        if streamed is not None and streamed.outcome.host_terms:
            terms = streamed.outcome.host_terms.items()
            rows.append(("host", ", ".join(f"{name} {show_size(size)}" for name, size in terms) + " on each node"))
    rows.append(("written", f"{folder / 'probe.json'}, {folder / 'probe.png'}"))
    print_rows(rows)
    shared = report.to_json()
    if shared.get("traffic"):
        out.print()
        out.print("Data that one device sends in a step of the longest sequence (predicted)", style="bold")
        out.print(traffic_table(shared["traffic"]))


def _describe_length(report: ProbeReport) -> str:
    task = report.task
    text = "tokens of a prompt plus its longest completion"
    if task.scaled == "length":
        text += f"; {task.fixed:,} {task.unit}{'s' if task.fixed > 1 else ''} in a batch"
    if task.objective == "grpo":
        rollout = (
            "a trial also generates the end of each completion"
            if task.method == "measure"
            else "the rollout is not simulated"
        )
        text += f"; {rollout}"
    return text


def _describe_schedule(report: ProbeReport) -> str:
    if report.schedule is None:
        return "chosen by the planner"
    chosen = "; chosen by the planner" if report.task.schedule is None else ""
    return report.schedule.describe(report.env.get("layers")) + chosen


def _describe_device(report: ProbeReport) -> str:
    env = report.env
    if report.task.method == "simulate":
        left = f", {report.task.margin:.0%} left free" if report.task.margin else ""
        host = f"; host {show_size(report.task.host_bytes)}" if report.task.host_bytes else ""
        return f"{env['device']}, {show_size(env['device_bytes'])}{host}{left}"
    return f"{env['device']}, {env['threads']} threads, torch {env['torch']}"


def _modes_table(report: ProbeReport) -> Table:
    scaled = "tokens" if report.task.scaled == "length" else f"{report.task.unit}s"
    streamed = report.limits["stream"].fits if "stream" in report.limits else 0
    found = f"longest,\n{scaled}" if scaled == "tokens" else f"largest,\n{scaled}"
    compares = len(report.task.modes) > 1
    ratio = ["StreamTune\nfits"] if compares else []
    table = make_table(Column(no_wrap=True), found, *ratio, "device\npeak", "host\npeak", "step\ntime", "\ntrials")
    for mode in report.task.modes:
        limit = report.limits.get(mode)
        if limit is None:
            continue
        outcome = limit.trial.outcome if limit.trial else None
        table.add_row(
            NAMES[mode],
            _show_limit(limit),
            *([_show_ratio(streamed / limit.fits) if limit.fits and mode != "stream" else ""] if compares else []),
            show_size(outcome.peak_bytes) if outcome and outcome.peak_bytes else "",
            show_size(outcome.host_bytes) if outcome and outcome.host_bytes else "",
            show_seconds(outcome.step_seconds) if outcome and outcome.step_seconds else "",
            str(sum(trial.shape.mode == mode for trial in report.trials)),
            style="bold" if mode == "stream" else None,
        )
    return table


def _show_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.0f}x"


def _show_limit(limit: Limit) -> Text:
    if not limit.fits:
        return Text("none" if limit.complete else "?")
    return Text(f"{limit.fits:,}" if limit.complete else f">= {limit.fits:,}")


def _describe_limit_cause(limit: Limit) -> str:
    if limit.failed is None:
        return f"{NAMES[limit.mode]}: no trial failed up to the end of the search"
    return f"{NAMES[limit.mode]} fails at {limit.fails:,}: {limit.failed.outcome.reason}"
