"""Errors and rows with the line of the recipe that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from streamtune import data, train
from streamtune.errors import OutOfMemoryError, UserError
from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.loader import LoadedRecipe


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


def make_sources(loaded: LoadedRecipe, *, evaluated: bool = True) -> list[data.Source]:
    """Return the sources of the rows, each with the line of the recipe that names it.

    Args:
        evaluated: Add those of its eval sets, behind the others.
    """
    recipe = loaded.recipe

    def source(spec: DatasetSpec, *key: str | int, evaluates: str | None = None) -> data.Source:
        where = loaded.where(*key, "path")
        return data.Source(
            **spec.model_dump(),
            mix_by=recipe.mix_by,
            evaluates=evaluates,
            seed=recipe.seed,
            streamed=recipe.streaming and evaluates is None,
            where=where,
        )

    sources = [source(spec, "datasets", index) for index, spec in enumerate(recipe.datasets)]
    for name, specs in recipe.eval_datasets.items() if evaluated else ():
        sources += [source(spec, "eval_datasets", name, index, evaluates=name) for index, spec in enumerate(specs)]
    return sources
