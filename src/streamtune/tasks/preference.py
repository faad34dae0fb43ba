"""Micro-batches of prompts with rated completions, and their preference losses: join data, engine and formulas.

    data.Tree --collate--> PreferenceBatch --handle.logprobs--> logp_K --objectives.pairs--> a loss for each pair
                                           --reference--------> ref_K  /

Shape suffixes: K target tokens, N completions, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from streamtune import data, train
from streamtune.engine import Branches, StreamHandle
from streamtune.recipe.settings import PreferenceSettings
from streamtune.tasks import objectives
from streamtune.tasks.reference import KeptLogps


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(train.TreeBatch):
    """Completions that are compared, with their ratings and with log-probs of the reference, where there are any."""

    reference_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]``: the reference's log-probs, where they were computed before"""
    margin_P: Tensor | None = None  # noqa: N815
    """fp64 ``[P]``: by how much the chosen completion is better, where the data says so of every pair"""
    desirable_N: Tensor | None = None  # noqa: N815
    """bool ``[N]`` of unpaired completions"""
    mismatched: PreferenceBatch | None = None
    """the prompts with completions of other prompts, where a loss measures its distance from the reference on them"""

    def to(self, device: torch.device) -> PreferenceBatch:
        """Move all but the mismatched completions, which are not trained on."""
        moved = super().to(device)
        assert isinstance(moved, PreferenceBatch)
        names = ("reference_K", "margin_P", "desirable_N")
        given = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(moved, **given)


class GivenReference:
    """A reference whose log-probs were computed before: they are in the batches."""

    def logprobs(self, batch: train.TreeBatch) -> Tensor:
        assert isinstance(batch, PreferenceBatch)
        assert batch.reference_K is not None, "batches are made with what was computed"
        return batch.reference_K


def tree_batch(
    trees: Sequence[data.Tree], *, pad_token_id: int, share: bool, padding_side: Literal["right", "left"] = "right"
) -> dict[str, Any]:
    """Return the fields of a :class:`streamtune.train.TreeBatch`; arguments as ``data.collate_trees``."""
    collated: dict[str, Any] = {
        **data.collate_trees(trees, pad_token_id=pad_token_id, share=share, padding_side=padding_side)
    }
    nodes = collated.pop("nodes")
    collated["origins"] = tuple(tree.origin for tree in trees)
    if share or padding_side == "right":
        # They follow from branches, and rows padded on the right count from 0 by themselves.
        collated["position_ids"] = None
    return {**collated, "branches": None if nodes is None else Branches.of_nodes(nodes)}


def preference_batch(trees: Sequence[data.Tree], *, pad_token_id: int, share: bool) -> PreferenceBatch:
    """Return a batch of trees with their ratings."""
    margins = [tree.margin for tree in trees if tree.margin is not None]
    labels = [label for tree in trees for label in tree.labels or []]
    return PreferenceBatch(
        **tree_batch(trees, pad_token_id=pad_token_id, share=share),
        margin_P=torch.tensor(margins, dtype=torch.float64) if len(margins) == len(trees) else None,
        desirable_N=torch.tensor(labels) if labels else None,
    )


def mismatched(tree: data.Tree, others: Sequence[data.Tree], start: int, max_length: int) -> data.Tree:
    """Return the prompt of a tree with the completions of another: the first from ``start`` on that has another prompt.

    Completions are cut so that each has ``max_length`` tokens at most with the prompt.
    """
    turns = (others[(start + distance) % len(others)] for distance in range(len(others)))
    other = next(candidate for candidate in turns if candidate.prompt != tree.prompt)
    room = max(max_length - len(tree.prompt), 1)
    masks = other.masks and [mask[:room] for mask in other.masks]
    if masks is not None and not all(any(mask) for mask in masks):
        masks = None
    return data.Tree(tree.prompt, [ids[:room] for ids in other.completions], masks, tree.origin)


class PreferenceBatches:
    """Makes micro-batches of trees, with the reference's log-probs where these are kept.

    Args:
        share: Stream a prompt once for its completions.
        measures: Add mismatched completions.
    """

    def __init__(
        self,
        prepared: data.PreparedTrees,
        recipe: PreferenceSettings,
        *,
        pad_token_id: int,
        share: bool,
        measures: bool,
    ) -> None:
        self.prepared, self.recipe = prepared, recipe
        self.pad_token_id, self.share, self.measures = pad_token_id, share, measures
        self.kept: KeptLogps | None = None
        """Of all trees in the order of :meth:`asked`."""

    @property
    def padded(self) -> bool:
        return not self.share

    @property
    def buckets(self) -> None:
        """None: trees are not cut."""

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return how many tokens each tree has, [trees]: its prompt once where it is shared, or once for each
        completion.
        """
        return self._sums[0]

    def squares(self) -> npt.NDArray[np.int64]:
        """Return the sum of the squares of each tree's rows, [trees]; a shared prompt counts once."""
        return self._sums[1]

    @cached_property
    def _sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return data.measure_trees(self.prepared.train, share=self.share)

    def per_sequence(self, unit: int) -> int:
        return 1

    @property
    def num_train(self) -> int:
        return len(self.prepared.train)

    @property
    def mixture(self) -> data.Mixture | None:
        return self.prepared.mixture

    def training(self, units: Sequence[int]) -> PreferenceBatch:
        return self._collate(self.prepared.train, units, 0)

    def held_out(self, batch_size: int, part: data.EvalSet | None = None) -> Iterator[PreferenceBatch]:
        """Iterate over batches of the held-out trees, or of one set of them, in their own order."""
        first, stop = (0, len(self.prepared.validation)) if part is None else (part.start, part.stop)
        for start in range(first, stop, batch_size):
            units = range(start, min(start + batch_size, stop))
            yield self._collate(self.prepared.validation, units, self.num_train)

    def asked(self) -> Iterator[data.Tree]:
        """Iterate over all trees that a reference scores: trained on, held out, and then the mismatched ones."""
        splits = (self.prepared.train, self.prepared.validation)
        for split in splits:
            yield from split
        if self.measures:
            for split in splits:
                yield from (self._mismatched(split, unit) for unit in range(len(split)))

    def alone(self, tree: data.Tree) -> train.TreeBatch:
        return train.TreeBatch(**tree_batch([tree], pad_token_id=self.pad_token_id, share=self.share))

    def _collate(self, split: Sequence[data.Tree], units: Sequence[int], before: int) -> PreferenceBatch:
        """Return the batch of the trees ``units`` of a split; it begins at ``before`` in the order of :meth:`asked`."""
        beside = None
        if self.measures:
            total = self.num_train + len(self.prepared.validation)
            others = [self._mismatched(split, unit) for unit in units]
            beside = self._batch(others, self._kept(units, total + before))
        trees = [split[unit] for unit in units]
        return replace(self._batch(trees, self._kept(units, before)), mismatched=beside)

    def _batch(self, trees: Sequence[data.Tree], reference_K: Tensor | None) -> PreferenceBatch:
        batch = preference_batch(trees, pad_token_id=self.pad_token_id, share=self.share)
        return replace(batch, reference_K=reference_K)

    def _mismatched(self, split: Sequence[data.Tree], unit: int) -> data.Tree:
        return mismatched(split[unit], self.prepared.train, unit + 1, self.recipe.max_length)

    def _kept(self, units: Sequence[int], before: int) -> Tensor | None:
        return None if self.kept is None else self.kept.of(before + unit for unit in units)


def _policy(handle: StreamHandle, model: nn.Module, batch: train.TreeBatch) -> tuple[Tensor, Tensor | None]:
    """Return differentiable log-probs ``[K]``, and the loss on routers."""
    scores = handle.logprobs(targets=batch.shift_labels, model=model, **batch.arguments)
    return batch.ragged(scores.logprobs), scores.router_loss


class PairObjective:
    """The mean over the pairs of a step of a loss of ``objectives.pairs``."""

    def __init__(self, handle: StreamHandle, recipe: PreferenceSettings, reference: train.Reference | None) -> None:
        self.handle, self.recipe, self.reference = handle, recipe, reference

    def totals(self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD) -> int:
        """Return the number of pairs of the step."""
        return world.count(sum(_tree(batch).num_rows // 2 for batch in train.counted(micro_batches)))

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: int | None) -> train.Score:
        batch, recipe = _tree(batch), self.recipe
        ref_K = None if self.reference is None else self.reference.logprobs(batch)
        logp_K, router_loss = _policy(self.handle, model, batch)
        row_K, rows = batch.row_K, batch.num_rows
        scores = None
        if "scores" in objectives.PREFERENCE_LOSSES[recipe.loss_type].reads and batch.margin_P is not None:
            scores = (batch.margin_P / 2, -batch.margin_P / 2)  # only their difference counts
        terms = objectives.preference_loss(
            recipe.loss_type,
            objectives.PairLogps.of(logp_K, row_K, rows),
            None if ref_K is None else objectives.PairLogps.of(ref_K, row_K, rows),
            pair_knobs(recipe),
            scores=scores,
        )
        summed = terms.losses_P.sum()
        metrics = terms.metrics()
        if ref_K is not None:
            chosen_K = row_K % 2 == 0  # the policy's own completions are not here; the chosen ones stand in for them
            kl_K = objectives.kl_estimate(logp_K.detach()[chosen_K], ref_K[chosen_K])
            metrics["kl"] = (kl_K.sum(dtype=torch.float64).item(), float(kl_K.numel()))
        if totals is None:
            return train.Score(summed, metrics=metrics, held_out=[(summed.item(), float(rows // 2))])
        return train.Score(summed / totals, router_loss=router_loss, metrics=metrics)


@dataclass(frozen=True)
class _UnpairedTotals:
    rows: int
    baseline: Tensor | None


class UnpairedObjective:
    """A loss of ``objectives.unpaired``, averaged over the completions of a step.

    The baseline of a loss is the mean log-ratio of the mismatched completions of the whole step, however it is split.
    They are scored before its first backward, without gradient and without dropout. In evaluation each batch has its
    own.
    """

    def __init__(
        self, handle: StreamHandle, recipe: PreferenceSettings, reference: train.Reference, device: torch.device
    ) -> None:
        self.handle, self.recipe, self.reference, self.device = handle, recipe, reference, device
        self.loss = objectives.check_unpaired(recipe.loss_type, unpaired_knobs(recipe))

    def totals(self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD) -> _UnpairedTotals:
        """Return the number of completions of the step, and its baseline."""
        batches = [_tree(batch) for batch in micro_batches]
        with self._autocast():
            baseline = self._baseline(batches, world)
        return _UnpairedTotals(world.count(sum(batch.num_rows for batch in train.counted(batches))), baseline)

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: _UnpairedTotals | None) -> train.Score:
        batch, recipe = _tree(batch), self.recipe
        assert batch.desirable_N is not None
        baseline = self._baseline([batch]) if totals is None else totals.baseline
        ref_K = self.reference.logprobs(batch)
        logp_K, router_loss = _policy(self.handle, model, batch)
        row_K, rows = batch.row_K, batch.num_rows
        terms = objectives.unpaired_loss(
            recipe.loss_type,
            objectives.RowLogps.of(logp_K, row_K, rows),
            objectives.RowLogps.of(ref_K, row_K, rows),
            batch.desirable_N,
            unpaired_knobs(recipe),
            baseline=baseline,
        )
        summed = terms.losses_N.sum()
        threshold = 0.0 if baseline is None else recipe.beta * baseline.item()
        right_N = (terms.rewards_N > threshold) == terms.desirable_N
        metrics = {**terms.metrics(), "rewards/accuracies": (float(right_N.sum()), float(rows))}
        if baseline is not None:
            metrics["kl"] = (baseline.item() * rows, float(rows))
        if totals is None:
            return train.Score(summed, metrics=metrics, held_out=[(summed.item(), float(rows))])
        return train.Score(summed / totals.rows, router_loss=router_loss, metrics=metrics)

    @torch.no_grad()
    def _baseline(self, batches: Sequence[PreferenceBatch], world: train.World = train.WORLD) -> Tensor | None:
        """Return the baseline, a scalar, of the batches of all ranks; None if the loss has none."""
        if not self.loss.needs_baseline:
            return None
        policy, reference = [], []
        with train.evaluating(self.handle.model), self.handle.routers.silenced():
            for batch in batches:
                assert batch.mismatched is not None
                beside = batch.mismatched.to(self.device)
                row_K, rows = beside.row_K, beside.num_rows
                logp_K, _ = _policy(self.handle, self.handle.model, beside)
                ref_K = self.reference.logprobs(beside)
                if not batch.filler:
                    policy.append(objectives.RowLogps.of(logp_K, row_K, rows))
                    reference.append(objectives.RowLogps.of(ref_K, row_K, rows))
        return objectives.kto_baseline(self._joined(policy, world), self._joined(reference, world))

    def _joined(self, parts: Sequence[objectives.RowLogps], world: train.World) -> objectives.RowLogps:
        if world.size > 1:
            mine = [(part.logp_N.tolist(), part.tokens_N.tolist()) for part in parts]
            parts = [
                objectives.RowLogps(torch.tensor(logps, dtype=torch.float64), torch.tensor(tokens, dtype=torch.int64))
                for found in world.gather(mine)
                for logps, tokens in found
            ]
        joined = objectives.RowLogps(
            torch.cat([part.logp_N for part in parts]).to(self.device),
            torch.cat([part.tokens_N for part in parts]).to(self.device),
        )
        return joined.per_token() if self.recipe.length_normalization else joined

    def _autocast(self) -> AbstractContextManager[Any]:
        return train.autocast(self.device, bool(self.recipe.bf16))


def pair_knobs(recipe: PreferenceSettings) -> objectives.PairKnobs:
    """Return the parameters of losses of pairs that are keys of the recipe."""
    keys = [field.name for field in fields(objectives.PairKnobs) if field.name in type(recipe).model_fields]
    return objectives.PairKnobs(**{key: getattr(recipe, key) for key in keys})


def unpaired_knobs(recipe: PreferenceSettings) -> objectives.UnpairedKnobs:
    return objectives.UnpairedKnobs(
        recipe.beta, recipe.desirable_weight, recipe.undesirable_weight, recipe.length_normalization
    )


def _tree(batch: train.MicroBatch) -> PreferenceBatch:
    assert isinstance(batch, PreferenceBatch)
    return batch
