"""Recipe keys of the run: seed, checkpoints, evaluation, early stopping, samples, and user code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from streamtune.recipe.rules import GIVEN, Clash, Count, Custom, Not, Refusal, Rules, Spec, Steps, Text, Where, at_most


class SampleSpec(Spec):
    """Keys of the recipe key ``sample``: prompts that the model completes at the end of a run and, with `sample_steps`,
    during training."""

    prompt: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Text | None = None
    """Prompt to complete, or list of prompts. With a chat template a prompt is a user message, otherwise the beginning
    of a text."""

    held_out: Steps = 0
    """Only for `sft`: number of held-out rows whose prompts the model completes too, with greedy decoding; the longest
    rows are used. A completion is right if it equals the row's answer. `samples.jsonl` says of each completion whether
    it is right, and the end of the run prints how many are."""

    max_new_tokens: Count = 64
    """Maximum number of tokens to generate for each prompt of `prompt`. The completion of a held-out row is at most as
    long as the row's answer."""

    @property
    def prompts(self) -> tuple[str, ...]:
        if self.prompt is None:
            return ()
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt


class RunKeys(Spec):
    """Recipe keys of the run: seed, folder, checkpoints, evaluation, early stopping, logs, samples and user code."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the random numbers for new weights, the order of the rows, and dropout."""

    shuffle: bool = True
    """Visit the rows in a random order drawn from `seed`, a new order in each epoch. With `false` the rows have the
    order of the datasets, such as from easy to hard; packed sequences (`packing`) have the order in which they were
    made."""

    output_dir: Annotated[Text, Field(default_factory=lambda: "runs/recipe")]
    """Folder of the run, relative to the working directory; `~` is the home folder. Default: `runs/` and the name of
    the recipe file."""

    save_steps: Steps = 0
    """Number of steps between checkpoints. 0 saves a checkpoint only at the end and when the run is interrupted."""

    save_total_limit: Count = 2
    """Number of newest checkpoints to keep; older checkpoints are deleted. Checkpoints of `metric_for_best_model` are
    kept in addition."""

    save_async: bool = True
    """Write checkpoints while training continues, one at a time, from a copy in host memory. If the copy would take
    more than half of the free memory, training waits instead. `false`: training always waits."""

    metric_for_best_model: Text | None = None
    """Name of the metric in `metrics.jsonl`, such as `eval_loss`, by which checkpoints are ranked; the best are kept in
    addition to the newest. The rank of a checkpoint is the value of the metric when it was saved. With an evaluation
    metric (`eval_...`), an evaluation that is among the best so far also saves a checkpoint, regardless of
    `save_steps`. Default: only the newest checkpoints are kept."""

    greater_is_better: bool | None = None
    """True if a higher value of `metric_for_best_model` is better. Default: true unless the name of the metric ends in
    `loss`."""

    early_stopping_patience: Steps = 0
    """Number of consecutive evaluations without a better `metric_for_best_model` after which the run ends early; 0
    disables early stopping. The final model has the weights of the last step; the best weights are in a checkpoint."""

    early_stopping_threshold: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """With `early_stopping_patience`: improvement of `metric_for_best_model` that an evaluation must exceed to count as
    better."""

    save_best_limit: Count = 1
    """With `metric_for_best_model`: number of best checkpoints to keep, in addition to the newest."""

    on_nan: Literal["stop", "skip"] = "stop"
    """Action on a NaN or infinite loss or gradient. `stop` ends the run before the weights change. `skip` drops the
    step and continues."""

    max_skips: Steps = 10
    """With `on_nan: skip`: maximum number of steps that may be dropped in the whole run. One more ends the run."""

    on_oom: Literal["stop", "replan"] = "stop"
    """Action if memory runs out in a step. `stop` ends the run and names the schedule that the planner would choose
    next. `replan` switches to this schedule and repeats the step, with the same gradient. With several ranks the run
    always stops."""

    deterministic: bool = False
    """Refuse kernels whose results differ between runs. On accelerators training is then slower, and a resumed run is
    bit-identical to an uninterrupted run. On the CPU training is always deterministic."""

    dataloader_num_workers: Annotated[int, Field(ge=0), at_most(1000)] = 0
    """Number of threads that prepare the batches of coming steps. 0 prepares each batch when it is needed. The batches
    do not depend on this number."""

    eval_steps: Steps = 0
    """Number of steps between evaluations on the held-out rows (`val_size`, `eval_datasets`). 0 evaluates only at the
    end."""

    logging_steps: Count = 1
    """Number of steps between printed lines, if the output is not a terminal. `metrics.jsonl` always has every step."""

    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Field(strict=False)] = ()
    """List of experiment trackers that get everything in `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `trackio`.
    Their packages must be installed (`pip install 'streamtune[trackers]'`). With `--offline` they write only local
    files."""

    sample: SampleSpec | None = None
    """Prompts that the model completes at the end of the run, and with `sample_steps` during training: `{prompt:
    [...]}`. Default: none."""

    sample_steps: Steps = 0
    """Number of steps between completions of the `sample` prompts, which are written to `samples.jsonl`. 0 completes
    them only at the end. Sampling does not change losses or weights."""

    callbacks: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """List of your own classes that are called during the run: `file.py:Name` or `module:Name`. A class has any of the
    methods `on_start`, `on_step`, `on_evaluate`, `on_end`. Callbacks need `allow_code`."""

    allow_code: bool = False
    """Allow running the code that the recipe names: `callbacks` and, in `grpo`, reward functions. Also allow running
    code that the model writes (reward `unit_tests`), in a subprocess with limits on time and memory. `--allow-code`
    does the same."""

    @field_validator("report_to")
    @classmethod
    def _drop_duplicates(cls, report_to: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(report_to))


def _refuse_patience_without_metric(recipe: Any) -> Iterator[Refusal]:
    metric = recipe.metric_for_best_model
    if metric is None or not metric.startswith("eval_"):
        yield Refusal(
            "early_stopping_patience",
            "'early_stopping_patience' needs an evaluation metric as 'metric_for_best_model'; found "
            f"{'none' if metric is None else repr(metric)}",
            "add metric_for_best_model: eval_loss",
        )
    elif recipe.eval_steps == 0:
        yield Refusal(
            "early_stopping_patience",
            "'early_stopping_patience' counts evaluations, and the only evaluation is at the end",
            "add eval_steps: 100",
        )


EARLY_STOPPING_RULES: Rules = (
    Clash(
        {"early_stopping_threshold": GIVEN, "early_stopping_patience": 0},
        "'early_stopping_threshold' needs 'early_stopping_patience'",
        "add early_stopping_patience: 3, or delete the line",
    ),
    Where({"early_stopping_patience": GIVEN}, Custom(_refuse_patience_without_metric)),
)


def _refuse_metric_without_rows(recipe: Any) -> Iterator[Refusal]:
    metric = recipe.metric_for_best_model
    if metric is not None and metric.startswith("eval_"):
        yield Refusal("metric_for_best_model", f"'metric_for_best_model: {metric}' needs rows to evaluate on", HOLD_OUT)


HOLD_OUT = "set val_size, such as val_size: 0.02, or eval_datasets"

EVALUATION_RULES: Rules = (
    Clash(
        {"sample_steps": GIVEN, "sample": None},
        "'sample_steps' needs prompts to complete",
        "add sample: {prompt: ...}, or a list: sample: {prompt: [..., ...]}",
    ),
    Clash(
        {"sample": Not(None), "sample.prompt": None, "sample.held_out": 0},
        "'sample' has nothing to complete",
        "add prompt: ..., or held_out: 10",
    ),
    Clash(
        {"sample.held_out": Not(None, 0), "objective": Not("sft")},
        "'held_out' compares completions with the answers in rows, and rows of {objective} have no answers",
        "write prompt: ...",
    ),
    Clash(
        {"sample.held_out": Not(None, 0), "has_evaluation_rows": False},
        "'held_out' needs held-out rows",
        "set val_size, such as 0.02",
    ),
    Where({"has_evaluation_rows": False}, Custom(_refuse_metric_without_rows)),
    Clash({"eval_steps": GIVEN, "has_evaluation_rows": False}, "'eval_steps' needs rows to evaluate on", HOLD_OUT),
)
