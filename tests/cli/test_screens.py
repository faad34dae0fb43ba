"""Screens at 80 and 120 columns and in a file, byte for byte; at every width no word is broken.

``STREAMTUNE_GOLDEN=write`` writes ``screens/`` anew. The screens of ``plan`` are in ``tests/plan``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.golden_kit import WIDTHS, check_golden, of_pinned_torch, screen
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

from streamtune.cli import main
from streamtune.cli.console import print_note, print_title
from streamtune.cli.doctor import CheckResult, print_check_result, print_readiness
from streamtune.cli.training_screens import print_banner, print_dry_run_end, print_outcome
from streamtune.train import RunProgress

SCREENS = Path(__file__).parent / "screens"
RECORDS: list[dict[str, Any]] = [
    {"step": step, "loss": 5.8 / step, "tokens": 120, "peak_mem_gib": 0.512 + step / 1000} for step in range(1, 13)
]
SAMPLES = [
    {"step": 12, "prompt": "Add 3 and 4.", "completion": "return a + b " * 12},
    {
        "step": 12,
        "prompt": "user\nWhat is the pass key?\nassistant",
        "completion": "The pass key is ruby heron.",
        "expected": "The pass key is ruby heron.",
        "right": True,
        "prompt_tokens": 3400,
    },
    {
        "step": 12,
        "prompt": "user\nWhat is the pass key that the log names?\nassistant",
        "completion": "The pass key is amber heron, and amber heron, and amber heron, and amber heron.",
        "expected": "The pass key is amber otter.",
        "right": False,
        "prompt_tokens": 2950,
    },
]
FINDINGS = [
    CheckResult("versions", "ok", "transformers 5.24.0, torch 2.13.0+cpu (tested: transformers 5.17 to 5.24)"),
    CheckResult("device", "advice", "torch 2.13.0+cpu: no accelerator; models train slowly on the CPU"),
    CheckResult("exactness", "ok", "cpu: gradients with and without streaming differ by 6.9e-07 of their norm (fp32)"),
    CheckResult("disk", "problem", "/nowhere: No such file or directory", "give a writable folder with --dir"),
]


def check(name: str, show: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a screen with its golden files, and check that no line breaks inside a word."""
    capsys.readouterr()
    show()
    whole = capsys.readouterr().out
    check_golden(SCREENS / f"{name}-file.txt", whole)
    for width in (*WIDTHS, 160):
        found = screen(width, show, capsys)
        assert max(map(len, found.splitlines())) <= width
        assert set(found.split()) <= set(whole.split()), f"a word is broken at {width} columns"
        if width in WIDTHS:
            check_golden(
                SCREENS / f"{name}-{width}.txt", "\n".join(line.rstrip() for line in found.splitlines()) + "\n"
            )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a run that is built as a dry run, with a plan of fixed times."""
    from streamtune.recipe import load_recipe
    from streamtune.run.build import build_run

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("screens")
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_rows(folder, 20)
        engine = {**FIXED, "device_memory": "1GiB", "host_memory": "1GiB"}
        keys = {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "val_size": 4, "max_length": 256}
        write_recipe(folder, {**RECIPE, **keys, "device": "cpu", "engine": engine})
        found = build_run(load_recipe("tiny.yaml"), dry_run=True)
        assert found.streamed.memory is not None
        memory = replace(found.streamed.memory, step_seconds=45.0)
        yield replace(found, streamed=replace(found.streamed, memory=memory))


def test_a_dry_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def show() -> None:
        print_title("sft tiny.yaml", right="DRY RUN")
        print_banner(run)
        print_dry_run_end(run, ["sft", "tiny.yaml", "--dry-run", "--set", "num_train_epochs=2"])

    check("dry-run", show, capsys)


def outcome_of(run: Any, **changes: Any) -> Any:
    from streamtune.run.train import RunOutcome

    state = RunProgress(step=12, tokens=1440, first_loss=5.8, last_loss=0.483, eval_loss=0.612)
    found = RunOutcome(
        progress=state,
        finished=True,
        exit_code=0,
        checkpoint=None,
        moved_aside=None,
        samples=SAMPLES,
        records=RECORDS,
        tokens=1440,
        seconds=12.5,
    )
    return replace(found, **changes)


@of_pinned_torch  # its losses
def test_the_end_of_a_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    check("end", lambda: print_outcome(run, outcome_of(run)), capsys)


def test_a_run_that_was_stopped(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = outcome_of(run, finished=False, checkpoint=Path("runs/tiny/checkpoints/step-000012"), samples=[])
    check("stopped", lambda: print_outcome(run, stopped), capsys)


@pytest.mark.full
def test_the_list_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("recipes", []), ("recipes-24gb", ["--device", "24GB"])):

        def show(more: list[str] = more) -> None:
            with contextlib.suppress(SystemExit):
                main(["recipes", "ls", *more])

        check(name, show, capsys)


@pytest.mark.parametrize("name", ["ready", "problem"])
def test_doctor(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    findings = FINDINGS if name == "problem" else FINDINGS[:-1]

    def show() -> None:
        for finding in findings:
            print_check_result(finding)
        print_readiness(findings, accelerators=0)

    check(f"doctor-{name}", show, capsys)


def test_a_note_wraps_at_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from streamtune.cli.console import err

    for name, value in {"_force_terminal": True, "_color_system": None, "_width": 80}.items():
        monkeypatch.setattr(err, name, value)
    text = "prepared rows are kept for the next start: 9.86 MiB in /home/someone/.cache/streamtune/rows/of/recipes"
    print_note(text)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(" ".join(lines).split()) == f"note: {text}"
    assert all(line.startswith("      ") for line in lines[1:])
    assert len(lines) > 1
