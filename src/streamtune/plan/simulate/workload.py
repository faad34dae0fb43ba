"""A step of training, apart from its schedule; the modes of computing its gradient; and the FLOPs that its model needs,
by which the use of a device is measured.

A token passes N weights: the linear layers and the head, and of experts as many as a router picks. Embeddings
are looked up, and norms are negligible. Training on n tokens takes

    2 N n          forward
    2 N n          the gradient handed on from layer to layer
    2 N_t n        the gradients of the N_t weights that are trained

so 6 N n for full fine-tuning, and about 4 N n with adapters: frozen weights need no gradient. Attention of a row, in
each layer that attends, takes for each pair of a token and one that it sees, itself included,

    2 H (d_k + d_v)    forward, with H heads of d_k and d_v numbers: scores, and their sum of values
    4 H (d_k + d_v)    backward

Tokens beyond a window are not seen. Padding, the forward passes of a reference and all recomputation are left out. What
a schedule really computes is ``Work.matmul_flops + Work.attention_flops`` (``simulate.simulate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import nn

from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.engine import decoder_layers
from streamtune.errors import ArgumentError
from streamtune.models import count_weights
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.plan.simulate.shard import WINDOWS, RankShard, heads_of

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
"""Modes that are compared by default."""

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
"""Readable name of each mode."""


DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class TeacherShape:
    """A teacher, whose forward comes before the model's, and whose head is read beside the model's.

    Attributes:
        hidden: Elements of a final hidden state.
        vocabulary: Rows of the head.
        dtype: Dtype of its weights and hidden states.
        flops: FLOPs of its forward, for each token, without attention.
        make_model: Builds it on ``meta``; None leaves its forward out.
        structure: Its configuration, by which cached simulations are told apart.
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
        length: Tokens of a row; if completions are scored, of the longest with its prompt.
        batch_size: Rows of a micro-batch; if completions are scored, the batch size that ``completions`` takes.
        micro_batches: Micro-batches of a step. With more than one, gradients of the first occupy memory during the
            others.
        make_optimizer: Builds the optimizer of a model; None trains without one.
        autocast: Compute in bf16.
        mode: ``stream``, or a baseline: ``plain`` autograd, ``checkpoint`` for every layer, the same with Liger's fused
            loss (``liger-loss``), and with the inputs of the layers on the host (``liger-loss-offload``).
        cluster: The devices that train, and each device's part of the step. Lengths and rows are those of all ranks
            that share a sequence together; one of these ranks is simulated.
        device_type: The device whose kernels compute: ``cuda`` or ``cpu``.
        completions: Returns what is scored at a length and batch size, if the loss is not on next tokens. A baseline
            has a row for each completion.
        token_loss: Per-token loss, if not cross-entropy; given with completions, it replaces their scores.
        teacher: Head of the teacher that the loss has a divergence from; its weights are in ``reference_bytes``.
        teacher_top_k: Number of a teacher's top-k tokens that a file has of each target, on the host; 0 without.
        reference_bytes: Bytes of weights that are held besides the model's and not trained.
        step: Kind of the optimizer step: passes over each micro-batch, gradients that exist at once, place of the
            states.
        keep: Cache simulations on disk.

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
            raise ArgumentError(f"kernels of {self.device_type!r} are not known", fix=f"set device_type to {known}")

    @cached_property
    def scored(self) -> Scored | None:
        """The completions that are scored; None if the loss is on next tokens."""
        if self.completions is None:
            return None
        scored = self.completions(self.length, self.batch_size)
        return scored if self.mode == "stream" else scored.apart()

    @property
    def frees_gradients(self) -> bool:
        """True if each gradient is freed in the backward: not if several micro-batches accumulate first."""
        return self.step.gradients == "layer" and self.micro_batches == 1

    @property
    def rows(self) -> int:
        return self.batch_size if self.scored is None else self.scored.rows

    @property
    def tokens(self) -> int:
        return self.length if self.scored is None else self.scored.length

    @property
    def taught_bytes(self) -> int:
        """Host bytes of a teacher's file for a micro-batch in which every token is a target."""
        k = self.teacher_top_k
        return self.rows * self.tokens * (4 * k + 4 * (k + 1) + 8) if k else 0

    @property
    def shard_tokens(self) -> int:
        """Number of a rank's own tokens of a sequence."""
        return RankShard(self.cluster.sequence_size).tokens(self.tokens)


Span = tuple[int, int]
"""Tokens that a piece of a row sees before it, and its own: ``(0, T)`` is a row, ``(trunk, branch)`` a completion."""

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
FORWARD = StepKind(backwards=0, gradients="none")

PICKED = ("num_experts_per_tok", "moe_topk", "num_selected_experts")


@dataclass(frozen=True)
class FlopCount:
    """The counts of a model.

    Attributes:
        weights: N, weights that a token passes.
        trained: N_t, how many of them are trained.
        width: ``H (d_k + d_v)``.
        windows: For each layer that attends its window in tokens; 0 is the whole row.
    """

    weights: int
    trained: int
    width: int
    windows: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> FlopCount:
        weights = trained = 0.0
        looked_up, part = _looked_up(model), _expert_part(model)
        for name, parameter in model.named_parameters():
            if id(parameter) in looked_up or (parameter.dim() < 2 and not hasattr(parameter, "quant_state")):
                continue
            count = count_weights(parameter) * (part if ".experts." in name else 1.0)
            weights += count
            trained += count if parameter.requires_grad else 0
        heads = heads_of(model)
        width = heads.queries * (heads.key_dim + heads.value_dim)
        return cls(round(weights), round(trained), width, tuple(_windows(model)))

    def step(self, spans: Iterable[Span], kind: StepKind = PLAIN_STEP) -> int:
        """Return the FLOPs of training on pieces of rows.

        All forwards of a step without a backward count; of another step one forward and one backward, since a first
        backward only measures a norm.
        """
        tokens = pairs = 0
        for before, own in spans:
            tokens += own
            pairs += sum(_seen(before + own, window) - _seen(before, window) for window in self.windows)
        if kind.backwards == 0:
            return kind.forwards * 2 * (tokens * self.weights + self.width * pairs)
        return tokens * (4 * self.weights + 2 * self.trained) + 6 * self.width * pairs


def workload_flops(workload: Workload) -> int:
    """Return the FLOPs of the micro-batches that the ranks of one sequence compute in a step."""
    count, scored = FlopCount.of(workload.make_model()), workload.scored
    spans: list[Span] = [(0, workload.length)] * workload.batch_size
    if scored is not None and scored.share:
        spans = [span for trunk, branches in scored.trees for span in ((0, trunk), *((trunk, b) for b in branches))]
    elif scored is not None:
        spans = [(0, trunk + branch) for trunk, branches in scored.trees for branch in branches]
    return workload.micro_batches * count.step(spans, workload.step)


def sketch_flops(workload: Workload) -> int:
    """Return the FLOPs of the sketch of a row as long as the workload's (``train.sketch``).

    It is a forward of the model, and of a teacher that is called; the gradient that the head hands on; and the backward
    of the last layer, which recomputes its forward.
    """
    model: Any = workload.make_model()
    count, head = FlopCount.of(model), model.get_output_embeddings()
    row, last = [(0, workload.length)], decoder_layers(model)[-1]
    of_last = sum(count_weights(p) for p in last.parameters() if p.dim() > 1 or hasattr(p, "quant_state"))
    attends = replace(count, weights=round(of_last * _expert_part(model)), trained=0, windows=count.windows[-1:])
    of_head = 2 * workload.length * (0 if head is None else count_weights(head.weight))
    of_teacher = 0 if workload.teacher is None else workload.length * workload.teacher.flops
    return count.step(row, FORWARD) + attends.step(row) + round(of_head) + of_teacher


def _seen(tokens: int, window: int) -> int:
    """Return the pairs of a token and one that it sees, in a causal row."""
    near = min(tokens, window) if window else tokens
    return near * (near + 1) // 2 + (tokens - near) * near


def _looked_up(model: Any) -> set[int]:
    """Return the identities of embedding tables, unless the head multiplies with them."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not table)
    found = {id(module.weight) for module in others}  # learnt positions
    return found if head is not None and head.weight is table else {*found, id(table)}


def _config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _expert_part(model: Any) -> float:
    """Return the fraction of the experts that a token passes; 1 without experts."""
    config = _config(model)
    count = next((v for name in EXPERTS if isinstance(v := getattr(config, name, None), int) and v), None)
    picked = next((v for name in PICKED if isinstance(v := getattr(config, name, None), int) and v), None)
    return picked / count if count and picked else 1.0


def _windows(model: Any) -> list[int]:
    """Return the window of each layer that attends."""
    config, count = _config(model), len(decoder_layers(model))
    window = next((v for name in WINDOWS if isinstance(v := getattr(config, name, None), int) and v > 0), 0)
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list) or len(kinds) != count:
        return [window] * count if getattr(config, "num_attention_heads", None) else []
    attending = [str(kind) for kind in kinds if "attention" in str(kind) and "linear" not in str(kind)]
    return [window if "sliding" in kind else 0 for kind in attending]
