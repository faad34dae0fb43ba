"""Devices by name, for a plan on one that is not there: public figures, each from its maker's data sheet.

Memory is the size that a program finds (the driver keeps some of the nominal size), rates are of dense bfloat16 without
sparsity, bandwidths are peaks; ``host_bandwidth`` is one direction of the link (PCIe 4 and 5 x16). A real step gets
less than these rates: ``rates.SHEET_EFFICIENCY`` has the parts that are assumed.

Links between devices, one direction of one device: NVLink 3, 4 and 5 are 600, 900 and 1,800 GB/s both ways (data sheets
of A100, H100 and B200), the seven links of an MI300X 64 GB/s each way; where there is none, or a bridge that joins two
devices only, PCIe. The network is what the maker's own machine has for each device: eight ports of 200 Gb/s (DGX A100)
or 400 Gb/s (DGX H100, H200 and B200; eight as well in platforms of MI300X). For the others there is no such machine:
100 Gb/s for the server cards and 10 Gb/s for those of workstations are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamtune.errors import ArgumentError, did_you_mean

__all__ = ["DEVICES", "Device", "find_device", "nearest_device"]

GIB = 1024**3
PCIE_4, PCIE_5 = 32e9, 64e9
NVLINK_3, NVLINK_4, NVLINK_5 = ("NVLink", 300e9), ("NVLink", 450e9), ("NVLink", 900e9)
INFINITY = ("Infinity Fabric", 7 * 64e9)


@dataclass(frozen=True)
class Device:
    """One device: bytes of memory, FLOP/s of bfloat16 matmuls, bytes/s of its memory, of its link to the host, to other
    devices of its node, and to other nodes."""

    name: str
    title: str
    memory_bytes: int
    matmul_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    link_name: str
    link_bandwidth: float
    network_bandwidth: float


def _device(
    name: str,
    title: str,
    gib: float,
    teraflops: float,
    gigabytes_per_s: float,
    host_bandwidth: float,
    link: tuple[str, float] | None,
    network_gigabits: float,
) -> Device:
    link_name, bandwidth = link or ("PCIe", host_bandwidth)
    rates = (teraflops * 1e12, gigabytes_per_s * 1e9, host_bandwidth)
    return Device(name, title, int(gib * GIB), *rates, link_name, bandwidth, network_gigabits * 1e9 / 8)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("a100-40gb", "NVIDIA A100 40GB", 39.4, 312, 1555, PCIE_4, NVLINK_3, 200),
        _device("a100-80gb", "NVIDIA A100 80GB", 79.1, 312, 2039, PCIE_4, NVLINK_3, 200),
        _device("h100-80gb", "NVIDIA H100 SXM", 79.1, 989, 3350, PCIE_5, NVLINK_4, 400),
        _device("h200-141gb", "NVIDIA H200", 139, 989, 4800, PCIE_5, NVLINK_4, 400),
        _device("b200-192gb", "NVIDIA B200", 178, 2250, 8000, PCIE_5, NVLINK_5, 400),
        _device("l4-24gb", "NVIDIA L4", 22.0, 121, 300, PCIE_4, None, 100),
        _device("l40s-48gb", "NVIDIA L40S", 44.4, 362, 864, PCIE_4, None, 100),
        _device("rtx-a6000-48gb", "NVIDIA RTX A6000", 47.4, 155, 768, PCIE_4, None, 10),
        _device("rtx-3090-24gb", "NVIDIA RTX 3090", 23.6, 71, 936, PCIE_4, None, 10),
        _device("rtx-4090-24gb", "NVIDIA RTX 4090", 23.6, 165, 1008, PCIE_4, None, 10),
        _device("rtx-5090-32gb", "NVIDIA RTX 5090", 31.3, 209, 1792, PCIE_5, None, 10),
        _device("mi300x-192gb", "AMD MI300X", 191, 1307, 5300, PCIE_5, INFINITY, 400),
    )
}
"""Every device known by name."""


def find_device(name: str) -> Device:
    """Return a device by its name, or by the part before the memory where that is one device (``h100``).

    Raises:
        ArgumentError: No such device, or several.
    """
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in DEVICES:
        return DEVICES[wanted]
    starts = [device for device in DEVICES.values() if device.name.startswith(f"{wanted}-")]
    if len(starts) == 1:
        return starts[0]
    known = ", ".join(DEVICES)
    if starts:
        several = " or ".join(device.name for device in starts)
        raise ArgumentError(f"'{name}' could be {several}", where="--device", mend=f"write --device {starts[0].name}")
    nearest = did_you_mean(wanted, DEVICES)
    raise ArgumentError(
        f"no device is called '{name}'",
        where="--device",
        mend=(f"{nearest} " if nearest else "") + f"Known are {known}; for another give --device-memory 80GiB",
    )


def nearest_device(size: int) -> Device:
    """Return the device whose memory is nearest to ``size`` bytes; the fastest of those that are as near."""
    return min(DEVICES.values(), key=lambda device: (abs(device.memory_bytes - size), -device.matmul_flops))
