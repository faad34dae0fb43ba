"""The training loop, with its run directory, checkpoints, metrics and progress display."""

from __future__ import annotations

from streamtune.train.backend import Backend, BlockBackend, LocalBackend, ZerothOrderBackend
from streamtune.train.checkpoint import Checkpoint, checkpoint_path, set_aside_later_checkpoints
from streamtune.train.directory_lock import DirectoryLock
from streamtune.train.evaluations import RunProgress
from streamtune.train.guard import mostly_skipped_error
from streamtune.train.in_backward import HostOptimizer, InBackwardBackend
from streamtune.train.loop import TrainJob, train
from streamtune.train.loss_scale import LossScale
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
    counted_batches,
    evaluation_mode,
)
from streamtune.train.process import StopRequest, preserve_rng, seed_everything, use_deterministic_kernels
from streamtune.train.progress import Listener, Listeners, Progress, RunFacts, draw_loss, format_duration, format_rate
from streamtune.train.records import (
    append_event,
    append_records,
    check_records,
    delete_records_after_step,
    read_records,
    record_failure,
)
from streamtune.train.rundir import (
    FILES,
    RunDirectory,
    check_same_run,
    check_shared_folder,
    describe_harmless_changes,
    find_checkpoint,
)
from streamtune.train.saver import ModelWriter, write_final_model
from streamtune.train.slices import SliceReader, slices_of_replicated_state
from streamtune.train.staging import commit_directory, write_text_durably
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
    "HeldOut",
    "HostOptimizer",
    "InBackwardBackend",
    "Listener",
    "Listeners",
    "LocalBackend",
    "LossScale",
    "MicroBatch",
    "ModelReference",
    "ModelWriter",
    "Objective",
    "PrefixBatch",
    "Progress",
    "Reference",
    "RunDirectory",
    "RunFacts",
    "RunProgress",
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
    "ZerothOrderBackend",
    "append_event",
    "append_records",
    "autocast",
    "check_records",
    "check_same_run",
    "check_shared_folder",
    "checkpoint_path",
    "commit_directory",
    "counted_batches",
    "delete_records_after_step",
    "describe_harmless_changes",
    "draw_loss",
    "evaluation_mode",
    "find_checkpoint",
    "format_duration",
    "format_rate",
    "is_out_of_memory",
    "mostly_skipped_error",
    "peak_memory_bytes",
    "preserve_rng",
    "read_records",
    "record_failure",
    "seed_everything",
    "set_aside_later_checkpoints",
    "slices_of_replicated_state",
    "train",
    "use_deterministic_kernels",
    "write_final_model",
    "write_text_durably",
]
