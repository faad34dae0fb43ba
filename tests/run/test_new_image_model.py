"""New vision-language models of random weights: their processor, their samples, evaluations and answers to images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from streamtune import data
from streamtune.cli import main
from streamtune.data.reading.image_cells import ImageCell
from streamtune.data.reading.pages import page_rows
from streamtune.models.new_processor import NEW_IMAGE_MODELS
from streamtune.programs.generate.answer import GenerateOptions, load_answerer
from streamtune.programs.generate.prompt_files import prompt_with_images, read_prompts
from tests.exactness.vision import MODELS
from tests.sft_kit import FIXED, write_recipe
from tests.vision_kit import draw  # noqa: F401 (leaves this file out where transformers needs torchvision)

QUESTION = "What is on the page?"


def new_model(kind: str) -> dict[str, Any]:
    keys = {"model_type": kind, **MODELS[kind]}
    text = {key: value for key, value in keys["text_config"].items() if not key.endswith("_token_id")}
    text.pop("vocab_size")
    vision = dict(keys["vision_config"])
    if not kind.startswith("qwen3"):
        text.pop("head_dim")  # the other configurations derive it
    if kind == "qwen2_vl":
        for key in ("out_hidden_size", "intermediate_size"):
            vision.pop(key)
    keys |= {"text_config": text, "vision_config": vision}
    return {key: value for key, value in keys.items() if not key.endswith("_token_id")}


def recipe(kind: str = "qwen3_vl", **keys: Any) -> dict[str, Any]:
    return {
        "model": {"init": new_model(kind)},
        "tokenizer": {"train": {"vocab_size": 300}},
        "datasets": [{"path": "demo-pages", "max_rows": 10}],
        "engine": FIXED,
        "max_length": 256,
        "val_size": 3,
        "max_pixels": 1024,
        "max_steps": 2,
        "learning_rate": 1.0e-2,
        "sample": {"held_out": 2},
        "output_dir": "run",
        **keys,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, command: str = "sft", recipe: str = "tiny.yaml") -> int:
    with pytest.raises(SystemExit) as left:
        main([command, recipe, *arguments])
    return int(left.value.code or 0)


def save_pages() -> dict[str, Path]:
    """Write the pages of ``demo-pages`` as files, by origin."""
    files = {}
    for number, row in enumerate(page_rows(max_rows=10)):
        files[row.origin] = Path(f"{number}.png")
        files[row.origin].write_bytes(row.columns["images"][0]["bytes"])
    return files


def answer(model: Any, tokenizer: Any, processor: data.ImageProcessor, page: Path, most: int) -> str:
    """Return the answer by transformers' own ``generate``, for the tokens and pixels of the processor."""
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": parts}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    files, images = processor.read_cells([ImageCell("page", page)], "")
    ids = torch.tensor([tokenizer.encode(processor.expand(text, images, "").text, add_special_tokens=False)])
    inputs = processor.model_inputs([files], ids)
    written = model.generate(ids, **inputs, do_sample=False, max_new_tokens=most)
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.quick("qwen3_vl")
@pytest.mark.parametrize("kind", NEW_IMAGE_MODELS)
def test_trained_sampled_evaluated_and_asked(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(folder, recipe(kind))
    assert run() == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    held_out = next(record["eval_loss"] for record in records if "eval_loss" in record)

    tokenizer: Any = AutoTokenizer.from_pretrained("run/final")
    config = AutoConfig.from_pretrained("run/final")
    token = "<|image|>" if kind == "glm4v" else "<|image_pad|>"
    assert config.image_token_id == tokenizer.convert_tokens_to_ids(token) < len(tokenizer)
    assert config.text_config.vocab_size == len(tokenizer)
    model: Any = AutoModelForImageTextToText.from_pretrained("run/final")
    processor = data.ImageProcessor(data.ImageOptions("run/final", "held", max_pixels=1024), tokenizer)
    pages = save_pages()
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    for sample in samples:
        most = len(tokenizer.encode(sample["expected"])) + 2
        assert answer(model, tokenizer, processor, pages[sample["row"]], most).startswith(sample["completion"])

    capsys.readouterr()
    assert run("--json", command="eval", recipe="run") == 0
    assert json.loads(capsys.readouterr().out)["splits"]["held-out"]["loss"] == pytest.approx(held_out, rel=1e-4)

    options = GenerateOptions(max_new_tokens=6, temperature=0.0)
    page = pages[samples[0]["row"]]
    asked = load_answerer("run", options)
    alone = asked.answer(QUESTION).text
    assert asked.answer(prompt_with_images(QUESTION, [str(page)])).text == answer(model, tokenizer, processor, page, 6)
    assert asked.answer(QUESTION).text == alone  # nothing of the image is left
    Path("rows.jsonl").write_text(json.dumps({"prompt": QUESTION, "images": [str(page)]}))
    (prompt,) = read_prompts(Path("rows.jsonl"))
    assert asked.answer(prompt).text == answer(model, tokenizer, processor, page, 6)


@pytest.mark.full
def test_adapters_of_a_new_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adapters on random weights, resumed, asked, and merged: their answers are the same."""
    write_recipe(folder, recipe(finetuning_type="lora", save_steps=1))
    assert run() == 0
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000001") == 0
    assert (
        Path("again/final/adapter_model.safetensors").read_bytes()
        == Path("run/final/adapter_model.safetensors").read_bytes()
    )
    prompt = prompt_with_images(QUESTION, [str(next(iter(save_pages().values())))])
    options = GenerateOptions(max_new_tokens=6, temperature=0.0)
    found = load_answerer("run", options).answer(prompt).text
    assert run("merged", command="export", recipe="run") == 0
    assert Path("merged/preprocessor_config.json").is_file()
    assert load_answerer("merged", options).encode(prompt)
    assert found == load_answerer("again", options).answer(prompt).text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model_type": "llava"}, "a new vision-language model of type 'llava' is not supported"),
        ({"text_config": {"hiden_size": 8}}, "Qwen3VLTextConfig has no key 'hiden_size'"),
        ({"image_token_id": 5}, "'image_token_id' is the id of a token, and the tokenizer decides ids"),
    ],
)
def test_refused_configurations(
    change: dict[str, Any], what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = recipe()
    keys["model"]["init"] |= change
    write_recipe(folder, keys)
    assert run() == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--file", "a.jsonl"], "--image and --file exclude each other"),
        (["--raw", "--prompt", QUESTION], "--image and --raw exclude each other"),
        (["--prompt", "<image><image>"], "the prompt has 2 times <image>, and --image is given 1 times"),
    ],
)
def test_refused_prompts(arguments: list[str], what: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--image", "a.png", *arguments, command="generate", recipe="none") == 2
    assert what in capsys.readouterr().err
