"""Every key of a recipe: its type, its default, its range and what it does.

A recipe is flat where the Hugging Face Trainer is flat and uses its names. The text under each field is the only
place a key is described: the JSON schema, the editor's hover text and the documentation are made from it.

The types are strict (``"1e-5"`` is not a number, ``yes`` is not a boolean), frozen, and refuse unknown keys.
Nothing here reads a file or touches a device; ``streamtune.recipe.loader`` adds the file and the line to an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamtune.base.adapters import ADAPTERS, AdapterName
from streamtune.base.optimizer_table import OptimizerName, step_kind
from streamtune.base.step_kind import StepKind
from streamtune.recipe.adapters import adapter_mistakes, adapters_of_whole_weights
from streamtune.recipe.batching import BucketSpec, batching_mistakes, turn_mistakes
from streamtune.recipe.learning_rates import ScheduleName, learning_rate_mistakes
from streamtune.recipe.losses import FOCAL_GAMMA, KD_BETA, TEACHER_FILE, loss_mistakes
from streamtune.recipe.optimizing import LearningRateGroup, optimizer_mistakes
from streamtune.recipe.presets import with_preset
from streamtune.recipe.selecting import SELECT_FROM, select_mistakes
from streamtune.recipe.sharing import CHUNK_ORDER, QUANTISED, SHARING_PRESETS, TEACHER, WholeWeights
from streamtune.recipe.spec import Count, Fraction, Rows, Spec, Steps, Text, at_most, mistake
from streamtune.recipe.streaming import SHUFFLE_BUFFER, streaming_mistakes

from .datasets import DatasetSpec, check_eval_sets, check_weights
from .engine import EngineSpec
from .groups import ModelInit, RopeScaling, SampleSpec, SpecialTokens, TokenizerSpec

RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
"""Variables of a chat template that a recipe cannot set."""


class Recipe(Spec):
    """Everything a supervised fine-tuning run depends on; what other objectives have in common with it."""

    objective: Literal["sft", "dpo", "grpo"] = "sft"
    """Objective of the training: `sft` the rows as they are, `dpo` preferences between completions, `grpo` rewards. The
    command of that name implies it."""

    preset: Literal["small_sft"] | None = None
    """`sft`: set several keys, where the recipe does not give them. `small_sft` is for models of 3B to 7B (arXiv
    2412.13337): `train_batch_size: 3840`, `learning_rate: 2.0e-5`, `lr_scheduler_type: constant`, no warm-up. The
    banner and `plan` show what is set."""

    # --- model -------------------------------------------------------------------------------------------------

    model_name_or_path: Text | None = None
    """Hub name or local folder of the model to fine-tune; or give `model`."""

    model: ModelInit | None = None
    """Start from a configuration and random weights: `{init: {model_type: qwen3, ...}}`."""

    tokenizer: TokenizerSpec | None = None
    """Tokenizer; without it, the one that belongs to `model_name_or_path`."""

    special_tokens: SpecialTokens = SpecialTokens()
    """Special tokens to use, and to add where the tokenizer does not have them:
    `{eos_token: "<|im_end|>", additional_special_tokens: ["<|im_start|>"]}`. The model gets a row for each new one."""

    added_tokens: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Tokens to add that are ordinary text when decoded: `["<think>", "</think>"]`. Their rows in embedding and head
    begin as the mean of the others and are trained, beside adapters too."""

    chat_template: Text | None = None
    """Jinja chat template, inline or the path of a file; without it, the tokenizer's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""

    allow_pickle: bool = False
    """Read weights that are a pickle (`pytorch_model.bin`), tensors only. Without it weights are safetensors."""

    dtype: Literal["auto", "mixed", "float32", "bfloat16"] = "auto"
    """Dtype of the weights. `mixed`: the checkpoint's own where they are frozen, float32 where they are trained, which
    keeps steps that bfloat16 would round away. `auto` is `mixed` with `bf16`; where that does not fit, bfloat16 with
    `weight_rounding: stochastic`, and the banner says so. A model made from a configuration is float32."""

    weight_rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of bfloat16 weights after each step, which is computed in float32. `nearest` loses steps smaller than
    half of the distance between two numbers; `stochastic` rounds up as often as what is cut off is large, by bits of
    `seed`, and keeps them on average. With `dtype: bfloat16`, or `modules_to_save` of a bfloat16 checkpoint."""

    rope_scaling: RopeScaling | None = None
    """Extend the rotary positions of the model to longer rows: `{rope_type: yarn, factor: 4}`. Saved in the model's
    configuration, where inference engines read it."""

    rope_theta: Annotated[float, Field(gt=1), at_most(10**15)] | None = None
    """Base of the frequencies of the rotary positions; without it, the model's own. Saved in its configuration."""

    # --- what is trained ---------------------------------------------------------------------------------------

    finetuning_type: Literal["full", "lora", "qlora"] = "full"
    """Train every weight, or low-rank adapters beside frozen weights, which `qlora` keeps in 8 or 4 bits."""

    quantization: Literal["auto", "nf4", "int8"] = "auto"
    """Of the frozen linear layers and experts, with `finetuning_type: qlora`: `nf4` (4 bits, bitsandbytes) or `int8`
    (torchao); `auto` is nf4 on an accelerator and where ranks divide the weights (`zero3`, `fsdp`), else int8.
    Embedding, norms and head keep their dtype."""

    adapter_type: AdapterName = "lora"
    """Kind of the adapters: `lora`; `rslora` (scaled by alpha / sqrt(r)), `dora`; `pissa` and `olora` (LoRA that starts
    from the leading part of each weight), `lora_ga` (of its gradient), `loftq` (of what `qlora` takes from it); `vera`,
    `ia3`, `oft`, `hra`, `loha`, `lokr`, `miss`, which peft has; `paca` (`lora_r` columns of each weight)."""

    lora_r: Annotated[int, Field(ge=1), at_most(10**5)] = 16
    """Rank of the adapters."""

    lora_alpha: Annotated[float, Field(gt=0), at_most(10**6)] | None = None
    """Scale of the adapters (the update is multiplied by lora_alpha / lora_r); without it, twice the rank."""

    lora_dropout: Fraction = 0.0
    """Dropout on the input of the adapters."""

    lora_target: Annotated[tuple[Text, ...], Field(min_length=1, strict=False)] | Literal["all-linear"] = "all-linear"
    """Modules that get an adapter, by the end of their name: `[q_proj, v_proj]`, or experts that are one tensor:
    `[gate_up_proj]`. `all-linear` is all but the head and routers."""

    lora_exclude: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules that get no adapter, by the end of their name: `[down_proj]`."""

    lora_rank_pattern: Annotated[dict[Text, Annotated[int, Field(ge=1), at_most(10**5)]], Field(default_factory=dict)]
    """Another rank for some modules, by a pattern of the end of their name: `{o_proj: 4}`."""

    lora_alpha_pattern: Annotated[
        dict[Text, Annotated[float, Field(gt=0), at_most(10**6)]], Field(default_factory=dict)
    ]
    """Another `lora_alpha` for some modules, by a pattern of the end of their name: `{o_proj: 8}`."""

    lora_ga_rows: Annotated[int, Field(ge=1), at_most(10**4)] = 8
    """`adapter_type: lora_ga`: rows, drawn by the seed, of whose gradient the adapters start. Gradients of several rows
    are summed on the host."""

    lora_ga_gamma: Annotated[float, Field(gt=0), at_most(10**9)] = 16.0
    """`adapter_type: lora_ga`: the first values of the adapters are divided by its square root."""

    loftq_iter: Annotated[int, Field(ge=1), at_most(100)] = 1
    """`adapter_type: loftq`: how often each weight is quantised without what its adapters start from. From 2 on the
    quantised base is one of its own, and what was taken from the weights is saved with the adapters."""

    oft_block_size: Annotated[int, Field(ge=2), at_most(10**5)] = 32
    """`adapter_type: oft`: size of the blocks that inputs are rotated in."""

    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules that are trained whole and saved with the adapters, by the end of their name: `[lm_head]`."""

    adapter_name_or_path: Text | None = None
    """Folder with adapters to start from, in peft's format. Their kind, ranks and modules are theirs."""

    # --- data --------------------------------------------------------------------------------------------------

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]
    """Sources of the rows; `[data/train.jsonl]` is `[{path: data/train.jsonl}]`."""

    mix_by: Literal["rows", "tokens"] = "rows"
    """Unit of the shares that `weight` gives the datasets in an epoch."""

    eval_datasets: Annotated[
        dict[Text, Annotated[tuple[DatasetSpec, ...], Field(min_length=1, strict=False)]], Field(default_factory=dict)
    ]
    """Named sets of rows to evaluate on, never trained on: `{code: data/code.jsonl, prose: [{path: ...}]}`. Each has a
    loss of its own, `eval_code_loss`; `eval_loss` is that of all held-out rows."""

    on_bad_row: Literal["error", "skip"] = "error"
    """A row that is malformed or cannot be trained on: refuse the data and list the first ten, or leave such rows out
    and list them in `bad_rows.json`."""

    max_bad_rows: Steps = 100
    """Rows that `on_bad_row: skip` may leave out; more are an error."""

    dataset_num_proc: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that render and tokenise rows. The rows are the same with any number."""

    streaming: bool = False
    """`sft`: read, render and fit the rows of `datasets` as training goes, for data that does not fit on disk. Needs
    `max_steps`. Nothing of them is prepared before the first step, and nothing is kept."""

    shuffle_buffer: Count = SHUFFLE_BUFFER
    """`streaming`: rows in memory that the next one is drawn from, fewer where they are long."""

    cache: bool = True
    """Keep prepared rows and a trained tokenizer on disk, under a hash of the files, the tokenizer and the options that
    they are made of, for the next start."""

    max_length: Annotated[int, Field(ge=2), at_most(10**12)] = 2048
    """Tokens a row may have."""

    overlength: Literal["error", "truncate", "drop", "split"] = "error"
    """A row longer than `max_length`: refuse it, cut a part off, leave it out, or make several rows of it."""

    truncate_side: Literal["auto", "left", "right", "middle"] = "auto"
    """The part that `overlength: truncate` cuts off. `auto` keeps the beginning of a document, and the last answer of
    other rows: the prompt loses its beginning, and an answer too long for `max_length` its end. A system message stays.
    Not for `dpo`; of a prompt (`grpo`) `auto` is `left`."""

    split_at: Literal["turn", "paragraph", "line", "token"] = "turn"
    """`overlength: split`: the best place to cut a row. `turn` is where an exchange of a chat begins; where there is
    none, rows are cut at a blank line, else at the end of a line, else at a token."""

    split_overlap: Annotated[int, Field(ge=0), at_most(10**12)] = 0
    """`overlength: split`: tokens in front of each later piece that are there as context, and not trained twice."""

    train_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Tokens the loss counts: the assistant's turns, the completion (of a chat the last turn), the last turn alone, or
    every token."""

    roles_to_train: Annotated[
        tuple[Literal["assistant", "user", "system", "developer", "tool"], ...], Field(min_length=1, strict=False)
    ] = ("assistant",)
    """`sft`: roles whose messages are trained. A message with `train: false` is not, whatever its role."""

    train_on_eos: Literal["turn", "all", "last", "none"] = "turn"
    """`sft`: tokens that end turns and are trained: those of trained turns, those of all turns, the last one of the
    chat, or none."""

    reasoning: Literal["template", "keep", "error", "per_turn"] = "template"
    """Reasoning of a trained answer (`<think>`, `reasoning_content`, `reasoning`, `thinking`) that the chat template
    leaves out: train without it and say how much it is, put it into the text, or refuse the rows. `sft`: `per_turn`
    trains each turn as the model sees it when it writes it, with the beginnings that turns share computed once."""

    on_empty: Literal["error", "drop", "train"] = "error"
    """`sft`: a row with an empty answer, or one of blanks alone: refuse it, leave it out, or train that nothing is to
    be said."""

    default_system: Text | None = None
    """System message of conversations that have none."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Variables of the chat template, such as `{enable_thinking: false}`; a row's column of this name comes first."""

    split_special_tokens: bool = False
    """Special tokens that the text of a row spells, such as `<|im_end|>` in an answer, stay text. Otherwise they become
    these tokens, as in a request to a server, and rows that spell them are counted."""

    packing: bool = False
    """Lay several rows end to end in one sequence of at most `max_length` tokens, where none sees another: no padding,
    the same gradient. `per_device_train_batch_size` then counts sequences."""

    batching: Literal["rows", "tokens", "buckets"] = "rows"
    """Contents of an optimizer step: so many `rows`; rows with at most `tokens_per_batch` tokens together (`tokens`);
    or as many pieces of one power-of-two length, which rows are cut into, as `tokens_per_batch` holds (`buckets`)."""

    tokens_per_batch: Count | None = None
    """Tokens of one optimizer step over all ranks, with `batching: tokens` and `batching: buckets`."""

    buckets: BucketSpec | None = None
    """`batching: buckets`: order of the lengths and smallest length: `{curriculum: grow-p2, cycles: 8, min_length: 64}`
    (dataset decomposition, arXiv 2405.13226)."""

    select_rows: Literal["colm"] | None = None
    """`sft`: train a step on a few rows that stand for many (`colm`, arXiv 2407.19580). `select_from` times the rows of
    a step are drawn, each is run forward, and of each dataset those are chosen whose gradients are nearest to all; rows
    of datasets smaller than the mean are kept. `selected.jsonl` has the choices."""

    select_from: Annotated[int, Field(ge=2), at_most(10**4)] = SELECT_FROM
    """`select_rows`: times the rows of a step that are drawn for it. An epoch draws each row once, and one of so many
    is trained."""

    val_size: Annotated[float, Field(ge=0), at_most(10**12)] = 0.0
    """Rows of `datasets` held out for evaluation: a fraction below 1, or a number of rows. Beside `eval_datasets` they
    are the set `held_out`."""

    # --- the loss ----------------------------------------------------------------------------------------------

    loss_type: Literal["nll", "dft", "focal"] = "nll"
    """`sft`: loss of a token that is trained on, of probability p: `nll` is -log p; `dft` multiplies it by p, without a
    gradient through that factor (arXiv 2508.05629); `focal` by (1 - p)^`focal_gamma`. What is held out is always
    compared by `nll`, and `metrics.jsonl` has it as `nll` beside another `loss`."""

    focal_gamma: Annotated[float, Field(ge=0), at_most(100)] = FOCAL_GAMMA
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

    kd_beta: Annotated[float, Field(gt=0, lt=1)] = KD_BETA
    """`kd_divergence: jsd`: share of the teacher in the mixture. Near 0 it is like `forward`, near 1 like `reverse`."""

    kd_temperature: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """`teacher`: number that the logits of both models are divided by in the divergence."""

    kd_hard_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """`teacher` of `sft`: share of the loss of the rows' own tokens (`loss_type`); the divergence has the rest."""

    # --- engine ------------------------------------------------------------------------------------------------

    engine: EngineSpec = EngineSpec()
    """Streaming of the sequence; the defaults suit most runs."""

    bf16: bool | None = None
    """Compute in bfloat16 (autocast) and keep the weights as they are. Without it: true where `dtype: auto` trains the
    weights of a bfloat16 or float16 checkpoint in float32, else false."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; `auto` takes an accelerator where there is one."""

    peak_flops: Annotated[float, Field(gt=0), at_most(10**20)] | None = None
    """Dense FLOP/s of one device, which `mfu` is a part of; without it, the bfloat16 figure of its data sheet where the
    device is known, and no `mfu` elsewhere, such as on a CPU."""

    # --- several devices ---------------------------------------------------------------------------------------

    deepspeed: Text | None = None
    """Share optimizer, gradients and weights between ranks through DeepSpeed: `zero1`, `zero2`, `zero3`,
    `zero3_offload` (weights and optimizer on the host), or the path of a DeepSpeed configuration, whose `auto` values
    are filled from the recipe. Without it several ranks keep a whole model each (DDP)."""

    fsdp: bool = False
    """Share weights, gradients and optimizer between ranks through PyTorch's FSDP2, in DeepSpeed's place."""

    sequence_parallel_size: Rows = 1
    """Ranks that share each sequence: the longest one grows with them. Divides the number of ranks."""

    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto"
    """Way of sharing a sequence: `ulysses` exchanges heads for tokens, `ring` passes keys and values around; `auto` is
    ulysses where the ranks divide the heads."""

    train_batch_size: Rows | None = None
    """Rows of one optimizer step over all ranks, in place of `gradient_accumulation_steps`, which then follows from the
    number of ranks: the same recipe trains the same on any number of them."""

    # --- routers of a mixture of experts -----------------------------------------------------------------------

    router_aux_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] | None = None
    """Coefficient of the load-balancing loss, added to the loss; without it, what the model's own configuration adds,
    which is nothing unless it says `output_router_logits`. `metrics.jsonl` has the balance loss as `aux_loss`."""

    router_z_loss_coef: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Coefficient of the router z-loss, the mean squared log-sum-exp of the routers' logits."""

    moe_balance: Literal["micro", "global"] = "micro"
    """Tokens the experts are balanced over: those of each forward (their losses are averaged, token by token), or of
    the whole optimizer step, which costs one more forward of each where there are several."""

    # --- optimisation ------------------------------------------------------------------------------------------

    per_device_train_batch_size: Rows = 1
    """Rows in one forward and backward."""

    per_device_eval_batch_size: Rows = 1
    """Rows in one forward when evaluating."""

    gradient_accumulation_steps: Rows = 1
    """Forwards and backwards to one optimizer step; the loss is the mean over the tokens of all of them."""

    num_train_epochs: Annotated[float, Field(gt=0), at_most(10**6)] = 1.0
    """Times to go through the data."""

    max_steps: Literal[-1] | Count = -1
    """Optimizer steps of the run, in place of `num_train_epochs`; -1 goes by the epochs."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-5
    """Peak learning rate."""

    lr_scheduler_type: ScheduleName = "cosine"
    """Shape of the learning rate after the warm-up; `cosine` and `linear` end at 0. `warmup_stable_decay` stays at the
    peak and decays at the end, `power` (arXiv 2408.13359) follows the tokens trained on, whatever the batch."""

    lr_scheduler_kwargs: Annotated[dict[Text, Any], Field(default_factory=dict)]
    """Options of the schedule, with the names of transformers: `{min_lr_rate: 0.1}` of `cosine_with_min_lr`,
    `{num_cycles: 3}` of `cosine_with_restarts`, `{power: 2.0, lr_end: 1.0e-7}` of `polynomial`, `{timescale: 1000}` of
    `inverse_sqrt`, `{decay_ratio: 0.1, decay_type: 1-sqrt}` (or `num_decay_steps`) of `warmup_stable_decay`,
    `{batch_size: 64, tokens_per_step: 262144}` of `power`."""

    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Multiply `learning_rate` by the size of a step over `lr_scaling_base`, or by the root of that."""

    lr_scaling_base: Count | None = None
    """`lr_scaling`: size of the step that `learning_rate` was chosen for, in the unit of the recipe's: rows over all
    ranks (sequences where they are packed), or tokens with `tokens_per_batch`."""

    warmup_ratio: Fraction = 0.0
    """Part of the steps in which the learning rate rises; or give `warmup_steps`."""

    warmup_steps: Steps = 0
    """Steps in which the learning rate rises; or give `warmup_ratio`."""

    optim: OptimizerName = "adamw"
    """Optimizer; `streamtune optim ls` lists them, with bytes of state, library and what they do not combine with."""

    optim_args: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Options of the optimizer, which `streamtune optim ls` lists: `{momentum: 0.9}`. Those of AdamW are keys of their
    own."""

    lr_groups: Annotated[tuple[LearningRateGroup, ...], Field(strict=False)] = ()
    """Parameters with a learning rate or weight decay of their own, by name:
    `[{match: embed_tokens, learning_rate: 1.0e-6}]`. LoRA+ is `[{match: lora_B, learning_rate: ...}]`, with 16 times
    `learning_rate`."""

    lr_layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor of the learning rate from each layer to the one below: the head has `learning_rate`, the last layer this
    times that, the embeddings, below the first layer, the least. A rate of `lr_groups` is taken as it is."""

    optim_states: Literal["param", "float32", "bfloat16"] = "param"
    """Dtype of the two moments that AdamW keeps of each weight: `param` is that of the weight. `bfloat16` takes half of
    float32's bytes and is rounded stochastically, so that small changes add up; a step is computed in float32. Not with
    DeepSpeed or FSDP2, which have states of their own."""

    weight_decay: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """Decoupled weight decay, on matrices only."""

    adam_beta1: Fraction = 0.9
    """AdamW's decay of the mean of the gradient, in all of its forms."""

    adam_beta2: Fraction = 0.999
    """AdamW's decay of the mean of its square."""

    adam_epsilon: Annotated[float, Field(gt=0), at_most(10**9)] = 1e-8
    """AdamW's term against division by zero."""

    max_grad_norm: Annotated[float, Field(ge=0), at_most(10**9)] = 1.0
    """Clip the gradient to this norm; 0 does not clip."""

    optim_in_backward: bool = False
    """Step each weight as soon as its gradient is there, and free the gradient: the same step, with the gradients of
    two layers instead of all. With `max_grad_norm` a first backward measures the norm, which doubles the time;
    `max_grad_norm: 0` and `clip_norm: lagged` need one. One device."""

    clip_norm: Literal["exact", "lagged"] = "exact"
    """Norm that `optim_in_backward` clips by: `exact` is the gradient's own, which takes a first backward; `lagged` is
    that of the step before (of the first step its own), another trajectory for half of the time. `metrics.jsonl` then
    has the norm that each step was clipped by, `clip_norm`, beside its own, `grad_norm`."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the weights, the order of the rows and dropout."""

    shuffle: bool = True
    """Visit the rows in an order drawn from the seed, another one each epoch. `false`: in the order of the datasets,
    such as from easy to hard; with `packing`, packs in the order they were made."""

    # --- the run -----------------------------------------------------------------------------------------------

    output_dir: Annotated[Text, Field(default_factory=lambda: "runs/recipe")]
    """Folder of the run, relative to the working directory; without it, `runs/` and the recipe's file name."""

    save_steps: Steps = 0
    """Save a checkpoint every so many steps; 0 saves at the end and when interrupted."""

    save_total_limit: Count = 2
    """Checkpoints to keep."""

    save_async: bool = True
    """Copy what is saved to the host and write it while training goes on, one checkpoint at a time. Where the copy
    would take more than half of the memory that is free, training waits instead."""

    metric_for_best_model: Text | None = None
    """Keep the best checkpoints too, by this name of `metrics.jsonl` as it was when they were saved: `eval_loss`. An
    evaluation (`eval_...`) that is among the best so far is saved, whatever `save_steps` says."""

    greater_is_better: bool | None = None
    """True if more of that metric is better; without it, more is better unless its name ends in `loss`."""

    early_stopping_patience: Steps = 0
    """Stop, as at the end of the run, after so many evaluations in a row without a better `metric_for_best_model`; 0
    never does. The final model is that of the last step; the best one is a checkpoint."""

    early_stopping_threshold: Annotated[float, Field(ge=0), at_most(10**9)] = 0.0
    """`early_stopping_patience`: a metric is better if it is better by more than this."""

    save_best_limit: Count = 1
    """Best checkpoints to keep, besides the newest."""

    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop before the weights change, or leave that step out and go on."""

    max_skips: Steps = 10
    """Steps of the whole run that `on_nan: skip` may leave out."""

    on_oom: Literal["stop", "replan"] = "stop"
    """Memory that runs out in a step: stop and say what the planner would take next, or take it and do the step again,
    for the same gradient. With several ranks the run stops."""

    deterministic: bool = False
    """Refuse kernels whose result differs from run to run: slower on accelerators, and a resumed run is the same there
    to the last bit too. On the CPU it is in any case."""

    dataloader_num_workers: Annotated[int, Field(ge=0), at_most(1000)] = 0
    """Threads that prepare the batches of coming steps; 0 prepares each when it is its turn. The rows are the same."""

    eval_steps: Steps = 0
    """Evaluate on the held-out rows every so many steps; 0 evaluates at the end."""

    logging_steps: Count = 1
    """Without a terminal, print a line every so many steps; `metrics.jsonl` has every step."""

    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], Field(strict=False)] = ()
    """Experiment trackers that get what `metrics.jsonl` gets, through their own packages (`pip install
    'streamtune[trackers]'`). With `--offline` they write local files only."""

    sample: SampleSpec | None = None
    """Prompts to try at the end of the run, and while it trains."""

    sample_steps: Steps = 0
    """Complete the prompts of `sample` every so many steps, into `samples.jsonl`; 0 does it at the end only. Losses and
    weights stay what they are without."""

    callbacks: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Classes of your own that are called as the run goes on: `file.py:Name` or `module:Name`, with any of the methods
    `on_start`, `on_step`, `on_evaluate`, `on_end`. Needs `allow_code`."""

    allow_code: bool = False
    """Let code run that the recipe names: `callbacks` and, in grpo, reward functions of your own and what the model has
    written (`unit_tests`), the latter in a subprocess with limits on time and memory. `--allow-code` is the same."""

    # --- rules about several keys -----------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _takes_its_preset(cls, given: Any) -> Any:
        return with_preset(given)

    @field_validator("report_to")
    @classmethod
    def _each_tracker_once(cls, report_to: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(report_to))

    @field_validator("val_size")
    @classmethod
    def _whole_rows(cls, val_size: float) -> float:
        if val_size >= 1 and val_size != int(val_size):
            raise mistake(
                f"'val_size' takes a fraction below 1 or a whole number of rows; found {val_size}", key="val_size"
            )
        return val_size

    @model_validator(mode="after")
    def _one_model(self) -> Recipe:
        if self.model_name_or_path is None and self.model is None:
            raise mistake(
                "the recipe names no model",
                key="model_name_or_path",
                mend="add model_name_or_path, or model: {init: ...}",
            )
        if self.model_name_or_path is not None and self.model is not None:
            raise mistake("'model_name_or_path' and 'model' exclude each other", key="model", mend="keep one of them")
        if self.model is not None and self.tokenizer is None:
            raise mistake(
                "a model made from a configuration has no tokenizer of its own",
                key="model",
                mend="add tokenizer: {train: {vocab_size: 4096}} or tokenizer: {path: NAME}",
            )
        return self

    def _check_chats(self) -> None:
        given = [name for name in RESERVED_VARIABLES if name in self.chat_template_kwargs]
        if given:
            raise mistake(
                f"'chat_template_kwargs' cannot set '{given[0]}', which every rendering sets itself",
                key="chat_template_kwargs",
                mend="delete it",
            )
        named = [*self.special_tokens.additional_special_tokens, *self.added_tokens]
        if twice := next((token for token in named if named.count(token) > 1), None):
            raise mistake(f"the token '{twice}' is added twice", key="added_tokens", mend="keep one of the two")
        for key, default in (("roles_to_train", ("assistant",)), ("train_on_eos", "turn")):
            if self.train_on == "all" and getattr(self, key) != default:
                raise mistake(
                    f"'{key}' chooses tokens, and 'train_on: all' trains every token",
                    key=key,
                    mend="delete one of the two",
                )
        for key, default in (("roles_to_train", ("assistant",)), ("train_on_eos", "turn"), ("on_empty", "error")):
            if self.objective != "sft" and getattr(self, key) != default:
                raise mistake(f"'{key}' has no meaning in {self.objective}", key=key, mend="delete the line")

    def _check_long_rows(self) -> None:
        for key, default, of in (
            ("truncate_side", "auto", "truncate"),
            ("split_at", "turn", "split"),
            ("split_overlap", 0, "split"),
        ):
            if getattr(self, key) != default and self.overlength != of:
                raise mistake(
                    f"'{key}' is read with 'overlength: {of}', and overlength is '{self.overlength}'",
                    key=key,
                    mend=f"write overlength: {of}, or delete the line",
                )
        if self.split_overlap >= self.max_length:
            raise mistake(
                f"'split_overlap' leaves no token of 'max_length' ({self.max_length:,}) to what follows it",
                key="split_overlap",
                mend="lower it, or raise max_length",
            )

    def _check_sample(self, sample: SampleSpec) -> None:
        if not sample.prompts and sample.held_out == 0:
            raise mistake("'sample' has nothing to complete", key="sample", mend="add prompt: ..., or held_out: 10")
        if sample.held_out > 0 and self.objective != "sft":
            raise mistake(
                f"'held_out' compares with the answers of rows, and 'objective: {self.objective}' has none",
                key="sample.held_out",
                mend="write prompt: ...",
            )
        if sample.held_out > 0 and not self.evaluates:
            raise mistake(
                "'held_out' needs rows that are held out", key="sample.held_out", mend="set val_size, such as 0.02"
            )

    @property
    def teacher_file(self) -> str | None:
        """The file with what a teacher said of the rows; None where the teacher is a model, or there is none."""
        return self.teacher if self.teacher is not None and self.teacher.endswith(TEACHER_FILE) else None

    @property
    def evaluates(self) -> bool:
        """True if there are rows to evaluate on."""
        return self.val_size > 0 or bool(self.eval_datasets)

    @property
    def step_kind(self) -> StepKind:
        """The kind of an optimizer step: by the optimizer, and by the keys that change it."""
        kind = step_kind(self.optim, self.optim_args)
        if self.optim_in_backward:
            kind = kind.in_backward(norm_first=self.max_grad_norm > 0 and self.clip_norm == "exact")
        return kind.on_host() if self.engine.optimizer == "host" else kind

    @property
    def draws(self) -> int:
        """Times the rows of a step that are drawn for it; 1 where all that are drawn are trained on."""
        return 1 if self.select_rows is None else self.select_from

    @property
    def starts_from_gradients(self) -> bool:
        """True if adapters start from gradients of rows, which a run computes before its first step."""
        return self.finetuning_type == "lora" and ADAPTERS[self.adapter_type].start == "gradient"

    @property
    def starts_from_quantisation(self) -> bool:
        """True if adapters start from what quantisation takes from the weights."""
        qlora = self.finetuning_type == "qlora" and self.adapter_name_or_path is None
        return qlora and ADAPTERS[self.adapter_type].start == "quantisation"

    @model_validator(mode="after")
    def _keys_agree(self) -> Recipe:
        self._check_chats()
        self._check_long_rows()
        check_weights(self.datasets, self.mix_by)
        check_eval_sets(self.eval_datasets)
        rules = (
            batching_mistakes,
            select_mistakes,
            turn_mistakes,
            streaming_mistakes,
            loss_mistakes,
            optimizer_mistakes,
            learning_rate_mistakes,
            adapter_mistakes,
        )
        for found in (found for rule in rules for found in rule(self)):
            raise found
        if self.deepspeed is not None and self.fsdp:
            raise mistake("'deepspeed' and 'fsdp' exclude each other", key="fsdp", mend="keep one of them")
        if self.warmup_ratio > 0 and self.warmup_steps > 0:
            raise mistake(
                "'warmup_ratio' and 'warmup_steps' exclude each other", key="warmup_steps", mend="keep one of them"
            )
        if self.quantization != "auto" and self.finetuning_type != "qlora":
            raise mistake(
                f"'quantization: {self.quantization}' needs frozen weights, and 'finetuning_type' is "
                f"{self.finetuning_type}",
                key="quantization",
                mend="write finetuning_type: qlora, or delete the line",
            )
        if self.sample_steps > 0 and self.sample is None:
            raise mistake(
                "'sample_steps' needs prompts to complete",
                key="sample_steps",
                mend="add sample: {prompt: ...}, or a list: sample: {prompt: [..., ...]}",
            )
        if self.sample is not None:
            self._check_sample(self.sample)
        metric = self.metric_for_best_model
        if metric is not None and metric.startswith("eval_") and not self.evaluates:
            raise mistake(
                f"'metric_for_best_model: {metric}' needs rows to evaluate on",
                key="metric_for_best_model",
                mend="set val_size, such as val_size: 0.02, or eval_datasets",
            )
        if self.eval_steps > 0 and not self.evaluates:
            raise mistake(
                "'eval_steps' needs rows to evaluate on",
                key="eval_steps",
                mend="set val_size, such as val_size: 0.02, or eval_datasets",
            )
        return self

    @model_validator(mode="after")
    def _weights_are_whole(self) -> Recipe:
        if self.fsdp or self.deepspeed in SHARING_PRESETS:
            for key, what, mend in self.needs_whole_weights():
                raise mistake(what, key=key, mend=mend)
        return self

    @model_validator(mode="after")
    def _rows_are_whole(self) -> Recipe:
        if self.engine.order == "chunk" and self.sequence_parallel_size > 1:
            raise mistake(
                "'order: chunk' is for whole rows, and 'sequence_parallel_size' shares each of them between ranks",
                key="engine.order",
                mend="write order: layer, or delete the line; or sequence_parallel_size: 1",
            )
        return self

    @model_validator(mode="after")
    def _optimizer_may_be_elsewhere(self) -> Recipe:
        if self.engine.optimizer != "auto" and (self.deepspeed is not None or self.fsdp):
            key = "fsdp" if self.fsdp else "deepspeed"
            raise mistake(
                f"'engine.optimizer' is the memory of an optimizer of this program's, and '{key}' has one of its own",
                key="engine.optimizer",
                mend=f"delete '{key}', or this line; deepspeed: zero3_offload steps on the host",
            )
        return self

    @model_validator(mode="after")
    def _weights_may_wait(self) -> Recipe:
        if self.engine.weights != "host":
            return self
        if self.deepspeed is not None or self.fsdp or self.sequence_parallel_size > 1:
            key = "fsdp" if self.fsdp else "sequence_parallel_size" if self.deepspeed is None else "deepspeed"
            raise mistake(
                f"'engine.weights: host' is for one device by itself, and '{key}' is for several or for DeepSpeed",
                key="engine.weights",
                mend=f"delete '{key}', or write deepspeed: zero3_offload and delete this line",
            )
        if self.bf16 and self.engine.fetch_dtype == "bfloat16":
            raise mistake(
                "'bf16' casts what layers compute, and with 'fetch_dtype: bfloat16' the weights are bfloat16 already",
                key="bf16",
                mend="write bf16: false, or delete fetch_dtype",
            )
        if self.finetuning_type == "qlora":
            raise mistake(
                "'engine.weights: host' copies weights as they are, and quantised ones stay on the device",
                key="engine.weights",
                mend="write finetuning_type: lora, or delete the line",
            )
        return self

    @model_validator(mode="after")
    def _states_are_ours(self) -> Recipe:
        if self.optim_states != "param" and (self.deepspeed is not None or self.fsdp):
            key = "fsdp" if self.fsdp else "deepspeed"
            raise mistake(
                f"'optim_states' is of an optimizer whose states each rank has whole, and '{key}' divides them in a "
                "dtype of its own",
                key="optim_states",
                mend=f"delete the line, or '{key}'",
            )
        return self

    @model_validator(mode="after")
    def _clips_by_a_norm_that_is_there(self) -> Recipe:
        if self.clip_norm == "exact":
            return self
        if not self.optim_in_backward:
            raise mistake(
                "'clip_norm: lagged' spares 'optim_in_backward' a first backward, and without it the norm is known "
                "before anything is stepped",
                key="clip_norm",
                mend="add optim_in_backward: true, or delete the line",
            )
        if self.max_grad_norm == 0:
            raise mistake(
                "'clip_norm: lagged' says how gradients are clipped, and 'max_grad_norm: 0' does not clip",
                key="clip_norm",
                mend="delete the line, or write max_grad_norm: 1.0",
            )
        return self

    @model_validator(mode="after")
    def _steps_in_backward(self) -> Recipe:
        if not self.optim_in_backward:
            return self
        if self.deepspeed is not None or self.fsdp:
            key = "fsdp" if self.fsdp else "deepspeed"
            raise mistake(
                f"'optim_in_backward' is for one device by itself, and '{key}' has an optimizer of its own",
                key="optim_in_backward",
                mend=f"delete the line, or '{key}'",
            )
        if self.on_nan == "skip" and (self.max_grad_norm == 0 or self.clip_norm == "lagged"):
            first = "max_grad_norm: 1.0" if self.max_grad_norm == 0 else "clip_norm: exact"
            raise mistake(
                "'on_nan: skip' leaves out a step before its optimizer, which has stepped in the backward by then",
                key="on_nan",
                mend=f"write {first}, which measures the gradient first, or on_nan: stop",
            )
        return self

    def needs_whole_weights(self) -> Iterator[WholeWeights]:
        """Yield the choices of this recipe that are refused where ranks share the weights."""
        if self.quantization == "int8":
            yield QUANTISED
        yield from adapters_of_whole_weights(self)
        if self.teacher is not None and self.teacher_file is None:
            yield TEACHER
        if self.engine.order == "chunk":
            yield CHUNK_ORDER
