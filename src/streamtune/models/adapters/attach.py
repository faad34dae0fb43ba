"""Add new adapters to a model, of the kinds in ``base/adapters.py``, and load saved adapters.

Adapters that subtract the product ``B0 A0`` of their initial values are saved as one LoRA of twice the rank,
``[B, -B0] [A; A0]``. Peft can load this LoRA onto the original base; resuming splits it again. ``paca`` is saved as a
LoRA: each row of ``A`` is 1 at the trained column, else 0.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from streamtune.base.adapters import ADAPTERS, AdapterSpec
from streamtune.base.patterns import find_matches
from streamtune.base.text import first_error_line
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.models.adapters.initial_values import (
    CONSTANT,
    START,
    LoftqQuantizer,
    add_constant_adapter,
    copy_to_meta,
    initialize_from_quantization_error,
    initialize_from_weights,
)
from streamtune.models.adapters.targets import (
    PEFT_FORM,
    all_embedding_and_head_names,
    embedding_and_head_names,
    explicit_target_names,
    is_tied,
    linear_target_names,
    lora_layers,
    module_and_parameter_names,
    peft_target_options,
    selected_tied_layers,
    suppress_pattern_warnings,
    whole_module_names,
    write_expert_targets,
    write_out_image_parts,
)
from streamtune.models.folder import (
    READ_BACKEND,
    check_adapter_config_file,
    read_without_mmap,
    refuse_file_changes,
)
from streamtune.models.model_class import is_inside
from streamtune.models.quantize import is_quantized

if TYPE_CHECKING:  # peft imports every quantiser: two seconds
    from peft import PeftConfig, PeftModel

EMBEDDING_LAYER_NAMES = ("embed_tokens", "lm_head")
"""Last parts of the names by which peft recognises a tied embedding among ``modules_to_save``."""
COLUMNS = "lora_A.index"
"""Suffix of the state entries that hold the indices of the columns that ``paca`` trains."""


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    target: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> PeftModel:
    """Freeze ``model`` and add LoRA to it; arguments other than ``seed`` are fields of :class:`AdapterSpec`.

    Example:
        >>> adapted = add_lora(model, r=4, target=["q_proj", "v_proj"])
        >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        896
    """
    return add_adapters(model, AdapterSpec(r=r, alpha=alpha, dropout=dropout, target=target), seed=seed)


def add_adapters(
    model: PreTrainedModel, spec: AdapterSpec, *, seed: int = 0, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Freeze ``model``, in place, and return it with trainable adapters.

    On ``meta``, initial values that need a decomposition of weights are not computed. Adapters of kind ``lora_ga`` have
    no effect until ``models.initialize_from_factors`` is called. The caller's random state does not change.

    Args:
        model: Model without adapters.
        spec: Kind, ranks and targets of the adapters.
        seed: Seed of the random initial values.
        new_tokens: Ids of tokens whose rows in the embedding and the head are trained too.
    """
    adapted_model = add_peft_adapters(model, spec, seed, new_tokens)
    if spec.adapter_kind.start == "peft":
        return adapted_model
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if spec.adapter_kind.subtracts_initial_values:
            add_constant_adapter(adapted_model)
        if spec.adapter_kind.start == "weights":
            initialize_from_weights(adapted_model, spec)
        elif spec.adapter_kind.start == "quantisation" and next(model.parameters()).device.type != "meta":
            initialize_from_quantization_error(model, lora_layers(adapted_model))
    return adapted_model


def make_loftq_quantizer(spec: AdapterSpec, *, iterations: int, seed: int) -> LoftqQuantizer:
    """Return a LoftQ quantiser for the adapters ``spec``; it quantises each adapted layer ``iterations`` times."""

    def rank_and_scale_by_layer(model: PreTrainedModel) -> dict[str, tuple[int, float]]:
        with torch.device("meta"):
            adapted_model = add_peft_adapters(copy_to_meta(model), spec, seed, ())
        return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in lora_layers(adapted_model)}

    return LoftqQuantizer(rank_and_scale_by_layer, iterations=iterations, seed=seed)


def add_peft_adapters(model: PreTrainedModel, spec: AdapterSpec, seed: int, new_tokens: Sequence[int]) -> PeftModel:
    """Return ``model`` with adapters of any kind, with peft's default initial values."""
    from peft import get_peft_config, get_peft_model

    spec = write_out_image_parts(model, spec)
    _check_rank_and_alpha_patterns(spec, model)
    if new_tokens:
        _refuse_adapter_on_head_with_new_tokens(spec, model)
    options = spec.peft_options(seed)
    whole = whole_module_names(model, spec.modules_to_save)
    tied = selected_tied_layers(model, whole)
    ends = all_embedding_and_head_names(model) if tied else []  # peft trains both, as one weight
    _check_whole_modules(model, spec, {*whole, *ends})
    full_names: list[str] = []
    if spec.adapter_kind.is_lora:
        target_options, full_names = peft_target_options(model, spec)
        options |= target_options
        options["trainable_token_indices"] = _rows_of_new_tokens(model, new_tokens, {*whole, *ends}) or None
        options["ensure_weight_tying"] = bool(tied)
        if tied:
            _check_tied_modules(model, whole, ends)
            whole = [*(name for name in whole if name not in ends), ends[0]]
    else:
        options["target_modules"] = linear_target_names(model, spec)
        _refuse_low_rank_only_options(spec, tied, new_tokens)
        _check_recipe_rank([model.get_submodule(name) for name in options["target_modules"]], spec)
    options |= {"task_type": "CAUSAL_LM", "modules_to_save": whole or None}
    config = get_peft_config(options)
    write_expert_targets(model, spec, config, {*whole, *ends})
    if full_names:
        config.target_modules, config.exclude_modules = set(full_names), set(spec.exclude) or None
    if spec.adapter_kind.columns:
        from streamtune.models.adapters.paca import register_paca_layer

        register_paca_layer(model, config)
    with torch.random.fork_rng(), suppress_pattern_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft sets it itself, for Conv1D
        torch.manual_seed(seed)
        try:
            adapted_model: PeftModel = get_peft_model(model, config)
        except (ValueError, TypeError, NotImplementedError) as error:
            in_whole = "modules_to_save" in str(error)
            raise ArgumentError(
                f"peft cannot put adapters of kind {spec.kind} on {type(model).__name__}: {first_error_line(error)}",
                where="modules_to_save" if in_whole else "lora_target" if spec.kind == "lora" else "adapter_type",
                fix=f"name other {'modules in modules_to_save' if in_whole else 'layers in lora_target'}"
                + ("" if spec.kind == "lora" or in_whole else ", or write adapter_type: lora"),
            ) from error
    _check_wrapped_modules(adapted_model, {*whole, *ends})
    if spec.adapter_kind.is_lora:
        _check_ranks_fit_layers(dict(lora_layers(adapted_model)), spec)
    if spec.adapter_kind.divides_by_rows:
        _refuse_dora_on_zero_rows(adapted_model)
    return adapted_model


def _check_whole_modules(model: PreTrainedModel, spec: AdapterSpec, whole: Collection[str]) -> None:
    """Raise an ArgumentError for modules of ``modules_to_save`` that cannot be trained, or that also get adapters."""
    modules = {name: model.get_submodule(name) for name in whole}
    for name, module in modules.items():
        if any(is_quantized(weight) for weight in (*module.parameters(), *module.buffers())):
            raise ArgumentError(
                f"{name} is quantised, and quantised weights cannot be trained",
                where="modules_to_save",
                fix="name the embedding, norms or the head, or write finetuning_type: lora",
            )
    if modules and not any(list(module.parameters()) for module in modules.values()):
        raise ArgumentError(
            f"{min(modules)} has no weights to train", where="modules_to_save", fix="name modules with weights"
        )
    for name in explicit_target_names(model, spec):
        if is_inside(name, whole):
            raise ArgumentError(
                f"{name} would be trained both by an adapter (lora_target) and whole (modules_to_save)",
                where="modules_to_save",
                fix="delete it from one of the two, or name it in lora_exclude",
            )


def _check_tied_modules(model: PreTrainedModel, whole: Collection[str], ends: Sequence[str]) -> None:
    """Raise an ArgumentError if peft would not train the tied embedding and head ``ends`` as the base has them."""
    why = None
    if not any(name in ends for name in whole):
        why = f"{next(name for name in whole if is_inside(ends[0], [name]))} contains it"
    elif _bias_of_head(model) is not None:
        why = "peft would leave out the bias of the head"
    elif ends[0].rpartition(".")[2] not in EMBEDDING_LAYER_NAMES:
        why = f"peft would not keep it tied: its name is not {' or '.join(EMBEDDING_LAYER_NAMES)}"
    if why is not None:
        raise ArgumentError(
            f"{ends[0]} is tied (embedding and head share a weight) and cannot be trained whole: {why}",
            where="modules_to_save",
            fix="leave it out, or write finetuning_type: full",
        )


def _bias_of_head(model: PreTrainedModel) -> Any:
    return getattr(model.get_output_embeddings(), "bias", None)


def _rows_of_new_tokens(
    model: PreTrainedModel, new_tokens: Sequence[int], whole: Collection[str]
) -> dict[str, list[int]]:
    """Return the rows that are trained in the embedding and the head; none in those that are trained ``whole``."""
    names = [name for name in embedding_and_head_names(model) if not is_inside(name, whole)] if new_tokens else []
    ends = ", ".join(name.rpartition(".")[2] for name in all_embedding_and_head_names(model))
    fix = "write finetuning_type: full"
    if not is_tied(model):
        fix = f"write modules_to_save: [{ends}], which trains them whole, or finetuning_type: full"
    refuse_rows_of_biased_head(model, names, where="added_tokens", fix=fix)
    return {name: list(new_tokens) for name in names}


def refuse_rows_of_biased_head(model: PreTrainedModel, names: Sequence[str], *, where: str, fix: str) -> None:
    """Raise an ArgumentError if single rows of the layers ``names`` are trained and the head has a bias."""
    if _bias_of_head(model) is None or not names:
        return
    head = all_embedding_and_head_names(model)[-1]
    if is_tied(model) or head in names:
        raise ArgumentError(
            f"{head} has a bias, and peft computes it without the bias where it trains rows of new tokens",
            where=where,
            fix=fix,
        )


def _check_wrapped_modules(adapted_model: Any, whole: Collection[str]) -> None:
    """Raise an ArgumentError if peft does not train exactly the modules of ``modules_to_save`` whole."""
    from peft.utils import ModulesToSaveWrapper

    named = adapted_model.get_base_model().named_modules()
    wrapped = {name for name, module in named if isinstance(module, ModulesToSaveWrapper)}
    if wrong := sorted(wrapped ^ set(whole)):
        raise ArgumentError(
            f"peft cannot tell {wrong[0]} from other modules of 'modules_to_save' by its name",
            where="modules_to_save",
            fix="leave it out, or write finetuning_type: full",
        )


def _refuse_low_rank_only_options(spec: AdapterSpec, tied: Sequence[str], new_tokens: Sequence[int]) -> None:
    *others, last = (name for name, kind in ADAPTERS.items() if kind.is_lora)
    fix = f"write adapter_type: {', '.join(others)} or {last}"
    if new_tokens:
        raise ArgumentError(
            f"embedding rows of new tokens can be trained only with low-rank adapters, not with kind {spec.kind}",
            where="adapter_type",
            fix=f"{fix}, or add no tokens",
        )
    for name in tied:
        raise ArgumentError(
            f"{name} is tied (embedding and head share a weight); adapters of kind {spec.kind} would train an untied "
            "copy of it",
            where="modules_to_save",
            fix=f"{fix}, or leave {name} out",
        )


def _refuse_adapter_on_head_with_new_tokens(spec: AdapterSpec, model: PreTrainedModel) -> None:
    head = model.get_output_embeddings()
    for name in [name for name, module in model.named_modules() if module is head]:
        if name in explicit_target_names(model, spec):
            raise ArgumentError(
                f"{name} cannot have an adapter and trained rows of new tokens",
                where="lora_target",
                fix=f"leave {name} out of lora_target; the rows of added_tokens and special_tokens are trained anyway",
            )


def _check_rank_and_alpha_patterns(spec: AdapterSpec, model: nn.Module) -> None:
    names = module_and_parameter_names(model)
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        find_matches(list(patterns), names, where=where, match_function="match", template=PEFT_FORM)


def _check_ranks_fit_layers(layers: Mapping[str, Any], spec: AdapterSpec) -> None:
    for where, patterns in (("lora_rank_pattern", spec.ranks), ("lora_alpha_pattern", spec.alphas)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in layers):
                known = sorted({name.rsplit(".", 1)[-1] for name in layers})
                raise ArgumentError(
                    f"no layer with an adapter matches '{pattern}'",
                    where=where,
                    fix=did_you_mean(pattern, known) or f"layers with adapters: {', '.join(known)}",
                )
    ranks = {name: layer.r[layer.active_adapters[0]] for name, layer in layers.items()}
    too_small = [name for name, layer in layers.items() if ranks[name] > _largest_rank(layer, spec)]
    # "all-linear" may include small layers, such as gates of one row, which the user did not choose.
    if isinstance(spec.target, str) and spec.adapter_kind.largest_rank == "named" and len(too_small) < len(layers):
        too_small = [name for name in too_small if any(re.match(rf"(.*\.)?({p})$", name) for p in spec.ranks)]
    for name in too_small:
        layer, most = layers[name], _largest_rank(layers[name], spec)
        last, part = name.rsplit(".", 1)[-1], "half of " if spec.adapter_kind.largest_rank == "half" else ""
        raise ArgumentError(
            f"adapter rank {ranks[name]} is larger than {part}the matrix of {name}, "
            f"{layer.out_features:,} x {layer.in_features:,}",
            where="lora_r",
            fix=f"write lora_r: {most}, or lora_rank_pattern: {{{last}: {most}}}",
        )


def _refuse_dora_on_zero_rows(adapted_model: Any) -> None:
    for name, layer in lora_layers(adapted_model):
        norms = layer.lora_magnitude_vector["default"].weight
        zeros = 0 if norms.is_meta else int((norms == 0).sum())
        if zeros:
            raise ArgumentError(
                f"DoRA divides by the norm of each row of a weight, and {zeros:,} rows of {name} are all zeros (such "
                "as a padding token's row)",
                where="adapter_type",
                fix=f"leave {name} out of lora_target, or write adapter_type: lora",
            )


def _check_recipe_rank(layers: Sequence[Any], spec: AdapterSpec) -> None:
    if spec.adapter_kind.even_rank and spec.r % 2:
        raise ArgumentError(
            f"the number of Householder reflections must be even, found {spec.r}: they start in pairs that cancel",
            where="lora_r",
            fix=f"write lora_r: {spec.r + 1}",
        )
    if spec.adapter_kind.largest_rank != "largest":
        return
    sizes = [(layer.in_features, layer.out_features) for layer in layers if hasattr(layer, "in_features")]
    most = max((size for pair in sizes for size in pair), default=spec.r)
    if spec.r > most:
        raise ArgumentError(
            f"adapter rank {spec.r:,} is larger than every matrix: the largest has {most:,} rows or columns",
            where="lora_r",
            fix="write a rank far below that size, such as 16",
        )


def _largest_rank(layer: Any, spec: AdapterSpec) -> int:
    columns, singular = layer.in_features, min(layer.in_features, layer.out_features)
    return {"columns": columns, "half": singular // 2}.get(spec.adapter_kind.largest_rank, singular)


def is_converted_when_saved(adapted_model: Any) -> bool:
    """Return True if saving converts the adapters of a model to a plain LoRA."""
    return any(START in layer.lora_A or _is_paca_layer(layer) for _, layer in lora_layers(adapted_model))


def _is_paca_layer(layer: Any) -> bool:
    return any(hasattr(part, "index") for part in layer.lora_A.values())


def convert_to_lora(
    adapted_model: Any, weights: Mapping[str, Tensor] | None = None
) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return the configuration and tensors of a model's adapters, converted to a plain LoRA on the unchanged base.

    :func:`is_converted_when_saved` must be True. ``weights`` is the state dict to convert, by default the model's.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = dict(adapted_model.state_dict() if weights is None else weights)
    constant = {name: state.pop(name) for name in list(state) if name.endswith(CONSTANT)}
    adapters = get_peft_model_state_dict(adapted_model, state_dict=state, save_embedding_layers=False)
    config = copy.deepcopy(adapted_model.peft_config["default"])
    config.inference_mode = True
    for name, values in constant.items():
        key = name.replace(f".{START}.weight", ".weight")
        adapters[key] = torch.cat([adapters[key], values.to(adapters[key])], dim=0 if "lora_A" in name else 1)
    if constant:
        # The scale does not change: alpha / r, or alpha / sqrt(r).
        more = 2**0.5 if config.use_rslora else 2
        config.r, config.lora_alpha = 2 * config.r, more * config.lora_alpha
        config.rank_pattern = {key: 2 * rank for key, rank in config.rank_pattern.items()}
        config.alpha_pattern = {key: more * alpha for key, alpha in config.alpha_pattern.items()}
    for name in [name for name in adapters if name.endswith(COLUMNS)]:
        index, layer = adapters.pop(name), name.removesuffix(".index")
        like = adapters[f"{layer.removesuffix('A')}B.weight"]
        ones = like.new_zeros(len(index), adapted_model.get_submodule(f"{layer}.default").width)
        adapters[f"{layer}.weight"] = ones.scatter_(1, index[:, None].to(ones.device), 1)
    return config, dict(_without_shared_storage(adapters))


def _without_shared_storage(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield contiguous tensors; a tensor that shares its storage with an earlier one (tied weights) is copied."""
    seen: set[int] = set()
    for name, values in tensors.items():
        own = values.contiguous()
        if (storage := own.untyped_storage().data_ptr()) in seen:
            own = own.clone()
        seen.add(storage)
        yield name, own


def load_run_adapters(
    model: PreTrainedModel, folder: Path, spec: AdapterSpec, *, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Return the base model with the adapters that a run saved, to resume their training.

    ``spec`` and ``new_tokens`` must be the arguments with which the run added the adapters.
    """
    if not spec.adapter_kind.written_as_lora:
        return load_peft_adapters(model, folder)
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    adapted_model = add_peft_adapters(model, spec, 0, new_tokens)
    saved = load_file(_adapter_weights_file(folder), backend=READ_BACKEND)
    if spec.adapter_kind.columns:
        for name in [name for name in saved if name.endswith("lora_A.weight")]:
            saved[name.replace("lora_A.weight", COLUMNS)] = saved.pop(name).argmax(dim=1)
        set_peft_model_state_dict(adapted_model, saved)
        return adapted_model
    add_constant_adapter(adapted_model)
    trained: dict[str, Tensor] = {}
    constant: dict[str, Tensor] = {}
    for name, values in saved.items():
        trained[name] = values
        if "lora_A" in name or "lora_B" in name:
            trained[name], constant[name] = values.chunk(2, dim=0 if "lora_A" in name else 1)
    set_peft_model_state_dict(adapted_model, trained)
    for name, module in adapted_model.named_modules():
        if f"{name}.weight".endswith(CONSTANT):
            module.weight.copy_(constant[f"{name.removesuffix(f'.{START}')}.weight"])
    return adapted_model


def _adapter_weights_file(folder: Path) -> Path:
    if not (path := folder / "adapter_model.safetensors").is_file():
        raise ArgumentError(f"{folder} has no adapters in safetensors", where="--resume", fix="use another checkpoint")
    return path


def load_peft_adapters(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Return the base model with the adapters saved in ``folder``, trainable."""
    from peft import PeftModel

    _adapter_weights_file(folder)
    check_adapter_config_file(folder, module_and_parameter_names(model), where="adapters")
    with suppress_pattern_warnings(), refuse_file_changes(folder, where="adapters"), read_without_mmap(folder):
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)
