"""The supervised steps before the first rollout: on the rows of the training prompts, with their own answers.

A policy learns from completions that are better than others, so some of them must be good: a model that never solves a
task cannot learn it from rewards. Held-out prompts are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune import data, train
from streamtune.data.readers import Row
from streamtune.data.render import RowRenderer
from streamtune.data.rows import detect_type, normalise
from streamtune.errors import DataError
from streamtune.recipe.grpo import GrpoRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["WarmSteps"]


class WarmSteps:
    """Shuffled demonstrations, ``sft_batch_size`` to a step, in micro-batches. A :class:`streamtune.train.StepStream`.

    Raises:
        DataError: A row has no answer, or is longer than a prompt and its completion may be.
    """

    def __init__(self, recipe: GrpoRecipe, prompts: Sequence[data.Prompt], tokenizer: PreTrainedTokenizerBase) -> None:
        render = RowRenderer(tokenizer, train_on="completion", notify=lambda text: None)
        self.examples = [_demonstration(prompt, render, recipe.max_length) for prompt in prompts]
        self.pad_token_id = tokenizer.pad_token_id
        self.step_size, self.batch_size = recipe.sft_batch_size, recipe.per_device_train_batch_size
        self.sampler = data.ResumableSampler(len(self.examples), seed=recipe.seed)

    def next_step(self) -> Sequence[train.MicroBatch]:
        """Return the micro-batches of the next demonstrations; fewer at the end of an epoch."""
        while not (step := list(islice(self.sampler.batches(self.step_size), 1))):
            pass  # The epoch was over; asking has moved the sampler on to the next one.
        rows = [self.examples[row] for row in step[0]]
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return [self._batch(part) for part in parts]

    def _batch(self, examples: Sequence[data.Example]) -> train.MicroBatch:
        batch = data.collate(examples, pad_token_id=self.pad_token_id)
        return train.MicroBatch(**batch, origins=tuple(example.origin for example in examples))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of another stream over the same prompts."""
        self.sampler.load_state_dict(state)


def _demonstration(prompt: data.Prompt, render: RowRenderer, max_length: int) -> data.Example:
    """Return the row of a prompt as an example of supervised training."""
    row = Row(prompt.origin, {"prompt": prompt.prompt, **prompt.columns})
    if "completion" not in row.columns and "messages" not in row.columns:
        raise DataError(
            "'sft_steps' trains on the rows' own answers, and this row has none",
            where=prompt.origin,
            mend="give the rows a column 'completion', or delete sft_steps",
        )
    row_type = "prompt_completion" if "completion" in row.columns else detect_type(row)
    rendered = render(normalise(row, row_type), row.origin)
    if len(rendered.input_ids) > max_length:
        raise DataError(
            f"the row has {len(rendered.input_ids):,} tokens with its answer, more than max_prompt_length and "
            f"max_completion_length together: {max_length:,}",
            where=prompt.origin,
            mend="raise max_completion_length",
        )
    ids, labels = np.array(rendered.input_ids, dtype=np.int32), np.array(rendered.labels, dtype=np.int32)
    return data.Example(ids, labels, prompt.origin)
