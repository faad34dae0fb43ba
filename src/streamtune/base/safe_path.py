"""Removal of the working directory from the search paths of code, in this process and its children.

``python -m`` and ``python -c`` put the working directory first on ``sys.path``. An empty entry of ``PYTHONPATH``,
``PATH`` or ``LD_LIBRARY_PATH`` (as in ``:/opt/lib``) also means the working directory. So a ``types.py`` next to a
downloaded recipe would be executed. A directory that ``PYTHONPATH`` names, ``.`` included, is kept.

This module is imported before all others, and imports only modules that Python loads at startup.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

SAFE = "PYTHONSAFEPATH"
LISTS = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables with lists of directories that code is loaded from."""


def safe_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a child process that must not load code from its working directory.

    >>> safe_environment({"PYTHONPATH": ":/opt/mine"})
    {'PYTHONPATH': '/opt/mine', 'PYTHONSAFEPATH': '1'}
    """
    return {**environ, **{name: _without_empty(environ[name]) for name in LISTS if name in environ}, SAFE: "1"}


def remove_working_directory_from_path() -> None:
    """Remove the working directory from ``sys.path`` and from the search paths of child processes.

    The directory stays if ``PYTHONPATH`` or an installed ``.pth`` file names it, or if it contains StreamTune itself.
    """
    try:
        working_directory = os.path.realpath(os.getcwd())  # noqa: PTH109 - pathlib is not loaded yet
    except OSError:  # it was deleted; a later check reports that
        working_directory = ""
    pythonpath = {os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    package_parent = os.path.realpath(f"{__file__}/../../..")
    library = os.path.realpath(f"{os.__file__}/..")
    real = [os.path.realpath(entry) for entry in sys.path]
    added = real.index(library) if library in real else 0  # entries before it are not installed ones
    if working_directory not in {*pythonpath, package_parent}:
        sys.path[:] = [
            entry for place, entry in enumerate(sys.path) if place >= added or real[place] != working_directory
        ]
    os.environ.update(safe_environment())


class SafeChildren:
    """Context manager: child processes started inside it load no code from their working directory."""

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
