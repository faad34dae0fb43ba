"""The paper: a decoder layer's exact gradient as a sum over chunks of the sequence, and the head beside it.

Read ``vjp`` first (the one equation), then ``layer`` (the node that calls it), ``cache`` (what a chunk sees of its
prefix), ``head``, and ``stream``, which puts them into a model.
"""

from streamtune.engine.balance import RouterLoss, balance_coefficient, balances_itself
from streamtune.engine.preflight import check_packing
from streamtune.engine.schedule import Schedule
from streamtune.engine.stream import StreamHandle, decoder_layers, stream

__all__ = [
    "RouterLoss",
    "Schedule",
    "StreamHandle",
    "balance_coefficient",
    "balances_itself",
    "check_packing",
    "decoder_layers",
    "stream",
]
