"""Write checkpoints, if possible in a worker thread, and delete old checkpoints.

    training thread    copy to the host     step   step   step            wait at the end
    worker                        write, hash, fsync, rename, verify, delete old checkpoints

A save waits for the previous save. Trained weights, buffers and optimizer tensors are copied to the host first. If the
copy would need more than half of the free host memory, the training thread itself writes the checkpoint, 2 GiB at a
time.

With several ranks, each rank writes its part into one staging directory, which all ranks must see. Rank 0 writes the
model, the index of slices and the manifest. An error on one rank is raised on all ranks, after the current step.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from streamtune.engine.memory.host import free_host_bytes
from streamtune.errors import CheckpointError
from streamtune.train.backend import Backend
from streamtune.train.checkpoint import (
    STATE,
    Manifest,
    checkpoint_path,
    list_checkpoints,
    open_checkpoint,
    read_manifest,
    rng_file_stem,
    write_manifest,
)
from streamtune.train.process import RngState
from streamtune.train.slices import Entry, Slice, write_index, write_slices
from streamtune.train.staging import (
    commit_directory,
    failed_write_error,
    free_bytes,
    fsync_path,
    make_directory,
    refuse_symlink,
    remove_directory,
)
from streamtune.train.world import WORLD, World


@dataclass(frozen=True)
class ModelWriter:
    """Writes a model in Hugging Face format.

    Attributes:
        write: Function that writes the model into a folder.
        num_bytes: Approximate size of the written files, in bytes.
        snapshot: Function that copies the trained weights to the host, and returns a function that writes the copy into
            a folder, from any thread. None: the model cannot be copied.
        needs_all_ranks: True if no rank has the whole model. Then all ranks call ``write`` or ``snapshot``, and only
            rank 0 gets the copy.
    """

    write: Callable[[Path], None]
    num_bytes: int
    snapshot: Callable[[], Callable[[Path], None]] | None = None
    needs_all_ranks: bool = False

    def snapshot_writer(self, world: World) -> ModelWriter:
        """Copy the model to the host, and return a writer of the copy for use in another thread. Called by all
        ranks."""
        if self.snapshot is None or not (self.needs_all_ranks or world.is_main):
            return self
        return ModelWriter(self.snapshot(), self.num_bytes)


@dataclass(frozen=True)
class KeepPolicy:
    """Numbers of checkpoints to keep when a new checkpoint is saved."""

    newest: int
    """Number of newest checkpoints to keep; 0 keeps all."""
    best: int = 0
    """Number of checkpoints with the best metric to keep in addition."""
    greater_is_better: bool = False
    metric: str | None = None
    """Name of the metric; checkpoints ranked by another metric count as not ranked. None: names are not compared."""

    def ranks(self, manifest: Manifest) -> bool:
        """Return True if a checkpoint has a value of this policy's metric."""
        is_same = self.metric is None or manifest.metric_name in (None, self.metric)
        return manifest.metric is not None and is_same


def delete_old_checkpoints(folder: Path, keep: KeepPolicy, *, run: str = "") -> list[Path]:
    """Delete the checkpoints that ``keep`` does not keep, and return their paths.

    Directories without a manifest of the run with id ``run`` are never deleted.
    """
    if keep.newest <= 0:
        return []
    manifests = ((path, _read_manifest_of_run(path, run)) for path in list_checkpoints(folder))
    own = [(path, manifest) for path, manifest in manifests if manifest is not None]
    measured = [(manifest.metric, path) for path, manifest in own if keep.ranks(manifest)]
    measured.sort(
        key=lambda found: (found[0] or 0.0) if keep.greater_is_better else -(found[0] or 0.0)
    )  # on a tie the newer is kept
    kept = {path for path, _ in own[-keep.newest :]} | {path for _, path in measured[-keep.best :] if keep.best}
    deleted = [path for path, _ in own if path not in kept]
    for path in deleted:
        remove_directory(path)
    return deleted


def _read_manifest_of_run(path: Path, run: str) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return manifest if manifest.run == run else None


class CheckpointSaver:
    """Context manager that saves checkpoints; on exit it waits for a save in the background.

    Args:
        folder: Folder of the checkpoints.
        writer: Writer of the model.
        keep: Numbers of checkpoints to keep.
        world: Ranks that save; if ``asynchronous``, with their own process group.
        run: Id of the run.
        asynchronous: True to write in a worker thread.
        before_write: Function called before each save, in the writing thread.
    """

    def __init__(
        self,
        folder: Path,
        writer: ModelWriter,
        keep: KeepPolicy,
        *,
        world: World = WORLD,
        run: str = "",
        asynchronous: bool = True,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.writer, self.keep, self.world, self.run = folder, writer, keep, world, run
        self.asynchronous, self.before_write = asynchronous, before_write
        self._worker: threading.Thread | None = None
        self._saved: list[Path] = []
        self._error: BaseException | None = None

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self._join_worker()

    def save(self, backend: Backend, *, state: Mapping[str, Any], rng: RngState, metric: float | None = None) -> None:
        """Save a checkpoint, or start to save it in the background. Called by all ranks.

        Args:
            backend: Backend with the optimizer states.
            state: JSON values, equal on all ranks, including ``step``; must not be changed later.
            rng: This rank's random state before the next step.
            metric: Value by which :class:`KeepPolicy` ranks the checkpoint; None if there is none.

        Raises:
            CheckpointError: This save or the previous one failed on a rank. Earlier checkpoints are intact.
        """
        self.wait_for_save()
        writer, world = self.writer, self.world
        state_bytes = _optimizer_state_bytes(backend)
        needed_bytes = writer.num_bytes + sum(world.gather_all_ranks(state_bytes))
        slices = backend.optimizer_slices()
        is_copied = self.asynchronous and writer.snapshot is not None
        is_copied = is_copied and _copies_fit_in_host_memory(world, state_bytes + writer.num_bytes * world.is_main)
        if is_copied:
            slices = iter([part._replace(values=part.values.detach().to("cpu", copy=True)) for part in slices])
            writer = writer.snapshot_writer(world)
        metric = None if metric is None else float(metric)
        content = CheckpointContent(
            state, rng, slices, backend.has_whole_state, needed_bytes, self.run, metric, self.keep.metric
        )

        def write() -> None:
            path = save_checkpoint(
                self.folder, content, writer, world, before_write=self.before_write, after_commit=self._on_commit
            )
            self._saved.append(path)

        if not is_copied:
            write()
            return
        worker = threading.Thread(target=self._run_and_store_error, args=(write,), name="checkpoint")
        worker.start()
        self._worker = worker  # set after start(): an unstarted thread cannot be joined

    def check_disk_space(self, backend: Backend) -> None:
        """Raise a CheckpointError if a checkpoint does not fit on the disk. Called by all ranks."""
        needed_bytes = self.writer.num_bytes + sum(self.world.gather_all_ranks(_optimizer_state_bytes(backend)))
        explain = _explain_write_errors(self.folder, needed_bytes, list_checkpoints(self.folder))
        self.world.run_on_rank_0(explain(lambda: _check_free_bytes(self.folder, needed_bytes)))

    def _on_commit(self, path: Path) -> None:
        open_checkpoint(path)  # verify it before old ones are deleted
        delete_old_checkpoints(self.folder, self.keep, run=self.run)

    def wait_for_save(self) -> None:
        """Wait for the save in the background, and raise its error if it failed."""
        self._join_worker()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def has_failed(self) -> bool:
        """True if the last save failed."""
        return self._error is not None

    def pop_committed(self) -> list[Path]:
        """Return the paths of the checkpoints completed since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def wait_and_pop_committed(self) -> list[Path]:
        """Wait for the save in the background, raise its error if it failed, and return :meth:`pop_committed`."""
        self.wait_for_save()
        return self.pop_committed()

    def _run_and_store_error(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def _join_worker(self) -> None:
        if self._worker is not None:
            self._worker.join()
            self._worker = None


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint except the model."""

    state: Mapping[str, Any]
    """JSON values for ``state.json``, including ``step``."""
    rng: RngState
    """Random state of this rank before the next step."""
    slices: Iterable[Slice]
    """Optimizer states that this rank writes."""
    has_whole_state: bool
    """True if this rank has all optimizer states as whole tensors."""
    needed_bytes: int
    """Approximate size of the checkpoint in bytes, model included."""
    run: str = ""
    """Id of the run; a run deletes only its own checkpoints."""
    metric: float | None = None
    """Value by which checkpoints are ranked; None if there is none."""
    metric_name: str | None = None
    """Name of the metric."""


def save_checkpoint(
    folder: Path,
    content: CheckpointContent,
    writer: ModelWriter,
    world: World = WORLD,
    *,
    before_write: Callable[[], None] = lambda: None,
    after_commit: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Write the checkpoint ``folder/step-N`` atomically, and return its path. Called by all ranks.

    Args:
        folder: Folder of the checkpoints.
        content: Content of the checkpoint except the model.
        writer: Writer of the model.
        world: Ranks that write.
        before_write: Function that rank 0 calls before anything is written.
        after_commit: Function that rank 0 calls with the path of the complete checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be written. Earlier checkpoints are intact.
    """
    step = int(content.state["step"])
    target = checkpoint_path(folder, step)
    explain = _explain_write_errors(target, content.needed_bytes, list_checkpoints(folder))
    ranks = {} if content.has_whole_state else {"ranks": world.size}

    def begin() -> Path:
        before_write()
        refuse_symlink(folder)
        make_directory(folder)
        _check_free_bytes(folder, content.needed_bytes)
        return staging.enter_context(commit_directory(target))

    def commit() -> None:
        if not content.has_whole_state:
            write_index(staged, all_entries)
        _write_json(staged / STATE, {**content.state, **ranks, "rng": content.rng.json_states})
        # The manifest is written last, so it lists only complete files.
        name = None if content.metric is None else content.metric_name
        write_manifest(staged, run=content.run, step=step, metric=content.metric, metric_name=name)
        staging.pop_all().close()
        after_commit(target)

    with ExitStack() as staging:
        staged = world.run_on_rank_0(explain(begin))
        entries = world.run_on_all_ranks(explain(lambda: _write_rank_state(staged, world, content)))
        all_entries = [entry for rank_entries in world.gather_all_ranks(entries) for entry in rank_entries]
        _write_model(writer, staged / "model", world, explain)
        world.run_on_rank_0(explain(commit))
    return target


def write_final_model(target: Path, writer: ModelWriter, world: World = WORLD) -> None:
    """Write the trained model to ``target`` atomically, replacing an earlier model. Called by all ranks.

    Raises:
        CheckpointError: The model cannot be written.
    """
    explain = _explain_write_errors(target, writer.num_bytes, list_checkpoints(target.parent / "checkpoints"))
    with ExitStack() as staging:
        staged = world.run_on_rank_0(explain(lambda: staging.enter_context(commit_directory(target))))
        _write_model(writer, staged, world, explain)
        world.run_on_rank_0(explain(lambda: staging.pop_all().close()))


def _write_model(writer: ModelWriter, folder: Path, world: World, explain: ContextDecorator) -> None:
    (world.run_on_all_ranks if writer.needs_all_ranks else world.run_on_rank_0)(explain(lambda: writer.write(folder)))


def _write_rank_state(staged: Path, world: World, content: CheckpointContent) -> list[Entry]:
    entries = write_slices(staged, content.slices, world.rank, has_whole_tensors=content.has_whole_state)
    name = rng_file_stem(world.rank)
    save_file(content.rng.tensors, staged / f"{name}.safetensors")
    if world.rank:
        _write_json(staged / f"{name}.json", content.rng.json_states)
    if world.size > 1:  # each rank flushes its own files: on a network file system another machine cannot
        for path in {staged / entry[-1] for entry in entries} | set(staged.glob(f"{name}.*")):
            fsync_path(path)
    return entries


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _optimizer_state_bytes(backend: Backend) -> int:
    return sum(each.values.nbytes for each in backend.optimizer_slices())


def _copies_fit_in_host_memory(world: World, num_bytes: int) -> bool:
    """Return True if the copies of all ranks need at most half of the free memory on every host."""
    host = socket.gethostname()
    needed_bytes = sum(size for other, size in world.gather_all_ranks((host, num_bytes)) if other == host)
    return not world.any_rank(2 * needed_bytes > free_host_bytes())


def _check_free_bytes(folder: Path, needed_bytes: int) -> None:
    if needed_bytes > free_bytes(folder):
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def _explain_write_errors(target: Path, needed_bytes: int, previous_checkpoints: Sequence[Path]) -> Iterator[None]:
    """Context manager that turns an error in writing ``target`` into a CheckpointError."""
    safe = f"{previous_checkpoints[-1]} is intact" if previous_checkpoints else "there is no earlier checkpoint"
    try:
        yield
    except Exception as error:
        # Tokenizers raise plain Exception for I/O errors; any more specific class is a bug of ours.
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        raise failed_write_error(error, target, needed_bytes=needed_bytes, intact=safe) from error
