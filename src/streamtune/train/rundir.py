"""The directory of a run, and checks before a run starts or resumes in it.

output_dir/
  run.json        settings and hashes by which a resumed run is compared
  recipe.yaml     recipe with every default filled in
  metrics.jsonl   one line per step
  events.jsonl    events with their times
  samples.jsonl   completed sample prompts
  trackers.json   ids of this run at its experiment trackers
  loss.png
  checkpoints/
  final/          trained model in Hugging Face format
  plan.json       predicted memory and time
  data.json       counts and lengths of the rows
  bad_rows.json   skipped rows
  selected.jsonl  rows selected for each step
  report.html     report of the run, written at the end
  deepspeed.json  DeepSpeed's configuration with every default filled in
  .lock           lock of the process that trains
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamtune.errors import ArgumentError, CheckpointError, RecipeError, did_you_mean
from streamtune.train.checkpoint import Checkpoint, check_identity, newest_checkpoint, open_checkpoint
from streamtune.train.directory_lock import IDENTITY, LOCK, DirectoryLock
from streamtune.train.records import read_records, rotated_paths
from streamtune.train.staging import failed_write_error, fsync_path, write_text_durably
from streamtune.train.world import World

FILES = {
    "base": "the files of the model that training started from",
    "adapter": "the files of the adapters' base model",
    "start": "the files of the adapters that training started from",
    "reference": "the files of the reference model, or the file of a teacher",
    "rewards": "the source files of the reward functions",
}
"""Files that a resumed run reads again, by the key of their fingerprint."""

MEASUREMENT_FILES = {"probe.json", "probe.png", "bench.json", "bench.png"}
"""Files that ``probe-max-len`` and ``bench`` may write into the directory before a run."""


class _PathInRun:
    """Descriptor that returns the path of a file or folder in the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of the files of a run."""

    path: Path

    identity = _PathInRun(IDENTITY)
    """Identity of the run: the recipe keys that determine the result, and a fingerprint of the data."""
    recipe = _PathInRun("recipe.yaml")
    """Path of recipe.yaml: the recipe with every default filled in."""
    deepspeed = _PathInRun("deepspeed.json")
    metrics = _PathInRun("metrics.jsonl")
    events = _PathInRun("events.jsonl")
    samples = _PathInRun("samples.jsonl")
    trackers = _PathInRun("trackers.json")
    loss_plot = _PathInRun("loss.png")
    plan = _PathInRun("plan.json")
    """Path of plan.json: the chosen schedule and its prediction, in the format of ``streamtune plan --json``."""
    data = _PathInRun("data.json")
    bad_rows = _PathInRun("bad_rows.json")
    selected = _PathInRun("selected.jsonl")
    report = _PathInRun("report.html")
    checkpoints = _PathInRun("checkpoints")
    final = _PathInRun("final")

    def read_identity(self) -> dict[str, Any] | None:
        """Return the content of ``run.json``: settings and hashes of the run; None if there is no run.

        Raises:
            ArgumentError: The directory cannot be read, or contains files that do not belong to a run.
        """
        self._check_entry_types()
        # List the folder first: another process may write run.json, and more files after it, in between.
        try:
            entries = {entry.name for entry in self.path.iterdir()}
        except FileNotFoundError:
            entries = set()
        except NotADirectoryError:
            entries = {self.path.name}
        except OSError as error:
            raise ArgumentError(
                f"{self.path} cannot be read: {error.strerror}",
                where="output_dir",
                fix="make it readable and writable (chmod u+rwx), or use another --output-dir",
            ) from error
        if self.identity.is_file():
            try:
                identity: dict[str, Any] = check_identity(
                    json.loads(self.identity.read_text(encoding="utf-8")), required_names=("recipe",)
                )
            except (OSError, ValueError, RecursionError) as error:
                raise ArgumentError(
                    f"{self.identity} cannot be read, so the run is unknown: {error}",
                    where="output_dir",
                    fix="use an empty or new folder (--output-dir); --resume PATH starts from a checkpoint of this run",
                ) from error
            return identity
        # A process killed at the start of a new run leaves its lock and a temporary run.json.
        if entries - {LOCK, f".tmp-{IDENTITY}"} - MEASUREMENT_FILES:
            raise ArgumentError(
                f"{self.path} is not empty and has no run of streamtune",
                where="output_dir",
                fix="use an empty or new folder (--output-dir)",
            )
        return None

    def _check_entry_types(self) -> None:
        """Raise an ArgumentError if a name that a run uses is a symbolic link or has the wrong file type."""
        text_files = [self.identity, self.recipe, self.deepspeed, self.metrics, self.events, self.loss_plot]
        text_files += [self.plan, self.data, self.bad_rows, self.report, self.samples, self.trackers, self.selected]
        text_files += [self.path / LOCK, *rotated_paths(self.path / "completions.jsonl")]
        folders = [self.checkpoints, self.final, self.path / "logs", self.path / "vllm"]
        folders += [self.path / name for name in ("tensorboard", "wandb", "mlflow", "trackio")]
        files = (*text_files, *folders)
        steps = self.checkpoints.iterdir() if self.checkpoints.is_dir() and not self.checkpoints.is_symlink() else ()
        for path in (*files, *(path for path in steps if path.name.startswith("step-"))):
            if path.is_symlink():
                raise ArgumentError(
                    f"{path} is a symbolic link, but a run's files must be in its own directory",
                    where="output_dir",
                    fix="remove the link; output_dir itself may be a link, such as to a larger disk",
                )
        for path, is_right, kind in [
            *((path, path.is_file, "regular file") for path in text_files),
            *((path, path.is_dir, "folder") for path in folders),
        ]:
            if os.path.lexists(path) and not is_right() and os.path.lexists(path):  # again: it may have been removed
                raise ArgumentError(
                    f"{path} must be a {kind}",
                    where="output_dir",
                    fix="move it away, or use another --output-dir",
                )

    def lock(self) -> DirectoryLock:
        """Lock the directory, and return the lock; the directory is created if it does not exist.

        Raises:
            ArgumentError: Another process is training in it, or it contains files that do not belong to a run.
            CheckpointError: The directory cannot be written to.
        """
        self.read_identity()
        return DirectoryLock(self.path)

    @contextmanager
    def claim(
        self,
        identity: Mapping[str, Any],
        recipe_yaml: str,
        deepspeed: Mapping[str, Any] = MappingProxyType({}),
        lock: DirectoryLock | None = None,
        documents: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Context manager that locks the directory and writes the settings of the run into it.

        Args:
            identity: Content of ``run.json``.
            recipe_yaml: Recipe with every default filled in.
            deepspeed: Configuration of DeepSpeed; empty without DeepSpeed.
            lock: Lock that this process already has; None: the directory is locked here.
            documents: Further JSON documents to write, by path.

        Raises:
            ArgumentError: Another process is training in the directory.
            CheckpointError: A file cannot be written.
        """
        texts = {self.identity: json.dumps(identity, indent=1) + "\n", self.recipe: recipe_yaml}
        texts |= {path: json.dumps(document, indent=1) + "\n" for path, document in documents.items()}
        if deepspeed:
            texts[self.deepspeed] = json.dumps(deepspeed, indent=2) + "\n"
        with nullcontext(lock) if lock is not None else self.lock():
            try:
                for path, text in texts.items():
                    write_text_durably(path, text)
            except OSError as error:
                raise self._unwritable_error(error, texts) from error
            yield

    @staticmethod
    def _unwritable_error(error: OSError, texts: Mapping[Path, str]) -> CheckpointError:
        needed = sum(map(len, texts.values()))
        return failed_write_error(error, next(iter(texts)), needed_bytes=needed, intact="existing files are unchanged")

    def fsync_records(self) -> None:
        """Wait until all records of the run are on disk."""
        for path in self.path.glob("[!.]*.jsonl"):
            if path.is_file() and not path.is_symlink():  # anything else was not written by the run
                fsync_path(path)
        fsync_path(self.path)

    def move_aside(self) -> Path:
        """Rename the run directory to the first free ``NAME.old-N``, and return the new path."""
        return self.lock().move_aside()


def find_checkpoint(run: RunDirectory, resume: str, notify: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint to resume from; None to start from the beginning.

    Args:
        run: Directory of the run.
        resume: ``auto`` (the newest undamaged checkpoint of ``run``), ``never``, or the path of a checkpoint.
        notify: Function called with a message about each damaged checkpoint.

    Raises:
        ArgumentError: The path does not exist.
        CheckpointError: The checkpoint is damaged, or all checkpoints of the run are damaged or missing.
    """
    if resume == "never":
        return None
    if resume == "auto":
        found = newest_checkpoint(run.checkpoints, notify)
        if found is None:
            _refuse_lost_checkpoints(run)
        return found
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ArgumentError(
            f"there is no checkpoint {path}",
            where="--resume",
            fix=did_you_mean(resume, ("auto", "never")) or "use auto, never, or runs/NAME/checkpoints/step-000100",
        )
    return open_checkpoint(path.resolve())  # a link to a checkpoint is allowed, a link inside it is not


def _refuse_lost_checkpoints(run: RunDirectory) -> None:
    """Raise a CheckpointError if all checkpoints that the run has saved are missing."""
    saved = [record for record in read_records(run.events) if record.get("event") == "checkpoint"]
    if saved and run.identity.is_file():
        raise CheckpointError(
            f"the run in {run.path} saved checkpoints, the last at step {saved[-1].get('step')}, but "
            f"{run.checkpoints} has none; nothing was changed",
            fix="restore one of them from a copy and start again, or resume from another with --resume PATH; "
            "--resume never moves this run aside and starts a new one",
        )


def check_same_run(
    old_identity: Mapping[str, Any],
    new_identity: Mapping[str, Any],
    *,
    where: Path,
    allowed_keys: Container[str] = (),
    never_allowed_keys: Container[str] = (),
) -> list[str]:
    """Compare the settings and data of a resumed run with its start; return descriptions of allowed differences.

    Args:
        old_identity: Content of ``run.json``: ``{"recipe": {key: value}, "data": hash, "files": {key: hash}}``.
        new_identity: The same for the resumed run; missing parts are not compared.
        where: Path of the run, for the error.
        allowed_keys: Keys that may differ: recipe keys, ``data``, and keys of :data:`FILES`.
        never_allowed_keys: Keys for which the error does not suggest ``--allow-change``.

    Raises:
        RecipeError: Other keys differ; the message names each key with both values.
    """
    objectives = [each.get("recipe", {}).get("objective", "sft") for each in (old_identity, new_identity)]
    if objectives[0] != objectives[1]:
        raise RecipeError(
            f"{where} already has a run of {objectives[0]}, which cannot resume as {objectives[1]}",
            fix="use another folder (--output-dir NEW), or start a new run: --resume never moves the old one aside",
        )
    changes = _describe_changes(old_identity.get("recipe", {}), new_identity.get("recipe", {}))
    if "data" in new_identity and old_identity.get("data") != new_identity["data"]:
        changes["data"] = "the data changed"
    old, new = old_identity.get("files", {}), new_identity.get("files", {})
    changes |= {
        key: f"{what} changed ({key})"
        for key, what in FILES.items()
        if key in old and new.get(key, old[key]) != old[key]
    }
    refused = {key: text for key, text in changes.items() if key not in allowed_keys}
    if refused:
        fix = "undo the change to resume, or start a new run: --output-dir NEW, or --resume never (which moves the "
        fix += "old run aside)"
        if not any(key in never_allowed_keys for key in refused):
            fix += "; to resume with the change, " + " ".join(f"--allow-change {key}" for key in refused)
        raise RecipeError(
            f"{where} already has a run with other settings: {'; '.join(refused.values())}",
            fix=fix,
        )
    return list(changes.values())


def describe_harmless_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe differences that do not prevent a resume: some recipe keys, library versions, number of ranks."""
    parts = [_describe_changes(old[part], new.get(part, {})) for part in ("free", "versions") if part in old]
    parts.append(_describe_changes(*({"world_size": each.get("world_size", 1)} for each in (old, new))))
    return [text for part in parts for text in part.values()]


def _describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{key} was {_short_json(old.get(key))}, is now {_short_json(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    }


def _short_json(value: Any) -> str:
    return json.dumps({k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value)


def check_shared_folder(folder: Path, world: World) -> None:
    """Check that all ranks see the same directory, so that they write their checkpoint files to one place.

    Raises:
        ArgumentError: A rank does not see a file that rank 0 wrote.
        CheckpointError: Rank 0 cannot write to the directory.
    """
    probe = folder / f".probe-{world.run_on_rank_0(lambda: secrets.token_hex(8))}"

    def make_folder_and_probe() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)

    try:
        world.run_on_rank_0(make_folder_and_probe)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error
    try:
        blind_ranks = [rank for rank, sees in enumerate(world.gather_all_ranks(_is_visible(probe))) if not sees]
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)
    if blind_ranks:
        shown_ranks = ", ".join(map(str, blind_ranks[:8])) + (" ..." if len(blind_ranks) > 8 else "")
        raise ArgumentError(
            f"{folder} is not the same directory on all nodes: rank {shown_ranks} cannot see a file that rank 0 wrote",
            where="output_dir",
            fix="use a directory on a file system that all nodes share",
        )


def _is_visible(probe: Path) -> bool:
    try:
        list(probe.parent.iterdir())  # makes a network file system refresh the directory
        return probe.exists()
    except OSError:
        return False
