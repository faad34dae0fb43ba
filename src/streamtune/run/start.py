"""Start a run: lock its directory, find the checkpoint to resume from, and compare the settings of the resumed run.

A changed setting that would change the training is an error that names the recipe key. The directory is locked before
it is read, so that its files do not change during the run.
"""

from __future__ import annotations

import os
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
from streamtune.distributed import check_ranks_agree
from streamtune.errors import ArgumentError, RecipeError, did_you_mean
from streamtune.optim.optimizers import WHOLE_STEP_MAKERS
from streamtune.recipe.keys.adapters import ADAPTER_KEYS, FREEZE_KEYS, TOWER_KEYS
from streamtune.recipe.loader import LoadedRecipe, path_exists
from streamtune.recipe.schema import Recipe
from streamtune.run.data import fingerprint_inputs, fingerprint_tokenizer_files
from streamtune.run.model import trained_parts
from streamtune.run.ranks import RunSetup, resolve_setup
from streamtune.run.weight_choices import rounding_warning, with_saved_precision
from streamtune.tasks import Task
from streamtune.tasks.task import Notify
from streamtune.tasks.teacher_file import teacher_file_date

Doing = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that shows a message during a slow activity."""
FREE_KEYS = frozenset(
    {
        # output paths and reports,
        "output_dir", "save_steps", "save_total_limit", "eval_steps", "logging_steps", "report_to", "sample",
        "early_stopping_patience", "early_stopping_threshold",
        "sample_steps", "callbacks",
        "num_completions_to_print", "save_async", "metric_for_best_model", "greater_is_better", "save_best_limit",
        # reactions to errors,
        "on_nan", "max_skips", "on_oom", "on_bad_row", "max_bad_rows",
        # caching and preparing of rows,
        "cache", "dataset_num_proc",
        # keys that only set other keys,
        "preset",
        # the FLOP/s that MFU is relative to,
        "peak_flops",
        # ways to compute the same gradient,
        "engine", "device", "per_device_eval_batch_size", "trust_remote_code", "allow_pickle", "share_prefix",
        "dataloader_num_workers", "deterministic", "optim_in_backward",
        "deepspeed", "fsdp", "sequence_parallel", "sequence_parallel_size",
        # keys that `rows_per_step` covers,
        "gradient_accumulation_steps", "train_batch_size",
        # and keys that the fingerprint of the data covers, wherever the files are now.
        "datasets", "eval_datasets",
    }
)  # fmt: skip
"""Keys that may change between the start of a run and its resumption."""


UNCHANGEABLE_KEYS = frozenset(
    {"model", "finetuning_type", "special_tokens", "added_tokens", *FREEZE_KEYS, *TOWER_KEYS, *ADAPTER_KEYS}
)
"""Keys that cannot change: the checkpoint already has the model or tokenizer that they describe, so a new value has no
effect, or it has optimizer states of other weights."""


TOKENIZER_KEYS = ("tokenizer", "chat_template")
"""Keys of the tokenizer. They may change, as when a folder was moved, and the run keeps the checkpoint's tokenizer."""


PATH_KEYS = (
    *("model_name_or_path", "ref_model_name_or_path", "teacher", "adapter_name_or_path"),
    *TOKENIZER_KEYS,
)
"""Keys that may name local files by paths, which depend on the working directory."""


ORDER_KEYS = ("seed", "shuffle", "prompts")
"""Keys that decide the order of the rows. After a change the data is read again from its beginning."""


STATE_DTYPE_KEYS = (("dtype", "auto"), ("weight_rounding", "nearest"))
"""Keys that decide the dtype of optimizer states, with their defaults."""


KEYS_ADDED_LATER = ("roles_to_train", "train_on_eos", "reasoning", "on_empty", "default_system", "chat_template_kwargs",
              "split_special_tokens",
              "rope_scaling", "rope_theta", "truncate_side", "split_at", "split_overlap", "mix_by", "special_tokens",
              "added_tokens", "batching", "tokens_per_batch", "buckets", "streaming", "shuffle_buffer",
              "select_rows", "select_from", "clip_norm", "optim_states", "optim_args", "lr_groups", "lr_layer_decay",
              "weight_rounding",
              "focal_gamma", "label_smoothing_factor", "z_loss_coef", "teacher", "kd_divergence", "kd_beta",
              "kd_temperature", "kd_hard_share", "lr_scheduler_kwargs", "lr_scaling",
              "lr_scaling_base", "adapter_type", "lora_exclude", "lora_rank_pattern", "lora_alpha_pattern",
              "lora_ga_rows", "lora_ga_gamma", "loftq_iter", "oft_block_size", "modules_to_save",
              "adapter_name_or_path", "allocation", *FREEZE_KEYS, *TOWER_KEYS)  # fmt: skip
"""Keys that are compared only if they are set, because older runs were started before these keys existed."""


FREE_KEYS_ADDED_LATER = ("sample_steps", "callbacks", "on_bad_row", "max_bad_rows", "cache", "dataset_num_proc",
              "peak_flops", "optim_in_backward", "early_stopping_patience", "early_stopping_threshold",
              "preset")  # fmt: skip
"""Keys of :data:`FREE_KEYS` that are recorded only if they are set, because older runs were started before they
existed."""


@dataclass(frozen=True)
class Start(RunSetup):
    """A run that is being started: setup, locked directory, and settings of the run that it resumes."""

    directory: train.RunDirectory
    checkpoint: train.Checkpoint | None
    """Checkpoint to resume from; None to train from the first step."""
    identity: dict[str, Any]
    """Settings of the run, and fingerprints (hashes) of its files and data; compared when the run is resumed."""
    replaces_run: bool
    """True if ``directory`` contains another run, which is renamed before this run starts."""
    resumed_identities: Mapping[Path, dict[str, Any]]
    """Path of the resumed run directory or checkpoint -> ``identity`` recorded there."""
    allow: frozenset[str]
    """Names that may differ from the resumed run: recipe keys, ``data``, and keys of ``train.FILES``."""
    notify: Notify
    fingerprint: Callable[[bool], dict[str, str]]
    """Function that returns the fingerprints of the files that are read; with True, also of models on the Hub."""
    changes: list[str] = field(default_factory=list)
    """Allowed differences from the resumed run, as text, for ``events.jsonl``."""
    lock: train.DirectoryLock | None = None
    """Lock of ``directory``; None in a dry run, and on ranks other than 0."""

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lock of the directory if an error was raised."""
        if kind is not None:
            self.release()

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def move_aside(self) -> Path | None:
        """If the directory contains another run, rename it and lock a new directory; return the new path of that run,
        or None.

        Raises:
            ArgumentError: Another process locked the new directory first.
        """
        if not self.replaces_run:
            return None
        if self.lock is None:
            return self.directory.move_aside()
        moved_to = self.lock.move_aside()
        try:
            self.lock.acquire(must_create=True)
        except ArgumentError as error:
            error.what += f"; the earlier run is now in {moved_to}"
            raise
        return moved_to

    def record_data(self, fingerprint: str) -> None:
        """Record the fingerprint of the data, and compare it with the other ranks and the resumed run.

        Raises:
            DistributedError: The data differs between ranks.
            RecipeError: The data differs from the data of the resumed run.
        """
        earlier_changes = self._compare_with_resumed()
        check_ranks_agree({"data": fingerprint})
        self.identity["data"] = fingerprint
        changed = [text for text in self._compare_with_resumed() if text not in earlier_changes]
        self._notify_changes(changed)
        position = None if self.checkpoint is None else self.checkpoint.state["stream"]
        reordered = self._keys_changed_since_checkpoint(ORDER_KEYS)
        if (
            (changed or reordered)
            and self.checkpoint is not None
            and position is not None
            and {"epoch", "picker"} & position.keys()
        ):
            # Completions, pass rates and gradient norms of grpo belong to the prompts of the old data.
            kept = {key: position[key] for key in position if key == "taken"}
            self.checkpoint.state["stream"] = kept if "picker" in position else None
            if changed:
                self.notify("the data changed, which --allow-change data permits: it is read again from its beginning")
            else:
                self.notify(
                    f"the order of the rows changed ({', '.join(reordered)}): the data is read from its beginning"
                )

    def _keys_changed_since_checkpoint(self, keys: Iterable[str]) -> list[str]:
        """Return the recipe keys whose values differ from the checkpoint; empty without a checkpoint."""
        if self.checkpoint is None:
            return []
        saved, current = self.resumed_identities[self.checkpoint.path].get("recipe", {}), self.identity["recipe"]
        return [key for key in keys if saved.get(key) != current.get(key)]

    def record_files(self, *, include_hubs: bool = False) -> None:
        """Record the fingerprints of files other than the data, and compare them with the resumed run.

        Called before and after the model is loaded.

        Args:
            include_hubs: True to include models on the Hub, whose commits are known after loading.

        Raises:
            ArgumentError: A file cannot be read, or changed between the two calls.
            RecipeError: A file differs from the file of the resumed run.
        """
        earlier_changes = self._compare_with_resumed()
        earlier_fingerprints = self.identity.get("files", {})
        fingerprints = self.world.run_on_rank_0(lambda: self.fingerprint(include_hubs))
        for key, value in earlier_fingerprints.items():
            if fingerprints.get(key) != value:
                raise ArgumentError(
                    f"{train.FILES[key]} changed while the run was starting ({key})",
                    fix="wait until the files are written, and start again",
                )
        self.identity["files"] = fingerprints
        self._notify_changes(text for text in self._compare_with_resumed() if text not in earlier_changes)

    def _notify_tokenizer_change(self, files: str | None) -> None:
        saved_files = self.checkpoint.state["identity"].get("tokenizer_files") if self.checkpoint is not None else None
        if None not in (saved_files, files) and saved_files != files:
            self.notify(
                "the files of the tokenizer or its chat template changed since the run started; the run keeps the "
                "tokenizer of its checkpoint"
            )
        elif keys := self._keys_changed_since_checkpoint(TOKENIZER_KEYS):
            self.notify(
                f"the change of {' and '.join(keys)} has no effect: the run keeps the tokenizer of its checkpoint"
            )
        self.identity["tokenizer_files"] = saved_files if self.checkpoint is not None else files

    @property
    def resets_optimizer(self) -> bool:
        """True if the states of the resumed run cannot be loaded: they are of another optimizer, of other options, or
        of another dtype that the optimizer cannot convert."""
        if self.checkpoint is None:
            return False
        saved, current = (identity.get("recipe", {}) for identity in (self.checkpoint.state["identity"], self.identity))
        pairs = [(identity.get("optim") or "adamw", identity.get("optim_args") or {}) for identity in (saved, current)]
        if pairs[0] != pairs[1] or pairs[1][0] in WHOLE_STEP_MAKERS:  # these convert states of another dtype
            return pairs[0] != pairs[1]
        return any((saved.get(key) or default) != (current.get(key) or default) for key, default in STATE_DTYPE_KEYS)

    def changed_file_keys(self) -> set[str]:
        """Return the keys of ``train.FILES`` whose files differ from the files of the resumed run."""
        now = self.identity.get("files", {})
        return {
            key
            for started_as in self.resumed_identities.values()
            for key, value in started_as.get("files", {}).items()
            if now.get(key, value) != value
        }

    def drop_old_reference_logprobs(self) -> None:
        """Delete the log-probs of the unfinished completions of grpo under a reference that has changed since.

        The run then writes new completions in place of these.
        """
        changed = self.changed_file_keys() & {"base", "adapter", "reference"}
        if self.checkpoint is None or not (changed or self._keys_changed_since_checkpoint(["ref_model_name_or_path"])):
            return
        rollout = (self.checkpoint.state["stream"] or {}).get("rollout") or {"groups": []}
        if any(group.get("ref") is not None for group in rollout["groups"]):
            for group in rollout["groups"]:
                group["ref"] = None
            self.notify("the reference changed: completions that the run has not finished with are written again")

    def copy_unread_fingerprints(self) -> None:
        """Copy the fingerprints of files that this process does not read from the resumed run."""
        for started_as in self.resumed_identities.values():  # the checkpoint comes last, so its fingerprints win
            self.identity["files"] = {**started_as.get("files", {}), **self.identity["files"]}

    def _compare_with_resumed(self) -> list[str]:
        """Raise an error unless this run may resume; return the allowed differences from the resumed run, as text."""
        for where, started_as in self.resumed_identities.items():
            self._check_rows_per_step(started_as, where)
            self._check_generation_size(started_as, where)
        changes = (
            train.check_same_run(
                started_as, self.identity, where=where, allowed_keys=self.allow, never_allowed_keys=UNCHANGEABLE_KEYS
            )
            for where, started_as in self.resumed_identities.items()
        )
        return list(dict.fromkeys(text for texts in changes for text in texts))

    def _check_rows_per_step(self, started_as: Mapping[str, Any], where: Path) -> None:
        """Check that another number of ranks does not change how many rows a step has."""
        key = "gradient_accumulation_steps"
        ranks = started_as.get("world_size", 1)
        saved, current = started_as.get("recipe", {}), self.identity["recipe"]
        if key in self.allow or ranks == self.world.size or not saved.get(key) or saved[key] == current[key]:
            return
        batch = current["per_device_train_batch_size"]
        if saved.get("per_device_train_batch_size") != batch:
            return
        names = [_count_ranks(count) for count in (ranks, self.world.size)]
        raise RecipeError(
            f"the run in {where} trains {batch * saved[key]} rows per step on {names[0]}, but this recipe trains "
            f"{batch * current[key]} on {names[1]}",
            fix=f"write train_batch_size: {batch * saved[key]}, which holds on any number of ranks, or start "
            f"{names[0]}; to resume with other steps, use --allow-change {key}",
        )

    def _check_generation_size(self, started_as: Mapping[str, Any], where: Path) -> None:
        """Check that another number of ranks does not change how many completions are written at a time."""
        key = "generation_batch_size"
        ranks = started_as.get("world_size", 1)
        saved, current = started_as.get("recipe", {}).get(key), self.identity["recipe"].get(key)
        if key in self.allow or ranks == self.world.size or None in (saved, current) or saved == current:
            return
        raise RecipeError(
            f"the run in {where} writes {saved} completions per generation on {_count_ranks(ranks)}, but this recipe "
            f"writes {current} on {_count_ranks(self.world.size)}",
            fix=f"write {key}: {saved} in place of steps_per_generation, which holds on any number of ranks, or start "
            f"{_count_ranks(ranks)}; to resume with other generations, use --allow-change {key}",
        )

    def _notify_changes(self, changes: Iterable[str]) -> None:
        for text in changes:
            self.changes.append(text)
            self.notify(f"resumed with a change: {text}")


def _count_ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def start_run(
    loaded: LoadedRecipe,
    resume: str,
    notify: Notify,
    allow_change: Collection[str] = (),
    *,
    dry_run: bool = False,
    doing: Doing = nullcontext,
) -> Start:
    """Return the start of a run, and notify the user of differences from the run that it resumes.

    The run directory is created and locked. Use the result as a context manager around building the run: an error
    releases the lock.

    Args:
        loaded: Recipe with the lines of its keys.
        resume: ``auto`` (resume the run in ``output_dir``), ``never``, or the path of a checkpoint.
        notify: Function called with messages for the user.
        allow_change: Names that may differ from the resumed run: recipe keys, ``data``, and keys of ``train.FILES``.
        dry_run: True to write nothing, and to ignore a lock of another process.
        doing: Function that returns a context manager, which shows a message during a slow activity.

    Raises:
        ArgumentError: A device or quantisation is not available, ``allow_change`` names an unknown key, or another
            process has locked the directory.
        CheckpointError: The checkpoint named by ``resume``, or every checkpoint of the directory, is unusable.
        DistributedError: Versions or recipe differ between ranks, or ranks cannot reach each other.
        RecipeError: The resumed run has other settings.
    """
    recipe = loaded.recipe
    known = (*type(recipe).model_fields, "data", *train.FILES)
    for name in allow_change:
        if name not in known:
            fix = did_you_mean(name, known) or f"give a recipe key, or one of: data, {', '.join(train.FILES)}"
            raise ArgumentError(f"--allow-change: unknown name '{name}'", where="--allow-change", fix=fix)
        if name in UNCHANGEABLE_KEYS:
            what = "tokens" if name in ("special_tokens", "added_tokens") else "weights"
            raise ArgumentError(
                f"'{name}' cannot change: the checkpoint has the {what} of the old value",
                where="--allow-change",
                fix="undo the change, or start a new run with another --output-dir",
            )
    setup = resolve_setup(loaded, notify)
    world = setup.world
    directory = train.RunDirectory(Path(recipe.output_dir))
    with ExitStack() as lock_stack:  # keeps the lock until this function succeeds; then the returned start keeps it

        def inspect_directory() -> tuple[dict[str, Any] | None, tuple[Path, dict[str, Any]] | None, str | None, str]:
            if not dry_run:
                lock = lock_stack.enter_context(directory.lock())
                if not lock.is_effective:
                    notify(
                        f"the file system of {directory.path} has no locks: start no other process that trains there"
                    )
                locks.append(lock)
            identity = directory.read_identity()
            if identity is not None and resume != "never":
                of_rows = (directory.selected, directory.path / "completions.jsonl")
                train.check_records((directory.metrics, directory.samples, *of_rows), directory.events)
            found = train.find_checkpoint(directory, resume, notify)
            files = fingerprint_tokenizer_files(recipe)
            taught = teacher_file_date(Path(recipe.teacher_file)) if recipe.teacher_file is not None else None
            state = None if found is None else (found.path, found.state)
            return identity, state, files, taught or date.today().isoformat()

        locks: list[train.DirectoryLock] = []
        existing, saved, tokenizer_files, today = world.run_on_rank_0(inspect_directory)
        checkpoint = None if saved is None else train.Checkpoint(*saved)
        resumed = checkpoint.state["identity"] if checkpoint is not None else existing if resume != "never" else None
        if resumed is not None:
            setup = setup.with_recipe(with_saved_precision(recipe, resumed.get("recipe", {})))
        continued = {directory.path: existing} if existing is not None and resume != "never" else {}
        if checkpoint is not None:
            continued[checkpoint.path] = checkpoint.state["identity"]
        continued = {
            path: _with_current_paths(_with_generation_size(identity), setup.recipe)
            for path, identity in continued.items()
        }
        dates = [identity["date"] for identity in continued.values() if "date" in identity]
        times: models.FileTimes = {}
        start = Start(
            **vars(setup),
            directory=directory,
            checkpoint=checkpoint,
            identity=_make_identity(setup, existing if resume != "never" else None, [today, *dates][-1]),
            replaces_run=existing is not None and resume == "never",
            resumed_identities=continued,
            allow=frozenset(
                "generation_batch_size" if name == "steps_per_generation" else name for name in allow_change
            ),
            notify=notify,
            fingerprint=lambda hubs: fingerprint_inputs(
                setup.task, loaded.path.parent, resumed=checkpoint is not None, include_hubs=hubs, times=times
            ),
            lock=locks[0] if locks else None,
        )
        if start.replaces_run:
            _refuse_own_inputs(setup.task, loaded.path.parent, directory.path)
        start._notify_changes(start._compare_with_resumed())
        with doing("reading the files of the model"):
            start.record_files()
        start._notify_tokenizer_change(tokenizer_files)
        last = list(continued.values())[-1] if continued else start.identity
        settings = [_with_unset_free_keys(identity, type(recipe)) for identity in (last, start.identity)]
        start._notify_changes(train.describe_harmless_changes(*settings))
        if start.resets_optimizer:
            notify("the optimizer or the dtype of its states changed, so its states are initialised again")
        if checkpoint is not None and checkpoint.num_ranks != world.size:
            notify(
                f"the checkpoint was saved on {_count_ranks(checkpoint.num_ranks)} and is resumed on {world.size}: "
                "dropout and other random numbers are seeded again, by step and rank"
            )
        lock_stack.pop_all()
    return start


def _refuse_own_inputs(task: Task[Any], folder: Path, output: Path) -> None:
    """Raise an ArgumentError if a new run reads a model or file in ``output``, the directory that would be renamed."""
    recipe = task.recipe
    names_by_key = {"model_name_or_path": recipe.model_name_or_path}
    names_by_key[task.reference_key] = task.reference_name
    names_by_key["adapter_name_or_path"] = recipe.adapter_name_or_path
    names_by_key["tokenizer"] = recipe.tokenizer.path if recipe.tokenizer is not None else None
    names_by_key |= {f"datasets.{number}": dataset.path for number, dataset in enumerate(recipe.datasets)}
    for name, datasets in recipe.eval_datasets.items():
        names_by_key |= {f"eval_datasets.{name}.{number}": dataset.path for number, dataset in enumerate(datasets)}
    names_in_output = []
    for key, name in names_by_key.items():
        for base_folder in (Path(), folder) if name is not None else ():
            with suppress(OSError, RuntimeError):  # not a file name: reading it raises the error
                is_inside = (base_folder / Path(str(name)).expanduser()).resolve().is_relative_to(output.resolve())
                if is_inside and (base_folder / Path(str(name)).expanduser()).exists():
                    names_in_output.append((key, name))
    for key, name in names_in_output[:1]:
        raise ArgumentError(
            f"{name} is in {output}, which `--resume never` would move aside",
            where=key,
            fix="give another --output-dir, or copy the file out of that directory first",
        )


def _make_identity(setup: RunSetup, resumed_identity: Mapping[str, Any] | None, date_text: str) -> dict[str, Any]:
    """Return the settings of a run that are compared when it is resumed (key ``recipe``) or reported (``free``).

    Args:
        setup: Setup of the run.
        resumed_identity: Identity of the resumed run; None for a new run.
        date_text: Date that chat templates print, even if the run is resumed on another day.
    """
    recipe = setup.recipe
    compared_settings = recipe.model_dump(mode="json", exclude={*FREE_KEYS, "quantization"})
    compared_settings["bf16"] = bool(recipe.bf16)
    compared_settings["gradient_accumulation_steps"] = setup.micro_batches * setup.world.data_size
    if recipe.tokens_per_batch is not None:  # tokens_per_batch sets the size of a step on any number of ranks
        compared_settings["gradient_accumulation_steps"] = 1
    if (steps := compared_settings.get("steps_per_generation")) is not None:  # it counts the completions of one rank
        size = steps * compared_settings["per_device_train_batch_size"] * setup.world.data_size
        compared_settings |= {"steps_per_generation": None, "generation_batch_size": size}
    if recipe.objective == "sft":  # older runs were started before there were other objectives
        del compared_settings["objective"]
        if recipe.loss_type == "nll":
            del compared_settings["loss_type"]
    if recipe.objective != "grpo":  # for other objectives it only allows callbacks, which change no result
        del compared_settings["allow_code"]
    for key in KEYS_ADDED_LATER:
        field = type(recipe).model_fields.get(key)  # some keys belong to one objective
        if field is not None and getattr(recipe, key) == field.get_default(call_default_factory=True):
            del compared_settings[key]
    unset_keys = {
        key for key in FREE_KEYS_ADDED_LATER if getattr(recipe, key) == type(recipe).model_fields[key].default
    }
    if setup.quantization is not None:  # the choice of `auto`, which differs by device
        compared_settings["quantization"] = setup.quantization
    return {
        "run": (resumed_identity or {}).get("run") or secrets.token_hex(8),
        "date": date_text,
        "recipe": compared_settings,
        "world_size": setup.world.size,
        "free": recipe.model_dump(
            mode="json", include=set(FREE_KEYS) - {"output_dir", "datasets", "eval_datasets", *unset_keys}
        ),
        "versions": {"streamtune": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def _with_generation_size(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity of an older run with ``generation_batch_size`` in place of ``steps_per_generation``."""
    settings = identity.get("recipe", {})
    if settings.get("steps_per_generation") is None:
        return identity
    data_size = identity.get("world_size", 1) // identity.get("free", {}).get("sequence_parallel_size", 1)
    size = settings["steps_per_generation"] * settings["per_device_train_batch_size"] * data_size
    return {**identity, "recipe": {**settings, "steps_per_generation": None, "generation_batch_size": size}}


def _with_current_paths(identity: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the identity of a resumed run with the current paths of files that it names from another directory.

    Fingerprints compare the content of these files.
    """
    settings = identity.get("recipe", {})
    current = recipe.model_dump(mode="json", include={*PATH_KEYS})
    same = {key: value for key, value in current.items() if _is_same_path(settings.get(key), value)}
    return {**identity, "recipe": {**settings, **same}} if same else identity


def _is_same_path(old: Any, new: Any) -> bool:
    """Return True if a path that exists ends with the parts of an earlier path, which was relative or the same."""
    if isinstance(old, dict) and isinstance(new, dict):  # tokenizer: {path: ...}
        old, new = old.get("path"), new.get("path")
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return False
    parts, path = Path(os.path.normpath(old)).parts, Path(os.path.abspath(new))  # noqa: PTH100 - without "..", links kept
    return path_exists(path) and path.parts[-len(parts) :] == parts


def _with_unset_free_keys(identity: Mapping[str, Any], recipe_type: type[Recipe]) -> Mapping[str, Any]:
    """Return ``identity`` with the defaults of the keys that are recorded only if they are set."""
    if "free" not in identity:
        return identity
    defaults = {key: recipe_type.model_fields[key].default for key in FREE_KEYS_ADDED_LATER}
    defaults = {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}
    return {**identity, "free": {**defaults, **identity["free"]}}


def notify_model_warnings(model: Any, longest_row: int, start: Start, notify: Notify) -> None:
    """Notify the user of warnings about a loaded model, and record the fingerprints of its files.

    Args:
        model: Loaded model.
        longest_row: Tokens of the longest row.
        start: Start of the run.
        notify: Function called with the warnings.

    Raises:
        ArgumentError: Rows are longer than the model's position table, or a file changed while it was read.
        RecipeError: The model's files differ from the files of the resumed run.
    """
    notes = [
        models.check_positions(model, longest_row),
        models.unquantized_experts_note(model),
        rounding_warning(start.recipe, model),
    ]
    if start.checkpoint is None:
        notes += [models.unloaded_layers_warning(model), models.frozen_modules_note(model)]
        notes.append(models.frozen_parts_note(model, trained_parts(start.recipe)))
    for note in notes:
        if note is not None:
            notify(note)
    start.record_files(include_hubs=True)
    start.drop_old_reference_logprobs()
    last = list(start.resumed_identities.values())[-1] if start.resumed_identities else None
    if last is not None and "files" not in last and start.identity["files"]:
        notify(
            "the run was started by a version that saved no fingerprints; it is unknown whether these files changed: "
            f"{', '.join(start.identity['files'])}"
        )
    start.copy_unread_fingerprints()
