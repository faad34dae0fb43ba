"""``streamtune grpo`` on prompts with images: prepared, completed, scored and trained on as prompts of text are."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

import streamtune
from streamtune import Schedule, data
from streamtune.cli import main
from streamtune.errors import ArgumentError, DataError
from streamtune.models import add_lora
from streamtune.recipe.loader import load_recipe
from streamtune.tasks.grpo.groups import Group, RewardScorer, make_micro_batches
from streamtune.tasks.grpo.objective import PolicyObjective
from streamtune.tasks.grpo.task import Grpo
from streamtune.tasks.rollout import Sampling, TransformersGenerator
from streamtune.train import ModelReference
from tests.exactness.families import gradients
from tests.exactness.test_grpo import LONGEST, make_layout, make_recipe, reference_loss
from tests.precision_kit import reference_of
from tests.sft_kit import FIXED, run, write_recipe
from tests.vision_kit import KINDS, MESSAGES, draw, processor_of, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # glm4v's processor
TURNS = [
    {"role": "system", "content": "Short answers."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]},
    {"role": "assistant", "content": "green"},
    {"role": "user", "content": [{"type": "text", "text": "And here?"}, {"type": "image"}]},
]
RECIPE: dict[str, Any] = {
    "objective": "grpo",
    "model_name_or_path": "base",
    "datasets": [{"path": "rows.jsonl"}],
    "engine": FIXED,
    "reward_funcs": ["rewards.py:low_tokens"],
    "allow_code": True,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_completion_length": 6,
    "max_prompt_length": 256,
    "learning_rate": 1.0e-2,
    "max_steps": 3,
    "output_dir": "run",
}
REWARDS = '''
import os, signal


def low_tokens(completions, completion_ids, answer, images, **columns):
    """Each picture has the colour of its word in ``answer``."""
    for pictures, words in zip(images, answer):
        assert [max("rgb", key=lambda c: picture.getpixel((6, 1))["rgb".index(c)]) for picture in pictures] == [
            word[0] for word in words.split()
        ]
    return [1.0 - sum(ids) / (300 * len(ids)) for ids in completion_ids]


def interrupting(completions, completion_ids, answer, images, **columns):
    """Presses Ctrl-C while the completions of the second rollout are scored, once."""
    os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
    if os.environ["CALLS"] == "2":
        signal.raise_signal(signal.SIGINT)
    return low_tokens(completions, completion_ids, answer, images)


def parity(completion_ids, images, **columns):
    """Even tokens for a red picture, odd tokens for a blue one."""
    odd = [picture.getpixel((6, 1))[2] > 128 for [picture] in images]
    return [sum(token % 2 == own for token in ids) / len(ids) for ids, own in zip(completion_ids, odd)]


def shown(prompts, completions, images, messages, **columns):
    for prompt, pictures, whole in zip(prompts, images, messages):
        parts = [part for message in prompt if isinstance(message["content"], list) for part in message["content"]]
        assert [part["image"].size for part in parts if part["type"] == "image"] == [each.size for each in pictures]
        assert whole[:-1] == prompt and whole[-1]["content"] == "red"
        assert not any("\\ufdd0" in str(message) for message in [*prompt, *whole])
    return [float(len(text[0]["content"])) for text in completions]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CALLS", raising=False)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def write_prompts(folder: Path, count: int = 4) -> list[dict[str, Any]]:
    """Write prompts in turn with one image, two of unlike sizes, none, and one in each of two turns."""
    rows, colours = [], ("red", "lime", "blue")
    for number in range(count):
        messages = [*MESSAGES, TURNS][number % 4]
        places = str(messages).count("'image'")
        shown = [colours[(number + place) % 3] for place in range(places)]
        paths = [
            draw(folder / f"{number}-{place}.png", colour, (20 + 6 * place + number, 16)).name
            for place, colour in enumerate(shown)
        ]
        rows.append({"prompt": messages, "images": paths, "answer": " ".join(shown).replace("lime", "green")})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def prepare(**options: Any) -> tuple[data.PreparedPrompts, data.ImageProcessor]:
    images, tokenizer = data.ImageOptions("base", "held"), AutoTokenizer.from_pretrained("base")
    chosen = {"max_length": 512, "max_prompt_length": 256, "images": images, **options}
    prompts = data.prepare_prompts([data.Source("rows.jsonl", type="prompts")], tokenizer, data.DataOptions(**chosen))
    return prompts, data.ImageProcessor(images, tokenizer)


def processor_inputs(kind: str, folder: Path, row: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs that the family's own processor makes of a prompt."""
    left = iter(row["images"])
    messages = [
        {
            **message,
            "content": [
                {"type": "image", "image": Image.open(folder / next(left))} if part["type"] == "image" else part
                for part in (
                    [{"type": "text", "text": message["content"]}]
                    if isinstance(message["content"], str)
                    else message["content"]
                )
            ],
        }
        for message in row["prompt"]
    ]
    found = processor_of(kind, folder / "base").apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    return {name: x for name, x in found.items() if name != "attention_mask"}


def some_groups(count: int, tokens: list[int]) -> Iterator[Group]:
    drawn = random.Random(5)
    for number in range(count):
        sizes = [drawn.randrange(1, LONGEST + 1) for _ in range(3)]
        yield Group(
            prompt=number,
            completions=[drawn.choices(tokens, k=size) for size in sizes],
            truncated=[False] * 3,
            rewards=[1.0] * 3,
            scores={"one": [1.0] * 3},
            advantages=[drawn.uniform(-2, 2) for _ in range(3)],
            old=[[drawn.uniform(-6.5, -4.5) for _ in range(size)] for size in sizes],
            ref=[[drawn.uniform(-6, -5) for _ in range(size)] for size in sizes],
        )


SCHEDULES = {
    "chunks": Schedule(chunk_size=13, head_chunk_size=9),
    "two levels": Schedule(chunk_size=20, head_chunk_size=9, levels=2, segment_size=1),
}


@pytest.mark.quick("qwen3_vl-lora-two levels", "gemma3-full-chunks")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("weights", ["full", "lora"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3"])
def test_a_step_is_exact(kind: str, weights: str, schedule: str, folder: Path) -> None:
    """Loss and gradients of a step, of the tower too, are as precise as plain torch's on each row alone."""
    save_checkpoint(kind, folder / "base")
    rows = write_prompts(folder)
    prepared, processor = prepare()
    prompts, inputs = list(prepared.training), [processor_inputs(kind, folder, row) for row in rows]
    assert [prompt.input_ids for prompt in prompts] == [each.pop("input_ids")[0].tolist() for each in inputs]
    inputs = [each if row["images"] else {} for each, row in zip(inputs, rows, strict=True)]
    model: Any = AutoModelForImageTextToText.from_pretrained("base").train()
    if weights == "lora":
        model = add_lora(model, r=4, target="all-linear")
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
    special = sorted({*range(250, len(AutoTokenizer.from_pretrained("base")))} - {model.config.image_token_id})
    groups, recipe = list(some_groups(4, [*range(3, 60), *special])), make_recipe("grpo", beta=0.07)

    def plain(model: Any) -> Any:
        return gradients(model, {}, lambda m, _: reference_loss(m, recipe, groups, prompts, 5, inputs))

    want = reference_of(model, plain)
    with streamtune.stream(model, schedule=SCHEDULES[schedule]) as handle:
        objective = PolicyObjective(handle, recipe)
        layout = replace(make_layout(recipe, 5, share=False), images=processor)
        batches = make_micro_batches(groups, prompts, layout)
        totals, total = objective.step_totals(batches), 0.0
        for batch in batches:
            score = objective.score(model, batch, totals)
            score.loss.backward()
            total += score.loss.item()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    want.check((total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}))


MORE = [pytest.param(each, marks=pytest.mark.full) for each in KINDS if each != "qwen3_vl"]


@pytest.mark.parametrize("kind", ["qwen3_vl", *MORE])
def test_greedy_completions_equal_generate(kind: str, folder: Path) -> None:
    """Of the streamed model, on all prompts together: as plain ``generate`` on the processor's inputs, one by one."""
    save_checkpoint(kind, folder / "base")
    rows = write_prompts(folder, 5)
    prepared, processor = prepare()
    model: Any = AutoModelForImageTextToText.from_pretrained("base").eval()
    settings = {"max_new_tokens": 7, "do_sample": False, "suppress_tokens": [model.config.image_token_id]}
    want = []
    with torch.no_grad():
        for row in rows:
            inputs = processor_inputs(kind, folder, row)
            inputs = inputs if row["images"] else {"input_ids": inputs["input_ids"]}
            found = model.generate(**inputs, **settings, eos_token_id=None, pad_token_id=0)
            want.append(found[0, inputs["input_ids"].shape[1] :].tolist())
    writer = TransformersGenerator(model, end_token_ids=[], pad_token_id=0, prefill_chunk_size=8, max_rows=4)
    writer.image_processor = processor
    prompts, images = [each.input_ids for each in prepared.training], [files(each) for each in prepared.training]
    with streamtune.stream(model, schedule=SCHEDULES["chunks"]):
        written = writer.write(prompts, 2, Sampling(7, temperature=0.0), images)
    assert [[each.token_ids for each in group] for group in written] == [[row, row] for row in want]
    model.train()


def files(prompt: data.Prompt) -> list[data.ImageFile]:
    return list(map(data.ImageFile.parse, prompt.images))


def test_an_image_token_is_never_sampled(folder: Path) -> None:
    """It would have no image when the log-probs of its completion are computed."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder, 1)
    prepared, processor = prepare()
    model: Any = AutoModelForImageTextToText.from_pretrained("base").eval()
    token = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight[token] = 0
        model.lm_head.weight[token] += 100 * model.model.language_model.norm.weight.sign()
    writer = TransformersGenerator(model, end_token_ids=[], pad_token_id=0, prefill_chunk_size=8, max_rows=8)
    assert all(token in each.token_ids for each in writer.write([[5, 6, 7]], 8, Sampling(8))[0])
    writer.image_processor = processor
    [group] = writer.write([prepared.training[0].input_ids], 8, Sampling(8), [files(prepared.training[0])])
    assert not any(token in each.token_ids for each in group)


def test_text_after_images_has_its_own_positions(folder: Path) -> None:
    """A model keeps positions of its last batch; a next batch of another size does not use them."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder, 5)
    prepared, processor = prepare()
    model: Any = AutoModelForImageTextToText.from_pretrained("base").eval()
    writer = TransformersGenerator(model, end_token_ids=[], pad_token_id=0, prefill_chunk_size=8, max_rows=2)
    writer.image_processor = processor
    greedy, prompts = Sampling(7, temperature=0.0), list(prepared.training)
    text = [[7, 8, 9], *(each.input_ids for each in prompts if not each.images), [5, 6]]
    alone = [writer.write([ids], 1, greedy)[0] for ids in text]
    shown = [*((each.input_ids, files(each)) for each in prompts if each.images), *((ids, []) for ids in text)]
    together = writer.write([ids for ids, _ in shown], 1, greedy, [images for _, images in shown])
    assert together[-3:] == alone


def losses(name: str) -> list[dict[str, Any]]:
    records = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in each.items() if k not in ("tokens_per_s", "peak_mem_gib")} for each in records]


def weights(name: str) -> dict[str, Tensor]:
    return load_file(f"{name}/final/model.safetensors")


def is_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_run_and_its_files(folder: Path) -> None:
    """Rewards see the pictures, the tower is frozen, no pixels are written, and a resumed run ends the same."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder, 6)
    keys = {"num_completions_to_print": 4, "val_size": 1, "eval_steps": 2, "max_steps": 2, "save_steps": 1}
    write_recipe(folder, {**RECIPE, **keys})
    assert run(command="grpo") == 0
    before, after = load_file("base/model.safetensors"), weights("run")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved
    assert not [name for name in moved if "visual" in name]
    lines = list(map(json.loads, Path("run/completions.jsonl").read_text().splitlines()))
    assert any(len(line.get("images", ())) == 2 for line in lines)
    assert all(len(json.dumps(line)) < 2000 for line in lines)
    assert any("eval_reward" in str(record) for record in losses("run"))
    assert run("--output-dir", "again", "--resume", "run/checkpoints/step-000001", command="grpo") == 0
    assert is_same(weights("again"), after)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "idefics3"))]
)
def test_resumed_bit_for_bit(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint in the middle of inner epochs, and after Ctrl-C in a rollout."""
    save_checkpoint(kind, folder / "base")
    write_prompts(folder, 6)
    write_recipe(
        folder, {**RECIPE, "num_iterations": 2, "beta": 0.05, "max_steps": 5, "save_steps": 1, "save_total_limit": 9}
    )
    assert run(command="grpo") == 0
    whole = losses("run")
    for step in (1, 2, 3):
        name = f"from-{step}"
        arguments = ("--output-dir", name, "--resume", f"run/checkpoints/step-{step:06d}")
        assert run(*arguments, command="grpo") == 0
        assert losses(name) == [record for record in whole if record["step"] > step]
        assert is_same(weights(name), weights("run"))
    write_recipe(folder, {**RECIPE, "max_steps": 4, "reward_funcs": ["rewards.py:interrupting"]})
    monkeypatch.setenv("CALLS", "9")
    assert run("--output-dir", "calm", command="grpo") == 0
    monkeypatch.setenv("CALLS", "0")
    assert run("--output-dir", "split", command="grpo") == 130
    assert run("--output-dir", "split", command="grpo") == 0
    assert is_same(weights("split"), weights("calm"))


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        {"finetuning_type": "lora", "beta": 0.05},
        {"loss_type": "rloo", "beta": 0.05},
        {"loss_type": "remax"},
        {"loss_type": "gspo", "steps_per_generation": 4},
        {"allocation": "gvm", "generation_batch_size": 16},
        {"sft_steps": 2, "sft_batch_size": 3},
        {"loss_type": "gkd", "teacher": "base", "reward_funcs": None, "beta": None},
        {"engine": {**FIXED, "weights": "host"}},
        {"dtype": "bfloat16"},
        {"freeze_vision_tower": False},
        {"max_pixels": 256},
    ],
    ids=lambda keys: " ".join(f"{key}={value}" for key, value in keys.items())[:40],
)
def test_other_ways_to_train(folder: Path, keys: dict[str, Any]) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    rows = write_prompts(folder, 6)
    if "sft_steps" in keys:
        answered = [{**row, "completion": [{"role": "assistant", "content": row["answer"] or "none"}]} for row in rows]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    recipe = {key: value for key, value in {**RECIPE, **keys}.items() if value is not None}
    write_recipe(folder, recipe)
    assert run(command="grpo") == 0
    before, after = load_file("base/model.safetensors"), load_file("base/model.safetensors")
    if keys.get("finetuning_type") != "lora":
        after = weights("run")
    moved = {name for name in after if not torch.equal(after[name], before[name].to(after[name].dtype))}
    assert any("visual" in name for name in moved) == ("freeze_vision_tower" in keys)


@pytest.mark.full
def test_the_reward_rises(folder: Path) -> None:
    """Even tokens for red squares, odd ones for blue: the completions depend on the picture."""
    save_checkpoint("qwen3_vl", folder / "base")
    rows = []
    for number in range(8):
        colour = ("red", "blue")[number % 2]
        path = draw(folder / f"{number}.png", colour, (16 + 4 * (number // 2), 16))
        rows.append({"prompt": MESSAGES[0], "images": [path.name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"reward_funcs": ["rewards.py:parity"], "max_completion_length": 4, "num_generations": 8}
    keys |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "max_steps": 40}
    write_recipe(folder, {**RECIPE, **keys})
    assert run(command="grpo") == 0
    found = [record["reward"] for record in losses("run") if "reward" in record]
    assert sum(found[:4]) / 4 < 0.65
    assert sum(found[-4:]) / 4 > 0.85


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3"])
def test_as_trl_prepares_them(kind: str, folder: Path) -> None:
    """Tokens, pixels and log-probs of TRL's trainer, of the completions that it wrote itself."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-untyped]

    save_checkpoint(kind, folder / "base")
    rows = write_prompts(folder, 2)
    theirs = processor_of(kind, folder / "base")
    theirs.tokenizer.padding_side = "left"
    settings = {"num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 6, "beta": 0.05}
    trainer = GRPOTrainer(
        AutoModelForImageTextToText.from_pretrained("base"),
        lambda completions, **columns: [1.0] * len(completions),
        GRPOConfig("out", use_cpu=True, bf16=False, report_to=[], temperature=0.7, **settings),
        Dataset.from_list([{"prompt": "none"}]),
        processing_class=theirs,
    )
    read = [{**row, "images": [Image.open(folder / name).convert("RGB") for name in row["images"]]} for row in rows]
    want = trainer._generate_and_score_completions([row for row in read for _ in range(2)])
    prepared, processor = prepare()
    prompt_ids = [ids[mask.bool()].tolist() for ids, mask in zip(want["prompt_ids"], want["prompt_mask"], strict=True)]
    assert prompt_ids == [prompt.input_ids for prompt in prepared.training for _ in range(2)]
    written = [
        ids[mask.bool()].tolist() for ids, mask in zip(want["completion_ids"], want["completion_mask"], strict=True)
    ]
    groups = [
        Group(number, written[2 * number : 2 * number + 2], [True] * 2, [1.0] * 2, {}, [1.0] * 2) for number in range(2)
    ]
    layout = replace(make_layout(make_recipe("grpo"), 4, share=False), images=processor)
    [batch] = make_micro_batches(groups, prepared.training, layout)
    types = batch.images or {}
    for name, value in types.items():
        if value.shape == batch.input_ids.shape:  # theirs are padded on the left
            for mine, other, prompt, mask in zip(value, want[name], prompt_ids, want["prompt_mask"], strict=True):
                begin = int((mask == 0).sum())
                assert mine[: len(prompt)].equal(other[begin : begin + len(prompt)]), name
                assert not mine[len(prompt) :].any()
        else:
            assert torch.equal(value, want[name]), name
    assert {*types} >= {*want} & {"pixel_values", "image_grid_thw", "pixel_attention_mask", "mm_token_type_ids"}
    model: Any = AutoModelForImageTextToText.from_pretrained("base")
    with streamtune.stream(model, schedule=SCHEDULES["chunks"]) as handle:
        found = ModelReference(model, handle, temperature=0.7).logprobs(batch)
    expected = want["ref_per_token_logps"][want["completion_mask"].bool()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_rewards_see_pictures_and_the_rows_columns(folder: Path) -> None:
    """As reward functions of TRL: ``images`` is a list for each completion, and prompts have the pictures."""
    save_checkpoint("qwen3_vl", folder / "base")
    path = draw(folder / "a.png", "red")
    encoded = base64.b64encode(path.read_bytes()).decode()
    asked = {"role": "user", "content": "<image>Which colour?"}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": "red"}], "image": "a.png"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "base64": encoded}, {"type": "text", "text": "And?"}]},
                {"role": "assistant", "content": "red"},
            ]
        },
        {"messages": [{"role": "user", "content": "None?"}, {"role": "assistant", "content": "red"}]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_recipe(write_recipe(folder, {**RECIPE, "reward_funcs": ["rewards.py:shown"]}))
    task: Any = Grpo.for_run(loaded.recipe, folder, lambda text: None)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained("base")
    prepared = task.prepare([data.Source("rows.jsonl", type="messages")], tokenizer, lambda text: None)
    prompts = list(prepared.training)
    assert [len(prompt.images) for prompt in prompts] == [1, 1, 0]
    assert encoded[:64] not in str(prompts), "images of a row are in files"
    scorer = RewardScorer(task.functions, tokenizer, has_images=True)
    ids = tokenizer.encode("red")
    assert scorer(prompts, [ids] * 3).total == [3.0] * 3
    assert scorer(prompts[2:], [ids]).total == [3.0], "a batch without images has the column too"
    draw(path, "blue")
    with pytest.raises(DataError, match="has changed since its row was prepared"):
        scorer(prompts[:1], [ids])


def test_an_image_is_never_cut(folder: Path) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder)
    whole, _ = prepare()
    longest = int(whole.training.lengths().max())
    for side in ("left", "middle"):
        with pytest.raises(DataError, match=r"with its 2 images, more than max_prompt_length = .* images is not cut"):
            prepare(max_prompt_length=longest - 1, overlength="truncate", truncate_side=side)
    with pytest.raises(DataError, match="prompt has more than max_prompt_length") as caught:
        prepare(max_prompt_length=longest - 1, overlength="error")
    assert "write max_pixels if smaller images" in str(caught.value.fix)
    fewer, _ = prepare(max_prompt_length=longest - 1, overlength="drop")
    assert len(fewer.training) == 3


@pytest.mark.parametrize(
    ("rows", "keys", "what"),
    [
        ([{"prompt": "<image> Which colour?", "images": ["0-0.png"]}], {}, "no messages that could show them"),
        ([{"prompt": [{"role": "user", "content": "<image> <image>"}], "images": ["0-0.png"]}], {}, "more places for"),
        (None, {"loss_type": "gkd", "teacher": "gemma", "reward_funcs": None}, "'gemma' is of type gemma3"),
    ],
    ids=["text", "places", "teacher"],
)
def test_refused(folder: Path, capsys: pytest.CaptureFixture[str], rows: Any, keys: dict[str, Any], what: str) -> None:
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder)
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if keys.get("teacher"):
        save_checkpoint("gemma3", folder / "gemma")
        AutoTokenizer.from_pretrained("base").save_pretrained("gemma")
    write_recipe(folder, {key: value for key, value in {**RECIPE, **keys}.items() if value is not None})
    assert run(command="grpo") == 2
    assert what in " ".join(capsys.readouterr().err.split())


def test_the_plan_counts_the_largest_prompt(folder: Path) -> None:
    """A micro-batch of completions of one prompt has its images once for each. vLLM gets no images."""
    save_checkpoint("qwen3_vl", folder / "base")
    rows = write_prompts(folder)
    recipe: Any = load_recipe(write_recipe(folder, RECIPE)).recipe
    task, tokenizer = Grpo(recipe), AutoTokenizer.from_pretrained("base")
    prepared = task.prepare([data.Source("rows.jsonl", type="prompts")], tokenizer, lambda text: None)
    largest = task.largest_images(prepared)
    assert largest is not None
    sizes = [len(processor_inputs("qwen3_vl", folder, row)["pixel_values"]) for row in rows if row["images"]]
    assert len(largest["pixel_values"]) == 4 * max(sizes)
    task = Grpo(recipe.model_copy(update={"use_vllm": True}))
    with pytest.raises(ArgumentError, match="the prompts have images, which are not passed to vLLM"):
        task.prepare([data.Source("rows.jsonl", type="prompts")], tokenizer, lambda text: None)


@pytest.mark.parametrize(
    "engine", [pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)]
)
def test_ranks(folder: Path, engine: str) -> None:
    """Two ranks write and train as one does, also if they share the weights and only one has an image at a time."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder, 6)
    keys = {"temperature": 0.01, "top_k": 1, "loss_type": "dr_grpo", "beta": 0.05}
    write_recipe(folder, {**RECIPE, **keys, "gradient_accumulation_steps": 2})
    assert run("--output-dir", "one", command="grpo") == 0
    write_recipe(folder, {**RECIPE, **keys, "gradient_accumulation_steps": 1, "fsdp": engine == "fsdp"})
    assert run("--output-dir", "two", "--nproc", "2", command="grpo") == 0
    one, two = ([record["reward"] for record in losses(name) if "reward" in record] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.full
def test_the_other_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``data`` shows the pictures of prompts; ``--dry-run``, ``verify`` and ``eval`` run on the recipe."""
    save_checkpoint("qwen3_vl", folder / "base")
    write_prompts(folder, 6)
    write_recipe(folder, {**RECIPE, "val_size": 2})
    assert run("--json", command="data") == 0
    document = "{" + capsys.readouterr().out.partition("{")[2]  # after what libraries print
    assert sorted({len(each["images"]) for each in json.loads(document)["samples"]}) == [0, 1]
    assert run("--dry-run", command="grpo") == 0
    capsys.readouterr()
    assert run(command="verify") == 0
    assert "without images" not in capsys.readouterr().err
    assert run("--length", "60", command="verify") == 0
    assert "the rows that are compared are without images" in capsys.readouterr().err
    assert run(command="grpo") == 0
    with pytest.raises(SystemExit) as left:
        main(["eval", "run", "--allow-code"])
    assert not left.value.code
