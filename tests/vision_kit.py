"""Folders of tiny vision-language models with the processor of their family, and rows with drawn images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from streamtune import models
from streamtune.data.images import _images_only
from tests.exactness.vision import END, IMAGE, MODELS, START

try:
    transformers.AutoImageProcessor.from_pretrained  # noqa: B018
except ImportError as error:  # transformers 5.17 has it only with torchvision
    pytest.skip(f"left out: {str(error).strip().splitlines()[0]}", allow_module_level=True)

__all__ = ["KINDS", "MESSAGES", "Kind", "draw", "processor_of", "save_checkpoint", "write_image_rows"]

QWEN_PROCESSOR = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
SIDE = {"height": 16, "width": 16}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role.upper() }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
"""As Llava's template: it prints lists of parts only, and the images of a message first."""


@dataclass(frozen=True)
class Kind:
    """Processor of the published checkpoints of a family."""

    image_processor: str
    settings: dict[str, Any]
    """settings of the image processor"""
    shown: str
    """what a chat template prints for an image"""
    tokens: dict[str, str]
    """name of an attribute of the tokenizer -> token"""
    values: dict[str, Any] = field(default_factory=dict)
    """settings of the processor"""
    template: str = CHAT


QWEN = Kind(
    "Qwen2VLImageProcessor",
    {**QWEN_PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 1024}},
    "<|vision_start|><|image_pad|><|vision_end|>",
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
)
KINDS: dict[str, Kind] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "glm4v": Kind(
        "Glm4vImageProcessor",
        {**QWEN_PROCESSOR, "size": {"shortest_edge": 64, "longest_edge": 1024}},
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
        },
    ),
    "gemma3": Kind(
        "Gemma3ImageProcessor",
        {"size": SIDE},
        "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"image_seq_length": 4},
    ),
    "llava": Kind(
        "LlavaImageProcessor",
        {"size": {"shortest_edge": 16}, "crop_size": SIDE},
        "",
        {"image_token": "<image>"},
        {"patch_size": 4, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1},
        PARTS_ONLY,
    ),
    "idefics3": Kind(
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        "<image>",
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        }
        | {f"row_{row}_col_{col}": f"<row_{row}_col_{col}>" for row in range(1, 3) for col in range(1, 3)}
        | {"end_of_utterance_token": "<end_of_utterance>"},
        {"image_seq_len": 4},
    ),
    "internvl": Kind(
        "GotOcr2ImageProcessor",
        {"size": SIDE, "crop_to_patches": True, "min_patches": 1, "max_patches": 3},
        "<IMG_CONTEXT>\n",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        {"image_seq_length": 4},
    ),
}
GRID = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
OTHER_KINDS: dict[str, Kind] = {
    "llava_next": Kind(  # a parameter beside all modules: image_newline
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 16}, "crop_size": SIDE, **GRID},
        "",
        {"image_token": "<image>"},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        PARTS_ONLY,
    )
}
"""Families that a few tests need."""
OTHER_MODELS = {"llava_next": {**MODELS["llava"], **GRID, "vision_feature_select_strategy": "default"}}


def make_tokenizer(kind: Kind) -> PreTrainedTokenizerFast:
    trained: Any = models.train_tokenizer(["Which colour is the page? It is red, green or blue."] * 8, vocab_size=300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=kind.tokens,
        chat_template=kind.template.replace("IMAGE", kind.shown),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    return tokenizer


def save_checkpoint(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a model of a family with random weights, its tokenizer and the files of its processor."""
    family = KINDS.get(kind) or OTHER_KINDS[kind]
    tokenizer = make_tokenizer(family)
    size = len(tokenizer)
    names = family.tokens
    number = {
        IMAGE: names.get("image_token", names.get("context_image_token")),
        START: names.get("vision_start_token", names.get("image_start_token")),
        END: names.get("vision_end_token", names.get("image_end_token")),
        113: names.get("video_token"),
    }
    sizes = {
        key: tokenizer.convert_tokens_to_ids(number[value]) if isinstance(value, int) and number.get(value) else value
        for key, value in (MODELS.get(kind) or OTHER_MODELS[kind]).items()
    }
    text = {**sizes["text_config"], "vocab_size": size, "bos_token_id": None}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(kind, **sizes | {"text_config": text})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # gemma3's projector, which would hide its tower
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pil = "" if find_spec("torchvision") else "Pil"  # as published where torchvision is installed
    getattr(transformers, family.image_processor + pil)(**family.settings).save_pretrained(folder)
    values = {"processor_class": PROCESSOR_MAPPING_NAMES[kind], **family.values}
    (folder / "processor_config.json").write_text(json.dumps(values))


def processor_of(kind: str, folder: Path) -> Any:
    """Return the family's own processor, without its part for videos, which needs torchvision."""
    family = KINDS.get(kind) or OTHER_KINDS[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    made: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    parts = {"tokenizer": tokenizer, "image_processor": images}
    return _images_only(made)(
        *(parts.get(name) for name in made.get_attributes()), chat_template=tokenizer.chat_template, **family.values
    )


def draw(path: Path, colour: str, size: tuple[int, int] = (20, 16)) -> Path:
    image = Image.new("RGB", size, colour)
    ImageDraw.Draw(image).line((0, 0, *size), fill="white")
    image.save(path)
    return path


MESSAGES = (
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}],
    [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "First "},
                {"type": "image"},
                {"type": "text", "text": " then "},
                {"type": "image"},
                {"type": "text", "text": "?"},
            ],
        }
    ],
    [{"role": "user", "content": [{"type": "text", "text": "No picture."}]}],
)


def write_image_rows(folder: Path, count: int, colours: Sequence[str] = ("red", "green", "blue")) -> list[Any]:
    """Write ``rows.jsonl``: conversations with one image, two images of unlike sizes, and none, in turn."""
    rows = []
    for number in range(count):
        messages = list(MESSAGES[number % len(MESSAGES)])
        places = sum(part["type"] == "image" for message in messages for part in message["content"])
        shown = [colours[(number + place) % len(colours)] for place in range(places)]
        sizes = [(20 + 6 * place + number, 16) for place in range(places)]
        paths = [
            draw(folder / f"{number}-{place}.png", colour, size).name
            for place, (colour, size) in enumerate(zip(shown, sizes, strict=True))
        ]
        messages.append({"role": "assistant", "content": [{"type": "text", "text": " ".join(shown) or "none"}]})
        rows.append({"messages": messages, "images": paths})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
