"""StreamTune: fine-tune language models on very long sequences, with the exact gradient.

>>> import streamtune
>>> handle = streamtune.stream(model, chunk_size=2048)  # any transformers causal LM, in place
>>> model(input_ids=ids, labels=labels).loss.backward()  # the usual call, with the exact gradient
>>> handle.remove()
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing, whose import is slow: Ctrl-C is not handled yet

if TYPE_CHECKING:
    from typing import Any

    from streamtune.engine import RouterLoss, SequenceParallel, StreamHandle, chunkwise, stream
    from streamtune.ops import linear_cross_entropy, token_logprobs
    from streamtune.schedule import Schedule

__all__ = [
    "RouterLoss",
    "Schedule",
    "SequenceParallel",
    "StreamHandle",
    "__version__",
    "chunkwise",
    "linear_cross_entropy",
    "stream",
    "token_logprobs",
]

__version__ = "0.1.0"

_MODULES = {
    "RouterLoss": "streamtune.engine",
    "Schedule": "streamtune.engine",
    "SequenceParallel": "streamtune.engine",
    "StreamHandle": "streamtune.engine",
    "chunkwise": "streamtune.engine",
    "stream": "streamtune.engine",
    "linear_cross_entropy": "streamtune.ops",
    "token_logprobs": "streamtune.ops",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import streamtune`` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
