"""Comparison of a written model with the trained model: logits and greedy text, on the same rows.

The weights that adapters changed may differ by one rounding each. No fixed bound on the effect fits all models, dtypes
and depths, so the yardstick is measured: the trained model, its adapters unmerged, with each of these weights moved at
random by one rounding of the written dtype. All is computed in fp32
(:func:`streamtune.programs.export.merge.widened`), because bfloat16 arithmetic would hide differences.

    R     logits of the trained model, in fp32                   [tokens, vocabulary]
    N     logits with one random rounding of the weights         the yardstick
    M     logits of the written model, in fp32

A token's error is ``|M - R| / |R|`` over the vocabulary. The written model passes if the median error is at most 3
times N's, and the largest at most 4 times. In mixtures of experts a rounding may route a token to another expert: there
1 token in 20 may be further off. Greedy texts may differ only after two next tokens as close as that.

A wrong merge is off by the effect of the adapters, which is measured as well. If the effect is below the yardstick, the
rounding of the merge loses the adapters, and the report says so.

The rows are the first of the run's data, or random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.data.templates import fix_date
from streamtune.errors import StreamTuneError
from streamtune.models import with_generation
from streamtune.programs.export.merge import Rounding, widened
from streamtune.programs.export.source import TrainedModel
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.run.data import make_sources
from streamtune.tasks import task_of
from streamtune.tasks.task import chat_options

FLOOR = 2e-6
"""Error of fp32 arithmetic alone, such as two ways to compute one product."""
MEDIAN, LARGEST = 3.0, 4.0
"""Allowed multiples of the yardstick for the median and the largest token error."""
ROUTED = 0.05
"""Share of tokens that may be routed to another expert."""
DRAWS = 2
"""Random roundings of the yardstick."""
LOGITS_BYTES = 256 << 20
"""Most bytes of kept logits."""
COARSE = 0.3
"""Yardstick above which the comparison is meaningless."""

Doing = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class AsTrained:
    """Logits and text of the trained model."""

    rows: list[Tensor]
    """token ids, ``[1, T]`` each"""
    logits: list[Tensor]
    """R: ``[T, vocabulary]`` per row, fp32"""
    yardstick: Tensor
    """``[tokens]``: larger error of the roundings N"""
    margins: float
    """largest change of one logit by a rounding"""
    effect: float
    """``|base - R| / |R|``, the effect of the adapters; 0 without adapters"""
    own: float
    """``|own - R| / |R|``, with the model in its own dtype"""
    own_margin: float
    """largest difference of one logit between the model's own dtype and fp32"""
    written: list[int]
    """greedy tokens after the prompt"""
    scores: Tensor
    """``[len(written), vocabulary]``: logits of the greedy tokens"""
    prompt: Tensor
    """``[1, P]``"""
    routed: bool
    """True for a mixture of experts."""


@dataclass(frozen=True)
class Differences:
    """Differences between the written and the trained model, with the allowed values."""

    tokens: int
    median: float
    """median token error ``|M - R| / |R|``"""
    largest: float
    """largest token error"""
    relative: float
    """``|M - R| / |R|`` over all tokens"""
    largest_logit: float
    """largest difference of one logit"""
    allowed_median: float
    allowed_largest: float
    beyond: int
    """tokens beyond ``allowed_largest``"""
    may_be_beyond: int
    effect: float
    own: float
    """error of the trained model in its own dtype"""
    own_after: float
    """error of the written model in its own dtype"""
    text_parts_at: int | None
    """first greedy token that differs, or None"""
    text_tokens: int
    text_tie: bool
    """True if a rounding explains the other token"""
    before: list[int]
    after: list[int]

    @property
    def passes(self) -> bool:
        """True if the models are equal up to one rounding of the weights."""
        near = self.median <= self.allowed_median and self.beyond <= self.may_be_beyond
        return near and self.allowed_median < COARSE and (self.text_parts_at is None or self.text_tie)

    @property
    def why_not(self) -> str:
        """First broken rule, in words; empty if the model passes."""
        if self.passes:
            return ""
        if not self.allowed_median < COARSE:  # NaN as well
            return (
                f"one rounding of its weights moves the logits by {self.allowed_median / MEDIAN:.1g}: nothing to tell"
            )
        if not self.median <= self.allowed_median:
            return (
                f"its logits are off by {self.median:.1e} in the median, where one rounding of the weights explains "
                f"{self.allowed_median:.1e}"
            )
        if self.beyond > self.may_be_beyond:
            return f"{self.beyond} of {self.tokens} tokens are off by more than {self.allowed_largest:.1e}"
        return f"its greedy text parts from the other at token {self.text_parts_at}, which was no close call"


@torch.no_grad()
def measure(
    model: Any,
    rows: Sequence[Tensor],
    prompt: Tensor,
    *,
    dtype: torch.dtype | None,
    everything: bool = False,
    new_tokens: int = 24,
    doing: Doing = lambda text: nullcontext(),
) -> AsTrained:
    """Compute logits, text and yardstick of the trained model.

    Args:
        model: Trained model with its adapters, in evaluation mode; it is left unchanged.
        rows: Token ids, ``[1, T]`` each.
        prompt: Token ids to continue, ``[1, P]``.
        dtype: Dtype of the written weights; None without rounding.
        everything: Round all weights, not only those that adapters change.
        new_tokens: Greedy tokens.
        doing: Returns a context that shows a message.
    """
    with doing("logits of the model as it trained"):
        with widened(model):
            logits = [row_logits(model, row) for row in rows]
        size = _norm(logits)
        own = [row_logits(model, row) for row in rows]
    own_error = _distance(own, logits) / size
    own_margin = _largest(own, logits)
    del own
    effect = 0.0
    if hasattr(model, "disable_adapter"):
        with doing("logits without the adapters"), model.disable_adapter(), widened(model):
            effect = _distance((row_logits(model, row) for row in rows), logits) / size
    yardstick, margin = torch.full((sum(each.shape[0] for each in logits),), FLOOR / MEDIAN), 0.0
    for seed in range(DRAWS if dtype is not None else 0):
        assert dtype is not None
        with (
            doing(f"logits with the weights rounded at random, {seed + 1} of {DRAWS}"),
            widened(model, Rounding(model, dtype, everything=everything, seed=seed)),
        ):
            errors, largest = row_errors(model, rows, logits)
        yardstick, margin = torch.maximum(yardstick, errors), max(margin, largest)
    with doing("greedy text of the model as it trained"):
        written, scores = _greedy(model, prompt, new_tokens)
    return AsTrained(
        list(rows), logits, yardstick, margin, effect, own_error, own_margin, written, scores, prompt, _routes(model)
    )


@torch.no_grad()
def compare(trained: AsTrained, model: nn.Module, *, doing: Doing = lambda text: nullcontext()) -> Differences:
    """Compare a written and loaded model, in evaluation mode, with the result of :func:`measure`."""
    rows = trained.rows
    with doing("logits of the written model"):
        with widened(model):
            errors, largest_logit = row_errors(model, rows, trained.logits)
        sizes = torch.cat([each.norm(dim=-1) for each in trained.logits])
        size = _norm(trained.logits)
        after = [row_logits(model, row) for row in rows]
        own_after, own_margin = _distance(after, trained.logits) / size, _largest(after, trained.logits)
        del after
    allowed = LARGEST * float(trained.yardstick.max())
    with doing("greedy text of the written model"):
        written, _ = _greedy(model, trained.prompt, len(trained.scores))
    parts = next(
        (at for at, pair in enumerate(zip(trained.written, written, strict=False)) if pair[0] != pair[1]), None
    )
    if parts is None and len(trained.written) != len(written):
        parts = min(len(trained.written), len(written))
    return Differences(
        tokens=len(errors),
        median=float(errors.median()),
        largest=float(errors.max()),
        relative=float((errors * sizes).norm()) / size,
        largest_logit=largest_logit,
        allowed_median=MEDIAN * float(trained.yardstick.median()),
        allowed_largest=allowed,
        beyond=int((~(errors <= allowed)).sum()),  # NaN is beyond
        may_be_beyond=max(1, int(ROUTED * len(errors))) if trained.routed else 0,
        effect=trained.effect,
        own=trained.own,
        own_after=own_after,
        text_parts_at=parts,
        text_tokens=len(trained.written),
        text_tie=parts is not None and _is_tie(trained, written, parts, LARGEST * (trained.own_margin + own_margin)),
        before=trained.written,
        after=written,
    )


def _is_tie(trained: AsTrained, written: list[int], at: int, margin: float) -> bool:
    """Return True if the trained model's logits of the two tokens are closer together than roundings move them."""
    if at >= len(trained.written) or at >= len(written):
        return False
    scores = trained.scores[at]
    return float(scores[trained.written[at]] - scores[written[at]]) <= margin + 1e-5


def row_logits(model: Any, row: Tensor) -> Tensor:
    """Return the logits of one row, ``[T, vocabulary]``, in fp32 on the CPU."""
    device = model_device(model)
    found: Tensor = model(input_ids=row.to(device), use_cache=False).logits
    return found[0].float().cpu()


def row_errors(model: nn.Module, rows: Sequence[Tensor], logits: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Return the relative error of each token, ``[tokens]``, and the largest logit difference."""
    errors, largest = [], 0.0
    for row, want in zip(rows, logits, strict=True):
        difference = row_logits(model, row) - want
        errors.append(difference.norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30))
        largest = max(largest, float(difference.abs().max()))
    return torch.cat(errors), largest


def _distance(found: Iterator[Tensor] | Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return sum(float((a - b).norm()) ** 2 for a, b in zip(found, want, strict=True)) ** 0.5


def _norm(logits: Sequence[Tensor]) -> float:
    return sum(float(each.norm()) ** 2 for each in logits) ** 0.5 or 1.0


def _largest(found: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, want, strict=True))


def _greedy(model: Any, prompt: Tensor, new_tokens: int) -> tuple[list[int], Tensor]:
    """Return the greedy tokens after a prompt, and their logits ``[N, vocabulary]``."""
    base = base_of(model)
    # Without the checkpoint's generation settings: penalties and temperatures are not weights.
    plain = with_generation(base, GenerationConfig(pad_token_id=0, eos_token_id=None))
    output = plain.generate(
        input_ids=prompt.to(base.device),
        attention_mask=torch.ones_like(prompt).to(base.device),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.shape[1] :].tolist(), torch.cat([each.float().cpu() for each in output.logits])


def _routes(model: nn.Module) -> bool:
    config = base_of(model).config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(isinstance(getattr(config, name, None), int) and getattr(config, name) > 1 for name in names)


# --- the rows ---------------------------------------------------------------------------------------------------------


ROWS = 4
"""Rows to compare."""
FIRST_ROWS = 16
"""Rows read from each source."""
TOKENS = 256
"""Most tokens of a row, from its start."""
PROMPT_TOKENS = 64
"""Most tokens of the greedy text's prompt."""


@dataclass(frozen=True)
class CheckRows:
    """Rows to compare on."""

    rows: list[Tensor]
    """``[1, T]`` token ids each."""
    prompt: Tensor
    """``[1, P]`` token ids to continue."""
    origin: str
    """source of the rows, in words"""
    own: bool
    """True for rows of the run's data"""


def choose_rows(trained: TrainedModel, model: Any, tokenizer: Any, notify: Callable[[str], None]) -> CheckRows:
    """Return the first rows of the run's data, cut to a few hundred tokens; else the sample prompt or random tokens."""
    vocabulary = base_of(model).get_input_embeddings().weight.shape[0]
    at_most = max(16, min(ROWS * TOKENS, LOGITS_BYTES // (4 * vocabulary)))
    config = base_of(model).config.get_text_config(decoder=True)
    limit = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    found: list[tuple[list[int], str]] = []
    why = "there is no run that names its data"
    if trained.loaded is not None:
        try:
            found = [each for each in _own_rows(trained, tokenizer) if max(each[0]) < vocabulary]
            why = "the run's data has no rows"
        except (StreamTuneError, OSError, ValueError) as error:
            why = f"the run's data cannot be read any more ({_first_line(error)})"
    if found:
        left = at_most
        rows: list[Tensor] = []
        for ids, _ in found:
            if left >= 2 and len(rows) < ROWS:
                rows.append(torch.tensor([ids[: min(limit, left)]]))
                left -= rows[-1].shape[1]
        tokens = sum(row.shape[1] for row in rows)
        named = f"{found[0][1]} and {len(rows) - 1} more" if len(rows) > 1 else found[0][1]
        return CheckRows(rows, _prompt(rows[0], limit), f"{named}: {tokens:,} tokens", own=True)
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(min(vocabulary, max(len(tokenizer), 2)), (1, min(limit, at_most)), generator=generator)
    if recipe is not None and recipe.sample is not None and recipe.sample.prompts:
        ids = _encode(tokenizer, recipe.sample.prompts[0], recipe)[:limit]
        if len(ids) >= 2:
            rows = [torch.tensor([ids]), drawn]
            notify(f"{why}, so the sample prompt and random tokens are compared")
            return CheckRows(rows, _prompt(rows[0], limit), "the sample prompt and random tokens", own=False)
    notify(f"{why}, so random tokens are compared")
    return CheckRows([drawn], _prompt(drawn, limit), f"{drawn.shape[1]:,} random tokens", own=False)


def _prompt(row: Tensor, limit: int) -> Tensor:
    """Return the first half of a row as a prompt."""
    return row[:, : max(1, min(PROMPT_TOKENS, row.shape[1] // 2, limit - 32 if limit > 48 else 1))]


def _own_rows(trained: TrainedModel, tokenizer: Any) -> list[tuple[list[int], str]]:
    """Return token ids and origin of the first rows, prepared for the run's objective."""
    assert trained.loaded is not None
    sources = [replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS))
               for source in make_sources(trained.loaded, evaluated=False)]  # fmt: skip
    fix_date(trained.identity.get("date"))
    task = task_of(trained.loaded.recipe)
    rows: Sequence[Any] = task.prepare(sources, tokenizer, lambda text: None, val_size=0.0).train
    return [(ids, row.origin) for row in rows[: 4 * ROWS] if len(ids := _ids(row)) >= 2]


def _ids(row: Any) -> list[int]:
    """Return the token ids of a row; of a tree, the prompt with its first completion."""
    if isinstance(row, data.Tree):
        return [*row.prompt, *row.completions[0]]
    return [int(token) for token in row.input_ids]


def _encode(tokenizer: Any, prompt: str, recipe: TrainedTokenKeys) -> list[int]:
    return models.encode_prompt(tokenizer, prompt, chat_options(recipe))


def _first_line(error: Exception) -> str:
    return str(getattr(error, "what", error)).splitlines()[0][:200]
