"""Configurations of the models that shipped recipes name, to plan them without a hub.

Each has the values of the published ``config.json`` that shapes, masks and positions depend on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "write_shape"]


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, **others: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        **others,
    }


def _llama(
    hidden: int, layers: int, heads: int, head_dim: int, intermediate: int, factor: float = 8.0, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **others,
    }


def _mistral(
    hidden: int, layers: int, intermediate: int, vocabulary: int, positions: int, theta: float
) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "sliding_window": None,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _gemma3(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, **others: Any
) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            **others,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "dtype": "bfloat16",
    }


QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **_qwen3(4096, 36, 32, 12288),
        "model_type": "qwen3_vl_text",
        "max_position_embeddings": 262144,
        "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tie_word_embeddings=True),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(
        2560, 36, 32, 9728, tie_word_embeddings=True, max_position_embeddings=262144, rope_theta=5e6
    ),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tie_word_embeddings=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408, tie_word_embeddings=False),
    "Qwen/Qwen3-VL-8B-Instruct": QWEN3_VL_8B,
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600, tie_word_embeddings=False),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 16, 32, 64, 8192, 32.0, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 28, 24, 128, 8192, 32.0, tie_word_embeddings=True),
    "meta-llama/Llama-3.1-8B-Instruct": _llama(4096, 32, 32, 128, 14336),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(8192, 80, 64, 128, 28672),
    "mistralai/Mistral-7B-Instruct-v0.3": _mistral(4096, 32, 14336, 32768, 32768, 1e6),
    "mistralai/Mistral-Nemo-Instruct-2407": _mistral(5120, 40, 14336, 131072, 131072, 1e6),
    "mistralai/Mistral-Small-24B-Instruct-2501": _mistral(5120, 40, 32768, 131072, 32768, 1e8),
    "google/gemma-3-4b-it": _gemma3(2560, 34, 8, 4, 256, 10240),
    "google/gemma-3-12b-it": _gemma3(3840, 48, 16, 8, 256, 15360),
    "google/gemma-3-27b-it": _gemma3(5376, 62, 32, 16, 128, 21504, query_pre_attn_scalar=168),
    "microsoft/phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "sliding_window": None,
        "rope_theta": 250000.0,
        "pad_token_id": 100349,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "unsloth/gpt-oss-20b-BF16": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
"""The configuration of each model, by its name on the hub."""


def write_shape(name: str, folder: Path) -> Path:
    """Write the ``config.json`` of a model into its own folder below ``folder``, and return that folder."""
    path = folder / name.replace("/", "--")
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
    return path
