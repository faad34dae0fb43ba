"""The paper: a decoder layer's exact gradient as a sum over chunks of the sequence, and the head beside it.

Read ``vjp`` first (the one equation), then ``layer`` (the node that calls it), ``cache`` (what a chunk sees of those
before it), ``head``, and ``stream``, which puts them into a model. What models do besides:

    call, outputs                   what goes into a layer and comes out of it, cut and joined
    attention, recognise, tiles     the attention and the mask a model asks for by name, or keeps
    rows, scan, sharing, balance    packed rows; Mamba-1's state; keys and values of other layers; a router's losses
    walks                           one call of a layer: forward, again, project, replay
    pointwise                       the norms outside the layers
    placement, storage, kept        what a schedule means for a layer; where tensors (arena, disk) and attention wait
    preflight                       is this very model streamed exactly? asked before training
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
