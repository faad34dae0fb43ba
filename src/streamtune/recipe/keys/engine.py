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
    """Return every choice of a schedule: the value in the recipe; else the default with ``schedule: fixed``, and None
    otherwise."""
    return {**(DEFAULTS if spec.schedule == "fixed" else dict.fromkeys(DEFAULTS)), **spec.choices()}


def _contradictions(spec: Any) -> Iterator[Refusal]:
    """Yield choices that exclude each other in every plan."""
    choices = _open_choices(spec)
    if choices["order"] == "chunk" and spec.keep_kv == "auto":
        choices["keep_kv"] = None  # it is kept without a word
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
    """Streaming of the sequence. Every choice gives the same gradient; choices differ in memory and time."""

    schedule: Literal["auto", "fixed"] = "auto"
    """`auto`: the planner picks the fastest schedule that fits, and keeps the choices that the recipe sets. `fixed`: no
    planner; choices that the recipe does not set have their default with `fixed`."""

    chunk_size: Count | Auto = "auto"
    """Maximum number of tokens of the sequence that a layer processes at once. Default with `fixed`: 2048."""

    head_chunk_size: Count | Auto = "auto"
    """Maximum number of tokens whose logits exist at once in the loss. Default with `fixed`: 1024."""

    offload: Literal[Auto, Tier] = "auto"
    """Memory that stores the layer inputs until the backward. The planner chooses `disk` only if `offload_dir` is set.
    Default with `fixed`: device."""

    offload_dir: Text | None = None
    """Directory for `offload: disk`, on a fast local disk. Its file is deleted when the run ends, also after a
    crash."""

    device_layers: Steps | Auto = "auto"
    """With `offload: host` or `disk`: number of layer inputs that stay on the device. Default with `fixed`: 0."""

    levels: Annotated[int, Field(ge=1, le=2)] | Auto = "auto"
    """Levels of stored layer inputs. 1 stores the input of every layer. 2 stores the input of every `segment_size`-th
    layer and recomputes the others, for one more forward. Default with `fixed`: 1."""

    segment_size: Count | Auto = "auto"
    """Layers of a segment with `levels: 2`. Default with `fixed`: the size that stores the fewest inputs."""

    keep_kv: bool | Literal[Auto, Kept] = "auto"
    """Keep every layer's keys and values from forward to backward instead of projecting them again. `true` means
    `device`. Default with `fixed`: no."""

    keep_attention: Literal[Auto, Kept] = "auto"
    """Keep the output of every attention, so that the backward does not recompute it. Default with `fixed`: no."""

    keep_layers: Steps | Auto = "auto"
    """Number of last layers that keep all activations and recompute nothing. Default with `fixed`: 0."""

    stream_grads: bool | Auto = "auto"
    """Overwrite the gradient of a layer's output with the gradient of its input, chunk by chunk, in the memory of the
    layer inputs. Default with `fixed`: false."""

    grad_dtype: GradDtype = "float32"
    """Dtype in which gradients are summed over chunks: float32, or the parameter's own. The planner never changes it,
    because it affects rounding."""

    fuse: Literal[Auto, Fuse] = "auto"
    """Norms and rotary embeddings on CUDA: torch's fused operators (`torch`), or as the model writes them (`none`).
    They differ only by rounding, so the planner never changes it. Default with `fixed`: torch."""

    order: Literal[Auto, Order] = "auto"
    """Outer loop of the backward. `layer` processes all chunks of a layer and stores every layer's input. `chunk`
    processes all layers of a chunk; it stores one layer input, and every layer's keys and values with their gradients.
    With `chunk`, `keep_kv` is device or host (recurrent states too), and `offload` places the one input. `levels: 2`
    then holds a chunk's activations of `segment_size` layers (with `fixed`: 1) instead of all. Default with `fixed`:
    layer."""

    weights: Literal[Auto, WeightTier] = "auto"
    """Memory of weights that are not in use. `host`: weights of layers, embedding and head are in host memory. Each
    layer is copied to the device before it computes, and its gradient is copied back. Weights trained there are stepped
    on the CPU; adapters stay on the device. One device only. The planner chooses `host` only if no other schedule fits,
    and says so. Default with `fixed`: device."""

    fetch_dtype: Literal[Auto, FetchDtype] = "auto"
    """Dtype of a weight's copy on the device, with `weights: host`. `bfloat16`: the model computes in bfloat16;
    weights, gradient sums and optimizer stay in float32. It replaces `bf16` and halves the layer inputs. The planner
    never changes it. Default with `fixed`: param."""

    optimizer: Literal[Auto, "device", "host"] = "auto"
    """Memory of the optimizer's states, where the optimizer also steps. `host` with weights on the device: each
    gradient is copied to host memory, and the stepped weight is copied back; with `optim_in_backward` this overlaps
    with the computation. `auto`: where the weights are. For full fine-tuning the planner chooses the host if nothing
    else fits; adapters beside host weights stay on the device. One device only."""

    device_memory: Size | Auto = "auto"
    """Device memory to plan with, such as `80GiB`. `auto` is the memory free at the start of the run."""

    host_memory: Size | Auto = "auto"
    """Host memory to plan with. `auto` is the available memory, with a container's limit respected."""

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
    def on_host(self) -> str | None:
        """The key because of which the optimizer steps on the host; None if it steps on the device."""
        return next((key for key in ("weights", "optimizer") if getattr(self, key) == "host"), None)

    def written(self) -> dict[str, Any]:
        """Return the schedule choices in the recipe, by field of the engine's ``Schedule``.

        ``segment_size`` implies two levels, and ``keep_kv: true`` becomes ``device``. ``offload`` is not derived from
        ``device_layers``: the caller does that.
        """
        made = self.choices()
        if "keep_kv" in made:
            made["keep_kv"] = kept(made["keep_kv"])
        if "segment_size" in made:
            made["levels"] = 2
        return made

    def choices(self) -> dict[str, Any]:
        """Return the schedule choices in the recipe, with the values as written."""
        return {name: value for name in DEFAULTS if (value := getattr(self, name)) not in ("auto", None)}


class EngineKeys(Spec):
    """Keys of streaming, and of the device."""

    engine: EngineSpec = EngineSpec()
    """Streaming of the sequence. The defaults suit most runs."""

    bf16: bool | None = None
    """Compute in bfloat16 (autocast); the weights keep their dtype. Default: true if `dtype: auto` trains the weights
    of a bfloat16 or float16 checkpoint in float32, else false."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. `auto` uses an accelerator if one exists."""

    peak_flops: Annotated[float, Field(gt=0), at_most(10**20)] | None = None
    """Peak dense FLOP/s of one device, from which `mfu` is computed. Default: the bfloat16 figure in the data sheet of
    a known device; otherwise, as on a CPU, there is no `mfu`."""


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
        "'order: chunk' reads the weights of all layers once for every chunk, and ranks that share them would send "
        "them each time",
        "write order: layer, or deepspeed: zero2",
    ),
)


SHARING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which ranks share the weights."""


class DeviceKeys(Spec):
    """Keys of several devices."""

    deepspeed: Text | None = None
    """Share optimizer, gradients and weights between ranks with DeepSpeed: `zero1`, `zero2`, `zero3`, `zero3_offload`
    (weights and optimizer on the host), or the path of a DeepSpeed configuration, whose `auto` values are filled from
    the recipe. Default: each rank has a whole model (DDP)."""

    fsdp: bool = False
    """Share weights, gradients and optimizer between ranks with PyTorch's FSDP2, instead of DeepSpeed."""

    sequence_parallel_size: Rows = 1
    """Number of ranks that share each sequence; the longest possible sequence grows with it. It divides the number of
    ranks."""

    sequence_parallel: Literal["auto", "ulysses", "ring"] = "auto"
    """Method of sharing a sequence between ranks: `ulysses` exchanges heads for tokens, `ring` passes keys and values
    around. `auto` is `ulysses` if the number of heads is divisible by the ranks."""

    train_batch_size: Rows | None = None
    """Rows of one optimizer step over all ranks. It replaces `gradient_accumulation_steps`, which is then derived from
    the number of ranks: a recipe trains the same on any number of ranks."""

    @property
    def divides(self) -> str | None:
        """The key that makes ranks share the optimizer or the weights; None if each rank has them whole."""
        return "fsdp" if self.fsdp else "deepspeed" if self.deepspeed is not None else None

    @property
    def shares_weights(self) -> bool:
        """True if a key of the recipe makes ranks share the weights. The stage of a DeepSpeed file is not read here."""
        return self.fsdp or self.deepspeed in SHARING_PRESETS


DEVICE_RULES: Rules = (
    Clash({"fsdp": True, "deepspeed": Not(None)}, "'deepspeed' and 'fsdp' exclude each other", KEEP_ONE),
)
