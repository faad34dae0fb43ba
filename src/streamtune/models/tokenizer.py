"""Tokenizers: load one, or train a byte-level BPE from text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from streamtune.base.patterns import check_splits
from streamtune.errors import ArgumentError
from streamtune.models.load import check_exists, loading_error
from streamtune.models.safety import check_count, key_place
from streamtune.models.tokens import add_tokens

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MAX_TEMPLATE = 1 << 20
"""Characters of a chat template: the longest known have thirty thousand."""

CHATML_TEMPLATE = """
{%- set calling = 'You can call the functions whose JSON schemas stand between <tools> and </tools>, one on a line:' -%}
{%- set written = 'To call one, write its name and arguments as JSON between <tool_call> and </tool_call>:' -%}
{%- set example = '<tool_call>\\n{"name": "function", "arguments": {"argument": "value"}}\\n</tool_call>' -%}
{%- set first = messages[0] if messages and messages[0].role == 'system' else none -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' + (first.content + '\\n\\n' if first else '') + calling + '\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\n\\n' + written + '\\n' + example + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set thinking = message.reasoning_content or message.reasoning or message.thinking -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- generation -%}
            {%- if thinking is string -%}{{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' -}}{%- endif -%}
            {{- message.content or '' -}}
            {%- for call in message.tool_calls or [] -%}
                {%- set called = call.function or call -%}
                {{- '\\n' if message.content or not loop.first -}}
                {{- '<tool_call>\\n{"name": ' + (called.name | tojson) + ', "arguments": ' -}}
                {{- called.arguments if called.arguments is string else called.arguments | tojson -}}
                {{- '}\\n</tool_call>' -}}
            {%- endfor -%}
            {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' -}}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
    {%- elif not (tools and loop.first and first) -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt -}}
""".strip()
"""ChatML, with the assistant's words and its end-of-turn marked as the part that is generated.

Reasoning stands between ``<think>`` and ``</think>`` in every turn that has some. Tools are JSON schemas in the system
message, calls stand between ``<tool_call>`` and ``</tool_call>``, and their results are the user's, between
``<tool_response>`` and ``</tool_response>``: the format of Hermes and Qwen, which inference engines read.
"""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE: no unknown token, every string decodes back to itself.

    Digits stand one by one; a line break with its indentation can become one token, which suits code.

    Args:
        texts: What to learn from; read once.
        vocab_size: Tokens at most, the 256 bytes and the three special tokens included.

    Returns:
        A tokenizer with the ChatML template, ``<|im_end|>`` as end and ``<|endoftext|>`` as padding.

    Raises:
        ArgumentError: ``vocab_size`` has no room for the bytes and the special tokens.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ArgumentError(
            f"a vocabulary of {vocab_size} has no room for 256 bytes and {len(special)} special tokens",
            where="tokenizer.train.vocab_size",
            mend=f"set it to at least {smallest}",
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return read_trained_tokenizer(bpe.to_str())


def read_trained_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer that :func:`train_tokenizer` makes of a trained vocabulary, ``text`` in JSON."""
    bpe = Tokenizer.from_str(text)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(
    name_or_path: str,
    *,
    trust_remote_code: bool = False,
    special_tokens: Mapping[str, Any] | None = None,
    added_tokens: Sequence[str] = (),
) -> PreTrainedTokenizerBase:
    """Load a tokenizer, by hub name or from a local folder. Without a padding token it pads with its end token.

    Args:
        name_or_path: The tokenizer.
        trust_remote_code: Allow code that comes with it to run.
        special_tokens: See :func:`streamtune.models.tokens.add_tokens`.
        added_tokens: See there.

    Raises:
        ArgumentError: There is no such tokenizer, or it has neither a padding nor an end token.
    """
    tokenizer = _read_tokenizer(name_or_path, trust_remote_code)
    special = special_tokens or {}
    if tokenizer.pad_token_id is None and special.get("pad_token") is None:
        if tokenizer.eos_token is None and special.get("eos_token") is not None:
            add_tokens(tokenizer, {"eos_token": special["eos_token"]}, ())
        if tokenizer.eos_token is None:
            raise ArgumentError(
                f"the tokenizer '{name_or_path}' has neither a padding nor an end-of-text token",
                where="model_name_or_path",
                mend="write special_tokens: {pad_token: ...}",
            )
        tokenizer.pad_token = tokenizer.eos_token
    add_tokens(tokenizer, special, added_tokens)
    return tokenizer


def read_vocabulary(name_or_path: str, *, trust_remote_code: bool = False) -> dict[str, int]:
    """Return the tokens of a tokenizer with their numbers, as its files have them.

    Raises:
        ArgumentError: There is no such tokenizer.
    """
    return _read_tokenizer(name_or_path, trust_remote_code).get_vocab()


def _read_tokenizer(name_or_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    check_exists(name_or_path)
    check_count(*key_place(name_or_path))  # transformers reads the model's configuration to find the tokenizer's class
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises nothing more special for a file it cannot read
        raise loading_error("tokenizer", name_or_path, error) from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is not None:
        parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        written = [json.loads(part.__getstate__()) for part in parts if part is not None]
        check_splits(list(_patterns(written)), where=f"tokenizer.json of {name_or_path}")
    if set(found.get_vocab()) <= set(found.all_special_tokens):  # made from the model's configuration alone
        raise ArgumentError(
            f"'{name_or_path}' has no tokenizer: of its files none has tokens",
            where="tokenizer",
            mend="copy tokenizer.json and tokenizer_config.json there, or name another: tokenizer: {path: NAME}",
        )
    return found


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions of a tokenizer's parts, given as JSON values."""
    if isinstance(value, dict):
        if isinstance(value.get("Regex"), str):
            yield value["Regex"]
        for inner in value.values():
            yield from _patterns(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give ``tokenizer`` a chat template: ``chatml``, the path of a Jinja file, or the template itself.

    Raises:
        ArgumentError: ``template`` names a file that is not there, or is no template.
    """
    if template == "chatml":
        tokenizer.chat_template = CHATML_TEMPLATE
        return
    if "{" in template:
        tokenizer.chat_template = template
        return
    if len(template) > 4096 or "\0" in template:
        raise ArgumentError("this is neither a chat template nor the path of one", where="chat_template")
    path = Path(template).expanduser()
    if not path.is_file():
        raise ArgumentError(
            f"there is no chat template file {path}",
            where="chat_template",
            mend="give 'chatml', the path of a Jinja file, or the template itself",
        )
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror or str(error)
        raise ArgumentError(f"cannot read the chat template {path}: {reason}", where="chat_template") from error
    if len(text) > MAX_TEMPLATE:
        raise ArgumentError(f"{path} has more than {MAX_TEMPLATE:,} characters: this is no chat template",
                            where="chat_template", mend="name a Jinja file")  # fmt: skip
    tokenizer.chat_template = text
