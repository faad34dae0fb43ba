"""Breaks one rank of a real run from the middle of a phase; ``sitecustomize`` of the ranks' interpreters imports it.

Environment: ``TRAP_RANK`` and ``TRAP_PHASE`` where, ``TRAP_HOW`` what (``SIGKILL``, ``SIGSTOP`` or ``wait``), and
``TRAP_FILE`` where the moment is written. ``wait`` waits for that file with ``.go`` after its name, for something to be
broken outside meanwhile.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PHASES: dict[str, tuple[str, str, int]] = {
    # module, what is called there, and which call of it
    "loading": ("streamtune.run.build", "make_model", 1),
    "forward": ("streamtune.train.objective", "SupervisedObjective.score", 3),
    "backward": ("streamtune.distributed.pytorch", "DdpBackend.backward", 3),
    "optimizer": ("streamtune.distributed.pytorch", "DdpBackend.step", 3),
    "evaluating": ("streamtune.train.loop", "evaluate", 1),
    "saving": ("streamtune.train.saver", "_write_rank_state", 1),
}
SAVE: dict[str, tuple[str, str, int]] = {
    # within the second save, which is written beside the training
    "before it": ("streamtune.train.saver", "commit_directory", 2),
    "its own part": ("streamtune.train.saver", "_write_rank_state", 2),
    "the index": ("streamtune.train.saver", "write_index", 2),
    "the manifest": ("streamtune.train.saver", "write_manifest", 2),
    "reading it back": ("streamtune.train.saver", "CheckpointSaver._on_commit", 2),
}


class Trap:
    """Finds the module of the phase as the import system does, and wraps the function as soon as it is there."""

    def __init__(self, phase: str, spring: Callable[[], None]) -> None:
        self._module, self._name, self._at = {**PHASES, **SAVE}[phase]
        self._spring = spring

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            run(module)
            self._wrap(module)

        spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, owner: Any) -> None:
        *outer, name = self._name.split(".")
        for each in outer:
            owner = getattr(owner, each)
        real, calls = getattr(owner, name), [0]

        @functools.wraps(real)
        def wrapped(*arguments: Any, **more: Any) -> Any:
            calls[0] += 1
            if calls[0] == self._at:
                self._spring()
            return real(*arguments, **more)

        setattr(owner, name, wrapped)


def spring(how: str, file: Path) -> None:
    """Note the moment, and break this process or wait."""
    told = file.with_suffix(".new")
    told.write_text(repr(time.time()))
    told.rename(file)
    if how != "wait":
        os.kill(os.getpid(), signal.Signals[how])
    while how == "wait" and not file.with_suffix(".go").exists():
        time.sleep(0.02)


if os.environ.get("RANK") == os.environ.get("TRAP_RANK", "none"):
    file = Path(os.environ["TRAP_FILE"])
    sys.meta_path.insert(0, Trap(os.environ["TRAP_PHASE"], functools.partial(spring, os.environ["TRAP_HOW"], file)))  # type: ignore[arg-type]
