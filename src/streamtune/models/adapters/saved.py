"""Adapters in files: their settings are checked before peft follows them, and they are written, loaded, started from.

Adapters with a constant part are written as one LoRA of twice the rank, ``[B, -B0] [A; A0]``, which peft puts on the
model as it was, and taken apart again when a run goes on. ``paca`` is written as a LoRA whose ``A`` has a one for each
column.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamtune.base.adapters import NAMED_STARTS, AdapterSpec
from streamtune.base.patterns import find_matches
from streamtune.errors import ArgumentError
from streamtune.models.adapters.add import add_unstarted
from streamtune.models.adapters.loftq import LOFTQ_FILE
from streamtune.models.adapters.start import CONSTANT, START, add_start
from streamtune.models.adapters.targets import PEFT_FORM, low_rank_layers, module_names, no_pattern_warnings
from streamtune.models.reading import READ, unchanged, unmapped

if TYPE_CHECKING:  # it imports every quantiser there is: two seconds that only adapters are worth
    from peft import PeftConfig, PeftModel

COLUMNS = "lora_A.index"
"""End of the names of the columns that ``paca`` trains, in the state of the adapters."""
ENDS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.down_proj", "input_layernorm"]
USUAL = [f"model.layers.{layer}.{end}" for layer in range(32) for end in ENDS]
"""Names to try patterns on where there is no model yet."""
MOST_RANK = 10**5


def check_saved_settings(
    folder: Path, names: Sequence[str], *, where: str, mend: str = "use a whole copy of it"
) -> None:
    """Read the settings of a folder with adapters, and refuse what peft would trip over or match for minutes.

    Args:
        folder: The folder.
        names: Names of the modules that the patterns are matched with.
        where: The key or the argument that named the folder, for errors.
        mend: The way out where the file cannot be read.

    Raises:
        ArgumentError: A setting is of another type, or a pattern takes too long.
    """
    path = folder / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", where=where, mend=mend) from error
    check_adapter_settings(settings, path, names, where=where)


def check_adapter_settings(settings: Any, path: Path, names: Sequence[str] = USUAL, *, where: str) -> None:
    """Refuse settings of adapters of another type than peft's, and patterns that take too long on ``names``.

    Args:
        settings: The content of ``adapter_config.json``.
        path: The file.
        names: Names of modules.
        where: The key or the argument that named the folder.

    Raises:
        ArgumentError: It names the setting.
    """

    def refuse(key: str, wanted: str) -> ArgumentError:
        shown = json.dumps(settings.get(key))[:60] if isinstance(settings, Mapping) else ""
        return ArgumentError(
            f"'{key}' in {path} is {shown}, and must be {wanted}", where=where, mend="correct the file"
        )

    if not isinstance(settings, Mapping):
        raise ArgumentError(f"{path} is not a mapping of settings", where=where, mend="use a whole copy of it")
    for key in ("r", "oft_block_size"):
        if key in settings and not (_is_number(settings[key], whole=True) and 0 <= settings[key] <= MOST_RANK):
            raise refuse(key, f"a whole number up to {MOST_RANK:,}")
    for key in ("lora_alpha", "lora_dropout", "alpha"):
        if key in settings and not _is_number(settings[key]):
            raise refuse(key, "a number")
    for key in ("rank_pattern", "alpha_pattern"):
        given = settings.get(key) or {}
        if not isinstance(given, Mapping) or not all(_is_number(value) for value in given.values()):
            raise refuse(key, "a mapping of patterns to numbers")
        find_matches(list(given), names, where=f"{key} in {path}", how="match", form=PEFT_FORM)
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "target_parameters"):
        given = settings.get(key)
        if given is not None and not isinstance(given, str) and not _are_texts(given):
            raise refuse(key, "a text or a list of texts")
        if isinstance(given, str):
            find_matches([given], names, where=f"{key} in {path}", how="fullmatch")
    layers = settings.get("layers_pattern") or []
    forms = [layers] if isinstance(layers, str) else list(layers)
    find_matches(forms, names, where=f"layers_pattern in {path}", how="match", form=r".*\.{}\.(\d+)\.")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def is_written_as_lora(adapted: Any) -> bool:
    """Return True if a model has adapters of a kind that is saved as another LoRA than it is trained as."""
    return any(START in layer.lora_A or _has_columns(layer) for _, layer in low_rank_layers(adapted))


def _has_columns(layer: Any) -> bool:
    return any(hasattr(part, "index") for part in layer.lora_A.values())


def written_adapters(adapted: Any, weights: Mapping[str, Tensor] | None = None) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Return the adapters of a model that :func:`is_written_as_lora`, as a LoRA on the model as it was.

    Args:
        adapted: The model.
        weights: Its state at the moment that is written; None is now.
    """
    from peft import get_peft_model_state_dict

    state: dict[str, Any] = dict(adapted.state_dict() if weights is None else weights)
    constant = {name: state.pop(name) for name in list(state) if name.endswith(CONSTANT)}
    found = get_peft_model_state_dict(adapted, state_dict=state, save_embedding_layers=False)
    config = copy.deepcopy(adapted.peft_config["default"])
    config.inference_mode = True
    for name, values in constant.items():
        key = name.replace(f".{START}.weight", ".weight")
        found[key] = torch.cat([found[key], values.to(found[key])], dim=0 if "lora_A" in name else 1)
    if constant:
        # The scale stays: alpha / r, or alpha / sqrt(r).
        more = 2**0.5 if config.use_rslora else 2
        config.r, config.lora_alpha = 2 * config.r, more * config.lora_alpha
        config.rank_pattern = {key: 2 * rank for key, rank in config.rank_pattern.items()}
        config.alpha_pattern = {key: more * alpha for key, alpha in config.alpha_pattern.items()}
    for name in [name for name in found if name.endswith(COLUMNS)]:
        index, layer = found.pop(name), name.removesuffix(".index")
        like = found[f"{layer.removesuffix('A')}B.weight"]
        ones = like.new_zeros(len(index), adapted.get_submodule(f"{layer}.default").width)
        found[f"{layer}.weight"] = ones.scatter_(1, index[:, None].to(ones.device), 1)
    return config, {name: values.contiguous() for name, values in found.items()}


def load_adapters(
    model: PreTrainedModel, folder: Path, spec: AdapterSpec, *, new_tokens: Sequence[int] = ()
) -> PeftModel:
    """Put saved adapters on their base, ready to be trained further as they were.

    Args:
        model: The base.
        folder: With the adapters, as a run saves them.
        spec: The adapters as they were added. Of kinds with a constant part the file has both parts.
        new_tokens: As they were added.

    Raises:
        ArgumentError: They are a pickle.
    """
    if not spec.row.written_as_lora:
        return load_lora(model, folder)
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    adapted = add_unstarted(model, spec, 0, new_tokens)
    saved = load_file(_weights_in(folder), backend=READ)
    if spec.row.columns:
        for name in [name for name in saved if name.endswith("lora_A.weight")]:
            saved[name.replace("lora_A.weight", COLUMNS)] = saved.pop(name).argmax(dim=1)
        set_peft_model_state_dict(adapted, saved)
        return adapted
    add_start(adapted)
    trained: dict[str, Tensor] = {}
    constant: dict[str, Tensor] = {}
    for name, values in saved.items():
        trained[name] = values
        if "lora_A" in name or "lora_B" in name:
            trained[name], constant[name] = values.chunk(2, dim=0 if "lora_A" in name else 1)
    set_peft_model_state_dict(adapted, trained)
    for name, module in adapted.named_modules():
        if f"{name}.weight".endswith(CONSTANT):
            module.weight.copy_(constant[f"{name.removesuffix(f'.{START}')}.weight"])
    return adapted


def _weights_in(folder: Path) -> Path:
    """Return the file of saved adapters.

    Raises:
        ArgumentError: There is none.
    """
    if not (path := folder / "adapter_model.safetensors").is_file():
        raise ArgumentError(f"{folder} has no adapters in safetensors", where="--resume", mend="use another checkpoint")
    return path


def load_lora(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put the adapters saved in ``folder`` on their base, ready to be trained further.

    Raises:
        ArgumentError: They are a pickle.
    """
    from peft import PeftModel

    _weights_in(folder)
    check_saved_settings(folder, module_names(model), where="adapters")
    with no_pattern_warnings(), unchanged(folder, where="adapters"), unmapped(folder):
        return PeftModel.from_pretrained(model, str(folder), is_trainable=True)


def start_from(model: PreTrainedModel, folder: str) -> PeftModel:
    """Put adapters that were saved in peft's format on their base, to be trained from there.

    Args:
        model: The base; on ``meta`` no weight is read.
        folder: With ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        ArgumentError: There are none, they are of a kind that is not trained here, or not of this base.
    """
    from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors import safe_open

    key, path = "adapter_name_or_path", Path(folder).expanduser()
    mend = "name a folder with adapters of peft"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (path / name).is_file():
            raise ArgumentError(f"{folder} has no {name}", where=key, mend=mend)
    check_saved_settings(path, module_names(model), where=key)
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path / 'adapter_config.json'} cannot be read: {error}", where=key, mend=mend) from error
    changed = str(getattr(config, "init_lora_weights", True)).lower()
    if config.is_prompt_learning or changed.startswith(("corda", *NAMED_STARTS)):
        kind = "a learnt prompt" if config.is_prompt_learning else f"adapters of {changed}, whose base was changed"
        raise ArgumentError(f"{folder} holds {kind}", where=key, mend="convert them to LoRA with peft")
    if (path / LOFTQ_FILE).is_file():
        raise ArgumentError(
            f"the adapters in {folder} (loftq_iter) belong to weights that were changed before they were quantised",
            where=key,
            mend=f"merge them, `streamtune export {folder} OUT`, and name OUT as the model",
        )
    config.inference_mode = False
    try:
        with no_pattern_warnings():
            if next(model.parameters()).device.type == "meta":
                return get_peft_model(model, config)
            with unchanged(path, where=key), unmapped(path):
                adapted = PeftModel.from_pretrained(model, str(path), is_trainable=True, config=config)
    except (IndexError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"peft cannot put the adapters in {folder} on this base: {str(error).splitlines()[0]}",
            where=key,
            mend="name adapters of this model",
        ) from error
    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        there = {name for name in file.keys() if not name.endswith(".base_layer.weight")}  # noqa: SIM118
    wanted = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if lost := sorted(there ^ {name for name in wanted if not name.endswith(".base_layer.weight")}):
        raise ArgumentError(
            f"the adapters in {folder} are not those of this base: {len(lost)} weights do not match, such as {lost[0]}",
            where=key,
            mend="name adapters of this model",
        )
    return adapted
