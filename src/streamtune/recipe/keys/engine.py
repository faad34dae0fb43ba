"""Recipe keys of the engine (how a step is streamed, memory budgets), of the device, and of several devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from streamtune.recipe.rules import (
    GIVEN,
    KEEP_ONE,
    Clash,
    Count,
    Custom,
    Not,
    Refusal,
    Rows,
    Rules,
    Size,
    Spec,
    Steps,
    Text,
    at_most,
)
from streamtune.schedule import (
    DEFAULTS,
    AutocastDtype,
    FetchDtype,
    Fuse,
    GradDtype,
    Kept,
    Order,
    Tier,
    WeightTier,
    find_contradictions,
    normalise_keep_choice,
)

Auto = Literal["auto"]


def _schedule_fields_with_defaults(spec: Any) -> dict[str, Any]:
    """Return the values of all schedule fields, by name.

    A field that the recipe does not set has its default with ``schedule: fixed``, and None with ``schedule: auto``.
    """
    return {**(DEFAULTS if spec.schedule == "fixed" else dict.fromkeys(DEFAULTS)), **spec.written_fields()}


def _refuse_contradictions(spec: Any) -> Iterator[Refusal]:
    choices = _schedule_fields_with_defaults(spec)
    if choices["order"] == "chunk" and spec.keep_kv == "auto":
        choices["keep_kv"] = None  # order: chunk keeps keys and values in any case
    for field, what, (other, value) in find_contradictions(choices, _quote_engine_key):
        fix = f"add {other}: {value}" if field == "offload" else f"write {other}: {value}, or delete the line"
        yield Refusal(f"engine.{field}", what, fix)


def _refuse_unused_offload_dir(spec: Any) -> Iterator[Refusal]:
    offload = _schedule_fields_with_defaults(spec)["offload"]
    if spec.offload_dir is not None and offload in ("device", "host"):
        yield Refusal(
            "engine.offload_dir",
            f"'engine.offload_dir' needs 'offload: disk', and 'engine.offload' is {offload}",
            "write offload: disk, or delete the line",
        )


def _quote_engine_key(field: str, value: str | None = None) -> str:
    return f"'engine.{field}'" if value is None else f"'engine.{field}: {value}'"


class EngineSpec(Spec):
    """Keys of the recipe key ``engine``, which control how a step is streamed. All values give the same gradient; they
    differ in memory and time."""

    schedule: Literal["auto", "fixed"] = "auto"
    """Source of the values of keys of this group that are `auto`. `auto`: the planner chooses the fastest values that
    fit in memory. `fixed`: each key gets the constant that its description gives as the default with `schedule:
    fixed`."""

    chunk_size: Count | Auto = "auto"
    """Maximum number of consecutive tokens of a sequence that a layer processes at once. Smaller chunks take less
    memory for activations. Default with `schedule: fixed`: 2048."""

    head_chunk_size: Count | Auto = "auto"
    """Maximum number of tokens whose logits are in memory at once while the loss is computed. Smaller chunks take less
    memory. Default with `schedule: fixed`: 1024."""

    offload: Literal[Auto, Tier] = "auto"
    """Memory that stores the input of each layer until the backward: `device` (GPU), `host` (CPU) or `disk`. With
    `auto`, the planner chooses `disk` only if `offload_dir` is set. Default with `schedule: fixed`: device."""

    offload_dir: Text | None = None
    """Folder on a fast local disk for the layer inputs of `offload: disk`. The file there is deleted when the run ends,
    also after a crash."""

    device_layers: Steps | Auto = "auto"
    """With `offload: host` or `offload: disk`: number of layers whose input stays in device memory. A larger number
    means fewer copies and more device memory. Default with `schedule: fixed`: 0."""

    levels: Annotated[int, Field(ge=1, le=2)] | Auto = "auto"
    """Number of levels of activation checkpoints. `1`: the input of every layer is stored. `2`: only the input of every
    `segment_size`-th layer is stored; the backward recomputes the other inputs. `2` takes less memory and costs one
    more forward. Default with `schedule: fixed`: 1."""

    segment_size: Count | Auto = "auto"
    """With `levels: 2`: number of consecutive layers of which only the first stores its input. Default with `schedule:
    fixed`: the size for which the fewest layer inputs are in memory at once."""

    keep_kv: bool | Literal[Auto, Kept] = "auto"
    """Memory that stores the attention keys and values of every layer until the backward: `device` or `host`. `no`:
    they are not stored; the backward computes them again from the layer input, which takes time instead of memory.
    `true` means `device`. Default with `schedule: fixed`: no."""

    keep_attention: Literal[Auto, Kept] = "auto"
    """Memory that stores the attention output of every layer until the backward: `device` or `host`. `no`: the backward
    recomputes the attention, which takes time instead of memory. Default with `schedule: fixed`: no."""

    keep_layers: Steps | Auto = "auto"
    """Number of layers, counted from the last, that store all their activations instead of recomputing them in the
    backward. A larger number is faster and takes more memory. Default with `schedule: fixed`: 0."""

    stream_grads: bool | Auto = "auto"
    """Store the gradient of the hidden states between two layers where `offload` stores the layer inputs. With
    `offload: device`, the gradient of a layer's input overwrites the gradient of the layer's output, chunk by chunk. So
    the memory of one of the two gradients is saved. Default with `schedule: fixed`: false."""

    grad_dtype: GradDtype = "float32"
    """Dtype in which gradients are summed over chunks: `float32`, or `param` for the dtype of the parameter. It affects
    rounding, so the planner never changes it."""

    fuse: Literal[Auto, Fuse] = "auto"
    """Implementation of norms, rotary embeddings and the gates of MLPs on CUDA: `torch` for fused operators of torch
    and, if it is installed, Liger; `none` for the model's own code. It affects rounding, so the planner never changes
    it. Default with `schedule: fixed`: torch."""

    order: Literal[Auto, Order] = "auto"
    """Outer loop of the backward. `layer`: all chunks of a layer, then the layer below. The input of every layer is
    stored. `chunk`: all layers of a chunk, then the chunk before. Stored are the input of the first layer (`offload`
    sets where), and the keys and values or recurrent states of every layer (`keep_kv` sets where). The activations of
    one chunk are in memory for all layers at once, or with `levels: 2` for `segment_size` layers (with `schedule:
    fixed`: 1). Default with `schedule: fixed`: layer."""

    weights: Literal[Auto, WeightTier] = "auto"
    """Memory that stores the weights of layers, embedding and head while they are not in use: `device` or `host`. With
    `host`, the weights of each layer are copied to the device before it computes, and their gradient is copied back.
    The optimizer updates these weights on the CPU; adapters stay on the device. One device only. With `auto`, the
    planner chooses `host` only if no other schedule fits, and reports it. Default with `schedule: fixed`: device."""

    fetch_dtype: Literal[Auto, FetchDtype] = "auto"
    """With `weights: host`: dtype of the copies of the weights on the device. `param`: the dtype of the stored weights.
    `bfloat16`: the model computes in bfloat16, while stored weights, gradient sums and optimizer stay in float32; layer
    inputs take half the memory. It cannot be combined with `bf16: true`. The planner never changes this key. Default
    with `schedule: fixed`: param."""

    optimizer: Literal[Auto, "device", "host"] = "auto"
    """Memory where the optimizer runs and stores its states: `device`, `host`, or `auto` for the memory that stores the
    weights (key `weights`). With `host` and weights on the device, each gradient is copied to host memory, and the
    updated weight is copied back; with `optim_in_backward` these copies overlap with the computation. One device only.
    In full fine-tuning, `auto` may become `host` if nothing else fits. With `weights: host`, adapters are still updated
    on the device."""

    device_memory: Size | Auto = "auto"
    """Device memory that the planner may use, such as `80GiB`. `auto`: the memory that is free at the start of the
    run."""

    host_memory: Size | Auto = "auto"
    """Host memory that the planner may use, such as `256GiB`. `auto`: the available memory, at most the limit of the
    container."""

    disk_memory: Size | Auto = "auto"
    """Disk space in `offload_dir` that the planner may use, such as `1TiB`. `auto`: the free space."""

    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of `device_memory`, `host_memory` and `disk_memory` that the planner leaves free. Raise it if a planned
    run runs out of memory."""

    rules = (
        Custom(_refuse_contradictions),
        Clash(
            {"fetch_dtype": "bfloat16", "weights": "auto"},
            "'engine.fetch_dtype: bfloat16' needs 'weights: host', and 'weights' is left to the planner",
            "write weights: host, or delete the line",
            key="engine.fetch_dtype",
        ),
        Clash(
            {"optimizer": "device", "weights": "host"},
            "'engine.optimizer: device' updates weights on the device, and 'weights: host' updates them on the host",
            "write optimizer: auto, or delete the line",
            key="engine.optimizer",
        ),
        Custom(_refuse_unused_offload_dir),
    )

    @property
    def host_optimizer_key(self) -> str | None:
        """The key of ``engine`` that makes the optimizer run on the host; None if it runs on the device."""
        return next((key for key in ("weights", "optimizer") if getattr(self, key) == "host"), None)

    def schedule_fields(self) -> dict[str, Any]:
        """Return the schedule choices in the recipe as fields of ``Schedule``: name -> value.

        ``segment_size`` implies two levels, and ``keep_kv: true`` becomes ``device``. The caller has to derive
        ``offload`` from ``device_layers``.
        """
        fields = self.written_fields()
        if "keep_kv" in fields:
            fields["keep_kv"] = normalise_keep_choice(fields["keep_kv"])
        if "segment_size" in fields:
            fields["levels"] = 2
        return fields

    def written_fields(self) -> dict[str, Any]:
        """Return the schedule fields that the recipe sets, by name, with the values as they are written there."""
        return {name: value for name in DEFAULTS if (value := getattr(self, name)) not in ("auto", None)}


class EngineKeys(Spec):
    """Recipe keys that control how a step is streamed, and on which device."""

    engine: EngineSpec = EngineSpec()
    """Group of keys that decide how a step is streamed, and how much memory it may use. The defaults suit most runs."""

    bf16: bool | None = None
    """Compute in bfloat16 (autocast); the weights keep their `dtype`. Default: true in full fine-tuning of a bfloat16
    or float16 checkpoint if `dtype: auto` chooses float32 weights, else false."""

    fp16: bool = False
    """Compute in float16 (autocast) with a scaled loss, for a device without bfloat16 (V100, T4, RTX 20). Trained
    weights are float32 (`dtype: mixed`); adapters are float32 on a frozen base in float16. The loss is multiplied by a
    scale before the backward, and gradients are divided by it before clipping. The scale starts at 65,536. A step whose
    gradient overflows is skipped and halves the scale; 2,000 steps without overflow double it. `metrics.jsonl` has
    `loss_scale`, and `overflow` for skipped steps. Write `bf16: true` on devices that have bfloat16."""

    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    """Device to train on: `cpu`, `cuda` (also AMD devices with ROCm), `xpu` (Intel), `mps` (Apple). `auto` is `cuda` if
    such a device exists, else the CPU. Nobody has tried `xpu` and `mps` yet, so they are used only if they are written;
    they train on one device, without fused attention kernels."""

    peak_flops: Annotated[float, Field(gt=0), at_most(10**20)] | None = None
    """Peak dense FLOP/s of one device, from which `mfu` (model FLOPs utilisation) is computed. Set it if the device is
    unknown to StreamTune. Default: the bfloat16 figure in the data sheet of a known device; otherwise `mfu` is not
    reported."""

    @property
    def autocast_dtype(self) -> AutocastDtype | None:
        """Dtype in which autocast computes; None without autocast."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else None


FP16_RULES: Rules = (
    Clash({"fp16": True, "bf16": True}, "'fp16' and 'bf16' exclude each other", KEEP_ONE),
    Clash(
        {"dtype": "float16", "fp16": False},
        "'dtype: float16' needs 'fp16: true', which scales the loss; otherwise float16 gradients become zero",
        "add fp16: true, or write dtype: bfloat16",
    ),
    Clash(
        {"dtype": "float16", "finetuning_type": "full"},
        "'dtype: float16' is for frozen weights, and full fine-tuning trains all weights, in float32 with 'fp16'",
        "write dtype: mixed, or train adapters with finetuning_type: lora",
    ),
    Clash(
        {"dtype": "float16", "modules_to_save": GIVEN},
        "'modules_to_save' are trained in the dtype of the base, and float16 weights lose small steps to rounding",
        "write dtype: float32",
        key="dtype",
    ),
    Clash(
        {"fp16": True, "dtype": "bfloat16"},
        "'fp16' computes in float16, and 'dtype: bfloat16' would round each weight to both dtypes",
        "delete the line of 'dtype', or write bf16: true in place of fp16",
        key="dtype",
    ),
    Clash(
        {"fp16": True, "engine.fetch_dtype": "bfloat16"},
        "'fp16' computes in float16, and 'fetch_dtype: bfloat16' computes in bfloat16",
        "delete fetch_dtype, or write fp16: false",
    ),
    Clash(
        {"fp16": True, "deepspeed": Not(None)},
        "'fp16' scales the loss itself, and DeepSpeed would scale and skip by its own rules, which no checkpoint saves",
        "write fsdp: true in place of 'deepspeed', or bf16: true in place of fp16",
    ),
    Clash(
        {"fp16": True, "weight_rounding": GIVEN},
        "'weight_rounding: stochastic' rounds trained bfloat16 weights, and 'fp16' trains float32 weights",
        "delete the line of 'weight_rounding'",
    ),
    *(
        Clash(
            {"fp16": True, "optim_in_backward": True, **setting},
            "'fp16' skips a step whose gradient overflows, and 'optim_in_backward' has updated weights by then",
            f"write {first}, which measures the gradient first, or delete 'optim_in_backward'",
        )
        for setting, first in (
            ({"max_grad_norm": 0}, "max_grad_norm: 1.0"),
            ({"clip_norm": "lagged"}, "clip_norm: exact"),
        )
    ),
    Clash(
        {"fp16": True, "adapter_type": "lora_ga"},
        "'adapter_type: lora_ga' starts from a gradient, whose float16 parts become zero without a scaled loss",
        "write adapter_type: lora, or bf16: true in place of fp16",
    ),
    Clash(
        {"fp16": True, "select_rows": Not(None)},
        "'select_rows' compares gradients of single rows, whose float16 parts become zero without a scaled loss",
        "delete the line of 'select_rows', or write bf16: true in place of fp16",
    ),
)

ENGINE_RULES: Rules = (
    *FP16_RULES,
    Clash(
        {"engine.order": "chunk", "sequence_parallel_size": GIVEN},
        "'order: chunk' needs whole rows, and 'sequence_parallel_size' splits each row between ranks",
        "write order: layer, or delete the line; or sequence_parallel_size: 1",
    ),
    Clash(
        {"engine.optimizer": GIVEN, "sharding_key": Not(None)},
        "'engine.optimizer' is for StreamTune's own optimizer, and '{sharding_key}' has another one",
        "delete '{sharding_key}', or this line; with deepspeed: zero3_offload the optimizer steps on the host",
    ),
    *(
        Clash(
            {"engine.weights": "host", key: GIVEN},
            f"'engine.weights: host' needs a single device without DeepSpeed, and the recipe sets '{key}'",
            f"delete '{key}', or write deepspeed: zero3_offload and delete this line",
        )
        for key in ("fsdp", "deepspeed", "sequence_parallel_size")
    ),
    Clash(
        {"bf16": True, "engine.weights": "host", "engine.fetch_dtype": "bfloat16"},
        "'bf16' and 'fetch_dtype: bfloat16' exclude each other: the weights on the device are bfloat16 already",
        "write bf16: false, or delete fetch_dtype",
    ),
    Clash(
        {"engine.weights": "host", "finetuning_type": "qlora"},
        "'engine.weights: host' does not move quantised weights, which stay on the device",
        "write finetuning_type: lora, or delete the line",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"engine.order": "chunk"},
        "'order: chunk' reads the weights of all layers once for every chunk, and ranks that shard the weights would "
        "gather them each time",
        "write order: layer, or deepspeed: zero2",
    ),
)


DEEPSPEED_PRESETS = ("zero1", "zero2", "zero3", "zero3_offload")
"""Values of ``deepspeed`` that are not the path of a DeepSpeed configuration."""
SHARDING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which ranks shard the weights."""


class DeviceKeys(Spec):
    """Recipe keys for training on several devices."""

    deepspeed: Text | None = None
    """State that DeepSpeed shards across ranks. `zero1`: optimizer states. `zero2`: also gradients. `zero3`: also
    weights. `zero3_offload`: as `zero3`, with weights and optimizer in host memory. The path of a DeepSpeed
    configuration is accepted too; its `auto` values are filled from the recipe. Default: nothing is sharded (DDP)."""

    fsdp: bool = False
    """Shard weights, gradients and optimizer states across ranks with PyTorch's FSDP2. It cannot be combined with
    `deepspeed`."""

    sequence_parallel_size: Rows = 1
    """Number of ranks that share each sequence, so that longer sequences fit. The number of all ranks must be a
    multiple of this number. 1: each rank has whole sequences."""

    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto"
    """With `sequence_parallel_size` above 1: method by which ranks share a sequence. `ulysses` exchanges attention
    heads for tokens. `ring` passes keys and values from rank to rank. `auto` is `ulysses` if the number of query heads
    is divisible by `sequence_parallel_size`, else `ring`."""

    train_batch_size: Rows | None = None
    """Number of rows in one optimizer step over all ranks. It replaces `gradient_accumulation_steps`, which is then
    derived from the number of ranks. Set it if the batch size must be the same on any number of ranks."""

    @property
    def sharding_key(self) -> str | None:
        """The recipe key that shards the optimizer or the weights across ranks; None if no key does."""
        return "fsdp" if self.fsdp else "deepspeed" if self.deepspeed is not None else None

    @property
    def shards_weights(self) -> bool:
        """True if a key of the recipe shards the weights across ranks. A path of a DeepSpeed configuration gives False,
        because the file is not read here."""
        return self.fsdp or self.deepspeed in SHARDING_PRESETS


DEVICE_RULES: Rules = (
    Clash({"fsdp": True, "deepspeed": Not(None)}, "'deepspeed' and 'fsdp' exclude each other", KEEP_ONE),
)
