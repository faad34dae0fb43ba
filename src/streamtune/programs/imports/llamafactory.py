"""Recipes of LLaMA-Factory."""

from __future__ import annotations

from typing import Any

from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    by_itself,
    more_special_tokens,
    no_counterpart,
    one_of,
    rope_scaling,
    same,
    split_names,
    switches,
    to,
    together,
    token_list,
    whole_modules,
    without,
)
from .llamafactory_datasets import take_datasets
from .templates import take_llamafactory_template
from .trainer_arguments import CHECKPOINTING, KERNELS, TRAINER_FIELDS, take_thinking, take_trackers, take_warmup

OBJECTIVES = {"pt": "sft", "sft": "sft", "dpo": "dpo", "kto": "dpo"}
"""``stage`` -> our objective."""

PREPARED = "rows are prepared when the run starts"
GENERATION = "read when it generates, not when it trains"
FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
"""Fields that say what ``finetuning_type: freeze`` trains."""

FIELDS: dict[str, FieldRule] = {
    **TRAINER_FIELDS,
    **same("model_name_or_path", "cutoff_len", "val_size", "lora_rank", "lora_alpha", "lora_dropout", "pref_beta"),
    **same("dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight", "simpo_gamma", "ref_model"),
    **same("moe_aux_loss_coef", "packing"),
    "lora_target": to("lora_target", split_names),
    "pref_ftx": to("rpo_alpha", lambda value: value or None),
    "pref_loss": to("loss_type"),
    "quantization_bit": to("quantization", one_of({4: "nf4", 8: "int8"}, "4 bits (nf4) or 8 (int8)")),
    "disable_gradient_checkpointing": FieldRule(why=CHECKPOINTING, needed=False),
    "rope_scaling": to("rope_scaling", rope_scaling),
    # taken together
    **together("stage", why="the objective of the recipe"),
    **together("finetuning_type", ours="finetuning_type"),
    **together("dataset dataset_dir max_samples interleave_probs mix_strategy", ours="datasets"),
    **together("eval_dataset", ours="eval_datasets"),
    **together("template", ours="chat_template"),
    **together("train_on_prompt mask_history", ours="train_on"),
    **together("pure_bf16", ours="dtype"),
    **together("neat_packing", ours="packing"),
    **together("enable_thinking preserve_thinking", ours="chat_template_kwargs"),
    **together("warmup_steps", ours="warmup_steps"),
    **together("warmup_ratio", ours="warmup_ratio"),
    "oft_block_size": to("oft_block_size", lambda value: value or None),
    # what StreamTune does by itself
    **by_itself(KERNELS, "use_kt kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num"),
    **by_itself(KERNELS, "kt_use_lora_experts kt_weight_path block_diag_attn"),
    **by_itself("models are placed by themselves", "device_map use_hyper_parallel hyper_parallel_args"),
    **by_itself("the precision of the weights says it", "compute_dtype"),
    **by_itself("set by cutoff_len", "model_max_length"),
    **by_itself(GENERATION, "generation_config generation_num_beams sglang_config sglang_lora_backend sglang_maxlen"),
    **by_itself(GENERATION, "sglang_mem_fraction sglang_tp_size"),
    **by_itself("`streamtune bench` measures", "enable_torch_profiler profile_modules profiler_active_steps"),
    **by_itself("`streamtune bench` measures", "profiler_output_dir profiler_profile_memory profiler_record_shapes"),
    **by_itself("`streamtune bench` measures", "profiler_repeat profiler_wait_steps profiler_warmup_steps"),
    **by_itself("`streamtune bench` measures", "profiler_with_stack"),
    **by_itself("`--nproc N` starts the ranks of one machine", "master_addr master_port ray_init_kwargs"),
    **by_itself("rows are drawn by 'seed'; packing: true saves the padding", "sortish_sampler"),
    **by_itself("read with use_eaft_loss only", "eaft_alpha"),
    **by_itself(KERNELS, "flash_attn", "enable_liger_kernel", "use_unsloth", "use_unsloth_gc", "use_v1_kernels"),
    **by_itself(CHECKPOINTING, "use_reentrant_gc"),
    **by_itself("the streamed head computes log-probabilities in fp32", "upcast_lmhead_output"),
    **by_itself("HF_HOME says where downloads are kept", "cache_dir", "offload_folder"),
    **by_itself(PREPARED, "overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "tokenized_path"),
    **by_itself(PREPARED, "streaming", "buffer_size", "data_shared_file_system", "media_dir"),
    **by_itself("padding has the label -100 always", "ignore_pad_token_for_loss"),
    **by_itself("loss.png is always drawn", "plot_loss"),
    **by_itself("metrics.jsonl has every step", "include_effective_tokens_per_second", "compute_accuracy"),
    **by_itself("the banner of a run says it", "print_param_status"),
    **by_itself(
        "models are placed by themselves", "low_cpu_mem_usage", "quantization_device_map", "use_fast_tokenizer"
    ),
    **by_itself(
        GENERATION, "infer_backend", "infer_dtype", "use_kv_cache", "do_sample", "temperature", "top_p", "top_k"
    ),
    **by_itself(GENERATION, "num_beams", "max_new_tokens", "max_length", "repetition_penalty", "length_penalty"),
    **same("default_system"),
    **by_itself(GENERATION, "skip_special_tokens", "eval_num_beams", "generation_max_length"),
    **by_itself(GENERATION, "vllm_maxlen", "vllm_gpu_util", "vllm_enforce_eager", "vllm_max_lora_rank", "vllm_config"),
    **by_itself(
        "`streamtune export` writes the model", "export_dir", "export_size", "export_device", "export_hub_model_id"
    ),
    **by_itself("`streamtune export` writes the model", "export_quantization_bit", "export_quantization_dataset"),
    **by_itself("`streamtune export` writes the model", "export_quantization_nsamples", "export_quantization_maxlen"),
    **by_itself("`streamtune export` writes the model", "export_legacy_format"),
    **by_itself("a token for a hub belongs in its environment variable", "ms_hub_token", "om_hub_token"),
    **by_itself("images and sounds are not trained on", "image_max_pixels", "image_min_pixels", "video_max_pixels"),
    **by_itself(
        "images and sounds are not trained on", "video_min_pixels", "video_fps", "video_maxlen", "crop_to_patches"
    ),
    **by_itself("images and sounds are not trained on", "audio_sampling_rate", "use_audio_in_video"),
    **by_itself("images and sounds are not trained on", "image_do_pan_and_scan", "freeze_multi_modal_projector"),
    **by_itself("images and sounds are not trained on", "freeze_vision_tower"),
    **by_itself("double quantisation is on for nf4", "double_quantization"),
    **by_itself(
        "read with their switch only", "galore_target", "galore_rank", "galore_update_interval", "galore_scale"
    ),
    **by_itself("read with their switch only", "galore_proj_type", "galore_layerwise", "apollo_target", "apollo_rank"),
    **by_itself(
        "read with their switch only", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type"
    ),
    **by_itself("read with their switch only", "apollo_scale_type", "apollo_layerwise", "apollo_scale_front"),
    **by_itself(
        "read with their switch only", "badam_mode", "badam_start_block", "badam_switch_mode", "badam_mask_mode"
    ),
    **by_itself("read with their switch only", "badam_switch_interval", "badam_update_ratio", "badam_verbose"),
    **by_itself("read with their switch only", "pissa_iter", "pissa_convert", "loraplus_lr_embedding", "oft_rank"),
    **by_itself("read with their switch only", "oft_target module_dropout create_new_adapter fp8_backend"),
    **by_itself("read with their switch only", "init_special_tokens"),
    **without("all layers are trained", *FREEZE),
    # lost
    "adapter_name_or_path": no_counterpart("a trained adapter to begin with: merge it first with `streamtune export`"),
    "adapter_folder": no_counterpart("a trained adapter to begin with: merge it first with `streamtune export`"),
    "model_revision": no_counterpart("a revision of the model: download it and name its folder", off=("main",)),
    **by_itself("the model gets a row for each new token", "resize_vocab"),
    "add_tokens": to("added_tokens", token_list),
    "add_special_tokens": to("special_tokens", more_special_tokens),
    "new_special_tokens_config": no_counterpart("new rows begin as the mean of the others"),
    **same("split_special_tokens"),
    **without("attention is exact", "shift_attn"),
    **without("the model keeps its form", "mixture_of_depths", "use_llama_pro"),
    "train_from_scratch": no_counterpart("write model: {init: ...} for a model with random weights"),
    "upcast_layernorm": no_counterpart("norms in fp32; write dtype: float32 for all weights"),
    "quantization_method": no_counterpart("bitsandbytes or torchao quantise", off=("bnb", "bitsandbytes")),
    "quantization_type": no_counterpart("4 bits are nf4", off=("nf4",)),
    "fp8": no_counterpart("training in 8 bits floating point"),
    "fp8_enable_fsdp_float8_all_gather": no_counterpart("training in 8 bits floating point"),
    "additional_target": to("modules_to_save", whole_modules),
    "loraplus_lr_ratio": no_counterpart("LoRA+: write lr_groups: [{match: lora_B, learning_rate: ...}]"),
    **switches("use_rslora", "use_dora", "pissa_init"),
    "use_adam_mini": no_counterpart("an optimizer that is not here"),
    "use_badam": no_counterpart("write optim: badam"),
    "use_galore": no_counterpart("write optim: galore"),
    "use_apollo": no_counterpart("write optim: apollo"),
    "use_muon": no_counterpart("write optim: muon"),
    "use_mca": no_counterpart("Megatron does not train here", trains=False),
    "use_dft_loss": FieldRule("loss_type", lambda value: "dft" if value else "nll"),
    "use_asft_loss": no_counterpart("the ASFT loss"),
    **by_itself("read with use_asft_loss only", "asft_alpha"),
    "use_eaft_loss": no_counterpart("the EAFT loss"),
    "freeze_language_model": no_counterpart("training of an image tower only"),
    "pref_bco_weight": no_counterpart("the BCO part of the loss"),
    "ld_alpha": no_counterpart("LD-DPO"),
    "ref_model_adapters": no_counterpart("adapters of the reference: merge them first"),
    "ref_model_quantization_bit": no_counterpart("the reference keeps its precision"),
    **without("a reward model", "reward_model", "reward_model_adapters", "reward_model_quantization_bit"),
    **by_itself(
        "read by PPO only", "reward_model_type", "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target"
    ),
    **by_itself("read by PPO only", "ppo_whiten_rewards"),
    "disable_shuffling": to("shuffle", lambda value: not value),
    "early_stopping_steps": to("early_stopping_patience"),
    "tool_format": no_counterpart("tools are rendered by the chat template"),
    **by_itself("each of eval_datasets has a loss of its own", "eval_on_each_dataset"),
    **without("this tracker is not here", "use_swanlab", trains=False),
    **by_itself(
        "read with use_swanlab only", "swanlab_project", "swanlab_workspace", "swanlab_run_name", "swanlab_mode"
    ),
    **by_itself("read with use_swanlab only", "swanlab_api_key", "swanlab_logdir", "swanlab_lark_webhook_url"),
    **by_itself("read with use_swanlab only", "swanlab_lark_secret"),
    **without("Ray does not start runs", "ray_run_name", "ray_storage_path", "ray_num_workers", trains=False),
    **without("Ray does not start runs", "resources_per_worker", "placement_strategy", trains=False),
}


def _objective(conversion: Conversion) -> str:
    stage = str(conversion.get("stage", "sft"))
    if stage not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise conversion.refuse("stage", what=f"'stage: {stage}' has no counterpart", mend=f"known are {known}")
    return OBJECTIVES[stage]


def _special(conversion: Conversion) -> None:
    stage = conversion.take("stage")
    if stage == "kto":
        conversion.put("loss_type", "kto", "stage")
    elif stage is not None:
        conversion.unneeded("stage", why=f"objective: {conversion.objective}")
    take_llamafactory_template(conversion, texts=stage == "pt")
    take_thinking(conversion)
    _take_trained(conversion, stage)
    _take_precision(conversion)
    _take_method(conversion)
    if stage == "pt":
        _take_blocks(conversion)
    elif conversion.take("neat_packing"):
        if conversion.take("packing") is not None:
            conversion.unneeded("packing", why="neat_packing says it")
        conversion.put("packing", True, "neat_packing")
    elif conversion.get("packing"):
        conversion.take("packing")
        conversion.put(
            "packing", True, "packing", note="rows see each other there without neat_packing, and never here"
        )
    if stage != "pt" and "neat_packing" in conversion.file.fields and not conversion.get("neat_packing"):
        conversion.unneeded("neat_packing", why="off: see packing")
    take_warmup(conversion)
    take_trackers(conversion, {})
    take_datasets(conversion, texts=stage == "pt")


def _take_method(conversion: Conversion) -> None:
    """Convert ``finetuning_type``: OFT is a kind of adapters here, and what freeze leaves frozen is trained."""
    name = "finetuning_type"
    given = name in conversion.file.fields
    method = conversion.take(name) or "lora"
    if method == "lora" and conversion.get("quantization_bit"):
        if given:
            conversion.put(name, "qlora", name)
        else:
            conversion.ours[name] = "qlora"
    elif method in ("lora", "full"):
        if given:
            conversion.put(name, method, name)
    elif method == "oft":
        conversion.put("adapter_type", "oft", name)
        conversion.ours[name] = "lora"
        target = conversion.take("oft_target")
        if target is not None:
            conversion.convert("lora_target", split_names, target, "oft_target")
    else:
        conversion.ours[name] = "full"
        last = conversion.get("freeze_trainable_layers", 2)
        why = f"it trains {last} layers and leaves the others as they are; here all weights are trained"
        conversion.lose(name, why=why if method == "freeze" else "we have full, lora and qlora")
    for key in FREEZE:
        if key in conversion.left and method != "freeze":
            conversion.take(key)
            conversion.unneeded(key, why="read with finetuning_type: freeze only")


def _take_blocks(conversion: Conversion) -> None:
    """Convert what ``stage: pt`` makes of texts: blocks of ``cutoff_len`` tokens, unless ``packing: false``."""
    given = conversion.file.fields
    packing = conversion.take("packing")
    if packing in (None, True):
        note = "texts are laid end to end in blocks there, and see each other; here they do not"
        if packing:
            conversion.put("packing", True, "packing", note=note)
        else:
            conversion.default("packing", True, note)
        conversion.default("overlength", "split", "a text that is too long goes on in the next block")
        conversion.default("split_at", "token")
    else:
        conversion.unneeded("packing", why="off, as here")
    if packing is None and "packing" in given:
        conversion.unneeded("packing", why="no value")
    if "neat_packing" in given:
        conversion.take("neat_packing")
        conversion.unneeded("neat_packing", why="read by stage: sft only")


def _take_trained(conversion: Conversion, stage: Any) -> None:
    on_prompt, last_only = conversion.take("train_on_prompt"), conversion.take("mask_history")
    given = conversion.file.fields
    if on_prompt:
        conversion.put("train_on", "all", "train_on_prompt")
    elif "train_on_prompt" in given:
        conversion.unneeded("train_on_prompt", why="off, as here")
    if last_only:
        conversion.put("train_on", "completion", "mask_history")
    elif "mask_history" in given:
        conversion.unneeded("mask_history", why="off, as here")
    if stage == "pt":
        conversion.default("train_on", "all", "stage: pt")


def _take_precision(conversion: Conversion) -> None:
    pure = conversion.take("pure_bf16")
    if pure:
        conversion.put("dtype", "bfloat16", "pure_bf16")
    elif "pure_bf16" in conversion.file.fields:
        conversion.unneeded("pure_bf16", why="off, as here")


def _defaults(conversion: Conversion) -> None:
    conversion.default("finetuning_type", "lora")
    adapters = conversion.ours.get("finetuning_type") != "full"
    if adapters:
        conversion.default("lora_r", 8)
    conversion.default("learning_rate", 5e-5)
    conversion.default("lr_scheduler_type", "linear")
    conversion.default("num_train_epochs", 3.0)
    conversion.default("per_device_train_batch_size", 8)
    cut = "there each turn loses a part of its question and of its answer; here the end of the row is cut off"
    conversion.default("overlength", "truncate", cut if conversion.objective == "sft" else "")
    if conversion.objective == "sft" and conversion.ours["overlength"] == "truncate":
        conversion.default("truncate_side", "right")
    if "bf16" not in conversion.ours:
        conversion.default("bf16", False, "nothing is cast there unless it is written")
    if "dtype" not in conversion.ours and conversion.get("bf16"):
        note = "frozen weights are kept in the precision of the computation" if adapters else "weights are kept in fp32"
        conversion.default("dtype", "bfloat16" if adapters else "float32", note)


SIGNS = (
    "stage cutoff_len template dataset_dir overwrite_cache preprocessing_num_workers plot_loss pref_beta pref_loss "
    "finetuning_type do_train flash_attn max_samples overwrite_output_dir"
)
"""Fields that no other trainer has."""

LLAMAFACTORY = PeerTrainer(
    name="llamafactory",
    title="LLaMA-Factory",
    fields=FIELDS,
    signs=frozenset(SIGNS.split()),
    objective=_objective,
    special=_special,
    defaults=_defaults,
    other_defaults=frozenset(
        [
            *("finetuning_type", "lora_r", "learning_rate", "lr_scheduler_type", "num_train_epochs", "dtype", "bf16"),
            *("per_device_train_batch_size", "overlength", "truncate_side", "split_at", "packing", "train_on"),
            *("reasoning", "default_system"),
        ]
    ),
)
