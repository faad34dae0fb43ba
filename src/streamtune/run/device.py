"""Make objects of the other packages from a recipe: shared by every command that needs a model or data.

The other packages take explicit arguments and know nothing of recipes; ``build_sft`` and ``build_bench`` join the
objects.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from streamtune import train
from streamtune.errors import ArgumentError, OutOfMemoryError, UserError
from streamtune.recipe.loader import LoadedRecipe

if TYPE_CHECKING:
    pass

__all__ = ["blame_recipe", "choose_device", "quiet_libraries"]


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
