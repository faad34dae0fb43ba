"""Reading and verification of checkpoints.

    checkpoints/step-000100/
      model/                       model and tokenizer in Hugging Face format; `from_pretrained` loads it
      optimizer-00001.safetensors  optimizer tensors by parameter name; in slices if slices.json exists (``slices``)
      rng.safetensors              torch's random states of rank 0; rank 3 has rng-r00003.safetensors and .json
      state.json                   step, position in the data, other random states, settings of the run
      manifest.json                size and SHA-256 of every other file, written last

Checkpoints contain no pickle, so reading one runs no code. ``saver`` writes checkpoints.
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
from streamtune.train.staging import fsync_path, remove_path

STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files match its manifest.

    Attributes:
        path: Folder of the checkpoint.
        state: Content of ``state.json``.
    """

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def model_dir(self) -> Path:
        """Folder of the model and tokenizer, for ``from_pretrained``."""
        return self.path / "model"

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return _read_tensors(sorted(self.path.glob("optimizer-*.safetensors")))

    @property
    def num_ranks(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return int(self.state.get("ranks", 1))

    def random_state(self, rank: int = 0) -> RngState:
        path = self.path / f"{rng_file_stem(rank)}.safetensors"
        plain = json.loads(path.with_suffix(".json").read_text(encoding="utf-8")) if rank else self.state["rng"]
        return RngState(_read_tensors([path]), plain)


def rng_file_stem(rank: int) -> str:
    """Return the file name of a rank's random state, without suffix."""
    return f"rng-r{rank:05d}" if rank else "rng"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step, such as ``folder/step-000100``."""
    return folder / f"step-{step:06d}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``, after verifying the hashes of all its files.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged.
    """
    manifest = read_manifest(path)
    verify_files(path, manifest)
    try:
        state = _check_state_types(json.loads((path / STATE).read_text(encoding="utf-8")))
        step = state["step"]
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{STATE} cannot be read ({error})"
        raise CheckpointError(f"{path} is damaged: {reason}", fix="use another checkpoint") from error
    name_match = STEP_NAME.fullmatch(path.name)
    if step != manifest.step or (name_match is not None and int(name_match[1]) != step):
        raise CheckpointError(
            f"{path} is damaged: {STATE} names step {step}, which does not match", fix="use another checkpoint"
        )
    return Checkpoint(path, state)


_STATE_TYPES: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "identity": (dict,),
    "progressed": (dict,),
    "stream": (dict, type(None)),
    "rng": (dict,),
}
"""Allowed types of the entries of ``state.json``."""
_IDENTITY_TYPES: dict[str, tuple[type, ...]] = dict.fromkeys(("recipe", "free", "versions", "files"), (dict,))
_RECIPE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model_name_or_path", "quantization", "objective", "finetuning_type", "dtype"), (str, type(None))),
    **dict.fromkeys(("model", "rope_scaling"), (dict, type(None))),
    **dict.fromkeys(("rope_theta", "max_length", "seed"), (int, float, type(None))),
}
"""Allowed types of the recipe's settings that other commands read."""


def _check_state_types(value: Any) -> dict[str, Any]:
    state = _check_types(value, _STATE_TYPES, required_names=("step", "identity"))
    ranks = state.get("ranks", 1)
    if state["step"] < 0 or not isinstance(ranks, int) or ranks < 1:
        raise ValueError("'step' must be 0 or more, and 'ranks' 1 or more")
    for name, entry in state.get("progressed", {}).items():
        allowed, expected = ((str,), "a text") if name == "ranked_by" else ((int, float, list), "a number or a list")
        if entry is not None and not isinstance(entry, allowed):
            raise ValueError(f"'progressed.{name}' must be {expected}, found {type(entry).__name__}")
    check_identity(state["identity"])
    return state


def check_identity(value: Any, required_names: Iterable[str] = ()) -> dict[str, Any]:
    """Return ``value``, the settings and hashes that identify a run, if its entries have the right types.

    Args:
        value: Parsed JSON from ``run.json`` or a checkpoint.
        required_names: Names of entries that must exist.

    Raises:
        ValueError: An entry is missing or has a wrong type.
    """
    identity = _check_types(value, _IDENTITY_TYPES, required_names)
    _check_types(identity.get("recipe", {}), _RECIPE_TYPES)
    for name, texts in identity.items():
        if name in ("files", "versions") and not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"'{name}' must contain only strings")
    return identity


def _check_types(
    value: Any, types: Mapping[str, tuple[type, ...]], required_names: Iterable[str] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {'null' if value is None else type(value).__name__}")
    for name in required_names:
        if name not in value:
            raise ValueError(f"'{name}' is missing")
    for name, allowed in types.items():
        if name in value and (not isinstance(value[name], allowed) or isinstance(value[name], bool)):
            expected = " or ".join({dict: "an object", type(None): "null"}.get(kind, kind.__name__) for kind in allowed)
            found_type = "null" if value[name] is None else type(value[name]).__name__
            raise ValueError(f"'{name}' must be {expected}, found {found_type}")
    return value


@contextmanager
def explain_restore_errors(path: Path, part: str) -> Iterator[None]:
    """Context manager that turns errors into a CheckpointError: ``part`` of the checkpoint cannot be restored.

    StreamTune's own errors and out-of-memory errors are not changed.
    """
    try:
        yield
    except (StreamTuneError, torch.OutOfMemoryError, MemoryError):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError,
            ValueError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path} is damaged: its {part} cannot be restored ({type(error).__name__}: {error})",
            fix="use another checkpoint: --resume PATH",
        ) from error


def newest_checkpoint(folder: Path, notify: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run; None if the run has no checkpoint.

    Args:
        folder: Folder of the run's checkpoints.
        notify: Function called with a message about each damaged checkpoint.

    Raises:
        CheckpointError: All checkpoints are damaged; the message names each.
    """
    damaged: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            damaged.append(error.what)
            continue
        for message in damaged:
            notify(f"{message}; going back to {checkpoint.path.name}")
        return checkpoint
    if damaged:
        count = "the only checkpoint" if len(damaged) == 1 else f"none of the {len(damaged)} checkpoints"
        verb = "cannot be used" if len(damaged) == 1 else "can be used"
        raise CheckpointError(
            "\n- ".join([f"{count} in {folder} {verb}, and nothing was changed", *damaged]),
            fix="restore one of them from a copy and start again, or resume from another with --resume PATH; "
            "--resume never moves this run aside and starts a new one",
        )
    return None


def set_aside_later_checkpoints(folder: Path, step: int) -> None:
    """Rename the checkpoints after ``step`` (to ``step-000200.superseded``), when a run resumes from ``step``."""
    later = [path for path in list_checkpoints(folder) if checkpoint_step(path) > step]
    for path in later:
        renamed = path.with_name(f"{path.name}.superseded")
        remove_path(renamed)
        path.rename(renamed)
    if later:
        fsync_path(folder)


def checkpoint_step(path: Path) -> int:
    """Return the step number in the folder name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    checkpoints = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(checkpoints)]


def _read_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
REQUIRED_FILES = (STATE, "rng.safetensors", "optimizer-00001.safetensors")
"""Files that every checkpoint has."""
MAX_MANIFEST_BYTES = 16 << 20
"""Largest manifest that is read, in bytes; a real one has a few hundred bytes per file."""


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``: size and SHA-256 of every file of a checkpoint.

    A checkpoint consists of exactly the files in its manifest. Changed, missing or additional files and symbolic links
    are errors. So is any change of the manifest itself.
    """

    run: str
    step: int
    metric: float | None
    """Value by which checkpoints are ranked (``metric_for_best_model``); None if there is none."""
    files: Mapping[str, Mapping[str, Any]]
    """Relative path with ``/`` -> ``{"bytes": n, "sha256": hex}``"""
    metric_name: str | None = None
    """Name of ``metric``; None without a metric and in checkpoints of older runs."""


def write_manifest(folder: Path, *, run: str, step: int, metric: float | None, metric_name: str | None = None) -> None:
    """Write a manifest of all files below ``folder``, after computing their hashes."""
    files = {name: _size_and_hash(folder / name) for name in sorted(_files_below(folder))}
    (folder / MANIFEST).write_text(_manifest_text(Manifest(run, step, metric, files, metric_name)), encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``; other files are not read.

    Raises:
        CheckpointError: The manifest is missing or damaged, or has another format.
    """
    try:
        if path.is_symlink() or stat.S_ISLNK((path / MANIFEST).lstat().st_mode):
            raise _damaged_error(path, "it is a symbolic link")
        if (path / MANIFEST).stat().st_size > MAX_MANIFEST_BYTES:
            raise _damaged_error(path, f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
        text = (path / MANIFEST).read_text(encoding="utf-8")
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {document['format']}; this version reads {FORMAT}",
                fix="use the version of streamtune that wrote it",
            )
        manifest = Manifest(
            document["run"],
            int(document["step"]),
            document["metric"],
            document["files"],
            document.get("metric_name"),
        )
        if (
            _manifest_text(manifest) != text
            or not isinstance(document["run"], str)
            or not isinstance(document["files"], dict)
        ):
            raise _damaged_error(path, f"{MANIFEST} was changed")
        is_number, is_text = isinstance(manifest.metric, float), isinstance(manifest.metric_name, str)
        if (manifest.metric is not None and not is_number) or (manifest.metric_name is not None and not is_text):
            raise _damaged_error(path, f"{MANIFEST} was changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint", fix="pass a folder such as runs/NAME/checkpoints/step-000100"
        ) from error
    for name in manifest.files:
        if not _is_safe_relative_path(name):
            raise _damaged_error(path, f"its manifest lists {name!r}, which is not a valid path in a checkpoint")
    return manifest


def verify_files(path: Path, manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: A file differs, is missing or was added; the message names the first such file.
    """
    for name in REQUIRED_FILES:
        if name not in manifest.files:
            raise _damaged_error(path, f"its manifest does not list {name}")
    try:
        existing = set(_files_below(path))
        for name, expected in manifest.files.items():
            if name not in existing:
                raise _damaged_error(path, f"{name} is missing")
            if _size_and_hash(path / name) != expected:
                raise _damaged_error(path, f"{name} was changed")
    except OSError as error:
        raise _damaged_error(path, f"it cannot be read: {error}") from error
    if added := sorted(existing - manifest.files.keys() - {MANIFEST}):
        raise _damaged_error(path, f"{added[0]} is not in its manifest")


def _manifest_text(manifest: Manifest) -> str:
    body = {"format": FORMAT, **asdict(manifest)}
    if manifest.metric_name is None:
        del body["metric_name"]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1, sort_keys=True) + "\n"


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files below ``folder``, with ``/`` as separator.

    Raises:
        CheckpointError: An entry is neither a regular file nor a directory.
    """
    for directory, subfolders, names in os.walk(folder, onerror=_raise_walk_error):
        for name in (*subfolders, *names):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield path.relative_to(folder).as_posix()
            elif not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
                raise _damaged_error(folder, f"{path.relative_to(folder).as_posix()} is {kind}")


def _raise_walk_error(error: OSError) -> None:
    raise error


def _is_safe_relative_path(name: str) -> bool:
    path = PurePosixPath(name)
    safe = not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
    return safe and name not in ("", ".", MANIFEST) and not any(mark in name for mark in ("\\", "\0", ":"))


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _damaged_error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}", fix="use another checkpoint")
