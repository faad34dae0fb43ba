"""Run under transformers 4: load each folder, compute logits, tokenize texts; prints one JSON document.

``python older_reader.py FOLDER...``; each folder has ``asked.json``: ``ids`` to compute, ``texts`` and ``chat`` to
tokenize, where it has a tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def read(folder: Path) -> dict[str, Any]:
    asked = json.loads((folder / "asked.json").read_text())
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([asked["ids"]]), use_cache=False).logits
    found: dict[str, Any] = {
        "logits": logits[0].float().tolist(),
        "lost": {key: sorted(map(str, value)) for key, value in report.items() if value},
        "ends": model.generation_config.eos_token_id,
        "dtype": str(model.dtype),
    }
    if (folder / "tokenizer.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found |= {
            "class": type(tokenizer).__name__,
            "texts": [tokenizer(text)["input_ids"] for text in asked["texts"]],
            "special": sorted(tokenizer.all_special_tokens),
            "chat": tokenizer.apply_chat_template(asked["chat"]) if tokenizer.chat_template else None,
        }
    return found


if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), transformers.__version__
    print(json.dumps([read(Path(name)) for name in sys.argv[1:]]))
