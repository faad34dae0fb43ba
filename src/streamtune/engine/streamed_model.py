"""A streamed model, as the checks and the calls of several ranks see it: the attributes of its handle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from streamtune.engine.context import CallContext
from streamtune.engine.head import StreamedHead
from streamtune.engine.lazy_logits import ScoreRequest
from streamtune.engine.own_attention import CallNames
from streamtune.engine.routers import RouterWatch
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.schedule import Schedule


class StreamedModel(Protocol):
    """The attributes of :class:`streamtune.engine.stream.StreamHandle` that other modules use."""

    model: Any
    """The model of ``transformers``, without wrappers."""
    layers: list[nn.Module]
    schedule: Schedule
    head: StreamedHead | None
    """None where the head is not streamed."""
    context: CallContext
    routers: RouterWatch
    scored: ScoreRequest | None
    """The scores that the current call is asked for."""
    sequence_parallel: SequenceParallel | None
    """The ranks that share each sequence; None where there is only this one."""
    form: str
    """The form of their exchange, ``ulysses`` or ``ring``."""
    names: CallNames
    """The attention that its configurations name, in calls and outside of them."""
    own_attention: str | None
    """The implementation that layers which compute their attention themselves keep."""

    @property
    def streams_head(self) -> bool:
        """True if the language-model head is streamed too."""
        ...

    @property
    def rotates_by_length(self) -> bool:
        """True if rotary embeddings of the model depend on the longest position."""
        ...

    def layer_on_device(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Return a context inside of which a layer holds its weights on the device, wherever they wait."""
        ...

    def scoring(self, scored: ScoreRequest) -> AbstractContextManager[None]:
        """Make a call inside the context return the requested scores in place of its output."""
        ...

    def logprobs(self, input_ids: Tensor, targets: Tensor, **options: Any) -> Any:
        """Return log-probabilities of target tokens."""
        ...
