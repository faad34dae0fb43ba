"""The rules about the loss of supervised rows, and of a teacher's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from streamtune.recipe.spec import mistake

FOCAL_GAMMA = 2.0
"""The exponent of the focal loss where the recipe does not say."""

KD_BETA = 0.5
"""The teacher's share of the mixture of the Jensen-Shannon divergence, where the recipe does not say."""

TEACHER_FILE = ".safetensors"
"""End of the name of a file with a teacher's likeliest tokens; models are folders, or names on a hub."""

OF_TEACHER = {"kd_divergence": "forward", "kd_beta": KD_BETA, "kd_temperature": 1.0, "kd_hard_share": 0.0}
"""Keys of the divergence from a teacher, and their defaults."""

OF_ROWS = {"focal_gamma": FOCAL_GAMMA, "label_smoothing_factor": 0.0, "z_loss_coef": 0.0, "teacher": None, **OF_TEACHER}
"""Keys of the loss of supervised rows, and their defaults."""

WITH_GKD = ("teacher", "kd_divergence", "kd_beta", "kd_temperature")
"""Those that grpo reads with ``loss_type: gkd``."""

NOT_OF_A_FILE = (
    ("streaming", True, "reads rows as training goes"),
    ("batching", "buckets", "cuts rows into pieces"),
    ("reasoning", "per_turn", "makes several rows of a conversation, which share their beginnings"),
)
"""Keys and values that go with a teacher that is a model, and not with a file, and why."""

UNREAD_WITH_GKD = {
    "beta": "weighs the divergence from a reference, and gkd has that from its teacher alone",
    "ref_model_name_or_path": "names a reference, and gkd is compared with its teacher alone",
    "epsilon": "clips ratios of probabilities, which gkd does not have",
    "epsilon_high": "clips ratios of probabilities, which gkd does not have",
    "delta": "clips ratios of probabilities, which gkd does not have",
    "importance_sampling_level": "is of ratios of probabilities, which gkd does not have",
    "scale_rewards": "is of advantages, and gkd makes none of its rewards: they are reported",
    "allocation": "is of the variance of a policy gradient, and gkd has none: it learns from its teacher",
}
"""Keys of a policy-gradient loss that ``loss_type: gkd`` does not read, and why."""


def loss_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys of the loss of supervised rows."""
    if recipe.preset is not None and recipe.objective != "sft":
        yield mistake(f"'preset: {recipe.preset}' is for sft", key="preset", mend="delete the line")
    given = [key for key, default in OF_ROWS.items() if getattr(recipe, key) != default]
    if recipe.objective == "grpo":
        yield from _mistakes_of_rollouts(recipe, given)
        return
    if recipe.objective != "sft":
        for key in given:
            yield mistake(
                f"'{key}' is of the loss of sft and has no meaning in {recipe.objective}",
                key=key,
                mend="delete the line",
            )
        return
    yield from _teacher_mistakes(recipe, given)
    if "focal_gamma" in given and recipe.loss_type != "focal":
        yield mistake(
            f"'focal_gamma' is read with 'loss_type: focal', and loss_type is '{recipe.loss_type}'",
            key="focal_gamma",
            mend="write loss_type: focal, or delete the line",
        )
    if "label_smoothing_factor" in given and recipe.loss_type != "nll":
        yield mistake(
            f"'label_smoothing_factor' smooths the targets of 'loss_type: nll', and loss_type is '{recipe.loss_type}'",
            key="label_smoothing_factor",
            mend="delete one of the two",
        )


def _mistakes_of_rollouts(recipe: Any, given: list[str]) -> Iterator[PydanticCustomError]:
    distils = recipe.loss_type == "gkd"
    for key in given:
        if key == "kd_hard_share":
            yield mistake(
                "'kd_hard_share' is of the rows' own tokens, and in grpo the model writes those that are trained on",
                key=key,
                mend="delete the line; sft_steps trains on the rows' own completions first",
            )
        elif key not in WITH_GKD:
            yield mistake(f"'{key}' is of the loss of sft and has no meaning in grpo", key=key, mend="delete the line")
        elif not distils:
            yield mistake(
                f"'{key}' is read in grpo with 'loss_type: gkd', and loss_type is '{recipe.loss_type}'",
                key=key,
                mend="write loss_type: gkd, or delete the line",
            )
    if distils:
        yield from _divergence_mistakes(recipe, given)
    if recipe.teacher_file is not None:
        yield mistake(
            "'teacher' is a file, which has the tokens of rows, and in grpo the model writes those that are trained on",
            key="teacher",
            mend="name a model",
        )


def distillation_mistakes(recipe: Any) -> Iterator[PydanticCustomError]:
    """Yield the mistakes in the keys of a grpo recipe with ``loss_type: gkd``, and in those of rewards without it."""
    rewarded = bool(recipe.reward_funcs)
    if recipe.loss_type != "gkd":
        if not rewarded:
            yield mistake(
                f"'reward_funcs' is missing: '{recipe.loss_type}' is trained on rewards",
                key="reward_funcs",
                mend="name at least one, such as reward_funcs: [exact_match]; or write loss_type: gkd and a teacher",
            )
        return
    if recipe.teacher is None:
        yield mistake(
            "'loss_type: gkd' learns from a teacher, and the recipe names none",
            key="loss_type",
            mend="add teacher: NAME, or write loss_type: dapo",
        )
    for key, why in UNREAD_WITH_GKD.items():
        if getattr(recipe, key) != type(recipe).model_fields[key].default:
            yield mistake(f"'{key}' {why}", key=key, mend="delete the line")
    if rewarded:
        return
    for key, default in {"reward_weights": None, "prompts": "uniform", "pass_reward": 1.0}.items():
        if getattr(recipe, key) != default:
            yield mistake(
                f"'{key}' is about rewards, and the recipe has no 'reward_funcs'",
                key=key,
                mend="add reward_funcs, or delete the line",
            )


def _divergence_mistakes(recipe: Any, given: list[str]) -> Iterator[PydanticCustomError]:
    for key in given:
        if key in OF_TEACHER and recipe.teacher is None:
            yield mistake(
                f"'{key}' is of the divergence from a teacher, and there is none",
                key=key,
                mend="add teacher: NAME, or delete the line",
            )
    if "kd_beta" in given and recipe.kd_divergence != "jsd":
        yield mistake(
            f"'kd_beta' is read with 'kd_divergence: jsd', and kd_divergence is '{recipe.kd_divergence}'",
            key="kd_beta",
            mend="write kd_divergence: jsd, or delete the line",
        )


def _teacher_mistakes(recipe: Any, given: list[str]) -> Iterator[PydanticCustomError]:
    yield from _divergence_mistakes(recipe, given)
    if recipe.teacher_file is not None:
        for key, value, why in NOT_OF_A_FILE:
            if getattr(recipe, key) == value:
                shown = str(value).lower() if isinstance(value, bool) else value
                yield mistake(
                    f"'{key}: {shown}' {why}, and 'teacher' is a file with what was said of whole rows",
                    key=key,
                    mend="delete the line, or name a model as teacher",
                )
    hard = [key for key in ("loss_type", "label_smoothing_factor", "z_loss_coef") if key in given]
    hard += ["loss_type"] if recipe.loss_type != "nll" else []
    if hard and recipe.teacher is not None and recipe.kd_hard_share == 0:
        yield mistake(
            f"'{hard[0]}' is of the loss of the rows' own tokens, which has no share beside the teacher",
            key=hard[0],
            mend="add kd_hard_share: 0.5, or delete the line",
        )
