"""The cases to count, their rows, and the rules that must hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.rank_group import Place, run_ranks
from tests.distributed.two_nodes import TwoNodes, why_not

ENGINES = ["ddp", "zero1", "zero2", "zero3", "fsdp"]
CHUNKS = [1, 8, 16]
BOUND = 1.01
"""Bound of streaming's bytes relative to ordinary training, and to training without checkpointing.

Adapters are compared with ordinary training only: in plain training nothing before the first adapter has a backward."""
PATIENCE = 3600
MODULE = "benchmarks.communication.cases"

Case = dict[str, Any]


def main_cases(engines: Iterable[str] = ENGINES, **more: Any) -> list[Case]:
    """Return every mode of each engine."""
    modes = [("plain", 1), ("ordinary", 1), *(("streaming", chunks) for chunks in CHUNKS), ("naive", 8)]
    return [{"engine": engine, "mode": mode, "chunks": chunks, **more} for engine in engines for mode, chunks in modes]


def _beside(engines: Iterable[str], naive: bool = False, **more: Any) -> list[Case]:
    modes = [("plain", 1), ("ordinary", 1), ("streaming", 8), *([("naive", 8)] if naive else [])]
    return [{"engine": engine, "mode": mode, "chunks": chunks, **more} for engine in engines for mode, chunks in modes]


TABLES: dict[str, list[Case]] = {
    "One step": main_cases(),
    "With the shipped presets' own values": _beside(["zero1", "zero2", "zero3"], naive=True, preset=True),
    "Accumulation over 4 micro-batches": _beside(ENGINES, accumulation=4),
    "LoRA": _beside(ENGINES, finetuning="lora"),
    "Tied embeddings": _beside(["zero2", "zero3", "fsdp"], tied=True),
    "Sequences shared by two ranks": [
        {"engine": engine, "mode": "streaming", "chunks": chunks, "sequence": 2, "form": form}
        for engine in ("zero2", "zero3")
        for form in ("ulysses", "ring")
        for chunks in CHUNKS
    ],
    "On the wire between two nodes": _beside(["zero1", "zero2", "zero3", "fsdp"], naive=True, wire=True),
}
"""Title -> cases, which share one start of ranks."""


@dataclass(frozen=True)
class Row:
    """A case and its counts.

    Attributes:
        traffic: Phase -> kind -> ``[calls, bytes]`` of one optimizer step on one rank.
        weight_bytes, trained_bytes: Bytes of all weights, and of the trained weights.
        norm: Gradient norm of the step.
        sent, received: Bytes on the wire of one node in a step; None if ranks were not nodes.
    """

    case: Case
    traffic: dict[str, dict[str, list[int]]]
    weight_bytes: int
    trained_bytes: int
    norm: float
    sent: float | None = None
    received: float | None = None

    @property
    def calls(self) -> int:
        """Collectives of the step."""
        return sum(calls for kinds in self.traffic.values() for calls, _ in kinds.values())

    @property
    def bytes(self) -> int:
        """Bytes of the collectives; received bytes count at the sender."""
        return sum(size for kinds in self.traffic.values() for kind, (_, size) in kinds.items() if kind != "recv")


def why_no_nodes() -> str | None:
    """Return why this user cannot make network namespaces, and what to do; None if possible."""
    if (reason := why_not()) == "":
        return None
    return f"{reason}; it takes iproute2 and root, in a container CAP_SYS_ADMIN as well"


@contextmanager
def two_places() -> Iterator[list[Place]]:
    """Make two nodes on one machine, one for each rank; remove them afterwards.

    A node is a network namespace; a cable (a veth pair) with no other traffic joins the two.
    """
    if reason := why_no_nodes():
        raise RuntimeError(f"two nodes cannot be made on this machine: {reason}")
    with tempfile.TemporaryDirectory() as folder, TwoNodes(Path(folder)) as nodes:
        yield [
            Place(("ip", "netns", "exec", name), {"GLOO_SOCKET_IFNAME": link, "MASTER_ADDR": nodes.addresses[0]})
            for name, link in zip(nodes.names, nodes.links, strict=True)
        ]


def count(cases: list[Case]) -> list[Row]:
    """Run cases on two ranks; each rank is a node if a case asks for bytes on the wire."""
    if any(case.get("wire") for case in cases):
        with two_places() as places:
            found = run_ranks(2, MODULE, cases, PATIENCE, places)
    else:
        found = run_ranks(2, MODULE, cases, PATIENCE)
    return [
        Row(
            json.loads(case),
            said["traffic"],
            said["bytes"],
            said["trained_bytes"],
            said["norm"],
            **said.get("wire", {}),
        )
        for case, said in found.items()
    ]


def measured(title: str) -> tuple[list[Row], str | None]:
    """Return the rows of a table, or the reason why there are none."""
    if any(case.get("wire") for case in TABLES[title]) and (reason := why_no_nodes()):
        return [], reason
    return count(TABLES[title]), None


def reference(rows: list[Row], row: Row, mode: str) -> Row | None:
    """Return the row of the same engine and settings in another mode."""
    same = {**row.case, "mode": mode, "chunks": 1}
    return next((other for other in rows if other.case == same), None)


def broken(rows: list[Row]) -> list[str]:
    """Return the rows that break a rule: streaming sends no more than ordinary training, for any number of chunks."""
    found = []
    measures: dict[str, Callable[[Row], float | None]] = {
        "counted": lambda row: row.bytes,
        "on the wire": lambda row: row.sent,
    }
    for row in rows:
        if (volume := _known_volume(row)) is not None:
            found.append(f"{row.case}: {volume}")
    for row in (row for row in rows if row.case["mode"] == "streaming" and "sequence" not in row.case):
        for mode in ("plain", "ordinary"):
            if (other := reference(rows, row, mode)) is None:
                continue
            for what, measure in measures.items():
                mine, theirs = measure(row), measure(other)
                if mine is None or theirs is None or (mode == "plain" and "finetuning" in row.case):
                    continue
                if mine > BOUND * theirs:
                    found.append(f"{row.case}: {mine / theirs:.3f} x the bytes of {mode} ({what})")
            if abs(row.norm / other.norm - 1) > 1e-5:
                found.append(f"{row.case}: another gradient than {mode}: {row.norm} and {other.norm}")
        for other in rows:
            if {**other.case, "chunks": row.case["chunks"]} == row.case and other.traffic != row.traffic:
                found.append(f"{row.case}: {row.traffic}; {other.case}: {other.traffic}")
    return found


def _known_volume(row: Row) -> str | None:
    """Return an error of the count itself if the volume of a step is known beforehand; None without error.

    DDP reduces each gradient once. ZeRO-3 gathers each weight once for a forward and reduces each gradient once.
    """
    if row.case.get("tied") or "sequence" in row.case:
        return None
    backwards = row.case.get("accumulation", 1) * (row.case["chunks"] if row.case["mode"] == "naive" else 1)
    checks = {
        "ddp": [("backward", "all_reduce", row.trained_bytes)],
        "zero3": [("backward", "reduce_scatter", backwards * row.trained_bytes)]
        + ([] if row.case.get("preset") else [("forward", "all_gather", backwards * row.weight_bytes)]),
    }
    for phase, kind, want in checks.get(row.case["engine"], []):
        got = row.traffic.get(phase, {}).get(kind, [0, 0])[1]
        if got != want:
            return f"{kind} of {got:,} bytes in the {phase}, and {want:,} are known to be due"
    return None
