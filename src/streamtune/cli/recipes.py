"""``streamtune recipes``, ``validate``, ``schema`` and ``optim``: list, copy and check recipes and optimizers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from streamtune.base.optimizer_table import OPTIMIZERS, OptimizerEntry, state_bytes
from streamtune.base.privacy import safe_text
from streamtune.errors import ArgumentError, RecipeError
from streamtune.recipe import (
    DpoRecipe,
    GrpoRecipe,
    LoadedRecipe,
    Recipe,
    ShippedRecipe,
    json_schema,
    load_recipe,
    path_exists,
    read_shipped,
    shipped_recipes,
    third_party_code_of,
    with_schema_header,
)
from streamtune.recipe.keys.adapters import keys_without_effect

from .console import err, make_table, out, print_json, print_note, print_rows, print_table, print_text
from .options import HelpCommand, HelpGroup, JsonOption, RecipeArgument, SetOption, option

recipes = typer.Typer(
    cls=HelpGroup, help="List, show and copy the recipes that come with StreamTune.", no_args_is_help=True
)

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of a shipped recipe, from `streamtune recipes ls`.", show_default=False),
]


GENERAL_RECIPES = {
    "quickstart": "a tiny model from scratch on a CPU, 2 to 3 minutes",
    "quickstart_dpo": "the same with preference pairs, 1 to 2 minutes",
    "quickstart_grpo": "the same with rewards, a few minutes",
    "quickstart_images": "the same with images of pages, 2 to 3 minutes",
    "sft-lora": "adapters on Qwen3-8B, rows up to 131,072 tokens",
    "sft-qlora": "adapters on a 4-bit Qwen3-32B, rows up to 65,536",
    "sft-full": "all weights of Qwen3-4B, rows up to 65,536 tokens",
    "qwen3-8b-long": "for planning: shape of Qwen3-8B, no download",
    "qwen3-32b-8gpu": "for planning: shape of Qwen3-32B, 8 devices",
    "llama3-8b-32gpu": "for planning: Llama-3.1-8B's shape, 4 x 8 devices",
    "bench": "the model that `streamtune bench` measures",
}
"""Name of a general recipe -> description of at most 49 characters, in the order of ``recipes ls``."""


@recipes.command("ls", cls=HelpCommand)
def list_recipes(
    device: Annotated[
        str | None,
        option(
            "SIZE",
            "List only the recipes made for this device memory, such as 24GB, or 8x80GB for eight devices. [default: "
            "all recipes]",
            "--device",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the shipped recipes: first general ones, then one for each combination of model and device."""
    shipped = [(recipe, load_recipe(recipe.path).recipe) for recipe in shipped_recipes()]
    if device is not None:
        shipped = _recipes_for_device(device, shipped)
    if json:
        print_json([_recipe_document(recipe, spec) for recipe, spec in shipped])
        return
    starters = [(recipe, spec) for recipe, spec in shipped if not recipe.device]
    if starters:
        order = list(GENERAL_RECIPES)
        starters.sort(key=lambda each: order.index(each[0].name) if each[0].name in GENERAL_RECIPES else len(order))
        table = make_table(*(Column(name, no_wrap=True) for name in ("recipe", "method", "for")), header="dim")
        for recipe, spec in starters:
            text = GENERAL_RECIPES.get(recipe.name, recipe.summary)
            table.add_row(Text(recipe.name, style="bold"), f"{spec.objective} {spec.finetuning_type}", text)
        out.print(table)
    for objective, title in OBJECTIVES.items():
        rows = [(recipe, spec) for recipe, spec in shipped if recipe.device and spec.objective == objective]
        if rows:
            print_table(
                f"{objective}: {title}", _recipes_table(rows), blank_line_before=bool(starters) or rows[0] != shipped[0]
            )
    out.print()
    print_text(Text.assemble("Next: ", ("streamtune recipes copy NAME my.yaml", "bold")))


def _recipes_for_device(
    device_memory: str, recipes: Sequence[tuple[ShippedRecipe, Recipe]]
) -> list[tuple[ShippedRecipe, Recipe]]:
    """Return the recipes that are made for a device memory, such as ``24GB``, ``24`` or ``8x80GB``.

    Raises:
        ArgumentError: No recipe is made for it.
    """
    wanted = f"{device_memory.upper().replace(' ', '').removesuffix('GB').removesuffix('GIB')}GB"
    found = [(recipe, spec) for recipe, spec in recipes if _compact_device_name(recipe).upper() == wanted]
    if not found:
        sizes = sorted(
            {_compact_device_name(recipe) for recipe, _ in recipes if recipe.device},
            key=lambda size: (len(size), size),
        )
        fix = f"choose one of: {', '.join(sizes)}"
        raise ArgumentError(f"no recipe is made for a device of {device_memory}", where="--device", fix=fix)
    return found


def _compact_device_name(recipe: ShippedRecipe) -> str:
    """Return the device of a recipe without blanks, such as ``8x80GB``; an empty string if it has none."""
    return recipe.device.replace(" ", "")


def _recipes_table(rows: Sequence[tuple[ShippedRecipe, Recipe]]) -> Table:
    name = Column("recipe", no_wrap=True, min_width=24)
    model = Column("model", no_wrap=True, overflow="ellipsis")
    sizes = [Column(title, justify="right", no_wrap=True) for title in ("device", "tokens")]
    table = make_table(name, Column("method", no_wrap=True), *sizes, model, padding=(0, 1, 0, 0), header="dim")
    for recipe, spec in rows:
        table.add_row(
            Text(recipe.name, style="bold"),
            spec.finetuning_type,
            _compact_device_name(recipe),
            f"{spec.max_length:,}",
            f" {str(spec.model_name_or_path).rpartition('/')[2]}",
        )
    return table


def _recipe_document(shipped: ShippedRecipe, spec: Recipe) -> dict[str, object]:
    return {
        "name": shipped.name,
        "summary": shipped.summary,
        "path": str(shipped.path),
        "objective": spec.objective,
        "finetuning_type": spec.finetuning_type,
        "model": spec.model_name_or_path,
        "max_length": spec.max_length,
        "device": shipped.device or None,
    }


@recipes.command("show", cls=HelpCommand)
def show_recipe(name: NameArgument) -> None:
    """Print the text of a shipped recipe."""
    text = read_shipped(name).text
    if out.is_terminal:
        coloured = Syntax("", "yaml", theme="ansi_dark", background_color="default").highlight(text)
        out.print(coloured, soft_wrap=True, end="")  # a line that the terminal wraps is copied as one
    else:
        print(text, end="")


@recipes.command("copy", cls=HelpCommand)
def copy_recipe(
    name: NameArgument,
    dest: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DEST]",
            help='New file, or folder for it. [default: NAME.yaml, with "-" for each "/" of the name]',
            show_default=False,
        ),
    ] = None,
) -> None:
    """Copy a shipped recipe to a new file. Never overwrites a file."""
    recipe = read_shipped(name)
    dest = dest or Path()
    if dest.is_dir():
        dest /= f"{recipe.name.replace('/', '-')}.yaml"
    write_new_file(
        dest, with_schema_header(recipe.text, dest.parent), f"`streamtune recipes copy {recipe.name} OTHER.yaml`"
    )
    command = f"streamtune {load_recipe(recipe.path).recipe.objective} {dest}"
    err.print(Text.assemble("wrote ", (str(dest), "bold"), f"; train with `{command}`"), soft_wrap=True)


def write_new_file(path: Path, text: str, fix: str) -> None:
    """Write a new file; ``fix`` is the advice in the error if the file exists.

    Raises:
        ArgumentError: The file exists, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise file_exists_error(path, fix) from None
    except OSError as error:
        fix = f"make the folder first: `mkdir -p {path.parent}`" if not path.parent.is_dir() else ""
        raise ArgumentError(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from None


def file_exists_error(path: Path, fix: str) -> ArgumentError:
    return ArgumentError("the file already exists; it is not overwritten", where=str(path), fix=fix)


def schema() -> None:
    """Print the JSON schema of recipes: type, default and description of every key."""
    print_json(json_schema())


OVERLENGTH = {"error": "refused", "truncate": "truncated", "drop": "dropped", "split": "split into pieces"}
ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}
OBJECTIVES = {"sft": "supervised fine-tuning", "dpo": "preferences", "grpo": "rewards"}
TRAIN_ON = {
    "assistant": "assistant turns; in plain text, every token",
    "completion": "the completion",
    "last": "the last assistant turn; in plain text, every token",
    "all": "every token",
}


def validate(recipe: RecipeArgument, set_: SetOption = None, json: JsonOption = False) -> None:
    """Check the keys and values of a recipe, without reading data or model."""
    try:
        loaded = load_recipe(recipe, set_ or [])
    except RecipeError as error:
        if json:
            print_json({"ok": False, "what": error.what, "where": error.where, "mend": error.fix})
        raise
    if json:
        values = loaded.recipe.model_dump(mode="json")
        print_json({"ok": True, "path": str(loaded.path), "notes": list(loaded.notes), "recipe": values})
        return
    _print_recipe_summary(loaded)


def _print_recipe_summary(loaded: LoadedRecipe) -> None:
    out.print(Text.assemble(("OK", "bold green"), " ", (safe_text(str(loaded.path)), "bold")), soft_wrap=True)
    print_rows(describe_recipe(loaded.recipe))
    for note in loaded.notes:
        print_note(note)


def describe_recipe(recipe: Recipe) -> list[tuple[str, str]]:
    """Return a summary of a recipe as (name, text) lines."""
    return [
        ("model", _describe_model(recipe)),
        ("tokenizer", _describe_tokenizer(recipe)),
        ("objective", _describe_objective(recipe)),
        *describe_method(recipe),
        ("training", _describe_trained_weights(recipe)),
        ("data", ", ".join(_describe_dataset(spec.path, spec.max_rows) for spec in recipe.datasets)),
        ("length", f"{recipe.max_length:,} tokens; longer rows are {OVERLENGTH[recipe.overlength]}"),
        *([("loss on", TRAIN_ON[recipe.train_on])] if recipe.objective == "sft" else []),
        ("batch", _describe_batch(recipe)),
        ("optimizer", _describe_optimizer(recipe)),
        ("duration", _describe_duration(recipe)),
        ("output", recipe.output_dir),
        *([("runs code", "; ".join(code))] if (code := third_party_code_of(recipe)) else []),
    ]


DIVERGENCES = {"forward": "forward KL", "reverse": "reverse KL", "jsd": "Jensen-Shannon"}


def describe_method(recipe: Recipe) -> list[tuple[str, str]]:
    """Return (name, text) lines about the recipe's teacher, row selection and allocation of completions."""
    found = []
    if recipe.teacher is not None:
        file = ", top-k tokens read from a file" if recipe.teacher_file is not None else ""
        hard = f"; {recipe.kd_hard_share:g} of the loss is cross-entropy of the rows" if recipe.kd_hard_share else ""
        found.append(("teacher", f"{recipe.teacher}{file}; {DIVERGENCES[recipe.kd_divergence]} divergence{hard}"))
    if recipe.select_rows is not None:
        found.append(("rows", f"1 of {recipe.select_from} drawn rows, selected by gradient ({recipe.select_rows})"))
    if isinstance(recipe, GrpoRecipe) and recipe.allocation != "equal":
        how = f"allocated among the prompts of a step ({recipe.allocation}); equal in the first epoch"
        found.append(("completions", how))
    return found


def _describe_model(recipe: Recipe) -> str:
    if recipe.model is None:
        return str(recipe.model_name_or_path)
    return f"{recipe.model.init['model_type']} from a configuration, random weights"


def _describe_tokenizer(recipe: Recipe) -> str:
    spec = recipe.tokenizer
    if spec is None:
        return "the model's own"
    return f"trained on the rows, {spec.train.vocab_size:,} entries" if spec.train else str(spec.path)


def _describe_objective(recipe: Recipe) -> str:
    if isinstance(recipe, GrpoRecipe):
        functions, count = ", ".join(recipe.reward_funcs), recipe.num_generations
        source = "the teacher's distribution" if recipe.is_distillation else f"{OBJECTIVES['grpo']} from {functions}"
        return f"{source}: {recipe.loss_type} loss, {count} completions per prompt"
    if not isinstance(recipe, DpoRecipe):
        return OBJECTIVES[recipe.objective]
    compared = "unpaired completions" if recipe.is_unpaired else "pairs of completions"
    return f"{OBJECTIVES['dpo']}: {recipe.loss_type} loss on {compared}, beta {recipe.beta:g}"


def _describe_trained_weights(recipe: Recipe) -> str:
    full = recipe.finetuning_type == "full"
    kind = _describe_trained_parts(recipe) if full else _describe_adapters(recipe)
    open_names = {"auto": "float32, or bfloat16 if that does not fit" if full else "the checkpoint's dtype"}
    if full and recipe.sharding_key is not None:
        open_names["auto"] = "float32" if recipe.fsdp else "the checkpoint's dtype"
    open_names["mixed"] = "float32" if full else "the checkpoint's dtype"
    weights: str = open_names.get(recipe.dtype, recipe.dtype) if recipe.model is None else recipe.dtype
    weights = "float32" if weights in ("auto", "mixed") else weights
    if recipe.finetuning_type == "qlora":
        automatic = "nf4" if recipe.shards_weights else "nf4 on an accelerator, int8 on the CPU"
        bits = automatic if recipe.quantization == "auto" else recipe.quantization
        weights = f"{weights}, linear layers in {bits}"
    return f"{kind}; weights in {weights}" + (f"; computed in {recipe.autocast_dtype}" if recipe.autocast_dtype else "")


def _describe_trained_parts(recipe: Recipe) -> str:
    """Return which weights full fine-tuning trains, such as ``layers (last 8) and lm_head``."""
    layers, freeze, train = recipe.trainable_layers, ", ".join(recipe.freeze), ", ".join(recipe.train)
    kind = f"layers ({layers})" if layers else "all weights" if freeze or not train else ""
    kind += f" except {freeze}" if freeze else ""
    return " and ".join(filter(None, (kind, train)))


def _describe_adapters(recipe: Recipe) -> str:
    if recipe.adapter_name_or_path is not None:
        return f"adapters of {recipe.adapter_name_or_path}"
    name = ADAPTERS[recipe.finetuning_type] if recipe.adapter_type == "lora" else f"{recipe.adapter_type} adapters"
    rank = "" if "lora_r" in keys_without_effect(recipe) else f" of rank {recipe.lora_r}"
    target = recipe.lora_target if isinstance(recipe.lora_target, str) else ", ".join(recipe.lora_target)
    return f"{name}{rank} on {target}"


DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")


def _describe_dataset(path: str, max_rows: int | None) -> str:
    remarks = [f"at most {max_rows:,} rows"] if max_rows is not None else []
    file = Path(path).expanduser()
    if file.suffix in DATA_FILES and not path_exists(file) and not re.search(r"[*?\[]|://", path):
        remarks.append("no such file here")
    return f"{path} ({', '.join(remarks)})" if remarks else path


def _describe_batch(recipe: Recipe) -> str:
    rows = recipe.per_device_train_batch_size
    step = recipe.train_batch_size or rows * recipe.gradient_accumulation_steps
    unit = "packed sequence" if recipe.packing else "completion" if isinstance(recipe, GrpoRecipe) else "row"
    if isinstance(recipe, DpoRecipe) and not recipe.is_unpaired:
        unit = "pair"
    if recipe.tokens_per_batch is not None:
        unit = "piece" if recipe.batching == "buckets" else unit
        return f"{recipe.tokens_per_batch:,} tokens a step in {unit}s ({rows} at a time)"
    return f"{step:,} {unit}s a step ({rows} at a time)" if step > 1 else f"1 {unit} a step"


def _describe_optimizer(recipe: Recipe) -> str:
    warmup = f", {recipe.warmup_ratio:.0%} warm-up" if recipe.warmup_ratio else ""
    warmup = f", {recipe.warmup_steps} steps warm-up" if recipe.warmup_steps else warmup
    return f"{recipe.optim}, learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}"


def _describe_duration(recipe: Recipe) -> str:
    supervised = getattr(recipe, "sft_steps", 0)
    first = f"{supervised:,} supervised steps, then " if supervised else ""
    if recipe.max_steps != -1:
        return f"{first}{recipe.max_steps:,} steps"
    return f"{first}{recipe.num_train_epochs:g} epoch{'s' if recipe.num_train_epochs != 1 else ''}"


# --- optimizers -------------------------------------------------------------------------------------------------------


optimizers = typer.Typer(
    cls=HelpGroup, help="List the optimizers that the recipe key `optim` accepts.", no_args_is_help=True
)

SIZE = 4096
"""Rows and columns of the matrix whose optimizer state is shown."""


@optimizers.command("ls", cls=HelpCommand)
def list_optimizers(json: JsonOption = False) -> None:
    """List the optimizers: bytes of state per parameter, library, options, and whether ZeRO and FSDP2 support them."""
    if json:
        print_json([_optimizer_document(name, entry) for name, entry in OPTIMIZERS.items()])
        return
    reasons = list(
        dict.fromkeys(entry.cannot_shard_reason for entry in OPTIMIZERS.values() if entry.cannot_shard_reason)
    )
    columns = [
        Column(title, no_wrap=True, justify="right" if title in ("fp32", "bf16") else "left")
        for title in ("optim", "fp32", "bf16", "library", "deepspeed, fsdp")
    ]
    table = make_table(*columns, padding=(0, 2, 0, 0))
    table.pad_edge = True
    for name, entry in OPTIMIZERS.items():
        library = entry.library if entry.is_installed else f"{entry.library}*"
        sizes = (f"{_state_bytes_per_parameter(name, width):.3g}" for width in (4, 2))
        divided = f"no ({reasons.index(entry.cannot_shard_reason) + 1})" if entry.cannot_shard_reason else "yes"
        table.add_row(Text(name, style="bold"), *sizes, library, divided)
    out.print(table)
    out.print()
    out.print(
        f"fp32, bf16: bytes of optimizer state per parameter of a {SIZE:,} x {SIZE:,} matrix in that dtype", style="dim"
    )
    for number, reason in enumerate(reasons, 1):
        out.print(f"({number}) {reason}", style="dim")
    missing = {entry.library: entry.install_command for entry in OPTIMIZERS.values() if not entry.is_installed}
    for library, line in missing.items():
        out.print(Text.assemble(f"* {library} is not installed: ", (line, "bold")))
    out.print()
    print_rows(
        [(name, _describe_optimizer_entry(entry)) for name, entry in OPTIMIZERS.items()], name_style="bold", indent=""
    )


def _state_bytes_per_parameter(optimizer_name: str, bytes_per_element: int) -> float:
    return state_bytes(optimizer_name, (SIZE, SIZE), bytes_per_element, {}) / SIZE**2


def _describe_optimizer_entry(entry: OptimizerEntry) -> str:
    options = ", ".join(f"{key}: {_show_yaml_value(value)}" for key, value in entry.options.items())
    only = f"; {entry.only_on} only" if entry.only_on else ""
    return f"{entry.text}{only}" + (f"; optim_args {{{options}}}" if options else "")


def _show_yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _optimizer_document(name: str, entry: OptimizerEntry) -> dict[str, Any]:
    return {
        "name": name,
        "text": entry.text,
        "library": entry.library,
        "installed": entry.is_installed,
        "install": entry.install_command or None,
        "state_bytes_per_parameter": {
            "float32": _state_bytes_per_parameter(name, 4),
            "bfloat16": _state_bytes_per_parameter(name, 2),
        },
        "options": dict(entry.options),
        "adam_keys": entry.is_adam or entry.adamw_for_rest,
        "adamw_for_rest": entry.adamw_for_rest,
        "only_on": entry.only_on or None,
        "not_divided": entry.cannot_shard_reason or None,
    }
