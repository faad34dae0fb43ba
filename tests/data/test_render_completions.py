"""A prompt and a completion are, token for token, what the whole conversation renders to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from streamtune.data.preferences import detect_preference_type, normalise_preference
from streamtune.data.reading.readers import Row
from streamtune.data.record_table import Tree
from streamtune.data.rendering.render import TreeRenderer
from streamtune.errors import DataError

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


def render(tokenizer: PreTrainedTokenizerFast, told: list[str] | None = None, **columns: Any) -> Tree:
    row = Row("x:1", columns)
    renderer = TreeRenderer(tokenizer, notify=[].append if told is None else told.append)
    return renderer(normalise_preference(row, detect_preference_type(row)), "x:1")


def counted(tokenizer: PreTrainedTokenizerFast, tree: Tree) -> list[str]:
    """What counts of each completion, decoded."""
    masks = tree.masks or [[True] * len(completion) for completion in tree.completions]
    return [
        tokenizer.decode([token for token, counts in zip(completion, mask, strict=True) if counts])
        for completion, mask in zip(tree.completions, masks, strict=True)
    ]


PROMPTS = {
    "one turn": [user("What is the capital of France?")],
    "with a system message": [{"role": "system", "content": "Be brief."}, user("one?")],
    "several turns": [user("one?"), answer("Answer 1."), user("two?")],
    "blanks": [user("\n\none \n")],
}
ANSWERS = {
    "short": ("Paris is.", "The dog"),
    "same beginning": ("Paris is the capital", "Paris, the dog"),
    "unicode": ("世界! café 👋🏽", "e\u0301 Grüße"),
}


@pytest.mark.parametrize(
    "template", ["chatml", "chatml_generation", "default_system", "no_generation_prompt", "llama3"]
)
@pytest.mark.parametrize("asked", PROMPTS)
@pytest.mark.parametrize("answered", ANSWERS)
def test_conversations(make_tokenizer: MakeTokenizer, template: str, asked: str, answered: str) -> None:
    end = "<|eot_id|>" if template == "llama3" else "<|im_end|>"
    tokenizer = make_tokenizer(template, eos_token=end)
    prompt, answers = PROMPTS[asked], ANSWERS[answered]
    tree = render(tokenizer, prompt=prompt, chosen=answers[0], rejected=answers[1])
    for text, completion in zip(answers, tree.completions, strict=True):
        whole = tokenizer.apply_chat_template([*prompt, answer(text)], tokenize=True)["input_ids"]
        assert [*tree.prompt, *completion] == whole
    assert counted(tokenizer, tree) == [f"{text}{end}" for text in answers]
    if template == "chatml":
        asked_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert tree.prompt == asked_ids, "what stands before an answer is what a model is asked when it writes one"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_texts_are_tokenised_with_their_prompt(make_tokenizer: MakeTokenizer, trim_offsets: bool) -> None:
    tokenizer = make_tokenizer(None, trim_offsets=trim_offsets)
    tree = render(tokenizer, prompt="The quick brown", chosen=" fox jumps", rejected=" dog.")
    for text, completion in zip((" fox jumps", " dog."), tree.completions, strict=True):
        whole = tokenizer("The quick brown" + text)["input_ids"]
        assert [*tree.prompt, *completion] == [*whole, tokenizer.eos_token_id]
    assert counted(tokenizer, tree) == [" fox jumps<|im_end|>", " dog.<|im_end|>"]
    assert tree.masks is None, "all tokens of these completions count"


def test_a_token_across_the_border_goes_with_the_answer(make_tokenizer: MakeTokenizer) -> None:
    """``ca`` + ``pital`` is one token; it differs from the other answer's and counts."""
    tokenizer = make_tokenizer(None)
    tree = render(tokenizer, prompt="The ca", chosen="pital of France", rejected="t")
    whole = [*tokenizer("The capital of France")["input_ids"], tokenizer.eos_token_id]
    assert [*tree.prompt, *tree.completions[0]] == whole
    assert tokenizer.decode(tree.prompt) == "The"
    assert counted(tokenizer, tree)[0] == " capital of France<|im_end|>"


def test_what_differs_before_the_answer_and_does_not_count_is_masked(make_tokenizer: MakeTokenizer) -> None:
    """Without trained marks in common, the header's line break merges with one answer's and not with the other's."""
    tokenizer = make_tokenizer("chatml")
    tree = render(tokenizer, prompt=[user("one?")], chosen="\n\nAnswer", rejected="dog")
    for text, completion in zip(("\n\nAnswer", "dog"), tree.completions, strict=True):
        whole = tokenizer.apply_chat_template([user("one?"), answer(text)], tokenize=True)["input_ids"]
        assert [*tree.prompt, *completion] == whole
    chosen, rejected = counted(tokenizer, tree)
    assert (chosen.lstrip("\n"), rejected) == ("Answer<|im_end|>", "dog<|im_end|>")
    assert tree.masks is not None
    assert not tree.masks[1][0], "the line break of the header stands in the completion, and does not count"


def test_only_the_assistant_counts_in_an_answer_of_several_turns(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("chatml")
    chosen = [answer("1"), user("sure?"), answer("yes")]
    tree = render(tokenizer, prompt=[user("one?"), answer("0"), user("really?")], chosen=chosen, rejected=answer("no"))
    assert counted(tokenizer, tree) == ["1<|im_end|>yes<|im_end|>", "no<|im_end|>"]
    assert "sure?" in tokenizer.decode(tree.completions[0])


def test_one_judged_answer(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("chatml")
    tree = render(tokenizer, prompt=[user("one?")], completion=[answer("1")], label=False)
    assert (counted(tokenizer, tree), tree.labels, tree.margin) == (["1<|im_end|>"], [False], None)


def test_no_token_stands_before_the_answers(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(DataError, match="the answers have no prompt token in common") as caught:
        render(tokenizer, prompt="d", chosen="ef", rejected="og")
    assert caught.value.where == "x:1"


def test_a_conversation_needs_a_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        render(make_tokenizer(None), prompt=[user("one?")], chosen="a", rejected="b")
