"""A step of training, apart from its schedule; and the modes of computing its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import nn

from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.errors import ArgumentError
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.plan.simulate.shard import RankShard

Mode = Literal[
    "plain",
    "checkpoint",
    "checkpoint-offload",
    "deepspeed-tiled",
    "liger-loss",
    "liger-loss-offload",
    "liger",
    "trl",
    "unsloth",
    "stream",
    "stream-keep-attention",
]


ALL_MODES: tuple[Mode, ...] = get_args(Mode)


MODES: tuple[Mode, ...] = ("plain", "checkpoint", "stream")
"""The modes that are compared by default."""

LABELS: dict[Mode, str] = {
    "plain": "plain autograd",
    "checkpoint": "gradient checkpointing",
    "checkpoint-offload": "checkpointing, inputs on host (save_on_cpu)",
    "deepspeed-tiled": "checkpointing, tiled MLP and loss (ALST)",
    "liger-loss": "checkpointing, fused loss (Liger)",
    "liger-loss-offload": "checkpointing, fused loss (Liger), inputs on host",
    "liger": "checkpointing, all kernels (Liger)",
    "trl": "checkpointing, offloading, fused loss (TRL)",
    "unsloth": "checkpointing, offloading, chunked loss (Unsloth)",
    "stream": "StreamTune",
    "stream-keep-attention": "StreamTune, attention kept",
}
"""The name of each mode for readers."""


DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TeacherShape:
    """A teacher, whose forward comes before the model's, and whose head is read beside the model's.

    Attributes:
        hidden: Elements of a final hidden state.
        vocabulary: Rows of the head.
        dtype: Of its weights and hidden states.
        flops: Operations of its forward, for each token, without attention.
        make_model: Builds it on ``meta``; None leaves its forward out.
        structure: Its configuration, by which simulations that are kept are told apart.
    """

    hidden: int
    vocabulary: int
    dtype: torch.dtype
    flops: int = 0
    make_model: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)
    structure: str = ""


@dataclass(frozen=True)
class Workload:
    """A step of training, apart from its schedule.

    Args:
        make_model: Builds the model on ``meta``: in its dtype, adapters attached, without weights.
        length: Tokens of a row; where completions are scored, of the longest with its prompt.
        batch_size: Rows of a micro-batch; where completions are scored, the batch size that ``completions`` takes.
        micro_batches: Micro-batches of a step. If several, the gradients of the first are there during the others.
        make_optimizer: Builds the optimizer of a model; None trains without one.
        autocast: Compute in bf16.
        mode: ``stream``, or a baseline: ``plain`` autograd, ``checkpoint`` for every layer, the same with Liger's fused
            loss (``liger-loss``), and with the inputs of the layers on the host (``liger-loss-offload``).
        cluster: The devices that train, and the part of the step that each has. Lengths and rows are those of all ranks
            that share a sequence together; one of these ranks is simulated.
        device_type: The device whose kernels compute: ``cuda`` or ``cpu``.
        completions: Returns what is scored at a length and batch size, where the loss is not on next tokens. A
            baseline has a row for each completion.
        token_loss: The loss of a target of the rows, where it is another than the cross entropy; of completions where
            it is given with them, which are not scored then.
        teacher: The head of the teacher that the loss has a divergence from; its weights are of ``reference_bytes``.
        teacher_top_k: Likeliest tokens of a teacher that a file has of each target, on the host; 0 without.
        reference_bytes: Bytes of weights that are held in addition to the model's and not trained.
        step: What the optimizer step computes of each micro-batch, the gradients that exist at once, and where states
            are.
        keep: Keep simulations on disk, and use those that are there.

    Raises:
        ArgumentError: A value is out of range.
    """

    make_model: Callable[[], nn.Module]
    length: int
    batch_size: int = 1
    micro_batches: int = 1
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    autocast: bool = False
    mode: Mode = "stream"
    cluster: Cluster = field(default_factory=Cluster)
    device_type: str = "cuda"
    completions: Completions | None = None
    token_loss: TokenLoss | None = None
    teacher: TeacherShape | None = None
    teacher_top_k: int = 0
    reference_bytes: int = 0
    step: StepKind = PLAIN_STEP
    keep: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be 1 or more, not {getattr(self, name)!r}")
        if self.length < 2:
            raise ArgumentError(f"a row of training has 2 tokens or more, not {self.length!r}")
        if self.device_type not in DEVICES:
            known = " or ".join(map(repr, DEVICES))
            raise ArgumentError(f"kernels of {self.device_type!r} are not known", mend=f"set device_type to {known}")

    @cached_property
    def scored(self) -> Scored | None:
        """The completions that are scored; None where the loss is on next tokens."""
        if self.completions is None:
            return None
        scored = self.completions(self.length, self.batch_size)
        return scored if self.mode == "stream" else scored.apart()

    @property
    def frees_gradients(self) -> bool:
        """True if each gradient is freed in the backward: not where those of several micro-batches add up first."""
        return self.step.gradients == "layer" and self.micro_batches == 1

    @property
    def rows(self) -> int:
        """Number of sequences of a micro-batch."""
        return self.batch_size if self.scored is None else self.scored.rows

    @property
    def tokens(self) -> int:
        """Number of tokens of a sequence."""
        return self.length if self.scored is None else self.scored.length

    @property
    def taught_bytes(self) -> int:
        """Bytes on the host of what a teacher's file has of a micro-batch in which every token is a target."""
        k = self.teacher_top_k
        return self.rows * self.tokens * (4 * k + 4 * (k + 1) + 8) if k else 0

    @property
    def shard_tokens(self) -> int:
        """Number of a rank's own tokens of a sequence."""
        return RankShard(self.cluster.sequence_size).tokens(self.tokens)
