"""Predict the time of a training step, and list devices with the figures of their data sheets.

Operators run one after another, so the time of the computation is

    FLOPs of matrix products / matmul rate + attention FLOPs / attention rate + bytes of other operators / bandwidth

A matrix product of few rows also counts as bytes, because memory bandwidth limits it.

On an accelerator four activities overlap with the computation: operator launches, copies to the host, copies to disk,
and an optimizer that steps on the host during the backward. So a step takes as long as the longest of the five. On the
CPU the same cores do all of this, so a step takes the sum.

The list of devices allows planning without the device. Memory is the size that a program can use (the driver reserves
part of the nominal size). FLOP/s are for bfloat16 without sparsity, with sums in fp32; of devices without bfloat16, for
float16. Bandwidths are peaks, in one direction of one device. A real step is slower: ``SHEET_EFFICIENCY`` has the
assumed fractions. Only the H100 and the H200 have been tried; every other device is ``untested``.

A GeForce card sums in fp32 at half the rate that is printed for fp16 with fp16 sums: twice its FP32 rate. Apple prints
no FLOP/s: an M3 has 128 units per core, at 1.4 GHz. Its GPU may use three quarters of the memory, which it shares with
the CPU.

NVLink 3, 4 and 5 have 600, 900 and 1,800 GB/s in both directions together (data sheets of A100, H100 and B200). The
seven links of an MI300X have 64 GB/s per direction each. Devices without such links, or with a bridge that joins only
two devices, use PCIe (4 or 5, x16).

Network bandwidths are taken from the maker's own machine: eight ports of 200 Gb/s (DGX A100) or of 400 Gb/s (DGX H100,
H200 and B200, and MI300X platforms). For other devices 100 Gb/s (server cards) or 10 Gb/s (workstation cards) are
assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamtune.plan.simulate.cluster import Links

if TYPE_CHECKING:
    from streamtune.plan.simulate.simulate import Work

from streamtune.errors import ArgumentError, did_you_mean

GIB = 1024**3
PCIE_4, PCIE_5 = 32e9, 64e9
PCIE_3, PCIE_4_X8, PCIE_5_X8 = 16e9, 16e9, 32e9
NVLINK_2, C2C = ("NVLink", 150e9), 450e9
UNIFIED = ("unified memory", 400e9)
NVLINK_3, NVLINK_4, NVLINK_5 = ("NVLink", 300e9), ("NVLink", 450e9), ("NVLink", 900e9)
INFINITY = ("Infinity Fabric", 7 * 64e9)


@dataclass(frozen=True)
class Device:
    """Figures of a device from its data sheet.

    Attributes:
        name: Name on the command line, such as ``h100-80gb``.
        title: Product name, such as ``NVIDIA H100 SXM``.
        memory_bytes: Bytes of memory that a program can use.
        matmul_flops: FLOP/s of dense bfloat16 matrix products.
        memory_bandwidth: Bytes/s of the device's memory.
        host_bandwidth: Bytes/s to the host, one direction.
        link_name: Name of the link to other devices of the node.
        link_bandwidth: Bytes/s to other devices of the node, one direction.
        network_bandwidth: Bytes/s to other nodes, one direction.
        has_bfloat16: False for a device that computes in float16 or float32.
        is_unified: True if the device computes in the host's memory.
        is_tested: True if StreamTune has trained on such a device.
    """

    name: str
    title: str
    memory_bytes: int
    matmul_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    link_name: str
    link_bandwidth: float
    network_bandwidth: float
    has_bfloat16: bool = True
    is_unified: bool = False
    is_tested: bool = False


def _make_device(
    name: str,
    title: str,
    gib: float,
    teraflops: float,
    gigabytes_per_s: float,
    host_bandwidth: float,
    link: tuple[str, float] | None,
    network_gigabits: float,
    **facts: bool,
) -> Device:
    link_name, link_bandwidth = link or ("PCIe", host_bandwidth)
    rates = (teraflops * 1e12, gigabytes_per_s * 1e9, host_bandwidth)
    return Device(name, title, int(gib * GIB), *rates, link_name, link_bandwidth, network_gigabits * 1e9 / 8, **facts)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _make_device("a100-40gb", "NVIDIA A100 40GB", 39.4, 312, 1555, PCIE_4, NVLINK_3, 200),
        _make_device("a100-80gb", "NVIDIA A100 80GB", 79.1, 312, 2039, PCIE_4, NVLINK_3, 200),
        _make_device("h100-80gb", "NVIDIA H100 SXM", 79.1, 989, 3350, PCIE_5, NVLINK_4, 400, is_tested=True),
        _make_device("h200-141gb", "NVIDIA H200", 139, 989, 4800, PCIE_5, NVLINK_4, 400, is_tested=True),
        _make_device("b200-192gb", "NVIDIA B200", 178, 2250, 8000, PCIE_5, NVLINK_5, 400),
        _make_device("l4-24gb", "NVIDIA L4", 22.0, 121, 300, PCIE_4, None, 100),
        _make_device("l40s-48gb", "NVIDIA L40S", 44.4, 362, 864, PCIE_4, None, 100),
        _make_device("rtx-a6000-48gb", "NVIDIA RTX A6000", 47.4, 155, 768, PCIE_4, None, 10),
        _make_device("rtx-3090-24gb", "NVIDIA RTX 3090", 23.6, 71, 936, PCIE_4, None, 10),
        _make_device("rtx-4090-24gb", "NVIDIA RTX 4090", 23.6, 165, 1008, PCIE_4, None, 10),
        _make_device("rtx-5090-32gb", "NVIDIA RTX 5090", 31.3, 209, 1792, PCIE_5, None, 10),
        _make_device("mi300x-192gb", "AMD MI300X", 191, 1307, 5300, PCIE_5, INFINITY, 400),
        _make_device("t4-16gb", "NVIDIA T4", 14.6, 65, 320, PCIE_3, None, 100, has_bfloat16=False),
        _make_device("v100-16gb", "NVIDIA V100 SXM2 16GB", 15.8, 125, 900, PCIE_3, NVLINK_2, 100, has_bfloat16=False),
        _make_device("v100-32gb", "NVIDIA V100 SXM2 32GB", 31.7, 125, 900, PCIE_3, NVLINK_2, 100, has_bfloat16=False),
        _make_device("a10g-24gb", "NVIDIA A10G", 22.1, 70, 600, PCIE_4, None, 100),
        _make_device("gh200-96gb", "NVIDIA GH200", 94.5, 989, 4000, C2C, NVLINK_4, 400),
        _make_device("rtx-6000-ada-48gb", "NVIDIA RTX 6000 Ada", 47.4, 364, 960, PCIE_4, None, 10),
        _make_device("rtx-pro-6000-96gb", "NVIDIA RTX PRO 6000", 94.9, 500, 1792, PCIE_5, None, 10),
        _make_device("rtx-3060-12gb", "NVIDIA RTX 3060", 11.6, 25.5, 360, PCIE_4, None, 10),
        _make_device("rtx-3060-ti-8gb", "NVIDIA RTX 3060 Ti", 7.6, 32.4, 448, PCIE_4, None, 10),
        _make_device("rtx-3070-8gb", "NVIDIA RTX 3070", 7.6, 40.6, 448, PCIE_4, None, 10),
        _make_device("rtx-3080-10gb", "NVIDIA RTX 3080", 9.6, 59.5, 760, PCIE_4, None, 10),
        _make_device("rtx-3080-ti-12gb", "NVIDIA RTX 3080 Ti", 11.6, 68.2, 912, PCIE_4, None, 10),
        _make_device("rtx-3090-ti-24gb", "NVIDIA RTX 3090 Ti", 23.6, 80, 1008, PCIE_4, None, 10),
        _make_device("rtx-4060-8gb", "NVIDIA RTX 4060", 7.6, 30.2, 272, PCIE_4_X8, None, 10),
        _make_device("rtx-4060-ti-16gb", "NVIDIA RTX 4060 Ti", 15.6, 44.1, 288, PCIE_4_X8, None, 10),
        _make_device("rtx-4070-12gb", "NVIDIA RTX 4070", 11.6, 58.3, 504, PCIE_4, None, 10),
        _make_device("rtx-4070-ti-super-16gb", "NVIDIA RTX 4070 Ti Super", 15.6, 88.2, 672, PCIE_4, None, 10),
        _make_device("rtx-4080-16gb", "NVIDIA RTX 4080", 15.6, 97.5, 717, PCIE_4, None, 10),
        _make_device("rtx-4080-super-16gb", "NVIDIA RTX 4080 Super", 15.6, 104, 736, PCIE_4, None, 10),
        _make_device("rtx-5060-ti-16gb", "NVIDIA RTX 5060 Ti", 15.5, 47.4, 448, PCIE_5_X8, None, 10),
        _make_device("rtx-5070-12gb", "NVIDIA RTX 5070", 11.6, 61.7, 672, PCIE_5, None, 10),
        _make_device("rtx-5070-ti-16gb", "NVIDIA RTX 5070 Ti", 15.5, 87.9, 896, PCIE_5, None, 10),
        _make_device("rtx-5080-16gb", "NVIDIA RTX 5080", 15.5, 113, 960, PCIE_5, None, 10),
        _make_device("m3-max-128gb", "Apple M3 Max", 96, 14.3, 400, 400e9, UNIFIED, 10, is_unified=True),
        _make_device("m3-ultra-512gb", "Apple M3 Ultra", 384, 28.7, 819, 819e9, UNIFIED, 10, is_unified=True),
    )
}


def find_device(name: str) -> Device:
    """Return the device with this name, or with this unique part of its name (``h100``, ``4090``).

    Raises:
        ArgumentError: No device matches, or more than one.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in DEVICES:
        return DEVICES[wanted]
    by_stem = [device for device in DEVICES.values() if f"-{_without_size(device.name)}".endswith(f"-{wanted}")]
    matches = by_stem or [device for device in DEVICES.values() if f"-{wanted}-" in f"-{device.name}"]
    if len(matches) == 1:
        return matches[0]
    device_names = ", ".join(DEVICES)
    if matches:
        several = " or ".join(device.name for device in matches)
        raise ArgumentError(f"'{name}' could be {several}", where="--device", fix=f"write --device {matches[0].name}")
    nearest = did_you_mean(wanted, DEVICES) or did_you_mean(wanted, {_without_size(each): None for each in DEVICES})
    raise ArgumentError(
        f"no device is called '{name}'",
        where="--device",
        fix=(f"{nearest} " if nearest else "")
        + f"devices: {device_names}; for another, pass --device-memory, such as 80GiB",
    )


def _without_size(name: str) -> str:
    return name.rpartition("-")[0]


USUAL_DEVICES = 12
"""Number of devices, from the first, that stand for a memory size: a plan by size does not change with longer lists."""


def nearest_device(memory_bytes: int) -> Device:
    """Return the usual device whose memory size is nearest to ``memory_bytes``; of two equal sizes, the faster one."""
    usual = list(DEVICES.values())[:USUAL_DEVICES]
    return min(usual, key=lambda device: (abs(device.memory_bytes - memory_bytes), -device.matmul_flops))


PEAK_FLOPS: dict[str, float] = {
    "gh200": 989e12,
    "t4": 65e12,
    "v100": 125e12,
    "a10g": 70e12,
    "a10": 125e12,
    "rtx pro 6000": 500e12,
    "rtx 3060 ti": 32.4e12,
    "rtx 3060": 25.5e12,
    "rtx 3070 ti": 43.5e12,
    "rtx 3070": 40.6e12,
    "rtx 3080 ti": 68.2e12,
    "rtx 3080": 59.5e12,
    "rtx 3090 ti": 80e12,
    "rtx 4060 ti": 44.1e12,
    "rtx 4060": 30.2e12,
    "rtx 4070 ti super": 88.2e12,
    "rtx 4070 ti": 80.2e12,
    "rtx 4070 super": 71e12,
    "rtx 4070": 58.3e12,
    "rtx 4080 super": 104e12,
    "rtx 4080": 97.5e12,
    "rtx 5060 ti": 47.4e12,
    "rtx 5070 ti": 87.9e12,
    "rtx 5070": 61.7e12,
    "rtx 5080": 113e12,
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "a100": 312e12,
    "a800": 312e12,
    "a40": 150e12,
    "rtx a6000": 155e12,
    "rtx 6000 ada": 364e12,
    "l40s": 362e12,
    "l40": 181e12,
    "l4": 121e12,
    "rtx 3090": 71e12,
    "rtx 4090": 165e12,
    "rtx 5090": 209e12,
    "mi250x": 383e12,
    "mi300x": 1307e12,
}
"""Dense bfloat16 (T4, V100: float16) FLOP/s from data sheets, by a part of the driver's device name; the first match
counts."""


def peak_flops(driver_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of the device that the driver calls ``driver_name``; None if unknown."""
    words = f" {' '.join(driver_name.lower().replace('-', ' ').replace('_', ' ').split())} "
    if " laptop " in words:  # another chip with nearly the same name
        return None
    return next((peak for part, peak in PEAK_FLOPS.items() if f" {part} " in words), None)


SHEET_EFFICIENCY = {
    "matmul": 0.6,
    "attention": 0.5,
    "attention_backward": 0.4,
    "memory": 0.75,
    "copy": 0.8,
    "link": 0.7,
}
"""Fraction of each data-sheet figure that a step is assumed to reach. Large matrix products reach 60 to 75% of the
dense rate, flash-attention kernels about half forward and less backward. Collectives of a few MB or more reach 70 to
85% of a link's bandwidth."""

DISK_BANDWIDTH = 2e9
"""Bytes/s of one NVMe disk with O_DIRECT; used if the disk was not measured."""

HOST_BANDWIDTH = 100e9
"""Bytes/s that optimizers on the host read and write, for all devices of a node together: about a fourth of the
bandwidth of two sockets with DDR5.
"""

LAUNCH_SECONDS = 8e-6
"""Seconds that Python needs to launch one operator."""


@dataclass(frozen=True)
class Rates:
    """Throughputs of a device, from which step times are predicted.

    Attributes:
        source: Origin of the figures: the device on which they were measured, or a data sheet.
        matmul_flops: FLOP/s of matrix products in the compute dtype.
        attention_flops, attention_backward_flops: FLOP/s of the attention kernel, forward and backward.
        touch_bandwidth: Bytes/s that element-wise operators read and write.
        copy_bandwidth: Bytes/s between device and host, one direction.
        disk_bandwidth: Bytes/s to and from the disk.
        host_bandwidth: Bytes/s of host memory for an optimizer that steps on the host.
        launch_seconds: Seconds to launch one operator.
        overlaps: True if copies and launches overlap with the computation.
    """

    source: str
    matmul_flops: float
    attention_flops: float
    attention_backward_flops: float
    touch_bandwidth: float
    copy_bandwidth: float
    disk_bandwidth: float = DISK_BANDWIDTH
    launch_seconds: float = LAUNCH_SECONDS
    host_bandwidth: float = HOST_BANDWIDTH
    overlaps: bool = True

    @property
    def seconds_per_attention_flop(self) -> float:
        """Mean seconds per attention FLOP of a step: 2 matrix products in each of two forwards, 5 in the backward."""
        return (4 / self.attention_flops + 5 / self.attention_backward_flops) / 9


def data_sheet_rates(device: Device) -> Rates:
    """Return the figures of the device's data sheet, multiplied by :data:`SHEET_EFFICIENCY`."""
    efficiency = SHEET_EFFICIENCY
    return Rates(
        source=f"data sheet of {device.title} times {efficiency['matmul']:.0%} (matmul), "
        f"{efficiency['attention']:.0%} (attention)",
        matmul_flops=efficiency["matmul"] * device.matmul_flops,
        attention_flops=efficiency["attention"] * device.matmul_flops,
        attention_backward_flops=efficiency["attention_backward"] * device.matmul_flops,
        touch_bandwidth=efficiency["memory"] * device.memory_bandwidth,
        copy_bandwidth=efficiency["copy"] * device.host_bandwidth,
    )


def data_sheet_links(device: Device) -> Links:
    efficiency = SHEET_EFFICIENCY["link"]
    return Links(efficiency * device.link_bandwidth, efficiency * device.network_bandwidth, device.link_name, "network")


def predict_seconds(work: Work, rates: Rates) -> float:
    compute = (
        work.matmul_flops / rates.matmul_flops
        + work.attention_flops * rates.seconds_per_attention_flop
        + work.touched_bytes / rates.touch_bandwidth
    )
    compute += work.host_touched_bytes / rates.host_bandwidth  # this optimizer starts after the last gradient
    launches = work.operators * rates.launch_seconds
    copies = work.moved_bytes / rates.copy_bandwidth
    disk = work.disk_moved_bytes / rates.disk_bandwidth
    optimizer = work.host_overlapped_bytes / rates.host_bandwidth
    parts = (compute, launches, copies, disk, optimizer)
    return max(parts) if rates.overlaps else sum(parts)
