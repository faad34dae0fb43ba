"""Convert recipes of LLaMA-Factory, and the datasets that its ``dataset_info.json`` describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .conversion import Conversion, PeerTrainer
from .field_rules import (
    FieldRule,
    convert_additional_special_tokens,
    convert_module_list,
    convert_module_names,
    convert_rope_scaling,
    convert_token_list,
    dft_if_on,
    field_table,
    key_rule,
    lookup_converter,
    negate_switch,
    no_counterpart,
    none_if_empty,
    same_name_rules,
    switch_rules,
)
from .rows_and_templates import (
    READ_OF_MESSAGES,
    convert_llamafactory_template,
    convert_split,
    first_local_row,
    report_media,
    report_tools_of_named_template,
    report_unread_columns,
    report_unread_fields,
    write_columns,
    write_datasets,
    write_eval_sets,
    write_weights,
)
from .trained_parameters import convert_frozen_layers, convert_tower
from .trainer_arguments import (
    CHECKPOINTING,
    KERNELS,
    TRAINER_FIELDS,
    convert_thinking,
    convert_trackers,
    convert_warmup,
    write_default_truncation,
)

OBJECTIVES = {"pt": "sft", "sft": "sft", "dpo": "dpo", "kto": "dpo"}
"""{LLaMA-Factory's ``stage``: StreamTune's objective}."""

FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
"""Fields that LLaMA-Factory reads only with ``finetuning_type: freeze``."""

FIELDS: dict[str, FieldRule] = field_table(
    {
        **TRAINER_FIELDS,
        **same_name_rules("""
            model_name_or_path cutoff_len val_size lora_rank lora_alpha lora_dropout pref_beta dpo_label_smoothing
            kto_chosen_weight kto_rejected_weight simpo_gamma ref_model moe_aux_loss_coef packing default_system
            split_special_tokens"""),
        **switch_rules("use_rslora use_dora pissa_init"),
        "lora_target": key_rule("lora_target", convert_module_names),
        "pref_ftx": key_rule("rpo_alpha", none_if_empty),
        "quantization_bit": key_rule(
            "quantization",
            lookup_converter({4: "nf4", 8: "int8"}, "StreamTune quantises to 4 bits (nf4) or 8 bits (int8)"),
        ),
        "rope_scaling": key_rule("rope_scaling", convert_rope_scaling),
        "oft_block_size": key_rule("oft_block_size", none_if_empty),
        "image_max_pixels": key_rule("max_pixels"),
        "image_min_pixels": key_rule("min_pixels"),
        "add_tokens": key_rule("added_tokens", convert_token_list),
        "add_special_tokens": key_rule("special_tokens", convert_additional_special_tokens),
        "additional_target": key_rule("modules_to_save", convert_module_list),
        "use_dft_loss": key_rule("loss_type", dft_if_on),
        "disable_shuffling": key_rule("shuffle", negate_switch),
        "media_dir": no_counterpart(
            "paths of images are relative to the file of the rows: move it into media_dir, or write absolute paths",
            off=(".",),
        ),
        "model_revision": no_counterpart("download the model revision and give its folder", off=("main",)),
        "quantization_method": no_counterpart(
            "StreamTune quantises with bitsandbytes or torchao", off=("bnb", "bitsandbytes")
        ),
        "quantization_type": no_counterpart("4-bit weights use nf4", off=("nf4",)),
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
        "freeze_vision_tower": "freeze_vision_tower",
        "freeze_projector": "freeze_multi_modal_projector",
        "trainable_layers": "freeze_trainable_layers",
        "freeze": "freeze_trainable_modules",
        "train": "freeze_extra_modules",
    },
    not_needed={
        CHECKPOINTING: "disable_gradient_checkpointing use_reentrant_gc",
        "StreamTune's objective (sft, dpo or grpo) sets this": "stage",
        KERNELS: """use_kt kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num
            kt_use_lora_experts kt_weight_path block_diag_attn flash_attn enable_liger_kernel use_unsloth use_unsloth_gc
            use_v1_kernels""",
        "models are placed automatically": """device_map use_hyper_parallel hyper_parallel_args low_cpu_mem_usage
            quantization_device_map use_fast_tokenizer""",
        "StreamTune takes the compute dtype from the weights": "compute_dtype",
        "set by cutoff_len": "model_max_length",
        "LLaMA-Factory uses this field for generation, not for training": """generation_config generation_num_beams
            sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size infer_backend infer_dtype
            use_kv_cache do_sample temperature top_p top_k num_beams max_new_tokens max_length repetition_penalty
            length_penalty skip_special_tokens eval_num_beams generation_max_length vllm_maxlen vllm_gpu_util
            vllm_enforce_eager vllm_max_lora_rank vllm_config""",
        "use `streamtune bench` for measurements": """enable_torch_profiler profile_modules profiler_active_steps
            profiler_output_dir profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps
            profiler_warmup_steps profiler_with_stack""",
        "StreamTune's `--nproc N` starts the ranks of one machine": "master_addr master_port ray_init_kwargs",
        "StreamTune shuffles rows by 'seed'; packing: true avoids padding": "sortish_sampler",
        "used only with use_eaft_loss": "eaft_alpha",
        "StreamTune always computes log-probabilities in fp32": "upcast_lmhead_output",
        "set the folder of downloads with the variable HF_HOME": "cache_dir offload_folder",
        "StreamTune prepares rows when the run starts": """overwrite_cache preprocessing_num_workers
            preprocessing_batch_size tokenized_path streaming buffer_size data_shared_file_system""",
        "StreamTune always labels padding with -100": "ignore_pad_token_for_loss",
        "loss.png is always drawn": "plot_loss",
        "metrics.jsonl has every step": "include_effective_tokens_per_second compute_accuracy",
        "StreamTune shows the number of trained parameters when a run starts": "print_param_status",
        "use `streamtune export` to write the model": """export_dir export_size export_device export_hub_model_id
            export_quantization_bit export_quantization_dataset export_quantization_nsamples export_quantization_maxlen
            export_legacy_format""",
        "put the token into the hub's environment variable": "ms_hub_token om_hub_token",
        "StreamTune trains on no videos and audio": """video_max_pixels video_min_pixels video_fps video_maxlen
            audio_sampling_rate use_audio_in_video""",
        "set in preprocessor_config.json of the model": "crop_to_patches image_do_pan_and_scan",
        "StreamTune's nf4 always has double quantisation": "double_quantization",
        "read only if enabled": """galore_target galore_rank galore_update_interval galore_scale galore_proj_type
            galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
            apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
            badam_mask_mode badam_switch_interval badam_update_ratio badam_verbose pissa_iter pissa_convert
            loraplus_lr_embedding oft_rank oft_target module_dropout create_new_adapter fp8_backend
            init_special_tokens""",
        "StreamTune adds an embedding row for each new token automatically": "resize_vocab",
        "used only with use_asft_loss": "asft_alpha",
        "used only by PPO": "reward_model_type ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards",
        "StreamTune reports a loss for each of eval_datasets": "eval_on_each_dataset",
        "used only with use_swanlab": """swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key
            swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret""",
    },
    lost={
        "the importer converts no trained adapters: merge the adapter first with `streamtune export`": """
            adapter_name_or_path adapter_folder""",
        "StreamTune initialises new embedding rows with the mean of the other rows": "new_special_tokens_config",
        "StreamTune does not support sparse attention": "shift_attn",
        "StreamTune does not change the architecture": "mixture_of_depths use_llama_pro",
        "write model: {init: ...} for a model with random weights": "train_from_scratch",
        "norms alone in fp32 are not supported; write dtype: float32 for all weights": "upcast_layernorm",
        "training in fp8": "fp8 fp8_enable_fsdp_float8_all_gather",
        "for LoRA+, write lr_groups: [{match: lora_B, learning_rate: ...}]": "loraplus_lr_ratio",
        "an unsupported optimizer": "use_adam_mini",
        "write optim: badam": "use_badam",
        "write optim: galore": "use_galore",
        "write optim: apollo": "use_apollo",
        "write optim: muon": "use_muon",
        "the ASFT loss": "use_asft_loss",
        "the EAFT loss": "use_eaft_loss",
        "StreamTune trains the language model too": "freeze_language_model",
        "StreamTune's losses have no BCO term": "pref_bco_weight",
        "LD-DPO": "ld_alpha",
        "StreamTune loads no adapters for the reference model: merge them first": "ref_model_adapters",
        "StreamTune does not quantise the reference model": "ref_model_quantization_bit",
        "a reward model": "reward_model reward_model_adapters reward_model_quantization_bit",
        "StreamTune renders tools with the chat template": "tool_format",
    },
    lost_without_effect={
        "Megatron is not supported": "use_mca",
        "StreamTune does not support this tracker": "use_swanlab",
        "Ray is not supported": "ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy",
    },
)


def _choose_objective(conversion: Conversion) -> str:
    stage = str(conversion.get("stage", "sft"))
    if stage not in OBJECTIVES:
        known = ", ".join(OBJECTIVES)
        raise conversion.import_error(
            "stage", what=f"StreamTune does not support 'stage: {stage}'", fix=f"supported: {known}"
        )
    return OBJECTIVES[stage]


def _convert_dependent_fields(conversion: Conversion) -> None:
    stage = conversion.pop_field("stage")
    texts = stage == "pt"
    if stage == "kto":
        conversion.write_key("loss_type", "kto", "stage")
        conversion.mark_unneeded("pref_loss", why="LLaMA-Factory reads this field only with stage: dpo")
    elif stage is not None:
        conversion.report_unneeded("stage", why=f"objective: {conversion.objective}")
    convert_llamafactory_template(conversion, texts=texts)
    convert_thinking(conversion)
    conversion.write_if_on("train_on_prompt", "train_on", "all")
    conversion.write_if_on("mask_history", "train_on", "completion")
    if texts:
        conversion.write_default("train_on", "all", "stage: pt")
    conversion.write_if_on("pure_bf16", "dtype", "bfloat16")
    _convert_finetuning_type(conversion)
    if texts:
        _convert_pretraining_packing(conversion)
    elif conversion.get("neat_packing"):
        if conversion.pop_field("packing") is not None:
            conversion.report_unneeded("packing", why="set by neat_packing")
        conversion.write_if_on("neat_packing", "packing", True)
    elif conversion.get("packing"):
        note = "without neat_packing, packed rows attend to each other in LLaMA-Factory; in StreamTune they never do"
        conversion.write_if_on("packing", "packing", True, note=note)
    conversion.mark_unneeded("neat_packing", why="off: see packing")
    convert_warmup(conversion)
    convert_trackers(conversion, {})
    convert_datasets(conversion, texts=texts)
    tower = {"freeze_vision_tower": "freeze_vision_tower", "freeze_multi_modal_projector": "freeze_projector"}
    convert_tower(conversion, tower, "lora_target")
    is_qwen3 = re.search(r"qwen3.*vl", str(conversion.get("model_name_or_path")).lower())
    frozen = conversion.get("freeze_multi_modal_projector") is not False
    if is_qwen3 and frozen and conversion.get("freeze_vision_tower") is False:
        conversion.report_lost_setting(
            "mergers between the layers of the vision tower",
            "LLaMA-Factory counts them to the tower, StreamTune to the projector: add 'deepstack_merger_list.*' to "
            "lora_target, or write freeze_projector: false",
        )


def _convert_finetuning_type(conversion: Conversion) -> None:
    """Convert ``finetuning_type``; ``oft`` becomes an ``adapter_type``, and ``freeze`` ``trainable_layers``."""
    name = "finetuning_type"
    given = name in conversion.left
    method = conversion.pop_field(name) or "lora"
    if method in ("lora", "full"):
        kind = "qlora" if method == "lora" and conversion.get("quantization_bit") else method
        if given:
            conversion.write_key(name, kind, name)
        elif kind == "qlora":
            conversion.ours[name] = kind
    elif method == "oft":
        conversion.write_key("adapter_type", "oft", name)
        conversion.ours[name] = "lora"
        target = conversion.pop_field("oft_target")
        if target is not None:
            conversion.convert_key("lora_target", convert_module_names, target, "oft_target")
    elif method == "freeze":
        convert_frozen_layers(conversion)
    else:
        conversion.ours[name] = "full"
        conversion.report_lost(name, why="finetuning_type is full, lora or qlora")
    if method != "freeze":
        conversion.mark_unneeded(*FREEZE, why="LLaMA-Factory reads this field only with finetuning_type: freeze")


def _convert_pretraining_packing(conversion: Conversion) -> None:
    """Convert the packing of ``stage: pt``: into blocks of ``cutoff_len`` tokens, unless ``packing: false``."""
    packing = conversion.file.fields.get("packing")
    if packing in (None, True):
        note = "texts in a block attend to each other in LLaMA-Factory, but not in StreamTune"
        if packing:
            conversion.write_if_on("packing", "packing", True, note=note)
        else:
            conversion.write_default("packing", True, note)
        conversion.write_default("overlength", "split", "LLaMA-Factory continues a long text in the next block")
        conversion.write_default("split_at", "token")
    conversion.mark_unneeded("packing", why="no value" if packing is None else "off, as in StreamTune")
    conversion.mark_unneeded("neat_packing", why="LLaMA-Factory reads this field only with stage: sft")


def _write_trainer_defaults(conversion: Conversion) -> None:
    conversion.write_default("finetuning_type", "lora")
    adapters = conversion.ours.get("finetuning_type") != "full"
    if adapters:
        conversion.write_default("lora_r", 8)
    conversion.write_default("learning_rate", 5e-5)
    conversion.write_default("lr_scheduler_type", "linear")
    conversion.write_default("num_train_epochs", 3.0)
    conversion.write_default("per_device_train_batch_size", 8)
    cut = "LLaMA-Factory truncates each question and answer; StreamTune truncates the end of the row"
    conversion.write_default("overlength", "truncate", cut if conversion.objective == "sft" else "")
    write_default_truncation(conversion)
    if "bf16" not in conversion.ours:
        conversion.write_default("bf16", False, "LLaMA-Factory uses no mixed precision by default")
    if "dtype" not in conversion.ours and (conversion.get("bf16") or conversion.get("fp16")):
        frozen = conversion.ours.get("trainable_layers") or conversion.ours.get("train")
        narrow = "bfloat16" if conversion.get("bf16") else "float16"
        note = (
            "LLaMA-Factory keeps frozen weights in the compute dtype"
            if adapters or frozen
            else "LLaMA-Factory keeps weights in fp32"
        )
        conversion.write_default("dtype", narrow if adapters else "mixed" if frozen else "float32", note)


ALPACA = {
    **{"prompt": "instruction", "query": "input", "response": "output"},
    **{name: name for name in ("system", "history", "tools")},
}
DEFAULT_COLUMNS = ("prompt", "query", "response")
"""Columns that LLaMA-Factory reads from alpaca rows if an entry of ``dataset_info.json`` names no columns."""
OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SHAREGPT_TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


Row = dict[str, Any] | None
"""First row of a dataset; None if unknown."""

MEDIA = ("videos", "audios")
"""Keys of ``dataset_info.json`` for columns with videos and audio."""
IMAGE_PIXELS = {"max_pixels": 768 * 768, "min_pixels": 32 * 32}
"""Keys and values of LLaMA-Factory's default limits of an image."""


def convert_datasets(conversion: Conversion, *, texts: bool) -> None:
    """Convert the fields ``dataset`` and ``eval_dataset`` with the help of ``dataset_info.json`` in ``dataset_dir``.

    ``texts`` is True for ``stage: pt``, which trains only on the prompt column.
    """
    folder, most = (conversion.file.fields.get(name) for name in ("dataset_dir", "max_samples"))
    conversion.mark_unneeded("dataset_dir", "max_samples", why="see datasets")
    write_datasets(conversion, _make_entries(conversion, "dataset", folder, most, is_plain_text=texts), "dataset")
    write_eval_sets(
        conversion, _make_entries(conversion, "eval_dataset", folder, most, is_plain_text=texts), "eval_dataset"
    )
    shares = conversion.get("interleave_probs")
    mixes = str(conversion.get("mix_strategy", "concat")).startswith("interleave")
    if mixes:
        name = "interleave_probs" if shares else "mix_strategy"
        write_weights(conversion, shares or [1.0] * len(conversion.ours.get("datasets", [])), name)
    why = "StreamTune's dataset entries have a weight instead" if mixes else "off, as in StreamTune"
    conversion.mark_unneeded("mix_strategy", "interleave_probs", why=why)


def _make_entries(
    conversion: Conversion, field: str, folder: Any, max_rows: Any, *, is_plain_text: bool
) -> list[dict[str, Any]]:
    names = conversion.get(field)
    if names is None:
        conversion.mark_unneeded(field, why="no value")
        return []
    conversion.pop_field(field)
    names = names.split(",") if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        conversion.report_lost(field, why="expected names")
        return []
    names = [name.strip() for name in names]
    info, found_in = _read_dataset_info(conversion, str(folder or "data"))
    specs = []
    for name in names:
        entry = info.get(name) if info is not None else None
        if not isinstance(entry, dict):
            spec = {"path": name}
            if folder != "ONLINE":
                missing = "that file does not exist" if info is None else f"it has no '{name}'"
                why = f"LLaMA-Factory looks up '{name}' in {found_in}, but {missing}: write the path of the data file"
                conversion.report_lost(field, why=why)
        else:
            spec = _convert_dataset(conversion, field, name, entry, Path(found_in).parent, texts=is_plain_text)
        if isinstance(max_rows, int) and max_rows:
            spec["max_rows"] = min(max_rows, spec.get("max_rows", max_rows))
        specs.append(spec)
    return specs


def _read_dataset_info(conversion: Conversion, folder: str) -> tuple[dict[str, Any] | None, str]:
    """Return the content and the path of ``dataset_info.json``; the content is None if the file is not found.

    The file is searched in the working directory, then in the folder of the recipe and in the folders above.
    """
    beside = conversion.file.path.resolve().parent
    for base in (Path(), beside, *beside.parents[:4]):
        path = base / folder / "dataset_info.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")), str(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise conversion.import_error("dataset", what=f"{path} cannot be read: {error}") from None
    return None, str(Path(folder) / "dataset_info.json")


def _convert_dataset(
    conversion: Conversion, field: str, name: str, entry: dict[str, Any], folder: Path, *, texts: bool
) -> dict[str, Any]:
    """Return StreamTune's dataset entry for an entry of ``dataset_info.json``; report what is not converted."""
    report_lost = conversion.make_lost_reporter(field, prefix=f"'{name}' in dataset_info.json: ")
    spec: dict[str, Any] = {}
    if "file_name" in entry:
        spec["path"] = str(folder / entry["file_name"])
    elif "hf_hub_url" in entry:
        spec["path"] = entry["hf_hub_url"]
    else:
        spec["path"] = str(entry.get("ms_hub_url") or entry.get("script_url") or entry.get("cloud_file_name") or name)
        report_lost("the dataset is neither a file nor on the Hugging Face hub")
    if "hf_hub_url" in entry and "split" in entry:
        convert_split(spec, entry["split"], report_lost)
    if entry.get("subset"):
        spec["name"] = entry["subset"]
    if entry.get("num_samples"):
        spec |= {"max_rows": entry["num_samples"], "shuffle": True}
    if entry.get("revision") or entry.get("folder"):
        report_lost("StreamTune cannot read an older revision or a single folder of a hub dataset")
    columns = entry.get("columns") or {}
    said = [f"'{columns[key]}'" for key in MEDIA if columns.get(key)]
    if said:
        report_lost(f"StreamTune does not train on the column {' and '.join(said)}")
    else:
        report_media(conversion, [spec], field)
    if columns.get("tools"):
        report_tools_of_named_template(conversion, report_lost)
    if texts:
        _convert_pretraining_column(spec, entry, report_lost)
    else:
        _convert_columns(spec, entry, report_lost, first_local_row(conversion, spec["path"]))
    if columns.get("images"):
        if columns["images"] != "images":
            spec["columns"] = {**spec.get("columns", {}), "images": columns["images"]}
        for key, pixels in IMAGE_PIXELS.items():
            if conversion.file.fields.get(f"image_{key}") is None and key not in conversion.ours:
                conversion.write_key(key, pixels, field, note="LLaMA-Factory's default")
    return spec


def _convert_pretraining_column(spec: dict[str, Any], entry: dict[str, Any], report_lost: Any) -> None:
    """Set the text column of a dataset for ``stage: pt``, which reads the prompt column."""
    columns = entry.get("columns") or {}
    if entry.get("formatting", "alpaca") != "alpaca":
        report_lost("LLaMA-Factory's stage: pt trains only the first message of a row: write the texts to a column")
    if columns.get("query") or not columns:
        report_lost("LLaMA-Factory's stage: pt trains prompt and query together: write both to one column")
    write_columns(spec, {"text": columns.get("prompt", ALPACA["prompt"])}, "text")


def _convert_columns(spec: dict[str, Any], entry: dict[str, Any], report_lost: Any, row: Row) -> None:
    """Set ``type`` and ``columns`` of the dataset entry ``spec``; report rows that LLaMA-Factory reads differently."""
    columns, tags = entry.get("columns") or {}, entry.get("tags") or {}
    sharegpt = entry.get("formatting", "alpaca") in ("sharegpt", "openai")
    style = {**SHAREGPT_TAGS, **{key: tag for key, tag in tags.items() if key in SHAREGPT_TAGS}}
    if entry.get("formatting") == "openai":
        report_lost("LLaMA-Factory's openai rows get the system text 'detailed thinking off': write it to the rows")
    if sharegpt and style not in (OPENAI_TAGS, SHAREGPT_TAGS):
        report_lost("StreamTune needs turns with 'role' and 'content', or 'from' and 'value'")
    if entry.get("ranking"):
        _convert_preference_columns(spec, columns, report_lost, row, sharegpt=sharegpt)
        return
    if "kto_tag" in columns:
        theirs = {"completion": columns.get("response"), "label": columns["kto_tag"]}
        write_columns(spec, {"prompt": columns.get("messages") or columns.get("prompt"), **theirs}, "unpaired")
        if sharegpt:
            report_lost("LLaMA-Factory's answer is the last message: write it to the column completion")
        _report_text_rows(columns, report_lost, row, sharegpt=sharegpt)
        return
    if sharegpt:
        column = columns.get("messages", "conversations")
        others = {ours: columns.get(ours) for ours in ("system", "tools")}
        if style == OPENAI_TAGS:
            write_columns(spec, {"messages": column if column != "conversations" else None, **others}, "messages")
        elif style == SHAREGPT_TAGS:
            write_columns(spec, {"conversations": column, **others}, "sharegpt")
        report_unread_columns(row, ("system", "tools"), columns.values(), report_lost)
        report_unread_fields(
            row, column, READ_OF_MESSAGES, ("tool_calls",) if entry.get("formatting") == "openai" else (), report_lost
        )
        return
    if columns and "response" not in columns and set(columns) == {"prompt"}:
        write_columns(spec, {"text": columns["prompt"]}, "text")
        return
    named = columns or {key: ALPACA[key] for key in DEFAULT_COLUMNS}
    if not {"prompt", "response"} <= named.keys():
        report_lost("rows need a question and an answer: write columns: {instruction: ..., output: ...}")
    write_columns(spec, {ALPACA[key]: column for key, column in named.items() if key in ALPACA}, "alpaca")
    if "query" in named:
        spec["input_separator"] = "\n"
    report_unread_columns(row, ("input", "system", "history", "tools"), named.values(), report_lost)


def _convert_preference_columns(
    spec: dict[str, Any], columns: dict[str, Any], report_lost: Any, row: Row, *, sharegpt: bool
) -> None:
    if not sharegpt and "prompt" not in columns:
        report_lost("preference rows need prompt, chosen and rejected: name these columns in `columns`")
    prompt = columns.get("messages", "conversations") if sharegpt else columns.get("prompt")
    theirs = {"prompt": prompt, "chosen": columns.get("chosen"), "rejected": columns.get("rejected")}
    others = {ours: columns.get(ours) for ours in ("system", "tools")}
    write_columns(spec, {**theirs, **others}, "preference")
    _report_text_rows(columns, report_lost, row, sharegpt=sharegpt)
    report_unread_columns(row, ("system", "tools"), columns.values(), report_lost)


def _report_text_rows(columns: dict[str, Any], report_lost: Any, row: Row, *, sharegpt: bool) -> None:
    """Report plain-text prompts and answers, which LLaMA-Factory converts to messages and StreamTune does not."""
    read = {"query", "history"} & columns.keys()
    if read and not sharegpt:
        report_lost(
            f"only LLaMA-Factory's prompt includes the column '{columns[min(read)]}': write the prompt as messages"
        )
    prompt = columns.get("prompt", "prompt")
    if not sharegpt and (row is None or not isinstance(row.get(prompt), list)):
        report_lost(
            "LLaMA-Factory converts texts to chat messages, and StreamTune does not: write the prompt as messages"
        )


LLAMAFACTORY = PeerTrainer(
    name="llamafactory",
    title="LLaMA-Factory",
    fields=FIELDS,
    signs="""stage cutoff_len template dataset_dir overwrite_cache preprocessing_num_workers plot_loss pref_beta
        pref_loss finetuning_type do_train flash_attn max_samples overwrite_output_dir""",
    objective=_choose_objective,
    special=_convert_dependent_fields,
    defaults=_write_trainer_defaults,
)
