"""The needle probe: what its prompts are, and that its figures are those of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamtune.cli import main
from streamtune.data import ChatOptions, Source, first_chat_context
from streamtune.errors import ArgumentError
from streamtune.models import load_tokenizer
from streamtune.programs.evaluate.needle import Haystack, _draw_trial, default_lengths, gather_haystack
from tests.programs.export.cases import tokenizer as make_tokenizer
from tests.sft_kit import FIXED, RECIPE, run, write_recipe, write_rows


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["eval", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.mark.full
@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.full)], ids=["messages", "text"])
def test_figures_equal_those_of_transformers(
    chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if chat:
        write_rows(tmp_path, 12)
    else:
        texts = (f"def f{number}(a):\n    return a + {number}\n" * 9 for number in range(12))
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_recipe(tmp_path, {**RECIPE, "max_length": 512, "val_size": 4, "engine": FIXED, "max_steps": 1})
    assert run() == 0
    options = ["--needle", "--needle-lengths", "256,320", "--needle-depths", "0,100", "--needle-trials", "2"]
    code, shown, _ = evaluated(capsys, "runs/tiny", *options, "--json")
    assert code == 0
    found = json.loads(shown)["needle"]
    assert found["chat"] is chat
    assert [(cell["length"], cell["depth"]) for cell in found["cells"]] == [(256, 0), (256, 100), (320, 0), (320, 100)]
    assert (tmp_path / "runs/tiny/eval/needle.png").read_bytes().startswith(b"\x89PNG")

    tokenizer = load_tokenizer("runs/tiny/final")
    model = AutoModelForCausalLM.from_pretrained("runs/tiny/final").eval()
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    texts = [m["content"] for row in rows for m in row["messages"]] if chat else [row["text"] for row in rows]
    stack = gather_haystack(texts, tokenizer, chat=chat, tokens=640, notify=lambda text: None)
    for cell in found["cells"]:
        gains, matched = [], 0
        for number in range(2):
            trial = _draw_trial(stack, cell["length"], 42, number)
            assert trial is not None
            prompt = stack.prompt(trial.needle, trial.question, trial.start, trial.hay, cell["depth"])
            assert len(prompt) + len(trial.answer) == cell["length"]
            without = stack.prompt([], trial.question, trial.start, trial.hay + len(trial.needle), 0.0)
            assert len(without) == len(prompt)
            one, other = (plain_logprob(model, ids, trial.answer) for ids in (prompt, without))
            gains.append(one - other)
            ids = torch.tensor([prompt])
            end = tokenizer.eos_token_id
            written = model.generate(ids, max_new_tokens=len(trial.answer) + 8, do_sample=False, eos_token_id=end)
            text = tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True)
            matched += text.split()[:1] == [trial.code]
        assert cell["gain"] == pytest.approx(sum(gains) / 2, abs=2e-5)
        assert cell["matched"] == matched

    code, shown, _ = evaluated(capsys, "runs/tiny", *options)
    assert code == 0
    assert "needle, by depth and length" in shown
    again = json.loads((tmp_path / "runs/tiny/eval/eval.json").read_text())["needle"]
    assert again == found


@pytest.mark.full
def test_a_code_that_is_known_by_heart_matches_and_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trial = _draw_trial(haystack(), 256, 42, 0)
    assert trial is not None
    known = "".join(map(chr, [*trial.question, *trial.answer]))
    hay = "def f(a):\n    return a\n"
    texts = [hay * count + known for count in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"engine": FIXED, "per_device_train_batch_size": 4, "max_steps": 80}
    write_recipe(tmp_path, {**RECIPE, "max_length": 512, **settings})
    assert run() == 0
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": hay * 15}) + "\n")
    arguments = ["--split", "train", "--needle", "--needle-lengths", "256", "--needle-trials", "1"]
    code, shown, problem = evaluated(capsys, "runs/tiny/final", "tiny.yaml", *arguments, "--json")
    assert code == 0, problem
    cells = json.loads(shown)["needle"]["cells"]
    assert sum(cell["matched"] for cell in cells) >= 3
    assert all(cell["logprob_without"] > -0.5 for cell in cells)
    assert all(cell["gain"] < 0.5 for cell in cells)


@pytest.mark.full
def test_a_completion_ends_with_the_table_of_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of all positions leaves room for the answer alone."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 12)
    shape = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    changes = {"model": {"init": shape}, "max_length": 256, "val_size": 2, "engine": FIXED, "max_steps": 1}
    write_recipe(tmp_path, {**RECIPE, **changes})
    assert run() == 0
    options = ["--needle", "--needle-lengths", "256", "--needle-depths", "0", "--needle-trials", "1", "--json"]
    code, shown, problem = evaluated(capsys, "runs/tiny", *options)
    assert code == 0, problem
    assert [cell["length"] for cell in json.loads(shown)["needle"]["cells"]] == [256]


def plain_logprob(model: Any, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    logprobs = logits.double().log_softmax(-1)
    return float(logprobs[torch.arange(len(answer)), torch.tensor(answer)].mean())


class _Letters:
    """Knows which letter is which token, so that prompts can be read."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def haystack() -> Haystack:
    return gather_haystack(["straw " * 50], _Letters(), chat=True, tokens=400, notify=lambda text: None)


def test_the_needle_is_where_its_depth_says() -> None:
    stack = haystack()
    trial = _draw_trial(stack, 600, 1, 0)
    assert trial is not None
    for depth in (0.0, 50.0, 100.0):
        text = "".join(map(chr, stack.prompt(trial.needle, trial.question, trial.start, trial.hay, depth)))
        assert text.count(trial.code) == 1
        before = text.index("\nThe access code of the")
        assert before == round(trial.hay * depth / 100)
        assert text.endswith(" is")
    without = "".join(map(chr, stack.prompt([], trial.question, trial.start, trial.hay + len(trial.needle), 0.0)))
    assert trial.code not in without


def test_trials_are_drawn_from_seed_length_and_number() -> None:
    stack = haystack()
    assert _draw_trial(stack, 600, 1, 0) == _draw_trial(stack, 600, 1, 0)
    codes = {
        found.code
        for arguments in ((600, 1, 0), (600, 1, 1), (600, 2, 0), (601, 1, 0))
        if (found := _draw_trial(stack, *arguments))
    }
    assert len(codes) == 4
    assert _draw_trial(stack, 100, 1, 0) is None


def test_default_lengths() -> None:
    assert default_lengths(8192) == (1024, 2048, 4096, 8192)
    assert default_lengths(300) == (64, 128, 256)
    with pytest.raises(ArgumentError):
        gather_haystack([], _Letters(), chat=False, tokens=9, notify=lambda text: None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--needle", "--needle-lengths", "12,x"], "must be numbers of tokens, found 'x'"),
        (["--needle", "--needle-depths", "101"], "must be percentages from 0 to 100, found '101'"),
        (["--needle-lengths", "512"], "--needle-lengths and --needle-depths need --needle"),
    ],
)
def test_wrong_options(options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, shown = evaluated(capsys, str(tmp_path), *options)
    assert code == 2
    assert words in " ".join(shown.split())


def test_needles_are_asked_as_the_first_conversation_is(tmp_path: Path) -> None:
    """With its system message, tools and variables of the template, behind the recipe's own."""
    tokenizer = deepcopy(make_tokenizer())
    tokenizer.chat_template = (
        "{{ lead }}{{ other }}{% for tool in tools or [] %}{{ tool.name }}\n{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    chat = ChatOptions(default_system="Recipe.", variables={"lead": "L", "other": "O"})
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = {
        "own": {
            "messages": [{"role": "system", "content": "Row."}, *answered],
            "tools": [{"name": "f"}],
            "chat_template_kwargs": {"lead": "R"},
        },
        "default": {"messages": answered},
        "prompt": {"prompt": answered[:1], "tools": [{"name": "f"}]},
        "text": {"text": "plain"},
    }
    want = {
        "own": "ROf\n<system>Row.<user>",
        "default": "LO<system>Recipe.<user>",
        "prompt": "LOf\n<system>Recipe.<user>",
        "text": "LO<user>",
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": 3}) + "\n" + json.dumps(row) + "\n")
        sources = [Source(str(tmp_path / f"{name}.jsonl"), type="auto" if "messages" not in row else "messages")]
        if "messages" not in row:
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
        frame = first_chat_context(sources, chat)
        stack = gather_haystack(["hay " * 9], tokenizer, chat=True, tokens=9, notify=print, frame=frame)
        assert tokenizer.decode(stack.head) == want[name]
        assert tokenizer.decode(stack.tail) == "<a>"
