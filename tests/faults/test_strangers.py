"""A folder of another person: nothing that lies in it is run or obeyed by a command that is started there."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import streamtune
from streamtune.base.child import Child
from streamtune.base.safe_path import safe_environment
from streamtune.distributed.remote_ranks import exported_variables
from streamtune.train.progress import draw_loss
from tests.faults.kit import write_sft

NAMES = (
    "types json torch yaml re os io enum abc typing random copy inspect traceback pickle struct socket select signal "
    "threading subprocess multiprocessing logging warnings tempfile shutil pathlib datetime collections functools "
    "contextlib dataclasses numpy transformers datasets pyarrow peft safetensors rich typer pydantic tokenizers "
    "huggingface_hub psutil triton deepspeed sitecustomize usercustomize"
)
HOSTILE = """
import posix  # built in: everything else may be hostile too
posix.write(posix.open({mark!r}, 1 | 64 | 1024, 0o600), {name!r}.encode() + b"\\n")
raise ImportError({name!r})
"""
BY_PYTHON = ("types", "warnings", "contextlib", "collections", "functools", "sitecustomize", "usercustomize")
"""Loaded by Python itself for ``python -m``, before any of our lines."""
BY_SCRIPT = ("re", "enum")
"""Loaded by the script that pip writes for a command, likewise."""

SCRIPT = shutil.which("streamtune", path=str(Path(sys.executable).parent)) or "streamtune"
GRPO = """
model: {init: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}}
tokenizer: {train: {vocab_size: 280}}
datasets: [{path: demo-arithmetic, name: copy, max_rows: 8}]
engine: {schedule: fixed, chunk_size: 32, head_chunk_size: 32}
max_prompt_length: 64
max_completion_length: 8
num_generations: 2
per_device_train_batch_size: 2
max_steps: 1
output_dir: runs/grpo
reward_funcs: ["rewards.py:score"]
"""
DPO = GRPO.partition("datasets:")[0] + "datasets: [{path: pairs.jsonl}]\nmax_steps: 1\noutput_dir: runs/dpo\n"
SMALL = ("--device-memory", "64MiB", "--to", "128")
COMMANDS = [
    ("data", "tiny.yaml"),
    ("sft", "tiny.yaml", "--nproc", "2"),
    ("sft", "tiny.yaml", "--output-dir", "runs/one", "--set", "max_steps=1"),
    ("probe-max-len", "tiny.yaml", *SMALL),
    ("bench", "tiny.yaml", "--lengths", "64", "--modes", "stream", "--repeats", "1"),
    ("plan", "tiny.yaml", "--json"),
    ("verify", "tiny.yaml", "--length", "48"),
    ("eval", "runs/tiny", "--max-rows", "2"),
    ("generate", "runs/tiny", "--prompt", "Add 1.", "--max-new-tokens", "2"),
    ("export", "runs/tiny", "out"),
    ("report", "runs/tiny"),
    ("teach", "tiny.yaml", "teacher.safetensors", "--set", "teacher=runs/tiny/final"),
    ("validate", "tiny.yaml"),
    ("recipes", "ls"),
    ("optim", "ls"),
    ("schema",),
    ("doctor",),
    ("env",),
    ("dpo", "pairs.yaml"),
    ("grpo", "rewarded.yaml", "--allow-code"),
]
FEW = ("sft", "bench", "generate", "export", "report", "doctor", "grpo")
"""Commands that differ most in what they import and start: `make test-all` tries them, and `make faults` all."""


def hostile(folder: Path) -> Path:
    """Fill a folder with a recipe and files that leave a mark when they run; return the path of the mark."""
    write_sft(folder, dataset_num_proc=2)
    mark = folder / "MARK"
    for name in NAMES.split():
        (folder / f"{name}.py").write_text(HOSTILE.format(mark=str(mark), name=name))
    line = f"import posix; posix.open({str(mark)!r}, 65, 0o600)\n"
    (folder / "evil.pth").write_text(line)
    return mark


def start(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    given.pop("PYTHONSAFEPATH", None)
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300)


def ran(mark: Path) -> str:
    return mark.read_text() if mark.exists() else ""


@pytest.mark.full
def test_processes_that_prepare_rows_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    mark = hostile(tmp_path)
    done = start(tmp_path, SCRIPT, "data", "tiny.yaml")
    assert (done.returncode, ran(mark)) == (0, ""), done.stderr


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([command for command in COMMANDS if command[0] in FEW], marks=pytest.mark.full, id="few"),
        pytest.param(COMMANDS, marks=pytest.mark.slow, id="all"),
    ],
)
def test_no_command_runs_what_lies_in_its_folder(commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    mark = hostile(tmp_path)
    (tmp_path / "pairs.yaml").write_text(DPO)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1", "chosen": "=2", "rejected": "=3"}\n' * 4)
    (tmp_path / "rewarded.yaml").write_text(GRPO)
    (tmp_path / "rewards.py").write_text("def score(completions, **columns):\n    return [*range(len(completions))]\n")
    wrong = {}
    for command in commands:
        done = start(tmp_path, SCRIPT, *command)
        if done.returncode != 0 or mark.exists():
            wrong[command] = (done.returncode, ran(mark), done.stderr[-800:])
            mark.unlink(missing_ok=True)
    assert wrong == {}


@pytest.mark.full
def test_python_m_takes_the_working_directory_off_its_path(tmp_path: Path) -> None:
    """``python -P -m`` runs none of them; without it Python itself imports a few before our first line."""
    mark = hostile(tmp_path)
    safe = start(tmp_path, sys.executable, "-P", "-m", "streamtune", "validate", "tiny.yaml")
    assert (safe.returncode, ran(mark)) == (0, ""), safe.stderr
    for name in BY_PYTHON:
        (tmp_path / f"{name}.py").unlink()
    done = start(tmp_path, sys.executable, "-m", "streamtune", "validate", "tiny.yaml")
    assert (done.returncode, ran(mark)) == (0, ""), done.stderr


def test_an_empty_entry_of_pythonpath_is_not_the_working_directory(tmp_path: Path) -> None:
    mark = hostile(tmp_path)
    for name in (*BY_PYTHON, *BY_SCRIPT):
        (tmp_path / f"{name}.py").unlink()
    for paths in (":", "", f"{tmp_path / 'none'}:"):
        done = start(tmp_path, SCRIPT, "validate", "tiny.yaml", PYTHONPATH=paths)
        assert (done.returncode, ran(mark)) == (0, ""), (paths, done.stderr)


def test_a_source_tree_is_kept_where_it_is_the_working_directory() -> None:
    program = (
        "import sys; from streamtune.base.safe_path import *; remove_working_directory_from_path(); print(sys.path)"
    )
    done = start(Path(streamtune.__file__).parents[1], sys.executable, "-S", "-c", program)
    assert done.stdout.startswith("[''"), (done.stdout, done.stderr)


def test_a_directory_that_the_user_names_is_kept(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('mine')\n")
    write_sft(tmp_path)
    done = start(tmp_path, SCRIPT, "validate", "tiny.yaml", PYTHONPATH=".")
    assert "mine" in done.stderr


def paths_there(connection: Connection) -> None:
    connection.send((sys.flags.safe_path, os.environ["PYTHONSAFEPATH"]))


@pytest.mark.full
def test_a_child_of_a_program_that_uses_the_library_has_a_safe_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    child = Child(paths_there)
    assert child.connection.recv() == (True, "1")
    child.close(seconds=10)
    assert "PYTHONSAFEPATH" not in os.environ


def test_lists_of_directories_have_no_empty_entries() -> None:
    given = {"PATH": "/bin::/usr/bin:", "PYTHONPATH": ":", "LD_LIBRARY_PATH": ":/opt/lib", "HOME": ":"}
    assert safe_environment(given) == {
        "PATH": "/bin:/usr/bin", "PYTHONPATH": "", "LD_LIBRARY_PATH": "/opt/lib", "HOME": ":", "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    there = exported_variables(given)
    assert (there["PYTHONSAFEPATH"], there["PYTHONPATH"], there["PATH"]) == ("1", "", "/bin:/usr/bin")


@pytest.mark.full
def test_every_python_that_is_started_is_told_to_leave_the_working_directory_out() -> None:
    """By ``-P`` or ``-I``; in the source such a command begins with ``sys.executable``, or is ``{python}`` for ssh."""
    package = Path(streamtune.__file__).parent
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                assert ast.unparse(node.elts[1]) in ("'-P'", "'-I'"), f"{file}:{node.lineno}"
    assert "{python} -P -m {AGENT}" in (package / "distributed/remote_ranks.py").read_text()


def test_a_matplotlibrc_of_the_folder_changes_no_picture(tmp_path: Path) -> None:
    import matplotlib

    records = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    draw_loss(records, tmp_path / "ours.png", title="t")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfigure.facecolor: red\nfont.size: 40\n")
    with matplotlib.rc_context(fname=str(tmp_path / "matplotlibrc")):
        draw_loss(records, tmp_path / "theirs.png", title="t")
        assert matplotlib.rcParams["text.usetex"] is True  # theirs again
    assert (tmp_path / "ours.png").read_bytes() == (tmp_path / "theirs.png").read_bytes()


@pytest.mark.full
def test_every_picture_is_drawn_with_the_settings_of_matplotlib_itself() -> None:
    for file in Path(streamtune.__file__).parent.rglob("*.py"):
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef) and "Figure(" in ast.unparse(function):
                decorated = [ast.unparse(each) for each in function.decorator_list]
                assert decorated == ["with_default_style"], f"{file}:{function.lineno}"


NO_HOME = """
import os, pwd, sys
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "HF_HOME"):
    os.environ.pop(name, None)
def no_entry(*arguments):
    raise KeyError("getpwuid(): uid not found: 54321")
pwd.getpwuid = pwd.getpwnam = no_entry
from streamtune.__main__ import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.quick("validate")
@pytest.mark.parametrize(
    "command",
    [
        ("validate", "tiny.yaml"),
        ("data", "tiny.yaml"),
        pytest.param(("sft", "tiny.yaml", "--nproc", "2"), marks=pytest.mark.slow),
    ],
    ids=lambda command: command[0],
)
def test_without_a_home_nothing_is_kept_and_nothing_is_left(command: tuple[str, ...], tmp_path: Path) -> None:
    """As in a container with a user id that no table has."""
    write_sft(tmp_path)
    (tmp_path / "tmp").mkdir()
    program = tmp_path / "tmp" / "program.py"
    program.write_text(NO_HOME)
    for _ in range(2):
        done = start(tmp_path, sys.executable, str(program), *command, TMPDIR=str(tmp_path / "tmp"))
        assert done.returncode == 0, done.stderr
        assert "cached for the next start" not in done.stderr
        assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == ["program.py"]
    assert {path.name for path in tmp_path.iterdir()} <= {"tiny.yaml", "rows.jsonl", "tmp", "runs"}
