"""Tokens that a recipe adds, their rows in the embedding and the head, and the tokens at which generation ends.

A new row is the mean of the rows of the tokens that were there before: of a size that the layers of the model are
used to, and the same on every rank and in every run. Rows of new tokens are trained with all others, or alone beside
adapters.

The generation config of a model is never changed in place: another thread may be writing a checkpoint, which has the
model's own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerBase

from streamtune.base.adapters import base_of
from streamtune.errors import ArgumentError

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def add_tokens(tokenizer: PreTrainedTokenizerBase, special: Mapping[str, Any], added: Sequence[str]) -> None:
    """Give a tokenizer its special tokens, and tokens of the user's own; those that it has keep their number.

    Args:
        tokenizer: Changed in place. Adding the same tokens twice changes nothing.
        special: The tokens for ``bos_token`` and the like, and a list of ``additional_special_tokens``.
        added: Tokens that are ordinary text when decoded, such as ``<think>``.
    """
    for name in SPECIAL:
        if (text := special.get(name)) is not None:
            tokenizer.add_special_tokens({name: AddedToken(text, special=True, normalized=False)})
    more = [AddedToken(text, special=True, normalized=False) for text in special.get("additional_special_tokens") or ()]
    tokenizer.add_tokens(more, special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added if text not in _named(special)])


def new_tokens(
    known: Collection[str], tokenizer: PreTrainedTokenizerBase, special: Mapping[str, Any], added: Sequence[str]
) -> list[int]:
    """Return the numbers of the tokens of a recipe that its tokenizer did not have before, ascending.

    Args:
        known: Tokens that it had.
        tokenizer: With those of the recipe.
        special: See :func:`add_tokens`.
        added: See there.
    """
    vocabulary = tokenizer.get_vocab()
    named = dict.fromkeys([*_named(special), *added])
    return sorted(vocabulary[text] for text in named if text not in known and text in vocabulary)


def _named(special: Mapping[str, Any]) -> list[str]:
    single = [special[name] for name in SPECIAL if special.get(name) is not None]
    return [*single, *(special.get("additional_special_tokens") or ())]


@torch.no_grad()
def add_rows(model: Any, size: int, new: Collection[int]) -> None:
    """Make the embedding and the head as large as the vocabulary, and set the rows of new tokens to the mean row.

    Args:
        model: With its weights; not quantised, without adapters. Spare rows of its tables are used before new ones.
        size: Tokens of the tokenizer.
        new: Numbers of the tokens that were added, which are the last ones.

    Raises:
        ArgumentError: The model cannot have other rows.
    """
    if size > model.get_input_embeddings().weight.shape[0]:
        try:
            with torch.random.fork_rng():
                model.resize_token_embeddings(size, mean_resizing=False)
        except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{type(model).__name__} cannot have rows for more tokens: {error}",
                where="added_tokens",
                mend="use tokens that its tokenizer has",
            ) from error
    rows = torch.tensor(sorted(new), device=model.device)
    first = int(rows[0])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables: dict[int, Any] = {
        id(module.weight): module.weight for module in (embedding, head) if isinstance(module, nn.Module)
    }
    for table in tables.values():
        table[rows] = table[:first].float().mean(dim=0).to(table.dtype)
    bias = getattr(head, "bias", None)
    if isinstance(bias, torch.Tensor):
        bias[rows] = bias[:first].float().mean().to(bias.dtype)


def use_special_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, special: Mapping[str, Any]) -> None:
    """Write the numbers of changed special tokens into the configurations of a model, where generation reads them.

    Args:
        model: Its configurations are changed in place.
        tokenizer: With the special tokens.
        special: The tokens that the recipe names. A new end of text is added to those that generation stops at.
    """
    text = model.config.get_text_config(decoder=True)
    generation = getattr(model, "generation_config", None)
    for name in ("bos_token", "eos_token", "pad_token"):
        if special.get(name) is None:
            continue
        key, number = f"{name}_id", getattr(tokenizer, f"{name}_id")
        for config in (model.config, text):
            setattr(config, key, number)
        if generation is None:
            continue
        ends = getattr(generation, key, None)
        if name == "eos_token" and ends is not None and ends != number:
            others = [each for each in (ends if isinstance(ends, list) else [ends]) if each != number]
            setattr(generation, key, [number, *others])
        else:
            setattr(generation, key, number)


def ends_of(settings: GenerationConfig | None) -> list[int]:
    """Return the tokens that a generation config ends at; none without one."""
    found: Any = getattr(settings, "eos_token_id", None)
    return [int(token) for token in (found if isinstance(found, list | tuple) else [found]) if token is not None]


def end_tokens(model: nn.Module, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end token, and the tokens that the model's generation config ends at."""
    configured = ends_of(getattr(base_of(model), "generation_config", None))
    return sorted({token for token in (*configured, tokenizer.eos_token_id) if token is not None})


def add_ends(model: nn.Module, tokens: Sequence[int]) -> list[int]:
    """Let a model's generation end at more tokens; return those at which it did not end before.

    The model gets a changed copy of its generation config: another thread may be writing the old one.
    """
    base: Any = base_of(model)
    known = ends_of(getattr(base, "generation_config", None))
    new = [token for token in tokens if token not in known]
    if new:
        settings = copy.deepcopy(base.generation_config) if base.generation_config is not None else GenerationConfig()
        settings.eos_token_id = [*known, *new] if len(known) + len(new) > 1 else new[0]
        settings._from_model_config = False  # else transformers may make it again from the model's configuration
        base.generation_config = settings
    return new


def with_generation(model: Any, settings: GenerationConfig) -> Any:
    """Return a model that generates by ``settings`` alone, and is ``model`` in all else.

    Both are the same modules, weights and hooks; ``model`` keeps its own generation config. Settings that are handed to
    ``generate`` would not do: what they leave open is filled from the model's own.
    """
    seen = object.__new__(type(model))
    vars(seen).update(vars(model))
    vars(seen)["generation_config"] = settings
    vars(seen).pop("generate", None)  # a streamed model has one of its own, which is bound to ``model``
    return seen
