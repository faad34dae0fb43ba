"""Tokens to compare a written model on: the first rows of the run's own data, or what there is in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.data.templates import fix_date
from streamtune.errors import StreamTuneError
from streamtune.programs.export.check import LOGITS_BYTES
from streamtune.programs.export.source import TrainedModel
from streamtune.recipe.schema import Recipe
from streamtune.run.data import make_sources
from streamtune.tasks import task_of
from streamtune.tasks.task import chat_options

ROWS = 4
"""Rows that are compared."""
FIRST_ROWS = 16
"""Rows of each source that are read."""
TOKENS = 256
"""Tokens of each, from its start."""
PROMPT_TOKENS = 64
"""Tokens of the prompt of the greedy text."""


@dataclass(frozen=True)
class CheckRows:
    """Rows to compare on."""

    rows: list[Tensor]
    """``[1, T]`` token ids each."""
    prompt: Tensor
    """``[1, P]`` token ids to continue."""
    origin: str
    """Their source, in words."""
    own: bool
    """True for rows of the run's own data."""


def choose_rows(trained: TrainedModel, model: Any, tokenizer: Any, notify: Callable[[str], None]) -> CheckRows:
    """Return the first rows of the run's data, cut to a few hundred tokens; else the sample prompt or random tokens.

    Args:
        trained: The run.
        model: For the size of its vocabulary and its positions.
        tokenizer: The model's.
        notify: Called with the reason where the data cannot be read.
    """
    vocabulary = base_of(model).get_input_embeddings().weight.shape[0]
    at_most = max(16, min(ROWS * TOKENS, LOGITS_BYTES // (4 * vocabulary)))
    config = base_of(model).config.get_text_config(decoder=True)
    limit = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    found: list[tuple[list[int], str]] = []
    why = "there is no run that names its data"
    if trained.loaded is not None:
        try:
            found = [each for each in _own_rows(trained, tokenizer) if max(each[0]) < vocabulary]
            why = "the run's data has no rows"
        except (StreamTuneError, OSError, ValueError) as error:
            why = f"the run's data cannot be read any more ({_first_line(error)})"
    if found:
        left = at_most
        rows: list[Tensor] = []
        for ids, _ in found:
            if left >= 2 and len(rows) < ROWS:
                rows.append(torch.tensor([ids[: min(limit, left)]]))
                left -= rows[-1].shape[1]
        tokens = sum(row.shape[1] for row in rows)
        named = f"{found[0][1]} and {len(rows) - 1} more" if len(rows) > 1 else found[0][1]
        return CheckRows(rows, _prompt(rows[0], limit), f"{named}: {tokens:,} tokens", own=True)
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(min(vocabulary, max(len(tokenizer), 2)), (1, min(limit, at_most)), generator=generator)
    if recipe is not None and recipe.sample is not None and recipe.sample.prompts:
        ids = _encode(tokenizer, recipe.sample.prompts[0], recipe)[:limit]
        if len(ids) >= 2:
            rows = [torch.tensor([ids]), drawn]
            notify(f"{why}, so the sample prompt and random tokens are compared")
            return CheckRows(rows, _prompt(rows[0], limit), "the sample prompt and random tokens", own=False)
    notify(f"{why}, so random tokens are compared")
    return CheckRows([drawn], _prompt(drawn, limit), f"{drawn.shape[1]:,} random tokens", own=False)


def _prompt(row: Tensor, limit: int) -> Tensor:
    """Return the start of a row as a prompt: half of it, so that what follows is like the data."""
    return row[:, : max(1, min(PROMPT_TOKENS, row.shape[1] // 2, limit - 32 if limit > 48 else 1))]


def _own_rows(trained: TrainedModel, tokenizer: Any) -> list[tuple[list[int], str]]:
    """Return token ids and origin of the first rows, as the run's objective prepares them."""
    assert trained.loaded is not None
    sources = [replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS))
               for source in make_sources(trained.loaded, evaluated=False)]  # fmt: skip
    fix_date(trained.identity.get("date"))
    task = task_of(trained.loaded.recipe)
    rows: Sequence[Any] = task.prepare(sources, tokenizer, lambda text: None, val_size=0.0).train
    return [(ids, row.origin) for row in rows[: 4 * ROWS] if len(ids := _ids(row)) >= 2]


def _ids(row: Any) -> list[int]:
    """Return the tokens of a row; of a prompt with completions, of the prompt and the first of them."""
    if isinstance(row, data.Tree):
        return [*row.prompt, *row.completions[0]]
    return [int(token) for token in row.input_ids]


def _encode(tokenizer: Any, prompt: str, recipe: Recipe) -> list[int]:
    return models.encode_prompt(tokenizer, prompt, chat_options(recipe))


def _first_line(error: Exception) -> str:
    return str(getattr(error, "what", error)).splitlines()[0][:200]
