"""Completions of a policy and the choice of their prompts: the part of reinforcement learning before the gradient."""

from __future__ import annotations

from streamtune.tasks.rollout.select import (
    LEAST,
    PROMPT_CHOICES,
    GradientNorms,
    PassRates,
    PromptPicker,
    allocate,
    variance_score,
)
from streamtune.tasks.rollout.writers import (
    Completion,
    Sampling,
    TransformersWriter,
    VllmWriter,
    Writer,
    WritingStopped,
    check_vllm,
)

__all__ = [
    "LEAST",
    "PROMPT_CHOICES",
    "Completion",
    "GradientNorms",
    "PassRates",
    "PromptPicker",
    "Sampling",
    "TransformersWriter",
    "VllmWriter",
    "Writer",
    "WritingStopped",
    "allocate",
    "check_vllm",
    "variance_score",
]
