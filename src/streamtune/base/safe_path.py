"""The working directory is left out of the paths that code is loaded from, here and in processes started from here.

``python -m`` and ``python -c`` put the working directory first on the path of modules. An empty entry of
``PYTHONPATH``, ``PATH`` or ``LD_LIBRARY_PATH`` (as ``:/opt/lib`` has one) means the working directory too. So a
``types.py`` beside a recipe from elsewhere would run. A directory that ``PYTHONPATH`` names, ``.`` included, is kept.

This module is imported before every other, and imports only what Python has loaded at its start.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

SAFE = "PYTHONSAFEPATH"
LISTS = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that list directories which code is loaded from."""


def safe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment for a process that loads nothing from its working directory.

    >>> safe_environment({"PYTHONPATH": ":/opt/mine"})
    {'PYTHONPATH': '/opt/mine', 'PYTHONSAFEPATH': '1'}
    """
    return {**environ, **{name: _without_empty(environ[name]) for name in LISTS if name in environ}, SAFE: "1"}


def leave_out_working_directory() -> None:
    """Remove the working directory from the module path of this process and of its children.

    It stays where ``PYTHONPATH`` or an installed ``.pth`` file names it, and where StreamTune itself is in it.
    """
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 - pathlib is not loaded yet
    except OSError:  # it was deleted; a later check says so
        here = ""
    named = {os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    home = os.path.realpath(f"{__file__}/../../..")
    library = os.path.realpath(f"{os.__file__}/..")
    real = [os.path.realpath(entry) for entry in sys.path]
    added = real.index(library) if library in real else 0  # what stands before it was not installed
    if here not in {*named, home}:
        sys.path[:] = [entry for place, entry in enumerate(sys.path) if place >= added or real[place] != here]
    os.environ.update(safe_environment())


class SafeChildren:
    """Context in which started processes get a safe environment, without changing the environment of this process."""

    def __enter__(self) -> None:
        changed = {name: value for name, value in safe_environment().items() if os.environ.get(name) != value}
        self._before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _without_empty(paths: str) -> str:
    return os.pathsep.join(entry for entry in paths.split(os.pathsep) if entry)
