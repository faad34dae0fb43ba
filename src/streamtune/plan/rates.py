"""Predict the time of a step: the work that a simulation counted, over rates measured or taken from a data sheet.

    device = matmul / r_m + attention / r_a + touched / r_t

Operators are taken to compute one after another: matrix products and attention by their operations, everything else by
the bytes it reads and writes. On an accelerator the launch of operators and copies overlap with the computation, so a
step takes the longest of four times: the device's work, ``operators * t_o``, ``moved / r_c`` and ``disk / r_d``. On the
CPU, where the same cores do all of it, it takes their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamtune.plan.devices import Device
from streamtune.simulate.cluster import Links

if TYPE_CHECKING:
    from streamtune.simulate.simulate import Work

__all__ = ["Rates", "links_of", "predict_seconds", "sheet_rates"]

SHEET_EFFICIENCY = {
    "matmul": 0.6,
    "attention": 0.5,
    "attention_backward": 0.4,
    "memory": 0.75,
    "copy": 0.8,
    "link": 0.7,
}
"""The part of a data sheet's figure that a step is taken to get: long matmuls reach 60 to 75% of the dense rate, flash
kernels about half of it forward and less backward; collectives of some MB and more 70 to 85% of a link."""

DISK_BANDWIDTH = 2e9
"""Bytes/s of one NVMe disk under O_DIRECT, where none was measured."""

HOST_BANDWIDTH = 100e9
"""Bytes/s that an optimizer on the host reads and writes, all devices of a node together: a fourth or so of what two
sockets of DDR5 have."""

LAUNCH_SECONDS = 8e-6
"""One operator as Python hands it to a device."""


@dataclass(frozen=True)
class Rates:
    """The rates of a device, per second.

    Attributes:
        source: The origin of the figures, in words: measured on which device, or a data sheet.
        matmul_flops: FLOP/s of matrix products, in the dtype that is computed in.
        attention_flops, attention_backward_flops: FLOP/s of the attention kernel.
        touch_bandwidth: Bytes/s of operators that compute next to nothing, read and written.
        copy_bandwidth: Bytes/s between device and host, one direction.
        disk_bandwidth: Bytes/s to and from the disk.
        host_bandwidth: Bytes/s of the machine's memory that an optimizer there gets.
        launch_seconds: Overhead of an operator besides its work.
        overlaps: True if copies overlap with the computation.
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
    def seconds_of_attention(self) -> float:
        """Seconds of an operation of attention in a checkpointed step: 2 + 2 products of a tile forward, 5 backward."""
        return (4 / self.attention_flops + 5 / self.attention_backward_flops) / 9


def sheet_rates(device: Device) -> Rates:
    """Return the rates of a device that is not there: its data sheet times :data:`SHEET_EFFICIENCY`."""
    part = SHEET_EFFICIENCY
    return Rates(
        source=f"data sheet of {device.title} times {part['matmul']:.0%} (matmul), {part['attention']:.0%} (attention)",
        matmul_flops=part["matmul"] * device.matmul_flops,
        attention_flops=part["attention"] * device.matmul_flops,
        attention_backward_flops=part["attention_backward"] * device.matmul_flops,
        touch_bandwidth=part["memory"] * device.memory_bandwidth,
        copy_bandwidth=part["copy"] * device.host_bandwidth,
    )


def links_of(device: Device) -> Links:
    """Return the links between devices of a kind: data sheets times :data:`SHEET_EFFICIENCY`."""
    part = SHEET_EFFICIENCY["link"]
    return Links(part * device.link_bandwidth, part * device.network_bandwidth, device.link_name, "network")


def predict_seconds(work: Work, rates: Rates) -> float:
    """Return the predicted seconds of a step that does ``work``."""
    compute = (
        work.matmul_flops / rates.matmul_flops
        + work.attention_flops * rates.seconds_of_attention
        + work.touched_bytes / rates.touch_bandwidth
    )
    compute += work.host_touched_bytes / rates.host_bandwidth  # an optimizer on the host waits for the last gradient
    launches = work.operators * rates.launch_seconds
    copies = work.moved_bytes / rates.copy_bandwidth
    disk = work.disk_moved_bytes / rates.disk_bandwidth
    parts = (compute, launches, copies, disk)
    return max(parts) if rates.overlaps else sum(parts)
