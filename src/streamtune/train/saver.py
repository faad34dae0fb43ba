"""Write checkpoints, off the training thread where that is safe, and delete the old ones.

    training thread    copy to the host     step   step   step            wait at the end
    worker                        write, hash, fsync, rename, read back, delete old ones

At most one save is in flight; a second save waits for the first. Its copy has what training changes (trained weights,
buffers) and the optimizer's tensors. If that copy would take more than half of the free host memory, or the model
cannot be copied, the save runs in the training thread and copies only shards of 2 GiB.

With several ranks each writes what it holds, from a worker of its own, into one staged directory that all must see; the
workers have a process group of their own. Rank 0 writes the model, the index of the parts and the manifest. An error on
any rank is raised on all, with its message, and the directory is discarded.

Errors of the worker are raised at the next boundary between steps.
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

import psutil
from safetensors import SafetensorError
from safetensors.torch import save_file

from streamtune.errors import CheckpointError
from streamtune.train.backend import Backend
from streamtune.train.checkpoint import (
    STATE,
    Manifest,
    checkpoint_path,
    open_checkpoint,
    read_manifest,
    rng_name,
    step_directories,
    write_manifest,
)
from streamtune.train.process import RngState
from streamtune.train.slices import Entry, Slice, write_index, write_slices
from streamtune.train.staging import (
    commit_directory,
    free_bytes,
    fsync_path,
    make_directory,
    refuse_link,
    remove_directory,
    write_error,
)
from streamtune.train.world import WORLD, World


@dataclass(frozen=True)
class ModelWriter:
    """A way to write a model in Hugging Face format, and about how many bytes that takes."""

    write: Callable[[Path], None]
    num_bytes: int
    snapshot: Callable[[], Callable[[Path], None]] | None = None
    """Copies to the host what training changes, and returns a function that writes the copy from any thread. None: the
    model cannot be copied, and is written as it stands.
    """
    together: bool = False
    """True if no rank has the whole model: all of them call ``write`` or ``snapshot`` then, and fail together or not at
    all. Rank 0 has the snapshot, and writes it alone.
    """

    def copied(self, world: World) -> ModelWriter:
        """Return a writer of the model as it is now, for any thread of rank 0. Called by all ranks."""
        if self.snapshot is None or not (self.together or world.is_main):
            return self
        return ModelWriter(self.snapshot(), self.num_bytes)


@dataclass(frozen=True)
class Keep:
    newest: int
    """Number of newest checkpoints that stay; 0 keeps all."""
    best: int = 0
    """Number of checkpoints with the best metric that stay besides."""
    greater_is_better: bool = False


def rotate(folder: Path, keep: Keep, *, run: str = "") -> list[Path]:
    """Delete the checkpoints of ``run`` that need not stay, and return what was deleted.

    A directory without a manifest of this very run is not touched, even if it is named like one.
    """
    if keep.newest <= 0:
        return []
    own = [(path, manifest) for path in step_directories(folder) if (manifest := _manifest_of(path, run)) is not None]
    measured = [(manifest.metric, path) for path, manifest in own if manifest.metric is not None]
    measured.sort(key=lambda found: found[0] if keep.greater_is_better else -found[0])  # of equals the newer stays
    stay = {path for path, _ in own[-keep.newest :]} | {path for _, path in measured[-keep.best :] if keep.best}
    surplus = [path for path, _ in own if path not in stay]
    for path in surplus:
        remove_directory(path)
    return surplus


def _manifest_of(path: Path, run: str) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None
    return manifest if manifest.run == run else None


class CheckpointSaver:
    """Saves the checkpoints of a run. Enter it around the loop: leaving waits for the save in flight.

    Args:
        folder: Folder of the checkpoints.
        writer: Writes the model.
        keep: The checkpoints that stay when a new one is verified.
        world: The ranks; if ``asynchronous``, over a group that nothing else uses.
        run: Id of the run.
        asynchronous: Write off the training thread.
        before: Called in the writing thread before anything is committed: writes all else that must be on disk by then.
    """

    def __init__(
        self,
        folder: Path,
        writer: ModelWriter,
        keep: Keep,
        *,
        world: World = WORLD,
        run: str = "",
        asynchronous: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.writer, self.keep, self.world, self.run = folder, writer, keep, world, run
        self.asynchronous, self.before = asynchronous, before
        self._worker: threading.Thread | None = None
        self._saved: list[Path] = []
        self._error: BaseException | None = None

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def save(self, backend: Backend, *, state: Mapping[str, Any], rng: RngState, metric: float | None = None) -> None:
        """Save the run as it is now; returns when training may change it. Called by all ranks.

        Args:
            backend: Backend with the optimizer's state.
            state: JSON values, the same on every rank, ``step`` among them; not changed later.
            rng: This rank's random state, which the next step starts from.
            metric: Value that ranks the checkpoint, see :class:`Keep`.

        Raises:
            CheckpointError: This save failed, on any rank, or the one before did. Earlier checkpoints are intact.
        """
        self.wait_for_last()
        writer, world = self.writer, self.world
        held = _size_of(backend)
        needed = writer.num_bytes + sum(world.collect(held))
        slices = backend.slices()
        copied = self.asynchronous and writer.snapshot is not None
        copied = copied and _has_room(world, held + writer.num_bytes * world.is_main)
        if copied:
            slices = iter([each._replace(values=each.values.detach().to("cpu", copy=True)) for each in slices])
            writer = writer.copied(world)
        content = Content(
            state, rng, slices, backend.whole, needed, self.run, None if metric is None else float(metric)
        )

        def write() -> None:
            path = save_checkpoint(self.folder, content, writer, world, before=self.before, after=self._committed)
            self._saved.append(path)

        if not copied:
            write()
            return
        worker = threading.Thread(target=self._guarded, args=(write,), name="checkpoint")
        worker.start()
        self._worker = worker  # only one that has started can be waited for

    def check_room(self, backend: Backend) -> None:
        """Raise a CheckpointError unless there is room for a checkpoint. Called by all ranks."""
        needed = self.writer.num_bytes + sum(self.world.collect(_size_of(backend)))
        explained = _explained(self.folder, needed, step_directories(self.folder))
        self.world.main(explained(lambda: _refuse_if_full(self.folder, needed)))

    def _committed(self, path: Path) -> None:
        open_checkpoint(path)  # only now is there one more than before
        rotate(self.folder, self.keep, run=self.run)

    def wait_for_last(self) -> None:
        """Wait for the save in flight, and raise its error."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def failed(self) -> bool:
        """True if the last save failed; :meth:`wait` raises its error."""
        return self._error is not None

    def finished(self) -> list[Path]:
        """Return the checkpoints that were committed since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> list[Path]:
        """Wait for the save in flight, as :meth:`wait_for_last`; then return the same as :meth:`finished`."""
        self.wait_for_last()
        return self.finished()

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # raised again in the training thread
            self._error = error

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()
            self._worker = None


@dataclass(frozen=True)
class Content:
    """The content of a checkpoint besides the model."""

    state: Mapping[str, Any]
    """JSON values; ``step`` among them."""
    rng: RngState
    """Random state of this rank, which the next step starts from."""
    slices: Iterable[Slice]
    """The optimizer's state that this rank holds; copied to the host in shards."""
    whole: bool
    """True if the slices are whole tensors, and this rank has all of them."""
    needed: int
    """About how many bytes the checkpoint takes, model included."""
    run: str = ""
    """Id of the run, whose own checkpoints alone are deleted by it."""
    metric: float | None = None
    """Value that ranks the checkpoint, where the best ones are kept."""


def save_checkpoint(
    folder: Path,
    content: Content,
    writer: ModelWriter,
    world: World = WORLD,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[Path], None] = lambda path: None,
) -> Path:
    """Write ``folder/step-N``, commit it at once, and return its path. Called by all ranks.

    Rank 0 calls ``before`` before anything is written, and ``after`` with the path once it is committed.

    Raises:
        CheckpointError: It cannot be written. Earlier checkpoints are intact.
    """
    step = int(content.state["step"])
    target = checkpoint_path(folder, step)
    explained = _explained(target, content.needed, step_directories(folder))
    ranks = {} if content.whole else {"ranks": world.size}

    def begin() -> Path:
        before()
        refuse_link(folder)
        make_directory(folder)
        _refuse_if_full(folder, content.needed)
        return staging.enter_context(commit_directory(target))

    def commit() -> None:
        if not content.whole:
            write_index(staged, every)
        _write_json(staged / STATE, {**content.state, **ranks, "rng": content.rng.plain})
        # Last: a directory with a manifest has everything the manifest lists.
        write_manifest(staged, run=content.run, step=step, metric=content.metric)
        staging.pop_all().close()
        after(target)

    with ExitStack() as staging:
        staged = world.main(explained(begin))
        entries = world.together(explained(lambda: _write_own(staged, world, content)))
        every = [entry for found in world.collect(entries) for entry in found]
        _write_model(writer, staged / "model", world, explained)
        world.main(explained(commit))
    return target


def write_final(target: Path, writer: ModelWriter, world: World = WORLD) -> None:
    """Write the trained model to ``target``, whole or not at all, replacing an earlier one. Called by all ranks."""
    explained = _explained(target, writer.num_bytes, step_directories(target.parent / "checkpoints"))
    with ExitStack() as staging:
        staged = world.main(explained(lambda: staging.enter_context(commit_directory(target))))
        _write_model(writer, staged, world, explained)
        world.main(explained(lambda: staging.pop_all().close()))


def _write_model(writer: ModelWriter, folder: Path, world: World, explained: ContextDecorator) -> None:
    """Write the model: by rank 0 if it has all of it, else by all ranks."""
    (world.together if writer.together else world.main)(explained(lambda: writer.write(folder)))


def _write_own(staged: Path, world: World, content: Content) -> list[Entry]:
    """Write to disk the state that this rank holds; return its entries of the index."""
    entries = write_slices(staged, content.slices, world.rank, whole=content.whole)
    name = rng_name(world.rank)
    save_file(content.rng.tensors, staged / f"{name}.safetensors")
    if world.rank:
        _write_json(staged / f"{name}.json", content.rng.plain)
    if world.size > 1:  # its own files: on a network file system another machine has nothing to flush of them
        for path in {staged / entry[-1] for entry in entries} | set(staged.glob(f"{name}.*")):
            fsync_path(path)
    return entries


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _size_of(backend: Backend) -> int:
    """Return how many bytes of optimizer state this rank writes."""
    return sum(each.values.nbytes for each in backend.slices())


def _has_room(world: World, size: int) -> bool:
    """Return True if on every host the copies (``size`` bytes on this rank) take less than half of the free memory."""
    host = socket.gethostname()
    needed = sum(size for other, size in world.collect((host, size)) if other == host)
    return not world.any(2 * needed > psutil.virtual_memory().available)


def _refuse_if_full(folder: Path, needed: int) -> None:
    if needed > free_bytes(folder):
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def _explained(target: Path, needed: int, previous: Sequence[Path]) -> Iterator[None]:
    """Turn errors while ``target`` of ``needed`` bytes is written into a message; the checkpoints ``previous`` stay."""
    safe = f"{previous[-1]} is intact" if previous else "there was no checkpoint before this one"
    try:
        yield
    except Exception as error:
        # Tokenizers raise Exception itself where the system fails them; anything more specific is a mistake of ours.
        if not isinstance(error, (OSError, SafetensorError)) and type(error) is not Exception:
            raise
        raise write_error(error, target, needed=needed, safe=safe) from error
