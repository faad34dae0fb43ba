"""Rollouts: choosing prompts, dividing completions among them, and writing the completions."""

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
