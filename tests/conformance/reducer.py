"""Reduce the configuration of any causal language model to a tiny one, by the meaning of its keys.

A configuration class says with its defaults which keys it knows. Each known key that means a size, a count or a
dropout gets a tiny value here; lists with one entry per layer are thinned so that every kind of layer stays once.
What cannot be guessed so is in :mod:`tests.conformance.exceptions`.
"""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.conformance.exceptions import EXCEPTIONS, IMAGE_TEXT_EXCEPTIONS, LEAVE_OUT
from tests.exactness.families import VOCAB

LAYERS = 2
MAX_LAYERS = 6
MAX_PARAMETERS = 130_000_000

# What a key means, the value it gets, and the keys that mean it across all configuration classes.
MEANINGS: tuple[tuple[str, int, str], ...] = (
    ("vocabulary", VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (
        "width of the residual stream",
        32,
        "hidden_size d_model n_embd embed_dim hidden_dim emb_dim embedding_size word_embed_proj_dim embedding_dim dim "
        "lru_width attention_hidden_size",
    ),
    (
        "width of an MLP",
        48,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size dff dim_ff d_inner "
        "intermediate_size_mlp dense_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
        "prefix_dense_intermediate_size",
    ),
    (
        "width of an expert, a rank or a side stream",
        16,
        "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank hidden_size_per_layer_input router_hidden_size "
        "o_lora_rank gated_norm_rank adapter_rank",
    ),
    (
        "number of layers",
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_blocks num_layers_per_stack",
    ),
    (
        "number of heads",
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads num_query_groups",
    ),
    (
        "number of key/value heads",
        2,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads multi_query_groups",
    ),
    (
        "width of a head",
        8,
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim dim_head d_head kv_channels "
        "attention_head_size query_pre_attn_scalar index_head_dim global_head_dim d_kv rotary_dim swa_v_head_dim",
    ),
    ("width of a head, rotated and unrotated part together", 16, "qk_head_dim"),
    (
        "number of experts",
        4,
        "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num",
    ),
    ("experts of a token", 2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (
        "expert groups and shared experts",
        1,
        "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts",
    ),
    # The batches are 37 tokens long: windows and selections must end inside them, learnt positions must not.
    ("sliding window", 9, "sliding_window sliding_window_size attention_window_size window_size"),
    ("chunk of local attention", 16, "local_attention attention_chunk_size"),
    (
        "number of positions",
        128,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
        "max_source_positions model_max_length keep_window_size",
    ),
    ("range of relative positions", 64, "rel_extent log_scaling_n_floor"),
    ("keys an indexer selects", 12, "index_topk"),
    ("small ranks and blocks", 8, "d_rel laurel_rank hc_lowrank index_block_size"),
    ("heads of an indexer, so many that no key scores zero with all", 32, "index_n_heads"),
    ("blocks an indexer selects", 2, "index_topk_blocks"),
    ("linear attention: key heads", 2, "linear_num_key_heads"),
    ("linear attention: heads", 4, "linear_num_value_heads linear_num_heads"),
    ("linear attention: width of a head", 8, "linear_key_head_dim linear_value_head_dim linear_head_dim"),
    ("state space: state and chunk", 8, "mamba_d_state state_size chunk_size ssm_state_size mamba_chunk_size"),
    ("state space: heads and ranks", 4, "mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank n_groups"),
    ("state space: width of a head", 16, "mamba_d_head mamba_head_dim mamba_headdim"),
    ("state space: groups", 1, "mamba_n_groups mamba_ngroups"),
    ("state space: width", 64, "mamba_d_ssm"),
    ("state space: factors", 2, "mamba_expand n_mamba_heads"),
)
SIZES: dict[str, int] = {key: value for _, value, keys in MEANINGS for key in keys.split()}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "cls_token_id": 1}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PER_LAYER_VALUES: dict[str, Any] = {
    "num_attention_heads_per_layer": 4,
    "activation_sparsity_pattern": 0.0,
    "intermediate_size": 48,
}
NOISE = re.compile(r"drop|jitter")
TEXT_CONFIGS = ("text_config", "decoder", "thinker_config")
IMAGE_TEXT = "/image-text"
"""End of the name of a family whose class for images and text is meant, beside or instead of a class for text."""


def family_names() -> list[str]:
    """The names of all causal language models, and of all image-text classes that are not one of them."""
    causal, image_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    others = [name for name, model in image_text.items() if name in CONFIG_MAPPING and causal.get(name) != model]
    return sorted([*causal, *(name + IMAGE_TEXT for name in others)])


def build(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A tiny random model of this name, in training mode, with every parameter away from zeros and ones.

    ``changes`` are set on its tiny configuration.

    Raises:
        ValueError: Some part kept its full size, because no key of its configuration was recognised.
    """
    torch.manual_seed(0)
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if name.endswith(IMAGE_TEXT) else MODEL_FOR_CAUSAL_LM_MAPPING
    _refuse_large(config, mapping)
    model = _new(config, mapping)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                _stir(parameter)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped matmul has no fp64
    return model.to(dtype).train()


def _new(config: PreTrainedConfig, mapping: Any) -> PreTrainedModel:
    """The class in a mapping, on the decoder's part of the configuration where that is what it takes."""
    model_class = mapping[type(config)]
    if not isinstance(config, model_class.config_class):
        part = config.get_text_config(decoder=True)
        config = part if isinstance(part, model_class.config_class) else config
    model: PreTrainedModel = model_class._from_config(config)
    if getattr(model.config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")  # transformers 5.17 lets gemma2 attend by sdpa, which drops its softcap
    if getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", None) is True:
        model.set_attn_implementation("eager")  # paligemma: sdpa gets no mask of text alone, and sees later tokens
    return model


def tiny_config(name: str) -> PreTrainedConfig:
    """The reduced configuration; of a multimodal model the text part is reduced, unless its exception says more."""
    if name.endswith(IMAGE_TEXT):
        return _tiny_image_text_config(name.removesuffix(IMAGE_TEXT))
    config_class = CONFIG_MAPPING[name]
    parts = getattr(config_class, "sub_configs", None) or {}
    text = next((part for part in TEXT_CONFIGS if part in parts), None)
    if text is not None and isinstance(parts[text], type) and parts[text].__name__ != "AutoConfig":
        others = {part: value for part, value in EXCEPTIONS.get(name, {}).items() if part in parts and part != text}
        return config_class(**{text: _reduced(parts[text], name)}, **others)
    return config_class(**_reduced(config_class, name))


def _tiny_image_text_config(name: str) -> PreTrainedConfig:
    """The configuration with every part reduced, the vision tower too."""
    config_class = CONFIG_MAPPING[name]
    parts = getattr(config_class, "sub_configs", None) or {}
    exceptions = IMAGE_TEXT_EXCEPTIONS.get(name, {})
    if not any(part in parts for part in TEXT_CONFIGS):
        return config_class(**{**_reduced(config_class, name), **exceptions})
    arguments: dict[str, Any] = {}
    for part, part_class in parts.items():
        if part in exceptions and exceptions[part] is None:
            continue
        automatic = not isinstance(part_class, type) or part_class.__name__ == "AutoConfig"
        if automatic:
            default = getattr(config_class(), part)
            if default is None:
                continue
            part_class = type(default)
        found = _reduced(part_class, name)
        if part not in TEXT_CONFIGS:
            found.pop("vocab_size", None)
        arguments[part] = {**found, **({"model_type": part_class.model_type} if automatic else {})}
    for key, value in exceptions.items():
        if key in arguments and isinstance(value, dict):
            merged = {**arguments[key], **value}
            arguments[key] = {part: one for part, one in merged.items() if one is not LEAVE_OUT}
        elif value is not None:
            arguments[key] = value
    return config_class(**arguments)


def _reduced(config_class: type[PreTrainedConfig], name: str) -> dict[str, Any]:
    """The arguments that make this class tiny."""
    defaults = _defaults(config_class)
    arguments, layers = _thin_layers(defaults)
    for key, default in defaults.items():
        if key not in arguments:
            value = _tiny_value(key, default)
            if value is not LEAVE_OUT:
                arguments[key] = value
    for key in LAYER_COUNTS:
        if key in arguments:
            arguments[key] = layers
    every_head_has_its_own = defaults.get("num_key_value_heads", 0) is None or defaults.get("kv_lora_rank")
    if "num_key_value_heads" in defaults and every_head_has_its_own:
        arguments["num_key_value_heads"] = 4
    parts = getattr(CONFIG_MAPPING[name], "sub_configs", None) or {}
    whole = config_class is CONFIG_MAPPING[name]
    arguments |= {key: value for key, value in EXCEPTIONS.get(name, {}).items() if whole or key not in parts}
    return {key: value for key, value in arguments.items() if value is not LEAVE_OUT}


def _defaults(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    try:
        return config_class().to_dict()
    except Exception:  # some classes have arguments without a default
        parameters = inspect.signature(config_class).parameters
        return {key: parameter.default for key, parameter in parameters.items()}


def _thin_layers(defaults: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Lists with an entry per layer, thinned to one layer of each kind, and the number of layers that remain."""
    counts = (defaults.get(key) for key in (*LAYER_COUNTS, "decoder_layers"))
    full = next((count for count in counts if isinstance(count, int)), None)
    lists = {
        key: value
        for key, value in defaults.items()
        if isinstance(value, (list, tuple)) and full and len(value) == full and key != "compress_ratios"
    }
    if not lists:
        return {}, LAYERS
    kinds = list(zip(*[[str(entry) for entry in value] for value in lists.values()], strict=True))
    kept = sorted({kinds.index(kind) for kind in kinds})[:MAX_LAYERS]
    if len(kept) < LAYERS:
        kept = list(range(LAYERS))
    thinned = {
        key: [PER_LAYER_VALUES.get(key, value[layer]) for layer in kept]  # a value only where it must be made small
        for key, value in lists.items()
    }
    return thinned, len(kept)


def _tiny_value(key: str, default: Any) -> Any:
    """What this key gets, or LEAVE_OUT when its default may stay."""
    is_count = isinstance(default, int) and not isinstance(default, bool)
    if key in SIZES and is_count:
        return SIZES[key]
    if key in SPECIAL_TOKENS:
        return SPECIAL_TOKENS[key]
    if NOISE.search(key) and "path" not in key and isinstance(default, float):
        return 0.0
    if key == "is_decoder":
        return True
    if key in ("first_k_dense_replace", "num_kv_shared_layers") and is_count and default:
        return 1
    if key == "rope_parameters" and isinstance(default, dict) and "rope_type" in default:
        kept = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
        geometry = {part: value for part, value in default.items() if part in kept and value is not None}
        return {**geometry, "rope_type": "default", "rope_theta": 10000.0}
    return LEAVE_OUT


def _refuse_large(config: PreTrainedConfig, mapping: Any) -> None:
    """Raise when the model would not be tiny; found without allocating it."""
    try:
        with torch.device("meta"):
            model = _new(copy.deepcopy(config), mapping)
    except NotImplementedError:  # its initialisation reads values, which the meta device has none of
        return
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_PARAMETERS:
        largest, _ = max(model.named_parameters(), key=lambda named: named[1].numel())
        raise ValueError(f"not reduced: {count:,} parameters, the largest is {largest}")


def _stir(parameter: torch.Tensor) -> None:
    """Move a parameter away from the zeros, ones and uninitialised values that would hide an error in its gradient."""
    if not bool(torch.isfinite(parameter).all()):
        parameter.copy_(torch.randn_like(parameter) * 0.02)
    if parameter.dim() == 1:
        parameter.add_(torch.randn_like(parameter) * 0.1)
    elif not bool(parameter.any()):
        parameter.add_(torch.randn_like(parameter) * 0.02)
