"""Write checkpoints, off the training thread where that is safe, and delete the old ones.

    training thread    copy to the host     step   step   step            wait at the end
    worker                        write, hash, fsync, rename, read back, delete old ones

With several ranks each has such a worker, and these talk to each other over a group of their own.

At most one save is in flight. Its copy is what training changes (trained weights, buffers) and the optimizer's tensors,
once; a second save waits for the first. Where that copy would take more than half of the host memory that is free, or
the model cannot be copied, the save is made in the training thread and nothing is copied but shards of 2 GiB.

What goes wrong in the worker is raised at the next boundary between steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from torch import Tensor

from streamtune.errors import CheckpointError
from streamtune.train.checkpoint import (
    ModelWriter,
    checkpoint_path,
    explained,
    open_checkpoint,
    save_checkpoint,
    step_directories,
)
from streamtune.train.manifest import Manifest, read_manifest
from streamtune.train.rng import RngState
from streamtune.train.staging import remove_directory

__all__ = ["CheckpointSaver", "Keep", "rotate"]


@dataclass(frozen=True)
class Keep:
    """The checkpoints that stay."""

    newest: int
    """So many of the newest; 0 keeps all."""
    best: int = 0
    """And so many of those with the best metric."""
    greater_is_better: bool = False


def rotate(folder: Path, keep: Keep, *, run: str = "") -> list[Path]:
    """Delete the checkpoints of ``run`` that need not stay, and return what was deleted.

    A directory without a manifest of this very run is not touched, even if it is named like one.
    """
    if keep.newest <= 0:
        return []
    own = [(path, manifest) for path in step_directories(folder) if (manifest := _manifest_of(path, run)) is not None]
    judged = [(manifest.metric, path) for path, manifest in own if manifest.metric is not None]
    judged.sort(key=lambda found: found[0] if keep.greater_is_better else -found[0])  # of equals the newer stays
    stay = {path for path, _ in own[-keep.newest :]} | {path for _, path in judged[-keep.best :] if keep.best}
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
    """Saves the checkpoints of a run. Enter it around the loop: leaving waits for what is in flight.

    Args:
        folder: Where the checkpoints go.
        writer: Writes the model.
        keep: The checkpoints that stay when a new one is verified.
        run: Which run this is.
        asynchronous: Write off the training thread.
        before: Called in the writing thread before anything is committed: writes all else that must be on disk by then.
    """

    def __init__(
        self,
        folder: Path,
        writer: ModelWriter,
        keep: Keep,
        *,
        run: str = "",
        asynchronous: bool = True,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.writer, self.keep, self.run = folder, writer, keep, run
        self.asynchronous, self.before = asynchronous, before
        self._worker: threading.Thread | None = None
        self._saved: list[Path] = []
        self._error: BaseException | None = None

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._join()

    def save(
        self,
        *,
        state: Mapping[str, Any],
        rng: RngState,
        optimizer_tensors: Mapping[str, Tensor],
        metric: float | None = None,
    ) -> None:
        """Save the run as it is now; returns when training may change it.

        Args:
            state: JSON values, ``step`` among them; none of them may change later.
            rng: The random state the next step starts from.
            optimizer_tensors: By name.
            metric: See :class:`Keep`.

        Raises:
            CheckpointError: This save, or the one before, failed. Earlier checkpoints are as they were.
        """
        self.wait_for_last()
        needed = self.writer.num_bytes + sum(tensor.nbytes for tensor in optimizer_tensors.values())
        writer = self.writer
        copied = self.asynchronous and writer.snapshot is not None and 2 * needed < psutil.virtual_memory().available
        if copied:
            assert writer.snapshot is not None
            writer = ModelWriter(writer.snapshot(), writer.num_bytes)
            optimizer_tensors = {name: x.detach().to("cpu", copy=True) for name, x in optimizer_tensors.items()}

        def write() -> None:
            with explained(checkpoint_path(self.folder, int(state["step"])), needed, step_directories(self.folder)):
                self.before()
                saved = save_checkpoint(
                    self.folder,
                    state=state,
                    rng=rng,
                    optimizer_tensors=optimizer_tensors,
                    writer=writer,
                    run=self.run,
                    metric=None if metric is None else float(metric),
                )
                self.committed(saved.path)

        self.begin(write, off_thread=copied)

    def begin(self, write: Callable[[], None], *, off_thread: bool) -> None:
        """Call ``write``: here, or in the worker if ``off_thread``. The last save is over by now."""
        if not off_thread:
            write()
            return
        worker = threading.Thread(target=self._guarded, args=(write,), name="checkpoint")
        worker.start()
        self._worker = worker  # only one that has started can be waited for

    def wait_for_last(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: It failed.
        """
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def committed(self, path: Path) -> None:
        """Record a checkpoint that was committed: read it back, then delete those that need not stay."""
        open_checkpoint(path)  # only now is there one more than before
        rotate(self.folder, self.keep, run=self.run)
        self._saved.append(path)

    @property
    def failed(self) -> bool:
        """True if the last save failed; :meth:`wait` raises its error."""
        return self._error is not None

    def finished(self) -> list[Path]:
        """Return the checkpoints that were committed since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> list[Path]:
        """Wait for the save in flight, then return the same as :meth:`finished`.

        Raises:
            CheckpointError: It failed.
        """
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
