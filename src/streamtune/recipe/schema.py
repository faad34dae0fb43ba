"""The recipe of supervised fine-tuning: the keys of all topics, and the order in which their rules are asked.

A recipe is flat where the Hugging Face Trainer is flat and uses its names. The text under each field in ``keys/`` is
the only place a key is described: the JSON schema, the editor's hover text and the documentation are made from it.

The types are strict (``"1e-5"`` is not a number, ``yes`` is not a boolean), frozen, and refuse unknown keys.
Nothing here reads a file or touches a device; ``streamtune.recipe.loader`` adds the file and the line to an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from streamtune.recipe.keys import adapters, engine, loss
from streamtune.recipe.keys.adapters import ADAPTER_RULES, QUANTIZATION_RULES, AdapterKeys
from streamtune.recipe.keys.batching import BATCH_RULES, SELECTION_RULES, BatchKeys, StepKeys
from streamtune.recipe.keys.datasets import DATASET_RULES, STREAMING_RULES, CacheKeys, DataKeys
from streamtune.recipe.keys.devices import DEVICE_RULES, DeviceKeys
from streamtune.recipe.keys.engine import ENGINE_RULES, EngineKeys
from streamtune.recipe.keys.learning_rate import LEARNING_RATE_RULES, WARMUP_RULES, LearningRateKeys
from streamtune.recipe.keys.loss import LOSS_RULES, LossKeys, RouterKeys
from streamtune.recipe.keys.model_and_tokenizer import MODEL_RULES, TOKEN_RULES, ModelKeys
from streamtune.recipe.keys.optimizer import OPTIMIZER_RULES, STATE_RULES, OptimizerKeys
from streamtune.recipe.keys.preset import PRESET_RULES, ObjectiveKeys
from streamtune.recipe.keys.run import EARLY_STOPPING_RULES, EVALUATION_RULES, RunKeys
from streamtune.recipe.keys.trained_tokens import (
    CHAT_RULES,
    LENGTH_RULES,
    TEMPLATE_RULES,
    TURN_RULES,
    TrainedTokenKeys,
)
from streamtune.recipe.rules import Custom, Refusal, Rules, refusals_of
from streamtune.recipe.settings import RowSettings, TokenizerSettings, TrainingSettings


def _of_shared_weights(recipe: Any) -> Iterator[Refusal]:
    if recipe.shares_weights:
        yield from recipe.needs_whole_weights()


class Recipe(
    TrainingSettings,
    RowSettings,
    TokenizerSettings,
    RunKeys,
    OptimizerKeys,
    LearningRateKeys,
    StepKeys,
    RouterKeys,
    DeviceKeys,
    EngineKeys,
    LossKeys,
    BatchKeys,
    TrainedTokenKeys,
    CacheKeys,
    DataKeys,
    AdapterKeys,
    ModelKeys,
    ObjectiveKeys,
):  # the keys of the last one come first
    """Everything a supervised fine-tuning run depends on; what other objectives have in common with it."""

    rules: ClassVar[Rules] = (
        *MODEL_RULES,
        *TEMPLATE_RULES,
        *TOKEN_RULES,
        *CHAT_RULES,
        *LENGTH_RULES,
        *DATASET_RULES,
        *BATCH_RULES,
        *SELECTION_RULES,
        *TURN_RULES,
        *STREAMING_RULES,
        *PRESET_RULES,
        *LOSS_RULES,
        *OPTIMIZER_RULES,
        *LEARNING_RATE_RULES,
        *EARLY_STOPPING_RULES,
        *ADAPTER_RULES,
        *DEVICE_RULES,
        *WARMUP_RULES,
        *QUANTIZATION_RULES,
        *EVALUATION_RULES,
        Custom(_of_shared_weights),
        *ENGINE_RULES,
        *STATE_RULES,
    )
    whole_weights: ClassVar[Rules] = (
        *adapters.NEEDS_WHOLE_WEIGHTS,
        *loss.NEEDS_WHOLE_WEIGHTS,
        *engine.NEEDS_WHOLE_WEIGHTS,
    )
    """Table of choices that are refused where ranks share the weights: by a key, or by a DeepSpeed file, whose stage a
    run finds."""

    def needs_whole_weights(self) -> Iterator[Refusal]:
        """Yield the choices of this recipe that are refused where ranks share the weights."""
        return refusals_of(self, self.whole_weights)

    @property
    def evaluates(self) -> bool:
        """True if there are rows to evaluate on."""
        return self.val_size > 0 or bool(self.eval_datasets)
