"""Print the output of the training commands: a summary of the run, its results, and samples of the trained model."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.text import Text

from streamtune.base.adapters import base_of
from streamtune.base.privacy import safe_text
from streamtune.base.text import show_size
from streamtune.recipe import third_party_code_of
from streamtune.recipe.keys.adapters import FREEZE_KEYS
from streamtune.recipe.keys.preset import describe_preset

from .console import out, print_rows, print_text
from .plan_screen import describe_memory, describe_optimizer, show_seconds
from .schedule_text import describe_schedule, short_dtype

if TYPE_CHECKING:
    from streamtune.plan import Plan
    from streamtune.run.train import Run, RunOutcome

QUANTIZED = {
    "int8": "TorchAoConfig(Int8WeightOnlyConfig())",
    "nf4": 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)',
}
"""Quantisation -> ``quantization_config`` with which transformers loads the base model."""
GIB = 1024**3
SPARK = "▁▂▃▄▅▆▇█"


def print_banner(run: Run) -> None:
    """Print a summary of the run before its first step: model, data, steps, time, memory, engine, output."""
    from streamtune.cli.data_screen import describe_batches, describe_rows
    from streamtune.cli.recipes import describe_method

    memory = run.streamed.memory
    print_rows(
        [
            ("model", _describe_model(run)),
            *([("positions", positions)] if (positions := _describe_rope_extension(run)) else []),
            *describe_rows(run.prepared.report),
            *describe_batches(run.batch_facts if run.recipe.batching != "rows" or run.recipe.packing else None),
            ("steps", _describe_steps(run)),
            *([("time", _describe_time(run, memory))] if memory is not None else []),
            *([("memory", describe_memory(memory, run.streamed.baseline_bytes))] if memory is not None else []),
            ("engine", describe_schedule(run.handle.schedule, len(run.handle.layers))),
            *([("ranks", _describe_ranks(run))] if run.world.size > 1 else []),
            *([("deepspeed", _describe_deepspeed(run))] if run.recipe.deepspeed is not None else []),
            *([("preset", preset)] if (preset := describe_preset(run.recipe)) is not None else []),
            *describe_method(run.recipe),
            *([("stops at", _describe_stop_tokens(run))] if run.added_stop_tokens else []),
            ("output", _describe_output_folder(run)),
            *([("runs code", "; ".join(code))] if (code := third_party_code_of(run.recipe)) else []),
        ]
    )


def print_dry_run_end(run: Run, arguments: Sequence[str]) -> None:
    command = shlex.join(["streamtune", *(each for each in arguments if each != "--dry-run")])
    if run.world.size > 1:  # a rank does not know the command of its launcher
        command = "the same command without --dry-run"
    print_text(Text.assemble("Nothing was trained. Start: ", (safe_text(command), "bold")))


def _describe_model(run: Run) -> str:
    from streamtune import models

    total, trainable = run.parameters.total, run.parameters.trainable
    trained = "all trained" if trainable == total else f"{trainable:,} ({trainable / total:.2%}) trained"
    if run.recipe.step_kind.gradients == "block":
        trained += " at a time"
    if any(getattr(run.recipe, key) for key in FREEZE_KEYS):
        trained += f", {models.trained_layers_text(run.model)}"
    base = base_of(run.model)
    dtype, frozen = (short_dtype(str(x).removeprefix("torch.")) for x in (models.trained_dtype(run.model), base.dtype))
    if dtype != frozen:
        dtype += f", frozen weights {frozen}"
    if run.start.quantization is not None:
        experts = " and experts" if models.has_packed_experts(run.model) else ""
        dtype += f", linear layers{experts} in {run.start.quantization}"
    if run.recipe.weight_rounding == "stochastic":
        dtype += ", rounded stochastically"
    autocast = ", computed in bf16" if run.recipe.bf16 else ""
    name, device = models.architecture_name(base), str(run.device)
    where = "CPU" if device == "cpu" else device
    return f"{name}, {_show_count(total)} parameters, {trained}; {dtype}{autocast}; {where}"


def _describe_rope_extension(run: Run) -> str:
    """Return how the recipe extends the model's context length by RoPE; an empty string if it does not."""
    from streamtune import models

    config, scaling = base_of(run.model).config, run.recipe.rope_scaling
    if scaling is None and run.recipe.rope_theta is None:
        return ""
    theta = f"base {run.recipe.rope_theta:g}, " if run.recipe.rope_theta is not None else ""
    kind = f"{scaling.rope_type}, " if scaling is not None else ""
    pretrained = models.pretrained_position_limit(config) or 0
    return f"{theta}{kind}{pretrained:,} to {models.position_limit(config) or 0:,} tokens"


def _describe_time(run: Run, plan: Plan) -> str:
    """Return the predicted time, such as ``about 2 min; longest step 4.5 s (predicted)``."""
    from streamtune.run.run_time import predict_run_seconds

    seconds = predict_run_seconds(run)
    step = f"longest step {show_seconds(plan.step_seconds)} (predicted)"
    if run.recipe.objective == "grpo":
        step += "; excludes the rollout"
    if seconds is None:
        return step
    return f"{_show_run_time(seconds)}{' left' if run.first_step else ''}; {step}"


def _show_run_time(seconds: float) -> str:
    """Return a duration as text, such as ``about 12 min``, ``about 3.4 h`` or ``about 5.1 days``."""
    if seconds < 45:
        return "less than a minute"
    if seconds < 90 * 60:
        return f"about {max(1, round(seconds / 60))} min"
    return f"about {seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"about {seconds / 86400:.1f} days"


def _describe_ranks(run: Run) -> str:
    recipe, world = run.recipe, run.world
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    nodes = f" on {world.size // local} machines" if world.size > local else ""
    shared = "PyTorch FSDP2" if recipe.fsdp else "DDP (a whole model on each)"
    if recipe.deepspeed is not None:
        shared = f"DeepSpeed {recipe.deepspeed}"
    sequences = f"; {world.sequence_size} share each sequence" if world.sequence_size > 1 else ""
    return f"{world.size}{nodes}; {shared}{sequences}"


def _describe_deepspeed(run: Run) -> str:
    """Return the DeepSpeed settings derived from the recipe, and the name of the full configuration file."""
    from streamtune.distributed.deepspeed_config import filled_auto_values

    assert run.recipe.deepspeed is not None
    values = filled_auto_values(run.recipe.deepspeed, run.backend.config)
    shown = ", ".join(f"{key.removeprefix('zero_optimization.')} {json.dumps(value)}" for key, value in values.items())
    return f"{shown or 'as written'}; full configuration in {run.directory.deepspeed.name}"


def _describe_stop_tokens(run: Run) -> str:
    from streamtune.run.samples import describe_stop_tokens

    return describe_stop_tokens(run.added_stop_tokens, run.tokenizer, run.model)


def _describe_steps(run: Run) -> str:
    from streamtune.tasks.steps import peak_learning_rate

    recipe, plan = run.recipe, run.plan
    rows, unit = run.start.rows_per_step, run.start.task.step_unit_noun
    size = f"{rows} {unit}{'s' if rows > 1 else ''}"
    if recipe.tokens_per_batch is not None:
        size = f"at most {recipe.tokens_per_batch:,} tokens of {unit}s"
    if recipe.draws_per_row > 1:
        size += f" (chosen from {recipe.draws_per_row * rows}, which takes a forward pass of each)"
    supervised = plan.supervised_steps
    steps = plan.total_steps - supervised
    epochs = "" if plan.steps_per_epoch is None else _show_epochs(steps / plan.steps_per_epoch)
    warmup = f", {plan.warmup_steps:,} warm-up step{'s' * (plan.warmup_steps > 1)}" if plan.warmup_steps else ""
    if plan.warmup_steps >= plan.total_steps:
        warmup += " (more than the run has)"
    first = f"{supervised:,} supervised, then " if supervised else ""
    return (
        f"{first}{steps:,}{epochs} x {size}; {describe_optimizer(recipe)}, "
        f"lr {peak_learning_rate(recipe, run.world):.4g}, {recipe.lr_scheduler_type}{warmup}"
    )


def _show_epochs(count: float) -> str:
    return f" ({count:.3g} epoch{'' if f'{count:.3g}' == '1' else 's'})"


def _describe_output_folder(run: Run) -> str:
    if run.checkpoint is not None:
        return f"{run.directory.path}, resumed from {run.checkpoint.path.name}"
    if run.start.replaces_run:
        return f"{run.directory.path}; the existing run in it is moved aside"
    return str(run.directory.path)


def print_outcome(run: Run, outcome: RunOutcome) -> None:
    """Print the results of the run, the samples, and the next command."""
    state, folder = outcome.progress, run.directory.path
    out.print()
    print_text(_outcome_title(run, outcome))
    rows = [("trained", _describe_trained_rows(run, outcome))] if outcome.tokens > 0 else []
    rows += _loss_rows(outcome)
    # A policy's loss stays near 0 whatever the policy learns, so the reward is drawn.
    rewards = [record["reward"] for record in outcome.records if "reward" in record]
    curve = rewards or outcome.losses
    if len(curve) > 1:
        line = sparkline(curve, width=min(out.width - 24, 60))
        rows.append(("", f"{line} {'reward' if rewards else 'loss'}"))
    if state.skipped:
        text = f"{state.skipped:,} of {state.step:,} steps, with a NaN or infinite loss or gradient; see events.jsonl"
        rows.append(("skipped", text))
    if outcome.tokens > 0:
        rate = f"{outcome.tokens / outcome.seconds:,.0f} tokens/s"
        since = " since the resume" if run.first_step else ""
        rows.append(("time", f"{show_seconds(outcome.seconds)} for {outcome.tokens:,} tokens{since}, {rate}"))
        rows += _peak_memory_rows(run, outcome)
    if outcome.moved_aside is not None:
        rows.append(("before", f"the earlier run in {folder} was moved to {outcome.moved_aside}"))
    names = ("report.html", "loss.png", "metrics.jsonl")
    if drawn := [name for name in names if (folder / name).is_file()]:
        rows.append(("curves", f"{folder / drawn[0]}" + "".join(f", {name}" for name in drawn[1:])))
    next_command = "run the same command again, which resumes"
    if outcome.finished:
        rows.append(("model", f"{run.directory.final}/"))
        rows.append(("load", _model_loading_call(run)))
        if (
            run.added_stop_tokens and run.recipe.finetuning_type != "full"
        ):  # PEFT takes the generation config of the base
            ends = f'generation_config=GenerationConfig.from_pretrained("{run.directory.final}")'
            rows.append(("generate", f"model.generate(..., {ends}) stops where trained turns end"))
        saved = run.directory.recipe
        rows.append(("export", f"streamtune export {folder} OUT"))
        rows.append(("verify", f"streamtune verify {saved}  (compare the gradient with plain autograd's)"))
        rows.append(("plan", f"streamtune plan {saved} --device h100  (memory and time on another device)"))
        rows.append(("longest", f"streamtune probe-max-len {saved}  (the longest row that trains)"))
        next_command = f"streamtune generate {folder}"
    elif outcome.checkpoint is not None:
        rows.append(("saved", str(outcome.checkpoint)))
    else:
        rows.append(("saved", "nothing: the run stopped before its first step ended"))
    print_rows(rows)
    print_samples(outcome.samples)
    print_text(Text.assemble("Next: ", (safe_text(next_command), "bold")))


def _describe_trained_rows(run: Run, outcome: RunOutcome) -> str:
    """Return a text such as ``456K parameters of Qwen3 on 3,234 training rows, 405 steps``."""
    from streamtune import models

    name = models.architecture_name(base_of(run.model))
    steps = outcome.progress.step - run.first_step
    resumed = f" after a resume at step {run.first_step:,}" if run.first_step else ""
    number = getattr(run.prepared.report, "train_examples", None)
    rows = "streamed rows" if number is None else f"{number:,} training row{'' if number == 1 else 's'}"
    count = _show_count(run.parameters.trainable)
    return f"{count} parameters of {name} on {rows}, {steps:,} step{'' if steps == 1 else 's'}{resumed}"


def _loss_rows(outcome: RunOutcome) -> list[tuple[str, str]]:
    state, rows = outcome.progress, []
    if state.first_loss is not None and state.last_loss is not None:
        held_out = f"; held out {state.eval_loss:.3f}" if state.eval_loss is not None else ""
        rows.append(("loss", f"{state.first_loss:.3f} -> {state.last_loss:.3f}{held_out}"))
    for name, title in (("rewards/accuracies", "accuracy"), ("reward", "reward")):
        course = [record[name] for record in outcome.records if name in record]
        if course:
            found = outcome.held_out.get(f"eval_{name}")
            held_out = f"; held out {found:.3f}" if found is not None else ""
            rows.append((title, f"{course[0]:.3f} -> {course[-1]:.3f}{held_out}"))
    return rows


def _peak_memory_rows(run: Run, outcome: RunOutcome) -> list[tuple[str, str]]:
    peaks = [record["peak_mem_gib"] for record in outcome.records if "peak_mem_gib" in record]
    if not peaks:
        return []
    of_what = "tensors" if run.device.type == "cuda" else "the whole process"
    text = f"{show_size(int(max(peaks) * GIB))} peak of {of_what} (measured)"
    if run.streamed.memory is not None:
        text += f"; {show_size(run.streamed.memory.simulation.peak_bytes)} of tensors planned"
    return [("memory", text)]


def _outcome_title(run: Run, outcome: RunOutcome) -> Text:
    step, steps = f"{outcome.progress.step:,}", f"{run.plan.total_steps:,}"
    if not outcome.finished:
        return Text(f"Stopped after step {step} of {steps}", style="bold yellow")
    if outcome.tokens == 0 and outcome.failure is None:
        return Text(
            "Already finished: no step is left to train (--resume does not start again from scratch)", "bold green"
        )
    if outcome.failure is not None:
        return Text("Finished, but most steps were skipped", style="bold red")
    if outcome.progress.ended_early:
        metric = run.recipe.metric_for_best_model
        return Text(f"Done early, after step {step} of {steps}: {metric} stopped improving", style="bold green")
    return Text("Done", style="bold green")


def _model_loading_call(run: Run) -> str:
    """Return the Python call that loads the final model, or a text if the adapters must be merged first."""
    from streamtune import models

    if models.has_packed_experts(run.model):
        return "merge the adapters first: transformers cannot load a base with quantised experts"
    if models.loftq_file_tensors(base_of(run.model)):
        return "merge the adapters first: the base was quantised from weights that LoftQ changed (loftq_iter)"
    if run.recipe.finetuning_type != "full" and run.recipe.model is not None:
        return "merge the adapters first: the base was made from a configuration, so it has no folder to refer to"
    if run.recipe.finetuning_type != "full" and _describe_rope_extension(run):
        return "merge the adapters first: they were trained with RoPE settings that the base's configuration lacks"
    loader = models.loader_class_name(run.model, adapters=run.recipe.finetuning_type != "full")
    quantized = f", quantization_config={QUANTIZED[run.start.quantization]}" if run.start.quantization else ""
    return f'{loader}.from_pretrained("{run.directory.final}"{quantized})'


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a one-line plot in block characters, of the means of ``width`` equal parts of ``values``."""
    width = max(1, min(width, len(values)))
    edges = [len(values) * index // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(SPARK[round((mean - low) / ((high - low) or 1.0) * (len(SPARK) - 1))] for mean in means)


def _show_count(count: int) -> str:
    """Return a count with its unit, such as ``4.2M`` or ``8.19B``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


# --- samples ----------------------------------------------------------------------------------------------------------


SHOWN_ANSWERS = 3
"""Number of held-out rows whose answers are printed; ``samples.jsonl`` has all answers."""


def print_samples(samples: Sequence[Mapping[str, Any]]) -> None:
    """Print sample prompts with their completions, then answers to the first held-out rows and how many were right.

    Args:
        samples: Lines of ``samples.jsonl``; lines of held-out rows have the key ``right``.
    """
    unscored = [sample for sample in samples if "right" not in sample]
    rows = [sample for sample in samples if "right" in sample]
    for sample in unscored:
        for title, text, style in (("prompt", sample["prompt"], ""), ("completion", sample["completion"], "green")):
            out.print(Text(f"  {title}", style="dim"))
            print_text(Text(safe_text(text.strip("\n")) or "(nothing)", style=style), indent=4)
    if not rows:
        return
    for sample in rows[:SHOWN_ANSWERS]:
        verdict = "right" if sample["right"] else f"wrong, expected {safe_text(' '.join(sample['expected'].split()))}"
        prompt = safe_text(_last_prompt_line(str(sample["prompt"])))
        completion = safe_text(" ".join(sample["completion"].split())) or "(nothing)"
        print_text(Text(f"held-out prompt of {sample['prompt_tokens']:,} tokens: {prompt}", style="dim"), indent=2)
        style = "green" if sample["right"] else "red"
        print_text(Text.assemble((completion, style), f"  ({verdict})"), indent=4)
    right = sum(bool(sample["right"]) for sample in rows)
    shortest, longest = (edge(sample["prompt_tokens"] for sample in rows) for edge in (min, max))
    span = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    print_text(
        Text.assemble(
            "answered ", (f"{right} of {len(rows)}", "bold"), f" held-out rows right; prompts of {span} tokens"
        ),
        indent=2,
    )


def _last_prompt_line(prompt: str) -> str:
    """Return the last line of a prompt, without a trailing role name such as ``assistant``."""
    lines = [line for line in prompt.split("\n") if line.strip()]
    if len(lines) > 1 and lines[-1].strip("<|>: ") in ("assistant", "model"):
        lines.pop()
    return lines[-1].strip() if lines else ""
