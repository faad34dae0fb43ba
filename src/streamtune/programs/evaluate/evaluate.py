"""Evaluate a trained model on the rows of a recipe, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.data.templates import fix_template_date
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError, OutOfMemoryError, RunError, StreamTuneError
from streamtune.plan.simulate.memory import device_model_bytes
from streamtune.programs.evaluate.eval_scores import ScoringModel, measure_rows, score_rows
from streamtune.programs.evaluate.model import (
    load_evaluated,
    load_evaluated_tokenizer,
    load_second_model,
    make_eval_reference,
    plan_evaluation,
)
from streamtune.programs.evaluate.needle import NeedleOptions, default_lengths, gather_haystack, probe_needles
from streamtune.programs.export.source import TrainedModel
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.run.data import locate_errors, make_sources
from streamtune.run.device import choose_device, prepare_libraries, stream_model
from streamtune.run.weight_choices import with_saved_precision
from streamtune.tasks import TASKS, Task
from streamtune.tasks.sft import Batches
from streamtune.tasks.task import BuiltRun, chat_options, image_options

SPLITS = ("held-out", "train", "all")
"""Accepted values of ``--split``."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of ``streamtune eval``."""

    split: str = "held-out"
    """Split to score, one of :data:`SPLITS`."""
    max_rows: int | None = None
    """Maximum number of rows of each split; None means all."""
    needle: NeedleOptions | None = None
    """Options of the needle-in-a-haystack test; None skips it."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness to run."""


@dataclass(frozen=True)
class Feedback:
    """Callbacks that report the progress of an evaluation."""

    notify: Callable[[str], None] = lambda message: None
    """Called with each note to show to the user."""
    doing: Callable[[str], AbstractContextManager[Any]] = field(default=nullcontext)
    """Called with a message before slow work; returns a context manager that shows the message."""
    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    """Called with a unit such as ``rows``, the number of finished units and the number of all units."""


def evaluate_model(
    loaded: LoadedRecipe,
    trained: TrainedModel,
    options: EvalOptions | None = None,
    feedback: Feedback | None = None,
) -> dict[str, Any]:
    """Evaluate a model and return the results, as ``streamtune eval --json`` prints them.

    Args:
        loaded: Recipe whose rows are scored.
        trained: Model from :func:`streamtune.programs.export.source.find_trained`.
        options: Splits and tests to run, and their limits.
        feedback: Callbacks for notes and progress.

    Raises:
        ArgumentError: The split has no rows, or an option contradicts the recipe.
        UserError: The recipe, its data or the model is invalid; ``where`` is the line of the recipe.
    """
    options, feedback = options or EvalOptions(), feedback or Feedback()
    notify, doing = feedback.notify, feedback.doing
    if options.split not in SPLITS:
        raise ArgumentError(f"--split: unknown split {options.split!r}", fix=f"choose from {', '.join(SPLITS)}")
    if options.lm_eval:
        require_lm_eval(options.lm_eval)
    with locate_errors(loaded):
        recipe = _adapt_to_single_process(with_saved_precision(loaded.recipe, trained.settings), notify)
        task = TASKS[recipe.objective].for_run(recipe, loaded.path.parent, notify)
        device = choose_device(recipe.device)
        prepare_libraries(device)
        sources = make_sources(loaded)
        fix_template_date(trained.identity.get("date"))
        with doing("reading the tokenizer"):
            tokenizer = load_evaluated_tokenizer(trained, recipe, notify=notify)
        prepared = task.prepare(sources, tokenizer, notify)
        chosen = _choose_splits(prepared, options)
        longest = task.longest_row_tokens(prepared)
        lengths = _needle_lengths(options, recipe)
        with doing("loading the model"):
            found = load_evaluated(trained, recipe, tokenizer, device, notify=notify)
        if (note := models.check_positions(found.model, max([longest, *lengths]), training=False)) is not None:
            notify(note)
        with doing("loading the reference"):
            held = load_second_model(task, found, tokenizer, device)
        may_share = task.scores_completions and not prepared.has_images
        share = may_share and task.can_share_prompts(found.model, notify, second_model=held)
        with doing("planning"):
            schedule = plan_evaluation(
                recipe,
                found.model,
                max([task.planned_length(longest), *lengths]),
                device,
                completions=task.make_measured_shape_function(prepared, longest, share=share),
                reference_bytes=0 if held is None else device_model_bytes(held),
            )
        with stream_model(recipe, found.model, schedule) as handle:
            with doing("checking that streaming does not change the model's results"):
                handle.check()
            reference = make_eval_reference(task, found.model, handle, held)
            evaluation = _Evaluation(task, found.model, tokenizer, prepared, handle, device, share, reference, feedback)
            with _explain_out_of_memory("scoring rows", "lower per_device_eval_batch_size or engine.chunk_size"):
                splits = {name: evaluation.evaluate_split(*rows) for name, rows in chosen.items()}
            chunk_size = handle.schedule.chunk_size
            needle = None
            if options.needle is not None:
                # Training stores the keys and values of one layer at a time, generation stores them for all layers.
                with _explain_out_of_memory("running the needle-in-a-haystack test", "give shorter --needle-lengths"):
                    needle = evaluation.probe_needles_in_rows(sources, options.needle, lengths)
        harness = None
        if options.lm_eval:
            with doing("lm-evaluation-harness"):
                harness = run_lm_eval(
                    found.model,
                    tokenizer,
                    options.lm_eval,
                    max_length=recipe.max_length,
                    limit=options.max_rows,
                )
    return {
        "model": trained.folder,
        "recipe": str(loaded.path),
        "objective": recipe.objective,
        "device": str(device),
        "bf16": bool(recipe.bf16),
        "fp16": recipe.fp16,
        "chunk_size": chunk_size,
        "splits": splits,
        **({"needle": needle} if needle is not None else {}),
        **({"lm_eval": harness} if harness is not None else {}),
    }


@dataclass(frozen=True)
class _Evaluation:
    """Model, tokenizer and rows of one evaluation."""

    task: Task[Any]
    model: Any
    tokenizer: Any
    prepared: Any
    handle: StreamHandle
    device: torch.device
    share: bool
    reference: train.Reference | None
    feedback: Feedback

    def evaluate_split(self, rows: Sequence[Any], names: Sequence[str] | None) -> dict[str, Any]:
        """Return a split's entry in ``eval.json``; ``names`` are the rows' dataset names from ``eval_datasets``."""
        recipe = self.task.recipe
        rows_done = partial(self.feedback.progress, "rows")
        if self.task.scores_completions:
            return measure_rows(
                self.task, self._make_run, rows, autocast_dtype=recipe.autocast_dtype, rows_done=rows_done, names=names
            )
        batches = Batches(self.prepared, self.tokenizer, images=image_options(recipe))
        return score_rows(
            self._streamed_model,
            rows,
            batch_size=recipe.per_device_eval_batch_size,
            collate=lambda part: batches.collate([[row] for row in part], packed=False),
            rows_done=rows_done,
            names=names,
        ).to_json()

    @property
    def _streamed_model(self) -> ScoringModel:
        return ScoringModel(self.handle, self.model, self.device, self.task.recipe.autocast_dtype)

    def _make_run(self, rows: Sequence[Any]) -> BuiltRun:
        """Return a run whose held-out rows are ``rows``; no file is written."""
        prepared = self.task.replace_held_out_rows(self.prepared, rows)
        batches = self.task.make_batch_maker(prepared, self.tokenizer, self.model, share=self.share)
        world = train.WORLD
        return BuiltRun(
            device=self.device,
            world=world,
            weights_are_sharded=False,
            directory=train.RunDirectory(Path(self.task.recipe.output_dir)),
            first_step=0,
            tokenizer=self.tokenizer,
            prepared=prepared,
            batches=batches,
            model=self.model,
            handle=self.handle,
            reference=self.reference,
            share=self.share,
            plan=self.task.count_steps(batches, 1, world),
        )

    def probe_needles_in_rows(
        self, sources: Sequence[data.Source], options: NeedleOptions, lengths: Sequence[int]
    ) -> dict[str, Any]:
        """Run a needle-in-a-haystack test in text of the rows, and return its entry in ``eval.json``."""
        recipe = self.task.recipe
        stack = gather_haystack(
            data.iter_texts(sources, on_bad_row=recipe.on_bad_row, max_bad_rows=recipe.max_bad_rows),
            self.tokenizer,
            chat=bool(self.tokenizer.chat_template) and data.has_chat_messages(sources),
            tokens=2 * max(lengths),
            notify=self.feedback.notify,
            frame=data.first_chat_context(sources, chat_options(recipe)),
        )
        cells_done = partial(self.feedback.progress, "needle cells")
        return probe_needles(self._streamed_model, stack, options, lengths, seed=recipe.seed, cells_done=cells_done)


@contextmanager
def _explain_out_of_memory(activity: str, fix: str) -> Iterator[None]:
    """Context manager: replace an out-of-memory error by an OutOfMemoryError that names ``activity`` and ``fix``."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory while {activity}", fix=fix) from error


def _adapt_to_single_process(recipe: Recipe, notify: Callable[[str], None]) -> Recipe:
    """Return the recipe for one process, without data-loader workers, vLLM and supervised steps."""
    changes: dict[str, Any] = {"train_batch_size": None, "dataloader_num_workers": 0}
    if getattr(recipe, "use_vllm", False):
        notify("evaluation generates completions with transformers, not with vLLM")
        changes["use_vllm"] = False
    if getattr(recipe, "sft_steps", 0):
        changes["sft_steps"] = 0
    return recipe.model_copy(update=changes)


def _choose_splits(prepared: Any, options: EvalOptions) -> dict[str, tuple[Sequence[Any], Sequence[str] | None]]:
    """Return split -> (rows, names) for the requested splits.

    ``names`` has the dataset name of each row from ``eval_datasets``; None if the recipe has no ``eval_datasets``.
    """
    split = options.split
    found = {"held-out": prepared.validation, "train": prepared.training}
    chosen: dict[str, tuple[Sequence[Any], Sequence[str] | None]] = {
        name: (rows[: options.max_rows], None) for name, rows in found.items() if split in (name, "all") and len(rows)
    }
    if "held-out" in chosen and prepared.eval_sets:
        places = {each.name: np.arange(each.start, each.stop)[: options.max_rows] for each in prepared.eval_sets}
        names = [name for name, of_set in places.items() for _ in of_set]
        chosen["held-out"] = prepared.validation.take(np.concatenate(list(places.values()))), names
    if not chosen:
        raise ArgumentError(
            f"the recipe has no {split} rows",
            where="val_size" if split == "held-out" else "datasets",
            fix="set val_size or eval_datasets in the recipe, or give --split train",
        )
    return chosen


def _needle_lengths(options: EvalOptions, recipe: Recipe) -> tuple[int, ...]:
    if options.needle is None:
        return ()
    return options.needle.lengths or default_lengths(recipe.max_length)


# --- lm-evaluation-harness --------------------------------------------------------------------------------------------


LM_EVAL_OPTION = "--lm-eval"


def require_lm_eval(tasks: Sequence[str]) -> None:
    """Raise an ArgumentError if lm-evaluation-harness is not installed or a task file does not exist."""
    if find_spec("lm_eval") is None:
        raise ArgumentError(
            "lm-evaluation-harness is not installed",
            where=LM_EVAL_OPTION,
            fix="pip install lm-eval, or leave --lm-eval out",
        )
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise ArgumentError(
                f"there is no file {task}",
                where=LM_EVAL_OPTION,
                fix="give the name of a task, or an existing YAML file",
            )


def run_lm_eval(
    model: Any, tokenizer: Any, tasks: Sequence[str], *, max_length: int, limit: int | None = None
) -> dict[str, dict[str, Any]]:
    """Run tasks of lm-evaluation-harness without streaming, and return task -> metric -> value.

    Args:
        model: Model in evaluation mode, with its adapters.
        tasks: Task names of the harness, or YAML files of tasks.
        max_length: Maximum number of tokens in a request; longer requests are truncated on the left.
        limit: Maximum number of documents of each task; None means all.

    Raises:
        ArgumentError: A task is unknown.
        RunError: The harness failed.
    """
    import lm_eval  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    try:
        manager = TaskManager(include_path=sorted({str(file.parent.resolve()) for file in files}) or None)
        names = [_task_name(task) for task in tasks]
        if unknown := [name for name in names if not manager.match_tasks([name])]:
            raise ArgumentError(
                f"unknown lm-evaluation-harness task '{unknown[0]}'",
                where=LM_EVAL_OPTION,
                fix="`lm-eval ls tasks` lists all names; for your own task, give its YAML file",
            )
        wrapped = HFLM(pretrained=base_of(model), tokenizer=tokenizer, max_length=max_length, batch_size=1)
        found = lm_eval.simple_evaluate(
            model=wrapped, tasks=names, task_manager=manager, limit=limit, log_samples=False, bootstrap_iters=1000
        )
    except StreamTuneError:
        raise
    except Exception as error:  # the package has errors of its own
        raise RunError(
            f"lm-evaluation-harness failed: {type(error).__name__}: {error}",
            where=LM_EVAL_OPTION,
            fix="--debug shows the traceback; run the task with `lm-eval run` on the exported model to compare",
        ) from error
    return {name: _numeric_figures(figures) for name, figures in found["results"].items()}


def _task_name(task: str) -> str:
    """Return the name of a task; for a YAML file, the value of its line ``task:``."""
    if not task.endswith((".yaml", ".yml")):
        return task
    for line in Path(task).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key == "task" and value.strip():
            return value.split("#")[0].strip().strip("'\"")
    raise ArgumentError(f"{task} has no line `task: NAME`", where=LM_EVAL_OPTION, fix="add the line")


def _numeric_figures(task_results: dict[str, Any]) -> dict[str, Any]:
    """Return the numeric metrics of a task, with the suffix ``,none`` of their names removed."""
    return {
        name.removesuffix(",none"): value
        for name, value in task_results.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
