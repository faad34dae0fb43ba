"""Output of a run: the live line at any width, plain lines without a terminal, and the plot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamtune.train import Progress, draw_loss, format_duration, format_rate, read_records
from streamtune.train.progress import Listener, Listeners, moving_average
from streamtune.train.records import append_record, delete_records_after_step

RECORD: dict[str, Any] = {
    "step": 120,
    "loss": 3.21456,
    "lr": 9.8e-4,
    "grad_norm": 0.912,
    "tokens": 900,
    "tokens_per_s": 12_345.0,
    "peak_mem_gib": 1.25,
    "epoch": 0.3,
}


def line_at(width: int, activity: str = "") -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    progress = Progress(console, total_steps=400)
    progress.report_step(RECORD)
    progress.show_activity(activity)
    return progress._live_line().plain


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140, 200])
def test_the_live_line_fits_and_keeps_what_matters(width: int) -> None:
    line = line_at(width, "batch 3/16")
    assert len(line) <= width
    assert "step 120/400" in line
    if width >= 40:
        assert "loss 3.215" in line
    if width >= 80:
        assert all(field in line for field in ("12.3k tok/s", "GiB", "ETA", "batch 3/16"))
    if width >= 140:
        assert all(field in line for field in ("lr 0.00098", "grad 0.91", "━"))


def test_without_a_terminal_lines_are_key_value_pairs() -> None:
    output = io.StringIO()
    with Progress(Console(file=output, width=30), total_steps=4, logging_steps=2) as progress:
        for step in range(1, 5):
            progress.report_step({**RECORD, "step": step})
        progress.report_evaluation(4, {"eval_loss": 3.5})
        progress.report_checkpoint(4, "runs/x/checkpoints/step-000004")
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["step=2/4", "step=4/4", "step=4/4", "step=4/4"]
    assert all("=" in word for line in lines for word in line.split())
    assert "loss=3.2146" in lines[0]
    assert "eval_loss=3.5000" in lines[2]
    assert "saved=runs/x/checkpoints/step-000004" in lines[3]
    assert "\x1b" not in output.getvalue()


def test_what_an_objective_measures_is_shown_and_goes_before_the_loss_does() -> None:
    metrics = {"rewards/accuracies": 0.75, "rewards/margins": 1.5, "rewards/chosen": 2.0}
    output = io.StringIO()
    with Progress(Console(file=output, width=30), total_steps=4) as progress:
        progress.report_step({**RECORD, "step": 1, **metrics})
        progress.report_evaluation(1, {"eval_loss": 3.5, "eval_rewards/accuracies": 0.5, "eval_rewards/chosen": 1.0})
    lines = output.getvalue().splitlines()
    assert " accuracy=0.7500 margin=1.5000 lr=" in lines[0]
    assert lines[1] == "step=1/4 eval_loss=3.5000 eval_accuracy=0.5000"
    for width in (40, 140):
        progress = Progress(Console(file=io.StringIO(), width=width, force_terminal=True), total_steps=400)
        progress.report_step({**RECORD, **metrics})
        line = progress._live_line().plain
        assert len(line) <= width
        assert "loss 3.215" in line
        assert ("accuracy 0.75" in line) == (width == 140)


def test_a_picture_has_a_panel_for_each_kind_of_metric(tmp_path: Path) -> None:
    """The number of panels follows from the height: 5 inches for the loss and 2.6 for each other panel."""
    heights = []
    for metrics in ((), ("rewards/accuracies",), ("rewards/accuracies", "rewards/chosen", "rewards/rejected")):
        records = [{"step": step, "loss": 1.0, **dict.fromkeys(metrics, 0.5)} for step in (1, 2)]
        records.append({"step": 2, "eval_loss": 1.0, **{f"eval_{name}": 0.5 for name in metrics}})
        draw_loss(records, tmp_path / "loss.png", title="run")
        heights.append(int.from_bytes((tmp_path / "loss.png").read_bytes()[20:24], "big"))
    assert heights == [750, 1140, 1530]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-:--"), (0, "0:00"), (61.6, "1:02"), (3661, "1:01:01"), (200_000, "2d 07:33")]
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_rates() -> None:
    assert [format_rate(rate) for rate in (3.2, 999, 12_345)] == ["3", "999", "12.3k"]


def test_smoothing_is_unbiased_at_the_start() -> None:
    assert moving_average([5.0] * 4, window=10) == pytest.approx([5.0] * 4)
    assert moving_average([1.0, 2.0, 3.0], window=1) == [1.0, 2.0, 3.0]
    assert moving_average([], window=3) == []


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_loss([], path, title="empty")
    assert not path.exists()
    records = [{"step": step, "loss": 5 / step} for step in range(1, 30)] + [{"step": 29, "eval_loss": 0.5}]
    draw_loss(records, path, title="run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]


def test_records_are_cut_after_a_step_and_torn_lines_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    delete_records_after_step(path, 3)
    assert read_records(path) == []
    for record in ({"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}):
        append_record(path, record)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    delete_records_after_step(path, 2)
    append_record(path, {"step": 3, "loss": 2.0})
    assert [record["step"] for record in read_records(path)] == [1, 2, 2, 3]
    assert read_records(path)[0]["loss"] == 0.1 + 0.2
    delete_records_after_step(path, 2, keep_evaluation=False)
    assert read_records(path)[1:] == [{"step": 2, "loss": 1.0}]


def test_the_use_of_the_device_is_shown_where_its_rate_is_known() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=True)
    progress = Progress(console, total_steps=400)
    progress._record = {**RECORD, "flops": 10**15, "mfu": 0.4142}
    assert "MFU 41%" in progress._live_line().plain
    assert "MFU" not in line_at(140)


class Changing(Listener):
    def __init__(self, raises: bool = False) -> None:
        self.raises, self.steps, self.ended = raises, list[Any](), False

    def step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["loss"])
        record["loss"] = None
        if self.raises:
            raise ValueError("enough")

    def finished(self, outcome: dict[str, Any]) -> None:
        self.ended = True


def test_each_listener_has_a_copy_and_the_first_error_is_kept() -> None:
    record, failing, other = {"step": 1, "loss": 2.0}, Changing(raises=True), Changing()
    listeners = Listeners([failing, other])
    listeners.raise_first_error()
    listeners.step(record)
    listeners.step(record)
    listeners.finished({"status": "failed", "step": 1})
    assert record == {"step": 1, "loss": 2.0}
    assert (failing.steps, other.steps) == ([2.0], [2.0, 2.0])
    assert (failing.ended, other.ended) == (False, True)
    with pytest.raises(ValueError, match="enough"):
        listeners.raise_first_error()
