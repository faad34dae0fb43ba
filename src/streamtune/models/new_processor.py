"""Image processors of new vision-language models with random weights, made from the configuration without downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AddedToken, PreTrainedConfig, PreTrainedTokenizerBase

from streamtune.engine.hf_names import PROCESSOR_NAMES, hf_internal
from streamtune.errors import ArgumentError


@dataclass(frozen=True)
class ImageFamily:
    """Image processor and image tokens of new models of a family."""

    image_processor: str
    """class of the image processor in ``transformers``"""
    video_processor: str
    tokens: Mapping[str, str]
    """key of the configuration -> special token, whose id is the key's value"""
    shown: str
    """text that a chat template prints for an image"""


_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
_SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
_GLM_TOKENS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "image_token_id": "<|image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "video_token_id": "<|video|>",
}
_GLM_SHOWN = "<|begin_of_image|><|image|><|end_of_image|>"
NEW_IMAGE_MODELS = {
    "qwen2_vl": ImageFamily("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", _TOKENS, _SHOWN),
    "qwen2_5_vl": ImageFamily("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", _TOKENS, _SHOWN),
    "qwen3_vl": ImageFamily("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", _TOKENS, _SHOWN),
    "qwen3_vl_moe": ImageFamily("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor", _TOKENS, _SHOWN),
    "glm4v": ImageFamily("Glm4vImageProcessor", "Glm4vVideoProcessor", _GLM_TOKENS, _GLM_SHOWN),
}
"""``model_type`` -> family, for all vision-language models that can be made from a configuration."""
LEAST_TOKENS, MOST_TOKENS = 4, 1280
"""Range of the number of tokens of an image, as in the defaults of ``Qwen2VLImageProcessor``."""


def image_family(keys: Mapping[str, Any]) -> ImageFamily | None:
    """Return the family of a new model with the configuration ``keys``; None if the model takes no images."""
    return NEW_IMAGE_MODELS.get(str(keys.get("model_type")))


def feature_tokens(name_or_path: str, keys: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the tokens that a model replaces by features of images, videos or audio, or their ids.

    Args:
        name_or_path: Folder or name on the hub of a checkpoint.
        keys: Configuration of a new model; empty for a checkpoint.
    """
    if keys:
        family = image_family(keys)
        return () if family is None else (family.tokens["image_token_id"], family.tokens["video_token_id"])
    try:
        config, _ = PreTrainedConfig.get_config_dict(name_or_path)
    except Exception:  # loading the model reports it
        return ()
    ids = (config.get(f"{kind}_token_{end}") for kind in ("image", "video", "audio") for end in ("id", "index"))
    return tuple(each for each in ids if isinstance(each, int))


def count_image_tokens(keys: Mapping[str, Any]) -> int:
    """Return the number of tokens that :func:`add_image_tokens` adds to a tokenizer that has none of them."""
    family = image_family(keys)
    return 0 if family is None else len(family.tokens)


def add_image_tokens(tokenizer: PreTrainedTokenizerBase, keys: Mapping[str, Any]) -> None:
    """Add the special tokens of images for a new model to a tokenizer, in place. Existing tokens keep their ids."""
    if (family := image_family(keys)) is not None:
        tokens = [AddedToken(text, special=True, normalized=False) for text in family.tokens.values()]
        tokenizer.add_tokens(tokens, special_tokens=True)


def new_model_token_ids(tokenizer: PreTrainedTokenizerBase, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens for a new model, by key of its configuration, image tokens included.

    Raises:
        ArgumentError: The configuration has an id of an image token.
    """
    family = image_family(keys)
    tokens = {} if family is None else family.tokens
    if written := next((key for key in tokens if key in keys), None):
        raise ArgumentError(
            f"'{written}' is the id of a token, and the tokenizer decides ids",
            where=f"model.init.{written}",
            fix="delete the line",
        )
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return ids | {key: tokenizer.convert_tokens_to_ids(text) for key, text in tokens.items()}


def processor_files(config: Any) -> dict[str, str]:
    """Return the files of the processor for the configuration of a new model, as name -> text.

    There are none for a model that takes no images. The patches have the sizes of the vision tower.
    """
    family = NEW_IMAGE_MODELS.get(config.model_type)
    if family is None:
        return {}
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    whole = {"processor_class": hf_internal(PROCESSOR_NAMES)[config.model_type]}
    shared = {
        **whole,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    size = {"shortest_edge": LEAST_TOKENS * side**2, "longest_edge": MOST_TOKENS * side**2}
    files: dict[str, dict[str, Any]] = {
        "processor_config.json": whole,
        "preprocessor_config.json": {**shared, "image_processor_type": family.image_processor, "size": size},
        "video_preprocessor_config.json": {**shared, "video_processor_type": family.video_processor},
    }
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}
