"""TensorBoard: event files in ``RUN/tensorboard``, written by ``torch.utils.tensorboard``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamtune.programs.trackers.tracker import Tracker, facts_of, flatten


class TensorboardTracker(Tracker):
    """Local files, offline or not. The steps that a resumed run takes again replace those of before."""

    name = "tensorboard"
    _writer: Any

    def start(self) -> dict[str, Any]:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what earlier files have at this step and later, from the second such mark of a run on.
        self._writer = SummaryWriter(str(self.folder), purge_step=self.facts.step + 1, flush_secs=10)
        for part, values in facts_of(self.facts).items():
            if isinstance(values, Mapping):
                rows = "".join(f"| {key} | {_cell(value)} |\n" for key, value in flatten(values))
                self._writer.add_text(part, f"| key | value |\n|---|---|\n{rows}", self.facts.step + 1)
        for term, size in self.facts.plan.get("terms", {}).items():
            self._writer.add_scalar(f"plan/terms/{term}", size, self.facts.step + 1)
        self._writer.flush()
        return {"folder": self.folder.name}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)

    def text(self, step: int, samples: list[dict[str, Any]]) -> None:
        for number, sample in enumerate(samples):
            shown = f"**{_cell(sample['prompt'])}**\n\n```text\n{sample['completion']}\n```"
            self._writer.add_text(f"samples/{number}", shown, step)

    def note(self, name: str, details: Mapping[str, Any]) -> None:
        self._writer.add_text("events", f"{name}: `{json.dumps(details)}`", int(details.get("step", self.facts.step)))

    def picture(self, step: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(path.name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, status: str) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|").replace("\n", " ")
