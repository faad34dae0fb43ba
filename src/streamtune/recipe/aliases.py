"""Translate keys and values of other trainers to StreamTune's.

A name with an equivalent is accepted, and a note tells the user. A name without an equivalent is refused, and the fix
says what to write. A key that is given under two names is a mistake. Each dict below lists the names of one kind.
"""

from __future__ import annotations

from typing import Any

from streamtune.base.adapters import ADAPTERS, NAMED_STARTS
from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.recipe.yaml import KeyOrigins, KeyPath, Mistake, show_path

ALIASES: dict[str, str] = {
    # model
    "base_model": "model_name_or_path",
    "model_id": "model_name_or_path",
    "model_name": "model_name_or_path",
    # adapters
    "adapter": "finetuning_type",
    "additional_target": "modules_to_save",
    "lora_modules_to_save": "modules_to_save",
    "lora_model_dir": "adapter_name_or_path",
    "exclude_modules": "lora_exclude",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
    "lora_rank": "lora_r",
    "lora_target_modules": "lora_target",
    "quantization_bit": "quantization",
    "target_modules": "lora_target",
    "unfrozen_parameters": "train",
    # data
    "cutoff_len": "max_length",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "model_max_length": "max_length",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "default_system_message": "default_system",
    "system": "default_system",
    "val_set_size": "val_size",
    # tokens
    "add_tokens": "added_tokens",
    "tokens": "added_tokens",
    # routers of a mixture of experts
    "aux_loss_coef": "router_aux_loss_coef",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
    "moe_z_loss_coeff": "router_z_loss_coef",
    # preferences
    "rl": "objective",
    "rl_beta": "beta",
    "pref_beta": "beta",
    "pref_loss": "loss_type",
    "pref_ftx": "rpo_alpha",
    "dpo_label_smoothing": "label_smoothing",
    "kto_chosen_weight": "desirable_weight",
    "kto_desirable_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "ref_model": "ref_model_name_or_path",
    "teacher_model_name_or_path": "teacher",
    "teacher_model": "teacher",
    "kd_temp": "kd_temperature",
    # optimisation
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "adam_eps": "adam_epsilon",
    "gradient_clipping": "max_grad_norm",
    # several devices
    "context_parallel_size": "sequence_parallel_size",
    "global_batch_size": "train_batch_size",
    # the run
    "random_seed": "seed",
    "torch_dtype": "dtype",
}
"""Another trainer's key -> StreamTune's key with the same meaning."""

DATASET_ALIASES: dict[str, str] = {
    "config_name": "name",
    "dataset_name": "path",
    "dataset_split": "split",
    "file_name": "path",
    "hf_hub_url": "path",
    "num_samples": "max_rows",
    "subset": "name",
}
"""Another trainer's key in an entry of ``datasets`` -> StreamTune's key with the same meaning."""

DATASET_INSTEAD: dict[str, str] = {
    "data_files": "write the path of each file",
    "ds_type": "delete this key; the suffix of the file sets the format",
    "field": "write columns: {text: NAME}",
    "field_input": "write columns: {input: NAME}",
    "field_instruction": "write columns: {instruction: NAME}",
    "field_messages": "write columns: {messages: NAME}",
    "field_output": "write columns: {output: NAME}",
    "field_system": "write columns: {system: NAME}",
    "field_tools": "write columns: {tools: NAME}",
    "formatting": "write type: messages, sharegpt or alpaca",
    "message_property_mappings": "write type: sharegpt for turns with 'from' and 'value'",
    "ranking": "write type: preference",
    "roles_to_train": "write this key at the top level; it applies to all datasets",
    "streaming": "write this key at the top level; it applies to all datasets",
    "tags": "write type: sharegpt for turns with 'from' and 'value'",
    "text_column": "write columns: {text: NAME}",
    "train_on_eos": "write this key at the top level; it applies to all datasets",
}
"""Another trainer's key in an entry of ``datasets`` that has no equivalent -> what to write instead."""

CHOICES: dict[str, dict[str, tuple[str, str] | None]] = {
    name: {
        "true": None,
        "default": None,
        **{kind: ("adapter_type", kind) for kind in NAMED_STARTS},
    }
    for name in ("init_lora_weights", "peft_init_lora_weights", "init_weights")
}
"""Another library's key -> its values -> StreamTune's key and value; None for a value without effect."""

SWITCHES: dict[str, tuple[str, str]] = {
    "load_in_4bit": ("quantization", "nf4"),
    "load_in_8bit": ("quantization", "int8"),
    **{switch: ("adapter_type", name) for name, kind in ADAPTERS.items() for switch in kind.switches},
}
"""Another trainer's boolean key -> StreamTune's key and value if it is true. If it is false, it excludes this value."""

VALUES: dict[str, dict[str, Any]] = {
    "lora_target": {"all": "all-linear"},
    "loss_type": {"kto_pair": "kto"},
    "lr_scheduler_type": {"wsd": "warmup_stable_decay"},
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_torch_xla": "adamw",
        "adamw_torch_npu_fused": "adamw",
        "paged_adamw": "adamw",
        "paged_adamw_32bit": "adamw",
        "ao_adamw_8bit": "adamw_torch_8bit",
        "ao_adamw_4bit": "adamw_torch_4bit",
        "ao_adamw_fp8": "adamw_torch_fp8",
        "adamw_bnb_8bit": "adamw_8bit",
    },
    "quantization": {"4": "nf4", "8": "int8"},
    "report_to": {"none": []},
    "dtype": {"bf16": "bfloat16", "fp32": "float32"},
}
"""StreamTune's key -> values of other trainers -> StreamTune's value with the same meaning."""

INSTEAD: dict[str, str] = {
    "attn_implementation": "delete the line; the engine picks the attention kernel, see `streamtune env`",
    "dataset": "write datasets: [{path: ...}]",
    "add_special_tokens": "write special_tokens: {additional_special_tokens: [...]}",
    "dataset_test_split": "write eval_datasets: {test: {path: ..., split: test}}",
    "do_train": "delete the line; `streamtune sft` trains",
    "cosine_min_lr_ratio": "write lr_scheduler_type: cosine_with_min_lr and lr_scheduler_kwargs: {min_lr_rate: 0.1}",
    "early_stopping_steps": "write early_stopping_patience: N, metric_for_best_model: eval_loss and eval_steps: N",
    "evaluation_strategy": "write eval_steps: N",
    "excess_length_strategy": "write overlength: error, truncate, drop or split",
    "load_best_model_at_end": "write metric_for_best_model: eval_loss, which keeps the best checkpoint",
    "lora_target_linear": "write lora_target: all-linear",
    "loraplus_lr_ratio": "write lr_groups: [{match: lora_B, learning_rate: ...}], with 16 times learning_rate",
    "neat_packing": "write packing: true; packed rows do not attend to each other",
    "packing_strategy": "write packing: true, and overlength: truncate or split",
    "truncation_mode": "write overlength: truncate, and truncate_side: left or right",
    "truncation_strategy": "write overlength: error, truncate, drop or split",
    "use_peft": "write finetuning_type: lora",
    "eos_token": "write special_tokens: {eos_token: ...}",
    "eval_dataset": "write eval_datasets: {NAME: PATH}",
    "eval_on_each_dataset": "delete the line; each set of eval_datasets has its own loss",
    "evals_per_epoch": "write eval_steps: N",
    "eval_strategy": "write eval_steps: N",
    "flash_attention": "delete the line; the engine picks the attention kernel, see `streamtune env`",
    "fp16": "write bf16: true; on a device without bfloat16 (V100, T4) bf16: false, which computes in float32",
    "group_by_length": "write packing: true, or batching: tokens with tokens_per_batch: N",
    "gradient_checkpointing": "delete the line; the keys under engine: decide what the backward recomputes",
    "output_router_logits": "write router_aux_loss_coef: 0.001, or the value in the model's card",
    "assistant_only_loss": "write train_on: assistant",
    "completion_only_loss": "write train_on: completion",
    "enable_thinking": "write chat_template_kwargs: {enable_thinking: false}",
    "loss_scale": "write train_on: assistant, last or all; a message with train: false never counts in the loss",
    "interleave_prob": "write weight: P in each entry of datasets",
    "interleave_probs": "write weight: P in each entry of datasets",
    "mask_history": "write train_on: last",
    "mix_strategy": "write weight: P in each entry of datasets; without weights an epoch visits all rows",
    "new_special_tokens": "write special_tokens: {additional_special_tokens: [...]}",
    "pad_token": "write special_tokens: {pad_token: ...}",
    "resize_vocab": "delete the line; the embedding gets a row for each new token",
    "stopping_strategy": "delete the line; an epoch of weighted datasets visits as many rows as all datasets have",
    "logging_dir": "delete the line; a run writes everything to output_dir",
    "overwrite_output_dir": "delete the line; use another output_dir, or --resume",
    "shuffle_merged_datasets": "delete the line; each epoch has a new order of rows unless shuffle is false",
    "save_strategy": "write save_steps: N",
    "saves_per_epoch": "write save_steps: N",
    "max_samples": "write max_rows: N in each entry of datasets",
    "stage": "delete the line; the command sets the objective, as in `streamtune sft`",
    "strict": "write on_bad_row: error, or on_bad_row: skip",
    "template": f"write chat_template: NAME, one of {', '.join(CHAT_TEMPLATES)}; without it, the tokenizer's own "
    "template is used",
    "train_on_inputs": "write train_on: all, or train_on: assistant",
    "test_datasets": "write eval_datasets: {NAME: PATH}",
    "train_on_prompt": "write train_on: all, or train_on: assistant",
    "val_dataset": "write eval_datasets: {NAME: PATH}",
    "use_liger_kernel": "delete the line; logits and loss are always computed in chunks",
}
"""Another trainer's key that has no equivalent -> what to write instead."""

REFUSED_VALUES: dict[tuple[str, Any], tuple[str, str]] = {
    ("finetuning_type", "freeze"): (
        "trains some of the layers",
        "write finetuning_type: full and trainable_layers: last N",
    ),
    ("quantization", "int4"): (
        "is not supported",
        "write nf4, which also has 4 bits, or int8; torchao's int4 kernels have no backward",
    ),
    **{
        ("finetuning_type", name): (
            "is an adapter type, and 'finetuning_type' must be 'full', 'lora' or 'qlora'",
            f"write finetuning_type: {'qlora' if kind.start == 'quantisation' else 'lora'} and adapter_type: {name}",
        )
        for name, kind in ADAPTERS.items()
        if name != "lora"
    },
}
"""Key and value that are refused -> the error, and what to write instead."""


def apply_aliases(tree: dict[str, Any], origins: KeyOrigins) -> tuple[list[str], list[Mistake]]:
    """Replace other trainers' keys and values in a recipe by StreamTune's, in place.

    Args:
        tree: Recipe as read.
        origins: Lines of the keys; changed with the tree.

    Returns:
        Notes on the accepted names, and the mistakes: a key under two names, or a key or value without an equivalent. A
        mistaken key is removed, so that it is reported once.
    """
    notes: list[str] = []
    mistakes: list[Mistake] = []
    _expand_datasets(tree, origins, notes, mistakes)
    for key, fix in INSTEAD.items():
        if key in tree:
            del tree[key]
            mistakes.append(Mistake((key,), f"'{key}' is another trainer's key", fix))
    _rename_choices(tree, origins, notes, mistakes)
    for key in [key for key in tree if key in ALIASES]:
        ours = ALIASES[key]
        if ours in tree:
            del tree[key]
            here = origins.key_origin(ours)
            mistakes.append(
                Mistake((key,), f"'{key}' means '{ours}', which is already set at {here}", "delete one of the two")
            )
            continue
        tree[ours] = tree.pop(key)
        origins.rename_key((key,), (ours,))
        notes.append(f"'{key}' is read as '{ours}'")
    for key, values in VALUES.items():
        value = tree.get(key)
        if isinstance(value, list) and len(value) == 1:  # report_to: [none]
            value = value[0]
        if isinstance(value, str | int) and str(value) in values:
            tree[key] = values[str(value)]
            shown = "[]" if tree[key] == [] else tree[key]
            notes.append(f"'{key}: {value}' is read as '{shown}'")
    for key in sorted((key for key in tree if key in SWITCHES), key=lambda key: tree[key] is False):
        ours, meaning = SWITCHES[key]
        switch = tree.pop(key)
        if not isinstance(switch, bool):
            mistakes.append(
                Mistake((key,), f"'{key}' must be true or false; found {switch!r}", f"write {ours}: {meaning}")
            )
        elif switch and ours in tree:
            what = f"'{key}' means '{ours}: {meaning}', and '{ours}' is already set at {origins.key_origin(ours)}"
            mistakes.append(Mistake((key,), what, "delete one of the two"))
        elif not switch and tree.get(ours) == meaning:
            what = f"'{key}: false' excludes '{ours}: {meaning}', which is set at {origins.key_origin(ours)}"
            mistakes.append(Mistake((key,), what, "delete one of the two"))
        elif not switch and meaning == "nf4" and tree.get("finetuning_type") == "qlora" and ours not in tree:
            what = f"'{key}: false' excludes nf4, which 'finetuning_type: qlora' uses on an accelerator"
            mistakes.append(Mistake((key,), what, "write quantization: int8, or finetuning_type: lora"))
        elif switch:
            tree[ours] = meaning
            origins.rename_key((key,), (ours,))
            notes.append(f"'{key}' is read as '{ours}: {meaning}'")
    for (key, value), (what, fix) in REFUSED_VALUES.items():
        if tree.get(key) == value:
            del tree[key]
            mistakes.append(Mistake((key,), f"'{key}: {value}' {what}", fix))
    return notes, mistakes


def _rename_choices(tree: dict[str, Any], origins: KeyOrigins, notes: list[str], mistakes: list[Mistake]) -> None:
    for key in [key for key in tree if key in CHOICES]:
        given = tree.pop(key)
        value = str(given).lower().replace("-", "_")
        meant = CHOICES[key].get(value.partition("_niter_")[0], ("", ""))
        if meant is None:
            notes.append(f"'{key}: {value}' has no effect: it is the default of adapter_type: lora")
        elif not meant[0]:
            known = ", ".join(f"{ours}: {kind}" for ours, kind in filter(None, CHOICES[key].values()))
            what = f"unknown initialisation of adapters '{key}: {given}'"
            mistakes.append(Mistake((key,), what, f"write one of: {known}"))
        elif meant[0] in tree:
            here = origins.key_origin(meant[0])
            what = f"'{key}' means '{meant[0]}: {meant[1]}', and '{meant[0]}' is already set at {here}"
            mistakes.append(Mistake((key,), what, "delete one of the two"))
        else:
            tree[meant[0]] = meant[1]
            origins.rename_key((key,), (meant[0],))
            notes.append(f"'{key}: {value}' is read as '{meant[0]}: {meant[1]}'")


def _expand_datasets(tree: dict[str, Any], origins: KeyOrigins, notes: list[str], mistakes: list[Mistake]) -> None:
    """Rewrite each entry of ``datasets`` and ``eval_datasets`` as ``{path: ...}``, with StreamTune's key names."""
    _expand_eval_sets(tree, origins, notes, mistakes)
    _expand_entries(tree.get("datasets"), ("datasets",), origins, notes, mistakes)
    sets = tree.get("eval_datasets")
    for name, entries in sets.items() if isinstance(sets, dict) else ():
        _expand_entries(entries, ("eval_datasets", name), origins, notes, mistakes)


def _expand_eval_sets(tree: dict[str, Any], origins: KeyOrigins, notes: list[str], mistakes: list[Mistake]) -> None:
    """Rewrite ``eval_datasets`` as a mapping from names to lists of entries.

    It may also be a list of named entries, or have one entry in place of a list.
    """
    given = tree.get("eval_datasets")
    if isinstance(given, list):
        named: dict[str, list[Any]] = {}
        for index, entry in enumerate(given):
            name = entry.pop("name", None) if isinstance(entry, dict) else None
            if not isinstance(name, str) or not name:
                what, fix = "an entry of 'eval_datasets' has no name", "write eval_datasets: {NAME: PATH, ...}"
                mistakes.append(Mistake(("eval_datasets", index), what, fix))
                continue
            path = entry.get("path")
            if isinstance(path, str) and "." not in path.rpartition("/")[2] and "subset" not in entry:
                what = f"'eval_datasets[{index}].name' is the name of the eval set"
                notes.append(f"{what}; to read a subset of {path}, write subset: NAME")
            origins.rename_key(("eval_datasets", index), ("eval_datasets", name, len(named.setdefault(name, []))))
            named[name].append(entry)
        if len(named) or not given:
            tree["eval_datasets"] = named
        else:
            del tree["eval_datasets"]
    elif isinstance(given, dict):
        for name, entries in given.items():
            if isinstance(entries, str | dict):
                if isinstance(entries, dict):
                    origins.rename_key(("eval_datasets", name), ("eval_datasets", name, 0))
                given[name] = [entries]
    elif given is not None:
        del tree["eval_datasets"]
        what = "'eval_datasets' must map names to datasets"
        mistakes.append(Mistake(("eval_datasets",), what, "write eval_datasets: {NAME: PATH, ...}"))


def _expand_entries(
    entries: Any, where: KeyPath, origins: KeyOrigins, notes: list[str], mistakes: list[Mistake]
) -> None:
    """Rewrite each entry in StreamTune's form: a plain path as ``{path: ...}``, and other trainers' keys renamed."""
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, str):
            entries[index] = {"path": entry}
        elif isinstance(entry, dict):
            for key in [key for key in entry if key in DATASET_INSTEAD]:
                del entry[key]
                mistakes.append(
                    Mistake((*where, index, key), f"'{key}' is another trainer's key", DATASET_INSTEAD[key])
                )
            for key in [key for key in entry if key in DATASET_ALIASES]:
                ours, path = DATASET_ALIASES[key], (*where, index, key)
                if ours in entry:
                    del entry[key]
                    mistakes.append(
                        Mistake(path, f"'{key}' means '{ours}', which is also set", "delete one of the two")
                    )
                    continue
                entry[ours] = entry.pop(key)
                origins.rename_key(path, (*where, index, ours))
                notes.append(f"'{show_path(path)}' is read as '{ours}'")
