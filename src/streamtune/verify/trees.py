"""The losses that ``verify`` compares where completions are scored: the recipe's own, computed in two ways.

    streamed   the recipe's layout, prompts shared where the model can; log-probabilities by the engine
    plain      a row for each completion behind its own copy of the prompt; log-probabilities by ordinary logits

In both, the reference's log-probabilities are computed in the same way as the model's. Completions of grpo are random
tokens after the prompts of the first rows: nothing is generated and no reward is computed. Losses on routers are left
out on both sides: a prompt that is shared goes through them once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from streamtune import train
from streamtune.engine import StreamHandle
from streamtune.run.reference import streamed
from streamtune.simulate.baselines import PlainScores
from streamtune.tasks.task import ScoringTask
from streamtune.train.objective import autocast
from streamtune.verify.restore import cast

__all__ = ["TreeLosses"]


@dataclass(frozen=True)
class TreeLosses:
    """The recipe's loss on the same completions in two layouts."""

    task: ScoringTask[Any]
    held: Any | None
    """The reference that is held; None where the model is its own, or there is none."""
    shared: train.TreeBatch
    """The batch in the layout that is trained on."""
    apart: train.TreeBatch
    """The batch with a row for each completion."""

    def plain(self, model: nn.Module, bf16: bool) -> Tensor:
        """Compute the loss from ordinary logits, with a row for each completion."""
        scorer: Any = PlainScores(model)
        beside: Any = PlainScores(self.held) if self.held is not None else scorer
        return self._loss(scorer, self._reference(model, beside), self.apart, model, bf16)

    def streamed(self, handle: StreamHandle) -> Callable[[nn.Module, bool], Tensor]:
        """Return a function that computes the loss by the engine, in the layout that is trained on."""
        return partial(self._streamed, handle)

    def _streamed(self, handle: StreamHandle, model: nn.Module, bf16: bool) -> Tensor:
        if self.held is None:
            return self._loss(handle, self._reference(model, handle), self.shared, model, bf16)
        reference = streamed(self.held, handle, temperature=self.task.temperature)
        with reference.handle:
            return self._loss(handle, reference, self.shared, model, bf16)

    def _reference(self, model: nn.Module, scorer: Any) -> train.ModelReference:
        called = model if self.held is None else self.held
        return train.ModelReference(called, scorer, temperature=self.task.temperature)

    def _loss(
        self, scorer: Any, reference: train.Reference, batch: train.TreeBatch, model: nn.Module, bf16: bool
    ) -> Tensor:
        """Return the loss of a step of this batch alone; without ``bf16`` a held reference is in the model's dtype."""
        task = type(self.task)(self.task.recipe.model_copy(update={"bf16": bf16}))
        device = batch.input_ids.device
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        wide = dtype if self.held is not None and not bf16 else None
        with cast(self.held or model, wide), autocast(device, bf16), scorer.routers.silenced():
            batch = task.with_reference(batch, reference)
            objective: Any = task.objective(scorer, reference, device)
            loss: Tensor = objective.score(model, batch, objective.totals([batch])).loss
        return loss
