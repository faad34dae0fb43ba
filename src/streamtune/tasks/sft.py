"""Supervised fine-tuning: the mean next-token loss over rows, which may be packed."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from streamtune import data, models, train
from streamtune.base.model_facts import model_device
from streamtune.base.paths import cache_folder
from streamtune.data.length_measures import fewest_packs
from streamtune.engine import Branches, StreamHandle, check_branches, check_packing
from streamtune.engine.preflight import check_packed_images
from streamtune.engine.rotary import longest_unscaled_length
from streamtune.errors import DataError, UnsupportedModelError
from streamtune.ops import Divergence, TokenLoss
from streamtune.recipe.keys.batching import BucketSpec
from streamtune.recipe.schema import Recipe
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.steps import SKETCH_SIZE, RowCost, SelectedSteps, StepPlan, first_epoch_steps
from streamtune.tasks.streamed import SAMPLE_ROWS, StreamedRows, StreamReport, StreamSteps, record_bad_rows
from streamtune.tasks.task import (
    BuiltRun,
    Notify,
    RandomStep,
    Task,
    Training,
    TrialStep,
    chat_options,
    delay_messages,
    image_options,
    larger_images,
    refuse_with_images,
)
from streamtune.tasks.teacher_file import TeacherFile
from streamtune.train.sketch import RowSketch, value_projection_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMPARED_ROWS = 3
"""Number of rows with images that are computed packed and alone before the first step."""
END_TOKEN_ROWS = 64
"""Number of streamed rows that are searched for end-of-turn tokens before the first step."""


class Sft(Task[Recipe]):
    """Task for ``objective: sft``: a next-token loss on rows, which may be packed, streamed or cut into pieces."""

    @property
    def step_unit_noun(self) -> str:
        if self.recipe.batching == "buckets":
            return "piece"
        if self.splits_turns:
            return "conversation"
        return "packed sequence" if self.recipe.packing else "row"

    def prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        notify: Notify,
        *,
        val_size: float | None = None,
    ) -> data.PreparedData:
        """Return the tokenized rows; with ``streaming: true`` only the first rows of each dataset, as a sample."""
        recipe = self.recipe
        if recipe.streaming:
            notify(f"streaming: true: at most the first {SAMPLE_ROWS:,} rows of each dataset are read, as a sample")
            sources = [
                source
                if source.evaluates
                else replace(source, max_rows=min(source.max_rows or SAMPLE_ROWS, SAMPLE_ROWS))
                for source in sources
            ]
        prepared = self._prepare(sources, tokenizer, self.data_options(val_size), notify)
        refuse_with_images(
            recipe,
            prepared,
            ("batching", recipe.batching == "buckets", "rows with images are not cut into pieces"),
            ("reasoning", self.splits_turns, "turns with images do not share their beginning"),
            ("teacher", recipe.teacher_file is not None, "a teacher's file is for rows of text"),
        )
        if recipe.batching != "buckets":
            return prepared
        if not recipe.packing:
            notify(
                f"a micro-batch has {recipe.per_device_train_batch_size} pieces, however short they are; "
                "packing: true joins pieces into sequences of max_length tokens"
            )
        return self._cut_into_pieces(prepared)

    def data_options(self, val_size: float | None = None) -> data.DataOptions:
        options = super().data_options(val_size)
        return replace(options, packing=options.packing and self.recipe.batching != "buckets")

    def _prepare(
        self,
        sources: Sequence[data.Source],
        tokenizer: PreTrainedTokenizerBase,
        options: data.DataOptions,
        notify: Notify,
    ) -> data.PreparedData:
        if self.recipe.streaming and any(not source.evaluates for source in sources):
            # The key of cached rows is a hash of whole files, which is slow to read for the first rows of a stream.
            options = replace(options, cache=None)
        with delay_messages(notify) as notify_later:
            return data.prepare(sources, tokenizer, options, notify_later)

    def prepare_training(
        self, sources: Sequence[data.Source], tokenizer: PreTrainedTokenizerBase, notify: Notify
    ) -> data.PreparedData | StreamedRows:
        if not self.recipe.streaming:
            return self.prepare(sources, tokenizer, notify)
        streamed = [source for source in sources if source.evaluates is None]
        evaluated = [source for source in sources if source.evaluates is not None]
        options = self.data_options(0.0)
        # A copy: rows may be rendered by one thread while another writes samples.
        stream = data.RowStream(streamed, copy.deepcopy(tokenizer), options, notify)
        stream.check_first_rows()
        held_out = self._prepare(evaluated, tokenizer, options, notify) if evaluated else None
        contents_hash, unhashed, stream.files = data.hash_streamed_sources(
            streamed, cache_folder() / "rows", save_hashes=options.cache is not None, notify=notify
        )
        if unhashed:
            notify(f"changes of {', '.join(unhashed)} cannot be detected: a resumed run assumes that there are none")
        return StreamedRows(
            stream=stream,
            held_out=held_out,
            report=StreamReport(
                [source.path for source in streamed],
                options.shuffle_buffer,
                options.max_length,
                None if held_out is None else held_out.report,
            ),
            fingerprint=contents_hash if held_out is None else f"{contents_hash} {held_out.fingerprint}",
        )

    def _cut_into_pieces(self, prepared: data.PreparedData) -> data.PreparedData:
        """Return ``prepared`` with training rows cut into pieces (``batching: buckets``) and with a new fingerprint."""
        recipe = self.recipe
        min_length = (recipe.buckets or BucketSpec()).min_length
        pieces = data.cut_rows_into_pieces(
            prepared.training, max_length=recipe.max_length, min_length=min_length, packing=recipe.packing
        )
        if not len(pieces):
            raise DataError(
                "no piece of a row has a trained token after its first token",
                where="batching",
                fix="write batching: rows, or train_on: all",
            )
        report = replace(
            prepared.report,
            pieces=len(pieces),
            pieces_dropped=prepared.report.pieces_dropped + pieces.dropped,
            piece_tokens_lost=pieces.tokens_lost,
            piece_targets_lost=pieces.targets_lost,
        )
        digest = hashlib.sha256(prepared.fingerprint.encode())
        for part in (pieces.rows, pieces.starts, pieces.stops, pieces.buckets):
            digest.update(part.tobytes())
        return replace(prepared, report=report, fingerprint=digest.hexdigest(), pieces=pieces)

    def first_epoch_statistics(
        self, prepared: data.PreparedData | StreamedRows, *, try_packing: bool = True
    ) -> data.BatchStatistics | None:
        if isinstance(prepared, StreamedRows) or self.recipe.select_rows is not None:
            return None
        recipe, batches = self.recipe, Batches(prepared, None)
        epoch, pieces, tokens = first_epoch_steps(batches, recipe), prepared.pieces, batches.lengths()
        layout = data.measure_epoch_layout(
            epoch,
            tokens,
            batches.squared_lengths(),
            batch_size=recipe.per_device_train_batch_size,
            packed=batches.is_packed,
            per_sequence=None if pieces is None else pieces.pieces_per_sequence(),
        )
        lengths = prepared.training.lengths()
        packs = None if self.splits_turns else prepared.packs  # turns that share a beginning have a fixed layout
        if packs is None and try_packing and not self.splits_turns:
            packs = data.pack_rows(lengths, recipe.max_length, seed=recipe.seed)
        # With dataset weights, an epoch visits some rows several times or never. Pieces are compared with whole rows.
        visited = int(lengths.sum() if prepared.mixture is None else layout.step_tokens.sum())
        concat = data.concat_squared_lengths(visited, recipe.max_length)
        step_percentiles = np.percentile(layout.step_tokens, (0, 50, 100), method="higher").tolist()
        return data.BatchStatistics(
            batching=recipe.batching,
            batch_size=recipe.per_device_train_batch_size,
            padding=round(1 - int(layout.step_tokens.sum()) / layout.positions, 4),
            steps=len(epoch),
            step_tokens=dict(zip(("min", "p50", "max"), map(int, step_percentiles), strict=True)),
            squared_lengths=layout.squares,
            squared_lengths_concat=concat,
            attention_ratio=round(concat / layout.squares, 3),
            packing=recipe.packing or self.splits_turns,
            packs=0 if packs is None else len(packs),
            pack_fill=0.0 if packs is None else round(packs.fill_rate(recipe.max_length), 4),
            fewest_packs=fewest_packs(lengths, recipe.max_length),
            pieces={} if pieces is None else pieces.piece_counts_by_bucket(),
        )

    def planned_length(self, longest_row: int) -> int:
        return self.recipe.max_length if self.recipe.packing or self.splits_turns else longest_row

    def largest_images(self, batches: Batches) -> Mapping[str, torch.Tensor] | None:
        return None if self.recipe.streaming else batches.largest_images(self.recipe.per_device_train_batch_size)

    @property
    def splits_turns(self) -> bool:
        """True with ``reasoning: per_turn``: each turn is a row, and common prefixes of rows are computed once."""
        return self.recipe.reasoning == "per_turn"

    def check_model(self, handle: StreamHandle) -> None:
        if self.recipe.packing:
            check_packing(handle)
        if self.splits_turns:
            self._check_shared_beginnings(handle)
        if self.recipe.select_rows is not None:
            value_projection_weights(handle.layers)

    def check_batches(self, handle: StreamHandle, batches: Batches, notify: Notify) -> None:
        if self.recipe.packing and len(sample := batches.shortest_rows_with_images(COMPARED_ROWS)) > 1:
            if models.find_deferred_weights(handle.model) is not None:
                notify("the weights are sharded: packed rows with images are not compared with the rows alone")
                return
            device = model_device(handle.model)
            packed, *alone = (
                batches.collate([rows], packed=len(rows) > 1).to(device).inputs
                for rows in (sample, *([row] for row in sample))
            )
            check_packed_images(handle, packed, alone)

    def _check_shared_beginnings(self, handle: StreamHandle) -> None:
        """Raise ``UnsupportedModelError`` if rows that share a prefix do not give the same results as separate rows."""
        fix = "write reasoning: keep, which trains all turns in one row"
        limit = longest_unscaled_length(handle.model.config)
        if limit is not None and limit < self.recipe.max_length:
            what = (
                f"the model's rotary embeddings change above {limit:,} tokens, so turns that share a prefix may need "
                "different ones"
            )
            raise UnsupportedModelError(what, where="reasoning", fix=f"{fix}, or set max_length: {limit}")
        try:
            check_branches(handle)
        except UnsupportedModelError as error:
            error.where, error.fix = "reasoning", fix
            raise

    def make_batch_maker(
        self,
        prepared: data.PreparedData | StreamedRows,
        tokenizer: PreTrainedTokenizerBase,
        model: Any,
        *,
        share: bool,
    ) -> Batches:
        """Return the object that makes micro-batches of rows; with ``streaming: true``, of held-out rows only."""
        # A stream without held-out rows has no batches here, and none are requested.
        prepared_rows: Any = prepared.held_out if isinstance(prepared, StreamedRows) else prepared
        teacher_path = self.recipe.teacher_file
        images = image_options(self.recipe)
        if teacher_path is None:
            return Batches(prepared_rows, tokenizer, images=images, model=model)
        teacher = TeacherFile.open(Path(teacher_path), self.recipe.kd_temperature)
        teacher.check_rows(prepared_rows.training, tokenizer)
        return Batches(prepared_rows, tokenizer, teacher, images)

    def count_steps(self, batches: Batches, micro_batches: int, world: train.World) -> StepPlan:
        recipe = self.recipe
        if not recipe.streaming:
            return super().count_steps(batches, micro_batches, world)
        warmup_steps = recipe.warmup_steps or math.ceil(recipe.max_steps * recipe.warmup_ratio)
        return StepPlan(recipe.max_steps, None, warmup_steps)

    def make_steps(self, built: BuiltRun) -> train.StepStream:
        if self.recipe.select_rows is not None:
            return self._selected_steps(built)
        if not self.recipe.streaming:
            return super().make_steps(built)
        batches = built.batches
        steps = StreamSteps(
            built.prepared.stream,
            lambda examples: batches.collate([[example] for example in examples], packed=False),
            self.recipe,
            built.world,
            RowCost.from_model(built.model),
        )
        built.closing.callback(steps.close)
        return steps

    def _selected_steps(self, built: BuiltRun) -> SelectedSteps:
        recipe, prepared = self.recipe, built.prepared
        mixture = prepared.mixture
        return SelectedSteps(
            built.batches,
            recipe,
            built.world,
            RowCost.from_model(built.model),
            sketch=RowSketch(
                built.model,
                built.handle,
                self.make_objective(built.handle, built.reference, built.device),
                device=built.device,
                size=SKETCH_SIZE,
                seed=recipe.seed,
                autocast_dtype=recipe.autocast_dtype,
            ),
            source_bounds=prepared.bounds,
            source_sizes=np.diff(prepared.bounds).tolist() if mixture is None else mixture.visits,
            origin_of_row=lambda row: prepared.training[row].origin,
            record_path=built.directory.selected,
            steps_taken=built.first_step,
        )

    def trained_end_tokens(self, prepared: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        rows = prepared.first_examples(END_TOKEN_ROWS) if isinstance(prepared, StreamedRows) else prepared.training
        return data.trained_end_tokens(rows, tokenizer, chat_options(self.recipe))

    def make_training(self, built: BuiltRun) -> Training:
        training = super().make_training(built)
        steps = training.steps
        if isinstance(steps, SelectedSteps):
            return replace(training, before_first_step=steps.before_first_step)
        if not isinstance(steps, StreamSteps):
            return training

        def before_first_step(backend: train.Backend, progress: train.Progress, stop: train.StopRequest) -> None:
            def report_messages(messages: Sequence[str], errors: Sequence[DataError]) -> None:
                for message in messages:
                    progress.report_note(built.first_step + steps.steps_taken, message)
                if errors and built.world.is_main:
                    record_bad_rows(built.directory.bad_rows, errors)

            steps.report_messages = report_messages

        return replace(training, before_first_step=before_first_step)

    def make_objective(self, scorer: Any, reference: train.Reference | None, device: torch.device) -> train.Objective:
        assert reference is None or isinstance(reference, train.ModelReference), "the reference must be a teacher model"
        return train.SupervisedObjective(scorer, self.token_loss, reference)

    @property
    def token_loss(self) -> TokenLoss:
        recipe = self.recipe
        divergence = Divergence(recipe.kd_divergence, recipe.kd_beta, recipe.kd_temperature, recipe.kd_hard_share)
        return TokenLoss(
            recipe.loss_type,
            recipe.focal_gamma,
            recipe.label_smoothing_factor,
            recipe.z_loss_coef,
            None if recipe.teacher is None else divergence,
        )

    @property
    def uses_reference(self) -> bool:
        """True if the recipe names a teacher model; a file with a teacher's top-k tokens needs no model."""
        return self.recipe.teacher is not None and self.recipe.teacher_file is None

    @property
    def reference_name(self) -> str | None:
        return self.recipe.teacher if self.uses_reference else None

    @property
    def teacher_top_k(self) -> int:
        file = self.recipe.teacher_file
        return 0 if file is None else TeacherFile.open(Path(file), self.recipe.kd_temperature).top_k_size

    @property
    def reference_key(self) -> str:
        return "teacher"

    def make_random_step(self, trial: TrialStep) -> RandomStep:
        teacher = trial.reference.model if isinstance(trial.reference, train.ModelReference) else None
        draw = RandomTokens(self.recipe, trial.model, teacher)
        drawn = [draw.draw_row_batch(trial.batch_size, trial.length) for _ in self._trial_micro_batches()]
        if top_k := self.teacher_top_k:
            drawn = [replace(batch, top_k=draw.draw_top_k(batch, top_k)) for batch in drawn]
        batches = [batch.to(trial.device) for batch in drawn]
        return self.make_objective(trial.handle, trial.reference, trial.device), lambda: batches


def collate_prefix_batch(examples: Sequence[data.Example]) -> train.PrefixBatch:
    """Return a batch of one sequence, in which common prefixes of the rows occur once."""
    collated = data.collate_prefixes(examples)
    branches = Branches.of_nodes(collated["nodes"])
    return train.PrefixBatch(
        input_ids=collated["input_ids"],
        attention_mask=collated["attention_mask"],
        shift_labels=collated["shift_labels"],
        origins=tuple(example.origin for example in examples),
        position_ids=branches.position_ids,
        weights=collated.get("weights"),
        branches=branches,
    )


@dataclass(frozen=True)
class Batches:
    """Makes micro-batches for a next-token loss. A training unit is a row, a pack of rows, or a piece of a row."""

    prepared: data.PreparedData
    tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer with the padding token; None if batches are only counted."""
    teacher: TeacherFile | None = None
    """File with a teacher's top-k tokens for the training rows; None without ``teacher_file``."""
    images: data.ImageOptions | None = None
    """Model whose processor prepares images; None for rows without images."""
    model: Any = None
    """Model that computes the batches, for its positions of tokens; None if no packed rows have images."""

    @property
    def is_packed(self) -> bool:
        pieces = self.prepared.pieces
        return self.prepared.packs is not None or (pieces is not None and pieces.sequence_length is not None)

    @property
    def is_padded(self) -> bool:
        return not self.is_packed

    @property
    def buckets(self) -> npt.NDArray[np.int64] | None:
        return None if self.prepared.pieces is None else self.prepared.pieces.buckets

    def collate(self, sequences: Sequence[Sequence[data.Example]], *, packed: bool) -> train.MicroBatch:
        """Return a batch of sequences, each with one row or, if ``packed``, with several rows."""
        examples = [example for sequence in sequences for example in sequence]
        assert self.tokenizer is not None, "padding needs a tokenizer"
        origins, pad = tuple(example.origin for example in examples), self.tokenizer.pad_token_id
        if packed and self.prepared.packs is not None and self.prepared.packs.sizes is not None:
            return collate_prefix_batch(examples)
        collated = (
            data.collate_packed(sequences, pad_token_id=pad) if packed else data.collate(examples, pad_token_id=pad)
        )
        batch = train.MicroBatch(**collated, origins=origins)
        if not any(example.images for example in examples):
            return batch
        files = [[data.ImageFile.parse(each) for row in rows for each in row.images] for rows in sequences]
        images = self.image_processor.model_inputs(files, batch.input_ids)
        if batch.position_ids is not None:
            images |= models.packed_image_positions(self.model, batch.input_ids, batch.position_ids, images)
        return replace(batch, images=images)

    @cached_property
    def image_processor(self) -> data.ImageProcessor:
        assert self.images is not None, "rows with images have a model with a processor"
        assert self.tokenizer is not None, "batches are made with a tokenizer"
        return data.ImageProcessor(self.images, self.tokenizer)

    def largest_images(self, batch_size: int) -> Mapping[str, torch.Tensor] | None:
        """Return the inputs for the images of a micro-batch with the most pixels; None without images."""
        chosen = data.rows_with_most_images(self.prepared.training, batch_size, self.prepared.packs)
        return larger_images(self.training_batch(units).images for units in chosen)

    def shortest_rows_with_images(self, count: int) -> list[data.Example]:
        """Return the shortest training rows, those with images first; an empty list without images."""
        rows = self.prepared.training
        if not data.have_images(rows) or not (counts := data.count_images(rows)).any():
            return []
        return [rows[row] for row in np.lexsort((rows.lengths(), counts == 0))[:count].tolist()]

    @property
    def num_training_units(self) -> int:
        prepared = self.prepared
        return len(prepared.pieces or prepared.packs or prepared.training)

    @property
    def mixture(self) -> data.Mixture | None:
        return self.prepared.mixture

    def training_batch(self, units: Sequence[int]) -> train.MicroBatch:
        prepared = self.prepared
        if prepared.pieces is None:
            sequences = [self._unit_examples(prepared.training, prepared.packs, unit) for unit in units]
            batch = self.collate(sequences, packed=self.is_packed)
            if self.teacher is None:
                return batch
            rows = [example for sequence in sequences for example in sequence]
            return replace(batch, top_k=self.teacher.top_k(rows, batch.shift_labels))
        pieces = [prepared.pieces.cut_piece(prepared.training, unit) for unit in units]
        per_sequence = self.units_per_sequence(units[0])
        sequences = [pieces[start : start + per_sequence] for start in range(0, len(pieces), per_sequence)]
        return self.collate(sequences, packed=self.is_packed)

    def lengths(self) -> npt.NDArray[np.int64]:
        return self._lengths_and_squares[0]

    def squared_lengths(self) -> npt.NDArray[np.int64]:
        return self._lengths_and_squares[1]

    @cached_property
    def _lengths_and_squares(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        prepared = self.prepared
        lengths = prepared.training.lengths() if prepared.pieces is None else prepared.pieces.lengths()
        if prepared.packs is None:
            return lengths, lengths**2
        packs, in_order = prepared.packs, lengths[prepared.packs.rows]
        if packs.sizes is not None and packs.squares is not None:
            return packs.sizes, packs.squares
        first, second = (np.add.reduceat(values, packs.starts[:-1]) for values in (in_order, in_order**2))
        return first, second

    def units_per_sequence(self, unit: int) -> int:
        return 1 if self._pieces_per_sequence is None else int(self._pieces_per_sequence[unit])

    @cached_property
    def _pieces_per_sequence(self) -> npt.NDArray[np.int64] | None:
        return None if self.prepared.pieces is None else self.prepared.pieces.pieces_per_sequence()

    def held_out_batches(self, batch_size: int, eval_set: data.EvalSet | None = None) -> Iterator[train.MicroBatch]:
        examples, packs = self.prepared.validation, self.prepared.validation_packs
        rows = range(len(examples)) if eval_set is None else range(eval_set.start, eval_set.stop)
        units = rows if packs is None else packs.packs_of_rows(rows.start, rows.stop)
        for start in range(0, len(units), batch_size):
            chosen = units[start : start + batch_size]
            yield self.collate(
                [self._unit_examples(examples, packs, unit) for unit in chosen], packed=packs is not None
            )

    @staticmethod
    def _unit_examples(examples: Sequence[data.Example], packs: data.Packs | None, unit: int) -> list[data.Example]:
        return [examples[row] for row in ([unit] if packs is None else packs[unit])]
