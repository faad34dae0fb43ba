"""Recipes of TRL: the configuration of ``trl sft``, ``trl dpo`` and ``trl grpo``, or such a command."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from .conversion import Conversion, PeerTrainer
from .datasets import (
    DATA_FILES,
    FLAGS,
    lose_fields,
    lose_unnamed,
    put_datasets,
    report_media,
    rows_of_split,
    seen_columns,
)
from .field_rules import (
    FieldRule,
    UnconvertedError,
    by_itself,
    no_counterpart,
    one_of,
    same,
    split_names,
    switches,
    to,
    together,
    whole_modules,
    without,
)
from .peer_files import json_value
from .templates import take_trl_template
from .trainer_arguments import CHECKPOINTING, KERNELS, TRAINER_FIELDS, one_loss, take_trackers, take_warmup

OF_GRPO = {
    *("reward_funcs", "num_generations", "max_completion_length", "num_iterations", "reward_weights", "use_vllm"),
    *("mask_truncated_completions", "scale_rewards", "epsilon", "epsilon_high", "reward_model_name_or_path"),
}
"""Fields of GRPO alone."""
OF_DPO = {
    *("beta", "label_smoothing", "precompute_ref_log_probs", "ref_model_name_or_path", "rpo_alpha", "ld_alpha"),
    *("f_divergence_type", "reference_free", "use_weighting", "loss_weights", "discopop_tau"),
}
"""Fields of DPO that supervised fine-tuning has not."""
Row = dict[str, Any] | None
"""The first row of a dataset; None where it is not here."""

COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "dpo", "orpo": "dpo", "cpo": "dpo", "grpo": "grpo"}

VLLM = "vLLM runs in the process of the training"
SERVER = "a server of vLLM is not asked: use_vllm runs vLLM in the process of the training"
PADDING = "chunks need no padding; packing: true saves it"


def _functions(value: Any) -> Any:
    """Return reward functions as ``module:function``; TRL writes ``module.function``, and its own without module."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise UnconvertedError("a list of functions was expected")
    own = [name for name in names if re.fullmatch(r"\w+", name)]
    return [f"trl.rewards:{name}" if name in own else re.sub(r"\.(\w+)$", r":\1", name) for name in names]


def _truncation(value: Any) -> Any:
    return one_of({"keep_start": "truncate"}, "a row that is too long loses its end")(value)


FIELDS: dict[str, FieldRule] = {
    **TRAINER_FIELDS,
    **same("model_name_or_path", "packing", "router_aux_loss_coef"),
    **same("lora_r", "lora_alpha", "lora_dropout"),
    "lora_target_modules": to("lora_target", split_names),
    "truncation_mode": to("overlength", _truncation),
    # dpo
    **same(
        "beta", "label_smoothing", "rpo_alpha", "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight"
    ),
    **same("ref_model_name_or_path", "reference_free", "max_prompt_length"),
    "precompute_ref_log_probs": to("precompute_ref_log_probs", trains=False),
    # grpo
    "reward_funcs": to("reward_funcs", _functions, why="code: needs allow_code: true"),
    **same("reward_weights", "num_generations", "max_completion_length", "temperature", "top_p", "min_p"),
    **same("repetition_penalty", "steps_per_generation", "generation_batch_size", "importance_sampling_level"),
    **same("epsilon", "epsilon_high", "delta", "num_iterations", "mask_truncated_completions"),
    "top_k": to("top_k", lambda value: max(value, 0) if isinstance(value, int) else value),
    "scale_rewards": to(
        "scale_rewards",
        one_of(
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
    **same("use_vllm", "vllm_gpu_memory_utilization", "num_completions_to_print", trains=False),
    # what StreamTune does by itself
    **by_itself(PADDING, "padding_free", "pad_to_multiple_of", "eval_packing", "pad_token"),
    # taken together
    **together("max_length max_seq_length", ours="max_length"),
    **together("packing_strategy", ours="overlength"),
    **together("loss_type", ours="loss_type"),
    **together("use_peft", ours="finetuning_type"),
    **together("load_in_4bit load_in_8bit", ours="quantization"),
    **together("dtype torch_dtype", ours="dtype"),
    **together("assistant_only_loss completion_only_loss", ours="train_on"),
    **together("warmup_steps", ours="warmup_steps"),
    **together("warmup_ratio", ours="warmup_ratio"),
    **together("dataset_name dataset_config dataset_train_split datasets dataset_text_field", ours="datasets"),
    **together("dataset_test_split", ours="eval_datasets"),
    **together("shuffle_dataset", ours="shuffle"),
    **by_itself(CHECKPOINTING, "use_logits_to_keep", "precompute_ref_batch_size", "use_liger_loss"),
    **by_itself(KERNELS, "cast_lm_head_to_fp32", "cache_implementation"),
    **by_itself("read from the columns of the rows", "dataset_kwargs is_encoder_decoder padding_value"),
    **by_itself("rows are prepared when the run starts", "dataset_streaming", "streaming", "dataset_batch_size"),
    **by_itself("completions.jsonl has them", "log_completions", "log_unique_prompts", "log_multimodal"),
    **by_itself("the task is a causal language model", "lora_task_type", "ignore_bias_buffers"),
    **by_itself("double quantisation is on for nf4", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    **by_itself("the temperature of the log-probabilities is that of the completions", "ds3_gather_for_generation"),
    **without(SERVER, "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout", trains=False),
    **without(SERVER, "vllm_mode", trains=False, off=("colocate",)),
    **by_itself("`accelerate` starts the ranks there: `--nproc N`", "accelerate_config num_processes"),
    **without("completions are not drawn in evaluation: write sample", "generate_during_eval", trains=False),
    "alpha": no_counterpart("AlphaPO's rewards"),
    **by_itself(VLLM, "vllm_group_port", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_model_impl"),
    **by_itself(VLLM, "vllm_max_model_length", "vllm_device", "vllm_dtype", "vllm_max_model_len"),
    **by_itself("completions are written by transformers or by vLLM", "use_transformers_paged"),
    **by_itself("completions are written by transformers or by vLLM", "use_transformers_continuous_batching"),
    **by_itself("completions are written by transformers or by vLLM", "transformers_continuous_batching_config"),
    **by_itself("read with their switch only", "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef_delta"),
    **by_itself("read with their switch only", "entropy_coef_max", "entropy_coef_min", "entropy_target"),
    **by_itself(
        "read with loss_type sapo and vespo only", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg"
    ),
    **by_itself("read with loss_type sapo and vespo only", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
    # lost
    "model_revision": no_counterpart("a revision of the model: download it and name its folder", off=("main",)),
    "model_init_kwargs": no_counterpart("arguments of from_pretrained"),
    "model_code_revision": no_counterpart("a revision of the model's code", off=("main",)),
    "lora_modules_to_save": to("modules_to_save", whole_modules),
    "lora_target_parameters": no_counterpart("adapters on parameters that are no linear layers"),
    **switches("use_rslora", "use_dora"),
    "bnb_4bit_quant_type": no_counterpart("4 bits are nf4", off=("nf4",)),
    "chat_template_path": to("chat_template", why="a tokenizer's folder is none: name the file of the template"),
    **same("chat_template_kwargs"),
    "eos_token": to("special_tokens", lambda value: {"eos_token": value}),
    "test_split_size": to("val_size", trains=False),
    "disable_dropout": no_counterpart("dropout of the model's configuration stays on", off=(True,)),
    "use_weighting": no_counterpart("WPO weighting of pairs"),
    "loss_weights": no_counterpart("a sum of several losses"),
    "f_divergence_type": no_counterpart("reverse KL is the divergence", off=("reverse_kl",)),
    "f_alpha_divergence_coef": no_counterpart("reverse KL is the divergence", trains=False),
    "discopop_tau": no_counterpart("of the loss discopop", trains=False),
    "ld_alpha": no_counterpart("LD-DPO"),
    "sync_ref_model": no_counterpart("the reference stays as it is"),
    "force_use_ref_model": no_counterpart("the frozen weights under the adapters are the reference", trains=False),
    "top_entropy_quantile": no_counterpart("a loss on the tokens of highest entropy only", off=(1.0, 1)),
    **without("a bonus on entropy", "entropy_coef", "use_adaptive_entropy"),
    "use_bias_correction_kl": no_counterpart("the corrected KL of new and old policy"),
    "off_policy_mask_threshold": no_counterpart("a mask on tokens far from the policy that wrote them"),
    "multi_objective_aggregation": no_counterpart("rewards are summed", off=("sum_then_normalize",)),
    "vllm_importance_sampling_correction": no_counterpart(
        "log-probabilities of the trained model are taken", trains=False
    ),
    "vllm_importance_sampling_mode": no_counterpart("as above", trains=False),
    "vllm_importance_sampling_cap": no_counterpart("as above", trains=False),
    "vllm_importance_sampling_clip_max": no_counterpart("as above", trains=False),
    "vllm_importance_sampling_clip_min": no_counterpart("as above", trains=False),
    **without("completions have no grammar", "vllm_structured_outputs_regex", "vllm_guided_decoding_regex"),
    "generation_kwargs": no_counterpart("further settings of generation"),
    "num_generations_eval": no_counterpart("evaluation draws num_generations completions", trains=False),
    "max_tool_calling_iterations": no_counterpart("completions call no tools"),
    "reward_model_name_or_path": no_counterpart("a reward model: write a reward function that calls it"),
    "log_completions_hub_repo": no_counterpart("a run uploads nothing", trains=False),
    "data_dir": no_counterpart("a folder of a dataset on the hub"),
}


def _objective(conversion: Conversion) -> str:
    command = conversion.file.command
    if command:
        if command not in COMMANDS:
            what = f"`trl {command}` has no counterpart"
            raise conversion.refuse(what=what, mend="sft, dpo, kto, orpo, cpo and grpo have one")
        return COMMANDS[command]
    names = set(conversion.file.fields)
    return "grpo" if names & OF_GRPO else "dpo" if names & OF_DPO else "sft"


def _special(conversion: Conversion) -> None:
    given = conversion.file.fields
    if "loss_type" in given:
        _take_loss(conversion)
    if conversion.file.command in ("kto", "orpo", "cpo") and "loss_type" not in given:
        conversion.ours["loss_type"] = conversion.file.command
    _take_adapters(conversion)
    take_weights_dtype(conversion, ("dtype", "torch_dtype"))
    take_warmup(conversion)
    take_trackers(conversion, {})
    _take_datasets(conversion)
    first = [seen_columns(conversion, str(spec["path"])) for spec in conversion.ours.get("datasets", [])]
    for index, (spec, row) in enumerate(zip(conversion.ours.get("datasets", []), first, strict=True)):
        place = ("dataset_name",) if "dataset_name" in given else ("datasets", index)
        report_media(conversion, [spec], *place)
        lose = partial(_lose_row, conversion, place, str(spec["path"]))
        lose_unnamed(row, ("system",), (), lose)
        if conversion.get("assistant_only_loss"):
            lose_fields(row, "messages", FLAGS, (), lose)
    _take_texts(conversion, first)
    _take_trained(conversion, first)
    _take_length(conversion)


def _take_texts(conversion: Conversion, first: list[Row]) -> None:
    """Convert ``dataset_text_field``, which names the column of texts where the rows have it."""
    name = "dataset_text_field"
    column = conversion.take(name)
    if column in (None, "", "text"):
        if name in conversion.file.fields:
            conversion.unneeded(name, why="the name of the column here too")
        return
    named = [index for index, row in enumerate(first) if row is None or column in row]
    if not named or conversion.objective != "sft":
        conversion.unneeded(name, why="the rows have no such column")
        return
    entries = list(conversion.ours["datasets"])
    for index in named:
        entries[index] = {**entries[index], "columns": {"text": column}, "type": "text"}
    conversion.put("datasets", entries, name)


def _take_trained(conversion: Conversion, first: list[Row]) -> None:
    """Convert what is trained: of prompt and completion the completion, of other rows every token, unless it is said.

    Args:
        conversion: The recipe on its way to ours.
        first: The first row of each dataset; None where it is not here.
    """
    given = conversion.file.fields
    assistant, completion = conversion.take("assistant_only_loss"), conversion.take("completion_only_loss")
    pairs = [row is not None and {"prompt", "completion"} <= row.keys() for row in first]
    seen = bool(first) and None not in first
    if assistant:
        conversion.put("train_on", "assistant", "assistant_only_loss")
        take_trl_template(conversion)
    elif "assistant_only_loss" in given:
        conversion.unneeded("assistant_only_loss", why="off: train_on says it")
    if completion and not assistant and (not seen or any(pairs)):
        conversion.put("train_on", "completion", "completion_only_loss")
    elif "completion_only_loss" in given and completion is not None:
        why = "off: train_on is all"
        if completion:
            why = "assistant_only_loss says it" if assistant else "the rows are not prompts and completions"
        conversion.unneeded("completion_only_loss", why=why)
    elif "completion_only_loss" in given:
        conversion.unneeded("completion_only_loss", why="no value")
    if conversion.objective != "sft" or assistant or completion is not None:
        return
    for row in first:
        _lose_answers(conversion, row)
    if seen and all(pairs):
        conversion.default("train_on", "completion", "the rows are prompts and completions")
    elif any(pairs):
        conversion.missing("completion_only_loss", "the first dataset decides it for all rows there; see train_on")
    elif not seen:
        why = "unset it is true for rows of prompt and completion, which are not here: write train_on: completion then"
        conversion.missing("completion_only_loss", why)


def _lose_answers(conversion: Conversion, row: Row) -> None:
    """Report a completion of several turns, which TRL trains whole."""
    turns = (row or {}).get("completion")
    if isinstance(turns, list) and len(turns) > 1:
        why = "a completion of several turns is trained whole there; here the assistant's turns of it"
        conversion.missing("completion_only_loss", why)


def _take_length(conversion: Conversion) -> None:
    """Convert the length, and what becomes of longer rows: packing can cut them into pieces, and null cuts nothing."""
    given = conversion.file.fields
    for name in ("max_length", "max_seq_length"):
        length = conversion.take(name)
        if length not in (None, ""):
            conversion.put("max_length", length, name)
        elif name in given and conversion.objective != "grpo":
            why = "without a length no row is cut: here longer rows than 2048 are an error, so write max_length"
            conversion.lose(name, why=why, trains=False)
            conversion.left.pop("truncation_mode", None)
            conversion.default("overlength", "error", "no row is cut")
    if conversion.objective == "sft" and conversion.get("truncation_mode") == "keep_end":
        conversion.take("truncation_mode")
        conversion.put("overlength", "truncate", "truncation_mode")
        conversion.put("truncate_side", "left", "truncation_mode")
    shuffles = conversion.take("shuffle_dataset")
    if shuffles is not None and conversion.objective == "grpo":
        conversion.put("shuffle", shuffles, "shuffle_dataset")
    elif "shuffle_dataset" in given:
        conversion.unneeded("shuffle_dataset", why="each epoch visits the rows in another order anyway")
    strategy = conversion.take("packing_strategy")
    if "packing_strategy" not in given:
        return
    if conversion.objective != "sft" or not conversion.get("packing"):
        conversion.unneeded("packing_strategy", why="read with packing only")
    elif strategy in ("wrapped", "bfd_split"):
        conversion.take("truncation_mode")
        see = "; rows of one sequence see each other there, and never here" if strategy == "wrapped" else ""
        conversion.put("overlength", "split", "packing_strategy", note=f"rows go on in the next sequence{see}")
    else:
        conversion.unneeded("packing_strategy", why="packing fills every sequence as far as rows fit")


def _take_loss(conversion: Conversion) -> None:
    value = conversion.take("loss_type")
    if conversion.objective == "sft":
        if value in ("nll", "chunked_nll", None):
            conversion.unneeded("loss_type", why="the cross entropy")
        elif value == "dft":
            conversion.put("loss_type", value, "loss_type")
        else:
            conversion.lose("loss_type", why="nll, dft and focal are the losses of rows")
        return
    conversion.convert("loss_type", one_loss, value, "loss_type")


def _take_adapters(conversion: Conversion) -> None:
    given = conversion.file.fields
    use, four, eight = (conversion.take(name) for name in ("use_peft", "load_in_4bit", "load_in_8bit"))
    if "use_peft" in given:
        quantised = "qlora" if four or eight else "lora"
        conversion.put("finetuning_type", quantised if use else "full", "use_peft")
    for name, value, bits in (("load_in_4bit", four, "nf4"), ("load_in_8bit", eight, "int8")):
        if name in given and value:
            conversion.put("quantization", bits, name)
        elif name in given:
            conversion.unneeded(name, why="off, as here")


def take_weights_dtype(conversion: Conversion, names: tuple[str, ...]) -> None:
    """Convert the dtype that weights are loaded in."""
    for name in names:
        if name in conversion.file.fields:
            value = conversion.take(name)
            if value in ("float16", "fp16", "half"):
                conversion.lose(name, why="weights in float16; here they keep the checkpoint's dtype")
            elif value is None:
                conversion.unneeded(name, why="no value")
            else:
                conversion.put("dtype", value, name)


def _take_datasets(conversion: Conversion) -> None:
    given = conversion.file.fields
    name, part, split = (conversion.take(key) for key in ("dataset_name", "dataset_config", "dataset_train_split"))
    for key in ("dataset_config", "dataset_train_split"):
        if key in given:
            conversion.unneeded(key, why="see datasets")
    _take_test_split(conversion, name, part)
    if name is not None:
        spec: dict[str, Any] = {"path": name}
        rows_of_split(spec, split or "train", lambda why: conversion.lose("dataset_train_split", why=why))
        if part:
            spec["name"] = part
        put_datasets(conversion, [spec], "dataset_name")
    try:
        entries = json_value(conversion.take("datasets"))
    except UnconvertedError as error:
        conversion.lose("datasets", why=str(error))
        return
    if entries is not None and not isinstance(entries, list):
        conversion.lose("datasets", why="a list of datasets was expected")
        return
    specs = []
    for index, entry in enumerate(entries or []):
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            conversion.lose("datasets", index, why="an entry without a path")
            continue
        spec = {"path": entry["path"], **({"name": entry["name"]} if entry.get("name") else {})}
        if entry.get("split"):
            rows_of_split(spec, entry["split"], partial(_lose_split, conversion, index))
        files = entry.get("data_files")
        for key in entry.keys() - {"path", "name", "split", "data_files"}:
            if entry[key] is not None:
                conversion.lose("datasets", index, key, why="no counterpart in a dataset's entry")
        local = entry["path"] in ("json", "csv", "parquet", "text")
        if files and not local:
            conversion.lose("datasets", index, "data_files", why="files of a dataset on the hub: name them by path")
        paths = (files if isinstance(files, list) else [files]) if files and local else [entry["path"]]
        specs += [{**spec, "path": path} for path in paths]
    put_datasets(conversion, specs, "datasets")


def _take_test_split(conversion: Conversion, name: Any, part: Any) -> None:
    """Convert ``dataset_test_split``, whose rows are read where the run evaluates."""
    split = conversion.take("dataset_test_split")
    evaluates = conversion.get("eval_strategy", "no") not in ("no", False)
    if name is not None and evaluates:
        spec = {"path": name, "split": str(split or "test"), **({"name": part} if part else {})}
        key = "dataset_test_split" if split else "eval_strategy"
        if str(name).endswith(DATA_FILES):
            why = f"{name} is a file and has no split '{spec['split']}': write val_size, or eval_datasets"
            conversion.lose(key, why=why, trains=False) if split else conversion.missing(key, why, trains=False)
            return
        conversion.put("eval_datasets", {"test": [spec]}, key, note="the rows of a split", trains=False)
    elif "dataset_test_split" in conversion.file.fields:
        conversion.unneeded("dataset_test_split", why="read where eval_strategy says so")


def _lose_row(conversion: Conversion, place: tuple[str | int, ...], path: str, why: str) -> None:
    conversion.lose(*place, why=f"{path}: {why}")


def _lose_split(conversion: Conversion, index: int, why: str) -> None:
    conversion.lose("datasets", index, "split", why=why)


def _defaults(conversion: Conversion) -> None:
    objective, ours = conversion.objective, conversion.ours
    conversion.default("learning_rate", 2e-5 if objective == "sft" else 1e-6)
    conversion.default("lr_scheduler_type", "linear")
    conversion.default("num_train_epochs", 3.0)
    if objective != "grpo":
        conversion.default("per_device_train_batch_size", 8)
        if ours.get("overlength") != "error":
            conversion.default("max_length", 1024)
        conversion.default("overlength", "truncate")
    if objective == "sft":
        if ours["overlength"] == "truncate":
            conversion.default("truncate_side", "right")
        elif ours["overlength"] == "split":
            conversion.default("split_at", "token")
        conversion.default("train_on", "all")
    if not conversion.get("fp16") and conversion.get("bf16") is None:
        conversion.default("bf16", True)
    conversion.default("dtype", "float32", "older releases keep the checkpoint's: auto")
    if ours.get("finetuning_type") in ("lora", "qlora"):
        conversion.default("lora_alpha", 32.0)
        conversion.default("lora_dropout", 0.05)
        if "lora_target" not in ours:
            conversion.missing(
                "lora_target_modules", "unset, peft takes the attention's modules; here it is all-linear"
            )


SIGNS = (
    "dataset_name dataset_config dataset_train_split use_peft lora_target_modules assistant_only_loss dtype "
    "completion_only_loss max_completion_length model_revision attn_implementation dataset_text_field "
    "dataset_test_split eos_token"
)
"""Fields that no other trainer has."""

TRL = PeerTrainer(
    name="trl",
    title="TRL",
    fields=FIELDS,
    signs=frozenset(SIGNS.split()),
    objective=_objective,
    special=_special,
    defaults=_defaults,
    other_defaults=frozenset(
        [
            *("learning_rate", "lr_scheduler_type", "num_train_epochs", "per_device_train_batch_size", "max_length"),
            *("overlength", "truncate_side", "split_at", "train_on", "bf16", "dtype", "lora_alpha", "lora_dropout"),
            "reasoning",
        ]
    ),
)
