"""Answers: the tokens that ``generate`` alone would write, whatever is read in chunks or known from the turn before."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from streamtune.data.options import ChatOptions
from streamtune.data.reading.readers import Row
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import normalise_row
from streamtune.errors import ArgumentError
from streamtune.programs.generate import answer as answering
from streamtune.programs.generate.answer import (
    Answer,
    Answerer,
    GenerateOptions,
    PromptEncoder,
    _Printer,
    load_answerer,
)
from streamtune.programs.generate.generate_command import _print_speed
from streamtune.programs.generate.prompt_files import read_prompts
from tests.conformance.reducer import build as build_any
from tests.exactness.families import FAMILIES, build
from tests.programs.export.cases import make_base, tokenizer, write_run

ASKED = "return a + b\n" * 4
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 10, "device": "cpu"}


def answerer(model: Any, **options: Any) -> Answerer:
    return Answerer(model, tokenizer(), GenerateOptions(**{**GREEDY, **options}), "a model")


def plain(model: Any, ids: list[int], count: int = 10) -> list[int]:
    """The same by ``generate`` alone, the prompt at once."""
    output = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=0,
    )
    return output[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.quick("llama", "mistral", "mamba2")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "mixtral", "qwen3_next", "mamba2"])
def test_read_in_chunks_and_turn_by_turn(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PREFILL_CHUNK", 7)
    longer = {"max_position_embeddings": 512} if family == "gpt2" else {}
    model = build(family, vocab_size=259, **longer).eval() if family in FAMILIES else widened_vocabulary(family)
    reader, tok = answerer(model), tokenizer()
    messages: list[dict[str, Any]] = []
    for turn in ("return a", "return b + a", "a b"):
        messages.append({"role": "user", "content": turn})
        ids = reader.encode(messages)
        pieces: list[str] = []
        answer = reader.answer(messages, pieces.append)
        assert answer.text == tok.decode(plain(model, ids), skip_special_tokens=True)
        assert "".join(pieces) == answer.text
        assert answer.prompt_tokens == len(ids)
        messages.append({"role": "assistant", "content": answer.text})
        if turn != "return a" and family in ("llama", "gpt2", "mixtral"):
            assert answer.read_tokens < len(ids)  # the turns before are known
    reader.clear_cache()
    assert reader.answer(messages[:1]).read_tokens == len(reader.encode(messages[:1]))


def test_keys_of_other_rotary_frequencies_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that grows beyond the length from which frequencies depend on it, and a shorter one after it."""
    monkeypatch.setattr(answering, "PREFILL_CHUNK", 7)
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}

    def make() -> Any:
        limits = {"max_position_embeddings": 64, "initializer_range": 0.5}
        return build("llama", vocab_size=259, rope_parameters=parameters, **limits).eval()

    reader = answerer(make())
    first, longer = "return a", "return a" + " + b" * 20
    for text in (first, longer, first):
        ids = reader.encode(text)
        assert reader.answer(text).text == tokenizer().decode(plain(make(), ids), skip_special_tokens=True)


def widened_vocabulary(family: str) -> Any:
    model = build_any(family).eval()
    model.resize_token_embeddings(259)
    return model


def test_a_prompt_is_read_in_chunks_and_its_progress_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "PREFILL_CHUNK", 16)
    reader = answerer(build("llama", vocab_size=259).eval())
    told: list[tuple[int, int]] = []
    answer = reader.answer(ASKED, reading=lambda done, total: told.append((done, total)))
    last = answer.prompt_tokens - 1
    assert told == [(done, last) for done in [*range(0, last, 16), last]]


def test_a_stop_ends_the_answer_and_the_next_one_is_whole() -> None:
    model = build("llama", vocab_size=259).eval()
    reader = answerer(model, max_new_tokens=40)

    def stop(text: str) -> None:
        reader.stopping = True

    stopped: Answer = reader.answer(ASKED, stop)
    assert stopped.stopped
    assert not stopped.finished
    assert 0 < stopped.tokens < 40
    again = reader.answer(ASKED)
    assert again.text == tokenizer().decode(plain(model, reader.encode(ASKED), 40), skip_special_tokens=True)


def test_a_table_of_positions_ends_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("gpt2", vocab_size=259).eval()
    reader = answerer(model, max_new_tokens=100)
    answer = reader.answer(ASKED)
    assert answer.prompt_tokens + answer.tokens <= 128
    _print_speed(answer, 100)
    assert "truncated at the end of the model's position table" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ArgumentError, match="position table has only 128"):
        reader.answer(ASKED * 4)


def test_lines_are_shown_with_their_first_space() -> None:
    """Tokenizers of SentencePiece's kind remove a space at the beginning of a decoded text."""
    tokens = ["<unk>", "<0x0A>", "▁def", ":", "▁▁▁", "▁", "return", "▁x"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tok = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    ids = [2, 3, 1, 4, 5, 6, 7, 1, 1, 5, 6]
    pieces: list[str] = []
    printer = _Printer(tok, pieces.append)
    for given in ([0], *([token] for token in ids)):  # the prompt comes first
        printer.put(torch.tensor(given))
    printer.end()
    assert "".join(pieces) == tok.decode(ids) == "def:\n    return x\n\n return"


def test_settings_of_the_draw() -> None:
    model = build("llama", vocab_size=259).eval()
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20)
    free = {"temperature": None}
    assert (answerer(model, **free).sampling.temperature, answerer(model, **free).sampling.top_k) == (0.6, 20)
    assert answerer(model, temperature=0.1, top_k=3).sampling.top_k == 3
    model.generation_config.update(do_sample=False)
    assert (answerer(model, **free).sampling.temperature, answerer(model, **free).sampling.top_k) == (0.7, 0)
    drawn = [answerer(model, temperature=2.0, seed=seed).answer(ASKED).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_of_each_form() -> None:
    reader = answerer(build("llama", vocab_size=259).eval(), system="Be brief.")
    tok = tokenizer()
    assert tok.decode(reader.encode("a")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Be brief" not in tok.decode(reader.encode([{"role": "system", "content": "x"}]))
    raw = answerer(build("llama", vocab_size=259).eval(), raw=True)
    assert tok.decode(raw.encode("a b")) == "a b"
    with pytest.raises(ArgumentError, match="--raw needs plain text, found messages"):
        raw.encode([{"role": "user", "content": "a"}])
    with pytest.raises(ArgumentError, match="the prompt is empty"):
        raw.encode("")
    with pytest.raises(ArgumentError, match="the model has 97 embeddings"):
        answerer(make_base("llama")).encode("zzz")


def test_a_system_message_that_nothing_renders_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "llama", "full", vocab_size=259)
    final = tmp_path / "run/final"
    with pytest.raises(ArgumentError, match="needs the chat template, but --raw leaves it out"):
        load_answerer(str(final), GenerateOptions(**GREEDY, system="Be brief.", raw=True))
    plain_text = deepcopy(tokenizer())
    plain_text.chat_template = None
    (final / "chat_template.jinja").unlink(missing_ok=True)
    plain_text.save_pretrained(final)
    with pytest.raises(ArgumentError, match="but this model's tokenizer has none"):
        load_answerer(str(final), GenerateOptions(**GREEDY, system="Be brief."))
    assert load_answerer(str(final), GenerateOptions(**GREEDY)).answer("a").tokens > 0


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ lead }}{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "q <|im_end|>"},
        CALL,
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "chat_template_kwargs": {"lead": "own"},
}


@pytest.mark.parametrize("splits", [False, True])
def test_a_prompt_of_a_file_is_the_beginning_of_the_row_that_was_trained(splits: bool, tmp_path: Path) -> None:
    """Tools, variables, system message and special tokens in the text, token for token."""
    tok = deepcopy(tokenizer())
    tok.chat_template = TEMPLATE
    chat = ChatOptions(default_system="Be brief.", variables={"lead": "all"}, split_special_tokens=splits)
    renderer = RowRenderer(tok, train_on="last", notify=print, chat=chat)
    trained = renderer(normalise_row(Row("x:1", ROW), "messages"), "x:1")
    first = [label >= 0 for label in trained.labels].index(True)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    [asked] = read_prompts(tmp_path / "rows.jsonl")
    options = {"system": "Be brief.", "variables": {"lead": "all"}, "split_special_tokens": splits}
    encode = PromptEncoder(tok, GenerateOptions(**options))
    assert tok.decode(encode(asked)).endswith("assistant\nown")
    assert encode(asked)[:first] == list(trained.input_ids)[:first]
    assert encode("a <|im_end|>").count(tok.convert_tokens_to_ids("<|im_end|>")) == (2 if splits else 3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lora", "nf4", "int8"])
def test_adapters_and_quantised_bases_as_they_trained(kind: str, tmp_path: Path) -> None:
    pytest.importorskip({"nf4": "bitsandbytes", "int8": "torchao"}.get(kind, "torch"))
    model = write_run(tmp_path, "llama", kind, vocab_size=259)
    reader = load_answerer(str(tmp_path / "run"), GenerateOptions(**GREEDY))
    ids = reader.encode(ASKED)
    assert reader.answer(ASKED).text == tokenizer().decode(plain(model, ids), skip_special_tokens=True)
    assert ("linear layers in" in reader.description) == (kind != "lora")
