"""Recipe keys of the loss per token, of distillation from a teacher, and of the routers of a mixture of experts."""

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
    show_value,
)

TEACHER_FILE = ".safetensors"
"""Suffix of a file with a teacher's top-k tokens. A teacher without it is a folder or a hub name."""


class LossKeys(Spec):
    """Recipe keys of the loss per token, and of distillation from a teacher."""

    loss_type: Literal["nll", "dft", "focal"] = "nll"
    """Loss in `sft` of a token that the model predicts with probability p. `nll`: -log p. `dft`: -log p times p,
    without a gradient through this factor (arXiv 2508.05629). `focal`: -log p times (1 - p)^`focal_gamma`. Held-out
    rows are always evaluated with `nll`. With `dft` and `focal`, `metrics.jsonl` also has the `nll` of training."""

    focal_gamma: Annotated[float, Field(ge=0), at_most(100)] = 2.0
    """Only for `sft` with `loss_type: focal`: exponent of (1 - p). A larger exponent reduces the weight of tokens that
    the model already predicts well."""

    label_smoothing_factor: Fraction = 0.0
    """Only for `sft`: fraction of a target's probability that is spread evenly over the vocabulary. 0 disables label
    smoothing."""

    z_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Only for `sft`: coefficient of the z-loss, the squared log-sum-exp of a token's logits. It is added to the loss
    and keeps the log-sum-exp near 0. 0 disables the z-loss."""

    teacher: Text | None = None
    """Teacher for distillation, in `sft` and in `grpo` with `loss_type: gkd`: hub name or local folder of a model with
    the same vocabulary as the trained model. The trained model learns the teacher's distribution at each token that
    counts in the loss. The teacher takes memory too, and is not trained. For `sft` the teacher can also be a file
    `NAME.safetensors` that `streamtune teach` wrote, with the teacher's top-k tokens. Default: no distillation."""

    kd_divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """With `teacher` (`sft`, `grpo`): divergence between the distributions of teacher and model. `forward`: KL(teacher
    || model). `reverse`: KL(model || teacher). `jsd`: the sum of KL(teacher || mixture) and KL(model || mixture),
    weighted by `kd_beta` (arXiv 2306.13649)."""

    kd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """With `teacher` (`sft`, `grpo`) and `kd_divergence: jsd`: share of the teacher in the mixture, between 0 and 1.
    Near 0, `jsd` behaves like `forward`, near 1 like `reverse`."""

    kd_temperature: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """With `teacher` (`sft`, `grpo`): temperature by which the logits of teacher and model are divided before the
    divergence is computed."""

    kd_hard_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only for `sft` with `teacher`: weight of the loss `loss_type` on the rows' own tokens. The divergence has the
    remaining weight, 1 - `kd_hard_share`."""

    @property
    def teacher_file(self) -> str | None:
        """Path of the file with a teacher's top-k tokens; None if the teacher is a model or missing."""
        return self.teacher if self.teacher is not None and self.teacher.endswith(TEACHER_FILE) else None


class RouterKeys(Spec):
    """Recipe keys of the losses on the routers of a mixture of experts."""

    router_aux_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Coefficient of the load-balancing loss of a mixture of experts, which is added to the loss. Default: the
    coefficient in the model's configuration if that sets `output_router_logits`, else 0. `metrics.jsonl` reports this
    loss as `aux_loss`."""

    router_z_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Coefficient of the router z-loss of a mixture of experts: the mean squared log-sum-exp of the routers' logits. 0
    disables it."""

    moe_balance: Literal["micro", "global"] = "micro"
    """Tokens over which the load-balancing loss of a mixture of experts is computed. `micro`: the tokens of one
    micro-batch; a step has the mean of these losses, weighted by tokens. `global`: the tokens of the whole optimizer
    step; each forward of a step with several micro-batches then runs twice."""


OF_TEACHER = ("kd_divergence", "kd_beta", "kd_temperature", "kd_hard_share")
"""Keys of the divergence from a teacher."""

OF_ROWS = "'{key}' belongs to the loss of sft; {objective} does not read it"

DIVERGENCE_RULES: Rules = (
    *(
        Clash(
            {key: GIVEN, "teacher": None},
            f"'{key}' belongs to the divergence from a teacher, and 'teacher' is missing",
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
            Reads(key, "loss_type", "gkd", "is read in grpo only with")
            for key in ("teacher", "kd_divergence", "kd_beta", "kd_temperature")
        ),
        Clash(
            {"kd_hard_share": GIVEN},
            "'kd_hard_share' weighs the loss of the rows' own tokens, and grpo trains on tokens that the model writes",
            "delete the line; sft_steps trains on the rows' own completions first",
        ),
        Where({"loss_type": "gkd"}, *DIVERGENCE_RULES),
        Clash(
            {"teacher": Not(None), "teacher_file": Not(None)},
            "'teacher' is a file for the tokens of given rows, and grpo trains on tokens that the model writes",
            "name a model as teacher",
        ),
    ),
    Where(
        {"objective": "sft"},
        *DIVERGENCE_RULES,
        *(
            Clash(
                {key: value, "teacher_file": Not(None)},
                f"'{key}: {show_value(value)}' {why}, and the file 'teacher' is for whole rows",
                "delete the line, or name a model as teacher",
            )
            for key, value, why in (
                ("streaming", True, "reads rows only during training"),
                ("batching", "buckets", "cuts rows into pieces"),
                ("reasoning", "per_turn", "makes several rows of a conversation, which share a prefix"),
            )
        ),
        *(
            Clash(
                {key: GIVEN, "teacher": Not(None), "kd_hard_share": 0},
                f"'{key}' changes the loss of the rows' own tokens, whose weight 'kd_hard_share' is 0",
                "add kd_hard_share: 0.5, or delete the line",
            )
            for key in ("label_smoothing_factor", "z_loss_coef", "loss_type")
        ),
        Reads("focal_gamma", "loss_type", "focal"),
        Reads("label_smoothing_factor", "loss_type", "nll", "works only with", ONE_OF_TWO),
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"teacher": Not(None), "teacher_file": None},
        "distillation needs the heads of teacher and model together, and ranks that shard weights gather one at a time",
        "write deepspeed: zero2, or train on completions that the teacher wrote",
    ),
)
