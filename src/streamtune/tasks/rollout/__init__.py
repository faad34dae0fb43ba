"""Rollouts: choosing prompts, dividing completions among them, and generating the completions."""

from __future__ import annotations

from streamtune.tasks.rollout.select import (
    MIN_COMPLETIONS,
    PROMPT_CHOICES,
    GradientNorms,
    PassRates,
    PromptPicker,
    allocate_completions,
    allocation_score,
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
    "MIN_COMPLETIONS",
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
    "allocate_completions",
    "allocation_score",
    "check_vllm",
]
