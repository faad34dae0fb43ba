"""Completions by vLLM, in this process and on this device, with the policy's weights handed over before each batch.

vLLM keeps its own copy of the model and is optional: it is imported only where it is asked for. It rounds differently
from the policy, so a token's old log-prob is never taken from it; the trainer computes its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.errors import ArgumentError
from streamtune.tasks.rollout.writer import Completion, Sampling, ended


def check_vllm(device: torch.device) -> None:
    """Refuse where vLLM is not installed, or there is no accelerator for it."""
    if find_spec("vllm") is None:
        raise ArgumentError(
            "'use_vllm: true' needs vLLM, which is not installed",
            where="use_vllm",
            mend="pip install vllm, or delete the line: transformers writes the completions then",
        )
    if device.type != "cuda":
        raise ArgumentError(
            f"'use_vllm: true' needs a CUDA device, and this run is on {device.type}",
            where="use_vllm",
            mend="delete the line: transformers writes the completions then",
        )


class VllmWriter:
    """Writes with vLLM.

    Args:
        model: The policy; its weights, with adapters merged into a copy, are handed over at each call.
        folder: Configuration and tokenizer in Hugging Face format; positions are the configuration's.
        max_length: Tokens of a prompt and its completion together.
        memory_fraction: Part of the device's memory that vLLM may take; the rest is for training.

    Raises:
        ArgumentError: vLLM is not installed, or there is no accelerator.
    """

    def __init__(
        self, model: nn.Module, folder: Path, *, end_token_ids: Sequence[int], max_length: int, memory_fraction: float
    ) -> None:
        check_vllm(model_device(model))
        # Otherwise the engine runs in a process of its own, which the weights would have to be copied to by hand.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.model, self.end_token_ids = model, frozenset(end_token_ids)
        self._parameters = vllm.SamplingParams
        self._engine: Any = vllm.LLM(
            model=str(folder),
            load_format="dummy",  # the weights are handed over before each use
            max_model_len=max_length,
            gpu_memory_utilization=memory_fraction,
        )

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Return ``count`` completions of each prompt. The seed comes from torch's generator."""
        with torch.no_grad():
            weights = policy_weights(self.model)
            self._engine.apply_model(lambda module: module.load_weights(weights) and None)
        self._engine.reset_prefix_cache()  # what it remembers of prompts is of the weights before
        common: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_tokens": sampling.max_completion_length,
            "stop_token_ids": sorted(self.end_token_ids),
            "seed": int(torch.randint(2**31 - 1, ())),
        }
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        each = (
            self._parameters(n=count, **common)
            if isinstance(count, int)
            else [self._parameters(n=own, **common) for own in count]
        )
        answers = self._engine.generate(asked, each, use_tqdm=False)
        return [[ended(list(one.token_ids), self.end_token_ids) for one in answer.outputs] for answer in answers]


def policy_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names as in a checkpoint, and weights with the adapters' update added to a copy; the model is left as it is.

    Merging in place and taking it back would leave the frozen weights rounded.
    """
    base: nn.Module = base_of(model)
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in base.named_parameters():
        inside = next((prefix for prefix in adapted if name.startswith(f"{prefix}.")), None)
        if inside is None:
            yield name, parameter.detach()
            continue
        rest = name.removeprefix(f"{inside}.")
        if not rest.startswith("base_layer."):
            continue  # the adapter itself
        layer: Any = adapted[inside]
        weight = parameter.detach()
        if rest == "base_layer.weight":
            for adapter in layer.active_adapters:
                weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
        yield f"{inside}.{rest.removeprefix('base_layer.')}", weight
