"""Keys of the loss: of supervised rows, of a teacher's tokens, and on the routers of a mixture of experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamtune.recipe.rules import (
    GIVEN,
    ONE_OF_TWO,
    Clash,
    Fraction,
    Not,
    OnlyFor,
    Reads,
    Rules,
    Spec,
    Text,
    Where,
    at_most,
    shown,
)

TEACHER_FILE = ".safetensors"
"""End of the name of a file with a teacher's likeliest tokens; models are folders, or names on a hub."""


class LossKeys(Spec):
    """The loss of a token that is trained on."""

    loss_type: Literal["nll", "dft", "focal"] = "nll"
    """`sft`: loss of a token that is trained on, of probability p: `nll` is -log p; `dft` multiplies it by p, without a
    gradient through that factor (arXiv 2508.05629); `focal` by (1 - p)^`focal_gamma`. What is held out is always
    compared by `nll`, and `metrics.jsonl` has it as `nll` beside another `loss`."""

    focal_gamma: Annotated[float, Field(ge=0), at_most(100)] = 2.0
    """`sft`: exponent of `loss_type: focal`: the larger it is, the less tokens count that are predicted well."""

    label_smoothing_factor: Fraction = 0.0
    """`sft`: part of a target that is spread evenly over the vocabulary."""

    z_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """`sft`: coefficient of the squared log-sum-exp of a token's logits, added to its loss so that it stays small."""

    teacher: Text | None = None
    """`sft`, and `grpo` with `loss_type: gkd`: hub name or local folder of a model with the same tokens, whose
    distribution is learnt at each token that is trained on. It is held beside the model and not trained; logits of
    neither are ever whole. In `sft` also a file, `NAME.safetensors`, with the likeliest tokens of a teacher, which
    `streamtune teach` wrote."""

    kd_divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """`teacher`: Kullback-Leibler divergence of the teacher's distribution from the model's (`forward`), of the model's
    from the teacher's (`reverse`), or of both from their mixture (`jsd`, arXiv 2306.13649)."""

    kd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """`kd_divergence: jsd`: share of the teacher in the mixture. Near 0 it is like `forward`, near 1 like `reverse`."""

    kd_temperature: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """`teacher`: number that the logits of both models are divided by in the divergence."""

    kd_hard_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`teacher` of `sft`: share of the loss of the rows' own tokens (`loss_type`); the divergence has the rest."""

    @property
    def teacher_file(self) -> str | None:
        """The file with what a teacher said of the rows; None where the teacher is a model, or there is none."""
        return self.teacher if self.teacher is not None and self.teacher.endswith(TEACHER_FILE) else None


class RouterKeys(Spec):
    """Losses on the routers of a mixture of experts."""

    router_aux_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Coefficient of the load-balancing loss, added to the loss; without it, what the model's own configuration adds,
    which is nothing unless it says `output_router_logits`. `metrics.jsonl` has the balance loss as `aux_loss`."""

    router_z_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Coefficient of the router z-loss, the mean squared log-sum-exp of the routers' logits."""

    moe_balance: Literal["micro", "global"] = "micro"
    """Tokens the experts are balanced over: those of each forward (their losses are averaged, token by token), or of
    the whole optimizer step, which costs one more forward of each where there are several."""


OF_TEACHER = ("kd_divergence", "kd_beta", "kd_temperature", "kd_hard_share")
"""Keys of the divergence from a teacher."""

OF_ROWS = "'{key}' is of the loss of sft and has no meaning in {objective}"

DIVERGENCE_RULES: Rules = (
    *(
        Clash(
            {key: GIVEN, "teacher": None},
            f"'{key}' is of the divergence from a teacher, and there is none",
            "add teacher: NAME, or delete the line",
        )
        for key in OF_TEACHER
    ),
    Reads("kd_beta", "kd_divergence", "jsd"),
)

LOSS_RULES: Rules = (
    OnlyFor("sft", "focal_gamma", "label_smoothing_factor", "z_loss_coef", what=OF_ROWS),
    Where({"objective": "dpo"}, OnlyFor("sft", "teacher", *OF_TEACHER, what=OF_ROWS)),
    Where(
        {"objective": "grpo"},
        *(
            Reads(key, "loss_type", "gkd", "is read in grpo with")
            for key in ("teacher", "kd_divergence", "kd_beta", "kd_temperature")
        ),
        Clash(
            {"kd_hard_share": GIVEN},
            "'kd_hard_share' is of the rows' own tokens, and in grpo the model writes those that are trained on",
            "delete the line; sft_steps trains on the rows' own completions first",
        ),
        Where({"loss_type": "gkd"}, *DIVERGENCE_RULES),
        Clash(
            {"teacher": Not(None), "teacher_file": Not(None)},
            "'teacher' is a file, which has the tokens of rows, and in grpo the model writes those that are trained on",
            "name a model",
        ),
    ),
    Where(
        {"objective": "sft"},
        *DIVERGENCE_RULES,
        *(
            Clash(
                {key: value, "teacher_file": Not(None)},
                f"'{key}: {shown(value)}' {why}, and 'teacher' is a file with what was said of whole rows",
                "delete the line, or name a model as teacher",
            )
            for key, value, why in (
                ("streaming", True, "reads rows as training goes"),
                ("batching", "buckets", "cuts rows into pieces"),
                ("reasoning", "per_turn", "makes several rows of a conversation, which share their beginnings"),
            )
        ),
        *(
            Clash(
                {key: GIVEN, "teacher": Not(None), "kd_hard_share": 0},
                f"'{key}' is of the loss of the rows' own tokens, which has no share beside the teacher",
                "add kd_hard_share: 0.5, or delete the line",
            )
            for key in ("label_smoothing_factor", "z_loss_coef", "loss_type")
        ),
        Reads("focal_gamma", "loss_type", "focal"),
        Reads("label_smoothing_factor", "loss_type", "nll", "smooths the targets of", ONE_OF_TWO),
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"teacher": Not(None), "teacher_file": None},
        "the heads of teacher and model are read together, and ranks that share weights gather them one at a time",
        "write deepspeed: zero2, or train on completions that the teacher has written",
    ),
)
