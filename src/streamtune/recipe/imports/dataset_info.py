"""The datasets of LLaMA-Factory's recipes: names that ``dataset_info.json`` explains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .conversion import Conversion
from .datasets import put_datasets, rows_of_split

__all__ = ["take_datasets"]

ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
SHAREGPT = {"messages": "conversations", "system": "system", "tools": "tools"}
PREFERENCE = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SHAREGPT_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


def take_datasets(conversion: Conversion) -> None:
    """Convert ``dataset``, by the ``dataset_info.json`` of ``dataset_dir``."""
    names = conversion.take("dataset")
    folder, most = conversion.take("dataset_dir"), conversion.take("max_samples")
    for name in ("dataset_dir", "max_samples"):
        if name in conversion.file.fields:
            conversion.unneeded(name, why="see datasets")
    if names is None:
        return
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        conversion.lose("dataset", why="names were expected")
        return
    names = [name.strip() for name in names]
    info, found_in = _dataset_info(conversion, str(folder or "data"))
    specs = []
    for name in names:
        entry = info.get(name) if info is not None else None
        if not isinstance(entry, dict):
            spec = {"path": name}
            if folder != "ONLINE":
                missing = "there is none" if info is None else f"it has no '{name}'"
                why = f"'{name}' is read from {found_in}, and {missing}: write the path of its file"
                conversion.lose("dataset", why=why)
        else:
            spec = _dataset(conversion, name, entry, Path(found_in).parent)
        if isinstance(most, int) and most:
            spec["max_rows"] = min(most, spec.get("max_rows", most))
        specs.append(spec)
    put_datasets(conversion, specs, "dataset")


def _dataset_info(conversion: Conversion, folder: str) -> tuple[dict[str, Any] | None, str]:
    """Return ``dataset_info.json``, of the folder as it is named, then seen from the recipe; and its path."""
    beside = conversion.file.path.resolve().parent
    for base in (Path(), beside, *beside.parents[:4]):
        path = base / folder / "dataset_info.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")), str(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise conversion.refuse("dataset", what=f"{path} cannot be read: {error}") from None
    return None, str(Path(folder) / "dataset_info.json")


def _dataset(conversion: Conversion, name: str, entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return our entry for one of ``dataset_info.json``; what it does not say is reported."""

    def lose(why: str) -> None:
        conversion.lose("dataset", why=f"'{name}' in dataset_info.json: {why}")

    spec: dict[str, Any] = {}
    if "file_name" in entry:
        path = folder / entry["file_name"]
        spec["path"] = str(path)
    elif "hf_hub_url" in entry:
        spec["path"] = entry["hf_hub_url"]
    else:
        spec["path"] = str(entry.get("ms_hub_url") or entry.get("script_url") or entry.get("cloud_file_name") or name)
        lose("neither a file nor a dataset of the Hugging Face hub")
    if "hf_hub_url" in entry and "split" in entry:
        rows_of_split(spec, entry["split"], lose)
    if entry.get("subset"):
        spec["name"] = entry["subset"]
    if entry.get("num_samples"):
        spec["max_rows"] = entry["num_samples"]
    if entry.get("revision") or entry.get("folder"):
        lose("a revision or a folder of a dataset on the hub")
    _take_columns(spec, entry, lose)
    return spec


def _take_columns(spec: dict[str, Any], entry: dict[str, Any], lose: Any) -> None:
    """Write the type of the rows, where their columns have the names that are read here."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    sharegpt = entry.get("formatting", "alpaca") == "sharegpt"
    if entry.get("ranking"):
        wrong = [key for key, column in columns.items() if PREFERENCE.get(key) not in (None, column)]
        if wrong or (not sharegpt and "prompt" not in columns):
            lose("rows of preferences have the columns prompt, chosen and rejected here: rename them")
        spec["type"] = "preference"
        return
    if "kto_tag" in columns:
        spec["type"] = "unpaired"
        lose("rows have the columns prompt, completion and label here: rename them")
        return
    if sharegpt:
        style = {**SHAREGPT_TAGS, **{key: tag for key, tag in tags.items() if key in SHAREGPT_TAGS}}
        column = columns.get("messages", "conversations")
        if style == OPENAI_TAGS and column in ("messages", "conversations"):
            spec["type"] = "messages"
        elif style == SHAREGPT_TAGS and column == "conversations":
            spec["type"] = "sharegpt"
        else:
            lose(
                "turns have 'role' and 'content' in a column 'messages' here, or 'from' and 'value' in 'conversations'"
            )
        return
    given = {**{key: ALPACA[key] for key in ("prompt", "query", "response")}, **columns} if columns else ALPACA
    if columns == {"prompt": "text"}:
        spec["type"] = "text"
    elif columns == {"prompt": "prompt", "response": "completion"}:
        spec["type"] = "prompt_completion"
    elif all(given[key] == column for key, column in ALPACA.items() if key in given):
        spec["type"] = "alpaca"
    else:
        lose("the columns are called instruction, input and output here: rename them")
