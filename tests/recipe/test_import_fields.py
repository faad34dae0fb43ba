"""The fields that other trainers document: each is mapped, explained or reported, and none is unknown."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamtune.errors import StreamTuneError
from streamtune.recipe.aliases import ALIASES
from streamtune.recipe.imports import TRAINERS, FieldFinding, importing
from streamtune.recipe.imports.conversion import Conversion
from streamtune.recipe.imports.reading import PeerFile
from streamtune.recipe.kinds import RECIPES
from streamtune.recipe.yaml import Marks

AXOLOTL = """
base_model base_model_config cls_model_config tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_type
processor_type trust_remote_code output_dir hub_model_id hub_strategy save_safetensors load_in_8bit load_in_4bit
adapter lora_model_dir lora_r lora_alpha lora_fan_in_fan_out lora_target_modules lora_target_parameters
lora_target_linear lora_modules_to_save lora_dropout peft_layers_to_transform peft_layers_pattern peft_use_dora
peft_use_rslora peft_layer_replication peft_init_lora_weights qlora_sharded_model_loading lora_on_cpu gptq
bnb_config_kwargs loraplus_lr_ratio loraplus_lr_embedding merge_lora relora gradient_accumulation_steps
micro_batch_size batch_size eval_batch_size auto_find_batch_size train_on_inputs group_by_length learning_rate
embedding_lr embedding_lr_scale weight_decay optimizer optim_args optim_target_modules torchdistx_path lr_scheduler
lr_scheduler_kwargs lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor lr_groups
adam_epsilon adam_epsilon2 adam_beta1 adam_beta2 adam_beta3 max_grad_norm num_epochs strict resume_from_checkpoint
auto_resume_from_checkpoints resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings rl trl vllm
reward_model process_reward_model num_labels dpo_use_weighting dpo_use_logits_to_keep datasets test_datasets
shuffle_merged_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx skip_prepare_dataset
pretraining_dataset dataset_processes dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory
dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last accelerator_config remove_unused_columns
push_dataset_to_hub hf_use_auth_token device device_map world_size local_rank ddp seed ddp_timeout ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_find_unused_parameters eval_table_size eval_max_new_tokens do_causal_lm_eval
eval_causal_lm_metrics do_bench_eval bench_dataset bench_split metric_for_best_model greater_is_better
loss_watchdog_threshold loss_watchdog_patience gc_steps bf16 fp16 fp8 bfloat16 float16 tf32 float32
gradient_checkpointing gradient_checkpointing_kwargs unfrozen_parameters sequence_len min_sample_len max_prompt_len
sample_packing sample_packing_group_size sample_packing_bin_size sample_packing_sequentially eval_sample_packing
pad_to_sequence_len curriculum_sampling multipack_real_batches pretraining_sample_concatenation batch_flattening
use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size
pretrain_multipack_attn xformers_attention sdp_attention s2_attention flex_attention flash_attention
flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp flash_optimum eager_attention
unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope
lora_mlp_kernel lora_qkv_kernel lora_o_kernel llama4_linearized_experts deepspeed fsdp fsdp_config
fsdp_final_state_dict_type val_set_size sequence_parallel_degree heads_k_stride special_tokens tokens
added_tokens_overrides torch_compile torch_compile_backend torch_compile_mode max_steps warmup_steps warmup_ratio
eval_steps evals_per_epoch eval_strategy save_steps saves_per_epoch save_strategy save_total_limit logging_steps
early_stopping_patience load_best_model_at_end save_only_model use_tensorboard profiler_steps
include_tokens_per_second neftune_noise_alpha orpo_alpha rpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
kto_undesirable_weight rl_beta max_memory gpu_memory_limit low_cpu_mem_usage chat_template chat_template_jinja
default_system_message fix_untrained_tokens plugins wandb_project wandb_entity wandb_name wandb_watch wandb_log_model
mlflow_tracking_uri mlflow_experiment_name lisa_n_layers lisa_step_interval use_ray excess_length_strategy
context_parallel_size trl.beta trl.use_vllm trl.reward_funcs trl.num_generations trl.max_completion_length
trl.temperature trl.top_p trl.top_k trl.min_p trl.num_iterations trl.epsilon trl.reward_weights trl.scale_rewards
trl.sync_ref_model trl.log_completions
"""

LLAMAFACTORY = """
model_name_or_path adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens
add_tokens add_special_tokens model_revision low_cpu_mem_usage rope_scaling flash_attn shift_attn mixture_of_depths
use_unsloth use_unsloth_gc enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing use_reentrant_gc
upcast_layernorm upcast_lmhead_output train_from_scratch infer_backend offload_folder use_kv_cache infer_dtype
hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code quantization_method quantization_bit
quantization_type double_quantization quantization_device_map fp8 image_max_pixels video_maxlen template dataset
eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history streaming buffer_size mix_strategy
interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples eval_num_beams
ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing tool_format tokenized_path
freeze_trainable_layers freeze_trainable_modules freeze_extra_modules additional_target lora_alpha lora_dropout
lora_rank lora_target loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init pissa_iter pissa_convert
create_new_adapter module_dropout oft_rank oft_block_size oft_target pref_beta pref_ftx pref_bco_weight pref_loss
dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm
ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model
reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha use_galore galore_target galore_rank
galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank
apollo_scale use_badam badam_mode badam_switch_mode badam_switch_interval badam_update_ratio use_swanlab
swanlab_project swanlab_mode pure_bf16 stage finetuning_type use_llama_pro use_adam_mini use_muon use_dft_loss
freeze_vision_tower freeze_multi_modal_projector freeze_language_model compute_accuracy disable_shuffling
early_stopping_steps plot_loss include_effective_tokens_per_second do_sample temperature top_p top_k num_beams
max_new_tokens ray_run_name
"""

SWIFT = """
tuner_backend train_type tuner_type adapters external_plugins seed model_kwargs load_args load_data_args use_hf
hub_token custom_register_path ddp_timeout ddp_backend ignore_args_error model model_type model_revision task_type
torch_dtype attn_impl new_special_tokens num_labels problem_type rope_scaling max_model_len device_map max_memory
local_repo_path init_strategy dataset val_dataset cached_dataset split_dataset_ratio data_seed dataset_num_proc
load_from_cache_file dataset_shuffle val_dataset_shuffle streaming interleave_prob stopping_strategy
shuffle_buffer_size download_mode columns strict remove_unused_columns model_name model_author custom_dataset_info
template system max_length truncation_strategy max_pixels agent_template norm_bbox use_chat_template padding_free
padding_side loss_scale sequence_parallel_size response_prefix template_backend max_new_tokens temperature top_k top_p
repetition_penalty num_beams stream stop_words logprobs quant_method quant_bits hqq_axis bnb_4bit_compute_dtype
bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage use_ray ray_exp_name device_groups output_dir
gradient_checkpointing vit_gradient_checkpointing deepspeed zero_hpz_partition_size deepspeed_autotp_size
per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps weight_decay adam_beta1 adam_beta2
learning_rate vit_lr aligner_lr lr_scheduler_type lr_scheduler_kwargs gradient_checkpointing_kwargs full_determinism
report_to logging_first_step logging_steps router_aux_loss_coef enable_dft_loss enable_channel_loss logging_dir
predict_with_generate metric_for_best_model greater_is_better max_epochs num_train_epochs save_strategy save_steps
eval_strategy eval_steps save_total_limit warmup_ratio dataloader_num_workers packing lazy_tokenize
resume_from_checkpoint resume_only_model check_model add_version freeze_llm freeze_vit freeze_aligner
freeze_parameters freeze_parameters_ratio trainable_parameters target_modules target_regex modules_to_save lora_rank
lora_alpha lora_dropout lora_bias lora_dtype lorap_lr_ratio use_rslora use_dora init_weights use_galore
lisa_activated_layers neftune_noise_alpha use_liger_kernel rlhf_type ref_model beta label_smoothing rpo_alpha
cpo_alpha simpo_gamma desirable_weight undesirable_weight loss_type loss_weights reward_model reward_funcs
reward_weights num_generations max_completion_length epsilon epsilon_high delta num_iterations scale_rewards use_vllm
vllm_mode vllm_server_host vllm_gpu_memory_utilization vllm_tensor_parallel_size sleep_level log_completions
multi_turn_scheduler dynamic_sample overlong_filter steps_per_generation generation_batch_size
importance_sampling_level sync_ref_model offload_model offload_optimizer
"""

VALUES: dict[str, Any] = {
    **{"rl": "dpo", "stage": "sft", "rlhf_type": "grpo", "train_type": "lora", "tuner_type": "lora", "adapter": "lora"},
    **{"process_reward_model": False, "trl": {"beta": 0.1}, "dataset": "r.jsonl", "datasets": [{"path": "r.jsonl"}]},
    **{"pretraining_dataset": "r.jsonl", "dataset_name": "r.jsonl", "warmup_steps": 3, "warmup_ratio": 0.1},
    **{"target_modules": "all", "max_samples": 5, "deepspeed": "zero2", "max_length": 64, "max_completion_length": 64},
    **{"model": "own/model", "report_to": "none"},
}
"""Values of fields that have to be right for a recipe to be read at all."""

TOGETHER = """
rl stage rlhf_type datasets dataset pretraining_dataset dataset_name dataset_train_split dataset_dir max_samples adapter
load_in_4bit load_in_8bit lora_target_linear lora_target_modules lora_target target_modules quant_bits quantization_bit
use_peft train_on_inputs mask_history chat_template template warmup_steps warmup_ratio report_to wandb_project
batch_size loss_type dtype torch_dtype max_length deepspeed reward_funcs scale_rewards
"""
"""Fields that are converted by functions."""


def answers(trainer: str, name: str) -> list[FieldFinding]:
    """The findings of a recipe with one field."""
    group, _, inner = name.partition(".")
    value = VALUES.get(name, not (trainer == "axolotl" and name == "reward_model"))
    fields = {group: {inner: value} if inner else value}
    lines = {(group,): 1} | ({(group, inner): 2} if inner else {})
    file = PeerFile(fields, Marks("r.yaml", lines), Path("r.yaml"))
    conversion = Conversion(file, TRAINERS[trainer])
    objective = conversion.trainer.objective(conversion)
    conversion.kind = RECIPES[objective]
    conversion.trainer.special(conversion)
    conversion.apply()
    assert conversion.left == {}
    return [found for found in conversion.findings if found.theirs.partition(":")[0].startswith(group)]


def assert_answered(trainer: str, names: list[str]) -> None:
    assert len(names) == len(set(names))
    silent = [name for name in names if not answers(trainer, name)]
    unknown = [name for name in names if any("that is known here" in found.note for found in answers(trainer, name))]
    assert (silent, unknown) == ([], [])


@pytest.mark.parametrize(("trainer", "names"), [("axolotl", AXOLOTL), ("llamafactory", LLAMAFACTORY), ("swift", SWIFT)])
def test_every_documented_field_has_an_answer(trainer: str, names: str) -> None:
    assert_answered(trainer, names.split())


@pytest.mark.full
def test_every_field_of_the_installed_trl_has_an_answer() -> None:
    trl = pytest.importorskip("trl")
    from trl.scripts.grpo import GRPOScriptArguments

    kinds = (trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments, GRPOScriptArguments)
    assert_answered("trl", sorted({field.name for kind in kinds for field in dataclasses.fields(kind)}))


@pytest.mark.parametrize(
    "value", [True, -3, 0.5, "a,b", "", [], ["a"], [1, {"a": 2}], {"a": 1}, "train[:10%]"], ids=str
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_values_of_any_kind_are_answered_or_refused(trainer: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields that are converted together: nothing but an error of ours leaves the importer."""
    for name in TOGETHER.split():
        fields = {"model": "m", "model_name_or_path": "m", "base_model": "m", name: value}
        file = PeerFile(fields, Marks("r.yaml"), Path("r.yaml"))
        monkeypatch.setattr(importing, "read_peer_file", lambda path, file=file: file)
        with suppress(StreamTuneError):
            importing.import_recipe(Path("r.yaml"), trainer)


def test_an_unknown_field_is_reported_with_the_nearest() -> None:
    (found,) = answers("axolotl", "sequense_len")
    assert (found.kind, found.trains, found.where) == ("lost", True, "r.yaml:1")
    assert found.note.endswith("did you mean 'sequence_len'?")


def test_every_rule_leads_to_a_key_of_ours_or_says_why() -> None:
    keys = {key for kind in RECIPES.values() for key in kind.model_fields}
    for trainer in TRAINERS.values():
        for name, rule in trainer.fields.items():
            assert rule.ours in keys if rule.ours else rule.needed or rule.why, f"{trainer.name}: {name}"


def test_names_of_fields_are_aliases_of_the_same_key() -> None:
    """What a recipe may be called by another trainer's name means the same where such a recipe is imported."""
    axolotl = {"batch_size"}  # the rows of a whole step there
    for trainer in TRAINERS.values():
        for name, rule in trainer.fields.items():
            if name in ALIASES and rule.ours and name not in axolotl:
                assert rule.ours == ALIASES[name], f"{trainer.name}: {name}"
