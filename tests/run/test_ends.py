"""A base that ends its texts with one token, trained on turns that end with another: generation stops at both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from streamtune.base.chat_templates import CHAT_TEMPLATES, read_chat_template
from streamtune.data.templates import ChatRequest, render_chat
from streamtune.models import all_eos_token_ids, train_tokenizer
from streamtune.programs.export.export import ExportOptions, export_model
from streamtune.programs.export.source import find_trained, load_trained
from streamtune.programs.generate.answer import GenerateOptions, load_answerer
from tests.sft_kit import FIXED, QWEN3, run, write_recipe

TEXT_END, TURN_END = "<|endoftext|>", "<|im_end|>"


def save_base(folder: Path, ends: list[str]) -> Any:
    """Save a base that generates until one of ``ends``, with a chat template in its tokenizer."""
    tokenizer = train_tokenizer(["Say it. ok then"] * 8, vocab_size=300)
    tokenizer.eos_token = TEXT_END
    number = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    torch.manual_seed(0)
    config = Qwen3Config(**{**QWEN3, "vocab_size": len(tokenizer), "eos_token_id": number[0]})
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=number[0] if len(number) == 1 else number, top_k=7,
                                               do_sample=True)  # fmt: skip
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


RECIPE: dict[str, Any] = {
    "model_name_or_path": "base",
    "datasets": [{"path": "rows.jsonl"}],
    "engine": FIXED,
    "max_length": 64,
    "learning_rate": 1.0e-2,
    "max_steps": 30,
    "save_steps": 15,
    "per_device_train_batch_size": 4,
    "output_dir": "run",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for asked in ("Say it.", "Say it then.") * 4:
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "ok"}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return tmp_path


def written_ends(folder: str | Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: Any = json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"]
    return list(tokenizer.convert_ids_to_tokens(found if isinstance(found, list) else [found]))


@pytest.mark.full
@pytest.mark.parametrize(("name", "end"), [("llama3", "<|eot_id|>"), ("gpt_oss", "<|return|>"), ("mistral", "")])
def test_the_end_of_a_template_by_name_is_an_end_of_the_model(folder: Path, name: str, end: str) -> None:
    save_base(folder / "base", [TEXT_END])
    form = CHAT_TEMPLATES[name]
    marks = [mark for mark in (*form.marks, form.end) if mark]
    keys = {"chat_template": name, "special_tokens": {"additional_special_tokens": marks}, "max_length": 256}
    write_recipe(folder, {**RECIPE, **keys, "max_steps": 1, "save_steps": 1})
    assert run() == 0
    assert written_ends("run/final") == ([TEXT_END, end] if end else [TEXT_END])
    assert Path("run/final/chat_template.jinja").read_text().strip() == read_chat_template(name)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"finetuning_type": "lora", "lora_r": 32, "learning_rate": 5.0e-2},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_trained_turns_is_in_all_that_is_written(
    folder: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_base(folder / "base", [TEXT_END])
    write_recipe(folder, {**RECIPE, **KINDS[kind], "max_steps": 1, "save_steps": 1})
    assert run() == 0
    shown = " ".join(capsys.readouterr().out.split())
    number = tokenizer.convert_tokens_to_ids(TURN_END)
    assert f"{TURN_END} ({number}), which end the turns that are trained on; in addition to {TEXT_END}" in shown
    for place in ("run/final", "run/checkpoints/step-000001/model"):
        assert written_ends(place) == [TEXT_END, TURN_END]
    own = json.loads(Path("run/final/generation_config.json").read_text())
    assert (own["top_k"], own["do_sample"]) == (7, True), "the rest is the base's own"
    for merge in (True, False) if kind == "lora" else (True,):
        out = folder / f"out-{merge}"
        export_model("run", out, ExportOptions(check=False, merge=merge))
        assert written_ends(out) == [TEXT_END, TURN_END]
        model, own_tokenizer = load_trained(find_trained(str(out)))
        assert number in all_eos_token_ids(model, own_tokenizer)
    model, own_tokenizer = load_trained(find_trained("run"))
    assert number in all_eos_token_ids(model, own_tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_generation_stops_where_the_trained_turns_end(folder: Path, kind: str) -> None:
    tokenizer = save_base(folder / "base", [TEXT_END])
    sample = {"prompt": "Say it.", "max_new_tokens": 9, "held_out": 1}
    write_recipe(folder, {**RECIPE, **KINDS[kind], "sample": sample, "val_size": 1})
    assert run() == 0
    answer = load_answerer("run", GenerateOptions(device="cpu", max_new_tokens=9, temperature=0.0)).answer("Say it.")
    assert (answer.text, answer.finished) == ("ok", True)
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert (samples[-1]["completion"], samples[-1]["right"]) == ("ok", True)
    export_model("run", folder / "out", ExportOptions(check=False))
    model = AutoModelForCausalLM.from_pretrained("out")
    asked = render_chat(tokenizer, ChatRequest([{"role": "user", "content": "Say it."}], generation=True))
    ids = torch.tensor([tokenizer(asked, add_special_tokens=False)["input_ids"]])
    written = model.generate(ids, do_sample=False, max_new_tokens=9)[0, ids.shape[1] :].tolist()
    assert written[-1] == tokenizer.convert_tokens_to_ids(TURN_END)
    assert len(written) < 9, "transformers stops there by itself"


def test_a_base_that_ends_there_already_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_base(folder / "base", [TEXT_END, TURN_END])
    write_recipe(folder, {**RECIPE, "max_steps": 1})
    assert run() == 0
    assert "stops at" not in capsys.readouterr().out
    before, after = (json.loads(Path(each, "generation_config.json").read_text()) for each in ("base", "run/final"))
    assert before == after


def test_a_base_that_trains_on_texts_keeps_its_end(folder: Path) -> None:
    save_base(folder / "base", [TEXT_END])
    Path("rows.jsonl").write_text('{"text": "ok then"}\n' * 8)
    write_recipe(folder, {**RECIPE, "max_steps": 1})
    assert run() == 0
    assert written_ends("run/final") == [TEXT_END]


def test_of_streamed_rows_the_first_are_looked_at(folder: Path) -> None:
    save_base(folder / "base", [TEXT_END])
    write_recipe(folder, {**RECIPE, "max_steps": 1, "streaming": True, "overlength": "drop"})
    assert run() == 0
    assert written_ends("run/final") == [TEXT_END, TURN_END]


@pytest.mark.full
def test_a_policy_stops_at_the_end_of_its_turn(folder: Path) -> None:
    """Supervised steps teach the policy to end turns; with only the base's stop token, completions were truncated."""
    save_base(folder / "base", [TEXT_END])
    row = {"prompt": [{"role": "user", "content": "Say it."}], "completion": [{"role": "assistant", "content": "ok"}]}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    Path("rewards.py").write_text(
        "def turns(completions, **columns):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    grpo = {"reward_funcs": ["rewards.py:turns"], "allow_code": True, "num_generations": 2, "sft_steps": 15,
            "max_completion_length": 8, "max_prompt_length": 48, "max_steps": 1}  # fmt: skip
    recipe = {key: value for key, value in RECIPE.items() if key != "max_length"}
    write_recipe(folder, {**recipe, **grpo})
    assert run(command="grpo") == 0
    assert written_ends("run/final") == [TEXT_END, TURN_END]
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["completions/clipped_ratio"] < 1


@pytest.mark.full
def test_a_policys_checkpoints_have_its_own_settings(folder: Path) -> None:
    """Checkpoints are written during rollouts, and the resumed run keeps its generation settings."""
    save_base(folder / "base", [TEXT_END, TURN_END])
    Path("rows.jsonl").write_text('{"prompt": "Say it."}\n' * 8)
    Path("rewards.py").write_text(
        "def turns(completions, **columns):\n    return [i % 2 for i in range(len(completions))]\n"
    )
    grpo = {"reward_funcs": ["rewards.py:turns"], "allow_code": True, "num_generations": 4, "save_steps": 1, "top_k": 3,
            "max_completion_length": 24, "max_prompt_length": 40, "max_steps": 3, "save_async": True}  # fmt: skip
    recipe = {key: value for key, value in RECIPE.items() if key != "max_length"}
    write_recipe(folder, {**recipe, **grpo, "save_total_limit": 9})
    assert run(command="grpo") == 0
    assert run("--resume", "run/checkpoints/step-000001", "--output-dir", "again", command="grpo") == 0
    own = json.loads(Path("base/generation_config.json").read_text())
    places = [*Path().glob("run/checkpoints/*/model"), *Path().glob("again/checkpoints/*/model"), Path("run/final"),
              Path("again/final")]  # fmt: skip
    assert len(places) >= 7
    for place in places:
        assert json.loads((place / "generation_config.json").read_text()) == own, place


def test_adapters_name_their_base_for_any_directory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base(folder / "base", [TEXT_END])
    write_recipe(folder, {**RECIPE, **KINDS["lora"], "max_steps": 1, "save_steps": 1})
    assert run() == 0
    printed = re.search(r'from_pretrained\("(.*?)"', capsys.readouterr().out)
    assert printed is not None
    for place in ("run/final", "run/checkpoints/step-000001/model"):
        assert json.loads(Path(place, "adapter_config.json").read_text())["base_model_name_or_path"] == str(
            folder / "base"
        )
    loaded = AutoPeftModelForCausalLM.from_pretrained(folder / printed[1])
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    again = AutoPeftModelForCausalLM.from_pretrained("../run/final")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, again(ids).logits)
        ours, _ = load_trained(find_trained("../run"))
        assert torch.allclose(ours(ids).logits, again(ids).logits, atol=1e-6)
    export_model("../run", Path("out"), ExportOptions(check=False, merge=False))
    assert json.loads(Path("out/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder / "base")


def test_adapters_at_other_positions_are_merged_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The base has the old positions, and PEFT would silently load the adapters on a different model."""
    save_base(folder / "base", [TEXT_END])
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_steps": 1}
    write_recipe(folder, {**RECIPE, **KINDS["lora"], **scaled})
    assert run() == 0
    assert "merge the adapters first: they were trained with RoPE settings that the base's" in " ".join(
        capsys.readouterr().out.split()
    )
