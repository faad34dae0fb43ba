"""Compare a written model with the model as it trained: logits and greedy text, on the same rows.

What may differ is the rounding of the weights that adapters changed, once each, and what arithmetic makes of it. No
fixed number bounds that over models, dtypes and depths. So the yardstick is measured: the model as it trained, its
adapters unmerged, with each of those weights moved at random by one rounding of the written dtype. Both are computed in
fp32 (:func:`streamtune.programs.export.merge.widened`), where bfloat16's own arithmetic hides nothing.

    R     logits of the model as it trained, in fp32             [tokens, vocabulary]
    N     the same with one random rounding of the weights       the yardstick
    M     logits of the written model, in fp32

A token's error is ``|M - R| / |R|`` over the vocabulary, and of N likewise. The written model passes if the median of
its errors is at most three times that of N, and the largest at most four times. In mixtures of experts a rounding may
send a token to another expert: there one token in twenty may be further off. Greedy text may part only where the two
next tokens were as close as that.

A merge that is wrong is off by what the adapters do, which is measured as well: where that is less than the yardstick,
merging loses the adapters in the rounding, and the report says so.

The rows are the first of the run's own data, or random tokens in their place.
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
from streamtune.run.recipe_lines import make_sources
from streamtune.tasks import task_of
from streamtune.tasks.task import chat_options

FLOOR = 2e-6
"""Error that fp32 arithmetic alone may make: two ways to compute one product, a tensor at another address."""
MEDIAN, LARGEST = 3.0, 4.0
"""Multiples of the yardstick that the median and the largest error of a token may reach."""
ROUTED = 0.05
"""Part of the tokens that routers may send elsewhere."""
DRAWS = 2
"""Random roundings of the yardstick."""
LOGITS_BYTES = 256 << 20
"""Most bytes of logits that are held."""
COARSE = 0.3
"""A yardstick above this tells nothing."""

Doing = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class AsTrained:
    """Logits and text of the model as it trained, to compare with."""

    rows: list[Tensor]
    """Token ids, ``[1, T]`` each."""
    logits: list[Tensor]
    """R: ``[T, vocabulary]`` of each row, fp32."""
    yardstick: Tensor
    """``[tokens]``: the larger error of the roundings N."""
    margins: float
    """Largest difference of one logit that a rounding made."""
    effect: float
    """``|base - R| / |R|``: what the adapters do; 0 without adapters."""
    own: float
    """``|own - R| / |R|``: what the model's own dtype makes of it."""
    own_margin: float
    """Largest difference of one logit between the model's own dtype and fp32."""
    written: list[int]
    """Greedy tokens after the prompt."""
    scores: Tensor
    """``[len(written), vocabulary]``: the logits they were chosen from."""
    prompt: Tensor
    """``[1, P]``"""
    routed: bool
    """True for a mixture of experts."""


@dataclass(frozen=True)
class Differences:
    """Distances of a written model from the model as it trained, and how large they may be."""

    tokens: int
    median: float
    """Median over the tokens of ``|M - R| / |R|``."""
    largest: float
    """The largest of a token."""
    relative: float
    """``|M - R| / |R|`` over all tokens."""
    largest_logit: float
    """The largest difference of one logit."""
    allowed_median: float
    allowed_largest: float
    beyond: int
    """Tokens further off than that."""
    may_be_beyond: int
    effect: float
    own: float
    """The same of the model as it trained in its own dtype: the error of the arithmetic it is used with."""
    own_after: float
    """And of the written model in its own dtype."""
    text_parts_at: int | None
    """The first greedy token that differs; None where all are the same."""
    text_tokens: int
    text_tie: bool
    """True if the two tokens there are as close as the roundings."""
    before: list[int]
    after: list[int]

    @property
    def passes(self) -> bool:
        """True if the written model is the model as it trained, to one rounding of its weights."""
        near = self.median <= self.allowed_median and self.beyond <= self.may_be_beyond
        return near and self.allowed_median < COARSE and (self.text_parts_at is None or self.text_tie)

    @property
    def why_not(self) -> str:
        """The first rule that it breaks, in words; empty where it passes."""
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
    """Compute what a written model is compared with.

    Args:
        model: As it trained, with its adapters, in evaluation mode; it is as before afterwards.
        rows: Token ids, ``[1, T]`` each.
        prompt: Token ids to continue, ``[1, P]``.
        dtype: Of the weights that are written; None where they are written as they are, with nothing to round.
        everything: All weights are rounded to it, and not those alone that adapters change.
        new_tokens: Greedy tokens to write.
        doing: Shows what is computed.
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
    """Compare a model that was written and loaded again with the model as it trained.

    Args:
        trained: From :func:`measure`.
        model: In evaluation mode.
        doing: Shows what is computed.
    """
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
    """Return True if the model as it trained has the two next tokens closer together than roundings move them."""
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
    """Return the relative error of each token, ``[tokens]``, and the largest difference of one logit."""
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
    """Return the likeliest tokens after a prompt, and the logits ``[N, vocabulary]`` they were chosen from."""
    base = base_of(model)
    # Without the settings of the checkpoint: penalties and temperatures are no weights.
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
"""Rows that are compared."""
FIRST_ROWS = 16
"""Rows of each source that are read."""
TOKENS = 256
"""Tokens of each, from its start."""
PROMPT_TOKENS = 64
"""Tokens of the prompt of the greedy text."""


@dataclass(frozen=True)
class CheckRows:
    """Rows to compare on."""

    rows: list[Tensor]
    """``[1, T]`` token ids each."""
    prompt: Tensor
    """``[1, P]`` token ids to continue."""
    origin: str
    """Their source, in words."""
    own: bool
    """True for rows of the run's own data."""


def choose_rows(trained: TrainedModel, model: Any, tokenizer: Any, notify: Callable[[str], None]) -> CheckRows:
    """Return the first rows of the run's data, cut to a few hundred tokens; else the sample prompt or random tokens.

    Args:
        trained: The run.
        model: For the size of its vocabulary and its positions.
        tokenizer: The model's.
        notify: Called with the reason where the data cannot be read.
    """
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
    """Return the start of a row as a prompt: half of it, so that what follows is like the data."""
    return row[:, : max(1, min(PROMPT_TOKENS, row.shape[1] // 2, limit - 32 if limit > 48 else 1))]


def _own_rows(trained: TrainedModel, tokenizer: Any) -> list[tuple[list[int], str]]:
    """Return token ids and origin of the first rows, as the run's objective prepares them."""
    assert trained.loaded is not None
    sources = [replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS))
               for source in make_sources(trained.loaded, evaluated=False)]  # fmt: skip
    fix_date(trained.identity.get("date"))
    task = task_of(trained.loaded.recipe)
    rows: Sequence[Any] = task.prepare(sources, tokenizer, lambda text: None, val_size=0.0).train
    return [(ids, row.origin) for row in rows[: 4 * ROWS] if len(ids := _ids(row)) >= 2]


def _ids(row: Any) -> list[int]:
    """Return the tokens of a row; of a prompt with completions, of the prompt and the first of them."""
    if isinstance(row, data.Tree):
        return [*row.prompt, *row.completions[0]]
    return [int(token) for token in row.input_ids]


def _encode(tokenizer: Any, prompt: str, recipe: TrainedTokenKeys) -> list[int]:
    return models.encode_prompt(tokenizer, prompt, chat_options(recipe))


def _first_line(error: Exception) -> str:
    return str(getattr(error, "what", error)).splitlines()[0][:200]
