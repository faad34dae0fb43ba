"""``stream(model)`` inside other people's trainers: the same losses and the same weights as without it.

The trainers are real and so are their backward, accumulation, clipping and optimizer; only the model is streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import streamtune
from streamtune.engine import decoder_layers
from streamtune.errors import UnsupportedModelError
from tests.exactness.families import batch, build
from tests.precision_kit import Float64
from tests.vision_kit import processor_of, save_checkpoint

CHUNK = 7
STEPS = 3


@pytest.fixture
def fp64() -> Iterator[None]:
    """Both runs are computed in fp64 throughout, so that they differ by nothing but a mistake."""
    with Float64():
        yield


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a handful of merges, trained on the rows below."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([row["prompt"] + row["completion"] for row in rows()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def rows(count: int = 16) -> list[dict[str, str]]:
    """Prompts and completions of unequal length."""
    return [
        {
            "prompt": f"{n} times {n % 5} " + "is " * (1 + n % 3),
            "completion": f"{n * (n % 5)}" + " indeed" * (n % 4) + ".",
        }
        for n in range(count)
    ]


def token_rows(tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The rows as ids, labels masked over the prompt."""
    out = []
    for row in rows():
        prompt, completion = (tokenizer(row[part])["input_ids"] for part in ("prompt", "completion"))
        ids = [*prompt, *completion, tokenizer.eos_token_id]
        out.append(
            {"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :], "attention_mask": [1] * len(ids)}
        )
    return Dataset.from_list(out)


def model_for(tokenizer: PreTrainedTokenizerFast, family: str = "qwen3") -> PreTrainedModel:
    """A tiny model that notes the longest piece of a row its feed-forward layers are given at once."""
    dtype = torch.get_default_dtype()
    model = build(family, dtype=dtype, vocab_size=len(tokenizer), max_position_embeddings=256)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(streamtune.chunkwise(note_length))
    return model


def note_length(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
    module.longest = max(getattr(module, "longest", 0), args[0].shape[1])
    module.calls = getattr(module, "calls", 0) + 1


def longest_piece(model: Any) -> int:
    """Tokens of a row that went through a feed-forward layer at once."""
    return max(getattr(module, "longest", 0) for module in model.modules())


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments both trainers take. SGD, since AdamW makes a full step of a gradient that is zero but for rounding."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.3,
        "optim": "sgd",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 5,
        **more,
    }


def hf_trainer(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, **more: Any) -> Trainer:
    data = token_rows(tokenizer)
    collate = DataCollatorForSeq2Seq(tokenizer, padding=True)
    arguments = TrainingArguments(**settings(folder, **more))
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=collate)


def sft_trainer(
    model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, peft_config: Any = None, **more: Any
) -> SFTTrainer:
    data = Dataset.from_list(rows())
    arguments = SFTConfig(
        **{**settings(folder), "bf16": False, "gradient_checkpointing": False, "max_length": 64, **more}
    )
    return SFTTrainer(
        model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer, peft_config=peft_config
    )


def losses(trainer: Trainer) -> list[float]:
    """The loss of every optimizer step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_run(
    got: Trainer, want: Trainer, before: dict[str, Tensor], *, loss: float = 1e-9, update: float = 1e-9
) -> None:
    """Losses within ``loss`` (relative), weights within ``update`` of the size of the whole update."""
    assert len(losses(got)) == STEPS
    assert losses(got) == pytest.approx(losses(want), rel=loss)
    ours, theirs = weights(got.model), weights(want.model)
    assert ours.keys() == theirs.keys()
    moved = torch.stack([(theirs[name] - before[name]).double().norm() for name in before]).norm()
    assert moved > 0.1
    assert longest_piece(want.model) > CHUNK >= longest_piece(got.model)
    off = torch.stack([(ours[name] - theirs[name]).double().norm() for name in theirs]).norm()
    assert off <= update * moved, float(off / moved)


@pytest.mark.usefixtures("fp64")
@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_hugging_face_trainer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str) -> None:
    plain = hf_trainer(model_for(tokenizer, family), tokenizer, tmp_path)
    before = weights(plain.model)
    plain.train()

    model = model_for(tokenizer, family)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = hf_trainer(model, tokenizer, tmp_path)
        streamed.train()
    assert_same_run(streamed, plain, before)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_streaming_stands_in_the_place_of_checkpointing(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, reentrant: bool
) -> None:
    """Left on in the arguments it changes nothing: the same bits, and no layer runs once more than without."""
    runs = []
    for more in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}):
        model = model_for(tokenizer)
        with streamtune.stream(model, chunk_size=CHUNK):
            trainer = hf_trainer(model, tokenizer, tmp_path, **more)
            trainer.train()
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == bool(more)
        runs.append((losses(trainer), weights(model), [layer.mlp.calls for layer in model.model.layers]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
    assert runs[0][2] == runs[1][2]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_hugging_face_trainer_under_bf16_autocast(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, family: str
) -> None:
    """Against the fp32 run: two bf16 runs round in different places and agree no better with each other."""
    exact = hf_trainer(model_for(tokenizer, family), tokenizer, tmp_path)
    before = weights(exact.model)
    exact.train()
    model = model_for(tokenizer, family)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = hf_trainer(model, tokenizer, tmp_path, bf16=True)
        streamed.train()
    assert_same_run(streamed, exact, before, loss=2e-3, update=2e-2)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.full
@pytest.mark.usefixtures("fp64")
def test_evaluation_in_the_hugging_face_trainer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Evaluated between the steps and afterwards, the last batch smaller than the others."""
    plain = hf_trainer(model_for(tokenizer), tokenizer, tmp_path, eval_strategy="steps", eval_steps=1)
    before = weights(plain.model)
    plain.train()
    model = model_for(tokenizer)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = hf_trainer(model, tokenizer, tmp_path, eval_strategy="steps", eval_steps=1)
        streamed.train()
        last = streamed.evaluate()["eval_loss"]
    assert_same_run(streamed, plain, before)
    got, want = ([log["eval_loss"] for log in t.state.log_history if "eval_loss" in log] for t in (streamed, plain))
    assert len(want) == STEPS
    assert got == pytest.approx([*want, want[-1]], rel=1e-9)
    assert last == got[-1]


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("head", [True, False])
def test_predictions(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, head: bool) -> None:
    plain, model = model_for(tokenizer), model_for(tokenizer)
    data = token_rows(tokenizer)
    want = hf_trainer(plain, tokenizer, tmp_path).predict(data)
    with streamtune.stream(model, chunk_size=CHUNK, head=head):
        got = hf_trainer(model, tokenizer, tmp_path).predict(data)
    torch.testing.assert_close(torch.tensor(got.predictions), torch.tensor(want.predictions), rtol=1e-9, atol=1e-12)
    assert got.metrics["test_loss"] == pytest.approx(want.metrics["test_loss"], rel=1e-9)


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("chosen", [False, True])
def test_metrics(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, chosen: bool) -> None:
    """``compute_metrics`` is given the logits, or what ``preprocess_logits_for_metrics`` makes of them."""

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        best = prediction.predictions if chosen else prediction.predictions.argmax(-1)
        wanted = prediction.label_ids[:, 1:]
        return {"accuracy": float((best[:, :-1] == wanted)[wanted != -100].mean())}

    found = []
    for streamed in (False, True):
        model = model_for(tokenizer)
        trainer = hf_trainer(model, tokenizer, tmp_path)
        trainer.compute_metrics = accuracy
        if chosen:
            trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(dim=-1)
        with streamtune.stream(model, chunk_size=CHUNK) if streamed else nullcontext():
            found.append(trainer.evaluate())
    for name in ("eval_accuracy", "eval_loss"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-9), name


@pytest.mark.full
def test_after_removal_the_model_trains_and_generates_as_its_own(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    plain, model = model_for(tokenizer), model_for(tokenizer)
    handle = streamtune.stream(model, chunk_size=CHUNK)
    hf_trainer(model, tokenizer, tmp_path).train()
    handle.remove()
    model.load_state_dict(plain.state_dict())

    trainers = [hf_trainer(m, tokenizer, tmp_path) for m in (model, plain)]
    for trainer in trainers:
        trainer.train()
    assert losses(trainers[0]) == losses(trainers[1])
    theirs = weights(plain)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(model).items())
    prompt = tokenizer(rows()[7]["prompt"], return_tensors="pt", return_token_type_ids=False)
    texts = [m.generate(**prompt, max_new_tokens=8, do_sample=False) for m in (model.eval(), plain.eval())]
    assert torch.equal(texts[0], texts[1])


@pytest.mark.quick("packing")
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_checkpointing": True},
        {"completion_only_loss": False},
        {"per_device_train_batch_size": 3, "padding_free": True, "max_length": None},
        {"packing": True, "max_length": 48, "per_device_train_batch_size": 1},
    ],
    ids=["completion", "checkpointing", "everything", "padding_free", "packing"],
)
def test_sft_trainer(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, more: dict[str, Any]) -> None:
    reference = {key: value for key, value in more.items() if key != "gradient_checkpointing"}
    plain = sft_trainer(model_for(tokenizer), tokenizer, tmp_path, **reference)
    before = weights(plain.model)
    plain.train()

    model = model_for(tokenizer)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = sft_trainer(model, tokenizer, tmp_path, **more)
        streamed.train()
        evaluated = streamed.evaluate()["eval_loss"]
    assert_same_run(streamed, plain, before)
    assert evaluated == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-9)


@pytest.mark.full
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("adapters", [False, True], ids=["", "lora"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3"])
def test_sft_trainer_on_rows_with_images(tmp_path: Path, kind: str, adapters: bool) -> None:
    """Its own collator prepares the images; the vision tower is trained, or has adapters of all linear layers."""
    save_checkpoint(kind, tmp_path / "base")
    images = [Image.new("RGB", (20 + 8 * (n % 3), 16), ("red", "green", "blue")[n % 3]) for n in range(8)]
    data = Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": "Which colour?"},
                    {"role": "assistant", "content": f"It is {('red', 'green', 'blue')[n % 3]}" + " indeed" * (n % 4)},
                ],
                "images": [image],
            }
            for n, image in enumerate(images)
        ]
    )
    arguments = {**settings(tmp_path), "bf16": False, "gradient_checkpointing": False, "max_length": None}
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False) if adapters else None

    def trainer(model: Any) -> SFTTrainer:
        for layer in decoder_layers(model):
            layer.mlp.register_forward_pre_hook(streamtune.chunkwise(note_length))
        torch.manual_seed(0)
        return SFTTrainer(
            model,
            SFTConfig(**arguments),
            train_dataset=data,
            processing_class=processor_of(kind, tmp_path / "base"),
            peft_config=lora,
        )

    def load() -> Any:
        return AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float64)

    plain = trainer(load())
    before = weights(plain.model)
    plain.train()
    model = load()
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = trainer(model)
        streamed.train()
    assert_same_run(streamed, plain, before)
    ours = weights(streamed.model)
    moved = {name for name in before if not torch.equal(ours[name], before[name])}
    assert {name for name in moved if "vision" in name or "visual" in name}


@pytest.mark.full
def test_sft_trainer_under_bf16_autocast(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    exact = sft_trainer(model_for(tokenizer), tokenizer, tmp_path)
    before = weights(exact.model)
    exact.train()
    model = model_for(tokenizer)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = sft_trainer(model, tokenizer, tmp_path, bf16=True)
        streamed.train()
    assert_same_run(streamed, exact, before, loss=2e-3, update=2e-2)


@pytest.mark.full
@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("order", ["before wrapping", "after wrapping"])
def test_sft_trainer_with_lora(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, order: str, checkpointing: bool
) -> None:
    def lora_trainer(model: PreTrainedModel, **more: Any) -> SFTTrainer:
        torch.manual_seed(9)  # peft draws the adapters here
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        return sft_trainer(model, tokenizer, tmp_path, config, **more)

    plain = lora_trainer(model_for(tokenizer))
    assert isinstance(plain.model, PeftModel)
    before = weights(plain.model)
    plain.train()

    model = model_for(tokenizer)
    handle = streamtune.stream(model, chunk_size=CHUNK) if order == "before wrapping" else None
    streamed = lora_trainer(model, gradient_checkpointing=checkpointing)
    handle = handle or streamtune.stream(streamed.model, chunk_size=CHUNK)
    streamed.train()
    assert_same_run(streamed, plain, before)
    moved = {name for name, value in weights(streamed.model).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)

    handle.remove()
    prompt = tokenizer(rows()[3]["prompt"], return_tensors="pt", return_token_type_ids=False)
    given = {**prompt, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(streamed.model.eval().generate(**given), plain.model.eval().generate(**given))
    trained = losses(streamed)
    streamed.train()  # plain training goes on from here
    assert losses(streamed)[-1] < trained[0]


def test_a_call_through_adapters_is_still_watched() -> None:
    """The head streams and what cannot be streamed is refused, although it is the wrapper that is called."""
    model = get_peft_model(build("mixtral"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with streamtune.stream(model, chunk_size=CHUNK):
        out = model(**batch("plain"))
        assert out.logits is None
        assert out.past_key_values is None
        with pytest.raises(UnsupportedModelError, match="attention weights are never built"):
            model(**batch("plain"), output_attentions=True)
    assert model(**batch("plain")).logits is not None
