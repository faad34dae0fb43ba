"""Convert datasets and chat templates of other trainers, and report columns and templates that differ."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from streamtune.base.chat_templates import CHAT_TEMPLATES

from .conversion import Conversion
from .field_rules import names_all_layers

DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")
MEDIA = ("video", "videos", "audio", "audios")
"""Names of columns with videos or audio."""
MAX_READ = 2**20
"""Maximum number of bytes to read from a file to find its first row."""


def first_local_row(conversion: Conversion, path: str) -> dict[str, Any] | None:
    """Return the first row of a local data file; None if the file does not exist or is unreadable.

    ``path`` is relative to the working directory or to the recipe's folder. For a Parquet file, only the column names
    are read, and all values are None.
    """
    for file in conversion.file.candidate_paths(path):
        if file.suffix not in DATA_FILES or not file.is_file():
            continue
        try:
            return _first_row(file)
        except (OSError, ValueError, StopIteration):
            return None  # training reports what is wrong with the file
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
        read = text.read(MAX_READ).lstrip()
    row, _ = json.JSONDecoder().raw_decode(read.removeprefix("[").lstrip())
    return row if isinstance(row, dict) else None


def report_unread_columns(
    row: Mapping[str, Any] | None,
    our_columns: Iterable[str],
    their_columns: Iterable[Any],
    report_lost: Callable[[str], None],
) -> None:
    """Report columns of the first row that StreamTune reads and the other trainer ignores.

    Args:
        row: First row; None if unknown.
        report_lost: Function that takes a reason and reports a difference.
    """
    read = set(their_columns)
    for column in our_columns:
        if row is not None and row.get(column) not in (None, "", [], "[]") and column not in read:
            report_lost(f"only StreamTune reads the column '{column}': rename it in the file")


FLAGS = ("train", "training", "loss", "weight")
"""Fields of a message that decide whether it is trained on."""

READ_OF_MESSAGES = (*FLAGS, "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of a message that StreamTune reads, besides role and content."""


def report_unread_fields(
    row: Mapping[str, Any] | None,
    column: str,
    our_fields: Iterable[str],
    their_fields: Iterable[str],
    report_lost: Callable[[str], None],
) -> None:
    """Report fields of the first row's messages that StreamTune reads and the other trainer ignores."""
    turns = row.get(column) if row is not None else None
    known = set(their_fields)
    for name in our_fields:
        if name not in known and isinstance(turns, list) and any(_has_field(turn, name) for turn in turns):
            report_lost(f"only StreamTune reads '{name}' of a message: remove it from the rows")


def _has_field(turn: Any, name: str) -> bool:
    return isinstance(turn, dict) and turn.get(name) not in (None, "", [])


def report_media(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int) -> None:
    """Report dataset columns with videos or audio, on which StreamTune does not train."""
    for spec in specs:
        row = first_local_row(conversion, str(spec["path"])) or {}
        for column in [name for name in MEDIA if name in row and row[name] not in ("", [])]:
            conversion.report_lost(*path, why=f"StreamTune does not train on '{column}' of {spec['path']}")


def rows_have_images(conversion: Conversion) -> bool:
    """Return True if the first row of a local dataset has images."""
    rows = [first_local_row(conversion, str(spec["path"])) or {} for spec in conversion.ours.get("datasets", [])]
    return any(name in row and row[name] not in ("", []) for row in rows for name in ("images", "image"))


def convert_trained_tower(conversion: Conversion, target: str) -> None:
    """Train the vision tower and the projector if rows have images, for a trainer that freezes nothing by default.

    Args:
        conversion: Conversion of the recipe.
        target: Field that names the layers with adapters. All linear layers include the layers for images.
    """
    if conversion.file.fields.get("freeze_mm_modules") or not rows_have_images(conversion):
        return
    if conversion.ours.get("finetuning_type", "full") == "full":
        conversion.write_default("freeze_vision_tower", False)
        conversion.write_default("freeze_projector", False)
    elif not names_all_layers(conversion.get(target)) and conversion.get("lora_target_modules"):
        conversion.report_lost_setting(
            "adapters in the vision tower",
            f"{conversion.trainer.title} adapts named layers of both parts, StreamTune only of the language model; "
            "add vision-tower or patterns such as 'vision_tower.*q_proj' to lora_target",
        )
    elif names_all_layers(conversion.get(target)):
        conversion.write_key("lora_target", ["all-linear", "vision-tower", "vision-projector"], target, replaces=True)


def write_datasets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Append dataset entries to the key ``datasets``.

    Later errors in these entries show the line of the imported field, whose key path is ``path``.
    """
    entries = [*conversion.ours.get("datasets", []), *specs]
    if not specs:
        return
    for spec in specs:
        if str(spec["path"]).endswith(DATA_FILES) and spec.get("split") == "train":
            del spec["split"]  # a file has no split
    conversion.write_key("datasets", entries, *path, note=note, replaces=True)
    for index in range(len(entries)):
        conversion.lines.setdefault(("datasets", index), conversion.file.marks.key_line(path))


def convert_split(spec: dict[str, Any], split: Any, report_lost: Callable[[str], None]) -> None:
    """Convert a dataset split; ``train[:1000]`` becomes ``split: train`` and ``max_rows: 1000``."""
    found = re.fullmatch(r"([^\[\]]+)(?:\[:(\d+)\])?", str(split))
    if found is None:
        report_lost("StreamTune reads only whole splits, or with max_rows their first rows")
        spec["split"] = re.split(r"[\[+]", str(split))[0]
        return
    spec["split"] = found[1]
    if found[2]:
        spec["max_rows"] = int(found[2])


def write_weights(conversion: Conversion, value: Any, *path: str | int, note: str = "") -> None:
    """Set ``weight`` of each dataset from a list of numbers or a comma-separated text."""
    entries = conversion.ours.get("datasets", [])
    try:
        parts = value.split(",") if isinstance(value, str) else list(value)
        weights = [float(part) for part in parts]
    except (TypeError, ValueError):
        conversion.report_lost(*path, why="dataset weights must be a list of numbers")
        return
    if len(weights) != len(entries):
        conversion.report_lost(
            *path, why=f"{len(weights)} numbers for {len(entries)} datasets: write weight in each dataset entry"
        )
        return
    weighted = [{**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True)]
    conversion.write_key(
        "datasets",
        weighted,
        *path,
        note=note or "a weight is the share of the dataset in the rows of an epoch",
        replaces=True,
    )


def write_eval_sets(conversion: Conversion, specs: list[dict[str, Any]], *path: str | int, note: str = "") -> None:
    """Write ``eval_datasets``; each set is named after its path."""
    named: dict[str, list[dict[str, Any]]] = {}
    for spec in specs:
        place = str(spec["path"])
        if place.endswith(DATA_FILES):
            spec.pop("split", None)  # a file has no split
            place = place.rpartition(".")[0]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", re.split(r"[/\\\\]", place)[-1]).strip("-")
        name = name if name[:1].isalpha() and name not in ("held_out", "nll") else f"set-{name}"
        while name in named:
            name += "-2"
        named[name] = [spec]
    if named:
        conversion.merge_into_key("eval_datasets", named, *path, note=note)


def write_columns(spec: dict[str, Any], columns: dict[str, Any], row_type: str) -> None:
    """Set ``type`` and ``columns`` of a dataset entry; ``columns`` maps StreamTune's column names to the file's."""
    renamed = {ours: theirs for ours, theirs in columns.items() if isinstance(theirs, str) and theirs != ours}
    if renamed:
        spec["columns"] = renamed
    spec["type"] = row_type


QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
GRANITE = "You are Granite, developed by IBM. You are a helpful AI assistant."

EQUAL_TEMPLATES: dict[str, dict[str, tuple[str, str]]] = {
    "LLaMA-Factory": {
        "chatml": ("chatml", ""),
        "chatml_de": ("chatml", "Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
        "granite4": ("granite", GRANITE),
        "mistral_small": ("mistral", ""),
        "phi4": ("phi4", ""),
        "qwen": ("qwen3_nothink", QWEN),
        "qwen3_nothink": ("qwen3_nothink", ""),
        "smollm": ("chatml", ""),
        "smollm2": ("chatml", SMOLLM),
    },
    "axolotl": {
        "chatml": ("chatml", ""),
        "gemma": ("gemma", ""),
        "gemma3": ("gemma3", ""),
        "llama3": ("llama3", ""),
        "qwen_25": ("qwen3_nothink", QWEN),
    },
    "ms-swift": {
        "chatml": ("chatml", ""),
        "phi4": ("phi4", ""),
        "qwen": ("qwen3_nothink", "You are a helpful assistant."),
        "qwen2_5": ("qwen3_nothink", QWEN),
        "qwen3_nothinking": ("qwen3_nothink", ""),
    },
}
"""Trainer -> its template -> StreamTune's template that prints the same without tools, and the default system
message."""

STRIPS = "strips whitespace at the ends of messages"
NEAR_TEMPLATES: dict[str, dict[str, tuple[str, str]]] = {
    "LLaMA-Factory": {
        "alpaca": ("alpaca", "begins with BOS, and writes a blank line after a row's system message"),
        "gemma": ("gemma3", STRIPS),
        "gemma2": ("gemma3", STRIPS),
        "gemma3": ("gemma3", STRIPS),
        "llama3": ("llama3", STRIPS),
        "vicuna": (
            "vicuna",
            "begins with BOS, and writes a blank before the first 'USER:' and after 'ASSISTANT:'",
        ),
    },
    "axolotl": {
        "alpaca": ("alpaca", "begins with Alpaca's prompt where a row has no system message"),
        "mistral_v7_tekken": ("mistral", "writes no default system message"),
        "qwen3": ("qwen3", "trains '<think>' and an empty think block before an answer"),
    },
    "ms-swift": {
        "gemma3_text": ("gemma3", STRIPS),
        "llama3": ("llama3", STRIPS),
        "mistral_2501": ("mistral", "writes no default system message"),
    },
}
"""Trainer -> its template -> StreamTune's nearest template, and what that does and the trainer's does not."""

REASONING = (
    *("deepseekr1", "hy3", "ernie_vl", "gemma4", "gemma4n", "glm4_moe", "glm4v", "glm4_5v", "glm4_7", "glmz1"),
    *("gpt_oss", "keye_vl", "kimi_vl", "mimo", "mimo_v2", "mimo_vl", "minimax2", "qwen3", "qwen3_omni", "qwen3_vl"),
    *("qwen3_5", "qwen3_6", "seed_oss", "youtu", "aeva"),
)
"""Templates of LLaMA-Factory that add a think block (``<think>...</think>``) to every answer."""

GENERIC = ("default", "empty", "fewshot", "original", "aquila")
"""Templates of LLaMA-Factory that do not belong to a particular model."""

THINKING_MODELS = re.compile(
    r"qwen-?3|qwq|deepseek-?r1|r1-distill|glm-?4\.[5-9]|glm-?z1|mimo|minimax-?m2|seed-?oss", re.I
)
NON_THINKING_MODELS = re.compile("instruct|coder|embed|rerank", re.I)
"""Two patterns: names of models whose chat templates render think blocks, and names that are exceptions."""

NAME_OR_FILE = "write chat_template: NAME or FILE.jinja"
COMPARE = f"check a row with `streamtune data`; if it differs, {NAME_OR_FILE}"
EVERY = (
    "the other trainer adds a think block, maybe empty, to every answer; "
    "StreamTune does so only if the tokenizer's template does"
)
TRAINING = "for Qwen3, TRL's file does the same: write chat_template: qwen3_training.jinja"


def _template_renders_thinking(conversion: Conversion) -> bool:
    """Return True if the model's chat template renders ``<think>``, judged by the template or the model's name."""
    name = str(conversion.ours.get("model_name_or_path") or conversion.get("model_name_or_path") or "")
    name = name or str(conversion.get("base_model") or "")
    for folder in conversion.file.candidate_paths(name):
        if name and folder.is_dir() and (found := _read_template(folder)):
            return "<think>" in found
    return bool(THINKING_MODELS.search(name)) and not NON_THINKING_MODELS.search(name)


def _read_template(folder: Path) -> str:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
            found = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue
        if found:
            return str(found)
    return ""


def _write_keep_reasoning(conversion: Conversion) -> None:
    if conversion.objective == "sft":
        conversion.write_default(
            "reasoning", "keep", "the reasoning of every answer is trained, as in the other trainer"
        )


def write_named_template(conversion: Conversion, name: Any, field: str) -> bool:
    """Write the template of StreamTune for the trainer's template ``name``; return False if none prints the same.

    A template that only comes near is written too, and what it does differently is reported as a star.
    """
    title = conversion.trainer.title
    equal, near = (table[title].get(str(name)) for table in (EQUAL_TEMPLATES, NEAR_TEMPLATES))
    ours, rest = equal or near or ("", "")
    if not ours:
        return False
    if not conversion.write_key("chat_template", ours, field, note="StreamTune saves this template in final/ too"):
        return True
    if equal is not None and rest:
        conversion.write_default("default_system", rest, f"{field}: {name}")
    elif equal is None:
        conversion.report_lost(field, why=f"StreamTune's {ours} {rest}; {title}'s does not")
    return True


def report_tools_of_named_template(conversion: Conversion, report_lost: Callable[[str], None]) -> None:
    """Report rows with tools if StreamTune's template was written for the trainer's; they are equal without tools."""
    if (ours := conversion.ours.get("chat_template")) in CHAT_TEMPLATES:
        report_lost(f"StreamTune's {ours} renders tools differently from {conversion.trainer.title}: {NAME_OR_FILE}")


def convert_llamafactory_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert LLaMA-Factory's ``template``; ``texts`` is True for ``stage: pt``, which uses no chat template."""
    name, given = conversion.pop_field("template"), "template" in conversion.file.fields
    if texts:
        if given:
            conversion.report_unneeded("template", why="stage: pt trains texts without a chat template")
        return
    if write_named_template(conversion, name, "template"):
        _report_thinking_unneeded(conversion, f"LLaMA-Factory's template: {name} renders no think block")
        return
    reasons = name in REASONING or (
        not name and (_template_renders_thinking(conversion) or conversion.get("enable_thinking") is not None)
    )
    if not name:
        if given:
            conversion.report_unneeded("template", why="StreamTune uses the tokenizer's own template")
        if not reasons:
            return
    if reasons:
        off = conversion.get("enable_thinking") is False
        if not off and not conversion.get("mask_history"):
            _write_keep_reasoning(conversion)
        why = (
            "LLaMA-Factory removes reasoning and adds an untrained think block to every answer; "
            "StreamTune adds such a block only to the last answer"
            if off
            else f"{EVERY}; {TRAINING}"
        )
    else:
        _report_thinking_unneeded(conversion, f"LLaMA-Factory's template: {name} does not use this field")
        own = f"LLaMA-Factory renders '{name}' without the tokenizer template's system message or date"
        used = f"StreamTune uses the tokenizer's own template; for another, {NAME_OR_FILE}"
        why = used if name in GENERIC else f"{own}: {COMPARE}"
    if name:
        conversion.report_lost("template", why=why)
    else:
        conversion.report_lost_setting("template", why)


def _convert_template_backend(conversion: Conversion, *, texts: bool) -> bool:
    """Convert ms-swift's ``template_backend``; return True if it is ``jinja``.

    ms-swift then uses the tokenizer's chat template and trains on all tokens.
    """
    name = "template_backend"
    jinja = conversion.pop_field(name) == "jinja"
    if name not in conversion.file.fields:
        return False
    if not jinja or texts or conversion.objective != "sft":
        conversion.report_unneeded(name, why="see template")
        return jinja
    conversion.write_key("train_on", "all", name, note="ms-swift then trains every token, whatever loss_scale is")
    conversion.mark_unneeded("loss_scale", why="template_backend: jinja trains every token")
    return True


def _report_thinking_unneeded(conversion: Conversion, why: str) -> None:
    conversion.mark_unneeded("enable_thinking", "preserve_thinking", why=why)


def convert_swift_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert ms-swift's ``template``; ``texts`` is True if rows are plain text without a chat template."""
    name, given = conversion.pop_field("template"), "template" in conversion.file.fields
    jinja = _convert_template_backend(conversion, texts=texts)
    if texts or jinja:
        if given:
            conversion.report_unneeded(
                "template", why="plain texts have no chat template" if texts else "template_backend: jinja"
            )
        return
    if given and not name:
        conversion.report_unneeded("template", why="no value")
    if write_named_template(conversion, name, "template"):
        return
    if name == "qwen3" or (not name and _template_renders_thinking(conversion)):
        keeps = conversion.get("preserve_thinking")
        if str(conversion.get("loss_scale")).startswith("last_round") and not keeps:
            if name:
                conversion.report_unneeded("template", why="the tokenizer's template gives the same last answer")
            return
        if keeps is not False:
            _write_keep_reasoning(conversion)
        why = f"{EVERY}; {TRAINING}"
    else:
        why = f"ms-swift renders {f'{name!r}' if name else 'each model type'} with its own code: {COMPARE}"
    if name:
        conversion.report_lost("template", why=why)
    else:
        conversion.report_lost_setting("template", why, changes_training=_template_renders_thinking(conversion))


def report_untrained_think_blocks(conversion: Conversion, types: list[Any]) -> None:
    """Report that StreamTune trains empty think blocks (``<think></think>``) before answers, and axolotl does not."""
    if conversion.objective == "sft" and "chat_template" in types and _template_renders_thinking(conversion):
        why = "axolotl does not train '<think>' and an empty think block before an answer; StreamTune does"
        conversion.report_lost_setting("datasets.type: chat_template", why)


def convert_trl_template(conversion: Conversion) -> None:
    """If the model writes think blocks, report that TRL replaces the chat template for ``assistant_only_loss``."""
    if conversion.get("chat_template_path") is None and _template_renders_thinking(conversion):
        _write_keep_reasoning(conversion)
        conversion.report_lost_setting(
            "assistant_only_loss: true", f"TRL renders the rows with its own template: {EVERY}; {TRAINING}"
        )
