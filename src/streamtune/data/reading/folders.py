"""Choose the data files of a split in a folder, by the rules of the ``datasets`` library.

The rules are tried in this order. The first rule that finds a split for at least one file is used for all files::

    README.md     its ``configs:``, with file patterns for each split
    shards        data/NAME-00000-of-00002.parquet; NAME is the split
    folders       train/..., data/validation-en/...
    files         train.jsonl, my_test-2.csv
    none          all files belong to the split ``train``

In a folder written by ``save_to_disk``, ``state.json`` lists the files and ``dataset_dict.json`` lists the splits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from streamtune.data.reading.files import file_format
from streamtune.data.reading.readers import READERS
from streamtune.errors import DataError, did_you_mean

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> words for it in names of files and folders, delimited by ``-._ 0-9`` or by the ends of the name."""

_WORD = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)") for split, words in KEYWORDS.items()
}
_COUNTED = re.compile(r"(?P<start>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>[^/]*)")
_SHARD = re.compile(r"(?:.*/)?data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]+")

DOCUMENTS = re.compile(
    r"(?:readme|license|licence|copying|notice|citation|changelog|changes|contributing|authors|requirements)"
    r"(?:[-._].*)?",
    re.IGNORECASE,
)
"""Names of documents about a dataset, such as README."""
NOT_ROWS = {
    "config.json",
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "croissant.json",
}
"""JSON files that describe a dataset and hold no rows."""


@dataclass(frozen=True)
class ChosenFiles:
    """The files of a folder that belong to a split, and its other data files; paths are relative to the folder.

    Or the files that match a pattern.
    """

    names: list[str]
    """files to read, in order"""
    left_out: list[str]
    """data files of the folder that are not read"""
    hidden: list[str] | None = None
    """hidden files that match the pattern and are not read; None for a folder"""
    missing: Sequence[str] = ()
    """files that are not there although the names of other files count them, as in ``train-00000-of-00002.parquet``"""


def is_data_file_name(name: str) -> bool:
    """Return True if a name belongs to a data file: not hidden, in a known format, no README or dataset description."""
    path = PurePosixPath(name)
    if any(part.startswith((".", "__")) for part in path.parts):
        return False
    return file_format(path.name) in READERS and path.name not in NOT_ROWS and not DOCUMENTS.fullmatch(path.name)


def choose_files(
    names: Iterable[str], read_text: Callable[[str], str], *, split: str, config: str | None, shown: str, where: str
) -> ChosenFiles:
    """Return the files of one split of the dataset in a folder.

    Args:
        names: All files below the folder, relative to it, with ``/``.
        read_text: Function that returns the text of one of these files.
        split: Split to read.
        config: Name of a configuration in README.md; None for the default configuration.
        shown: Name of the folder in messages.
        where: Place in the recipe, for errors.

    Raises:
        DataError: The split or the configuration does not exist, or a file of the split is missing.
    """
    every = sorted(names)
    if "dataset_dict.json" in every or "state.json" in every:
        return _choose_saved_files(every, read_text, split, shown, where)
    data = [name for name in every if is_data_file_name(name)]
    if any(file_format(name) != ".md" for name in data):
        data = [name for name in data if file_format(name) != ".md"]
    splits = _files_by_config(every, read_text, config, shown, where)
    if splits is None:
        if not data:
            fix = f"add a file with one of the extensions {', '.join(READERS)}"
            raise DataError(f"the folder '{shown}' has no data file", where=where, fix=fix)
        splits = _files_by_split(data)
    if split not in splits:
        raise _unknown_split_error(split, splits, shown, where)
    chosen = splits[split]
    if not chosen:
        raise DataError(
            f"no file in '{shown}' matches the patterns of the split '{split}'",
            where=where,
            fix="check the 'configs' in its README.md",
        )
    left_out = [name for name in every if name not in set(chosen) and file_format(name) in READERS]
    return ChosenFiles(chosen, left_out, missing=_missing_shards(chosen))


def _missing_shards(names: Sequence[str]) -> list[str]:
    """Return the files that the names of shards (``NAME-00000-of-00002.parquet``) count, but that are not there."""
    counted: dict[tuple[str, int, str], set[int]] = {}
    for name in names:
        if match := _COUNTED.fullmatch(name):
            counted.setdefault((match["start"], int(match["count"]), match["end"]), set()).add(int(match["number"]))
    return [
        f"{start}-{number:05d}-of-{count:05d}{end}"
        for (start, count, end), found in counted.items()
        for number in range(count)
        if number not in found
    ]


def _unknown_split_error(split: str, splits: Iterable[str], shown: str, where: str) -> DataError:
    names = list(splits)
    return DataError(
        f"'{shown}' has no split '{split}', found {', '.join(names)}",
        where=where,
        fix=did_you_mean(split, names) or f"write split: {names[0]}" if names else "",
    )


def _files_by_split(names: Sequence[str]) -> dict[str, list[str]]:
    """Return split -> files, by the first rule that finds a split: shards, folders, or file names.

    If no rule finds a split, all files belong to ``train``.
    """
    for rule in (
        _find_split_of_shard,
        lambda path: _find_split_in_path_parts(path.parent.parts),
        lambda path: _find_split_in_path_parts([path.name]),
    ):
        found: dict[str, list[str]] = {}
        for name in names:
            for split in rule(PurePosixPath(name)):
                found.setdefault(split, []).append(name)
        if found:
            order = [split for split in KEYWORDS if split in found]
            return {split: found[split] for split in (*order, *(split for split in found if split not in KEYWORDS))}
    return {"train": list(names)}


def _find_split_of_shard(path: PurePosixPath) -> list[str]:
    match = _SHARD.fullmatch(str(path))
    return [match["split"]] if match else []


def _find_split_in_path_parts(parts: Sequence[str]) -> list[str]:
    """Return [split] for the last part of a path that names a split, such as ``dev``; an empty list if none does."""
    for part in reversed(parts):
        for split, pattern in _WORD.items():
            if pattern.search(part.lower()):
                return [split]
    return []


# --- README.md --------------------------------------------------------------------------------------------------------


def _files_by_config(
    names: Sequence[str], read_text: Callable[[str], str], config: str | None, shown: str, where: str
) -> dict[str, list[str]] | None:
    """Return split -> files as the ``configs`` in README.md list them; None if README.md has no ``configs``.

    Raises:
        DataError: The configuration does not exist, or several exist and the recipe chooses none.
    """
    configs = _read_configs(read_text("README.md")) if "README.md" in names else {}
    if not configs:
        if config is not None:
            raise DataError(
                f"the folder '{shown}' has no configurations, found name: {config}", where=where, fix="remove 'name'"
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
        split: [name for name in names if any(_matches_pattern(name, pattern) for pattern in patterns)]
        for split, patterns in configs[config]["splits"].items()
    }


def _read_configs(readme: str) -> dict[str, dict[str, Any]]:
    """Return the configurations in the YAML header of a README, each with ``splits`` and ``default``."""
    parts = readme.split("---", 2)
    if not readme.startswith("---") or len(parts) < 3:
        return {}
    try:
        header = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    found = {}
    for entry in (header.get("configs") if isinstance(header, dict) else None) or ():
        if isinstance(entry, dict) and (splits := _read_split_patterns(entry)):
            found[str(entry.get("config_name", "default"))] = {"splits": splits, "default": entry.get("default")}
    return found


def _read_split_patterns(config_entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return split -> file patterns of a configuration; its ``data_dir`` is prepended to each pattern."""
    files = config_entry.get("data_files")
    if isinstance(files, list) and any(isinstance(item, dict) for item in files):
        files = {item.get("split", "train"): item.get("path", ()) for item in files if isinstance(item, dict)}
    if not isinstance(files, dict):
        files = {"train": files} if files else {}
    folder = str(config_entry.get("data_dir") or "").strip("/")
    return {
        str(split): [
            str(PurePosixPath(folder, str(pattern)))
            for pattern in (patterns if isinstance(patterns, (list, tuple)) else [patterns])
        ]
        for split, patterns in files.items()
    }


def _matches_pattern(name: str, pattern: str) -> bool:
    """Return True if a file name matches a glob pattern; ``*`` does not match a slash, ``**`` does."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(signs.get(part) or re.escape(part) for part in parts), name) is not None


# --- save_to_disk -----------------------------------------------------------------------------------------------------


def _choose_saved_files(
    names: Sequence[str], read_text: Callable[[str], str], split: str, shown: str, where: str
) -> ChosenFiles:
    """Return the files that ``save_to_disk`` wrote for a split.

    Raises:
        DataError: The split does not exist, or a listed file is missing.
    """
    folder = ""
    if "dataset_dict.json" in names:
        splits = [str(item) for item in _read_json_object(read_text, "dataset_dict.json", shown).get("splits") or ()]
        if split not in splits:
            raise _unknown_split_error(split, splits, shown, where)
        folder = f"{split}/"
    state_name = f"{folder}state.json"
    if state_name not in names:
        what = f"'{shown}' has no split '{split}', although its dataset_dict.json lists it"
        raise DataError(what, where=where, fix="save or download the dataset again")
    state = _read_json_object(read_text, state_name, shown)
    own = state.get("_split")
    if not folder and split != (own or "train"):
        raise _unknown_split_error(split, [own or "train"], shown, where)
    files = [folder + str(item.get("filename")) for item in state.get("_data_files") or () if isinstance(item, dict)]
    if missing := [name for name in files if name not in names]:
        what = f"the file '{missing[0]}' is missing in '{shown}', although {state_name} lists it"
        raise DataError(what, where=where, fix="save or download the dataset again")
    return ChosenFiles(files, [])


def _read_json_object(read_text: Callable[[str], str], name: str, shown: str) -> dict[str, Any]:
    try:
        found = json.loads(read_text(name))
    except ValueError as error:
        raise DataError(f"malformed JSON: {error}", where=f"{shown}/{name}", fix="save the dataset again") from error
    if not isinstance(found, dict):
        raise DataError("expected a JSON object", where=f"{shown}/{name}", fix="save the dataset again")
    return found
