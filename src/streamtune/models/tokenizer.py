"""Load tokenizers or train them from text; add tokens to a tokenizer, and rows for them to embedding and head.

A new row is the mean of the previous tokens' rows. So a new row has a typical norm, and is equal on every rank and in
every run. Rows of new tokens are trained with all other rows, or alone with adapters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from streamtune.base.chat_templates import CHAT_TEMPLATES, describe_missing_template, print_images, read_chat_template
from streamtune.base.patterns import check_split_patterns
from streamtune.engine.hf_names import HUB_FILE, hf_internal
from streamtune.errors import ArgumentError
from streamtune.models.config import check_layer_limit, check_path_exists, make_loading_error, read_config_json

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MAX_TEMPLATE = 1 << 20
"""Largest number of characters of a chat template; the longest published templates have about thirty thousand."""

CHATML_TEMPLATE = read_chat_template("chatml")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which has no unknown token and encodes every string without loss.

    Digits are single tokens. A line break with its indentation can become one token, which suits code. The tokenizer
    has the ChatML template, ``<|im_end|>`` as EOS and ``<|endoftext|>`` as padding token.

    ``vocab_size`` is the largest number of tokens, including 256 bytes and three special tokens.
    """
    special = [END_OF_TEXT, TURN_START, TURN_END]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ArgumentError(
            f"a vocabulary of {vocab_size} has no room for 256 bytes and {len(special)} special tokens",
            where="tokenizer.train.vocab_size",
            fix=f"set it to at least {smallest}",
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
    """Return a tokenizer that :func:`train_tokenizer` trained; ``text`` is its vocabulary as JSON."""
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
    """Load a tokenizer from a local folder or by its name on the hub. Without a padding token, EOS is used for padding.

    ``special_tokens`` and ``added_tokens`` are added with :func:`add_tokens`.
    """
    tokenizer = _read_tokenizer(name_or_path, trust_remote_code)
    special = special_tokens or {}
    if tokenizer.pad_token_id is None and special.get("pad_token") is None:
        if tokenizer.eos_token is None and special.get("eos_token") is not None:
            add_tokens(tokenizer, {"eos_token": special["eos_token"]}, ())
        if tokenizer.eos_token is None:
            raise ArgumentError(
                f"the tokenizer '{name_or_path}' has neither a padding token nor EOS",
                where="model_name_or_path",
                fix="write special_tokens: {pad_token: ...}",
            )
        tokenizer.pad_token = tokenizer.eos_token
    add_tokens(tokenizer, special, added_tokens)
    return tokenizer


def read_vocabulary(name_or_path: str, *, trust_remote_code: bool = False) -> dict[str, int]:
    return _read_tokenizer(name_or_path, trust_remote_code).get_vocab()


def _read_tokenizer(name_or_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    check_path_exists(name_or_path)
    check_layer_limit(*read_config_json(name_or_path))  # transformers finds the tokenizer's class by config.json
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # the tokenizers library raises plain exceptions for unreadable files
        raise make_loading_error("tokenizer", name_or_path, error) from error
    if found.chat_template is None:
        found.chat_template = _read_processor_template(name_or_path)
    backend = getattr(found, "backend_tokenizer", None)
    if backend is not None:
        parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
        written = [json.loads(part.__getstate__()) for part in parts if part is not None]
        check_split_patterns(list(_find_regular_expressions(written)), where=f"tokenizer.json of {name_or_path}")
    if set(found.get_vocab()) <= set(found.all_special_tokens):  # transformers made it from the model's config alone
        raise ArgumentError(
            f"'{name_or_path}' has no tokenizer: none of its files has tokens",
            where="tokenizer",
            fix="copy tokenizer.json and tokenizer_config.json into it, or name a tokenizer: tokenizer: {path: NAME}",
        )
    return found


def _read_processor_template(name_or_path: str) -> str | None:
    """Return the template in ``chat_template.json``, where older vision-language checkpoints have it; None without."""
    with suppress(OSError, ValueError, AttributeError):
        path = hf_internal(HUB_FILE)(name_or_path, "chat_template.json", _raise_exceptions_for_missing_entries=False)
        template = None if path is None else json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
        return template if isinstance(template, str) else None
    return None


def _find_regular_expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _find_regular_expressions(part)


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str, image_text: str = "") -> None:
    """Set the chat template of ``tokenizer``: a name of :data:`CHAT_TEMPLATES`, the path of a Jinja file, or the
    template itself.

    A file with such a name needs a path with a folder: ``./chatml``.

    Args:
        image_text: Text of an image for templates of :data:`CHAT_TEMPLATES`
            (:func:`streamtune.data.templates.image_text`); an empty string for a model of text.
    """
    if form := CHAT_TEMPLATES.get(template):
        if not form.end and tokenizer.eos_token is None:
            raise ArgumentError(
                f"the chat template {template} ends answers with EOS, and the tokenizer has no EOS token",
                where="chat_template",
                fix="write special_tokens: {eos_token: ...}",
            )
        text = read_chat_template(template)
        tokenizer.chat_template = print_images(text, image_text) if image_text else text
        return
    if "{" in template:
        tokenizer.chat_template = template
        return
    if len(template) > 4096 or "\0" in template:
        raise ArgumentError("chat_template is neither a template nor a path", where="chat_template")
    path = Path(template).expanduser()
    if not path.is_file():
        what, fix = describe_missing_template(template)
        raise ArgumentError(what, where="chat_template", fix=fix)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, ValueError) else error.strerror or str(error)
        raise ArgumentError(f"cannot read the chat template {path}: {reason}", where="chat_template") from error
    if len(text) > MAX_TEMPLATE:
        raise ArgumentError(f"{path} has more than {MAX_TEMPLATE:,} characters: it is not a chat template",
                            where="chat_template", fix="name a Jinja file")  # fmt: skip
    tokenizer.chat_template = text


def describe_missing_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """Return a note on the tokens that a named template prints and the tokenizer splits, with the keys that add them.

    Return None if the tokenizer has all tokens, or if ``template`` is not a name of :data:`CHAT_TEMPLATES`.
    """
    form = CHAT_TEMPLATES.get(template)
    split: dict[str, int] = {}
    for text in () if form is None else filter(None, (*form.marks, form.end, *form.added)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if text not in tokenizer.convert_ids_to_tokens(ids):
            split[text] = len(ids)
    if form is None or not split:
        return None
    special = {
        **({"eos_token": form.end} if form.end in split else {}),
        **({"additional_special_tokens": marks} if (marks := [each for each in form.marks if each in split]) else {}),
    }
    added = [each for each in form.added if each in split]
    keys = [f"special_tokens: {_flow_mapping(special)}"] if special else []
    keys += [f"added_tokens: {json.dumps(added, ensure_ascii=False)}"] if added else []
    *names, last = split
    counts = " and ".join(str(count) for count in split.values()) if len(split) <= 2 else "several"
    return (
        f"the tokenizer splits {', '.join(names)}{' and ' if names else ''}{last}, which the chat template {template} "
        f"writes, into {counts} tokens{' each' if len(split) > 2 else ''}; "
        f"to add each as one token, write {' and '.join(keys)}"
    )


def _flow_mapping(keys: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in keys.items()) + "}"


SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def add_tokens(tokenizer: PreTrainedTokenizerBase, special: Mapping[str, Any], added: Sequence[str]) -> None:
    """Add a recipe's special tokens and ordinary tokens to a tokenizer, in place. Existing tokens keep their ids.

    ``special`` has tokens for keys such as ``bos_token``, and a list for ``additional_special_tokens``. Tokens in
    ``added``, such as ``<think>``, are decoded as ordinary text. A second call changes nothing.
    """
    for name in SPECIAL:
        if (text := special.get(name)) is not None:
            tokenizer.add_special_tokens({name: AddedToken(text, special=True, normalized=False)})
    more = [AddedToken(text, special=True, normalized=False) for text in special.get("additional_special_tokens") or ()]
    tokenizer.add_tokens(more, special_tokens=True)
    ordinary = [text for text in added if text not in _special_token_texts(special)]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ordinary])


def new_token_ids(
    old_vocab: Collection[str], tokenizer: PreTrainedTokenizerBase, special: Mapping[str, Any], added: Sequence[str]
) -> list[int]:
    """Return the ids of the tokens in ``special`` and ``added`` that are not in ``old_vocab``, ascending.

    ``tokenizer`` already has the tokens.
    """
    vocabulary = tokenizer.get_vocab()
    texts = dict.fromkeys([*_special_token_texts(special), *added])
    return sorted(vocabulary[text] for text in texts if text not in old_vocab and text in vocabulary)


def _special_token_texts(special: Mapping[str, Any]) -> list[str]:
    single = [special[name] for name in SPECIAL if special.get(name) is not None]
    return [*single, *(special.get("additional_special_tokens") or ())]


@torch.no_grad()
def add_embedding_rows(model: Any, vocab_size: int, new_token_ids: Collection[int]) -> None:
    """Enlarge the embedding and the head for new tokens, and set the rows of new tokens to the mean of the old rows.

    The model must have unquantised weights and no adapters. It is not enlarged if it already has ``vocab_size`` rows.
    ``vocab_size`` is the number of tokens; ``new_token_ids`` are the ids of the new tokens, which come last.
    """
    if vocab_size > model.get_input_embeddings().weight.shape[0]:
        try:
            with torch.random.fork_rng():
                model.resize_token_embeddings(vocab_size, mean_resizing=False)
        except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"the embedding of {type(model).__name__} cannot be enlarged for new tokens: {error}",
                where="added_tokens",
                fix="use tokens that the model's tokenizer has",
            ) from error
    rows = torch.tensor(sorted(new_token_ids), device=model.device)
    first_new_id = int(rows[0])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables: dict[int, Any] = {
        id(module.weight): module.weight for module in (embedding, head) if isinstance(module, nn.Module)
    }
    for table in tables.values():
        table[rows] = table[:first_new_id].float().mean(dim=0).to(table.dtype)
    bias = getattr(head, "bias", None)
    if isinstance(bias, torch.Tensor):
        bias[rows] = bias[:first_new_id].float().mean().to(bias.dtype)


def write_special_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase, special_tokens: Mapping[str, Any]) -> None:
    """Write the ids of the tokens in ``special_tokens`` into a model's configuration and generation config, in place.

    A new EOS is added to the tokens that end generation.
    """
    text_config = model.config.get_text_config(decoder=True)
    generation = getattr(model, "generation_config", None)
    for name in ("bos_token", "eos_token", "pad_token"):
        if special_tokens.get(name) is None:
            continue
        key, token_id = f"{name}_id", getattr(tokenizer, f"{name}_id")
        for config in (model.config, text_config):
            setattr(config, key, token_id)
        if generation is None:
            continue
        ends = getattr(generation, key, None)
        if name == "eos_token" and ends is not None and ends != token_id:
            others = [other for other in (ends if isinstance(ends, list) else [ends]) if other != token_id]
            setattr(generation, key, [token_id, *others])
        else:
            setattr(generation, key, token_id)
