"""The page of what combines with what, docs/reference/support.md: made by asking for each pair of options.

python -m tools.support_matrix          # writes it; `make docs` does
python -m tools.support_matrix --check  # exits with 1 where it is out of date

A pair is written as a recipe, which passes the checks of a run before data or weights are read: validation, settings of
the loss, layout of the ranks, and the engine on a model without weights. Nothing here says what is refused;
:mod:`tools.support_options` lists the options.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from streamtune.errors import UserError
from streamtune.recipe import RECIPES, Recipe
from streamtune.recipe.mistakes import mistakes_from_validation
from streamtune.run.device import stream_model
from streamtune.run.model import make_meta_model
from streamtune.run.ranks import check_rank_layout, check_reference_start, weights_are_sharded
from streamtune.tasks import TASKS

from .support_options import BASES, GROUPS, MODELS, OF_THREE, TABLES, THEMES, Option, Table

__all__ = ["PAGE", "Matrix", "Refusal", "ask", "page", "recipe_of"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/support.md"
ROUTER_KEYS = ("router_aux_loss_coef", "router_z_loss_coef", "moe_balance")


@dataclass(frozen=True)
class Refusal:
    """The error of a combination, and its fix."""

    what: str
    fix: str


def recipe_of(objective: str, options: Iterable[Option]) -> dict[str, Any]:
    """Return the recipe with these options, as in a file."""
    tree: dict[str, Any] = copy.copy(BASES[objective])
    for option in options:
        for key, value in option.keys.items():
            *groups, last = key.split(".")
            holder = tree
            for group in groups:
                holder[group] = holder = dict(holder.get(group, {}))
            holder[last] = value
    return tree


def ask(objective: str, options: Iterable[Option]) -> Refusal | None:
    """Return the refusal of a recipe with these options on the ranks they need; None if it is accepted."""
    options = tuple(options)
    tree, kind = recipe_of(objective, options), RECIPES[objective]
    try:
        recipe = kind.model_validate(tree)
    except ValidationError as error:
        found = mistakes_from_validation(error, tree, kind)[0]
        return Refusal(found.what, found.fix)
    try:
        _set_up(recipe, max(option.ranks for option in options))
    except UserError as error:
        return Refusal(error.what, error.fix)
    return None


def _set_up(recipe: Recipe, ranks: int) -> None:
    """Run the checks before data or weights are read, without the checks of the machine.

    Raises:
        UserError: The run would be refused.
    """
    here = torch.device("cpu")
    if getattr(recipe, "use_vllm", False):
        recipe = recipe.model_copy(update={"use_vllm": False})  # already validated; it would look for the package
    kind = type(recipe)
    names = () if kind is Recipe else [key for key in kind.model_fields if _is_own(kind, key) or key in OF_TEACHER]
    own = tuple((key, getattr(recipe, key)) for key in names)
    _check_loss(recipe.objective, own)
    task = TASKS[recipe.objective](recipe)
    check_reference_start(task)
    world = check_rank_layout(recipe, ranks, weights_are_sharded=weights_are_sharded(recipe))
    task.check_ranks(here, world)
    assert recipe.model is not None, "all of them have a model of a configuration"
    _stream(recipe.model.init["model_type"], *(getattr(recipe, key) for key in ROUTER_KEYS))


def _is_own(kind: type[Recipe], key: str) -> bool:
    """Return True if a key is of this objective alone, or has other values in it."""
    own, common = kind.model_fields[key], Recipe.model_fields.get(key)
    return common is None or (own.annotation, own.default) != (common.annotation, common.default)


OF_TEACHER = ("teacher", "kd_divergence")
"""Keys of all objectives that losses read too."""


@cache
def _check_loss(objective: str, own: tuple[tuple[str, Any], ...]) -> None:
    """Check the settings of a loss, once for each set of values of the objective's own keys."""
    recipe = RECIPES[objective].model_validate({**BASES[objective], "max_length": 4096, **dict(own)})
    TASKS[objective].for_run(recipe, ROOT, lambda message: None)


@cache
def _stream(model_type: str, *router_values: Any) -> None:
    """Put the engine, with losses on routers, into a model without weights, once for each set of values."""
    model = {"init": next(each for each in MODELS if each["model_type"] == model_type)}
    recipe = Recipe.model_validate(
        {**BASES["sft"], "model": model, **dict(zip(ROUTER_KEYS, router_values, strict=True))}
    )
    stream_model(recipe, make_meta_model(recipe, torch.device("cpu"))).remove()


@dataclass
class Matrix:
    """The answers so far, and the refusals by number."""

    answers: dict[tuple[str, frozenset[str]], Refusal | None] = field(default_factory=dict)
    numbers: dict[Refusal, int] = field(default_factory=dict)
    examples: dict[Refusal, tuple[str, tuple[Option, ...], Refusal]] = field(default_factory=dict)
    """Numbered refusal -> an objective and options that meet it, and the full refusal."""
    _known: dict[str, list[str]] = field(default_factory=dict)

    def ask(self, objective: str, *options: Option) -> Refusal | None:
        """Return the result of :func:`ask`, cached."""
        key = (objective, frozenset(option.name for option in options))
        if key not in self.answers:
            self.answers[key] = ask(objective, options)
        return self.answers[key]

    def number(self, refusal: Refusal, objective: str, options: tuple[Option, ...]) -> int:
        """Return the number of a refusal on the page; refusals that differ by loss or objective share a number."""
        names = [objective, *(str(option.keys["loss_type"]) for option in options if "loss_type" in option.keys)]
        shape = Refusal(re.sub(rf"\b({'|'.join(names)})\b", "...", refusal.what), refusal.fix)
        self.examples.setdefault(shape, (objective, options, refusal))
        return self.numbers.setdefault(shape, len(self.numbers) + 1)

    def objectives(self, *options: Option) -> list[str]:
        """Return the objectives that have all the options."""
        return [name for name in BASES if all(name in self._objectives(option) for option in options)]

    def _objectives(self, option: Option) -> list[str]:
        """Return the objectives that accept an option alone; if none does, those that have its keys."""
        if option.name not in self._known:
            accepting = [name for name in BASES if self.ask(name, option) is None]
            tops = {key.partition(".")[0] for key in option.keys}
            having = [name for name in BASES if tops <= RECIPES[name].model_fields.keys()]
            self._known[option.name] = accepting or having
        return self._known[option.name]

    def pair(self, row: Option, column: Option) -> Mapping[str, Refusal | None]:
        """Return the answers by objective; empty if the two are equal or give one key two values."""
        if row.objective is not None or column.objective is not None:
            objective = row.objective or column.objective
            assert objective is not None
            return {objective: self.ask(objective, *(each for each in (row, column) if each.objective is None))}
        if row == column or any(row.keys[key] != column.keys[key] for key in row.keys.keys() & column.keys.keys()):
            return {}
        return {name: self.ask(name, row, column) for name in self.objectives(row, column)}

    def cell(self, row: Option, column: Option) -> str:
        """Return yes, or no with the number of the refusal; by objective if the answers differ."""
        answers = self.pair(row, column)
        options = tuple(each for each in (row, column) if each.objective is None)
        marks = {
            name: "yes" if refusal is None else self._no(refusal, name, options) for name, refusal in answers.items()
        }
        if len(set(marks.values())) <= 1:
            return next(iter(marks.values()), "")
        return ", ".join(f"{name} {mark}" for name, mark in marks.items())

    def _no(self, refusal: Refusal, objective: str, options: tuple[Option, ...]) -> str:
        number = self.number(refusal, objective, options)
        return f"**no** [{number}](#r{number})"

    def of_three(self, options: Iterable[Option]) -> Iterator[tuple[str, tuple[Option, Option, Option], Refusal]]:
        """Yield three options that are refused together, though any two of them are accepted."""
        for three in combinations(options, 3):
            if not all(self.pair(*two) for two in combinations(three, 2)):
                continue
            for name in self.objectives(*three):
                if all(self.ask(name, *two) is None for two in combinations(three, 2)) and (
                    refusal := self.ask(name, *three)
                ):
                    yield name, three, refusal


def page(matrix: Matrix | None = None) -> str:
    """Return the page."""
    return "\n".join(_page(matrix or Matrix())) + "\n"


def _page(matrix: Matrix) -> Iterator[str]:
    yield from ("<!-- Made by `make docs` from what is refused. Changes here are lost. -->", "", "# What combines", "")
    yield INTRODUCTION
    for table in TABLES:
        yield from ("", f"## {table.title}", "", table.text, "", *_table(matrix, table))
    yield from _three(matrix)
    yield from ("", "## Refusals", "", REFUSALS, "")
    yield from ("| | refused | instead |", "|---:|---|---|")
    for refusal, number in matrix.numbers.items():
        yield f'| <a id="r{number}"></a>{number} | {_in_cell(refusal.what)} | {_in_cell(refusal.fix)} |'
    yield from ("", CLOSING)


def _titles(options: Iterable[Option]) -> list[str]:
    return [option.title for option in options]


def _table(matrix: Matrix, table: Table) -> Iterator[str]:
    """Yield a table; options with the same answers share a row or a column."""
    columns = [option for name in table.columns for option in GROUPS[name]]
    answers = {
        row.name: [matrix.cell(row, column) for column in columns] for name in table.rows for row in GROUPS[name]
    }
    heads: dict[tuple[str, ...], list[Option]] = {}
    for number, column in enumerate(columns):
        heads.setdefault(tuple(cells[number] for cells in answers.values()), []).append(column)
    yield f"| | {' | '.join(', '.join(_titles(same)) for same in heads.values())} |"
    yield f"|---|{'---|' * len(heads)}"
    kept = [columns.index(same[0]) for same in heads.values()]
    for name in table.rows:
        if len(table.rows) > 1:
            yield f"| **{THEMES[name]}** |{' |' * len(heads)}"
        alike: dict[str, list[Option]] = {}
        for row in GROUPS[name]:
            alike.setdefault(" | ".join(answers[row.name][number] for number in kept), []).append(row)
        for cells, rows in alike.items():
            yield f"| {', '.join(_titles(rows))} | {cells} |"


def _three(matrix: Matrix) -> Iterator[str]:
    """Yield the section on three options at once."""
    options = [option for name in OF_THREE for option in GROUPS[name]]
    yield from ("", "## Three at once", "")
    found = list(matrix.of_three(options))
    yield f"Each three of these {len(options)} were asked for together as well: {', '.join(_titles(options))}."
    if not found:
        yield "None are refused where each two of them are accepted."
        return
    yield "These are refused though each two of them are accepted:"
    yield ""
    for objective, three, refusal in found:
        number = matrix.number(refusal, objective, three)
        yield f"- {objective}: {', '.join(_titles(three))} [{number}](#r{number})"


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


INTRODUCTION = """\
Each cell was asked: a recipe with the two options was put through what a run does before it reads data or weights. That
is validation, the settings of the loss, the layout of the ranks, and the engine on a model without weights. *yes* is
accepted. *no* has the number of the [refusal](#refusals). An empty cell is an option with itself, or one key with two
values. Where a cell names no objective, the answer is the same in each objective that has both options.

A refused recipe ends with exit code 2 before any data is read; refusals of [routers](#routers) need the model's class
and come once it is loaded. Tests train a sample of the *yes* cells on one device, and run the command for each
*no* that one device can meet."""

REFUSALS = """\
The sentences are those of the errors, which have the file and the line as well; `...` stands for the objective or the
loss."""

CLOSING = """\
## What is not here

- **Models.** Which families stream exactly: [families](families.md). A model may also refuse what this page accepts:
  packed rows that some layers cannot keep apart, heads that `sequence_parallel: ulysses` cannot divide, packed rows
  of layers that both attend and carry a state on ranks that share sequences. The checks before the first step
  (`handle.check()`, and those of rows) find it.
- **Machines.** Whether a device, DeepSpeed, vLLM, bitsandbytes or torchao is there: `streamtune doctor`. What fits:
  `streamtune plan`.
- **Data.** Which rows an objective reads: [rows](../data-preferences.md).
- **A DeepSpeed file of your own.** One of stage 3 is refused what `zero3` is, when the run starts. Values that
  contradict the recipe are refused once the model is loaded.
- **Several ranks.** *yes* says that nothing refuses it. What was trained on several ranks, and how equal it is:
  [equality](equality.md) and [limits](../guide/limits.md).
- **Four options and more at once.**"""


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it. Returns 1 where it is out of date, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.support_matrix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the page is out of date")
    check, text = parser.parse_args(arguments).check, page()
    old = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if old and not check:
        PAGE.write_text(text, encoding="utf-8")
    if old:
        print(f"{PAGE.relative_to(ROOT)} {'is out of date: make docs' if check else 'written'}")
    return int(check and old)


if __name__ == "__main__":
    sys.exit(main())
