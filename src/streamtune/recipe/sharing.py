"""Choices that need whole weights, and are refused where ranks share them.

A recipe knows this by itself where it names FSDP2 or a preset of stage 3. A DeepSpeed file says its own stage, and a
run asks for the same refusals once it has read it.
"""

from __future__ import annotations

from typing import NamedTuple

SHARING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which each rank holds a part of the weights."""


class WholeWeights(NamedTuple):
    """A choice that needs whole weights on each rank: its key, what is wrong with shared ones, and how to mend it."""

    key: str
    what: str
    mend: str


QUANTISED = WholeWeights(
    "quantization",
    "weights that torchao quantised (int8) cannot be divided between ranks",
    "write quantization: nf4, or deepspeed: zero2 (each rank keeps the quantised base)",
)

TEACHER = WholeWeights(
    "teacher",
    "the heads of teacher and model are read together, and ranks that share weights gather them one at a time",
    "write deepspeed: zero2, or train on completions that the teacher has written",
)

VLLM = WholeWeights(
    "use_vllm",
    "vLLM needs the whole weights on each rank, and the recipe shares them",
    "write deepspeed: zero2, or let transformers write the completions",
)

REPEATED = WholeWeights(
    "repetition_penalty",
    "ranks that share their weights write in step, with padding, and repetition_penalty would count that",
    "write deepspeed: zero2, or repetition_penalty: 1.0",
)


CHUNK_ORDER = WholeWeights(
    "engine.order",
    "order: chunk passes through the weights of all layers once for every chunk, and ranks that share them would send "
    "them each time",
    "write order: layer, or deepspeed: zero2",
)
