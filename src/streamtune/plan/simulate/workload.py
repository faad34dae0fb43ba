"""Describe a training step without its schedule, list the modes of computing its gradient, and count its model FLOPs.

Model FLOPs are the basis of model FLOPs utilisation (MFU). A token is multiplied with N weights: the linear layers, the
head, and the experts that the router picks. Embeddings are looked up, and norms are negligible. Training on n tokens
needs

    2 N n          forward
    2 N n          backward, gradients of the hidden states
    2 N_t n        backward, gradients of the N_t trained weights

So full fine-tuning needs 6 N n, and adapters about 4 N n, because frozen weights need no gradient. Attention needs, in
each attention layer and for each query-key pair that is not masked,

    2 H (d_k + d_v)    forward, for H heads with dimensions d_k and d_v: scores, and weighted sum of values
    4 H (d_k + d_v)    backward

Layers below the lowest trained weight have no backward. Tokens outside a sliding window are masked. Padding, reference
forwards and recomputation do not count. The FLOPs that a step with a schedule really computes are ``Work.matmul_flops +
Work.attention_flops`` (``simulate.simulate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import nn

from streamtune.base.adapters import base_of
from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.engine import decoder_layers
from streamtune.engine.inspect_model import first_differentiated_layer, image_parameters
from streamtune.errors import ArgumentError
from streamtune.models import full_parameter_size
from streamtune.ops import TokenLoss
from streamtune.plan.simulate.cluster import Cluster
from streamtune.plan.simulate.scored import Completions, Scored
from streamtune.plan.simulate.shard import WINDOWS, RankShard, count_heads

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
"""Modes compared by default."""

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
    """Sizes of a distillation teacher, whose forward runs before the forward of the trained model.

    Attributes:
        hidden: Dimension of the hidden states.
        vocabulary: Vocabulary size of the head.
        dtype: Dtype of weights and hidden states.
        flops: FLOPs per token of the forward, without attention.
        make_model: Function that builds the teacher on ``meta``; None: the forward is not simulated.
        structure: Configuration as text, part of the cache key of simulations.
    """

    hidden: int
    vocabulary: int
    dtype: torch.dtype
    flops: int = 0
    make_model: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)
    structure: str = ""


@dataclass(frozen=True)
class ImageCost:
    """Device bytes and work for the images of a micro-batch, which a vision tower computes before the tokens.

    Attributes:
        held: Bytes during the whole step: pixels, features, and what the backward of a trained tower needs.
        peak: Largest number of bytes while the tower computes, ``held`` included.
        forward, backward: Work of the tower, one number for each name in ``simulate.trace.WORK``. The backward includes
            the recomputation of parts; it is 0 for a frozen tower.
        model_flops: FLOPs of one forward and, if the tower is trained, one backward.
    """

    held: int
    peak: int
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()
    model_flops: int = 0


@dataclass(frozen=True)
class Workload:
    """Training step to simulate, without its schedule (chunk sizes, offloading, recomputation).

    Args:
        make_model: Function that returns the model on ``meta``, in its dtype and with adapters.
        length: Number of tokens of a row; with ``completions``, of the longest completion and its prompt.
        batch_size: Number of rows of a micro-batch; with ``completions``, the batch size passed to it.
        micro_batches: Number of micro-batches of a step. With two or more, gradients of earlier micro-batches occupy
            memory.
        make_optimizer: Function that builds the optimizer of a model; None: no optimizer.
        autocast: Dtype of autocast, ``bfloat16`` or ``float16``; None: no autocast.
        mode: Method to compute the gradient: ``stream``, ``plain`` autograd, ``checkpoint`` for every layer,
            checkpointing with Liger's fused loss (``liger-loss``), or also with layer inputs on the host
            (``liger-loss-offload``).
        cluster: Devices that train; one rank is simulated. ``length`` and ``batch_size`` count whole rows, which
            several ranks may share.
        device_type: Type of the device whose kernels are simulated: ``cuda`` or ``cpu``.
        completions: Function that returns the completions to score for a length and batch size; None for next-token
            loss. Baselines have one row per completion.
        token_loss: Per-token loss, if not cross-entropy; with ``completions`` it replaces their log-probabilities.
        teacher: Teacher of a distillation loss; ``reference_bytes`` includes its weights.
        teacher_top_k: Number of saved teacher tokens per target, in host memory; 0 without saved tokens.
        reference_bytes: Bytes of the weights of other models, such as a reference.
        images: Bytes and work for the images of a micro-batch; None for rows of text.
        step: Kind of the optimizer step: number of passes over each micro-batch, which gradients exist at once, and the
            tier of optimizer states.
        keep: True to cache simulations on disk.

    Raises:
        ArgumentError: A value is out of range.
    """

    make_model: Callable[[], nn.Module]
    length: int
    batch_size: int = 1
    micro_batches: int = 1
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    autocast: str | None = None
    mode: Mode = "stream"
    cluster: Cluster = field(default_factory=Cluster)
    device_type: str = "cuda"
    completions: Completions | None = None
    token_loss: TokenLoss | None = None
    teacher: TeacherShape | None = None
    teacher_top_k: int = 0
    reference_bytes: int = 0
    images: ImageCost | None = None
    step: StepKind = PLAIN_STEP
    keep: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be 1 or more, found {getattr(self, name)!r}")
        if self.length < 2:
            raise ArgumentError(f"length must be 2 tokens or more, found {self.length!r}")
        if self.device_type not in DEVICES:
            known = " or ".join(map(repr, DEVICES))
            raise ArgumentError(f"unknown device_type {self.device_type!r}", fix=f"set device_type to {known}")

    @cached_property
    def scored(self) -> Scored | None:
        """Completions to score; None for next-token loss."""
        if self.completions is None:
            return None
        scored = self.completions(self.length, self.batch_size)
        return scored if self.mode == "stream" else scored.as_separate_rows()

    @property
    def frees_gradients(self) -> bool:
        """True if each gradient is freed during the backward; possible only with one micro-batch."""
        return self.step.gradients == "layer" and self.micro_batches == 1

    @property
    def num_rows(self) -> int:
        return self.batch_size if self.scored is None else self.scored.num_rows

    @property
    def num_tokens(self) -> int:
        return self.length if self.scored is None else self.scored.length

    @property
    def saved_teacher_bytes(self) -> int:
        """Host bytes of the saved teacher tokens of a micro-batch in which every token is a target."""
        k = self.teacher_top_k
        return self.num_rows * self.num_tokens * (4 * k + 4 * (k + 1) + 8) if k else 0

    @property
    def shard_tokens(self) -> int:
        """Largest number of tokens of a sequence that one rank has."""
        return RankShard(self.cluster.sequence_size).shard_tokens(self.num_tokens)


Span = tuple[int, int]
"""Numbers of tokens before and in a part of a row: ``(0, T)`` is a row, ``(trunk, branch)`` a completion."""

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
FORWARD = StepKind(backwards=0, gradients="none")

PICKED_COUNT_KEYS = ("num_experts_per_tok", "moe_topk", "num_selected_experts")


@dataclass(frozen=True)
class FlopCount:
    """Numbers from which a model's FLOPs are counted.

    Attributes:
        weights: N, number of weights with which a token is multiplied.
        trained: N_t, number of these weights that are trained.
        forward_only: Number of these weights that are in layers without a backward.
        width: ``H (d_k + d_v)``: number of query heads, times the summed dimensions of a key and a value.
        windows: Sliding window of each attention layer, in tokens; 0: the whole row.
        forward_only_windows: Windows of the attention layers without a backward.
    """

    weights: int
    trained: int
    width: int
    windows: tuple[int, ...]
    forward_only: int = 0
    forward_only_windows: tuple[int, ...] = ()

    @classmethod
    def from_model(cls, model: Any) -> FlopCount:
        weights = trained = forward_only = 0.0
        lookup_ids, picked_fraction = _lookup_weight_ids(model), _routed_expert_fraction(model)
        lookup_ids |= set(map(id, image_parameters(base_of(model), decoder_layers(model))))  # no token meets them
        first = first_differentiated_layer(model)
        below_ids = {id(p) for layer in decoder_layers(model)[:first] for p in layer.parameters()}
        for name, parameter in model.named_parameters():
            if id(parameter) in lookup_ids or (parameter.dim() < 2 and not hasattr(parameter, "quant_state")):
                continue
            count = full_parameter_size(parameter) * (picked_fraction if ".experts." in name else 1.0)
            weights += count
            trained += count if parameter.requires_grad else 0
            forward_only += count if id(parameter) in below_ids else 0
        heads = count_heads(model)
        width = heads.queries * (heads.key_dim + heads.value_dim)
        windows = _attention_windows(model)
        below = [window for window in windows[:first] if window is not None]
        return cls(
            round(weights),
            round(trained),
            width,
            tuple(window for window in windows if window is not None),
            round(forward_only),
            tuple(below),
        )

    def step_flops(self, spans: Iterable[Span], kind: StepKind = PLAIN_STEP) -> int:
        """Return the FLOPs of a training step on ``spans``, which are parts of rows.

        A step without a backward counts all its forwards. Other steps count one forward and one backward, because a
        first backward that only measures the gradient norm does not count.
        """
        tokens = pairs = forward_only_pairs = 0
        for before, own in spans:
            tokens += own
            pairs += _count_pairs(before, own, self.windows)
            forward_only_pairs += _count_pairs(before, own, self.forward_only_windows)
        if kind.backwards == 0:
            return kind.forwards * 2 * (tokens * self.weights + self.width * pairs)
        whole = tokens * (4 * self.weights + 2 * self.trained) + 6 * self.width * pairs
        return whole - 2 * tokens * self.forward_only - 4 * self.width * forward_only_pairs


def workload_flops(workload: Workload) -> int:
    """Return the model FLOPs of a step, summed over its micro-batches and over the ranks that share a sequence."""
    count, scored = FlopCount.from_model(workload.make_model()), workload.scored
    spans: list[Span] = [(0, workload.length)] * workload.batch_size
    if scored is not None and scored.share:
        spans = [span for trunk, branches in scored.trees for span in ((0, trunk), *((trunk, b) for b in branches))]
    elif scored is not None:
        spans = [(0, trunk + branch) for trunk, branches in scored.trees for branch in branches]
    images = 0 if workload.images is None else workload.images.model_flops
    if workload.step.backwards == 0:
        images *= workload.step.forwards
    return workload.micro_batches * (count.step_flops(spans, workload.step) + images)


def sketch_flops(workload: Workload) -> int:
    """Return the FLOPs to compute a gradient sketch of one row, by which training rows are compared (``train.sketch``).

    A sketch needs a forward of the model (and of a teacher model), the head's gradient for hidden states, and the
    recomputed forward and the backward of the last layer.
    """
    model: Any = workload.make_model()
    count, head = FlopCount.from_model(model), model.get_output_embeddings()
    row, last = [(0, workload.length)], decoder_layers(model)[-1]
    weights = sum(full_parameter_size(p) for p in last.parameters() if p.dim() > 1 or hasattr(p, "quant_state"))
    last_layer = replace(
        count,
        weights=round(weights * _routed_expert_fraction(model)),
        trained=0,
        windows=count.windows[-1:],
        forward_only=0,
        forward_only_windows=(),
    )
    head_flops = 2 * workload.length * (0 if head is None else full_parameter_size(head.weight))
    teacher_flops = 0 if workload.teacher is None else workload.length * workload.teacher.flops
    return count.step_flops(row, FORWARD) + last_layer.step_flops(row) + round(head_flops) + teacher_flops


def _count_pairs(before: int, own: int, windows: Iterable[int]) -> int:
    return sum(_unmasked_pairs(before + own, window) - _unmasked_pairs(before, window) for window in windows)


def _unmasked_pairs(tokens: int, window: int) -> int:
    """Return how many query-key pairs of a causal row are not masked; ``window`` 0 means no sliding window."""
    near = min(tokens, window) if window else tokens
    return near * (near + 1) // 2 + (tokens - near) * near


def _lookup_weight_ids(model: Any) -> set[int]:
    """Return the ids of embedding weights that are only looked up; a weight tied to the head is left out."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not table)
    found = {id(module.weight) for module in others}  # learnt positions
    return found if head is not None and head.weight is table else {*found, id(table)}


def _text_config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _routed_expert_fraction(model: Any) -> float:
    """Return the fraction of a layer's experts that each token is routed to; 1 without experts."""
    config = _text_config(model)
    count = next((v for name in EXPERT_COUNT_KEYS if isinstance(v := getattr(config, name, None), int) and v), None)
    picked = next((v for name in PICKED_COUNT_KEYS if isinstance(v := getattr(config, name, None), int) and v), None)
    return picked / count if count and picked else 1.0


def _attention_windows(model: Any) -> list[int | None]:
    """Return the sliding window of each layer's attention, in tokens; 0: the whole row; None: no attention."""
    config, count = _text_config(model), len(decoder_layers(model))
    window = next((v for name in WINDOWS if isinstance(v := getattr(config, name, None), int) and v > 0), 0)
    if getattr(config, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(config, "layer_types", None)
    if not isinstance(kinds, list) or len(kinds) != count:
        return [window if getattr(config, "num_attention_heads", None) else None] * count
    return [
        (window if "sliding" in kind else 0) if "attention" in kind and "linear" not in kind else None
        for kind in map(str, kinds)
    ]
