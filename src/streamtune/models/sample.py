"""Text that a trained model writes, to look at what it has learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamtune.base.model_device import model_device
from streamtune.data import ChatOptions, PromptRenderer
from streamtune.errors import ArgumentError, DataError
from streamtune.models.tokens import end_tokens

if TYPE_CHECKING:
    from peft import PeftModel


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
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    in_step: bool = False,
    chat: ChatOptions | None = None,
) -> str:
    """Return the model's continuation of ``prompt``, without special tokens.

    Args:
        model: Streamed or not; it is put into evaluation mode, and left in it.
        tokenizer: Renders the prompt as a user's message where it has a chat template, and takes it as it is otherwise.
        prompt: What to answer or to continue.
        max_new_tokens: Tokens at most; it stops sooner at a token that ends its generation.
        temperature: 0 takes the likeliest token at each place.
        seed: Of the draw. The caller's random state is left as it was.
        in_step: Ranks share the weights and compute each token together, a rank that is done too.
        chat: Options of rendering, as the rows that were trained on have them.
    """
    ids = torch.tensor([encode_prompt(tokenizer, prompt, chat or ChatOptions())], device=model_device(model))
    draw = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **draw,
            max_new_tokens=max_new_tokens,
            synced_gpus=in_step,
            eos_token_id=end_tokens(model, tokenizer) or None,
            pad_token_id=tokenizer.pad_token_id,
        )
    written: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
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
    """Return the likeliest token at each place after the token ids of ``prompt``.

    Args:
        model: Streamed or not; it is put into evaluation mode, and left in it.
        prompt: Token ids.
        max_new_tokens: Tokens at most.
        ends: The ids that end the text; one of them is the last one returned.
        pad: The id for padding.
        in_step: As for :func:`sample_text`.
    """
    model.eval()
    ids = torch.tensor([list(prompt)], device=model_device(model))
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            synced_gpus=in_step,
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
        )
    written: list[int] = output[0, len(prompt) :].tolist()
    return written
