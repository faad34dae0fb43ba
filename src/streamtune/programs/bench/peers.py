"""The peers that change a model or the files of ``transformers``: set up by their own functions, and undone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from torch import Tensor, nn

from streamtune.base.adapters import base_of
from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.errors import UnsupportedModelError
from streamtune.plan.simulate.scored import checkpointing

Loss = Callable[[dict[str, Any]], Tensor]
"""The mean loss of the next tokens of a batch, by the arguments of the model."""


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Undo on leaving what is replaced inside: attributes and hooks of modules, names and classes of their files."""
    modules = [vars(module) for module in model.modules()]
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    files = [vars(sys.modules[name]) for name in sorted(names) if name.startswith("transformers.models.")]
    classes = {value for file in files for value in file.values() if isinstance(value, type)}
    # what a module holds in dictionaries, such as its hooks, is put back into the same dictionaries
    held = [(value, dict(value)) for attributes in modules for value in attributes.values() if isinstance(value, dict)]
    before = [(attributes, dict(attributes)) for attributes in [*modules, *files]]
    methods = [(kind, dict(vars(kind))) for kind in classes if kind.__module__.startswith("transformers.models.")]
    try:
        yield
    finally:
        for now, then in [*before, *held]:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
        for kind, then in methods:
            for name in vars(kind).keys() - then.keys():
                delattr(kind, name)
            for name, value in then.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)


@contextmanager
def imported(name: str) -> Iterator[None]:
    """Refuse a peer whose import fails, as with versions of torch or ``transformers`` that it does not know.

    Raises:
        UnsupportedModelError: Names the reason.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} cannot be imported: {str(error).splitlines()[0]}") from error


@contextmanager
def liger(model: Any) -> Iterator[Loss]:
    """Prepare checkpointing with all of Liger's kernels: RMSNorm, rotation, SwiGLU, and the loss without logits.

    Raises:
        UnsupportedModelError: Liger has none for this family.
    """
    with imported("Liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    causal = base_of(model)
    if causal.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UnsupportedModelError(f"Liger has no kernels for {causal.config.model_type}")
    with restored(causal), checkpointing(model):
        _apply_liger_kernel_to_instance(model=causal)
        yield lambda batch: model(**batch, labels=batch["input_ids"], use_cache=False).loss


def liger_loss(head: Any, hidden_BTC: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean loss by Liger's head, which makes no logits of all tokens."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    of = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX)
    loss: Tensor = of(head.weight, hidden_BTC.flatten(0, 1), labels_BT.flatten(), head.bias)
    return loss


@contextmanager
def trl(model: Any) -> Iterator[Loss]:
    """Prepare TRL's supervised trainer with activation offloading: checkpointing, and its head without logits.

    Raises:
        UnsupportedModelError: This TRL has no such head: it is older.
    """
    with imported("TRL"):
        from trl.models import activation_offloading
        from trl.trainer.utils import add_fused_lm_head

    causal = base_of(model)
    with restored(causal), checkpointing(model):
        add_fused_lm_head(causal)
        offloaded = activation_offloading.get_act_offloading_ctx_manager(model=model)

        def loss(batch: dict[str, Any]) -> Tensor:
            with offloaded:
                out: Tensor = model(**batch, labels=batch["input_ids"], fused_lm_head=True).loss
            return out

        yield loss


@contextmanager
def unsloth(model: Any) -> Iterator[Loss]:
    """Prepare Unsloth's checkpointing, which keeps the inputs of layers on the host, and its loss in chunks.

    Importing Unsloth changes ``transformers`` for the rest of the process. What it replaces after that is put back.
    """
    with imported("Unsloth"), redirect_stdout(sys.stderr):  # it greets
        __import__("unsloth")
        from unsloth_zoo import gradient_checkpointing
        from unsloth_zoo.fused_losses import unsloth_fused_ce_loss

    causal = base_of(model)
    embeddings, head = causal.get_input_embeddings(), causal.get_output_embeddings()

    def loss(batch: dict[str, Any]) -> Tensor:
        hidden = causal.base_model(**batch, use_cache=False).last_hidden_state
        out: Tensor = unsloth_fused_ce_loss(None, hidden, head.weight, head.bias, batch["input_ids"])
        return out

    gradient_checkpointing.patch_unsloth_smart_gradient_checkpointing(embeddings.weight.dtype)
    try:
        with restored(causal), checkpointing(model, gradient_checkpointing.unsloth_checkpoint):
            # as torch's reentrant kind, it computes gradients only where an input has one
            embeddings.register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))
            yield loss
    finally:
        gradient_checkpointing.unpatch_unsloth_smart_gradient_checkpointing()
