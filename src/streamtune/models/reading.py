"""Read the files of a model while another process may write to them: a change is an error, and no signal.

:func:`unchanged` compares size and times of the files before and after, so what was read is of one state of the folder.
:func:`unmapped` has libraries read safetensors into memory. A mapped file that is cut, as ``cp`` over it does, ends the
process with SIGBUS; a file that is read is an error of its own. Only weights that take more than half of the host's
free memory, in all ranks of the host, and pickles stay mapped: a process that ends with SIGBUS prints where it was.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from streamtune.base.result_cache import checksum_of
from streamtune.engine.hf_names import SAFE_OPEN, inside, replace_inside
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.errors import ArgumentError

READ = "pread"
"""The way in which safetensors reads a file without mapping it. Each slice of a tensor reads all of the tensor."""
SETTINGS_BYTES = 1 << 20
SETTLED_SECONDS = 3.0
"""A file that changed so recently may change again without another time."""
FILES = (".json", ".safetensors", ".bin", ".pt", ".pth", ".py")
"""Endings of the files that a model is made of."""
PEFT_READS = "peft.utils.save_and_load", "safe_load_file"

State = tuple[int, int, int, int, str]
"""Size, times and inode of a file, and the checksum of one that changed only just."""


@contextmanager
def unchanged(name_or_path: str | Path, *, where: str = "model_name_or_path") -> Iterator[None]:
    """Refuse a folder whose files are written to while they are read inside, also where they are put back.

    Args:
        name_or_path: The folder of a model or of adapters, whose base is watched as well. Of a name on a hub, whose
            files do not change, nothing is watched.
        where: The key or the argument that names it, for the error.

    Raises:
        ArgumentError: A file was written to, in place of any error that this made.
    """
    folders = [name for name in (str(name_or_path), adapter_base(str(name_or_path))) if name is not None]
    before = _states(folders)

    def check(cause: Exception | None) -> None:
        after = _states(folders, recent={path for path, state in before.items() if state[-1]})
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                raise ArgumentError(
                    f"{path} was written to while it was read",
                    where=where,
                    mend="wait until it is written, and start again",
                ) from cause

    try:
        yield
    except Exception as error:
        check(error)
        raise
    check(None)


def _states(folders: list[str], recent: set[Path] | None = None) -> dict[Path, State]:
    """Return the states of the files in folders.

    Args:
        folders: The folders.
        recent: The files that are read for their checksum; None for those that changed only just.
    """
    found: dict[Path, State] = {}
    for folder in folders:
        with suppress(OSError, ValueError, RuntimeError):  # no folder, which loading it says
            for path in Path(folder).expanduser().iterdir():
                with suppress(OSError):
                    if path.suffix in FILES and stat.S_ISREG((facts := path.stat()).st_mode):
                        changed = max(facts.st_mtime, facts.st_ctime)
                        new = time.time() - changed < SETTLED_SECONDS if recent is None else path in recent
                        content = _checksum(path) if new else ""
                        found[path] = (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, content)
    return found


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return checksum_of(file)


@contextmanager
def unmapped(name_or_path: str | Path) -> Iterator[None]:
    """Have transformers and peft read safetensors without mapping them, if the weights fit into half of free memory.

    Args:
        name_or_path: The folder whose weights are read inside.
    """
    with ExitStack() as stack:
        if _ranks_here() * _weights_bytes(name_or_path) <= usable_host_bytes() // 2:
            opens = inside(SAFE_OPEN)
            stack.callback(replace_inside, SAFE_OPEN, opens)
            replace_inside(SAFE_OPEN, partial(_open, opens))
            with suppress(ImportError):
                module = importlib.import_module(PEFT_READS[0])
                loads = getattr(module, PEFT_READS[1])
                stack.callback(setattr, module, PEFT_READS[1], loads)
                setattr(module, PEFT_READS[1], partial(loads, backend=READ))
        if not faulthandler.is_enabled():
            with suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr has no file descriptor
                faulthandler.enable(all_threads=False)
                stack.callback(faulthandler.disable)
        yield


def _open(opens: Any, filename: Any, framework: str, device: Any = "cpu", *, backend: str = "") -> Any:
    """Open a file of safetensors, as ``safe_open`` does, without mapping it."""
    return opens(filename, framework=framework, device=device, backend=READ)


def _ranks_here() -> int:
    """Return the number of ranks on this machine, which load at once: they share the pages of a mapped file."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(given)) if given.isascii() and given.isdecimal() else 1


def _weights_bytes(name_or_path: str | Path) -> int:
    folders = [name for name in (str(name_or_path), adapter_base(str(name_or_path))) if name is not None]
    total = 0
    for folder in folders:
        with suppress(OSError, ValueError, RuntimeError):
            total += sum(path.stat().st_size for path in Path(folder).expanduser().glob("*.safetensors"))
    return total


def adapter_base(name_or_path: str) -> str | None:
    """Return the folder of the base that adapters at ``name_or_path`` name; None where they name none."""
    try:
        folder = Path(name_or_path).expanduser()
        settings = folder / "adapter_config.json"
        if not settings.is_file() or settings.stat().st_size > SETTINGS_BYTES:
            return None
        found = Path(json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]).expanduser()
        return str(found) if found.is_dir() and found.resolve() != folder.resolve() else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
