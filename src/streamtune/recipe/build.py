"""Make objects of the other packages from a recipe: shared by every command that needs a model or data.

The other packages take explicit arguments and know nothing of recipes; ``build_sft`` and ``build_bench`` join the
objects.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from streamtune import data, models, train
from streamtune.engine import (
    RouterLoss,
    Schedule,
    SequenceParallel,
    StreamHandle,
    balance_coefficient,
    balances_itself,
    stream,
)
from streamtune.errors import ArgumentError, OutOfMemoryError, UnsupportedModelError, UserError
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import EngineSpec, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "blame_recipe",
    "choose_device",
    "make_router_loss",
    "make_schedule",
    "make_sources",
    "make_tokenizer",
    "make_tokenizer_together",
    "prepare_data",
    "quiet_libraries",
    "stream_model",
]


def make_sources(loaded: LoadedRecipe) -> list[data.Source]:
    """Return the sources of the rows, each with the line of the recipe that names it."""
    return [
        data.Source(**spec.model_dump(), where=loaded.where("datasets", index, "path"))
        for index, spec in enumerate(loaded.recipe.datasets)
    ]


def make_tokenizer(
    recipe: Recipe,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the tokenizer: the checkpoint's, one trained on the rows, or one that is loaded."""
    if checkpoint is not None:
        return models.load_tokenizer(str(checkpoint.model_dir), trust_remote_code=recipe.trust_remote_code)
    spec = recipe.tokenizer
    tokenizer: PreTrainedTokenizerBase
    if spec is not None and spec.train is not None:
        tokenizer = models.train_tokenizer(data.iter_texts(sources), vocab_size=spec.train.vocab_size)
        notify(f"trained a byte-level BPE tokenizer with {len(tokenizer):,} entries")
    else:
        name = spec.path if spec is not None else recipe.model_name_or_path
        assert name is not None, "the schema asks for a tokenizer where there is no model to take it from"
        tokenizer = models.load_tokenizer(name, trust_remote_code=recipe.trust_remote_code)
    if recipe.chat_template is not None:
        models.set_chat_template(tokenizer, recipe.chat_template)
    return tokenizer


def make_tokenizer_together(
    world: train.World,
    recipe: Recipe,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the same tokenizer on every rank. Called by all ranks.

    Rank 0 trains it, and sends the vocabulary as JSON; or loads it first, and the others after it, each from the files
    of its own machine. The chat template is rank 0's.
    """
    made: list[PreTrainedTokenizerBase] = []
    is_trained = checkpoint is None and recipe.tokenizer is not None and recipe.tokenizer.train is not None

    def make() -> tuple[str | None, Any]:
        made.append(make_tokenizer(recipe, sources, checkpoint, notify))
        backend: Any = made[0].backend_tokenizer if is_trained else None
        return backend.to_str() if is_trained else None, made[0].chat_template

    text, template = world.main(make)

    def read() -> PreTrainedTokenizerBase:
        if made:
            return made[0]
        plain = recipe.model_copy(update={"chat_template": None})
        tokenizer: PreTrainedTokenizerBase = (
            make_tokenizer(plain, sources, checkpoint, notify) if text is None else models.read_trained_tokenizer(text)
        )
        tokenizer.chat_template = template
        return tokenizer

    return world.together(read)


def prepare_data(
    recipe: Recipe,
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Callable[[str], None],
) -> data.PreparedData:
    """Return the rows as token ids. Messages about them are passed to ``notify`` at the end.

    Earlier they would interrupt the live count of rows.
    """
    said: list[str] = []
    try:
        return data.prepare(
            sources,
            tokenizer,
            max_length=recipe.max_length,
            overlength=recipe.overlength,
            train_on=recipe.train_on,
            val_size=recipe.val_size,
            packing=recipe.packing,
            seed=recipe.seed,
            notify=said.append,
        )
    finally:
        for text in said:
            notify(text)


def make_schedule(spec: EngineSpec) -> Schedule:
    """Return the engine's schedule without a planner: the fields that the recipe gives, and defaults for the others.

    With ``schedule: auto`` the recipe may leave out a field that another one needs. ``device_layers`` needs
    ``offload``: it is then ``disk`` if there is an ``offload_dir``, else ``host``.
    """
    chosen = spec.written()
    if chosen.get("device_layers") and "offload" not in chosen:
        chosen["offload"] = "disk" if "offload_dir" in chosen else "host"
    if chosen.get("offload", "device") != "disk":
        chosen.pop("offload_dir", None)
    return Schedule(**chosen)


def make_router_loss(recipe: Recipe, model: Any) -> RouterLoss | None:
    """Return the loss on the routers that a recipe or its model asks for; None if neither asks for one.

    Raises:
        ArgumentError: ``moe_balance`` is chosen, and there is nothing to balance.
        UnsupportedModelError: The model asks for a balance loss and has no coefficient for it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    balance, z = recipe.router_aux_loss_coef, recipe.router_z_loss_coef
    own = balances_itself(base)
    if balance is None:
        balance = balance_coefficient(base) if own else 0.0
    if balance or z or own:  # 0 switches off what the model's configuration asks for
        return RouterLoss(balance, z, recipe.moe_balance)
    if recipe.moe_balance != "micro":
        raise ArgumentError(
            f"'moe_balance: {recipe.moe_balance}' needs a loss on the routers, and nothing asks for one",
            where="moe_balance",
            mend="set router_aux_loss_coef, such as 0.001, or delete the line",
        )
    return None


def stream_model(
    recipe: Recipe, model: Any, schedule: Schedule | None = None, ranks: SequenceParallel | None = None
) -> StreamHandle:
    """Put the engine into a model, with the router loss that the recipe adds.

    Args:
        recipe: The recipe.
        model: Changed in place.
        schedule: The planner's choice; None is the recipe's schedule, with defaults.
        ranks: Those that share each sequence, if any do.

    Raises:
        UnsupportedModelError: The model cannot be streamed, or has no routers such as the recipe asks to balance.
    """
    schedule, router_loss = schedule or make_schedule(recipe.engine), make_router_loss(recipe, model)
    handle = stream(model, schedule=schedule, sequence_parallel=ranks)
    if router_loss is None:
        return handle
    handle.remove()
    try:
        return stream(model, schedule=schedule, router_loss=router_loss, sequence_parallel=ranks)
    except UnsupportedModelError as error:  # the model streams; it is its routers
        keys = [key for key in ("router_aux_loss_coef", "router_z_loss_coef") if getattr(recipe, key)]
        if keys:
            error.where, error.mend = keys[0], f"delete {' and '.join(keys)}; the model trains without"
        raise


def choose_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ArgumentError: CUDA is asked for and not there.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "no CUDA device is here", where="device", mend="write device: cpu, or see `streamtune env` for what is"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


@contextmanager
def blame_recipe(loaded: LoadedRecipe) -> Iterator[None]:
    """Replace a key that an error names by the file and line of the recipe, and explain a lack of memory."""
    try:
        yield
    except UserError as error:
        key, *rest = error.where.split(".")
        if key in type(loaded.recipe).model_fields:
            error.where = loaded.where(key, *rest)
        raise
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "out of memory before the first step, while the model and what belongs to it were made ready",
            where=loaded.where("model_name_or_path"),
            mend="use a smaller model, dtype: bfloat16, or a device with more memory",
        ) from error


def quiet_libraries(device: torch.device) -> None:
    """Turn off the progress bars and warnings of libraries, which would be drawn over our own line of progress."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\..*")
    # DeepSpeed calls collectives by their old names, and hooks modules whose inputs need no gradient.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    # Saving a model imports deepspeed where it is installed, which then announces how it chose a device.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
