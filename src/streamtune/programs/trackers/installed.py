"""The packages of the trackers, and whether they are installed. Imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from streamtune.errors import ArgumentError

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
}
"""Name in ``report_to``: the module that is imported, and the package that has it."""


def check_installed(names: Sequence[str]) -> None:
    """Check that the packages of some trackers can be imported.

    Args:
        names: Keys of :data:`PACKAGES`.

    Raises:
        ArgumentError: Some are missing; ``where`` is ``report_to``.
    """
    missing = [name for name in names if not _is_here(PACKAGES[name][0])]
    if missing:
        named = " and ".join(f"'{name}'" for name in missing)
        packages = " ".join(PACKAGES[name][1] for name in missing)
        raise ArgumentError(
            f"report_to names {named}, which {'is' if len(missing) == 1 else 'are'} not installed",
            where="report_to",
            mend=f"pip install 'streamtune[trackers]' (or only: pip install {packages}), or take it out of report_to",
        )


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a module of that name without a spec, such as one set to None
        return False
