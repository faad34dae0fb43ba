"""``streamtune validate``: checks the recipe alone, without data, model or device."""

from __future__ import annotations

from rich.text import Text

from streamtune.errors import RecipeError
from streamtune.recipe import DpoRecipe, GrpoRecipe, LoadedRecipe, Recipe, code_of, load_recipe

from .console import out, plain, print_json, print_note, print_rows
from .options import JsonOption, RecipeArgument, SetOption

__all__ = ["recipe_facts", "validate"]

OVERLENGTH = {"error": "refused", "truncate": "cut at the end", "drop": "left out", "split": "split into several"}
ADAPTERS = {"lora": "LoRA", "qlora": "QLoRA"}
OBJECTIVES = {"sft": "supervised fine-tuning", "dpo": "preferences", "grpo": "rewards"}
TRAIN_ON = {"assistant": "the assistant's turns", "completion": "the completion", "all": "every token"}


def validate(recipe: RecipeArgument, set_: SetOption = None, json: JsonOption = False) -> None:
    """Check a recipe: keys, types, ranges. Loads no data, no model, no torch."""
    try:
        loaded = load_recipe(recipe, set_ or [])
    except RecipeError as error:
        if json:
            print_json({"ok": False, "what": error.what, "where": error.where, "mend": error.mend})
        raise
    if json:
        values = loaded.recipe.model_dump(mode="json")
        print_json({"ok": True, "path": str(loaded.path), "notes": list(loaded.notes), "recipe": values})
        return
    _print_facts(loaded)


def _print_facts(loaded: LoadedRecipe) -> None:
    out.print(Text.assemble(("OK", "bold green"), " ", (plain(str(loaded.path)), "bold")), soft_wrap=True)
    print_rows(recipe_facts(loaded.recipe))
    for note in loaded.notes:
        print_note(note)


def recipe_facts(recipe: Recipe) -> list[tuple[str, str]]:
    """Return a summary of a recipe as (name, text) lines, to be read before a run."""
    return [
        ("model", _model(recipe)),
        ("tokenizer", _tokenizer(recipe)),
        ("objective", _objective(recipe)),
        ("training", _training(recipe)),
        ("data", ", ".join(_dataset(spec.path, spec.max_rows) for spec in recipe.datasets)),
        ("length", f"{recipe.max_length:,} tokens; a longer row is {OVERLENGTH[recipe.overlength]}"),
        *([("loss on", TRAIN_ON[recipe.train_on])] if recipe.objective == "sft" else []),
        ("batch", _batch(recipe)),
        ("optimizer", _optimizer(recipe)),
        ("duration", _duration(recipe)),
        ("output", recipe.output_dir),
        *([("runs code", "; ".join(code))] if (code := code_of(recipe)) else []),
    ]


def _model(recipe: Recipe) -> str:
    if recipe.model is None:
        return str(recipe.model_name_or_path)
    return f"{recipe.model.init['model_type']} from a configuration, random weights"


def _tokenizer(recipe: Recipe) -> str:
    spec = recipe.tokenizer
    if spec is None:
        return "the model's own"
    return f"trained on the rows, {spec.train.vocab_size:,} entries" if spec.train else str(spec.path)


def _objective(recipe: Recipe) -> str:
    if isinstance(recipe, GrpoRecipe):
        functions, count = ", ".join(recipe.reward_funcs), recipe.num_generations
        return f"{OBJECTIVES['grpo']} by {functions}: {recipe.loss_type} loss, {count} completions of a prompt"
    if not isinstance(recipe, DpoRecipe):
        return OBJECTIVES[recipe.objective]
    compared = "completions judged one by one" if recipe.unpaired else "pairs of completions"
    return f"{OBJECTIVES['dpo']}: {recipe.loss_type} loss of {compared}, beta {recipe.beta:g}"


def _training(recipe: Recipe) -> str:
    kind = "all weights"
    if recipe.finetuning_type != "full":
        target = recipe.lora_target if isinstance(recipe.lora_target, str) else ", ".join(recipe.lora_target)
        kind = f"{ADAPTERS[recipe.finetuning_type]} of rank {recipe.lora_r} on {target}"
    weights: str = "the checkpoint's dtype" if recipe.dtype == "auto" and recipe.model is None else recipe.dtype
    weights = "float32" if weights == "auto" else weights
    if recipe.finetuning_type == "qlora":
        bits = "nf4 on an accelerator, int8 on the CPU" if recipe.quantization == "auto" else recipe.quantization
        weights = f"{weights}, linear layers in {bits}"
    return f"{kind}; weights in {weights}" + ("; computed in bfloat16" if recipe.bf16 else "")


def _dataset(path: str, max_rows: int | None) -> str:
    return path if max_rows is None else f"{path} ({max_rows:,} rows at most)"


def _batch(recipe: Recipe) -> str:
    rows, micro = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    return f"{rows * micro:,} rows a step ({rows} at a time)" if rows * micro > 1 else "1 row a step"


def _optimizer(recipe: Recipe) -> str:
    warmup = f", {recipe.warmup_ratio:.0%} warm-up" if recipe.warmup_ratio else ""
    warmup = f", {recipe.warmup_steps} steps warm-up" if recipe.warmup_steps else warmup
    return f"{recipe.optim}, learning rate {recipe.learning_rate:g}, {recipe.lr_scheduler_type}{warmup}"


def _duration(recipe: Recipe) -> str:
    supervised = getattr(recipe, "sft_steps", 0)
    first = f"{supervised:,} supervised steps, then " if supervised else ""
    if recipe.max_steps != -1:
        return f"{first}{recipe.max_steps:,} steps"
    return f"{first}{recipe.num_train_epochs:g} epoch{'s' if recipe.num_train_epochs != 1 else ''}"
