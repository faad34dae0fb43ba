"""The device allocator's setting: expandable segments, so that ever longer sequences do not fragment memory.

Without it, memory a longer sequence cannot use again stays reserved, and a run ends out of memory with gigabytes free.
torch reads the setting once, when it first touches the device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

__all__ = ["VARIABLES", "allocator_setting", "grow_segments"]

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable's name and its older one; some versions of torch follow only one of them."""
SETTING = "expandable_segments:True"


def grow_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set expandable segments for this process and its children unless the user set the allocator; Linux only."""
    if sys.platform == "linux" and not any(name in environment for name in VARIABLES):
        environment.update(dict.fromkeys(VARIABLES, SETTING))


def allocator_setting(environment: MutableMapping[str, str] = os.environ) -> str:
    """Return the allocator's setting from the environment; an empty string if there is none."""
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")
