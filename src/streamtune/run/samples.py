"""Sample completions during and after training, and stop tokens of the model.

Completions are generated for the recipe's prompts and for prompts of held-out rows. Training mode and random state are
restored, so training continues bit-identically. If the weights are sharded, all ranks generate together. Otherwise rank
0 generates and the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.base.privacy import redact_values
from streamtune.recipe.settings import RowSettings
from streamtune.tasks import Task
from streamtune.tasks.task import BuiltRun, PreparedRows, chat_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE_TEMPERATURE = 0.3
"""Temperature for the recipe's prompts. Greedy decoding would repeat itself early in training."""

SHOWN_TOKENS = 60
"""Number of tokens at the end of a held-out row's prompt that are written to ``samples.jsonl``."""


def make_samples(
    built: BuiltRun, recipe: RowSettings, step: int, stop: train.StopRequest | None = None
) -> list[dict[str, Any]] | None:
    """Complete the sample prompts; return the lines for ``samples.jsonl``, or None if a stop was requested.

    Called by all ranks. The model and the random state do not change.

    Args:
        built: Model, tokenizer and rows of the run.
        recipe: Recipe with the key ``sample``.
        step: Number of the step, written to each line.
        stop: Stop request, checked before each prompt; None: not checked.
    """
    sample, world, on_all_ranks = recipe.sample, built.world, built.weights_are_sharded
    assert sample is not None
    rows = _longest_answered_rows(built.prepared.validation, sample.held_out) if sample.held_out else []

    def write() -> list[dict[str, Any]] | None:
        model, tokenizer = base_of(built.model), built.tokenizer
        written: list[dict[str, Any]] = []
        prompts: list[str | data.Example] = [*sample.prompts, *rows]
        for prompt in prompts:
            is_stopped = stop is not None and stop.requested
            if world.any_rank(is_stopped) if on_all_ranks else is_stopped:
                return None
            if isinstance(prompt, str):
                text = models.sample_text(
                    model,
                    tokenizer,
                    prompt,
                    models.Decoding(sample.max_new_tokens, SAMPLE_TEMPERATURE, recipe.seed, synced_gpus=on_all_ranks),
                    chat=chat_options(recipe),
                )
                written.append({"prompt": prompt, "completion": text})
            else:
                written.append(_complete_row(built, model, prompt, synced_gpus=on_all_ranks))
        return written

    routers: AbstractContextManager[Any] = (
        built.handle.routers.without_losses() if built.handle.layers else nullcontext()
    )
    with train.preserve_rng(), train.evaluation_mode(built.model), routers:
        samples = world.run_on_all_ranks(write) if on_all_ranks else world.run_on_rank_0(write)
    if samples is None:
        return None
    return [{"step": step, **redact_values(each)} for each in samples]


def _longest_answered_rows(rows: Sequence[data.Example], count: int) -> list[data.Example]:
    answered = [row for row in rows if _answer_span(row)[1] > 0]
    return sorted(answered, key=lambda row: -row.num_tokens)[:count]


def _answer_span(row: data.Example) -> tuple[int, int]:
    """Return start and end of the first span of tokens that are trained on; (0, 0) for a row without prompt or
    answer."""
    labels = np.asarray(row.labels)
    trained = np.flatnonzero(labels != IGNORE_INDEX)
    if len(trained) == 0 or trained[0] == 0:
        return 0, 0
    after = np.flatnonzero(labels[trained[0] :] == IGNORE_INDEX)
    return int(trained[0]), int(trained[0] + after[0]) if len(after) else len(labels)


def _complete_row(built: BuiltRun, model: Any, row: data.Example, *, synced_gpus: bool) -> dict[str, Any]:
    """Return a line of ``samples.jsonl`` with the greedy completion of a row's prompt and the expected answer."""
    tokenizer: Any = built.tokenizer
    begin, end = _answer_span(row)
    ids = [int(token) for token in row.input_ids]
    expected = ids[begin:end]
    ends = models.all_eos_token_ids(model, tokenizer)
    generated = models.generate_greedily(
        model,
        ids[:begin],
        max_new_tokens=len(expected),
        eos=ends,
        pad=tokenizer.pad_token_id,
        synced_gpus=synced_gpus,
        images=_image_inputs(built, row, ids[:begin]),
    )
    end_position = next((position for position, token in enumerate(expected) if token in ends), len(expected))
    expected_ids = expected[: end_position + 1]  # without tokens that a template writes after the end
    shown = tokenizer.decode(ids[max(0, begin - SHOWN_TOKENS) : begin], skip_special_tokens=True)
    return {
        "prompt": f"... {shown}" if begin > SHOWN_TOKENS else shown,
        "completion": tokenizer.decode(generated, skip_special_tokens=True),
        "expected": tokenizer.decode(expected_ids, skip_special_tokens=True),
        "right": generated == expected_ids,
        "prompt_tokens": begin,
        "row": row.origin,
        **({"images": [data.ImageFile.parse(each).path for each in row.images]} if row.images else {}),
    }


def _image_inputs(built: BuiltRun, row: data.Example, prompt: list[int]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for the images in a row's prompt."""
    if not row.images:
        return {}
    processor: data.ImageProcessor = built.batches.image_processor
    images = processor.images_before(list(map(data.ImageFile.parse, row.images)), prompt)
    return processor.model_inputs([images], torch.tensor([prompt])) if images else {}


def add_stop_tokens(
    task: Task[Any], prepared: PreparedRows, tokenizer: PreTrainedTokenizerBase, model: Any
) -> list[int]:
    """Add the end tokens of the training data to the model's generation config; return the added tokens.

    They are saved with checkpoints, the final model and exports.
    """
    return models.add_eos_token_ids(model, task.trained_end_tokens(prepared, tokenizer))


def describe_stop_tokens(added: list[int], tokenizer: PreTrainedTokenizerBase, model: Any) -> str:
    """Return one line that names the added stop tokens and the model's earlier stop tokens."""
    earlier = [token for token in models.eos_token_ids(base_of(model).generation_config) if token not in added]
    rest = f"in addition to {_token_names(earlier, tokenizer)}" if earlier else "the model had no stop token"
    return f"{_token_names(added, tokenizer)}, which end the turns that are trained on; {rest} (generation_config.json)"


def _token_names(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)
