"""``tools.words`` finds what it counts, and nothing else; no file has more of it than before."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import words


@pytest.mark.full
def test_no_file_has_more_than_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert words.main([]) == 0, capsys.readouterr().out


SOURCE = '''
def f(prefix, rows, size):
    """Return the dtype of the weights{}.

    Args:
        prefix: {}
        rows: Rows of a step.
    """
    raise ValueError({})
'''


@pytest.mark.parametrize(
    ("after", "argument", "message", "kinds"),
    [
        ("", "Name of a module.", "'the rows are read'", []),
        (", and that of the model", "Name of a module.", "'there is no row'", ["pronoun"]),
        ("", "Of the names.", "'the rows are read'", ["noun"]),
        ("", "The model's.", "f'{size} is no size that is known'", ["negation", "noun"]),
        ("", "Name of a module.", "'" + "word " * 31 + "'", ["long"]),
        ("", "Name of a module.", "'" + "Word word. " * 16 + "'", []),
    ],
)
def test_what_is_counted(tmp_path: Path, after: str, argument: str, message: str, kinds: list[str]) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE.format(after, argument, message))
    assert sorted(kind for _, kind, _ in words.places(path)) == sorted(kinds)


def test_code_and_tables_of_a_page_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    long = "word " * 40
    path.write_text(f"# Title\n\n```\n{long}\n\n{long}\n```\n\n| a |\n|---|\n| {long} |\n\n- {long}\n- few\n")
    assert [kind for _, kind, _ in words.places(path)] == ["long"]
