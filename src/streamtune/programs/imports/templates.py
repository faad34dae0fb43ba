"""Chat templates of other trainers: where they render or mask a chat otherwise than the tokenizer's own template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .conversion import Conversion

CHATML: dict[str, str] = {
    "chatml": "",
    "chatml_de": "Du bist ein freundlicher und hilfsbereiter KI-Assistent.",
    "qwen": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "qwen3_nothink": "",
}
"""Templates of LLaMA-Factory that write ChatML, with the system message of rows that have none."""

SWIFT_CHATML = ("chatml", "qwen3_nothinking")
"""Templates of ms-swift that write ChatML without a system message of their own."""

REASONING = (
    *("deepseekr1", "hy3", "ernie_vl", "gemma4", "gemma4n", "glm4_moe", "glm4v", "glm4_5v", "glm4_7", "glmz1"),
    *("gpt_oss", "keye_vl", "kimi_vl", "mimo", "mimo_v2", "mimo_vl", "minimax2", "qwen3", "qwen3_omni", "qwen3_vl"),
    *("qwen3_5", "qwen3_6", "seed_oss", "youtu", "aeva"),
)
"""Templates of LLaMA-Factory that write a think block into every answer."""

GENERIC = ("alpaca", "default", "empty", "vicuna", "fewshot", "original", "aquila")
"""Templates that belong to no model."""

OF_THINKERS = re.compile(r"qwen-?3|qwq|deepseek-?r1|r1-distill|glm-?4\.[5-9]|glm-?z1|mimo|minimax-?m2|seed-?oss", re.I)
NO_THINKERS = re.compile("instruct|coder|embed|rerank", re.I)
"""Names of models whose chat templates write think blocks, and of their relatives whose templates do not."""

COMPARE = "compare a row with `streamtune data`, and write chat_template: FILE.jinja"
EVERY = (
    "every answer has a think block there, empty without reasoning, and here where the tokenizer's template writes one"
)
TRAINING = "for Qwen3 name TRL's chat_templates/qwen3_training.jinja as chat_template, which does the same"


def _thinks(conversion: Conversion) -> bool:
    """Return True if the model's own chat template writes think blocks: by the template of a folder, or by its name."""
    name = str(conversion.ours.get("model_name_or_path") or conversion.get("model_name_or_path") or "")
    name = name or str(conversion.get("base_model") or "")
    for base in (Path(), conversion.file.path.resolve().parent):
        folder = base / Path(name).expanduser()
        if name and folder.is_dir() and (found := _template(folder)):
            return "<think>" in found
    return bool(OF_THINKERS.search(name)) and not NO_THINKERS.search(name)


def _template(folder: Path) -> str:
    """Return the chat template in a tokenizer's folder; empty where there is none."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
            found = text if name.endswith(".jinja") else json.loads(text).get("chat_template")
        except (OSError, ValueError, AttributeError):
            continue
        if found:
            return str(found)
    return ""


def _keep_reasoning(conversion: Conversion) -> None:
    """Write ``reasoning: keep``, for a trainer that trains the reasoning of every answer."""
    if conversion.objective == "sft":
        conversion.default("reasoning", "keep", "the reasoning of every answer is trained")


def take_llamafactory_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert ``template``, a name of templates that LLaMA-Factory renders by its own code.

    Args:
        conversion: The recipe on its way to ours.
        texts: True for ``stage: pt``, which renders no chat.
    """
    name, given = conversion.take("template"), "template" in conversion.file.fields
    if texts:
        if given:
            conversion.unneeded("template", why="stage: pt trains texts, without a chat template")
        return
    if isinstance(name, str) and name in CHATML:
        conversion.put("chat_template", "chatml", "template", note="final/ gets this template too")
        if CHATML[name]:
            conversion.default("default_system", CHATML[name], f"template: {name}")
        _leave_thinking(conversion, f"template: {name} writes no think block")
        return
    reasons = name in REASONING or (not name and (_thinks(conversion) or conversion.get("enable_thinking") is not None))
    if not name:
        if given:
            conversion.unneeded("template", why="the tokenizer's own template")
        if not reasons:
            return
    if reasons:
        off = conversion.get("enable_thinking") is False
        if not off and not conversion.get("mask_history"):
            _keep_reasoning(conversion)
        why = (
            "reasoning is removed, and a think block that is not trained stands in every answer there; here in the last"
            if off
            else f"{EVERY}; {TRAINING}"
        )
    else:
        _leave_thinking(conversion, f"template: {name} does not read it")
        own = f"its own code renders '{name}', with no system message or date that the tokenizer's template adds"
        used = "the tokenizer's own template is used; write chat_template: FILE.jinja"
        why = used if name in GENERIC else f"{own}: {COMPARE}"
    if name:
        conversion.lose("template", why=why)
    else:
        conversion.missing("template", why)


def _takes_jinja(conversion: Conversion, *, texts: bool) -> bool:
    """Convert ``template_backend: jinja``: the tokenizer's own template renders rows, and every token is trained."""
    name = "template_backend"
    jinja = conversion.take(name) == "jinja"
    if name not in conversion.file.fields:
        return False
    if not jinja or texts or conversion.objective != "sft":
        conversion.unneeded(name, why="see template")
        return jinja
    conversion.put("train_on", "all", name, note="which trains every token there, whatever loss_scale says")
    if "loss_scale" in conversion.left:
        conversion.take("loss_scale")
        conversion.unneeded("loss_scale", why="template_backend: jinja trains every token")
    return True


def _leave_thinking(conversion: Conversion, why: str) -> None:
    """Report what is said about thoughts as not needed."""
    for key in ("enable_thinking", "preserve_thinking"):
        if key in conversion.left:
            conversion.take(key)
            conversion.unneeded(key, why=why)


def take_swift_template(conversion: Conversion, *, texts: bool) -> None:
    """Convert ``template``; ms-swift renders each model by a template of its own, named or not."""
    name, given = conversion.take("template"), "template" in conversion.file.fields
    jinja = _takes_jinja(conversion, texts=texts)
    if texts or jinja:
        if given:
            conversion.unneeded("template", why="texts have no chat template" if texts else "template_backend: jinja")
        return
    if given and not name:
        conversion.unneeded("template", why="no value")
    if name in SWIFT_CHATML:
        conversion.put("chat_template", "chatml", "template", note="final/ gets this template too")
        return
    if name == "qwen3" or (not name and _thinks(conversion)):
        keeps = conversion.get("preserve_thinking")
        if str(conversion.get("loss_scale")).startswith("last_round") and not keeps:
            if name:
                conversion.unneeded("template", why="the last answer is rendered as by the tokenizer's own")
            return
        if keeps is not False:
            _keep_reasoning(conversion)
        why = f"{EVERY}; {TRAINING}"
    else:
        why = f"its own code renders {f'{name!r}' if name else 'each kind of model'}, not the tokenizer: {COMPARE}"
    if name:
        conversion.lose("template", why=why)
    else:
        conversion.missing("template", why, trains=_thinks(conversion))


def report_empty_thoughts(conversion: Conversion, types: list[Any]) -> None:
    """Report that axolotl masks an empty think block in front of an answer, which is trained here."""
    if conversion.objective == "sft" and "chat_template" in types and _thinks(conversion):
        why = "'<think>' and an empty think block, which stand before an answer, are not trained there, and are here"
        conversion.missing("datasets.type: chat_template", why)


def take_trl_template(conversion: Conversion) -> None:
    """Report the template that TRL puts in place of the tokenizer's own for ``assistant_only_loss``."""
    if conversion.get("chat_template_path") is None and _thinks(conversion):
        _keep_reasoning(conversion)
        conversion.missing("assistant_only_loss: true", f"a template of TRL's renders the rows: {EVERY}; {TRAINING}")
