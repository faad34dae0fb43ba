"""Data: from files, the hub or the standard library to token ids, labels and batches.

    sources -> readers -> rows, messages -> chat, render -> store, report      (prepare)
    sampler -> collate                                                         (every step)

Import order is that of the arrows, right to left; nothing here knows a model or a recipe.
"""

from __future__ import annotations

from streamtune.data.collate import Batch, PackedBatch, collate, collate_packed
from streamtune.data.packing import Packs, pack_rows
from streamtune.data.prepare import OVERLENGTH, PreparedData, iter_texts, prepare
from streamtune.data.render import IGNORE_INDEX, TRAIN_ON
from streamtune.data.report import DataReport
from streamtune.data.rows import ROW_TYPES
from streamtune.data.sampler import ResumableSampler
from streamtune.data.sources import Source
from streamtune.data.stdlib_corpus import STDLIB_PATH
from streamtune.data.store import Example

__all__ = [
    "IGNORE_INDEX",
    "OVERLENGTH",
    "ROW_TYPES",
    "STDLIB_PATH",
    "TRAIN_ON",
    "Batch",
    "DataReport",
    "Example",
    "PackedBatch",
    "Packs",
    "PreparedData",
    "ResumableSampler",
    "Source",
    "collate",
    "collate_packed",
    "iter_texts",
    "pack_rows",
    "prepare",
]
