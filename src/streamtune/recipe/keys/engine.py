"""Keys of streaming (the ``engine:`` group), of the device, and of several devices: choices and memory budgets."""

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
    FetchDtype,
    Fuse,
    GradDtype,
    Kept,
    Order,
    Tier,
    WeightTier,
    contradictions,
    kept,
)

Auto = Literal["auto"]


def _open_choices(spec: Any) -> dict[str, Any]:
    """Return the value of every schedule choice. A choice that the recipe does not set has its default with ``schedule:
    fixed``, and is None (open) with ``auto``."""
    return {**(DEFAULTS if spec.schedule == "fixed" else dict.fromkeys(DEFAULTS)), **spec.choices()}


def _contradictions(spec: Any) -> Iterator[Refusal]:
    """Yield a refusal for each pair of choices that exclude each other."""
    choices = _open_choices(spec)
    if choices["order"] == "chunk" and spec.keep_kv == "auto":
        choices["keep_kv"] = None  # order: chunk keeps keys and values in any case
    for field, what, (other, value) in contradictions(choices, _quote_choice):
        fix = f"add {other}: {value}" if field == "offload" else f"write {other}: {value}, or delete the line"
        yield Refusal(f"engine.{field}", what, fix)


def _unused_offload_dir(spec: Any) -> Iterator[Refusal]:
    offload = _open_choices(spec)["offload"]
    if spec.offload_dir is not None and offload in ("device", "host"):
        yield Refusal(
            "engine.offload_dir",
            f"'engine.offload_dir' needs 'offload: disk', and 'engine.offload' is {offload}",
            "write offload: disk, or delete the line",
        )


def _quote_choice(field: str, value: str | None = None) -> str:
    return f"'engine.{field}'" if value is None else f"'engine.{field}: {value}'"


class EngineSpec(Spec):
    """Keys of the ``engine`` group, which decide how a step is streamed. All values give the same gradient; they differ
    in memory and time."""

    schedule: Literal["auto", "fixed"] = "auto"
    """Choice of the keys below that the recipe does not set. `auto`: the planner picks the fastest schedule that fits
    in memory. `fixed`: no planner; each key has its default with `fixed`, which its description names."""

    chunk_size: Count | Auto = "auto"
    """Maximum number of tokens of the sequence that a layer processes at once. Default with `fixed`: 2048."""

    head_chunk_size: Count | Auto = "auto"
    """Maximum number of tokens whose logits exist at once in the loss. Default with `fixed`: 1024."""

    offload: Literal[Auto, Tier] = "auto"
    """Memory that stores the layer inputs until the backward. The planner chooses `disk` only if `offload_dir` is set.
    Default with `fixed`: device."""

    offload_dir: Text | None = None
    """Directory for `offload: disk`, on a fast local disk. The file with the layer inputs is deleted when the run ends,
    also after a crash."""

    device_layers: Steps | Auto = "auto"
    """With `offload: host` or `offload: disk`: number of layer inputs that stay on the device. Default with `fixed`:
    0."""

    levels: Annotated[int, Field(ge=1, le=2)] | Auto = "auto"
    """Number of levels of stored layer inputs. `1`: the input of every layer is stored. `2`: only every
    `segment_size`-th layer's input is stored. The backward recomputes the other inputs, which costs one more forward.
    Default with `fixed`: 1."""

    segment_size: Count | Auto = "auto"
    """With `levels: 2`: number of layers in a segment. Default with `fixed`: the size that stores the fewest layer
    inputs."""

    keep_kv: bool | Literal[Auto, Kept] = "auto"
    """Memory that keeps every layer's keys and values until the backward. With `no`, the backward projects them again.
    `true` means `device`. Default with `fixed`: no."""

    keep_attention: Literal[Auto, Kept] = "auto"
    """Memory that keeps the output of every attention until the backward. With `no`, the backward recomputes it.
    Default with `fixed`: no."""

    keep_layers: Steps | Auto = "auto"
    """Number of layers, counted from the last, that keep all activations and recompute nothing. Default with `fixed`:
    0."""

    stream_grads: bool | Auto = "auto"
    """Save memory for gradients of hidden states. Chunk by chunk, the gradient with respect to a layer's input
    overwrites the gradient with respect to its output, in the memory of the layer inputs. Default with `fixed`:
    false."""

    grad_dtype: GradDtype = "float32"
    """Dtype in which gradients are summed over chunks: float32, or the dtype of the parameter (`param`). It affects
    rounding, so the planner never changes it."""

    fuse: Literal[Auto, Fuse] = "auto"
    """Implementation of norms and rotary embeddings on CUDA: torch's fused operators (`torch`), or the model's own code
    (`none`). The choice affects rounding, so the planner never changes it. Default with `fixed`: torch."""

    order: Literal[Auto, Order] = "auto"
    """Outer loop of the backward. `layer` processes all chunks of a layer, then the next layer; it stores the input of
    every layer. `chunk` processes all layers of a chunk, then the next chunk. It stores the input of the first layer,
    and every layer's keys and values (or recurrent states) with their gradients. With `chunk`, `keep_kv` is device or
    host, and `offload` places the first layer's input. `levels: 2` then holds a chunk's activations for `segment_size`
    layers at once (with `fixed`: 1) instead of all layers. Default with `fixed`: layer."""

    weights: Literal[Auto, WeightTier] = "auto"
    """Memory that holds weights while they are not in use. `host`: weights of layers, embedding and head are in host
    memory. Each layer is copied to the device before it computes, and its gradient is copied back. The optimizer
    updates these weights on the CPU; adapters stay on the device. One device only. The planner chooses `host` only if
    no other schedule fits, and says so. Default with `fixed`: device."""

    fetch_dtype: Literal[Auto, FetchDtype] = "auto"
    """With `weights: host`: dtype of the copies of weights on the device. `param` is the dtype of the weight. With
    `bfloat16` the model computes in bfloat16; weights, gradient sums and optimizer stay in float32. This replaces
    `bf16`, and halves the bytes of the layer inputs. The planner never changes it. Default with `fixed`: param."""

    optimizer: Literal[Auto, "device", "host"] = "auto"
    """Memory that holds the optimizer's states; the optimizer also runs there. `host` with weights on the device: each
    gradient is copied to host memory, and the updated weight is copied back; with `optim_in_backward` the copies
    overlap with the computation. `auto`: the memory of the weights. For full fine-tuning the planner chooses the host
    if nothing else fits; adapters beside host weights stay on the device. One device only."""

    device_memory: Size | Auto = "auto"
    """Device memory to plan with, such as `80GiB`. `auto` is the memory free at the start of the run."""

    host_memory: Size | Auto = "auto"
    """Host memory to plan with. `auto` is the available memory, at most the limit of the container."""

    disk_memory: Size | Auto = "auto"
    """Disk space in `offload_dir` to plan with. `auto` is the free space."""

    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of each memory budget that the planner leaves free."""

    rules = (
        Custom(_contradictions),
        Clash(
            {"fetch_dtype": "bfloat16", "weights": "auto"},
            "'engine.fetch_dtype: bfloat16' needs 'weights: host', and 'weights' is left to the planner",
            "write weights: host, or delete the line",
            key="engine.fetch_dtype",
        ),
        Clash(
            {"optimizer": "device", "weights": "host"},
            "'engine.optimizer: device' steps on the device, and with 'weights: host' weights are stepped on the host",
            "write optimizer: auto, or delete the line",
            key="engine.optimizer",
        ),
        Custom(_unused_offload_dir),
    )

    @property
    def host_key(self) -> str | None:
        """The key that makes the optimizer run on the host; None if it runs on the device."""
        return next((key for key in ("weights", "optimizer") if getattr(self, key) == "host"), None)

    def written(self) -> dict[str, Any]:
        """Return the schedule choices in the recipe as fields of ``Schedule``: name -> value.

        ``segment_size`` implies two levels, and ``keep_kv: true`` becomes ``device``. The caller has to derive
        ``offload`` from ``device_layers``.
        """
        fields = self.choices()
        if "keep_kv" in fields:
            fields["keep_kv"] = kept(fields["keep_kv"])
        if "segment_size" in fields:
            fields["levels"] = 2
        return fields

    def choices(self) -> dict[str, Any]:
        """Return the schedule choices in the recipe, with the values as they are written there."""
        return {name: value for name in DEFAULTS if (value := getattr(self, name)) not in ("auto", None)}


class EngineKeys(Spec):
    """Keys of the streamed step, and of the device that computes it."""

    engine: EngineSpec = EngineSpec()
    """Keys that decide how a step is streamed, and its memory budgets. The defaults suit most runs."""

    bf16: bool | None = None
    """Compute in bfloat16 (autocast); the weights keep their dtype. Default: true if `dtype: auto` trains the weights
    of a bfloat16 or float16 checkpoint in float32, else false."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. `auto` uses an accelerator if one exists."""

    peak_flops: Annotated[float, Field(gt=0), at_most(10**20)] | None = None
    """Peak dense FLOP/s of one device, from which `mfu` is computed. Default: the bfloat16 figure in the data sheet of
    a known device. For other devices and the CPU, `mfu` is not reported."""


ENGINE_RULES: Rules = (
    Clash(
        {"engine.order": "chunk", "sequence_parallel_size": GIVEN},
        "'order: chunk' needs whole rows, and 'sequence_parallel_size' splits each row between ranks",
        "write order: layer, or delete the line; or sequence_parallel_size: 1",
    ),
    Clash(
        {"engine.optimizer": GIVEN, "divides": Not(None)},
        "'engine.optimizer' places StreamTune's own optimizer, and '{divides}' brings another one",
        "delete '{divides}', or this line; with deepspeed: zero3_offload the optimizer steps on the host",
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
        "'order: chunk' reads the weights of all layers once for every chunk, and ranks that shard them would send "
        "them each time",
        "write order: layer, or deepspeed: zero2",
    ),
)


SHARING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which ranks shard the weights."""


class DeviceKeys(Spec):
    """Keys of training on several devices."""

    deepspeed: Text | None = None
    """Shard optimizer states (`zero1`), also gradients (`zero2`), also weights (`zero3`) across ranks with DeepSpeed.
    `zero3_offload` has weights and optimizer in host memory. The path of a DeepSpeed configuration is accepted too; its
    `auto` values are filled from the recipe. Default: each rank has the whole model (DDP)."""

    fsdp: bool = False
    """Shard weights, gradients and optimizer states across ranks with PyTorch's FSDP2, instead of DeepSpeed."""

    sequence_parallel_size: Rows = 1
    """Number of ranks that share each sequence; more ranks allow longer sequences. The number of all ranks must be a
    multiple of it."""

    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto"
    """Method by which ranks share a sequence: `ulysses` exchanges attention heads for tokens, `ring` passes keys and
    values from rank to rank. `auto` is `ulysses` if the number of query heads is divisible by `sequence_parallel_size`,
    else `ring`."""

    train_batch_size: Rows | None = None
    """Number of rows in one optimizer step over all ranks. It replaces `gradient_accumulation_steps`, which is then
    derived from the number of ranks. So a recipe trains the same on any number of ranks."""

    @property
    def divides(self) -> str | None:
        """The key that shards the optimizer or the weights across ranks; None if each rank has both whole."""
        return "fsdp" if self.fsdp else "deepspeed" if self.deepspeed is not None else None

    @property
    def shares_weights(self) -> bool:
        """True if a key of the recipe shards the weights across ranks. A DeepSpeed configuration is not read here, so
        its stage does not count."""
        return self.fsdp or self.deepspeed in SHARING_PRESETS


DEVICE_RULES: Rules = (
    Clash({"fsdp": True, "deepspeed": Not(None)}, "'deepspeed' and 'fsdp' exclude each other", KEEP_ONE),
)
