"""Models and tokenizers: load or initialise, adapt, save. Nothing here trains."""

from __future__ import annotations

from streamtune.base.adapters import AdapterSpec
from streamtune.models.adapters.add import add_adapters, add_lora, loftq_start
from streamtune.models.adapters.loftq import LOFTQ_FILE, QuantisationChange, QuantisedBefore, taken_of
from streamtune.models.adapters.lora_ga import first_factors, start_from_factors, summed_bytes
from streamtune.models.adapters.saved import check_saved_settings, load_adapters, load_lora, start_from
from streamtune.models.adapters.start import started_values
from streamtune.models.blueprint import blueprint, small_like
from streamtune.models.checkpoint_files import (
    FileTimes,
    absolute_name,
    checkpoint_dtype,
    fingerprint_files,
    fingerprint_model,
    fingerprint_tokenizer,
    is_folder,
)
from streamtune.models.deferred import Deferred, defer_init, defer_load, deferred_of, phantom_weights
from streamtune.models.export import (
    SavedTokenizer,
    copy_gathered,
    copy_weights,
    save_architecture,
    save_copied,
    save_gathered,
    save_pretrained,
    use_saved_ends,
    write_shards,
)
from streamtune.models.load import (
    ModelOptions,
    ParameterCount,
    check_positions,
    count_parameters,
    count_weights,
    describe_positions,
    init_model,
    left_out,
    load_model,
)
from streamtune.models.older import add_old_names
from streamtune.models.packed import PackedExperts, has_packed_experts
from streamtune.models.positions import RopeChange, position_limit, pretrained_positions
from streamtune.models.quantize import choose_quantization, divide_packed, left_whole, quantization
from streamtune.models.reading import adapter_base
from streamtune.models.sample import Decoding, encode_prompt, likeliest_tokens, sample_text
from streamtune.models.tokenizer import (
    CHATML_TEMPLATE,
    load_tokenizer,
    read_trained_tokenizer,
    read_vocabulary,
    set_chat_template,
    train_tokenizer,
)
from streamtune.models.tokens import (
    add_ends,
    add_rows,
    add_tokens,
    end_tokens,
    ends_of,
    new_tokens,
    use_special_tokens,
    with_generation,
)

__all__ = [
    "CHATML_TEMPLATE",
    "LOFTQ_FILE",
    "AdapterSpec",
    "Decoding",
    "Deferred",
    "FileTimes",
    "ModelOptions",
    "PackedExperts",
    "ParameterCount",
    "QuantisationChange",
    "QuantisedBefore",
    "RopeChange",
    "SavedTokenizer",
    "absolute_name",
    "adapter_base",
    "add_adapters",
    "add_ends",
    "add_lora",
    "add_old_names",
    "add_rows",
    "add_tokens",
    "blueprint",
    "check_positions",
    "check_saved_settings",
    "checkpoint_dtype",
    "choose_quantization",
    "copy_gathered",
    "copy_weights",
    "count_parameters",
    "count_weights",
    "defer_init",
    "defer_load",
    "deferred_of",
    "describe_positions",
    "divide_packed",
    "encode_prompt",
    "end_tokens",
    "ends_of",
    "fingerprint_files",
    "fingerprint_model",
    "fingerprint_tokenizer",
    "first_factors",
    "has_packed_experts",
    "init_model",
    "is_folder",
    "left_out",
    "left_whole",
    "likeliest_tokens",
    "load_adapters",
    "load_lora",
    "load_model",
    "load_tokenizer",
    "loftq_start",
    "new_tokens",
    "phantom_weights",
    "position_limit",
    "pretrained_positions",
    "quantization",
    "read_trained_tokenizer",
    "read_vocabulary",
    "sample_text",
    "save_architecture",
    "save_copied",
    "save_gathered",
    "save_pretrained",
    "set_chat_template",
    "small_like",
    "start_from",
    "start_from_factors",
    "started_values",
    "summed_bytes",
    "taken_of",
    "train_tokenizer",
    "use_saved_ends",
    "use_special_tokens",
    "with_generation",
    "write_shards",
]
