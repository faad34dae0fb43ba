"""The losses of preference pairs, each the formula of its paper.

Every function here takes two scores of P pairs and returns P losses. A score is

    log pi(y|x) - log pi_ref(y|x)     where the loss has a reference (``needs_reference``)
    log pi(y|x)                       where it has none

of a completion y: the sum over its tokens, or the mean where the loss is defined per token (``per_token``) or the user
asks for it. Below ``w`` and ``l`` are the scores of the chosen (won) and the rejected (lost) completion, ``sigma`` is
the logistic function. To add a loss, write a function, a line of the table and its name in ``recipe/dpo.py``; for a
parameter of its own, a field of :class:`PairKnobs` and a key of the same name.

Shape suffixes: P pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairKnobs:
    """Parameters of the formulas besides the two scores. A field that is a key of the recipe has its value."""

    beta: float = 0.1
    """strength of the pull to the reference, or the loss's own factor"""
    label_smoothing: float = 0.0
    """share of pairs taken to be the wrong way round"""
    simpo_gamma: float = 0.5
    """target margin"""
    cpo_alpha: float = 1.0
    """weight of the NLL"""
    dpop_lambda: float = 50.0
    """weight of the penalty"""
    rpo_alpha: float | None = None
    """weight of an NLL that is added to any loss"""
    length_normalization: bool = False
    """log-probs per token; ipo, simpo and orpo always read these"""
    reference_free: bool = False
    """take the reference as uniform: scores are log-probs"""
    reward_gap_P: Tensor | float = 0.5  # noqa: N815
    """copg: reward of the chosen less that of the rejected completion"""


def _sigmoid(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``-(1 - eps) log sigma(beta (w - l)) - eps log sigma(-beta (w - l))``.

    DPO (arXiv 2305.18290, eq. 7); with ``eps = label_smoothing > 0`` the conservative DPO of E. Mitchell's "A note on
    DPO with noisy preferences" (2023). Over plain log-probs it is the preference term of CPO (arXiv 2401.08417, eq. 3).
    """
    logits_P, smoothing = knobs.beta * (w_P - l_P), knobs.label_smoothing
    return -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)


def _robust(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``(-(1 - eps) log sigma(beta (w - l)) + eps log sigma(-beta (w - l))) / (1 - 2 eps)``.

    Robust DPO (arXiv 2403.00409): unbiased where a share ``eps = label_smoothing`` of the pairs is the wrong way round.
    """
    logits_P, smoothing = knobs.beta * (w_P - l_P), knobs.label_smoothing
    return (smoothing * logsigmoid(-logits_P) - (1 - smoothing) * logsigmoid(logits_P)) / (1 - 2 * smoothing)


def _hinge(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``max(0, 1 - beta (w - l))``: SLiC (arXiv 2305.10425) with RSO's normalised score (arXiv 2309.06657)."""
    return torch.relu(1 - knobs.beta * (w_P - l_P))


def _ipo(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``(w - l - 1 / (2 beta))^2`` with scores per token.

    IPO (arXiv 2310.12036, eq. 17; its tau is beta). The mean over tokens is not in the paper's text, but in the code of
    its authors, and in TRL.
    """
    return (w_P - l_P - 1 / (2 * knobs.beta)) ** 2


def _exo_pair(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``q (log q - log(1 - eps)) + (1 - q) (log(1 - q) - log eps)`` with ``q = sigma(beta (w - l))``.

    EXO over pairs (arXiv 2402.00856, eq. 16): the reverse KL from the policy's preference to labels smoothed by
    ``eps = label_smoothing``, which must be positive.
    """
    logits_P = knobs.beta * (w_P - l_P)
    smoothing = torch.tensor(knobs.label_smoothing, dtype=logits_P.dtype, device=logits_P.device)
    won_P = torch.sigmoid(logits_P) * (logsigmoid(logits_P) - torch.log1p(-smoothing))
    lost_P = torch.sigmoid(-logits_P) * (logsigmoid(-logits_P) - torch.log(smoothing))
    return won_P + lost_P


def _sppo_hard(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``(w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2``.

    SPPO (arXiv 2405.00675, eq. 4.7) with hard probabilities: 1 that the chosen one wins, 0 that the rejected one does.
    """
    return (w_P - 0.5 / knobs.beta) ** 2 + (l_P + 0.5 / knobs.beta) ** 2


def _apo_zero(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``1 - sigma(beta w) + sigma(beta l)``: APO-zero (arXiv 2408.06266, eq. 7), chosen up, rejected down."""
    return torch.sigmoid(-knobs.beta * w_P) + torch.sigmoid(knobs.beta * l_P)


def _apo_down(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``sigma(beta w) + 1 - sigma(beta (w - l))``.

    APO-down (arXiv 2408.06266, eq. 8): both down, rejected further.
    """
    return torch.sigmoid(knobs.beta * w_P) + torch.sigmoid(-knobs.beta * (w_P - l_P))


def _dpop(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``-log sigma(beta (w - l - lambda max(0, -w)))``.

    DPO-positive (arXiv 2402.13228, eq. 3): a penalty where the chosen completion is less likely than under the
    reference.
    """
    return -logsigmoid(knobs.beta * (w_P - l_P - knobs.dpop_lambda * torch.relu(-w_P)))


def _copg(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``-(R_w - R_l - beta / 2 (w - l)) (w - l)``.

    Contrastive policy gradient (arXiv 2406.19185, eqs. 7-9, its objective negated); the gradient is that of eqs. 18-19.
    R are scores of the completions. Without them ``R_w - R_l = 1/2``, where the gradient is that of IPO over summed
    log-probs, times beta / 2 (eqs. 21-22).
    """
    gap_P = w_P - l_P
    return -(knobs.reward_gap_P - 0.5 * knobs.beta * gap_P) * gap_P


def _orpo(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``-beta log sigma(log odds(w) - log odds(l))``, ``odds(s) = e^s / (1 - e^s)``, scores per token.

    ORPO (arXiv 2403.07691, eqs. 4 and 7; its lambda is beta). Eq. 6 adds the NLL of the chosen completion.
    """
    log_odds_P = (w_P - l_P) - (_log1mexp(w_P) - _log1mexp(l_P))
    return -knobs.beta * logsigmoid(log_odds_P)


def _simpo(w_P: Tensor, l_P: Tensor, knobs: PairKnobs) -> Tensor:
    """Return ``-log sigma(beta (w - l) - gamma)``, scores per token: SimPO (arXiv 2405.14734, eq. 6).

    Label smoothing is that of ``sigmoid``, as in TRL.
    """
    logits_P, smoothing = knobs.beta * (w_P - l_P) - knobs.simpo_gamma, knobs.label_smoothing
    return -(1 - smoothing) * logsigmoid(logits_P) - smoothing * logsigmoid(-logits_P)


def _log1mexp(x_P: Tensor) -> Tensor:
    """Return ``log(1 - e^x)`` for x < 0 without cancellation.

    x is clamped to at most -eps of float32: a completion of probability 1 has infinite odds, and no useful gradient.
    """
    x_P = x_P.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.where(x_P < -0.6931471805599453, torch.log1p(-torch.exp(x_P)), torch.log(-torch.expm1(x_P)))


@dataclass(frozen=True)
class PreferenceLoss:
    """One loss of :data:`PREFERENCE_LOSSES`."""

    formula: Callable[[Tensor, Tensor, PairKnobs], Tensor]
    """(scores of chosen ``[P]``, of rejected ``[P]``, knobs) -> losses ``[P]``"""
    reads: frozenset[str]
    """knobs that some losses read and that this one reads too; ``scores`` are rewards of the completions"""
    needs_reference: bool = True
    per_token: bool = False
    """scores are means over tokens, as published"""
    margin_only: bool = False
    """only ``w - l`` counts, so that the reference may be taken as uniform (``reference_free``)"""
    nll: Callable[[PairKnobs], float] = lambda knobs: 0.0
    """weight of the chosen completion's NLL per token, as published"""


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
    "orpo": PreferenceLoss(_orpo, frozenset(), needs_reference=False, per_token=True, nll=lambda knobs: 1.0),
    "simpo": PreferenceLoss(
        _simpo, frozenset({"label_smoothing", "simpo_gamma"}), needs_reference=False, per_token=True
    ),
    "cpo": PreferenceLoss(
        _sigmoid, frozenset({"label_smoothing", "cpo_alpha"}), needs_reference=False, nll=lambda knobs: knobs.cpo_alpha
    ),
}
"""Name -> loss of chosen and rejected completions. Unpaired rows have a table of their own (``UNPAIRED_LOSSES``)."""
