"""Convert arguments of Hugging Face's ``Trainer``, which all supported trainers share, and options of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.base.adapters import ADAPTERS
from streamtune.errors import RecipeError
from streamtune.recipe.keys.adapters import ADAPTER_KEYS
from streamtune.recipe.yaml import read_yaml

from .conversion import Conversion
from .field_rules import (
    FieldRule,
    UnconvertedError,
    convert_optimizer_name,
    convert_step_count,
    field_table,
    key_rule,
    no_counterpart,
    same_name_rules,
)

CHECKPOINTING = "streaming replaces gradient checkpointing"
KERNELS = "StreamTune chooses kernels automatically; `streamtune env` lists them"


def _convert_best_metric(value: Any) -> Any:
    if not isinstance(value, str):
        raise UnconvertedError("expected a name")
    return value if value.startswith("eval_") else f"eval_{value}"


def _convert_deepspeed(value: Any) -> Any:
    if isinstance(value, dict):
        raise UnconvertedError("write the DeepSpeed configuration to a JSON file, and its path here: deepspeed: FILE")
    if value in ("zero0", "zero2_offload"):
        raise UnconvertedError(
            f"'{value}' is not supported; use zero1, zero2, zero3, zero3_offload, or the path of a file"
        )
    if isinstance(value, str) and value.endswith(".json") and not Path(value).expanduser().exists():
        for stage in ("3", "2", "1"):
            if f"zero{stage}" in Path(value).stem.replace("_", "") or f"z{stage}" in Path(value).stem:
                offload = "offload" in value and stage == "3"
                return f"zero{stage}_offload" if offload else f"zero{stage}"
    return value


def _convert_trackers(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    names = [name for name in names if name not in ("none", None, "")]
    if "all" in names:
        raise UnconvertedError("name the trackers: tensorboard, wandb, mlflow, trackio")
    return names


def single_loss_name(value: Any) -> Any:
    """Return the loss name; a list of one name is accepted too.

    Raises:
        UnconvertedError: The list does not have exactly one name.
    """
    if isinstance(value, list) and len(value) != 1:
        raise UnconvertedError("a sum of several losses is not supported; StreamTune takes one loss_type")
    return value[0] if isinstance(value, list) else value


def _convert_positive_steps(value: Any) -> Any:
    return -1 if value in (0, -1) else value


TRAINER_FIELDS: dict[str, FieldRule] = field_table(
    {
        **same_name_rules("""
            label_smoothing_factor learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon
            max_grad_norm num_train_epochs per_device_train_batch_size gradient_accumulation_steps seed bf16 fp16
            trust_remote_code"""),
        **same_name_rules("per_device_eval_batch_size output_dir greater_is_better", changes_training=False),
        **same_name_rules("dataloader_num_workers save_total_limit", changes_training=False),
        "lr_scheduler_kwargs": key_rule("lr_scheduler_kwargs", lambda value: value or {}),
        "optim": key_rule("optim", convert_optimizer_name),
        "deepspeed": key_rule(
            "deepspeed",
            _convert_deepspeed,
            changes_training=False,
            why="the DeepSpeed file does not exist here; its name gives the ZeRO stage",
        ),
        "eval_steps": key_rule("eval_steps", convert_step_count, changes_training=False),
        "save_steps": key_rule("save_steps", convert_step_count, changes_training=False),
        "logging_steps": key_rule("logging_steps", convert_step_count, changes_training=False),
        "max_steps": key_rule("max_steps", _convert_positive_steps),
        "metric_for_best_model": key_rule("metric_for_best_model", _convert_best_metric, changes_training=False),
        "full_determinism": key_rule("deterministic", changes_training=False),
        "report_to": key_rule("report_to", _convert_trackers, changes_training=False),
        "fsdp": key_rule("fsdp", bool, changes_training=False),
        "use_cpu": key_rule("device", lambda value: "cpu" if value else "auto", changes_training=False),
        "train_sampling_strategy": no_counterpart("rows are shuffled", changes_training=False, off=("random",)),
        "save_strategy": no_counterpart("write save_steps: N", changes_training=False, off=("steps",)),
        "eval_strategy": no_counterpart("write eval_steps: N", changes_training=False, off=("steps",)),
        "evaluation_strategy": no_counterpart("write eval_steps: N", changes_training=False, off=("steps",)),
    },
    renamed={"warmup_steps": "warmup_steps", "warmup_ratio": "warmup_ratio"},
    not_needed={
        "StreamTune's fsdp: true shards automatically with FSDP2": "fsdp_config fsdp_transformer_layer_cls_to_wrap",
        CHECKPOINTING: """gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
            activation_checkpointing_kwargs use_cache activation_offloading""",
        "StreamTune offloads layer inputs automatically if they do not fit": "activation_offload",
        KERNELS: """tf32 use_liger_kernel liger_kernel_config attn_implementation torch_compile torch_compile_backend
            torch_compile_mode jit_mode_eval use_ipex half_precision""",
        "StreamTune prepares rows once, on disk": """dataloader_pin_memory dataloader_persistent_workers
            dataloader_prefetch_factor remove_unused_columns label_names length_column_name dataset_num_proc
            accelerator_config dataloader_in_order dataloader_multiprocessing_context""",
        "StreamTune sets up DDP automatically; `--nproc N` starts the ranks": """ddp_timeout ddp_backend
            ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_find_unused_parameters local_rank
            average_tokens_across_devices world_size""",
        "the command sets it: `streamtune sft`, `dpo` or `grpo`": "do_train do_eval do_predict",
        "StreamTune writes all files of a run to output_dir": "logging_dir log_level log_level_replica",
        "metrics.jsonl has every step": """logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node
            include_num_input_tokens_seen include_tokens_per_second disable_tqdm skip_memory_metrics include_for_metrics
            include_inputs_for_metrics""",
        "StreamTune resumes a run in output_dir; `--resume never` starts a new run": "overwrite_output_dir",
        "StreamTune resumes by the same command; `--resume PATH` names a checkpoint": "resume_from_checkpoint",
        "StreamTune resumes a run exactly where it stopped": "ignore_data_skip restore_callback_states_from_checkpoint",
        "StreamTune's checkpoints are safetensors that every rank can read": "save_safetensors save_on_each_node",
        "StreamTune saves the model alone in final/; checkpoints have everything needed to resume": "save_only_model",
        "StreamTune's on_oom: replan switches to another schedule with the same gradient": "auto_find_batch_size",
        "evaluation computes losses only": """prediction_loss_only eval_accumulation_steps eval_do_concat_batches
            batch_eval_metrics eval_use_gather_object predict_with_generate""",
        "StreamTune evaluates in the precision of training": "bf16_full_eval fp16_full_eval",
        "StreamTune plans memory, so no cache needs to be emptied": "torch_empty_cache_steps",
        "StreamTune's launcher saves and resumes": "enable_jit_checkpoint",
        "write device: cpu to train without an accelerator": "no_cuda use_mps_device",
        "put the token of the Hugging Face hub into HF_TOKEN": "hub_token push_to_hub_token hf_hub_token",
    },
    lost={
        "noise on embeddings": "neftune_noise_alpha",
        "arguments of the optimizer": "optim_args",
        "target modules of a layer-wise or low-rank optimizer are not converted": "optim_target_modules",
        "StreamTune trains an incomplete last batch of an epoch too": "dataloader_drop_last",
    },
    lost_without_effect={
        "StreamTune's on_nan sets what happens if a loss is not finite": "debug",
        "StreamTune shuffles rows with the random seed 'seed'": "data_seed",
        "StreamTune shuffles rows; packing: true avoids padding": "group_by_length",
        "metric_for_best_model keeps the best checkpoint; final/ has the last step": "load_best_model_at_end",
        "StreamTune's first evaluation is after eval_steps steps": "eval_delay eval_on_start",
        "write sequence_parallel_size: N": "parallelism_config",
        "StreamTune uploads nothing in a run; `streamtune export` writes the model": """push_to_hub hub_model_id
            hub_strategy hub_private_repo hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization""",
        "StreamTune names a tracker's run after the run's folder": "run_name project",
        "set by TRACKIO_SPACE_ID": "trackio_space_id trackio_bucket_id trackio_static_space_id",
    },
)
"""Arguments of ``transformers.TrainingArguments``."""


def convert_warmup(conversion: Conversion) -> None:
    """Convert ``warmup_steps`` and ``warmup_ratio``.

    Steps take precedence over the ratio. Steps below 1 are a ratio. The schedule ``constant`` has no warm-up.
    """
    steps_count = conversion.file.fields.get("warmup_steps") not in (None, 0)
    constant = "constant" in (conversion.get("lr_scheduler_type"), conversion.get("lr_scheduler"))
    for name in ("warmup_steps", "warmup_ratio"):
        if name not in conversion.left:
            continue
        value = conversion.pop_field(name)
        if value in (None, 0, ""):
            conversion.report_unneeded(name, why="no warm-up, as in StreamTune")
        elif constant:
            conversion.report_unneeded(name, why="the schedule 'constant' has no warm-up in transformers")
        elif name == "warmup_ratio" and steps_count:
            conversion.report_unneeded(name, why="'warmup_steps' takes precedence")
        elif name == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
            conversion.write_key("warmup_ratio", value, name, note="warmup_steps below 1 is a fraction of all steps")
        else:
            whole = isinstance(value, float) and name == "warmup_steps" and value.is_integer()
            conversion.write_key(name, int(value) if whole else value, name)


def convert_quantization_bits(conversion: Conversion) -> None:
    conversion.write_if_on("load_in_4bit", "quantization", "nf4")
    conversion.write_if_on("load_in_8bit", "quantization", "int8")


def report_default_targets(conversion: Conversion) -> None:
    """Report that peft and StreamTune apply LoRA to different modules by default."""
    if conversion.ours.get("finetuning_type") in ("lora", "qlora") and "lora_target" not in conversion.ours:
        conversion.report_lost_setting(
            "lora_target_modules", "if unset, peft adapts attention modules only; StreamTune adapts all linear layers"
        )


def write_default_truncation(conversion: Conversion) -> None:
    """Write the other trainer's default for long rows: cut at the end, or split between any two tokens."""
    if conversion.objective == "sft" and conversion.ours.get("overlength") == "truncate":
        conversion.write_default("truncate_side", "right")
    elif conversion.objective == "sft" and conversion.ours.get("overlength") == "split":
        conversion.write_default("split_at", "token")


LIONS = {
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion_8bit"),
}
"""{name of Lion in transformers: StreamTune's optimizer}."""


def convert_optimizer(conversion: Conversion) -> None:
    """Convert SGD and Lion, whose arguments differ in transformers: SGD without momentum, Lion with Adam's betas."""
    names = (
        name for name in ("optim", "optimizer") if (rule := conversion.trainer.find_rule(name)) and rule.ours == "optim"
    )
    for name in names:
        theirs = conversion.left.get(name)
        if theirs == "sgd" and conversion.write_key("optim", "sgd", name):
            conversion.write_default("optim_args", {"momentum": 0.0}, "SGD of transformers has no momentum")
        elif isinstance(theirs, str) and theirs in LIONS and conversion.write_key("optim", LIONS[theirs], name):
            betas = [conversion.get("adam_beta1", 0.9), conversion.get("adam_beta2", 0.999)]
            conversion.write_default("optim_args", {"betas": betas}, "from adam_beta1 and adam_beta2")
            conversion.mark_unneeded("adam_beta1", "adam_beta2", why="StreamTune reads the betas from optim_args")


def convert_nll_of_simpo(conversion: Conversion) -> None:
    """Convert ``cpo_alpha``, the weight of the NLL term that TRL's CPO trainer adds to SimPO's loss too."""
    alpha = conversion.get("cpo_alpha", 1.0)
    if not alpha:
        conversion.mark_unneeded("cpo_alpha", why="no NLL term, as in StreamTune")
    elif conversion.get("cpo_alpha") is None:
        conversion.mark_unneeded("cpo_alpha", why="no value")
        conversion.write_default("rpo_alpha", alpha, "from cpo_alpha, the weight of the NLL term in TRL's CPO trainer")
    else:
        conversion.pop_field("cpo_alpha")
        conversion.write_key("rpo_alpha", alpha, "cpo_alpha")


def report_nll_differences(conversion: Conversion) -> None:
    """Report that TRL averages the NLL term of ``orpo``, ``cpo`` and ``rpo_alpha`` differently from StreamTune."""
    loss = conversion.ours.get("loss_type")
    if loss == "orpo":
        there = "TRL's NLL counts prompt and answer and is a mean over the tokens of a micro-batch"
        conversion.report_lost_setting(
            "loss_type: orpo", f"{there}; StreamTune's counts the answer and is a mean over pairs"
        )
    elif (loss == "cpo" and conversion.ours.get("cpo_alpha", 1.0)) or conversion.ours.get("rpo_alpha"):
        name = "loss_type: cpo" if loss == "cpo" else "rpo_alpha"
        conversion.report_lost_setting(
            name, "TRL's NLL is a mean over the tokens of a micro-batch, StreamTune's is a mean over pairs"
        )


def convert_trackers(conversion: Conversion, settings: dict[str, str]) -> None:
    """Convert ``report_to``, and fields that name a tracker, such as ``wandb_project``."""
    names: list[str] = []
    variables: list[str] = []
    if "report_to" in conversion.file.fields:
        conversion.convert_key(
            "report_to", _convert_trackers, conversion.pop_field("report_to"), "report_to", changes_training=False
        )
        names = conversion.ours.get("report_to", [])
    for name, tracker in settings.items():
        if name in conversion.file.fields:
            value = conversion.pop_field(name)
            variable = ""
            if isinstance(value, str) and value and not name.startswith("use_"):
                variable = f"set {name.upper()}={' '.join(value.split())[:60]}"
                variables.append(variable)
            if value in (None, "", False):
                conversion.report_unneeded(name, why="no value")
            elif tracker in names:
                conversion.report_unneeded(name, why=variable or f"'{tracker}' is named already")
            elif conversion.write_key(
                "report_to", [*names, tracker], name, note=variable, changes_training=False, replaces=True
            ):
                names = conversion.ours["report_to"]
    if len(variables) > 1 and names:
        conversion.notes["report_to"] = "; ".join(variables)


def convert_thinking(conversion: Conversion) -> None:
    """Convert the chat template's variables ``enable_thinking`` and ``preserve_thinking``."""
    for name in ("enable_thinking", "preserve_thinking"):
        if name not in conversion.left:
            continue
        value = conversion.pop_field(name)
        if not isinstance(value, bool):
            conversion.report_unneeded(name, why="StreamTune uses the chat template's default")
        elif name == "preserve_thinking" and not value:
            conversion.report_unneeded(name, why="off, as in StreamTune")
        elif name == "preserve_thinking" and conversion.objective == "sft":
            conversion.write_key("reasoning", "keep", name)
        else:
            conversion.merge_into_key(
                "chat_template_kwargs",
                {name: value},
                name,
                note="the variable has an effect only if the chat template reads it",
            )


def remove_conflicting_keys(conversion: Conversion) -> None:
    """Remove and report converted keys that conflict with other keys, or that other keys disable."""
    ours = conversion.ours

    def remove_key(key: str, why: str, *, changes_training: bool | None = None) -> None:
        ours.pop(key)
        line = conversion.lines.pop((key,), None)
        conversion.notes.pop(key, None)
        own_findings = [found for found in conversion.findings if found.ours.partition(":")[0] == key]
        for found in own_findings:
            conversion.findings.remove(found)
        given = next((found.theirs for found in own_findings if found.kind == "mapped"), "")
        if given or not own_findings:
            where = f"{conversion.file.marks.file}:{line}" if line else ""
            conversion.report_other_file(given or key, where, why, changes_training)

    if ours.get("quantization") == "int8" and (ours.get("deepspeed") or ours.get("fsdp")):
        why = "StreamTune's 8-bit weights (torchao) are not moved by DeepSpeed or FSDP2; without the key: nf4, 4 bits"
        remove_key("quantization", why, changes_training=True)
    if ours.get("early_stopping_patience"):
        conversion.write_default("metric_for_best_model", "eval_loss", "early stopping compares it")
    if not ours.get("val_size") and not ours.get("eval_datasets"):
        for key in ("eval_steps", "metric_for_best_model", "greater_is_better"):
            if key in ours:
                remove_key(key, "the recipe holds out no rows; set val_size or eval_datasets")
    if ours.get("early_stopping_patience") and not ours.get("eval_steps"):
        why = "the only evaluation is at the end: write eval_steps: N and early_stopping_patience"
        remove_key("early_stopping_patience", why, changes_training=True)
    if conversion.objective != "sft" and ours.get("packing"):
        remove_key("packing", "only sft rows are packed; a shared prompt is concatenated with its completions")
    if ours.get("finetuning_type", "full") == "full":
        for key in ADAPTER_KEYS:
            if key in ours:
                remove_key(key, "finetuning_type: full trains all weights")
    elif (kind := ours.get("adapter_type", "lora")) in ADAPTERS:
        row, quantised = ADAPTERS[kind], ours["finetuning_type"] == "qlora"
        if quantised and not row.on_quantised:
            remove_key(
                "adapter_type",
                f"'{kind}' computes with the base weights, which qlora keeps quantised",
                changes_training=True,
            )
        elif not quantised and row.start == "quantisation":
            remove_key(
                "adapter_type",
                f"'{kind}' starts from the quantisation error: write finetuning_type: qlora",
                changes_training=True,
            )
    if ours.get("finetuning_type") != "qlora" and "quantization" in ours:
        remove_key("quantization", "StreamTune quantises only frozen weights under adapters", changes_training=True)


# --- the launcher -----------------------------------------------------------------------------------------------------


RANKS = ("num_processes", "nproc_per_node", "num_gpus")
MACHINES = ("num_machines", "nnodes", "num_nodes", "machine_rank", "node_rank", "main_process_ip", "main_process_port",
            "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "hostfile", "rdzv_conf",
            "same_network", "deepspeed_hostfile", "deepspeed_multinode_launcher")  # fmt: skip
FALLBACK_OPTIONS = {"gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "max_grad_norm"}
"""{launcher option: StreamTune key}, for options that apply if the Trainer's arguments do not set the key."""


@dataclass(frozen=True)
class LauncherOption:
    """Option of a launcher such as ``torchrun``, or key of the launcher's configuration file."""

    name: str
    value: Any
    where: str
    beside: Mapping[str, Any]
    """All options of the same group."""
    group: str = ""

    @property
    def theirs(self) -> str:
        return f"{self.group}{'.' if self.group else ''}{self.name}: {self.value}"

    @property
    def text(self) -> str:
        return str(self.value).lower()


def is_accelerate_config(fields: dict[str, Any]) -> bool:
    """Return True if the fields come from a file that ``accelerate config`` writes."""
    return "compute_environment" in fields and "distributed_type" in fields


def convert_launcher(conversion: Conversion) -> None:
    """Convert the launcher's options and the keys of its configuration file."""
    options = {name: value for name, (value, _) in conversion.file.launcher.items()}
    for name, (value, line) in conversion.file.launcher.items():
        where = f"{conversion.file.path}:{line}"
        if name == "config_file":
            _convert_accelerate_config(conversion, str(value), where)
        else:
            _convert_launcher_option(conversion, LauncherOption(name, value, where, options))


def _convert_accelerate_config(conversion: Conversion, name: str, where: str) -> None:
    theirs = f"config_file: {name}"
    path = next((path for path in conversion.file.candidate_paths(name) if path.is_file()), None)
    if path is None:
        why = (
            "this accelerate file does not exist here: compare its settings of precision, DeepSpeed, FSDP and processes"
        )
        conversion.report_other_file(theirs, where, why, True)
        return
    try:
        fields, marks, _ = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError, RecipeError) as error:
        conversion.report_other_file(theirs, where, f"cannot be read: {error}", True)
        return
    conversion.report_other_file(theirs, where, "see its keys", None)
    for key, value in fields.items() if isinstance(fields, dict) else ():
        if isinstance(value, dict):
            for inner, inside in value.items():
                _convert_launcher_option(
                    conversion, LauncherOption(inner, inside, marks.key_origin(key, inner), value, key)
                )
        else:
            _convert_launcher_option(conversion, LauncherOption(key, value, marks.key_origin(key), fields))


def _convert_launcher_option(conversion: Conversion, option: LauncherOption) -> None:
    found = _recipe_key_of_option(option)
    if found is None:
        conversion.report_other_file(option.theirs, option.where, *_why_option_not_written(option))
    elif found[0] in conversion.ours:
        conversion.report_other_file(option.theirs, option.where, f"'{found[0]}' is given", None)
    else:
        conversion.write_other_file(*found, option.theirs, option.where)


def _recipe_key_of_option(option: LauncherOption) -> tuple[str, Any] | None:
    name, value, text = option.name, option.value, option.text
    if name == "mixed_precision" and text in ("bf16", "fp16"):
        return text, True
    if name == "zero_stage" and text in ("1", "2", "3"):
        places = [option.beside.get(f"offload_{part}_device") for part in ("optimizer", "param")]
        return "deepspeed", f"zero{value}" + ("_offload" if text == "3" and "cpu" in places else "")
    if name == "deepspeed_config_file" and value:
        return "deepspeed", value
    if (name == "use_fsdp" and text != "false") or (name == "distributed_type" and text == "fsdp"):
        return "fsdp", True
    if name in FALLBACK_OPTIONS and isinstance(value, int | float) and not isinstance(value, bool):
        return FALLBACK_OPTIONS[name], value
    return None


def _why_option_not_written(option: LauncherOption) -> tuple[str, bool | None]:
    """Return why a launcher option is not converted, and whether that changes training; None: nothing is lost."""
    name, text = option.name, option.text
    if name in RANKS:
        return f"use `--nproc {option.value}`", None
    if name == "mixed_precision" and text == "fp8":
        return "StreamTune does not train in fp8; write bf16: true", True
    if name in ("mixed_precision", "use_fsdp"):
        return "off, as in StreamTune", None
    if name in FALLBACK_OPTIONS:
        return "set by the recipe", None
    if name in MACHINES:
        return (
            "StreamTune's `--nproc` starts ranks on one machine; for several machines, see docs/guide/many-gpus.md",
            None,
        )
    if name.startswith("parallelism_config") or option.group == "parallelism_config":
        off = text in ("1", "none", "false", "true", "0")
        return ("off", None) if off else ("write sequence_parallel_size: N", False)
    return "StreamTune sets up ranks and kernels automatically", None
