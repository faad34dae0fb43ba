"""Needle-in-a-haystack test: hide a sentence with a random code in text of the recipe, and ask for the code at the end.

    prompt   head, haystack, needle, haystack, question, tail    head and tail are from the chat template, if any
    answer   the code

A cell of the results is a length (prompt plus answer, in tokens) and a depth (percentage of the haystack before the
needle). Code, wording and haystack of a trial depend on the seed, the length and the trial's number, not on the depth.

    matched   number of trials whose greedy completion begins with the code
    gain      mean log-probability of the answer tokens, minus its value with haystack in place of the needle
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
from streamtune.errors import ArgumentError
from streamtune.models import all_eos_token_ids, position_table_limit
from streamtune.ops.devices import to_float64
from streamtune.programs.evaluate.eval_scores import ScoringModel, mean_and_error
from streamtune.tasks.rollout import Sampling, TransformersGenerator

Ids = npt.NDArray[np.int64]

KEY_ADJECTIVES, KEY_ANIMALS = (
    ("amber", "cobalt", "crimson", "golden", "ivory", "olive", "silver", "violet"),
    ("badger", "falcon", "heron", "lynx", "otter", "raven", "salmon", "walrus"),
)
"""Adjectives and animals whose random combination names the code, such as ``amber badger``."""
TEXT_PLACEHOLDER = "@@streamtune-needle@@"
"""Placeholder for the user's text while the chat template is rendered."""
MIN_HAY = 16
"""Minimum number of haystack tokens in a prompt."""
EXTRA_TOKENS = 8
"""Number of tokens generated beyond the length of the answer."""
LONGEST_DEFAULT, SHORTEST_DEFAULT = 1024, 64


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """Options of a needle-in-a-haystack test."""

    lengths: tuple[int, ...] = ()
    """Lengths of prompt plus answer, in tokens; if empty, :func:`default_lengths`."""
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    """Positions of the needle: percentage of the haystack before it."""
    trials: int = 3
    """Number of prompts for each length and depth."""


@dataclass(frozen=True)
class Haystack:
    """Token ids from which needle-in-a-haystack prompts are made."""

    hay: Ids
    """Token ids of concatenated texts; a prompt repeats them if it needs more."""
    head: list[int]
    tail: list[int]
    chat: bool
    """True if the prompt is a user message; False if it is plain text."""
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return _encode(self.tokenizer, text)

    def trial(self, key: str, code: str) -> tuple[list[int], list[int], list[int]]:
        """Return the token ids of needle, question and answer."""
        needle = self.encode(f"\nThe access code of the {key} is {code}.\n")
        question_text = f"\n\nWhat is the access code of the {key}?"
        if self.chat:
            return needle, self.encode(f"{question_text} Answer with the code alone."), self.encode(code)
        question = self.encode(f"{question_text} The access code of the {key} is")
        whole = self.encode(f"{question_text} The access code of the {key} is {code}")
        if whole[: len(question)] == question:
            return needle, question, whole[len(question) :]
        return needle, question, self.encode(f" {code}")

    def prompt(self, needle: Sequence[int], question: Sequence[int], start: int, hay: int, depth: float) -> list[int]:
        """Return a prompt with ``hay`` haystack tokens from index ``start``, and the needle at ``depth`` percent."""
        before = round(hay * depth / 100)
        straw = np.take(self.hay, range(start, start + hay), mode="wrap").tolist()
        return [*self.head, *straw[:before], *needle, *straw[before:], *question, *self.tail]


@dataclass(frozen=True)
class _NeedleTrial:
    """Randomly drawn content of a prompt; its haystack part has ``hay`` tokens from index ``start``."""

    needle: list[int]
    question: list[int]
    answer: list[int]
    code: str
    start: int
    hay: int


def default_lengths(max_length: int) -> tuple[int, ...]:
    """Return the powers of two up to ``max_length``: from 1,024, or from 64 if ``max_length`` is below 2,048."""
    first = LONGEST_DEFAULT if max_length >= 2 * LONGEST_DEFAULT else SHORTEST_DEFAULT
    return tuple(1 << power for power in range(first.bit_length() - 1, max_length.bit_length()))


def gather_haystack(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    chat: bool,
    tokens: int,
    notify: Callable[[str], None],
    frame: data.ChatContext | None = None,
) -> Haystack:
    """Tokenize the text in which needles are hidden.

    Args:
        chat: True to frame the prompt with the chat template.
        tokens: Maximum number of haystack tokens.
        notify: Called with a note if the texts repeat, or the chat template cannot be used.
        frame: System message, tools and variables of the chat template in training.

    Raises:
        ArgumentError: The rows have no text.
    """
    hay: list[int] = []
    for text in texts:
        hay += _encode(tokenizer, f"{text}\n")
        if len(hay) >= tokens:
            break
    if not hay:
        raise ArgumentError("the rows have no text for the needle-in-a-haystack test", where="datasets")
    if len(hay) < tokens:
        notify(f"the rows have only {len(hay):,} tokens of text: the needle-in-a-haystack test repeats them")
    head, tail, chat = _tokens_around_user_text(tokenizer, chat, frame or data.ChatContext(), notify)
    return Haystack(np.array(hay[:tokens], dtype=np.int64), head, tail, chat, tokenizer)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokens_around_user_text(
    tokenizer: Any, chat: bool, frame: data.ChatContext, notify: Callable[[str], None]
) -> tuple[list[int], list[int], bool]:
    """Return the token ids before and after the user's text, and True if the chat template made them."""
    if chat and tokenizer.chat_template:
        messages = [*frame.system, {"role": "user", "content": TEXT_PLACEHOLDER}]
        rendered = render_chat(tokenizer, ChatRequest(messages, frame.tools, True, frame.variables))
        if rendered.count(TEXT_PLACEHOLDER) == 1:
            head, _, tail = rendered.partition(TEXT_PLACEHOLDER)
            return _encode(tokenizer, head), _encode(tokenizer, tail), True
        notify("the chat template changes or repeats the user's text: the needle-in-a-haystack test uses plain text")
    first = list(tokenizer("", verbose=False)["input_ids"])[:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return first if begins else [], [], False


def _draw_trial(haystack: Haystack, length: int, seed: int, trial_index: int) -> _NeedleTrial | None:
    """Return the random choices of a trial; None if the prompt does not fit into ``length`` tokens."""
    draw = random.Random(f"needle {seed} {length} {trial_index}")
    key, code = f"{draw.choice(KEY_ADJECTIVES)} {draw.choice(KEY_ANIMALS)}", str(draw.randrange(10**6, 10**7))
    needle, question, answer = haystack.trial(key, code)
    hay = length - sum(map(len, (haystack.head, needle, question, haystack.tail, answer)))
    if hay < MIN_HAY:
        return None
    return _NeedleTrial(needle, question, answer, code, draw.randrange(len(haystack.hay)), hay)


def probe_needles(
    streamed: ScoringModel,
    haystack: Haystack,
    options: NeedleOptions,
    lengths: Sequence[int],
    *,
    seed: int,
    cells_done: Callable[[int, int], None] = lambda done, cells: None,
) -> dict[str, Any]:
    """Run the needle-in-a-haystack test and return the entry ``needle`` of ``eval.json``.

    Args:
        options: Lengths, depths and number of trials. Default lengths that are too short are left out.
        lengths: Lengths of prompt plus answer, in tokens, from the options or by default.
        seed: Seed of codes, wordings and haystack positions.
        cells_done: Called after each cell with the number of finished cells and the number of all cells.

    Raises:
        ArgumentError: A length in ``options`` is too short for a prompt, or all lengths are.
    """
    drawn = {
        length: [_draw_trial(haystack, length, seed, number) for number in range(options.trials)] for length in lengths
    }
    fitting = {length: [each for each in found if each] for length, found in drawn.items() if all(found)}
    if not fitting or (options.lengths and len(fitting) < len(lengths)):
        short = min(length for length in lengths if length not in fitting)
        raise ArgumentError(
            f"a length of {short:,} tokens is too short for needle, question and {MIN_HAY} tokens of other text",
            where="--needle-lengths",
            fix="give larger lengths",
        )
    model, handle, tokenizer = streamed.model, streamed.handle, haystack.tokenizer
    writer = TransformersGenerator(
        model,
        end_token_ids=all_eos_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        prefill_chunk_size=handle.schedule.chunk_size,
        max_rows=1,
        compute_context=streamed.autocast,
    )
    cells: list[dict[str, Any]] = []
    total = len(fitting) * len(options.depths)
    with torch.no_grad(), train.evaluation_mode(model), train.preserve_rng(), handle.routers.without_losses():
        for length, trials in fitting.items():
            without = []
            for each in trials:
                plain = haystack.prompt([], each.question, each.start, each.hay + len(each.needle), 0.0)
                without.append(_mean_logprob(streamed, plain, each.answer))
            for depth in options.depths:
                prompts = [haystack.prompt(each.needle, each.question, each.start, each.hay, depth) for each in trials]
                pairs = list(zip(prompts, trials, strict=True))
                found = [_mean_logprob(streamed, prompt, each.answer) for prompt, each in pairs]
                matched = [_answers_with_code(writer, tokenizer, prompt, each) for prompt, each in pairs]
                cells.append({"length": length, "depth": depth, **_summarise_cell(matched, found, without)})
                cells_done(len(cells), total)
    return {
        "lengths": list(fitting),
        "depths": list(options.depths),
        "trials": options.trials,
        "chat": haystack.chat,
        "seed": seed,
        "cells": cells,
    }


def _mean_logprob(streamed: ScoringModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the mean log-probability of the answer tokens after a prompt, in nats."""
    ids_BT = torch.tensor([[*prompt, *answer[:-1]]], device=streamed.device)
    targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    targets_BT[0, len(prompt) - 1 :] = torch.tensor(answer, device=streamed.device)
    with streamed.autocast():
        scores_BT = streamed.handle.logprobs(ids_BT, targets_BT, model=streamed.model).logprobs
        return float(to_float64(scores_BT[0, len(prompt) - 1 :]).mean())


def _answers_with_code(writer: TransformersGenerator, tokenizer: Any, prompt: list[int], trial: _NeedleTrial) -> bool:
    """Return True if the first word of the greedy completion is the code."""
    limit = position_table_limit(writer.model)
    most = len(trial.answer) + EXTRA_TOKENS
    most = most if limit is None else min(most, limit - len(prompt))
    [[written]] = writer.write([prompt], 1, Sampling(most, temperature=0.0))
    words = tokenizer.decode(written.token_ids, skip_special_tokens=True).split()
    return bool(words) and words[0].strip(".,:;!?\"'`*()") == trial.code


def _summarise_cell(
    matches: Sequence[bool], logprobs_with_needle: Sequence[float], logprobs_without: Sequence[float]
) -> dict[str, Any]:
    gain, error = mean_and_error(
        [one - other for one, other in zip(logprobs_with_needle, logprobs_without, strict=True)]
    )
    return {
        "matched": sum(matches),
        "trials": len(logprobs_with_needle),
        "logprob": math.fsum(logprobs_with_needle) / len(logprobs_with_needle),
        "logprob_without": math.fsum(logprobs_without) / len(logprobs_with_needle),
        "gain": gain,
        "standard_error": error,
    }
