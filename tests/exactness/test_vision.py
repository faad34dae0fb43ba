"""Vision-language models: the gradient of the whole model, vision tower included, with images and with text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import streamtune
from streamtune import Schedule
from streamtune.engine import decoder_layers
from streamtune.engine.attention import NAME
from streamtune.errors import UnsupportedModelError
from streamtune.ops import LazyMask

from .families import gradients, reference
from .vision import IMAGE, LENGTH, MODELS, PLACES, ROWS, batch, build

EXACT = [kind for kind in MODELS if kind != "mllama"]
CHUNKS = (7, 20)
"""The first ends inside an image of every model; PaliGemma's prompt of 25 tokens fits two chunks of the second."""


def chunks_for(kind: str) -> tuple[int, ...]:
    return CHUNKS[1:] if kind.startswith("paligemma") else CHUNKS


@pytest.mark.parametrize("image", [True, False], ids=["image", "text"])
@pytest.mark.parametrize("kind", EXACT)
def test_exact(kind: str, image: bool) -> None:
    model, inputs = build(kind), batch(kind, image)
    want = reference(model, inputs)
    seen = sum(float(grad.norm()) for name, grad in want.truth[1].items() if "vision" in name or "visual" in name)
    assert (seen > 0) == image, "the vision tower is trained where there is an image"
    for chunk_size in chunks_for(kind):
        with streamtune.stream(model, schedule=Schedule(chunk_size=chunk_size, head_chunk_size=9)):
            want.check(gradients(model, inputs), chunk_size)


@pytest.mark.quick("gemma3", "llava", "qwen3_vl")
@pytest.mark.parametrize("kind", EXACT)
def test_padded_on_the_right(kind: str) -> None:
    model, inputs = build(kind), batch(kind, image=True)
    inputs["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
    inputs["attention_mask"][1, -6:] = 0
    inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=20):
        want.check(gradients(model, inputs))


@pytest.mark.parametrize("image", [True, False], ids=["image", "text"])
def test_the_balance_loss_of_a_mixture(image: bool) -> None:
    """The number of experts of a token stands in the configuration of the text model."""
    model, inputs = build("qwen3_vl_moe"), batch("qwen3_vl_moe", image)
    model.config.text_config.router_aux_loss_coef = 0.5
    inputs["output_router_logits"] = True
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=7):
        want.check(gradients(model, inputs))


@pytest.mark.quick("paligemma", "llama4", "qwen2_vl")
@pytest.mark.parametrize("kind", EXACT)
def test_the_preflight_agrees(kind: str) -> None:
    with streamtune.stream(build(kind), chunk_size=8) as handle:
        handle.check()


def masks_of(kind: str) -> dict[str, LazyMask]:
    """The masks the decoder layers of a streamed call are handed, by the attention they ask for."""
    model, found = build(kind), {}
    with streamtune.stream(model, chunk_size=20) as handle:
        for index, layer in enumerate(handle.layers):

            def hook(module: Any, args: Any, kwargs: Any, index: int = index) -> None:
                found[str(index)] = kwargs["attention_mask"]

            layer.register_forward_pre_hook(hook, with_kwargs=True)
        model(**batch(kind, image=True))
    return found


@pytest.mark.parametrize("kind", ["gemma3", "paligemma", "paligemma 2"])
def test_image_blocks_are_facts(kind: str) -> None:
    """Nothing is examined: where a sequence may be cut is read from the blocks."""
    for mask in masks_of(kind).values():
        assert isinstance(mask, LazyMask)
        assert mask.function is None
        assert mask.block_start is not None
        assert mask.sees_future
        if kind == "gemma3":
            inside = {t for start in PLACES for t in range(start + 1, start + 4)}
            assert mask.allowed_cuts == [t for t in range(LENGTH + 1) if t not in inside]
        else:
            assert mask.allowed_cuts == [0, *range(25, LENGTH + 1)]


def test_a_prompt_longer_than_two_chunks_is_refused_by_its_length() -> None:
    """PaliGemma's prompt sees itself in both directions: it cannot be cut, however small the chunk is to be."""
    model = build("paligemma")
    with (
        streamtune.stream(model, chunk_size=8),
        pytest.raises(UnsupportedModelError, match="25 consecutive tokens") as caught,
    ):
        model(**batch("paligemma", image=True))
    assert "chunk_size to 13 or more" in caught.value.fix


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")  # transformers 5.17, by its own tower
def test_cross_attention_to_an_image_is_refused_by_name() -> None:
    """Mllama's image has keys of its own in the cache; its text alone streams."""
    model = build("mllama")
    inputs = batch("mllama", image=False)
    want = reference(model, inputs)
    with streamtune.stream(model, chunk_size=8):
        want.check(gradients(model, inputs))
        with pytest.raises(UnsupportedModelError, match=r"uses cross-attention \('cross_attention_states'\)"):
            model(**batch("mllama", image=True))


def test_the_vision_tower_keeps_its_own_attention() -> None:
    """Also in a call, where the decoder's is ours."""
    model, seen = build("gemma3"), list[tuple[str, str]]()
    configs = (model.config.vision_config, model.config.text_config)
    before = configs[0]._attn_implementation
    decoder_layers(model)[0].register_forward_pre_hook(
        lambda *given: seen.append(tuple(config._attn_implementation for config in configs))  # type: ignore[arg-type]
    )
    with streamtune.stream(model):
        model(**batch("gemma3", image=True))
    assert seen == [(before, NAME)]
    assert before != NAME


@pytest.mark.full
def test_an_image_inside_a_chunk_and_one_across_a_chunks_end() -> None:
    """Every place an image of four tokens can have in chunks of eight."""
    model = build("gemma3")
    for start in range(14):
        inputs = batch("gemma3", image=False)
        inputs["token_type_ids"][:, start : start + 4] = 1
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["token_type_ids"] == 1, IMAGE)
        inputs["pixel_values"] = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(start))
        want = reference(model, inputs)
        with streamtune.stream(model, chunk_size=8):
            want.check(gradients(model, inputs), start)


def test_the_vision_tower_keeps_its_own_checkpointing() -> None:
    """Only what is streamed is taken out of gradient checkpointing's hands."""
    model, inputs = build("gemma3"), batch("gemma3", image=True)
    model.gradient_checkpointing_enable()
    tower = [module for name, module in model.named_modules() if "vision_tower" in name]
    before = [getattr(module, "gradient_checkpointing", None) for module in tower]
    assert True in before
    with streamtune.stream(model, chunk_size=8) as handle:
        model(**inputs).loss.backward()
        assert [getattr(module, "gradient_checkpointing", None) for module in tower] == before
        assert not any(getattr(layer, "gradient_checkpointing", False) for layer in handle.layers)
    assert all(layer.gradient_checkpointing for layer in decoder_layers(model))
