"""The chat templates that a recipe can select by name with ``chat_template``.

    chatml          ChatML, with tools and reasoning as Hermes and Qwen print them
    llama3          Llama 3
    llama3_tools    Llama 3.1, with tools
    qwen3           Qwen3, with tools and reasoning
    qwen3_nothink   Qwen3-Instruct-2507 and Qwen2.5, with tools
    gemma           Gemma 1 and 2
    gemma3          Gemma 3
    mistral         Mistral Small 3
    phi4            Phi-4
    deepseek_r1     DeepSeek-R1 and its distilled models
    gpt_oss         gpt-oss, with tools and reasoning
    granite         Granite 4, with tools
    cohere2         Command R7B, Command A and Tiny Aya
    smollm2         SmolLM2
    vicuna          Vicuna 1.1 and later
    alpaca          Alpaca

A template is the file ``NAME.jinja`` of this folder and a row of :data:`CHAT_TEMPLATES`. Every file encloses what the
assistant writes, with the token that ends the turn, in ``{% generation %}``. Recipes are checked against the names
before torch and transformers are imported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from streamtune.errors import did_you_mean


@dataclass(frozen=True)
class ChatTemplate:
    """Description of a chat template of this folder: its format, and the tokens that it needs."""

    about: str
    """Models whose format it is."""
    end: str
    """Token that ends an answer; an empty string means the tokenizer's EOS token."""
    marks: tuple[str, ...] = ()
    """Further tokens that mark turns. A tokenizer without them splits their text into several tokens."""
    added: tuple[str, ...] = ()
    """Tokens around reasoning, tool calls and tool results, which the format's own tokenizers have."""
    tools: bool = False
    """True if the template prints tools, tool calls and tool results; others reject calls and results."""
    reasoning: bool = False
    """True if the template prints the reasoning of a last answer."""


_THOUGHTS = ("<think>", "</think>")
_CALLS = ("<tool_call>", "</tool_call>")
_RESULTS = ("<tool_response>", "</tool_response>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")

CHAT_TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": ChatTemplate("ChatML (Hermes, Yi, many others)", "<|im_end|>", ("<|im_start|>",),
                           tools=True, reasoning=True),
    "llama3": ChatTemplate("Llama 3", "<|eot_id|>", _HEADERS),
    "llama3_tools": ChatTemplate("Llama 3.1", "<|eot_id|>", _HEADERS, tools=True),
    "qwen3": ChatTemplate("Qwen3", "<|im_end|>", ("<|im_start|>",), (*_THOUGHTS, *_CALLS, *_RESULTS),
                          tools=True, reasoning=True),
    "qwen3_nothink": ChatTemplate("Qwen3-Instruct-2507, Qwen2.5", "<|im_end|>", ("<|im_start|>",), (*_CALLS, *_RESULTS),
                                  tools=True),
    "gemma": ChatTemplate("Gemma, Gemma 2", "<end_of_turn>", ("<start_of_turn>",)),
    "gemma3": ChatTemplate("Gemma 3", "<end_of_turn>", ("<start_of_turn>",)),
    "mistral": ChatTemplate("Mistral Small 3", "", ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")),
    "phi4": ChatTemplate("Phi-4", "<|im_end|>", ("<|im_start|>", "<|im_sep|>")),
    "deepseek_r1": ChatTemplate("DeepSeek-R1 and its distilled models", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                                ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"), _THOUGHTS),
    "gpt_oss": ChatTemplate("gpt-oss", "<|return|>",
                            ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
                            tools=True, reasoning=True),
    "granite": ChatTemplate("Granite 4", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>"), tools=True),
    "cohere2": ChatTemplate("Command R7B, Command A, Tiny Aya", "<|END_OF_TURN_TOKEN|>",
                            ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
                             "<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "smollm2": ChatTemplate("SmolLM2", "<|im_end|>", ("<|im_start|>",)),
    "vicuna": ChatTemplate("Vicuna 1.1 and later", ""),
    "alpaca": ChatTemplate("Alpaca", ""),
}  # fmt: skip
"""Name of a chat template -> its description."""


@cache
def read_chat_template(name: str) -> str:
    """Return the Jinja text of a template of :data:`CHAT_TEMPLATES`."""
    return Path(__file__).with_name(f"{name}.jinja").read_text(encoding="utf-8").strip()


def print_images(template: str, image_text: str) -> str:
    """Return a template that also accepts lists of parts as the content of a message, and prints ``image_text`` for
    each part that is an image.
    """
    literal = json.dumps(image_text, ensure_ascii=False)
    if GEMMA_IMAGE in template:
        return template.replace(GEMMA_IMAGE, literal)
    return _PARTS.replace("IMAGE_TEXT", literal) + template


GEMMA_IMAGE = "'<start_of_image>'"
"""Expression in ``gemma3.jinja``, which prints lists of parts by itself."""
_PARTS = """
{%- set joined = namespace(messages=[]) -%}
{%- for message in messages -%}
    {%- set content = namespace(text='') -%}
    {%- if not message.content or message.content is string -%}
        {%- set joined.messages = joined.messages + [message] -%}
    {%- else -%}
        {%- for part in message.content -%}
            {%- set content.text = content.text + (IMAGE_TEXT if part.type == 'image' else part.text) -%}
        {%- endfor -%}
        {%- set joined.messages = joined.messages + [dict(message, content=content.text)] -%}
    {%- endif -%}
{%- endfor -%}
{%- set messages = joined.messages -%}
""".lstrip()


def describe_missing_template(value: str) -> tuple[str, str]:
    """Return error and fix for a ``chat_template`` that is neither a name of :data:`CHAT_TEMPLATES` nor a file."""
    names = f"the names are {', '.join(CHAT_TEMPLATES)}"
    if re.fullmatch(r"[\w-]+", value):
        hint = did_you_mean(value.replace("-", "_"), CHAT_TEMPLATES)
        return (
            f"unknown chat template '{value}', and no file has this name",
            f"{f'{hint} ' if hint else ''}{names}; or write the path of a Jinja file",
        )
    return f"the chat template file {value} does not exist", f"write the path of a Jinja file, or a name; {names}"
