"""The directory of a run, and the rules by which a run may use it.

output_dir/
  run.json        identity of the run          recipe.yaml     resolved, replayable
  metrics.jsonl   one line a step              events.jsonl    events with their times
  samples.jsonl   sample prompts completed     trackers.json   ids of this run at its trackers
  loss.png        checkpoints/                 final/          trained model, in Hugging Face format
  plan.json       prediction                   data.json       counts and lengths of the rows
  bad_rows.json   rows left out as faulty      selected.jsonl  rows chosen for each step
  report.html     all of that on a page, written at the end
  deepspeed.json  DeepSpeed's configuration with every default filled in
  .lock           held by the process that trains, see ``hold``
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
from streamtune.train.hold import IDENTITY, LOCK, DirectoryHold
from streamtune.train.records import read_records, rotated
from streamtune.train.staging import fsync_path, write_durably, write_error
from streamtune.train.world import World

FILES = {
    "base": "the files of the model that training started from",
    "adapter": "the files of the base that the model's adapters name",
    "start": "the files of the adapters that training started from",
    "reference": "the files of the reference model, or the file of a teacher",
    "rewards": "the files with the source of the reward functions",
}
"""Files that a run reads again when it resumes, by the key of their fingerprint."""

MEASURED = {"probe.json", "probe.png", "bench.json", "bench.png"}
"""Files that ``probe-max-len`` and ``bench`` write into the directory before there is a run."""


class _Entry:
    """Path of a file or folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of the files of a run."""

    path: Path

    identity = _Entry(IDENTITY)
    """Identity of the run: the part of the recipe that decides the result, and a fingerprint of the data."""
    recipe = _Entry("recipe.yaml")
    """The recipe, with every default filled in."""
    deepspeed = _Entry("deepspeed.json")
    metrics = _Entry("metrics.jsonl")
    events = _Entry("events.jsonl")
    samples = _Entry("samples.jsonl")
    trackers = _Entry("trackers.json")
    loss_plot = _Entry("loss.png")
    plan = _Entry("plan.json")
    """The planner's schedule and its prediction, as ``streamtune plan --json`` prints it."""
    data = _Entry("data.json")
    bad_rows = _Entry("bad_rows.json")
    selected = _Entry("selected.jsonl")
    report = _Entry("report.html")
    checkpoints = _Entry("checkpoints")
    final = _Entry("final")

    def read_identity(self) -> dict[str, Any] | None:
        """Return the identity of the run here, None without a run; ArgumentError if the files are not a run's."""
        self._refuse_others()
        # Listed before it is looked for: another start may write it meanwhile, and several files after it.
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
                fix="make it readable and writable to you (chmod u+rwx), or give another --output-dir",
            ) from error
        if self.identity.is_file():
            try:
                identity: dict[str, Any] = check_identity(
                    json.loads(self.identity.read_text(encoding="utf-8")), needed=("recipe",)
                )
            except (OSError, ValueError, RecursionError) as error:
                raise ArgumentError(
                    f"{self.identity} cannot be read, so nothing says what run this is: {error}",
                    where="output_dir",
                    fix="give an empty or new folder with --output-dir; --resume takes a checkpoint of this one there",
                ) from error
            return identity
        # A process killed while it claimed a new directory leaves its lock and the first file staged.
        if entries - {LOCK, f".tmp-{IDENTITY}"} - MEASURED:
            raise ArgumentError(
                f"{self.path} is not empty, and what is in it is not a run of streamtune",
                where="output_dir",
                fix="give an empty or new folder with --output-dir",
            )
        return None

    def _refuse_others(self) -> None:
        """Refuse links and things of another type under the names that a run writes, moves and deletes.

        A named pipe would wait for its other end, a folder would be replaced, and a link leads out of the directory.
        """
        texts = [self.identity, self.recipe, self.deepspeed, self.metrics, self.events, self.loss_plot]
        texts += [self.plan, self.data, self.bad_rows, self.report, self.samples, self.trackers, self.selected]
        texts += [self.path / LOCK, *rotated(self.path / "completions.jsonl")]
        folders = [self.checkpoints, self.final, self.path / "logs", self.path / "vllm"]
        folders += [self.path / name for name in ("tensorboard", "wandb", "mlflow", "trackio")]
        files = (*texts, *folders)
        steps = self.checkpoints.iterdir() if self.checkpoints.is_dir() and not self.checkpoints.is_symlink() else ()
        for path in (*files, *(path for path in steps if path.name.startswith("step-"))):
            if path.is_symlink():
                raise ArgumentError(
                    f"{path} is a symbolic link; a run keeps its files in its own directory",
                    where="output_dir",
                    fix="remove the link; output_dir itself may be one, to a disk with room",
                )
        for path, is_right, kind in [
            *((path, path.is_file, "regular file") for path in texts),
            *((path, path.is_dir, "folder") for path in folders),
        ]:
            if os.path.lexists(path) and not is_right() and os.path.lexists(path):  # else it was removed meanwhile
                raise ArgumentError(
                    f"{path} is no {kind}, and a run keeps one there",
                    where="output_dir",
                    fix="move it away, or give another --output-dir",
                )

    def hold(self) -> DirectoryHold:
        """Lock the directory, which is made if it does not exist. Files that are not a run's are left as they are.

        Raises:
            ArgumentError: Another process is training in it, or it has files that are not a run's.
            CheckpointError: It cannot be written to.
        """
        self.read_identity()
        return DirectoryHold(self.path)

    @contextmanager
    def claim(
        self,
        identity: Mapping[str, Any],
        recipe_yaml: str,
        deepspeed: Mapping[str, Any] = MappingProxyType({}),
        hold: DirectoryHold | None = None,
        documents: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
    ) -> Iterator[None]:
        """Write the identity and recipe of the run, and keep other processes from training in the directory.

        Args:
            identity: Identity of the run.
            recipe_yaml: The recipe, with every default filled in.
            deepspeed: Configuration of DeepSpeed; empty if it does not train.
            hold: Lock of this process; without it the directory is locked here.
            documents: Further documents to write, by their path: the plan, the data.
        """
        texts = {self.identity: json.dumps(identity, indent=1) + "\n", self.recipe: recipe_yaml}
        texts |= {path: json.dumps(document, indent=1) + "\n" for path, document in documents.items()}
        if deepspeed:
            texts[self.deepspeed] = json.dumps(deepspeed, indent=2) + "\n"
        with nullcontext(hold) if hold is not None else self.hold():
            try:
                for path, text in texts.items():
                    write_durably(path, text)
            except OSError as error:
                raise self._unwritable(error, texts) from error
            yield

    @staticmethod
    def _unwritable(error: OSError, texts: Mapping[Path, str]) -> CheckpointError:
        needed = sum(map(len, texts.values()))
        return write_error(error, next(iter(texts)), needed=needed, safe="what was there before is intact")

    def sync(self) -> None:
        """Wait until every line of the run's records is on disk."""
        for path in self.path.glob("[!.]*.jsonl"):
            if path.is_file() and not path.is_symlink():  # else it is none of the run's
                fsync_path(path)
        fsync_path(self.path)

    def move_aside(self) -> Path:
        """Rename a directory that holds a run to the first free ``NAME.old-N``, and return that path."""
        return self.hold().move_aside()


def find_checkpoint(run: RunDirectory, resume: str, notify: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint to resume; None starts at the beginning.

    Args:
        run: The directory to look in.
        resume: ``auto`` (the newest one of ``run`` that verifies), ``never``, or the path of a checkpoint.
        notify: Called with a message about each damaged checkpoint.
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
            fix=did_you_mean(resume, ("auto", "never")) or "give auto, never, or runs/NAME/checkpoints/step-000100",
        )
    return open_checkpoint(path.resolve())  # a link to a checkpoint is fine, one inside it is not


def _refuse_lost_checkpoints(run: RunDirectory) -> None:
    """Refuse to start anew if a run's checkpoints are gone: its records and model would be overwritten."""
    saved = [record for record in read_records(run.events) if record.get("event") == "checkpoint"]
    if saved and run.identity.is_file():
        raise CheckpointError(
            f"{run.path} holds a run that saved checkpoints, the last at step {saved[-1].get('step')}, and none is in "
            f"{run.checkpoints}; nothing was changed",
            fix="put a copy of one back and start again, or go on from another with --resume PATH; "
            "--resume never moves this run aside and starts anew",
        )


def check_same_run(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    where: Path,
    allow: Container[str] = (),
    fixed: Container[str] = (),
) -> list[str]:
    """Refuse to resume a run under other settings or data than at its start; return the allowed differences.

    Args:
        before: Identity at the start: ``{"recipe": {key: value}, "data": fingerprint, "files": {key: fingerprint}}``.
        now: Identity of this start; parts that it lacks are not compared.
        where: Path of the run, for the message.
        allow: Keys that may differ: of the recipe, ``data``, and of :data:`FILES`.
        fixed: Keys that no flag lets differ, so none is advised.

    Raises:
        RecipeError: They differ; the message names each key with both values.
    """
    objectives = [each.get("recipe", {}).get("objective", "sft") for each in (before, now)]
    if objectives[0] != objectives[1]:
        raise RecipeError(
            f"{where} holds a run of {objectives[0]}, and this is {objectives[1]}: one cannot go on as the other",
            fix="write to another folder (--output-dir NEW), or start anew: --resume never moves the old run aside",
        )
    found = _changes(before.get("recipe", {}), now.get("recipe", {}))
    if "data" in now and before.get("data") != now["data"]:
        found["data"] = "the data is not the same"
    old, new = before.get("files", {}), now.get("files", {})
    found |= {
        key: f"{what} have changed ({key})"
        for key, what in FILES.items()
        if key in old and new.get(key, old[key]) != old[key]
    }
    refused = {key: text for key, text in found.items() if key not in allow}
    if refused:
        fix = "undo the change to go on with it, or start anew: --output-dir NEW, or --resume never (which moves the "
        fix += "old run aside)"
        if not any(key in fixed for key in refused):
            fix += "; to change the run on its way, " + " ".join(f"--allow-change {key}" for key in refused)
        raise RecipeError(
            f"{where} holds a run with other settings: {'; '.join(refused.values())}",
            fix=fix,
        )
    return list(found.values())


def tell_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe other differences from the start of a run: keys that may differ, versions of libraries, ranks."""
    parts = [_changes(before[part], now.get(part, {})) for part in ("free", "versions") if part in before]
    parts.append(_changes(*({"world_size": each.get("world_size", 1)} for each in (before, now))))
    return [text for part in parts for text in part.values()]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{key} was {_short_json(old.get(key))} and is {_short_json(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    }


def _short_json(value: Any) -> str:
    """Return a setting as JSON, a group without its keys of value None."""
    return json.dumps({k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value)


def check_shared_folder(folder: Path, world: World) -> None:
    """Refuse a directory that is not the same for all ranks: their checkpoints would be in pieces."""
    probe = folder / f".probe-{world.main(lambda: secrets.token_hex(8))}"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch(exist_ok=False)

    try:
        world.main(make)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error}") from error
    try:
        blind = [rank for rank, sees in enumerate(world.collect(_sees(probe))) if not sees]
    finally:
        if world.is_main:
            probe.unlink(missing_ok=True)
    if blind:
        named = ", ".join(map(str, blind[:8])) + (" ..." if len(blind) > 8 else "")
        raise ArgumentError(
            f"{folder} is not the same directory on all nodes: rank 0 wrote to it and rank {named} cannot see it",
            where="output_dir",
            fix="give a directory on a file system that all nodes share",
        )


def _sees(probe: Path) -> bool:
    try:
        list(probe.parent.iterdir())  # a network file system looks again at a directory that is listed
        return probe.exists()
    except OSError:
        return False
