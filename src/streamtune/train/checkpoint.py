"""Checkpoints: complete or absent, verified before use, exact on resume.

    checkpoints/step-000100/
      model/                       in Hugging Face format, tokenizer included: `from_pretrained` loads it
      optimizer-00001.safetensors  the optimizer's tensors, by parameter name; with slices.json in parts, see ``slices``
      rng.safetensors              torch's generators, of rank 0; rng-r00003.safetensors and .json of rank 3
      state.json                   step, position in the data, the other generators, identity of the run
      manifest.json                size and SHA-256 of every other file, written last

No pickle anywhere: reading a checkpoint runs no code. ``saver`` writes checkpoints, ``staging`` commits them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from streamtune.errors import CheckpointError, StreamTuneError
from streamtune.train.process import RngState
from streamtune.train.staging import (
    fsync_path,
    remove_any,
)

STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files agree with its manifest."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def model_dir(self) -> Path:
        """Folder that ``from_pretrained`` loads."""
        return self.path / "model"

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return _read_tensors(sorted(self.path.glob("optimizer-*.safetensors")))

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.state.get("ranks", 1))

    def rng(self, rank: int = 0) -> RngState:
        """Read the random state of one of the ranks that wrote it."""
        path = self.path / f"{rng_name(rank)}.safetensors"
        plain = json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) if rank else self.state["rng"]
        return RngState(_read_tensors([path]), plain)


def rng_name(rank: int) -> str:
    """Return the file name of a rank's random state, without the suffix."""
    return f"rng-r{rank:05d}" if rank else "rng"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, such as ``folder/step-000100``."""
    return folder / f"step-{step:06d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify every byte of the checkpoint at ``path`` and open it; CheckpointError if it is damaged."""
    manifest = read_manifest(path)
    verify_files(path, manifest)
    try:
        state = _checked_state(json.loads((path / STATE).read_text(encoding="utf-8")))
        step = state["step"]
    except (OSError, ValueError, RecursionError) as error:
        why = f"{STATE} cannot be read ({error})"
        raise CheckpointError(f"{path} is damaged: {why}", fix="use another checkpoint") from error
    named = STEP_NAME.fullmatch(path.name)
    if step != manifest.step or (named is not None and int(named[1]) != step):
        raise CheckpointError(f"{path} is damaged: it is the checkpoint of step {step}", fix="use another checkpoint")
    return Checkpoint(path, state)


_OF_STATE: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "identity": (dict,),
    "progressed": (dict,),
    "stream": (dict, type(None)),
    "rng": (dict,),
}
"""Types that entries of a state may have."""
_OF_IDENTITY: dict[str, tuple[type, ...]] = dict.fromkeys(("recipe", "free", "versions", "files"), (dict,))
_OF_RECIPE: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model_name_or_path", "quantization", "objective", "finetuning_type", "dtype"), (str, type(None))),
    **dict.fromkeys(("model", "rope_scaling"), (dict, type(None))),
    **dict.fromkeys(("rope_theta", "max_length", "seed"), (int, float, type(None))),
}
"""Settings of a run that other commands compute with."""


def _checked_state(value: Any) -> dict[str, Any]:
    """Return the content of ``state.json``; ValueError unless it has the form that a run writes."""
    state = _checked(value, _OF_STATE, needed=("step", "identity"))
    ranks = state.get("ranks", 1)
    if state["step"] < 0 or not isinstance(ranks, int) or ranks < 1:
        raise ValueError("its 'step' or its 'ranks' is no count")
    for name, number in state.get("progressed", {}).items():
        if not isinstance(number, (int, float, list, type(None))):
            raise ValueError(f"its 'progressed' has a '{name}' that is a {type(number).__name__}")
    check_identity(state["identity"])
    return state


def check_identity(value: Any, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Return the identity of a run, as ``run.json`` and checkpoints have it, with the entries ``needed``.

    Raises:
        ValueError: The content does not have the form that a run writes.
    """
    identity = _checked(value, _OF_IDENTITY, needed)
    _checked(identity.get("recipe", {}), _OF_RECIPE)
    for name, texts in identity.items():
        if name in ("files", "versions") and not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"its '{name}' holds something that is no text")
    return identity


def _checked(value: Any, types: Mapping[str, tuple[type, ...]], needed: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it holds no JSON object but {'nothing' if value is None else f'a {type(value).__name__}'}")
    for name in needed:
        if name not in value:
            raise ValueError(f"it has no '{name}'")
    for name, allowed in types.items():
        if name in value and (not isinstance(value[name], allowed) or isinstance(value[name], bool)):
            wanted = "no JSON object but " if allowed == (dict,) else ""
            raise ValueError(f"its '{name}' is {wanted}a {type(value[name]).__name__}")
    return value


@contextmanager
def restoring(path: Path, what: str) -> Iterator[None]:
    """Raise errors inside as a CheckpointError that names what could not be restored, but for errors of ours."""
    try:
        yield
    except (StreamTuneError, torch.OutOfMemoryError, MemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError,
            ValueError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path} is damaged: its {what} cannot be restored ({type(error).__name__}: {error})",
            fix="use another checkpoint: --resume PATH",
        ) from error


def newest_checkpoint(folder: Path, notify: Callable[[str], None]) -> Checkpoint | None:
    """Open the newest checkpoint of a run that verifies, None if there are none; report the damaged ones passed over.

    Raises:
        CheckpointError: There are checkpoints and none of them verifies; the message names each.
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
            fix="put back a copy of one of them and start again, or go on from another with --resume PATH; "
            "--resume never moves this run aside and starts anew",
        )
    return None


def supersede(folder: Path, step: int) -> None:
    """Rename the checkpoints after ``step``, to which a run goes back, to ``step-000200.superseded``.

    They are damaged, or the user went back behind them; their steps are taken again.
    """
    later = [path for path in step_directories(folder) if step_of(path) > step]
    for path in later:
        aside = path.with_name(f"{path.name}.superseded")
        remove_any(aside)
        path.rename(aside)
    if later:
        fsync_path(folder)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


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


FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
NEEDED = (STATE, "rng.safetensors", "optimizer-00001.safetensors")
"""Files that every checkpoint has."""
LARGEST = 16 << 20
"""Bytes of a manifest at most; a real one has some hundred for each file."""


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``: every file of a checkpoint with its size and SHA-256, and a digest of the list itself.

    A checkpoint consists of exactly the files in its manifest: a file that differs, is missing or was added is refused,
    and so is a symbolic link. The manifest's own bytes have to be those that :func:`write_manifest` writes for its
    values, digest included, so that every changed byte is noticed.
    """

    run: str
    """Id of the run that wrote it."""
    step: int
    metric: float | None
    """Value that ranks it, where the best checkpoints are kept."""
    files: Mapping[str, Mapping[str, Any]]
    """Path with ``/`` -> ``{"bytes": n, "sha256": hex}``"""


def write_manifest(folder: Path, *, run: str, step: int, metric: float | None) -> None:
    """Write the manifest of all files below ``folder``, which are read back from disk."""
    files = {name: _describe(folder / name) for name in sorted(_files_below(folder))}
    (folder / MANIFEST).write_text(_text(Manifest(run, step, metric, files)), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at ``path``, and none of its files; CheckpointError if it was changed."""
    try:
        if path.is_symlink() or stat.S_ISLNK((path / MANIFEST).lstat().st_mode):
            raise _damaged(path, "it is a symbolic link")
        if (path / MANIFEST).stat().st_size > LARGEST:
            raise _damaged(path, f"{MANIFEST} is larger than any")
        text = (path / MANIFEST).read_text(encoding="utf-8")
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {found['format']}; this version reads {FORMAT}",
                fix="use the version of streamtune that wrote it",
            )
        manifest = Manifest(found["run"], int(found["step"]), found["metric"], found["files"])
        if _text(manifest) != text or not isinstance(found["run"], str) or not isinstance(found["files"], dict):
            raise _damaged(path, f"{MANIFEST} is not what was written")
        if manifest.metric is not None and not isinstance(manifest.metric, float):
            raise _damaged(path, f"{MANIFEST} is not what was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint",
            fix="give a folder such as runs/NAME/checkpoints/step-000100",
        ) from error
    for name in manifest.files:
        if not _is_plain(name):
            raise _damaged(path, f"its manifest lists {name!r}, which is no file of a checkpoint")
    return manifest


def verify_files(path: Path, manifest: Manifest) -> None:
    """Compare every byte of a checkpoint with its manifest; a CheckpointError names the first file that differs."""
    for name in NEEDED:
        if name not in manifest.files:
            raise _damaged(path, f"its manifest does not list {name}")
    try:
        there = set(_files_below(path))
        for name, expected in manifest.files.items():
            if name not in there:
                raise _damaged(path, f"{name} is missing")
            if _describe(path / name) != expected:
                raise _damaged(path, f"{name} is not what was written")
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    if added := sorted(there - manifest.files.keys() - {MANIFEST}):
        raise _damaged(path, f"{added[0]} is not in its manifest")


def _text(manifest: Manifest) -> str:
    body = {"format": FORMAT, **asdict(manifest)}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True) + "\n"


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files, with ``/``; CheckpointError for anything but plain files and directories."""
    for directory, subfolders, names in os.walk(folder, onerror=_raise):
        for name in (*subfolders, *names):
            found = Path(directory, name)
            mode = found.lstat().st_mode
            if stat.S_ISREG(mode):
                yield found.relative_to(folder).as_posix()
            elif not stat.S_ISDIR(mode):
                what = "a symbolic link" if stat.S_ISLNK(mode) else "no plain file"
                raise _damaged(folder, f"{found.relative_to(folder).as_posix()} is {what}")


def _raise(error: OSError) -> None:
    raise error


def _is_plain(name: str) -> bool:
    """Return True if ``name`` is the path of a file below the checkpoint, in its one normal form."""
    path = PurePosixPath(name)
    safe = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
    return safe and name not in ("", ".", MANIFEST) and not any(mark in name for mark in ("\\", "\0", ":"))


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}", fix="use another checkpoint")
