"""The tokens that generation stops at, after what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamtune import models
from streamtune.base.adapters import base_of
from streamtune.tasks import Task
from streamtune.tasks.task import PreparedRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_as_trained(
    task: Task[Any], prepared: PreparedRows, tokenizer: PreTrainedTokenizerBase, model: Any
) -> list[int]:
    """Let the model's generation end at the tokens that end trained turns; return those at which it did not before.

    They are in its generation config from then on: in checkpoints, in the final model and in exports of it.
    """
    return models.add_ends(model, task.trained_ends(prepared, tokenizer))


def describe_ends(added: list[int], tokenizer: PreTrainedTokenizerBase, model: Any) -> str:
    """Return in one line at which tokens generation stops, and which of them the model did not stop at before."""
    own = [token for token in models.ends_of(base_of(model).generation_config) if token not in added]
    before = f"besides {_names(own, tokenizer)}" if own else "the model named none"
    return f"{_names(added, tokenizer)}, as the trained turns do; {before} (generation_config.json)"


def _names(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in tokens)
