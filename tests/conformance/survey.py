"""What streaming makes of one model of transformers, found by trying: exact, refused, no causal decoder, or at fault.

The whole gradient of the streamed model is held against the unstreamed model's, parameter by parameter, with the
measure and the bound of :mod:`tests.exactness.families`. Each name has a process of its own and a time limit, so that
a crash of the interpreter or a loop without end is a finding as well.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from streamtune import Schedule, StreamHandle, stream
from streamtune.engine.call import layer_cache_argument
from streamtune.engine.hf_names import STATE
from streamtune.engine.own_attention import DenseOnUseMask
from streamtune.errors import UnsupportedModelError
from tests.conformance.exceptions import NOT_CAUSAL
from tests.conformance.reducer import build
from tests.exactness.families import BOUND, VOCAB, batch, errors, gradients

FP64_BOUND = 2e-6  # not rounding of fp64: models compute norms, softmax and the loss in fp32 whatever their dtype
LEAK_BOUND = 1e-5  # of the norm: what fp32 rounding leaves of an exact zero
TIME_LIMIT = 150.0
KINDS = ("plain", "masked", "right", "left")
SCHEDULES = (
    Schedule(chunk_size=16, head_chunk_size=11),
    Schedule(
        chunk_size=5,
        head_chunk_size=7,
        offload="host",
        levels=2,
        segment_size=2,
        keep_kv="host",
        keep_attention="host",
        stream_grads=True,
    ),
)
"""Everything computed again from the layer inputs; everything kept or moved that can be, over two levels."""
# In training these refuse a batch that does not say which tokens are text.
NEEDS_TOKEN_TYPES = ("gemma3", "gemma4", "gemma4_unified", "molmo2/image-text")


class Category(StrEnum):
    """What came of a name; the last two are faults of StreamTune."""

    EXACT = "exact"
    REFUSED_BY_STREAM = "refused by stream()"
    REFUSED_BY_CHECK = "refused by check()"
    REFUSED_IN_THE_CALL = "refused in the call"
    NOT_CAUSAL = "not a causal decoder"
    NOT_BUILT = "not built"
    CRASHED = "crashed"
    SILENTLY_WRONG = "silently wrong"


REFUSED = (Category.REFUSED_BY_STREAM, Category.REFUSED_BY_CHECK, Category.REFUSED_IN_THE_CALL)
FAULTS = (Category.CRASHED, Category.SILENTLY_WRONG)


@dataclass(frozen=True)
class Finding:
    """The category of a name, why, the largest error measured, and what a reader of the table should know besides."""

    name: str
    category: Category
    reason: str = ""
    error: float | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Comparison:
    """The largest error over all batches and schedules, and the batches the unstreamed model does not run on."""

    error: float = 0.0
    where: str = ""
    not_run: dict[str, str] = field(default_factory=dict)
    attention: str = ""


def survey(name: str, limit: float = TIME_LIMIT) -> Finding:
    """:func:`classify` in a forked process, ended after ``limit`` seconds.

    The fork is of a server that has imported everything and computed nothing: a fork of the running tests would
    inherit the threads and locks of whatever ran before.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            return Finding(name, Category.CRASHED, f"no answer within {limit:g} s")
        return receiver.recv()
    except EOFError:
        process.join()
        return Finding(name, Category.CRASHED, f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def classify(name: str) -> Finding:
    """Build, stream, check and compare the model of this name; of one that is refused, ask whether it is causal."""
    if name in NOT_CAUSAL:
        return Finding(name, Category.NOT_CAUSAL, NOT_CAUSAL[name])
    try:
        model = build(name)
    except Exception as error:
        return Finding(name, Category.NOT_BUILT, describe(error))
    found = _streamed(name, model)
    if found.category in REFUSED and (leak := future_in_logits(model)) > LEAK_BOUND:
        reason = f"another last token changes the logits of the tokens before it, by {leak:.0e} of their norm"
        return Finding(name, Category.NOT_CAUSAL, reason)
    return found


@torch.no_grad()
def future_in_logits(model: PreTrainedModel) -> float:
    """How much the logits of all tokens but the last depend on the last one; 0 where it does not run on tokens alone.

    ``||z(ids) - z(ids')|| / ||z(ids)||`` over those tokens, in evaluation mode and with the same random numbers.
    """
    ids = batch("plain")["input_ids"]
    others = ids.clone()
    others[:, -1] = 3 + (ids[:, -1] - 2) % (VOCAB - 3)
    was_training, logits = model.training, []
    model.eval()
    try:
        for tokens in (ids, others):
            torch.manual_seed(0)
            logits.append(model(input_ids=tokens).logits[:, :-1].double())
    except Exception:
        return 0.0
    finally:
        model.train(was_training)
    return float((logits[0] - logits[1]).norm() / logits[0].norm())


def _streamed(name: str, model: PreTrainedModel) -> Finding:
    """What stream(), check() and the comparison say of a model."""
    try:
        handle = stream(model, schedule=SCHEDULES[0])
    except UnsupportedModelError as error:
        return Finding(name, Category.REFUSED_BY_STREAM, str(error))
    except Exception as error:
        return Finding(name, Category.CRASHED, f"in stream(): {describe(error)}")
    try:
        handle.check()
    except UnsupportedModelError as error:
        refusal = str(error)
    except Exception as error:
        return Finding(name, Category.CRASHED, f"in check(): {describe(error)}")
    else:
        refusal = ""
    finally:
        handle.remove()
    verdict = _verdict(name, model)
    if not refusal:
        return verdict
    notes = list(verdict.notes)
    if verdict.category is Category.EXACT:
        notes.append("check() refuses it, yet it was exact")
    return Finding(name, Category.REFUSED_BY_CHECK, refusal, verdict.error, tuple(notes))


def compare(model: PreTrainedModel, name: str) -> Comparison:
    """Streamed against unstreamed gradients and loss, over every kind of batch and every schedule.

    Raises:
        UnsupportedModelError: The streamed model refused a batch.
    """
    result = Comparison()
    for kind in KINDS:
        inputs = _inputs(model, name, kind)
        try:
            reference_loss, reference = gradients(model, inputs)
        except Exception as error:
            result.not_run[kind] = describe(error)
            continue
        for schedule in SCHEDULES:
            with stream(model, schedule=schedule) as handle, _squares() as squares:
                loss, streamed = gradients(model, inputs)
                result.attention = _attention_of(handle, bool(squares))
            measured = {"the loss": _relative(loss, reference_loss), **errors(streamed, reference)}
            for what, error in measured.items():
                size = math.inf if math.isnan(error) else error
                if size >= result.error:
                    result.error, result.where = size, f"{what}, {kind}, chunks of {schedule.chunk_size}"
    return result


def describe(error: BaseException) -> str:
    """The error in one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:200]} ({Path(place.filename).name}:{place.lineno})"


def _verdict(name: str, model: PreTrainedModel) -> Finding:
    """Exact, refused in the call, crashed or silently wrong; in doubt about fp32's rounding, fp64 decides."""
    try:
        found = compare(model, name)
        if len(found.not_run) == len(KINDS):
            return Finding(name, Category.NOT_BUILT, f"unstreamed, it runs on no batch: {found.not_run[KINDS[0]]}")
        notes = tuple(f"unstreamed, it does not run on {kind}: {why}" for kind, why in found.not_run.items())
        if found.attention:
            notes = (found.attention, *notes)
        if found.error <= BOUND:
            return Finding(name, Category.EXACT, "", found.error, notes)
        wide = build(name, dtype=torch.float64)
        precise = compare(wide, name)
        if precise.error > FP64_BOUND:
            with _widened(wide):
                precise = compare(wide, name)
    except UnsupportedModelError as error:
        return Finding(name, Category.REFUSED_IN_THE_CALL, str(error))
    except Exception as error:
        return Finding(name, Category.CRASHED, f"in the streamed call: {describe(error)}")
    both = f"{found.error:.1e} in fp32 ({found.where}), {precise.error:.1e} in fp64"
    if precise.error <= FP64_BOUND and precise.not_run.keys() == found.not_run.keys():
        return Finding(name, Category.EXACT, "", found.error, (*notes, f"settled in fp64: {both}"))
    return Finding(name, Category.SILENTLY_WRONG, f"{both} ({precise.where})", found.error, notes)


class _WideTorch:
    """``torch`` for a module whose fp32 shall be fp64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _widened(model: PreTrainedModel) -> Iterator[None]:
    """What the model computes in fp32 whatever its dtype (recurrent states, norms, softmax), it computes in fp64."""
    module, narrow = sys.modules[type(model).__module__], Tensor.float
    module.torch, Tensor.float = _WideTorch(), Tensor.double
    try:
        yield
    finally:
        module.torch, Tensor.float = torch, narrow


@contextmanager
def _squares() -> Iterator[list[Tensor]]:
    """Collects the dense masks that the model asks for before its layers."""
    built: list[Tensor] = []
    dense = DenseOnUseMask.to_dense

    def remembered(mask: DenseOnUseMask) -> Tensor:
        built.append(dense(mask))
        return built[-1]

    DenseOnUseMask.to_dense = remembered
    try:
        yield built
    finally:
        DenseOnUseMask.to_dense = dense


def _attention_of(handle: StreamHandle, squares: bool) -> str:
    """What a reader should know of the memory of its attention; empty where it is ours in all layers."""
    attending = [layer for layer in handle.layers if layer_cache_argument(layer) != STATE]
    own = sum(layer.forward.own_attention is not None for layer in attending)
    if not own:
        return ""
    part = "" if own == len(handle.layers) else f" in {own} of {len(handle.layers)} layers"
    return f"dense mask{part}" if squares else f"dense tiles{part}"


def _inputs(model: PreTrainedModel, name: str, kind: str) -> dict[str, Any]:
    inputs: dict[str, Any] = batch(kind)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        inputs.pop("position_ids", None)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    if name in NEEDS_TOKEN_TYPES:
        text = torch.zeros_like(inputs["input_ids"])
        inputs |= {"token_type_ids": text, "mm_token_type_ids": text}
    return inputs


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs() / want.double().abs().clamp_min(1e-9))


def _answer(name: str, sender: Connection) -> None:
    """What the forked process does."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    sender.send(classify(name))
