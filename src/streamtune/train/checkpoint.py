"""Checkpoints that can be trusted: complete or absent, verified before use, exact on resume.

    checkpoints/step-000100/
      model/                       in Hugging Face format, tokenizer included: `from_pretrained` loads it
      optimizer-00001.safetensors  the optimizer's tensors, by parameter name
      rng.safetensors              torch's generators
      state.json                   step, position in the data, the other generators, what run this is
      manifest.json                size and SHA-256 of every other file, written last

No pickle anywhere: reading a checkpoint runs no code. How it is committed is in ``staging``, what the manifest says and
how it is checked in ``manifest``, who writes it and when in ``saver``.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamtune.errors import CheckpointError
from streamtune.train.manifest import STATE, read_manifest, verify_files, write_manifest
from streamtune.train.rng import RngState
from streamtune.train.staging import (
    commit_directory,
    free_bytes,
    fsync_path,
    make_directory,
    refuse_link,
    remove_any,
    write_error,
)

__all__ = [
    "STATE",
    "Checkpoint",
    "ModelWriter",
    "check_room",
    "checkpoint_path",
    "explained",
    "newest_checkpoint",
    "open_checkpoint",
    "save_checkpoint",
    "step_directories",
    "supersede",
    "write_final",
]

STEP_NAME = re.compile(r"step-(\d{6,})")
SHARD_BYTES = 2 << 30
"""The optimizer's tensors are copied to the host in pieces of this size, where they are not there already."""


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

    def rng(self) -> RngState:
        """Read the random state."""
        return RngState(_read_tensors([self.path / "rng.safetensors"]), self.state["rng"])


@dataclass(frozen=True)
class ModelWriter:
    """A way to write a model in Hugging Face format, and about how many bytes that takes."""

    write: Callable[[Path], None]
    """Writes into the folder it is given."""
    num_bytes: int
    snapshot: Callable[[], Callable[[Path], None]] | None = None
    """Copies to the host what training changes, and returns what writes the copy from any thread. None: there is no
    such copy, and the model is written as it stands."""
    together: bool = False
    """True if no rank has the whole model: all of them call ``write`` or ``snapshot`` then, and fail together or not at
    all. Rank 0 has the snapshot, and writes it alone."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, such as ``folder/step-000100``."""
    return folder / f"step-{step:06d}"


def save_checkpoint(
    folder: Path,
    *,
    state: Mapping[str, Any],
    rng: RngState,
    optimizer_tensors: Mapping[str, Tensor],
    writer: ModelWriter,
    run: str = "",
    metric: float | None = None,
) -> Checkpoint:
    """Write ``folder/step-N`` and commit it at once.

    Args:
        folder: Where the checkpoints of the run are.
        state: JSON values; ``step`` among them.
        rng: The random state the next step starts from.
        optimizer_tensors: By name; copied to the host in shards.
        writer: Writes the model.
        run: Which run this is: only its own checkpoints are deleted by it.
        metric: The value to rank it by, where the best checkpoints are kept.

    Raises:
        CheckpointError: It cannot be written. Earlier checkpoints are as they were.
    """
    step = int(state["step"])
    target = checkpoint_path(folder, step)
    needed = writer.num_bytes + sum(tensor.nbytes for tensor in optimizer_tensors.values())
    with explained(target, needed, step_directories(folder)):
        refuse_link(folder)
        make_directory(folder)
        if needed > free_bytes(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        with commit_directory(target) as staged:
            writer.write(staged / "model")
            for index, shard in enumerate(_shards(optimizer_tensors), start=1):
                save_file(shard, staged / f"optimizer-{index:05d}.safetensors")
            save_file(rng.tensors, staged / "rng.safetensors")
            (staged / STATE).write_text(json.dumps({**state, "rng": rng.plain}, indent=1) + "\n", encoding="utf-8")
            # Last: a directory with a manifest has everything the manifest lists.
            write_manifest(staged, run=run, step=step, metric=metric)
    return Checkpoint(target, {**state, "rng": rng.plain})


def check_room(folder: Path, writer: ModelWriter, optimizer_tensors: Mapping[str, Tensor]) -> None:
    """Raise unless there is room for a checkpoint of what is trained.

    Raises:
        CheckpointError: A checkpoint takes more bytes than are free; with both figures.
    """
    needed = writer.num_bytes + sum(tensor.nbytes for tensor in optimizer_tensors.values())
    with explained(folder, needed, step_directories(folder)):
        if needed > free_bytes(folder):
            raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def explained(target: Path, needed: int, previous: Sequence[Path]) -> Iterator[None]:
    """Turn errors while a checkpoint is written into a message with figures.

    Args:
        target: What is written.
        needed: Bytes it takes.
        previous: The checkpoints that are there already, and stay.
    """
    safe = f"{previous[-1]} is intact" if previous else "there was no checkpoint before this one"
    try:
        yield
    except Exception as error:
        # Tokenizers raise Exception itself where the system fails them; anything more specific is a mistake of ours.
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        raise write_error(error, target, needed=needed, safe=safe) from error


def write_final(target: Path, writer: ModelWriter) -> None:
    """Write the trained model to ``target``, whole or not at all; what was there before is replaced.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        with commit_directory(target) as staged:
            writer.write(staged)
    except Exception as error:
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        safe = "the run's last checkpoint is intact"
        raise write_error(error, target, needed=writer.num_bytes, safe=safe) from error


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


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Copy ``tensors`` to the host, at most about SHARD_BYTES at a time."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield shard


def _read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors
