"""Find trained models by run, checkpoint or folder, and load them as in training.

    RUN                       run.json, recipe.yaml, final/, checkpoints/
    RUN/checkpoints/step-100  manifest.json, model/
    a model or adapters       config.json or adapter_config.json; the run, if any, is a folder above

Runs on several devices also save whole models in Hugging Face format. Adapters are loaded onto the base model of
their run, with the quantisation of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streamtune import models, train
from streamtune.base.text import first_error_line
from streamtune.errors import ArgumentError, RecipeError, StreamTuneError, did_you_mean
from streamtune.recipe import LoadedRecipe, load_recipe
from streamtune.train.checkpoint import (
    Checkpoint,
    checkpoint_step,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
)
from streamtune.train.records import read_records_backwards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Notify = Callable[[str], None]
USE_CHECKPOINT = "use a checkpoint of the run: --checkpoint"
NAME_BASE = "give the model they were trained on: --base PATH"


@dataclass(frozen=True)
class TrainedModel:
    """The folder of a trained model, with the records of its run."""

    given: str
    """Path or name that the user gave."""
    folder: str
    """Folder in Hugging Face format, or model name on the hub."""
    adapters: bool
    """True if the folder has adapters without their base model."""
    run: train.RunDirectory | None = None
    loaded: LoadedRecipe | None = None
    """Recipe of the run; None without a run or if the recipe is unreadable."""
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``run.json``: settings, fingerprints and versions of the run."""
    step: int | None = None
    """Number of optimizer steps before the checkpoint; None for the final model."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Recipe keys that change the trained weights, from ``run.json``; empty without a run."""
        found: Mapping[str, Any] = self.identity.get("recipe", {})
        return found

    @property
    def quantization(self) -> str | None:
        """Quantisation of the frozen base model during training; None without quantisation."""
        return self.settings.get("quantization") if self.adapters else None

    @property
    def trusts_code(self) -> bool:
        """True if the run allowed the model's own Python code (``trust_remote_code``)."""
        return self.loaded is not None and self.loaded.recipe.trust_remote_code

    @property
    def base(self) -> str | None:
        """Name of the adapters' base model; None if it was built from a configuration, or is unknown."""
        if not self.adapters:
            return None
        if self.settings.get("model") is not None:
            return None
        named = self.loaded.recipe.model_name_or_path if self.loaded is not None else None
        named = named or self.settings.get("model_name_or_path")
        own = _recorded_base(Path(self.folder))
        if named is None or (own is not None and Path(own).is_absolute() and not models.is_local_folder(named)):
            return own  # the run's name may be relative to the directory that the run was started in
        return named

    def describe(self) -> str:
        """Return the folder; for a checkpoint, with its step."""
        return self.folder if self.step is None else f"{self.folder}, after step {self.step:,}"


def find_trained(model_name_or_path: str, *, checkpoint: str | None = None, hub: bool = False,
                 notify: Notify = lambda text: None) -> TrainedModel:  # fmt: skip
    """Find a trained model without loading it; the files of a checkpoint are verified by their hashes.

    Args:
        model_name_or_path: Run, checkpoint, folder with a model or adapters, or name on the hub.
        checkpoint: Name (``step-000100``) or step of a checkpoint of the run; None means the final model.
        hub: True to accept names on the hub.
        notify: Called with each note to show to the user.

    Raises:
        ArgumentError: The folder does not exist, or has no model.
        CheckpointError: The checkpoint is damaged.
    """
    path = (
        Path(model_name_or_path).expanduser()
        if models.is_local_folder(model_name_or_path)
        else Path(model_name_or_path)
    )
    if not models.is_local_folder(model_name_or_path):
        if hub and not _is_local_name(model_name_or_path):
            return _refuse_checkpoint(TrainedModel(model_name_or_path, model_name_or_path, adapters=False), checkpoint)
        raise _missing_folder_error(path)
    if (path / "run.json").is_file():
        return _find_in_run(model_name_or_path, train.RunDirectory(path), checkpoint, notify)
    if (path / "manifest.json").is_file():
        found = _find_checkpoint(model_name_or_path, open_checkpoint(path), _find_run_above(path, 2), notify)
        return _refuse_checkpoint(found, checkpoint)
    if not ((path / "config.json").is_file() or (path / "adapter_config.json").is_file()):
        raise ArgumentError(
            f"{path} is neither a run nor a model: it has no run.json, config.json or adapter_config.json",
            where="RUN",
            fix="give a run (runs/NAME), one of its checkpoints, or a folder with a model",
        )
    above = _find_run_above(path, 3) if path.name == "model" else _find_run_above(path, 1)
    return _refuse_checkpoint(_make_trained_model(model_name_or_path, path, above, notify), checkpoint)


def _find_in_run(
    model_name_or_path: str, run: train.RunDirectory, checkpoint: str | None, notify: Notify
) -> TrainedModel:
    """Return the requested checkpoint of a run; if None, the final model or else the newest checkpoint."""
    if checkpoint is not None:
        name = f"step-{int(checkpoint):06d}" if checkpoint.isdecimal() else Path(checkpoint).name
        path = run.checkpoints / name
        if not path.is_dir():
            names = [each.name for each in list_checkpoints(run.checkpoints)]
            raise ArgumentError(
                f"{run.path} has no checkpoint {name}",
                where="--checkpoint",
                fix=did_you_mean(name, names)
                or (f"checkpoints: {', '.join(names)}" if names else "the run has no checkpoints"),
            )
        return _find_checkpoint(model_name_or_path, open_checkpoint(path), run, notify)
    if run.final.is_dir():
        _notify_newer_checkpoint(run, notify)
        return _make_trained_model(model_name_or_path, run.final, run, notify)
    newest = newest_checkpoint(run.checkpoints, notify)
    if newest is None:
        raise ArgumentError(
            f"{run.path} has no model yet: neither final/ nor a checkpoint",
            where="RUN",
            fix="train it first; save_steps saves checkpoints during training",
        )
    notify(f"the run has not finished: its newest checkpoint is used, after step {newest.step:,}")
    return _find_checkpoint(model_name_or_path, newest, run, notify)


def _find_checkpoint(
    model_name_or_path: str, checkpoint: Checkpoint, run: train.RunDirectory | None, notify: Notify
) -> TrainedModel:
    return _make_trained_model(
        model_name_or_path,
        checkpoint.model_dir,
        run,
        notify,
        step=checkpoint.step,
        identity=checkpoint.state.get("identity"),
    )


def _notify_newer_checkpoint(run: train.RunDirectory, notify: Notify) -> None:
    with suppress(StreamTuneError):  # without readable events there is no note
        ends = (event.get("step") for event in read_records_backwards(run.events) if event.get("event") == "finish")
        done = next(ends, None)
        later = [
            path for path in list_checkpoints(run.checkpoints) if isinstance(done, int) and checkpoint_step(path) > done
        ]
        if later:
            notify(
                f"{run.final} is the model after step {done:,}, but the run has a newer checkpoint; to use it, add "
                f"--checkpoint {checkpoint_step(later[-1])}"
            )


def _make_trained_model(
    model_name_or_path: str,
    folder: Path,
    run: train.RunDirectory | None,
    notify: Notify,
    *,
    step: int | None = None,
    identity: Any = None,
) -> TrainedModel:
    """Return the model in ``folder`` with its run's recipe and ``run.json``; notify if the recipe is unreadable."""
    loaded: LoadedRecipe | None = None
    if run is not None:
        try:
            now = run.read_identity()
        except StreamTuneError as error:
            raise ArgumentError(
                error.what,
                where="RUN",
                fix=f"copy {folder} out of the run and export the copy; give the base model with --base",
            ) from error
        identity = identity if isinstance(identity, dict) and identity else now
        if run.recipe.is_file():
            try:
                loaded = _with_checkpoint_settings(load_recipe(run.recipe), identity, now)
            except StreamTuneError as error:  # written by a version with other keys
                notify(f"this version cannot read {run.recipe} ({error.what}); only run.json is used")
    adapters = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    identity = identity if isinstance(identity, dict) else {}
    return TrainedModel(model_name_or_path, str(folder), adapters, run, loaded, identity, step)


def _with_checkpoint_settings(loaded: LoadedRecipe, checkpoint_identity: Any, run_identity: Any) -> LoadedRecipe:
    """Return the run's recipe with the settings of the checkpoint, which a resume may have changed."""
    settings, latest = ((each or {}).get("recipe", {}) for each in (checkpoint_identity, run_identity))
    changed = {key: value for key, value in settings.items() if key in latest and latest[key] != value}
    if not changed:
        return loaded
    try:
        recipe = type(loaded.recipe).model_validate({**loaded.recipe.model_dump(), **changed})
    except ValueError as error:
        raise RecipeError(f"the checkpoint has invalid settings: {error}", where=str(loaded.path)) from error
    return replace(loaded, recipe=recipe)


def _find_run_above(path: Path, levels: int) -> train.RunDirectory | None:
    """Return the run that is ``levels`` folders above ``path``; None if that folder is not a run."""
    above = path.resolve()
    for _ in range(levels):
        above = above.parent
    return train.RunDirectory(above) if (above / "run.json").is_file() else None


def _refuse_checkpoint(trained: TrainedModel, checkpoint: str | None) -> TrainedModel:
    if checkpoint is not None:
        raise ArgumentError(
            f"--checkpoint {checkpoint} needs a run, but {trained.given} is not a run",
            where="--checkpoint",
            fix="give the folder of the run",
        )
    return trained


def _is_local_name(model_name_or_path: str) -> bool:
    """Return True if a name is invalid on the hub, or its first part is a local folder."""
    if model_name_or_path.startswith((".", "/", "~")) or model_name_or_path.count("/") > 1:
        return True
    return "/" in model_name_or_path and Path(model_name_or_path).parent.is_dir()


def _missing_folder_error(path: Path) -> ArgumentError:
    siblings: list[str] = []
    with suppress(OSError, ValueError):  # not a file name
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    return ArgumentError(
        f"there is no folder {path}",
        where="RUN",
        fix=did_you_mean(path.name, siblings) or "give a run, such as runs/NAME, or a folder with a model",
    )


def _recorded_base(folder: Path) -> str | None:
    try:
        named = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return named if isinstance(named, str) and named else None


def load_trained(
    trained: TrainedModel,
    *,
    device: str = "cpu",
    base: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    trust_remote_code: bool = False,
    notify: Notify = lambda text: None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a model as in training, in evaluation mode, and its tokenizer; return both.

    Args:
        base: Base model of the adapters; None means the base model that the run records.
        dtype: Dtype of the weights. None: the dtype of the stored weights, or of the adapters' base model in training.
        quantization: Quantisation of the frozen base model: ``nf4``, ``int8`` or None.
        trust_remote_code: True to allow the model's own Python code.
        notify: Called with each note to show to the user.

    Raises:
        ArgumentError: The model cannot be loaded, or its base model does not exist.
    """
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    tokenizer = load_trained_tokenizer(trained, base, trust_remote_code)
    if not trained.adapters:
        model: Any = models.load_model(
            trained.folder,
            models.ModelOptions(dtype or "auto"),
            device=device,
            trust_remote_code=trust_remote_code,
        )
        return model.requires_grad_(False).eval(), tokenizer
    if quantization is not None:
        models.choose_quantization(quantization, torch.device(device))  # raises an error if its package is missing
    change = models.SavedLoftqQuantizer.load(Path(trained.folder)) if quantization is not None else None
    name = resolve_base(trained, base, notify)
    if is_trained_base(trained, base) is False:
        notify(f"{base} is not the base model that these adapters were trained on: the result is a different model")
    wanted = dtype or (recipe.dtype if recipe is not None else str(trained.settings.get("dtype") or "auto"))
    wanted = "auto" if wanted == "mixed" else wanted  # the base of adapters is as in its checkpoint
    options = models.ModelOptions(wanted, quantization, models.RopeChange.from_settings(trained.settings), change)
    if name is None:
        made: Any = _init_base_again(trained, tokenizer, options, device)
    else:
        made = models.load_model(
            name,
            options,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=recipe is not None and recipe.allow_pickle,
        )
        rows = made.get_input_embeddings().weight.shape[0]
        wanted_rows = models.embedding_rows_of_adapters(made, Path(trained.folder))
        if wanted_rows > rows:  # rows of new tokens, whose values come with the adapters
            models.add_embedding_rows(made, wanted_rows, range(rows, wanted_rows))
    models.add_saved_eos_tokens(made, Path(trained.folder))
    adapted = _load_adapters(made, Path(trained.folder))
    return adapted.requires_grad_(False).eval(), tokenizer


def _load_adapters(base: Any, folder: Path) -> Any:
    """Load the adapters in a folder onto their base model and return the result.

    Raises:
        ArgumentError: A file is damaged, or the adapters do not fit the base or are of an unsupported kind.
    """
    from peft import PeftConfig
    from safetensors import SafetensorError

    if not (folder / "adapter_model.safetensors").is_file():
        raise ArgumentError(f"{folder} has no adapter_model.safetensors", where="RUN", fix=USE_CHECKPOINT)
    models.check_adapter_config_file(folder, [], where="RUN", fix=USE_CHECKPOINT)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{folder / 'adapter_config.json'} cannot be read: {first_error_line(error)}",
            where="RUN",
            fix=USE_CHECKPOINT,
        ) from error
    if config.is_prompt_learning or getattr(config, "layer_replication", None):
        kind = "prompt tuning" if config.is_prompt_learning else "layer replication"
        raise ArgumentError(
            f"{folder} has adapters with {kind}, which StreamTune cannot load", where="RUN", fix="load them with peft"
        )
    try:
        adapted = models.load_peft_adapters(base, folder)
        _check_adapter_weights_loaded(adapted, folder)
    except SafetensorError as error:
        raise ArgumentError(
            f"{folder / 'adapter_model.safetensors'} is damaged: {error}",
            where="RUN",
            fix=USE_CHECKPOINT,
        ) from error
    except (IndexError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"peft cannot load the adapters in {folder} onto this base: {first_error_line(error)}",
            where="RUN",
            fix=NAME_BASE,
        ) from error
    return adapted


def resolve_base(trained: TrainedModel, base: str | None = None, notify: Notify = lambda text: None) -> str | None:
    """Return the adapters' base model; None if it was built from a configuration, or there are no adapters.

    Args:
        base: Base model given by the user; None means the base model that the run records.
        notify: Called with a note if the base is itself a folder of adapters.

    Raises:
        ArgumentError: The base model does not exist, or its files have changed since the run.
    """
    name = base or trained.base
    if name is None or not trained.adapters:
        return None
    _check_base(trained, name, is_named_by_user=base is not None)
    return _resolve_adapter_base(trained, name, notify)


def is_trained_base(trained: TrainedModel, base: str | None) -> bool | None:
    """Return True if the adapters were trained on the files of ``base``, False if on other files, None if unknown.

    Args:
        base: Name or folder that the user gave; None means the base model that the run records.
    """
    if base is None:
        return True
    before = trained.identity.get("files", {}).get("base")
    if before is None or not models.is_local_folder(base):
        made = trained.settings.get("model") is not None
        return False if made else (True if base == trained.base else None)
    return bool(models.fingerprint_model(base, code=trained.trusts_code) == before)


def load_trained_tokenizer(
    trained: TrainedModel, base: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; for adapters saved without one, the base model's tokenizer.

    Raises:
        ArgumentError: There is no tokenizer.
    """
    name = trained.folder
    if trained.adapters and not any(Path(name).glob("tokenizer*")):
        name = base or trained.base or name
    return models.load_tokenizer(name, trust_remote_code=trust_remote_code)


def _init_base_again(trained: TrainedModel, tokenizer: Any, options: models.ModelOptions, device: str) -> Any:
    """Initialise the adapters' base model again, with the configuration and the seed of their run.

    Raises:
        ArgumentError: The run records neither a configuration nor a base model.
    """
    made = trained.settings.get("model")
    if not isinstance(made, dict):
        raise ArgumentError(
            f"the base model of the adapters in {trained.folder} is unknown",
            where="RUN",
            fix="give it with --base PATH",
        )
    return models.init_model(
        made["init"],
        options,
        vocab_size=len(tokenizer),
        token_ids=models.new_model_token_ids(tokenizer, made["init"]),
        device=device,
        seed=int(trained.settings["seed"]),
    )


def _check_base(trained: TrainedModel, base_name: str, *, is_named_by_user: bool) -> None:
    """Raise an ArgumentError if the base model does not exist, or its files have changed since training."""
    if _is_local_name(base_name) and not models.is_local_folder(base_name):
        raise ArgumentError(
            f"the base of the adapters in {trained.folder} is '{base_name}', but this folder does not exist",
            where="--base" if is_named_by_user else "RUN",
            fix="give another --base" if is_named_by_user else "give its current path with --base PATH",
        )
    before = trained.identity.get("files", {}).get("base")
    if is_named_by_user or before is None or not models.is_local_folder(base_name):
        return
    if models.fingerprint_model(base_name, code=trained.trusts_code) != before:
        raise ArgumentError(
            f"the files of {base_name} have changed since the adapters in {trained.folder} were trained",
            where="RUN",
            fix="give an unchanged copy with --base PATH; --base with the same folder skips this check",
        )


def _resolve_adapter_base(trained: TrainedModel, name: str, notify: Notify) -> str:
    """Return the base model to load; if ``name`` is itself a folder of adapters, the base model of that folder.

    Raises:
        ArgumentError: Another program trained adapters on top of adapters.
    """
    folder = Path(name).expanduser()
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return name
    below = models.local_adapter_base(name)
    if trained.run is None or below is None:
        raise ArgumentError(
            f"the base of the adapters in {trained.folder} is itself a folder of adapters: {name}",
            where="--base",
            fix=f"merge them first with `streamtune export {name} OUT`, then give --base OUT",
        )
    # Before such runs were refused, new adapters replaced the adapters in the folder, because both had the same name.
    notify(
        f"this run trained its adapters on {below} without the adapters in {name}: they are loaded onto {below} alone"
    )
    return below


def _check_adapter_weights_loaded(model: Any, folder: Path) -> None:
    """Raise an ArgumentError if the adapter weights in the file and in the model have different names."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    # peft also writes the base's own weights of embeddings and heads with adapters
    stored = {name for name in stored if not name.endswith(".base_layer.weight")}
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    if lost := sorted(stored ^ {name for name in wanted if not name.endswith(".base_layer.weight")}):
        raise ArgumentError(
            f"the adapters in {folder} do not fit this base: {len(lost)} weights do not match, such as {lost[0]}",
            where="RUN",
            fix=NAME_BASE,
        )
