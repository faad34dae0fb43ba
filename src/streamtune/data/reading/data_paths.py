"""Find the files of a dataset: local paths, ``fsspec`` URLs (``s3://``, ``hf://``), and datasets on the Hugging Face
Hub.
"""

from __future__ import annotations

import io
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast

from streamtune.base.privacy import is_offline
from streamtune.data.reading.files import DataFile, file_format, make_local_file
from streamtune.data.reading.folders import ChosenFiles, choose_files
from streamtune.data.reading.readers import READERS, Row, error_in_one_line, row_of_table
from streamtune.errors import DataError, did_you_mean

FoundFiles = tuple[list[DataFile], ChosenFiles | None]
"""Files to read, and the chosen files of a folder or pattern; the second is None if the path is a file."""

MOST_LISTED = 1_000_000
"""Maximum number of files in a folder. More files suggest a wrong path, such as the root of a disk."""


def is_url(path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path) is not None


def find_local_files(path: str, *, split: str, config: str | None, where: str) -> FoundFiles | None:
    """Return the local files that a path or a glob pattern names.

    Return None if the path can only be the name of a dataset on the Hugging Face Hub.

    Args:
        split: Split to read from a folder.
        config: Configuration to read from a folder; None for its default.
        where: Place in the recipe, for errors.

    Raises:
        DataError: The file, folder or split does not exist.
        OSError: The path cannot be accessed.
    """
    try:
        local = Path(path).expanduser()
    except RuntimeError as error:  # ~name of an unknown user
        raise DataError(
            f"'{path}' begins with the home folder of a user that does not exist",
            where=where,
            fix="write the whole path, or ./~... for a file whose name begins with ~",
        ) from error
    if local.is_dir():
        names = list(_walk_files(local, path, where))
        chosen = choose_files(
            names, lambda name: _read_text(make_local_file(local / name, f"{path}/{name}")),
            split=split, config=config, shown=path, where=where,
        )  # fmt: skip
        return [make_local_file(local / name, str(local / name)) for name in chosen.names], chosen
    if os.path.lexists(local):  # True for a broken link and a pipe too: opening them raises the error
        files = [make_local_file(local, path)]
    elif re.search(r"[*?\[]", path):
        try:
            matches = sorted(str(file) for file in _expand_glob(local) if not file.is_dir())
        except (ValueError, NotImplementedError) as error:
            raise _pattern_error(path, error, where) from error
        chosen = _leave_out_hidden(matches, str(local), path, where)
        _refuse_split(path, split, config, where)
        return [make_local_file(Path(name), name) for name in chosen.names], chosen
    elif _looks_like_hub_name(path):
        return None
    else:
        raise DataError(f"the file '{path}' does not exist", where=where, fix=_suggest_path(local))
    _refuse_split(path, split, config, where)
    return files, None


def _refuse_split(path: str, split: str, config: str | None, where: str) -> None:
    if split != "train" or config is not None:
        raise DataError(
            f"'split' and 'name' cannot be used with a file: '{path}'",
            where=where,
            fix="remove 'split' and 'name', or give the folder of the file; to hold rows out, set val_size",
        )


def _walk_files(folder: Path, shown: str, where: str) -> Iterator[str]:
    """Yield the paths of the files below a folder, relative to it. Follow links; skip hidden files and folders."""
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
                raise DataError(
                    f"the folder '{shown}' has more than {MOST_LISTED:,} files",
                    where=where,
                    fix="give the files themselves, or a smaller folder",
                )
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                waiting.append(entry)
            else:
                yield entry.relative_to(folder).as_posix()


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:  # a broken link: opening it raises the error
        return False


def _read_text(file: DataFile) -> str:
    with file.open() as opened:
        return opened.read(1 << 24).decode("utf-8", "replace")


def _expand_glob(pattern: Path) -> Iterator[Path]:
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return anchor.glob(str(pattern.relative_to(anchor) if pattern.is_absolute() else pattern))


def _pattern_error(pattern: str, error: Exception, where: str) -> DataError:
    what = f"'{pattern}' is not a valid pattern: {error_in_one_line(error, 300)}"
    parts = re.sub(r"\*{2,}(?=[^/*])", "**/*", pattern)
    return DataError(what, where=where, fix=f"write '{parts}'" if parts != pattern else "check the pattern")


def _leave_out_hidden(matches: Sequence[str], pattern: str, shown: str, where: str) -> ChosenFiles:
    """Return the files that match a pattern; hidden ones only if the pattern names their dot, as ``data/.*.jsonl``.

    Raises:
        DataError: No file is left.
    """
    dotted = [part for part in pattern.split("/") if part.startswith(".")]
    hidden = [
        name
        for name in matches
        if any(
            part.startswith(".") and not any(fnmatchcase(part, named) for named in dotted) for part in name.split("/")
        )
    ]
    names = [name for name in matches if name not in set(hidden)]
    if not names:
        fix = f"to read hidden files, write the dot in the pattern: '{hidden[0]}'" if hidden else "check the path"
        only = "visible " if hidden else ""
        raise DataError(f"no {only}file matches the pattern '{shown}'", where=where, fix=fix)
    return ChosenFiles(names, [], hidden)


def _looks_like_hub_name(path: str) -> bool:
    """Return True if a path has the form ``name`` or ``owner/name``, and no extension of a known file format."""
    return bool(re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)) and file_format(path) not in READERS


def _suggest_path(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path())
        missing = folder.relative_to(existing).parts[0] if folder != existing else str(folder)
        hint = did_you_mean(missing, (child.name for child in existing.iterdir() if child.is_dir()))
        return f"'{existing.resolve()}' has no folder '{missing}'" + (f"; {hint}" if hint else "")
    return did_you_mean(path.name, (file.name for file in folder.iterdir())) or f"look in '{folder.resolve()}'"


# --- addresses --------------------------------------------------------------------------------------------------------

_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "http": "aiohttp requests", "https": "aiohttp requests", "hf": "huggingface_hub", "oci": "ocifs",
    "sftp": "paramiko", "ssh": "paramiko", "dropbox": "dropboxdrivefs", "gdrive": "gdrivefs", "smb": "smbprotocol",
}  # fmt: skip
"""Protocol -> packages that ``fsspec`` needs for the protocol."""
_OWN_MACHINE = ("file", "local", "memory")
"""Protocols that need no network."""


def find_remote_files(address: str, *, split: str, config: str | None, where: str) -> FoundFiles:
    """Return the files at an ``fsspec`` URL: a file, a folder, or a pattern.

    Args:
        address: URL, such as ``s3://bucket/data/*.jsonl``.
        split: Split to read from a folder.
        config: Configuration to read from a folder; None for its default.
        where: Place in the recipe, for errors.

    Raises:
        DataError: The files do not exist or cannot be reached, a package is missing, or ``--offline`` forbids access.
    """
    import fsspec  # type: ignore[import-untyped]

    protocol = address.partition("://")[0].lower()
    if is_offline() and protocol not in _OWN_MACHINE:
        raise DataError(
            f"--offline forbids network access to '{address}'",
            where=where,
            fix="download it first and give the local path, or run without --offline",
        )
    try:
        system, path = fsspec.core.url_to_fs(address)
        if re.search(r"[*?\[]", path) and protocol not in ("http", "https"):
            chosen = _leave_out_hidden(sorted(map(str, system.glob(path))), str(path), address, where)
            _refuse_split(address, split, config, where)
            return [_remote_file(system, name, f"{protocol}://{name.lstrip('/')}") for name in chosen.names], chosen
        if protocol not in ("http", "https") and system.isdir(path):
            root = str(path).rstrip("/")
            names = [str(name)[len(root) :].lstrip("/") for name in system.find(path)]
            chosen = choose_files(
                [name for name in names if not any(part.startswith(".") for part in name.split("/"))],
                lambda name: _read_text(_remote_file(system, f"{root}/{name}", f"{address}/{name}")),
                split=split, config=config, shown=address, where=where,
            )  # fmt: skip
            base = address.rstrip("/")
            return [_remote_file(system, f"{root}/{name}", f"{base}/{name}") for name in chosen.names], chosen
        if not system.exists(path):
            raise DataError(f"'{address}' does not exist", where=where, fix="check the URL and your access")
    except DataError:
        raise
    except ImportError as error:
        package = _PACKAGES.get(protocol, "")
        fix = f"pip install {package}" if package else ""
        raise DataError(
            f"reading '{protocol}://' needs a package: {error_in_one_line(error, 300)}", where=where, fix=fix
        ) from error
    except ValueError as error:
        if "**" in address:
            raise _pattern_error(address, error, where) from error
        raise DataError(
            f"cannot read '{address}': {error_in_one_line(error, 300)}", where=where, fix=_PROTOCOLS
        ) from error
    except Exception as error:  # every fsspec backend and network library has its own errors
        raise _unreachable_error(address, error, where) from error
    _refuse_split(address, split, config, where)
    return [_remote_file(system, path, address)], None


_PROTOCOLS = "use a local path, or a URL with s3://, gs://, hf://datasets/, https:// or another fsspec protocol"


def _remote_file(system: Any, path: str, shown_path: str) -> DataFile:
    def open_file() -> IO[bytes]:
        try:
            opened = system.open(path, "rb")
        except Exception as error:  # as above
            raise _unreachable_error(shown_path, error, shown_path) from error
        return cast(IO[bytes], opened if hasattr(opened, "peek") else io.BufferedReader(opened))

    return DataFile(
        path.rstrip("/").rpartition("/")[2].partition("?")[0],
        shown_path,
        open_file,
        None,
        _remote_version(system, path),
    )


_VERSIONS = ("ETag", "etag", "blob_id", "checksum", "md5Hash", "sha256", "mtime", "LastModified", "last_modified")
"""Keys of ``fsspec`` file information that identify a file's version, in various storage systems."""


def _remote_version(system: Any, path: str) -> str | None:
    """Return the version of a remote file, such as its ETag; None if the storage reports none."""
    try:
        info = system.info(path)
        found = {name: str(info[name]) for name in _VERSIONS if info.get(name)}
        return f"{info.get('size')} {sorted(found.items())}" if found else None
    except Exception:  # reading the file raises the error that the user should see
        return None


def _unreachable_error(address: str, error: Exception, where: str) -> DataError:
    what = f"cannot read '{address}': {error_in_one_line(error, 300)}"
    return DataError(what, where=where, fix="check the URL, your access and the network")


def hub_rows(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Iterator[Row]:
    """Yield the rows of a dataset on the Hugging Face Hub.

    Raises:
        DataError: The dataset cannot be loaded or read.
    """
    shown, number = f"{name}[{split}]", 0
    rows = iter(load_hub_dataset(name, config, split, where, streamed=streamed))
    while True:
        try:
            columns = next(rows)
        except StopIteration:
            return
        except Exception as error:  # network errors of a stream, or the library's error for a damaged file
            raise DataError(
                f"cannot read the next row of the dataset '{name}': {_first_line(error)}",
                where=f"{shown}:row {number + 1}",
                fix="check your access and the network, and start again: the run resumes from its last checkpoint",
            ) from error
        number += 1
        yield row_of_table(f"{shown}:row {number}", columns)


def load_hub_dataset(name: str, config: str | None, split: str, where: str, *, streamed: bool = False) -> Any:
    """Return a ``datasets.Dataset`` from the Hugging Face Hub, downloaded by the first call and then read from the
    cache.

    The required version 4 of ``datasets`` does not execute code of a dataset.

    Args:
        name: Name of the dataset, as ``name`` or ``owner/name``.
        config: Configuration of the dataset; None for its default.
        where: Place in the recipe, for errors.
        streamed: Whether to return an ``IterableDataset``, which reads from the hub and stores no copy.

    Raises:
        DataError: The dataset cannot be loaded.
    """
    import datasets

    _refuse_format_name(name, where)
    with _hide_progress_bars_without_terminal():
        try:
            return datasets.load_dataset(name, config, split=split, streaming=streamed)
        except Exception as error:  # raised by the library, by the network or by a dataset builder
            raise _hub_load_error(name, config, split, error, where) from error


def _hub_load_error(name: str, config: str | None, split: str, error: Exception, where: str) -> DataError:
    import datasets

    if isinstance(error, ValueError) and "split" in str(error):
        try:
            splits = datasets.get_dataset_split_names(name, config)
        except Exception:  # the first error says more
            splits = []
        if splits and split not in splits:
            what = f"'{name}' has no split '{split}', found {', '.join(splits)}"
            return DataError(what, where=where, fix=did_you_mean(split, splits) or f"write split: {splits[0]}")
    return DataError(
        f"cannot load the dataset '{name}': {_first_line(error)}",
        where=where,
        fix="no local file has this name; for a hub dataset, check 'path', 'name', 'split', your login and the network",
    )


def _refuse_format_name(name: str, where: str) -> None:
    """Raise ``DataError`` if the name of a dataset is the name of a file format, such as ``json``.

    ``datasets`` would read files of the working directory instead.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if name in _PACKAGED_DATASETS_MODULES or "::" in name:
        raise DataError(
            f"'{name}' is the name of a file format, not of a dataset",
            where=where,
            fix="give the path of the file",
        )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _hide_progress_bars_without_terminal() -> Iterator[Any]:
    import datasets

    if sys.stderr.isatty() or not datasets.is_progress_bar_enabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
