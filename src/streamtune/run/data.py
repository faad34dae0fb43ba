"""Make the sources of the rows and the tokenizer of a recipe, and fingerprint what a run reads besides its data.

A fingerprint is taken of what a run reads again each time it is started.

    base        model_name_or_path: configuration and weights of a folder, the commit of a model on a hub
    adapter     the base that adapters in that folder name
    reference   ref_model_name_or_path
    rewards     the source of the user's own reward functions

``model.init`` and ``seed`` decide a new model, and the data decides a trained tokenizer: these are compared directly. A
run goes on with the tokenizer of its checkpoint, so a change there is only noted.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtune import data, models, train
from streamtune.distributed import read_environment
from streamtune.errors import OutOfMemoryError, UserError
from streamtune.recipe.keys.datasets import DatasetSpec
from streamtune.recipe.keys.model_and_tokenizer import ModelKeys
from streamtune.recipe.loader import LoadedRecipe
from streamtune.recipe.settings import TokenizerSettings
from streamtune.tasks import Task, rewards
from streamtune.tasks.task import PreparedRows, row_cache
from streamtune.tasks.taught import taught_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_tokenizer(
    recipe: TokenizerSettings,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
    *,
    template: bool = True,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the checkpoint, a tokenizer trained on the rows, or a loaded one.

    With ``template`` it has the chat template of the recipe, if that gives one.
    """
    if checkpoint is not None:
        return models.load_tokenizer(str(checkpoint.model_dir), trust_remote_code=recipe.trust_remote_code)
    spec = recipe.tokenizer
    tokenizer: PreTrainedTokenizerBase
    if spec is not None and spec.train is not None:
        trained_on = [source for source in sources if source.evaluates is None]
        tokenizer, kept = _train_tokenizer(recipe, trained_on, spec.train.vocab_size, notify)
        how = (
            "found a byte-level BPE tokenizer that was trained on these rows before, with"
            if kept
            else "trained a byte-level BPE tokenizer with"
        )
        notify(f"{how} {len(tokenizer):,} entries")
        models.add_tokens(tokenizer, recipe.special_tokens.model_dump(), recipe.added_tokens)
    else:
        tokenizer = models.load_tokenizer(
            _tokenizer_name(recipe),
            trust_remote_code=recipe.trust_remote_code,
            special_tokens=recipe.special_tokens.model_dump(),
            added_tokens=recipe.added_tokens,
        )
    _tell_of_new_tokens(recipe, tokenizer, notify)
    if template and recipe.chat_template is not None:
        models.set_chat_template(tokenizer, recipe.chat_template)
        _tell_of_chatml(recipe, tokenizer, notify)
    return tokenizer


def _train_tokenizer(
    recipe: TokenizerSettings, sources: Sequence[data.Source], vocab_size: int, notify: Callable[[str], None]
) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return a tokenizer that is trained on the rows, and True if it was kept from an earlier start."""
    cache = row_cache(recipe)
    settings = {
        "vocab_size": vocab_size,
        "on_bad_row": recipe.on_bad_row,
        "max_bad_rows": recipe.max_bad_rows,
        "code": [inspect.getsource(sys.modules[each.__module__]) for each in (models.train_tokenizer, data.iter_texts)],
    }
    made: list[PreTrainedTokenizerBase] = []

    def train_it() -> str:
        texts = data.iter_texts(sources, on_bad_row=recipe.on_bad_row, max_bad_rows=recipe.max_bad_rows, calls=True)
        made.append(models.train_tokenizer(texts, vocab_size=vocab_size))
        backend: Any = made[0].backend_tokenizer
        text: str = backend.to_str()
        return text

    if cache is None:
        train_it()
        return made[0], False
    text, kept = cache.text_of(sources, settings, train_it, notify)
    return made[0] if made else models.read_trained_tokenizer(text), kept


def prepare_together(
    task: Task[Any],
    world: train.World,
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Callable[[str], None],
) -> PreparedRows:
    """Prepare the rows on every rank; with a cache one rank of each machine does the work. Called by all ranks."""
    made: list[PreparedRows] = []

    def prepare() -> PreparedRows:
        return made[0] if made else task.prepare_training(sources, tokenizer, notify)

    if world.size > 1 and task.recipe.cache:
        leads = read_environment().local_rank == 0
        world.together(lambda: made.append(prepare()) if leads else None)
    return world.together(prepare)


def _tokenizer_name(recipe: ModelKeys) -> str:
    name = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path
    assert name is not None, "the schema asks for a tokenizer where there is no model to take it from"
    return name


def _tell_of_new_tokens(recipe: ModelKeys, tokenizer: PreTrainedTokenizerBase, notify: Callable[[str], None]) -> None:
    new = new_token_ids(recipe, tokenizer)
    if new:
        shown = ", ".join(tokenizer.convert_ids_to_tokens(new[:8])) + (" ..." if len(new) > 8 else "")
        notify(f"{len(new):,} tokens are added: {shown}; the tokenizer has {len(tokenizer):,}")


def _tell_of_chatml(recipe: ModelKeys, tokenizer: PreTrainedTokenizerBase, notify: Callable[[str], None]) -> None:
    """Notify the user if the built-in template writes its marks in several tokens each."""
    if recipe.chat_template != "chatml":
        return
    marks = ("<|im_start|>", "<|im_end|>")
    pieces = [len(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks]
    if max(pieces) > 1:
        notify(
            f"the tokenizer has no token for each of {' and '.join(marks)}, which chatml writes: they take "
            f'{pieces[0]} and {pieces[1]} tokens; to add them, write special_tokens: {{eos_token: "<|im_end|>", '
            'additional_special_tokens: ["<|im_start|>"]}'
        )


def new_token_ids(recipe: ModelKeys, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that a recipe adds to a loaded model's tokenizer, ascending."""
    special = recipe.special_tokens.model_dump(exclude_defaults=True)
    trains = recipe.tokenizer is not None and recipe.tokenizer.train is not None
    if trains or recipe.model_name_or_path is None or not (special or recipe.added_tokens):
        return []
    before = models.read_vocabulary(_tokenizer_name(recipe), trust_remote_code=recipe.trust_remote_code)
    return models.new_tokens(before, tokenizer, special, recipe.added_tokens)


def make_tokenizer_together(
    world: train.World,
    recipe: TokenizerSettings,
    sources: Sequence[data.Source],
    checkpoint: train.Checkpoint | None,
    notify: Callable[[str], None],
) -> PreTrainedTokenizerBase:
    """Return the same tokenizer on every rank. Called by all ranks.

    A trained tokenizer is made on rank 0 and sent as JSON. A loaded one is read by rank 0 first, then by the others,
    from the files of their own machines. The chat template is rank 0's.
    """
    made: list[PreTrainedTokenizerBase] = []
    is_trained = checkpoint is None and recipe.tokenizer is not None and recipe.tokenizer.train is not None

    def make() -> tuple[str | None, Any]:
        made.append(make_tokenizer(recipe, sources, checkpoint, notify))
        backend: Any = made[0].backend_tokenizer if is_trained else None
        return backend.to_str() if is_trained else None, made[0].chat_template

    text, template = world.main(make)

    def read() -> PreTrainedTokenizerBase:
        if made:
            return made[0]
        tokenizer: PreTrainedTokenizerBase
        if text is None:
            tokenizer = make_tokenizer(recipe, sources, checkpoint, notify, template=False)
        else:
            tokenizer = models.read_trained_tokenizer(text)
            models.add_tokens(tokenizer, recipe.special_tokens.model_dump(), recipe.added_tokens)
        tokenizer.chat_template = template
        return tokenizer

    return world.together(read)


def fingerprint_inputs(
    task: Task[Any], folder: Path, *, resumed: bool, hubs: bool, times: models.FileTimes
) -> dict[str, str]:
    """Return the fingerprints of the files that are read, by the keys of :data:`streamtune.train.FILES`.

    Args:
        resumed: True if the run goes on from a checkpoint.
        hubs: Ask for the commits of models on a hub: once they are loaded, the answer is at hand.

    Raises:
        ArgumentError: A file cannot be read, or was written to since.
    """
    found: dict[str, str | None] = {}
    recipe = task.recipe
    name, reference = recipe.model_name_or_path, task.reference_name
    if name is not None and reads_base(task, resumed=resumed) and _is_at_hand(name, hubs):
        found["base"] = models.fingerprint_model(name, code=recipe.trust_remote_code, times=times)
        if (base := models.adapter_base(name)) is not None:
            found["adapter"] = models.fingerprint_model(base, code=recipe.trust_remote_code, times=times)
    if recipe.adapter_name_or_path is not None and recipe.finetuning_type != "full" and not resumed:
        found["start"] = models.fingerprint_model(recipe.adapter_name_or_path, times=times)
    if reference is not None and _is_at_hand(reference, hubs):
        found["reference"] = models.fingerprint_model(reference, code=recipe.trust_remote_code, times=times)
        if (base := models.adapter_base(reference)) is not None:
            under = models.fingerprint_model(base, code=recipe.trust_remote_code, times=times)
            found["reference"] = f"{found['reference']} on {under}"
    if recipe.teacher_file is not None:
        found["reference"] = taught_digest(Path(recipe.teacher_file))
    if sources := rewards.reward_sources(list(task.reward_funcs), folder):
        found["rewards"] = models.fingerprint_files(sources.items(), times)
    return {key: value for key, value in found.items() if value is not None}


def fingerprint_tokenizer_files(recipe: ModelKeys) -> str | None:
    """Return the fingerprint of the tokenizer's files in a folder, and of a chat template in a file; None without."""
    name = recipe.tokenizer.path if recipe.tokenizer is not None else recipe.model_name_or_path
    parts = [models.fingerprint_tokenizer(name)] if name is not None else []
    template = recipe.chat_template
    if template is not None and "{" not in template:
        with suppress(OSError, RuntimeError):  # no name of a file, which reading it says
            if (path := Path(template).expanduser()).is_file():
                parts.append(models.fingerprint_files([("chat_template", path)]))
    return " ".join(part for part in parts if part is not None) or None


def reads_base(task: Task[Any], *, resumed: bool) -> bool:
    """Return True if starting this run loads the base model's weights.

    Only a resumed full fine-tuning run without a base reference does not.
    """
    if not resumed or task.recipe.finetuning_type != "full":
        return True
    return task.reference_name is None and task.compares


def _is_at_hand(name: str, hubs: bool) -> bool:
    return hubs or models.is_folder(name)


@contextmanager
def blame_recipe(loaded: LoadedRecipe) -> Iterator[None]:
    """Replace a key that an error names by the file and line of the recipe, and explain a lack of memory."""
    try:
        yield
    except UserError as error:
        key, *rest = error.where.split(".")
        if key in type(loaded.recipe).model_fields:
            error.where = loaded.where(key, *rest)
        raise
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            "out of memory before the first step, while the model and what belongs to it were made ready",
            where=loaded.where("model_name_or_path"),
            fix="use a smaller model, dtype: bfloat16, or a device with more memory",
        ) from error


def make_sources(loaded: LoadedRecipe, *, evaluated: bool = True) -> list[data.Source]:
    """Return the sources of the rows, each with the line of the recipe that names it.

    Args:
        evaluated: Add those of its eval sets, behind the others.
    """
    recipe = loaded.recipe

    def source(spec: DatasetSpec, *key: str | int, evaluates: str | None = None) -> data.Source:
        where = loaded.where(*key, "path")
        return data.Source(
            **spec.model_dump(),
            mix_by=recipe.mix_by,
            evaluates=evaluates,
            seed=recipe.seed,
            streamed=recipe.streaming and evaluates is None,
            where=where,
        )

    sources = [source(spec, "datasets", index) for index, spec in enumerate(recipe.datasets)]
    for name, specs in recipe.eval_datasets.items() if evaluated else ():
        sources += [source(spec, "eval_datasets", name, index, evaluates=name) for index, spec in enumerate(specs)]
    return sources
