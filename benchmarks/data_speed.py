"""Compare the processor time of preparing rows with that of ``datasets.map`` doing the same work.

    python -m benchmarks.data_speed --rows 20000 --repeats 5

Chats: ``tokenizer.apply_chat_template`` with the mask of the assistant's tokens, as TRL's ``assistant_only_loss`` asks
for it. Documents: the tokenizer's call. Both read the same JSON lines and write Arrow. Each is a process of its own
whose time is that of itself and its children, without imports; they take turns, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

KINDS = ("chats", "documents")


def make_rows(kind: str, count: int, path: Path) -> None:
    """Write rows: chats of 2 to 6 short turns, or documents of 20,000 words."""
    draw = random.Random(0)
    words = [f"{a}{b}" for a in ("str", "con", "re", "in", "pro") for b in ("eam", "tune", "port", "fer", "duct", "")]

    def text(size: int) -> str:
        return " ".join(draw.choice(words) for _ in range(size))

    with path.open("w") as file:
        for _ in range(count):
            turns = [
                {"role": role, "content": text(draw.randint(5, 60))}
                for _ in range(draw.randint(1, 3))
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns} if kind == "chats" else {"text": text(20_000)}) + "\n")


def run(who: str, kind: str, path: Path, vocabulary: Path, processes: int) -> None:
    """Prepare the rows one way, and print seconds of processor time, tokens and trained tokens."""
    from streamtune.cli.console import loading_libraries

    with loading_libraries() if who == "streamtune" else nullcontext():  # as the command imports them
        import datasets  # before the clock starts, as everything is
        import torch  # noqa: F401

        from streamtune.data import DataOptions, Source, prepare
        from streamtune.models.tokenizer import read_trained_tokenizer

    tokenizer = read_trained_tokenizer(vocabulary.read_text())
    before = _seconds()
    if who == "streamtune":
        prepared = prepare([Source(str(path))], tokenizer, DataOptions(max_length=1_000_000, processes=processes))
        tokens, trained = prepared.report.tokens, prepared.report.supervised_tokens
    else:
        loaded = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")
        )

        def chat(row: dict[str, object]) -> dict[str, object]:
            made = tokenizer.apply_chat_template(
                row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

        def document(row: dict[str, object]) -> dict[str, object]:
            return {"input_ids": tokenizer(str(row["text"]) + str(tokenizer.eos_token))["input_ids"]}

        mapped = loaded.map(
            chat if kind == "chats" else document,
            num_proc=processes if processes > 1 else None,
            remove_columns=loaded.column_names,
            load_from_cache_file=False,
        )
        tokens = sum(len(ids) for ids in mapped["input_ids"])
        trained = sum(map(sum, mapped["assistant_masks"])) if kind == "chats" else tokens - len(mapped)
    print(json.dumps({"seconds": _seconds() - before, "tokens": tokens, "trained": trained}))


def _seconds() -> float:
    """Return the processor time of this process and the children that ended."""
    from streamtune.data.templates import _WORKERS

    _WORKERS.close()  # a child counts once it ended
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        who, kind, path, vocabulary = options.one
        run(who, kind, Path(path), Path(vocabulary), options.processes)
        return
    from streamtune.models.tokenizer import train_tokenizer

    print("| rows | | processor seconds, ours | datasets.map | ratio | pairs |\n|---|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in KINDS:
            path, vocabulary = folder / f"{kind}.jsonl", folder / "tokenizer.json"
            make_rows(kind, options.rows if kind == "chats" else options.documents, path)
            lines = path.read_text().splitlines()[:500]
            vocabulary.write_text(train_tokenizer(lines, vocab_size=2000).backend_tokenizer.to_str())
            found: dict[str, list[float]] = {"streamtune": [], "datasets": []}
            sizes = {}
            for _ in range(options.repeats):
                for who in found:
                    command = [sys.executable, "-m", "benchmarks.data_speed", "--processes", str(options.processes)]
                    command += ["--one", who, kind, str(path), str(vocabulary)]
                    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
                    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
                    result = json.loads(done.stdout.splitlines()[-1])
                    found[who].append(result["seconds"])
                    sizes[who] = (result["tokens"], result["trained"])
            ours, theirs = (statistics.median(found[who]) for who in found)
            ratios = ", ".join(f"{a / b:.2f}" for a, b in zip(*found.values(), strict=True))
            count = options.rows if kind == "chats" else options.documents
            assert len(set(sizes.values())) == 1, sizes
            tokens, trained = sizes["streamtune"]
            what = f"{count:,} {kind}, {tokens:,} tokens, {trained:,} trained"
            print(f"| {what} | {ours:.1f} | {theirs:.1f} | **{ours / theirs:.2f}** | {ratios} |")


if __name__ == "__main__":
    main()
