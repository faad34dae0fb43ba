"""Convert recipes of TRL: a command such as ``trl sft``, ``trl dpo`` or ``trl grpo``, or its configuration file."""

from __future__ import annotations

import re
from typing import Any, get_args

from streamtune.recipe.keys.policy import PolicyLossName

from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    UnconvertedError,
    convert_module_list,
    convert_module_names,
    field_table,
    key_rule,
    lookup_converter,
    no_counterpart,
    same_name_rules,
    switch_rules,
    zero_if_negative,
)
from .recipe_files import parse_json_text
from .rows_and_templates import (
    DATA_FILES,
    FLAGS,
    convert_split,
    convert_trained_tower,
    convert_trl_template,
    first_local_row,
    report_media,
    report_unread_columns,
    report_unread_fields,
    write_datasets,
)
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    convert_nll_of_simpo,
    convert_quantization_bits,
    convert_trackers,
    convert_warmup,
    report_default_targets,
    report_nll_differences,
    single_loss_name,
    write_default_truncation,
)

OF_GRPO = {
    *("reward_funcs", "num_generations", "max_completion_length", "num_iterations", "reward_weights", "use_vllm"),
    *("mask_truncated_completions", "scale_rewards", "epsilon", "epsilon_high", "reward_model_name_or_path"),
}
"""Fields that only GRPO has."""
OF_DPO = {
    *("beta", "label_smoothing", "precompute_ref_log_probs", "ref_model_name_or_path", "rpo_alpha", "ld_alpha"),
    *("f_divergence_type", "reference_free", "use_weighting", "loss_weights", "discopop_tau"),
}
"""Fields that DPO has and SFT does not."""
OF_OTHERS = {"desirable_weight": "kto", "undesirable_weight": "kto", "cpo_alpha": "cpo", "simpo_gamma": "cpo"}
"""{field that only this trainer has: command of the trainer}, for TRL's other preference trainers."""
LOSSES_OF_ROWS = (None, "nll", "chunked_nll", "dft")
POLICY_LOSSES = (*get_args(PolicyLossName), "cispo", "sapo", "luspo", "vespo")
"""Losses of GRPO, supported or not. A preference loss is any other name, or a list."""
Row = dict[str, Any] | None
"""First row of a dataset; None if unknown."""

SERVER = "StreamTune supports no vLLM servers; use_vllm runs vLLM in the training process"
COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "dpo", "orpo": "dpo", "cpo": "dpo", "grpo": "grpo"}


def _convert_reward_functions(value: Any) -> Any:
    """Rewrite TRL's ``module.function`` as ``module:function``; a name without a module is from ``trl.rewards``."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise UnconvertedError("reward functions must be a list of names")
    own = [name for name in names if re.fullmatch(r"\w+", name)]
    return [f"trl.rewards:{name}" if name in own else re.sub(r"\.(\w+)$", r":\1", name) for name in names]


GRPO_FIELDS: dict[str, FieldRule] = field_table(
    {
        **same_name_rules("""
            beta chat_template_kwargs delta epsilon epsilon_high generation_batch_size importance_sampling_level
            max_completion_length min_p num_generations num_iterations repetition_penalty reward_weights temperature
            top_p"""),
        **same_name_rules("use_vllm vllm_gpu_memory_utilization", changes_training=False),
        "vllm_mode": no_counterpart(SERVER, changes_training=False, off=("colocate",)),
    },
    not_needed={"completions.jsonl records them": "log_completions"},
    lost={"StreamTune does not update the reference model": "sync_ref_model"},
    lost_without_effect={SERVER: "vllm_server_host vllm_server_port vllm_server_timeout"},
)
"""Arguments of ``trl.GRPOConfig`` that axolotl and ms-swift have too."""

SHARED_FIELDS: dict[str, FieldRule] = field_table(
    {
        **GRPO_FIELDS,
        **same_name_rules("""
            cpo_alpha desirable_weight label_smoothing lora_alpha lora_dropout packing router_aux_loss_coef
            simpo_gamma steps_per_generation undesirable_weight"""),
        **switch_rules("use_rslora use_dora"),
        "top_k": key_rule("top_k", zero_if_negative),
        "bnb_4bit_quant_type": no_counterpart("4-bit weights use nf4", off=("nf4",)),
        "f_divergence_type": no_counterpart("StreamTune supports only the reverse KL", off=("reverse_kl",)),
        "top_entropy_quantile": no_counterpart("StreamTune has no loss on high-entropy tokens only", off=(1.0, 1)),
    },
    renamed={"dtype": "dtype torch_dtype", "max_length": "max_length"},
    not_needed={"StreamTune runs vLLM in the training process": "vllm_max_model_len vllm_tensor_parallel_size"},
    lost={"LD-DPO": "ld_alpha", "StreamTune does not sum several losses": "loss_weights"},
    lost_without_effect={SERVER: "vllm_server_base_url"},
)
"""Arguments of TRL that ms-swift has too."""

FIELDS: dict[str, FieldRule] = field_table(
    {
        **TRAINER_FIELDS,
        **SHARED_FIELDS,
        **same_name_rules("""model_name_or_path lora_r
            rpo_alpha ref_model_name_or_path reference_free
            max_prompt_length mask_truncated_completions use_bias_correction_kl"""),
        **same_name_rules("precompute_ref_log_probs num_completions_to_print", changes_training=False),
        "lora_target_modules": key_rule("lora_target", convert_module_names),
        "truncation_mode": key_rule(
            "overlength", lookup_converter({"keep_start": "truncate"}, "StreamTune truncates longer rows at the end")
        ),
        "reward_funcs": key_rule("reward_funcs", _convert_reward_functions, why="code: needs allow_code: true"),
        "scale_rewards": key_rule(
            "scale_rewards",
            lookup_converter(
                {
                    True: "group",
                    False: "none",
                    "group": "group",
                    "batch": "batch",
                    "none": "none",
                    "true": "group",
                    "false": "none",
                }
            ),
        ),
        "lora_modules_to_save": key_rule("modules_to_save", convert_module_list),
        "chat_template_path": key_rule(
            "chat_template", why="StreamTune's chat_template takes no tokenizer folder: give the template file"
        ),
        "eos_token": key_rule("special_tokens", lambda value: {"eos_token": value}),
        "test_split_size": key_rule("val_size", changes_training=False),
        "model_revision": no_counterpart("download the model revision and give its folder", off=("main",)),
        "model_code_revision": no_counterpart("StreamTune loads no revision of the model's code", off=("main",)),
        "disable_dropout": no_counterpart("StreamTune keeps dropout of the model's configuration enabled", off=(True,)),
        "multi_objective_aggregation": no_counterpart("rewards are summed", off=("sum_then_normalize",)),
    },
    renamed={
        "max_length": "max_seq_length",
        "overlength": "packing_strategy",
        "loss_type": "loss_type",
        "finetuning_type": "use_peft",
        "quantization": "load_in_4bit load_in_8bit",
        "train_on": "assistant_only_loss completion_only_loss",
        "datasets": "dataset_name dataset_config dataset_train_split datasets dataset_text_field",
        "eval_datasets": "dataset_test_split",
        "shuffle": "shuffle_dataset",
    },
    not_needed={
        "StreamTune's chunks need no padding": "padding_free pad_to_multiple_of eval_packing pad_token",
        CHECKPOINTING: "use_logits_to_keep precompute_ref_batch_size use_liger_loss",
        KERNELS: "cast_lm_head_to_fp32 cache_implementation",
        "StreamTune recognises rows by their columns": "dataset_kwargs is_encoder_decoder padding_value",
        "StreamTune prepares rows when the run starts": "dataset_streaming streaming dataset_batch_size",
        "completions.jsonl records them": "log_unique_prompts log_multimodal",
        "StreamTune trains only causal language models": "lora_task_type ignore_bias_buffers",
        "StreamTune's nf4 always has double quantisation": "use_bnb_nested_quant bnb_4bit_quant_storage",
        "StreamTune gathers ZeRO-3 weights for generation automatically": "ds3_gather_for_generation",
        "`--nproc N` starts the ranks": "accelerate_config num_processes",
        "StreamTune runs vLLM in the training process": """vllm_group_port vllm_enable_sleep_mode vllm_model_impl
            vllm_max_model_length vllm_device vllm_dtype""",
        "StreamTune generates completions with transformers or vLLM": """use_transformers_paged
            use_transformers_continuous_batching transformers_continuous_batching_config""",
        "read only if enabled": """ref_model_mixup_alpha ref_model_sync_steps entropy_coef_delta entropy_coef_max
            entropy_coef_min entropy_target""",
        "TRL reads this field only with loss_type sapo and vespo": """sapo_temperature_neg sapo_temperature_pos
            vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos""",
    },
    lost={
        "AlphaPO's rewards": "alpha",
        "arguments of from_pretrained": "model_init_kwargs",
        "StreamTune adapts only linear layers, not other parameters": "lora_target_parameters",
        "WPO weighting of pairs": "use_weighting",
        "an entropy bonus": "entropy_coef use_adaptive_entropy",
        "StreamTune has no mask on off-policy tokens": "off_policy_mask_threshold",
        "StreamTune does not support structured outputs": "vllm_structured_outputs_regex vllm_guided_decoding_regex",
        "other generation settings": "generation_kwargs",
        "StreamTune does not support tool calls in completions": "max_tool_calling_iterations",
        "StreamTune loads no reward model: write a reward function that calls it": "reward_model_name_or_path",
        "StreamTune cannot read a single folder (data_dir) of a hub dataset": "data_dir",
    },
    lost_without_effect={
        "StreamTune's evaluation generates no completions: set the key sample": "generate_during_eval",
        "StreamTune supports only the reverse KL": "f_alpha_divergence_coef",
        "used only by the loss discopop": "discopop_tau",
        "StreamTune's reference is the base model without its adapters": "force_use_ref_model",
        "StreamTune takes log-probabilities from the trained model, not vLLM": """
            vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap
            vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min""",
        "evaluation generates num_generations completions": "num_generations_eval",
        "a run uploads nothing": "log_completions_hub_repo",
    },
)


def _choose_objective(conversion: Conversion) -> str:
    command = conversion.file.command
    if command:
        if command not in COMMANDS:
            what = f"StreamTune has no command for `trl {command}`"
            raise conversion.import_error(what=what, fix="supported: sft, dpo, kto, orpo, cpo and grpo")
        return COMMANDS[command]
    names, loss = set(conversion.file.fields), conversion.get("loss_type")
    if names & OF_GRPO or loss in POLICY_LOSSES:
        return "grpo"
    return "dpo" if names & {*OF_DPO, *OF_OTHERS} or loss not in LOSSES_OF_ROWS else "sft"


def _preference_command(conversion: Conversion) -> str:
    """Return the preference command that the fields belong to: ``kto``, ``orpo``, ``cpo`` or ``dpo``."""
    found = (command for name, command in OF_OTHERS.items() if name in conversion.file.fields)
    return conversion.file.command or next(found, "dpo")


def _convert_dependent_fields(conversion: Conversion) -> None:
    given = conversion.file.fields
    command = _preference_command(conversion) if conversion.objective == "dpo" else ""
    if command == "cpo":
        _convert_cpo_loss(conversion)
    elif "loss_type" in given:
        _convert_loss(conversion)
    elif command in ("kto", "orpo"):
        conversion.ours["loss_type"] = command
    elif command and not conversion.file.command:
        conversion.write_default(
            "loss_type", "sigmoid", "the default of `trl dpo`; for `trl orpo` write loss_type: orpo"
        )
    if not conversion.get("beta"):
        conversion.mark_unneeded("use_bias_correction_kl", why="used only with beta")
    if "use_peft" in given:
        quantised = conversion.get("load_in_4bit") or conversion.get("load_in_8bit")
        kind = "full" if not conversion.pop_field("use_peft") else "qlora" if quantised else "lora"
        conversion.write_key("finetuning_type", kind, "use_peft")
    convert_quantization_bits(conversion)
    convert_weights_dtype(conversion, "dtype", "torch_dtype")
    convert_warmup(conversion)
    convert_trackers(conversion, {})
    _convert_datasets(conversion)
    first_rows: list[Row] = []
    for index, spec in enumerate(conversion.ours.get("datasets", [])):
        row = first_local_row(conversion, str(spec["path"]))
        place = ("dataset_name",) if "dataset_name" in given else ("datasets", index)
        report_media(conversion, [spec], *place)
        report_lost = conversion.make_lost_reporter(*place, prefix=f"{spec['path']}: ")
        report_unread_columns(row, ("system",), (), report_lost)
        if conversion.get("assistant_only_loss"):
            report_unread_fields(row, "messages", FLAGS, (), report_lost)
        first_rows.append(row)
    _convert_text_column(conversion, first_rows)
    _convert_trained_tokens(conversion, first_rows)
    _convert_length_limit(conversion)
    convert_trained_tower(conversion, "lora_target_modules")


def _convert_text_column(conversion: Conversion, first_rows: list[Row]) -> None:
    """Convert ``dataset_text_field`` for the datasets whose first row has this column."""
    name = "dataset_text_field"
    column = conversion.get(name, "text")
    named = [index for index, row in enumerate(first_rows) if row is None or column in row]
    if column == "text":
        conversion.mark_unneeded(name, why="StreamTune reads the column 'text' by default too")
    elif not named or conversion.objective != "sft":
        conversion.mark_unneeded(name, why="the rows do not have this column")
    else:
        entries = list(conversion.ours["datasets"])
        for index in named:
            entries[index] = {**entries[index], "columns": {"text": column}, "type": "text"}
        conversion.write_key("datasets", entries, name, replaces=True)


def _convert_trained_tokens(conversion: Conversion, first_rows: list[Row]) -> None:
    """Convert the choice of trained tokens; TRL's default is completions, and all tokens of rows without completions.

    Args:
        first_rows: First row of each dataset; None if unknown.
    """
    assistant = conversion.pop_field("assistant_only_loss")
    completion = conversion.file.fields.get("completion_only_loss")
    pairs = [row is not None and {"prompt", "completion"} <= row.keys() for row in first_rows]
    seen = bool(first_rows) and None not in first_rows
    if assistant:
        conversion.write_key("train_on", "assistant", "assistant_only_loss")
        convert_trl_template(conversion)
    elif "assistant_only_loss" in conversion.file.fields:
        conversion.report_unneeded("assistant_only_loss", why="off: train_on sets it")
    why = "no value" if completion is None else "off: train_on is all"
    if completion and not assistant and (not seen or any(pairs)):
        conversion.write_if_on("completion_only_loss", "train_on", "completion")
    elif completion:
        why = "assistant_only_loss sets it" if assistant else "the rows are not prompts and completions"
    conversion.mark_unneeded("completion_only_loss", why=why)
    if conversion.objective != "sft" or assistant or completion is not None:
        return
    for row in first_rows:
        turns = (row or {}).get("completion")
        if isinstance(turns, list) and len(turns) > 1:
            why = "TRL trains on all turns of a completion; StreamTune trains only on the assistant turns"
            conversion.report_lost_setting("completion_only_loss", why)
    if seen and all(pairs):
        conversion.write_default("train_on", "completion", "TRL's default for rows of prompts and completions")
    elif any(pairs):
        conversion.report_lost_setting(
            "completion_only_loss", "TRL's first dataset decides for all rows which tokens are trained; see train_on"
        )
    elif not seen:
        why = "the rows cannot be read here; if they have prompt and completion, write train_on: completion"
        conversion.report_lost_setting("completion_only_loss", why)


def _convert_length_limit(conversion: Conversion) -> None:
    """Convert the length limit, and whether longer rows are truncated, split by packing, or kept."""
    given = conversion.file.fields
    for name in ("max_length", "max_seq_length"):
        length = conversion.pop_field(name)
        if length not in (None, ""):
            conversion.write_key("max_length", length, name)
        elif name in given and conversion.objective == "sft" and conversion.get("packing"):
            conversion.report_lost(
                name, why="TRL refuses packing without max_length: write max_length", changes_training=False
            )
        elif name in given and conversion.objective != "grpo":
            why = "TRL truncates no row; StreamTune refuses rows longer than 2048 tokens: write max_length"
            conversion.report_lost(name, why=why, changes_training=False)
            conversion.left.pop("truncation_mode", None)
            conversion.write_default("overlength", "error", "no row is truncated")
    strategy = given.get("packing_strategy")
    if conversion.objective == "sft" and conversion.get("packing") and strategy in ("wrapped", "bfd_split"):
        conversion.mark_unneeded("truncation_mode", why="TRL's packing truncates no row; see packing_strategy")
    elif conversion.objective == "sft" and conversion.get("truncation_mode") == "keep_end":
        conversion.pop_field("truncation_mode")
        conversion.write_key("overlength", "truncate", "truncation_mode")
        conversion.write_key("truncate_side", "left", "truncation_mode")
    shuffles = given.get("shuffle_dataset")
    if shuffles is not None and conversion.objective == "grpo":
        conversion.write_key("shuffle", shuffles, "shuffle_dataset")
    conversion.mark_unneeded("shuffle_dataset", why="StreamTune shuffles the rows in each epoch anyway")
    if conversion.objective != "sft" or not conversion.get("packing"):
        conversion.mark_unneeded("packing_strategy", why="used only with packing")
    elif strategy in ("wrapped", "bfd_split"):
        see = "; packed rows attend to each other in TRL, but not in StreamTune" if strategy == "wrapped" else ""
        conversion.write_if_on(
            "packing_strategy", "overlength", "split", note=f"TRL continues rows in the next sequence{see}"
        )
    conversion.mark_unneeded("packing_strategy", why="StreamTune packs as many rows as fit into each sequence")


def _convert_cpo_loss(conversion: Conversion) -> None:
    """Convert the loss of TRL's CPO trainer."""
    loss = conversion.pop_field("loss_type") or "sigmoid"
    if loss == "simpo":
        conversion.write_key("loss_type", "simpo", "loss_type")
        convert_nll_of_simpo(conversion)
    elif loss == "sigmoid":
        conversion.ours["loss_type"] = "cpo"
        if "loss_type" in conversion.file.fields:
            conversion.write_key("loss_type", "cpo", "loss_type")
    else:
        conversion.report_lost(
            "loss_type", why="StreamTune supports only the losses cpo and simpo of TRL's CPO trainer"
        )
        conversion.ours["loss_type"] = "cpo"


def _convert_loss(conversion: Conversion) -> None:
    value = conversion.pop_field("loss_type")
    if conversion.objective != "sft":
        conversion.convert_key("loss_type", single_loss_name, value, "loss_type")
    elif value in ("nll", "chunked_nll", None):
        conversion.report_unneeded("loss_type", why="the cross entropy")
    elif value == "dft":
        conversion.write_key("loss_type", value, "loss_type")
    else:
        conversion.report_lost("loss_type", why="StreamTune's sft losses are nll, dft and focal")


def convert_weights_dtype(conversion: Conversion, *names: str, computes_in_it: bool = False) -> None:
    """Convert the dtype of the weights; ``computes_in_it`` is True if float16 weights imply ``fp16``."""
    for name in names:
        value = conversion.file.fields.get(name)
        if value in ("float16", "fp16", "half") and (conversion.get("fp16") or computes_in_it):
            note = "with fp16, frozen weights of a 16-bit checkpoint are float16, and trained weights float32"
            conversion.write_key("dtype", "auto", name, note=note)
        elif value in ("float16", "fp16", "half"):
            conversion.report_lost(name, why="StreamTune needs fp16: true, which scales the loss, for float16 weights")
        elif value is not None:
            conversion.write_key("dtype", value, name)
        conversion.mark_unneeded(name, why="no value")


def _convert_datasets(conversion: Conversion) -> None:
    name, part, split = (
        conversion.pop_field("dataset_name"),
        conversion.get("dataset_config"),
        conversion.get("dataset_train_split"),
    )
    conversion.mark_unneeded("dataset_config", "dataset_train_split", why="see datasets")
    _convert_test_split(conversion, name, part)
    if name is not None:
        spec: dict[str, Any] = {"path": name}
        convert_split(spec, split or "train", conversion.make_lost_reporter("dataset_train_split"))
        if part:
            spec["name"] = part
        write_datasets(conversion, [spec], "dataset_name")
    try:
        entries = parse_json_text(conversion.pop_field("datasets"))
    except UnconvertedError as error:
        conversion.report_lost("datasets", why=str(error))
        return
    if entries is not None and not isinstance(entries, list):
        conversion.report_lost("datasets", why="expected a list of datasets")
        return
    specs = []
    for index, entry in enumerate(entries or []):
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            conversion.report_lost("datasets", index, why="the dataset entry has no path")
            continue
        spec = {"path": entry["path"], **({"name": entry["name"]} if entry.get("name") else {})}
        if entry.get("split"):
            convert_split(spec, entry["split"], conversion.make_lost_reporter("datasets", index, "split"))
        files = entry.get("data_files")
        for key in entry.keys() - {"path", "name", "split", "data_files"}:
            if entry[key] is not None:
                conversion.report_lost("datasets", index, key, why="StreamTune does not know this key of a dataset")
        local = entry["path"] in ("json", "csv", "parquet", "text")
        if files and not local:
            conversion.report_lost("datasets", index, "data_files", why="give the files of a hub dataset in path")
        paths = (files if isinstance(files, list) else [files]) if files and local else [entry["path"]]
        specs += [{**spec, "path": path} for path in paths]
    write_datasets(conversion, specs, "datasets")


def _convert_test_split(conversion: Conversion, name: Any, config_name: Any) -> None:
    """Convert ``dataset_test_split``, which TRL uses if ``eval_strategy`` is set."""
    split = conversion.pop_field("dataset_test_split")
    if name is not None and conversion.get("eval_strategy", "no") not in ("no", False):
        spec = {"path": name, "split": str(split or "test"), **({"name": config_name} if config_name else {})}
        key = "dataset_test_split" if split else "eval_strategy"
        if str(name).endswith(DATA_FILES):
            why = f"{name} is a file without a split '{spec['split']}': write val_size or eval_datasets"
            conversion.report_lost(key, why=why, changes_training=False) if split else conversion.report_lost_setting(
                key, why, changes_training=False
            )
            return
        left = dict(conversion.left)
        conversion.write_key("eval_datasets", {"test": [spec]}, key, note="rows of the split", changes_training=False)
        conversion.left = left  # eval_strategy has its own rule
    elif "dataset_test_split" in conversion.file.fields:
        conversion.report_unneeded("dataset_test_split", why="TRL reads this field only if eval_strategy is set")


def _write_trainer_defaults(conversion: Conversion) -> None:
    objective, ours = conversion.objective, conversion.ours
    conversion.write_default("learning_rate", 2e-5 if objective == "sft" else 1e-6)
    conversion.write_default("lr_scheduler_type", "linear")
    conversion.write_default("num_train_epochs", 3.0)
    if objective != "grpo":
        conversion.write_default("per_device_train_batch_size", 8)
        if ours.get("overlength") != "error":
            conversion.write_default("max_length", 1024)
        conversion.write_default("overlength", "truncate")
    write_default_truncation(conversion)
    if objective == "sft":
        conversion.write_default("train_on", "all")
    if not ours.get("fp16") and conversion.get("bf16") is None:
        conversion.write_default("bf16", True)
    conversion.write_default("dtype", "float32", "older TRL releases keep the checkpoint's dtype (auto)")
    if objective == "grpo" and ours.get("beta"):
        conversion.write_default("use_bias_correction_kl", True, "as of TRL 1.16")
    if ours.get("finetuning_type") in ("lora", "qlora"):
        conversion.write_default("lora_alpha", 32.0)
        conversion.write_default("lora_dropout", 0.05)
    report_default_targets(conversion)
    report_nll_differences(conversion)


TRL = PeerTrainer(
    name="trl",
    title="TRL",
    fields=FIELDS,
    signs="""dataset_name dataset_config dataset_train_split use_peft lora_target_modules assistant_only_loss dtype
        completion_only_loss max_completion_length model_revision attn_implementation dataset_text_field
        dataset_test_split eos_token""",
    objective=_choose_objective,
    special=_convert_dependent_fields,
    defaults=_write_trainer_defaults,
)
