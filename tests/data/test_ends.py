"""The tokens that end what is trained, derived from the rows under the template they are rendered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fixed_tokenizer import fixed_tokenizer
from test_golden_chats import ROWS, WITHOUT_TOOLS
from transformers import PreTrainedTokenizerFast

from streamtune.data.inspect_rows import trained_end_tokens
from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.record_table import Example, Prompt, Tree
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import normalise_row

ENDS = {
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "phi4": ["<|im_end|>"],
    "llama31": ["<|eot_id|>"],
    "mistral3": ["</s>"],
    "gemma3": ["<end_of_turn>"],
    "deepseek_r1": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "gpt_oss": ["<|return|>"],
    "granite": ["<|end_of_text|>"],
}
"""The tokens at which the makers' own generation configs end, of those that rows without tools train."""


def examples(tokenizer: Any, rows: list[dict[str, Any]], train_on: str, chat: ChatOptions) -> list[Example]:
    render = RowRenderer(tokenizer, train_on=train_on, notify=lambda message: None, chat=chat)
    made = [render(normalise_row(Row("x:1", json.loads(json.dumps(row))), "messages"), "x:1") for row in rows]
    return [Example(each.input_ids, each.labels, "x:1") for each in made]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("row", ["system", "reasoning"])
@pytest.mark.parametrize("name", ENDS)
def test_of_each_format_its_end_of_turn_is_found(name: str, row: str, train_on: str) -> None:
    tokenizer, chat = fixed_tokenizer(name), ChatOptions()
    found = trained_end_tokens(examples(tokenizer, [ROWS[row]], train_on, chat), tokenizer, chat)
    assert tokenizer.convert_ids_to_tokens(found) == ENDS[name]


@pytest.mark.parametrize("name", sorted(set(ENDS) - set(WITHOUT_TOOLS)))
def test_calls_of_tools_end_a_turn_too(name: str) -> None:
    tokenizer, chat = fixed_tokenizer(name), ChatOptions()
    found = trained_end_tokens(examples(tokenizer, [ROWS["tools"]], "assistant", chat), tokenizer, chat)
    more = ["<|call|>"] if name == "gpt_oss" else []
    assert set(tokenizer.convert_ids_to_tokens(found)) == {*ENDS[name], *more}


def test_of_prompts_the_template_says_it(tokenizer: PreTrainedTokenizerFast) -> None:
    chat, end = ChatOptions(), tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert trained_end_tokens([Prompt([1, 2], "p", {}, "x")], tokenizer, chat) == [end]
    assert trained_end_tokens([], tokenizer, chat) == [end]
    tokenizer.chat_template = None
    assert trained_end_tokens([Prompt([1, 2], "p", {}, "x")], tokenizer, chat) == []


def test_texts_end_with_the_end_token(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = make_tokenizer("chatml", eos_token="<|endoftext|>")
    chat, end = ChatOptions(), tokenizer.eos_token_id
    text = RowRenderer(tokenizer, train_on="all", notify=lambda message: None)(
        normalise_row(Row("x:1", {"text": "one two"}), "text"), "x:1"
    )
    rows: list[Any] = [Example(text.input_ids, text.labels, "x:1")]
    assert trained_end_tokens(rows, tokenizer, chat) == [end], "the template of a base model is not in these rows"
    pair = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rows += examples(tokenizer, [pair], "all", chat)
    both = trained_end_tokens(rows, tokenizer, chat)
    assert set(both) == {end, tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_no_end_is_trained_without_ends(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = ChatOptions(train_on_eos="none")
    assert trained_end_tokens(examples(tokenizer, [ROWS["system"]], "assistant", chat), tokenizer, chat) == []


def test_a_marker_spelled_in_an_answer_hides_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    row = [301, 302, end, 303, end]
    assert trained_end_tokens([Example(row, [-100, *row[1:]], "x")], tokenizer, ChatOptions()) == [end]


def test_answers_of_pairs_end_as_their_tokens_do(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> None:
    tokenizer = make_tokenizer("chatml", eos_token="<|endoftext|>")
    end, other = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|eot_id|>"))
    assert trained_end_tokens([Tree([1], [[304, end], [305, end]])], tokenizer, ChatOptions()) == [end]
    masked = Tree([1], [[304, other, 307], [305, other, 307]], masks=[[True, True, False]] * 2)
    assert trained_end_tokens([masked], tokenizer, ChatOptions()) == [other]
