"""Text that a trained model writes, to look at what it has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.model_facts import model_device
from streamtune.data import ChatOptions, PromptRenderer
from streamtune.errors import ArgumentError, DataError
from streamtune.models.tokens import end_tokens

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True)
class Decoding:
    """Settings of a text that is generated."""

    max_new_tokens: int
    """Most tokens; generation stops sooner at an end token."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """Seed of the sampling."""
    in_step: bool = False
    """True if ranks share the weights and compute each token together, also a rank that is done."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: ChatOptions) -> list[int]:
    """Return the token ids of a prompt: of a message of the user where there is a chat template, else of its text.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The text.
        chat: Options of rendering.

    Raises:
        ArgumentError: The chat template refuses the prompt, or the prompt has no token.
    """
    asked: str | list[dict[str, Any]] = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
    try:
        return PromptRenderer(tokenizer, chat=chat)(asked, None, "")
    except DataError as error:
        raise ArgumentError(error.what, where="sample", mend="give another prompt, or another chat_template") from error


def sample_text(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    decoding: Decoding,
    *,
    chat: ChatOptions | None = None,
) -> str:
    """Return the model's answer to ``prompt``, or its continuation, without special tokens.

    The model, streamed or not, stays in evaluation mode. The caller's random state is left as it was.

    Args:
        model: The model.
        tokenizer: Its tokenizer. With a chat template it renders the prompt as a user's message.
        prompt: The text.
        decoding: Length and sampling.
        chat: Options of rendering, as for the rows that were trained on.
    """
    ids = encode_prompt(tokenizer, prompt, chat or ChatOptions())
    ends, pad = end_tokens(model, tokenizer), tokenizer.pad_token_id
    with torch.random.fork_rng():
        torch.manual_seed(decoding.seed)
        generated = _generate(model, ids, decoding, ends, pad)
    written: str = tokenizer.decode(generated, skip_special_tokens=True)
    return written


def likeliest_tokens(
    model: PreTrainedModel | PeftModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    pad: int | None,
    in_step: bool = False,
) -> list[int]:
    """Return the token ids of the greedy continuation of ``prompt``, an end token among ``ends`` included.

    The model stays in evaluation mode.
    """
    return _generate(model, prompt, Decoding(max_new_tokens, in_step=in_step), ends, pad)


def _generate(model: Any, prompt: Sequence[int], decoding: Decoding, ends: Sequence[int], pad: int | None) -> list[int]:
    """Return the token ids that the model generates after ``prompt``."""
    ids = torch.tensor([list(prompt)], device=model_device(model))
    sampling = {"do_sample": True, "temperature": decoding.temperature} if decoding.temperature > 0 else {}
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{"do_sample": False, **sampling},
            max_new_tokens=decoding.max_new_tokens,
            synced_gpus=decoding.in_step,
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
        )
    written: list[int] = output[0, len(prompt) :].tolist()
    return written
