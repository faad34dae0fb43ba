"""``python -m streamtune.distributed.agent``: start the ranks of this machine for a launcher on another machine.

The launcher starts the agent over ssh. Both exchange JSON documents, one per line. The launcher sends

    {"start": {...}}  {"signal": 2}  {"kill": true}  {"ping": true}

The agent first sends ``{"hello": {...}}``, then ``{"end": {...}}`` for each rank that ends, or ``{"refused": {...}}``
if the ranks cannot be started. If rank 0 runs here, ``{"out": text, "to": 1 or 2}`` has text that it wrote to file
descriptor 1 or 2. The agent ends its ranks if the connection is closed, or if no message, such as a ``ping``, arrives
for :data:`SILENCE_SECONDS`.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import IO, Any

from streamtune import __version__
from streamtune.base.safe_path import safe_environment
from streamtune.distributed.failure import Failure
from streamtune.distributed.hosts import free_port
from streamtune.distributed.local_ranks import LocalRanks, count_devices
from streamtune.errors import StreamTuneError

SILENCE_SECONDS = 20.0
"""Seconds without a message from the launcher after which the ranks are ended."""


def main() -> None:
    """Execute messages of the launcher until all ranks of this machine have ended or the connection is lost."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read_messages, args=(messages,), daemon=True).start()
    agent = _Agent()
    agent.write_message({"hello": {"version": __version__, "devices": count_devices(), "port": free_port()}})
    try:
        agent.serve(messages)
    finally:
        agent.close()


def _read_messages(messages: queue.Queue[dict[str, Any] | None]) -> None:
    pending = b""
    while data := os.read(0, 65536):
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            messages.put(json.loads(line))
    messages.put(None)


class _Agent:
    def __init__(self) -> None:
        self._ranks: LocalRanks | None = None
        self._disconnected = False
        self._write_lock = threading.Lock()
        self._readers: list[threading.Thread] = []

    def write_message(self, document: dict[str, Any]) -> None:
        with self._write_lock:
            try:
                sys.stdout.buffer.write(json.dumps(document).encode() + b"\n")
                sys.stdout.buffer.flush()
            except OSError:
                self._disconnected = True

    def serve(self, messages: queue.Queue[dict[str, Any] | None]) -> None:
        last_heard = time.monotonic()
        while True:
            try:
                message = messages.get(timeout=0.05)
            except queue.Empty:
                pass
            else:
                if message is None:
                    return
                last_heard = time.monotonic()
                self._handle_message(message)
            if self._disconnected or time.monotonic() - last_heard > SILENCE_SECONDS:
                return
            if self._ranks is not None and self._report_ends():
                return

    def _report_ends(self) -> bool:
        assert self._ranks is not None
        ends = self._ranks.poll()
        if any(end.rank == 0 for end in ends):
            for reader in self._readers:  # forward the last lines before the end is reported
                reader.join(timeout=2)
        for end in ends:
            self.write_message({"end": asdict(end)})
        return not self._ranks.running_ranks

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._start_ranks(message["start"])
        elif self._ranks is not None and "signal" in message:
            self._ranks.send_signal(int(message["signal"]))
        elif self._ranks is not None and "kill" in message:
            self._ranks.kill()

    def _start_ranks(self, request: dict[str, Any]) -> None:
        has_main = request["first_rank"] == 0
        pipe = subprocess.PIPE if has_main else None
        try:
            self._ranks = LocalRanks(
                [sys.executable, "-P", "-m", "streamtune", *request["arguments"]],
                request["first_rank"],
                request["count"],
                safe_environment({**os.environ, **request["environment"]}),
                request["host"],
                (pipe, pipe),
            )
        except StreamTuneError as error:
            self.write_message({"refused": asdict(Failure.from_error(error, request["first_rank"], request["host"]))})
            return
        if has_main and 0 in self._ranks.running_ranks:
            process = self._ranks.process_of_rank(0)
            for output_number, stream in ((1, process.stdout), (2, process.stderr)):
                reader = threading.Thread(target=self._forward_output, args=(stream, output_number), daemon=True)
                reader.start()
                self._readers.append(reader)

    def _forward_output(self, stream: IO[bytes], output_number: int) -> None:
        while data := os.read(stream.fileno(), 65536):
            self.write_message({"out": data.decode("utf-8", errors="replace"), "to": output_number})

    def close(self) -> None:
        if self._ranks is not None:
            for end in self._ranks.close():
                self.write_message({"end": asdict(end)})


if __name__ == "__main__":
    main()
