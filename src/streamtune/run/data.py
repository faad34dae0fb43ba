"""Make the sources of the rows and the tokenizer of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from streamtune import data, models, train
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["make_sources", "make_tokenizer", "make_tokenizer_together"]


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
    *,
    template: bool = True,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer: the checkpoint's, one trained on the rows, or one that is loaded.

    With ``template`` it has the chat template of the recipe, if that gives one.
    """
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
    if template and recipe.chat_template is not None:
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
        tokenizer: PreTrainedTokenizerBase = (
            make_tokenizer(recipe, sources, checkpoint, notify, template=False)
            if text is None
            else models.read_trained_tokenizer(text)
        )
        tokenizer.chat_template = template
        return tokenizer

    return world.together(read)
