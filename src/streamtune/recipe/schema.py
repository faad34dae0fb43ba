"""Define the recipe class of each objective, with the order of its rules, and the JSON schema of recipes.

Keys are at the top level, with the same names, if the Hugging Face Trainer has them as arguments. The docstring of a
field, here and in ``keys/``, is the only description of a key. The JSON schema, the editor's hover text and the
documentation are made from these docstrings.

The types are strict (``"1e-5"`` is not a number, ``yes`` is not a boolean), frozen, and refuse unknown keys. Nothing
here reads a file or touches a device; ``streamtune.recipe.loader`` adds file and line to an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from streamtune.recipe.keys import adapters, engine, loss
from streamtune.recipe.keys.adapters import ADAPTER_RULES, QUANTIZATION_RULES, AdapterKeys
from streamtune.recipe.keys.batching import BATCH_RULES, SELECTION_RULES, BatchKeys, StepKeys
from streamtune.recipe.keys.datasets import DATASET_RULES, STREAMING_RULES, CacheKeys, DataKeys
from streamtune.recipe.keys.engine import DEVICE_RULES, ENGINE_RULES, DeviceKeys, EngineKeys
from streamtune.recipe.keys.learning_rate import LEARNING_RATE_RULES, WARMUP_RULES, LearningRateKeys
from streamtune.recipe.keys.loss import LOSS_RULES, LossKeys, RouterKeys
from streamtune.recipe.keys.model_and_tokenizer import MODEL_RULES, TOKEN_RULES, ModelKeys
from streamtune.recipe.keys.optimizer import OPTIMIZER_RULES, STATE_RULES, OptimizerKeys
from streamtune.recipe.keys.policy import NEEDS_WHOLE_WEIGHTS, POLICY_RULES
from streamtune.recipe.keys.preferences import DPO_RULES, ROW_RULES
from streamtune.recipe.keys.preset import PRESET_RULES, ObjectiveKeys
from streamtune.recipe.keys.rollouts import (
    ALLOCATION_RULES,
    REWARD_RULES,
    ROLLOUT_BATCH_RULES,
    ROLLOUT_LENGTH_RULES,
)
from streamtune.recipe.keys.run import EARLY_STOPPING_RULES, EVALUATION_RULES, RunKeys
from streamtune.recipe.keys.trained_tokens import (
    CHAT_RULES,
    LENGTH_RULES,
    TEMPLATE_RULES,
    TURN_RULES,
    TrainedTokenKeys,
)
from streamtune.recipe.rules import Custom, Refusal, Rules, Steps, find_refusals
from streamtune.recipe.settings import (
    PreferenceSettings,
    RolloutSettings,
    RowSettings,
    TokenizerSettings,
    TrainingSettings,
)


def _refuse_unshardable_choices(recipe: Any) -> Iterator[Refusal]:
    if recipe.shards_weights:
        yield from recipe.find_sharding_conflicts()


class Recipe(
    TrainingSettings,
    RowSettings,
    TokenizerSettings,
    RunKeys,
    OptimizerKeys,
    LearningRateKeys,
    StepKeys,
    RouterKeys,
    DeviceKeys,
    EngineKeys,
    LossKeys,
    BatchKeys,
    TrainedTokenKeys,
    CacheKeys,
    DataKeys,
    AdapterKeys,
    ModelKeys,
    ObjectiveKeys,
):  # the keys of the last one come first
    """A recipe of supervised fine-tuning, and the keys that all other objectives have too."""

    rules: ClassVar[Rules] = (
        *MODEL_RULES,
        *TEMPLATE_RULES,
        *TOKEN_RULES,
        *CHAT_RULES,
        *LENGTH_RULES,
        *DATASET_RULES,
        *BATCH_RULES,
        *SELECTION_RULES,
        *TURN_RULES,
        *STREAMING_RULES,
        *PRESET_RULES,
        *LOSS_RULES,
        *OPTIMIZER_RULES,
        *LEARNING_RATE_RULES,
        *EARLY_STOPPING_RULES,
        *ADAPTER_RULES,
        *DEVICE_RULES,
        *WARMUP_RULES,
        *QUANTIZATION_RULES,
        *EVALUATION_RULES,
        Custom(_refuse_unshardable_choices),
        *ENGINE_RULES,
        *STATE_RULES,
    )
    whole_weights: ClassVar[Rules] = (
        *adapters.NEEDS_WHOLE_WEIGHTS,
        *loss.NEEDS_WHOLE_WEIGHTS,
        *engine.NEEDS_WHOLE_WEIGHTS,
    )
    """Rules that apply if ranks shard the weights. A recipe key or the stage in a DeepSpeed configuration decides this;
    the configuration is read at the start of a run."""

    def find_sharding_conflicts(self) -> Iterator[Refusal]:
        """Yield the choices of this recipe that are refused if ranks shard the weights."""
        return find_refusals(self, self.whole_weights)

    @property
    def has_evaluation_rows(self) -> bool:
        return self.val_size > 0 or bool(self.eval_datasets)


class DpoRecipe(PreferenceSettings, Recipe):
    """A recipe of training on preferences between completions (DPO and related losses)."""

    objective: Literal["dpo"] = "dpo"
    """Training objective: preferences between completions of a prompt."""

    rules = (*Recipe.rules, *ROW_RULES, *DPO_RULES)


class GrpoRecipe(RolloutSettings, Recipe):
    """A recipe of training on completions that the model writes, with rewards (GRPO) or with a teacher."""

    objective: Literal["grpo"] = "grpo"
    """Training objective: a loss on completions that the model writes, from their rewards or from a teacher's
    distribution."""

    num_completions_to_print: Steps = 4
    """Number of completions of each batch that are saved, with their rewards, in `completions.jsonl`."""

    rules = (
        *Recipe.rules,
        *REWARD_RULES,
        *ALLOCATION_RULES,
        *ROLLOUT_LENGTH_RULES,
        *ROLLOUT_BATCH_RULES,
        *POLICY_RULES,
    )
    whole_weights = (*Recipe.whole_weights, *NEEDS_WHOLE_WEIGHTS)


RECIPES: dict[str, type[Recipe]] = {"sft": Recipe, "dpo": DpoRecipe, "grpo": GrpoRecipe}
"""Value of ``objective`` -> class of the recipe. The command with the same name trains recipes of this class."""


def objectives_with(key: str) -> list[str]:
    """Return the objectives whose recipes have this key at the top level."""
    return [objective for objective, kind in RECIPES.items() if key in kind.model_fields]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe file (draft 2020-12), with every key's description.

    The recipe of each objective is a definition; the key ``objective`` decides which of them applies to a file.

    Example:
        >>> "chunk_size" in json_schema()["$defs"]["EngineSpec"]["properties"]
        True
    """
    definitions: dict[str, Any] = {}
    for kind in RECIPES.values():
        schema = kind.model_json_schema()
        definitions |= schema.pop("$defs", {})
        entries, sets = schema["properties"]["datasets"], schema["properties"]["eval_datasets"]
        path = {"type": "string", "minLength": 1}
        one = {"anyOf": [entries["items"], path]}  # a path alone
        entries["items"] = sets["additionalProperties"]["items"] = one
        sets["additionalProperties"] = {"anyOf": [sets["additionalProperties"], *one["anyOf"]]}
        named = {"allOf": [entries["items"]["anyOf"][0]], "type": "object", "required": ["name", "path"]}
        form = {key: sets.pop(key) for key in ("type", "additionalProperties")}
        sets["anyOf"] = [form, {"type": "array", "items": named}]
        definitions[kind.__name__] = schema
    others = [(objective, kind) for objective, kind in RECIPES.items() if objective != "sft"]
    rest: dict[str, Any] = {"$ref": f"#/$defs/{RECIPES['sft'].__name__}"}
    for objective, kind in reversed(others):
        condition = {"properties": {"objective": {"const": objective}}, "required": ["objective"]}
        rest = {"if": condition, "then": {"$ref": f"#/$defs/{kind.__name__}"}, "else": rest}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "StreamTune recipe", "type": "object"}
    return {**head, **rest, "$defs": _drop_titles(definitions, names=True)}


def _drop_titles(node: Any, *, names: bool = False) -> Any:
    """Return a JSON schema without the titles that pydantic derives from names.

    ``names`` is True if the keys of ``node`` are names of recipe keys or definitions; then a key ``title`` is not
    dropped.
    """
    if isinstance(node, list):
        return [_drop_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: " ".join(value.split())  # join the lines of a docstring
        if key == "description" and isinstance(value, str)
        else _drop_titles(value, names=key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title" or not isinstance(value, str)
    }
