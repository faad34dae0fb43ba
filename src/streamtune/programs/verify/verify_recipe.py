"""Verify the model of a recipe on the recipe's rows.

build_verify    recipe -> tokenizer, first rows, model, schedules; what ``sft`` would train, by the same functions
verify_recipe   plain autograd and streaming on them

The balance loss of a mixture's routers is compared with the one ``transformers`` computes. A router z-loss, which it
does not know, is left out on both sides.

Where completions are scored, their own loss is compared (:class:`TreeLosses`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from streamtune import data, models, train
from streamtune.base.adapters import base_of
from streamtune.base.model_facts import model_device
from streamtune.engine import LossRequest, RouterLoss, StreamHandle, balance_coefficient, balances_itself
from streamtune.engine.rotary import as_alone
from streamtune.errors import ArgumentError, DataError, OutOfMemoryError, RunError
from streamtune.ops import TokenLoss, token_loss_reference
from streamtune.plan.simulate.scored import PlainScores
from streamtune.programs.verify.compared_rows import Room, TreeLosses, Window, choose_rows, measure_room
from streamtune.programs.verify.report import VerifyReport
from streamtune.programs.verify.restore import cast
from streamtune.programs.verify.verify import compare_gradients, verify_schedules
from streamtune.recipe.loader import LoadedRecipe
from streamtune.run.data import make_tokenizer
from streamtune.run.device import (
    choose_device,
    make_router_loss,
    make_schedule,
    prepare_libraries,
    stream_model,
)
from streamtune.run.model import make_model
from streamtune.run.precision import precise
from streamtune.run.recipe_lines import blame_recipe, make_sources
from streamtune.run.reference import load_reference, streamed
from streamtune.schedule import Schedule
from streamtune.tasks import Task, task_of
from streamtune.tasks.random_batches import RandomTokens
from streamtune.tasks.sft import prefix_batch
from streamtune.tasks.task import ScoringTask
from streamtune.train.objective import autocast, loss_of, output_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = ("float32", "bfloat16", "float64")
"""Values of ``--dtype``."""

FIRST_ROWS = 64
"""Rows of each source that are read: a verification needs one or a few."""

PACKED_ROWS = 2
"""Rows of a packed sequence at least, if the data has so many: one alone would prove nothing of packing."""

LEAST = 4
"""Tokens that can be cut into chunks: none has only one."""

LENGTH = {"cpu": 2048, "cuda": 8192}
"""Tokens that are enough to prove it, where nothing is said and memory allows more."""

PROBE = 256
"""Tokens of the forward that memory is measured on."""


@dataclass(frozen=True)
class _Asked:
    """The model to verify, and what it is asked to compute."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    length: int | None
    """Tokens of the batch at most; None is as many as memory allows and a proof needs."""
    widened: torch.dtype | None
    """Widen the weights to it first."""
    bf16: bool


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The batch of a verification, chosen by the memory that plain autograd has."""

    windows: tuple[Window, ...]
    """The rows; none where completions are scored."""
    batch: train.MicroBatch
    alone: train.MicroBatch
    """The same rows one by one; the batch itself where it is not packed"""
    length_limit: str
    """The reason for the length of the batch, if a row was cut."""
    room: Room
    router_loss: RouterLoss | None = None
    """The loss that the recipe adds for routers; of it only the balance loss is compared."""
    token_loss: TokenLoss = field(default_factory=TokenLoss)
    """The loss of a target of the rows."""
    teacher: Any = None
    """The model that it has a divergence from."""
    losses: TreeLosses | None = None
    """The loss of completions, where these are scored."""


@dataclass(frozen=True, kw_only=True)
class VerifySubject(_Chosen):
    """The subject of a verification: a model, a batch, and the schedules to stream it with."""

    loaded: LoadedRecipe
    model: Any
    parameters: models.ParameterCount
    device: torch.device
    schedules: list[Schedule]
    dtype: torch.dtype | None
    """Widen the weights to it first."""
    bf16: bool

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, T of the batch."""
        return self.batch.input_ids.shape[1]


def build_verify(
    loaded: LoadedRecipe,
    *,
    length: int | None = None,
    dtype: str | None = None,
    notify: Callable[[str], None] = lambda message: None,
    doing: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> VerifySubject:
    """Load the recipe's model and its first rows. Nothing is written.

    Args:
        loaded: The recipe.
        length: Tokens of the batch at most; None is as many as memory allows and a proof needs.
        dtype: One of :data:`DTYPES`; None is what the recipe trains in.
        notify: Called with messages for the user, a sentence at a time.
        doing: Returns a context that shows a message while something takes long.

    Raises:
        UserError: With the line of the recipe that is to blame.
    """
    if length is not None and length < LEAST:
        raise ArgumentError(f"--length takes a number of tokens from {LEAST} up", mend="write --length 1024")
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"--dtype does not know {dtype!r}", mend=f"choose from {', '.join(DTYPES)}")
    recipe = precise(loaded.recipe)
    task = task_of(recipe)
    with blame_recipe(loaded):
        device = choose_device(recipe.device)
        prepare_libraries(device)
        with doing("making the tokenizer"):
            sources = make_sources(loaded, evaluated=False)
            tokenizer = make_tokenizer(recipe, sources, None, notify)
        rows = _first_rows(task, sources, tokenizer, notify)
        with doing("loading the model"):
            model = make_model(recipe, tokenizer, None, device)
        with stream_model(recipe, model) as handle:  # what is refused is refused at once
            task.check_model(handle)
        bf16 = bool(recipe.bf16) if dtype is None else dtype == "bfloat16"
        widened: torch.dtype | None = getattr(torch, dtype) if dtype in ("float32", "float64") else None
        choose: Any = _choose_trees if isinstance(task, ScoringTask) else _choose_rows
        chosen = choose(task, _Asked(model, tokenizer, length, widened, bf16), rows, notify=notify, doing=doing)
        if (note := models.check_positions(model, chosen.alone.input_ids.shape[1], training=False)) is not None:
            notify(note)
        schedules = verify_schedules(chosen.batch.input_ids.shape[1], make_schedule(recipe.engine))
    return VerifySubject(
        **vars(chosen),
        loaded=loaded,
        model=model,
        parameters=models.count_parameters(model),
        device=device,
        schedules=schedules,
        dtype=widened,
        bf16=bf16,
    )


def _choose_rows(
    task: Task[Any],
    asked: _Asked,
    rows: Sequence[data.Example],
    *,
    notify: Callable[[str], None],
    doing: Callable[[str], AbstractContextManager[Any]],
) -> _Chosen:
    """Choose rows of next tokens, as long as memory allows."""
    model, tokenizer, length = asked.model, asked.tokenizer, asked.length
    recipe, device = task.recipe, model_device(model)
    router_loss = make_router_loss(recipe, model)
    teacher = None
    if task.compares:
        with doing("loading the teacher"):
            teacher = load_reference(task, model, tokenizer, device)
    with doing("measuring how long a row plain autograd has room for"):
        room = _measure(model, rows, tokenizer, device, asked.bf16, router_loss)
    limit, why = (length, "--length") if length is not None else _fitting_length(room, device, asked.widened)
    per_turn = recipe.reasoning == "per_turn"
    windows = choose_rows(rows, limit, PACKED_ROWS if recipe.packing or per_turn else 1)
    alone = batch = _collate(windows, tokenizer).to(device)
    if per_turn:
        batch = prefix_batch([window.example for window in windows]).to(device)
    elif recipe.packing:
        batch = _collate(windows, tokenizer, packed=True).to(device)
    if top_k := task.teacher_top_k:  # of windows the file says nothing: likeliest tokens are drawn
        taught = RandomTokens(recipe, model).top_k(alone, top_k)
        packed = batch is not alone
        alone = replace(alone, top_k=taught)
        batch = replace(batch, top_k=taught.at(batch.shift_labels)) if packed else alone
    return _Chosen(
        windows=tuple(windows),
        batch=batch,
        alone=alone,
        length_limit=why if any(window.length < window.row_length for window in windows) else "",
        room=room,
        router_loss=router_loss,
        token_loss=task.token_loss,
        teacher=teacher,
    )


def _choose_trees(
    task: ScoringTask[Any],
    asked: _Asked,
    rows: Sequence[Any],
    *,
    notify: Callable[[str], None],
    doing: Callable[[str], AbstractContextManager[Any]],
) -> _Chosen:
    """Choose completions, as long as memory allows, with their loss in both layouts."""
    model, tokenizer, length = asked.model, asked.tokenizer, asked.length
    device = model_device(model)
    with doing("loading the reference"):
        held = load_reference(task, model, tokenizer, device) if task.compares else None
    with doing("checking that prompts can be shared"):
        share = task.can_share(model, notify, beside=held)
    with doing("measuring how long a row plain autograd has room for"):
        room = _measure_scored(model, device, asked.bf16)
    limit, why = (length, "--length") if length is not None else _fitting_length(room, device, asked.widened)
    trees, cut = task.compared_trees(rows, limit, len(tokenizer))
    plain, pad = PlainScores(model), tokenizer.pad_token_id
    shared, apart = task.compared_batches(trees, model, plain, pad_token_id=pad, share=share)
    losses = TreeLosses(task, held, shared.to(device), apart.to(device))
    return _Chosen(
        windows=(), batch=losses.shared, alone=losses.apart, length_limit=why if cut else "", room=room, losses=losses
    )


def verify_recipe(subject: VerifySubject, notify: Callable[[str], None] = lambda message: None) -> VerifyReport:
    """Compare streamed with plain autograd.

    Raises:
        UnsupportedModelError: The model cannot be streamed.
        OutOfMemoryError: Plain autograd itself does not fit at this length.
    """
    loss_of = partial(_loss, subject.batch, subject)
    losses = subject.losses

    def of_handle(handle: StreamHandle) -> Any:
        return partial(loss_of, handle=handle)

    try:
        return compare_gradients(
            subject.model,
            loss_of if losses is None else losses.plain,
            subject.schedules,
            dtype=subject.dtype,
            bf16=subject.bf16,
            plain_loss_of=partial(_plain_loss, subject) if losses is None else losses.plain,
            loss_with=of_handle if losses is None else losses.streamed,
            unfit=partial(subject.room.lacks, subject.alone.input_ids.numel()),
            notify=notify,
        )
    except (RuntimeError, MemoryError) as error:
        if not train.is_out_of_memory(error):
            raise
        rows, length = subject.alone.input_ids.shape
        raise OutOfMemoryError(
            f"out of memory on {rows} x {length:,} tokens: plain autograd, the reference, keeps all activations",
            mend=f"choose a shorter length: --length {max(LEAST, length // 2)}",
        ) from error


# --- rows -------------------------------------------------------------------------------------------------------------


def _first_rows(
    task: Task[Any],
    sources: Sequence[data.Source],
    tokenizer: PreTrainedTokenizerBase,
    notify: Callable[[str], None],
) -> Sequence[Any]:
    """Return the first rows of the first source, held-out ones too; all rows of all sources if none is usable."""
    few = [
        replace(source, max_rows=min(source.max_rows or FIRST_ROWS, FIRST_ROWS), shuffle=False) for source in sources
    ]
    try:
        return task.prepare(few[:1], tokenizer, notify, val_size=0.0).train
    except DataError:
        return task.prepare(sources, tokenizer, notify, val_size=0.0).train


def _collate(windows: Sequence[Window], tokenizer: PreTrainedTokenizerBase, packed: bool = False) -> train.MicroBatch:
    examples = [window.example for window in windows]
    pad, origins = tokenizer.pad_token_id, tuple(example.origin for example in examples)
    if packed:
        return train.MicroBatch(**data.collate_packed([examples], pad_token_id=pad), origins=origins)
    return train.MicroBatch(**data.collate(examples, pad_token_id=pad), origins=origins)


def _plain_loss(subject: VerifySubject, model: torch.nn.Module, bf16: bool) -> torch.Tensor:
    """Return the loss of the rows one by one, each with the rotary embeddings that it has alone."""
    packed = subject.batch is not subject.alone
    with as_alone(model, subject.alone.attention_mask) if packed else nullcontext():
        return _loss(subject.alone, subject, model, bf16)


def _loss(
    batch: train.MicroBatch,
    subject: VerifySubject,
    model: torch.nn.Module,
    bf16: bool,
    *,
    handle: StreamHandle | None = None,
) -> torch.Tensor:
    """Return the loss of ``sft`` without a router z-loss; the model itself adds the balance loss, streamed or not.

    Without ``bf16`` a teacher computes in the dtype of the model.
    """
    router_loss, token_loss, held = subject.router_loss, subject.token_loss, subject.teacher
    if token_loss.is_plain and batch.weights is None:
        return _cross_entropy(batch, router_loss, model, bf16)
    device, dtype = batch.input_ids.device, next(p.dtype for p in model.parameters() if p.is_floating_point())
    with cast(held or model, dtype if held is not None and not bf16 else None):
        if handle is not None:
            teacher_logits = None
            if held is not None:
                with (teacher := streamed(held, handle)).handle, autocast(device, bf16):
                    teacher_logits = teacher.lazy_logits(batch)
            with handle.with_loss(LossRequest(token_loss, batch.weights, teacher_logits, batch.top_k)):
                return _cross_entropy(batch, router_loss, model, bf16)
        asked, balance = _balance(batch, router_loss, model)
        with autocast(device, bf16):
            output = model(**{**batch.arguments, **asked})
            with torch.no_grad():
                wide = None if held is None else held(**batch.arguments).logits
        loss = (
            token_loss_reference(
                output.logits, batch.shift_labels, token_loss, batch.weights, teacher_BTV=wide, top_k=batch.top_k
            )
            / batch.target_weight
        )
        return loss + balance * output.aux_loss if balance else loss


def _balance(
    batch: train.MicroBatch, router_loss: RouterLoss | None, model: torch.nn.Module
) -> tuple[dict[str, Any], float]:
    """Return the arguments by which a model returns its balance loss, and the factor of that; none without."""
    if router_loss is None or not (router_loss.balance or balances_itself(base_of(model))):
        return {}, 0.0
    # The mask says which tokens count, so it is given where there is padding; packed rows must be told without one.
    padded = batch.position_ids is None and batch.num_tokens < batch.attention_mask.numel()
    mask = batch.attention_mask if padded else None
    return {"attention_mask": mask, "output_router_logits": True}, router_loss.balance


def _cross_entropy(
    batch: train.MicroBatch, router_loss: RouterLoss | None, model: torch.nn.Module, bf16: bool
) -> torch.Tensor:
    """Return the loss that a model itself computes, or that its handle computes in its place."""
    asked, balance = _balance(batch, router_loss, model)
    if not asked:
        return loss_of(model, batch, num_targets=batch.target_weight, bf16=bf16)
    with autocast(batch.input_ids.device, bf16), warnings.catch_warnings():
        # The balance loss is asked for by the argument of the router logits, which nobody reads here.
        warnings.filterwarnings("ignore", message="router_logits are not returned")
        output = output_of(model, batch, num_targets=batch.target_weight, **asked)
    loss: torch.Tensor = output.loss + (balance - balance_coefficient(base_of(model))) * output.aux_loss
    return loss


# --- memory -----------------------------------------------------------------------------------------------------------


def _measure(
    model: Any,
    examples: Sequence[data.Example],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    bf16: bool,
    router_loss: RouterLoss | None,
) -> Room:
    """Measure the memory that plain autograd holds for a number of tokens."""
    base = base_of(model)
    [window] = choose_rows(examples, PROBE)[:1]
    repeats = -(-PROBE // window.length)  # the tokens do not matter here, only their number

    def forward(tokens: int) -> torch.Tensor:
        ids = np.tile(np.asarray(window.example.input_ids), repeats)[:tokens]
        probe = _collate([Window(data.Example(ids, ids, window.example.origin), 0, tokens)], tokenizer)
        return _cross_entropy(probe.to(device), router_loss, model, bf16)

    limit = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = min(PROBE, limit) if isinstance(limit, int) else PROBE
    return measure_room(base, torch.bfloat16 if bf16 else base.dtype, forward, tokens)


def _measure_scored(model: Any, device: torch.device, bf16: bool) -> Room:
    """Measure the memory that plain autograd holds for a number of tokens that it scores."""
    base = base_of(model)

    def forward(tokens: int) -> torch.Tensor:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        with autocast(device, bf16):
            return PlainScores(base).logprobs(ids, ids).logprobs.sum()

    return measure_room(base, torch.bfloat16 if bf16 else base.dtype, forward, PROBE)


def _fitting_length(room: Room, device: torch.device, widened: torch.dtype | None) -> tuple[int, str]:
    """Return the number of tokens to take, and the reason for it: enough for a proof, fewer where memory ends."""
    enough = LENGTH["cpu" if device.type == "cpu" else "cuda"]
    trained = widened or room.measured
    longest = room.longest(torch.float32 if trained.itemsize < 4 else torch.float64)
    if longest < PROBE:  # no room for a wider truth at all
        longest = room.longest(trained)
    if longest < LEAST:
        raise RunError("there is no memory left beside the weights", mend="free some, or choose --length by hand")
    if longest >= enough:
        return enough, "enough for a proof"
    return longest, f"what plain autograd has room for in the {room.free / 2**30:.1f} GiB that are free"
