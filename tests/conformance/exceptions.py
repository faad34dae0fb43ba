"""The names whose tiny configuration cannot be guessed from their keys, and what they get instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

from tests.exactness.families import SMALL, VOCAB

LEAVE_OUT: Any = object()  # the argument is not passed, so the class takes or derives its own default

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SMALL_BYTE_PART = {key: value for key, value in SMALL.items() if key != "head_dim" and not key.endswith("token_id")} | {
    "num_key_value_heads": 4
}
SMALL_TOWER = {"hidden_size": 32, "num_attention_heads": 4}
QWEN4_INDEXER = {
    "indexer_n_heads": 32,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",  # its default is None
    "ple_layer_ids": [1],  # embeddings of n-grams, whose last tokens go from chunk to chunk
    "ngram_vocab_size_base": 50,
}

DOTS3_SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}


class LinearTowerConfig(Gemma3nVisionConfig):
    """Gemma 3n's own names a tower of a library that is no dependency; its language model is the same behind any."""

    model_type = "linear_tower"


class LinearTower(PreTrainedModel):
    """Patches to features, one by one."""

    config_class = LinearTowerConfig

    def __init__(self, config: LinearTowerConfig) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.project(pixel_values)


AutoModel.register(LinearTowerConfig, LinearTower)

_DRAFTS = (
    "proposes tokens to another model: it is given that model's hidden states, keys and values, makes none of its own, "
    "and its mask is bidirectional"
)
NOT_CAUSAL = {"gemma4_assistant": _DRAFTS, "gemma4_unified_assistant": _DRAFTS}
"""Names that are no causal decoders and cannot be asked by running them, and why. The others are asked."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **{"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    },
    # Without it transformers guesses the loss from the class's name, and warns that it could not.
    "gpt2": {"loss_type": "ForCausalLM"},
    "gpt-sw3": {"loss_type": "ForCausalLM"},
    # The real caps are so far from tiny scores and logits that they would be the identity.
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    # Hybrids: which layers attend is said in a key of their own, and must fit the reduced number of layers.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": LEAVE_OUT},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},  # its pattern of blocks has three
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "mamba_dt_rank": 4,
        "attention_hidden_size": 64,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2, "num_hidden_layers": LEAVE_OUT},
    # Heads: these widths or counts do not follow from the others.
    "mamba2": {"head_dim": 16, "num_heads": 4},
    "ministral": {"head_dim": 8},
    "laguna": {"num_attention_heads_per_layer": None},
    "xlstm": {"chunk_size": 11, "qk_dim_factor": 1.0},
    # Rotary embeddings whose scaling needs the full size, or whose default does not go with tiny heads.
    "gpt_oss": {"rope_parameters": ROPE},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 8},
    "ministral3": {
        "rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
    },
    # Experts: defaults of None, or more of them for a token than exist.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
    # Their rotary embeddings are one for each kind of layer.
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {**ROPE, "mrope_section": [2, 1, 1]},
            "sliding_attention": {**ROPE, "mrope_section": [2, 1, 1]},
        },
    },
    # Indexers of sparse attention.
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 4},
    "qwen4_exp": QWEN4_INDEXER,
    "qwen4_exp_text": QWEN4_INDEXER,
    # Encoders and the rest of their generation.
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "roc_bert": {
        "shape_vocab_size": 20,
        "pronunciation_vocab_size": 20,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "xmod": {"default_language": "en_XX"},  # it runs only once a language is chosen
    # Models of several parts, where the part to reduce is not a text configuration of a known class.
    "fuyu": {"text_config": {"model_type": "persimmon", **SMALL}, "hidden_size": 32, "vocab_size": VOCAB},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **SMALL},
        "vision_config": {
            **SMALL_TOWER,
            "num_hidden_layers": 2,
            "output_channels": 32,
            "image_size": 64,
            "patch_size": 16,
            "mlp_dim": 32,
        },
        "image_token_index": VOCAB - 1,
    },
    "blt": {
        "patcher_config": SMALL_BYTE_PART,
        "encoder_config": {**SMALL_BYTE_PART, "hidden_size_global": 32, "cross_attn_k": 1},
        "decoder_config": {**SMALL_BYTE_PART, "hidden_size_global": 32, "cross_attn_k": 1},
        "global_config": SMALL_BYTE_PART,
        "encoder_hash_byte_group_vocab": 50,
        "cross_attn_k": 1,
        "patch_in_forward": False,
    },
    "dots3_note_text": DOTS3_SLIDING,
    "dots3_note": DOTS3_SLIDING | {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "moss_transcribe_diarize": {
        "text_config": {"model_type": "qwen3", **SMALL},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 64,
        },
    },
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "gemma3n": {
        "vision_config": LinearTowerConfig(hidden_size=32, vocab_size=8, vocab_offset=VOCAB),
        "audio_config": {
            "hidden_size": 32,
            "vocab_size": 8,
            "vocab_offset": VOCAB + 8,
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 4,
        },
    },
    "phi4_multimodal": {
        "vision_config": {**SMALL_TOWER, "intermediate_size": 48, "num_hidden_layers": 2, "crop_size": 56},
        "audio_config": {
            **SMALL_TOWER,
            "intermediate_size": 48,
            "num_blocks": 2,
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
        },
        "vocab_size": VOCAB,
    },
}

MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
IMAGE_TEXT_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 4},
        "vision_config": {"codebook_size": 4, "base_channels": 32},
        "image_token_offset": 80,
        "audio_token_offset": 84,
    },
    "chameleon": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32, "resolution": 32}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}}},
    "cosmos3_edge": {"text_config": {"rope_parameters": MROPE}},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {
            "sam_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            "encoder_config": {
                **SMALL_TOWER,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
            },
        },
    },
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "evolla": {"protein_encoder_config": {**SMALL_TOWER, "intermediate_size": 48, "num_hidden_layers": 1}},
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
            "encoder_config": {**SMALL_TOWER, "intermediate_size": 48, "num_hidden_layers": 1},
        },
    },
    "emu3": {"vocabulary_map": {"<image>": 90}, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}
    },
    "glm4v": {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}},
    "glm46v": {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}},
    "glm4v_moe": {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}},
    "glmga": {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}},
    "glm_ocr": {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}},
    "glm5_next": {"text_config": {"index_topk": 16, "qk_rope_head_dim": 0}},
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "hunyuan_vl": {"text_config": {"rope_parameters": MROPE, "head_dim": 8}},
    "hy_v4_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}},
    **{key: {"text_config": {"rope_parameters": MROPE}} for key in ("paddleocr_vl", "qwen2_vl", "qwen2_5_vl")},
    "inkling2": {"vision_config": {"text_hidden_size": 32}, "audio_config": {"text_hidden_size": 32}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 32}, "audio_config": {"text_hidden_size": 32}},
    "mistral4": {"rope_parameters": {**ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "muse_spark": {
        "vision_config": {"out_hidden_size": 32},
        "audio_config": {"out_hidden_size": 32},
        "out_hidden_size": 48,
        "projector_hidden_size": 32,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "idefics": {"vision_config": {"embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 1}},
}
"""Values that the parts of an image-text configuration get in addition, by family; None leaves a part out."""
