"""Dataset sources and tokenizer of a recipe, and fingerprints (hashes) of the other files that a run reads.

When a run is resumed, the fingerprints must be unchanged:

    base        model_name_or_path: configuration and weights of a folder, or the commit of a model on the Hub
    adapter     base model recorded in model_name_or_path, if that folder contains adapters
    start       adapter_name_or_path: adapters that training starts from
    reference   ref_model_name_or_path or teacher: a model, or a file of teacher probabilities
    rewards     source code of the user's reward functions

A resumed run keeps the tokenizer of its checkpoint, so a changed tokenizer file is only reported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, models, train
from streamtune.base.chat_templates import CHAT_TEMPLATES, print_images
from streamtune.data.templates import image_text
from streamtune.distributed import read_environment
from streamtune.errors import OutOfMemoryError, UserError
from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.keys.model_and_tokenizer import ModelKeys
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.rules import is_given
from streamtune.recipe.schema import Recipe
from streamtune.recipe.settings import TokenizerSettings
from streamtune.tasks import Task, rewards
from streamtune.tasks.task import PreparedRows, row_cache
from streamtune.tasks.teacher_file import teacher_file_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_tokenizer(
    recipe: TokenizerSettings,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
    *,
    set_template: bool = True,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the checkpoint or recipe, or train a new tokenizer on the rows.

    Args:
        recipe: Settings of the tokenizer.
        sources: Sources of the rows.
        checkpoint: Checkpoint that is resumed; None for a new run.
        notify: Function called with messages for the user.
        set_template: True to set the recipe's chat template.
    """
    if checkpoint is not None:
        return models.load_tokenizer(str(checkpoint.model_dir), trust_remote_code=recipe.trust_remote_code)
    spec = recipe.tokenizer
    tokenizer: PreTrainedTokenizerBase
    if spec is not None and spec.train is not None:
        trained_on = [source for source in sources if source.evaluates is None]
        tokenizer, is_cached = _train_tokenizer(recipe, trained_on, spec.train.vocab_size, notify)
        how = (
            "reused the byte-level BPE tokenizer that was trained on these rows before, with"
            if is_cached
            else "trained a byte-level BPE tokenizer with"
        )
        notify(f"{how} {len(tokenizer):,} entries")
        models.add_tokens(tokenizer, recipe.special_tokens.model_dump(), recipe.added_tokens)
        models.add_image_tokens(tokenizer, _new_model_keys(recipe))
        if family := models.image_family(_new_model_keys(recipe)):
            tokenizer.chat_template = print_images(str(tokenizer.chat_template), family.shown)
    else:
        tokenizer = models.load_tokenizer(
            _tokenizer_name(recipe),
            trust_remote_code=recipe.trust_remote_code,
            special_tokens=recipe.special_tokens.model_dump(),
            added_tokens=recipe.added_tokens,
        )
        models.add_image_tokens(tokenizer, _new_model_keys(recipe))
    _notify_new_tokens(recipe, tokenizer, notify)
    if set_template and recipe.chat_template is not None:
        models.set_chat_template(tokenizer, recipe.chat_template, image_text(tokenizer))
        if note := models.describe_missing_tokens(tokenizer, recipe.chat_template):
            notify(note)
    return tokenizer


def _new_model_keys(recipe: ModelKeys) -> Mapping[str, Any]:
    return {} if recipe.model is None else recipe.model.init


def _train_tokenizer(
    recipe: TokenizerSettings, sources: Sequence[data.Source], vocab_size: int, notify: Callable[[str], None]
) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return a tokenizer trained on the rows, and True if it was cached."""
    cache = row_cache(recipe)
    settings = {
        "vocab_size": vocab_size,
        "on_bad_row": recipe.on_bad_row,
        "max_bad_rows": recipe.max_bad_rows,
        "code": [inspect.getsource(sys.modules[each.__module__]) for each in (models.train_tokenizer, data.iter_texts)],
    }
    trained: list[PreTrainedTokenizerBase] = []

    def make_tokenizer_json() -> str:
        texts = data.iter_texts(sources, on_bad_row=recipe.on_bad_row, max_bad_rows=recipe.max_bad_rows, calls=True)
        trained.append(models.train_tokenizer(texts, vocab_size=vocab_size))
        backend: Any = trained[0].backend_tokenizer
        text: str = backend.to_str()
        return text

    if cache is None:
        make_tokenizer_json()
        return trained[0], False
    text, is_cached = cache.cached_text(sources, settings, make_tokenizer_json, notify)
    return trained[0] if trained else models.read_trained_tokenizer(text), is_cached


def prepare_on_all_ranks(
    task: Task[Any],
    world: train.World,
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Callable[[str], None],
) -> PreparedRows:
    """Return the tokenized rows. Called by all ranks; with a cache, the first rank of each machine fills it."""
    prepared_rows: list[PreparedRows] = []

    def prepare() -> PreparedRows:
        return prepared_rows[0] if prepared_rows else task.prepare_training(sources, tokenizer, notify)

    if world.size > 1 and task.recipe.cache:
        is_local_main = read_environment().local_rank == 0
        world.run_on_all_ranks(lambda: prepared_rows.append(prepare()) if is_local_main else None)
    return world.run_on_all_ranks(prepare)


def _tokenizer_name(recipe: ModelKeys) -> str:
    name = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path
    assert name is not None, "unreachable: the recipe schema requires a tokenizer if no model is named"
    return name


def _notify_new_tokens(recipe: ModelKeys, tokenizer: PreTrainedTokenizerBase, notify: Callable[[str], None]) -> None:
    new = new_token_ids(recipe, tokenizer)
    if new:
        shown = ", ".join(tokenizer.convert_ids_to_tokens(new[:8])) + (" ..." if len(new) > 8 else "")
        notify(f"added {len(new):,} tokens to the tokenizer: {shown}; it now has {len(tokenizer):,}")


def new_token_ids(recipe: ModelKeys, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of tokens that the recipe adds to the tokenizer of a pretrained model, in ascending order."""
    special = recipe.special_tokens.model_dump(exclude_defaults=True)
    trains = recipe.tokenizer is not None and recipe.tokenizer.train is not None
    if trains or recipe.model_name_or_path is None or not (special or recipe.added_tokens):
        return []
    before = models.read_vocabulary(_tokenizer_name(recipe), trust_remote_code=recipe.trust_remote_code)
    return models.new_token_ids(before, tokenizer, special, recipe.added_tokens)


def make_shared_tokenizer(
    world: train.World,
    recipe: TokenizerSettings,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the same tokenizer on every rank. Called by all ranks.

    Rank 0 trains a new tokenizer and sends it to the other ranks. Existing tokenizers are loaded from the files of each
    machine, with the chat template of rank 0.
    """
    loaded: list[PreTrainedTokenizerBase] = []
    is_trained = checkpoint is None and recipe.tokenizer is not None and recipe.tokenizer.train is not None

    def make_on_rank_0() -> tuple[str | None, Any]:
        loaded.append(make_tokenizer(recipe, sources, checkpoint, notify))
        backend: Any = loaded[0].backend_tokenizer if is_trained else None
        return backend.to_str() if is_trained else None, loaded[0].chat_template

    text, template = world.run_on_rank_0(make_on_rank_0)

    def read() -> PreTrainedTokenizerBase:
        if loaded:
            return loaded[0]
        tokenizer: PreTrainedTokenizerBase
        if text is None:
            tokenizer = make_tokenizer(recipe, sources, checkpoint, notify, set_template=False)
        else:
            tokenizer = models.read_trained_tokenizer(text)
            models.add_tokens(tokenizer, recipe.special_tokens.model_dump(), recipe.added_tokens)
            models.add_image_tokens(tokenizer, _new_model_keys(recipe))
        tokenizer.chat_template = template
        return tokenizer

    return world.run_on_all_ranks(read)


def fingerprint_inputs(
    task: Task[Any], folder: Path, *, resumed: bool, include_hubs: bool, times: models.FileTimes
) -> dict[str, str]:
    """Return the fingerprints of the files that the run reads, by the keys of :data:`streamtune.train.FILES`.

    Args:
        task: Task of the run.
        folder: Folder of the recipe, for relative paths of reward functions.
        resumed: True if the run resumes from a checkpoint.
        include_hubs: True to include the commits of models on the Hub, which are known once the models are loaded.
        times: Modification times of files from earlier calls; files that are read for the first time are added.

    Raises:
        ArgumentError: A file cannot be read, or its modification time differs from ``times``.
    """
    fingerprints: dict[str, str | None] = {}
    recipe = task.recipe
    name, reference = recipe.model_name_or_path, task.reference_name
    if name is not None and reads_base_weights(task, resumed=resumed) and _can_fingerprint(name, include_hubs):
        fingerprints["base"] = models.fingerprint_model(name, code=recipe.trust_remote_code, times=times)
        if (base := models.local_adapter_base(name)) is not None:
            fingerprints["adapter"] = models.fingerprint_model(base, code=recipe.trust_remote_code, times=times)
    if recipe.adapter_name_or_path is not None and recipe.finetuning_type != "full" and not resumed:
        fingerprints["start"] = models.fingerprint_model(recipe.adapter_name_or_path, times=times)
    if reference is not None and _can_fingerprint(reference, include_hubs):
        fingerprints["reference"] = models.fingerprint_model(reference, code=recipe.trust_remote_code, times=times)
        if (base := models.local_adapter_base(reference)) is not None:
            base_fingerprint = models.fingerprint_model(base, code=recipe.trust_remote_code, times=times)
            fingerprints["reference"] = f"{fingerprints['reference']} on {base_fingerprint}"
    if recipe.teacher_file is not None:
        fingerprints["reference"] = teacher_file_digest(Path(recipe.teacher_file))
    if sources := rewards.reward_sources(list(task.reward_funcs), folder):
        fingerprints["rewards"] = models.fingerprint_files(sources.items(), times)
    return {key: value for key, value in fingerprints.items() if value is not None}


def fingerprint_tokenizer_files(recipe: ModelKeys) -> str | None:
    """Return the fingerprint of the tokenizer's local files and the chat template file; None if there are none."""
    name = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path
    parts = [models.fingerprint_tokenizer(name)] if name is not None else []
    template = recipe.chat_template
    if template is not None and "{" not in template and template not in CHAT_TEMPLATES:
        with suppress(OSError, RuntimeError):  # not a file name: reading it raises the error
            if (path := Path(template).expanduser()).is_file():
                parts.append(models.fingerprint_files([("chat_template", path)]))
    return " ".join(part for part in parts if part is not None) or None


def reads_base_weights(task: Task[Any], *, resumed: bool) -> bool:
    """Return True if starting the run loads the weights of the base model.

    A resumed full fine-tuning run does not load them, unless the base model is the reference.
    """
    if not resumed or task.recipe.finetuning_type != "full":
        return True
    return task.reference_name is None and task.uses_reference


def _can_fingerprint(name: str, include_hubs: bool) -> bool:
    return include_hubs or models.is_local_folder(name)


@contextmanager
def locate_errors(loaded: LoadedRecipe) -> Iterator[None]:
    """Context manager that adds the line of the recipe to errors that name a recipe key.

    An out-of-memory error of torch becomes an OutOfMemoryError.
    """
    try:
        yield
    except UserError as error:
        key, *rest = error.where.split(".")
        if key in type(loaded.recipe).model_fields:
            error.where = loaded.key_origin(key, *rest)
        raise
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "out of memory before the first step, while the model was set up",
            where=loaded.key_origin("model_name_or_path"),
            fix="use a smaller model, dtype: bfloat16, or a device with more memory",
        ) from error


CHAT_KEYS = ("default_system", "chat_template_kwargs", "roles_to_train", "train_on_eos")
"""Keys that only rows with messages read."""


def unread_chat_keys_note(recipe: Recipe, sources: Sequence[data.Source]) -> str | None:
    """Return a note on keys of chats that the recipe sets although no dataset begins with a chat; None without any."""
    given = [key for key in CHAT_KEYS if is_given(recipe, key)]
    if not given or any(data.has_chat_messages([source]) for source in sources if source.evaluates is None):
        return None
    keys = " and ".join(f"'{key}'" for key in given) + (" has" if len(given) == 1 else " have")
    return f"{keys} no effect on rows of plain text, and no dataset begins with a chat"


def make_sources(loaded: LoadedRecipe, *, include_eval_sets: bool = True) -> list[data.Source]:
    """Return the dataset sources of a recipe, each with the line of the recipe that names it.

    Args:
        loaded: Recipe with the lines of its keys.
        include_eval_sets: True to append the sources of the evaluation sets.
    """
    recipe = loaded.recipe

    def source(spec: DatasetSpec, *key: str | int, evaluates: str | None = None) -> data.Source:
        where = loaded.key_origin(*key, "path")
        return data.Source(
            **spec.model_dump(),
            mix_by=recipe.mix_by,
            evaluates=evaluates,
            seed=recipe.seed,
            streamed=recipe.streaming and evaluates is None,
            where=where,
        )

    sources = [source(spec, "datasets", index) for index, spec in enumerate(recipe.datasets)]
    for name, specs in recipe.eval_datasets.items() if include_eval_sets else ():
        sources += [source(spec, "eval_datasets", name, index, evaluates=name) for index, spec in enumerate(specs)]
    return sources
