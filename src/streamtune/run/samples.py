"""Complete the sample prompts of a recipe and of held-out rows, while a run trains and at its end; and choose the
tokens that generation stops at.

While it trains the model stays streamed: a call without gradients honours its cache. Mode and random state are put
back, so the steps that follow are, bit for bit, those of a run without samples. Where ranks share the weights all of
them compute each token together and draw the same. Otherwise rank 0 writes alone, and the others wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.base.privacy import redact_values
from streamtune.recipe.settings import RowSettings
from streamtune.tasks import Task
from streamtune.tasks.task import Built, PreparedRows, chat_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_TEMPERATURE = 0.3
"""Of the recipe's prompts. The likeliest token each time would go in circles where little is learnt yet."""

SHOWN_TOKENS = 60
"""Tokens at the end of a held-out row's prompt that are shown and kept; the row may have thousands."""


def write_samples(
    built: Built, recipe: RowSettings, step: int, stop: train.StopRequest | None = None
) -> list[dict[str, Any]] | None:
    """Return the lines of ``samples.jsonl`` for a step; None where ``stop`` was requested. Called by all ranks.

    The model and the random state are left as they are. ``stop`` is looked at before each prompt.
    """
    sample, world, together = recipe.sample, built.world, built.shares_weights
    assert sample is not None
    rows = _longest(built.prepared.validation, sample.held_out) if sample.held_out else []

    def write() -> list[dict[str, Any]] | None:
        model, tokenizer = base_of(built.model), built.tokenizer
        written: list[dict[str, Any]] = []
        asks: list[str | data.Example] = [*sample.prompts, *rows]
        for asked in asks:
            stopped = stop is not None and stop.requested
            if world.any(stopped) if together else stopped:
                return None
            if isinstance(asked, str):
                text = models.sample_text(
                    model,
                    tokenizer,
                    asked,
                    models.Decoding(sample.max_new_tokens, SAMPLE_TEMPERATURE, recipe.seed, in_step=together),
                    chat=chat_options(recipe),
                )
                written.append({"prompt": asked, "completion": text})
            else:
                written.append(_answer(model, tokenizer, asked, in_step=together))
        return written

    routers: AbstractContextManager[Any] = built.handle.routers.silenced() if built.handle.layers else nullcontext()
    with train.preserve_rng(), train.evaluating(built.model), routers:
        found = world.together(write) if together else world.main(write)
    if found is None:
        return None
    return [{"step": step, **redact_values(each)} for each in found]


def _longest(rows: Sequence[data.Example], count: int) -> list[data.Example]:
    answered = [row for row in rows if _answer_span(row)[1] > 0]
    return sorted(answered, key=lambda row: -row.num_tokens)[:count]


def _answer_span(row: data.Example) -> tuple[int, int]:
    """Return the bounds of the first run of trained tokens; 0, 0 for a row without a prompt or an answer."""
    labels = np.asarray(row.labels)
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    if len(trained) == 0 or trained[0] == 0:
        return 0, 0
    after = np.flatnonzero(labels[trained[0] :] == IGNORE_INDEX)
    return int(trained[0]), int(trained[0] + after[0]) if len(after) else len(labels)


def _answer(model: Any, tokenizer: Any, row: data.Example, *, in_step: bool) -> dict[str, Any]:
    """Complete the prompt of a row greedily, and compare with the row's answer."""
    begin, end = _answer_span(row)
    ids = [int(token) for token in row.input_ids]
    wanted = ids[begin:end]
    ends = models.end_tokens(model, tokenizer)
    got = models.likeliest_tokens(
        model, ids[:begin], max_new_tokens=len(wanted), ends=ends, pad=tokenizer.pad_token_id, in_step=in_step
    )
    stop = next((place for place, token in enumerate(wanted) if token in ends), len(wanted))
    compared = wanted[: stop + 1]  # without what a template writes after the end
    shown = tokenizer.decode(ids[max(0, begin - SHOWN_TOKENS) : begin], skip_special_tokens=True)
    return {
        "prompt": f"... {shown}" if begin > SHOWN_TOKENS else shown,
        "completion": tokenizer.decode(got, skip_special_tokens=True),
        "expected": tokenizer.decode(compared, skip_special_tokens=True),
        "right": got == compared,
        "prompt_tokens": begin,
        "row": row.origin,
    }


def end_as_trained(
    task: Task[Any], prepared: PreparedRows, tokenizer: PreTrainedTokenizerBase, model: Any
) -> list[int]:
    """Add the tokens that end trained turns to those at which generation stops; return the tokens added.

    They are in the generation config from then on: in checkpoints, in the final model and in its exports.
    """
    return models.add_ends(model, task.trained_ends(prepared, tokenizer))


def describe_ends(added: list[int], tokenizer: PreTrainedTokenizerBase, model: Any) -> str:
    own = [token for token in models.ends_of(base_of(model).generation_config) if token not in added]
    before = f"besides {_names(own, tokenizer)}" if own else "the model named none"
    return f"{_names(added, tokenizer)}, as the trained turns do; {before} (generation_config.json)"


def _names(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)
