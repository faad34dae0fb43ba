"""Folders of data files, read as the ``datasets`` library reads them: by split, without files that are not data.

These rules are tried in order; the first that gives any file a split decides for all files::

    README.md     its ``configs:``, with patterns of files for each split
    shards        data/NAME-00000-of-00002.parquet, with any name
    folders       train/..., data/validation-en/...
    files         train.jsonl, my_test-2.csv
    none          all files are the split ``train``

A folder that ``save_to_disk`` wrote lists its own files (``state.json``), and its splits (``dataset_dict.json``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from streamtune.data.reading.files import format_of
from streamtune.data.reading.readers import READERS
from streamtune.errors import DataError, did_you_mean

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> its words in names of files and folders, between the signs ``-._ 0-9`` or the ends of the name."""

_WORD = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)") for split, words in KEYWORDS.items()
}
_SHARD = re.compile(r"(?:.*/)?data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]+")

DOCUMENTS = re.compile(
    r"(?:readme|license|licence|copying|notice|citation|changelog|changes|contributing|authors|requirements)"
    r"(?:[-._].*)?",
    re.IGNORECASE,
)
"""Names of files about a dataset, such as README."""
NOT_ROWS = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "croissant.json",
}
"""JSON files about a dataset."""


@dataclass(frozen=True)
class Chosen:
    """Files of a folder that are read, relative to it and in order, and data files that are left out."""

    names: list[str]
    left_out: list[str]


def is_data_name(name: str) -> bool:
    """Return True if a file is data by its name: not hidden, of a known format, not about the dataset."""
    path = PurePosixPath(name)
    if any(part.startswith((".", "__")) for part in path.parts):
        return False
    return format_of(path.name) in READERS and path.name not in NOT_ROWS and not DOCUMENTS.fullmatch(path.name)


def choose_files(
    names: Iterable[str], read: Callable[[str], str], *, split: str, config: str | None, shown: str, where: str
) -> Chosen:
    """Choose the files of a split among the files of a folder.

    Args:
        names: All files below the folder, relative to it, with ``/``.
    """
    every = sorted(names)
    if "dataset_dict.json" in every or "state.json" in every:
        return _saved(every, read, split, shown, where)
    data = [name for name in every if is_data_name(name)]
    if any(format_of(name) != ".md" for name in data):
        data = [name for name in data if format_of(name) != ".md"]
    splits = _configured(every, read, config, shown, where)
    if splits is None:
        if not data:
            fix = f"it may hold {', '.join(READERS)}"
            raise DataError(f"the folder '{shown}' holds no data file", where=where, fix=fix)
        splits = _split_names(data)
    if split not in splits:
        raise _no_split(split, splits, shown, where)
    chosen = splits[split]
    if not chosen:
        raise DataError(f"no file is of the split '{split}' in '{shown}'", where=where)
    return Chosen(chosen, [name for name in every if name not in set(chosen) and format_of(name) in READERS])


def _no_split(split: str, splits: Iterable[str], shown: str, where: str) -> DataError:
    names = list(splits)
    return DataError(
        f"'{shown}' has no split '{split}'; it has {', '.join(names)}",
        where=where,
        fix=did_you_mean(split, names) or f"write split: {names[0]}" if names else "",
    )


def _split_names(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files of each split, by the first rule that finds a split."""
    for rule in (_of_shard, lambda path: _word_of(path.parent.parts), lambda path: _word_of([path.name])):
        found: dict[str, list[str]] = {}
        for name in names:
            for split in rule(PurePosixPath(name)):
                found.setdefault(split, []).append(name)
        if found:
            order = [split for split in KEYWORDS if split in found]
            return {split: found[split] for split in (*order, *(split for split in found if split not in KEYWORDS))}
    return {"train": list(names)}


def _of_shard(path: PurePosixPath) -> list[str]:
    match = _SHARD.fullmatch(str(path))
    return [match["split"]] if match else []


def _word_of(parts: Sequence[str]) -> list[str]:
    """Return the split that the last of some names has a word for, as a list of none or one."""
    for part in reversed(parts):
        for split, pattern in _WORD.items():
            if pattern.search(part.lower()):
                return [split]
    return []


# --- README.md --------------------------------------------------------------------------------------------------------


def _configured(
    names: Sequence[str], read: Callable[[str], str], config: str | None, shown: str, where: str
) -> dict[str, list[str]] | None:
    """Return the files of each split by the ``configs`` of README.md; None without ``configs``."""
    configs = _configs(read("README.md")) if "README.md" in names else {}
    if not configs:
        if config is not None:
            raise DataError(
                f"the folder '{shown}' has no configuration '{config}'", where=where, fix="leave out 'name'"
            )
        return None
    known = list(configs)
    if config is None:
        default = next((name for name in known if configs[name].get("default") or name == "default"), None)
        if default is None and len(known) > 1:
            fix = f"write name: {known[0]}"
            what = f"'{shown}' has several configurations: {', '.join(known)}"
            raise DataError(what, where=where, fix=fix)
        config = default or known[0]
    if config not in configs:
        fix = did_you_mean(config, known) or f"use {', '.join(known)}"
        raise DataError(f"'{shown}' has no configuration '{config}'", where=where, fix=fix)
    return {
        split: [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
        for split, patterns in configs[config]["splits"].items()
    }


def _configs(readme: str) -> dict[str, dict[str, Any]]:
    """Return the configurations in the header of a README: ``splits`` with patterns, and ``default``."""
    parts = readme.split("---", 2)
    if not readme.startswith("---") or len(parts) < 3:
        return {}
    try:
        header = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    found = {}
    for entry in (header.get("configs") if isinstance(header, dict) else None) or ():
        if isinstance(entry, dict) and (splits := _patterns(entry)):
            found[str(entry.get("config_name", "default"))] = {"splits": splits, "default": entry.get("default")}
    return found


def _patterns(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the patterns of each split of a configuration, below its ``data_dir``."""
    files = entry.get("data_files")
    if isinstance(files, list) and any(isinstance(item, dict) for item in files):
        files = {item.get("split", "train"): item.get("path", ()) for item in files if isinstance(item, dict)}
    if not isinstance(files, dict):
        files = {"train": files} if files else {}
    folder = str(entry.get("data_dir") or "").strip("/")
    return {
        str(split): [
            str(PurePosixPath(folder, str(pattern)))
            for pattern in (patterns if isinstance(patterns, (list, tuple)) else [patterns])
        ]
        for split, patterns in files.items()
    }


def _matches(name: str, pattern: str) -> bool:
    """Return True if a name matches a pattern: ``*`` matches no slash, ``**`` any folders."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(signs.get(part) or re.escape(part) for part in parts), name) is not None


# --- save_to_disk -----------------------------------------------------------------------------------------------------


def _saved(names: Sequence[str], read: Callable[[str], str], split: str, shown: str, where: str) -> Chosen:
    """Return the files that ``save_to_disk`` wrote for a split."""
    folder = ""
    if "dataset_dict.json" in names:
        splits = [str(item) for item in _json(read, "dataset_dict.json", shown).get("splits") or ()]
        if split not in splits:
            raise _no_split(split, splits, shown, where)
        folder = f"{split}/"
    state_name = f"{folder}state.json"
    if state_name not in names:
        what = f"the split '{split}' is not in '{shown}', although its dataset_dict.json lists it"
        raise DataError(what, where=where, fix="save or fetch the dataset anew")
    state = _json(read, state_name, shown)
    own = state.get("_split")
    if not folder and split != (own or "train"):
        raise _no_split(split, [own or "train"], shown, where)
    files = [folder + str(item.get("filename")) for item in state.get("_data_files") or () if isinstance(item, dict)]
    if missing := [name for name in files if name not in names]:
        what = f"'{missing[0]}' is not in '{shown}', although {state_name} lists it"
        raise DataError(what, where=where, fix="save or fetch the dataset anew")
    return Chosen(files, [])


def _json(read: Callable[[str], str], name: str, shown: str) -> dict[str, Any]:
    try:
        found = json.loads(read(name))
    except ValueError as error:
        raise DataError(f"malformed JSON: {error}", where=f"{shown}/{name}", fix="save the dataset anew") from error
    if not isinstance(found, dict):
        raise DataError("this is no JSON object", where=f"{shown}/{name}", fix="save the dataset anew")
    return found
