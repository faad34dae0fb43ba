"""Simulate a document of many page images in one row, with adapters on Qwen3-VL-8B: which schedules fit in 80 GiB.

    python -m benchmarks.document_pages [PAGES ...]

A page has 1,024 x 1,024 pixels: 4,096 patches of the vision tower, 1,024 tokens of the language model. Nothing is
downloaded or allocated: the model is on ``meta``.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from tools.model_shapes import write_shape

from streamtune.engine import image_tower
from streamtune.errors import UserError
from streamtune.plan.budget import Limits
from streamtune.plan.planner import choose
from streamtune.plan.rates import data_sheet_rates, find_device
from streamtune.plan.simulate import simulate
from streamtune.plan.simulate.image_inputs import measure_images
from streamtune.plan.simulate.workload import LABELS, Mode
from streamtune.recipe.loader import load_recipe
from streamtune.run.model import make_meta_model
from streamtune.run.plan import recipe_workload
from streamtune.schedule import Schedule

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
SIDE, PATCH, MERGED, CHANNELS = 1024, 16, 4, 3 * 2
TEXT = 2048
"""Tokens of question and answer."""
DEVICE_GIB, HOST_GIB = 80, 256
BASELINES: tuple[Mode, ...] = ("checkpoint", "liger-loss", "liger-loss-offload")


def page_inputs(pages: int) -> dict[str, torch.Tensor]:
    """Return the tower's inputs for a row of pages; pixels have no values."""
    side = SIDE // PATCH
    pixels = torch.empty(pages * side * side, CHANNELS * PATCH * PATCH, device="meta")
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]] * pages)}


def main(arguments: list[str]) -> None:
    """Print a table of peak bytes for each number of pages."""
    with tempfile.TemporaryDirectory() as folder:
        base = write_shape(MODEL, Path(folder))
        loaded = load_recipe(
            "recipes/qwen3-vl/8b-lora-24gb.yaml",
            [f"model_name_or_path={base}", "gradient_accumulation_steps=1", "max_length=262144"],
        )
        device = torch.device("cuda")
        model = make_meta_model(loaded.recipe, device)
        card = find_device("h100")
        limits = Limits(device_bytes=DEVICE_GIB << 30, host_bytes=HOST_GIB << 30, disk_bytes=0)
        for pages in [int(each) for each in arguments] or [50, 100, 200]:
            length = pages * (SIDE // PATCH) ** 2 // MERGED + TEXT
            inputs = page_inputs(pages)
            parts = measure_images(model, inputs, autocast=True)
            image_tower.FROZEN_ELEMENTS, kept = 1 << 62, image_tower.FROZEN_ELEMENTS
            whole = measure_images(model, inputs, autocast=True)
            image_tower.FROZEN_ELEMENTS = kept
            print(f"{pages} pages, {length:,} tokens; pixels {inputs['pixel_values'].nbytes / 2**30:.1f} GiB")
            print(f"  tower, all images at once   {whole.peak / 2**30:7.1f} GiB, held {whole.held / 2**30:.1f}")
            print(f"  tower, a few at a time      {parts.peak / 2**30:7.1f} GiB, held {parts.held / 2**30:.1f}")
            workload = recipe_workload(loaded.recipe, model, length, device)
            for mode in BASELINES:
                found = simulate(replace(workload, mode=mode, images=whole), Schedule())
                print(f"  {LABELS[mode]:<50} {found.peak_bytes / 2**30:7.1f} GiB, host {found.host_bytes / 2**30:.1f}")
            try:
                plan = choose(replace(workload, images=parts), limits, data_sheet_rates(card))
            except UserError as error:
                print(f"  StreamTune: {error}")
                continue
            found = plan.simulation
            print(
                f"  {'StreamTune':<50} {found.peak_bytes / 2**30:7.1f} GiB, host {found.host_bytes / 2**30:.1f}, "
                f"{plan.step_seconds:.0f} s predicted"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
