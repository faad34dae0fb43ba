"""Micro-batches for preference training, and the objectives that compute preference losses on them.

    data.Tree --collate--> PreferenceBatch --handle.logprobs--> logp_K --objectives.pairs--> a loss for each pair
                                           --reference--------> ref_K  /

Shape suffixes: K target tokens, N completions, P pairs.
"""

from __future__ import annotations

import math
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
from streamtune.tasks.reference import CachedLogps


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(train.TreeBatch):
    """A micro-batch of preference pairs or labelled completions, possibly with precomputed reference log-probs."""

    reference_K: Tensor | None = None  # noqa: N815
    """fp32 ``[K]``: precomputed log-probs of the reference; None if the training step computes them"""
    margin_P: Tensor | None = None  # noqa: N815
    """fp64 ``[P]``: margin of each pair in the data, such as chosen minus rejected score; NaN for a pair without one,
    None if no pair has one"""
    desirable_N: Tensor | None = None  # noqa: N815
    """bool ``[N]``: True for a desirable completion; None for pairs"""
    mismatched: PreferenceBatch | None = None
    """The same prompts with completions of other prompts, from which KTO estimates a KL; None for other losses."""

    def to(self, device: torch.device) -> PreferenceBatch:
        """Return a copy on ``device``, except for :attr:`mismatched`, which is not moved."""
        moved = super().to(device)
        assert isinstance(moved, PreferenceBatch)
        names = ("reference_K", "margin_P", "desirable_N")
        tensors = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(moved, **tensors)


class PrecomputedReference:
    """Reference model whose log-probs were computed before training and are part of each batch."""

    def logprobs(self, batch: train.TreeBatch) -> Tensor:
        assert isinstance(batch, PreferenceBatch)
        assert batch.reference_K is not None, "batches have precomputed log-probs"
        return batch.reference_K


def batch_trees(
    trees: Sequence[data.Tree],
    *,
    pad_token_id: int,
    share: bool,
    padding_side: Literal["right", "left"] = "right",
    images: data.ImageProcessor | None = None,
) -> dict[str, Any]:
    """Return the fields of a :class:`streamtune.train.TreeBatch` with these trees (prompts with completions).

    Args:
        images: Processor of the images of prompts, which are then not shared; None for prompts without images.
    """
    collated: dict[str, Any] = {
        **data.collate_trees(trees, pad_token_id=pad_token_id, share=share, padding_side=padding_side)
    }
    nodes = collated.pop("nodes")
    collated["origins"] = tuple(tree.origin for tree in trees)
    if share or padding_side == "right":
        # Branches determine the positions, and the model numbers rows padded on the right from 0.
        collated["position_ids"] = None
    if any(tree.images for tree in trees):
        assert images is not None, "prompts with images have a processor"
        assert not share, "prompts with images are not shared"
        files = [list(map(data.ImageFile.parse, tree.images)) for tree in trees for _ in tree.completions]
        collated["images"] = images.model_inputs(files, collated["input_ids"])
    return {**collated, "branches": None if nodes is None else Branches.of_nodes(nodes)}


def preference_batch(
    trees: Sequence[data.Tree], *, pad_token_id: int, share: bool, images: data.ImageProcessor | None = None
) -> PreferenceBatch:
    """Return a batch with the completions of ``trees``, and margins (of pairs) or labels (of single completions)."""
    margins = [math.nan if tree.margin is None else tree.margin for tree in trees]
    labels = [label for tree in trees for label in tree.labels or []]
    return PreferenceBatch(
        **batch_trees(trees, pad_token_id=pad_token_id, share=share, images=images),
        margin_P=None if all(map(math.isnan, margins)) else torch.tensor(margins, dtype=torch.float64),
        desirable_N=torch.tensor(labels) if labels else None,
    )


def mismatched_tree(tree: data.Tree, donors: Sequence[data.Tree], start: int, max_length: int) -> data.Tree:
    """Return a tree with the prompt of ``tree`` and the completions of another prompt.

    Args:
        donors: Trees whose completions may be used. At least one tree has another prompt.
        start: Index in ``donors`` at which the search for another prompt begins.
        max_length: Maximum number of tokens of the prompt plus a completion; longer completions are cut.
    """
    candidates = (donors[(start + distance) % len(donors)] for distance in range(len(donors)))
    asked = (tree.prompt, list(tree.images))
    donor = next(candidate for candidate in candidates if (candidate.prompt, list(candidate.images)) != asked)
    max_tokens = max(max_length - len(tree.prompt), 1)
    masks = donor.masks and [mask[:max_tokens] for mask in donor.masks]
    if masks is not None and not all(any(mask) for mask in masks):
        masks = None
    completions = [ids[:max_tokens] for ids in donor.completions]
    return data.Tree(tree.prompt, completions, masks, tree.origin, images=tree.images)


class PreferenceBatches:
    """Makes micro-batches of prompts with completions, and adds precomputed reference log-probs if there are any.

    Args:
        prepared: Trees (prompts with completions) to train on, and held-out trees.
        share: True if the common prefix of a prompt's completions is computed once.
        has_baseline: True to add each prompt with completions of other prompts, for the KL estimate of KTO.
        images: Processor of the images of prompts; None for rows without images.
    """

    def __init__(
        self,
        prepared: data.PreparedCompletions,
        recipe: PreferenceSettings,
        *,
        pad_token_id: int,
        share: bool,
        has_baseline: bool,
        images: data.ImageProcessor | None = None,
    ) -> None:
        self.prepared, self.recipe = prepared, recipe
        self.pad_token_id, self.share, self.has_baseline = pad_token_id, share, has_baseline
        self.images = images
        self.reference_logps: CachedLogps | None = None
        """Precomputed log-probs of all trees, in the order of :meth:`reference_trees`; None if there are none."""

    @property
    def is_padded(self) -> bool:
        return not self.share

    @property
    def buckets(self) -> None:
        """None, because prompts with completions are not grouped by length."""

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each training tree (prompt with completions); a shared prefix counts once."""
        return self._lengths_and_squares[0]

    def squared_lengths(self) -> npt.NDArray[np.int64]:
        """Return the sum of squared row lengths of each training tree; the square of a shared prefix counts once."""
        return self._lengths_and_squares[1]

    @cached_property
    def _lengths_and_squares(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return data.measure_trees(self.prepared.training, share=self.share)

    def units_per_sequence(self, unit: int) -> int:
        return 1

    @property
    def num_training_units(self) -> int:
        return len(self.prepared.training)

    @property
    def mixture(self) -> data.Mixture | None:
        return self.prepared.mixture

    def training_batch(self, units: Sequence[int]) -> PreferenceBatch:
        return self._collate(self.prepared.training, units, 0)

    def held_out_batches(self, batch_size: int, eval_set: data.EvalSet | None = None) -> Iterator[PreferenceBatch]:
        first, stop = (0, len(self.prepared.validation)) if eval_set is None else (eval_set.start, eval_set.stop)
        for start in range(first, stop, batch_size):
            units = range(start, min(start + batch_size, stop))
            yield self._collate(self.prepared.validation, units, self.num_training_units)

    def reference_trees(self) -> Iterator[data.Tree]:
        """Yield all trees that the reference scores: training and held-out trees, then both with mismatched
        completions."""
        splits = (self.prepared.training, self.prepared.validation)
        for split in splits:
            yield from split
        if self.has_baseline:
            for split in splits:
                yield from (self._mismatched_tree(split, unit) for unit in range(len(split)))

    def make_single_batch(self, tree: data.Tree) -> train.TreeBatch:
        fields = batch_trees([tree], pad_token_id=self.pad_token_id, share=self.share, images=self.images)
        return train.TreeBatch(**fields)

    def _collate(self, split: Sequence[data.Tree], units: Sequence[int], first_index: int) -> PreferenceBatch:
        """Return a batch of the trees with indices ``units`` in ``split``, which has the training or the held-out
        trees.

        ``first_index`` is the index of the split's first tree in :meth:`reference_trees`.
        """
        mismatched = None
        if self.has_baseline:
            total = self.num_training_units + len(self.prepared.validation)
            others = [self._mismatched_tree(split, unit) for unit in units]
            mismatched = self._make_batch(others, self._reference_logps(units, total + first_index))
        trees = [split[unit] for unit in units]
        return replace(self._make_batch(trees, self._reference_logps(units, first_index)), mismatched=mismatched)

    def _make_batch(self, trees: Sequence[data.Tree], reference_K: Tensor | None) -> PreferenceBatch:
        batch = preference_batch(trees, pad_token_id=self.pad_token_id, share=self.share, images=self.images)
        return replace(batch, reference_K=reference_K)

    def _mismatched_tree(self, split: Sequence[data.Tree], unit: int) -> data.Tree:
        return mismatched_tree(split[unit], self.prepared.training, unit + 1, self.recipe.max_length)

    def _reference_logps(self, units: Sequence[int], first_index: int) -> Tensor | None:
        logps = self.reference_logps
        return None if logps is None else logps.concatenate_logps(first_index + unit for unit in units)


def _policy_logps(handle: StreamHandle, model: nn.Module, batch: train.TreeBatch) -> tuple[Tensor, Tensor | None]:
    """Return differentiable log-probs of the target tokens, ``[K]``, and the router loss of a mixture of experts."""
    scores = handle.logprobs(targets=batch.shift_labels, model=model, **batch.inputs)
    return batch.gather_targets(scores.logprobs), scores.router_loss


class PairObjective:
    """Loss on preference pairs for the training loop: the mean over all pairs of an optimizer step."""

    def __init__(self, handle: StreamHandle, recipe: PreferenceSettings, reference: train.Reference | None) -> None:
        self.handle, self.recipe, self.reference = handle, recipe, reference

    def step_totals(self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD) -> int:
        return world.sum_count_over_ranks(
            sum(_as_preference_batch(batch).num_rows // 2 for batch in train.counted_batches(micro_batches))
        )

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: int | None) -> train.Score:
        batch, recipe = _as_preference_batch(batch), self.recipe
        ref_K = None if self.reference is None else self.reference.logprobs(batch)
        logp_K, router_loss = _policy_logps(self.handle, model, batch)
        row_K, rows = batch.row_K, batch.num_rows
        scores = None
        if "scores" in objectives.PREFERENCE_LOSSES[recipe.loss_type].reads and batch.margin_P is not None:
            gap_P = batch.margin_P.nan_to_num(nan=objectives.DEFAULT_REWARD_GAP)
            scores = (gap_P / 2, -gap_P / 2)  # only their difference counts
        terms = objectives.preference_loss(
            recipe.loss_type,
            objectives.PairLogps.from_tokens(logp_K, row_K, rows),
            None if ref_K is None else objectives.PairLogps.from_tokens(ref_K, row_K, rows),
            pair_options(recipe),
            scores=scores,
        )
        summed = terms.losses_P.sum()
        metrics = terms.metrics()
        if ref_K is not None:
            chosen_K = row_K % 2 == 0  # estimated on chosen completions: the policy has not written any
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
    """Loss on single labelled completions for the training loop: the mean over all completions of an optimizer step.

    KTO subtracts a baseline: an estimate of the KL with the reference, from each prompt with completions of other
    prompts. The baseline is computed once per step over all ranks, before the first backward, without gradient and
    dropout. In evaluation each batch has its own baseline.
    """

    def __init__(
        self, handle: StreamHandle, recipe: PreferenceSettings, reference: train.Reference, device: torch.device
    ) -> None:
        self.handle, self.recipe, self.reference, self.device = handle, recipe, reference, device
        self.loss = objectives.check_unpaired_loss(recipe.loss_type, unpaired_options(recipe))

    def step_totals(
        self, micro_batches: Sequence[train.MicroBatch], world: train.World = train.WORLD
    ) -> _UnpairedTotals:
        """Return the number of completions and the KL baseline of an optimizer step, computed over all ranks."""
        batches = [_as_preference_batch(batch) for batch in micro_batches]
        with self._autocast():
            baseline = self._compute_baseline(batches, world)
        return _UnpairedTotals(
            world.sum_count_over_ranks(sum(batch.num_rows for batch in train.counted_batches(batches))), baseline
        )

    def score(self, model: nn.Module, batch: train.MicroBatch, totals: _UnpairedTotals | None) -> train.Score:
        batch, recipe = _as_preference_batch(batch), self.recipe
        assert batch.desirable_N is not None
        # In evaluation a filler has a baseline of its own too: without one it could not be scored.
        baseline = self._compute_baseline([replace(batch, filler=False)]) if totals is None else totals.baseline
        ref_K = self.reference.logprobs(batch)
        logp_K, router_loss = _policy_logps(self.handle, model, batch)
        row_K, rows = batch.row_K, batch.num_rows
        terms = objectives.unpaired_loss(
            recipe.loss_type,
            objectives.RowLogps.from_tokens(logp_K, row_K, rows),
            objectives.RowLogps.from_tokens(ref_K, row_K, rows),
            batch.desirable_N,
            unpaired_options(recipe),
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
    def _compute_baseline(self, batches: Sequence[PreferenceBatch], world: train.World = train.WORLD) -> Tensor | None:
        """Return the KL estimate that the loss subtracts, a scalar over the batches of all ranks; None if it subtracts
        none."""
        if not self.loss.needs_baseline:
            return None
        policy, reference = [], []
        with train.evaluation_mode(self.handle.model), self.handle.routers.without_losses():
            for batch in batches:
                assert batch.mismatched is not None
                mismatched = batch.mismatched.to(self.device)
                row_K, rows = mismatched.row_K, mismatched.num_rows
                logp_K, _ = _policy_logps(self.handle, self.handle.model, mismatched)
                ref_K = self.reference.logprobs(mismatched)
                if not batch.filler:
                    policy.append(objectives.RowLogps.from_tokens(logp_K, row_K, rows))
                    reference.append(objectives.RowLogps.from_tokens(ref_K, row_K, rows))
        return objectives.kto_baseline(self._gather_logps(policy, world), self._gather_logps(reference, world))

    def _gather_logps(self, parts: Sequence[objectives.RowLogps], world: train.World) -> objectives.RowLogps:
        if world.size > 1:
            mine = [(part.logp_N.tolist(), part.tokens_N.tolist()) for part in parts]
            parts = [
                objectives.RowLogps(torch.tensor(logps, dtype=torch.float64), torch.tensor(tokens, dtype=torch.int64))
                for found in world.gather_data_ranks(mine)
                for logps, tokens in found
            ]
        joined = objectives.RowLogps(
            torch.cat([part.logp_N for part in parts]).to(self.device),
            torch.cat([part.tokens_N for part in parts]).to(self.device),
        )
        return joined.token_means() if self.recipe.length_normalization else joined

    def _autocast(self) -> AbstractContextManager[Any]:
        return train.autocast(self.device, self.recipe.autocast_dtype)


def pair_options(recipe: PreferenceSettings) -> objectives.PairOptions:
    keys = [field.name for field in fields(objectives.PairOptions) if field.name in type(recipe).model_fields]
    return objectives.PairOptions(**{key: getattr(recipe, key) for key in keys})


def unpaired_options(recipe: PreferenceSettings) -> objectives.UnpairedOptions:
    return objectives.UnpairedOptions(
        recipe.beta, recipe.desirable_weight, recipe.undesirable_weight, recipe.length_normalization
    )


def _as_preference_batch(batch: train.MicroBatch) -> PreferenceBatch:
    assert isinstance(batch, PreferenceBatch)
    return batch
