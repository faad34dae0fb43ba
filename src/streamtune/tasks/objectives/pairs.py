"""Losses of preference pairs, with the formulas of their papers: from per-token log-probs to one loss for each pair.

    logp_K --sum by completion--> PairLogps --minus the reference--> scores --formula--> losses_P

A formula takes the two scores of each of P pairs and returns P losses. The score of a completion y is

    log pi(y|x) - log pi_ref(y|x)     if the loss has a reference (``needs_reference``)
    log pi(y|x)                       if it has none

A score is a sum over the tokens of y; with ``per_token`` or ``length_normalization`` it is their mean. In the formulas
below ``chosen`` and ``rejected`` are the scores of the two completions of a pair, and ``sigma`` is the logistic
function.

To add a loss, write a function, add it to :data:`PREFERENCE_LOSSES`, and add its name to
``recipe/keys/preferences.py``. A new parameter needs a field of :class:`PairOptions`, a recipe key, and an entry in
``OF_PAIRS``.

The caller sums ``losses_P`` and divides by the number of pairs of the optimizer step.

Shape suffixes: K target tokens, N completions, P pairs (N = 2 P).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from streamtune.base.text import look_up
from streamtune.errors import ArgumentError
from streamtune.tasks.objectives.advantages import sum_by_row, tokens_per_row

DEFAULT_REWARD_GAP = 0.5
"""copg: difference of the rewards of a pair without scores"""


@dataclass(frozen=True)
class PairOptions:
    """Parameters of the losses on preference pairs. Each but ``reward_gap_P`` is a recipe key of the same name."""

    beta: float = 0.1
    """factor of the scores in the loss; in DPO, a larger value keeps the policy closer to the reference"""
    label_smoothing: float = 0.0
    """assumed fraction of pairs with swapped labels"""
    simpo_gamma: float = 0.5
    """simpo: target margin"""
    cpo_alpha: float = 1.0
    """cpo: weight of the NLL"""
    dpop_lambda: float = 50.0
    """dpop: weight of the penalty if the chosen completion becomes less likely"""
    rpo_alpha: float | None = None
    """weight of an NLL that is added to any loss; None: no NLL"""
    length_normalization: bool = False
    """True to divide log-probs by the number of tokens; ipo, simpo and orpo always do"""
    reference_free: bool = False
    """True to ignore the reference: scores are then log-probs under the policy"""
    reward_gap_P: Tensor | float = DEFAULT_REWARD_GAP  # noqa: N815
    """copg: reward of the chosen completion minus reward of the rejected completion"""


def _sigmoid(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``-(1 - eps) log sigma(beta (chosen - rejected)) - eps log sigma(-beta (chosen - rejected))``.

    DPO (arXiv 2305.18290, eq. 7); with ``eps = label_smoothing > 0`` the conservative DPO of E. Mitchell's "A note on
    DPO with noisy preferences" (2023). Without a reference it is the preference term of CPO (arXiv 2401.08417, eq. 3).
    """
    logits_P, smoothing = options.beta * (chosen_P - rejected_P), options.label_smoothing
    return -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)


def _robust(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``(-(1 - eps) log sigma(beta d) + eps log sigma(-beta d)) / (1 - 2 eps)``, ``d = chosen - rejected``.

    Robust DPO (arXiv 2403.00409): unbiased if a fraction ``eps = label_smoothing`` of the pairs has swapped labels.
    """
    logits_P, smoothing = options.beta * (chosen_P - rejected_P), options.label_smoothing
    return (smoothing * logsigmoid(-logits_P) - (1 - smoothing) * logsigmoid(logits_P)) / (1 - 2 * smoothing)


def _hinge(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``max(0, 1 - beta (chosen - rejected))``: SLiC (arXiv 2305.10425) with RSO's score (arXiv 2309.06657)."""
    return torch.relu(1 - options.beta * (chosen_P - rejected_P))


def _ipo(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``(chosen - rejected - 1 / (2 beta))^2`` with scores per token.

    IPO (arXiv 2310.12036, eq. 17; its tau is beta). The mean over tokens is not in the paper, but in the authors' code
    and in TRL.
    """
    return (chosen_P - rejected_P - 1 / (2 * options.beta)) ** 2


def _exo_pair(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``q log(q / (1 - eps)) + (1 - q) log((1 - q) / eps)``, ``q = sigma(beta (chosen - rejected))``.

    EXO over pairs (arXiv 2402.00856, eq. 16): the reverse KL from the policy's preference to labels smoothed by
    ``eps = label_smoothing``, which must be positive.
    """
    logits_P = options.beta * (chosen_P - rejected_P)
    smoothing = torch.tensor(options.label_smoothing, dtype=logits_P.dtype, device=logits_P.device)
    won_P = torch.sigmoid(logits_P) * (logsigmoid(logits_P) - torch.log1p(-smoothing))
    lost_P = torch.sigmoid(-logits_P) * (logsigmoid(-logits_P) - torch.log(smoothing))
    return won_P + lost_P


def _sppo_hard(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``(chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2``.

    SPPO (arXiv 2405.00675, eq. 4.7) with hard probabilities: the chosen completion wins with probability 1.
    """
    return (chosen_P - 0.5 / options.beta) ** 2 + (rejected_P + 0.5 / options.beta) ** 2


def _apo_zero(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``1 - sigma(beta chosen) + sigma(beta rejected)``.

    APO-zero (arXiv 2408.06266, eq. 7): the chosen completion becomes more likely, the rejected completion less likely.
    """
    return torch.sigmoid(-options.beta * chosen_P) + torch.sigmoid(options.beta * rejected_P)


def _apo_down(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``sigma(beta chosen) + 1 - sigma(beta (chosen - rejected))``.

    APO-down (arXiv 2408.06266, eq. 8): both completions become less likely, the rejected completion more strongly.
    """
    return torch.sigmoid(options.beta * chosen_P) + torch.sigmoid(-options.beta * (chosen_P - rejected_P))


def _dpop(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``-log sigma(beta (chosen - rejected - lambda max(0, -chosen)))``.

    DPO-positive (arXiv 2402.13228, eq. 3): DPO with a penalty if the chosen completion is less likely than under the
    reference.
    """
    return -logsigmoid(options.beta * (chosen_P - rejected_P - options.dpop_lambda * torch.relu(-chosen_P)))


def _copg(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``-(R - beta / 2 (chosen - rejected)) (chosen - rejected)``.

    Contrastive policy gradient: the negative objective of arXiv 2406.19185, eqs. 7-9, with the gradient of eqs. 18-19.
    R is the gap between the rewards of the two completions. Without rewards it is 1/2, and the gradient
    is beta / 2 times the gradient of IPO over summed log-probs (eqs. 21-22).
    """
    gap_P = chosen_P - rejected_P
    return -(options.reward_gap_P - 0.5 * options.beta * gap_P) * gap_P


def _orpo(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``-beta log sigma(log odds(chosen) - log odds(rejected))``, ``odds(s) = e^s / (1 - e^s)``.

    ORPO (arXiv 2403.07691, eqs. 4 and 7; its lambda is beta) with scores per token. Eq. 6 of the paper adds the NLL of
    the chosen completion.
    """
    log_odds_P = (chosen_P - rejected_P) - (_log1mexp(chosen_P) - _log1mexp(rejected_P))
    return -options.beta * logsigmoid(log_odds_P)


def _simpo(chosen_P: Tensor, rejected_P: Tensor, options: PairOptions) -> Tensor:
    """Return ``-log sigma(beta (chosen - rejected) - gamma)``, scores per token: SimPO (arXiv 2405.14734, eq. 6).

    Labels are smoothed as in ``sigmoid``, as TRL does.
    """
    logits_P, smoothing = options.beta * (chosen_P - rejected_P) - options.simpo_gamma, options.label_smoothing
    return -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)


def _log1mexp(x_P: Tensor) -> Tensor:
    """Return ``log(1 - e^x)`` for x < 0 without cancellation.

    x is clamped to at most -eps of float32: a completion of probability 1 has infinite odds, and no useful gradient.
    """
    x_P = x_P.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(x_P < -0.6931471805599453, torch.log1p(-torch.exp(x_P)), torch.log(-torch.expm1(x_P)))


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss on preference pairs: its formula, the parameters that it uses, and whether it needs a reference."""

    formula: Callable[[Tensor, Tensor, PairOptions], Tensor]
    """(scores of chosen ``[P]``, of rejected ``[P]``, options) -> losses ``[P]``"""
    reads: frozenset[str]
    """names of the parameters that this loss, but not every loss, uses; ``scores`` are rewards of the completions"""
    needs_reference: bool = True
    per_token: bool = False
    """True if scores are means over tokens, as published"""
    margin_only: bool = False
    """True if the loss depends only on ``chosen - rejected``, so the reference may be uniform (``reference_free``)"""
    nll: Callable[[PairOptions], float] = lambda options: 0.0
    """function (options) -> weight of the NLL per token of the chosen completion, as published"""


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(_sigmoid, frozenset({"label_smoothing"}), margin_only=True),
    "robust": PreferenceLoss(_robust, frozenset({"label_smoothing"}), margin_only=True),
    "hinge": PreferenceLoss(_hinge, frozenset(), margin_only=True),
    "ipo": PreferenceLoss(_ipo, frozenset(), per_token=True, margin_only=True),
    "exo_pair": PreferenceLoss(_exo_pair, frozenset({"label_smoothing"}), margin_only=True),
    "sppo_hard": PreferenceLoss(_sppo_hard, frozenset()),
    "apo_zero": PreferenceLoss(_apo_zero, frozenset()),
    "apo_down": PreferenceLoss(_apo_down, frozenset()),
    "dpop": PreferenceLoss(_dpop, frozenset({"dpop_lambda"})),
    "copg": PreferenceLoss(_copg, frozenset({"scores"})),
    "orpo": PreferenceLoss(_orpo, frozenset(), needs_reference=False, per_token=True, nll=lambda options: 1.0),
    "simpo": PreferenceLoss(
        _simpo, frozenset({"label_smoothing", "simpo_gamma"}), needs_reference=False, per_token=True
    ),
    "cpo": PreferenceLoss(
        _sigmoid, frozenset({"label_smoothing", "cpo_alpha"}), needs_reference=False, nll=lambda each: each.cpo_alpha
    ),
}
"""Name of a loss on preference pairs -> the loss."""


@dataclass(frozen=True)
class PairLogps:
    """Log-probs of the chosen and rejected completions of P pairs under one model."""

    chosen_P: Tensor  # noqa: N815
    """log-prob of the chosen completion, summed over its tokens: float64 ``[P]``"""
    rejected_P: Tensor  # noqa: N815
    chosen_tokens_P: Tensor  # noqa: N815
    """number of target tokens of the chosen completion: int64 ``[P]``"""
    rejected_tokens_P: Tensor  # noqa: N815

    @classmethod
    def from_tokens(cls, logp_K: Tensor, row_K: Tensor, num_rows: int) -> PairLogps:
        """Sum log-probs over tokens. Pair p has the completions ``2 p`` (chosen) and ``2 p + 1`` (rejected).

        ``row_K`` is the completion of each token, and ``num_rows`` the number of completions.
        """
        assert num_rows % 2 == 0, f"the number of completions must be even, found {num_rows}"
        logp_N, tokens_N = sum_by_row(logp_K, row_K, num_rows), tokens_per_row(row_K, num_rows)
        return cls(logp_N[0::2], logp_N[1::2], tokens_N[0::2], tokens_N[1::2])

    def token_means(self) -> PairLogps:
        return PairLogps(
            self.chosen_P / self.chosen_tokens_P.clamp(min=1),
            self.rejected_P / self.rejected_tokens_P.clamp(min=1),
            self.chosen_tokens_P,
            self.rejected_tokens_P,
        )


@dataclass(frozen=True)
class PreferenceTerms:
    """Losses of P pairs, and values for metrics. All are float64 ``[P]``; only ``losses_P`` has a gradient."""

    losses_P: Tensor  # noqa: N815
    chosen_rewards_P: Tensor  # noqa: N815
    """beta times the score: the log-ratio of policy and reference or, without a reference, the log-prob"""
    rejected_rewards_P: Tensor  # noqa: N815
    chosen_logps_P: Tensor  # noqa: N815
    """log-prob under the policy: divided by the number of tokens if the loss does so, else summed"""
    rejected_logps_P: Tensor  # noqa: N815
    nll_P: Tensor  # noqa: N815
    """mean negative log-likelihood of a token of the chosen completion"""

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return metrics: TRL's name -> (sum over pairs, number of pairs). Synchronizes with the device once."""
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
    options: PairOptions = PairOptions(),
    *,
    scores: tuple[Tensor, Tensor] | None = None,
) -> PreferenceTerms:
    """Return the loss of each pair: the formula of :data:`PREFERENCE_LOSSES`, plus NLL terms.

    The NLL of a pair is the mean over the tokens of its chosen completion, so it does not depend on other pairs of a
    micro-batch. Its weight is 1 in orpo and ``cpo_alpha`` in cpo. ``rpo_alpha`` adds it to any loss (arXiv 2404.19733,
    eq. 1).

    Args:
        name: Name of the loss, a key of :data:`PREFERENCE_LOSSES`.
        reference: Log-probs under the reference, which get no gradient; None if the loss needs no reference.
        scores: Rewards for copg (chosen ``[P]``, rejected ``[P]``). None: +1/4 and -1/4.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, a given value is not used by the loss, or the
            reference is missing.

    Example:
        >>> policy = PairLogps(torch.tensor([-4.0]), torch.tensor([-6.0]), torch.tensor([3]), torch.tensor([3]))
        >>> reference = PairLogps(torch.tensor([-5.0]), torch.tensor([-5.0]), torch.tensor([3]), torch.tensor([3]))
        >>> terms = preference_loss("sigmoid", policy, reference, PairOptions(beta=0.5))
        >>> torch.allclose(terms.losses_P.float(), -torch.nn.functional.logsigmoid(torch.tensor([0.5 * 2.0])))
        True
    """
    loss = check_preference_loss(name, options)
    if scores is not None and "scores" not in loss.reads:
        raise ArgumentError(f"the loss '{name}' does not read scores (rewards)", where="loss_type", fix="use copg")
    reads_reference = loss.needs_reference and not options.reference_free
    if reads_reference and reference is None:
        raise ArgumentError(
            f"the loss '{name}' needs a reference, found None",
            where="loss_type",
            fix="give the log-probs of a reference, or use orpo, simpo or cpo",
        )
    if scores is not None:
        options = replace(options, reward_gap_P=(scores[0] - scores[1]).to(policy.chosen_P))
    return _compute_terms(loss, policy, reference if reads_reference else None, options)


def _compute_terms(
    loss: PreferenceLoss, policy: PairLogps, reference: PairLogps | None, options: PairOptions
) -> PreferenceTerms:
    nll_P = -policy.token_means().chosen_P
    nll_weight = loss.nll(options) + (options.rpo_alpha or 0.0)
    if loss.per_token or options.length_normalization:
        policy, reference = policy.token_means(), reference and reference.token_means()
    chosen_P, rejected_P = policy.chosen_P, policy.rejected_P
    if reference is not None:
        chosen_P, rejected_P = chosen_P - reference.chosen_P.detach(), rejected_P - reference.rejected_P.detach()
    losses_P = loss.formula(chosen_P, rejected_P, options)
    if nll_weight:
        losses_P = losses_P + nll_weight * nll_P
    return PreferenceTerms(
        losses_P,
        options.beta * chosen_P.detach(),
        options.beta * rejected_P.detach(),
        policy.chosen_P.detach(),
        policy.rejected_P.detach(),
        nll_P.detach(),
    )


def check_preference_loss(name: str, options: PairOptions = PairOptions()) -> PreferenceLoss:
    """Return the loss called ``name``, after checking that its parameters are valid.

    Raises:
        ArgumentError: The name is unknown, a value is out of range, or a parameter is set that the loss does not use.
    """
    loss = look_up(name, PREFERENCE_LOSSES, "loss of preference pairs", where="loss_type")
    _check_ranges(options)
    for key in (field.name for field in fields(options)):
        readers = [other for other, one in PREFERENCE_LOSSES.items() if key in one.reads]
        if readers and name not in readers and getattr(options, key) != getattr(PairOptions, key):
            raise ArgumentError(
                f"the loss '{name}' does not read {key}", where=key, fix=f"delete it, or use {' or '.join(readers)}"
            )
    _check_combination(name, loss, options)
    return loss


def _check_ranges(options: PairOptions) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(f"{field.name} must be finite, found {value}", where=field.name)
    if options.beta <= 0:
        raise ArgumentError(f"beta must be positive, found {options.beta}", where="beta", fix="0.1 is usual")
    if not 0 <= options.label_smoothing < 0.5:
        raise ArgumentError(
            f"label_smoothing must be in [0, 0.5), found {options.label_smoothing}",
            where="label_smoothing",
            fix="use a smaller value: at 0.5 half of the labels would be swapped, and nothing could be learnt",
        )
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, int | float) and value < 0:
            raise ArgumentError(f"{field.name} must not be negative, found {value}", where=field.name)


def _check_combination(name: str, loss: PreferenceLoss, options: PairOptions) -> None:
    if name == "exo_pair" and options.label_smoothing == 0:
        raise ArgumentError(
            "exo_pair takes the logarithm of label_smoothing, which is 0",
            where="label_smoothing",
            fix="set label_smoothing: 0.001",
        )
    if options.reference_free and loss.needs_reference and not loss.margin_only:
        able = [other for other, one in PREFERENCE_LOSSES.items() if one.margin_only]
        raise ArgumentError(
            f"the loss '{name}' compares each completion with the reference, so reference_free is undefined for it",
            where="reference_free",
            fix=f"delete reference_free, or use one of: {', '.join(able)}",
        )
