"""What the fault suite is made of: forked runs, moments to break them at, and what two runs are compared by."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

import pytest
import torch
import yaml
from safetensors.torch import load_file

from streamtune.train.checkpoint import newest_checkpoint

ROOT = Path(__file__).parents[2]
TIMINGS = ("tokens_per_s", "peak_mem_gib")

# Classes and actions of shim.c.
OPEN, RENAME, FSYNC, UNLINK, MKDIR, WRITE = 1, 2, 4, 8, 16, 32
ALL = OPEN | RENAME | FSYNC | UNLINK | MKDIR | WRITE
COUNT, KILL, TEAR, FAIL_ONCE, FAIL_ON, TEAR_ON = range(6)

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "attention_dropout": 0.1,
}
SFT: dict[str, Any] = {
    "model": {"init": MODEL},
    "tokenizer": {"train": {"vocab_size": 280}},
    "datasets": [{"path": "rows.jsonl"}],
    "learning_rate": 1.0e-2,
    "max_length": 64,
    "val_size": 2,
    "engine": {"schedule": "fixed", "chunk_size": 32, "head_chunk_size": 32},
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "save_steps": 2,
    "eval_steps": 4,
}
"""Ten rows by two: five steps an epoch, ten in all, five checkpoints of which two are kept."""


def write_sft(folder: Path, *, longer: int = 1, **changes: Any) -> None:
    """Rows and recipe of a tiny run of ``sft``; ``longer`` answers for long rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Add {n}."},
                {"role": "assistant", "content": f"{n}+1" * (1 + n % 3) * longer},
            ]
        }
        for n in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**SFT, **changes}, sort_keys=False))


@dataclass(frozen=True)
class Done:
    """How a forked run ended."""

    status: int
    """Exit code, or the signal that killed it, negative."""
    counted: int
    """Calls the shim counted, where the run came to its end."""
    output: str
    seconds: float


@dataclass
class Zygote:
    """One process that forks runs, one at a time."""

    shim: Path
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self.shim),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "tests.faults.zygote"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        assert self._hear() == {"ready": True}

    def run(
        self,
        folder: Path,
        *arguments: str,
        command: str = "sft",
        arm: tuple[Any, ...] | None = None,
        hook: str | None = None,
        after: Callable[[int], None] = lambda pid: None,
        **more: Any,
    ) -> Done:
        """``streamtune sft tiny.yaml ...`` in ``folder``; ``after`` is called with the process that was forked."""
        output = folder / "output.txt"
        output.unlink(missing_ok=True)
        job = {
            "cwd": str(folder),
            "argv": [command, "tiny.yaml", *arguments],
            "output": str(output),
            "arm": arm,
            **more,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**job, "hook": hook}) + "\n")
        self.process.stdin.flush()
        pid = self._hear()["pid"]
        started = time.monotonic()
        after(pid)
        ended = self._hear()
        seconds = time.monotonic() - started
        return Done(ended["status"], ended["counted"], output.read_text() if output.exists() else "", seconds)

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the zygote died: {self.process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found


Case = TypeVar("Case")
Found = TypeVar("Found")


class Zygotes:
    """A few of them, and cases dealt out to whichever is free."""

    def __init__(self, shim: Path, count: int) -> None:
        self._free: Queue[Zygote] = Queue()
        self._all = [Zygote(shim) for _ in range(count)]
        for zygote in self._all:
            self._free.put(zygote)

    def run(self, folder: Path, *arguments: str, **options: Any) -> Done:
        """As :meth:`Zygote.run`, of the one that is free next."""
        zygote = self._free.get()
        try:
            return zygote.run(folder, *arguments, **options)
        finally:
            self._free.put(zygote)

    def each(self, trial: Callable[[Case], Found], cases: Iterable[Case]) -> list[Found]:
        """``trial`` of every case, so many at a time as there are zygotes."""
        with ThreadPoolExecutor(len(self._all)) as pool:
            return list(pool.map(trial, cases))

    def close(self) -> None:
        """End all of them."""
        for zygote in self._all:
            zygote.close()


def compile_shim(folder: Path) -> Path:
    """The shared object of ``shim.c``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the shim that breaks system calls is compiled, and there is no C compiler")
    target = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl", "-lpthread"], check=True)
    return target


def kill_after(seconds: float) -> Callable[[int], None]:
    """Waits, then SIGKILL."""

    def kill(pid: int) -> None:
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.kill(pid, signal.SIGKILL)

    return kill


# --- what a run came to -----------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a record file, without what a clock measured."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in found]


def state_of(run: Path) -> dict[str, Any]:
    """All that a finished run came to: its model, the last checkpoint with optimizer and generators, every metric."""
    checkpoint = newest_checkpoint(run / "checkpoints", lambda text: None)
    assert checkpoint is not None, "no checkpoint"
    tensors = {
        f"{file.relative_to(run)}/{name}": (
            str(x.dtype),
            tuple(x.shape),
            x.contiguous().flatten().view(torch.uint8).numpy().tobytes(),
        )
        for file in [*sorted((run / "final").glob("*.safetensors")), *sorted(checkpoint.path.rglob("*.safetensors"))]
        for name, x in load_file(file).items()
    }
    kept = {key: checkpoint.state[key] for key in ("step", "progressed", "stream", "rng")}
    found = {"tensors": tensors, "state": kept, "metrics": read_lines(run / "metrics.jsonl")}
    for name in ("completions", "selected"):
        if (run / f"{name}.jsonl").exists():
            found[name] = read_lines(run / f"{name}.jsonl")
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Parts that are not equal to the last bit."""
    found = [part for part in theirs if part != "tensors" and ours.get(part) != theirs[part]]
    names = ours["tensors"].keys() | theirs["tensors"].keys()
    return found + [name for name in names if ours["tensors"].get(name) != theirs["tensors"].get(name)]


def complete_checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that verify."""
    from streamtune.errors import CheckpointError
    from streamtune.train.checkpoint import list_checkpoints, open_checkpoint

    found = []
    for path in list_checkpoints(run / "checkpoints"):
        try:
            found.append(open_checkpoint(path).step)
        except CheckpointError:
            continue
    return found


# --- figures ----------------------------------------------------------------------------------------------------------


def report(name: str, **figures: Any) -> None:
    """Hand a figure to ``make faults``, which writes docs/reference/reliability.md; without it, nothing."""
    folder = os.environ.get("STREAMTUNE_FAULTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def size(full: int, fast: int) -> int:
    """How many cases: all of them under ``make faults``, a few under ``make test``."""
    return full if os.environ.get("STREAMTUNE_FAULTS") else fast


def lines_of(path: Path) -> Iterator[list[str]]:
    """Fields of the shim's log."""
    for line in path.read_text().splitlines():
        yield line.split("\t")
