"""Save a teacher model's top-k log-probabilities at each trained token of a recipe, for offline distillation.

A run with ``teacher: FILE`` distils from the file without loading the teacher.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import torch

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.templates import fix_template_date
from streamtune.errors import ArgumentError
from streamtune.ops import top_k_classes
from streamtune.ops.head.sweep import TargetRows
from streamtune.programs.evaluate.evaluate import Feedback
from streamtune.programs.evaluate.model import plan_evaluation
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import locate_errors, make_sources, make_tokenizer
from streamtune.run.device import choose_device, prepare_libraries, stream_model
from streamtune.run.reference import load_reference
from streamtune.tasks import task_of
from streamtune.tasks.teacher_file import (
    TeacherFileWriter,
    distinct_row_indices,
    lock_output,
    num_targets,
    tokenizer_hash,
)


def teach(loaded: LoadedRecipe, output: Path, *, top_k: int, feedback: Feedback | None = None) -> dict[str, Any]:
    """Write the teacher's top-k tokens at each trained token of the training rows; return the file's metadata and path.

    Args:
        loaded: SFT recipe that names a teacher model.
        output: File to write; it must not exist.
        top_k: Number of tokens saved for each trained token.
        feedback: Callbacks for notes and progress.

    Raises:
        ArgumentError: The recipe has no teacher or another objective, or ``top_k`` is not below the vocabulary size.
        UserError: The recipe, its data or the model is invalid; ``where`` is the line of the recipe.
    """
    feedback = feedback or Feedback()
    notify, doing = feedback.notify, feedback.doing
    recipe = loaded.recipe
    with locate_errors(loaded), ExitStack() as stack:
        partial = stack.enter_context(lock_output(output))
        task = task_of(recipe)
        if recipe.objective != "sft":
            raise ArgumentError(f"teach needs an sft recipe, found objective: {recipe.objective}", where="objective")
        if recipe.teacher is None or recipe.teacher_file is not None:
            raise ArgumentError("the recipe names no teacher model", where="teacher", fix="--set teacher=NAME")
        # Refuse now what a run with the file would refuse.
        for key, what, fix in recipe.model_copy(update={"teacher": str(output)}).refusals():
            raise ArgumentError(what, where=key, fix=fix)
        device = choose_device(recipe.device)
        prepare_libraries(device)
        sources = make_sources(loaded)
        today = date.today().isoformat()
        fix_template_date(today)  # a run with the file renders the same date
        with doing("making the tokenizer"):
            tokenizer = make_tokenizer(recipe, sources, None, notify)
        prepared = task.prepare(sources, tokenizer, notify)
        training: Any = prepared.training
        if data.have_images(training):
            raise ArgumentError(
                "the rows have images, and a teacher's file is for rows of text",
                where="datasets",
                fix="remove the rows with images",
            )
        rows, numbers = prepared.training, list(distinct_row_indices(prepared.training))
        with doing("loading the teacher"):
            teacher = load_reference(task, None, tokenizer, device)
        assert teacher is not None, "it has a name"
        vocabulary = min(len(tokenizer), teacher.get_output_embeddings().weight.shape[0])
        if top_k >= vocabulary:
            raise ArgumentError(
                f"--top-k must be below the teacher's vocabulary size {vocabulary:,}, found {top_k:,}",
                where="--top-k",
                fix="64 is usual",
            )
        with doing("planning"):
            alone = recipe.model_copy(update={"teacher": None})
            schedule = plan_evaluation(alone, teacher, task.longest_row_tokens(prepared), device)
        handle = stack.enter_context(stream_model(recipe, teacher, schedule))
        teacher.requires_grad_(False)
        with doing("checking that streaming does not change the model's results"):
            handle.check()
        facts = {
            "k": str(top_k),
            "vocabulary": str(vocabulary),
            "temperature": repr(recipe.kd_temperature),
            "date": today,
            "teacher": recipe.teacher,
            "tokenizer": tokenizer_hash(tokenizer),
        }
        writer = TeacherFileWriter(partial, [num_targets(rows[number]) for number in numbers], facts)
        model = train.ModelReference(teacher, handle)
        with writer.renamed_on_success(output), torch.no_grad(), train.autocast(device, recipe.autocast_dtype):
            for start in range(0, len(numbers), recipe.per_device_eval_batch_size):
                part = [rows[number] for number in numbers[start : start + recipe.per_device_eval_batch_size]]
                tensors = data.collate(part, pad_token_id=tokenizer.pad_token_id)
                batch = train.MicroBatch(**tensors, origins=tuple(row.origin for row in part)).to(device)
                ids, logprobs = _teacher_top_tokens(model, batch, top_k, vocabulary, recipe.kd_temperature)
                place = 0
                for row in part:
                    stop = place + num_targets(row)
                    writer.add_row(row, ids[place:stop], logprobs[place:stop])
                    place = stop
                feedback.progress("rows", start + len(part), len(numbers))
    return {**writer.metadata, "file": str(output), "targets": int(writer.starts[-1]), "bytes": output.stat().st_size}


def _teacher_top_tokens(
    model: train.ModelReference, batch: train.MicroBatch, top_k: int, vocabulary: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the teacher's top-k token ids ``[K, k]`` and log-probabilities ``[K, k + 1]`` for K trained tokens.

    The last log-probability is of all other tokens together.
    """
    lazy = model.lazy_logits(batch)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    with lazy.head.teacher_head(lazy, batch.shift_labels) as head:
        for chunk in TargetRows(batch.shift_labels, IGNORE_INDEX, model.handle.schedule.head_chunk_size).chunks():
            ids, logprobs = top_k_classes(head.logits(chunk)[:, :vocabulary], top_k, temperature)
            found.append((ids.int().cpu(), logprobs.float().cpu()))
    ids_parts, logprob_parts = zip(*found, strict=True)
    return torch.cat(ids_parts), torch.cat(logprob_parts)
