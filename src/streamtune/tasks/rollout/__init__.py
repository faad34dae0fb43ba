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
    GenerationStopped,
    Images,
    Sampling,
    TransformersGenerator,
    VllmGenerator,
    Writer,
    require_vllm,
)

__all__ = [
    "MIN_COMPLETIONS",
    "PROMPT_CHOICES",
    "Completion",
    "GenerationStopped",
    "GradientNorms",
    "Images",
    "PassRates",
    "PromptPicker",
    "Sampling",
    "TransformersGenerator",
    "VllmGenerator",
    "Writer",
    "allocate_completions",
    "allocation_score",
    "require_vllm",
]
