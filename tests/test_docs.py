"""The documentation holds: links lead somewhere, recipes load, keys, flags and files exist, the README is short."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import streamtune
from streamtune.cli.app import app
from streamtune.recipe import load_recipe

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "streamtune"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIAL = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md")), *TUTORIAL]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINES_OF_README = 150


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> Iterator[str]:
    """Yield the code blocks of a page in a language."""
    for found, text in FENCE.findall(path.read_text(encoding="utf-8")):
        if found == language:
            yield text


def without_code(path: Path) -> str:
    """Return a page without its code blocks and code spans, in which brackets are not links."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


@functools.cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page: those that it writes, and those of its headings, as GitHub makes them."""
    page = FENCE.sub("", path.read_text(encoding="utf-8"))
    found = set(re.findall(r'<a id="([^"]+)"></a>', page))
    for line in page.splitlines():
        if heading := re.match(r"#+ (.*)", line):
            text = LINK.sub(lambda link: link[0].split("]")[0].lstrip("!["), heading[1])
            anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            number = 0
            while (numbered := f"{anchor}-{number}" if number else anchor) in found:
                number += 1
            found.add(numbered)
    return found


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LINES_OF_README


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    wrong = []
    for target in LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            wrong.append(target)
    assert wrong == []


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(without_code(index))}
    pages = {*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guide").glob("*.md"), *TUTORIAL} - {index}
    assert pages - listed == set()


@pytest.mark.parametrize("name", ["architecture", "glossary"])
def test_code_that_pages_name_exists(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", text)
    assert paths
    assert [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()] == []


def test_the_architecture_has_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    rooms = {room for room in rooms if not room.startswith("_")}
    assert {room for room in rooms if f"`{room}`" not in text} == set()


# --- recipes ----------------------------------------------------------------------------------------------------------

SCHEMA = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))["$defs"]
KEYS = {key for recipe in ("Recipe", "DpoRecipe", "GrpoRecipe") for key in SCHEMA[recipe]["properties"]}
ENGINE_KEYS = set(SCHEMA["EngineSpec"]["properties"])


def yaml_blocks() -> Iterator[tuple[str, str]]:
    for page in GUIDE:
        for number, text in enumerate(blocks(page, "yaml")):
            yield f"{name_of(page)}-{number}", text


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in yaml_blocks()])
def test_recipes_load_and_keys_exist(text: str, tmp_path: Path) -> None:
    found = yaml.safe_load(text)
    if "datasets" in found and ("model" in found or "model_name_or_path" in found):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        recipe = load_recipe(path).recipe
        assert recipe.objective == found.get("objective", "sft")
    assert set(found) - KEYS == set()
    assert set(found.get("engine", {})) - ENGINE_KEYS == set()


# --- commands ---------------------------------------------------------------------------------------------------------


@functools.cache
def command(*names: str) -> Any:
    """Return a command of the command line, by its words."""
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.commands[name]
    return found


@functools.cache
def flags(*names: str) -> set[str]:
    """Return the flags of a command, and those that may stand behind any."""
    own = [flag for parameter in command(*names).params for flag in (*parameter.opts, *parameter.secondary_opts)]
    return {flag for flag in own if flag.startswith("-")} | {"--help", "-h", "--debug", "--offline"}


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words behind ``streamtune`` of every command in a page's code blocks and code spans."""
    text = page.read_text(encoding="utf-8")
    spans = [*blocks(page, "bash"), *re.findall(r"`(streamtune [a-z][^`\n]*)`", FENCE.sub("", text))]
    for line in "\n".join(spans).replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("...", ""), comments=True)
        if "streamtune" in words and words[0] in ("streamtune", "torchrun"):
            yield words[words.index("streamtune") + 1 :]


@pytest.mark.parametrize("page", GUIDE, ids=name_of)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for words in command_lines(page):
        names = words[:2] if words[0] == "recipes" and len(words) > 1 else words[:1]
        known = flags(*names)
        assert {word.partition("=")[0] for word in words if word.startswith("-")} - known == set(), words
        changed = [words[place + 1] for place, word in enumerate(words[:-1]) if word == "--set"]
        for change in changed:
            leaf = change.partition("=")[0].split(".")
            assert leaf[0] in KEYS | ENGINE_KEYS, words


def test_flags_in_tables_of_options_exist() -> None:
    every = {flag for name in command().commands for flag in flags(name)}
    every |= {flag for name in command("recipes").commands for flag in flags("recipes", name)}
    for page in GUIDE:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        found = set(re.findall(r"`(--[a-z][a-z-]*)", text))
        assert found - every == set(), name_of(page)


def test_shipped_recipes_that_pages_name_exist() -> None:
    for page in GUIDE:
        for name in re.findall(r"\brecipes/([\w./-]+\.yaml)", page.read_text(encoding="utf-8")):
            assert (ROOT / "recipes" / name).is_file(), f"{name_of(page)}: {name}"
        for name in re.findall(r"streamtune \w+ ((?:[a-z][\w-]*)/[\w.-]+gb)\b", page.read_text(encoding="utf-8")):
            assert (ROOT / "recipes" / f"{name}.yaml").is_file(), f"{name_of(page)}: {name}"


def test_python_names_that_pages_use_exist() -> None:
    for page in GUIDE:
        names = set(re.findall(r"\bstreamtune\.([A-Za-z]\w*)", page.read_text(encoding="utf-8")))
        assert names - {*streamtune.__all__, "engine", "integrations"} == set(), name_of(page)
