"""A process that holds a model and measures it on request, so that only this process can run out of memory."""

from __future__ import annotations

import gc
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from streamtune.base.child import Child
from streamtune.errors import RunError, StreamTuneError
from streamtune.programs.bench.modes import WAYS
from streamtune.programs.bench.subject import Case, Job, MeasuredModel


class Worker:
    """A process with a :class:`MeasuredModel`, whose methods it calls on request.

    Attributes:
        failed: The reason why the last request has no answer; empty if it has one.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.failed = job, ""
        self._start()

    def _start(self) -> None:
        self._child = Child(_serve, self.job)
        self._busy = False

    def ask(self, request: str, *args: Any) -> dict[str, Any]:
        """Return the answer to a request; empty if there is none, with the reason in ``failed``.

        A process that has ended is started anew.

        Raises:
            RunError: The request failed because of a defect, and not because of a limit of the machine.
        """
        if not self._child.process.is_alive():
            self.close()
            self._start()
        process, connection = self._child.process, self._child.connection
        self.failed, self._busy = "", True
        try:
            connection.send((request, args))
            answer: dict[str, Any] = connection.recv()
            self._busy = False
        except (EOFError, OSError):  # the process is gone: on the CPU that is what running out of memory looks like
            process.join()
            self.failed = f"the process ended with exit code {process.exitcode} (out of memory?)"
            return {}
        if "fault" in answer:  # it must not pass for a limit
            raise RunError("the benchmark failed", mend=answer["fault"])
        self.failed = answer.get("error", "")
        return {} if self.failed else answer

    def close(self) -> None:
        """End the process, without waiting for a step that is running."""
        self._child.close(seconds=0 if self._busy else 10)


def _serve(connection: Connection, job: Job) -> None:
    """Build the model once, then measure on request until the other end closes; this is the body of the process."""
    subject: MeasuredModel | None = None
    answer: dict[str, Any]
    while True:
        try:
            request, args = connection.recv()
        except EOFError:
            return
        try:
            subject = subject or MeasuredModel(job)
            answer = getattr(subject, request)(*args)
        except Exception as error:
            answer = _refusal(error, any(isinstance(arg, Case) and WAYS[arg.mode].package for arg in args))
        if subject is not None and "error" in answer:  # out of the handler: its frames no longer hold tensors
            subject.leave()
            gc.collect()
        try:
            connection.send(answer)
        except ConnectionError:  # whoever asked is gone, as after Ctrl-C
            return


def _refusal(error: Exception, of_peer: bool) -> dict[str, Any]:
    """Return the reason of a failure; as a fault if it is a defect, and not that of a peer."""
    text = str(error)
    if isinstance(error, StreamTuneError):  # this model in this mode refused, a disk that is full
        return {"error": error.what}
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return {"error": "out of memory"}
    if of_peer:
        return {"error": f"failed: {type(error).__name__}: {text.strip().partition(chr(10))[0][:120]}"}
    return {"fault": traceback.format_exc()}
