"""What streaming makes of one model of transformers, found by trying: exact, refused, or at fault.

The whole gradient of the streamed model is held against the unstreamed model's, parameter by parameter, with the
measure and the bound of :mod:`tests.exactness.families`. Each name has a process of its own and a time limit, so that
a crash of the interpreter or a loop without end is a finding as well.
"""

from __future__ import annotations

import inspect
import math
import multiprocessing
import os
import traceback
import warnings
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from streamtune import Schedule, stream
from streamtune.errors import UnsupportedModelError
from tests.conformance.reducer import build
from tests.exactness.families import BOUND, batch, errors, gradients

FP64_BOUND = 2e-6  # not rounding of fp64: models compute norms, softmax and the loss in fp32 whatever their dtype
TIME_LIMIT = 150.0
KINDS = ("plain", "masked", "right", "left")
SCHEDULES = (
    Schedule(chunk_size=16, head_chunk_size=11),
    Schedule(chunk_size=5, head_chunk_size=7, keep_kv=True),
)
# In training these refuse a batch that does not say which tokens are text.
NEEDS_TOKEN_TYPES = ("gemma3", "gemma4", "gemma4_unified")


class Category(StrEnum):
    """What came of a name; the last two are faults of StreamTune."""

    EXACT = "exact"
    REFUSED_BY_STREAM = "refused by stream()"
    REFUSED_BY_CHECK = "refused by check()"
    REFUSED_IN_THE_CALL = "refused in the call"
    NOT_BUILT = "not built"
    CRASHED = "crashed"
    SILENTLY_WRONG = "silently wrong"


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
    """Build, stream, check and compare the model of this name."""
    try:
        model = build(name)
    except Exception as error:
        return Finding(name, Category.NOT_BUILT, describe(error))
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
    elif verdict.category is Category.NOT_BUILT:
        notes.append(verdict.reason)
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
            with stream(model, schedule=schedule):
                loss, streamed = gradients(model, inputs)
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
        if found.error <= BOUND:
            return Finding(name, Category.EXACT, "", found.error, notes)
        precise = compare(build(name, dtype=torch.float64), name)
    except UnsupportedModelError as error:
        return Finding(name, Category.REFUSED_IN_THE_CALL, str(error))
    except Exception as error:
        return Finding(name, Category.CRASHED, f"in the streamed call: {describe(error)}")
    both = f"{found.error:.1e} in fp32 ({found.where}), {precise.error:.1e} in fp64"
    if precise.error <= FP64_BOUND and precise.not_run.keys() == found.not_run.keys():
        return Finding(name, Category.EXACT, "", found.error, (*notes, f"settled in fp64: {both}"))
    return Finding(name, Category.SILENTLY_WRONG, f"{both} ({precise.where})", found.error, notes)


def _inputs(model: PreTrainedModel, name: str, kind: str) -> dict[str, Tensor]:
    inputs = batch(kind)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        inputs.pop("position_ids", None)
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
