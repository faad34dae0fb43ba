"""A process that holds a model and measures it on request, so that only this process can run out of memory."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from streamtune.bench.subject import Job, Subject
from streamtune.errors import RunError, StreamTuneError
from streamtune.quiet import packed_call, run_packed

__all__ = ["Worker"]


class Worker:
    """A process with a :class:`Subject`, whose methods it calls on request.

    Attributes:
        failed: The reason why the last request has no answer; empty if it has one.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.failed = job, ""
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_packed, args=(theirs, *packed_call(_serve, self.job)), daemon=True)
        with _interrupts_ignored():  # by the process, from its first import on: what Ctrl-C means is decided here
            self.process.start()
        theirs.close()
        self._busy = False

    def ask(self, request: str, *args: Any) -> dict[str, Any]:
        """Return the answer to a request; empty if there is none, with the reason in ``failed``.

        A process that has ended is started anew.

        Raises:
            RunError: The request failed because of a defect, and not because of a limit of the machine.
        """
        if not self.process.is_alive():
            self.close()
            self._start()
        self.failed, self._busy = "", True
        try:
            self.connection.send((request, args))
            answer: dict[str, Any] = self.connection.recv()
            self._busy = False
        except (EOFError, OSError):  # the process is gone: on the CPU that is what running out of memory looks like
            self.process.join()
            self.failed = f"the process ended with exit code {self.process.exitcode} (out of memory?)"
            return {}
        if "fault" in answer:  # it must not pass for a limit
            raise RunError("the benchmark failed", mend=answer["fault"])
        self.failed = answer.get("error", "")
        return {} if self.failed else answer

    def close(self) -> None:
        """End the process, without waiting for a step that is running."""
        self.connection.close()
        self.process.join(timeout=0 if self._busy else 10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that one may say so
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(connection: Connection, job: Job) -> None:
    """Build the model once, then measure on request until the other end closes; this is the body of the process."""
    subject: Subject | None = None
    answer: dict[str, Any]
    while True:
        try:
            request, args = connection.recv()
        except EOFError:
            return
        try:
            subject = subject or Subject(job)
            answer = getattr(subject, request)(*args)
        except Exception as error:
            answer = _told(error)
        if subject is not None and "error" in answer:  # out of the handler: its frames no longer hold tensors
            subject.leave()
            gc.collect()
        try:
            connection.send(answer)
        except ConnectionError:  # whoever asked is gone, as after Ctrl-C
            return


def _told(error: Exception) -> dict[str, Any]:
    text = str(error)
    if isinstance(error, StreamTuneError):  # this model in this mode refused, a disk that is full
        return {"error": error.what}
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return {"error": "out of memory"}
    return {"fault": traceback.format_exc()}
