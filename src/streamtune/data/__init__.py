"""Turn files, datasets on the Hugging Face Hub and built-in data into token ids, labels and batches.

    options: the recipe's options for preparing rows
    reading -> row_types, preferences -> rendering -> fit -> record_table, data_report   (prepare, row_stream)
    row_cache: a disk cache of prepared rows, found by their contents                    (prepare)
    batches: micro-batches and optimizer steps                                           (every step)
    inspect_rows, length_measures: show prepared rows as text; compare other lengths     (streamtune data)
    texts: the texts of all rows, for training a tokenizer

A bad file or row raises ``DataError``. ``faults`` collects the errors of bad rows. ``rendering/counts`` counts what the
user should know about valid rows. Modules import only modules to their left. Nothing here imports a model or a recipe.
"""

from __future__ import annotations

from streamtune.data.batches.collate import (
    Batch,
    CollatedTrees,
    PackedBatch,
    collate,
    collate_packed,
    collate_prefixes,
    collate_trees,
)
from streamtune.data.batches.optimizer_steps import (
    ChosenRows,
    EpochSteps,
    StepSampler,
    assign_to_ranks,
    choose_rows_to_train,
    find_small_sources,
    make_bucket_sampler,
    make_token_budget_sampler,
)
from streamtune.data.batches.sampler import Mixture, Packs, Pieces, ResumableSampler, cut_rows_into_pieces, pack_rows
from streamtune.data.data_report import CompletionReport as CompletionReport
from streamtune.data.data_report import DataReport
from streamtune.data.fit.held_out import EvalSet
from streamtune.data.image_files import (
    MOST_PIXELS,
    ImageFile,
    count_images,
    decode_image,
    have_images,
    rows_with_most_images,
)
from streamtune.data.images import IMAGES, ImageOptions, ImageProcessor
from streamtune.data.inspect_rows import trained_end_tokens
from streamtune.data.length_measures import BatchStatistics, EpochLayout, concat_squared_lengths, measure_epoch_layout
from streamtune.data.options import (
    COMPLETION_OVERLENGTH,
    IDENTICAL_PAIRS,
    OVERLENGTH,
    ChatOptions,
    DataOptions,
    RowPolicy,
)
from streamtune.data.preferences import PREFERENCE_TYPES
from streamtune.data.prepare import (
    PreparedCompletions,
    PreparedData,
    PreparedPrompts,
    prepare,
    prepare_preferences,
    prepare_prompts,
    prepare_unpaired,
)
from streamtune.data.reading.builtin import ARITHMETIC_PATH, PREFERENCES_PATH, STDLIB_PATH
from streamtune.data.reading.sources import Source
from streamtune.data.record_table import Example, Prompt, Tree, gather_columns, measure_trees
from streamtune.data.rendering.render import TRAIN_ON, PromptRenderer
from streamtune.data.row_cache import RowCache, hash_streamed_sources
from streamtune.data.row_stream import RowStream, StreamPosition
from streamtune.data.row_types import PROMPT_TYPES, ROW_TYPES
from streamtune.data.texts import ChatContext, first_chat_context, has_chat_messages, iter_texts

__all__ = [
    "ARITHMETIC_PATH",
    "COMPLETION_OVERLENGTH",
    "IDENTICAL_PAIRS",
    "IMAGES",
    "MOST_PIXELS",
    "OVERLENGTH",
    "PREFERENCES_PATH",
    "PREFERENCE_TYPES",
    "PROMPT_TYPES",
    "ROW_TYPES",
    "STDLIB_PATH",
    "TRAIN_ON",
    "Batch",
    "BatchStatistics",
    "ChatContext",
    "ChatOptions",
    "ChosenRows",
    "CollatedTrees",
    "CompletionReport",
    "DataOptions",
    "DataReport",
    "EpochLayout",
    "EpochSteps",
    "EvalSet",
    "Example",
    "ImageFile",
    "ImageOptions",
    "ImageProcessor",
    "Mixture",
    "PackedBatch",
    "Packs",
    "Pieces",
    "PreparedCompletions",
    "PreparedData",
    "PreparedPrompts",
    "Prompt",
    "PromptRenderer",
    "ResumableSampler",
    "RowCache",
    "RowPolicy",
    "RowStream",
    "Source",
    "StepSampler",
    "StreamPosition",
    "Tree",
    "assign_to_ranks",
    "choose_rows_to_train",
    "collate",
    "collate_packed",
    "collate_prefixes",
    "collate_trees",
    "concat_squared_lengths",
    "count_images",
    "cut_rows_into_pieces",
    "decode_image",
    "find_small_sources",
    "first_chat_context",
    "gather_columns",
    "has_chat_messages",
    "hash_streamed_sources",
    "have_images",
    "iter_texts",
    "make_bucket_sampler",
    "make_token_budget_sampler",
    "measure_epoch_layout",
    "measure_trees",
    "pack_rows",
    "prepare",
    "prepare_preferences",
    "prepare_prompts",
    "prepare_unpaired",
    "rows_with_most_images",
    "trained_end_tokens",
]
