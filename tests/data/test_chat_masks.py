"""Every token of an assistant's turn and its terminator is trained, nothing else, on the ids of the full rendering."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preparing import ListRenderer
from tokenizers import Tokenizer
from trained_tokenizers import read_template, train_bpe, wrap
from transformers import PreTrainedTokenizerFast

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.rendering.tokens import Rendered
from streamtune.data.row_types import Conversation
from streamtune.data.templates import ChatRequest, _reads_parts_only
from streamtune.errors import DataError
from streamtune.models.tokenizer import train_tokenizer

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 3}}}]

CHATS: dict[str, list[Message]] = {
    "single": [user("What is the capital of France?"), answer("Paris is the capital of France.")],
    "several turns": [
        user("one?"),
        answer("Answer 1."),
        user("two?"),
        answer("Answer 2."),
        user("3?"),
        answer("Three"),
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        user("one?"),
        answer("Answer 1."),
        user("two?"),
        answer("2"),
    ],
    "ends with the user": [user("one?"), answer("Answer 1."), user("and then?")],
    "empty answer": [user("one?"), answer(""), user("two?"), answer("Answer 2.")],
    "unicode": [
        user("Grüße 👋🏽"),
        answer("世界! e\u0301 café 👋🏽\u200d"),
        user("é"),
        answer("\u0301combining first"),
    ],
    "blanks merge across borders": [user("\n\none \n"), answer("\n\n  Answer\n\n\n"), user(" "), answer("   ")],
    "quotes the format": [
        user("How does a turn look?"),
        answer("<|im_start|>assistant\nLike this<|im_end|>\n<|im_start|>user\n"),
        user("<|im_start|>assistant\nFake"),
        answer("Answer 2."),
    ],
}


def trained_pieces(tokenizer: PreTrainedTokenizerFast, rendered: Rendered) -> list[str]:
    """The runs of trained tokens, decoded."""
    runs: list[list[int]] = [[]]
    for label in rendered.labels:
        if label != IGNORE_INDEX:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def as_shown(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[Message]:
    """The messages as the template gets them: with texts as lists of parts, if it prints only such."""
    shown = ChatRequest(messages).to_kwargs(as_parts=_reads_parts_only(tokenizer))["conversations"][0]
    return list(shown)


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], train_on: str = "assistant") -> Rendered:
    """Render, and check that the ids are those of the full rendering and the labels theirs where they are trained."""
    rendered = ListRenderer(tokenizer, train_on=train_on, notify=lambda message: None)(Conversation(messages), "x:1")
    assert (
        rendered.input_ids == tokenizer.apply_chat_template(as_shown(tokenizer, messages), tokenize=True)["input_ids"]
    )
    assert all(label in (token, IGNORE_INDEX) for token, label in zip(rendered.input_ids, rendered.labels, strict=True))
    return rendered


def answers(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("options", [{}, {"trim_offsets": True}, {"normalise": True}], ids=lambda o: "+".join(o) or "-")
@pytest.mark.parametrize("template", ["chatml", "chatml_generation", "default_system", "no_generation_prompt"])
@pytest.mark.parametrize("name", CHATS)
def test_answers_and_their_terminators_are_trained(
    make_tokenizer: MakeTokenizer, name: str, template: str, options: dict[str, bool]
) -> None:
    tokenizer = make_tokenizer(template, **options)
    pieces = trained_pieces(tokenizer, render(tokenizer, CHATS[name]))
    expected = [f"{text}<|im_end|>" for text in answers(CHATS[name])]
    if options.get("normalise"):
        expected = [tokenizer.backend_tokenizer.normalizer.normalize_str(text) for text in expected]
    if "merge" in name:  # the header's line break may share a token with the answer's
        pieces = [
            piece.removeprefix("\n") if piece != want else piece for piece, want in zip(pieces, expected, strict=True)
        ]
    assert pieces == expected


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", [name for name in CHATS if "merge" not in name])
def test_llama3(make_tokenizer: MakeTokenizer, name: str, trim_offsets: bool) -> None:
    tokenizer = make_tokenizer("llama3", trim_offsets=trim_offsets, eos_token="<|eot_id|>")
    pieces = trained_pieces(tokenizer, render(tokenizer, CHATS[name]))
    assert pieces == [f"{text.strip()}<|eot_id|>" for text in answers(CHATS[name])]


def test_a_token_across_the_border_of_an_answer_is_trained(make_tokenizer: MakeTokenizer) -> None:
    """The header's line break and the answer's are one token in the full rendering: it holds a word of the answer."""
    tokenizer = make_tokenizer("chatml")
    messages = [user("one?"), answer("\n\nAnswer")]
    rendered = render(tokenizer, messages)
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    whole = tokenizer("<|im_start|>assistant\n\n\nAnswer", add_special_tokens=False)["input_ids"]
    assert whole[: len(header)] != header, "the corpus must make the line breaks merge, or this tests nothing"
    assert trained_pieces(tokenizer, rendered) == ["\n\n\nAnswer<|im_end|>"]


def test_default_system_prompt_is_not_trained(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("default_system")
    rendered = render(tokenizer, CHATS["single"])
    assert "You are a helpful assistant." in tokenizer.decode(rendered.input_ids)
    assert trained_pieces(tokenizer, rendered) == ["Paris is the capital of France.<|im_end|>"]


def test_mistral_has_no_generation_prompt_and_spaces_before_answers(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("mistral", eos_token="</s>", bos_token="<s>")
    pieces = trained_pieces(tokenizer, render(tokenizer, CHATS["several turns"]))
    assert [piece.strip() for piece in pieces] == ["Answer 1.</s>", "Answer 2.</s>", "Three</s>"]


def test_template_without_a_terminator_trains_the_answer_alone_and_says_so(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("plain")
    told: list[str] = []
    renderer = ListRenderer(tokenizer, train_on="assistant", notify=told.append)
    for _ in range(2):
        rendered = renderer(Conversation([user("one?"), answer("two "), user("3?"), answer("four")]), "x:1")
    assert [piece.strip() for piece in trained_pieces(tokenizer, rendered)] == ["two", "four"]
    assert told == ["the chat template ends answers without a special token: the model does not learn to stop"]


def generation_marked(template: str) -> str:
    """The Qwen3 template with the marks its authors left out: the truth the other methods are measured by."""
    marked = template.replace("{#-GENERATION-#}", "{%- generation %}")
    return marked.replace("{#-ENDGENERATION-#}", "{%- endgeneration %}")


THINKING: dict[str, list[Message]] = {
    "reasoning of past turns is dropped": [
        user("one?"),
        answer("<think>\nfirst thought\n</think>\n\nAnswer 1."),
        user("two?"),
        answer("<think>\nsecond thought\n</think>\n\nAnswer 2."),
    ],
    "reasoning in its own field": [
        user("one?"),
        answer("Answer 1.", reasoning_content="first thought"),
        user("two?"),
        answer("Answer 2.", reasoning_content="second thought"),
    ],
    "no reasoning": [user("one?"), answer("Answer 1."), user("two?"), answer("Answer 2.")],
    "same words everywhere": [user("same"), answer("same"), user("same"), answer("same"), user("same"), answer("same")],
    "tools": [
        user("Will it rain?"),
        answer("<think>\nask\n</think>\n\nLet me see.", tool_calls=CALL),
        {"role": "tool", "content": "sunny"},
        answer("<think>\nI know\n</think>\n\nNo."),
        user("And tomorrow?"),
        answer("", tool_calls=CALL * 2),
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "rain"},
        answer("Yes."),
    ],
    "empty answer": [user("one?"), answer(""), user("two?"), answer("Answer 2.")],
    "header quoted": [
        user("one?"),
        answer("a<|im_start|>assistant\nb"),
        user("<|im_start|>assistant\n"),
        answer("<think>\n\n</think>\n\nAnswer 2."),
    ],
}


@pytest.mark.parametrize("name", THINKING)
def test_rewritten_history_is_masked_as_the_template_would_mark_it(bpe: Tokenizer, name: str) -> None:
    template = read_template("qwen3")
    plain, marked = wrap(bpe, template), wrap(bpe, generation_marked(template))
    rendered, truth = render(plain, THINKING[name]), render(marked, THINKING[name])
    assert rendered == truth
    assert "first thought" not in plain.decode(rendered.input_ids)


def test_rewritten_history_keeps_the_words(bpe: Tokenizer) -> None:
    tokenizer = wrap(bpe, read_template("qwen3"))
    rendered = render(tokenizer, THINKING["reasoning of past turns is dropped"])
    assert trained_pieces(tokenizer, rendered) == [
        "Answer 1.<|im_end|>",
        "<think>\nsecond thought\n</think>\n\nAnswer 2.<|im_end|>",
    ]


@pytest.mark.parametrize("template", ["qwen3", "chatml", "chatml_generation"])
def test_chosen_answers_only(bpe: Tokenizer, template: str) -> None:
    tokenizer = wrap(bpe, read_template(template))
    chat = [user("one?"), answer("First", weight=0), user("two?"), answer("Second"), user("3?"), answer("Third")]
    assert [piece[-16:] for piece in trained_pieces(tokenizer, render(tokenizer, chat))] == [
        "Second<|im_end|>",
        trained_pieces(tokenizer, render(tokenizer, chat))[-1][-16:],
    ]
    (last,) = trained_pieces(tokenizer, render(tokenizer, chat, "completion"))
    assert last.endswith("Third<|im_end|>")
    assert "Second" not in last


def test_train_on_all_trains_every_token_but_the_first(tokenizer: PreTrainedTokenizerFast) -> None:
    rendered = render(tokenizer, CHATS["system"], "all")
    assert rendered.labels == [IGNORE_INDEX, *rendered.input_ids[1:]]


def test_marks_that_miss_the_terminator_are_completed(bpe: Tokenizer) -> None:
    marked = read_template("chatml_generation")
    short = marked.replace(
        "{{- message['content'] + '<|im_end|>' }}\n        {%- endgeneration %}",
        "{{- message['content'] }}\n        {%- endgeneration %}\n        {{- '<|im_end|>' }}",
    )
    wide = marked.replace("'<|im_end|>' }}\n        {%- endgen", "'<|im_end|>\\n' }}\n        {%- endgen")
    assert len({marked, short, wide}) == 3
    for template in (short, wide):
        tokenizer = wrap(bpe, template)
        pieces = trained_pieces(tokenizer, render(tokenizer, CHATS["several turns"]))
        assert pieces == ["Answer 1.<|im_end|>", "Answer 2.<|im_end|>", "Three<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "what"),
    [
        # the second answer's words are printed before the first answer as well
        (
            "{{ messages[-1].content }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
            "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "prints the message in one block with",
        ),
        # answers are printed without their words
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content if m.role == 'user' else '') + "
            "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "omits",
        ),
        # answers are printed under a header the generation prompt does not have, and history is rewritten
        (
            "{{ messages | length }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
            "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
            "prints different text before the answer",
        ),
    ],
    ids=["prints an answer twice", "drops answers", "other header"],
)
def test_what_cannot_be_masked_exactly_is_refused(bpe: Tokenizer, template: str, what: str) -> None:
    tokenizer = wrap(bpe, template)
    with pytest.raises(DataError, match=re.escape(what)) as caught:
        render(tokenizer, CHATS["several turns"])
    assert caught.value.where == "x:1"
    assert "{% generation %}" in caught.value.fix


def test_template_that_refuses_the_conversation(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="roles must alternate") as caught:
        render(make_tokenizer("mistral"), [user("one?"), user("two?"), answer("three")])
    assert caught.value.where == "x:1"


def test_half_a_character_in_a_field_the_template_prints(bpe: Tokenizer) -> None:
    tokenizer = wrap(bpe, read_template("qwen3"))
    with pytest.raises(DataError, match="lone surrogate"):
        render(tokenizer, [user("one?"), answer("two", reasoning_content="\ud83d")])


def test_no_template(make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(DataError, match="no chat template") as caught:
        ListRenderer(make_tokenizer(None), train_on="assistant", notify=print)(Conversation(CHATS["single"]), "x:1")
    assert "chatml" in caught.value.fix


# ---------------------------------------------------------------- every template that TRL keeps a copy of

_TRL = importlib.util.find_spec("trl")
TRL_TEMPLATES = sorted((Path(_TRL.origin).parent / "chat_templates").glob("*.jinja")) if _TRL and _TRL.origin else []

TRL_CHATS: dict[str, list[Message]] = {
    "several turns": [user("ask one"), answer("Answer-1."), user("ask two"), answer("Answer-2")],
    "reasoning": [
        user("ask one"),
        answer("Answer-1.", reasoning_content="reason one"),
        user("ask two"),
        answer("Answer-2", reasoning_content="reason two"),
    ],
    "tools": [
        user("ask one"),
        answer("", tool_calls=[{"id": "call00001", **CALL[0]}]),
        {"role": "tool", "content": "result", "name": "weather", "tool_call_id": "call00001"},
        answer("Answer-1."),
        user("ask two"),
        answer("Answer-2"),
    ],
}


@pytest.fixture(scope="module")
def all_special() -> Tokenizer:
    marks = (
        r"<\|[\w/ -]+\|>",  # <|im_end|>
        r"<\uff5c[^\uff5c<>]+\uff5c>",  # DeepSeek's full-width bars
        r"<\|(?:turn|tool_call|tool_response|channel)>|<(?:turn|tool_call|tool_response|channel)\|>",  # Gemma 4
        r"<(?:start|end)_of_(?:turn|utterance)>|</?s>|\[gMASK\]|<sop>",
    )
    found = {token for path in TRL_TEMPLATES for token in re.findall("|".join(marks), path.read_text(encoding="utf-8"))}
    return train_bpe(special=sorted(found | {"<bos>", "<eos>"}))


@pytest.mark.full
@pytest.mark.parametrize("path", TRL_TEMPLATES, ids=lambda path: path.stem)
def test_published_templates_are_masked_exactly_or_refused(all_special: Tokenizer, path: Path) -> None:
    """Nobody but the assistant is trained, every answer is, whatever the template does; or the row is refused."""
    tokenizer = wrap(all_special, path.read_text(encoding="utf-8"), eos_token="<eos>", bos_token="<bos>")
    for messages in TRL_CHATS.values():
        rendered = render_unless_refused(tokenizer, messages)
        if rendered is None:
            continue
        trained = "\0".join(trained_pieces(tokenizer, rendered))
        assert all(text in trained for text in answers(messages))
        assert not re.search("ask|result", trained)


def render_unless_refused(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> Rendered | None:
    try:
        return render(tokenizer, messages)
    except DataError:
        return None


MARKED_PAIRS = [path for path in TRL_TEMPLATES if path.with_stem(f"{path.stem}_training").exists()]


@pytest.mark.parametrize("path", MARKED_PAIRS, ids=lambda path: path.stem)
def test_agrees_with_the_marks_trl_added_by_hand(all_special: Tokenizer, path: Path) -> None:
    """Where the marked copy renders the same text, masks agree but for what TRL marks around a turn.

    That is the line break behind a terminator, the end token of the whole text, and in some the assistant's header.
    """
    options = {"eos_token": "<eos>", "bos_token": "<bos>"}
    plain = wrap(all_special, path.read_text(encoding="utf-8"), **options)
    marked = wrap(all_special, path.with_stem(f"{path.stem}_training").read_text(encoding="utf-8"), **options)
    for messages in TRL_CHATS.values():
        ours = render_unless_refused(plain, messages)
        if ours is None:
            continue
        theirs = marked.apply_chat_template(
            as_shown(plain, messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if theirs["input_ids"] != ours.input_ids:
            continue
        differing = [
            token if bool(mask) != (label != IGNORE_INDEX) else IGNORE_INDEX
            for token, label, mask in zip(ours.input_ids, ours.labels, theirs["assistant_masks"], strict=True)
        ]
        around = r"\s*(<eos>)?|<\|start\|>assistant|<.Assistant.>|<\|tool_response>"
        for piece in trained_pieces(plain, Rendered(ours.input_ids, differing)):
            assert re.fullmatch(around, piece)


def test_marks_inside_of_a_recursive_loop_are_not_taken_for_places_in_the_text() -> None:
    tokenizer = train_tokenizer(["one two three four five six"], vocab_size=300)
    tokenizer.chat_template = (
        "{% for m in messages recursive %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    renderer = ListRenderer(tokenizer, train_on="assistant", notify=print)
    rows = [Conversation([answer("one two")])] * 9 + [Conversation([user("three four"), answer("one two")])]
    renderer.render_contents_ahead(rows)
    last = [renderer(row, "rows.jsonl:1") for row in rows][-1]
    trained = [token for token, label in zip(last.input_ids, last.labels, strict=True) if label != IGNORE_INDEX]
    assert tokenizer.decode(trained) == "one two<|im_end|>"
