"""Checkpoints that can be trusted: complete or absent, verified before use, exact on resume.

    checkpoints/step-000100/
      model/                       in Hugging Face format, tokenizer included: `from_pretrained` loads it
      optimizer-00001.safetensors  the optimizer's tensors, by parameter name; with slices.json in parts, see ``slices``
      rng.safetensors              torch's generators, of rank 0; rng-r00003.safetensors and .json of rank 3
      state.json                   step, position in the data, the other generators, what run this is
      manifest.json                size and SHA-256 of every other file, written last

No pickle anywhere: reading a checkpoint runs no code. ``saver`` writes them, ``staging`` commits what was written,
and ``manifest`` says how it is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from streamtune.errors import CheckpointError
from streamtune.train.manifest import STATE, read_manifest, verify_files
from streamtune.train.rng import RngState
from streamtune.train.staging import (
    fsync_path,
    remove_any,
)

__all__ = [
    "STATE",
    "Checkpoint",
    "checkpoint_path",
    "newest_checkpoint",
    "open_checkpoint",
    "rng_name",
    "step_directories",
    "supersede",
]

STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files agree with its manifest."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps taken when it was saved."""
        return int(self.state["step"])

    @property
    def model_dir(self) -> Path:
        """The folder that ``from_pretrained`` loads."""
        return self.path / "model"

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Read the optimizer's tensors, on the CPU."""
        return _read_tensors(sorted(self.path.glob("optimizer-*.safetensors")))

    @property
    def ranks(self) -> int:
        """The number of ranks that wrote it."""
        return int(self.state.get("ranks", 1))

    def rng(self, rank: int = 0) -> RngState:
        """Read the random state of one of the ranks that wrote it."""
        path = self.path / f"{rng_name(rank)}.safetensors"
        plain = json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) if rank else self.state["rng"]
        return RngState(_read_tensors([path]), plain)


def rng_name(rank: int) -> str:
    """Return the name of a rank's random state, without the ending."""
    return f"rng-r{rank:05d}" if rank else "rng"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, such as ``folder/step-000100``."""
    return folder / f"step-{step:06d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify the checkpoint at ``path`` and open it. Every byte of it is read.

    Raises:
        CheckpointError: It is not a checkpoint, or one of its files is not what was written.
    """
    manifest = read_manifest(path)
    verify_files(path, manifest)
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        step = int(state["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {STATE} cannot be read", mend="use another checkpoint") from error
    named = STEP_NAME.fullmatch(path.name)
    if step != manifest.step or (named is not None and int(named[1]) != step):
        raise CheckpointError(f"{path} is damaged: it is the checkpoint of step {step}", mend="use another checkpoint")
    return Checkpoint(path, state)


def newest_checkpoint(folder: Path, notify: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of a run that verifies; report the damaged ones passed over. None if there is none.

    Raises:
        CheckpointError: There are checkpoints and none of them verifies; it names each.
    """
    damaged: list[str] = []
    for path in reversed(step_directories(folder)):
        try:
            found = open_checkpoint(path)
        except CheckpointError as error:
            damaged.append(error.what)
            continue
        for what in damaged:
            notify(f"{what}; going back to {found.path.name}")
        return found
    if damaged:
        count = "the only checkpoint" if len(damaged) == 1 else f"none of the {len(damaged)} checkpoints"
        verb = "cannot be used" if len(damaged) == 1 else "can be used"
        raise CheckpointError(
            "\n- ".join([f"{count} in {folder} {verb}, and nothing was changed", *damaged]),
            mend="put back a copy of one of them and start again, or go on from another with --resume PATH; "
            "--resume never moves this run aside and starts anew",
        )
    return None


def supersede(folder: Path, step: int) -> None:
    """Take the checkpoints after ``step`` out of use, where a run goes back to ``step``: ``step-000200.superseded``.

    They are damaged, or the user went back behind them; the steps they stand for are taken again.
    """
    later = [path for path in step_directories(folder) if int(path.name.removeprefix("step-")) > step]
    for path in later:
        aside = path.with_name(f"{path.name}.superseded")
        remove_any(aside)
        path.rename(aside)
    if later:
        fsync_path(folder)


def step_directories(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors
