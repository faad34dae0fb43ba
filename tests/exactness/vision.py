"""Tiny vision-language models, each with a batch of images and text: one image a row, at another place in each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

ROWS, LENGTH, IMAGE, START, END = 2, 37, 110, 111, 112
PLACES = (5, 3)
"""Where the image of each row begins."""
TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 113,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32}
CROSS_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 48,
    "max_num_tiles": 1,
    "supported_aspect_ratios": [[1, 1]],
}


def _rope(**more: Any) -> dict[str, Any]:
    return {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}


MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
    },
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "projection_dim": 32,
    },
    "paligemma 2": {
        "text_config": {**TEXT, "model_type": "gemma2", "sliding_window": 6},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
        "projection_dim": 32,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "image_seq_length": 17,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "attention_chunk_size": 12,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
        },
        "vision_config": {
            **TOWER,
            "intermediate_size": 96,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        "image_token_index": IMAGE,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "pixtral", "head_dim": 12},
        "image_token_id": IMAGE,
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": TOWER,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
    },
    "qwen2_vl": {
        "text_config": _rope(mrope_section=[2, 1, 1]),
        "vision_config": {**QWEN_TOWER, "hidden_size": 32, "embed_dim": 24, "mlp_ratio": 2},
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": _rope(mrope_section=[2, 1, 1]),
        "vision_config": {**QWEN_TOWER, "window_size": 8, "fullatt_block_indexes": [1]},
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": _rope(mrope_section=[2, 1, 1], mrope_interleaved=True),
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **_rope(mrope_section=[2, 1, 1], mrope_interleaved=True),
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "glm4v": {
        "text_config": _rope(mrope_section=[2, 1, 1], partial_rotary_factor=1.0),
        "vision_config": {**QWEN_TOWER, "image_size": 16},
        "image_token_id": IMAGE,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_token_id": 113,
    },
    "mllama": {
        "text_config": {**_rope(), "num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision_config": CROSS_TOWER,
        "image_token_index": IMAGE,
    },
}
IMAGE_TOKENS = {"paligemma": 16, "paligemma 2": 16, "llava": 17, "mllama": 0}
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v")
"""Models that are given patches and the grid they come from instead of pictures."""


def build(kind: str) -> PreTrainedModel:
    """A model of a kind with every parameter away from its initial zeros and ones."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split()[0], **MODELS[kind])
    implementation = "eager" if kind == "paligemma 2" else "sdpa"  # Gemma 2's softcap has no SDPA form
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if kind == "llama4":  # transformers 5.24.0 reads an output of the decoder that it does not hand on
        model.language_model.register_forward_hook(
            lambda module, args, out: vars(out).setdefault("image_outputs") and None
        )
    return model.train()


def batch(kind: str, image: bool) -> dict[str, Any]:
    """``ROWS`` x ``LENGTH`` tokens, with one image in each row or with none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100, (ROWS, LENGTH), generator=generator)
    out: dict[str, Any] = {}
    if image:
        size = IMAGE_TOKENS.get(kind, 4)
        for row, start in enumerate(PLACES):
            ids[row, start : start + size] = IMAGE
            if kind in GRIDS:
                ids[row, start - 1], ids[row, start + size] = START, END
        out = _pixels(kind, ids, generator)
    if kind == "gemma3":
        out["token_type_ids"] = (ids == IMAGE).long()
    if kind.startswith("paligemma"):  # the prompt sees itself in both directions, the answer looks back
        out["token_type_ids"] = (torch.arange(LENGTH) >= 25).long().expand(ROWS, -1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100), **out}


def _pixels(kind: str, ids: Tensor, generator: torch.Generator) -> dict[str, Any]:
    if kind in GRIDS:
        patches = torch.randn(ROWS * 16, 3 * 2 * 4 * 4, generator=generator)
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        return {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    if kind == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]] * ROWS)}
    if kind == "idefics3":
        return {"pixel_values": pixels[:, None]}
    if kind == "mllama":
        return {
            "pixel_values": pixels[:, None, None],
            "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(ROWS, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(ROWS, LENGTH, 1, 1, dtype=torch.long),
        }
    return {"pixel_values": pixels}
