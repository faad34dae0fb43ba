"""The keys that each part of a run reads. A recipe has all of them; a function takes the settings of its own part.

    TokenizerSettings  a tokenizer, loaded or trained on the rows
    RowSettings        rows -> token ids
    BatchSettings      token ids -> micro-batches and optimizer steps
    ModelSettings      the weights: source, dtype, memory, adapters
    OptimizerSettings  the update of the weights
    TrainingSettings   an optimizer step: batches, model and update
    PreferenceSettings the preference loss
    PolicySettings     the loss on completions that the model writes
    RolloutSettings    PolicySettings, and the completions with their rewards

Each class inherits from topics in ``keys/`` and adds no key, so a key is defined once. A recipe is an instance of every
class that its objective needs. ``mypy`` refuses a function that reads a key outside its annotation.
"""

from __future__ import annotations

from streamtune.base.optimizer_table import StepKind, step_kind
from streamtune.recipe.keys.adapters import AdapterKeys
from streamtune.recipe.keys.batching import BatchKeys, StepKeys
from streamtune.recipe.keys.datasets import CacheKeys, DataKeys
from streamtune.recipe.keys.engine import DeviceKeys, EngineKeys
from streamtune.recipe.keys.learning_rate import LearningRateKeys
from streamtune.recipe.keys.loss import LossKeys, RouterKeys
from streamtune.recipe.keys.model_and_tokenizer import ModelKeys
from streamtune.recipe.keys.optimizer import OptimizerKeys
from streamtune.recipe.keys.policy import PolicyKeys
from streamtune.recipe.keys.preferences import PreferenceKeys
from streamtune.recipe.keys.preset import ObjectiveKeys
from streamtune.recipe.keys.rollouts import RewardKeys, RolloutKeys
from streamtune.recipe.keys.run import RunKeys
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys


class RowSettings(RunKeys, BatchKeys, TrainedTokenKeys, CacheKeys, DataKeys):
    """Settings of rows. ``data/`` reads no recipe; it gets the ``DataOptions`` made by ``Task.data_options``."""


class TokenizerSettings(CacheKeys, DataKeys, ModelKeys):
    """Settings of a tokenizer: loaded, or trained on the rows."""


class BatchSettings(RunKeys, LearningRateKeys, StepKeys, DeviceKeys, BatchKeys, TrainedTokenKeys):
    """Settings of micro-batches, of the rows of an optimizer step, and of the learning rate, which depends on their
    number."""


class ModelSettings(RunKeys, RouterKeys, DeviceKeys, EngineKeys, LossKeys, TrainedTokenKeys, AdapterKeys, ModelKeys):
    """Settings of a model with its adapters and teacher, on the device or in host memory."""


class OptimizerSettings(RunKeys, OptimizerKeys, LearningRateKeys, DeviceKeys, EngineKeys, AdapterKeys, ModelKeys):
    """Settings of the update of the weights."""

    @property
    def step_kind(self) -> StepKind:
        """The kind of an optimizer step, from the optimizer and the keys that change it."""
        kind = step_kind(self.optim, self.optim_args)
        if self.optim_in_backward:
            kind = kind.in_backward(norm_first=self.max_grad_norm > 0 and self.clip_norm == "exact")
        return kind.on_host() if self.engine.optimizer == "host" else kind


class TrainingSettings(
    OptimizerSettings,
    BatchSettings,
    ModelSettings,
    RunKeys,  # the order of all topics is the recipe's
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
    AdapterKeys,
    ModelKeys,
    ObjectiveKeys,
):
    """Settings of an optimizer step."""


class PreferenceSettings(PreferenceKeys, EngineKeys, LossKeys, TrainedTokenKeys):
    """Settings of a preference loss."""


class PolicySettings(PolicyKeys, RolloutKeys, StepKeys, LossKeys):
    """Settings of a loss on completions that the model writes."""

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss needs the log-probs of the policy that wrote the completions: it may change before training
        on them."""
        return not self.distils and self.num_iterations * self.steps_per_rollout > 1


class RolloutSettings(PolicySettings, RewardKeys, TrainingSettings):
    """Settings of writing completions, scoring them, and training on them."""
