"""Checkpoints that can be trusted: complete or absent, verified before use, exact on resume.

    checkpoints/step-000100/
      model/                       in Hugging Face format, tokenizer included: `from_pretrained` loads it
      optimizer-00001.safetensors  the optimizer's tensors, by parameter name
      rng.safetensors              torch's generators
      state.json                   step, position in the data, the other generators, what run this is
      manifest.json                size and SHA-256 of every other file, written last

No pickle anywhere: reading a checkpoint runs no code. A directory without a manifest, or with a file that differs from
it, is named and passed over in favour of the one before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamtune.errors import CheckpointError
from streamtune.train.rng import RngState
from streamtune.train.staging import commit_directory, free_bytes, write_error

__all__ = [
    "STATE",
    "Checkpoint",
    "ModelWriter",
    "checkpoint_path",
    "newest_checkpoint",
    "open_checkpoint",
    "previous_checkpoints",
    "rotate",
    "save_checkpoint",
    "supersede",
    "write_final",
    "write_json",
    "write_manifest",
]

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
STEP_NAME = re.compile(r"step-(\d{6,})")
SHARD_BYTES = 2 << 30
"""The optimizer's tensors are copied to the host in pieces of this size, never all at once."""


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
    """How a model is written in Hugging Face format, and about how much that is."""

    write: Callable[[Path], None]
    """Writes into the folder it is given."""
    num_bytes: int
    together: bool = False
    """Whether no rank has the whole model: all of them call ``write`` then, and fail together or not at all."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """``folder/step-000100``"""
    return folder / f"step-{step:06d}"


def save_checkpoint(
    folder: Path,
    *,
    state: Mapping[str, Any],
    rng: RngState,
    optimizer_tensors: Mapping[str, Tensor],
    writer: ModelWriter,
) -> Checkpoint:
    """Write ``folder/step-N`` and commit it at once.

    Args:
        folder: Where the checkpoints of the run are.
        state: JSON values; ``step`` among them.
        rng: The random state the next step starts from.
        optimizer_tensors: By name; copied to the host in shards.
        writer: Writes the model.

    Raises:
        CheckpointError: It cannot be written. Earlier checkpoints are as they were.
    """
    target = checkpoint_path(folder, int(state["step"]))
    needed = writer.num_bytes + sum(tensor.nbytes for tensor in optimizer_tensors.values())
    previous = previous_checkpoints(folder)
    safe = f"{previous[-1]} is intact" if previous else "there was no checkpoint before this one"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if needed > free_bytes(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        with commit_directory(target) as staged:
            writer.write(staged / "model")
            for index, shard in enumerate(_shards(optimizer_tensors), start=1):
                save_file(shard, staged / f"optimizer-{index:05d}.safetensors")
            save_file(rng.tensors, staged / "rng.safetensors")
            write_json(staged / STATE, {**state, "rng": rng.plain})
            write_manifest(staged)
    except (OSError, SafetensorError) as error:
        raise write_error(error, target, needed=needed, safe=safe) from error
    return Checkpoint(target, {**state, "rng": rng.plain})


def write_manifest(staged: Path) -> None:
    """List every file of a checkpoint. Last: a directory with a manifest has everything the manifest lists."""
    files = [path for path in sorted(staged.rglob("*")) if path.is_file()]
    listed = {path.relative_to(staged).as_posix(): _describe(path) for path in files}
    write_json(staged / MANIFEST, {"format": FORMAT, "files": listed})


def write_final(target: Path, writer: ModelWriter) -> None:
    """Write the trained model to ``target``, whole or not at all; what was there before is replaced.

    Raises:
        CheckpointError: It cannot be written.
    """
    try:
        with commit_directory(target) as staged:
            writer.write(staged)
    except (OSError, SafetensorError) as error:
        safe = "the run's last checkpoint is intact"
        raise write_error(error, target, needed=writer.num_bytes, safe=safe) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify the checkpoint at ``path`` and open it.

    Raises:
        CheckpointError: It is not a checkpoint, or one of its files is not what was written.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}; this version reads {FORMAT}",
                mend="use the version of streamtune that wrote it",
            )
        for name, expected in manifest["files"].items():
            if not (path / name).is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing", mend="use another checkpoint")
            if _describe(path / name) != expected:
                raise CheckpointError(
                    f"{path} is damaged: {name} is not what was written", mend="use another checkpoint"
                )
        return Checkpoint(path, json.loads((path / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint",
            mend="give a folder such as runs/NAME/checkpoints/step-000100",
        ) from error


def newest_checkpoint(folder: Path, notify: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of a run that verifies; name the damaged ones passed over. None if there is none."""
    for path in reversed(previous_checkpoints(folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            notify(f"{error.what}; going back to the one before it")
    return None


def rotate(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints and return what was deleted. ``keep`` of 0 deletes nothing."""
    surplus = previous_checkpoints(folder)[:-keep] if keep > 0 else []
    for path in surplus:
        shutil.rmtree(path, ignore_errors=True)
    return surplus


def supersede(folder: Path, step: int) -> None:
    """Take the checkpoints after ``step`` out of use, where a run goes back to ``step``: ``step-000200.superseded``.

    They are damaged, or the user went back behind them; the steps they stand for are taken again.
    """
    for path in previous_checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            aside = path.with_name(f"{path.name}.superseded")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def previous_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, oldest first."""
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


def _describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256, read back from the file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
