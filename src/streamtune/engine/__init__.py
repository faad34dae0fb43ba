"""StreamBP (arXiv 2506.03077): the exact gradient of a decoder layer as a sum over chunks of the sequence.

``vjp`` has the equation, ``layer`` the autograd node of a decoder layer, and ``passes`` the runs of a layer over its
chunks. ``kv`` and ``cache`` hold the keys, values and recurrent states that a chunk reads from earlier chunks. ``head``
computes the loss without full logits. ``streamed_model`` installs these parts in a model. The other modules:

    stream, call_hooks              the handle; hooks that run before and after a call of the model
    streamed_layer                  one layer, the state that its calls share, and the checks before a call
    call, call_parts                bind a layer's arguments, run the layer on a chunk, join the outputs of all chunks
    saved                           tensors that a layer call saves for its backward
    chain                           order "chunk": backward through all layers of a chunk, then the preceding chunk
    context                         state of a model call, of a chunk and of the last layer call
    attention, masks, own_attention attention and mask functions that a config names; layers with their own attention
    rows, scan                      packed rows and rows that share a prefix; Mamba-1's scan with an initial state
    lazy_logits                     a placeholder for logits that are not computed
    requests                        losses other than cross-entropy; log-probabilities for any objective
    routers                         losses on the routers of a mixture of experts
    outside_layers, rotary          embedding and norms outside the layers; rotary embeddings that depend on row length
    fused                           fused linear modules, norms and rotary embeddings of a layer
    memory/                         storage of layer inputs on the device, on the host or on disk
    offloaded_weights               weights offloaded to the host, copied to the device while their layer computes
    sequence/                       sequence parallelism: tokens of each rank, states, and calls of the model
    observe                         random state and autocast of a forward, restored in its backward; observers; hooks
    inspect_model, sharded          the decoder layers of a model; weights that ZeRO or FSDP2 shard
    hf_names                        names of transformers' internals, by version
    evaluated                       logits of an evaluation, computed when they are read
    model_call                      arguments of a model call, read and changed by name
    preflight/                      comparison of a model with and without streaming, before training
"""

from streamtune.engine.inspect_model import decoder_layers
from streamtune.engine.lazy_logits import LazyLogits
from streamtune.engine.observe import chunkwise
from streamtune.engine.offloaded_weights import keep_on_host
from streamtune.engine.preflight import check_branches, check_packing
from streamtune.engine.requests import LossRequest, TokenScores
from streamtune.engine.routers import RouterLoss, adds_balance_loss, balance_coefficient
from streamtune.engine.rows import Branches
from streamtune.engine.sequence.shards import SequenceParallel
from streamtune.engine.stream import StreamHandle, stream
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
    "adds_balance_loss",
    "balance_coefficient",
    "check_branches",
    "check_packing",
    "chunkwise",
    "decoder_layers",
    "keep_on_host",
    "stream",
]
