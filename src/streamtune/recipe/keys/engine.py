"""Keys of streaming (the ``engine:`` group), of the device and of several: what is fixed, what memory there is."""

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
    """Return all choices of a schedule: with ``fixed`` one that is not made takes its default, else it is None."""
    return {**(DEFAULTS if spec.schedule == "fixed" else dict.fromkeys(DEFAULTS)), **spec.choices()}


def _contradictions(spec: Any) -> Iterator[Refusal]:
    """Yield choices that exclude each other under any plan."""
    choices = _open_choices(spec)
    if choices["order"] == "chunk" and spec.keep_kv == "auto":
        choices["keep_kv"] = None  # it is kept without a word
    for field, what, (other, value) in contradictions(choices, _in_a_recipe):
        fix = f"add {other}: {value}" if field == "offload" else f"write {other}: {value}, or delete the line"
        yield Refusal(f"engine.{field}", what, fix)


def _directory_without_disk(spec: Any) -> Iterator[Refusal]:
    offload = _open_choices(spec)["offload"]
    if spec.offload_dir is not None and offload in ("device", "host"):
        yield Refusal(
            "engine.offload_dir",
            f"'engine.offload_dir' is where 'offload: disk' writes, and 'engine.offload' is {offload}",
            "write offload: disk, or delete the line",
        )


def _in_a_recipe(field: str, value: str | None = None) -> str:
    return f"'engine.{field}'" if value is None else f"'engine.{field}: {value}'"


class EngineSpec(Spec):
    """Streaming of the sequence. Every choice gives the same gradient; they differ in memory and time."""

    schedule: Literal["auto", "fixed"] = "auto"
    """`auto`: the planner picks the fastest schedule that fits, and keeps to what is written below. `fixed`: no
    planner; what is not written below takes its default."""

    chunk_size: Count | Auto = "auto"
    """Most tokens of the sequence a layer works on at once. Without planner: 2048."""

    head_chunk_size: Count | Auto = "auto"
    """Most tokens whose logits exist at once in the loss. Without planner: 1024."""

    offload: Literal[Auto, Tier] = "auto"
    """Place of the layers' inputs until the backward. The planner takes `disk` only where `offload_dir` names a
    directory. Without planner: device."""

    offload_dir: Text | None = None
    """Directory for `offload: disk`, on a fast local disk. What is written there is gone when the run ends, however it
    ends."""

    device_layers: Steps | Auto = "auto"
    """With `offload` to host or disk: layer inputs that stay on the device all the same. Without planner: 0."""

    levels: Annotated[int, Field(ge=1, le=2)] | Auto = "auto"
    """1 stores the input of every layer, 2 that of every `segment_size`-th and computes those between again, for one
    more forward. Without planner: 1."""

    segment_size: Count | Auto = "auto"
    """Layers of a segment at two levels. Without planner: the size that stores fewest."""

    keep_kv: bool | Literal[Auto, Kept] = "auto"
    """Keep every layer's keys and values from forward to backward instead of projecting them again; `true` is
    `device`. Without planner: no."""

    keep_attention: Literal[Auto, Kept] = "auto"
    """Keep the output of every attention, so that the backward does not run its forward again. Without planner: no."""

    keep_layers: Steps | Auto = "auto"
    """The last so many layers keep everything and recompute nothing. Without planner: 0."""

    stream_grads: bool | Auto = "auto"
    """The gradient of a layer's input takes the place of that of its output chunk by chunk, where the layer inputs
    are. Without planner: false."""

    grad_dtype: GradDtype = "float32"
    """Dtype in which the sum over chunks is accumulated: float32, or that of the parameter. The planner never changes
    it: it decides the rounding."""

    fuse: Literal[Auto, Fuse] = "auto"
    """Norms and rotary embeddings on CUDA: `torch`, by few operators of torch's; `none`, as the model writes them. They
    differ by rounding only. The planner never changes it. Without planner: torch."""

    order: Literal[Auto, Order] = "auto"
    """Outer loop of the backward. `layer` takes all chunks of a layer and stores every layer's input; `chunk` takes
    all layers of a chunk and stores every layer's keys and values, with their gradients, and one layer input. With
    `chunk`, `keep_kv` is device or host (also for the states of recurrent layers), `offload` is where that input is,
    and `levels: 2` holds the activations of a chunk in `segment_size` layers (without planner: 1) instead of all.
    Without planner: layer."""

    weights: Literal[Auto, WeightTier] = "auto"
    """Memory in which weights wait while they are not used. `host`: those of layers, embedding and head are in the
    machine's memory; each layer is copied to the device before it computes, and its gradient back. What is trained
    there is stepped on the CPU; adapters stay on the device. One device. The planner takes `host` where no schedule
    fits otherwise, and says so. Without planner: device."""

    fetch_dtype: Literal[Auto, FetchDtype] = "auto"
    """With `weights: host`, the dtype of a weight's copy on the device. `bfloat16`: the model computes in bfloat16, and
    weights, sums of gradients and optimizer stay in float32; in place of `bf16`, with half of the layer inputs. The
    planner never changes it. Without planner: param."""

    optimizer: Literal[Auto, "device", "host"] = "auto"
    """Memory of the optimizer's states, and where it steps. `host` with weights on the device: each gradient goes to
    the machine's memory, and the stepped weight comes back; with `optim_in_backward` beside the computation. `auto` is
    where the weights are, and with the planner the host where no schedule of full fine-tuning fits otherwise; adapters
    beside weights on the host are on the device. One device."""

    device_memory: Size | Auto = "auto"
    """Memory of the device to plan with, such as `80GiB`; `auto` is what is free when the run starts."""

    host_memory: Size | Auto = "auto"
    """Memory of the machine to plan with; `auto` is what is available in it, limits of a container included."""

    disk_memory: Size | Auto = "auto"
    """Space in `offload_dir` to plan with; `auto` is what is free there."""

    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of each of these that the planner leaves free."""

    rules = (
        Custom(_contradictions),
        Clash(
            {"fetch_dtype": "bfloat16", "weights": "auto"},
            "'engine.fetch_dtype: bfloat16' is of weights that wait on the host, which is left to the planner",
            "write weights: host, or delete the line",
            key="engine.fetch_dtype",
        ),
        Clash(
            {"optimizer": "device", "weights": "host"},
            "'engine.optimizer: device' steps on the device, and weights that wait on the host are stepped there",
            "write optimizer: auto, or delete the line",
            key="engine.optimizer",
        ),
        Custom(_directory_without_disk),
    )

    @property
    def on_host(self) -> str | None:
        """The key that has the optimizer step on the host; None where it steps on the device."""
        return next((key for key in ("weights", "optimizer") if getattr(self, key) == "host"), None)

    def written(self) -> dict[str, Any]:
        """Return the choices of a schedule that are made here, by the names of the engine's ``Schedule``.

        ``segment_size`` stands for two levels, and ``keep_kv: true`` for ``device``. ``offload`` is not derived from
        ``device_layers``: that is left to the caller.
        """
        made = self.choices()
        if "keep_kv" in made:
            made["keep_kv"] = kept(made["keep_kv"])
        if "segment_size" in made:
            made["levels"] = 2
        return made

    def choices(self) -> dict[str, Any]:
        """Return the choices of a schedule that are made here, as they are written."""
        return {name: value for name in DEFAULTS if (value := getattr(self, name)) not in ("auto", None)}


class EngineKeys(Spec):
    """Streaming, and the device that it is on."""

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


ENGINE_RULES: Rules = (
    Clash(
        {"engine.order": "chunk", "sequence_parallel_size": GIVEN},
        "'order: chunk' is for whole rows, and 'sequence_parallel_size' shares each of them between ranks",
        "write order: layer, or delete the line; or sequence_parallel_size: 1",
    ),
    Clash(
        {"engine.optimizer": GIVEN, "divides": Not(None)},
        "'engine.optimizer' is the memory of an optimizer of this program's, and '{divides}' has one of its own",
        "delete '{divides}', or this line; deepspeed: zero3_offload steps on the host",
    ),
    *(
        Clash(
            {"engine.weights": "host", key: GIVEN},
            f"'engine.weights: host' is for one device by itself, and '{key}' is for several or for DeepSpeed",
            f"delete '{key}', or write deepspeed: zero3_offload and delete this line",
        )
        for key in ("fsdp", "deepspeed", "sequence_parallel_size")
    ),
    Clash(
        {"bf16": True, "engine.weights": "host", "engine.fetch_dtype": "bfloat16"},
        "'bf16' casts what layers compute, and with 'fetch_dtype: bfloat16' the weights are bfloat16 already",
        "write bf16: false, or delete fetch_dtype",
    ),
    Clash(
        {"engine.weights": "host", "finetuning_type": "qlora"},
        "'engine.weights: host' copies weights as they are, and quantised ones stay on the device",
        "write finetuning_type: lora, or delete the line",
    ),
)

NEEDS_WHOLE_WEIGHTS: Rules = (
    Clash(
        {"engine.order": "chunk"},
        "order: chunk passes through the weights of all layers once for every chunk, and ranks that share them would "
        "send them each time",
        "write order: layer, or deepspeed: zero2",
    ),
)


SHARING_PRESETS = ("zero3", "zero3_offload")
"""Values of ``deepspeed`` with which each rank holds a part of the weights."""


class DeviceKeys(Spec):
    """Keys of several devices."""

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

    @property
    def divides(self) -> str | None:
        """The key that has ranks divide the optimizer or the weights; None where each has them whole."""
        return "fsdp" if self.fsdp else "deepspeed" if self.deepspeed is not None else None

    @property
    def shares_weights(self) -> bool:
        """True if ranks share the weights by a key; a DeepSpeed file says its own stage."""
        return self.fsdp or self.deepspeed in SHARING_PRESETS


DEVICE_RULES: Rules = (
    Clash({"fsdp": True, "deepspeed": Not(None)}, "'deepspeed' and 'fsdp' exclude each other", KEEP_ONE),
)
