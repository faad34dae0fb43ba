"""The training loop, with its run directory, checkpoints, metrics and progress display."""

from __future__ import annotations

from streamtune.train.backend import Backend, BlockBackend, ForwardBackend, LocalBackend
from streamtune.train.checkpoint import Checkpoint, checkpoint_path, supersede
from streamtune.train.directory_lock import DirectoryLock
from streamtune.train.evaluations import Progressed
from streamtune.train.guard import skipped_most
from streamtune.train.in_backward import HostOptimizer, InBackwardBackend
from streamtune.train.loop import TrainJob, train
from streamtune.train.objective import (
    MicroBatch,
    ModelReference,
    Objective,
    PrefixBatch,
    Reference,
    Score,
    StepStream,
    SupervisedObjective,
    TreeBatch,
    autocast,
    counted,
    evaluating,
)
from streamtune.train.process import StopRequest, preserve_rng, seed_everything, use_deterministic_kernels
from streamtune.train.progress import Listener, Listeners, Progress, RunFacts, draw_loss, format_duration, format_rate
from streamtune.train.records import (
    append_event,
    append_records,
    check_records,
    cut_after_step,
    read_records,
    record_failure,
)
from streamtune.train.rundir import (
    FILES,
    RunDirectory,
    check_same_run,
    check_shared_folder,
    find_checkpoint,
    tell_changes,
)
from streamtune.train.saver import ModelWriter, write_final
from streamtune.train.slices import SliceReader, share_out_whole
from streamtune.train.staging import commit_directory, write_durably
from streamtune.train.step import (
    GIB,
    HeldOut,
    StepContext,
    TrainSettings,
    is_out_of_memory,
    peak_memory_bytes,
)
from streamtune.train.world import WORLD, World

__all__ = [
    "FILES",
    "GIB",
    "WORLD",
    "Backend",
    "BlockBackend",
    "Checkpoint",
    "DirectoryLock",
    "ForwardBackend",
    "HeldOut",
    "HostOptimizer",
    "InBackwardBackend",
    "Listener",
    "Listeners",
    "LocalBackend",
    "MicroBatch",
    "ModelReference",
    "ModelWriter",
    "Objective",
    "PrefixBatch",
    "Progress",
    "Progressed",
    "Reference",
    "RunDirectory",
    "RunFacts",
    "Score",
    "SliceReader",
    "StepContext",
    "StepStream",
    "StopRequest",
    "SupervisedObjective",
    "TrainJob",
    "TrainSettings",
    "TreeBatch",
    "World",
    "append_event",
    "append_records",
    "autocast",
    "check_records",
    "check_same_run",
    "check_shared_folder",
    "checkpoint_path",
    "commit_directory",
    "counted",
    "cut_after_step",
    "draw_loss",
    "evaluating",
    "find_checkpoint",
    "format_duration",
    "format_rate",
    "is_out_of_memory",
    "peak_memory_bytes",
    "preserve_rng",
    "read_records",
    "record_failure",
    "seed_everything",
    "share_out_whole",
    "skipped_most",
    "supersede",
    "tell_changes",
    "train",
    "use_deterministic_kernels",
    "write_durably",
    "write_final",
]
