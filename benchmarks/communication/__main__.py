"""Count, write the page, its figures and its picture, and fail if a bound breaks.

python -m benchmarks.communication [FOLDER]
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.communication.page import draw, environment, page
from benchmarks.communication.tables import TABLES, broken, measured

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"


def main(folder: Path) -> int:
    """Measure every table; the exit code."""
    tables = {}
    for title, cases in TABLES.items():
        print(f"{title}: {len(cases)} cases on 2 ranks", flush=True)
        tables[title] = measured(title)
        if (reason := tables[title][1]) is not None:
            print(f"  left out: {reason}", flush=True)
    env = environment()
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for found, _ in tables.values() for row in found]
    document = {
        "environment": env,
        "tables": {title: [asdict(r) for r in found] for title, (found, _) in tables.items()},
    }
    (folder / "communication.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "communication.md").write_text(page(env, tables))
    draw(tables["One step"][0], tables["On the wire between two nodes"][0], folder / "communication.png")
    print(f"{folder / 'communication.md'}: {len(rows)} rows")
    failures = [failure for found, _ in tables.values() for failure in broken(found)]
    print("\n".join(failures) or "streaming sends what training without it sends, on any number of chunks")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
