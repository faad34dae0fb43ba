"""Compare an exported model with the trained model: logits and greedy text, on the same rows.

Merging rounds each merged weight once. The effect of this rounding on the logits depends on the model and the dtype,
so it is measured. The trained model, with unmerged adapters, runs with each of these weights changed at random by one
rounding error of the exported dtype. All logits are computed in fp32, because bfloat16 arithmetic would hide
differences.

    R     logits of the trained model                                  [tokens, vocabulary]
    N     logits of the trained model with randomly rounded weights
    M     logits of the exported model

The error of a token is ``|M - R| / |R|``, with norms over the vocabulary. The exported model passes if two
conditions hold. Its median error is at most 3 times the median error of N. Its largest error is at most 4 times the
largest error of N. In a mixture of experts, 1 token in 20 may exceed the second bound, because a rounding error may
route it to another expert. Greedy texts may differ only where rounding errors can change the order of two tokens.

If the adapters change the logits less than the rounding does, a note says that merging loses their effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from streamtune import data, models
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.data.templates import fix_template_date
from streamtune.engine.inspect_model import has_adapters
from streamtune.errors import StreamTuneError
from streamtune.models import copy_with_generation_config
from streamtune.models.model_class import frozen_modules
from streamtune.programs.export.merge import Rounding, computing_in_fp32
from streamtune.programs.export.source import TrainedModel
from streamtune.recipe.keys.adapters import TOWER_KEYS
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.run.data import make_sources
from streamtune.tasks import task_of
from streamtune.tasks.task import chat_options, image_options

FLOOR = 2e-6
"""Relative error that another order of summation in fp32 explains."""
ALLOWED_MEDIAN, ALLOWED_LARGEST = 3.0, 4.0
"""Allowed median and largest token error, as multiples of the errors with randomly rounded weights."""
ROUTED_FRACTION = 0.05
"""Fraction of tokens that may exceed the largest allowed error in a mixture of experts."""
ROUNDING_DRAWS = 2
"""Number of times that the weights are randomly rounded."""
LOGITS_BYTES = 256 << 20
"""Maximum size of the stored logits, in bytes."""
INCONCLUSIVE_FROM = 0.3
"""Allowed median error from which the comparison is inconclusive."""

Doing = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class ComparedRow:
    """A row on which two models are compared."""

    ids: Tensor
    """[1, T] token ids"""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """inputs of the model for the row's images, such as ``pixel_values``"""

    @property
    def compared_tokens(self) -> int:
        """Number of tokens whose logits are compared: the last ones of a row with images."""
        return min(self.ids.shape[1], IMAGE_LOGITS if self.images else MAX_TOKENS)

    def model_inputs(self, model: Any) -> dict[str, Tensor]:
        """Return the inputs of ``model``, on its device."""
        device = model_device(model)
        return {name: value.to(device) for name, value in {"input_ids": self.ids, **self.images}.items()}


@dataclass(frozen=True)
class AsTrained:
    """Logits and greedy text of the trained model, and the effect of rounding its weights."""

    rows: list[ComparedRow]
    logits: list[Tensor]
    """R: logits of each row in fp32, ``[T, vocabulary]``."""
    rounding_errors: Tensor
    """Relative error of each token with randomly rounded weights, the largest over the draws, ``[tokens]``."""
    margins: float
    """Largest change of a single logit with randomly rounded weights."""
    effect: float
    """Relative change of the logits if the adapters are disabled; 0 without adapters."""
    own: float
    """Relative error of the logits if the model computes in its own dtype instead of fp32."""
    own_margin: float
    """Largest error of a single logit if the model computes in its own dtype instead of fp32."""
    written: list[int]
    """Token ids that greedy decoding generates after the prompt."""
    scores: Tensor
    """Logits from which each greedy token was chosen, ``[len(written), vocabulary]``."""
    prompt: ComparedRow
    routed: bool
    """True if the model is a mixture of experts."""


@dataclass(frozen=True)
class Differences:
    """Differences between the exported and the trained model, and the allowed differences."""

    tokens: int
    median: float
    """Median over tokens of the relative error ``|M - R| / |R|``."""
    largest: float
    """Largest relative error of a token."""
    relative: float
    """``|M - R| / |R|``, with norms over all tokens."""
    largest_logit: float
    """Largest difference of a single logit."""
    allowed_median: float
    allowed_largest: float
    beyond: int
    """Number of tokens whose error exceeds ``allowed_largest``."""
    may_be_beyond: int
    effect: float
    own: float
    """Relative error of the trained model's logits if it computes in its own dtype instead of fp32."""
    own_after: float
    """Relative difference between R and the exported model's logits in its own dtype."""
    text_parts_at: int | None
    """Index of the first greedy token that differs; None if all are equal."""
    text_tokens: int
    text_tie: bool
    """True if rounding errors explain the first greedy token that differs."""
    before: list[int]
    after: list[int]

    @property
    def passes(self) -> bool:
        """Return True if rounding errors explain all differences."""
        near = self.median <= self.allowed_median and self.beyond <= self.may_be_beyond
        return near and self.allowed_median < INCONCLUSIVE_FROM and (self.text_parts_at is None or self.text_tie)

    @property
    def why_failed(self) -> str:
        """Return the first violated rule as text; empty if the model passes."""
        if self.passes:
            return ""
        if not self.allowed_median < INCONCLUSIVE_FROM:  # NaN as well
            return (
                f"inconclusive: rounding the weights changes the logits by {self.allowed_median / ALLOWED_MEDIAN:.1g}"
            )
        if not self.median <= self.allowed_median:
            return (
                f"the median relative error of its logits is {self.median:.1e}; rounding the weights explains at most "
                f"{self.allowed_median:.1e}"
            )
        if self.beyond > self.may_be_beyond:
            return f"the logits of {self.beyond} of {self.tokens} tokens differ by more than {self.allowed_largest:.1e}"
        return (
            f"greedy decoding chooses another token at position {self.text_parts_at}, and rounding does not explain it"
        )


@torch.no_grad()
def measure_trained(
    model: Any,
    rows: Sequence[ComparedRow],
    prompt: ComparedRow,
    *,
    dtype: torch.dtype | None,
    all_weights: bool = False,
    new_tokens: int = 24,
    doing: Doing = lambda text: nullcontext(),
) -> AsTrained:
    """Compute logits and greedy text of the trained model, and the effect of rounding its weights.

    Args:
        model: Trained model with its adapters, in evaluation mode; it is not changed.
        rows: Rows whose logits are computed.
        prompt: Row to continue.
        dtype: Dtype of the exported weights; None if the export does not round them.
        all_weights: True to round all weights, not only the weights that adapters change.
        new_tokens: Number of tokens to generate greedily.
        doing: Called with a message before slow work; returns a context manager that shows the message.
    """
    with doing("logits of the trained model"):
        with computing_in_fp32(model):
            logits = [row_logits(model, row) for row in rows]
        size = _total_norm(logits)
        own = [row_logits(model, row) for row in rows]
    own_error = _relative_difference(own, logits) / size
    own_margin = _largest_difference(own, logits)
    del own
    effect = 0.0
    if hasattr(model, "disable_adapter"):
        with doing("logits without the adapters"), model.disable_adapter(), computing_in_fp32(model):
            effect = _relative_difference((row_logits(model, row) for row in rows), logits) / size
    rounding_errors, margin = torch.full((sum(each.shape[0] for each in logits),), FLOOR / ALLOWED_MEDIAN), 0.0
    for seed in range(ROUNDING_DRAWS if dtype is not None else 0):
        assert dtype is not None
        with (
            doing(f"logits with randomly rounded weights, {seed + 1} of {ROUNDING_DRAWS}"),
            computing_in_fp32(model, Rounding(model, dtype, everything=all_weights, seed=seed)),
        ):
            errors, largest = relative_row_errors(model, rows, logits)
        rounding_errors, margin = torch.maximum(rounding_errors, errors), max(margin, largest)
    with doing("greedy text of the trained model"):
        written, scores = _generate_greedily(model, prompt, new_tokens)
    return AsTrained(
        list(rows),
        logits,
        rounding_errors,
        margin,
        effect,
        own_error,
        own_margin,
        written,
        scores,
        prompt,
        _has_experts(model),
    )


@torch.no_grad()
def compare_with_trained(
    trained: AsTrained, model: nn.Module, *, doing: Doing = lambda text: nullcontext()
) -> Differences:
    """Compare the exported model, in evaluation mode, with the result of :func:`measure_trained`."""
    rows = trained.rows
    with doing("logits of the exported model"):
        with computing_in_fp32(model):
            errors, largest_logit = relative_row_errors(model, rows, trained.logits)
        sizes = torch.cat([each.norm(dim=-1) for each in trained.logits])
        size = _total_norm(trained.logits)
        after = [row_logits(model, row) for row in rows]
        own_after, own_margin = (
            _relative_difference(after, trained.logits) / size,
            _largest_difference(after, trained.logits),
        )
        del after
    allowed = ALLOWED_LARGEST * float(trained.rounding_errors.max())
    with doing("greedy text of the exported model"):
        written, _ = _generate_greedily(model, trained.prompt, len(trained.scores))
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
        allowed_median=ALLOWED_MEDIAN * float(trained.rounding_errors.median()),
        allowed_largest=allowed,
        beyond=int((~(errors <= allowed)).sum()),  # NaN is beyond
        may_be_beyond=max(1, int(ROUTED_FRACTION * len(errors))) if trained.routed else 0,
        effect=trained.effect,
        own=trained.own,
        own_after=own_after,
        text_parts_at=parts,
        text_tokens=len(trained.written),
        text_tie=parts is not None
        and _is_near_tie(trained, written, parts, ALLOWED_LARGEST * (trained.own_margin + own_margin)),
        before=trained.written,
        after=written,
    )


def _is_near_tie(trained: AsTrained, written_tokens: list[int], position: int, margin: float) -> bool:
    """Return True if the trained model's logits of the two differing tokens are at most ``margin`` apart."""
    if position >= len(trained.written) or position >= len(written_tokens):
        return False
    scores = trained.scores[position]
    return float(scores[trained.written[position]] - scores[written_tokens[position]]) <= margin + 1e-5


def row_logits(model: Any, row: ComparedRow) -> Tensor:
    """Return the logits of the compared tokens of a row, ``[tokens, vocabulary]``, in fp32 on the CPU."""
    only_last = {"logits_to_keep": row.compared_tokens} if row.images else {}
    found: Tensor = model(**row.model_inputs(model), **only_last, use_cache=False).logits
    return found[0].float().cpu()


def relative_row_errors(
    model: nn.Module, rows: Sequence[ComparedRow], logits: Sequence[Tensor]
) -> tuple[Tensor, float]:
    """Compare the logits of a model with expected logits.

    Return the relative error of each token, ``[tokens]``, and the largest difference of a single logit.
    """
    errors, largest = [], 0.0
    for row, want in zip(rows, logits, strict=True):
        difference = row_logits(model, row) - want
        errors.append(difference.norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30))
        largest = max(largest, float(difference.abs().max()))
    return torch.cat(errors), largest


def _relative_difference(actual: Iterator[Tensor] | Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return sum(float((a - b).norm()) ** 2 for a, b in zip(actual, expected, strict=True)) ** 0.5


def _total_norm(logits: Sequence[Tensor]) -> float:
    return sum(float(each.norm()) ** 2 for each in logits) ** 0.5 or 1.0


def _largest_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


def _generate_greedily(model: Any, prompt: ComparedRow, new_tokens: int) -> tuple[list[int], Tensor]:
    """Return N greedy tokens after a prompt, and the logits from which they were chosen, ``[N, vocabulary]``."""
    base = base_of(model)
    # Ignore the checkpoint's generation settings: penalties and temperatures are not weights.
    plain = copy_with_generation_config(base, GenerationConfig(pad_token_id=0, eos_token_id=None))
    output = plain.generate(
        **prompt.model_inputs(base),
        attention_mask=torch.ones_like(prompt.ids).to(base.device),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, prompt.ids.shape[1] :].tolist(), torch.cat(
        [each.float().cpu() for each in output.logits]
    )


def _has_experts(model: nn.Module) -> bool:
    config = base_of(model).config.get_text_config(decoder=True)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(isinstance(getattr(config, name, None), int) and getattr(config, name) > 1 for name in names)


# --- the rows ---------------------------------------------------------------------------------------------------------


MAX_ROWS = 4
"""Maximum number of rows to compare."""
FIRST_ROWS = 16
"""Number of rows read from each source."""
MAX_TOKENS = 256
"""Maximum number of tokens used of each row, from its start."""
PROMPT_TOKENS = 64
"""Maximum number of prompt tokens for the greedy text."""
IMAGE_ROW_TOKENS = 2048
"""Maximum number of tokens of all rows with images, which are never cut. Other rows are compared without images."""
IMAGE_LOGITS = 64
"""Number of tokens at the end of a row with images whose logits are compared."""


@dataclass(frozen=True)
class CheckRows:
    """Rows on which the exported and the trained model are compared."""

    rows: list[ComparedRow]
    prompt: ComparedRow
    """Row to continue."""
    origin: str
    """Description of the rows' origin."""
    own: bool
    """True if the rows are from the run's data."""


def choose_rows(trained: TrainedModel, model: Any, tokenizer: Any, notify: Callable[[str], None]) -> CheckRows:
    """Return the first rows of the run's data, at most 256 tokens of each; if the data is unreadable, random tokens.

    With random tokens, the first prompt of the recipe's ``sample``, if any, is also a row.
    """
    vocabulary = base_of(model).get_input_embeddings().weight.shape[0]
    at_most = max(16, min(MAX_ROWS * MAX_TOKENS, LOGITS_BYTES // (4 * vocabulary)))
    config = base_of(model).config.get_text_config(decoder=True)
    limit = min(MAX_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)
    found: list[tuple[ComparedRow, str]] = []
    why = "the training data is not recorded"
    if trained.loaded is not None:
        try:
            found = [each for each in _first_rows_of_run(trained, tokenizer) if int(each[0].ids.max()) < vocabulary]
            why = "the run's data has no rows"
        except (StreamTuneError, OSError, ValueError) as error:
            why = f"the run's data cannot be read any more ({_first_error_line(error)})"
    if _trained_for_images(trained, model) and not any(row.images for row, _ in found):
        notify("no row with images is compared, so the trained part for images is not checked")
    if found:
        left = at_most
        rows: list[ComparedRow] = []
        for row, _ in found:
            if left >= 2 and len(rows) < MAX_ROWS:
                rows.append(row if row.images else ComparedRow(row.ids[:, : min(limit, left)]))
                left -= rows[-1].compared_tokens
        tokens = sum(row.compared_tokens for row in rows)
        named = f"{found[0][1]} and {len(rows) - 1} more" if len(rows) > 1 else found[0][1]
        seen = " with images" if any(row.images for row in rows) else ""
        return CheckRows(rows, _prompt_of_row(rows[0], limit), f"{named}{seen}: {tokens:,} tokens", own=True)
    recipe = trained.loaded.recipe if trained.loaded is not None else None
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(min(vocabulary, max(len(tokenizer), 2)), (1, min(limit, at_most)), generator=generator)
    if recipe is not None and recipe.sample is not None and recipe.sample.prompts:
        ids = _encode(tokenizer, recipe.sample.prompts[0], recipe)[:limit]
        if len(ids) >= 2:
            rows = [ComparedRow(torch.tensor([ids])), ComparedRow(drawn)]
            notify(f"{why}: the models are compared on the sample prompt and on random tokens")
            return CheckRows(rows, _prompt_of_row(rows[0], limit), "the sample prompt and random tokens", own=False)
    notify(f"{why}: the models are compared on random tokens")
    row = ComparedRow(drawn)
    return CheckRows([row], _prompt_of_row(row, limit), f"{drawn.shape[1]:,} random tokens", own=False)


def _trained_for_images(trained: TrainedModel, model: Any) -> bool:
    """Return True if a run trained the vision tower or the projector, or has adapters in them."""
    base = base_of(model)
    parts = [base.get_submodule(name) for name in frozen_modules(base) if name not in dict(base.named_parameters())]
    keys = trained.loaded is not None and not all(getattr(trained.loaded.recipe, key) for key in TOWER_KEYS)
    return bool(parts) and (keys or any(map(has_adapters, parts)))


def _prompt_of_row(row: ComparedRow, limit: int) -> ComparedRow:
    """Return the first tokens of a row: at most half of the row, and at most :data:`PROMPT_TOKENS`.

    A row with images is returned whole.
    """
    if row.images:
        return row
    return ComparedRow(row.ids[:, : max(1, min(PROMPT_TOKENS, row.ids.shape[1] // 2, limit - 32 if limit > 48 else 1))])


def _first_rows_of_run(trained: TrainedModel, tokenizer: Any) -> list[tuple[ComparedRow, str]]:
    """Return the first rows of the run's data with their places; rows with images come first."""
    assert trained.loaded is not None
    sources = [replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS))
               for source in make_sources(trained.loaded, include_eval_sets=False)]  # fmt: skip
    fix_template_date(trained.identity.get("date"))
    task = task_of(trained.loaded.recipe)
    rows: Sequence[Any] = task.prepare(sources, tokenizer, lambda text: None, val_size=0.0).training
    few = [(row, ids) for row in rows[: 4 * MAX_ROWS] if len(ids := _token_ids_of_row(row)) >= 2]
    few.sort(key=lambda pair: not (pair[0].images and len(pair[1]) <= IMAGE_ROW_TOKENS))
    found, processor, left = list[tuple[ComparedRow, str]](), None, IMAGE_ROW_TOKENS
    for row, ids in few:
        inputs: dict[str, Tensor] = {}
        if row.images and len(ids) <= left:
            left -= len(ids)
            processor = processor or data.ImageProcessor.load(image_options(trained.loaded.recipe), tokenizer)
            inputs = processor.model_inputs([list(map(data.ImageFile.parse, row.images))], torch.tensor([ids]))
        found.append((ComparedRow(torch.tensor([ids]), inputs), row.origin))
    return found


def _token_ids_of_row(row: Any) -> list[int]:
    """Return the token ids of a row; for a prompt with completions, of the prompt and the first completion."""
    if isinstance(row, data.Tree):
        return [*row.prompt, *row.completions[0]]
    return [int(token) for token in row.input_ids]


def _encode(tokenizer: Any, prompt: str, recipe: TrainedTokenKeys) -> list[int]:
    return models.encode_prompt(tokenizer, prompt, chat_options(recipe))


def _first_error_line(error: Exception) -> str:
    return str(getattr(error, "what", error)).splitlines()[0][:200]
