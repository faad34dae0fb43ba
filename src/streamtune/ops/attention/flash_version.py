"""The implementation behind torch's operators of flash attention: that of the wheel (FA2), or a newer one installed.

FA3 (Shah et al., arXiv 2407.08608) is the package ``flash_attn_interface``, for devices of capability 9; FA4 is
``flash_attn.cute``, for 9 and 10. torch registers one of them in place of its own, for the whole process, so a program
that owns the process may choose, and a library may not: ``streamtune.stream`` uses what is active.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention

from streamtune.ops.attention.kernel_trial import MARGIN, Kernel, TrialHeads, agrees_with_formula, median_seconds

log = logging.getLogger(__name__)

DEFAULT = "FA2"
PACKAGES = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}
"""Implementation -> its package, and the first numbers of the capabilities of the devices it is for."""

_attention: Any = torch.nn.attention


def active_flash() -> str:
    """Return the name of the implementation that is active; versions of torch without the choice have the default."""
    current = getattr(_attention, "current_flash_attention_impl", lambda: None)()
    return current or DEFAULT


@lru_cache(maxsize=8)
def use_fastest_flash(device: torch.device, kernel: Kernel, heads: TrialHeads) -> str:
    """Activate the implementation that is the fastest of those that agree with the formula, and return its name.

    One that the user activated stays.

    Args:
        device: The device whose process this is; one that is only simulated has no implementation.
        kernel: Flash attention by torch's operators.
        heads: The heads that are tried, in bfloat16.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or active_flash() != DEFAULT:
        return active_flash()
    best, least = DEFAULT, median_seconds(kernel, device, torch.bfloat16, heads) if _installed(device) else None
    for name in _installed(device):
        try:
            _attention.activate_flash_attention_impl(name)
        except Exception as error:  # of its package, whatever it is
            log.info("%s is installed and cannot be used: %s", name, error)
            continue
        right = agrees_with_formula(kernel, device, torch.bfloat16, heads.size)
        seconds = median_seconds(kernel, device, torch.bfloat16, heads) if right else None
        if seconds is not None and (least is None or seconds < least * MARGIN):
            best, least = name, seconds
    if best != active_flash():
        if best == DEFAULT:
            _attention.restore_flash_attention_impl()
        else:
            _attention.activate_flash_attention_impl(best)
    if best != DEFAULT:
        log.info("flash attention by %s", best)
    return best


def _installed(device: torch.device) -> list[str]:
    known: list[str] = getattr(_attention, "list_flash_attention_impls", list)()
    capability = torch.cuda.get_device_capability(device)[0]
    return [
        name
        for name, (package, capabilities) in PACKAGES.items()
        if name in known and capability in capabilities and _is_there(package)
    ]


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # the package that it is a part of is missing
        return False
