"""Chat templates that mean harm: an error within seconds, and the same text as ever from those that do not."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from streamtune.data import templates
from streamtune.data.templates import (
    ChatRequest,
    TemplateLimitError,
    TemplateLimits,
    TemplateRefusalError,
    render_chat,
)
from streamtune.errors import ArgumentError, DataError
from streamtune.models import Decoding, sample_text, set_chat_template, train_tokenizer
from tests.faults.figures import tell
from tests.faults.memory import peak_of_children

TEMPLATES = sorted((Path(__file__).parents[1] / "data" / "templates").glob("*.jinja"))
CHAT = [
    {"role": "user", "content": "What is 猫?"},
    {"role": "assistant", "content": "A cat.", "reasoning_content": None},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = {
    "loop": LOOP,
    "loop that writes": LOOP.replace("{% endfor %}", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}", 1),
    "multiplied text": "{{ 'x' * 10**10 }}",
    "width of a format": "{{ '%2000000000d' % 1 }}",
    "width of a filter": "{{ 'a'|center(3000000000) }}",
    "doubled text": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubled list": (
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
        "{{ ns.s|tojson }}"
    ),
    "squared number": (
        "{% set ns = namespace(s=3) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}{{ ns.s > 1 }}"
    ),
    "much text": "{{ 'x' * 4000000 }}",
    "long template": "x" * (2 << 20),
}
REFUSED = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "attribute filter": "{{ (''|attr('__class__')).x }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "change of data": "{{ messages.append(1) }}",
    "no template": "{{ messages",
    "raises": "{{ raise_exception('no') }}",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["What is a cat? A cat. hello world"] * 4, vocab_size=300)
    made.bos_token = made.pad_token
    return made


def test_a_rendering_is_that_of_transformers(tokenizer: Any) -> None:
    """Every template, with and without tools and generation prompt, to the character."""
    for path in TEMPLATES:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        for tools in (None, TOOLS):
            for generation in (False, True):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": generation}
                expected = tokenizer.apply_chat_template(CHAT, tokenize=False, **options)
                assert render_chat(tokenizer, ChatRequest(CHAT, tools, generation)) == expected
    tokenizer.chat_template = {"default": "one {{ bos_token }}", "tool_use": "two {{ tools|length }}"}
    assert render_chat(tokenizer, ChatRequest(CHAT)).startswith("one")
    assert render_chat(tokenizer, ChatRequest(CHAT, TOOLS)) == "two 1"


@pytest.mark.full
def test_what_takes_too_much_is_an_error(tokenizer: Any) -> None:
    """Time, memory and output, also where a single operation takes them; the next rendering is as ever."""
    slowest, done = 0.0, 0
    with peak_of_children(str(templates.WORKER)) as peak:
        for name, template in TOO_MUCH.items():
            started = time.monotonic()
            with pytest.raises(TemplateLimitError) as caught:
                render_chat(tokenizer, ChatRequest(CHAT), template=template, limits=TemplateLimits(seconds=1))
            slowest, done = max(slowest, time.monotonic() - started), done + 1
            assert caught.value.where == "chat_template", name
            assert render_chat(tokenizer, ChatRequest(CHAT), template="{{ messages|length }}") == "2"
    taken = round(peak())
    tell("hostile_templates_limited", done, len(TOO_MUCH), slowest_seconds=round(slowest, 1), peak_mib=taken)
    assert taken < 400  # 256 MiB and what python itself takes


def test_what_the_sandbox_refuses_is_an_error(tokenizer: Any) -> None:
    written = {}
    for name, template in REFUSED.items():
        try:
            written[name] = render_chat(tokenizer, ChatRequest(CHAT), template=template)
        except TemplateRefusalError:
            continue
    tell("hostile_templates_refused", len(REFUSED) - len(written), len(REFUSED))
    assert written == {}


@pytest.mark.full
def test_the_process_that_renders_has_no_secrets_and_writes_no_file(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "c" * 34)
    templates._WORKERS.close()
    assert render_chat(tokenizer, ChatRequest(CHAT), template="x") == "x"
    worker = templates._WORKERS._worker
    assert worker is not None
    folder = Path("/proc") / str(worker.process.pid)
    assert b"hf_" not in (folder / "environ").read_bytes()
    if os.name == "posix":
        limits = (folder / "limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max file size")).split()[3] == "0"


def test_a_recipe_names_its_hostile_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command: one panel with the line of the recipe, exit code 2; so from a tokenizer's own files."""
    import streamtune.cli
    from tests.sft_kit import RECIPE, write_recipe, write_rows

    write_rows(tmp_path, 4)
    recipe = write_recipe(tmp_path, {**RECIPE, "chat_template": "{{ 'x' * 10**10 }}"})
    with pytest.raises(SystemExit) as left:
        streamtune.cli.main(["sft", str(recipe), "--output-dir", str(tmp_path / "run")])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "takes more than" in said
    assert f"{recipe}:" in said
    assert not (tmp_path / "run").exists()


def test_a_template_that_raises_names_the_row_or_the_key(tokenizer: Any, tmp_path: Path) -> None:
    from streamtune.data.rendering.render import PromptRenderer

    tokenizer.chat_template = "{{ raise_exception('users first') }}"
    with pytest.raises(DataError, match="users first") as caught:
        PromptRenderer(tokenizer)(CHAT, None, "rows.jsonl:7")
    assert caught.value.where == "rows.jsonl:7"
    with pytest.raises(ArgumentError, match="users first"):
        sample_text(None, tokenizer, "hello", Decoding(1))  # type: ignore[arg-type]
    big = tmp_path / "big.jinja"
    big.write_text("x" * (2 << 20))
    with pytest.raises(ArgumentError, match="it is not a chat template"):
        set_chat_template(tokenizer, str(big))
