"""The floating-point operations of a training step that its model asks for, by which the use of a device is measured.

A token passes N weights: those of the linear layers and of the head, of experts as many as a router picks. Embeddings
are looked up, and norms are nothing beside the rest. Training on n tokens takes

    2 N n          forward
    2 N n          the gradient handed on from layer to layer
    2 N_t n        the gradients of the N_t weights that are trained

so 6 N n where all of them are, and about 4 N n with adapters: frozen weights need no gradient. Attention of a row, in
each layer that attends, takes for each pair of a token and one that it sees, itself included,

    2 H (d_k + d_v)    forward, with H heads of d_k and d_v numbers: scores, and their sum of values
    4 H (d_k + d_v)    backward

Tokens beyond a window are not seen. Padding, the forward passes of a reference and all that is computed again are left
out. What a schedule really computes is ``Work.matmul_flops + Work.attention_flops`` (``simulate.simulate``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from streamtune.base.optimizer_table import PLAIN_STEP, StepKind
from streamtune.engine import decoder_layers
from streamtune.models import count_weights
from streamtune.plan.simulate.shard import WINDOWS, heads_of
from streamtune.plan.simulate.workload import Workload

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
        trained: N_t, those of them that are trained.
        width: ``H (d_k + d_v)``.
        windows: For each layer that attends its window in tokens; 0 is the whole row.
    """

    weights: int
    trained: int
    width: int
    windows: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> FlopCount:
        """Count a model, on any device, with its adapters."""
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
        """Return the operations of training on pieces of rows.

        Args:
            spans: The pieces.
            kind: The optimizer step. All forwards of a step without a backward count; of another, one forward and one
                backward do, since a first backward measures a norm alone.
        """
        tokens = pairs = 0
        for before, own in spans:
            tokens += own
            pairs += sum(_seen(before + own, window) - _seen(before, window) for window in self.windows)
        if kind.backwards == 0:
            return kind.forwards * 2 * (tokens * self.weights + self.width * pairs)
        return tokens * (4 * self.weights + 2 * self.trained) + 6 * self.width * pairs


def workload_flops(workload: Workload) -> int:
    """Return the operations of the micro-batches that the ranks of one sequence compute in a step."""
    count, scored = FlopCount.of(workload.make_model()), workload.scored
    spans: list[Span] = [(0, workload.length)] * workload.batch_size
    if scored is not None and scored.share:
        spans = [span for trunk, branches in scored.trees for span in ((0, trunk), *((trunk, b) for b in branches))]
    elif scored is not None:
        spans = [(0, trunk + branch) for trunk, branches in scored.trees for branch in branches]
    return workload.micro_batches * count.step(spans, workload.step)


def sketch_flops(workload: Workload) -> int:
    """Return the operations of the sketch of a row, as long as those of the workload (``train.sketch``).

    It is a forward of the model, and of a teacher that is called; the gradient that the head hands on; and the backward
    of the last layer, which computes its forward again.
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
    """Return the identity of the table of embeddings, unless the head multiplies with it."""
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not table)
    found = {id(module.weight) for module in others}  # learnt positions
    return found if head is not None and head.weight is table else {*found, id(table)}


def _config(model: Any) -> Any:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _expert_part(model: Any) -> float:
    """Return the part of the experts that a token passes; 1 without experts."""
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
