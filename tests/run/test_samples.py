"""Samples during training: the run is bit-identical to a run without samples."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamtune.data.reading.builtin import passkey_rows
from streamtune.errors import ArgumentError
from streamtune.models import generate_greedily
from streamtune.train import StopRequest
from tests.distributed.rank_group import run_ranks
from tests.exactness.families import VOCAB, build
from tests.sft_kit import FIXED, QWEN3, RECIPE, run, write_recipe, write_rows

TINY: dict[str, Any] = {
    **RECIPE,
    "model": {"init": {**QWEN3, "attention_dropout": 0.1}},
    "max_length": 256,
    "val_size": 4,
    "engine": FIXED,
    "gradient_accumulation_steps": 3,
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 9,
    "eval_steps": 3,
    "sample": {"prompt": ["Add 3 and 4.", "Add 1."], "max_new_tokens": 6},
}
TIMINGS = ("tokens_per_s", "peak_mem_gib")


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 20)
    write_recipe(tmp_path, TINY)
    return run


def lines(folder: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(folder, name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in found]


def states(folder: str) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return weights, optimizer and random state of every checkpoint, and the final model."""
    files = [*sorted(Path(folder).glob("checkpoints/**/*.safetensors")), Path(folder, "final/model.safetensors")]
    return [(str(path.relative_to(folder)), load_file(path)) for path in files]


def same(first: str, second: str) -> None:
    ours, theirs = states(first), states(second)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    assert any("rng" in name or "rng" in " ".join(tensors) for name, tensors in ours), "the random state is compared"
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine), name


def test_a_greedy_continuation_is_that_of_the_largest_logits() -> None:
    """Whatever the model's generation config has, and up to the end of its table of positions."""
    model = build("gpt2").eval()
    model.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=2)
    prompt = torch.randint(3, VOCAB, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < 128:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generate_greedily(model, prompt, max_new_tokens=40, eos=[], pad=0) == ids[100:]
    with pytest.raises(ArgumentError, match="position table has only 128"):
        generate_greedily(model, ids, max_new_tokens=1, eos=[], pad=0)


@pytest.mark.full
def test_a_run_with_samples_is_bit_for_bit_the_run_without(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--output-dir", "plain") == 0
    assert sft("--output-dir", "sampled", "--set", "sample_steps=1") == 0
    assert lines("sampled") == lines("plain")
    same("sampled", "plain")
    written = lines("sampled", "samples.jsonl")
    assert [(each["step"], each["prompt"]) for each in written] == [
        (step, prompt) for step in range(1, 7) for prompt in TINY["sample"]["prompt"]
    ]
    assert all(each.keys() == {"step", "prompt", "completion"} for each in written)
    assert lines("plain", "samples.jsonl") == written[-2:], "at the end they are written in any case"
    shown = capsys.readouterr().out
    assert 'step=2/6 prompt="Add 1." sample="' in shown


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora", "bf16"])
def test_it_is_so_across_a_resumption_too(sft: Callable[..., int], kind: str) -> None:
    more = {"full": [], "lora": ["finetuning_type=lora", "lora_dropout=0.1", "lora_r=4"], "bf16": ["bf16=true"]}[kind]
    sets = [part for setting in more for part in ("--set", setting)]
    assert sft("--output-dir", "plain", *sets) == 0
    assert sft("--output-dir", "whole", "--set", "sample_steps=2", *sets) == 0
    assert lines("whole") == lines("plain")
    if kind != "lora":
        same("whole", "plain")
    for step in (2, 4):
        folder, checkpoint = f"from-{step}", f"whole/checkpoints/step-{step:06d}"
        assert sft("--output-dir", folder, "--resume", checkpoint, "--set", "sample_steps=2", *sets) == 0
        assert lines(folder) == [record for record in lines("plain") if record["step"] > step]
        assert lines(folder, "samples.jsonl") == [s for s in lines("whole", "samples.jsonl") if s["step"] > step]


@pytest.mark.full
def test_samples_after_the_checkpoint_are_cut_and_written_again(
    sft: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops while it samples after step 3; the checkpoint marks the samples as due, and they come once."""
    whole = ("--set", "sample_steps=1", "--set", "max_steps=4", "--set", "save_steps=0")
    assert sft("--output-dir", "whole", *whole) == 0
    from streamtune.run import train as run_train

    plain = run_train.make_samples

    def interrupted(built: Any, recipe: Any, step: int, stop: StopRequest | None = None) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(built, recipe, step, stop)

    with monkeypatch.context() as patch:
        patch.setattr(run_train, "make_samples", interrupted)
        assert sft("--output-dir", "split", *whole) == 130
    assert [each["step"] for each in lines("split", "samples.jsonl")] == [1, 1, 2, 2]
    with Path("split/samples.jsonl").open("a") as file:  # as if it had been killed after a later step
        file.write('{"step": 4, "prompt": "?", "completion": "lost"}\n{"step": 5, "pro')
    assert sft("--output-dir", "split", *whole) == 0
    assert lines("split", "samples.jsonl") == lines("whole", "samples.jsonl")
    assert lines("split") == lines("whole")


@pytest.mark.full
def test_ranks_sample_together_and_train_the_same(tmp_path: Path) -> None:
    """Rank 0 samples alone if each rank has the whole model; all ranks sample together if they shard the weights."""
    write_rows(tmp_path, 24)
    steps = {"max_steps": 4, "train_batch_size": 4, "gradient_accumulation_steps": 1, "val_size": 0, "eval_steps": 0}
    model = {"init": {**QWEN3, "attention_dropout": 0.0}}
    recipe = {key: value for key, value in {**TINY, **steps, "model": model}.items() if key != "sample"}
    del recipe["gradient_accumulation_steps"]
    write_recipe(tmp_path, {**recipe, "device": "cpu"})
    cases = [
        {"folder": str(tmp_path), "layout": layout, "output": f"{layout}-{name}", "settings": settings}
        for layout in ("ddp", "fsdp", "zero3")
        for name, settings in (
            ("plain", {}),
            ("sampled", {"sample": {"prompt": ["Add 3.", "Add 40 and 2."], "max_new_tokens": 5}, "sample_steps": 1}),
        )
    ]
    found = {json.loads(case)["output"]: result for case, result in
             run_ranks(2, "tests.distributed.state_cases", cases).items()}  # fmt: skip
    for layout in ("ddp", "fsdp", "zero3"):
        plain, sampled = found[f"{layout}-plain"], found[f"{layout}-sampled"]
        assert sampled["losses"] == plain["losses"]
        assert len(sampled["losses"]) == 4
        assert sampled["final"] == plain["final"]
        written = lines(str(tmp_path / f"{layout}-sampled"), "samples.jsonl")
        assert [each["step"] for each in written] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_answers_of_held_out_rows_are_those_of_the_final_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The completions of the three longest held-out rows equal greedy decoding by transformers with the saved model."""
    monkeypatch.chdir(tmp_path)
    keys = {
        **{key: value for key, value in TINY.items() if key not in ("sample", "save_steps")},
        "datasets": [{"path": "demo-passkey", "max_rows": 40}],
        "tokenizer": {"train": {"vocab_size": 400}},
        "max_length": 2048,
        "overlength": "drop",
        "shuffle": False,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "sample": {"held_out": 3},
    }
    write_recipe(tmp_path, keys)
    assert run("--output-dir", "asked") == 0
    printed = capsys.readouterr().out
    found = lines("asked", "samples.jsonl")
    assert [each["step"] for each in found] == [3, 3, 3]
    assert f"answered {sum(each['right'] for each in found)} of 3 held-out rows right" in printed
    lengths = [each["prompt_tokens"] for each in found]
    assert lengths == sorted(lengths, reverse=True)
    model: Any = AutoModelForCausalLM.from_pretrained("asked/final")
    tokenizer: Any = AutoTokenizer.from_pretrained("asked/final")
    rows = {row.origin: row.columns["messages"] for row in passkey_rows(max_rows=40)}
    for each in found:
        asked, answer = rows[each["row"]]
        assert each["expected"] == answer["content"]
        text = tokenizer.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        assert ids.shape[1] == each["prompt_tokens"]
        most = len(tokenizer(answer["content"], add_special_tokens=False).input_ids) + 2
        written = model.generate(ids, do_sample=False, max_new_tokens=most, eos_token_id=tokenizer.eos_token_id)
        text = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        assert each["completion"]
        assert text.startswith(each["completion"])
        assert each["right"] == (each["completion"] == answer["content"])


@pytest.mark.full
def test_rows_in_their_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``shuffle: false`` trains the rows in file order, as the token counts of the steps show."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 20)
    keys = {key: value for key, value in TINY.items() if key not in ("sample", "save_steps", "eval_steps")}
    for name, more in (("own", {"shuffle": False}), ("drawn", {})):
        write_recipe(tmp_path, {**keys, "gradient_accumulation_steps": 1, "val_size": 0, "max_steps": 6, **more})
        assert run("--output-dir", name) == 0
    rows = [json.loads(line)["messages"] for line in Path(RECIPE["datasets"][0]["path"]).read_text().splitlines()]
    tokenizer: Any = AutoTokenizer.from_pretrained("own/final")
    own = [record["tokens"] for record in lines("own") if "loss" in record]
    wanted = [
        len(tokenizer(tokenizer.apply_chat_template(row, tokenize=False), add_special_tokens=False).input_ids)
        for row in rows[:6]
    ]
    assert own == wanted
    assert [record["tokens"] for record in lines("drawn") if "loss" in record] != wanted


def test_the_first_screen_compares_with_plain_autograd_and_checkpointing(
    sft: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft("--dry-run", "--set", "engine.schedule=auto") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory "))
    assert re.fullmatch(r"  memory  .+ of .+ \(checkpointing .+, plain .+; simulated\)", row)
