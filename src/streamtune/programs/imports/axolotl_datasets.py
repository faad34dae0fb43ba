"""Convert the datasets of axolotl's recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .conversion import Conversion
from .field_rules import FieldRule, UnconvertedError, field_table, lookup_converter
from .rows_and_templates import (
    FLAGS,
    NAME_OR_FILE,
    convert_split,
    first_local_row,
    report_media,
    report_unread_columns,
    report_unread_fields,
    write_datasets,
    write_eval_sets,
)

SETS = ("datasets", "pretraining_dataset", "test_datasets")

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
"""For each objective, {axolotl's dataset type: StreamTune's row type}. Other types are axolotl's prompt formats."""

COLUMNS: dict[str, str] = {
    "field_messages": "messages",
    "field_tools": "tools",
    "field_system": "system",
    "field": "text",
    "text_column": "text",
    "field_prompt": "prompt",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
}
"""{field of axolotl's dataset entry: column that StreamTune reads}."""

TEXTS = ("completion", "pretrain")
"""Dataset types of plain texts, which axolotl splits into parts of ``sequence_len`` tokens."""

ENTRY_FIELDS: dict[str, FieldRule] = field_table(
    {},
    renamed={
        "datasets": """path name split data_files field_messages field_tools field_system field text_column field_prompt
            field_chosen field_rejected field_completion field_label type message_property_mappings message_field_role
            message_field_content type.field_prompt type.field_chosen type.field_rejected type.field_completion
            type.field_label chat_template chat_template_jinja message_field_training roles""",
        "roles_to_train": "roles_to_train",
        "train_on_eos": "train_on_eos",
    },
    not_needed={
        "StreamTune recognises a file by its ending and runs no code of a dataset": "ds_type trust_remote_code",
        "StreamTune prepares rows when the run starts": "preprocess_shards",
        "StreamTune renders reasoning in the text unchanged; see the key reasoning": "split_thinking",
        "StreamTune reads reasoning from reasoning_content, reasoning and thinking": "field_thinking",
        "used only with kd_trainer": "logprobs_field temperature",
        "StreamTune recognises turns by their roles": "field_human field_model",
        "axolotl reads this field only with type: synthetic": "length sequence_length min_input_id max_input_id seed",
        "only process reward models use this field": "step_separator max_completion_length train_on_last_step_only",
    },
    lost={
        "to train only a part of the rows, write max_rows": "shards shards_idx skip",
        "StreamTune cannot read an older revision of a dataset": "revision",
        "a custom prompt format": """conversation input_format input_transform type.system_prompt type.system_format
            type.format type.no_input_format type.field_system type.field_instruction type.field_input type.field_output
            type.prompt_format type.chosen_format type.rejected_format type.completion_format""",
        "StreamTune masks only whole messages (train: false), not spans": "message_field_training_detail",
        "end-of-turn tokens: see train_on_eos": "train_on_eot",
        "StreamTune does not drop system messages": "drop_system_message",
        "StreamTune needs the reasoning in reasoning_content or thinking": "template_thinking_key",
    },
)


USUAL_ROLES = [
    {"user": [*users], "assistant": [*models]}
    for users in (("user",), ("human",), ("user", "human"), ("human", "user"))
    for models in (("assistant",), ("gpt",), ("assistant", "gpt"), ("gpt", "assistant"))
]
"""Values of ``roles`` that StreamTune recognises without a setting."""

ROLES = {"gpt": "assistant", "human": "user", "model": "assistant"}
"""{axolotl's role name: StreamTune's role name}."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold reasoning."""

READ_FIRST = ("path", "message_property_mappings", "message_field_role", "message_field_content")
"""Fields of a dataset entry that are converted first."""

LOADERS = ("json", "csv", "parquet", "text", "arrow")
"""Values of ``path`` that name a loader for ``data_files``."""


def dataset_types(conversion: Conversion) -> list[Any]:
    entries = conversion.get("datasets")
    return [entry.get("type") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def convert_datasets(conversion: Conversion) -> None:
    texts: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for name in SETS:
        entries = conversion.pop_field(name)
        if entries is None:
            if name in conversion.file.fields:
                conversion.report_unneeded(name, why="no value")
            continue
        entries = entries if isinstance(entries, list) else [entries]
        specs = []
        for index, entry in enumerate(entries):
            entry = {"path": entry} if isinstance(entry, str) else entry
            if isinstance(entry, dict) and isinstance(entry.get("path"), str):
                found = _convert_dataset(conversion, entry, name, index)
                is_text = entry.get("type", "pretrain" if name == "pretraining_dataset" else "") in TEXTS
                (texts if is_text else others).extend(found)
                report_media(conversion, found, name, index)
                specs += found
            else:
                conversion.report_lost(name, index, why="the dataset entry has no path")
        if name == "test_datasets":
            write_eval_sets(conversion, specs, name)
            continue
        write_datasets(conversion, specs, name)
        if name == "pretraining_dataset":
            conversion.ours.setdefault("train_on", "all")
    _convert_long_rows(conversion, bool(texts), bool(others))


def _convert_long_rows(conversion: Conversion, has_texts: bool, has_other_rows: bool) -> None:
    """Convert ``excess_length_strategy``, except for plain texts, which axolotl always splits."""
    name, packs = "excess_length_strategy", conversion.get("sample_packing")
    given = name in conversion.file.fields
    strategy = conversion.pop_field(name)
    try:
        ours = lookup_converter({"drop": "drop", "truncate": "truncate", "raise": "error"})(strategy or "drop")
    except UnconvertedError as error:
        conversion.report_lost(name, why=str(error))
        ours, given = "drop", False
    if not has_texts or conversion.objective != "sft":
        if given and strategy:
            conversion.write_key("overlength", ours, name)
        elif given:
            conversion.report_unneeded(name, why="no value")
        return
    conversion.write_default("overlength", "split", "axolotl splits a text into parts of sequence_len tokens")
    if has_other_rows:
        what = name if given else f"{name}: {ours}"
        why = "axolotl splits only texts; StreamTune's overlength applies to all rows"
        conversion.report_lost(name, why=why) if given else conversion.report_lost_setting(what, why)
    elif given:
        conversion.report_unneeded(name, why="StreamTune splits texts, so they are never too long")
    if conversion.get("pretraining_dataset"):
        why = "axolotl cuts a text into windows that overlap by up to 256 tokens and end with EOS; StreamTune does not"
        cut = "without sample_packing, axolotl truncates a text at sequence_len; StreamTune trains on the whole text"
        conversion.report_lost_setting("pretraining_dataset", why if packs else cut)


def _convert_dataset(conversion: Conversion, entry: dict[str, Any], name: str, index: int) -> list[dict[str, Any]]:
    """Return StreamTune's dataset entries for an entry of axolotl; report settings that are not converted."""
    spec: dict[str, Any] = {"path": entry["path"]}

    def report_lost(key: str, why: str) -> None:
        conversion.report_lost(name, index, key, why=why)

    given = entry.get("message_property_mappings")
    turns = {"role": "role", "content": "content", **(given if isinstance(given, dict) else {})}
    turn = tuple(entry.get(f"message_field_{part}") or turns[part] for part in ("role", "content"))
    files = entry.get("data_files")
    prompt = "messages"
    for key, value in entry.items():
        if value in (None, "", False) or key in READ_FIRST:
            continue
        if key == "type":
            _convert_dataset_type(conversion, spec, value, report_lost)
        elif key == "chat_template_jinja":
            conversion.write_key("chat_template", value, name, index, key)
        elif key == "name":
            spec["name"] = value
        elif key == "split":
            convert_split(spec, value, conversion.make_lost_reporter(name, index, "split"))
        elif key == "field_thinking" and value not in THOUGHTS:
            report_lost(key, f"StreamTune reads reasoning from {', '.join(THOUGHTS)}")
        elif key in ENTRY_FIELDS and not ENTRY_FIELDS[key].needed:
            conversion.report_unneeded(name, index, key, why=ENTRY_FIELDS[key].why)
        elif key == "data_files":
            if entry["path"] not in LOADERS and not entry.get("ds_type"):
                report_lost(key, "give the files of a hub dataset in path")
        elif key == "field_messages" and conversion.objective == "dpo":
            prompt = value
        elif key in COLUMNS:
            if value != COLUMNS[key] and not (key == "field_messages" and value == "conversations"):
                spec["columns"] = {**spec.get("columns", {}), COLUMNS[key]: value}
        elif key in ("roles_to_train", "train_on_eos", "train_on_eot"):
            _convert_trained_turns(conversion, value, name, index, key)
        elif key == "message_field_training" and value in FLAGS:
            conversion.report_unneeded(
                name, index, key, why=f"StreamTune reads the message fields {', '.join(FLAGS)} without a setting"
            )
        elif key == "chat_template":
            if value not in ("tokenizer_default", "jinja"):
                report_lost(key, f"to change the tokenizer's own chat template, {NAME_OR_FILE}")
        elif key == "roles":
            if value not in USUAL_ROLES:
                report_lost(key, "roles are user, assistant, system and tool; in sharegpt rows, human and gpt")
        else:
            rule = ENTRY_FIELDS.get(key)
            report_lost(key, rule.why if rule else "StreamTune does not know this key of a dataset")
    if entry.get("type") == "chat_template.default" and conversion.objective == "dpo" and prompt != "prompt":
        spec["columns"] = {"prompt": prompt, **spec.get("columns", {})}
    if turn == ("from", "value"):
        if conversion.objective == "sft":
            spec["type"] = "sharegpt"
    elif turn != ("role", "content"):
        report_lost(
            "message_property_mappings", "rename fields: turns need 'role' and 'content', or 'from' and 'value'"
        )
    if conversion.objective == "sft":
        column = str(entry.get("field_messages") or "messages")
        flags = (str(entry.get("message_field_training")),)
        row, lose_path = first_local_row(conversion, entry["path"]), conversion.make_lost_reporter(name, index, "path")
        report_unread_fields(row, column, FLAGS, flags, lose_path)
        if conversion.ours.get("chat_template") == "chatml":  # axolotl's chatml renders only roles and contents
            report_unread_fields(row, column, (*THOUGHTS, "tool_calls"), (), lose_path)
            report_unread_columns(row, ("tools",), (), lose_path)
    if files and (entry["path"] in LOADERS or entry.get("ds_type")):
        return [{**spec, "path": file} for file in (files if isinstance(files, list) else [files])]
    return [spec]


def _convert_trained_turns(conversion: Conversion, value: Any, name: str, index: int, setting: str) -> None:
    """Convert ``roles_to_train`` or ``train_on_eos`` of a dataset; StreamTune has one setting for all datasets."""
    key = "train_on_eos" if setting == "train_on_eot" else setting
    if key == "roles_to_train" and isinstance(value, list):
        value = list(dict.fromkeys(ROLES.get(role, role) if isinstance(role, str) else str(role) for role in value))
    if key == "roles_to_train" and conversion.get("train_on_inputs"):
        conversion.report_unneeded(name, index, setting, why="train_on_inputs trains every role")
    elif value in (["assistant"], "turn") and key not in conversion.ours:
        conversion.report_unneeded(name, index, setting, why="as in StreamTune")
    elif conversion.objective != "sft" or conversion.ours.get("train_on") == "all":
        conversion.report_unneeded(name, index, setting, why="StreamTune trains all tokens of an answer")
    elif conversion.ours.get(key, value) != value:
        conversion.report_lost(name, index, setting, why=f"StreamTune has one {key} for all datasets")
    else:
        conversion.write_key(key, value, name, index, setting)


def _convert_dataset_type(
    conversion: Conversion, spec: dict[str, Any], value: Any, report_lost: Callable[[str, str], None]
) -> None:
    known = TYPES[conversion.objective]
    kto = conversion.ours.get("loss_type") == "kto"
    if isinstance(value, dict) and conversion.objective == "dpo" and not any("format" in key for key in value):
        spec["type"] = "unpaired" if kto else "preference"
        names = {COLUMNS[key]: column for key, column in value.items() if key in COLUMNS and column}
        if renamed := {ours: column for ours, column in names.items() if ours != column}:
            spec["columns"] = {**spec.get("columns", {}), **renamed}
    elif isinstance(value, dict):
        report_lost(
            "type", "StreamTune has no custom prompt formats: write rows as messages or as prompt and completion"
        )
    elif value in known:
        if known[value]:
            spec["type"] = known[value]
        if value == "alpaca":
            report_lost("type", "StreamTune uses the chat template, not Alpaca's prompt text")
    elif conversion.objective == "dpo":
        spec["type"] = "unpaired" if kto else "preference"
        columns = "prompt, completion and label" if kto else "prompt, chosen and rejected"
        report_lost("type", f"StreamTune renders the rows with the chat template; the columns must be {columns}")
    elif conversion.objective == "grpo":
        report_lost("type", "StreamTune's grpo rows need a column 'prompt' or messages")
    else:
        report_lost("type", f"StreamTune recognises rows by their columns; '{value}' has a custom prompt format")
