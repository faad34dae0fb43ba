"""Start training from existing adapters in peft's format: check that they fit base and tokens, and load them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from streamtune.base.adapters import NAMED_STARTS
from streamtune.base.text import first_error_line
from streamtune.errors import ArgumentError
from streamtune.models.adapters.attach import refuse_rows_of_biased_head
from streamtune.models.adapters.initial_values import LOFTQ_FILE
from streamtune.models.adapters.targets import (
    embedding_and_head_names,
    module_and_parameter_names,
    suppress_pattern_warnings,
)
from streamtune.models.folder import check_adapter_config_file, read_without_mmap, refuse_file_changes
from streamtune.models.tokenizer import read_vocabulary

if TYPE_CHECKING:  # peft imports every quantiser: two seconds
    from peft import PeftModel
    from transformers import PreTrainedTokenizerBase

KEY = "adapter_name_or_path"
WEIGHTS = "adapter_model.safetensors"


def load_initial_adapters(model: PreTrainedModel, folder: str, *, reads_weights: bool = True) -> PeftModel:
    """Return the base model with existing adapters in peft's format, to train them further.

    On ``meta``, or without ``reads_weights``, the adapters have peft's initial values; no weight is read.

    Raises:
        ArgumentError: The folder has no adapters, their kind cannot be trained, or they belong to another base.
    """
    from peft import PeftModel, get_peft_model, get_peft_model_state_dict
    from safetensors import safe_open

    path, config = Path(folder).expanduser(), _read_adapter_config(model, folder)
    trained = _trained_rows(model, config)
    refuse_rows_of_biased_head(
        model, [name for name, rows in trained.items() if rows], where=KEY, fix="train new adapters"
    )
    _check_row_count(model, folder, model.get_input_embeddings().weight.shape[0], {})
    config.inference_mode = False
    try:
        with suppress_pattern_warnings():
            if not reads_weights or next(model.parameters()).device.type == "meta":
                return get_peft_model(model, config)
            with refuse_file_changes(path, where=KEY), read_without_mmap(path):
                adapted_model = PeftModel.from_pretrained(model, str(path), is_trainable=True, config=config)
    except (IndexError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"peft cannot put the adapters in {folder} on this base: {first_error_line(error)}",
            where=KEY,
            fix="use adapters of this model",
        ) from error
    with safe_open(path / WEIGHTS, framework="pt") as file:
        saved = {name for name in file.keys() if not name.endswith(".base_layer.weight")}  # noqa: SIM118
    wanted = get_peft_model_state_dict(adapted_model, save_embedding_layers=False)
    if lost := sorted(saved ^ {name for name in wanted if not name.endswith(".base_layer.weight")}):
        raise ArgumentError(
            f"the adapters in {folder} belong to another base: {len(lost)} weights do not match, such as {lost[0]}",
            where=KEY,
            fix="use adapters of this model",
        )
    return adapted_model


def _read_adapter_config(model: PreTrainedModel, folder: str) -> Any:
    from peft import PeftConfig

    path = Path(folder).expanduser()
    fix = "name a folder with adapters in peft's format"
    for name in ("adapter_config.json", WEIGHTS):
        if not (path / name).is_file():
            raise ArgumentError(f"{folder} has no {name}", where=KEY, fix=fix)
    check_adapter_config_file(path, module_and_parameter_names(model), where=KEY)
    try:
        config: Any = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{path / 'adapter_config.json'} cannot be read: {error}", where=KEY, fix=fix) from error
    if getattr(config, "layer_replication", None):
        raise ArgumentError(
            f"{folder} has adapters with layer replication, which StreamTune cannot load",
            where=KEY,
            fix="merge them with peft, and use the result as the model",
        )
    changed = str(getattr(config, "init_lora_weights", True)).lower()
    if config.is_prompt_learning or changed.startswith(("corda", *NAMED_STARTS)):
        kind = (
            "a learned prompt"
            if config.is_prompt_learning
            else f"adapters initialised by {changed}, which changed the weights of their base"
        )
        raise ArgumentError(f"{folder} contains {kind}", where=KEY, fix="convert them to LoRA with peft")
    if (path / LOFTQ_FILE).is_file():
        raise ArgumentError(
            f"the adapters in {folder} were trained with loftq_iter, on weights that were changed before quantisation",
            where=KEY,
            fix=f"merge them with `streamtune export {folder} OUT`, and use OUT as the model",
        )
    return config


def embedding_rows_of_adapters(model: PreTrainedModel, folder: Path) -> int:
    """Return the number of embedding rows that the adapters in ``folder`` were trained with; 0 if they train none."""
    from safetensors import SafetensorError, safe_open

    try:
        listed = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("trainable_token_indices")
        tables = listed.values() if isinstance(listed, Mapping) else [listed or []]
        count = max((int(token) + 1 for table in tables for token in table), default=0)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            keys = {f"base_model.model.{name}.weight" for name in embedding_and_head_names(model)}
            return max([count, *(file.get_slice(key).get_shape()[0] for key in keys.intersection(file.keys()))])
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        SafetensorError,
    ):  # loading the adapters reports the mistake
        return 0


def check_tokens_of_adapters(
    model: PreTrainedModel,
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    new_tokens: Sequence[int],
    *,
    trust_remote_code: bool = False,
) -> None:
    """Check that adapters to train further belong to the run's tokens. ``model`` has no rows of ``new_tokens`` yet.

    Raises:
        ArgumentError: The adapters do not train the rows of a new token, or a row that they train belongs to another
            token here.
    """
    path, config = Path(folder).expanduser(), _read_adapter_config(model, folder)
    trained, rows = _trained_rows(model, config), model.get_input_embeddings().weight.shape[0]
    before = read_vocabulary(str(path), trust_remote_code=trust_remote_code) if any(path.glob("tokenizer*")) else {}
    ids = (
        set(before.values()) if None in trained.values() else {row for table in trained.values() for row in table or ()}
    )
    before = {token: before[token] for token in sorted(before, key=before.__getitem__) if before[token] in ids}
    now = tokenizer.get_vocab()
    added = [token for token, row in before.items() if row >= rows or row in new_tokens or now.get(token) != row]
    for token in added:
        if (found := now.get(token)) != before[token]:
            raise ArgumentError(
                f"the adapters in {folder} were trained with other tokens: there {token} has id {before[token]:,}, "
                + ("and here the tokenizer lacks it" if found is None else f"and here id {found:,}"),
                where=KEY,
                fix=_tokens_fix(added),
            )
    untrained = [
        row
        for row in new_tokens
        if row >= embedding_rows_of_adapters(model, path)
        or any(table is not None and row not in table for table in trained.values())
    ]
    if untrained:
        tokens = tokenizer.convert_ids_to_tokens(untrained)
        raise ArgumentError(
            f"the recipe adds {', '.join(tokens[:5])}{' ...' if len(tokens) > 5 else ''} to the tokenizer, and the "
            f"adapters in {folder} do not train the rows of new tokens in {' and '.join(trained)}",
            where=KEY,
            fix=(_tokens_fix(added) if added else "add no tokens")
            + f", or merge the adapters, `streamtune export {folder} OUT`, and write model_name_or_path: OUT",
        )
    _check_row_count(model, folder, max(rows, len(tokenizer)) if new_tokens else rows, before)


def _trained_rows(model: PreTrainedModel, config: Any) -> dict[str, set[int] | None]:
    """Return the rows that adapters train in the embedding and the head, by name; None for a whole matrix."""
    names = embedding_and_head_names(model)
    whole = getattr(config, "modules_to_save", None) or ()
    listed: Any = getattr(config, "trainable_token_indices", None) or {}
    tables = listed if isinstance(listed, Mapping) else {names[0]: listed}
    return {
        name: None
        if any(name.endswith(suffix) for suffix in whole)
        else {row for suffix, rows in tables.items() if name.endswith(suffix) for row in rows}
        for name in names
    }


def _check_row_count(model: PreTrainedModel, folder: str, rows: int, tokens: Mapping[str, int]) -> None:
    wanted = embedding_rows_of_adapters(model, Path(folder).expanduser())
    missing = [token for token, row in tokens.items() if row >= rows]
    if wanted > rows:
        raise ArgumentError(
            f"the adapters in {folder} were trained with {wanted:,} rows of the embedding, and this base has {rows:,}",
            where=KEY,
            fix=f"{_tokens_fix(missing)}, and name no other tokenizer"
            if missing
            else f"use adapters of this model, or {_tokens_fix(missing)}",
        )


def _tokens_fix(tokens: Sequence[str]) -> str:
    shown = f": {json.dumps(list(tokens), ensure_ascii=False)}" if 0 < len(tokens) <= 10 else ""
    return f"write added_tokens{shown} (or special_tokens) as the run that trained the adapters"
