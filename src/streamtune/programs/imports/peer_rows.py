"""Rows of other trainers: entries of ``datasets``, columns that are read otherwise, templates that render otherwise."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .conversion import Conversion

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that hold what is not text."""
MOST_READ = 2**20
"""Bytes of a file that are read to see the columns of its first row."""


def seen_columns(conversion: Conversion, path: str) -> dict[str, Any] | None:
    """Return the first row of a local file, looked up in the working directory, then beside the recipe; else None.

    Only the column names of a Parquet file are read; their values are None.
    """
    for file in conversion.file.places(path):
        if file.suffix not in DATA_FILES or not file.is_file():
            continue
        try:
            return _first_row(file)
        except (OSError, ValueError, StopIteration):
            return None  # the run says what is wrong with the file
    return None


def _first_row(file: Path) -> dict[str, Any] | None:
    if file.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        return dict.fromkeys(parquet.read_schema(file).names)
    with file.open(encoding="utf-8", newline="") as text:
        if file.suffix == ".csv":
            return dict(next(csv.DictReader(text)))
        if file.suffix == ".txt":
            return {"text": ""}
        read = text.read(MOST_READ).lstrip()
    row, _ = json.JSONDecoder().raw_decode(read.removeprefix("[").lstrip())
    return row if isinstance(row, dict) else None


def lose_unnamed(
    row: Mapping[str, Any] | None, ours: Iterable[str], named: Iterable[Any], lose: Callable[[str], None]
) -> None:
    """Report the columns of the first row that are read here, and not by the other trainer.

    Args:
        row: First row; None if unknown.
        ours: Names of columns that are read here.
        named: Columns that the other trainer reads.
        lose: Function that reports a loss.
    """
    read = set(named)
    for column in ours:
        if row is not None and row.get(column) not in (None, "", [], "[]") and column not in read:
            lose(f"the column '{column}' is not read there, and is here: rename it in the file")


FLAGS = ("train", "training", "loss", "weight")
"""Fields of a message that switch its training on or off."""

READ_OF_MESSAGES = (*FLAGS, "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of a message that are read here, besides role and content."""


def lose_fields(
    row: Mapping[str, Any] | None, column: str, fields: Iterable[str], read: Iterable[str], lose: Callable[[str], None]
) -> None:
    """Report the ``fields`` of the first row's messages that are read here, and not among those the trainer reads."""
    turns = row.get(column) if row is not None else None
    known = set(read)
    for name in fields:
        if name not in known and isinstance(turns, list) and any(_has(turn, name) for turn in turns):
            lose(f"'{name}' of a message is not read there, and is here: take it out of the rows")


def _has(turn: Any, name: str) -> bool:
    return isinstance(turn, dict) and turn.get(name) not in (None, "", [])


def report_media(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int) -> None:
    """Report the columns of images, sounds and videos."""
    for spec in specs:
        row = seen_columns(conversion, str(spec["path"])) or {}
        for column in [name for name in MEDIA if name in row and row[name] not in ("", [])]:
            conversion.lose(*path, why=f"the column '{column}' of {spec['path']}: only its text is trained on")


def put_datasets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Append entries to ``datasets``, with the line of their field."""
    entries = [*conversion.ours.get("datasets", []), *specs]
    if not specs:
        return
    for spec in specs:
        if str(spec["path"]).endswith(DATA_FILES) and spec.get("split") == "train":
            del spec["split"]  # of a file: it has none
    conversion.put("datasets", entries, *path, note=note)
    for index in range(len(entries)):
        conversion.lines.setdefault(("datasets", index), conversion.file.marks.line(path))


def rows_of_split(spec: dict[str, Any], split: Any, lose: Callable[[str], None]) -> None:
    """Write a split: ``train[:1000]`` becomes ``split: train`` and ``max_rows: 1000``."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[:(\d+)\])?", str(split))
    if found is None:
        lose("a part of a split, of which max_rows takes the first rows only")
        spec["split"] = re.split(r"[\[+]", str(split))[0]
        return
    spec["split"] = found[1]
    if found[2]:
        spec["max_rows"] = int(found[2])


def put_weights(conversion: Conversion, value: Any, *path: str | int, note: str = "") -> None:
    """Write the weights of the datasets, given a list of numbers or a text with commas."""
    entries = conversion.ours.get("datasets", [])
    try:
        parts = value.split(",") if isinstance(value, str) else list(value)
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        conversion.lose(*path, why="a list of numbers was expected")
        return
    if len(weights) != len(entries):
        conversion.lose(*path, why=f"{len(weights)} numbers for {len(entries)} datasets: write weight in each")
        return
    weighted = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    conversion.put("datasets", weighted, *path, note=note or "shares of an epoch, which is as long as all rows")


def put_eval_sets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Write eval sets; the path of each makes its name."""
    named: dict[str, list[dict[str, Any]]] = {}
    for spec in specs:
        place = str(spec["path"])
        if place.endswith(DATA_FILES):
            spec.pop("split", None)  # of a file: it has none
            place = place.rpartition(".")[0]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", re.split(r"[/\\\\]", place)[-1]).strip("-")
        name = name if name[:1].isalpha() and name not in ("held_out", "nll") else f"set-{name}"
        while name in named:
            name += "-2"
        named[name] = [spec]
    if named:
        conversion.put("eval_datasets", {**conversion.ours.get("eval_datasets", {}), **named}, *path, note=note)


def rename_columns(spec: dict[str, Any], columns: dict[str, Any], type_: str) -> None:
    """Write the type of the rows and the columns with another name; ``columns`` is our name -> theirs."""
    renamed = {ours: theirs for ours, theirs in columns.items() if isinstance(theirs, str) and theirs != ours}
    if renamed:
        spec["columns"] = renamed
    spec["type"] = type_


CHATML: dict[str, str] = {
    "chatml": "",
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen3_nothink": "",
}
"""Template of LLaMA-Factory that writes ChatML -> its default system message."""

SWIFT_CHATML = ("chatml", "qwen3_nothinking")
"""Templates of ms-swift that write ChatML without a default system message."""

REASONING = (
    *("deepseekr1", "hy3", "ernie_vl", "gemma4", "gemma4n", "glm4_moe", "glm4v", "glm4_5v", "glm4_7", "glmz1"),
    *("gpt_oss", "keye_vl", "kimi_vl", "mimo", "mimo_v2", "mimo_vl", "minimax2", "qwen3", "qwen3_omni", "qwen3_vl"),
    *("qwen3_5", "qwen3_6", "seed_oss", "youtu", "aeva"),
)
"""Templates of LLaMA-Factory that put a think block into every answer."""

GENERIC = ("alpaca", "default", "empty", "vicuna", "fewshot", "original", "aquila")
"""Templates without a model."""

OF_THINKERS = re.compile(r"qwen-?3|qwq|deepseek-?r1|r1-distill|glm-?4\.[5-9]|glm-?z1|mimo|minimax-?m2|seed-?oss", re.I)
NO_THINKERS = re.compile("instruct|coder|embed|rerank", re.I)
"""Models whose chat templates write think blocks, and their relatives whose templates do not."""

COMPARE = "compare a row with `streamtune data`, and write chat_template: FILE.jinja"
EVERY = (
    "every answer has a think block there, empty without reasoning, and here where the tokenizer's template writes one"
)
TRAINING = "for Qwen3 name TRL's chat_templates/qwen3_training.jinja as chat_template, which does the same"


def _thinks(conversion: Conversion) -> bool:
    """Return True if the model's chat template writes think blocks, by the folder's template or the model's name."""
    name = str(conversion.ours.get("model_name_or_path") or conversion.get("model_name_or_path") or "")
    name = name or str(conversion.get("base_model") or "")
    for folder in conversion.file.places(name):
        if name and folder.is_dir() and (found := _template(folder)):
            return "<think>" in found
    return bool(OF_THINKERS.search(name)) and not NO_THINKERS.search(name)


def _template(folder: Path) -> str:
    """Return the chat template of a tokenizer's folder, or an empty text."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
            found = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue
        if found:
            return str(found)
    return ""


def _keep_reasoning(conversion: Conversion) -> None:
    if conversion.objective == "sft":
        conversion.default("reasoning", "keep", "the reasoning of every answer is trained")


def take_llamafactory_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert ``template``, which LLaMA-Factory's own code renders; ``texts`` is True for ``stage: pt``."""
    name, given = conversion.take("template"), "template" in conversion.file.fields
    if texts:
        if given:
            conversion.unneeded("template", why="stage: pt trains texts, without a chat template")
        return
    if isinstance(name, str) and name in CHATML:
        conversion.put("chat_template", "chatml", "template", note="final/ gets this template too")
        if CHATML[name]:
            conversion.default("default_system", CHATML[name], f"template: {name}")
        _leave_thinking(conversion, f"template: {name} writes no think block")
        return
    reasons = name in REASONING or (not name and (_thinks(conversion) or conversion.get("enable_thinking") is not None))
    if not name:
        if given:
            conversion.unneeded("template", why="the tokenizer's own template")
        if not reasons:
            return
    if reasons:
        off = conversion.get("enable_thinking") is False
        if not off and not conversion.get("mask_history"):
            _keep_reasoning(conversion)
        why = (
            "reasoning is removed, and a think block that is not trained stands in every answer there; here in the last"
            if off
            else f"{EVERY}; {TRAINING}"
        )
    else:
        _leave_thinking(conversion, f"template: {name} does not read it")
        own = f"its own code renders '{name}', with no system message or date that the tokenizer's template adds"
        used = "the tokenizer's own template is used; write chat_template: FILE.jinja"
        why = used if name in GENERIC else f"{own}: {COMPARE}"
    if name:
        conversion.lose("template", why=why)
    else:
        conversion.missing("template", why)


def _takes_jinja(conversion: Conversion, *, texts: bool) -> bool:
    """Convert ``template_backend: jinja``: the tokenizer's template renders rows, and every token is trained."""
    name = "template_backend"
    jinja = conversion.take(name) == "jinja"
    if name not in conversion.file.fields:
        return False
    if not jinja or texts or conversion.objective != "sft":
        conversion.unneeded(name, why="see template")
        return jinja
    conversion.put("train_on", "all", name, note="which trains every token there, whatever loss_scale says")
    conversion.dismiss("loss_scale", why="template_backend: jinja trains every token")
    return True


def _leave_thinking(conversion: Conversion, why: str) -> None:
    conversion.dismiss("enable_thinking", "preserve_thinking", why=why)


def take_swift_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert ``template``; ms-swift renders every model by a template of its own."""
    name, given = conversion.take("template"), "template" in conversion.file.fields
    jinja = _takes_jinja(conversion, texts=texts)
    if texts or jinja:
        if given:
            conversion.unneeded("template", why="texts have no chat template" if texts else "template_backend: jinja")
        return
    if given and not name:
        conversion.unneeded("template", why="no value")
    if name in SWIFT_CHATML:
        conversion.put("chat_template", "chatml", "template", note="final/ gets this template too")
        return
    if name == "qwen3" or (not name and _thinks(conversion)):
        keeps = conversion.get("preserve_thinking")
        if str(conversion.get("loss_scale")).startswith("last_round") and not keeps:
            if name:
                conversion.unneeded("template", why="the last answer is rendered as by the tokenizer's own")
            return
        if keeps is not False:
            _keep_reasoning(conversion)
        why = f"{EVERY}; {TRAINING}"
    else:
        why = f"its own code renders {f'{name!r}' if name else 'each kind of model'}, not the tokenizer: {COMPARE}"
    if name:
        conversion.lose("template", why=why)
    else:
        conversion.missing("template", why, trains=_thinks(conversion))


def report_empty_thoughts(conversion: Conversion, types: list[Any]) -> None:
    """Report empty think blocks before answers, which axolotl masks."""
    if conversion.objective == "sft" and "chat_template" in types and _thinks(conversion):
        why = "'<think>' and an empty think block, which stand before an answer, are not trained there, and are here"
        conversion.missing("datasets.type: chat_template", why)


def take_trl_template(conversion: Conversion) -> None:
    """Report TRL's own template for ``assistant_only_loss``."""
    if conversion.get("chat_template_path") is None and _thinks(conversion):
        _keep_reasoning(conversion)
        conversion.missing("assistant_only_loss: true", f"a template of TRL's renders the rows: {EVERY}; {TRAINING}")
