"""AdamW on a part of the weights at a time: block coordinate descent, BAdam (arXiv 2404.02827, algorithm 1).

A block, such as a layer, is trained for ``switch_block_every`` steps by AdamW whose moments begin at zero, while all
other weights are frozen. Then another block is. So gradients and moments are there for one block only:

    for each block b of a pass:  m = v = 0
        for k = 1 ... K:  g = dL/dw_b;  AdamW steps w_b by g, with m, v and the bias correction of step k

Weights of 16 bits are stepped in float32: the block has a copy of them for as long as it is trained, as in the paper.

What is frozen below the lowest trained weight needs no gradient, so the backward ends there: layers below it run once,
and none of their inputs is stored.
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
from streamtune.optim.weight_step import ADAMW, EachWeight, adamw_step, hash_of, saved_entries

SwitchMode = Literal["random", "ascending", "descending", "fixed"]
"""The order of blocks: another random one in each pass, from the embedding on, from the last layer on, always one."""

NUMBERED = re.compile(r"^(.*?\.)?(\d+)\.")
"""The name of a parameter's layer: its own name up to the first number."""

EVERY_NAME = "."
"""A pattern of a block of all parameters."""

EMBEDDING = re.compile(r"embed|wte|word_embeddings")


@dataclass(frozen=True)
class WeightBlock:
    """Parameters that are trained together, by name. ``name`` is their module, or the first and last of several."""

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
    """Split parameters into blocks, in the order in which a forward uses them.

    Args:
        names: Names of the parameters, in the order of the model.
        layers_per_block: Layers that are trained together.
        include_embedding: Make the embeddings the first block.
        include_lm_head: Make the parameters of neither a layer nor the embeddings the last block.
        patterns: Regular expressions: each makes a block of the parameters in whose names it is found, in place of
            layers. Parameters that none of them finds are not trained.

    Raises:
        ArgumentError: A pattern finds nothing, or there are no layers.
    """
    if patterns:
        found_by = find_matches(patterns, names, where="optim_args.blocks")
        blocks = [
            WeightBlock(pattern, frozenset(names[number] for number in numbers))
            for pattern, numbers in zip(patterns, found_by, strict=True)
        ]
        if missing := next((block.name for block in blocks if not block.parameters), None):
            shown = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
            raise ArgumentError(
                f"no parameter that is trained has a name with '{missing}' in it",
                where="optim_args.blocks",
                fix=f"parameters are {shown}",
            )
        return blocks
    layers: dict[str, list[str]] = {}
    embedding: list[str] = []
    others: list[str] = []
    for name in names:
        if match := NUMBERED.match(name):
            layers.setdefault(match.group().rstrip("."), []).append(name)
        else:
            (embedding if EMBEDDING.search(name) else others).append(name)
    each, found = list(layers), list[WeightBlock]()
    if include_embedding and embedding:
        found.append(WeightBlock("embedding", frozenset(embedding)))
    for start in range(0, len(each), layers_per_block):
        together = each[start : start + layers_per_block]
        name = together[0] if len(together) == 1 else f"{together[0]} to {together[-1]}"
        found.append(WeightBlock(name, frozenset(parameter for layer in together for parameter in layers[layer])))
    if include_lm_head and others:
        found.append(WeightBlock("head", frozenset(others)))
    if not found:
        raise ArgumentError("the model has no numbered layers to take one after another", where="optim")
    return found


@dataclass(frozen=True)
class BlockOptions:
    """Options of the blocks and of their order.

    Attributes:
        switch_block_every: Steps until another block is trained.
        switch_mode: The order of the blocks.
        start_block: Index of the first block; with ``fixed`` of the only block.
        layers_per_block, include_embedding, include_lm_head, blocks: Arguments of :func:`split_blocks`.
    """

    switch_block_every: int = 50
    switch_mode: SwitchMode = "random"
    start_block: int | None = None
    layers_per_block: int = 1
    include_embedding: bool = False
    include_lm_head: bool = False
    blocks: Sequence[str] = ()

    def split(self, names: Sequence[str]) -> list[WeightBlock]:
        return split_blocks(
            names,
            layers_per_block=self.layers_per_block,
            include_embedding=self.include_embedding,
            include_lm_head=self.include_lm_head,
            patterns=self.blocks,
        )


class BlockAdamW(EachWeight):
    """AdamW on one block at a time; it sets ``requires_grad`` of all its parameters, for the block and for the others.

    Its groups have the parameters of the block alone.

    Args:
        params: Groups of ``(name, parameter)``.
        seed: Seed of the random order.
        options: Options of AdamW, and of :class:`BlockOptions`.

    Raises:
        ArgumentError: There are no such blocks.
    """

    DEFAULTS: ClassVar = ADAMW

    def __init__(self, params: Iterable[dict[str, Any]], *, seed: int = 0, **options: Any) -> None:
        super().__init__(params, **{key: options.pop(key) for key in ADAMW if key in options})
        self.options, self.seed = BlockOptions(**options), seed
        self._everything = [
            list(zip(group["param_names"], group["params"], strict=True)) for group in self.param_groups
        ]
        self.blocks = self.options.split([name for group in self._everything for name, _ in group])
        start_block = self.options.start_block
        if start_block is not None and not 0 <= start_block < len(self.blocks):
            raise ArgumentError(
                f"there are {len(self.blocks)} blocks, 0 to {len(self.blocks) - 1}, and no block {start_block}",
                where="optim_args.start_block",
            )
        self.steps_taken = 0
        self._train_block()

    @property
    def block(self) -> int:
        """Index of the block that the next step trains; a function of the steps taken and of the seed."""
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
    def every_parameter(self) -> list[nn.Parameter]:
        """All parameters that it was built over, also parameters outside of the blocks."""
        return [parameter for group in self._everything for _, parameter in group]

    def train_together(self) -> None:
        """Make one block of all parameters: to measure or to plan the step that takes the most."""
        self.blocks = [WeightBlock("all", frozenset(name for group in self._everything for name, _ in group))]
        self.go_to(0)

    def go_to(self, steps_taken: int) -> None:
        """Train the block whose turn is after so many steps, with moments of zero."""
        self.steps_taken = steps_taken
        self._train_block()

    @property
    def is_fresh(self) -> bool:
        """True if the block has not been stepped yet: it has no moments."""
        return not self.state

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the block, and take the next one if it is its turn."""
        super().step()
        self.steps_taken += 1
        if self.steps_taken % self.options.switch_block_every == 0:
            self._train_block()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the block, of an optimizer that has taken as many steps.

        It stays in float32: torch would cast it to the dtype of the weight.
        """
        self.state.clear()
        for parameter, _, entry in saved_entries(self, state_dict):
            self.state[parameter] = {key: x.detach().to(parameter.device, copy=True) for key, x in entry.items()}

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= _fresh_state(parameter, parameter.device)
        weight = state.get("float32", parameter)
        adamw_step(weight, grad.to(weight.dtype), state, group, fused=True)
        if weight is not parameter:
            parameter.copy_(weight)

    @torch.no_grad()
    def _train_block(self) -> None:
        """Freeze all weights outside of the block, and begin its moments at zero."""
        names = self.blocks[self.block].parameters
        self.state.clear()
        for group, everything in zip(self.param_groups, self._everything, strict=True):
            for name, parameter in everything:
                parameter.requires_grad_(name in names)
                if name not in names:
                    parameter.grad = None
            chosen = [(name, parameter) for name, parameter in everything if name in names]
            group["params"] = [parameter for _, parameter in chosen]
            group["param_names"] = [name for name, _ in chosen]


def _fresh_state(weight: Tensor, count_device: torch.device | str) -> dict[str, Tensor]:
    # Moments are float32, or wider if the weight is.
    wide = torch.promote_types(weight.dtype, torch.float32)
    state = {"step": torch.zeros((), dtype=torch.float32, device=count_device)}
    state |= {key: torch.zeros_like(weight, dtype=wide) for key in ("exp_avg", "exp_avg_sq")}
    if weight.dtype != wide:
        state["float32"] = weight.detach().to(wide)
    return state


def train_largest_block(model: nn.Module, **options: Any) -> None:
    """Freeze all weights of a model outside of the block whose step takes the most memory and time.

    The lowest block has the longest backward, and the largest the most gradients and moments. Where these are two,
    both are left, which takes a little more than either. ``options`` are for :class:`BlockOptions`.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = BlockOptions(**options).split(list(trained))
    sizes = [sum(trained[name].numel() for name in block.parameters) for block in found]
    lowest, largest = found[0], found[max(range(len(found)), key=sizes.__getitem__)]
    for name, parameter in trained.items():
        parameter.requires_grad_(name in lowest.parameters | largest.parameters)


# --- a part of each weight -------------------------------------------------------------------------------------------


class RatioAdamW(EachWeight):
    """AdamW on a part of each weight: the ratio form of BAdam (arXiv 2404.02827, appendix).

    AdamW trains k = max(1, ratio n) adjacent values of a weight with n values for ``switch_block_every`` steps, with
    moments that begin at zero, then k others, at a place drawn at random. The gradient has all values; the state has
    8 k bytes in place of 8 n. Weights of 16 bits are stepped in float32, as in a block.

    The state of a weight may begin with its number as ``seed``.
    """

    DEFAULTS: ClassVar = {**ADAMW, "update_ratio": 0.01, "switch_block_every": 50}

    def _step_one(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, values = self.state[parameter], parameter.view(-1)
        size = part_size(len(values), group["update_ratio"])
        if "step" not in state or (not parameter.is_meta and int(state["step"]) == group["switch_block_every"]):
            state["turn"] = state.get("turn", -1) + 1
            state["start"] = part_start(len(values) - size, state.get("seed", 0), state["turn"])
            state |= _fresh_state(values[state["start"] : state["start"] + size], "cpu")
        part = slice(state["start"], state["start"] + size)
        weight = state.get("float32", values[part])
        adamw_step(weight, grad.reshape(-1)[part].to(weight.dtype), state, group, fused=False)
        if "float32" in state:
            values[part] = weight.to(parameter.dtype)


def part_size(count: int, ratio: float) -> int:
    """Return the number of values that are trained at a time, of ``count``."""
    return min(count, max(1, round(ratio * count)))


def part_start(last: int, seed: int, turn: int) -> int:
    """Return the first value of a part, from 0 to ``last``: a function of the weight's number and of the turn."""
    return hash_of(seed, turn) % (last + 1)
