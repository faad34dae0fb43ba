"""The paper: a decoder layer's exact gradient as a sum over chunks of the sequence, and the head beside it.

Read ``vjp`` first (the one equation), then ``layer`` (the node that calls it), ``passes`` (one call of a layer:
forward, recompute, project, replay), ``kv`` and ``cache`` (what a chunk sees of those before it), ``head``, and
``streamed_model``, which puts them into a model. Besides:

    stream, call_hooks              the handle; what happens before and after a call of the model
    streamed_layer                  a layer and what its calls share; checks before a call
    call, call_parts                bind a layer's call, run it on a chunk, join its outputs
    saved                           tensors that a layer call keeps until its backward
    chain                           the order of chunks: all layers of a chunk, then the chunk before
    context                         state of a call, of a chunk and of the layer before, needed and not passed
    attention, masks, own_attention the attention and the mask a model asks for by name, or keeps
    rows, scan                      packed rows and rows that share their beginning; Mamba-1's state
    lazy_logits                     logits that are not computed
    requests                        another loss than the cross entropy; log-probabilities for any objective
    routers                         the losses of a mixture's routers
    outside_layers, rotary          embedding and norms outside the layers; rotary embeddings by the length of a row
    fused                           linear modules, norms and rotary embeddings of a layer in fewer kernels
    memory/                         placement of layer inputs: device, host, disk
    waiting                         weights that wait on the host, a layer's copies on the device while it computes
    sequence/                       ranks that share a sequence: their tokens, states, and calls of the model
    observe                         the state of a forward restored in its backward; observers; hooks of modules
    inspect_model, sharded          the parts of a model; its weights at one moment, and those that ranks share
    hf_names                        what transformers calls its inside, in which version
    evaluated                       logits of an evaluation, computed when they are read
    model_call                      arguments of the model's call
    preflight/                      is this very model streamed exactly? asked before training
"""

from streamtune.engine.inspect_model import decoder_layers
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.observe import chunkwise
from streamtune.engine.preflight import check_branches, check_packing
from streamtune.engine.requests import LossRequest, TokenScores
from streamtune.engine.routers import RouterLoss, balance_coefficient, balances_itself
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.stream import StreamHandle, stream
from streamtune.engine.waiting import keep_on_host
from streamtune.schedule import Schedule

__all__ = [
    "Branches",
    "LazyLogits",
    "LossRequest",
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
    "keep_on_host",
    "stream",
]
