"""Versions of installed libraries, and settings of their imports.

No library is imported here. Call :func:`quiet_imports` and :func:`hide_quantisers` before importing torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from streamtune.errors import UnsupportedModelError, VersionError

TESTED = {"transformers": ("5.17", "5.24"), "torch": ("2.11", "2.14")}
"""Oldest and newest minor version with which the tests pass. ``pyproject.toml`` has the same bounds; a newer version is
tried, and reported as untested."""


def installed_version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def untested_versions_note() -> str:
    """Return a note that names libraries newer than the newest tested version; empty if there are none."""
    newer = _newer_than_tested()
    return f"not tested with {' and '.join(map(_describe_version, newer))}" if newer else ""


def pip_install_command() -> str:
    """Return the pip command that replaces libraries newer than the newest tested version."""
    return " ".join(
        ["pip install", *(f"'{name}<{_next_minor_version(TESTED[name][1])}'" for name in _newer_than_tested())]
    )


def missing_name_error(package: str, missing_name: str) -> VersionError:
    """Return an error for a name that the installed ``package`` lacks; its fix installs a tested version."""
    oldest, newest = TESTED[package]
    version = installed_version(package)
    older = bool(version) and _minor_version(version) < _minor_version(oldest)
    return VersionError(
        f"{package} {version} has no {missing_name}, which StreamTune needs",
        where=f"{package} {version}; tested: {oldest} to {newest}",
        fix=f"pip install '{package}>={oldest}'" if older else f"pip install '{package}<{_next_minor_version(newest)}'",
    )


@contextmanager
def name_untested_as_cause() -> Iterator[None]:
    """Context manager that adds a note to an ``UnsupportedModelError`` if a library is newer than its tested
    versions."""
    try:
        yield
    except UnsupportedModelError as error:
        if (text := untested_versions_note()) and text not in error.what:
            error.what = f"{error.what}; {text}, which is the likely cause"
            error.fix = "; ".join(filter(None, [pip_install_command(), error.fix and f"or {error.fix}"]))
            error.args = (error.what,)
        raise


def _newer_than_tested() -> list[str]:
    return [
        name for name, (_, newest) in TESTED.items() if _minor_version(installed_version(name)) > _minor_version(newest)
    ]


def _describe_version(name: str) -> str:
    oldest, newest = TESTED[name]
    return f"{name} {installed_version(name)} (tested: {oldest} to {newest})"


def _minor_version(version: str) -> tuple[int, ...]:
    parts = [int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]]
    return (*parts, *[0] * (2 - len(parts)))


def _next_minor_version(newest: str) -> str:
    major, minor = _minor_version(newest)
    return f"{major}.{minor + 1}"


# --- imports ----------------------------------------------------------------------------------------------------------

QUANTISERS = ("torchao", "bitsandbytes")
LOGGERS = (*QUANTISERS, "torch.utils._pytree")


def quiet_imports() -> None:
    """Set the log level of bitsandbytes, torchao and ``torch.utils._pytree`` to ERROR."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def imports_are_quiet() -> bool:
    return logging.getLogger(LOGGERS[0]).level == logging.ERROR  # torch resets the levels of its own loggers


_own = False


def mark_command_process() -> None:
    """Record that this process runs one command of the command line and then ends."""
    global _own
    _own = True


def is_command_process() -> bool:
    return _own


def hide_quantisers() -> None:
    """Make later imports of bitsandbytes and torchao fail, as if neither were installed.

    Importing them takes a quarter of the import time of peft and transformers. Both remember that the import failed, so
    call this only in a process that quantises nothing.
    """
    for name in QUANTISERS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as documented, None marks a missing module
