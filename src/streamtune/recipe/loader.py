"""Load a recipe file: apply aliases and command-line settings, check the values, and report each mistake with its line.

``--set key=value`` changes any key of a recipe on the command line. A key is written in full
(``engine.chunk_size=4096``, ``datasets.0.path=other.jsonl``), or by its last name if that is unique
(``chunk_size=4096``; ``num_hidden_layers=8`` for a model made from a configuration). A value is read as in the file.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamtune.base.chat_templates import CHAT_TEMPLATES, describe_missing_template
from streamtune.base.paths import NO_HOME, open_nonblocking
from streamtune.base.privacy import find_secret, redact
from streamtune.errors import RecipeError, did_you_mean
from streamtune.recipe.keys.adapters import unread_adapter_keys
from streamtune.recipe.mistakes import leaf_key_paths
from streamtune.recipe.yaml import MAX_BYTES, KeyOrigins, KeyPath, read_yaml, show_path

from .aliases import ALIASES, INSTEAD, SWITCHES, apply_aliases
from .keys.datasets import DatasetSpec
from .keys.engine import DEEPSPEED_PRESETS
from .keys.preferences import UNPAIRED
from .keys.run import RunKeys
from .mistakes import find_recipe_mistakes, mistakes_to_error, unknown_key_mistake
from .rules import Condition, Not, OneOf, condition_holds, fill_placeholders, is_given
from .schema import RECIPES, Recipe, objectives_with
from .shipped import read_shipped, shipped_names

BUILT_IN = ("python-stdlib", "demo-preferences", "demo-arithmetic", "demo-passkey", "demo-pages")
"""Names of built-in datasets, which take precedence over local folders."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and its source.

    Args:
        recipe: Checked recipe, with defaults filled in and local paths resolved.
        path: Path of the recipe file, as given.
        notes: Messages for the user: accepted names of other trainers, and keys without effect.
        origins: Line, or command-line setting, of each key.
    """

    recipe: Recipe
    path: Path
    notes: tuple[str, ...]
    origins: KeyOrigins

    def key_origin(self, *path: str | int) -> str:
        """Return where a key was set: ``file:line`` or ``--set``. Example: ``key_origin("datasets", 0, "path")``."""
        return self.origins.key_origin(*path)


def load_recipe(path: str | Path, overrides: Sequence[str] = (), objective: str | None = None) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        path: YAML file, or the name of a shipped recipe if no such file exists.
        overrides: ``key=value`` settings, which take precedence over the file.
        objective: Objective of the command, which a recipe without an objective gets. A recipe with another objective
            is refused. None: the objective in the recipe, or sft.

    Returns:
        Recipe with resolved local paths. ``datasets[].path``, ``chat_template``, ``tokenizer.path``, ``deepspeed`` and
        ``model_name_or_path`` are searched in the recipe's folder, then in the working directory. ``output_dir`` and
        ``engine.offload_dir`` are relative to the working directory; ``~`` in them is the home folder. A name of
        a chat template is not a path.

    Raises:
        RecipeError: The file or a setting is wrong. The error has ``file:line`` and every mistake found.

    Example:
        >>> loaded = load_recipe("quickstart", ["max_steps=20"])
        >>> loaded.recipe.max_steps
        20
    """
    path = _resolve_recipe_path(Path(path))
    tree, origins, mistakes = read_yaml(read_recipe_text(path), str(path))
    if tree is None:
        raise RecipeError(
            "the recipe is empty", where=str(path), fix="`streamtune recipes ls` lists recipes to start from"
        )
    if not isinstance(tree, dict):
        what = "a list" if isinstance(tree, list) else "text"
        raise RecipeError(f"a recipe must have keys and values; found {what}", where=f"{path}:1",
                          fix="write 'key: value', with a space after the colon")  # fmt: skip
    notes, misnamed = apply_aliases(tree, origins)
    mistakes += misnamed
    recipe_type = _recipe_class(tree, overrides, objective)
    if not mistakes:  # a setting may name a key that is a mistake in the file
        notes += apply_overrides(tree, origins, overrides, recipe_type)
        renamed, misnamed = apply_aliases(tree, origins)  # values and later keys that came with a setting
        notes += renamed
        mistakes += misnamed
    _refuse_secrets(tree, (), origins)
    tree.setdefault("output_dir", f"runs/{path.stem}")
    _check_objective(tree, origins, objective)
    try:
        recipe = recipe_type.model_validate(tree)
    except ValidationError:
        raise mistakes_to_error(mistakes + find_recipe_mistakes(tree, recipe_type), origins) from None
    if mistakes:
        raise mistakes_to_error(mistakes, origins)
    notes += [*_notes_on_unread_keys(recipe), *_notes_on_hidden_files(recipe, path.parent)]
    return LoadedRecipe(_resolve_local_paths(recipe, path.parent, origins), path, tuple(notes), origins)


def _recipe_class(tree: dict[str, Any], overrides: Sequence[str], objective: str | None) -> type[Recipe]:
    """Return the recipe class of the objective in ``overrides`` or ``tree``, else of ``objective``."""
    named = tree.get("objective")
    for override in overrides:
        name, _, value = override.partition("=")
        if ALIASES.get(name.strip(), name.strip()) == "objective":
            named = _parse_override_value(value, f"--set {override}")
    return RECIPES.get(str(named)) or RECIPES[objective or "sft"]


def _check_objective(tree: dict[str, Any], origins: KeyOrigins, objective: str | None) -> None:
    named = tree.setdefault("objective", objective) if objective is not None else tree.get("objective")
    if objective is not None and named != objective and isinstance(named, str) and named in RECIPES:
        raise RecipeError(
            f"the recipe has objective {named}, and the command trains {objective}",
            where=origins.key_origin("objective"),
            fix=f"run `streamtune {named} {origins.file}`",
        )


def _refuse_secrets(value: Any, path: KeyPath, origins: KeyOrigins) -> None:
    """Raise RecipeError if a recipe contains a token or password, because every run keeps a copy of its recipe."""
    if isinstance(value, dict):
        for key, item in value.items():
            if kind := find_secret(str(key)):
                raise _secret_error(kind, "a key", origins.key_origin(*path, key))
            _refuse_secrets(item, (*path, key), origins)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_secrets(item, (*path, index), origins)
    elif isinstance(value, str) and (kind := find_secret(value)):
        raise _secret_error(kind, f"'{show_path(path)}'", origins.key_origin(*path))


def _secret_error(kind: str, what: str, where: str) -> RecipeError:
    return RecipeError(
        f"{what} contains {kind}, and every run keeps a copy of its recipe",
        where=redact(where),
        fix="remove the secret, and revoke it if others have seen it; set a hub token with HF_TOKEN or `hf auth login`",
    )


def _resolve_recipe_path(path: Path) -> Path:
    """Return ``path`` if it exists, else the file of the shipped recipe with this name, else ``path``."""
    name = path.as_posix()
    try:
        is_name = name in shipped_names() and not os.path.lexists(path)
    except (OSError, ValueError):  # not a valid file name: reading it raises an error that says so
        return path
    return read_shipped(name).path if is_name else path


def read_recipe_text(path: Path) -> str:
    """Return the text of a recipe file, which is UTF-8 with or without a byte-order mark."""
    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RecipeError(
                    "expected a file; found a pipe or a device", where=str(path), fix="write the recipe to a file"
                )
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise RecipeError("the file does not exist", where=str(path), fix=_missing_file_fix(path)) from None
    except IsADirectoryError:
        inside = sorted(entry.name for entry in path.glob("*.y*ml"))
        fix = f"name a recipe in it, such as {path / inside[0]}" if inside else "name a YAML file"
        raise RecipeError("expected a recipe file; found a folder", where=str(path), fix=fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RecipeError(f"the recipe cannot be read: {reason}", where=str(path)) from None
    if len(data) > MAX_BYTES:
        raise RecipeError(f"the file exceeds {MAX_BYTES // 1024} KiB, the limit of a recipe", where=str(path),
                          fix="name a YAML recipe; write the path of data under datasets")  # fmt: skip
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError("the file is not UTF-8 text", where=f"{path}:{line}", fix="save the file as UTF-8") from None


def _missing_file_fix(path: Path) -> str:
    names, name = shipped_names(), path.as_posix().removesuffix(".yaml")
    if shipped := next((each for each in (name, path.stem) if each in names), None):
        return f"`streamtune recipes copy {shipped}` writes the shipped recipe"
    folder = path.parent
    beside = [entry.name for entry in folder.glob("*.y*ml")] if folder.is_dir() else []
    if nearest := did_you_mean(path.name, beside):
        return nearest if folder == Path() else nearest.replace("'", f"'{folder}/", 1)
    nearest = did_you_mean(name, names) or did_you_mean(path.stem, names)
    return nearest.replace("did you mean", "did you mean the shipped recipe") or (
        "`streamtune recipes ls` lists the shipped recipes"
    )


UNREAD_KEYS: tuple[tuple[str, Condition, str], ...] = (
    ("gradient_accumulation_steps", {"train_batch_size": Not(None)}, "with train_batch_size: {train_batch_size}"),
    ("num_train_epochs", {"max_steps": Not(-1)}, "with max_steps: {max_steps}"),
    ("max_bad_rows", {"on_bad_row": "error"}, "with on_bad_row: error"),
    ("max_skips", {"on_nan": "stop"}, "with on_nan: stop"),
    ("save_best_limit", {"metric_for_best_model": None}, "without metric_for_best_model"),
    ("greater_is_better", {"metric_for_best_model": None}, "without metric_for_best_model"),
    ("sequence_parallel", {"sequence_parallel_size": 1}, "with sequence_parallel_size: 1"),
    ("engine.disk_memory", {"engine.offload_dir": None}, "without engine.offload_dir"),
    ("sample.max_new_tokens", {"sample": Not(None), "sample.prompt": None}, "without sample.prompt"),
    ("identical_pairs", {"objective": "dpo", "loss_type": OneOf(*UNPAIRED)}, "with loss_type: {loss_type}"),
    ("dataloader_num_workers", {"objective": "grpo"}, "with objective: grpo"),
    ("pass_reward", {"objective": "grpo", "prompts": "uniform", "allocation": "equal"}, "with prompts: uniform"),
    ("sft_batch_size", {"objective": "grpo", "sft_steps": 0}, "without sft_steps"),
    ("sft_learning_rate", {"objective": "grpo", "sft_steps": 0}, "without sft_steps"),
    ("vllm_gpu_memory_utilization", {"objective": "grpo", "use_vllm": False}, "without use_vllm"),
    ("per_device_generation_batch_size", {"objective": "grpo", "use_vllm": True}, "with use_vllm"),
)
"""Key, the condition under which it has no effect on training, and the end of the note, which names the condition."""


def _notes_on_unread_keys(recipe: Recipe) -> list[str]:
    notes = [f"'{key}' has no effect with {setting}" for key, setting in unread_adapter_keys(recipe).items()]
    return notes + [
        f"'{key}' has no effect {fill_placeholders(why, recipe)}"
        for key, when, why in UNREAD_KEYS
        if condition_holds(recipe, when) and is_given(recipe, key)
    ]


def _resolve_local_paths(recipe: Recipe, folder: Path, origins: KeyOrigins) -> Recipe:
    """Return the recipe with resolved local paths; names that are not local files stay unchanged."""

    def local_path(value: str, *key: str | int) -> str:
        beside = folder / _expand_home(value, origins.key_origin(*key))
        of_rows = key[0] in ("datasets", "eval_datasets")
        is_here = path_exists(beside, broken_links=True) or (of_rows and _has_glob_match(folder, value))
        return str(beside) if value not in BUILT_IN and is_here else value

    def with_local_paths(specs: Sequence[DatasetSpec], *key: str) -> tuple[DatasetSpec, ...]:
        return tuple(
            spec.model_copy(update={"path": local_path(spec.path, *key, i, "path")}) for i, spec in enumerate(specs)
        )

    changes: dict[str, Any] = {
        "datasets": with_local_paths(recipe.datasets, "datasets"),
        "output_dir": _with_home(recipe.output_dir, origins.key_origin("output_dir")),
    }
    if recipe.engine.offload_dir is not None:
        offload_dir = _with_home(recipe.engine.offload_dir, origins.key_origin("engine", "offload_dir"))
        changes["engine"] = recipe.engine.model_copy(update={"offload_dir": offload_dir})
    if recipe.eval_datasets:
        changes["eval_datasets"] = {
            name: with_local_paths(specs, "eval_datasets", name) for name, specs in recipe.eval_datasets.items()
        }
    if recipe.tokenizer and recipe.tokenizer.path:
        changes["tokenizer"] = recipe.tokenizer.model_copy(
            update={"path": local_path(recipe.tokenizer.path, "tokenizer", "path")}
        )
    if recipe.chat_template is not None:
        changes["chat_template"] = _resolve_template(recipe.chat_template, local_path, origins)
    keys = ["model_name_or_path", "ref_model_name_or_path", "adapter_name_or_path", "teacher"]
    for key in [*keys, *(["deepspeed"] if recipe.deepspeed not in DEEPSPEED_PRESETS else [])]:
        if value := getattr(recipe, key, None):
            changes[key] = local_path(value, key)
    if rewards := getattr(recipe, "reward_funcs", None):
        changes["reward_funcs"] = tuple(_resolve_code_path(spec, folder, origins, "reward_funcs") for spec in rewards)
    if recipe.callbacks:
        changes["callbacks"] = tuple(
            _resolve_code_path(spec, folder, origins, "callbacks") for spec in recipe.callbacks
        )
    return recipe.model_copy(update=changes)


def _resolve_template(value: str, local_path: Callable[[str, str], str], origins: KeyOrigins) -> str:
    """Return the value of ``chat_template`` with a resolved path; names of :data:`CHAT_TEMPLATES` stay unchanged."""
    if value in CHAT_TEMPLATES or "{" in value:
        return value
    path = local_path(value, "chat_template")
    what, fix = describe_missing_template(value)
    if "did you mean" in fix and not path_exists(Path(path)):
        raise RecipeError(what, where=origins.key_origin("chat_template"), fix=fix)
    return f"./{path}" if path in CHAT_TEMPLATES else path


def _notes_on_hidden_files(recipe: Recipe, folder: Path) -> list[str]:
    name = recipe.chat_template
    if name not in CHAT_TEMPLATES or not (path_exists(folder / name) or path_exists(Path(name))):
        return []
    return [f"'chat_template: {name}' is StreamTune's template; to read the file '{name}', write ./{name}"]


def _has_glob_match(folder: Path, pattern: str) -> bool:
    if not re.search(r"[*?\[]", pattern) or "://" in pattern:
        return False
    try:
        return next(folder.glob(pattern), None) is not None
    except (OSError, ValueError, NotImplementedError):  # an absolute pattern, or one that is malformed
        return False


def _with_home(path: str, where: str) -> str:
    """Return a path with its leading ``~`` expanded; other paths stay as they are written."""
    return str(_expand_home(path, where)) if path.startswith("~") else path


def _expand_home(path: str, where: str) -> Path:
    try:
        if path.startswith("~") and os.environ.get(NO_HOME):  # $HOME is deleted when the command ends
            raise RuntimeError
        return Path(path).expanduser()
    except RuntimeError:
        raise RecipeError(f"there is no home folder '{path.partition('/')[0]}'", where=where,
                          fix="write the full path") from None  # fmt: skip


def may_name_hub(recipe: Recipe) -> bool:
    """Return True if a recipe names a model, tokenizer or dataset that is not local, and so may be on a hub.

    Args:
        recipe: Recipe from :func:`load_recipe`, whose local paths are resolved.
    """
    names = [recipe.model_name_or_path, getattr(recipe, "ref_model_name_or_path", None), recipe.teacher]
    names += [recipe.tokenizer.path if recipe.tokenizer else None]
    datasets = [*recipe.datasets, *(spec for specs in recipe.eval_datasets.values() for spec in specs)]
    names += [spec.path for spec in datasets if spec.path not in BUILT_IN and "*" not in spec.path]
    return any(name is not None and not path_exists(Path(name).expanduser()) for name in names)


def _resolve_code_path(spec: str, folder: Path, origins: KeyOrigins, key: str) -> str:
    """Return a reward function or callback with the absolute path of its file."""
    file, suffix, function = spec.partition(".py:")
    beside = folder / (_expand_home(f"{file}.py", origins.key_origin(key)) if suffix else Path(spec))
    return f"{beside.absolute()}:{function}" if suffix and path_exists(beside) else spec


def path_exists(path: Path, *, broken_links: bool = False) -> bool:
    """Return True if a file or folder exists; with ``broken_links`` also for a symbolic link without a target."""
    try:
        return path.exists() or (broken_links and path.is_symlink())
    except (OSError, ValueError):  # an inline template is no file name: too long, or with a NUL
        return False


def user_reward_functions(recipe: RunKeys) -> list[str]:
    """Return the reward functions from the user's own code, such as ``path.py:function``, without their options."""
    return [spec.partition("(")[0].strip() for spec in getattr(recipe, "reward_funcs", ()) if ":" in spec.split("(")[0]]


CONFIGURATIONS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def _may_have_python_code(name: str) -> bool:
    """Return True unless a model or tokenizer is a local folder without Python code. A hub name returns True."""
    try:
        folder = Path(name).expanduser()
        if not folder.is_dir() or any(folder.glob("*.py")) or (folder / "adapter_config.json").exists():
            return True
        return any(_names_remote_code(folder / each) for each in CONFIGURATIONS if (folder / each).exists())
    except (OSError, ValueError, RuntimeError):
        return True


def _names_remote_code(path: Path) -> bool:
    """Return True if a configuration file has ``auto_map`` (classes whose code may be on a hub), or cannot be read."""
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return True


def third_party_code_of(recipe: Recipe) -> list[str]:
    """Return one description for each kind of code from outside StreamTune that a run executes."""
    found = []
    tokenizer = recipe.tokenizer.path if recipe.tokenizer is not None else None
    models = (recipe.model_name_or_path, tokenizer, getattr(recipe, "ref_model_name_or_path", None))
    if recipe.trust_remote_code and (named := [name for name in models if name and _may_have_python_code(name)]):
        found.append(f"Python code of {' and '.join(named)} (trust_remote_code)")
    if own := user_reward_functions(recipe):
        found.append(f"{', '.join(own)} (reward_funcs)")
    if recipe.callbacks:
        found.append(f"{', '.join(recipe.callbacks)} (callbacks)")
    if any(spec.partition("(")[0].strip() == "unit_tests" for spec in getattr(recipe, "reward_funcs", ())):
        found.append("code that the model writes, in a subprocess with limits (unit_tests)")
    if recipe.allow_pickle:
        found.append("pickles, read as tensors only (allow_pickle)")
    return found


def apply_overrides(
    tree: dict[str, Any], origins: KeyOrigins, overrides: Sequence[str], recipe_type: type[Recipe] = Recipe
) -> list[str]:
    """Write ``key=value`` settings into a recipe, in place. The last of several settings for a key applies.

    Args:
        tree: Recipe, with aliases already renamed.
        origins: Line or setting of each key; keys that a setting writes get this setting.
        overrides: Settings as given after ``--set``.
        recipe_type: Class of the recipe, which decides which keys exist.

    Returns:
        Notes on accepted names of other trainers.

    Raises:
        RecipeError: A setting has no ``=``, a value that is not YAML, or an unknown or ambiguous key.
    """
    notes: list[str] = []
    for override in overrides:
        setting = f"--set {override}"
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise RecipeError(
                f"'{override}' has no key or no '='",
                where=setting,
                fix="write --set key=value, such as --set max_length=4096",
            )
        value = _parse_override_value(text, setting)
        if name in ALIASES:
            notes.append(f"'{name}' is read as '{ALIASES[name]}'")
            name = ALIASES[name]
        path = _find_key_path(name, tree, setting, recipe_type)
        _set_value(tree, path, value, origins, setting)
    return notes


def _parse_override_value(text: str, setting: str) -> Any:
    try:
        value, _, mistakes = read_yaml(text.strip(), "--set")
    except RecipeError as error:
        raise RecipeError(error.what, where=setting, fix="quote the value: --set 'key=\"value\"'") from error
    if mistakes:
        raise RecipeError(mistakes[0].what.partition(",")[0], where=setting, fix=mistakes[0].fix)
    return value


def _find_key_path(name: str, tree: dict[str, Any], setting: str, recipe_type: type[Recipe]) -> KeyPath:
    """Return the full path of a key.

    ``name`` is a full path, a top-level key, or the last component of exactly one path. Errors cite ``setting``, the
    command-line setting with the key.
    """
    parts = tuple(int(part) if part.isdecimal() else part for part in re.sub(r"\[(\d+)\]", r".\1", name).split("."))
    leaves = leaf_key_paths(recipe_type)
    if len(parts) > 1 or (name,) in leaves.get(name, []) or name in {*INSTEAD, *SWITCHES}:
        return parts
    if name in {str(paths[0][0]) for paths in leaves.values()}:  # 'engine', 'tokenizer': whole groups
        return parts
    configuration = _model_configuration(tree)
    places = leaves.get(name, []) + ([("model", "init", name)] if name in configuration else [])
    if len(places) == 1:
        return places[0]
    if places:
        raise RecipeError(
            f"'{name}' is ambiguous: {' or '.join(show_path(place) for place in places)}",
            where=setting,
            fix=f"write the full key, such as --set {'.'.join(map(str, places[0]))}=...",
        )
    datasets = tree.get("datasets")
    given = datasets if isinstance(datasets, list) else []
    if entries := [i for i, entry in enumerate(given) if isinstance(entry, dict) and name in entry]:
        raise RecipeError(
            f"'{name}' is a key in an entry of 'datasets'",
            where=setting,
            fix=f"write --set datasets.{entries[0]}.{name}=...",
        )
    if objectives_with(name):
        mistake = unknown_key_mistake((name,), recipe_type)
        raise RecipeError(mistake.what, where=setting, fix=mistake.fix)
    fix = did_you_mean(name, [*leaves, *ALIASES, *SWITCHES, *configuration])
    raise RecipeError(f"unknown key '{name}'", where=setting, fix=fix or "`streamtune schema` lists every key")


def _model_configuration(tree: dict[str, Any]) -> dict[str, Any]:
    model = tree.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    return init if isinstance(init, dict) else {}


def _set_value(tree: dict[str, Any], path: KeyPath, value: Any, origins: KeyOrigins, setting: str) -> None:
    """Set the value at a path, and create missing mappings. Each new key gets ``setting`` as its origin."""
    here: Any = tree
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(part, int) and isinstance(here, list):
            if part >= len(here):
                shown = show_path(path[:depth])
                raise RecipeError(f"'{shown}' has {len(here)} entries, counted from {shown}[0]", where=setting)
        elif isinstance(part, int) or not isinstance(here, dict):
            raise RecipeError(
                f"'{show_path(path[:depth])}' has no key '{part}'", where=setting, fix="set the whole value"
            )
        if last:
            here[part] = value
            origins.set_origin(path, setting)
        elif isinstance(here, dict) and not isinstance(here.get(part), (dict, list)):
            here[part] = here = {}
            origins.set_origin(path[: depth + 1], setting)
        else:
            here = here[part]
