"""The process that renders chat templates imports the rendering of transformers, and all of it where that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streamtune.data.templates import WORKER

PROGRAM = """
import importlib.util, runpy, sys
{first}
library = runpy.run_path(sys.argv[1], run_name="worker")["_import_library"]()
chat = [{{"role": "user", "content": "cat"}}]
texts, _ = library.render_jinja_template([chat], chat_template="{{{{ messages[0].content }}}}")
print(texts[0], getattr(sys.modules["transformers"], "__version__", "no version"))
"""
REFUSE = """
spec = importlib.util.module_from_spec
def refuse(found):
    if found.name == "transformers":
        raise AttributeError("a module that is set up otherwise")
    return spec(found)
importlib.util.module_from_spec = refuse
"""


@pytest.mark.parametrize(("first", "is_whole"), [("", False), (REFUSE, True)], ids=["alone", "refused"])
def test_library(first: str, is_whole: bool) -> None:
    program = [sys.executable, "-c", PROGRAM.format(first=first), str(WORKER)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    word, version = done.stdout.split(maxsplit=1)
    assert word == "cat"
    assert (version.strip() != "no version") == is_whole
