"""``streamtune env``: show versions, devices, memory, and the kernels that run on this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.text import Text

from streamtune import __version__
from streamtune.cli.machine import allocator_setting

from .console import out, print_json, print_rows
from .options import JsonOption

PACKAGES = ("torch", "transformers", "datasets", "peft", "torchao", "bitsandbytes", "deepspeed", "accelerate",
            "trl", "safetensors", "tokenizers", "numpy", "pydantic", "typer")  # fmt: skip
GIB = 1024**3


def env(json: JsonOption = False) -> None:
    """Show versions, devices, memory and the kernels that run on this machine."""
    found = environment_document()
    if json:
        print_json(found)
        return
    _print_section("versions", {name: version or "not installed" for name, version in found["versions"].items()})
    memory = found["memory"]
    _print_section("memory", {name.removesuffix("_bytes"): _show_gib(size) for name, size in memory.items() if size})
    devices = {device["name"]: _describe_device(device) for device in found["devices"]}
    _print_section("devices", devices)
    kernels = {
        f"{device} {dtype}": "  ".join(f"{mask}: {kernel}" for mask, kernel in by_mask.items())
        for device, by_dtype in found["attention"].items()
        for dtype, by_mask in by_dtype.items()
    }
    _print_section("attention kernels", kernels)
    _print_section("head", {device: _describe_fused_heads(head) for device, head in found["head"].items()})
    _print_section("allocator", {"setting": found["allocator"] or "default of torch"})


def environment_document() -> dict[str, Any]:
    """Return the document of ``env --json``.

    Returns:
        ``versions``: package -> version. ``platform``: operating system. ``memory``: bytes of host memory.
        ``devices``: one dictionary per device. ``attention``: device -> dtype -> ``unmasked`` or ``masked`` -> fastest
        kernel with correct results at the head size of an 8B model; ``tiled`` is computed in plain PyTorch.
        ``head``: device -> ``candidates``, fused kernels of the LM head that the first step may choose.
        ``allocator``: setting of torch's memory allocator.
    """
    import torch

    versions: dict[str, str | None] = {"streamtune": __version__, "python": platform.python_version()}
    versions |= {name: _package_version(name) for name in PACKAGES}
    versions["torch"] = str(torch.__version__)  # with the build (+cpu, +cu130), which package metadata may lack
    devices = _list_devices()
    kernels = {device["name"]: _fastest_kernels(torch.device(device["name"])) for device in devices}
    return {
        "versions": versions,
        "platform": platform.platform(),
        "memory": _host_memory(),
        "devices": devices,
        "attention": kernels,
        "head": {device["name"]: {"candidates": _fused_head_names(device["name"])} for device in devices},
        "allocator": allocator_setting(),
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _list_devices() -> list[dict[str, Any]]:
    import psutil
    import torch

    cpu = {
        "name": "cpu",
        "model": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    from streamtune.ops.devices import has_bfloat16

    devices: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "model": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": total,
                "free_bytes": free,
                # is_bf16_supported() counts emulation, and asks the current device only
                "bf16": has_bfloat16(torch.device("cuda", index)),
            }
        )
    return [*devices, *_list_untried_devices()]


def _list_untried_devices() -> Iterator[dict[str, Any]]:
    """Yield the Intel and Apple devices, which run only if a recipe names them."""
    import psutil
    import torch

    from streamtune.engine.memory.host import total_host_bytes
    from streamtune.ops.devices import accelerators, device_name, free_device_bytes, shares_host_memory

    for device in accelerators():
        if device.type == "cuda":
            continue
        if shares_host_memory(device):
            total, free = total_host_bytes(), psutil.virtual_memory().available
        else:
            total, free = torch.xpu.get_device_properties(device).total_memory, free_device_bytes(device)
        found = {"name": str(device), "model": device_name(device), "capability": ""}
        yield {**found, "memory_bytes": total, "free_bytes": free, "bf16": True}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _fastest_kernels(device: Any) -> dict[str, dict[str, str]]:
    import torch

    from streamtune.ops.attention.kernels import kernel_names, use_installed_flash

    use_installed_flash(device)
    return {str(dtype).removeprefix("torch."): kernel_names(device, dtype) for dtype in (torch.float32, torch.bfloat16)}


def _fused_head_names(device: str) -> list[str]:
    from streamtune.ops.head.kernels import head_candidates

    return [] if device == "cpu" else [kernel.name for kernel in head_candidates()]


def _describe_fused_heads(head: dict[str, list[str]]) -> str:
    names = head["candidates"]
    return f"streamed, or {', '.join(names)} if it is faster in the first step" if names else "streamed"


def _host_memory() -> dict[str, int | None]:
    import psutil

    from streamtune.engine.memory.host import container_limit_bytes

    memory = psutil.virtual_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "container_limit_bytes": container_limit_bytes(),
    }


def _describe_device(device: dict[str, Any]) -> str:
    if device["name"] == "cpu":
        return f"{device['model']}, {device['cores']} cores, {device['threads']} threads"
    memory = f"{_show_gib(device['free_bytes'])} of {_show_gib(device['memory_bytes'])} free"
    bf16 = "bfloat16" if device["bf16"] else "no bfloat16"
    capability = f"compute capability {device['capability']}, {bf16}" if device["capability"] else "untested"
    return f"{device['model']}, {memory}, {capability}"


def _show_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _print_section(title: str, rows: dict[str, str]) -> None:
    out.print(Text(title, style="bold"))
    print_rows((name.replace("_", " "), value) for name, value in rows.items())
