"""Preference losses of pairs: from per-token log-probs to one loss for each pair, and metrics.

    logp_K --sum by completion--> PairLogps --less the reference--> scores --formula of objectives.pairs--> losses_P

Nothing is divided here: the caller sums ``losses_P`` and divides by the pairs of the whole optimizer step.

Shape suffixes: K target tokens, N completions, P pairs (N = 2 P).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from streamtune.base.names import look_up
from streamtune.errors import ArgumentError
from streamtune.tasks.objectives.pairs import PREFERENCE_LOSSES, PairKnobs, PreferenceLoss
from streamtune.tasks.objectives.ragged import counts, sum_by_row


@dataclass(frozen=True)
class PairLogps:
    """Log-probs of the completions of P pairs under one model."""

    chosen_P: Tensor  # noqa: N815
    """log-prob of the chosen completion, summed over its tokens: float64 ``[P]``"""
    rejected_P: Tensor  # noqa: N815
    chosen_tokens_P: Tensor  # noqa: N815
    """target tokens of the chosen completion: int64 ``[P]``"""
    rejected_tokens_P: Tensor  # noqa: N815

    @classmethod
    def of(cls, logp_K: Tensor, row_K: Tensor, num_rows: int) -> PairLogps:
        """Sum per-token log-probs; rows lie pair after pair, the chosen one first: row ``2 p``, then ``2 p + 1``.

        Args:
            logp_K: Log-prob of each target token ``[K]``.
            row_K: The completion it belongs to ``[K]``, int64.
            num_rows: N, an even number.
        """
        assert num_rows % 2 == 0, f"{num_rows} completions are no pairs"
        logp_N, tokens_N = sum_by_row(logp_K, row_K, num_rows), counts(row_K, num_rows)
        return cls(logp_N[0::2], logp_N[1::2], tokens_N[0::2], tokens_N[1::2])

    def per_token(self) -> PairLogps:
        """Return the same with means over tokens in place of sums."""
        return PairLogps(
            self.chosen_P / self.chosen_tokens_P.clamp(min=1),
            self.rejected_P / self.rejected_tokens_P.clamp(min=1),
            self.chosen_tokens_P,
            self.rejected_tokens_P,
        )


@dataclass(frozen=True)
class PreferenceTerms:
    """The losses of P pairs and their terms. All float64 ``[P]``; only ``losses_P`` has a gradient."""

    losses_P: Tensor  # noqa: N815
    chosen_rewards_P: Tensor  # noqa: N815
    """beta times the score the loss reads: log-ratio to the reference, or log-prob where there is none"""
    rejected_rewards_P: Tensor  # noqa: N815
    chosen_logps_P: Tensor  # noqa: N815
    """log-prob under the policy: per token where the loss reads it per token, else summed"""
    rejected_logps_P: Tensor  # noqa: N815
    nll_P: Tensor  # noqa: N815
    """mean negative log-likelihood of a token of the chosen completion"""

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return name -> (sum over the pairs, number of pairs), under TRL's names. Waits for the device once."""
        margins_P = self.chosen_rewards_P - self.rejected_rewards_P
        columns: Mapping[str, Tensor] = {
            "rewards/chosen": self.chosen_rewards_P,
            "rewards/rejected": self.rejected_rewards_P,
            "rewards/margins": margins_P,
            "rewards/accuracies": (margins_P > 0).double(),
            "logps/chosen": self.chosen_logps_P,
            "logps/rejected": self.rejected_logps_P,
            "nll_loss": self.nll_P,
        }
        sums = torch.stack([column.detach().sum() for column in columns.values()]).tolist()
        return {name: (total, float(margins_P.numel())) for name, total in zip(columns, sums, strict=True)}


def preference_loss(
    name: str,
    policy: PairLogps,
    reference: PairLogps | None,
    knobs: PairKnobs = PairKnobs(),  # noqa: B008 (frozen)
    *,
    scores: tuple[Tensor, Tensor] | None = None,
) -> PreferenceTerms:
    """Compute one loss for each pair: the formula of :data:`PREFERENCE_LOSSES`, plus NLL terms.

    The NLL is the mean over the tokens of the chosen completion, pair by pair, so that it does not depend on which
    pairs share a micro-batch. orpo adds it with weight 1, cpo with ``cpo_alpha``, and ``rpo_alpha`` adds it to any loss
    (arXiv 2404.19733, eq. 1).

    Args:
        name: A key of :data:`PREFERENCE_LOSSES`.
        policy: Log-probs under the model that is trained.
        reference: Log-probs under the reference; None where the loss needs none. Not differentiated.
        knobs: Parameters of the formula.
        scores: (of the chosen ``[P]``, of the rejected ``[P]``) rewards for copg; None reads +1/4 and -1/4.

    Raises:
        ArgumentError: An unknown name, a value out of range, a value the loss would not read, or no reference.
    """
    loss = check_preference(name, knobs)
    if scores is not None and "scores" not in loss.reads:
        raise ArgumentError(f"the loss '{name}' does not read scores", where="loss_type", mend="use copg")
    reads_reference = loss.needs_reference and not knobs.reference_free
    if reads_reference and reference is None:
        raise ArgumentError(
            f"the loss '{name}' compares with a reference, and there is none",
            where="loss_type",
            mend="give the log-probs of a reference, or use orpo, simpo or cpo",
        )
    if scores is not None:
        knobs = replace(knobs, reward_gap_P=(scores[0] - scores[1]).to(policy.chosen_P))
    return _terms(loss, policy, reference if reads_reference else None, knobs)


def _terms(loss: PreferenceLoss, policy: PairLogps, reference: PairLogps | None, knobs: PairKnobs) -> PreferenceTerms:
    nll_P = -policy.per_token().chosen_P
    nll_weight = loss.nll(knobs) + (knobs.rpo_alpha or 0.0)
    if loss.per_token or knobs.length_normalization:
        policy, reference = policy.per_token(), reference and reference.per_token()
    chosen_P, rejected_P = policy.chosen_P, policy.rejected_P
    if reference is not None:
        chosen_P, rejected_P = chosen_P - reference.chosen_P.detach(), rejected_P - reference.rejected_P.detach()
    losses_P = loss.formula(chosen_P, rejected_P, knobs)
    if nll_weight:
        losses_P = losses_P + nll_weight * nll_P
    return PreferenceTerms(
        losses_P,
        knobs.beta * chosen_P.detach(),
        knobs.beta * rejected_P.detach(),
        policy.chosen_P.detach(),
        policy.rejected_P.detach(),
        nll_P.detach(),
    )


def check_preference(name: str, knobs: PairKnobs = PairKnobs()) -> PreferenceLoss:  # noqa: B008 (frozen)
    """Return the loss of this name, after checking that it can be computed with these values and reads all of them.

    A value that differs from its default and that the loss would not read is an error: it would change nothing, and its
    user expects that it does.

    Raises:
        ArgumentError: A value is not allowed; ``where`` names its key.
    """
    loss = look_up(name, PREFERENCE_LOSSES, "loss of preference pairs", where="loss_type")
    _check_ranges(knobs)
    for key in (field.name for field in fields(knobs)):
        readers = [other for other, one in PREFERENCE_LOSSES.items() if key in one.reads]
        if readers and name not in readers and getattr(knobs, key) != getattr(PairKnobs, key):
            raise ArgumentError(
                f"the loss '{name}' does not read {key}", where=key, mend=f"leave it out, or use {' or '.join(readers)}"
            )
    _check_combination(name, loss, knobs)
    return loss


def _check_ranges(knobs: PairKnobs) -> None:
    """Refuse numbers that are not finite or out of range."""
    for field in fields(knobs):
        value = getattr(knobs, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(f"{field.name} is {value}", where=field.name, mend="give a finite number")
    if knobs.beta <= 0:
        raise ArgumentError(f"beta is {knobs.beta}: it must be positive", where="beta", mend="0.1 is usual")
    if not 0 <= knobs.label_smoothing < 0.5:
        raise ArgumentError(
            f"label_smoothing is {knobs.label_smoothing}: it must be in [0, 0.5)",
            where="label_smoothing",
            mend="at 0.5 half of the pairs would be the wrong way round, and nothing could be learnt from them",
        )
    for field in fields(knobs):
        value = getattr(knobs, field.name)
        if isinstance(value, int | float) and value < 0:
            raise ArgumentError(f"{field.name} is {value}: it must not be negative", where=field.name)


def _check_combination(name: str, loss: PreferenceLoss, knobs: PairKnobs) -> None:
    if name == "exo_pair" and knobs.label_smoothing == 0:
        raise ArgumentError(
            "exo_pair takes the logarithm of label_smoothing, which is 0",
            where="label_smoothing",
            mend="set label_smoothing: 0.001",
        )
    if knobs.reference_free and loss.needs_reference and not loss.margin_only:
        able = [other for other, one in PREFERENCE_LOSSES.items() if one.margin_only]
        raise ArgumentError(
            f"the loss '{name}' weighs each completion against the reference: it has no reference-free form",
            where="reference_free",
            mend=f"leave it out, or use one of: {', '.join(able)}",
        )
