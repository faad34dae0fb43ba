"""The contract of an objective: what it adds to a run, a plan, a probe and a verification.

    of_run, check_ranks          the settings of its loss, before anything is loaded
    prepare, longest             its data
    completions, reference ...   the shape of its micro-batches, and what they are compared with
    batches, count_steps         its micro-batches, and the number of its optimizer steps
    objective, training          its loss, and everything that the training loop is run with

:data:`streamtune.tasks.TASKS` has one class for each ``objective`` of a recipe.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import nn

from streamtune import data, optim, train
from streamtune.base.model_facts import model_device
from streamtune.base.paths import cache_folder
from streamtune.engine import StreamHandle, check_branches, stream
from streamtune.engine.inspect_model import hybrid_layer
from streamtune.engine.rotary import longest_unscaled
from streamtune.errors import UnsupportedModelError
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.recipe.keys.datasets import CacheKeys
from streamtune.recipe.keys.trained_tokens import TrainedTokenKeys
from streamtune.recipe.schema import DpoRecipe, GrpoRecipe, Recipe
from streamtune.tasks.steps import RowCost, StepPlan, Steps, Units, accumulation, make_sampler, scaled_rate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R_co = TypeVar("R_co", bound=Recipe, covariant=True)
ScoringR_co = TypeVar("ScoringR_co", bound=DpoRecipe | GrpoRecipe, covariant=True)

Notify = Callable[[str], None]
"""Called with messages for the user, a sentence at a time."""

Begin = Callable[[train.Backend, train.Progress, train.StopRequest], None]
"""Called before the first step with the objects that a stream of steps may need."""

RandomStep = tuple[train.Objective, Callable[[], Sequence[train.MicroBatch]]]
"""An objective, and a function that makes the micro-batches of a step of random tokens."""


class PreparedRows(Protocol):
    """Rows as token ids, of any objective."""

    @property
    def fingerprint(self) -> str:
        """The hash of all rows, in their order."""
        ...

    @property
    def report(self) -> Any:
        """Counts and lengths of the rows: ``describe()`` and ``length_percentiles``."""
        ...

    @property
    def bad_rows(self) -> Sequence[Mapping[str, str]]:
        """The rows that were left out as faulty, each with what is wrong with it."""
        ...

    @property
    def train(self) -> Sequence[Any]:
        """The rows to train on."""
        ...

    @property
    def validation(self) -> Sequence[Any]:
        """The held-out rows."""
        ...

    @property
    def eval_sets(self) -> Sequence[data.EvalSet]:
        """The named parts of the held-out rows; none where they have no names."""
        ...


@dataclass(kw_only=True)
class Built:
    """The parts of a built run that a task makes its training of."""

    device: torch.device
    world: train.World
    shares_weights: bool
    """True if each rank holds a part of the weights."""
    directory: train.RunDirectory
    first_step: int
    """The step that the run goes on from; 0 at the beginning."""
    tokenizer: PreTrainedTokenizerBase
    prepared: Any
    """The task's own data, from :meth:`Task.prepare`."""
    batches: Any
    """The task's own batches, from :meth:`Task.batches`."""
    model: Any
    """The streamed model."""
    handle: StreamHandle
    reference: train.Reference | None
    """None where the loss has none."""
    share: bool
    """True if completions share their prompts."""
    plan: StepPlan
    closing: ExitStack = field(default_factory=ExitStack)
    """Closes what the run holds open: engines that gather weights, processes that render rows."""

    @property
    def backend(self) -> train.Backend:
        """The backend that computes gradients and updates the weights."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything of an objective that the training loop is run with."""

    objective: train.Objective
    steps: train.StepStream
    held_out: train.HeldOut
    """Makes the held-out micro-batches of each set, anew at each call; empty where nothing is held out."""
    learning_rate_at: Callable[[int], float]
    """The learning rate of each step, from 0."""
    begin: Begin = lambda backend, progress, stop: None


@dataclass(frozen=True, kw_only=True)
class TrialStep:
    """The model, the reference and the shape of a step of random tokens that the probe runs."""

    model: Any
    handle: StreamHandle | None
    """None where the model is not streamed: a baseline."""
    scorer: Any
    """Computes log-probs for objectives: the handle, or ordinary logits."""
    reference: train.Reference | None
    length: int
    batch_size: int
    share: bool
    """True if completions share their prompts."""

    @property
    def device(self) -> torch.device:
        device: torch.device = model_device(self.model)
        return device


class Task(ABC, Generic[R_co]):
    """An objective with its recipe. Methods that are not abstract suit a loss on rows of next tokens."""

    shortest: ClassVar[int] = 2
    """Tokens of the shortest row: of a prompt and a completion, two each, where completions are scored."""
    scores: ClassVar[bool] = False
    """True if completions are scored token by token, instead of a loss on the next tokens of rows."""

    def __init__(self, recipe: R_co) -> None:
        self.recipe = recipe

    def with_recipe(self, recipe: Any) -> Self:
        """Return the task with another recipe of the same objective, and all else that it was made with."""
        other = copy(self)
        other.recipe = recipe
        return other

    # --- settings ----------------------------------------------------------------------------------------------

    @classmethod
    def of_run(cls, recipe: Any, folder: Path, notify: Notify) -> Self:
        """Return the task of a run: its settings are checked, and code that the recipe names is loaded.

        Raises:
            ArgumentError: The loss does not read a setting, or does not accept its value.
        """
        return cls(recipe)

    def check_ranks(self, device: torch.device, world: train.World) -> None:
        """Raise ``ArgumentError`` if the ranks cannot compute the objective, before anything is loaded."""

    @property
    def unit(self) -> str:
        """Name of the unit that ``per_device_train_batch_size`` counts."""
        return "row"

    @property
    def step_unit(self) -> str:
        """Name of the unit that an optimizer step is counted in."""
        return self.unit

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
        """Return the rows as token ids. Messages are passed on at the end: earlier they would interrupt the live count.

        Args:
            val_size: The held-out part; None is the recipe's.

        Raises:
            DataError: A row cannot be trained on; it names the file and line.
        """

    def data_options(self, val_size: float | None = None) -> data.DataOptions:
        """Return the options of preparing rows; ``val_size`` None is the recipe's."""
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
            cache=row_cache(recipe),
        )

    def prepare_training(
        self, sources: Sequence[data.Source], tokenizer: PreTrainedTokenizerBase, notify: Notify
    ) -> PreparedRows:
        """Return the rows of a run; without rows to train on where they are streamed."""
        return self.prepare(sources, tokenizer, notify)

    def longest(self, prepared: PreparedRows) -> int:
        """Return how many tokens the longest row has, or the longest prompt with its completion."""
        return min(prepared.report.length_percentiles["max"], self.recipe.max_length)

    @property
    def row_limit(self) -> tuple[str, int]:
        """The key that limits the tokens of a row as it is prepared, and its value."""
        return "max_length", self.recipe.max_length

    def batch_facts(self, prepared: Any, *, try_packing: bool = True) -> data.BatchFacts | None:
        """Return measures of the batches of the first epoch on one rank; None where they depend on the model.

        Args:
            try_packing: Pack rows that are not packed too, which takes some seconds for a million.
        """
        return None

    def with_held_out(self, prepared: Any, rows: Sequence[Any]) -> Any:
        """Return the data of :meth:`prepare` with these rows in place of the held-out rows."""
        return replace(prepared, validation=rows, eval_sets=())

    # --- shapes ------------------------------------------------------------------------------------------------

    @property
    def compares(self) -> bool:
        """True if the objective compares with a reference."""
        return False

    @property
    def precomputes(self) -> bool:
        """True if the reference's log-probs are computed before the first step."""
        return False

    @property
    def temperature(self) -> float:
        """The number that logits are divided by."""
        return 1.0

    @property
    def reference_name(self) -> str | None:
        """The model that the recipe names as reference, if it names one."""
        return None

    @property
    def reference_key(self) -> str:
        """The key that names the reference."""
        return "ref_model_name_or_path"

    @property
    def holds_reference(self) -> bool:
        """True if a second model is held: a named reference, or a copy where all weights are trained."""
        if not self.compares or self.precomputes:
            return False
        return self.recipe.finetuning_type == "full" or self.reference_name is not None

    @property
    def may_share(self) -> bool:
        """True if completions have prompts in common, and the recipe does not keep them apart."""
        return self.share_prefix != "never"

    @property
    def share_prefix(self) -> str:
        """The recipe's ``share_prefix``: ``never``, ``auto`` or ``always``."""
        return "never"

    @property
    def reward_funcs(self) -> Sequence[str]:
        """The names of the recipe's reward functions."""
        return ()

    def can_share(self, model: Any, notify: Notify = lambda message: None, *, beside: Any = None) -> bool:
        """Return True if the recipe allows completions to share their prompts, and a test shows that the model can.

        Args:
            model: The model on its device, not streamed; left as it is.
            notify: Called with the reason if it cannot.
            beside: A reference that is another model, and is called with the same sequences; None without one.

        Raises:
            UnsupportedModelError: They cannot, and the recipe asks for it.
        """
        if not self.may_share:
            return False
        named = beside is not None and self.reference_name is not None
        return self._can_share(model, notify) and (not named or self._can_share(beside, notify, self.reference_name))

    def _can_share(self, model: Any, notify: Notify, name: str | None = None) -> bool:
        whose = "" if name is None else f"'{name}': "
        limit, what = longest_unscaled(model.config), ""
        if limit is not None and self.recipe.max_length > limit:
            what = (
                f"its rotary embeddings change above {limit:,} tokens, and completions of up to "
                f"{self.recipe.max_length:,} may be on both sides"
            )
            fix = f"max_length: {limit}"
        elif self.recipe.sequence_parallel_size > 1 and (kind := hybrid_layer(model)) is not None:
            what = f"{kind} both attends and carries a state, and ranks share its sequences"
            fix = "sequence_parallel_size: 1"
        if what:
            if self.share_prefix == "always":
                raise UnsupportedModelError(whose + what, where="share_prefix", fix=f"set share_prefix: auto, or {fix}")
            notify(f"each completion has its own copy of the prompt: {whose}{what}")
            return False
        with stream(model) as handle:
            try:
                check_branches(handle)
            except UnsupportedModelError as error:
                if self.share_prefix == "always":
                    error.where, error.what = "share_prefix", whose + error.what
                    raise
                notify(f"each completion has its own copy of the prompt: {whose}{error.what}")
                return False
        return True

    def completions(self, *, share: bool = True) -> Completions | None:
        """Return the completions of a micro-batch, by length and batch size; None if the loss is on next tokens.

        ``share``: the model can share prompts. The recipe may still forbid it.
        """
        return None

    def own_completions(self, prepared: PreparedRows, longest: int, *, share: bool) -> Completions | None:
        """Return :meth:`completions` as large as the run's own data makes them."""
        return self.completions(share=share)

    def planned_length(self, longest: int) -> int:
        """Return how many tokens the longest sequence of a micro-batch has, for rows of at most ``longest``."""
        return longest

    def check_model(self, handle: StreamHandle) -> None:
        """Raise ``UnsupportedModelError`` if the model lacks what the objective needs besides exact streaming."""

    # --- training ----------------------------------------------------------------------------------------------

    @abstractmethod
    def batches(self, prepared: Any, tokenizer: PreTrainedTokenizerBase, *, share: bool) -> Units:
        """Return the object that makes micro-batches of the data."""

    @abstractmethod
    def objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        """Return the loss.

        Args:
            scorer: The handle of the streamed model, or another object that computes log-probs.
            reference: None where the loss has none.
        """

    def count_steps(self, batches: Any, micro_batches: int, world: train.World) -> StepPlan:
        """Count the optimizer steps; the last of an epoch may have fewer micro-batches, none is left out.

        Where steps are counted in tokens epochs differ in steps; ``steps_per_epoch`` is of the first. ``micro_batches``
        are those of a rank in a step.
        """
        recipe = self.recipe
        sampler = make_sampler(batches, recipe)
        if isinstance(sampler, data.StepSampler):
            steps_per_epoch = len(sampler.epoch_steps(0))
        else:
            batches_per_epoch = -(-sampler.num_rows // recipe.per_device_train_batch_size)
            steps_per_epoch = -(-batches_per_epoch // (micro_batches * world.data_size * recipe.draws))
        total_steps = recipe.max_steps
        if total_steps < 0:
            total_steps = math.ceil(steps_per_epoch * recipe.num_train_epochs)
            if isinstance(sampler, data.StepSampler):  # whose epochs have not all as many steps
                whole = int(recipe.num_train_epochs)
                total_steps = sum(len(sampler.epoch_steps(epoch)) for epoch in range(whole))
                if part := recipe.num_train_epochs - whole:
                    total_steps += math.ceil(part * len(sampler.epoch_steps(whole)))
        warmup_steps = recipe.warmup_steps or math.ceil(total_steps * recipe.warmup_ratio)
        return StepPlan(total_steps, steps_per_epoch, warmup_steps)

    def make_steps(self, built: Built) -> train.StepStream:
        return Steps(built.batches, self.recipe, built.world, RowCost.of_model(built.model))

    def trained_ends(self, prepared: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids of the tokens that end trained turns or texts: generation must stop at them."""
        return data.trained_ends(prepared.train, tokenizer, chat_options(self.recipe))

    def training(self, built: Built) -> Training:
        """Return everything of the objective that the training loop is run with."""
        recipe = self.recipe
        held_out = partial(built.batches.held_out, recipe.per_device_eval_batch_size)
        return Training(
            objective=self.objective(built.handle, built.reference, built.device),
            steps=self.make_steps(built),
            held_out=held_out_sets(built.prepared, held_out),
            learning_rate_at=optim.build_schedule(
                recipe.lr_scheduler_type,
                learning_rate=scaled_rate(recipe, built.world),
                total_steps=built.plan.total_steps,
                warmup_steps=built.plan.warmup_steps,
                options=recipe.lr_scheduler_kwargs,
            ),
        )

    @property
    def token_loss(self) -> TokenLoss:
        """The loss of a target token of supervised rows."""
        return TokenLoss()

    @property
    def teacher_top_k(self) -> int:
        """Number of a teacher's likeliest tokens that a file has of each target; 0 without such a file."""
        return 0

    # --- trials and comparisons --------------------------------------------------------------------------------

    @abstractmethod
    def random_step(self, trial: TrialStep) -> RandomStep:
        """Return the objective and the micro-batches of a training step of random tokens, in the recipe's shape.

        Gradients are accumulated over two micro-batches where the recipe does so over several. The gradients of the
        first are there during the second, and more micro-batches add nothing.
        """

    def _micro_batches(self) -> range:
        recipe = self.recipe
        if recipe.tokens_per_batch is not None:
            return range(min(accumulation(recipe, train.WORLD), 2))
        return range(min(recipe.gradient_accumulation_steps, 2))


def held_out_sets(
    prepared: PreparedRows, make: Callable[[data.EvalSet | None], Iterable[train.MicroBatch]]
) -> train.HeldOut:
    """Return the makers of held-out batches by the name of their set; none where nothing is held out.

    ``make`` makes the batches of a set, or of all held-out rows for None.
    """
    if prepared.eval_sets:
        return {each.name: partial(make, each) for each in prepared.eval_sets}
    return {"": partial(make, None)} if prepared.validation else {}


class ScoringTask(Task[ScoringR_co]):
    """An objective on completions, which are scored token by token."""

    shortest = 4
    scores = True

    @property
    def reference_name(self) -> str | None:
        return self.recipe.ref_model_name_or_path

    @property
    def share_prefix(self) -> str:
        return self.recipe.share_prefix

    def completions(self, *, share: bool = True) -> Completions:
        return partial(self.scored, share and self.may_share)

    @abstractmethod
    def scored(self, share: bool, length: int, batch_size: int) -> Scored:
        """Return the completions of a micro-batch in the shape that the recipe's keys give it.

        Args:
            length: Tokens of the longest prompt with its completion.
            batch_size: The value of ``per_device_train_batch_size``.
        """

    @abstractmethod
    def compared_trees(self, rows: Sequence[Any], length: int, vocabulary: int) -> tuple[list[data.Tree], bool]:
        """Return a few trees for a verification, of about ``length`` tokens in all rows; and True if they were cut.

        Raises:
            DataError: Prompts have to differ, and all are the same.
        """

    @abstractmethod
    def compared_batches(
        self, trees: Sequence[data.Tree], model: nn.Module, plain: Any, *, pad_token_id: int, share: bool
    ) -> tuple[train.TreeBatch, train.TreeBatch]:
        """Return the same trees as a batch in the recipe's layout, and as a batch with a row for each completion.

        Args:
            plain: Computes log-probs of ``model``, which is not streamed, from ordinary logits.
            pad_token_id: Token that pads rows of the second.
            share: True if prompts are shared in the first.
        """

    def with_reference(self, batch: train.TreeBatch, reference: train.Reference) -> train.TreeBatch:
        """Return a batch with the reference's log-probs, where the objective reads them from the batch."""
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


def row_cache(recipe: CacheKeys) -> data.RowCache | None:
    """Return the cache of prepared rows; None where a recipe keeps none."""
    return data.RowCache(cache_folder() / "rows") if recipe.cache else None


@contextmanager
def held_back(notify: Notify) -> Iterator[Notify]:
    """Pass messages on when the context is left."""
    messages: list[str] = []
    try:
        yield messages.append
    finally:
        for message in messages:
            notify(message)
