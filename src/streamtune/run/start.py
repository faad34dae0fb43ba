"""Start a run: find its directory and the checkpoint it goes on from.

The settings of a run that is resumed are compared with those of the recipe, and a difference that would change the
training is refused by name. The directory is held before it is read, so that decisions made from its files hold until
the run is over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from streamtune import __version__, models, train
from streamtune.distributed import agree
from streamtune.errors import ArgumentError, RecipeError, did_you_mean
from streamtune.recipe.keys.adapters import ADAPTER_KEYS
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import fingerprint_inputs, fingerprint_tokenizer_files
from streamtune.run.ranks import Setup, resolve
from streamtune.run.weight_choices import as_before, loses_steps
from streamtune.tasks import Task
from streamtune.tasks.task import Notify

Doing = Callable[[str], AbstractContextManager[Any]]
"""Returns a context that shows a message while something takes long."""
FREE_KEYS = frozenset(
    {
        # Where things go and what is shown,
        "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "sample",
        "early_stopping_patience", "early_stopping_threshold",
        "sample_steps", "callbacks",
        "num_completions_to_print", "save_async", "metric_for_best_model", "greater_is_better", "save_best_limit",
        # what is done about what goes wrong,
        "on_nan", "max_skips", "on_oom", "on_bad_row", "max_bad_rows",
        # where rows that were prepared before are found,
        "cache", "dataset_num_proc",
        # what only sets other keys,
        "preset",
        # what a step is compared with,
        "peak_flops",
        # how the same gradient is computed,
        "engine", "device", "per_device_eval_batch_size", "trust_remote_code", "allow_pickle", "share_prefix",
        "dataloader_num_workers", "deterministic", "optim_in_backward",
        "deepspeed", "fsdp", "sequence_parallel", "sequence_parallel_size",
        # what `rows_per_step` says,
        "gradient_accumulation_steps", "train_batch_size",
        # and what the fingerprint of the data covers, wherever the files are now.
        "datasets", "eval_datasets",
    }
)  # fmt: skip
"""Keys that may change between the start of a run and its resumption."""


SHAPE_KEYS = frozenset({"model", "finetuning_type", *ADAPTER_KEYS})
"""Keys that cannot change, for a checkpoint brings what they decide: a new value would be written down and not used."""


LATER_KEYS = ("roles_to_train", "train_on_eos", "reasoning", "on_empty", "default_system", "chat_template_kwargs",
              "split_special_tokens",
              "rope_scaling", "rope_theta", "truncate_side", "split_at", "split_overlap", "mix_by", "special_tokens",
              "added_tokens", "batching", "tokens_per_batch", "buckets", "streaming", "shuffle_buffer",
              "select_rows", "select_from", "clip_norm", "optim_states", "optim_args", "lr_groups", "lr_layer_decay",
              "weight_rounding",
              "focal_gamma", "label_smoothing_factor", "z_loss_coef", "teacher", "kd_divergence", "kd_beta",
              "kd_temperature", "kd_hard_share", "lr_scheduler_kwargs", "lr_scaling",
              "lr_scaling_base", "adapter_type", "lora_exclude", "lora_rank_pattern", "lora_alpha_pattern",
              "lora_ga_rows", "lora_ga_gamma", "loftq_iter", "oft_block_size", "modules_to_save",
              "adapter_name_or_path", "allocation")  # fmt: skip
"""Keys that are compared once they are given: runs were started before there were such keys."""


@dataclass(frozen=True)
class Start(Setup):
    """The start of a run, and what it must have in common with the run that it resumes."""

    directory: train.RunDirectory
    checkpoint: train.Checkpoint | None
    """The checkpoint that the run goes on from; None starts at the beginning."""
    identity: dict[str, Any]
    """The settings and fingerprints of the run; those of files, data and model are added as they become known."""
    replaces: bool
    """True if ``directory`` holds another run, which is moved aside first."""
    continued: Mapping[Path, dict[str, Any]]
    """The run directory and the checkpoint that are resumed, each with the identity it was started with."""
    allow: frozenset[str]
    """Keys that may differ from it all the same: keys of the recipe, ``data``, and keys of ``train.FILES``."""
    notify: Notify
    fingerprint: Callable[[bool], dict[str, str]]
    """Fingerprints of the files that are read, of models on a hub too where asked."""
    changes: list[str] = field(default_factory=list)
    """Allowed differences from the run that it goes on with, in the words of the notes; ``events.jsonl`` has them."""
    lock: train.DirectoryLock | None = None
    """Keeps other processes out of ``directory``; None in a dry run, and on ranks other than 0."""

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the directory if building the run failed; a run that is built keeps it."""
        if kind is not None:
            self.release()

    def release(self) -> None:
        """Release the directory, so that other processes can have it."""
        if self.lock is not None:
            self.lock.release()

    def move_aside(self) -> Path | None:
        """Rename the directory if it holds another run, and hold a new one in its place; return where that run is.

        Raises:
            ArgumentError: Another process was faster with the new directory.
        """
        if not self.replaces:
            return None
        if self.lock is None:
            return self.directory.move_aside()
        aside = self.lock.move_aside()
        try:
            self.lock.take(new=True)
        except ArgumentError as error:
            error.what += f"; the run that was there is now in {aside}"
            raise
        return aside

    def with_data(self, fingerprint: str) -> None:
        """Record the fingerprint of the data, and compare it.

        Settings were compared before the data was read, because reading it takes minutes.

        Raises:
            DistributedError: It is not the data of the other ranks.
            RecipeError: It is not the data of the resumed run.
        """
        before = self._check()
        agree({"data": fingerprint})
        self.identity["data"] = fingerprint
        changed = [text for text in self._check() if text not in before]
        self._tell(changed)
        if changed and self.checkpoint is not None and "epoch" in self.checkpoint.state["stream"]:
            self.checkpoint.state["stream"] = None
            self.notify("the data is another, as --allow-change data says: it is gone through from its beginning")

    def with_files(self, *, hubs: bool = False) -> None:
        """Record the fingerprints of the files read besides the data. Called before the model is loaded, and after.

        Args:
            hubs: Include models on a hub: their commit is known once they are loaded.

        Raises:
            ArgumentError: They changed while they were read, or cannot be read.
            RecipeError: They are not those of the resumed run.
        """
        known = self._check()
        before = self.identity.get("files", {})
        found = self.world.main(lambda: self.fingerprint(hubs))
        for key, value in before.items():
            if found.get(key) != value:
                raise ArgumentError(
                    f"{train.FILES[key]} changed while the run was being started ({key})",
                    fix="wait until they are written, and start again",
                )
        self.identity["files"] = found
        self._tell(text for text in self._check() if text not in known)

    def _tell_tokenizer(self, files: str | None) -> None:
        before = self.checkpoint.state["identity"].get("tokenizer_files") if self.checkpoint is not None else None
        if None not in (before, files) and before != files:
            self.notify(
                "the files of the tokenizer, or its chat template, have changed since the run started; it goes on with "
                "the tokenizer in its checkpoint"
            )
        self.identity["tokenizer_files"] = before if self.checkpoint is not None else files

    @property
    def begins_optimizer(self) -> bool:
        """True if the run goes on with another optimizer, or other options of it: the saved states do not fit."""
        if self.checkpoint is None:
            return False
        before, now = (each.get("recipe", {}) for each in (self.checkpoint.state["identity"], self.identity))
        pairs = [(each.get("optim") or "adamw", each.get("optim_args") or {}) for each in (before, now)]
        return pairs[0] != pairs[1]

    def changed_files(self) -> set[str]:
        """Return the keys of ``train.FILES`` that differ from the resumed run, and may."""
        now = self.identity.get("files", {})
        return {
            key
            for started_as in self.continued.values()
            for key, value in started_as.get("files", {}).items()
            if now.get(key, value) != value
        }

    def keep_unread_files(self) -> None:
        """Take over the fingerprints of files that are not read this time: the next start may read them."""
        for started_as in self.continued.values():  # the checkpoint's last: the run goes on with what it was made with
            self.identity["files"] = {**started_as.get("files", {}), **self.identity["files"]}

    def _check(self) -> list[str]:
        """Return the allowed differences, each once: the directory and its checkpoint may both have it."""
        for where, started_as in self.continued.items():
            self._check_rows(started_as, where)
        found = (
            train.check_same_run(started_as, self.identity, where=where, allow=self.allow, fixed=SHAPE_KEYS)
            for where, started_as in self.continued.items()
        )
        return list(dict.fromkeys(text for texts in found for text in texts))

    def _check_rows(self, started_as: Mapping[str, Any], where: Path) -> None:
        """Refuse another number of ranks if their steps have other rows; the error names keys that a user writes.

        The identity counts the micro-batches of all ranks as ``gradient_accumulation_steps``; the recipe may lack this
        key.
        """
        key = "gradient_accumulation_steps"
        ranks = started_as.get("world_size", 1)
        before, now = started_as.get("recipe", {}), self.identity["recipe"]
        if key in self.allow or ranks == self.world.size or not before.get(key) or before[key] == now[key]:
            return
        batch = now["per_device_train_batch_size"]
        if before.get("per_device_train_batch_size") != batch:
            return
        names = [f"{count} rank{'' if count == 1 else 's'}" for count in (ranks, self.world.size)]
        raise RecipeError(
            f"the steps of the run in {where} have {batch * before[key]} rows, on {names[0]}; with {names[1]} this "
            f"recipe makes steps of {batch * now[key]}",
            fix=f"write train_batch_size: {batch * before[key]}, which is the same on any number of ranks, or start "
            f"{names[0]}; to go on with other steps, --allow-change {key}",
        )

    def _tell(self, changes: Iterable[str]) -> None:
        for text in changes:
            self.changes.append(text)
            self.notify(f"going on with a change: {text}")


def start_run(
    loaded: LoadedRecipe,
    resume: str,
    notify: Notify,
    allow_change: Collection[str] = (),
    *,
    dry_run: bool = False,
    doing: Doing = nullcontext,
) -> Start:
    """Prepare the start of a run, and notify the user of differences from the run that it resumes.

    The directory is made and held before it is read, and removed again where it was made for nothing. The result is the
    context of the code that builds the run.

    Args:
        resume: ``auto`` (go on where the run in ``output_dir`` stopped), ``never``, or the path of a checkpoint.
        allow_change: Keys that may differ: keys of the recipe, ``data``, and keys of ``train.FILES``.
        dry_run: Write nothing; neither hold the directory nor fail if another process does.

    Raises:
        ArgumentError: A device or quantisation is not there, ``allow_change`` names an unknown key, or another process
            has the directory.
        CheckpointError: The checkpoint named by ``resume`` cannot be used, or none of the run in the directory.
        DistributedError: The ranks have other versions or another recipe, or do not reach each other.
        RecipeError: The resumed run was started under other settings.
    """
    recipe = loaded.recipe
    known = (*type(recipe).model_fields, "data", *train.FILES)
    for name in allow_change:
        if name not in known:
            fix = did_you_mean(name, known) or f"name a key of the recipe, or one of: data, {', '.join(train.FILES)}"
            raise ArgumentError(f"there is no '{name}' to change", where="--allow-change", fix=fix)
        if name in SHAPE_KEYS:
            raise ArgumentError(
                f"'{name}' is decided by what the run goes on with: its checkpoint has the weights of the old one",
                where="--allow-change",
                fix="undo the change, or start anew with another --output-dir",
            )
    setup = resolve(loaded, notify)
    world = setup.world
    directory = train.RunDirectory(Path(recipe.output_dir))
    with ExitStack() as held:  # until this start is found to be possible, and by what is returned from then on

        def look() -> tuple[dict[str, Any] | None, tuple[Path, dict[str, Any]] | None, str | None, str]:
            if not dry_run:
                lock = held.enter_context(directory.lock())
                if not lock.works:
                    notify(f"nothing keeps a second start out of {directory.path}: its file system has no locks")
                taken.append(lock)
            identity = directory.read_identity()
            if identity is not None and resume != "never":
                of_rows = (directory.selected, directory.path / "completions.jsonl")
                train.check_records((directory.metrics, directory.samples, *of_rows), directory.events)
            found = train.find_checkpoint(directory, resume, notify)
            files = fingerprint_tokenizer_files(recipe)
            return identity, None if found is None else (found.path, found.state), files, date.today().isoformat()

        taken: list[train.DirectoryLock] = []
        before, kept, tokenizer_files, today = world.main(look)
        checkpoint = None if kept is None else train.Checkpoint(*kept)
        begun = checkpoint.state["identity"] if checkpoint is not None else before if resume != "never" else None
        if begun is not None:
            setup = setup.with_recipe(as_before(recipe, begun.get("recipe", {})))
        continued = {directory.path: before} if before is not None and resume != "never" else {}
        if checkpoint is not None:
            continued[checkpoint.path] = checkpoint.state["identity"]
        dates = [identity["date"] for identity in continued.values() if "date" in identity]
        times: models.FileTimes = {}
        start = Start(
            **vars(setup),
            directory=directory,
            checkpoint=checkpoint,
            identity=_identify(setup, before if resume != "never" else None, [today, *dates][-1]),
            replaces=before is not None and resume == "never",
            continued=continued,
            allow=frozenset(allow_change),
            notify=notify,
            fingerprint=lambda hubs: fingerprint_inputs(
                setup.task, loaded.path.parent, resumed=checkpoint is not None, hubs=hubs, times=times
            ),
            lock=taken[0] if taken else None,
        )
        if start.replaces:
            _refuse_own_inputs(setup.task, loaded.path.parent, directory.path)
        start._tell(start._check())
        with doing("reading the files of the model"):
            start.with_files()
        start._tell_tokenizer(tokenizer_files)
        last = list(continued.values())[-1] if continued else start.identity
        start._tell(train.tell_changes(last, start.identity))
        if start.begins_optimizer:
            notify("the optimizer is another one, so its states begin anew")
        if checkpoint is not None and checkpoint.ranks != world.size:
            ranks = checkpoint.ranks
            notify(
                f"the checkpoint is of {ranks} rank{'' if ranks == 1 else 's'} and goes on with {world.size}: dropout "
                "and other draws of the ranks are seeded anew, by the step and the rank"
            )
        held.pop_all()
    return start


def _refuse_own_inputs(task: Task[Any], folder: Path, output: Path) -> None:
    """Refuse to move a run aside that the new one reads from; ``output`` is the directory that would be moved."""
    recipe = task.recipe
    named = {"model_name_or_path": recipe.model_name_or_path}
    named[task.reference_key] = task.reference_name
    named["adapter_name_or_path"] = recipe.adapter_name_or_path
    named["tokenizer"] = recipe.tokenizer.path if recipe.tokenizer is not None else None
    named |= {f"datasets.{number}": dataset.path for number, dataset in enumerate(recipe.datasets)}
    for name, datasets in recipe.eval_datasets.items():
        named |= {f"eval_datasets.{name}.{number}": dataset.path for number, dataset in enumerate(datasets)}
    found = []
    for key, name in named.items():
        for start in (Path(), folder) if name is not None else ():
            with suppress(OSError, RuntimeError):  # no name of a file, which reading it says
                inside = (start / Path(str(name)).expanduser()).resolve().is_relative_to(output.resolve())
                if inside and (start / Path(str(name)).expanduser()).exists():
                    found.append((key, name))
    for key, name in found[:1]:
        raise ArgumentError(
            f"{name} is in {output}, which --resume never would move aside",
            where=key,
            fix="give another --output-dir, or copy it out of that directory first",
        )


def _identify(setup: Setup, before: Mapping[str, Any] | None, day: str) -> dict[str, Any]:
    """Return the identity of a run: the settings that a resumption must share, and others whose changes are reported.

    The rows of a step are counted over all ranks: the number of ranks changes nothing but roundings.

    Args:
        before: The identity of the resumed run, if there is one.
        day: The date that chat templates print, on whatever day the run is resumed.
    """
    recipe = setup.recipe
    compared = recipe.model_dump(mode="json", exclude={*FREE_KEYS, "quantization"})
    compared["bf16"] = bool(recipe.bf16)
    compared["gradient_accumulation_steps"] = setup.micro_batches * setup.world.data_size
    if recipe.tokens_per_batch is not None:  # which says what a step holds, on any number of ranks
        compared["gradient_accumulation_steps"] = 1
    if recipe.objective == "sft":  # runs were started before there was another
        del compared["objective"]
        if recipe.loss_type == "nll":
            del compared["loss_type"]
    if recipe.objective != "grpo":  # elsewhere it decides about callbacks alone, which change no result
        del compared["allow_code"]
    for key in LATER_KEYS:
        field = type(recipe).model_fields.get(key)  # some are of one objective
        if field is not None and getattr(recipe, key) == field.get_default(call_default_factory=True):
            del compared[key]
    newer = (
        "sample_steps",
        "callbacks",
        "on_bad_row",
        "max_bad_rows",
        "cache",
        "dataset_num_proc",
        "peak_flops",
        "optim_in_backward",
        "early_stopping_patience",
        "early_stopping_threshold",
        "preset",
    )  # runs are older than these
    unset = {key for key in newer if getattr(recipe, key) == type(recipe).model_fields[key].default}
    if setup.quantization is not None:  # what `auto` became: on another device it is another model
        compared["quantization"] = setup.quantization
    return {
        "run": (before or {}).get("run") or secrets.token_hex(8),
        "date": day,
        "recipe": compared,
        "world_size": setup.world.size,
        "free": recipe.model_dump(
            mode="json", include=set(FREE_KEYS) - {"output_dir", "datasets", "eval_datasets", *unset}
        ),
        "versions": {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def tell_of_model(model: Any, longest: int, start: Start, notify: Notify) -> None:
    """Pass on warnings about a loaded model and rows of ``longest`` tokens, and record the model's files.

    Raises:
        ArgumentError: Its table of positions is shorter than the rows, or a file changed while it was read.
        RecipeError: The model's files are not those of the resumed run.
    """
    notes = [models.check_positions(model, longest), models.left_whole(model), loses_steps(start.recipe, model)]
    if start.checkpoint is None:
        notes.append(models.left_out(model))
    for note in notes:
        if note is not None:
            notify(note)
    start.with_files(hubs=True)
    last = list(start.continued.values())[-1] if start.continued else None
    if last is not None and "files" not in last and start.identity["files"]:
        notify(
            "the run was started by a version that kept no fingerprints of files; whether these changed since is not "
            f"known: {', '.join(start.identity['files'])}"
        )
    start.keep_unread_files()
