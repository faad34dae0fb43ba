"""Completions of a policy and the choice of their prompts: the part of reinforcement learning before the gradient."""

from __future__ import annotations

from streamtune.rollout.allocate import LEAST, GradientNorms, allocate, variance_score
from streamtune.rollout.ends import add_ends, end_tokens, ends_of, with_generation
from streamtune.rollout.generate import TransformersWriter
from streamtune.rollout.select import PROMPT_CHOICES, PassRates, PromptPicker
from streamtune.rollout.vllm import VllmWriter, check_vllm
from streamtune.rollout.writer import Completion, Sampling, Writer, WritingStopped

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
    "add_ends",
    "allocate",
    "check_vllm",
    "end_tokens",
    "ends_of",
    "variance_score",
    "with_generation",
]
