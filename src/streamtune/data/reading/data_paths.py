"""Places of data: local files, addresses that ``fsspec`` knows (``s3://``, ``hf://``), and datasets on the hub."""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from streamtune.base.privacy import is_offline
from streamtune.data.reading.cells import without_nulls
from streamtune.data.reading.files import DataFile, format_of, local_file
from streamtune.data.reading.folders import Chosen, choose_files
from streamtune.data.reading.readers import READERS, Row, one_line
from streamtune.errors import DataError, did_you_mean

Found = tuple[list[DataFile], Chosen | None]
"""Files, and the choice that was made in a folder."""

MOST_LISTED = 1_000_000
"""Most files of a folder: more are a mistake, such as the root of a disk."""


def is_address(path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def local_files(path: str, *, split: str, config: str | None, where: str) -> Found | None:
    """Return the files that a path or a pattern names; None if it can only be a dataset on the hub.

    Raises:
        DataError: There is no such file, folder or split.
        OSError: The system refuses to look at the path.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        names = list(_walk(local, path, where))
        chosen = choose_files(
            names, lambda name: _read(local_file(local / name, f"{path}/{name}")),
            split=split, config=config, shown=path, where=where,
        )  # fmt: skip
        return [local_file(local / name, str(local / name)) for name in chosen.names], chosen
    if os.path.lexists(local):  # a broken link and a pipe too: opening says what they are
        files = [local_file(local, path)]
    elif re.search(r"[*?\[]", path):
        files = [local_file(file, str(file)) for file in sorted(_glob(local)) if not file.is_dir()]
        if not files:
            raise DataError(f"no file matches '{path}'", where=where)
    elif _looks_like_hub_name(path):
        return None
    else:
        raise DataError(f"there is no file '{path}'", where=where, fix=_nearest(local))
    _refuse_split(path, split, config, where)
    return files, None


def _refuse_split(path: str, split: str, config: str | None, where: str) -> None:
    if split != "train" or config is not None:
        raise DataError(
            f"'{path}' is a file: it has no split and no configuration",
            where=where,
            fix="leave out 'split' and 'name', or name its folder; hold rows out with val_size",
        )


def _walk(folder: Path, shown: str, where: str) -> Iterator[str]:
    """Yield the files below a folder, relative to it; links are followed, each folder once, hidden ones never."""
    seen: set[tuple[int, int]] = set()
    waiting, count = [folder], 0
    while waiting:
        here = waiting.pop()
        status = here.stat()
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in sorted(here.iterdir()):
            count += 1
            if count > MOST_LISTED:
                raise DataError(f"'{shown}' holds more than {MOST_LISTED:,} files", where=where, fix="name the files")
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                waiting.append(entry)
            else:
                yield entry.relative_to(folder).as_posix()


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:  # a broken link: opening it says so
        return False


def _read(file: DataFile) -> str:
    with file.open() as opened:
        return opened.read(1 << 24).decode("utf-8", "replace")


def _glob(pattern: Path) -> Iterator[Path]:
    """Return the paths that match a pattern, which may be absolute."""
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return anchor.glob(str(pattern.relative_to(anchor) if pattern.is_absolute() else pattern))


def _looks_like_hub_name(path: str) -> bool:
    """Return True if a path can be ``name`` or ``owner/name`` on the hub, and not a file name of a known format."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)) and format_of(path) not in READERS


def _nearest(path: Path) -> str:
    """Return a hint at the file or folder that the user may have meant."""
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path())
        missing = folder.relative_to(existing).parts[0] if folder != existing else str(folder)
        hint = did_you_mean(missing, (child.name for child in existing.iterdir() if child.is_dir()))
        return f"there is no folder '{missing}' in '{existing.resolve()}'" + (f"; {hint}" if hint else "")
    return did_you_mean(path.name, (file.name for file in folder.iterdir())) or f"look in '{folder.resolve()}'"


# --- addresses --------------------------------------------------------------------------------------------------------

_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "http": "aiohttp requests", "https": "aiohttp requests", "hf": "huggingface_hub", "oci": "ocifs",
    "sftp": "paramiko", "ssh": "paramiko", "dropbox": "dropboxdrivefs", "gdrive": "gdrivefs", "smb": "smbprotocol",
}  # fmt: skip
"""Protocol -> package that fsspec needs for it."""
_OWN_MACHINE = ("file", "local", "memory")


def remote_files(address: str, *, split: str, config: str | None, where: str) -> Found:
    """Return the files behind an address: a file, a folder, or a pattern."""
    import fsspec  # type: ignore[import-untyped]

    protocol = address.partition("://")[0].lower()
    if is_offline() and protocol not in _OWN_MACHINE:
        raise DataError(
            f"'{address}' is elsewhere, and --offline forbids to connect", where=where, fix="fetch it first"
        )
    try:
        system, path = fsspec.core.url_to_fs(address)
        if re.search(r"[*?\[]", path) and protocol not in ("http", "https"):
            found = sorted(str(name) for name in system.glob(path))
            if not found:
                raise DataError(f"no file matches '{address}'", where=where)
            _refuse_split(address, split, config, where)
            return [_remote_file(system, name, f"{protocol}://{name.lstrip('/')}") for name in found], None
        if protocol not in ("http", "https") and system.isdir(path):
            root = str(path).rstrip("/")
            names = [str(name)[len(root) :].lstrip("/") for name in system.find(path)]
            chosen = choose_files(
                [name for name in names if not any(part.startswith(".") for part in name.split("/"))],
                lambda name: _read(_remote_file(system, f"{root}/{name}", f"{address}/{name}")),
                split=split, config=config, shown=address, where=where,
            )  # fmt: skip
            base = address.rstrip("/")
            return [_remote_file(system, f"{root}/{name}", f"{base}/{name}") for name in chosen.names], chosen
        if not system.exists(path):
            raise DataError(f"there is nothing at '{address}'", where=where, fix="check the address and the access")
    except DataError:
        raise
    except ImportError as error:
        package = _PACKAGES.get(protocol, "")
        fix = f"pip install {package}" if package else ""
        raise DataError(
            f"reading '{protocol}://' needs a package: {one_line(error, 300)}", where=where, fix=fix
        ) from error
    except ValueError as error:
        raise DataError(f"cannot read '{address}': {one_line(error, 300)}", where=where, fix=_PROTOCOLS) from error
    except Exception as error:  # every backend and its network have errors of their own
        raise _cannot_reach(address, error, where) from error
    _refuse_split(address, split, config, where)
    return [_remote_file(system, path, address)], None


_PROTOCOLS = "use a path, or an address of fsspec such as s3://, gs://, hf://datasets/ or https://"


def _remote_file(system: Any, path: str, shown: str) -> DataFile:
    def open_it() -> IO[bytes]:
        try:
            opened = system.open(path, "rb")
        except Exception as error:  # as above
            raise _cannot_reach(shown, error, shown) from error
        return cast(IO[bytes], opened if hasattr(opened, "peek") else io.BufferedReader(opened))

    return DataFile(path.rstrip("/").rpartition("/")[2].partition("?")[0], shown, open_it, None, _version(system, path))


_VERSIONS = ("ETag", "etag", "blob_id", "checksum", "md5Hash", "sha256", "mtime", "LastModified", "last_modified")
"""Names under which storage systems give the version of a file."""


def _version(system: Any, path: str) -> str | None:
    """Return the version of a remote file; None if its storage gives none."""
    try:
        info = system.info(path)
        found = {name: str(info[name]) for name in _VERSIONS if info.get(name)}
        return f"{info.get('size')} {sorted(found.items())}" if found else None
    except Exception:  # reading it raises the error that matters
        return None


def _cannot_reach(address: str, error: Exception, where: str) -> DataError:
    what = f"cannot read '{address}': {one_line(error, 300)}"
    return DataError(what, where=where, fix="check the address, the access and the network")


def hub_rows(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Iterator[Row]:
    """Yield the rows of a dataset on the hub."""
    shown, number = f"{name}[{split}]", 0
    rows = iter(load_hub(name, config, split, where, streamed=streamed))
    while True:
        try:
            columns = next(rows)
        except StopIteration:
            return
        except Exception as error:  # of a stream the network's, and the library's own for a damaged file
            raise DataError(
                f"cannot read on in the dataset '{name}': {_first_line(error)}",
                where=f"{shown}:row {number + 1}",
                fix="check access and the network, and start again: the run goes on from its last checkpoint",
            ) from error
        number += 1
        yield Row(f"{shown}:row {number}", without_nulls(columns))


def load_hub(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Any:
    """Return a ``datasets.Dataset``: from the hub the first time, then from the library's cache.

    The library runs no script of a dataset since its version 4, which this package requires.

    Args:
        name: ``name`` or ``owner/name``.
        streamed: Return an ``IterableDataset``, which reads from the hub and keeps nothing.
    """
    import datasets

    _refuse_formats(name, where)
    with _quiet_without_terminal():
        try:
            return datasets.load_dataset(name, config, split=split, streaming=streamed)
        except Exception as error:  # the library raises its own, the network's and the builder script's errors
            raise _cannot_load(name, config, split, error, where) from error


def _cannot_load(name: str, config: str | None, split: str, error: Exception, where: str) -> DataError:
    """Return the error of a dataset that is not loaded; it lists the splits if only the split is wrong."""
    import datasets

    if isinstance(error, ValueError) and "split" in str(error):
        try:
            splits = datasets.get_dataset_split_names(name, config)
        except Exception:  # whatever it is, the first error is the better one
            splits = []
        if splits and split not in splits:
            what = f"'{name}' has no split '{split}'; it has {', '.join(splits)}"
            return DataError(what, where=where, fix=did_you_mean(split, splits) or f"write split: {splits[0]}")
    return DataError(
        f"cannot load the dataset '{name}': {_first_line(error)}",
        where=where,
        fix="it is no local file; for the hub, check its name, 'name' and 'split', access and the network",
    )


def _refuse_formats(name: str, where: str) -> None:
    """Raise if the path is a file format's name: ``datasets`` would read files of the working directory for it."""
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if name in _PACKAGED_DATASETS_MODULES or "::" in name:
        raise DataError(
            f"'{name}' is a file format of the datasets library, not a dataset",
            where=where,
            fix="name the file itself",
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quiet_without_terminal() -> Iterator[Any]:
    """Switch the progress bars of ``datasets`` off unless stderr is a terminal."""
    import datasets

    if sys.stderr.isatty() or not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
