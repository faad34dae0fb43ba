"""Names of ``transformers``' internals, each with the version that introduced it.

``transformers`` renames arguments, functions and attributes between minor versions. All internal names that this
package uses are listed here and nowhere else. The documented arguments of a model call (``input_ids``, ``labels``,
``attention_mask``, ...) and the keys of a configuration are not listed. A name that the installed version lacks raises
:class:`~streamtune.errors.VersionError`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from streamtune.base.libraries import installed_version, missing_name_error

SAFE_FILE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the weight file in a model folder, and of its index file."""

# --- the cache -------------------------------------------------------------------------------------------------------

CACHES = {
    "past_key_values": "all models until 5.23; removed in 5.40",
    "cache_params": "Mamba and similar models until 5.23; removed in 5.40",
    "layer_past": "layers of bloom, falcon, gpt_bigcode, gpt_neox, imagegpt and mpt",
    "past_key_value": "before 5.17, and in code of model repositories",
    "cache": "since 5.24",
}
"""Names of the cache argument of models and layers, and of the cache in outputs, each with the versions that use it.
Old names come first: if a model has an argument with an old name, that argument is the cache. Before 5.24 a few models
used ``cache`` for something else.
"""
CACHE = "past_key_values"
"""Name of the cache argument in error messages; models of all tested versions accept it."""
OTHER_KEYS = "kv"
"""Argument of attention modules (xlm, flaubert) whose argument ``cache`` is not a cache of ``transformers``."""
STATE = "state"
"""Argument with which xLSTM and RWKV pass a state to a layer, in place of a cache."""

CACHE_METHODS = {
    "update": "5.17",
    "update_indexer": "5.17",
    "get_seq_length": "5.17",
    "get_mask_sizes": "5.17",
    "get_query_offset": "5.17",
    "update_conv_state": "5.17",
    "update_recurrent_state": "5.17",
    "has_previous_state": "5.17",
    "get_conv_state": "5.21",
    "get_recurrent_state": "5.21",
    "is_recording_past": "5.21",
}
"""Cache methods that layers call, each with the version that introduced it; ``ChunkCache`` implements all of them.
Before 5.21 layers read states from the items of ``cache.layers``.
"""
OWN_CACHE_METHODS = {"get_linear_cache": "minimax", "set_linear_cache": "minimax"}
"""Methods that a model family adds to its own cache class, each with the family."""
SCAN = "mamba_selective_scan"
"""Name of the scan function in the modules of Mamba-1 mixers."""
STATE_CALLS = frozenset({"update_conv_state", "update_recurrent_state", "set_linear_cache", SCAN})
"""Functions that layers with a recurrent or convolution state call."""
KEY_CALLS = frozenset({"update", "get_seq_length"})
"""Cache methods called by layers with keys and values, and by layers that count positions."""
LAYER_STATES = ("conv_states", "recurrent_states")
"""Attributes of an item of ``cache.layers``, each indexed by state, which layers read until transformers 5.20."""
RECORDS_PAST = "record_past"
"""Attribute of an item of ``cache.layers``. If it is True, layers do not run a chunk of one token as a decoding step,
which writes states in place.
"""
KEYS_AND_VALUES = ("keys", "values")
"""Attributes of an item of ``cache.layers`` with the keys and values of a filled cache."""
STATES_IN_MODULES = ("conv1d_state", "recurrent_states", "recurrent_state", "ssm_state")
"""Attributes in which modules store a state themselves, outside the cache (recurrent_gemma)."""

# --- arguments of layers and of attention ----------------------------------------------------------------------------

KEY_BIASES = ("alibi", "position_bias")
"""Arguments with a bias per key, added to the scores of all queries; the last dimension is the keys."""
DISTANCES = ("relative_distance",)
"""Arguments with the distance of each query to each key, ``[T, T]`` for all rows; since 5.24."""
POSITIONS = ("position_ids", "cache_position")
"""Arguments with positions of tokens in their last dimension; ``cache_position`` was used before 5.17."""
TEXT_AND_AXES = 4
"""First dimension of ``position_ids`` ``[4, B, T]`` in models with images: positions of tokens, then time, height and
width. The first shows packed rows; the others are the angles of the rotary embedding.
"""
ROTATIONS = "position_embeddings"
"""Argument that holds cosine and sine ``[B, T, D]``."""
OTHER_SEQUENCES = ("cross_attention_states", "encoder_hidden_states")
"""Arguments with the other sequence of a cross-attention, whose keys and values are in the same cache."""
ROW_ENDS, ROW_IDS = "cu_seq_lens_q", "seq_idx"
KERNEL_ROWS = (ROW_ENDS, "cu_seq_lens_k", "max_length_q", "max_length_k", ROW_IDS)
"""Arguments that describe packed rows to attention kernels. Layers do not get them for a chunk, because they refer to
the whole sequence.
"""
UNREAD_ARGUMENTS = (
    *POSITIONS,
    ROW_ENDS,
    "cu_seq_lens_k",
    ROW_IDS,
    "token_type_ids",
    "mm_token_type_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
)
"""Tensor arguments that models pass to attention functions, and that eager attention does not read. Arguments of the
loss are among them, because models pass unknown arguments on to their layers.
"""
KNOWN_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Attention implementations that compute softmax(q k' + mask) v, as StreamTune's attention does."""
TEXT_CLASS_ONLY = frozenset({"llama4"})
"""Families whose class for images and text cannot compute text alone in ``transformers`` 5.24, so that the class for
text is used.
"""
NEEDS_TOKEN_TYPES = frozenset({"molmo2"})
"""Families whose class for images and text is trained in ``transformers`` 5.24 only with the type of each token."""
IMAGES_REFUSED = {
    "llama4": "Llama 4 is trained with its class for text, which takes no images",
    "mllama": "Mllama's cross-attention to images is not streamed",
    "paligemma": "PaliGemma's processor lets the tokens of a prompt see each other",
}
"""Families whose rows with images are refused, each with the reason."""
HUB_KERNELS = "kernels-community/"
"""Prefix of attention kernels from the Hugging Face hub that replace the implementations in ``KNOWN_ATTENTION``."""
BY_POSITIONS = ("flash_attention", HUB_KERNELS)
"""Prefixes of attention implementations that find packed rows by the ``position_ids``."""
_IMAGE_POSITIONS = "rope_deltas"  # of a model, kept from its last call with images
NUMBERS_AXES = "get_rope_index"
"""Method of models with a position per image axis: the positions ``[axes, B, T]`` of rows, padded on the right."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments with the type of each token: 0 is text."""
INDEXER_POOLING = "compress_ratio"
"""Attribute of an indexer: how many keys it pools into one key; the cache holds keys before pooling and rotation."""
KEPT_WINDOW = "keep_window_size"
"""Configuration key (doge) with the number of keys that attention keeps; a key's score depends on its value alone."""

# --- attributes of models and configurations, all since 5.17 or before -----------------------------------------------

_ATTENTION = "_attn_implementation_internal"  # of each configuration
_CHANGES_ATTENTION = "_can_set_attn_implementation"  # of a model's class
_RECORDED = "_can_record_outputs"  # None, or what to record of which modules
_CHECKPOINTING = "_set_gradient_checkpointing"  # of a model
_STATEFUL = "_is_stateful"
_WIDE = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_TIED = "all_tied_weights_keys"
LOSS = "_loss_function"
"""Attribute that ``model.loss_function = f`` sets."""

# --- functions and classes -------------------------------------------------------------------------------------------

CACHE_CLASS = "cache_utils.Cache"
LINEAR_CACHE = "cache_utils.LinearAttentionCacheLayerMixin"
_PAGED_CACHE = "PagedAttentionCache"  # of generation.continuous_batching, which not every build can import
CONVERSIONS = "conversion_mapping.get_model_conversion_mapping"
CONVERTER, RENAMING = "core_model_loading.WeightConverter", "core_model_loading.WeightRenaming"
ANY_OF = "core_model_loading.build_glob_alternation"
ORDER_OF_KEYS = "core_model_loading.dot_natural_key"
RENAMED_KEY = "core_model_loading.rename_source_key"
AS_IN_FILES = "core_model_loading.revert_weight_conversion"
STREAMER = "generation.streamers.BaseStreamer"
CAUSAL_LOSS = "loss.loss_utils.ForCausalLMLoss"
LOSSES = "loss.loss_utils.LOSS_MAPPING"
FIXED_LOSS = "loss.loss_utils.fixed_cross_entropy"
CAUSAL_MASK = "masking_utils.causal_mask_function"
FINDS_PACKED = "masking_utils.find_packed_sequence_indices"
GGUF_KNOWN = "modeling_gguf_pytorch_utils.GGUF_SUPPORTED_ARCHITECTURES"
GGUF_ORDERS = "modeling_gguf_pytorch_utils.TENSOR_PROCESSORS"
GGUF_ORDER = "modeling_gguf_pytorch_utils.TensorProcessor"
CHECKPOINTED_LAYER = "modeling_layers.GradientCheckpointingLayer"
MTP_MODEL = "modeling_layers.MtpModel"
ATTENTIONS = "modeling_utils.ALL_ATTENTION_FUNCTIONS"
SAFE_OPEN = "modeling_utils.safe_open"
CAUSAL_NAMES = "models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
IMAGE_TEXT_NAMES = "models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"
PROCESSOR_NAMES = "models.auto.processing_auto.PROCESSOR_MAPPING_NAMES"
CONV1D = "pytorch_utils.Conv1D"
QUANTIZERS = "quantizers.AutoHfQuantizer"
HUB_FILE = "utils.hub.cached_file"
HUB_COMMIT = "utils.hub.extract_commit_hash"
FUNCTIONS = {
    ANY_OF: "5.17",
    AS_IN_FILES: "5.17",
    ATTENTIONS: "5.17",
    CACHE_CLASS: "5.17",
    CAUSAL_LOSS: "5.17",
    CAUSAL_MASK: "5.17",
    CAUSAL_NAMES: "5.17",
    CHECKPOINTED_LAYER: "5.17",
    CONV1D: "5.17",
    CONVERSIONS: "5.17",
    CONVERTER: "5.17",
    FINDS_PACKED: "5.17",
    FIXED_LOSS: "5.17",
    GGUF_KNOWN: "5.17",
    GGUF_ORDER: "5.17",
    GGUF_ORDERS: "5.17",
    HUB_COMMIT: "5.17",
    HUB_FILE: "5.17",
    IMAGE_TEXT_NAMES: "5.17",
    LINEAR_CACHE: "5.17",
    LOSSES: "5.17",
    MTP_MODEL: "5.17",
    ORDER_OF_KEYS: "5.17",
    PROCESSOR_NAMES: "5.17",
    QUANTIZERS: "5.17",
    RENAMED_KEY: "5.17",
    RENAMING: "5.17",
    SAFE_OPEN: "5.17",
    STREAMER: "5.17",
}
"""Functions and classes of ``transformers``, each with the version that introduced it; 5.17 also stands for earlier
versions.
"""
MODEL_MODULES = ("cache_utils.", "loss.", "masking_utils.", "modeling_layers.", "modeling_utils.")
"""Prefixes of the modules that are imported with every model."""

MASKS = {
    "packed_sequence_mask_function.<locals>.inner_mask": "5.17",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "5.23",
    "sliding_window_overlay.<locals>.inner_mask": "5.17",
    "chunked_overlay.<locals>.inner_mask": "5.17",
    "blockwise_overlay.<locals>.inner_mask": "5.17",
    "and_masks.<locals>.and_mask": "5.17",
    "or_masks.<locals>.or_mask": "5.17",
}
"""Qualified names of the closures in ``masking_utils`` from which masks are composed, each with its first version."""
PACKED, REMAPPED, WINDOW, SPAN, BLOCKS, AND_MASKS, OR_MASKS = MASKS
CLOSURE_VARIABLES = {
    PACKED: ("packed_sequence_mask",),
    REMAPPED: ("mask_function", "position_ids"),
    WINDOW: ("sliding_window",),
    SPAN: ("chunk_size", "left_padding"),
    BLOCKS: ("block_sequence_ids",),
    AND_MASKS: ("mask_functions",),
    OR_MASKS: ("mask_functions",),
}
"""Variables that each closure in ``MASKS`` captures."""

BALANCE_LOSS, BALANCE_ARGUMENTS = "load_balancing_loss_func", ("gate_logits", "num_experts", "top_k", "attention_mask")
"""Name of the function for the load-balancing loss in a mixture-of-experts module, and its parameters in all families
that use the formula of Switch Transformers.
"""
RWKV_KERNEL, RWKV_LAYER, RWKV_SIZE = "rwkv_cuda_kernel", "layer_id", "attention_hidden_size"
"""Name of the loaded CUDA kernel in RWKV's module, and names of attributes of its layer and of its attention."""
LAYER_NUMBERS = ("layer_idx", RWKV_LAYER, "layer_number", "block_idx")
"""Attributes that hold the index of a module's layer."""
MAKES_POSITIONS = "create_position_ids"
"""Prefix of the names of functions that compute positions from tokens."""


def hf_internal(name: str) -> Any:
    """Return an internal function or class of ``transformers`` that is listed in :data:`FUNCTIONS`.

    Raises:
        VersionError: The installed version of ``transformers`` lacks it.
    """
    assert name in FUNCTIONS, name
    return _import_internal(name)


@lru_cache(maxsize=256)
def _import_internal(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(f"transformers.{module}"), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise missing_name_error("transformers", f"transformers.{name}") from error


def replace_internal(name: str, function: Callable[..., Any]) -> None:
    """Replace an internal function of ``transformers``, listed in :data:`FUNCTIONS`, in its module."""
    module, _, attribute = name.rpartition(".")
    setattr(import_module(f"transformers.{module}"), attribute, function)


@lru_cache(maxsize=512)
def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of the function that it wraps (``__wrapped__``)."""
    return inspect.signature(forward).parameters


def cache_argument(forward: Callable[..., Any], state: bool = True) -> str | None:
    """Return the name of a forward's cache argument; None if it has none.

    With ``state``, return the name of the state argument (xLSTM, RWKV) if there is no cache argument.
    """
    parameters = parameters_of(forward)
    argument = next((name for name in CACHES if name in parameters), STATE if state and STATE in parameters else None)
    return None if OTHER_KEYS in parameters else argument


def cache_names(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of cache arguments that have a value in a call's arguments, or in a model's output."""
    return [name for name in CACHES if arguments.get(name) is not None]


def renamed_cache(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the arguments of a call with the cache argument renamed to ``name``, unless two caches are passed."""
    names = cache_names(arguments)
    if len(names) != 1 or names == [name]:
        return dict(arguments)
    return {name if key == names[0] else key: value for key, value in arguments.items() if key != name}


def cache_keyword(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return ``{name: cache}``, where name is the cache argument of ``forward``."""
    return {cache_argument(forward, state=False) or CACHE: cache}


def has_attention_name(config: Any) -> bool:
    """Return True if a model configuration has an attribute for the attention implementation."""
    return hasattr(config, _ATTENTION)


def attention_name(config: Any) -> Any:
    """Return the attention implementation set in a model configuration, such as ``sdpa``; None if none is set."""
    return getattr(config, _ATTENTION)


def set_attention_name(config: Any, name: Any) -> None:
    """Set the attention implementation, such as ``sdpa``, in a model configuration."""
    setattr(config, _ATTENTION, name)


def uses_registered_attention(model: PreTrainedModel) -> bool:
    """Return True if layers call the attention function named in the model's configuration, not code of their own."""
    return bool(getattr(model, _CHANGES_ATTENTION)())


def recorded_modules(module: Any, output: str) -> list[tuple[Any, str | None, int]]:
    """Return the modules whose outputs ``transformers`` records as ``output``, such as ``hidden_states``.

    Each item is (class, suffix of the module name or None, index in the module's output).
    """
    recorded = (getattr(module, _RECORDED, None) or {}).get(output)
    specs = recorded if isinstance(recorded, list | tuple) else [] if recorded is None else [recorded]
    return [
        (getattr(spec, "target_class", spec), getattr(spec, "layer_name", None), getattr(spec, "index", 0))
        for spec in specs
    ]


def forget_image_positions(model: PreTrainedModel) -> None:
    """Reset what a model keeps of the images of an earlier call: the model adds it to positions after a cache."""
    for module in model.modules():
        if getattr(module, _IMAGE_POSITIONS, None) is not None:
            setattr(module, _IMAGE_POSITIONS, None)


def is_stateful(model: Any) -> bool:
    """Return True if the model's cache is a recurrent state, which cannot be cut back to fewer tokens."""
    return bool(getattr(model, _STATEFUL, False))


def set_checkpointing(model: Any, enable: bool, function: Callable[..., Any]) -> None:
    """Turn gradient checkpointing of all layers on or off; ``function`` is the checkpoint function."""
    getattr(model, _CHECKPOINTING)(enable=enable, gradient_checkpointing_func=function)


def fp32_weight_names(model: Any) -> set[str]:
    """Return parts of weight names: a weight with such a part in its name always stays in float32."""
    return {each for name in _WIDE for each in getattr(model, name, None) or ()}


def tied_weights(model: Any) -> dict[str, str]:
    """Return the names of tied weights, each mapped to the name of the weight it is tied to."""
    return dict(getattr(model, _TIED, None) or {})


@lru_cache(maxsize=1)
def check_internal_names() -> None:
    """Check that the installed ``transformers`` has every internal name that a streamed model needs.

    Names that only some models need are checked when they are used.

    Raises:
        VersionError: A name is missing.
    """
    for name, since in FUNCTIONS.items():
        if _is_installed_since(since) and name.startswith(MODEL_MODULES):
            hf_internal(name)
    Cache, masking_utils = hf_internal(CACHE_CLASS), import_module("transformers.masking_utils")
    wanted: list[tuple[Any, str, str]] = [
        *(
            (Cache, method, "cache_utils.Cache")
            for method, since in CACHE_METHODS.items()
            if _is_installed_since(since)
        ),
        *(
            (PreTrainedModel, name, "PreTrainedModel")
            for name in (_CHANGES_ATTENTION, _RECORDED, _CHECKPOINTING, _STATEFUL, *_WIDE)
        ),
        (PreTrainedConfig(), _ATTENTION, "PreTrainedConfig"),
    ]
    for owner, name, called in wanted:
        if not hasattr(owner, name):
            raise missing_name_error("transformers", f"{called}.{name}")
    for name, since in MASKS.items():
        maker, _, inner = name.partition(".<locals>.")
        if _is_installed_since(since):
            closure_variables = _closure_variables(getattr(masking_utils, maker, None), inner)
            if not set(CLOSURE_VARIABLES[name]) <= closure_variables:
                raise missing_name_error(
                    "transformers", f"masking_utils.{maker} that holds {' and '.join(CLOSURE_VARIABLES[name])}"
                )


def _is_installed_since(since: str) -> bool:
    return tuple(map(int, installed_version("transformers").split(".")[:2])) >= tuple(map(int, since.split(".")))


def _closure_variables(maker: Any, closure_name: str) -> set[str]:
    codes = [] if maker is None else inspect.unwrap(maker).__code__.co_consts
    return {name for code in codes if getattr(code, "co_name", None) == closure_name for name in code.co_freevars}


def is_unchunked_only_cache(cache: Any) -> bool:
    """Return True for a cache that layers in chunks cannot use: of fixed size, or paged for continuous batching."""
    return bool(getattr(cache, "is_compileable", False)) or type(cache).__name__ == _PAGED_CACHE
