"""``streamtune doctor``: check what a run needs on this machine, and print what to fix.

The checks compare gradients of a small model, copy pinned memory, write a temporary file, and connect to the hub.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from streamtune.base.libraries import TESTED, pip_install_command, untested_versions_note
from streamtune.base.privacy import is_offline, safe_text
from streamtune.base.text import show_size

from .console import err, loading_libraries, print_json, print_labelled, print_text
from .env import environment_document
from .options import JsonOption

GIB = 1024**3
STATUS_MARKS = {"ok": ("ok", "green"), "advice": ("!", "yellow"), "problem": ("x", "red")}
OPTIONAL = {
    "deepspeed": ("deepspeed", "`deepspeed:` (ZeRO) in a recipe"),
    "bitsandbytes": ("quant", "`finetuning_type: qlora` in nf4"),
    "torchao": ("quant", "`finetuning_type: qlora` in int8"),
}
"""Optional package -> (extra of streamtune that installs it, what needs it)."""
HUB_SECONDS = 3.0
PINNED_BYTES, SLOW_COPY = 256 << 20, 4 * GIB
"""Bytes copied to each device, and the bandwidth (bytes/s) below which copies count as slow."""
SLOW_DISK, LITTLE_DISK, LITTLE_SHM = 100 << 20, 10 * GIB, 1 * GIB


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: Name of the check.
        status: ``ok``; ``advice`` if a run works but is slower or lacks something; ``problem`` if a run would fail.
        found: Description of the result.
        fix: Advice; empty if there is nothing to fix.
    """

    check: str
    status: Literal["ok", "advice", "problem"]
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {"check": self.check, "status": self.status, "found": self.found, "mend": self.fix}


def doctor(
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="DIR", help="Folder whose disk is tested. Give the folder of runs, or engine.offload_dir."
        ),
    ] = Path(),
    json: JsonOption = False,
) -> None:
    """Check this machine for training, and print what to fix. Exits with 1 if a run would fail."""
    with loading_libraries():
        found = environment_document()
    findings = []
    for name, check in CHECKS.items():
        with err.status(name):
            made = list(check(found, directory))
        findings += made
        for finding in made if not json else ():
            print_check_result(finding)
    problems = sum(finding.status == "problem" for finding in findings)
    if json:
        print_json({"checks": [finding.to_json() for finding in findings], "problems": problems})
    else:
        accelerators = sum(device["name"] != "cpu" for device in found["devices"])
        print_readiness(findings, accelerators)
    if problems:
        raise typer.Exit(1)


def print_readiness(results: list[CheckResult], accelerators: int) -> None:
    """Print whether the machine is ready, then the next command or the checks that failed."""
    problems = list(dict.fromkeys(each.check for each in results if each.status == "problem"))
    if problems:
        count = sum(each.status == "problem" for each in results)
        text = f"Not ready: {count} problem{'' if count == 1 else 's'}. Fix first: {', '.join(problems)}"
        print_text(Text(text, style="bold red"))
        return
    devices = "CPU only" if not accelerators else f"{accelerators} device{'' if accelerators == 1 else 's'}"
    ready = Text.assemble((f"Ready ({devices}).", "bold green"), " Next: ")
    print_text(ready.append("streamtune sft quickstart", style="bold"))


def print_check_result(result: CheckResult) -> None:
    mark, style = STATUS_MARKS[result.status]
    print_labelled(Text.assemble((f"{mark:>3}", style), f"  {result.check:<18}"), Text(safe_text(result.found)))
    if result.fix:
        print_labelled(Text(" " * 23), Text(result.fix, style="dim"))


def _check_devices(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    import torch

    build = f"torch {torch.__version__}"
    accelerators = [device for device in environment["devices"] if device["name"] != "cpu"]
    if torch.version.hip is not None:
        found = f"{build} is built for ROCm: nobody has tried AMD devices yet"
        yield CheckResult("device", "advice", found, "compare the gradient first: `streamtune verify`")
    nvidia = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    if not accelerators:
        if torch.version.cuda and nvidia:
            fix = f"the driver may be older than CUDA {torch.version.cuda}: see `nvidia-smi`, or install another torch"
            yield CheckResult("device", "problem", f"{build} finds no CUDA device, but the machine has one", fix)
        elif nvidia:
            fix = "install torch for CUDA: pytorch.org/get-started"
            yield CheckResult(
                "device", "problem", f"{build} is built for the CPU, but the machine has a CUDA device", fix
            )
        else:
            yield CheckResult("device", "advice", f"{build}: no accelerator; models train slowly on the CPU")
    for device in accelerators:
        name, free, total = device["model"], device["free_bytes"], device["memory_bytes"]
        text = f"{device['name']}: {name}, {show_size(free)} of {show_size(total)} free"
        if free < 0.9 * total:
            yield CheckResult("device", "advice", text, "other processes use this device's memory: see `nvidia-smi`")
        elif not device["capability"]:
            kind = device["name"].partition(":")[0]
            fix = f"to use it, write device: {kind}; what runs: docs/guide/devices.md"
            yield CheckResult("device", "advice", f"{text}; nobody has tried this kind yet", fix)
        elif not device["bf16"]:
            yield CheckResult("device", "advice", f"{text}; no bfloat16", "write fp16: true in recipes, not bf16: true")
        else:
            yield CheckResult("device", "ok", text)


def _check_attention_kernels(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    for device, by_dtype in environment["attention"].items():
        for dtype, by_mask in by_dtype.items():
            names = ", ".join(f"{kernel} ({mask})" for mask, kernel in by_mask.items())
            tiled = "tiled" in by_mask.values() and device.startswith("cuda")
            fix = (
                "no kernel gave correct results: attention runs in plain PyTorch, several times slower" if tiled else ""
            )
            yield CheckResult("attention", "advice" if tiled else "ok", f"{device} {dtype}: {names}", fix)


def _check_exact_gradient(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    """Compare the gradient of a small model with and without streaming, in fp32 on each device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from streamtune.engine import stream

    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    for device in environment["devices"]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).to(device["name"])
            ids = torch.randint(0, 128, (1, 200)).to(device["name"])
        model(input_ids=ids, labels=ids).loss.backward()
        want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="not tested with")  # `_check_versions` reports it
            handle = stream(model, chunk_size=48)
        with handle:
            model(input_ids=ids, labels=ids).loss.backward()
        errors = {
            name: float((p.grad - want[name]).norm() / want[name].norm())
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # NaN is the largest
        text = (
            f"{device['name']}: gradients with and without streaming differ by {errors[worst]:.1e} of their norm (fp32)"
        )
        if errors[worst] < 1e-4 and errors.keys() == want.keys():
            yield CheckResult("exactness", "ok", text)
        else:
            yield CheckResult(
                "exactness", "problem", f"{text}: {worst}", "report it as a bug, with the output of `streamtune env`"
            )


def _check_copy_speed(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    """Measure the bandwidth of copies from pinned host memory to each accelerator."""
    import torch

    for device in environment["devices"]:
        if not device["name"].startswith("cuda"):  # others copy without pinned memory
            continue
        try:
            host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            fix = "raise the limit of locked memory (`ulimit -l`), or write offload: device"
            yield CheckResult("pinned memory", "problem", f"cannot be allocated: {str(error).splitlines()[0]}", fix)
            return
        there = torch.empty_like(host, device=device["name"])
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device["name"])
        start = time.perf_counter()
        for _ in range(4):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device["name"])
        rate = 4 * PINNED_BYTES / (time.perf_counter() - start)
        slow = rate < SLOW_COPY
        fix = "offload: host would wait for copies: use a PCIe slot with more lanes, or offload: device" if slow else ""
        text = f"host to {device['name']} at {show_size(int(rate))}/s"
        yield CheckResult("pinned memory", "advice" if slow else "ok", text, fix)


def _check_memory(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    memory = environment["memory"]
    limit = memory["container_limit_bytes"]
    text = f"{show_size(memory['available_bytes'])} of {show_size(memory['total_bytes'])} free"
    if limit is not None:
        text += f"; limit of the container {show_size(limit)}"
    yield CheckResult("host memory", "ok", text)
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        return
    if shared < LITTLE_SHM:
        fix = "ranks of one machine exchange data through /dev/shm: docker run --ipc host, or --shm-size 8g"
        yield CheckResult("shared memory", "advice", f"/dev/shm has {show_size(shared)} free", fix)


def _check_disk(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    from streamtune.plan.calibrate import measure_disk

    for name, folder in (("disk", directory), ("temporary files", Path(tempfile.gettempdir()))):
        try:
            free = shutil.disk_usage(folder).free
            rate = measure_disk(folder)
        except OSError as error:
            fix = "give a writable folder with --dir" if name == "disk" else "set TMPDIR to a writable folder"
            yield CheckResult(name, "problem", f"{folder.absolute()}: {error.strerror}", fix)
            continue
        text = f"{folder.absolute()}: {show_size(free)} free, writes at {show_size(int(rate))}/s"
        if free < LITTLE_DISK:
            yield CheckResult(name, "advice", text, "an fp32 checkpoint with AdamW takes 12 bytes per parameter")
        elif rate < SLOW_DISK:
            yield CheckResult(
                name, "advice", text, "offload: disk would wait for this disk: a local NVMe disk is faster"
            )
        else:
            yield CheckResult(name, "ok", text)


def _check_hub(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    from huggingface_hub.constants import ENDPOINT, ENV_VARS_TRUE_VALUES, HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE)
    above = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(above, os.W_OK):
        yield CheckResult("hub cache", "problem", f"{cache} cannot be written", "set HF_HOME to a writable folder")
    switch = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if is_offline() or switch.upper() in ENV_VARS_TRUE_VALUES:
        yield CheckResult("hub", "ok", "offline, as requested: local files and caches only")
        return
    fix = "use local folders, or set HF_ENDPOINT to a mirror or HTTPS_PROXY to a proxy; --offline skips this check"
    try:
        with urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=HUB_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        if error.code == 407 or error.code >= 500:  # of a proxy; a mirror need not have a first page
            yield CheckResult("hub", "advice", f"{ENDPOINT} answers with {error.code} ({error.reason})", fix)
            return
    except (OSError, ValueError) as error:
        yield CheckResult("hub", "advice", f"{ENDPOINT} does not answer: {getattr(error, 'reason', error)}", fix)
        return
    yield CheckResult("hub", "ok", f"{ENDPOINT} answers")


def _check_packages(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    versions = environment["versions"]
    for package, (extra, use) in OPTIONAL.items():
        if versions.get(package) is None:
            yield CheckResult(
                "package", "advice", f"{package} is not installed", f"for {use}: pip install 'streamtune[{extra}]'"
            )
    if versions.get("deepspeed") is not None and shutil.which("c++") is None and shutil.which("g++") is None:
        fix = "zero3_offload compiles its Adam optimizer: install g++, or use another preset"
        yield CheckResult("compiler", "advice", "no C++ compiler found", fix)


def _check_versions(environment: dict[str, Any], directory: Path) -> Iterator[CheckResult]:
    shown = ", ".join(f"{name} {environment['versions'][name]}" for name in TESTED)
    tested = " and ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    if text := untested_versions_note():
        yield CheckResult("versions", "advice", text, f"if something fails: {pip_install_command()}")
    else:
        yield CheckResult("versions", "ok", f"{shown} (tested: {tested})")


CHECKS: dict[str, Callable[[dict[str, Any], Path], Iterator[CheckResult]]] = {
    "versions": _check_versions,
    "devices": _check_devices,
    "attention kernels": _check_attention_kernels,
    "exactness": _check_exact_gradient,
    "pinned memory": _check_copy_speed,
    "host memory": _check_memory,
    "disk": _check_disk,
    "hub": _check_hub,
    "packages": _check_packages,
}
"""Name -> check, in the order of running. A check takes the document of ``env --json`` and the folder of runs."""
