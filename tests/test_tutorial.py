"""The README and the tutorial run: every file they print is written, every command runs in order, as it is printed.

Three tables say what differs here: :data:`NOT_RUN` has commands that cannot run in a test, :data:`ADDED` what is put
behind a command (a small local model for one on the hub), and :data:`SHORTER` what shortens a run. A test checks that
every entry is still printed. ``pytest -m slow tests/test_tutorial.py`` leaves the last table out, and starts a shell
for every command; otherwise ``streamtune`` runs in this process but for its runs of several ranks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamtune.cli import main
from streamtune.models.tokenizer import train_tokenizer
from tests.sft_kit import QWEN3
from tests.test_docs import FENCE, ROOT, blocks

TUTORIAL = ROOT / "docs" / "tutorial"
PAGES = {"README": ROOT / "README.md", **{page.stem: page for page in sorted(TUTORIAL.glob("0*.md"))}}
FILE = re.compile(r"# ([\w./-]+\.(?:yaml|py|jsonl))$")
RUNS = ("sft", "dpo", "grpo")
IN_FULL = ("README", "01-first-run", "02-own-data", "05-preferences")
"""Pages that `make test-all` runs, shortened; the others are slow."""

NOT_RUN = {
    ("README", "git clone ADDRESS-OF-THIS-REPOSITORY streamtune && cd streamtune"): "the tests run in a clone",
    ("README", "make setup"): "makes a virtual environment from a package index",
    ("README", "source .venv/bin/activate"): "there is none: see `make setup`",
    ("README", "make quickstart"): "makes a virtual environment, then trains a shipped recipe for minutes",
    (
        "07-several-devices",
        "streamtune sft recipe.yaml --hostfile hosts",
    ): "needs several machines",
    (
        "07-several-devices",
        "torchrun --nproc_per_node 8 -m streamtune sft recipe.yaml",
    ): "needs eight devices",
}
"""Why a command is not run, by page and command."""

TINY = ["--set", "model_name_or_path=tiny", "--set", "max_length=512"]
"""A small local model in place of one on the hub, and short rows."""
SHAPE = [part for key, value in QWEN3.items() if key != "model_type" for part in ("--set", f"{key}={value}")]
"""A small model in place of the shape that a recipe has."""
PLAN = "streamtune plan real.yaml --device h100 --host-memory 256GiB"
MILLION = "streamtune plan million.yaml --length 1048576 --device h100-80gb --host-memory"

ADDED: dict[tuple[str, str], list[str]] = {
    ("README", "streamtune data recipe.yaml"): TINY,
    ("README", "streamtune verify recipe.yaml"): TINY,
    ("README", "streamtune plan recipe.yaml"): TINY,
    ("README", "streamtune sft recipe.yaml"): [*TINY, "--set", "learning_rate=0.01"],
    ("README", "streamtune generate runs/qwen3-long"): ["--prompt", "What is streamed?", "--max-new-tokens", "4"],
    ("README", "streamtune plan qwen3-8b-long --device rtx-4090 --host-memory 64GiB --length 65536"): SHAPE,
    ("01-first-run", "streamtune plan qwen3/0.6b-full-24gb --device rtx-4090 --host-memory 64GiB"): TINY,
    ("02-own-data", "streamtune plan real.yaml --device rtx-4090 --host-memory 64GiB"): TINY,
    ("03-documents", PLAN): TINY,
    ("04-reasoning-traces", PLAN): TINY,
    ("04-reasoning-traces", f"{PLAN} --set finetuning_type=qlora"): TINY,
    ("05-preferences", PLAN): TINY,
    ("06-rewards", PLAN): [*TINY[:2], "--set", "max_prompt_length=64", "--set", "max_completion_length=64"],
    ("07-several-devices", "streamtune plan recipe.yaml --device h100 --host-memory 1900GB --ranks 8"): TINY,
    ("08-one-million-tokens", f"{MILLION} 256GiB"): SHAPE,
    ("08-one-million-tokens", f"{MILLION} 512GiB"): SHAPE,
    (
        "08-one-million-tokens",
        "streamtune probe-max-len million.yaml --method simulate --device h100-80gb --device-memory 80GiB "
        "--host-memory 256GiB",
    ): [*SHAPE, "--to", "4096"],
    ("08-one-million-tokens", "streamtune verify million.yaml --length 4096"): [
        *SHAPE,
        "--set",
        "model.init.vocab_size=4096",
    ],
    ("08-one-million-tokens", "streamtune sft million.yaml --set max_length=1048576"): [
        *SHAPE,
        *shlex.split("--set model.init.vocab_size=4096 --set max_length=1024 --set datasets.0.max_rows=20"),
        *shlex.split("--set max_steps=8 --set learning_rate=0.01"),
    ],
}
"""Words put behind a command, by page and command."""

SHORTER: dict[tuple[str, str], list[str]] = {
    ("01-first-run", "streamtune sft first.yaml"): ["--set", "max_steps=20"],
    ("02-own-data", "streamtune sft dates.yaml"): ["--set", "max_steps=20"],
    ("03-documents", "streamtune sft documents.yaml"): ["--set", "max_steps=8"],
    ("04-reasoning-traces", "streamtune sft traces.yaml"): ["--set", "max_steps=20"],
    ("05-preferences", "streamtune sft answers.yaml"): ["--set", "max_steps=20"],
    ("05-preferences", "streamtune dpo pairs.yaml"): ["--set", "max_steps=8"],
    ("06-rewards", "streamtune grpo tasks.yaml --allow-code"): ["--set", "max_steps=24"],
    **{
        ("07-several-devices", f"streamtune sft ranks.yaml{more}"): ["--set", "max_steps=4"]
        for more in (
            "",
            " --nproc 2 --output-dir runs/two",
            " --nproc 2 --set sequence_parallel_size=2 --output-dir runs/shared",
            " --nproc 2 --set fsdp=true --output-dir runs/fsdp",
        )
    },
}
"""Words that make a run shorter than the page's; ``slow`` runs it as printed."""

FAILS = {
    (
        "02-own-data",
        "streamtune sft dates.yaml --dry-run --set datasets.0.path=broken.jsonl",
    ): (2, "error: the conversation has no assistant message"),
}
"""Exit code and message of commands that show an error."""

SAME = {
    "07-several-devices": ("one", "two", "shared", "fsdp"),
    "08-one-million-tokens": ("levels", "two-levels"),
}
"""Runs of a page that train the same, to rounding."""

SHOWS = {
    "validate": "OK ",
    "plan": "FITS ",
    "verify": "\nexact: streamed loss and gradients equal plain autograd's",
    "data": "rows as the model sees them",
    "eval": "held-out, ",
    "probe-max-len": "Longest sequence",
    "bench": "checkpoint",
    "recipes": "",
    "generate": "",
}
"""Text that the screen of a command must have; a run is judged by its files, in :func:`check_run`."""


@dataclass(frozen=True)
class File:
    """A file that a page prints, with its name in its first line."""

    name: str
    text: str


def steps_of(page: Path) -> Iterator[File | str]:
    """Yield the files and the commands of a page, in order."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                if command := re.sub(r"(^|\s+)#.*", "", line).strip():
                    yield re.sub(r"\s+", " ", command)
        elif named := FILE.match(text.splitlines()[0] if text else ""):
            yield File(named[1], text)


def commands_of(name: str) -> list[str]:
    return [step for step in steps_of(PAGES[name]) if isinstance(step, str)]


# --- what the tables and the pages say --------------------------------------------------------------------------------


def test_the_tables_name_commands_that_are_printed() -> None:
    printed = {(name, command) for name in PAGES for command in commands_of(name)}
    assert {*NOT_RUN, *ADDED, *SHORTER, *FAILS} - printed == set()
    assert NOT_RUN.keys() & (ADDED.keys() | SHORTER.keys()) == set()


def test_every_block_of_the_tutorial_is_run() -> None:
    """A block of code is a file with a name or commands; what a screen shows has no language."""
    for name, page in PAGES.items():
        if name != "README":
            languages = {language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
            assert languages <= {"", "bash", "yaml", "python"}, name
            for language in ("yaml", "python"):
                assert all(FILE.match(text.splitlines()[0]) for text in blocks(page, language)), name


@pytest.mark.parametrize("name", PAGES)
def test_recipes_that_pages_print_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for step in steps_of(PAGES[name]):
        if isinstance(step, File):
            Path(step.name).write_text(step.text)
            if step.name.endswith(".yaml"):
                with pytest.raises(SystemExit) as left:
                    main(["validate", step.name])
                assert not left.value.code, step.name


# --- what the commands do ---------------------------------------------------------------------------------------------


def prepare_readme(folder: Path) -> None:
    """Write what a reader of the README has: the repository's recipes, rows, and here a model in place of the hub's."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "data").mkdir()
    with (folder / "data" / "train.jsonl").open("w") as rows:
        for number in range(24):
            messages = [{"role": "user", "content": f"Count to {number}."}]
            messages.append({"role": "assistant", "content": " ".join(map(str, range(number + 1)))})
            rows.write(json.dumps({"messages": messages}) + "\n")


def write_tiny(folder: Path) -> None:
    """Write a small model with its tokenizer."""
    tokenizer = train_tokenizer([str(number) for number in range(1000)], vocab_size=300)
    torch.manual_seed(0)
    options = {key: value for key, value in QWEN3.items() if key != "model_type"}
    Qwen3ForCausalLM(Qwen3Config(**options, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables of a reader's shell, with this checkout's ``streamtune`` first on its path."""
    programs = folder / "bin"
    programs.mkdir()
    for name, words in {"streamtune": "-m streamtune", "python": ""}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "80",
    }


def values(run: Path, key: str) -> list[float]:
    """Return the values of a key of a run's ``metrics.jsonl``, step by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def check_run(shown: str) -> None:
    """Check what a run leaves: a model, and losses or rewards that are better at the end."""
    [final] = re.findall(r"^  model +(\S+/final)/$", shown, re.MULTILINE)
    assert list(Path(final).glob("*.safetensors")), final
    rewards = values(Path(final).parent, "reward")
    losses = [-reward for reward in rewards] or values(Path(final).parent, "loss")
    part = max(1, len(losses) // 4)
    assert sum(losses[-part:]) < sum(losses[:part]), losses


def check_screen(command: str, shown: str) -> None:
    """Check the main result of a ``streamtune`` command."""
    words = shlex.split(command)
    if words[0] != "streamtune":
        return
    if words[1] in RUNS and "--dry-run" not in words:
        check_run(shown)
    elif words[1] not in RUNS:
        assert SHOWS[words[1]] in shown, shown


def in_shell(command: str, variables: Mapping[str, str], folder: Path) -> tuple[int, str, str]:
    """Run a command as a reader does; return its exit code and what it printed and complained of."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=dict(variables), capture_output=True, text=True, timeout=1800
    )
    return done.returncode, done.stdout, done.stderr


def in_process(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a ``streamtune`` command in the working directory, without a process that imports every library anew."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        main(shlex.split(command)[1:])
    return (int(left.value.code or 0), *capfd.readouterr())


def run_page(name: str, folder: Path, capfd: pytest.CaptureFixture[str] | None = None) -> None:
    """Write the files of a page and run its commands in a folder: shorter, with a fixture that captures the output."""
    variables = environment(folder)
    write_tiny(folder / "tiny")
    if name == "README":
        prepare_readme(folder)
    for step in steps_of(PAGES[name]):
        if isinstance(step, File):
            path = folder / step.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(step.text, encoding="utf-8")
        elif (name, step) not in NOT_RUN:
            more = [*ADDED.get((name, step), ()), *(SHORTER.get((name, step), ()) if capfd else ())]
            command = f"{step} {shlex.join(more)}".rstrip()
            if capfd and step.startswith("streamtune ") and "--nproc" not in step:
                left, out, err = in_process(command, capfd)
            else:
                left, out, err = in_shell(command, variables, folder)
            code, message = FAILS.get((name, step), (0, ""))
            shown = f"{command}\n{out[-3000:]}\n{err[-3000:]}"
            assert left == code, shown
            assert message in err, shown
            if code == 0:
                check_screen(step, out)
    first, *others = SAME.get(name, ("",))
    for other in others:
        losses = [values(folder / "runs" / run, "loss") for run in (first, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4), other


def test_the_python_of_the_readme_runs() -> None:
    torch.manual_seed(0)
    options = {key: value for key, value in QWEN3.items() if key != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**options, vocab_size=64))
    ids = torch.randint(64, (1, 48))
    [text] = blocks(PAGES["README"], "python")
    exec(text, {"model": model, "ids": ids, "labels": ids})
    streamed = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    for ours, parameter in zip(streamed, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_the_recipe_of_the_readme_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(Path("tiny"))
    prepare_readme(tmp_path)
    [recipe] = [step for step in steps_of(PAGES["README"]) if isinstance(step, File)]
    Path(recipe.name).write_text(recipe.text)
    command = "streamtune sft recipe.yaml"
    with pytest.raises(SystemExit) as left:
        main([*command.split()[1:], *ADDED["README", command]])
    assert not left.value.code
    check_run(capsys.readouterr().out)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name in IN_FULL else pytest.param(name, marks=pytest.mark.slow) for name in PAGES]
)
def test_a_page_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    run_page(name, tmp_path, None if name == "README" else capfd)  # the README as a newcomer runs it, in a shell


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PAGES.keys() - {"README"}))
def test_a_page_runs_as_it_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(name, tmp_path)
