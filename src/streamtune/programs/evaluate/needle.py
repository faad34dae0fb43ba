"""Probe retrieval: a sentence with a random code in hay of the recipe's own texts, and a question for it at the end.

    prompt   head, hay, needle, hay, question, tail     head and tail are the chat template's, where rows are messages
    answer   the code

A cell is a length of prompt and answer together, and a depth of the needle in the hay. Each of its trials has a key, a
code and a place in the hay of its own, drawn from the seed, the length and the number of the trial; so all depths of a
trial differ in the depth alone. Two figures of a trial:

    matched   the likeliest completion begins with the code
    gain      mean log-prob of an answer token, less that of the same token where hay stands in the needle's place
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from streamtune import data, train
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.templates import ChatRequest, render_chat
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError
from streamtune.models import end_tokens
from streamtune.tasks.rollout import Sampling, TransformersWriter

Ids = npt.NDArray[np.int64]

FIRST, SECOND = (
    ("amber", "cobalt", "crimson", "golden", "ivory", "olive", "silver", "violet"),
    ("badger", "falcon", "heron", "lynx", "otter", "raven", "salmon", "walrus"),
)
"""A key is one word of each."""
MARK = "@@streamtune-needle@@"
"""Stands for the text of the user while the chat template is rendered."""
LEAST_HAY = 16
"""Tokens of hay in the shortest prompt."""
SLACK = 8
"""Tokens that are written besides those of the answer."""
LONGEST_DEFAULT, SHORTEST_DEFAULT = 1024, 64


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """The cells of a probe."""

    lengths: tuple[int, ...] = ()
    """Tokens of prompt and answer together; empty takes :func:`default_lengths`."""
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    """Percent of the hay before the needle."""
    trials: int = 3
    """Of each cell."""


@dataclass(frozen=True)
class Haystack:
    """The parts of prompts, as token ids."""

    hay: Ids
    """Texts one after another; read round and round where a prompt needs more."""
    head: list[int]
    tail: list[int]
    chat: bool
    """True if the question is a user's and the answer an assistant's; else the answer continues the text."""
    encode: Callable[[str], list[int]]

    def trial(self, key: str, code: str) -> tuple[list[int], list[int], list[int]]:
        """Return the needle, the question and the answer."""
        needle = self.encode(f"\nThe access code of the {key} is {code}.\n")
        asked = f"\n\nWhat is the access code of the {key}?"
        if self.chat:
            return needle, self.encode(f"{asked} Answer with the code alone."), self.encode(code)
        question = self.encode(f"{asked} The access code of the {key} is")
        whole = self.encode(f"{asked} The access code of the {key} is {code}")
        if whole[: len(question)] == question:
            return needle, question, whole[len(question) :]
        return needle, question, self.encode(f" {code}")

    def prompt(self, needle: Sequence[int], question: Sequence[int], start: int, hay: int, depth: float) -> list[int]:
        """Return a prompt with ``hay`` tokens of hay from ``start`` on, and the needle at ``depth`` percent of it."""
        before = round(hay * depth / 100)
        straw = np.take(self.hay, range(start, start + hay), mode="wrap").tolist()
        return [*self.head, *straw[:before], *needle, *straw[before:], *question, *self.tail]


@dataclass(frozen=True)
class _NeedleTrial:
    needle: list[int]
    question: list[int]
    answer: list[int]
    code: str
    start: int
    hay: int


def default_lengths(max_length: int) -> tuple[int, ...]:
    """Return the powers of two up to ``max_length``, from 1,024 on; from 64 on where there would be fewer than two."""
    first = LONGEST_DEFAULT if max_length >= 2 * LONGEST_DEFAULT else SHORTEST_DEFAULT
    return tuple(1 << power for power in range(first.bit_length() - 1, max_length.bit_length()))


def gather_hay(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    chat: bool,
    tokens: int,
    notify: Callable[[str], None],
    frame: data.ChatFrame | None = None,
) -> Haystack:
    """Make a haystack of texts.

    Args:
        texts: The texts of rows.
        tokenizer: The model's.
        chat: True if the model was trained on messages; its chat template is used then.
        tokens: Tokens of hay to gather at most.
        notify: Called where the texts come to less, and are repeated.
        frame: System message, tools and variables of the chat template that the model was trained with.

    Raises:
        ArgumentError: There is no text.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    hay: list[int] = []
    for text in texts:
        hay += encode(f"{text}\n")
        if len(hay) >= tokens:
            break
    if not hay:
        raise ArgumentError("the rows have no text to hide a needle in", where="datasets")
    if len(hay) < tokens:
        notify(f"the rows come to {len(hay):,} tokens of text: the hay of the needle probe repeats them")
    head, tail, chat = _frame(tokenizer, encode, chat, frame or data.ChatFrame(), notify)
    return Haystack(np.array(hay[:tokens], dtype=np.int64), head, tail, chat, encode)


def _frame(
    tokenizer: Any,
    encode: Callable[[str], list[int]],
    chat: bool,
    frame: data.ChatFrame,
    notify: Callable[[str], None],
) -> tuple[list[int], list[int], bool]:
    """Return the tokens before and after the text of the user, and True if they are a chat template's."""
    if chat and tokenizer.chat_template:
        messages = [*frame.system, {"role": "user", "content": MARK}]
        rendered = render_chat(tokenizer, ChatRequest(messages, frame.tools, True, frame.variables))
        if rendered.count(MARK) == 1:
            head, _, tail = rendered.partition(MARK)
            return encode(head), encode(tail), True
        notify("the chat template does not show the user's text once as it is: needles are asked for in plain text")
    first = list(tokenizer("", verbose=False)["input_ids"])[:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return first if begins else [], [], False


def _trial(stack: Haystack, length: int, seed: int, number: int) -> _NeedleTrial | None:
    """Draw a trial; None if it does not fit into ``length`` tokens."""
    draw = random.Random(f"needle {seed} {length} {number}")
    key, code = f"{draw.choice(FIRST)} {draw.choice(SECOND)}", str(draw.randrange(10**6, 10**7))
    needle, question, answer = stack.trial(key, code)
    hay = length - sum(map(len, (stack.head, needle, question, stack.tail, answer)))
    if hay < LEAST_HAY:
        return None
    return _NeedleTrial(needle, question, answer, code, draw.randrange(len(stack.hay)), hay)


def probe_needles(
    handle: StreamHandle,
    model: Any,
    tokenizer: Any,
    stack: Haystack,
    options: NeedleOptions,
    lengths: Sequence[int],
    *,
    asked: bool,
    seed: int,
    bf16: bool,
    device: torch.device,
    cells_done: Callable[[int, int], None] = lambda done, cells: None,
) -> dict[str, Any]:
    """Return the part of the document that is about needles: the cells, each with ``matched`` and ``gain``.

    Args:
        handle: Streams the model.
        model: The model.
        tokenizer: Its tokenizer.
        stack: The parts of prompts.
        options: Depths and trials.
        lengths: Tokens of prompt and answer together.
        asked: True if the user named these lengths: one that holds no trial is an error then, and left out otherwise.
        seed: Of keys, codes and places.
        bf16: Compute in bfloat16.
        device: Of the model.
        cells_done: Called after each cell with those that are done and all of them.

    Raises:
        ArgumentError: A length is too short.
    """
    drawn = {length: [_trial(stack, length, seed, number) for number in range(options.trials)] for length in lengths}
    fitting = {length: [each for each in found if each] for length, found in drawn.items() if all(found)}
    if not fitting or (asked and len(fitting) < len(lengths)):
        short = min(length for length in lengths if length not in fitting)
        raise ArgumentError(
            f"{short:,} tokens are too few for a needle, its question and {LEAST_HAY} tokens of hay",
            where="--needle-lengths",
            mend="give longer ones",
        )
    writer = TransformersWriter(
        model,
        end_token_ids=end_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        prefill_chunk_size=handle.schedule.chunk_size,
        max_rows=1,
        computing=lambda: train.autocast(device, bf16),
    )
    cells: list[dict[str, Any]] = []
    total = len(fitting) * len(options.depths)
    with torch.no_grad(), train.evaluating(model), train.preserve_rng(), handle.routers.silenced():

        def logprob(prompt: list[int], answer: list[int]) -> float:
            with train.autocast(device, bf16):
                return _mean_logprob(handle, model, prompt, answer, device)

        for length, trials in fitting.items():
            without = [
                logprob(stack.prompt([], each.question, each.start, each.hay + len(each.needle), 0.0), each.answer)
                for each in trials
            ]
            for depth in options.depths:
                prompts = [stack.prompt(each.needle, each.question, each.start, each.hay, depth) for each in trials]
                found = [logprob(prompt, each.answer) for prompt, each in zip(prompts, trials, strict=True)]
                matched = [_matches(writer, tokenizer, *each) for each in zip(prompts, trials, strict=True)]
                cells.append(_cell(length, depth, matched, found, without))
                cells_done(len(cells), total)
    return {
        "lengths": list(fitting),
        "depths": list(options.depths),
        "trials": options.trials,
        "chat": stack.chat,
        "seed": seed,
        "cells": cells,
    }


def _mean_logprob(
    handle: StreamHandle, model: Any, prompt: Sequence[int], answer: Sequence[int], device: torch.device
) -> float:
    """Return the mean log-prob of an answer's tokens after a prompt, streamed."""
    ids_BT = torch.tensor([[*prompt, *answer[:-1]]], device=device)
    targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    targets_BT[0, len(prompt) - 1 :] = torch.tensor(answer, device=device)
    scores_BT = handle.logprobs(ids_BT, targets_BT, model=model).logprobs
    return float(scores_BT[0, len(prompt) - 1 :].double().mean())


def _matches(writer: TransformersWriter, tokenizer: Any, prompt: list[int], trial: _NeedleTrial) -> bool:
    """Return True if the first word of the likeliest completion is the code."""
    [[written]] = writer.write([prompt], 1, Sampling(len(trial.answer) + SLACK, temperature=0.0))
    words = tokenizer.decode(written.token_ids, skip_special_tokens=True).split()
    return bool(words) and words[0].strip(".,:;!?\"'`*()") == trial.code


def _cell(
    length: int, depth: float, matched: Sequence[bool], found: Sequence[float], without: Sequence[float]
) -> dict[str, Any]:
    gains = [one - other for one, other in zip(found, without, strict=True)]
    count = len(gains)
    mean = math.fsum(gains) / count
    error = None
    if count > 1:
        error = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (count - 1) / count)
    return {
        "length": length,
        "depth": depth,
        "matched": sum(matched),
        "trials": count,
        "logprob": math.fsum(found) / count,
        "logprob_without": math.fsum(without) / count,
        "gain": mean,
        "standard_error": error,
    }
