"""Count, write the page, its figures and its picture, and fail if a bound breaks.

python -m benchmarks.communication [FOLDER]
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.communication.page import draw, environment, page
from benchmarks.communication.tables import TABLES, Row, broken, measured

Tables = dict[str, tuple[list[Row], str | None]]

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"


def main(folder: Path) -> int:
    """Measure every table; the exit code. What is known is written after each."""
    folder.mkdir(parents=True, exist_ok=True)
    tables: Tables = {}
    for title, cases in TABLES.items():
        print(f"{title}: {len(cases)} cases on 2 ranks", flush=True)
        tables[title] = measured(title)
        if (reason := tables[title][1]) is not None:
            print(f"  left out: {reason}", flush=True)
        write(folder, tables)
    failures = [failure for found, _ in tables.values() for failure in broken(found)]
    print("\n".join(failures) or "streaming sends what training without it sends, on any number of chunks")
    print(folder / "communication.md")
    return bool(failures)


def write(folder: Path, tables: Tables) -> None:
    """Write the page, its figures and its picture."""
    env = environment()
    figures = {title: [asdict(row) for row in rows] for title, (rows, _) in tables.items()}
    (folder / "communication.json").write_text(json.dumps({"environment": env, "tables": figures}, indent=1) + "\n")
    (folder / "communication.md").write_text(page(env, tables))
    wired = tables.get("On the wire between two nodes", ([], None))[0]
    draw(tables["One step"][0], wired, folder / "communication.png")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
