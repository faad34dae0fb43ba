"""Attention of a chunk of queries, attention masks, and token losses and log-probabilities without the full logits."""

from streamtune.ops.attention.attention import prefix_attention, prefix_attention_reference
from streamtune.ops.attention.mask import LazyMask, MaskView, Segment
from streamtune.ops.attention.runs import Branch, BranchTable, row_starts
from streamtune.ops.first_order import first_order, is_graph_retained, suspend_tensor_hooks
from streamtune.ops.head.cross_entropy import linear_cross_entropy, project_cross_entropy
from streamtune.ops.head.logprobs import project_scores, token_logprobs, token_scores
from streamtune.ops.head.token_losses import (
    MEASURED,
    Divergence,
    TeacherHead,
    TokenLoss,
    TopKTeacher,
    linear_token_loss,
    project_token_loss,
    token_loss_reference,
    top_k_classes,
)

__all__ = [
    "MEASURED",
    "Branch",
    "BranchTable",
    "Divergence",
    "LazyMask",
    "MaskView",
    "Segment",
    "TeacherHead",
    "TokenLoss",
    "TopKTeacher",
    "first_order",
    "is_graph_retained",
    "linear_cross_entropy",
    "linear_token_loss",
    "prefix_attention",
    "prefix_attention_reference",
    "project_cross_entropy",
    "project_scores",
    "project_token_loss",
    "row_starts",
    "suspend_tensor_hooks",
    "token_logprobs",
    "token_loss_reference",
    "token_scores",
    "top_k_classes",
]
