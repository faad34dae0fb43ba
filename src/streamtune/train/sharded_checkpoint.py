"""A checkpoint of several ranks: each writes what it holds, all of it or nothing is committed.

    checkpoints/step-000100/
      model/                               as of one device: gathered a parameter at a time, written by rank 0
      optimizer-*.safetensors, slices.json the optimizer's state, see ``slices``
      rng.safetensors, state.json          of rank 0, and what all have in common
      rng-r00003.safetensors, .json        the random state of rank 3
      manifest.json                        over all files, written last, by rank 0

All ranks write into one staged directory, which they must all see (:func:`check_shared_folder`). An error on
any of them is raised on all, with its message, and the directory is discarded.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file

from streamtune.errors import ArgumentError, CheckpointError
from streamtune.train.backend import Backend
from streamtune.train.checkpoint import (
    STATE,
    Checkpoint,
    ModelWriter,
    checkpoint_path,
    explained,
    step_directories,
    write_final,
)
from streamtune.train.manifest import write_manifest
from streamtune.train.rng import RngState
from streamtune.train.saver import CheckpointSaver
from streamtune.train.slices import Slice, write_index, write_slices
from streamtune.train.staging import commit_directory, free_bytes, fsync_path, make_directory, refuse_link
from streamtune.train.world import World

__all__ = ["check_shared_folder", "ranks_of", "rng_of_rank", "save_sharded", "write_final_together"]


def save_sharded(
    saver: CheckpointSaver,
    *,
    world: World,
    backend: Backend,
    state: Mapping[str, Any],
    rng: RngState,
    metric: float | None,
) -> None:
    """Write ``step-N`` and commit it at once. Called by all ranks; when it returns training may go on.

    Where there is room for a copy on every host each rank writes that from its worker, and else now.

    Args:
        saver: Where to, of which run, and what is kept.
        world: The ranks; where ``saver`` is asynchronous, over a group that nothing else uses.
        backend: Whose state it is.
        state: JSON values, the same on every rank; ``step`` among them.
        rng: This rank's random state, which the next step starts from.
        metric: See :class:`streamtune.train.saver.Keep`.

    Raises:
        CheckpointError: It cannot be written, by this rank or another, or the one before could not. Earlier
            checkpoints are as they were.
    """
    saver.wait_for_last()
    folder, writer, step = saver.folder, saver.writer, int(state["step"])
    target, previous = checkpoint_path(folder, step), step_directories(folder)
    slices: Iterable[Slice] = map(Slice._make, backend.slices())
    held = sum(values.nbytes for *_, values in backend.slices())
    needed = writer.num_bytes + sum(world.collect(held))
    copied = saver.asynchronous and writer.snapshot is not None
    copied = copied and _has_room(world, held + writer.num_bytes * world.is_main)
    if copied:
        slices = [found._replace(values=found.values.detach().to("cpu", copy=True)) for found in slices]
        writer = _copy_model(writer, world)

    def told(work: Callable[[], Any]) -> Any:
        with explained(target, needed, previous):
            return work()

    def write() -> None:
        def begin() -> Path:
            saver.before()
            refuse_link(folder)
            make_directory(folder)
            if needed > free_bytes(folder):
                raise OSError(errno.ENOSPC, "No space left on device")
            return staging.enter_context(commit_directory(target))

        def commit() -> None:
            write_index(staged, every)
            _write_json(staged / STATE, {**state, "ranks": world.size, "rng": rng.plain})
            write_manifest(staged, run=saver.run, step=step, metric=None if metric is None else float(metric))
            staging.pop_all().close()
            saver.committed(target)

        with ExitStack() as staging:
            staged = world.main(lambda: told(begin))
            entries = world.together(lambda: told(lambda: _write_own(staged, world.rank, slices, rng)))
            every = [entry for found in world.collect(entries) for entry in found]
            _write_model(writer, staged / "model", world, told)
            world.main(lambda: told(commit))

    saver.begin(write, off_thread=copied)


def _has_room(world: World, size: int) -> bool:
    """Return True if on every host the copies of its ranks take less than half of the free memory.

    ``size`` is the bytes of this rank's copy.
    """
    host = socket.gethostname()
    needed = sum(size for other, size in world.collect((host, size)) if other == host)
    return not world.any(2 * needed > psutil.virtual_memory().available)


def _copy_model(writer: ModelWriter, world: World) -> ModelWriter:
    """Return a writer of the model as it is now, for any thread of rank 0."""
    if writer.snapshot is None or not (writer.together or world.is_main):
        return writer
    return ModelWriter(writer.snapshot(), writer.num_bytes)


def _write_model(writer: ModelWriter, folder: Path, world: World, told: Callable[[Callable[[], Any]], Any]) -> None:
    """Write the model: by rank 0 where it has all of it, by all ranks where none has."""
    if writer.together:
        world.together(lambda: told(lambda: writer.write(folder)))
    else:
        world.main(lambda: told(lambda: writer.write(folder)))


def write_final_together(target: Path, writer: ModelWriter, world: World) -> None:
    """Write the trained model to ``target``, whole or not at all. Called by all ranks.

    Raises:
        CheckpointError: It cannot be written.
    """
    if not writer.together:
        world.main(lambda: write_final(target, writer))
        return

    def told(work: Callable[[], Any]) -> Any:
        with explained(target, writer.num_bytes, step_directories(target.parent / "checkpoints")):
            return work()

    with ExitStack() as staging:
        staged = world.main(lambda: told(lambda: staging.enter_context(commit_directory(target))))
        _write_model(writer, staged, world, told)
        world.main(lambda: told(lambda: staging.pop_all().close()))


def _write_own(staged: Path, rank: int, slices: Iterable[Slice], rng: RngState) -> list[Any]:
    """Write the state that this rank holds to disk, and return its entries of the index."""
    entries = write_slices(staged, slices, rank)
    name = f"rng-r{rank:05d}" if rank else "rng"
    save_file(rng.tensors, staged / f"{name}.safetensors")
    if rank:
        _write_json(staged / f"{name}.json", rng.plain)
    # Its own files: on a network file system another machine has nothing to flush of them.
    for path in {staged / entry[-1] for entry in entries} | set(staged.glob(f"{name}.*")):
        fsync_path(path)
    return entries


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def ranks_of(checkpoint: Checkpoint) -> int:
    """Return the number of ranks that wrote it."""
    return int(checkpoint.state.get("ranks", 1))


def rng_of_rank(checkpoint: Checkpoint, rank: int) -> RngState:
    """Return the random state of one of the ranks that wrote it."""
    if rank == 0:
        return checkpoint.rng()
    path = checkpoint.path / f"rng-r{rank:05d}.safetensors"
    return RngState(load_file(path), json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))


def check_shared_folder(folder: Path, world: World) -> None:
    """Refuse a directory that is not one and the same for all ranks: their checkpoints would be in pieces.

    Raises:
        ArgumentError: Some ranks see another directory of this name, or none.
    """
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
            mend="give a directory on a file system that all nodes share",
        )


def _sees(probe: Path) -> bool:
    try:
        list(probe.parent.iterdir())  # a network file system looks again at a directory that is listed
        return probe.exists()
    except OSError:
        return False
