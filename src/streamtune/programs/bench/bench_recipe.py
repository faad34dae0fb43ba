"""Benchmark the model of a recipe, or measure a table of ``streamtune bench --table`` for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from streamtune import __version__, models
from streamtune.errors import ArgumentError
from streamtune.plan.simulate.workload import ALL_MODES, Mode
from streamtune.programs.bench.bench import BenchReport, run_bench
from streamtune.programs.bench.measure_table import TableOptions, measure_longest_lengths, measure_table_steps
from streamtune.programs.bench.subject import Job
from streamtune.programs.bench.table_rows import TableName, TableReport
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.schema import Recipe
from streamtune.run.data import locate_errors
from streamtune.run.device import choose_device, make_schedule, prepare_libraries
from streamtune.run.model import make_meta_model, make_model_without_data
from streamtune.run.plan import shares_prompts
from streamtune.run.weight_choices import with_best_precision
from streamtune.tasks import task_of

SCORING: tuple[Mode, ...] = ("plain", "checkpoint", "checkpoint-offload", "stream", "stream-keep-attention")
"""Training methods that can compute log-probabilities of completions, as for DPO and GRPO."""

DECISIVE_KEYS = {
    "model_name_or_path",
    "model",
    "dtype",
    "bf16",
    "fp16",
    "finetuning_type",
    "quantization",
    "lora_r",
    "lora_target",
    "lora_dropout",
    "per_device_train_batch_size",
    "engine",
    "seed",
    "objective",
    "loss_type",
    "max_prompt_length",
    "max_completion_length",
    "num_generations",
    "share_prefix",
    "ref_model_name_or_path",
}
"""Recipe keys that affect the measurements of a table."""
FREE_KEYS = {
    # the rows, which are random here,
    "datasets", "eval_datasets", "mix_by", "on_bad_row", "max_bad_rows", "dataset_num_proc", "streaming",
    "shuffle_buffer", "cache", "max_length", "overlength", "truncate_side", "split_at", "split_overlap", "train_on",
    "roles_to_train", "train_on_eos", "reasoning", "on_empty", "default_system", "chat_template",
    "chat_template_kwargs", "split_special_tokens", "packing", "batching", "tokens_per_batch", "buckets", "val_size",
    "shuffle", "dataloader_num_workers", "prompts",
    # how many steps there are, what happens between them,
    "train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "save_steps", "save_total_limit", "save_async", "metric_for_best_model", "greater_is_better",
    "early_stopping_patience", "early_stopping_threshold", "save_best_limit", "on_nan", "max_skips", "on_oom",
    "eval_steps", "logging_steps", "report_to", "sample", "sample_steps", "callbacks", "allow_code",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "lr_scaling", "lr_scaling_base", "warmup_ratio",
    "warmup_steps", "reward_funcs", "reward_weights", "num_completions_to_print",
    # and where it goes.
    "output_dir", "preset", "peak_flops",
}  # fmt: skip
"""Recipe keys that do not affect any measurement. The table ``max-length`` also compares the number of micro-batches.

Keys in neither set are compared only if the recipe sets them. So a table that was begun before StreamTune had a key can
still be resumed.
"""


def bench_recipe(
    loaded: LoadedRecipe,
    *,
    lengths: Sequence[int],
    modes: Sequence[Mode],
    repeats: int,
    packed_rows: int = 0,
    notify: Callable[[str], None] = lambda message: None,
) -> BenchReport:
    """Benchmark the recipe's model on random tokens, with the recipe's schedule, precision, adapters and batch size."""
    recipe, task = loaded.recipe, task_of(loaded.recipe)
    check_options(lengths, modes, repeats, task.min_row_tokens)
    completions = None
    if recipe.objective != "sft":
        if packed_rows:
            raise ArgumentError(f"--packed-rows needs an sft recipe, found {recipe.objective}", fix="leave it out")
        if unsupported := [mode for mode in modes if mode not in SCORING]:
            raise ArgumentError(
                f"mode '{unsupported[0]}' cannot score the completions of {recipe.objective}",
                fix=f"choose from {', '.join(SCORING)}",
            )
        device = choose_device(recipe.device)
        prepare_libraries(device)
        with locate_errors(loaded):
            share = shares_prompts(task, make_meta_model(recipe, device), device)
            completions = task.make_shape_function(share=share)
    if packed_rows and not 2 <= packed_rows <= min(lengths) // 2:
        raise ArgumentError(
            f"--packed-rows must be from 2 to half of the smallest length, found {packed_rows}",
            fix="for example, write --packed-rows 16 --lengths 16384",
        )
    report = BenchReport({}, make_schedule(recipe.engine), packed_rows=packed_rows, objective=recipe.objective)
    job = replace(make_job(recipe), completions=completions)
    return run_bench(report, job, lengths=lengths, modes=modes, repeats=repeats, notify=notify)


def check_options(lengths: Sequence[int], modes: Sequence[Mode], repeats: int, shortest: int) -> None:
    """Raise an ArgumentError if a length is below ``shortest``, a mode is unknown, or ``repeats`` is below 1."""
    if not lengths or any(length < shortest for length in lengths):
        raise ArgumentError(
            f"--lengths must be at least {shortest} tokens each, found {list(lengths)}", fix="write --lengths 2048,8192"
        )
    if unknown := [mode for mode in modes if mode not in ALL_MODES]:
        raise ArgumentError(f"--modes: unknown mode {unknown[0]!r}", fix=f"choose from {', '.join(ALL_MODES)}")
    if repeats < 1:
        raise ArgumentError(f"--repeats must be at least 1, found {repeats}")


def make_job(recipe: Recipe) -> Job:
    """Return the model and batch size of a recipe as a :class:`Job`, which child processes can unpickle."""
    recipe = with_best_precision(recipe)
    make_model = partial(_make_model, recipe, str(choose_device(recipe.device)))
    return Job(make_model, recipe.per_device_train_batch_size, recipe.autocast_dtype)


def _make_model(recipe: Recipe, device: str) -> Any:
    prepare_libraries(torch.device(device))
    return make_model_without_data(recipe, torch.device(device))


def measure_recipe_table(
    loaded: LoadedRecipe,
    table: TableName,
    options: TableOptions,
    *,
    notify: Callable[[str], None] = lambda message: None,
) -> TableReport:
    """Measure a named table for the recipe's model; finished rows of an interrupted measurement are reused."""
    recipe, job = loaded.recipe, make_job(loaded.recipe)
    schedule = make_schedule(recipe.engine)
    settings: dict[str, Any] = {
        "streamtune": __version__,
        "recipe": recipe_settings_measured(recipe),
        "schedule_in_words": schedule.describe(),
    }
    if recipe.objective != "sft" and table not in ("max-length", "prefix-sharing"):
        raise ArgumentError(
            f"--table {table} needs an sft recipe, found {recipe.objective}",
            where="--table",
            fix="leave --table out, or give --table max-length or --table prefix-sharing",
        )
    check_options(options.lengths or [4], options.modes, options.repeats, 2)
    if options.method not in ("measure", "simulate"):
        raise ArgumentError(f"--method must be measure or simulate, found {options.method!r}")
    simulated = table == "max-length" and options.method == "simulate"
    with locate_errors(loaded):
        if files := fingerprints(recipe, weights=not simulated):
            settings["files"] = files
    if table == "max-length":
        return measure_longest_lengths(recipe, job, options, settings, notify)
    return measure_table_steps(table, job, schedule, options, {**settings, "repeats": options.repeats}, notify)


def recipe_settings_measured(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe settings that change the measured times, memory or losses, as JSON values."""
    written = {key: value for key, value in recipe.model_dump(mode="json").items() if key in DECISIVE_KEYS}
    if recipe.objective == "sft":  # older files have neither key
        del written["objective"]
        if recipe.loss_type == "nll":
            del written["loss_type"]
    free = (
        FREE_KEYS if recipe.rope_scaling is None else FREE_KEYS - {"max_length"}
    )  # max_length may set the factor of rope_scaling
    given = recipe.model_dump(mode="json", exclude={*DECISIVE_KEYS, *free}, exclude_defaults=True)
    return {**written, **given}


def fingerprints(recipe: Recipe, *, weights: bool) -> dict[str, str]:
    """Return the hashes of the models, adapters and teacher file that the recipe names.

    Args:
        weights: True to hash weights and configurations; False to hash configurations only.
    """
    task = task_of(recipe)
    names = {key: getattr(recipe, key) for key in ("model_name_or_path", "adapter_name_or_path")}
    names[task.reference_key] = task.reference_name
    names |= {
        f"base of {key}": models.local_adapter_base(name) for key, name in list(names.items()) if name is not None
    }
    code = recipe.trust_remote_code
    found = {
        key: models.fingerprint_model(name, code=code, weights=weights)
        for key, name in names.items()
        if name is not None
    }
    if recipe.teacher_file is not None:
        found["teacher"] = models.fingerprint_files([("teacher", Path(recipe.teacher_file))])
    return {key: value for key, value in found.items() if value is not None}
