"""Recipes of LLaMA-Factory."""

from __future__ import annotations

from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    dft_or_nll,
    field_table,
    more_special_tokens,
    negated,
    no_counterpart,
    one_of,
    or_none,
    rope_scaling,
    same,
    split_names,
    switches,
    to,
    token_list,
    whole_modules,
)
from .llamafactory_datasets import take_datasets
from .templates import take_llamafactory_template
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    default_cut,
    take_thinking,
    take_trackers,
    take_warmup,
)

OBJECTIVES = {"pt": "sft", "sft": "sft", "dpo": "dpo", "kto": "dpo"}
"""``stage`` -> our objective."""

FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
"""Fields that say what ``finetuning_type: freeze`` trains."""

FIELDS: dict[str, FieldRule] = field_table(
    {
        **TRAINER_FIELDS,
        **same("""model_name_or_path cutoff_len val_size lora_rank lora_alpha lora_dropout pref_beta dpo_label_smoothing
            kto_chosen_weight kto_rejected_weight simpo_gamma ref_model moe_aux_loss_coef packing default_system
            split_special_tokens"""),
        **switches("use_rslora use_dora pissa_init"),
        "lora_target": to("lora_target", split_names),
        "pref_ftx": to("rpo_alpha", or_none),
        "quantization_bit": to("quantization", one_of({4: "nf4", 8: "int8"}, "4 bits (nf4) or 8 (int8)")),
        "rope_scaling": to("rope_scaling", rope_scaling),
        "oft_block_size": to("oft_block_size", or_none),
        "add_tokens": to("added_tokens", token_list),
        "add_special_tokens": to("special_tokens", more_special_tokens),
        "additional_target": to("modules_to_save", whole_modules),
        "use_dft_loss": to("loss_type", dft_or_nll),
        "disable_shuffling": to("shuffle", negated),
        "model_revision": no_counterpart("a revision of the model: download it and name its folder", off=("main",)),
        "quantization_method": no_counterpart("bitsandbytes or torchao quantise", off=("bnb", "bitsandbytes")),
        "quantization_type": no_counterpart("4 bits are nf4", off=("nf4",)),
    },
    renamed={
        "finetuning_type": "finetuning_type",
        "datasets": "dataset dataset_dir max_samples interleave_probs mix_strategy",
        "eval_datasets": "eval_dataset",
        "chat_template": "template",
        "train_on": "train_on_prompt mask_history",
        "dtype": "pure_bf16",
        "packing": "neat_packing",
        "chat_template_kwargs": "enable_thinking preserve_thinking",
        "loss_type": "pref_loss",
        "early_stopping_patience": "early_stopping_steps",
    },
    not_needed={
        CHECKPOINTING: "disable_gradient_checkpointing use_reentrant_gc",
        "the objective of the recipe": "stage",
        KERNELS: """use_kt kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num
            kt_use_lora_experts kt_weight_path block_diag_attn flash_attn enable_liger_kernel use_unsloth use_unsloth_gc
            use_v1_kernels""",
        "models are placed by themselves": """device_map use_hyper_parallel hyper_parallel_args low_cpu_mem_usage
            quantization_device_map use_fast_tokenizer""",
        "the precision of the weights says it": "compute_dtype",
        "set by cutoff_len": "model_max_length",
        "read when it generates, not when it trains": """generation_config generation_num_beams sglang_config
            sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size infer_backend infer_dtype use_kv_cache
            do_sample temperature top_p top_k num_beams max_new_tokens max_length repetition_penalty length_penalty
            skip_special_tokens eval_num_beams generation_max_length vllm_maxlen vllm_gpu_util vllm_enforce_eager
            vllm_max_lora_rank vllm_config""",
        "`streamtune bench` measures": """enable_torch_profiler profile_modules profiler_active_steps
            profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps
            profiler_warmup_steps profiler_with_stack""",
        "`--nproc N` starts the ranks of one machine": "master_addr master_port ray_init_kwargs",
        "rows are drawn by 'seed'; packing: true saves the padding": "sortish_sampler",
        "read with use_eaft_loss only": "eaft_alpha",
        "the streamed head computes log-probabilities in fp32": "upcast_lmhead_output",
        "HF_HOME says where downloads are kept": "cache_dir offload_folder",
        "rows are prepared when the run starts": """overwrite_cache preprocessing_num_workers preprocessing_batch_size
            tokenized_path streaming buffer_size data_shared_file_system media_dir""",
        "padding has the label -100 always": "ignore_pad_token_for_loss",
        "loss.png is always drawn": "plot_loss",
        "metrics.jsonl has every step": "include_effective_tokens_per_second compute_accuracy",
        "the banner of a run says it": "print_param_status",
        "`streamtune export` writes the model": """export_dir export_size export_device export_hub_model_id
            export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen
            export_legacy_format""",
        "a token for a hub belongs in its environment variable": "ms_hub_token om_hub_token",
        "images and sounds are not trained on": """image_max_pixels image_min_pixels video_max_pixels video_min_pixels
            video_fps video_maxlen crop_to_patches audio_sampling_rate use_audio_in_video image_do_pan_and_scan
            freeze_multi_modal_projector freeze_vision_tower""",
        "double quantisation is on for nf4": "double_quantization",
        "read with their switch only": """galore_target galore_rank galore_update_interval galore_scale galore_proj_type
            galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
            apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
            badam_mask_mode badam_switch_interval badam_update_ratio badam_verbose pissa_iter pissa_convert
            loraplus_lr_embedding oft_rank oft_target module_dropout create_new_adapter fp8_backend
            init_special_tokens""",
        "the model gets a row for each new token": "resize_vocab",
        "read with use_asft_loss only": "asft_alpha",
        "read by PPO only": "reward_model_type ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards",
        "each of eval_datasets has a loss of its own": "eval_on_each_dataset",
        "read with use_swanlab only": """swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key
            swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret""",
    },
    lost={
        "all layers are trained": "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        "a trained adapter to begin with: merge it first with `streamtune export`": """adapter_name_or_path
            adapter_folder""",
        "new rows begin as the mean of the others": "new_special_tokens_config",
        "attention is exact": "shift_attn",
        "the model keeps its form": "mixture_of_depths use_llama_pro",
        "write model: {init: ...} for a model with random weights": "train_from_scratch",
        "norms in fp32; write dtype: float32 for all weights": "upcast_layernorm",
        "training in 8 bits floating point": "fp8 fp8_enable_fsdp_float8_all_gather",
        "LoRA+: write lr_groups: [{match: lora_B, learning_rate: ...}]": "loraplus_lr_ratio",
        "an optimizer that is not here": "use_adam_mini",
        "write optim: badam": "use_badam",
        "write optim: galore": "use_galore",
        "write optim: apollo": "use_apollo",
        "write optim: muon": "use_muon",
        "the ASFT loss": "use_asft_loss",
        "the EAFT loss": "use_eaft_loss",
        "training of an image tower only": "freeze_language_model",
        "the BCO part of the loss": "pref_bco_weight",
        "LD-DPO": "ld_alpha",
        "adapters of the reference: merge them first": "ref_model_adapters",
        "the reference keeps its precision": "ref_model_quantization_bit",
        "a reward model": "reward_model reward_model_adapters reward_model_quantization_bit",
        "tools are rendered by the chat template": "tool_format",
    },
    lost_beside_training={
        "Megatron does not train here": "use_mca",
        "this tracker is not here": "use_swanlab",
        "Ray does not start runs": """ray_run_name ray_storage_path ray_num_workers resources_per_worker
            placement_strategy""",
    },
)


def _objective(conversion: Conversion) -> str:
    stage = str(conversion.get("stage", "sft"))
    if stage not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise conversion.refuse("stage", what=f"'stage: {stage}' has no counterpart", mend=f"known are {known}")
    return OBJECTIVES[stage]


def _special(conversion: Conversion) -> None:
    stage = conversion.take("stage")
    texts = stage == "pt"
    if stage == "kto":
        conversion.put("loss_type", "kto", "stage")
    elif stage is not None:
        conversion.unneeded("stage", why=f"objective: {conversion.objective}")
    take_llamafactory_template(conversion, texts=texts)
    take_thinking(conversion)
    conversion.switch("train_on_prompt", "train_on", "all")
    conversion.switch("mask_history", "train_on", "completion")
    if texts:
        conversion.default("train_on", "all", "stage: pt")
    conversion.switch("pure_bf16", "dtype", "bfloat16")
    _take_method(conversion)
    if texts:
        _take_blocks(conversion)
    elif conversion.get("neat_packing"):
        if conversion.take("packing") is not None:
            conversion.unneeded("packing", why="neat_packing says it")
        conversion.switch("neat_packing", "packing", True)
    elif conversion.get("packing"):
        note = "rows see each other there without neat_packing, and never here"
        conversion.switch("packing", "packing", True, note=note)
    conversion.dismiss("neat_packing", why="off: see packing")
    take_warmup(conversion)
    take_trackers(conversion, {})
    take_datasets(conversion, texts=texts)


def _take_method(conversion: Conversion) -> None:
    """Convert ``finetuning_type``: OFT is a kind of adapters here, and what freeze leaves frozen is trained."""
    name = "finetuning_type"
    given = name in conversion.left
    method = conversion.take(name) or "lora"
    if method in ("lora", "full"):
        kind = "qlora" if method == "lora" and conversion.get("quantization_bit") else method
        if given:
            conversion.put(name, kind, name)
        elif kind == "qlora":
            conversion.ours[name] = kind
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
    if method != "freeze":
        conversion.dismiss(*FREEZE, why="read with finetuning_type: freeze only")


def _take_blocks(conversion: Conversion) -> None:
    """Convert what ``stage: pt`` makes of texts: blocks of ``cutoff_len`` tokens, unless ``packing: false``."""
    packing = conversion.file.fields.get("packing")
    if packing in (None, True):
        note = "texts are laid end to end in blocks there, and see each other; here they do not"
        if packing:
            conversion.switch("packing", "packing", True, note=note)
        else:
            conversion.default("packing", True, note)
        conversion.default("overlength", "split", "a text that is too long goes on in the next block")
        conversion.default("split_at", "token")
    conversion.dismiss("packing", why="no value" if packing is None else "off, as here")
    conversion.dismiss("neat_packing", why="read by stage: sft only")


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
    default_cut(conversion)
    if "bf16" not in conversion.ours:
        conversion.default("bf16", False, "nothing is cast there unless it is written")
    if "dtype" not in conversion.ours and conversion.get("bf16"):
        note = "frozen weights are kept in the precision of the computation" if adapters else "weights are kept in fp32"
        conversion.default("dtype", "bfloat16" if adapters else "float32", note)


LLAMAFACTORY = PeerTrainer(
    name="llamafactory",
    title="LLaMA-Factory",
    fields=FIELDS,
    signs="""stage cutoff_len template dataset_dir overwrite_cache preprocessing_num_workers plot_loss pref_beta
        pref_loss finetuning_type do_train flash_attn max_samples overwrite_output_dir""",
    objective=_objective,
    special=_special,
    defaults=_defaults,
)
