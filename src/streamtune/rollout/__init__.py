"""Completions of a policy and the choice of their prompts: the part of reinforcement learning before the gradient."""

from __future__ import annotations

from streamtune.rollout.generate import TransformersWriter, end_tokens
from streamtune.rollout.select import PROMPT_CHOICES, PassRates, PromptPicker
from streamtune.rollout.vllm import VllmWriter, check_vllm
from streamtune.rollout.writer import Completion, Sampling, Writer, WritingStopped

__all__ = [
    "PROMPT_CHOICES",
    "Completion",
    "PassRates",
    "PromptPicker",
    "Sampling",
    "TransformersWriter",
    "VllmWriter",
    "Writer",
    "WritingStopped",
    "check_vllm",
    "end_tokens",
]
