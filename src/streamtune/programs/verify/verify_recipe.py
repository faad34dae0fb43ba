"""Verify the model of a recipe on the recipe's rows.

build_verify    builds the tokenizer, the first rows, the model and the schedules, as training does
verify_recipe   compares streaming with plain autograd on them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.engine import RouterLoss
from streamtune.errors import ArgumentError, DataError, OutOfMemoryError, RunError
from streamtune.plan.simulate.scored import PlainScores
from streamtune.programs.verify.compared_rows import (
    FreeMemory,
    RowLosses,
    TreeLosses,
    Window,
    choose_windows,
    measure_memory,
    model_cross_entropy,
)
from streamtune.programs.verify.report import VerifyReport
from streamtune.programs.verify.verify import Comparison, compare_gradients, verify_schedules
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import locate_errors, make_sources, make_tokenizer
from streamtune.run.device import (
    choose_device,
    make_router_loss,
    make_schedule,
    prepare_libraries,
    refuse_unsuitable_device,
    stream_model,
)
from streamtune.run.model import make_model
from streamtune.run.reference import load_reference
from streamtune.run.weight_choices import with_best_precision
from streamtune.schedule import Schedule
from streamtune.tasks import Task, task_of
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.sft import collate_prefix_batch
from streamtune.tasks.task import ScoringTask, image_options
from streamtune.train.objective import autocast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AUTOCAST_DTYPES = ("bfloat16", "float16")
DTYPES = ("float32", *AUTOCAST_DTYPES, "float64")

FIRST_ROWS = 64
"""Number of rows to read; one or a few of them are compared."""

PACKED_ROWS = 2
"""Minimum number of rows in a packed sequence, if the data has as many; one row would not test packing."""

MIN_TOKENS = 4
"""Minimum number of tokens: two chunks of two tokens."""

DEFAULT_MAX_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Default maximum number of tokens in the batch, by device type."""

WITHOUT_IMAGES = "the rows that are compared are without images: give a --length that has room for a row with images"

MEASURED_TOKENS = 256
"""Number of tokens in the forward that measures memory."""


@dataclass(frozen=True)
class _Options:
    model: Any
    tokenizer: PreTrainedTokenizerBase
    length: int | None
    widened: torch.dtype | None
    """Dtype to which narrower weights are converted; None keeps all dtypes."""
    autocast_dtype: str | None


@dataclass(frozen=True, kw_only=True)
class _ChosenBatch:
    """Batch to compare, short enough for plain autograd's memory."""

    windows: tuple[Window, ...]
    """The compared rows; empty if completions are scored."""
    batch: train.MicroBatch
    alone: train.MicroBatch
    """The same rows unpacked; equal to ``batch`` if the batch is not packed."""
    length_limit: str
    """Reason why rows were cut; empty if no row was cut."""
    memory: FreeMemory
    losses: RowLosses | TreeLosses


@dataclass(frozen=True, kw_only=True)
class VerifySubject(_ChosenBatch):
    """The recipe, model, batch and schedules to verify."""

    loaded: LoadedRecipe
    model: Any
    parameters: models.ParameterCount
    device: torch.device
    schedules: list[Schedule]
    dtype: torch.dtype | None
    """Dtype to which narrower weights are converted; None keeps all dtypes."""
    autocast_dtype: str | None

    @property
    def length(self) -> int:
        """Number of tokens in the longest sequence of the batch."""
        return self.batch.input_ids.shape[1]

    @property
    def tree_losses(self) -> TreeLosses | None:
        """Losses of the compared completions; None if next-token rows are compared."""
        return self.losses if isinstance(self.losses, TreeLosses) else None

    @property
    def router_loss(self) -> RouterLoss | None:
        """The recipe's router loss, of which only the load-balancing part is compared; None for DPO and GRPO."""
        return self.losses.router_loss if isinstance(self.losses, RowLosses) else None


def build_verify(
    loaded: LoadedRecipe,
    *,
    length: int | None = None,
    dtype: str | None = None,
    notify: Callable[[str], None] = lambda message: None,
    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> VerifySubject:
    """Load the recipe's model and its first rows, and choose batch and schedules. Nothing is written.

    Args:
        length: Maximum number of tokens in the batch; None: :data:`DEFAULT_MAX_TOKENS`, or fewer if memory is short.
        dtype: One of :data:`DTYPES`; None: the recipe's dtype.
        notify: Callback for notes to the user.
        doing: Function that returns a context manager, which shows a message during slow work.

    Raises:
        ArgumentError: ``length`` is below 4, or ``dtype`` is unknown.
    """
    if length is not None and length < MIN_TOKENS:
        raise ArgumentError(f"--length must be at least {MIN_TOKENS} tokens, found {length}", fix="write --length 1024")
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"--dtype: unknown dtype {dtype!r}", fix=f"choose from {', '.join(DTYPES)}")
    recipe = with_best_precision(loaded.recipe)
    task = task_of(recipe)
    with locate_errors(loaded):
        device = choose_device(recipe.device)
        refuse_unsuitable_device(device, recipe.objective, 1)
        prepare_libraries(device)
        with doing("making the tokenizer"):
            sources = make_sources(loaded, include_eval_sets=False)
            tokenizer = make_tokenizer(recipe, sources, None, notify)
        rows = _read_first_rows(task, sources, tokenizer, notify)
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, None, device)
        with stream_model(recipe, model) as handle:  # refuses unsupported models early
            task.check_model(handle)
        autocast_dtype = recipe.autocast_dtype if dtype is None else dtype if dtype in AUTOCAST_DTYPES else None
        widened: torch.dtype | None = getattr(torch, dtype) if dtype in ("float32", "float64") else None
        if models.trained_image_modules(model) and data.have_images(rows):  # first the rows with images
            stored: Any = rows
            rows = stored.take(np.argsort(data.count_images(stored) == 0, kind="stable"))
        choose: Any = _choose_completions if isinstance(task, ScoringTask) else _choose_rows
        chosen = choose(
            task, _Options(model, tokenizer, length, widened, autocast_dtype), rows, notify=notify, doing=doing
        )
        if chosen.alone.images is None and models.trains_only_images(model):
            raise ArgumentError(
                "no row with images is compared, and the recipe trains only a part for images",
                where="--length" if length is not None else "datasets",
                fix=f"give a --length that has room for a row with images, among the first {FIRST_ROWS} rows",
            )
        if (note := models.check_positions(model, chosen.alone.input_ids.shape[1], training=False)) is not None:
            notify(note)
        schedules = verify_schedules(chosen.batch.input_ids.shape[1], make_schedule(recipe.engine))
    return VerifySubject(
        **vars(chosen),
        loaded=loaded,
        model=model,
        parameters=models.count_parameters(model),
        device=device,
        schedules=schedules,
        dtype=widened,
        autocast_dtype=autocast_dtype,
    )


def _choose_rows(
    task: Task[Any],
    options: _Options,
    rows: Sequence[data.Example],
    *,
    notify: Callable[[str], None],
    doing: Callable[[str], AbstractContextManager[Any]],
) -> _ChosenBatch:
    """Choose rows to compare by their next-token loss, within the free memory."""
    model, tokenizer, length = options.model, options.tokenizer, options.length
    recipe, device = task.recipe, model_device(model)
    router_loss = make_router_loss(recipe, model)
    teacher = None
    if task.uses_reference:
        with doing("loading the teacher"):
            teacher = load_reference(task, model, tokenizer, device)
    with doing("measuring the longest row that plain autograd has memory for"):
        memory = _measure_row_memory(model, rows, tokenizer, device, options.autocast_dtype, router_loss)
    limit, why = (
        (length, "--length") if length is not None else _longest_fitting_length(memory, device, options.widened)
    )
    per_turn = recipe.reasoning == "per_turn"
    windows = choose_windows(rows, limit, PACKED_ROWS if recipe.packing or per_turn else 1)
    alone = batch = _with_images(_collate_windows(windows, tokenizer), windows, task, options)
    if data.have_images(rows) and batch.images is None:
        notify(WITHOUT_IMAGES)
    if per_turn:
        batch = collate_prefix_batch([window.example for window in windows]).to(device)
    elif recipe.packing:
        batch = _with_images(_collate_windows(windows, tokenizer, packed=True), windows, task, options)
    if top_k := task.teacher_top_k:  # the file has whole rows, not windows: use random tokens as top-k
        taught = RandomTokens(recipe, model).draw_top_k(alone, top_k)
        packed = batch is not alone
        alone = replace(alone, top_k=taught)
        batch = replace(batch, top_k=taught.reindexed_for(batch.shift_labels)) if packed else alone
    return _ChosenBatch(
        windows=tuple(windows),
        batch=batch,
        alone=alone,
        length_limit=why if any(window.length < window.row_length for window in windows) else "",
        memory=memory,
        losses=RowLosses(batch, alone, router_loss, task.token_loss, teacher),
    )


def _choose_completions(
    task: ScoringTask[Any],
    options: _Options,
    rows: Sequence[Any],
    *,
    notify: Callable[[str], None],
    doing: Callable[[str], AbstractContextManager[Any]],
) -> _ChosenBatch:
    """Choose completions to compare, within the free memory, with shared prompts and as one row each."""
    model, tokenizer, length = options.model, options.tokenizer, options.length
    device = model_device(model)
    with doing("loading the reference"):
        second_model = load_reference(task, model, tokenizer, device) if task.uses_reference else None
    with doing("measuring the longest row that plain autograd has memory for"):
        memory = _measure_completion_memory(model, device, options.autocast_dtype)
    limit, why = (
        (length, "--length") if length is not None else _longest_fitting_length(memory, device, options.widened)
    )
    trees, cut = task.verification_trees(rows, limit, len(tokenizer))
    images, share = None, False
    if any(tree.images for tree in trees):  # an image is in one sequence
        images = data.ImageProcessor.load(image_options(task.recipe), tokenizer)
    else:
        with doing("checking that prompts can be shared"):
            share = task.can_share_prompts(model, notify, second_model=second_model)
    if data.have_images(rows) and images is None:
        notify(WITHOUT_IMAGES)
    plain, pad = PlainScores(model), tokenizer.pad_token_id
    shared, apart = task.verification_batches(trees, model, plain, pad_token_id=pad, share=share, images=images)
    losses = TreeLosses(task, second_model, shared.to(device), apart.to(device))
    return _ChosenBatch(
        windows=(),
        batch=losses.shared,
        alone=losses.apart,
        length_limit=why if cut else "",
        memory=memory,
        losses=losses,
    )


def verify_recipe(subject: VerifySubject, notify: Callable[[str], None] = lambda message: None) -> VerifyReport:
    """Compare the streamed gradient with plain autograd's.

    Raises:
        UnsupportedModelError: The model cannot be streamed.
        OutOfMemoryError: Plain autograd does not fit in memory at this length.
    """
    why_too_large = partial(subject.memory.why_too_large, subject.alone.input_ids.numel())
    try:
        return compare_gradients(
            Comparison(
                subject.model,
                subject.losses,
                subject.schedules,
                subject.dtype,
                subject.autocast_dtype,
                why_too_large=why_too_large,
                notify=notify,
            )
        )
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        rows, length = subject.alone.input_ids.shape
        raise OutOfMemoryError(
            f"out of memory at {rows} x {length:,} tokens: plain autograd, for comparison, stores all activations",
            fix=f"choose a shorter length: --length {max(MIN_TOKENS, length // 2)}",
        ) from error


# --- rows -------------------------------------------------------------------------------------------------------------


def _read_first_rows(
    task: Task[Any],
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Callable[[str], None],
) -> Sequence[Any]:
    """Return the first rows of the first dataset, held-out rows included; if none is usable, return all rows."""
    few = [
        replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS), shuffle=False) for source in sources
    ]
    try:
        return task.prepare(few[:1], tokenizer, notify, val_size=0.0).training
    except DataError:
        return task.prepare(sources, tokenizer, notify, val_size=0.0).training


def _collate_windows(
    windows: Sequence[Window], tokenizer: PreTrainedTokenizerBase, packed: bool = False
) -> train.MicroBatch:
    examples = [window.example for window in windows]
    pad, origins = tokenizer.pad_token_id, tuple(example.origin for example in examples)
    if packed:
        return train.MicroBatch(**data.collate_packed([examples], pad_token_id=pad), origins=origins)
    return train.MicroBatch(**data.collate(examples, pad_token_id=pad), origins=origins)


def _with_images(
    batch: train.MicroBatch, windows: Sequence[Window], task: Task[Any], options: _Options
) -> train.MicroBatch:
    """Return a batch of windows with the inputs for the images of its rows, on the model's device."""
    device, processor = model_device(options.model), image_options(task.recipe)
    files = [list(map(data.ImageFile.parse, window.example.images)) for window in windows]
    if processor is None or not any(files):
        return batch.to(device)
    if batch.position_ids is not None:
        files = [[each for row in files for each in row]]
    images = data.ImageProcessor(processor, options.tokenizer).model_inputs(files, batch.input_ids)
    if batch.position_ids is not None:
        images |= models.packed_image_positions(options.model, batch.input_ids, batch.position_ids, images)
    images = {name: x.to(device) for name, x in images.items()}  # the plain model reads all of them
    return replace(batch.to(device), images=images)


# --- memory -----------------------------------------------------------------------------------------------------------


def _measure_row_memory(
    model: Any,
    examples: Sequence[data.Example],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    autocast_dtype: str | None,
    router_loss: RouterLoss | None,
) -> FreeMemory:
    base = base_of(model)
    [window] = choose_windows(examples, MEASURED_TOKENS)[:1]
    repeats = -(-MEASURED_TOKENS // window.length)  # only the number of tokens matters

    def forward(tokens: int) -> torch.Tensor:
        ids = np.tile(np.asarray(window.example.input_ids), repeats)[:tokens]
        probe = _collate_windows([Window(data.Example(ids, ids, window.example.origin), 0, tokens)], tokenizer)
        return model_cross_entropy(probe.to(device), router_loss, model, autocast_dtype)

    limit = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = min(MEASURED_TOKENS, limit) if isinstance(limit, int) else MEASURED_TOKENS
    return measure_memory(base, getattr(torch, autocast_dtype) if autocast_dtype else base.dtype, forward, tokens)


def _measure_completion_memory(model: Any, device: torch.device, autocast_dtype: str | None) -> FreeMemory:
    base = base_of(model)

    def forward(tokens: int) -> torch.Tensor:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        with autocast(device, autocast_dtype):
            return PlainScores(base).logprobs(ids, ids).logprobs.sum()

    return measure_memory(
        base, getattr(torch, autocast_dtype) if autocast_dtype else base.dtype, forward, MEASURED_TOKENS
    )


def _longest_fitting_length(
    memory: FreeMemory, device: torch.device, widened_dtype: torch.dtype | None
) -> tuple[int, str]:
    """Return the maximum number of tokens in the batch, and the reason: the default, or the free memory."""
    enough = DEFAULT_MAX_TOKENS["cpu" if device.type == "cpu" else "cuda"]
    trained = widened_dtype or memory.measured
    longest = memory.max_tokens(torch.float32 if trained.itemsize < 4 else torch.float64)
    if longest < MEASURED_TOKENS:  # no memory for a wider truth
        longest = memory.max_tokens(trained)
    if longest < MIN_TOKENS:
        raise RunError("the weights leave no memory for a forward and backward", fix="free memory, or give --length")
    if longest >= enough:
        return enough, "the default maximum"
    return longest, f"the most that plain autograd has memory for: {memory.free / 2**30:.1f} GiB are free"
