"""Needle probe of retrieval: hide a sentence with a random code in text of the recipe, and ask for the code at the end.

    prompt   head, hay, needle, hay, question, tail     head and tail come from the chat template, if rows are messages
    answer   the code

A cell is a length (prompt plus answer) and a depth of the needle in the hay. Key, code and the start of the hay are
drawn from the seed, the length and the trial's number. So the same trial at two depths differs in the depth alone.

    matched   the greedy completion begins with the code
    gain      mean log-probability of an answer token, minus its value with hay in place of the needle
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
from streamtune.models import all_eos_token_ids
from streamtune.programs.evaluate.eval_scores import ScoringModel, mean_and_error
from streamtune.tasks.rollout import Sampling, TransformersWriter

Ids = npt.NDArray[np.int64]

KEY_ADJECTIVES, KEY_ANIMALS = (
    ("amber", "cobalt", "crimson", "golden", "ivory", "olive", "silver", "violet"),
    ("badger", "falcon", "heron", "lynx", "otter", "raven", "salmon", "walrus"),
)
"""Words of a key: one of the first list, one of the second."""
TEXT_PLACEHOLDER = "@@streamtune-needle@@"
"""Placeholder for the user's text while the chat template is rendered."""
MIN_HAY = 16
"""Minimum number of hay tokens in a prompt."""
EXTRA_TOKENS = 8
"""Number of tokens generated beyond the answer's length."""
LONGEST_DEFAULT, SHORTEST_DEFAULT = 1024, 64


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """Lengths, depths and number of trials of a needle-in-a-haystack test."""

    lengths: tuple[int, ...] = ()
    """Numbers of tokens in prompt plus answer; if empty, :func:`default_lengths`."""
    depths: tuple[float, ...] = (0.0, 25.0, 50.0, 75.0, 100.0)
    """Percentages of the hay that come before the needle."""
    trials: int = 3
    """Number of trials of each cell."""


@dataclass(frozen=True)
class Haystack:
    """Tokens from which needle-in-a-haystack prompts are made."""

    hay: Ids
    """Concatenated texts; a prompt repeats them if it needs more."""
    head: list[int]
    tail: list[int]
    chat: bool
    """True if the prompt is a user message; False if the answer continues plain text."""
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
        """Return a prompt with ``hay`` tokens of hay from position ``start``, and the needle at ``depth`` percent."""
        before = round(hay * depth / 100)
        straw = np.take(self.hay, range(start, start + hay), mode="wrap").tolist()
        return [*self.head, *straw[:before], *needle, *straw[before:], *question, *self.tail]


@dataclass(frozen=True)
class _NeedleTrial:
    """Random choices of one needle-in-a-haystack trial: needle, question, answer and surrounding text."""

    needle: list[int]
    question: list[int]
    answer: list[int]
    code: str
    start: int
    hay: int


def default_lengths(max_length: int) -> tuple[int, ...]:
    """Return the powers of two from 1,024 to ``max_length``; if there are fewer than two, from 64."""
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
    """Return the text in which needles are hidden, made of the rows' texts.

    Args:
        texts: Texts of the rows.
        tokenizer: Tokenizer of the model.
        chat: True if the model is trained on messages: the chat template then frames the prompt.
        tokens: Maximum number of hay tokens.
        notify: Called with a note if the texts are shorter than ``tokens`` and repeat.
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
        raise ArgumentError("the rows have no text to hide a needle in", where="datasets")
    if len(hay) < tokens:
        notify(f"the rows have only {len(hay):,} tokens of text: the needle probe repeats them")
    head, tail, chat = _tokens_around_user_text(tokenizer, chat, frame or data.ChatContext(), notify)
    return Haystack(np.array(hay[:tokens], dtype=np.int64), head, tail, chat, tokenizer)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokens_around_user_text(
    tokenizer: Any, chat: bool, frame: data.ChatContext, notify: Callable[[str], None]
) -> tuple[list[int], list[int], bool]:
    """Return the tokens before and after the user's text, and whether the chat template made them."""
    if chat and tokenizer.chat_template:
        messages = [*frame.system, {"role": "user", "content": TEXT_PLACEHOLDER}]
        rendered = render_chat(tokenizer, ChatRequest(messages, frame.tools, True, frame.variables))
        if rendered.count(TEXT_PLACEHOLDER) == 1:
            head, _, tail = rendered.partition(TEXT_PLACEHOLDER)
            return _encode(tokenizer, head), _encode(tokenizer, tail), True
        notify("the chat template changes or repeats the user's text: the needle probe uses plain text")
    first = list(tokenizer("", verbose=False)["input_ids"])[:1]
    begins = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return first if begins else [], [], False


def _draw_trial(haystack: Haystack, length: int, seed: int, trial_index: int) -> _NeedleTrial | None:
    """Return a random trial; None if it does not fit into ``length`` tokens."""
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
    """Run the needle-in-a-haystack test and return its entry of eval.json: cells with ``matched`` and ``gain``.

    Args:
        streamed: Model to probe.
        haystack: Parts of the prompts.
        options: Lengths, depths and number of trials. Default lengths that are too short are left out.
        lengths: Numbers of tokens in prompt plus answer, from the options or by default.
        seed: Seed of keys, codes and hay.
        cells_done: Called after each cell with the number of cells done and the total.

    Raises:
        ArgumentError: A length in ``options`` is too short for a trial, or every length is.
    """
    drawn = {
        length: [_draw_trial(haystack, length, seed, number) for number in range(options.trials)] for length in lengths
    }
    fitting = {length: [each for each in found if each] for length, found in drawn.items() if all(found)}
    if not fitting or (options.lengths and len(fitting) < len(lengths)):
        short = min(length for length in lengths if length not in fitting)
        raise ArgumentError(
            f"a length of {short:,} tokens is too short for needle, question and {MIN_HAY} tokens of hay",
            where="--needle-lengths",
            fix="give larger lengths",
        )
    model, handle, tokenizer = streamed.model, streamed.handle, haystack.tokenizer
    writer = TransformersWriter(
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
    """Return the mean log-probability of an answer's tokens after a prompt, computed by the streamed model."""
    ids_BT = torch.tensor([[*prompt, *answer[:-1]]], device=streamed.device)
    targets_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    targets_BT[0, len(prompt) - 1 :] = torch.tensor(answer, device=streamed.device)
    with streamed.autocast():
        scores_BT = streamed.handle.logprobs(ids_BT, targets_BT, model=streamed.model).logprobs
        return float(scores_BT[0, len(prompt) - 1 :].double().mean())


def _answers_with_code(writer: TransformersWriter, tokenizer: Any, prompt: list[int], trial: _NeedleTrial) -> bool:
    """Return True if the first word of the greedy completion is the code."""
    [[written]] = writer.write([prompt], 1, Sampling(len(trial.answer) + EXTRA_TOKENS, temperature=0.0))
    words = tokenizer.decode(written.token_ids, skip_special_tokens=True).split()
    return bool(words) and words[0].strip(".,:;!?\"'`*()") == trial.code


def _summarise_cell(
    matches: Sequence[bool], logprobs_with_needle: Sequence[float], logprobs_without: Sequence[float]
) -> dict[str, Any]:
    """Return the results of one length and depth, from mean log-probabilities with and without the needle."""
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
