"""``StreamTuneCallback`` in the real trainers: the run equals the plain model's, and its logs have the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import streamtune
from streamtune.engine import StreamHandle
from streamtune.errors import ArgumentError, UnsupportedModelError
from streamtune.integrations import StreamTuneCallback
from tests.engine.test_trainers import (
    CHUNK,
    STEPS,
    assert_same_run,
    fp64,
    hf_trainer,
    longest_piece,
    losses,
    model_for,
    rows,
    sft_trainer,
    tokenizer,
    weights,
)

__all__ = ["fp64", "tokenizer"]  # fixtures


def is_streamed(model: Any) -> bool:
    try:
        return bool(StreamHandle.of(model))
    except ArgumentError:
        return False


def trained(trainer: Trainer, callback: StreamTuneCallback) -> Trainer:
    trainer.add_callback(callback)
    trainer.train()
    return trainer


@pytest.mark.usefixtures("fp64")
@pytest.mark.quick("whole")
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_the_run_is_that_of_the_plain_model(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lora: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        model = model_for(tokenizer)
        return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if lora else model

    plain = hf_trainer(made(), tokenizer, tmp_path)
    before = weights(plain.model)
    plain.train()

    callback = StreamTuneCallback(chunk_size=CHUNK, max_length=64)
    streamed = trained(hf_trainer(made(), tokenizer, tmp_path), callback)
    assert_same_run(streamed, plain, before)
    assert (callback.handle, is_streamed(streamed.model)) == (None, False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("StreamTune")]
    assert line.startswith(f"StreamTune: chunks of {CHUNK} tokens, head ")
    assert "; predicted peak " in line


def test_every_log_of_training_has_the_figures(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path, eval_strategy="steps", eval_steps=1)
    callback = StreamTuneCallback(chunk_size=CHUNK, max_length=64)
    history = trained(trainer, callback).state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert len(steps) == STEPS
    assert callback.plan is not None
    for entry in steps:
        assert entry["stream_chunk_size"] == CHUNK
        assert 0.01 < entry["peak_mem_gib"] < 100
        assert entry["predicted_peak_gib"] == callback.plan.simulation.peak_bytes / 2**30 > 0
    assert not any("peak_mem_gib" in entry for entry in history if "loss" not in entry)


class Recorder(TrainerCallback):
    """A tracker that stores its logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        self.logs.append(dict(logs))


@pytest.mark.full
@pytest.mark.parametrize("attached", [True, False])
def test_attached_in_front_trackers_have_the_figures_too(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, attached: bool
) -> None:
    trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path)
    tracker = Recorder()
    trainer.add_callback(tracker)
    callback = StreamTuneCallback(chunk_size=CHUNK)
    if attached:
        assert callback.attach(trainer) is callback
    else:
        trainer.add_callback(callback)
    trainer.train()
    assert ["peak_mem_gib" in logs for logs in tracker.logs if "loss" in logs] == [attached] * STEPS


@pytest.mark.full
def test_the_planner_chooses_under_autocast(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """With ``bf16`` accelerate replaces ``forward`` before training begins."""
    runs = []
    for callbacks in ([], [StreamTuneCallback(max_length=64)]):
        trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path, bf16=True)
        for callback in callbacks:
            trained(trainer, callback)
            assert callback.plan is not None
            assert callback.plan.fits
        if not callbacks:
            trainer.train()
        runs.append(losses(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=2e-2)


@pytest.mark.full
def test_weights_that_would_lose_small_steps_are_told(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = StreamTuneCallback(chunk_size=CHUNK, max_length=64)
    trained(hf_trainer(model_for(tokenizer).bfloat16(), tokenizer, tmp_path, max_steps=1), callback)
    said = capsys.readouterr().out
    assert "trained weights are bfloat16, so each updated weight is rounded to the nearest bfloat16 number" in said
    assert "TrainingArguments(bf16=True)" in said
    trained(hf_trainer(model_for(tokenizer), tokenizer, tmp_path, max_steps=1, bf16=True), callback)
    assert "rounded to the nearest" not in capsys.readouterr().out


@pytest.mark.full
def test_without_a_length_the_planner_is_told_nothing(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="needs the length of the longest row"):
        trained(hf_trainer(model_for(tokenizer), tokenizer, tmp_path), StreamTuneCallback())
    callback = StreamTuneCallback(streamtune.Schedule(chunk_size=CHUNK))
    trained(hf_trainer(model_for(tokenizer), tokenizer, tmp_path), callback)
    assert callback.plan is None


def test_what_does_not_fit_is_refused_before_the_first_step(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path)
    with pytest.raises(ArgumentError, match="fit"):
        trained(trainer, StreamTuneCallback(max_length=64, device_memory="64KiB"))
    assert trainer.state.global_step == 0
    assert not is_streamed(trainer.model)


def test_a_schedule_and_a_chunk_size_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="exclude each other"):
        StreamTuneCallback(streamtune.Schedule(), chunk_size=8)


def test_a_model_that_is_streamed_already_stays_so(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_for(tokenizer)
    with streamtune.stream(model, chunk_size=CHUNK) as handle:
        trainer = trained(hf_trainer(model, tokenizer, tmp_path), StreamTuneCallback(chunk_size=3, max_length=64))
        assert StreamHandle.of(model) is handle
    assert trainer.state.log_history[0]["stream_chunk_size"] == CHUNK
    assert "streamed before training began" in capsys.readouterr().out
    assert longest_piece(model) <= CHUNK


@pytest.mark.full
def test_an_error_in_training_and_the_next_training(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            raise KeyboardInterrupt

    trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path)
    callback, fails = StreamTuneCallback(chunk_size=CHUNK), Fails()
    trainer.add_callback(fails)
    with pytest.raises(KeyboardInterrupt):
        trained(trainer, callback)
    trainer.remove_callback(fails)
    trainer.train()
    assert len(losses(trainer)) >= STEPS
    assert not is_streamed(trainer.model)
    callback.remove()


@pytest.mark.quick("FSDP")
@pytest.mark.parametrize("wrapper", ["DeepSpeed", "FSDP"])
def test_weights_that_are_distributed_already_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, wrapper: str
) -> None:
    trainer = hf_trainer(model_for(tokenizer), tokenizer, tmp_path)
    if wrapper == "FSDP":
        trainer.args.fsdp = True
    else:
        trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}
    given = {"model": trainer.model}
    with pytest.raises(UnsupportedModelError, match=f"{wrapper} has already sharded the weights"):
        StreamTuneCallback(chunk_size=CHUNK).on_train_begin(trainer.args, trainer.state, trainer.control, **given)


@pytest.mark.full
@pytest.mark.usefixtures("fp64")
def test_trl_sft_plans_for_its_own_length(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    plain = sft_trainer(model_for(tokenizer), tokenizer, tmp_path)
    before = weights(plain.model)
    plain.train()
    callback = StreamTuneCallback(chunk_size=CHUNK)
    streamed = trained(sft_trainer(model_for(tokenizer), tokenizer, tmp_path), callback)
    assert_same_run(streamed, plain, before)
    assert callback.plan is not None  # for max_length of SFTConfig


def trl_trainer(kind: str, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Trainer:
    common = {"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    common |= {
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 5,
    }
    if kind == "dpo":
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in rows()]
        config = DPOConfig(**common, max_length=64)
        return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    config = GRPOConfig(**common, max_completion_length=6, num_generations=2, beta=0.0)
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in rows()])

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

    return GRPOTrainer(model, even, config, train_dataset=prompts, processing_class=tokenizer)


@pytest.mark.full
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_trl_dpo_and_grpo(kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model_for(tokenizer).save_pretrained(tmp_path / "model")  # DPO loads the reference from where the model came from

    def made() -> Trainer:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        return trl_trainer(kind, model, tokenizer, tmp_path)

    plain = made()
    plain.train()
    callback = StreamTuneCallback(chunk_size=CHUNK)
    streamed = trained(made(), callback)
    assert losses(streamed) == pytest.approx(losses(plain), rel=1e-9, abs=1e-12)
    ours, theirs = weights(streamed.model), weights(plain.model)
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert worst < 1e-9
    assert (callback.plan is not None) == (kind == "dpo")  # GRPO's prompts have no limit
