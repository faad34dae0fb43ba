"""Base classes of the tasks: a task is the code for one value of the recipe key ``objective``.

    for_run, check_ranks                     check settings, before anything is loaded
    prepare, longest_row_tokens              tokenize rows, and measure the longest row
    make_shape_function, uses_reference      describe micro-batches and reference model, to plan memory and time
    make_batch_maker, count_steps            make micro-batches, and count optimizer steps
    make_objective, make_training            make the loss, and all inputs of the training loop

:data:`streamtune.tasks.TASKS` has the class for each ``objective``.
"""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from streamtune import data, models, optim, train
from streamtune.base.model_facts import model_device
from streamtune.base.paths import cache_folder
from streamtune.engine import StreamHandle, check_branches, stream
from streamtune.engine.inspect_model import hybrid_layer_name
from streamtune.engine.rotary import longest_unscaled_length
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.recipe.keys.datasets import CacheKeys
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.recipe.schema import DpoRecipe, GrpoRecipe, Recipe
from streamtune.tasks.steps import (
    RowCost,
    StepPlan,
    Steps,
    Units,
    count_micro_batches,
    make_sampler,
    peak_learning_rate,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R_co = TypeVar("R_co", bound=Recipe, covariant=True)
ScoringR_co = TypeVar("ScoringR_co", bound=DpoRecipe | GrpoRecipe, covariant=True)

Notify = Callable[[str], None]
"""Function called with each message for the user, which is one sentence."""

BeforeFirstStep = Callable[[train.Backend, train.Progress, train.StopRequest], None]
"""Function called before the first step with the backend, the progress display and the stop request."""

RandomStep = tuple[train.Objective, Callable[[], Sequence[train.MicroBatch]]]
"""An objective, and a function that returns the micro-batches of one training step on random tokens."""


class PreparedRows(Protocol):
    """Protocol of the tokenized rows of a run."""

    @property
    def fingerprint(self) -> str:
        """Hash of all rows, in order."""
        ...

    @property
    def report(self) -> Any:
        """Report on the rows: their counts (``describe()``) and lengths (``length_percentiles``)."""
        ...

    @property
    def bad_rows(self) -> Sequence[Mapping[str, str]]:
        """The faulty rows that were left out, each with its error."""
        ...

    @property
    def training(self) -> Sequence[Any]: ...

    @property
    def validation(self) -> Sequence[Any]: ...

    @property
    def has_images(self) -> bool:
        """True if a row has images, of those that are read before training."""
        ...

    @property
    def eval_sets(self) -> Sequence[data.EvalSet]:
        """The named sets of held-out rows; empty if held-out rows have no set names."""
        ...


@dataclass(kw_only=True)
class BuiltRun:
    """A run's loaded model, data and plan, from which a task makes its :class:`Training`."""

    device: torch.device
    world: train.World
    weights_are_sharded: bool
    """True if the weights are sharded over the ranks."""
    directory: train.RunDirectory
    first_step: int
    """Number of steps that the run has already taken: the checkpoint's step, or 0 for a new run."""
    tokenizer: PreTrainedTokenizerBase
    prepared: Any
    """Result of the task's :meth:`Task.prepare_training`."""
    batches: Any
    """Result of the task's :meth:`Task.make_batch_maker`."""
    model: Any
    handle: StreamHandle
    reference: train.Reference | None
    """The reference or teacher model; None if the loss needs neither."""
    share: bool
    """True if the common prefix of a prompt's completions is computed once."""
    plan: StepPlan
    closing: ExitStack = field(default_factory=ExitStack)
    """Exit stack that closes the run's resources at its end, such as worker processes."""

    @property
    def backend(self) -> train.Backend:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Training:
    """Inputs of the training loop: loss, steps, held-out batches and learning rate."""

    objective: train.Objective
    steps: train.StepStream
    held_out: train.HeldOut
    """Name of a held-out set -> function that returns a new iterator over its micro-batches; empty without sets."""
    learning_rate_at: Callable[[int], float]
    """Function that returns the learning rate of a step, counted from 0."""
    before_first_step: BeforeFirstStep = lambda backend, progress, stop: None


@dataclass(frozen=True, kw_only=True)
class TrialStep:
    """Inputs of a training step on random tokens, which is run to measure its memory and time."""

    model: Any
    handle: StreamHandle | None
    """Handle of the streamed model; None for a baseline, whose model is not streamed."""
    scorer: Any
    """Object that computes log-probs for the objective: the handle, or an object that uses ordinary logits."""
    reference: train.Reference | None
    length: int
    batch_size: int
    share: bool
    """True if the common prefix of a prompt's completions is computed once."""

    @property
    def device(self) -> torch.device:
        device: torch.device = model_device(self.model)
        return device


class Task(ABC, Generic[R_co]):
    """Base class of tasks: data, micro-batches, loss and steps of an ``objective``. Defaults suit a next-token loss."""

    min_row_tokens: ClassVar[int] = 2
    """Minimum number of tokens of a row or, in tasks that score completions, of a prompt plus its completion."""
    scores_completions: ClassVar[bool] = False
    """True if the objective reads the log-prob of each token of a completion; False for a next-token loss on rows."""

    def __init__(self, recipe: R_co) -> None:
        self.recipe = recipe

    def with_recipe(self, recipe: Any) -> Self:
        """Return a copy of the task with another recipe of the same objective, and with the same reward functions."""
        other = copy(self)
        other.recipe = recipe
        return other

    # --- settings ----------------------------------------------------------------------------------------------

    @classmethod
    def for_run(cls, recipe: Any, folder: Path, notify: Notify) -> Self:
        """Return the task of a run, after checking its settings and loading its reward functions.

        Raises:
            ArgumentError: The loss does not use a setting, or does not accept its value.
        """
        return cls(recipe)

    def check_ranks(self, device: torch.device, world: train.World) -> None:
        """Raise ``ArgumentError`` if the objective cannot be trained on this device or with this number of ranks.

        Called before models and data are loaded.
        """

    @property
    def unit_noun(self) -> str:
        """Noun for the units that ``per_device_train_batch_size`` counts: ``row``, ``pair`` or ``completion``."""
        return "row"

    @property
    def step_unit_noun(self) -> str:
        """Noun that screens use for the training units of an optimizer step."""
        return self.unit_noun

    # --- data --------------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        notify: Notify,
        *,
        val_size: float | None = None,
    ) -> PreparedRows:
        """Return the tokenized rows.

        Args:
            notify: Function called with each message, after all rows are read.
            val_size: Held-out fraction, or number of held-out rows; None: the recipe's value.

        Raises:
            DataError: A row cannot be trained on; the error names file and line.
        """

    def data_options(self, val_size: float | None = None) -> data.DataOptions:
        """Return the options for preparing rows; ``val_size`` replaces the recipe's value unless it is None."""
        recipe = self.recipe
        return data.DataOptions(
            max_length=recipe.max_length,
            overlength=recipe.overlength,
            truncate_side=recipe.truncate_side,
            split_at=recipe.split_at,
            split_overlap=recipe.split_overlap,
            train_on=recipe.train_on,
            chat=chat_options(recipe),
            packing=recipe.packing,
            val_size=recipe.val_size if val_size is None else val_size,
            seed=recipe.seed,
            shuffle_buffer=recipe.shuffle_buffer if recipe.shuffle else 1,
            on_bad_row=recipe.on_bad_row,
            max_bad_rows=recipe.max_bad_rows,
            processes=recipe.dataset_num_proc,
            images=image_options(recipe),
            cache=row_cache(recipe),
        )

    def prepare_training(
        self, sources: Sequence[data.Source], tokenizer: PreTrainedTokenizerBase, notify: Notify
    ) -> PreparedRows:
        """Return the prepared rows of a run; with ``streaming: true``, an object that reads rows during training."""
        return self.prepare(sources, tokenizer, notify)

    def longest_row_tokens(self, prepared: PreparedRows) -> int:
        """Return the number of tokens of the longest row, or of the longest prompt plus completion."""
        return min(prepared.report.length_percentiles["max"], self.recipe.max_length)

    @property
    def row_limit(self) -> tuple[str, int]:
        """Recipe key that limits the number of tokens of a row (for grpo: of a prompt), and its value."""
        return "max_length", self.recipe.max_length

    def first_epoch_statistics(self, prepared: Any, *, try_packing: bool = True) -> data.BatchStatistics | None:
        """Return statistics of the first epoch's batches on one rank; None if they are unknown before training.

        Args:
            prepared: Result of :meth:`prepare`.
            try_packing: True to compute also how well unpacked rows would pack, which takes seconds per million rows.
        """
        return None

    def replace_held_out_rows(self, prepared: Any, rows: Sequence[Any]) -> Any:
        """Return a copy of ``prepared``, the result of :meth:`prepare`, with ``rows`` as its held-out rows."""
        return replace(prepared, validation=rows, eval_sets=())

    # --- shapes ------------------------------------------------------------------------------------------------

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares the trained model with a reference model or a teacher."""
        return False

    @property
    def precomputes_reference(self) -> bool:
        """True if the reference's log-probs are computed before the first step."""
        return False

    @property
    def temperature(self) -> float:
        """Temperature by which the loss divides logits."""
        return 1.0

    @property
    def reference_name(self) -> str | None:
        """Name or path of the reference model in the recipe; None if the recipe names none."""
        return None

    @property
    def reference_key(self) -> str:
        """Recipe key that names the reference or the teacher."""
        return "ref_model_name_or_path"

    @property
    def has_second_model(self) -> bool:
        """True if a second model is in memory: a named reference or, in full fine-tuning, a copy of the model."""
        if not self.uses_reference or self.precomputes_reference:
            return False
        return self.recipe.finetuning_type == "full" or self.reference_name is not None

    @property
    def may_share_prompts(self) -> bool:
        """True if the recipe allows the common prefix of a prompt's completions to be computed once."""
        return self.share_prefix != "never"

    @property
    def share_prefix(self) -> str:
        """The recipe's ``share_prefix``: ``never``, ``auto`` or ``always``."""
        return "never"

    @property
    def reward_funcs(self) -> Sequence[str]:
        return ()

    def can_share_prompts(self, model: Any, notify: Notify = lambda message: None, *, second_model: Any = None) -> bool:
        """Return True if the common prefix of a prompt's completions can be computed once.

        The recipe must allow this sharing, and the model must pass a test.

        Args:
            model: Unstreamed model on its device; it is not changed.
            notify: Function called with the reason if prompts cannot be shared.
            second_model: Reference model, which gets the same sequences; None without a second model. It is tested only
                if the recipe names it.

        Raises:
            UnsupportedModelError: Prompts cannot be shared, and the recipe sets ``share_prefix: always``.
        """
        if not self.may_share_prompts:
            return False
        is_reference_named = second_model is not None and self.reference_name is not None
        return self._can_model_share_prompts(model, notify) and (
            not is_reference_named or self._can_model_share_prompts(second_model, notify, self.reference_name)
        )

    def _can_model_share_prompts(self, model: Any, notify: Notify, name: str | None = None) -> bool:
        prefix = "" if name is None else f"'{name}': "
        limit, problem = longest_unscaled_length(model.config), ""
        if limit is not None and self.recipe.max_length > limit:
            problem = (
                f"the model's rotary embeddings change above {limit:,} tokens, so completions of up to "
                f"{self.recipe.max_length:,} may need different ones"
            )
            fix = f"max_length: {limit}"
        elif self.recipe.sequence_parallel_size > 1 and (kind := hybrid_layer_name(model)) is not None:
            problem = (
                f"{kind} has both attention and a recurrent state, which ranks that share a sequence do not support"
            )
            fix = "sequence_parallel_size: 1"
        if problem:
            if self.share_prefix == "always":
                raise UnsupportedModelError(
                    prefix + problem, where="share_prefix", fix=f"set share_prefix: auto, or {fix}"
                )
            notify(f"each completion has its own copy of the prompt: {prefix}{problem}")
            return False
        with stream(model) as handle:
            try:
                check_branches(handle)
            except UnsupportedModelError as error:
                if self.share_prefix == "always":
                    error.where, error.what = "share_prefix", prefix + error.what
                    raise
                notify(f"each completion has its own copy of the prompt: {prefix}{error.what}")
                return False
        return True

    def make_shape_function(self, *, share: bool = True) -> Completions | None:
        """Return a function (length, batch size) -> token counts of a micro-batch; None for a next-token loss.

        With ``share``, the common prefix of a prompt's completions counts once, unless the recipe forbids sharing.
        """
        return None

    def make_measured_shape_function(
        self, prepared: PreparedRows, longest_row: int, *, share: bool
    ) -> Completions | None:
        """Return the same function as :meth:`make_shape_function`, but with token counts of the run's own rows."""
        return self.make_shape_function(share=share)

    def largest_images(self, batches: Any) -> Mapping[str, torch.Tensor] | None:
        """Return the model's inputs for the images of the largest micro-batch; None without images."""
        return None

    def planned_length(self, longest_row: int) -> int:
        """Return the maximum number of tokens of a sequence in a micro-batch, given the length of the longest row."""
        return longest_row

    def check_model(self, handle: StreamHandle) -> None:
        """Raise ``UnsupportedModelError`` if the objective does not support the model."""

    def check_batches(self, handle: StreamHandle, batches: Any, notify: Notify) -> None:
        """Raise ``UnsupportedModelError`` if the model computes rows in batches differently from the rows alone.

        ``notify`` is called with a message if the weights are not loaded yet, so that nothing can be compared.
        """

    # --- training ----------------------------------------------------------------------------------------------

    @abstractmethod
    def make_batch_maker(self, prepared: Any, tokenizer: PreTrainedTokenizerBase, model: Any, *, share: bool) -> Units:
        """Return the object that makes micro-batches of the prepared rows for a model."""

    @abstractmethod
    def make_objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        """Return the objective, which computes the loss of each micro-batch.

        Args:
            scorer: Handle of the streamed model, or another object that computes log-probs.
            reference: Reference or teacher model; None if the loss needs neither.
        """

    def count_steps(self, batches: Any, micro_batches: int, world: train.World) -> StepPlan:
        """Return the numbers of optimizer steps of the run, its first epoch and its warm-up.

        The last step of an epoch may have fewer micro-batches. With ``tokens_per_batch``, epochs may differ in their
        numbers of steps.

        Args:
            batches: Result of :meth:`make_batch_maker`.
            micro_batches: Number of micro-batches of one rank in a step.
        """
        recipe = self.recipe
        sampler = make_sampler(batches, recipe)
        if isinstance(sampler, data.StepSampler):
            steps_per_epoch = len(sampler.epoch_steps(0))
        else:
            batches_per_epoch = -(-sampler.num_rows // recipe.per_device_train_batch_size)
            steps_per_epoch = -(-batches_per_epoch // (micro_batches * world.data_size * recipe.draws_per_row))
        total_steps = recipe.max_steps
        if total_steps < 0:
            total_steps = math.ceil(steps_per_epoch * recipe.num_train_epochs)
            if isinstance(sampler, data.StepSampler):  # epochs may differ in steps
                whole = int(recipe.num_train_epochs)
                total_steps = sum(len(sampler.epoch_steps(epoch)) for epoch in range(whole))
                if part := recipe.num_train_epochs - whole:
                    total_steps += math.ceil(part * len(sampler.epoch_steps(whole)))
        warmup_steps = recipe.warmup_steps or math.ceil(total_steps * recipe.warmup_ratio)
        return StepPlan(total_steps, steps_per_epoch, warmup_steps)

    def make_steps(self, built: BuiltRun) -> train.StepStream:
        return Steps(built.batches, self.recipe, built.world, RowCost.from_model(built.model))

    def trained_end_tokens(self, prepared: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids of tokens that end a trained turn or text, at which generation must stop."""
        return data.trained_end_tokens(prepared.training, tokenizer, chat_options(self.recipe))

    def make_training(self, built: BuiltRun) -> Training:
        """Return the inputs of the training loop: loss, steps, held-out batches and learning rate."""
        recipe = self.recipe
        held_out = partial(built.batches.held_out_batches, recipe.per_device_eval_batch_size)
        return Training(
            objective=self.make_objective(built.handle, built.reference, built.device),
            steps=self.make_steps(built),
            held_out=held_out_sets(built.prepared, held_out),
            learning_rate_at=optim.build_schedule(
                recipe.lr_scheduler_type,
                learning_rate=peak_learning_rate(recipe, built.world),
                total_steps=built.plan.total_steps,
                warmup_steps=built.plan.warmup_steps,
                options=recipe.lr_scheduler_kwargs,
            ),
        )

    @property
    def token_loss(self) -> TokenLoss:
        """Loss of one target token of a supervised row."""
        return TokenLoss()

    @property
    def teacher_top_k(self) -> int:
        """Number of top-k tokens per target in the teacher file; 0 without a teacher file."""
        return 0

    # --- trials and comparisons --------------------------------------------------------------------------------

    @abstractmethod
    def make_random_step(self, trial: TrialStep) -> RandomStep:
        """Return the objective and the micro-batches of a training step on random tokens, with the recipe's shapes.

        With gradient accumulation the step has only two micro-batches. Gradients of the first occupy memory during the
        second, and further micro-batches would not raise the peak.
        """

    def _trial_micro_batches(self) -> range:
        return range(min(count_micro_batches(self.recipe, train.WORLD), 2))


def held_out_sets(
    prepared: PreparedRows, make_batches: Callable[[data.EvalSet | None], Iterable[train.MicroBatch]]
) -> train.HeldOut:
    """Return a mapping from the name of each held-out set to a function that iterates over its batches.

    Without held-out rows the mapping is empty. Without named sets its only key is an empty string.

    Args:
        make_batches: Function that iterates over the batches of a set, or of all held-out rows if the set is None.
    """
    if prepared.eval_sets:
        return {each.name: partial(make_batches, each) for each in prepared.eval_sets}
    return {"": partial(make_batches, None)} if prepared.validation else {}


class ScoringTask(Task[ScoringR_co]):
    """Base class of tasks whose loss uses the log-probs of completions (``dpo``, ``grpo``)."""

    min_row_tokens = 4
    scores_completions = True

    @property
    def reference_name(self) -> str | None:
        return self.recipe.ref_model_name_or_path

    @property
    def share_prefix(self) -> str:
        return self.recipe.share_prefix

    def make_shape_function(self, *, share: bool = True) -> Completions:
        return partial(self.micro_batch_shape, share and self.may_share_prompts)

    @abstractmethod
    def micro_batch_shape(self, share: bool, length: int, batch_size: int) -> Scored:
        """Return the token counts of a micro-batch's prompts and completions, as the recipe's keys set them.

        Args:
            share: True if the common prefix of a prompt's completions is computed once.
            length: Number of tokens of the longest prompt plus completion.
            batch_size: The value of ``per_device_train_batch_size``.
        """

    @abstractmethod
    def verification_trees(self, rows: Sequence[Any], length: int, vocabulary: int) -> tuple[list[data.Tree], bool]:
        """Return trees (prompts with completions) to verify gradients on, and True if any of them was shortened.

        All trees together have about ``length`` tokens.

        Raises:
            DataError: The loss needs different prompts, and all prompts are the same.
        """

    @abstractmethod
    def verification_batches(
        self,
        trees: Sequence[data.Tree],
        model: nn.Module,
        plain_scorer: Any,
        *,
        pad_token_id: int,
        share: bool,
        images: data.ImageProcessor | None = None,
    ) -> tuple[train.TreeBatch, train.TreeBatch]:
        """Return two batches of the same trees: one in the recipe's layout, and one with a row for each completion.

        Args:
            trees: Prompts with completions, on which the results of both batches are compared.
            model: The unstreamed model.
            plain_scorer: Object that computes log-probs of ``model`` from full logits.
            share: True if the first batch computes the common prefix of a prompt's completions once.
            images: Processor of the images of prompts; None for prompts without images.
        """

    def with_reference(self, batch: train.TreeBatch, reference: train.Reference) -> train.TreeBatch:
        """Return the batch, with the reference's log-probs added if the objective reads them from the batch."""
        return batch


def chat_options(recipe: TrainedTokenKeys) -> data.ChatOptions:
    return data.ChatOptions(
        reasoning=recipe.reasoning,
        on_empty=recipe.on_empty,
        roles_to_train=recipe.roles_to_train,
        train_on_eos=recipe.train_on_eos,
        default_system=recipe.default_system,
        variables=recipe.chat_template_kwargs,
        split_special_tokens=recipe.split_special_tokens,
    )


def image_options(recipe: Recipe) -> data.ImageOptions | None:
    """Return the model whose processor prepares images, and their limits; None for a new model that takes no images."""
    name, files = recipe.model_name_or_path, None
    if name is None:
        assert recipe.model is not None, "unreachable: the recipe schema requires a model"
        models.check_model_type(recipe.model.init)
        if models.image_family(recipe.model.init) is None:
            return None
        config = models.build_config(recipe.model.init)
        name, files = config.model_type, models.processor_files(config)
    return data.ImageOptions(
        name,
        image_folder(keep=recipe.cache),
        recipe.trust_remote_code,
        recipe.max_pixels,
        recipe.min_pixels,
        models.feature_tokens(name, {} if recipe.model is None else recipe.model.init),
        files,
    )


def refuse_with_images(recipe: Any, prepared: Any, *options: tuple[str, bool, str]) -> None:
    """Refuse options that rows with images do not support, and ranks that share a sequence.

    Args:
        recipe: Recipe of the run.
        prepared: Prepared rows; without images nothing is refused.
        options: Key of the recipe, True if it is set so that it is refused, and the reason, for each option.

    Raises:
        ArgumentError: An option is set, and there are rows with images.
    """
    if not prepared.has_images:
        return
    divided = ("sequence_parallel_size", recipe.sequence_parallel_size > 1, "rows with images are not divided")
    for key, is_set, what in (*options, divided):
        if is_set:
            shown = str(getattr(recipe, key)).lower()
            raise ArgumentError(f"{what}, but the recipe has {key}: {shown}", where=key, fix="delete the line")


def image_processor(
    recipe: Recipe, prepared: PreparedRows, tokenizer: PreTrainedTokenizerBase
) -> data.ImageProcessor | None:
    """Return the processor of the images of prepared rows; None for rows without images."""
    return data.ImageProcessor.load(image_options(recipe), tokenizer) if prepared.has_images else None


def larger_images(found: Iterable[Mapping[str, torch.Tensor] | None]) -> Mapping[str, torch.Tensor] | None:
    """Return those inputs for images that have the most elements; None without images."""
    images = [each for each in found if each is not None]
    return max(images, key=lambda inputs: sum(x.numel() for x in inputs.values()), default=None)


def image_folder(*, keep: bool = True) -> str:
    """Return the folder for images that rows hold as bytes: in the cache, or one that ends with the process."""
    return str(cache_folder() / "rows" / data.IMAGES) if keep else _temporary_folder()


@cache
def _temporary_folder() -> str:
    folder = tempfile.mkdtemp(prefix="streamtune-images-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def row_cache(recipe: CacheKeys) -> data.RowCache | None:
    """Return the cache on disk of tokenized rows; None if the recipe disables it."""
    return data.RowCache(cache_folder() / "rows") if recipe.cache else None


@contextmanager
def delay_messages(notify: Notify) -> Iterator[Notify]:
    """Collect messages inside the ``with`` block, and pass them to ``notify`` at its end, even after an error."""
    messages: list[str] = []
    try:
        yield messages.append
    finally:
        for message in messages:
            notify(message)
