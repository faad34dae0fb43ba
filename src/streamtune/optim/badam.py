"""AdamW on one block of weights at a time: block coordinate descent, BAdam (arXiv 2404.02827, algorithm 1).

A block, such as a layer, is trained for ``switch_block_every`` steps by AdamW whose moments start at zero, while all
other weights are frozen. Then another block is trained. So only one block has gradients and moments:

    for each block b of a pass:  m = v = 0
        for k = 1 ... K:  g = dL/dw_b;  AdamW updates w_b by g, with m, v and the bias correction of step k

16-bit weights are updated in float32: a block has a float32 copy while it is trained, as in the paper.

Layers below the lowest trained weight need no gradient, so the backward ends at that weight. These layers run only
forward, and their inputs are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from streamtune.base.patterns import find_matches
from streamtune.errors import ArgumentError
from streamtune.optim.weight_step import ADAMW, PerWeightOptimizer, adamw_step, hash_integers, saved_states

SwitchMode = Literal["random", "ascending", "descending", "fixed"]
"""Order of the blocks: a new random order in each pass (``random``), from the embedding up (``ascending``), from the
last layer down (``descending``), or always the same block (``fixed``)."""

NUMBERED = re.compile(r"^(.*?\.)?(\d+)\.")
"""Regular expression for the name of a parameter's layer: the parameter's name up to the first number."""

EVERY_NAME = "."
"""Pattern that matches every parameter name, for a block of all parameters."""

EMBEDDING = re.compile(r"embed|wte|word_embeddings")


@dataclass(frozen=True)
class WeightBlock:
    """Parameters trained together; ``name`` is their layer or pattern, or "FIRST to LAST" for several layers."""

    name: str
    parameters: frozenset[str]


def split_blocks(
    names: Sequence[str],
    *,
    layers_per_block: int = 1,
    include_embedding: bool = False,
    include_lm_head: bool = False,
    patterns: Sequence[str] = (),
) -> list[WeightBlock]:
    """Split parameters into blocks that are trained in turn. The blocks are in the order in which a forward uses them.

    Args:
        names: Names of the parameters, in the model's order.
        layers_per_block: Number of layers that are trained together.
        include_embedding: True makes the embeddings the first block.
        include_lm_head: True makes a last block of the parameters outside layers and embeddings.
        patterns: Regular expressions that replace the split by layers. Each expression makes one block, of the
            parameters whose names contain a match. Parameters without a match are not trained.

    Raises:
        ArgumentError: A pattern matches no parameter, or the model has no numbered layers.
    """
    if patterns:
        matches = find_matches(patterns, names, where="optim_args.blocks")
        blocks = [
            WeightBlock(pattern, frozenset(names[number] for number in numbers))
            for pattern, numbers in zip(patterns, matches, strict=True)
        ]
        if missing := next((block.name for block in blocks if not block.parameters), None):
            shown = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
            raise ArgumentError(
                f"the pattern '{missing}' matches no trained parameter",
                where="optim_args.blocks",
                fix=f"trained parameters: {shown}",
            )
        return blocks
    layers: dict[str, list[str]] = {}
    embedding: list[str] = []
    other_names: list[str] = []
    for name in names:
        if match := NUMBERED.match(name):
            layers.setdefault(match.group().rstrip("."), []).append(name)
        else:
            (embedding if EMBEDDING.search(name) else other_names).append(name)
    layer_names, blocks = list(layers), list[WeightBlock]()
    if include_embedding and embedding:
        blocks.append(WeightBlock("embedding", frozenset(embedding)))
    for start in range(0, len(layer_names), layers_per_block):
        together = layer_names[start : start + layers_per_block]
        name = together[0] if len(together) == 1 else f"{together[0]} to {together[-1]}"
        blocks.append(WeightBlock(name, frozenset(parameter for layer in together for parameter in layers[layer])))
    if include_lm_head and other_names:
        blocks.append(WeightBlock("head", frozenset(other_names)))
    if not blocks:
        raise ArgumentError("the model has no numbered layers to split into blocks", where="optim")
    return blocks


@dataclass(frozen=True)
class BlockOptions:
    """Options of :class:`BlockAdamW`: the blocks, and their order.

    Attributes:
        switch_block_every: Number of steps after which another block is trained.
        switch_mode: Order of the blocks.
        start_block: Index of the first block; with ``fixed``, of the only block.
        layers_per_block, include_embedding, include_lm_head, blocks: Arguments of :func:`split_blocks`.
    """

    switch_block_every: int = 50
    switch_mode: SwitchMode = "random"
    start_block: int | None = None
    layers_per_block: int = 1
    include_embedding: bool = False
    include_lm_head: bool = False
    blocks: Sequence[str] = ()

    def split_parameters(self, parameter_names: Sequence[str]) -> list[WeightBlock]:
        return split_blocks(
            parameter_names,
            layers_per_block=self.layers_per_block,
            include_embedding=self.include_embedding,
            include_lm_head=self.include_lm_head,
            patterns=self.blocks,
        )


class BlockAdamW(PerWeightOptimizer):
    """AdamW that trains one block of parameters at a time and freezes all other parameters.

    The parameter groups contain only the parameters of the current block.

    Args:
        params: Groups of ``(name, parameter)``.
        seed: Seed of the random order of blocks.
        options: Options of AdamW, and of :class:`BlockOptions`.

    Raises:
        ArgumentError: The parameters cannot be split into these blocks, or ``start_block`` does not exist.
    """

    DEFAULTS: ClassVar = ADAMW

    def __init__(self, params: Iterable[dict[str, Any]], *, seed: int = 0, **options: Any) -> None:
        super().__init__(params, **{key: options.pop(key) for key in ADAMW if key in options})
        self.options, self.seed = BlockOptions(**options), seed
        self._all_named_parameters = [
            list(zip(group["param_names"], group["params"], strict=True)) for group in self.param_groups
        ]
        self.blocks = self.options.split_parameters([name for group in self._all_named_parameters for name, _ in group])
        start_block = self.options.start_block
        if start_block is not None and not 0 <= start_block < len(self.blocks):
            raise ArgumentError(
                f"start_block is {start_block}, but the {len(self.blocks)} blocks have indices 0 to "
                f"{len(self.blocks) - 1}",
                where="optim_args.start_block",
            )
        self.steps_taken = 0
        self._switch_to_current_block()

    @property
    def current_block_index(self) -> int:
        mode, start = self.options.switch_mode, self.options.start_block
        count, turn = len(self.blocks), self.steps_taken // self.options.switch_block_every
        if mode == "random":
            if turn == 0 and start is not None:
                return start
            generator = torch.Generator().manual_seed((self.seed << 24) + turn // count)
            return int(torch.randperm(count, generator=generator)[turn % count])
        first = start if start is not None else count - 1 if mode == "descending" else 0
        step = {"ascending": 1, "descending": -1, "fixed": 0}[mode]
        return (first + step * turn) % count

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """All parameters that were passed to the optimizer, including parameters outside the blocks."""
        return [parameter for group in self._all_named_parameters for _, parameter in group]

    def merge_blocks(self) -> None:
        """Merge all blocks into one, to measure or plan the step that needs the most memory."""
        self.blocks = [WeightBlock("all", frozenset(name for group in self._all_named_parameters for name, _ in group))]
        self.train_block_after(0)

    def train_block_after(self, steps_taken: int) -> None:
        """Switch to the block that is trained after ``steps_taken`` steps, with moments of zero."""
        self.steps_taken = steps_taken
        self._switch_to_current_block()

    @property
    def has_no_moments(self) -> bool:
        return not self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the current block; after every ``switch_block_every`` steps, switch to the next block."""
        super().step()
        self.steps_taken += 1
        if self.steps_taken % self.options.switch_block_every == 0:
            self._switch_to_current_block()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the current block, in float32. ``steps_taken`` must already be restored."""
        self.state.clear()
        for parameter, _, entry in saved_states(self, state_dict):
            self.state[parameter] = {key: x.detach().to(parameter.device, copy=True) for key, x in entry.items()}

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= _make_zero_moments(parameter, parameter.device)
        weight = state.get("float32", parameter)
        adamw_step(weight, grad.to(weight.dtype), state, group, fused=True)
        if weight is not parameter:
            parameter.copy_(weight)

    @torch.no_grad()
    def _switch_to_current_block(self) -> None:
        names = self.blocks[self.current_block_index].parameters
        self.state.clear()
        for group, named_parameters in zip(self.param_groups, self._all_named_parameters, strict=True):
            for name, parameter in named_parameters:
                parameter.requires_grad_(name in names)
                if name not in names:
                    parameter.grad = None
            chosen = [(name, parameter) for name, parameter in named_parameters if name in names]
            group["params"] = [parameter for _, parameter in chosen]
            group["param_names"] = [name for name, _ in chosen]


def _make_zero_moments(weight: Tensor, step_device: torch.device | str) -> dict[str, Tensor]:
    # Moments are float32, or wider if the weight is.
    moments_dtype = torch.promote_types(weight.dtype, torch.float32)
    state = {"step": torch.zeros((), dtype=torch.float32, device=step_device)}
    state |= {key: torch.zeros_like(weight, dtype=moments_dtype) for key in ("exp_avg", "exp_avg_sq")}
    if weight.dtype != moments_dtype:
        state["float32"] = weight.detach().to(moments_dtype)
    return state


def train_largest_block(model: nn.Module, **options: Any) -> None:
    """Freeze all weights except the first block (longest backward) and the largest block (most gradients and moments).

    If both blocks differ, a step with these weights needs slightly more time and memory than any real step. ``options``
    are the fields of :class:`BlockOptions`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = BlockOptions(**options).split_parameters(list(trained))
    sizes = [sum(trained[name].numel() for name in block.parameters) for block in found]
    lowest, largest = found[0], found[max(range(len(found)), key=sizes.__getitem__)]
    for name, parameter in trained.items():
        parameter.requires_grad_(name in lowest.parameters | largest.parameters)


# --- a part of each weight -------------------------------------------------------------------------------------------


class RatioAdamW(PerWeightOptimizer):
    """AdamW that trains a few values of each weight at a time: the ratio variant of BAdam (arXiv 2404.02827, appendix).

    Of a weight with n values, k = max(1, ``update_ratio`` n) adjacent values are trained, with moments that start at
    zero. After ``switch_block_every`` steps, k values at another random position are trained. The gradient has all n
    values; the state has 8 k bytes instead of 8 n. 16-bit weights are updated in a float32 copy of the k values.

    ``seed`` in the initial state of a weight, if present, determines the positions.
    """

    DEFAULTS: ClassVar = {**ADAMW, "update_ratio": 0.01, "switch_block_every": 50}

    def _step_weight(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, values = self.state[parameter], parameter.view(-1)
        size = trained_value_count(len(values), group["update_ratio"])
        if "step" not in state or (not parameter.is_meta and int(state["step"]) == group["switch_block_every"]):
            state["turn"] = state.get("turn", -1) + 1
            state["start"] = random_slice_start(len(values) - size, state.get("seed", 0), state["turn"])
            state |= _make_zero_moments(values[state["start"] : state["start"] + size], "cpu")
        part = slice(state["start"], state["start"] + size)
        weight = state.get("float32", values[part])
        adamw_step(weight, grad.reshape(-1)[part].to(weight.dtype), state, group, fused=False)
        if "float32" in state:
            values[part] = weight.to(parameter.dtype)


def trained_value_count(value_count: int, ratio: float) -> int:
    return min(value_count, max(1, round(ratio * value_count)))


def random_slice_start(max_start: int, weight_number: int, turn: int) -> int:
    """Return the index of a weight's first trained value, from 0 to ``max_start``; ``turn`` counts the switches."""
    return hash_integers(weight_number, turn) % (max_start + 1)
