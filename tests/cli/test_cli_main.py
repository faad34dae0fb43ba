"""The command line as a whole: help, exit codes, printed errors."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import streamtune.cli
from streamtune.cli import main
from streamtune.cli.console import error_panel
from streamtune.errors import DataError, OutOfMemoryError, RecipeError, StreamTuneError


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command in a separate process."""
    command = [sys.executable, "-m", "streamtune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def shown(error: StreamTuneError, width: int = 80) -> list[str]:
    """Return the panel of an error on a terminal of this width."""
    file = io.StringIO()
    Console(file=file, width=width).print(error_panel(error))
    return file.getvalue().splitlines()


def test_help_lists_the_commands():
    done = run("--help")
    assert done.returncode == 0
    for command in ("sft", "bench", "verify", "validate", "recipes", "schema", "env"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", [[], ["sft"], ["verify"], ["recipes"], ["recipes", "ls"]], ids=" ".join)
def test_help_shows_no_type_of_a_flag(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "bool" not in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert not caught.value.code
    assert capsys.readouterr().out == f"streamtune {streamtune.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["validat", "x"], "did you mean 'validate'?"),
        (["validate"], "Missing argument"),
        (["validate", "x.yaml", "--st", "seed=1"], "unknown option '--st'"),
        (["validate", "x.yaml", "--set"], "requires an argument"),
        (["plan", "x.yaml", "--length", "ten"], "--length must be a whole number, found 'ten'"),
    ],
)
def test_wrong_usage_exits_2(arguments, said, capfd):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["sfy", "x.yaml"], "did you mean 'sft'?"),
        (["recipes", "lst"], "did you mean 'ls'?"),
        (["quickstart_dpo"], "name a command before the recipe, such as `streamtune dpo quickstart_dpo`"),
        (["plan", "quickstart", "--dvice", "h100"], "did you mean '--device'?"),
        (["sft", "quickstart", "--lr", "3"], "write --set learning_rate=3"),
        (["sft", "quickstart", "--epochs"], "write --set num_train_epochs=..."),
        (["sft", "quickstart", "--max-lenght=64"], "did you mean --set max_length=64?"),
        (["env", "--qqq"], "the command has --json, --help"),
    ],
)
def test_an_unknown_command_or_option_names_the_nearest(arguments, fix, capfd):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"fix: {fix}"


def test_an_error_goes_to_stderr_with_its_exit_code():
    done = run("validate", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the file does not exist",
        "where: nowhere.yaml",
        "fix: `streamtune recipes ls` lists the shipped recipes",
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [["--debug", "validate", "nowhere.yaml"], ["validate", "nowhere.yaml", "--debug"]]
)
def test_a_traceback_only_with_debug(arguments):
    done = run(*arguments)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "RecipeError: the file does not exist" in done.stderr


def test_a_defect_is_told_as_one(capsys, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("streamtune.cli.app.app", broken)
    with pytest.raises(SystemExit) as caught:
        main(["env"])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "error: ZeroDivisionError: division by zero" in said
    assert "--debug" in said
    assert "Traceback" not in said


def test_ctrl_c_exits_130(monkeypatch):
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamtune.cli.env.environment_document", stopped)
    with pytest.raises(SystemExit) as caught:
        main(["env"])
    assert caught.value.code == 130


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m streamtune schema | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_a_panel_shows_the_line_of_the_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 1\nengine:\n    chunk_siz: 5   # [bold]\n")
    lines = shown(
        RecipeError("unknown key 'chunk_siz'", where=f"{path}:3", fix="did you mean 'chunk_size'?"), width=240
    )
    assert lines[0].startswith("╭─ Recipe error ─")
    assert "unknown key 'chunk_siz'" in lines[1]
    assert f"where  {path}:3" in lines[3]
    assert "chunk_siz: 5   # [bold]" in lines[4]
    assert "fix    did you mean 'chunk_size'?" in lines[5]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_a_panel_fits_the_terminal(width):
    what = "2 mistakes\n- line 4: " + "a long sentence about a key " * 6 + "\n- line 5: [red]x[/red]"
    lines = shown(DataError(what, where="data/" + "long/" * 40 + "x.jsonl:7", fix="mend " * 30), width)
    assert {len(line) for line in lines} == {width}
    assert any("[red]x[/red]" in line for line in lines)


def test_a_panel_is_named_after_its_error():
    assert shown(OutOfMemoryError("no memory"))[0].startswith("╭─ Out of memory error ─")
    assert shown(StreamTuneError("something"))[0].startswith("╭─ Error ─")
    assert len(shown(StreamTuneError("something"))) == 3


def test_names_of_strangers_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Text in brackets is printed literally, and control characters are escaped."""
    from streamtune.cli.console import out, print_rows

    for each in (False, True):
        monkeypatch.setattr(out, "_force_terminal", each)
        print_rows([("[bold]mine[/bold]", "[red]x"), ("a\x1b[2Jb", "y")])
        shown = capsys.readouterr().out
        assert "[bold]mine[/bold]" in shown
        assert "[red]x" in shown
        assert "\x1b[2J" not in shown
