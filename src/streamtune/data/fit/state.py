"""Write the counts of a fit to files, and read them back: what a table of records does not hold itself.

fit.npz      numbers of rows and records, hashes: everything that grows with the data
fit.json     the rest
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamtune.data.fit.length_fit import LengthFit
from streamtune.data.fit.parts import Digests, SourceStart
from streamtune.data.reading.sources import Source

_GIVEN = ("writer", "policy", "_group")
"""Attributes that the maker of a fit gives it, and that no file can hold."""


def save_fit(fit: LengthFit[Any, Any], folder: Path) -> None:
    """Write the counts of a fit.

    Raises:
        OSError: A file cannot be written.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain: dict[str, Any] = {}
    for name, value in vars(fit).items():
        if name in _GIVEN:
            continue
        if isinstance(value, array):
            arrays[name] = np.frombuffer(value, dtype=np.int64)
        elif isinstance(value, Digests):
            arrays[name] = value.bytes()
        elif isinstance(value, dict) and any(isinstance(item, array) for item in value.values()):
            for key, item in value.items():
                arrays[f"{name}/{key}"] = np.frombuffer(item, dtype=np.int64)
        else:
            plain[name] = _plain(value)
    np.savez(folder / "fit.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own options
    (folder / "fit.json").write_text(json.dumps(plain), "utf-8")


def load_fit(fit: LengthFit[Any, Any], folder: Path, sources: Sequence[Source]) -> None:
    """Give a new fit the counts that were written, of the same sources; shares and repetitions may be others.

    Raises:
        OSError, ValueError, KeyError: The files cannot be read, or hold something else.
    """
    plain = json.loads((folder / "fit.json").read_text("utf-8"))
    with np.load(folder / "fit.npz", allow_pickle=False) as arrays:
        for name in arrays.files:
            found, (owner, _, key) = arrays[name], name.partition("/")
            if key:
                vars(fit)[owner][key] = array("q", found.tobytes())
            elif found.dtype == np.uint8:
                vars(fit)[owner] = Digests(found.tobytes())
            else:
                vars(fit)[owner] = array("q", found.tobytes())
    for name, value in plain.items():
        before = vars(fit)[name]
        if isinstance(before, Counter):
            value = Counter(value)
        elif isinstance(before, tuple):
            value = tuple(value)
        elif name == "starts":
            value = [
                SourceStart(**{**item, "source": source, "counts": Counter(item["counts"])})
                for item, source in zip(value, sources, strict=True)
            ]
        vars(fit)[name] = value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        TypeError: From ``json``, if a kind of fit gets an attribute that is written here for the first time.
    """
    if isinstance(value, SourceStart):
        return {name: _plain(item) for name, item in vars(value).items() if name != "source"}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
