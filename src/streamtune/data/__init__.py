"""Data: from files, the hub or the standard library to token ids, labels and batches.

    sources -> readers -> rows, messages -> chat, render -> store, report                          (prepare)
    sources -> readers -> rows_preference -> render_tree -> tree, fit_trees, report_trees    (prepare_trees)
    sources -> readers -> render_prompt -> prompt, report_trees                            (prepare_prompts)
    sampler -> collate, collate_trees                                                           (every step)

Import order is that of the arrows, right to left; nothing here knows a model or a recipe.
"""

from __future__ import annotations

from streamtune.data.assign import assign_rows
from streamtune.data.collate import Batch, PackedBatch, collate, collate_packed
from streamtune.data.collate_trees import NO_ROW, CollatedTrees, collate_trees
from streamtune.data.demos import ARITHMETIC_PATH, PREFERENCES_PATH
from streamtune.data.fit_trees import IDENTICAL_PAIRS, TREE_OVERLENGTH
from streamtune.data.packing import Packs, pack_rows
from streamtune.data.prepare import OVERLENGTH, PreparedData, prepare
from streamtune.data.prepare_prompts import PROMPT_TYPES, PreparedPrompts, prepare_prompts
from streamtune.data.prepare_trees import PreparedTrees, prepare_preferences, prepare_unpaired
from streamtune.data.prompt import Prompt, gather_columns
from streamtune.data.render import IGNORE_INDEX, TRAIN_ON
from streamtune.data.report import DataReport
from streamtune.data.report_trees import TreeReport
from streamtune.data.rows import ROW_TYPES
from streamtune.data.rows_preference import PREFERENCE_TYPES
from streamtune.data.sampler import ResumableSampler
from streamtune.data.sources import Source
from streamtune.data.stdlib_corpus import STDLIB_PATH
from streamtune.data.store import Example
from streamtune.data.texts import iter_texts
from streamtune.data.tree import Tree

__all__ = [
    "ARITHMETIC_PATH",
    "IDENTICAL_PAIRS",
    "IGNORE_INDEX",
    "NO_ROW",
    "OVERLENGTH",
    "PREFERENCES_PATH",
    "PREFERENCE_TYPES",
    "PROMPT_TYPES",
    "ROW_TYPES",
    "STDLIB_PATH",
    "TRAIN_ON",
    "TREE_OVERLENGTH",
    "Batch",
    "CollatedTrees",
    "DataReport",
    "Example",
    "PackedBatch",
    "Packs",
    "PreparedData",
    "PreparedPrompts",
    "PreparedTrees",
    "Prompt",
    "ResumableSampler",
    "Source",
    "Tree",
    "TreeReport",
    "assign_rows",
    "collate",
    "collate_packed",
    "collate_trees",
    "gather_columns",
    "iter_texts",
    "pack_rows",
    "prepare",
    "prepare_preferences",
    "prepare_prompts",
    "prepare_unpaired",
]
