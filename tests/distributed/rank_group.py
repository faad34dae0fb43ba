"""One start of several ranks for many cases: what a test asks of them comes back as JSON, a line a case.

    found = run_ranks(2, "tests.distributed.equality_cases", ["zero1", "zero2"])     # case -> what rank 0 returned

Each rank imports the module and calls its ``run(case)`` for one case after the other. An error in a rank is the test's.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 300
"""Seconds for all cases of a group together."""


def run_ranks(size: int, module: str, cases: Sequence[Any], patience: float = PATIENCE) -> dict[str, Any]:
    """What rank 0 returned of each case, by the case as JSON.

    Raises:
        AssertionError: A rank failed; with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        port = _free_port()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.rank_group", module, str(results), json.dumps(list(cases))],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "DS_ACCELERATOR": "cpu",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            said = [rank.communicate(timeout=patience)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        codes = [rank.returncode for rank in ranks]
        assert codes == [0] * size, "\n".join(
            f"rank {i} ended with {codes[i]}:\n{text[-6000:]}" for i, text in enumerate(said)
        )
        return dict(json.loads(line) for line in results.read_text().splitlines())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _main(module: str, results: Path, cases: Sequence[Any]) -> None:
    import torch

    from streamtune.distributed.process_group import join, leave

    join(torch.device("cpu"))
    run = importlib.import_module(module).run
    for case in cases:
        found = run(case)
        if os.environ["RANK"] == "0":
            with results.open("a") as file:
                file.write(json.dumps([case if isinstance(case, str) else json.dumps(case), found]) + "\n")
    leave()


if __name__ == "__main__":
    try:
        _main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others wait in a collective that this rank will never join
