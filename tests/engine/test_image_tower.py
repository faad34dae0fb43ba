"""The vision tower on a few images at a time: the same results, the same gradient, and the memory that is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, AutoTokenizer

from streamtune import data
from streamtune.engine import decoder_layers, image_tower
from streamtune.engine.image_tower import install_image_tower
from streamtune.plan.simulate.image_inputs import measure_images
from streamtune.plan.simulate.memory import LiveBytes
from streamtune.plan.simulate.meta_operators import meta_copy
from streamtune.plan.simulate.trace import WORK
from streamtune.plan.simulate.workload import FlopCount
from streamtune.tasks.sft import Batches
from streamtune.train import MicroBatch
from tests.vision_kit import KINDS, save_checkpoint, write_image_rows

QUICK = ("qwen3_vl", "gemma3", "idefics3")


def load(kind: str, folder: Path, *, rows: int, trained: bool) -> tuple[Any, MicroBatch]:
    save_checkpoint(kind, folder)
    write_image_rows(folder, rows)
    tokenizer, images = AutoTokenizer.from_pretrained(folder), data.ImageOptions(str(folder), "held")
    options = data.DataOptions(max_length=512, images=images)
    prepared = data.prepare([data.Source(str(folder / "rows.jsonl"))], tokenizer, options)
    model = AutoModelForImageTextToText.from_pretrained(folder).train().requires_grad_(trained)
    return model, Batches(prepared, tokenizer, images=images).training_batch(range(rows))


def loss_and_gradients(model: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    wide = {name: x.double() if torch.is_floating_point(x) else x for name, x in (batch.images or {}).items()}
    model.zero_grad()
    loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.shift_labels, **wide).loss
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick("qwen3_vl-True", "idefics3-False")
@pytest.mark.parametrize("kind_trained", [f"{kind}-{trained}" for kind in KINDS for trained in (True, False)])
def test_parts_are_the_whole(kind_trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, trained = kind_trained.rpartition("-")
    model, batch = load(kind, tmp_path, rows=6, trained=trained == "True")
    model.double()
    want, gradients = loss_and_gradients(model, batch)
    monkeypatch.setattr(image_tower, "FROZEN_ELEMENTS", 1000)
    monkeypatch.setattr(image_tower, "TRAINED_ELEMENTS", 1000)
    tower = install_image_tower(model, decoder_layers(model))
    assert tower is not None
    calls = []
    whole = tower.compute_whole
    tower.compute_whole = lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs)  # type: ignore[func-returns-value]
    found, in_parts = loss_and_gradients(model, batch)
    assert len(calls) >= 6, "six images, one at a time"
    tower.remove()
    assert "get_image_features" not in vars(tower.owner)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=0)
    assert in_parts.keys() == gradients.keys()
    size = torch.stack([gradient.norm() for gradient in gradients.values()]).norm() if gradients else 0
    for name, gradient in gradients.items():
        # glm4v computes its positions in fp32; a bias of keys has the gradient 0
        assert (in_parts[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-15 * size, name


@pytest.mark.quick(*(f"{kind}-{trained}" for kind in QUICK for trained in (True,)))
@pytest.mark.parametrize("kind_trained", [f"{kind}-{trained}" for kind in KINDS for trained in (True, False)])
def test_the_planned_memory_is_measured(kind_trained: str, tmp_path: Path) -> None:
    """Byte for byte what the tower allocates on this device, without the kernels' own workspace."""
    kind, _, trained = kind_trained.rpartition("-")
    model, batch = load(kind, tmp_path, rows=3, trained=trained == "True")
    images = batch.images or {}
    planned = measure_images(meta_copy(model), images, device="cpu")
    tower = install_image_tower(model, decoder_layers(model))
    assert tower is not None
    given = {name: x for name, x in images.items() if name in tower.argument_names}
    with LiveBytes(model, []) as live:
        results = tower(**given)
        held = live.total
    del results
    pixels = sum(x.nbytes for x in images.values())
    # Views of the pixels count as new here, and the pixels are in the plan already.
    seen = images["pixel_values"].nbytes if "image_grid_thw" in images or images["pixel_values"].dim() == 5 else 0
    assert planned.held == held + pixels - seen
    assert planned.peak == pytest.approx(live.peak + pixels - seen, rel=0.001)


def test_memory_does_not_grow_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = load("qwen3_vl", tmp_path, rows=3, trained=True)
    images = batch.images or {}
    many = {name: torch.cat([x] * 20) for name, x in images.items() if name != "mm_token_type_ids"}
    meta = meta_copy(model)
    whole = measure_images(meta, many, device="cpu")
    monkeypatch.setattr(image_tower, "TRAINED_ELEMENTS", 7000)
    parts = measure_images(meta, many, device="cpu")
    assert parts.peak < 0.35 * whole.peak
    meta.requires_grad_(False)
    frozen = measure_images(meta, many, device="cpu")
    monkeypatch.setattr(image_tower, "FROZEN_ELEMENTS", 7000)
    assert measure_images(meta, many, device="cpu").peak < 0.75 * frozen.peak


@pytest.mark.quick(*(f"{kind}-{trained}" for kind in QUICK for trained in (True,)))
@pytest.mark.parametrize("kind_trained", [f"{kind}-{trained}" for kind in KINDS for trained in (True, False)])
def test_the_planned_products_are_computed(kind_trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many FLOPs of products as torch counts in the forward and the backward, whole and in recomputed parts."""
    kind, _, trained = kind_trained.rpartition("-")
    model, batch = load(kind, tmp_path, rows=3, trained=trained == "True")
    images = batch.images or {}
    for elements in (1 << 25, 1000):
        monkeypatch.setattr(image_tower, "FROZEN_ELEMENTS", elements)
        monkeypatch.setattr(image_tower, "TRAINED_ELEMENTS", elements)
        planned = measure_images(meta_copy(model), images, device="cpu")
        tower = install_image_tower(model, decoder_layers(model))
        assert tower is not None
        given = {name: x for name, x in images.items() if name in tower.argument_names}
        with FlopCounterMode(display=False) as counter:
            results = tower(**given)
            forward = _products(counter)
            if trained == "True":
                found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
                sum(x.sum() for x in found).backward()
        tower.remove()
        assert planned.forward[WORK.index("matmul_flops")] == forward > 0
        products = [WORK.index(name) for name in ("matmul_flops", "attention_flops")]
        once = sum(planned.forward[at] + planned.backward[at] for at in products)
        again = trained == "True" and elements == 1000  # parts are recomputed, which a model's FLOPs leave out
        assert planned.model_flops == pytest.approx(once - again * sum(planned.forward[at] for at in products))
        backward = planned.backward[WORK.index("matmul_flops")]
        if elements > 1000:
            assert backward == _products(counter) - forward
        else:  # torch ends the recomputation at the last tensor that is saved, before the last product
            assert _products(counter) - forward <= backward <= 1.1 * (_products(counter) - forward)


def _products(counter: FlopCounterMode) -> int:
    return sum(size for name, size in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))


def test_no_token_meets_the_weights_of_the_tower(tmp_path: Path) -> None:
    """The FLOPs of rows of text, from which MFU is computed, are those of the language model."""
    model, _ = load("qwen3_vl", tmp_path, rows=1, trained=True)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1 and "embed_tokens" not in name}
    language = sum(p.numel() for name, p in matrices.items() if "visual" not in name)
    assert FlopCount.from_model(meta_copy(model)).weights == language < sum(p.numel() for p in matrices.values())
