"""Models and tokenizers: load or initialise, adapt, save. Nothing here trains."""

from __future__ import annotations

from streamtune.models.adapters import add_lora, load_lora
from streamtune.models.blueprint import blueprint
from streamtune.models.export import SavedTokenizer, copy_weights, save_pretrained
from streamtune.models.load import (
    ParameterCount,
    check_positions,
    count_parameters,
    init_model,
    left_out,
    load_model,
)
from streamtune.models.quantize import choose_quantization
from streamtune.models.sample import sample_text
from streamtune.models.tokenizer import CHATML_TEMPLATE, load_tokenizer, set_chat_template, train_tokenizer

__all__ = [
    "CHATML_TEMPLATE",
    "ParameterCount",
    "SavedTokenizer",
    "add_lora",
    "blueprint",
    "check_positions",
    "choose_quantization",
    "copy_weights",
    "count_parameters",
    "init_model",
    "left_out",
    "load_lora",
    "load_model",
    "load_tokenizer",
    "sample_text",
    "save_pretrained",
    "set_chat_template",
    "train_tokenizer",
]
