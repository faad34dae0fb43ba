"""Plan the shipped recipes that name a model and a device, and write the figures into their headers and a page.

python -m tools.recipe_headers [NAME ...]  # plans them, all by default, and writes the line `# Planned:` of each;
                                           # then the page docs/reference/recipes-shipped.md
python -m tools.recipe_headers --page      # only the page, from the headers as they are

A plan takes half a minute to two minutes. Nothing is read from a hub: ``tools.model_shapes`` has the configurations.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtune.recipe import Recipe, ShippedRecipe, load_recipe, shipped_recipes

from .model_shapes import write_shape

__all__ = ["PAGE", "Planned", "command_of", "page", "plan_shipped", "planned_recipes", "read_header", "write_header"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/recipes-shipped.md"
GIB = 1024**3
COMMAND = re.compile(r"^#   streamtune plan (.+)$", re.MULTILINE)
HEADER = re.compile(
    r"^# Planned: (?P<peak>[\d.,]+) GiB of (?P<size>[\d.,]+) GiB on (?:the|each) device, (?P<host>[\d.,]+) GiB on the "
    r"host, (?P<seconds>[\d.,]+) s a step of (?P<step>.+)\.$",
    re.MULTILINE,
)
UNPLANNED = re.compile(r"^# Planned: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Planned:
    """The figures of a header.

    Args:
        peak: Peak of a step on a device, in GiB.
        size: Memory of the device, in GiB.
        host: Host memory of a step, all ranks of a node together, in GiB.
        seconds: Predicted seconds of an optimizer step.
        step: Contents of a step: ``8 rows``.
        ranks: Number of devices.
    """

    peak: float
    size: float
    host: float
    seconds: float
    step: str
    ranks: int = 1

    def line(self) -> str:
        """Return the line of the header."""
        where = "the" if self.ranks == 1 else "each"
        seconds = f"{self.seconds:,.0f}" if self.seconds >= 10 else f"{self.seconds:.1f}"
        return (
            f"# Planned: {self.peak:.1f} GiB of {self.size:.1f} GiB on {where} device, "
            f"{self.host:,.1f} GiB on the host, {seconds} s a step of {self.step}."
        )


def planned_recipes() -> list[ShippedRecipe]:
    """Return the shipped recipes that name a device."""
    return [recipe for recipe in shipped_recipes() if recipe.device]


def command_of(shipped: ShippedRecipe) -> dict[str, Any]:
    """Return the options of ``streamtune plan`` in a recipe's header, by the names of ``PlanOptions``."""
    found = COMMAND.search(shipped.text)
    name, *words = shlex.split(found[1]) if found else ("",)
    if name != shipped.name:
        raise ValueError(f"the header of {shipped.name} has no `streamtune plan {shipped.name} --device ...`")
    options = {
        key.removeprefix("--").replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    return {key: int(value) if key in ("ranks", "nodes") else value for key, value in options.items()}


def read_header(shipped: ShippedRecipe) -> Planned:
    """Return the figures in a recipe's header."""
    found = HEADER.search(shipped.text)
    if found is None:
        raise ValueError(f"{shipped.name} has no line `# Planned:`; run python -m tools.recipe_headers {shipped.name}")
    numbers = {key: float(found[key].replace(",", "")) for key in ("peak", "size", "host", "seconds")}
    return Planned(**numbers, step=found["step"], ranks=command_of(shipped).get("ranks", 1))


def write_header(shipped: ShippedRecipe, planned: Planned) -> None:
    """Write the figures into a recipe's file."""
    shipped.path.write_text(UNPLANNED.sub(planned.line(), shipped.text, count=1), encoding="utf-8")


def plan_shipped(shipped: ShippedRecipe, folder: Path, *, length: int | None = None) -> Planned:
    """Plan a recipe for the device of its header.

    Args:
        shipped: The recipe.
        folder: Directory for the configuration of its model.
        length: Tokens of a row; None is the recipe's.

    Raises:
        ArgumentError: No schedule fits.
    """
    from streamtune.run.plan import PlanOptions, plan_recipe

    shape = write_shape(str(load_recipe(shipped.path).recipe.model_name_or_path), folder)
    loaded = load_recipe(shipped.path, [f"model_name_or_path={shape}"])
    found = plan_recipe(loaded, PlanOptions(**command_of(shipped), length=length))
    chosen, ranks = found.plan, found.cluster.ranks
    return Planned(
        peak=chosen.simulation.peak_bytes / GIB,
        size=chosen.limits.device_bytes / GIB,
        host=found.cluster.ranks_per_node * chosen.simulation.host_bytes / GIB,
        seconds=chosen.step_seconds,
        step=_step(loaded.recipe, found.micro_batches * found.cluster.data_size),
        ranks=ranks,
    )


def _step(recipe: Recipe, micro_batches: int) -> str:
    """Describe an optimizer step: ``8 rows``, ``64 completions, no rollout``."""
    count = recipe.per_device_train_batch_size * micro_batches
    if recipe.objective == "grpo":
        return f"{count} completions, no rollout"
    unit = "pair" if recipe.objective == "dpo" else "row"
    return f"{count} {unit}{'s' if count > 1 else ''}"


def page() -> str:
    """Return the page of shipped recipes, made from their headers."""
    return "\n".join(_page()) + "\n"


def _page() -> Iterator[str]:
    yield "<!-- Made by `python -m tools.recipe_headers --page` from the recipes. Changes here are lost. -->"
    yield from ("", "# Shipped recipes", "", INTRODUCTION)
    yield "| recipe | trains | model | device | longest row | peak GiB | host GiB | a step | seconds |"
    yield "|---|---|---|---|---:|---:|---:|---|---:|"
    for shipped in planned_recipes():
        recipe, figures, options = load_recipe(shipped.path).recipe, read_header(shipped), command_of(shipped)
        devices = f"{figures.ranks} x {options['device']}" if figures.ranks > 1 else options["device"]
        seconds = f"{figures.seconds:,.0f}" if figures.seconds >= 10 else f"{figures.seconds:.1f}"
        yield (
            f"| `{shipped.name}` | {recipe.objective}, {recipe.finetuning_type} | {recipe.model_name_or_path} "
            f"| {devices}, {options['host_memory']} | {recipe.max_length:,} | {figures.peak:.1f} of {figures.size:.1f} "
            f"| {figures.host:,.1f} | {figures.step.removesuffix(', no rollout')} | {seconds} |"
        )
    yield from ("", CLOSING)


INTRODUCTION = """\
Recipes for a model, a way of training and a device. Each has a length of rows that the planner finds room for there,
within the model's own positions, at which a row takes less than four minutes. Where device and host have room left,
longer rows train too, and `streamtune probe-max-len` says how long.

```bash
streamtune recipes ls
streamtune recipes copy qwen3/8b-lora-80gb my.yaml               # then put your own rows under datasets
streamtune sft my.yaml
streamtune sft qwen3/8b-lora-80gb --set datasets.0.path=my.jsonl # or by its name, as it is
streamtune plan qwen3/8b-lora-80gb                               # the same recipe on the device at hand
```

All figures are planned, not measured. Memory is simulated. Seconds are predicted from the device's data sheet, within
about 25% ([plan](../guide/plan.md)). 5% of device and host stay free. Peak GiB are per device, host GiB per node. A
step is an optimizer step in which every row has `max_length` tokens; for grpo it excludes the rollout.
"""

CLOSING = """\
Qwen3-8B, 14B and 32B have 40,960 positions. Recipes with longer rows extend them with YaRN (`rope_scaling`), which the
model cards describe up to 131,072 tokens. Qwen3-4B-Instruct-2507 has 262,144 positions.

On another device, or with less host memory, the planner chooses another schedule, or names the longest row that fits.
`sft-full`, `sft-lora` and `sft-qlora` contain and explain the keys that are changed most often."""


def main(arguments: list[str] | None = None) -> int:
    """Plan recipes and write their headers and the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="shipped recipes; all that have a header by default")
    parser.add_argument("--page", action="store_true", help="write the page only")
    asked = parser.parse_args(arguments)
    every = {shipped.name: shipped for shipped in planned_recipes()}
    if unknown := [name for name in asked.names if name not in every]:
        parser.error(f"no such recipe: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in [] if asked.page else asked.names or every:
            planned = plan_shipped(every[name], Path(folder))
            write_header(every[name], planned)
            print(f"{name}: {planned.line().removeprefix('# ')}", flush=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
