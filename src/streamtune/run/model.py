"""Create the model and the optimizer of a recipe.

make_model                 for training: loads weights, for the tokenizer of the data make_model_without_data    for
measurements: loads weights, without tokenizer or data make_meta_model             for planning: on the ``meta`` device

For a reference model there are ``make_reference_model``, ``make_reference_without_data`` and
``make_reference_blueprint``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streamtune import models, optim, train
from streamtune.base.adapters import base_of
from streamtune.base.optimizer_table import state_bytes
from streamtune.base.text import parse_size, show_size
from streamtune.engine import decoder_layers, keep_on_host
from streamtune.engine.memory.host import usable_host_bytes
from streamtune.engine.offloaded_weights import offloaded_parameters
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.adapters import FREEZE_KEYS, AdapterKeys
from streamtune.recipe.settings import ModelSettings, OptimizerSettings, TrainingSettings
from streamtune.run.data import new_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST_RATE = torch.finfo(torch.float32).max
"""Maximum learning rate: a step of AdamW moves each weight by about the rate, so a larger one overflows float32."""


def make_model(
    recipe: TrainingSettings,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: train.Checkpoint | None,
    device: torch.device,
    *,
    shard_world: train.World | None = None,
) -> Any:
    """Return the model to train, with the weights of the checkpoint or of the base model, and with adapters.

    Args:
        recipe: Recipe of the run.
        tokenizer: Tokenizer of the data.
        checkpoint: Checkpoint that is resumed; None for a new run.
        device: Device of this rank.
        shard_world: Ranks that will shard the weights; the model is then on ``meta``, and its weights are loaded later.
    """
    if "host" in (recipe.engine.weights, recipe.engine.optimizer):
        _check_host_memory(recipe, device)
    return _move_to_device(
        recipe, _make_model(recipe, tokenizer, checkpoint, _loading_device(recipe, device), shard_world), device
    )


def _make_model(
    recipe: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: train.Checkpoint | None,
    device: torch.device,
    shard_world: train.World | None,
) -> Any:
    adapters = recipe.finetuning_type != "full"
    new_tokens = new_token_ids(recipe, tokenizer)
    if new_tokens and shard_world is not None and (adapters or checkpoint is None):
        _refuse_new_tokens(recipe, tokenizer, new_tokens)
    name = str(checkpoint.model_dir) if checkpoint is not None and not adapters else recipe.model_name_or_path
    change = (
        _make_loftq_quantizer(recipe) if checkpoint is None else models.SavedLoftqQuantizer.load(checkpoint.model_dir)
    )
    model = _make_base_model(
        recipe, device, len(tokenizer), _token_ids(recipe, tokenizer), name=name, shard_world=shard_world, change=change
    )
    if adapters and checkpoint is None and recipe.adapter_name_or_path is not None:
        models.check_tokens_of_adapters(
            model, recipe.adapter_name_or_path, tokenizer, new_tokens, trust_remote_code=recipe.trust_remote_code
        )
    if new_tokens and (adapters or checkpoint is None):
        if not adapters:
            _refuse_frozen_new_tokens(recipe, model, tokenizer, new_tokens)
        models.add_embedding_rows(model, len(tokenizer), new_tokens)
    models.write_special_token_ids(model, tokenizer, recipe.special_tokens.model_dump())
    _check_vocabulary(model, tokenizer)
    with models.use_placeholder_weights(model):
        if checkpoint is None or not adapters:
            adapted = _add_adapters(recipe, model, new_tokens)
        elif recipe.adapter_name_or_path is not None:  # adapters of any kind, as they were loaded
            adapted = models.load_peft_adapters(model, checkpoint.model_dir)
        else:
            adapted = models.load_run_adapters(
                model, checkpoint.model_dir, _adapter_spec(recipe), new_tokens=new_tokens
            )
    if recipe.model_name_or_path is not None:
        for config in getattr(adapted, "peft_config", {}).values():
            config.base_model_name_or_path = models.make_path_absolute(recipe.model_name_or_path)
    return adapted


def make_reference_model(
    recipe: ModelSettings,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    *,
    name: str | None = None,
    shard_world: train.World | None = None,
    change: models.LayerQuantizer | None = None,
) -> Any:
    """Return the model ``name``, or the recipe's base model if None, without adapters."""
    is_own_model = name in (None, recipe.model_name_or_path)
    new_tokens = new_token_ids(recipe, tokenizer) if is_own_model else []
    if new_tokens and shard_world is not None:
        _refuse_new_tokens(recipe, tokenizer, new_tokens)
    name = name or recipe.model_name_or_path
    loading_device = _loading_device(recipe, device)
    model = _make_base_model(
        recipe,
        loading_device,
        len(tokenizer),
        _token_ids(recipe, tokenizer),
        name=name,
        shard_world=shard_world,
        change=change,
        frozen=not is_own_model,
    )
    if new_tokens:
        models.add_embedding_rows(model, len(tokenizer), new_tokens)
    return _move_to_device(recipe, model, device)


def _check_host_memory(recipe: TrainingSettings, device: torch.device) -> None:
    model = base_of(make_meta_model(recipe, device))
    offloads_weights = recipe.engine.weights == "host"
    host_weights = offloaded_parameters(model, decoder_layers(model)) if offloads_weights else []
    weights = sum(p.nbytes for p in host_weights)
    trained = sum(p.nbytes for p in host_weights if p.requires_grad)
    step = recipe.step_kind
    updated = host_weights if step.states != "host" else list(model.parameters())
    layer_ids = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    # Stochastic rounding keeps float32 states for bfloat16 weights, except AdamW, which follows `optim_states`.
    rounds_stochastically = recipe.weight_rounding == "stochastic" and recipe.optim != "adamw"
    size = 4 if rounds_stochastically else {"param": None, "float32": 4, "bfloat16": 2}[recipe.optim_states]
    states = sum(
        state_bytes(
            recipe.optim, tuple(p.shape), size or p.element_size(), recipe.optim_args, in_layer=id(p) in layer_ids
        )
        for p in updated
        if p.requires_grad
    )
    terms = {"weights": weights, "optimizer": states, "gradients": 0 if step.gradients == "layer" else trained}
    host_memory = recipe.engine.host_memory
    usable_bytes = usable_host_bytes() if host_memory == "auto" else parse_size(host_memory, where="engine.host_memory")
    if sum(terms.values()) <= usable_bytes:
        return
    shown = ", ".join(f"{name} {show_size(size)}" for name, size in terms.items() if size)
    noun, key = ("weights", "engine.weights") if offloads_weights else ("optimizer", "engine.optimizer")
    tip = (
        ""
        if step.gradients == "layer" or not offloads_weights
        else "write optim_in_backward: true, which keeps few gradients; "
    )
    raise ArgumentError(
        f"the host's memory is too small for the {noun}: needed {shown}; usable {show_size(usable_bytes)}",
        where=key,
        fix=f"{tip}train adapters (finetuning_type: lora), or use a machine with more memory",
    )


def _loading_device(recipe: ModelSettings, device: torch.device) -> torch.device:
    return torch.device("cpu") if recipe.engine.weights == "host" else device


def _move_to_device(recipe: ModelSettings, model: Any, device: torch.device) -> Any:
    if recipe.engine.weights == "host":
        keep_on_host(model, device)
    return model


def _show_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    tokens = tokenizer.convert_ids_to_tokens(list(token_ids))
    return ", ".join(tokens[:5]) + (f" and {len(tokens) - 5:,} more" if len(tokens) > 5 else "")


def _refuse_frozen_new_tokens(
    recipe: ModelSettings, model: Any, tokenizer: PreTrainedTokenizerBase, new_tokens: Sequence[int]
) -> None:
    embedding = model.get_input_embeddings()
    if embedding.weight.requires_grad:
        return
    name = next(name for name, module in model.named_modules() if module is embedding)
    raise ArgumentError(
        f"the vocabulary lacks {_show_tokens(tokenizer, new_tokens)}, and the embedding is frozen, so the vectors of "
        "these tokens would not be trained",
        where="added_tokens" if recipe.added_tokens else "special_tokens",
        fix=f"add {name} to train" if not recipe.freeze else f"add {name} to train, or delete its pattern in freeze",
    )


def _refuse_new_tokens(recipe: ModelSettings, tokenizer: PreTrainedTokenizerBase, new_tokens: Sequence[int]) -> None:
    shown = _show_tokens(tokenizer, new_tokens)
    full_fix = "; or add them on one device: --set max_steps=1 --set learning_rate=0, then name the final/ of that run"
    raise ArgumentError(
        f"the vocabulary lacks {shown}; embeddings cannot be resized under ZeRO-3 or FSDP2",
        where="added_tokens" if recipe.added_tokens else "special_tokens",
        fix="write deepspeed: zero2" + (f"{full_fix} as the model" if recipe.finetuning_type == "full" else ""),
    )


def make_trial_model(recipe: ModelSettings, model: Any, device: torch.device) -> Any:
    """Return a small copy of a model whose weights are not loaded yet; return a loaded ``model`` itself.

    The copy is used in checks. It has random weights, and only one layer of each type.
    """
    if models.find_deferred_weights(model) is None:
        return model
    small = models.make_small_copy(model, decoder_layers(model), seed=recipe.seed).to(device)
    if recipe.finetuning_type != "full" and recipe.adapter_name_or_path is not None:  # saved for more layers
        return models.load_initial_adapters(small, recipe.adapter_name_or_path, reads_weights=False)
    return _add_adapters(recipe, small)


def make_model_without_data(recipe: ModelSettings, device: torch.device) -> Any:
    """Return the recipe's model without tokenizer or data."""
    base = _make_base_without_data(
        recipe, _loading_device(recipe, device), recipe.model_name_or_path, _make_loftq_quantizer(recipe)
    )
    if recipe.finetuning_type != "full" and recipe.adapter_name_or_path is not None:
        rows = base.get_input_embeddings().weight.shape[0]
        wanted_rows = models.embedding_rows_of_adapters(base, Path(recipe.adapter_name_or_path).expanduser())
        if rows < wanted_rows <= rows + _count_added_tokens(recipe):
            models.add_embedding_rows(base, wanted_rows, range(rows, wanted_rows))
    return _move_to_device(recipe, _add_adapters(recipe, base), device)


def make_reference_without_data(recipe: ModelSettings, device: torch.device, name: str | None) -> Any:
    """Return the reference model without tokenizer or data: the model ``name``, or a copy of the recipe's model."""
    model = _make_base_without_data(recipe, _loading_device(recipe, device), name or recipe.model_name_or_path)
    return _move_to_device(recipe, model, device).requires_grad_(False).eval()


def _make_base_without_data(
    recipe: ModelSettings, device: torch.device, name: str | None, change: models.LayerQuantizer | None = None
) -> Any:
    size = _trained_vocabulary_size(recipe) or 0
    if recipe.model is not None:
        size = models.text_keys(recipe.model.init).get("vocab_size", size)
    frozen = name != recipe.model_name_or_path
    return _make_base_model(recipe, device, size, {}, name=name, change=change, frozen=frozen)


def make_reference_blueprint(recipe: ModelSettings, device: torch.device, name: str | None) -> Any:
    """Return the reference model on the ``meta`` device: the model ``name``, or the recipe's model."""
    return _make_blueprint(recipe, device, name).requires_grad_(False)


def make_meta_model(recipe: ModelSettings, device: torch.device) -> Any:
    """Return the recipe's model with its adapters on the ``meta`` device, quantised as on ``device``."""
    model = _make_blueprint(recipe, device, None)
    size, num_added = model.get_input_embeddings().weight.shape[0], _count_added_tokens(recipe)
    new_tokens = range(size - num_added, size) if recipe.model_name_or_path is not None else range(0)
    with torch.device("meta"):
        return _add_adapters(recipe, model, new_tokens)


def _make_blueprint(recipe: ModelSettings, device: torch.device, name: str | None) -> Any:
    source: Any = recipe.model.init if recipe.model is not None else recipe.model_name_or_path
    frozen = name not in (None, recipe.model_name_or_path)
    return models.build_meta_model(
        source if name is None else name,
        models.ModelOptions(
            weights_dtype(recipe, frozen=frozen),
            choose_quantization(recipe, device),
            _rope_change(recipe),
            trained=_trained_parts_of_model(recipe, frozen=frozen),
        ),
        vocab_size=_trained_vocabulary_size(recipe) if name is None else None,
        new_token_count=_count_added_tokens(recipe) if name in (None, recipe.model_name_or_path) else 0,
        trust_remote_code=recipe.trust_remote_code,
    )


def trained_parts(recipe: AdapterKeys, frozen_dtype: torch.dtype | None = None) -> models.TrainedParts | None:
    """Return the recipe's choice of trained parameters; None if it trains all of them, or adapters.

    ``frozen_dtype`` is the dtype of frozen weights, if it is not the dtype of the trained weights.
    """
    tower, projector = not recipe.freeze_vision_tower, not recipe.freeze_projector
    chosen = any(getattr(recipe, key) for key in FREEZE_KEYS)
    if recipe.finetuning_type != "full" or not (chosen or tower or projector):
        return None
    return models.TrainedParts(
        recipe.trainable_layers, recipe.freeze, recipe.train, frozen_dtype if chosen else None, tower, projector
    )


def _trained_parts_of_model(recipe: ModelSettings, *, frozen: bool) -> models.TrainedParts | None:
    """Return the recipe's choice of trained parameters; the other weights of a bfloat16 checkpoint stay in bfloat16.

    With ``dtype: mixed`` trained weights are float32. Autocast computes with bfloat16 copies of them, so frozen
    weights of a bfloat16 checkpoint have the same effect in bfloat16. ``frozen`` is True for another model than the
    recipe's.
    """
    if frozen or trained_parts(recipe) is None:
        return None
    name, dtype = recipe.model_name_or_path, None
    if recipe.dtype == "mixed" and recipe.bf16 and name is not None:
        dtype = models.checkpoint_dtype(name, recipe.trust_remote_code)
    return trained_parts(recipe, dtype if dtype == torch.bfloat16 else None)


def weights_dtype(recipe: ModelSettings, *, frozen: bool = False) -> str:
    """Return the dtype of the base model's weights, or ``auto`` for the checkpoint's dtype.

    Args:
        recipe: Recipe with the key ``dtype``.
        frozen: True for a model that is not trained, such as a reference.
    """
    if recipe.dtype != "mixed":
        return recipe.dtype
    return "auto" if frozen or recipe.finetuning_type != "full" else "float32"


def make_optimizer(recipe: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a model's trainable weights.

    Raises:
        ArgumentError: The learning rate is too large for float32, a library is missing, or an ``lr_groups`` pattern
            matches nothing.
    """
    rates = {"learning_rate": recipe.learning_rate}
    rates |= {f"lr_groups.{number}": group.learning_rate or 0.0 for number, group in enumerate(recipe.lr_groups)}
    for key, rate in rates.items():
        if rate > LARGEST_RATE:
            raise ArgumentError(
                f"a learning rate of {rate:g} is too large for float32",
                where=key,
                fix="use a rate such as 1e-5 (full) or 1e-4 (lora)",
            )
    places = optim.LayerPositions(model, decoder_layers(base_of(model)))
    groups = optim.NameGroups(
        [group.match for group in recipe.lr_groups],
        [name for name, parameter in model.named_parameters() if parameter.requires_grad],
    )

    def rate_scale(name: str) -> float:
        group = groups.group_index(name)
        own_rate = None if group is None else recipe.lr_groups[group].learning_rate
        if own_rate is not None:
            return own_rate / recipe.learning_rate
        return recipe.lr_layer_decay ** places.depth_below_head(name)

    def decay(name: str) -> float | None:
        group = groups.group_index(name)
        return None if group is None else recipe.lr_groups[group].weight_decay

    choice = optim.OptimChoice(
        recipe.optim,
        recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        betas=(recipe.adam_beta1, recipe.adam_beta2),
        eps=recipe.adam_epsilon,
        states=recipe.optim_states,
        rounding=recipe.weight_rounding,
        seed=recipe.seed,
        args=recipe.optim_args,
    )
    return optim.build_optimizer(
        choice, model.named_parameters(), lr_scale_of=rate_scale, weight_decay_of=decay, is_in_layer=places.is_in_layer
    )


def train_largest_block(recipe: OptimizerSettings, model: nn.Module) -> None:
    """Make only the most expensive block of layers trainable, if the optimizer trains one block at a time."""
    if recipe.step_kind.gradients == "block":
        if recipe.finetuning_type == "full":
            model.requires_grad_(True)  # in a resumed run only one block is trainable
            models.freeze_parts(model, trained_parts(recipe))
        optim.train_largest_block(model, **recipe.optim_args)


def choose_quantization(recipe: ModelSettings, device: torch.device) -> str | None:
    """Return ``nf4`` or ``int8`` for a QLoRA recipe; None for other recipes."""
    if recipe.finetuning_type != "qlora":
        return None
    kind = recipe.quantization
    if kind == "auto" and (recipe.fsdp or recipe.deepspeed is not None):  # the kind that these can move
        kind = "nf4"
    return models.choose_quantization(kind, device)


def weights_are_sharded(recipe: ModelSettings) -> bool:
    """Return True if the weights are sharded over ranks (ZeRO-3 or FSDP2)."""
    if recipe.deepspeed is None:
        return recipe.fsdp
    from streamtune.distributed.deepspeed_config import read_config, zero_stage

    return zero_stage(read_config(recipe.deepspeed)) == 3


def _make_base_model(
    recipe: ModelSettings,
    device: torch.device,
    vocab_size: int,
    token_ids: dict[str, Any],
    *,
    name: str | None,
    shard_world: train.World | None = None,
    change: models.LayerQuantizer | None = None,
    frozen: bool = False,
) -> Any:
    """Return the pretrained model ``name``, or a new model if None, without adapters."""
    dtype, quantization = weights_dtype(recipe, frozen=frozen), choose_quantization(recipe, device)
    parts, remote = _trained_parts_of_model(recipe, frozen=frozen), recipe.trust_remote_code
    options = models.ModelOptions(dtype, quantization, _rope_change(recipe), change, parts)
    if shard_world is not None and quantization is None:
        if name is not None:
            return shard_world.run_on_all_ranks(
                lambda: models.load_model_deferred(name, options, trust_remote_code=remote)
            )
        assert recipe.model is not None, "unreachable: the recipe schema requires a model"
        return models.init_model_deferred(
            recipe.model.init,
            options,
            vocab_size=vocab_size,
            token_ids=token_ids,
            seed=recipe.seed,
            draw=shard_world.is_main,
        )
    if name is not None:
        return models.load_model(
            name, options, device=str(device), trust_remote_code=remote, allow_pickle=recipe.allow_pickle
        )
    assert recipe.model is not None, "unreachable: the recipe schema requires a model"
    return models.init_model(
        recipe.model.init,
        options,
        vocab_size=vocab_size,
        token_ids=token_ids,
        device=str(device),
        seed=recipe.seed,
    )


def _make_loftq_quantizer(recipe: ModelSettings) -> models.LayerQuantizer | None:
    if not recipe.starts_from_quantisation:
        return None
    return models.make_loftq_quantizer(_adapter_spec(recipe), iterations=recipe.loftq_iter, seed=recipe.seed)


def _rope_change(recipe: ModelSettings) -> models.RopeChange | None:
    return models.RopeChange.from_settings(recipe.model_dump(include={"rope_scaling", "rope_theta", "max_length"}))


def _token_ids(recipe: ModelSettings, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return models.new_model_token_ids(tokenizer, {} if recipe.model is None else recipe.model.init)


def _add_adapters(recipe: ModelSettings, model: Any, new_tokens: Sequence[int] = ()) -> Any:
    """Return ``model`` with new adapters and trained embedding rows of ``new_tokens``; unchanged for full
    fine-tuning."""
    if recipe.finetuning_type == "full":
        if kind := models.quantization_kind(model):
            raise ArgumentError(
                f"the checkpoint is quantised ({kind}), and quantised weights cannot be trained",
                where="finetuning_type",
                fix="write finetuning_type: qlora, which trains adapters on them, or use the checkpoint before "
                "quantisation",
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ArgumentError(
                f"{recipe.model_name_or_path} holds adapters on a frozen base, and full fine-tuning trains all weights",
                where="model_name_or_path",
                fix=f"merge them: `streamtune export {recipe.model_name_or_path} OUT`, and set model_name_or_path: OUT",
            )
        return model
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ArgumentError(
            f"{recipe.model_name_or_path} holds adapters, and new adapters would replace them",
            where="model_name_or_path",
            fix=f"merge them: `streamtune export {recipe.model_name_or_path} OUT`, and set model_name_or_path: OUT",
        )
    if recipe.adapter_name_or_path is not None:
        adapted = models.load_initial_adapters(model, recipe.adapter_name_or_path)
    else:
        adapted = models.add_adapters(model, _adapter_spec(recipe), seed=recipe.seed, new_tokens=new_tokens)
    if any(p.requires_grad and p.dtype == torch.float16 for p in adapted.parameters()):
        raise ArgumentError(
            "the adapters train modules of a float16 base (modules_to_save), and float16 weights lose small steps",
            where="adapter_name_or_path" if recipe.adapter_name_or_path is not None else "dtype",
            fix="write dtype: float32",
        )
    return adapted


def _adapter_spec(recipe: ModelSettings) -> models.AdapterSpec:
    return models.AdapterSpec(
        kind=recipe.adapter_type,
        r=recipe.lora_r,
        alpha=recipe.lora_alpha,
        dropout=recipe.lora_dropout,
        target=recipe.lora_target,
        exclude=recipe.lora_exclude,
        ranks=recipe.lora_rank_pattern,
        alphas=recipe.lora_alpha_pattern,
        modules_to_save=recipe.modules_to_save,
        block_size=recipe.oft_block_size,
    )


def _trained_vocabulary_size(recipe: ModelSettings) -> int | None:
    trained = recipe.tokenizer.train if recipe.tokenizer is not None else None
    images = 0 if recipe.model is None else models.count_image_tokens(recipe.model.init)
    return trained.vocab_size + _count_added_tokens(recipe) + images if trained is not None else None


def _count_added_tokens(recipe: ModelSettings) -> int:
    """Return the largest number of tokens that the recipe may add; the tokenizer may already have some of them."""
    special = recipe.special_tokens.model_dump(exclude_none=True)
    return len(special) - 1 + len(special["additional_special_tokens"]) + len(recipe.added_tokens)


def _check_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ArgumentError(
            f"the tokenizer has {len(tokenizer):,} tokens, but the model's embedding only {rows:,} rows",
            where="tokenizer",
            fix="use the tokenizer that belongs to the model",
        )
