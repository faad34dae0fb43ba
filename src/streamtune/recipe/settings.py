"""Define groups of recipe keys, one for each part of a run, as types of function arguments.

    TokenizerSettings  a tokenizer, loaded or trained on the rows
    RowSettings        rows -> token ids
    BatchSettings      token ids -> micro-batches and optimizer steps
    ModelSettings      the weights: source, dtype, memory, adapters
    OptimizerSettings  the optimizer step: optimizer, learning rate, trained weights
    TrainingSettings   a training step: batches, model and optimizer
    PreferenceSettings the preference loss
    PolicySettings     the loss on completions that the model writes
    RolloutSettings    PolicySettings, and the completions with their rewards

A recipe has all keys; a function takes only the group that it reads. Each class inherits from classes in ``keys/`` and
adds no key. A recipe is an instance of every class that its objective needs. ``mypy`` rejects a function that reads a
key outside the class that annotates its argument.
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
    """Recipe keys that decide the token ids of rows; ``Task.data_options`` makes ``DataOptions`` from these keys."""


class TokenizerSettings(CacheKeys, DataKeys, ModelKeys):
    """Recipe keys that decide the tokenizer, which is loaded or trained on the rows."""


class BatchSettings(RunKeys, LearningRateKeys, StepKeys, DeviceKeys, BatchKeys, TrainedTokenKeys):
    """Recipe keys that decide the micro-batches and the rows of an optimizer step, including the learning rate."""


class ModelSettings(RunKeys, RouterKeys, DeviceKeys, EngineKeys, LossKeys, TrainedTokenKeys, AdapterKeys, ModelKeys):
    """Recipe keys that decide the model: its weights, dtype, memory, adapters, routers and teacher."""


class OptimizerSettings(RunKeys, OptimizerKeys, LearningRateKeys, DeviceKeys, EngineKeys, AdapterKeys, ModelKeys):
    """Recipe keys that decide the optimizer step: optimizer, learning rate, trained weights and their memory."""

    @property
    def step_kind(self) -> StepKind:
        """Kind of optimizer step: number of forwards and backwards, gradients in memory, memory of the states."""
        kind = step_kind(self.optim, self.optim_args)
        if self.optim_in_backward:
            kind = kind.with_step_in_backward(norm_first=self.max_grad_norm > 0 and self.clip_norm == "exact")
        return kind.with_host_states() if self.engine.optimizer == "host" else kind


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
    """Recipe keys that decide a training step: batches, model and optimizer."""


class PreferenceSettings(PreferenceKeys, EngineKeys, LossKeys, TrainedTokenKeys):
    """Recipe keys that decide a preference loss, its reference and its rows."""


class PolicySettings(PolicyKeys, RolloutKeys, StepKeys, LossKeys):
    """Recipe keys that decide the loss on completions that the model writes."""

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss needs log-probs under the policy that wrote the completions."""
        return not self.is_distillation and self.num_iterations * self.steps_per_rollout > 1


class RolloutSettings(PolicySettings, RewardKeys, TrainingSettings):
    """Recipe keys that decide how completions are written, scored and trained on."""

    @property
    def completions_per_step(self) -> int:
        """Number of completions in one optimizer step of one rank alone; of all ranks with ``train_batch_size``.

        If ``steps_per_generation`` is set too, their ratio depends on the number of ranks: then the smallest number.
        """
        if self.train_batch_size is None:
            return super().completions_per_step
        return self.train_batch_size if self.steps_per_generation is None else self.per_device_train_batch_size
