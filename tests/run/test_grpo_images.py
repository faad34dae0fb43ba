"""``streamtune grpo`` on prompts with images: prepared, completed, scored and trained on as prompts of text are."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
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
from streamtune.errors import DataError
from streamtune.models import add_lora
from streamtune.recipe.loader import load_recipe
from streamtune.recipe.schema import GrpoRecipe
from streamtune.tasks.grpo.groups import Group, make_micro_batches
from streamtune.tasks.grpo.objective import PolicyObjective
from streamtune.tasks.grpo.task import Grpo
from streamtune.tasks.rollout import Sampling, TransformersGenerator
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
    "max_prompt_length": 128,
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
    """What the family's own processor gives for a prompt."""
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


def some_groups(count: int) -> Iterator[Group]:
    drawn = random.Random(5)
    for number in range(count):
        sizes = [drawn.randrange(1, LONGEST + 1) for _ in range(3)]
        yield Group(
            prompt=number,
            completions=[[drawn.randrange(3, 250) for _ in range(size)] for size in sizes],
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


@pytest.mark.quick("qwen3_vl", "full", "chunks")
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
    groups, recipe = list(some_groups(4)), make_recipe("grpo", beta=0.07)

    def plain(model: Any) -> Any:
        return gradients(model, {}, lambda m, _: reference_loss(m, recipe, groups, prompts, 5, inputs))

    want = reference_of(model, plain)
    with streamtune.stream(model, schedule=SCHEDULES[schedule]) as handle:
        objective = PolicyObjective(handle, recipe)
        layout = make_layout(recipe, 5, share=False)
        layout = type(layout)(**{**vars(layout), "images": processor})
        batches = make_micro_batches(groups, prompts, layout)
        totals, total = objective.step_totals(batches), 0.0
        for batch in batches:
            score = objective.score(model, batch, totals)
            score.loss.backward()
            total += score.loss.item()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    want.check((total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}))
