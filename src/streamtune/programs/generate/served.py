"""Answers by vLLM, for whole models on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from streamtune.errors import ArgumentError
from streamtune.models import load_tokenizer
from streamtune.programs.export.source import find_trained
from streamtune.programs.generate.answer import GenerateOptions, PromptEncoder
from streamtune.programs.generate.prompt_files import Asked


def check_served() -> None:
    """Refuse where vLLM is not installed.

    Raises:
        ArgumentError: It is not.
    """
    if find_spec("vllm") is None:
        raise ArgumentError(
            "--vllm needs vLLM, which is not installed",
            where="--vllm",
            mend="pip install vllm, or leave --vllm out: transformers writes the answer then",
        )


def answer_with_vllm(given: str, asked: Sequence[Asked], options: GenerateOptions) -> list[dict[str, Any]]:
    """Answer prompts by vLLM, all of them together.

    Args:
        given: A run or a model with all of its weights.
        asked: The prompts.
        options: How to answer.

    Returns:
        For each prompt ``text``, ``prompt_tokens``, ``tokens`` and ``finished``.

    Raises:
        ArgumentError: vLLM is not installed, or the model holds adapters.
    """
    check_served()
    trained = find_trained(given, checkpoint=options.checkpoint, hub=True)
    if trained.adapters:
        raise ArgumentError(
            f"{trained.folder} holds adapters, and vLLM gets whole models here",
            where="--vllm",
            mend=f"`streamtune export {given} OUT` merges them; then `streamtune generate OUT --vllm`",
        )
    import vllm  # type: ignore[import-not-found, unused-ignore]

    engine = vllm.LLM(model=trained.folder, dtype=options.dtype or "auto", seed=options.seed)
    settings = engine.get_default_sampling_params()
    settings.max_tokens = options.max_new_tokens
    for name in ("temperature", "top_p", "top_k"):
        if getattr(options, name) is not None:
            setattr(settings, name, getattr(options, name))
    if trained.loaded is not None:
        options = options.trained_by(trained.loaded.recipe)
    encode = PromptEncoder(load_tokenizer(trained.folder, trust_remote_code=trained.trusts_code), options)
    outputs: Any = engine.generate([{"prompt_token_ids": encode(each)} for each in asked], settings)
    return [
        {
            "text": output.outputs[0].text,
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": len(output.outputs[0].token_ids),
            "finished": output.outputs[0].finish_reason == "stop",
        }
        for output in outputs
    ]
