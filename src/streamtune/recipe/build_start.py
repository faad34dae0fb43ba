"""Where a run starts: its directory, the checkpoint it goes on from, its device and its ranks.

What is gone on with is compared with what the recipe asks for now, and a difference that would change the training is
refused by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from streamtune import __version__, models, train
from streamtune.distributed import agree
from streamtune.errors import ArgumentError, did_you_mean
from streamtune.recipe.build import choose_device, quiet_libraries
from streamtune.recipe.build_model import choose_quantization
from streamtune.recipe.build_world import (
    accumulation,
    device_of_rank,
    make_world,
    share_reference,
    shares_weights,
)
from streamtune.recipe.schema import Recipe

if TYPE_CHECKING:
    pass

__all__ = ["Doing", "Notify", "Start", "start_run", "tell_of_model"]

Notify = Callable[[str], None]
"""Told what is worth knowing on the way, a sentence at a time."""
Doing = Callable[[str], AbstractContextManager[Any]]
"""Shows what takes a while, for as long as it does."""
FREE_KEYS = frozenset(
    {
        # Where things go and what is shown,
        "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "sample",
        "num_completions_to_print", "save_async", "metric_for_best_model", "greater_is_better", "save_best_limit",
        # what is done about what goes wrong,
        "on_nan", "max_skips", "on_oom",
        # how the same gradient is computed,
        "engine", "device", "per_device_eval_batch_size", "trust_remote_code", "allow_pickle", "share_prefix",
        "dataloader_num_workers", "deterministic",
        "deepspeed", "fsdp", "sequence_parallel", "sequence_parallel_size",
        # what `rows_per_step` says,
        "gradient_accumulation_steps", "train_batch_size",
        # and what the fingerprint of the data covers, wherever the files are now.
        "datasets",
    }
)  # fmt: skip
"""Keys that may change between the start of a run and its resumption."""


@dataclass(frozen=True)
class Start:
    """Where a run starts, and what it must have in common with what it goes on with."""

    device: torch.device
    world: train.World
    """The ranks that train together."""
    quantization: str | None
    """``nf4`` or ``int8``: of the frozen linear layers."""
    directory: train.RunDirectory
    checkpoint: train.Checkpoint | None
    """Where the run goes on from; None starts at the beginning."""
    identity: dict[str, Any]
    replaces: bool
    """Whether ``directory`` holds another run, which is moved aside first."""
    shares_weights: bool
    """Whether each rank holds a part of the weights."""
    continued: Mapping[Path, dict[str, Any]]
    """What is gone on with, and what it was started as."""
    allow: frozenset[str]
    """What may differ from that all the same: keys of the recipe, and ``data``."""
    notify: Notify
    planned_for: dict[str, Any] = field(default_factory=dict)
    """What the planner was asked, to ask it again where memory runs out."""
    engines: list[Any] = field(default_factory=list)
    """What gathers the weights of references that ranks share."""

    @property
    def sharing(self) -> train.World | None:
        """The ranks that share the weights; None where each has all of them."""
        return self.world if self.shares_weights else None

    def share(self, recipe: Recipe) -> Callable[[Any, Any], None]:
        """Gives a reference its weights, of which each rank holds a part; does nothing to one that has them."""

        def share(model: Any, layers: Any) -> None:
            engine = share_reference(recipe, model, layers, self.world, self.device)
            if engine is not None:
                self.engines.append(engine)

        return share

    def close(self) -> None:
        """Let go of what shares a reference."""
        for engine in self.engines:
            engine.destroy()
        self.engines.clear()

    def with_data(self, fingerprint: str) -> None:
        """Take note of the data. Run settings were compared before it was read, with which it takes minutes.

        Raises:
            DistributedError: It is not the data of the other ranks.
            RecipeError: It is not the data of the run that is gone on with.
        """
        told = self._check()
        agree({"data": fingerprint})
        self.identity["data"] = fingerprint
        changed = [text for text in self._check() if text not in told]
        self._tell(changed)
        if changed and self.checkpoint is not None and "epoch" in self.checkpoint.state["stream"]:
            self.checkpoint.state["stream"] = None
            self.notify("the data is another, as --allow-change data says: it is gone through from its beginning")

    def _check(self) -> list[str]:
        """The allowed differences; each once, though the directory and its checkpoint both tell them."""
        found = (
            train.check_same_run(started_as, self.identity, where=where, allow=self.allow)
            for where, started_as in self.continued.items()
        )
        return list(dict.fromkeys(text for texts in found for text in texts))

    def _tell(self, changes: Iterable[str]) -> None:
        for text in changes:
            self.notify(f"going on with a change: {text}")


def start_run(recipe: Recipe, resume: str, notify: Notify, allow_change: Collection[str] = ()) -> Start:
    """Find out where a run starts, and say what differs from the start of what it goes on with. Nothing is written.

    Args:
        recipe: The recipe.
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        notify: See :data:`Notify`.
        allow_change: What may differ: keys of the recipe, and ``data``.

    Raises:
        ArgumentError: A device that is not there, a quantisation that is not installed, or ``allow_change`` names
            nothing that could be refused.
        CheckpointError: The checkpoint named by ``resume`` cannot be used.
        DistributedError: The ranks have other versions or another recipe, or do not reach each other.
        RecipeError: What would be gone on with was started under other settings.
    """
    known = (*type(recipe).model_fields, "data")
    for name in allow_change:
        if name not in known:
            mend = did_you_mean(name, known) or "name a key of the recipe, or data"
            raise ArgumentError(f"there is no '{name}' to change", where="--allow-change", mend=mend)
    device = device_of_rank(choose_device(recipe.device))
    if recipe.deterministic:
        train.use_deterministic_kernels()
    quantization = choose_quantization(recipe, device)
    quiet_libraries(device)
    agree(_facts(recipe))
    world = make_world(recipe, device)
    directory = train.RunDirectory(Path(recipe.output_dir))
    before, checkpoint = world.main(
        lambda: (directory.read_identity(), train.find_checkpoint(directory, resume, notify))
    )
    continued = {directory.path: before} if before is not None and resume != "never" else {}
    if checkpoint is not None:
        continued[checkpoint.path] = checkpoint.state["identity"]
    start = Start(
        device=device,
        world=world,
        quantization=quantization,
        directory=directory,
        checkpoint=checkpoint,
        identity=_identify(recipe, quantization, world, before if resume != "never" else None),
        replaces=before is not None and resume == "never",
        shares_weights=shares_weights(recipe),
        continued=continued,
        allow=frozenset(allow_change),
        notify=notify,
    )
    start._tell(start._check())
    last = list(continued.values())[-1] if continued else start.identity
    start._tell(train.tell_changes(last, start.identity))
    if checkpoint is not None and train.ranks_of(checkpoint) != world.size:
        ranks = train.ranks_of(checkpoint)
        notify(
            f"the checkpoint is of {ranks} rank{'' if ranks == 1 else 's'} and goes on with {world.size}: dropout "
            "and other draws of the ranks are seeded anew, by the step and the rank"
        )
    return start


def _facts(recipe: Recipe) -> dict[str, str]:
    """What of a recipe must be the same on all ranks: everything but where the files are."""
    settings = recipe.model_dump(mode="json", exclude={"output_dir", "datasets"})
    return {f"recipe {name}": json.dumps(value) for name, value in settings.items()}


def _identify(
    recipe: Recipe, quantization: str | None, world: train.World, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What run this is: what a resumption must have in common with its start, and what is told where it differs.

    The rows of a step are those of all ranks together: on how many they are computed changes nothing but roundings.
    """
    compared = recipe.model_dump(mode="json", exclude={*FREE_KEYS, "quantization"})
    compared["gradient_accumulation_steps"] = accumulation(recipe, world) * world.data_size
    if recipe.objective == "sft":  # runs were started before there was another
        del compared["objective"]
    if quantization is not None:  # what `auto` became: on another device it is another model
        compared["quantization"] = quantization
    return {
        "run": (before or {}).get("run") or secrets.token_hex(8),
        "recipe": compared,
        "world_size": world.size,
        "free": recipe.model_dump(mode="json", include=set(FREE_KEYS) - {"output_dir", "datasets"}),
        "versions": {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def tell_of_model(model: Any, longest: int, start: Start, notify: Notify) -> None:
    """Say what is worth knowing of a loaded model before rows of ``longest`` tokens go through it.

    Raises:
        ArgumentError: They cannot: its table of positions is shorter.
    """
    notes = [models.check_positions(model, longest)]
    if start.checkpoint is None:
        notes.append(models.left_out(model))
    for note in notes:
        if note is not None:
            notify(note)
