"""The files with the source of reward functions, so that a run can see that one has changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from streamtune.rewards.spec import OWN, import_target

__all__ = ["reward_sources"]

PACKAGE = Path(__file__).resolve().parents[1]
INSTALLED = ("site-packages", "dist-packages")


def reward_sources(specs: list[str], directory: Path) -> dict[str, Path]:
    """Return the files that functions of the user's own are written in, and those these import from beside them.

    What is installed is not followed, nor is what a function imports only when it is called, or reads.

    Args:
        specs: What the recipe writes in ``reward_funcs``; built-in functions have no file.
        directory: Where relative paths start and modules may lie.

    Returns:
        Names that do not change where the folder is moved, and where each file is.
    """
    found: dict[str, Path] = {}
    for spec in specs:
        match = OWN.fullmatch(spec.strip())
        if match is None:
            continue
        module = import_target(match["target"], directory)
        file = _file_of(module)
        if file is None:
            continue
        package = sys.modules.get(module.__name__.partition(".")[0])
        top = _file_of(package) if package is not None and "." in module.__name__ else None
        above = directory.resolve()
        root = above if file.is_relative_to(above) else (top or file).parent
        for path in _reached(module, root):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
            found[f"{match['target'].rpartition('/')[2]}: {name}"] = path
    return found


def _reached(module: ModuleType, root: Path) -> Iterator[Path]:
    """Yield the file of a module, and of the modules below ``root`` that its names come from."""
    seen, waiting = set[str](), [module]
    while waiting:
        each = waiting.pop()
        file = _file_of(each)
        if file is None or each.__name__ in seen:
            continue
        seen.add(each.__name__)
        if each is not module and not _is_own(file, root):
            continue
        yield file
        for value in list(vars(each).values()):
            if isinstance(value, ModuleType):
                waiting.append(value)
                continue
            with suppress(Exception):  # an object may answer to a name as it likes
                name = value.__module__
                if isinstance(name, str) and name in sys.modules:
                    waiting.append(sys.modules[name])


def _is_own(file: Path, root: Path) -> bool:
    if not file.is_relative_to(root) or file.is_relative_to(PACKAGE):
        return False
    return not any(part in INSTALLED for part in (*root.parts, *file.relative_to(root).parts))


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) and name.endswith(".py") else None
