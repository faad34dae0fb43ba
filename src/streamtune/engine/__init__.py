"""The paper: a decoder layer's exact gradient as a sum over chunks of the sequence, and the head beside it.

Read ``vjp`` first (the one equation), then ``layer`` (the node that calls it), ``cache`` (what a chunk sees of those
before it), ``head``, and ``stream``, which puts them into a model. What models do besides:

    call, outputs                   what goes into a layer and comes out of it, cut and joined
    attention, recognise, tiles     the attention and the mask a model asks for by name, or keeps
    rows, scan, sharing, balance    packed rows; Mamba-1's state; keys and values of other layers; a router's losses
    branches, scores                rows that share their beginning; per-token log-probabilities for any objective
    walks                           one call of a layer: forward, again, project, replay
    pointwise                       the norms outside the layers
    placement, storage, kept        what a schedule means for a layer; where tensors (arena, disk) and attention wait
    parallel, strips                ranks that share a sequence, and what is whose
    ambient, weights, module_hooks  what is as it was in the forward, and who may look on
    evaluated                       logits of an evaluation, computed when they are read
    preflight                       is this very model streamed exactly? asked before training
"""

from streamtune.engine.branches import Branches
from streamtune.engine.inspect_model import decoder_layers
from streamtune.engine.module_hooks import chunkwise
from streamtune.engine.preflight import check_branches, check_packing
from streamtune.engine.routers import RouterLoss, balance_coefficient, balances_itself
from streamtune.engine.scores import TokenScores
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.stream import StreamHandle, stream
from streamtune.schedule import Schedule

__all__ = [
    "Branches",
    "RouterLoss",
    "Schedule",
    "SequenceParallel",
    "StreamHandle",
    "TokenScores",
    "balance_coefficient",
    "balances_itself",
    "check_branches",
    "check_packing",
    "chunkwise",
    "decoder_layers",
    "stream",
]
