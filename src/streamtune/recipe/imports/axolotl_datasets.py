"""The datasets of axolotl's recipes."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion
from .datasets import put_datasets, put_eval_sets, rows_of_split

__all__ = ["take_datasets"]

TYPES: dict[str, dict[str, str]] = {
    "sft": {
        "chat_template": "messages",
        "alpaca": "alpaca",
        "completion": "text",
        "pretrain": "text",
        "sharegpt": "sharegpt",
    },
    "dpo": {
        "chat_template.default": "preference",
        "chat_template.argilla_chat": "preference",
        "user_defined.default": "",
    },
    "grpo": {},
}
"""``type`` of a dataset -> ours; the templates of others are their own."""

COLUMNS: dict[str, str] = {
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field": "text",
    "text_column": "text",
}
"""Names of columns, with those that are read here."""


USUAL_ROLES = [
    {"user": [*users], "assistant": [*models]}
    for users in (("user",), ("human",), ("user", "human"), ("human", "user"))
    for models in (("assistant",), ("gpt",), ("assistant", "gpt"), ("gpt", "assistant"))
]
"""Names of the roles that rows of messages or of sharegpt have here too."""

ROLES = {"gpt": "assistant", "human": "user", "model": "assistant"}
"""Other names of roles that can be trained."""

FLAGS = ("train", "training", "loss", "weight")
"""Fields of a message that say here whether it is trained."""

LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Paths that are no datasets, but say how ``data_files`` are read."""


def take_datasets(conversion: Conversion) -> None:
    """Convert ``datasets``, ``pretraining_dataset`` and ``test_datasets``."""
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        entries = conversion.take(name)
        if entries is None:
            if name in conversion.file.fields:
                conversion.unneeded(name, why="no value")
            continue
        entries = entries if isinstance(entries, list) else [entries]
        specs = []
        for index, entry in enumerate(entries):
            entry = {"path": entry} if isinstance(entry, str) else entry
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                specs += _dataset(conversion, entry, name, index)
            else:
                conversion.lose(name, index, why="an entry without a path")
        if name == "test_datasets":
            put_eval_sets(conversion, specs, name)
            continue
        put_datasets(conversion, specs, name)
        if name == "pretraining_dataset":
            conversion.ours.setdefault("train_on", "all")


def _dataset(conversion: Conversion, entry: dict[str, Any], name: str, index: int) -> list[dict[str, Any]]:
    """Return the entries of ours for one of theirs; what they do not say is reported."""
    spec: dict[str, Any] = {"path": entry["path"]}

    def lose(key: str, why: str, trains: bool = True) -> None:
        conversion.lose(name, index, key, why=why, trains=trains)

    turns = {**{"role": "role", "content": "content"}, **_group(entry.get("message_property_mappings"))}
    turns |= {"role": entry.get("message_field_role") or turns["role"]}
    turns |= {"content": entry.get("message_field_content") or turns["content"]}
    files = entry.get("data_files")
    for key, value in entry.items():
        if value in (None, "", False) or key in ("path", "message_property_mappings"):
            continue
        if key == "type":
            _take_type(conversion, spec, value, lose)
        elif key == "name":
            spec["name"] = value
        elif key == "split":
            rows_of_split(spec, value, lambda why: lose("split", why))
        elif key == "ds_type" or key == "trust_remote_code":
            conversion.unneeded(name, index, key, why="the file's ending says it; a dataset's code is not run")
        elif key == "data_files":
            if entry["path"] not in LOADERS and not entry.get("ds_type"):
                lose(key, "files of a dataset on the hub: name them by path")
        elif key in ("message_field_role", "message_field_content"):
            continue
        elif key in COLUMNS:
            if value != COLUMNS[key] and not (key == "field_messages" and value == "conversations"):
                spec["columns"] = {**spec.get("columns", {}), COLUMNS[key]: value}
        elif key in ("roles_to_train", "train_on_eos"):
            _take_trained(conversion, key, value, name, index)
        elif key == "message_field_training" and value in FLAGS:
            conversion.unneeded(name, index, key, why="a message is trained unless it says so itself")
        elif key == "chat_template":
            if value != "tokenizer_default":
                lose(key, "the tokenizer's own template is used; write chat_template: FILE.jinja")
        elif key == "roles":
            if value not in USUAL_ROLES:
                lose(key, "roles are read as user, assistant, system, tool; human and gpt in sharegpt rows")
        else:
            lose(key, "no counterpart in a dataset's entry")
    if (turns["role"], turns["content"]) == ("from", "value"):
        spec["type"] = "sharegpt"
    elif (turns["role"], turns["content"]) != ("role", "content"):
        lose("message_property_mappings", "a turn has 'role' and 'content' here, or 'from' and 'value': rename them")
    if files and (entry["path"] in LOADERS or entry.get("ds_type")):
        return [{**spec, "path": file} for file in (files if isinstance(files, list) else [files])]
    return [spec]


def _take_trained(conversion: Conversion, key: str, value: Any, name: str, index: int) -> None:
    """Convert what is trained of the rows of one dataset: here it is the same for all of them."""
    if key == "roles_to_train" and isinstance(value, list):
        value = list(dict.fromkeys(ROLES.get(role, role) if isinstance(role, str) else str(role) for role in value))
    if value in (["assistant"], "turn") and key not in conversion.ours:
        conversion.unneeded(name, index, key, why="as here")
    elif conversion.objective != "sft" or conversion.ours.get("train_on") == "all":
        conversion.unneeded(name, index, key, why="every token of an answer counts")
    elif conversion.ours.get(key, value) != value:
        conversion.lose(name, index, key, why=f"{key} is the same for all datasets here")
    else:
        conversion.put(key, value, name, index, key)


def _group(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _take_type(conversion: Conversion, spec: dict[str, Any], value: Any, lose: Any) -> None:
    known = TYPES[conversion.objective]
    if isinstance(value, dict):
        lose("type", "a prompt format of your own: write the rows as messages, or as prompt and completion")
    elif value in known:
        if known[value]:
            spec["type"] = known[value]
        if value == "alpaca":
            lose("type", "an alpaca row is rendered by the chat template here, not by Alpaca's own text")
    elif conversion.objective == "dpo":
        kto = conversion.ours.get("loss_type") == "kto"
        spec["type"] = "unpaired" if kto else "preference"
        lose("type", "rows are rendered by the chat template; the columns are prompt, chosen and rejected" if not kto
             else "rows are rendered by the chat template; the columns are prompt, completion and label")  # fmt: skip
    elif conversion.objective == "grpo":
        lose("type", "rows have a 'prompt' column, or messages")
    else:
        lose("type", f"rows are recognised by their columns; '{value}' has a prompt format of its own")
